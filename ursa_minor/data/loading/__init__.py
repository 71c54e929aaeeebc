"""Yield the training and evaluation batches of a run from folders of token shards.

A step goes in. Inputs and targets, (B, T) on the device, come out. The order of the windows is a
pure function of the position in the run.

- ``corpus``: open all sources of a run, and wait for those that are being prepared
- ``windows``: cut the ids of a split into windows of T + 1 ids
- ``order``: the windows that each step reads
- ``epochs``: suggest how often a small text is read
- ``batches``: read windows from memory maps or from the device's memory
- ``token_folder``: judge the ids of token files that another program wrote
- ``background``: the processes that run ``prepare_data.py``
"""
