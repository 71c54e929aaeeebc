"""One training run.

- ``setup``: everything before the first step
- ``folder``: the run folder and its lock
- ``resume``: which checkpoint to continue from, and when to save
- ``publish``: what is pushed to the Hub
- ``time_limit``: ``max_hours``
- ``finish``: the ways in which a run ends
- ``eval_only``: evaluate without training
"""
