"""Optimizers, the schedule of the learning rate, one update."""
