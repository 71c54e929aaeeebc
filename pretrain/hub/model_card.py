"""README.md of a pushed model: metadata that the Hub reads, and what this run measured, in plain words.

Its text is model_card.jinja. Names and texts from outside go into it through ``_text`` and ``_fenced`` only.
"""

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pretrain.base.foreign import clean
from pretrain.base.layout import step_name
from pretrain.evaluation.items import records
from pretrain.evaluation.record import Task
from pretrain.machine.facts import Facts
from pretrain.model.architectures import ARCHITECTURES
from pretrain.recipe import keys

TEMPLATE = Path(__file__).with_name("model_card.jinja")
SIZES = {(12, 768): "GPT-2 124M", (24, 1024): "GPT-2 355M", (36, 1280): "GPT-2 774M", (48, 1600): "GPT-2 1558M"}
TASKS = list(records().values())
# By its name in metrics: the task of a score (None: a loss of the text), and its name in words.
MEASURES: dict[str, tuple[Task | None, str]] = {
    "eval/loss": (None, "validation loss, nats per token"),
    "eval/bits_per_byte": (None, "validation, bits per byte"),
    "test/loss": (None, "test loss, nats per token"),
    "test/bits_per_byte": (None, "test, bits per byte"),
}
MEASURES |= {
    task.metric(score): (task, f"{task.label} {score} ({rule}){', %' * (score in task.shares)}")
    for task in TASKS
    for score, rule in task.scores.items()
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def published(model: keys.Model) -> dict[str, dict[str, float]]:
    """Return published scores that a model of this shape may be compared with: metric -> model -> value."""
    size = SIZES.get((model.n_layer or 0, model.n_embd or 0), "GPT-2 124M")
    found: dict[str, dict[str, float]] = {}
    for task in TASKS:
        for name in [size, "GPT-3 124M"] if size == "GPT-2 124M" else [size]:
            for score, value in zip(task.scores, task.published.get(name, ()), strict=False):
                if value is not None:
                    found.setdefault(task.metric(score), {})[name] = value / 100 if score in task.shares else value
    return found


def model_card(
    repo_id: str, step: int, rows: Sequence[Mapping], recipe: keys.Recipe, facts: Facts, best_step: int | None = None
) -> str:
    """Return the README.md of the model after ``step`` updates; a figure without a row of this run is not in it.

    Args:
        repo_id: owner/name on the Hub.
        rows: of metrics.jsonl; those of later steps are left out.
        best_step: where the weights are from, if not from ``step``: that of the lowest validation loss.
    """
    from huggingface_hub import ModelCard

    rows = [row for row in rows if row.get("step", math.inf) <= step]
    of = step if best_step is None else best_step
    # The test split is scored once, with the weights that are here.
    scored = _newest(row for row in rows if row["step"] <= of or "test/loss" in row)
    lines, results = _results(scored, {of, step}, recipe)
    record = ARCHITECTURES.get(facts.model_type)
    card = ModelCard.from_template(
        metadata(recipe, repo_id, results),
        template_path=str(TEMPLATE),
        text=_text,
        fenced=_fenced,
        repo_id=json.dumps(repo_id),
        tag=step_name(step),
        step=step,
        of=of,
        recipe=recipe,
        facts=facts,
        kind=record.label if record else facts.model_type,
        data=", ".join(map(_in_words, keys.sources(recipe.data))),
        prompt=json.dumps(next(iter(recipe.evaluation.sample_prompts), "The"), ensure_ascii=False),
        has_curves=not {"train/loss", "eval/loss"}.isdisjoint(_newest(rows)),
        lines=lines,
        command=shlex.join(facts.command),
    )
    return f"{card}\n"


def metadata(recipe: keys.Recipe, repo_id: str = "", results: Sequence = ()) -> Any:
    """Return the ModelCardData, the head of a card; ``results``: EvalResults of this model."""
    from huggingface_hub import ModelCardData

    source = recipe.model.init_from
    return ModelCardData(
        language=list(recipe.hub.language) or None,
        license=recipe.hub.license,
        base_model=source if source and HUB_ID.fullmatch(source) and not Path(source).exists() else None,
        datasets=_data_sets(recipe) or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *recipe.tracking.tags],
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=list(results) or None,
    )


def _newest(rows: Iterable[Mapping]) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric, and its step."""
    return {name: (value, row["step"]) for row in rows for name, value in row.items() if _is_number(value)}


def _results(
    scored: Mapping[str, tuple[float, int]], steps: Collection[int], recipe: keys.Recipe
) -> tuple[list[tuple[str, str]], list]:
    """Return lines of what was measured, and an EvalResult of each figure that is of these weights and of public data.

    Args:
        scored: the last value of each metric, and its step.
        steps: at which these weights were measured.
    """
    from huggingface_hub import EvalResult

    trained_on, lines, results = _data_sets(recipe), [], []
    for metric, (task, words) in MEASURES.items():
        if metric not in scored:
            continue
        (value, when), (split, _, score) = scored[metric], metric.partition("/")
        if task:
            (data_set, part), count = task.dataset, f"{scored[task.metric('items')][0]:,.0f} items"
            figure, about = task.shown(score, value), f"{task.label}, {count}"
            error = scored.get(f"{metric}_stderr")
            line = f"{figure} ± {task.shown(score, error[0])}, {count}" if error else f"{figure}, {count}"
        else:
            data_set, part = trained_on[0] if len(trained_on) == 1 else "text", split.replace("eval", "validation")
            figure = line = f"{value:.4f}"
            about = f"{data_set}, kept from training"
        own = when in steps
        lines.append((words, line if own else f"{line} (at step {when:,})"))
        if own and not (task and recipe.evaluation.files_of(task.name)):
            result = EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=data_set,
                dataset_name=about,
                dataset_config=task and task.config,
                dataset_split=part,
                metric_type=score,
                metric_name=words,
                metric_value=float(figure),
            )
            results.append(result)
    return lines, results


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


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(clean(str(value)).split()))


def _fenced(text: str, language: str) -> str:
    """Return a block of code whose fence no backticks within can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{clean(text).rstrip()}\n{fence}"
