"""Flags of the scripts that score a model; needs no torch, so that a wrong one is answered at once."""

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser, files_help: str) -> None:
    """Add the flags that every evaluation has."""
    parser.add_argument("--model", required=True, help="a run folder, its model/, any model folder, or a Hub id")
    parser.add_argument("--data_files", nargs="+", metavar="FILE", help=files_help)
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N items (0 = all)")
    batch_help = "questions at once, each with all its endings, or auto (default)"
    parser.add_argument("--batch_size", default="auto", metavar="N", help=batch_help)
    parser.add_argument("--output", metavar="FILE", help="write a JSON line an item: sums, counts, predictions, label")


def faults_of(asked: argparse.Namespace) -> list[str]:
    """Return the faults of these flags; the batch size becomes a number, or None for auto."""
    faults = []
    if asked.limit < 0:
        faults.append(f"--limit {asked.limit}: must be 0 (all) or more")
    if asked.batch_size != "auto" and not (asked.batch_size.isdecimal() and int(asked.batch_size)):
        faults.append(f"--batch_size {asked.batch_size}: must be auto, or 1 or more")
    if asked.output and (Path(asked.output).is_dir() or not Path(asked.output).absolute().parent.is_dir()):
        faults.append(f"--output {asked.output}: must be a file in a folder that exists")
    if asked.output and Path(asked.output).resolve() in {Path(name).resolve() for name in asked.data_files or ()}:
        faults.append(f"--output {asked.output}: is one of --data_files, which it would replace")
    if not faults:
        asked.batch_size = None if asked.batch_size == "auto" else int(asked.batch_size)
    return faults
