"""train.py after a change of benchmarks/ablation.py, as benchmarks/runs.py starts it; a fork that ends with it."""

import os
import sys

from pretrain.optim import muon


def main(argv: list[str]) -> int:
    """Execute the Python in CHANGE, then train."""
    exec(os.environ["CHANGE"], {"muon": muon})
    del sys.modules["train"]  # it was imported before the change, and took names from the modules that it changes
    import train

    return train.main(argv)
