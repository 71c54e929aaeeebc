r"""Score models on tasks: runs, checkpoints, model folders, or causal language models of the Hub.

    python eval_tasks.py --model runs/gpt2_124m --tasks lambada_openai arc_easy
    accelerate launch --quiet --multi_gpu eval_tasks.py --model openai-community/gpt2 \
        --tasks blimp --output items.jsonl
    python eval_tasks.py --model 'runs/a/checkpoints/*' 'runs/b/checkpoints/*' --tasks blimp \
        --scores scores.jsonl --picture curve.png

For one model, the script prints a table of each task, with standard errors, published scores of
other models and the score of random guessing, and then one JSON line on standard output.

For several models, it writes the JSON lines to the file of --scores, and skips models that this
file contains. It prints a table with all models, and draws the scores over tokens.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ursa_minor.base import console, files, paths, wording
from ursa_minor.base.cli import exit_on_bad_input, is_main_process
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch
from ursa_minor.evaluation.score_file import ScoreFile
from ursa_minor.model import model_list
from ursa_minor.model.model_list import ListedModel
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import command_line, keys

log = logging.getLogger("ursa_minor.eval_tasks")

SCORES_FILE = "learning_curve.jsonl"  # in the folder of the runs


@exit_on_bad_input
def main(argv: list[str] | None = None, task: str | None = None) -> int:
    """Score a model, print the results, and write and push them if requested.

    Args:
        argv: the command line without the name of the script; None takes that of the process.
        task: the only task to score, or None for a script with ``--tasks``.

    Returns:
        The exit status: 1 if the scores could not be pushed or a model could not be scored, else 0.
    """
    args = parse(sys.argv[1:] if argv is None else argv, task)
    check_launch(os.environ)
    console.start(is_main=is_main_process())
    if args.has_several_models:
        return score_several(args)
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


def score_several(args: argparse.Namespace) -> int:
    """Score several models, and write a file, a table and a picture of their scores.

    Args:
        args: the result of ``parse``.

    Returns:
        The exit status: 1 if a model could not be scored, else 0.
    """
    listed = model_list.list_models(args.models)
    for problem in listed.problems:
        log.warning(problem)
    if listed.skipped:
        log.info(f"These paths contain no model and are skipped: {', '.join(listed.skipped)}")
    scores_path = Path(args.scores or default_scores_path(listed.models))
    picture = args.picture or scores_path.with_suffix(".png")
    check_picture(args.picture, listed.models)
    score_file = ScoreFile(scores_path)

    console.announce_imports()
    # These imports take seconds, so they come after the checks of the command line.
    from ursa_minor.evaluation import score_models, score_tables
    from ursa_minor.hub import client
    from ursa_minor.reporting import learning_curve

    client.set_timeouts()
    scores = score_models.run(args, listed.models, score_file)
    if scores.lines:
        print(f"\n{score_tables.models_table(scores.tasks, scores.lines)}")
        for task in scores.tasks:
            part_lines = score_tables.newest_of_runs(task, scores.part_lines)
            if part_lines:
                print(f"\n{score_tables.parts_table(task, part_lines)}")
        print(f"\n{scores_path}")
        if learning_curve.has_points(scores.lines):
            learning_curve.draw(scores.tasks, scores.lines, picture)
            print(picture)
    num_failed = scores.num_failed + len(listed.problems)
    if num_failed:
        log.warning(
            f"{wording.pluralize(num_failed, 'model was', 'models were')} not scored; see the "
            f"messages above. The same command tries again, and keeps the scores of the others"
        )
    return 1 if num_failed else 0


def default_scores_path(models: Sequence[ListedModel]) -> Path:
    """Return the file of --scores: next to the folder of the first run, as in compare_runs.py."""
    for model in models:
        if model.run_dir is not None:
            return Path(os.path.relpath(model.run_dir.resolve().with_name(SCORES_FILE)))
    return Path(SCORES_FILE)


def check_picture(picture: Path | None, models: Sequence[ListedModel]) -> None:
    """Report the models that have no place in the picture.

    Raises:
        BadInput: ``--picture`` is given, and no model has a place.
    """
    without_tokens = [model.name for model in models if model.tokens is None]
    if not without_tokens:
        return
    reason = (
        f"it is not known on how many tokens {wording.join_or(without_tokens)} was trained. Only "
        f"checkpoints and finished runs are drawn"
    )
    if len(without_tokens) < len(models):
        log.warning(f"The picture leaves out models, because {reason}")
    elif picture is not None:
        raise BadInput(
            f"--picture {picture}: {reason}. Leave out --picture, or use the checkpoints of a run"
        )


def parse(argv: list[str], task: str | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: the command line without the name of the script.
        task: the only task to score, or None for a script with ``--tasks``. Its scores may be
            pushed to the Hub.

    Returns:
        The options. ``models`` has the values of --model, and ``model`` is the first one.
        ``has_several_models`` is whether a file and a picture of several models are written.
        ``task_files`` is a dictionary from a task to its files, ``batch_size`` is None for auto,
        and ``single_task`` is whether the script scores a single task.

    Raises:
        BadInput: with every error that was found.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s --model NAME [NAME ...] [--option value ...]",
        description=_description(task),
        allow_abbrev=False,
    )
    _add_options(parser, task)
    parser.set_defaults(single_task=task is not None)
    args = command_line.parse_flags(parser, argv)
    args.tasks = list(dict.fromkeys(args.tasks))
    args.model = args.models[0]
    has_pattern = any(model_list.is_pattern(name) for name in args.models)
    writes_scores = args.scores is not None or args.picture is not None
    is_for_several = len(args.models) > 1 or has_pattern or writes_scores
    args.has_several_models = task is None and is_for_several

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
    help_text = (
        "Model to score (required): a run folder, a checkpoint, a model folder, or a Hub id "
        "(ID or ID@REVISION)."
    )
    if task is None:
        help_text += (
            " Several values, or a pattern such as 'runs/x/checkpoints/*', mean several models."
        )
    model_group = parser.add_argument_group("model")
    model_group.add_argument(
        "--model",
        dest="models",
        nargs="+" if task is None else 1,
        type=paths.argument,
        required=True,
        metavar="NAME_OR_PATH",
        help=help_text,
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
        output_group.add_argument(
            "--scores",
            type=paths.argument,
            metavar="PATH",
            help="Add one JSON line per model and task to this file, and skip the models whose "
            f"scores it contains. (default: {SCORES_FILE} next to the folder of the first run, if "
            "there are several models)",
        )
        output_group.add_argument(
            "--picture",
            type=paths.path_argument,
            metavar="PATH",
            help="The .png file of the scores over tokens. (default: the name of --scores with "
            ".png, if there are several models)",
        )
        output_group.add_argument(
            "--by_part",
            action="store_true",
            help="Also compute the scores of each part of BLiMP. The field UID of an item is the "
            "name of its part.",
        )
    else:
        parser.set_defaults(scores=None, picture=None, by_part=False)
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
    errors += _output_errors(args, task_files)
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


def _output_errors(args: argparse.Namespace, task_files: dict[str, list[str]]) -> list[str]:
    """Return the errors in the names of files that are written."""
    errors = []
    item_files = _resolved_paths(task_files)
    for option, name in (("--output", args.output), ("--scores", args.scores)):
        if not name:
            continue
        path = Path(name).resolve()
        if path.is_dir() or not path.parent.is_dir():
            errors.append(f"{option} {name}: must be a file in a folder that exists")
        if path in item_files:
            errors.append(
                f"{option} {name}: is a file with items, which would be overwritten. "
                f"Choose another name"
            )
    if args.scores and Path(args.scores).suffix == ".png":
        errors.append(f"--scores {args.scores}: is the name of a picture. Use a .jsonl file")
    if args.picture and not paths.can_be_picture(args.picture):
        errors.append(f"--picture {args.picture}: must be a .png file in a folder that exists")
    if args.output and args.has_several_models:
        errors.append(
            f"--output {args.output}: contains the items of one model, but this command scores "
            f"several models. Write their scores with --scores, or use --output with one model and "
            f"without --scores and --picture"
        )
    return errors


def _resolved_paths(task_files: dict[str, list[str]]) -> set[Path]:
    resolved = set()
    for file_names in task_files.values():
        resolved |= {Path(name).resolve() for name in file_names}
    return resolved


if __name__ == "__main__":
    sys.exit(main())
