"""Checkpoints.

Model, optimizer and training state go in; a folder ``step-N`` comes out, and the reverse.

- ``format``: write, verify and read the folder
- ``state``: the scalars stored next to the tensors
"""
