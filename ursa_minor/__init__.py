"""The implementation behind ``train.py`` and the other scripts.

A module imports only from its own package and from lower levels (tests/test_layout.py):

    base < recipe < data, model < optim < preflight, checkpoint < machine < evaluation
         < export, hub, reporting < run < post < scripts

Packages on the same level do not import each other.

- ``base``: errors, files, console, URLs, signals; used by all other packages
- ``recipe``: hyperparameters from a YAML file and flags
- ``data``: documents -> token shards -> batches
- ``model``: stock GPT-2 and Llama models, attention, loss
- ``optim``: optimizers, learning rate schedules, one update
- ``preflight``: estimates and checks before a run starts
- ``checkpoint``: training state on disk
- ``machine``: devices, Accelerator, micro-batch size
- ``evaluation``: validation loss, tasks, samples
- ``export``: model files for other programs
- ``hub``: push to and pull from the Hugging Face Hub
- ``reporting``: terminal, metrics, pictures, trackers
- ``run``: one training run: set-up, resume, publish, finish
- ``post``: post-training with TRL
"""
