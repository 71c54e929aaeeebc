"""Report a run.

- ``report``: terminal, metrics.jsonl and samples.txt
- ``curves``: curves.png
- ``trackers``: wandb, TensorBoard and others through Accelerate
- ``clock``: training time and speed
- ``profiler``: traces of a few steps (``--profile``)
"""
