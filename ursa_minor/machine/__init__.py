"""The machine that a run uses.

- ``device``: devices and the features that they support
- ``accelerator``: create Accelerate's Accelerator; wrap model and optimizer
- ``micro_batch``: find the largest micro-batch that fits
- ``full_model``: gather a sharded model for evaluation, sampling and export
- ``run_info``: hardware, command and model size of a run
"""
