"""Hyperparameters of a run.

A YAML file and command-line flags go in; a frozen ``Recipe`` comes out, or BadInput with every error that was found.
``train.py --help`` needs these modules only, so none of them imports torch.

- ``keys``: every key: section, type, range, default, help text
- ``command_line``: parse flags
- ``loading``: read the file, apply the flags, check the result
- ``rules``: rules for single values and for combinations
- ``effects``: conditions under which a key has an effect
- ``sizes``: model sizes for ``--size``
- ``source_kind``, ``data_source``: kinds of data sources; how flags replace a source
- ``places``: paths in a recipe, and in the recipe of a run folder that has moved
- ``batching``: divide a step into processes and micro-batches
- ``reference_curves``: published loss curves
- ``other_flags``: flags of other trainers and their replacements
"""
