"""Optimizers and the update.

A model and the optimizer keys of a recipe go in, and an optimizer comes out. ``update`` makes one
step with it.

- ``optimizers``: definition of each optimizer
- ``adamw``: parameter groups of AdamW
- ``muon``: Muon, alone and for Transformers' Trainer
- ``schedule``: learning rate of a step
- ``update``: one update; skips gradients that are not finite
"""
