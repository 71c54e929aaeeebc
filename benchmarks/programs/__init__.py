"""Load models of this project in other programs, and compare the results with Transformers.

    python -m benchmarks.programs          # or make programs

The models are made with the product's code (``models``). For each program of ``definitions`` there
is an environment with pinned packages (``environments``). A script of ``inside/`` runs there, loads
the models and writes its results. ``comparison`` compares them with those of Transformers in the
project's environment. The comparisons are stored in ``benchmarks/results/programs.json``, from
which ``table`` generates the table in ``docs/export.md``.

- ``definitions``: the programs: version, packages, commands, known problems
- ``texts``: 200 strings, prompts and a chat
- ``models``: the exported models that are compared
- ``environments``: create the environment of a program
- ``comparison``: compare the answers of a program with the reference
- ``table``: the JSON file -> the part of docs/export.md between two markers
- ``inside/``: scripts that run in the environments. They import nothing of this project
"""
