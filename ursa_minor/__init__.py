"""The parts of the recipe, in rooms, one purpose a file. The story that uses them is ``train.py``.

The rooms, in the order in which they may use each other: ``base``, ``recipe``, ``data``, ``model``, ``optim``, ``machine``,
``evaluation``, ``hub``, ``run``. A file imports from its own room and from those before it; the scripts come last, and
import no script.
"""
