"""Tasks for people, beside training: a model scored on them with a bar, and a table beside others' scores."""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pretrain.base import files
from pretrain.base.entry import catch_interrupts
from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.evaluation import items, likelihood, record
from pretrain.evaluation.encoding import Encoded
from pretrain.evaluation.likelihood import Answer
from pretrain.machine import hardware
from pretrain.machine.accelerator import make_accelerator
from pretrain.model import pretrained
from pretrain.model.find import find
from pretrain.recipe.rules import counted

log = logging.getLogger(__name__)

METRICS = Path(__file__).parents[2] / "metrics"
PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
FEW = 100  # items, below which a score is nearly chance
COLUMNS = 79  # of a bar that no terminal shows


@dataclass(frozen=True)
class Scored:
    """A task's scores; ``line``: what is printed as JSON; ``cut``: a note on texts that were too long."""

    test: Encoded
    answers: list[Answer]
    line: dict[str, Any]
    cut: str
    device: str


def run(asked: argparse.Namespace, tasks: Sequence[str], table: Callable[[list[Scored]], str]) -> list[Scored]:
    """Score tasks as a script was asked to; log the table, write ``--output``. Empty but on the main process.

    Raises BadInput where a task cannot be scored, before any is, and when it is interrupted.
    """
    disable_progress_bar()  # Transformers' own bars, over loading one file
    name, records = find(asked.model), items.records()
    tokenizer = tokenization.load(name, of_model=True)
    tests = [
        Encoded(records[task], items.read(records[task], asked.task_files.get(task), asked.limit), tokenizer)
        for task in tasks
    ]
    # Without a YAML the model runs in the precision it was saved in, as in lm-evaluation-harness.
    accelerator = make_accelerator(hardware.this_device(), precision="no")
    model = pretrained.load(name).to(accelerator.device)
    tests = [test.fitting(tokenizer, likelihood.context_length(model.config)) for test in tests]
    catch_interrupts()
    try:
        answered = [_answers(test, model, asked.batch_size, accelerator) for test in tests]
    except KeyboardInterrupt:
        raise BadInput("stopped before all items were scored; nothing was written", 130) from None
    if not accelerator.is_main_process:
        return []
    found = [_scored(asked, test, *how, model, accelerator) for test, how in zip(tests, answered, strict=True)]
    log.info(table(found))
    if asked.output:
        names = [{"task": one.test.task.name} if "tasks" in asked else {} for one in found]  # of several tasks
        rows = (name | row for name, one in zip(names, found, strict=True) for row in one.test.rows(one.answers))
        files.write_text(Path(asked.output), "".join(json.dumps(row) + "\n" for row in rows))
        log.info(f"each item's sums and predictions: {asked.output}")
    return found


def _answers(
    test: Encoded, model: PreTrainedModel, batch_size: int | None, accelerator: Accelerator
) -> tuple[list[Answer], float]:
    """Return a model's answers and the seconds that they took, with a bar on the main process."""
    mine, start = len(test.questions) // accelerator.num_processes, time.perf_counter()
    how: dict[str, Any] = {"unit": "text", "disable": not accelerator.is_main_process, "desc": test.task.name}
    # A log file gets a line now and then.
    how |= {"mininterval": 0.2, "dynamic_ncols": True} if sys.stderr.isatty() else {"mininterval": 30, "ncols": COLUMNS}
    with tqdm(total=mine, **how) as bar, accelerator.autocast():
        found = likelihood.log_likelihoods(
            model,
            test.questions,
            context_length=likelihood.context_length(model.config),
            accelerator=accelerator,
            batch_size=batch_size,
            progress=lambda batch: bar.update(len(batch)),
        )
    assert found is not None  # nothing stops it
    return found, time.perf_counter() - start


def _scored(
    asked: argparse.Namespace,
    test: Encoded,
    answers: list[Answer],
    seconds: float,
    model: PreTrainedModel,
    accelerator: Accelerator,
) -> Scored:
    length, task, precision = likelihood.context_length(model.config), test.task, accelerator.mixed_precision
    cut = test.longer_than(length)
    line = {
        "model": asked.model,
        "dataset": ", ".join(asked.task_files.get(task.name) or [f"{task.dataset[0]}@{str(test.commit)[:7]}"]),
        "items": len(test.items),
        "cut": cut,
        "left_out": test.left_out,
        "precision": PRECISIONS.get(str(model.dtype), str(model.dtype)) if precision == "no" else precision,
        **by_metrics(test, answers),
        "seconds": round(seconds, 2),
    }
    note = f", {cut:,} texts cut from the left to {length} tokens" if cut else ""
    note += f", {test.left_out:,} with a longer ending left out" if test.left_out else ""
    return Scored(test, answers, line, note, hardware.device_name(accelerator.device))


def by_metrics(test: Encoded, answers: Sequence[Answer]) -> dict[str, float]:
    """Return a test's scores and their standard errors, as the metrics of the folder metrics/ compute them."""
    if test.task.scores is record.LAST_WORD:
        words = {"predictions": [float(sums[0]) for sums in test.sums(answers)]}
        return _compute("last_word", **words, references=[int(answer.greedy) for answer in answers])
    of_texts = [
        _compute(
            "multiple_choice",
            predictions=[values.tolist() for values in test.sums(answers, text)],
            characters=[sizes.tolist() for sizes in test.characters],
            tokens=[sizes.tolist() for sizes in tokens],
            references=test.gold.tolist(),
        )
        for text, tokens in enumerate(test.tokens)
    ]
    names = (f"{score}{end}" for score in test.task.scores for end in ("", "_stderr"))
    return {name: of_texts[-1 if name.startswith("acc_token_norm") else 0][name] for name in names}


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return where evaluate puts its copies of our metrics, until this process ends: the home may not be writable."""
    return tempfile.TemporaryDirectory(prefix="metrics-")


def _compute(name: str, **values: list) -> dict[str, float]:
    import evaluate

    evaluate.config.HF_MODULES_CACHE = folder = _folder().name
    return evaluate.load(str(METRICS / name), keep_in_memory=True, cache_dir=folder).compute(**values)


def table(found: Sequence[Scored]) -> str:
    """Return the scores of several tasks beside GPT-2 124M's and chance, in 80 columns."""
    lines, notes = [("", found[0].line["model"][-26:], "GPT-2 124M", "chance")], []
    for scored in found:
        task, line = scored.test.task, scored.line
        count = (
            f"{line['items']:,} of {task.size:,} items"
            if scored.test.commit
            else counted(line["items"], "item", "items")
        )
        # Others' scores are of the whole data set.
        comparable = (scored.test.commit and not scored.test.left_out) or line["items"] == task.size
        known = comparable and task.published.get("GPT-2 124M") or [None] * len(task.scores)
        for name, ours, theirs in zip(task.scores, task.with_errors(line), known, strict=True):
            chance = f"{100 * task.chance:.2f}" if name in task.shares else "-"
            lines.append((f"{task.name} {name}", ours, f"{theirs:.2f}" if theirs else "-", chance))
        few = "; too few: neither the score nor its standard error means much" if line["items"] < FEW else ""
        notes.append(f"{task.name}: {count} of {line['dataset']}{scored.cut}{few}")
        notes += [line for line in task.citations if comparable and line.startswith("GPT-2 124M")]
    width = max(len(line[0]) for line in lines)
    rows = [f"{what:{width}}  {ours:>26}  {theirs:>10}  {chance:>6}" for what, ours, theirs, chance in lines]
    last = f"shares in per cent, each score ± its standard error; {found[0].line['precision']} on {found[0].device}"
    return "\n".join(["", *rows, "", last, *notes])


def task_table(scored: Scored, legend: str) -> str:
    """Return a task's scores beside those of other models, a row a model; ``legend``: what the scores are."""
    task, line = scored.test.task, scored.line
    known = {name: [f"{value:.2f}" if value else "-" for value in row] for name, row in task.published.items()}
    chance = [f"{100 * task.chance:.2f}"] * len(task.scores)
    body = {"": task.scores, line["model"][-40:]: task.with_errors(line), **known, "chance": chance}
    width = max(map(len, body))
    return "\n".join(
        [
            "",
            f"{task.label}, {counted(line['items'], 'item', 'items')} of {line['dataset']}{scored.cut}; "
            f"{line['precision']} on {scored.device}, {line['items'] / line['seconds']:,.1f} items/s",
            "",
            *(f"{name:{width}}  " + "  ".join(f"{cell:>14}" for cell in cells) for name, cells in body.items()),
            "",
            "per cent ± standard error",
            legend,
            *task.citations,
        ]
    )
