"""Evaluate a model: validation loss, scores of tasks, and samples.

- ``evaluator``: run all evaluations of a training run on its processes
- ``validation``: compute the loss of a split
- ``baselines``: compute the loss of a bigram model and the size after gzip
- ``sampling``: generate text
- ``task``, ``tasks``: define a task; one module per task
- ``task_data``, ``item_files``, ``rows``: load and validate the items of a task
- ``encoded_task``: encode the items of a task, and compute scores from a model's answers
- ``likelihood``: compute the log-likelihoods of endings
- ``metrics``: compute scores from log-likelihoods
- ``score_model``: score a model on tasks outside a run
- ``score_models``: score several models or checkpoints, each of them once
- ``score_file``: the JSON lines with the scores of several models
- ``score_tables``: the scores of several models, or of the parts of a task, as tables
"""
