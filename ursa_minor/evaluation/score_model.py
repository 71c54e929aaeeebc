"""Score a model on tasks outside a run, for eval_tasks.py and eval_hellaswag.py.

Progress is shown by a bar, and scores by a table with the published scores of other models.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from ursa_minor.base import files, paths, terminal
from ursa_minor.base.cli import catch_interrupts
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.evaluation import likelihood, metrics, score_tables, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.likelihood import ModelAnswer
from ursa_minor.evaluation.metrics import Metric
from ursa_minor.evaluation.task import Task
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import make_accelerator
from ursa_minor.model import pretrained
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.precision import precision_of
from ursa_minor.model.resolve import resolve_model
from ursa_minor.model.vocabulary import check_embedding_rows

log = logging.getLogger(__name__)

METRICS_FOLDER = paths.ROOT / "metrics"
MODEL_CHARACTERS = 40  # maximum length of the name of a model in a table
CELL_CHARACTERS = 14  # minimum width of a column of scores


def run(args: argparse.Namespace) -> list[tuple[Task, dict[str, Any]]]:
    """Score a model on the tasks of a command line.

    Log a table for each task, and write the file of ``--output``.

    Args:
        args: the result of ``eval_tasks.parse``.

    Returns:
        On the main process, each task with the JSON object that the script prints for it. On the
        other processes, an empty list.

    Raises:
        BadInput: a task cannot be scored (raised before any task is scored), or the user has
            interrupted the program.
    """
    disable_progress_bar()  # Transformers shows one while it loads a single file
    model_name = resolve_model(args.model)
    model_option = f"--model {args.model}"
    check_no_hub_adapter(model_name, model_option)
    tokenizer = pretrained_tokenizer.load(model_name, of_model=True)
    # Everything is loaded first, so that an error is reported before any task is scored.
    tasks = [task_data.all_tasks()[name] for name in args.tasks]
    items = [task_data.read(task, args.task_files.get(task.name), args.limit) for task in tasks]
    if args.by_part:
        task_data.check_parts(dict(zip(tasks, items, strict=True)))

    # Without an Accelerate YAML the model runs in the precision in which it was saved, as in
    # lm-evaluation-harness.
    accelerator = make_accelerator(hardware.this_device(), precision="no")
    model = pretrained.load(model_name).to(accelerator.device)
    check_embedding_rows(model, tokenizer, model_option)
    context_length = likelihood.context_length(model.config)
    tests = [
        EncodedTask(task, task_items, tokenizer, context_length)
        for task, task_items in zip(tasks, items, strict=True)
    ]
    if args.push_to_hub:
        check_complete(tests, args.push_to_hub)

    precision = precision_of(model, accelerator.mixed_precision)
    results: list[tuple[Task, dict[str, Any]]] = []
    item_lines: list[str] = []
    catch_interrupts()
    try:
        for test in tests:
            start = time.perf_counter()
            answers = compute_answers(test, model, args.batch_size, accelerator)
            seconds = time.perf_counter() - start
            if not accelerator.is_main_process:
                continue
            task_field = {} if args.single_task else {"task": test.task.name}
            line = task_field | {
                "model": args.model,
                "dataset": describe_data(test, args.task_files.get(test.task.name)),
                "items": len(test.items),
                "cut": test.longer_than(context_length),
                "left_out": test.left_out,
                "precision": precision,
                **test.result(answers, by_evaluate()),
                "seconds": round(seconds, 2),
            }
            log.info(
                table(test.task, line, f"{precision} on {hardware.device_name(accelerator.device)}")
            )
            results.append((test.task, line))
            if args.by_part and test.task.part_field:
                part_lines = lines_of_parts(test, answers, task_field | {"model": args.model})
                log.info("\n" + score_tables.parts_table(test.task, part_lines))
                results += [(test.task, part_line) for part_line in part_lines]
            for row in test.rows(answers):
                item_lines.append(files.to_json(task_field | row) + "\n")
    except KeyboardInterrupt:
        raise BadInput(
            "interrupted before all items were scored. No scores were written", 130
        ) from None
    if args.output and accelerator.is_main_process:
        files.write_text(Path(args.output), "".join(item_lines))
        log.info(f"The log-likelihoods and predictions of each item are in {args.output}")
    return results


def lines_of_parts(
    test: EncodedTask, answers: Sequence[ModelAnswer], shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a line with the scores of each part of a task.

    Args:
        shared: the fields that all of these lines have.
    """
    results = test.result_by_part(answers)
    return [{**shared, "part": part, **result} for part, result in results.items()]


def describe_data(test: EncodedTask, task_files: Sequence[str] | None) -> str:
    """Return the names of local files, or the data set with the beginning of its commit."""
    if task_files:
        return ", ".join(task_files)
    name, _ = test.task.dataset
    return f"{name}@{str(test.commit)[:7]}"


def check_complete(tests: Sequence[EncodedTask], model_id: str) -> None:
    """Raise BadInput unless all items of each public data set are scored.

    The scores in a model card describe the complete data set.
    """
    for test in tests:
        if test.revision is None:
            task = test.task
            message = (
                f"--push_to_hub {model_id}: a model card reports scores on all {task.size:,} items "
                f"of {task.dataset[0]}, but only {len(test.items):,} would be scored. "
            )
            if test.left_out:
                message += f"{test.left_out:,} items do not fit into the model's context. "
            raise BadInput(f"{message}Leave out --push_to_hub")


def compute_answers(
    test: EncodedTask,
    model: PreTrainedModel,
    batch_size: int | None,
    accelerator: Accelerator,
    *,
    keeps_bar: bool = True,
) -> list[ModelAnswer]:
    """Return a model's answers. The main process shows a progress bar.

    Args:
        keeps_bar: whether the bar remains on the terminal at the end. Otherwise it is not written
            to a log file, where it could not be removed.
    """
    shows_bar = accelerator.is_main_process and (keeps_bar or sys.stderr.isatty())
    questions_per_process = len(test.questions) // accelerator.num_processes
    progress_bar = tqdm(
        desc=test.task.name,
        unit="text",
        total=questions_per_process,
        dynamic_ncols=True,
        leave=keeps_bar,
        disable=not shows_bar,
        # In a log file, each update of the bar is a line.
        mininterval=0.2 if sys.stderr.isatty() else 30,
    )
    with progress_bar, accelerator.autocast():
        answers = likelihood.log_likelihoods(
            model,
            test.questions,
            context_length=likelihood.context_length(model.config),
            accelerator=accelerator,
            batch_size=batch_size,
            progress=lambda batch: progress_bar.update(len(batch)),
        )
    assert answers is not None  # None is only returned with `stop`
    return answers


@cache
def by_evaluate() -> dict[str, Metric]:
    """Return the metrics of the folder metrics/ as the evaluate library loads them.

    evaluate copies a metric before it imports it. The copies are in a temporary folder, because the
    home folder may not be writable.
    """
    import evaluate

    metrics_by_name = {}
    with tempfile.TemporaryDirectory(prefix="metrics-") as folder:
        evaluate.config.HF_MODULES_CACHE = folder
        for name in metrics.PLAIN:
            metric = evaluate.load(
                str(METRICS_FOLDER / name), keep_in_memory=True, cache_dir=folder
            )
            metrics_by_name[name] = metric.compute
    return metrics_by_name


def table(task: Task, line: Mapping[str, Any], hardware_text: str) -> str:
    """Return the scores of a task as a table, with the published scores of other models.

    Args:
        line: the JSON object of the task (see ``run``).
        hardware_text: the precision and the device.
    """
    num_items = line["items"]
    items_per_second = num_items / max(line["seconds"], 0.01)
    truncated = pluralize(line["cut"], "text", "texts")
    left_out = pluralize(line["left_out"], "item", "items")
    rows = []
    for name, cells in _table_rows(task, line).items():
        rows.append([name, *(cell.rjust(CELL_CHARACTERS) for cell in cells)])
    width = terminal.width_of(sys.stderr)
    title = (
        f"{task.label}, {pluralize(num_items, 'item', 'items')} of {line['dataset']}; "
        f"{truncated} truncated from the left to fit the context; "
        f"{left_out} with a longer ending left out; "
        f"{hardware_text}, {items_per_second:,.1f} items/s"
    )
    notes = [
        "Scores that are fractions are in per cent, with their standard error after ±. "
        f"Scores of other models are of all {task.size:,} items of the data set.",
    ]
    if num_items < score_tables.MIN_RELIABLE_ITEMS:
        notes.append(score_tables.UNRELIABLE)
    notes += [f"{score} ({rule})" for score, rule in task.scores.items()]
    notes += task.citations
    table_lines = terminal.align(rows, width, numbers_right=True)
    return "\n".join(
        [
            "",
            terminal.wrap(title, width),
            "",
            *table_lines,
            "",
            *(terminal.wrap(note, width) for note in notes),
        ]
    )


def _table_rows(task: Task, line: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the header and the rows of a table: for each model, a cell for each score."""
    model_name = line["model"][-MODEL_CHARACTERS:]
    rows = {
        "": list(task.scores),
        model_name: task.format_with_errors(line),
    }
    for name, values in task.published.items():
        rows[name] = [f"{value:.2f}" if value else "-" for value in values]
    if task.chance:
        chance = f"{100 * task.chance:.2f}"
        rows["chance"] = [chance] * len(task.scores)
    return rows
