"""One training run, from the set-up to its end.

A recipe, the opened data and an Accelerator go in; ``train.py`` contains the training loop itself.
A run folder with checkpoints, metrics and the finished model comes out.

- ``setup``: everything before the first step
- ``folder``: the run folder and its lock
- ``resume``: which checkpoint to continue from, and when to save
- ``publish``: push the model, its card and checkpoints to the Hub
- ``time_limit``: ``max_hours``
- ``finish``: the ways in which a run ends
- ``eval_only``: evaluate without training
"""
