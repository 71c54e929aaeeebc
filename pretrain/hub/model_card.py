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

from pretrain.base.foreign import clean
from pretrain.base.layout import step_name
from pretrain.evaluation.items import records
from pretrain.hub import scores
from pretrain.machine.facts import Facts
from pretrain.model.architectures import ARCHITECTURES
from pretrain.recipe import keys

TEMPLATE = Path(__file__).with_name("model_card.jinja")
TASKS = list(records().values())
LOSSES = {
    "eval/loss": "validation loss, nats per token",
    "eval/bits_per_byte": "validation, bits per byte",
    "test/loss": "test loss, nats per token",
    "test/bits_per_byte": "test, bits per byte",
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Figure(NamedTuple):
    """A measurement: its words and number in a card, its value and its data in the metadata that the Hub reads."""

    metric: str
    words: str
    shown: str
    value: float
    step: int
    data: dict[str, Any]


def model_card(
    repo_id: str, step: int, rows: Sequence[Mapping], recipe: keys.Recipe, facts: Facts, best_step: int | None = None
) -> str:
    """Return the README.md of the model after ``step`` updates; a figure without a row of this run is not in it.

    Args:
        repo_id: owner/name on the Hub.
        rows: of metrics.jsonl; figures of later steps are left out.
        best_step: where the weights are from, if not from ``step``: that of the lowest validation loss.
    """
    from huggingface_hub import ModelCard

    of = step if best_step is None else best_step
    # The test split is scored once, with the weights that are here.
    scored = _newest(row for row in rows if row["step"] <= of or "test/loss" in row)
    figures, record = [*_figures(scored, recipe)], ARCHITECTURES.get(facts.model_type)
    card = ModelCard.from_template(
        metadata(recipe, repo_id, [figure for figure in figures if figure.step in (of, step)]),
        template_path=str(TEMPLATE),
        text=_text,
        fenced=_fenced,
        repo_id=json.dumps(repo_id),
        tag=step_name(step),
        step=step,
        of=of,
        recipe=recipe,
        init_from=keys.public(recipe)["init_from"],
        facts=facts,
        kind=record.label if record else facts.model_type,
        data=", ".join(map(_in_words, keys.sources(recipe.data))),
        prompt=json.dumps(next(iter(recipe.evaluation.sample_prompts), "The"), ensure_ascii=False),
        has_curves=any("train/loss" in row or "eval/loss" in row for row in rows),
        figures=figures,
        cost=_cost(rows, facts.num_processes),
        command=shlex.join(facts.command),
    )
    return f"{card}\n"


def metadata(recipe: keys.Recipe, repo_id: str = "", figures: Sequence[Figure] = ()) -> Any:
    """Return the ModelCardData, the head of a card."""
    from huggingface_hub import EvalResult, ModelCardData

    source = recipe.model.init_from
    results = [
        EvalResult(task_type="text-generation", metric_type=metric, metric_name=words, metric_value=value, **data)
        for metric, words, _, value, _, data in figures
    ]
    return ModelCardData(
        language=list(recipe.hub.language) or None,
        license=recipe.hub.license,
        base_model=source if source and HUB_ID.fullmatch(source) and not Path(source).exists() else None,
        datasets=_data_sets(recipe) or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *recipe.tracking.tags],
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _newest(rows: Iterable[Mapping]) -> dict[str, tuple[float, int]]:
    """Return the last finite value of each metric, and its step."""
    return {
        name: (value, row["step"])
        for row in rows
        for name, value in row.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _figures(scored: Mapping[str, tuple[float, int]], recipe: keys.Recipe) -> Iterator[Figure]:
    """Yield what was measured, of the newest value of each metric and its step."""
    of_text = {"dataset_type": " ".join(_data_sets(recipe)) or "text", "dataset_name": "text kept from training"}
    for name, words in LOSSES.items():
        if name in scored:
            value, step = scored[name]
            yield Figure(name.partition("/")[2], words, f"{value:.4f}", round(value, 4), step, of_text)
    for task in TASKS:
        data = scores.data_of(task)
        items = f"{scored.get(task.metric('items'), (0, 0))[0]:,.0f} items"
        for score, rule in task.scores.items():
            if (name := task.metric(score)) in scored:
                (value, step), (error, _) = scored[name], scored.get(f"{name}_stderr", (math.nan, 0))
                words = f"{task.label} {score} ({rule}){', %' if score in task.shares else ''}"
                shown = task.shown(score, value)
                yield Figure(score, words, f"{shown} ± {task.shown(score, error)}, {items}", float(shown), step, data)


def _cost(rows: Sequence[Mapping], processes: int) -> dict[str, str]:
    """Return what the training has taken, as far as the rows state it."""
    speeds, watts = ([row[name] for row in rows if row.get(name)] for name in ("tokens_per_second", "gpu/watts"))
    if not speeds:
        return {}
    seconds = _newest(rows)["elapsed_seconds"][0]
    found = {"training time": f"{timedelta(seconds=round(seconds))} (h:mm:ss), evaluating and saving not counted"}
    found["speed"] = f"{statistics.median(speeds):,.0f} tokens/s, the median of {len(speeds):,} readings"
    if watts:
        used = statistics.fmean(watts) * seconds * processes / 3.6e6
        found["energy"] = (
            f"{used:.3g} kWh, the cards alone: the mean power of one (NVML) over that time, times {processes}"
        )
    return found


def _data_sets(recipe: keys.Recipe) -> list[str]:
    """Return the ids of the Hub's data sets that the run has read."""
    names = map(keys.hub_id, keys.sources(recipe.data))
    return list(dict.fromkeys(name for name in names if name and HUB_ID.fullmatch(name)))


def _in_words(source: keys.Data) -> str:
    """Return what a source is."""
    name, subset = keys.hub_id(source), source.dataset_config_name
    if name is None:
        own = source.data_dir or source.data_files
        return "files of its author's" if own else "the source of Python's standard library"
    link = f"[{_text(name)}](https://huggingface.co/datasets/{name})" if HUB_ID.fullmatch(name) else _text(name)
    return f"{link} ({_text(subset)})" if subset and not source.data_dir else link


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(clean(str(value)).split()))


def _fenced(text: str, language: str) -> str:
    """Return a block of code whose fence no backticks within can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{clean(text).rstrip()}\n{fence}"
