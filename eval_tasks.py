r"""Score a model on tasks: a run, a model folder, or any causal language model of the Hub.

    python eval_tasks.py --model runs/gpt2_124m --tasks lambada_openai arc_easy
    accelerate launch --quiet --multi_gpu eval_tasks.py --model openai-community/gpt2 \
        --tasks blimp --output scores.jsonl

For each task the script prints a table, with standard errors, published scores of other models and
the score of random guessing, and then one JSON line on standard output.
"""

import argparse
import os
import sys
from pathlib import Path

from ursa_minor.base import console, files, paths, wording
from ursa_minor.base.cli import exit_on_bad_input, is_main_process
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import command_line, keys


@exit_on_bad_input
def main(argv: list[str] | None = None, task: str | None = None) -> int:
    """Score a model, print the results, and write and push them if requested.

    Args:
        argv: the command line without the name of the script; None takes that of the process.
        task: the only task to score, or None for a script with ``--tasks``.

    Returns:
        The exit status: 1 if the scores could not be pushed, else 0.
    """
    args = parse(sys.argv[1:] if argv is None else argv, task)
    check_launch(os.environ)
    console.start(is_main=is_main_process())
    resolve_model(args.model)
    console.announce_imports()
    # These imports take seconds, so they come after the checks of the command line.
    from ursa_minor.evaluation import score_model
    from ursa_minor.hub import card_scores, client

    client.set_timeouts()
    if args.push_to_hub:
        card_scores.check_model_exists(args.push_to_hub)
    is_pushed = True
    for scored_task, line in score_model.run(args):
        if args.push_to_hub:
            # Only HellaSwag has --push_to_hub, and its definition has a revision.
            revision = str(scored_task.revision)
            is_pushed = card_scores.push(args.push_to_hub, scored_task, revision, line)
        print(files.to_json(line), flush=True)
    return 0 if is_pushed else 1


def parse(argv: list[str], task: str | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: the command line without the name of the script.
        task: the only task to score, or None for a script with ``--tasks``. Its scores may be
            pushed to the Hub.

    Returns:
        The options. ``task_files`` is a dictionary from a task to its files, ``batch_size`` is None
        for auto, and ``single_task`` is whether the script scores a single task.

    Raises:
        BadInput: with every error that was found.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s --model NAME [--option value ...]",
        description=_description(task),
        allow_abbrev=False,
    )
    _add_options(parser, task)
    parser.set_defaults(single_task=task is not None)
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


def _description(task: str | None) -> str:
    if task:
        return f"Score a model on the task {task} and print the scores as a JSON line."
    return "Score a model on tasks and print one JSON line per task."


def _add_options(parser: argparse.ArgumentParser, task: str | None) -> None:
    """Add the options in groups. ``task`` is the only task of the script, or None."""
    model_group = parser.add_argument_group("model")
    model_group.add_argument(
        "--model",
        type=paths.argument,
        required=True,
        metavar="NAME_OR_PATH",
        help="Model to score (required): a run folder, a checkpoint, a model folder, or a Hub id "
        "(ID or ID@REVISION).",
    )

    data_group = parser.add_argument_group("tasks")
    if task is None:
        english_tasks = [name for name in keys.TASK_NAMES if not name.startswith("multiblimp_")]
        data_group.add_argument(
            "--tasks",
            nargs="+",
            required=True,
            metavar="NAME",
            help=f"Tasks to score (required): {', '.join(english_tasks)}, and multiblimp_LANGUAGE "
            f"with an ISO 639-3 code, such as multiblimp_hin.",
        )
    else:
        parser.set_defaults(tasks=[task])
    data_group.add_argument(
        "--task_files",
        nargs="+",
        type=paths.assignment_argument,
        default=[],
        metavar="NAME=PATH",
        help="Files with your own items of a task, in JSON lines, Parquet or TSV. Repeat NAME for "
        "several files. (default: the task's data set on the Hub)",
    )
    data_group.add_argument(
        "--data_files",
        nargs="+",
        type=paths.argument,
        metavar="PATH",
        help="Files with your own items, like --task_files but without NAME, if there is only one "
        "task. (default: the task's data set on the Hub)",
    )
    data_group.add_argument(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="Number of items of each task to score, from the first one. 0 means all. (default: "
        "%(default)s)",
    )

    evaluation_group = parser.add_argument_group("evaluation")
    evaluation_group.add_argument(
        "--batch_size",
        default="auto",
        metavar="N|auto",
        help="Number of questions per batch, each with all of its endings. auto chooses it for the "
        "device. (default: %(default)s)",
    )

    output_group = parser.add_argument_group("output")
    output_group.add_argument(
        "--output",
        type=paths.argument,
        metavar="PATH",
        help="Write one JSON line per item to this file, with log-likelihoods in nats, lengths in "
        "tokens and characters, predictions and the label. (default: no file)",
    )
    if task is None:
        parser.set_defaults(push_to_hub=None)
    else:
        output_group.add_argument(
            "--push_to_hub",
            metavar="ID",
            help="Write the scores into the model card of this model on the Hub. (default: the "
            "scores are not pushed)",
        )


def read_task_files(args: argparse.Namespace) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each task, and the errors in ``--task_files`` and ``--data_files``."""
    task_files: dict[str, list[str]] = {}
    errors = []
    for assignment in args.task_files:
        name, _, file = assignment.partition("=")
        if name in args.tasks and file:
            task_files.setdefault(name, []).append(file)
        else:
            names = ", ".join(args.tasks)
            errors.append(
                f"--task_files {assignment}: must be NAME=PATH, where NAME is one of {names}"
            )
    if args.data_files and (len(args.tasks) > 1 or task_files):
        errors.append(
            "--data_files: cannot be used with several tasks or with --task_files. "
            "Use --task_files NAME=PATH only"
        )
    elif args.data_files:
        task_files[args.tasks[0]] = args.data_files
    return task_files, errors


def option_errors(args: argparse.Namespace, task_files: dict[str, list[str]]) -> list[str]:
    """Return the errors in the values of the other options."""
    errors = []
    if args.limit < 0:
        errors.append(f"--limit {args.limit}: must be 0 (all) or more")
    is_number = args.batch_size.isdecimal() and int(args.batch_size) > 0
    if args.batch_size != "auto" and not is_number:
        errors.append(f"--batch_size {args.batch_size}: must be auto, or 1 or more")
    if args.output:
        output = Path(args.output).resolve()
        if output.is_dir() or not output.parent.is_dir():
            errors.append(f"--output {args.output}: must be a file in a folder that exists")
        if output in _resolved_paths(task_files):
            errors.append(
                f"--output {args.output}: is a file with items, which would be overwritten. "
                f"Choose another name"
            )
    if args.push_to_hub and (args.limit or task_files):
        errors.append(
            "--push_to_hub: a model card reports scores on the complete validation split. "
            "Leave out --limit, --task_files and --data_files"
        )
    model_id, _, revision = args.model.partition("@")
    if revision and args.push_to_hub == model_id:
        errors.append(
            f"--push_to_hub {model_id}: its card describes the newest version of the model, but "
            f"--model names revision {revision}. Leave out the revision or --push_to_hub"
        )
    return errors


def _resolved_paths(task_files: dict[str, list[str]]) -> set[Path]:
    resolved = set()
    for file_names in task_files.values():
        resolved |= {Path(name).resolve() for name in file_names}
    return resolved


if __name__ == "__main__":
    sys.exit(main())
