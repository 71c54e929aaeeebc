"""Report the progress and the results of a run.

- ``report``: the terminal, metrics.jsonl and samples.txt
- ``curves``: curves.png
- ``trackers``: wandb, TensorBoard and others through Accelerate
- ``clock``: training time and speed
- ``profiler``: traces of a few updates (``--profile``)
"""
