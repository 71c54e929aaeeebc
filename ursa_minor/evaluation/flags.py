"""Flags of the scripts that score a model; needs no torch, so that a wrong one is answered at once."""

import argparse
from pathlib import Path

from ursa_minor.base import paths


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every evaluation has."""
    parser.add_argument(
        "--model",
        type=paths.argument,
        required=True,
        help="a run folder, its model/, any model folder, or a Hub id (ID or ID@REVISION)",
    )
    files_help = "a task's items, as JSON lines, Parquet or TSV; else the Hub's"
    parser.add_argument(
        "--task_files", nargs="+", type=paths.assignment_argument, default=[], metavar="NAME=FILE", help=files_help
    )
    parser.add_argument(
        "--data_files", nargs="+", type=paths.argument, metavar="FILE", help="the same, of the only task"
    )
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N items (0 = all)")
    batch_help = "questions at once, each with all its endings, or auto (default)"
    parser.add_argument("--batch_size", default="auto", metavar="N", help=batch_help)
    output_help = "write a JSON line an item: sums, counts, predictions, label"
    parser.add_argument("--output", type=paths.argument, metavar="FILE", help=output_help)


def faults_of(asked: argparse.Namespace) -> list[str]:
    """Return the faults of these flags; the batch size becomes a number, or None for auto, task_files a list by task."""
    faults, named, tasks = [], {}, asked.tasks
    for word in asked.task_files:
        name, _, file = word.partition("=")
        if name in tasks and file:
            named.setdefault(name, []).append(file)
        else:
            faults.append(f"--task_files {word}: must be NAME=FILE, with one of {', '.join(tasks)} as NAME")
    if asked.data_files and (len(tasks) > 1 or named):
        faults.append("--data_files: are the items of one task; with several write --task_files NAME=FILE")
    elif asked.data_files:
        named[tasks[0]] = asked.data_files
    if asked.limit < 0:
        faults.append(f"--limit {asked.limit}: must be 0 (all) or more")
    if asked.batch_size != "auto" and not (asked.batch_size.isdecimal() and int(asked.batch_size)):
        faults.append(f"--batch_size {asked.batch_size}: must be auto, or 1 or more")
    if asked.output:
        output = Path(asked.output).resolve()
        if output.is_dir() or not output.parent.is_dir():
            faults.append(f"--output {asked.output}: must be a file in a folder that exists")
        if output in {Path(name).resolve() for files in named.values() for name in files}:
            faults.append(f"--output {asked.output}: is a file of items, which it would replace")
    asked.task_files = named
    if not faults:
        asked.batch_size = None if asked.batch_size == "auto" else int(asked.batch_size)
    return faults
