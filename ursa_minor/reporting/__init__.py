"""Report the progress and the results of a run.

- ``report``: the terminal, metrics.jsonl and samples.txt
- ``curves``: curves.png
- ``run_groups``: runs that differ only in some keys, such as the seed
- ``learning_curve``: scores over tokens, for eval_tasks.py
- ``trackers``: wandb, TensorBoard and others through Accelerate
- ``clock``: training time and speed
- ``profiler``: traces of a few updates (``--profile``)
"""
