"""What can be known before a run starts: estimates, checks and trials.

- ``estimate``: memory, speed, hours, energy and cost from formulas
- ``run_estimate``: estimate of a recipe as text (``--estimate``)
- ``budget``: hours or money -> run (``--plan``)
- ``data_throughput``: speed of text preparation
- ``vocabulary``: tokenizer and ``init_from`` fit each other
- ``train_command``: the command line of train.py and the files it names
- ``checks``: the checks of ``check_setup.py``
- ``compatibility``: results of checks from plain values
- ``trials``: training steps and collectives in processes of their own
"""
