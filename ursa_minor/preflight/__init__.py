"""Estimates, checks and trials before a run starts.

- ``estimate``: memory, speed, hours and energy from formulas
- ``data_size``: the size of the data, and the number of steps of ``num_train_epochs``
- ``run_estimate``: the estimate of a recipe on GPUs, as text or as a table (``--estimate``)
- ``budget``: plan a run for a budget of hours or money (``--plan``)
- ``vocabulary``: check that the tokenizer and ``init_from`` fit each other
- ``train_command``: parse and write command lines of train.py, and check the files they name
- ``checks``: the checks of check_setup.py
- ``data_check``: look at the data of a recipe, for check_setup.py
- ``compatibility``: judge the values that the checks have collected
- ``trials``: training steps and collectives, in separate processes
"""
