"""One run and its folder: checkpoints, metrics, trackers, curves, profile."""
