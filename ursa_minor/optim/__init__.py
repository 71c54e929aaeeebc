"""Optimizers and the update.

- ``optimizers``: definition of each optimizer
- ``adamw``: parameter groups
- ``muon``: Muon, alone and for Transformers' Trainer
- ``schedule``: learning rate of a step
- ``update``: one update; skips gradients that are not finite
"""
