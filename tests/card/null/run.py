"""Run a command on the null card: a CUDA build of PyTorch sees cards that hold memory and run no kernel.

    python tests/card/null/run.py --card h200 python benchmarks/memory_card.py
    python tests/card/null/run.py --count 2 accelerate launch --config_file accelerate_configs/h200.yaml train.py

The Python that runs this file must have the CUDA build; the library is built at the first call. README.md beside it says
what the null card shows and what it cannot show.
"""

import argparse
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build import LIBRARY, build  # noqa: E402
from described_cards import CARDS  # noqa: E402

# A size that is read from a tensor means nothing here and may ask for terabytes. The card's own memory does not count.
HOST_BYTES = 16 * 2**30


def environment(card: str, count: int, memory_gib: float | None, trace: str | None) -> dict[str, str]:
    """Return what a process needs in its environment, beside what it has, to see ``count`` cards."""
    folder = build()
    own = {
        "NULL_CARD": CARDS[card].described(memory_gib),
        "NULL_CARD_COUNT": str(count),
        "LD_PRELOAD": str(folder / LIBRARY),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder_of_hook()), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return own | ({"NULL_CARD_TRACE": trace} if trace else {})


def folder_of_hook() -> Path:
    """Return what stands first on Python's path: PyTorch calls the hook in it when it is imported."""
    return Path(__file__).resolve().parent / "hook"


def main() -> None:
    """Become the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=CARDS, default="h200", metavar="NAME", help=f"one of {', '.join(CARDS)}")
    parser.add_argument("--count", type=int, default=1, help="cards of this machine (default: %(default)s)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a card, instead of its own")
    parser.add_argument("--trace", metavar="PREFIX", help="write what is asked of the card to PREFIX.PID")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.command:
        parser.error("give a command")
    os.environ.update(environment(asked.card, asked.count, asked.memory, asked.trace))
    resource.setrlimit(resource.RLIMIT_DATA, (HOST_BYTES, HOST_BYTES))
    os.execvp(asked.command[0], asked.command)


if __name__ == "__main__":
    main()
