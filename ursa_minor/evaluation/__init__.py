"""How good a model is: validation loss, tasks and samples.

- ``evaluator``: all evaluations of a run, shared by its processes
- ``validation``: loss of a split
- ``baselines``: bigram and gzip
- ``sampling``: generate text
- ``task``, ``tasks``: definition of a task; one module per task
- ``task_data``, ``item_files``, ``rows``: load and validate the examples of a task
- ``encoded_task``: a task's examples as token ids; their scores
- ``likelihood``: log-likelihoods of endings
- ``metrics``: log-likelihoods -> scores
- ``score_model``: score a model on tasks outside a run
"""
