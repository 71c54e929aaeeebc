"""Recipes: the hyperparameters and settings of a run.

The input is a YAML file and command-line flags. The result is a frozen ``Recipe``, or BadInput with
every error that was found. ``train.py --help`` imports only these modules, and none of them imports
torch.

- ``keys``: definitions of all keys: section, type, range, default, help text
- ``command_line``: parse flags
- ``loading``: read the file, apply the flags, check the result
- ``rules``: rules for single values and for combinations of values
- ``effects``: conditions under which a key has an effect
- ``sizes``: model sizes for ``--size``
- ``source_kind``: kinds of data sources
- ``data_source``: flags that replace the data source or the model of a recipe
- ``places``: paths in a recipe, and in the recipe of a run folder that was moved
- ``kept_steps``: the steps that ``keep_checkpoints`` means
- ``batching``: divide an update into processes and micro-batches
- ``reference_curves``: loss curves of published runs
- ``other_flags``: flags of other trainers and their replacements
"""
