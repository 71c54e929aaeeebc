"""README.md of a pushed model: metadata that the Hub reads, and what this run measured, in plain words.

Its text is model_card.jinja. Names and texts from outside go into it through ``_text`` and ``_fenced`` only.
"""

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ursa_minor.base.redaction import redact
from ursa_minor.base.run_files import step_name
from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.hub import card_merge, card_scores
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.recipe import keys

CARD_TEMPLATE = Path(__file__).with_name("model_card.jinja")
CARD_TASKS = list(all_tasks().values())
CARD_LOSSES = {
    "eval/loss": "validation loss, nats per token",
    "eval/bits_per_byte": "validation, bits per byte",
    "test/loss": "test loss, nats per token",
    "test/bits_per_byte": "test, bits per byte",
}
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Figure(NamedTuple):
    """A measurement in a card.

    Attributes:
        words: its name in the text.
        shown: its value in the text.
        step: when it was measured.
        result: the same in the metadata that the Hub reads; None if it is not in them.
    """

    words: str
    shown: str
    step: int
    result: EvalResult | None


class NewestValue(NamedTuple):
    """The newest finite value of a metric, and the row of metrics.jsonl that contains it."""

    value: float
    row: Mapping[str, Any]


def model_card(
    repo_id: str,
    step: int,
    rows: Sequence[Mapping],
    recipe: keys.Recipe,
    run_info: RunInfo,
    best_step: int | None = None,
) -> str:
    """Return the README.md of the model after ``step`` updates; a figure without a row of this run is not in it.

    Args:
        repo_id: owner/name on the Hub.
        rows: of metrics.jsonl; figures of later steps are left out.
        best_step: where the weights are from, if not from ``step``: that of the lowest validation loss.
    """
    of = step if best_step is None else best_step
    # The test split is scored once, with the weights that are here.
    scored = _newest(row for row in rows if row["step"] <= of or "test/loss" in row)
    figures = [*_figures(scored)]
    architecture = ARCHITECTURES.get(run_info.model_type)
    card = ModelCard.from_template(
        metadata(recipe, repo_id, [figure for figure in figures if figure.step in (of, step)]),
        template_path=str(CARD_TEMPLATE),
        text=_text,
        fenced=_fenced,
        repo_id=json.dumps(repo_id),
        tag=step_name(step),
        step=step,
        of=of,
        recipe=recipe,
        init_from=keys.redacted(recipe)["init_from"],
        run_info=run_info,
        kind=architecture.label if architecture else run_info.model_type,
        data=", ".join(map(_in_words, recipe.data.resolved_sources)),
        prompt=json.dumps(next(iter(recipe.evaluation.sample_prompts), "The"), ensure_ascii=False),
        has_curves=any("train/loss" in row or "eval/loss" in row for row in rows),
        figures=figures,
        cost=_cost(rows, run_info.num_processes),
        command=shlex.join(run_info.command),
    )
    return card_merge.mark(str(card))


def metadata(
    recipe: keys.Recipe, repo_id: str = "", figures: Sequence[Figure] = ()
) -> ModelCardData:
    """Return the head of a card."""
    results = [figure.result for figure in figures if figure.result is not None]
    return ModelCardData(
        language=list(recipe.hub.language) or None,
        license=recipe.hub.license,
        base_model=_base_model(recipe.model.init_from),
        datasets=_data_sets(recipe) or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *recipe.tracking.tags],
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _base_model(init_from: str | None) -> str | None:
    """Return the Hub id of a run's base model without its revision; None if there is none."""
    if init_from is None or Path(init_from).exists():
        return None
    model_id = init_from.partition("@")[0]
    return model_id if MODEL_ID.fullmatch(model_id) else None


def _newest(rows: Iterable[Mapping]) -> dict[str, NewestValue]:
    """Return the last finite value of each metric."""
    newest = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                newest[name] = NewestValue(value, row)
    return newest


def _figures(newest: Mapping[str, NewestValue]) -> Iterator[Figure]:
    """Yield what was measured, from the newest value of each metric."""
    for name, words in CARD_LOSSES.items():
        if name in newest:
            yield _loss(name, words, newest[name])
    for task in CARD_TASKS:
        for score in task.scores:
            if task.metric(score) in newest:
                yield _score(task, score, newest[task.metric(score)])


def _loss(name: str, words: str, measured: NewestValue) -> Figure:
    """Return a loss. Its text is a part of the run's own data, never a complete public data set."""
    prefix, _, metric = name.partition("/")
    split = "validation" if prefix == "eval" else prefix
    result = EvalResult(
        **card_scores.KIND,
        dataset_type="text",
        dataset_name="text kept from training",
        dataset_split=split,
        metric_type=metric,
        metric_name=words,
        metric_value=round(measured.value, 4),
    )
    return Figure(words, f"{measured.value:.4f}", measured.row["step"], result)


def _score(task: Task, score: str, measured: NewestValue) -> Figure:
    """Return a score of a task. The metadata have it if it is of all items of the public data set."""
    value, row = measured
    name = task.metric(score)
    words = f"{task.label} {score} ({task.scores[score]})"
    if score in task.shares:
        words += ", %"
    error = task.format_score(score, row.get(f"{name}_stderr", math.nan))
    shown = (
        f"{task.format_score(score, value)} ± {error}, {row.get(task.metric('items'), 0):,} items"
    )
    revision = row.get(task.metric("revision"))
    if revision is None:
        return Figure(words, f"{shown}, not those of the complete data set", row["step"], None)
    return Figure(words, shown, row["step"], card_scores.result(task, score, value, revision))


def _cost(rows: Sequence[Mapping], processes: int) -> dict[str, str]:
    """Return what the training has taken, as far as the rows state it."""
    speeds, watts = (
        [row[name] for row in rows if row.get(name)] for name in ("tokens_per_second", "gpu/watts")
    )
    if not speeds:
        return {}
    seconds = _newest(rows)["elapsed_seconds"].value
    cost = {
        "training time": f"{timedelta(seconds=round(seconds))} (h:mm:ss), evaluating and saving not counted"
    }
    cost["speed"] = (
        f"{statistics.median(speeds):,.0f} tokens/s, the median of {len(speeds):,} readings"
    )
    if watts:
        used = statistics.fmean(watts) * seconds * processes / 3.6e6
        cost["energy"] = (
            f"{used:.3g} kWh, the cards alone: the mean power of one (NVML) over that time, times {processes}"
        )
    return cost


def _data_sets(recipe: keys.Recipe) -> list[str]:
    """Return the ids of the Hub's data sets that the run has read."""
    names = [source.hub_id for source in recipe.data.resolved_sources]
    return list(dict.fromkeys(name for name in names if name and MODEL_ID.fullmatch(name)))


def _in_words(source: keys.DataSource) -> str:
    """Return what a source is."""
    name, subset = source.hub_id, source.dataset_config_name
    if name is None:
        files = source.data_dir or source.data_files
        return "files of its author's" if files else "the source of Python's standard library"
    link = (
        f"[{_text(name)}](https://huggingface.co/datasets/{name})"
        if MODEL_ID.fullmatch(name)
        else _text(name)
    )
    return f"{link} ({_text(subset)})" if subset and not source.data_dir else link


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(redact(str(value)).split()))


def _fenced(text: str, language: str) -> str:
    """Return a block of code whose fence no backticks within can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{redact(text).rstrip()}\n{fence}"
