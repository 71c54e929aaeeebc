"""Tasks for people, beside training: a model scored on them with a bar, and tables beside others' scores."""

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

from ursa_minor.base import files, paths
from ursa_minor.base.cli import catch_interrupts
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, metrics, task_data
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
FEW = 100  # items, below which a score is nearly chance


def run(args: argparse.Namespace) -> list[tuple[Task, dict[str, Any]]]:
    """Score tasks as a script was asked to; log a table of each, write ``--output``. Empty but on the main process.

    Returns: each task with what is printed of it as JSON. Raises BadInput where a task cannot be scored, before any is,
    and when it is interrupted.
    """
    disable_progress_bar()  # Transformers' own bars, over loading one file
    name, tasks = resolve_model(args.model), task_data.all_tasks()
    check_no_hub_adapter(name, f"--model {args.model}")
    tokenizer = tokenization.load(name, of_model=True)
    task_items = [
        task_data.read(tasks[task], args.task_files.get(task), args.limit) for task in args.tasks
    ]
    # Without a YAML the model runs in the precision it was saved in, as in lm-evaluation-harness.
    accelerator = make_accelerator(hardware.this_device(), precision="no")
    model = pretrained.load(name).to(accelerator.device)
    check_embedding_rows(model, tokenizer, f"--model {args.model}")
    length = likelihood.context_length(model.config)
    tests = [
        EncodedTask(tasks[task], rows, tokenizer, length)
        for task, rows in zip(args.tasks, task_items, strict=True)
    ]
    if args.push_to_hub:
        check_complete(tests, args.push_to_hub)
    precision = precision_of(model, accelerator.mixed_precision)
    lines, rows = [], []
    catch_interrupts()
    try:
        for test in tests:
            start, task = time.perf_counter(), test.task
            its = {} if args.alone else {"task": task.name}
            answers = _answers(test, model, args.batch_size, accelerator)
            seconds = round(time.perf_counter() - start, 2)
            if not accelerator.is_main_process:
                continue
            line = its | {
                "model": args.model,
                "dataset": ", ".join(
                    args.task_files.get(task.name) or [f"{task.dataset[0]}@{str(test.commit)[:7]}"]
                ),
                "items": len(test.items),
                "cut": test.longer_than(length),
                "left_out": test.left_out,
                "precision": precision,
                **test.result(answers, by_evaluate()),
                "seconds": seconds,
            }
            log.info(
                table(task, line, f"{precision} on {hardware.device_name(accelerator.device)}")
            )
            lines.append((task, line))
            rows += [files.to_json(its | row) + "\n" for row in test.rows(answers)]
    except KeyboardInterrupt:
        raise BadInput("stopped before all items were scored; nothing was written", 130) from None
    if args.output and accelerator.is_main_process:
        files.write_text(Path(args.output), "".join(rows))
        log.info(f"each item's sums and predictions: {args.output}")
    return lines


def check_complete(tests: Sequence[EncodedTask], model_id: str) -> None:
    """Raise BadInput unless all items of each public data set are scored: a model card claims that."""
    for test in tests:
        if test.revision is None:
            task = test.task
            raise BadInput(
                f"--push_to_hub {model_id}: a model card's scores are of all {task.size:,} items of {task.dataset[0]}, "
                f"and {len(test.items):,} would be scored ({test.left_out:,} do not fit the model's context). Leave "
                "--push_to_hub out"
            )


def _answers(
    test: EncodedTask, model: PreTrainedModel, batch_size: int | None, accelerator: Accelerator
) -> list[ModelAnswer]:
    """Return a model's answers, with a bar on the main process; a log file gets a line of it now and then."""
    bar_options = {
        "disable": not accelerator.is_main_process,
        "mininterval": 0.2 if sys.stderr.isatty() else 30,
    }
    num_texts = len(test.questions) // accelerator.num_processes
    with (
        tqdm(
            desc=test.task.name, unit="text", total=num_texts, dynamic_ncols=True, **bar_options
        ) as bar,
        accelerator.autocast(),
    ):
        answers = likelihood.log_likelihoods(
            model,
            test.questions,
            context_length=likelihood.context_length(model.config),
            accelerator=accelerator,
            batch_size=batch_size,
            progress=lambda batch: bar.update(len(batch)),
        )
    assert answers is not None  # nothing stops it
    return answers


@cache
def by_evaluate() -> dict[str, Metric]:
    """Return the metrics of the folder metrics/, as evaluate loads them.

    Its copies of them stand in a folder that is then removed: the home may not be writable.
    """
    import evaluate

    with tempfile.TemporaryDirectory(prefix="metrics-") as folder:
        evaluate.config.HF_MODULES_CACHE = folder
        options = {"keep_in_memory": True, "cache_dir": folder}
        return {
            name: evaluate.load(str(METRICS_FOLDER / name), **options).compute
            for name in metrics.PLAIN
        }


def table(task: Task, line: Mapping[str, Any], where: str) -> str:
    """Return a task's scores beside those of other models on all its items, a row a model, and the rule of each score."""
    body = {"": list(task.scores), line["model"][-40:]: task.with_errors(line)}
    body |= {
        name: [f"{value:.2f}" if value else "-" for value in row]
        for name, row in task.published.items()
    }
    if task.chance:
        body["chance"] = [f"{100 * task.chance:.2f}"] * len(task.scores)
    width = max(map(len, body))
    few = (
        ["too few: neither a score nor its standard error means much"]
        if line["items"] < FEW
        else []
    )
    cut = f"{line['cut']:,} texts cut from the left to fit the context, {line['left_out']:,} with a longer ending left out"
    return "\n".join(
        [
            "",
            f"{task.label}, {pluralize(line['items'], 'item', 'items')} of {line['dataset']}; {cut}; {where}, "
            f"{line['items'] / max(line['seconds'], 0.01):,.1f} items/s",
            "",
            *(
                f"{name:{width}}  " + "  ".join(f"{cell:>14}" for cell in cells)
                for name, cells in body.items()
            ),
            "",
            f"shares in per cent, each score ± its standard error; other models on all {task.size:,} items of its data set",
            *few,
            *(f"{score}: {rule}" for score, rule in task.scores.items()),
            *task.citations,
        ]
    )
