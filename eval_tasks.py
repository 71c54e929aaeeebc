"""Score a model on tasks: a run, a model folder, or any causal language model of the Hub.

    python eval_tasks.py --model runs/gpt2_124m --tasks lambada_openai arc_easy
    accelerate launch --multi_gpu eval_tasks.py --model openai-community/gpt2 --tasks blimp --output scores.jsonl

A table a task, scores with their standard errors beside others' and chance; then a JSON line a task on standard output.
"""

import argparse
import os
import sys
from pathlib import Path

from ursa_minor.base import console, files, paths, wording
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import command_line, keys


@exit_on_bad_input
def main(argv: list[str] | None = None, task: str | None = None) -> int:
    """Score, print the tables and the JSON lines, write and push what was requested; ``task``: the only one."""
    args = parse(sys.argv[1:] if argv is None else argv, task)
    check_launch(os.environ)
    console.start()
    resolve_model(args.model)
    console.announce_imports()
    # Here, for they take seconds: a wrong flag is answered at once.
    from ursa_minor.evaluation import score_model
    from ursa_minor.hub import card_scores, client

    client.bound_client()
    if args.push_to_hub:
        card_scores.check_model_exists(args.push_to_hub)
    pushed = True
    for scored_task, line in score_model.run(args):
        if args.push_to_hub:
            # Only HellaSwag's scores can be pushed, whose revision is fixed.
            pushed = card_scores.push(
                args.push_to_hub, scored_task, str(scored_task.revision), line
            )
        print(files.to_json(line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str], task: str | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        task: the only task to score, or None for a script with ``--tasks``. Its scores may be pushed.

    Returns:
        The flags. ``task_files`` is a dict from a task to its files, and ``batch_size`` is None for auto.

    Raises:
        BadInput: with every error that was found.
    """
    parser = argparse.ArgumentParser(
        description=f"Score a model on {task or 'tasks'}.", allow_abbrev=False
    )
    add_flags(parser)
    if task:
        parser.add_argument(
            "--push_to_hub",
            metavar="ID",
            help="put the scores into the card of this model of the Hub",
        )
    else:
        tasks_help = f"tasks: {wording.join_or(keys.TASK_NAMES)}; multiblimp_LANGUAGE"
        parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help=tasks_help)
    parser.set_defaults(tasks=[task], alone=bool(task), push_to_hub=None)
    args = command_line.parse_flags(parser, argv)
    args.tasks = list(dict.fromkeys(args.tasks))

    task_files, errors = read_task_files(args)
    errors += option_errors(args, task_files)
    for name in args.tasks:
        if name not in keys.TASK_NAMES:
            suggestion = wording.did_you_mean(name, keys.TASK_NAMES)
            errors.append(f"--tasks {name}: must be {wording.join_or(keys.TASK_NAMES)}{suggestion}")
    if errors:
        raise BadInput(errors)

    args.task_files = task_files
    args.batch_size = None if args.batch_size == "auto" else int(args.batch_size)
    return args


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every evaluation has."""
    parser.add_argument(
        "--model",
        type=paths.argument,
        required=True,
        help="a run folder, its model/, any model folder, or a Hub id (ID or ID@REVISION)",
    )
    parser.add_argument(
        "--task_files",
        nargs="+",
        type=paths.assignment_argument,
        default=[],
        metavar="NAME=FILE",
        help="a task's items, as JSON lines, Parquet or TSV; else the Hub's",
    )
    parser.add_argument(
        "--data_files",
        nargs="+",
        type=paths.argument,
        metavar="FILE",
        help="the same, of the only task",
    )
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the first N items (0 = all)"
    )
    parser.add_argument(
        "--batch_size",
        default="auto",
        metavar="N",
        help="questions at once, each with all its endings, or auto (default)",
    )
    parser.add_argument(
        "--output",
        type=paths.argument,
        metavar="FILE",
        help="write a JSON line for each item: sums, counts, predictions, label",
    )


def read_task_files(args: argparse.Namespace) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each task that ``--task_files`` or ``--data_files`` names, and the errors in these flags."""
    task_files: dict[str, list[str]] = {}
    errors = []
    for assignment in args.task_files:
        name, _, file = assignment.partition("=")
        if name in args.tasks and file:
            task_files.setdefault(name, []).append(file)
        else:
            names = ", ".join(args.tasks)
            errors.append(
                f"--task_files {assignment}: must be NAME=FILE, with one of {names} as NAME"
            )
    if args.data_files and (len(args.tasks) > 1 or task_files):
        errors.append(
            "--data_files: are the items of one task; with several write --task_files NAME=FILE"
        )
    elif args.data_files:
        task_files[args.tasks[0]] = args.data_files
    return task_files, errors


def option_errors(args: argparse.Namespace, task_files: dict[str, list[str]]) -> list[str]:
    """Return the errors in the values of the other flags."""
    errors = []
    if args.limit < 0:
        errors.append(f"--limit {args.limit}: must be 0 (all) or more")
    is_number = args.batch_size.isdecimal() and int(args.batch_size) > 0
    if args.batch_size != "auto" and not is_number:
        errors.append(f"--batch_size {args.batch_size}: must be auto, or 1 or more")
    if args.output:
        output = Path(args.output).resolve()
        item_files = {Path(name).resolve() for names in task_files.values() for name in names}
        if output.is_dir() or not output.parent.is_dir():
            errors.append(f"--output {args.output}: must be a file in a folder that exists")
        if output in item_files:
            errors.append(f"--output {args.output}: is a file of items, which it would replace")
    if args.push_to_hub and (args.limit or task_files):
        errors.append(
            "--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files"
        )
    model_id, _, revision = args.model.partition("@")
    if revision and args.push_to_hub == model_id:
        errors.append(
            f"--push_to_hub {model_id}: its card describes the newest version, and --model another one"
        )
    return errors


if __name__ == "__main__":
    sys.exit(main())
