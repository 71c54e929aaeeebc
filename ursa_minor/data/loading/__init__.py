"""Yield the batches of a run from token shards.

A step goes in; inputs and targets, (B, T) on the device, come out. The order is a pure function of the position.

- ``corpus``: open all sources of a run; wait for those that are being prepared
- ``windows``: cut the ids of a split into windows of T + 1
- ``order``: the windows that each step reads
- ``batches``: read windows from memory maps or from the device's memory
- ``background``: processes that run ``prepare_data.py``
"""
