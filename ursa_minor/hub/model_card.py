"""Write the model card of a run: the README.md of its repository on the Hub.

The text is model_card.jinja. Every name and text that the user or a data set has chosen must pass
through ``escaped`` or ``code_block``, so that it cannot break the card.
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
from ursa_minor.hub.origin import public_file_name
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.recipe import keys

CARD_TEMPLATE = Path(__file__).with_name("model_card.jinja")
CARD_TASKS = list(all_tasks().values())
# The label of each loss. It is the metric's name in the metadata, by which a later push finds the
# value to replace, so the wording must not change.
CARD_LOSSES = {
    "eval/loss": "validation loss, nats per token",
    "eval/bits_per_byte": "validation, bits per byte",
    "test/loss": "test loss, nats per token",
    "test/bits_per_byte": "test, bits per byte",
}
# The same for the baselines, which are not results of the model.
CARD_BASELINES = {
    "baseline/bigram_bits_per_byte": "validation, bits per byte, bigram model",
    "baseline/gzip": "validation, bits per byte, gzip",
}
MAX_LISTED_FILES = 5  # data files that a card names
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MARKDOWN_CHARACTERS = re.compile(r"([\\`*_\[\]<>#|~$&!])")
JOULES_PER_KILOWATT_HOUR = 3.6e6
DEFAULT_PROMPT = "The"
MAX_EXAMPLE_TOKENS = 50  # maximum number of tokens that the example code generates


class Measurement(NamedTuple):
    """A loss or score in a card.

    Attributes:
        label: name in the table of results.
        text: value in the table of results.
        step: the step at which it was measured.
        result: the result in the form of the card's metadata, or None if it is left out of them.
    """

    label: str
    text: str
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
    *,
    prompt: str | None = None,
) -> str:
    """Return the README.md of the model after ``step`` updates.

    The card contains only values that this run has logged.

    Args:
        repo_id: OWNER/NAME on the Hub.
        step: the step of the push.
        rows: the rows of metrics.jsonl. Evaluations after the step of the weights are ignored.
        recipe: the recipe of the run.
        run_info: command, hardware and size of the model.
        best_step: the step of the weights, if it is not ``step``: the one with the lowest
            validation loss.
        prompt: prompt of the example if the recipe has no sample_prompts: one of samples.txt.
    """
    weights_step = step if best_step is None else best_step
    measurements = list(measurements_of(rows, weights_step))
    sample_prompts = recipe.evaluation.sample_prompts or [prompt or DEFAULT_PROMPT]
    max_new_tokens = min(MAX_EXAMPLE_TOKENS, recipe.model.sequence_length // 2)
    card = ModelCard.from_template(
        metadata(recipe, repo_id, measured_at(measurements, {weights_step, step})),
        template_path=str(CARD_TEMPLATE),
        escaped=escaped,
        code_block=code_block,
        repo_id=json.dumps(repo_id),
        tag=step_name(step),
        step=step,
        weights_step=weights_step,
        num_tokens=step * recipe.batch.tokens_per_step,
        recipe=recipe,
        init_from=keys.redacted(recipe)["init_from"],
        run_info=run_info,
        architecture=architecture_label(run_info.model_type),
        data=describe_data(recipe),
        prompt=json.dumps(sample_prompts[0], ensure_ascii=False),
        max_new_tokens=max_new_tokens,
        has_curves=any("train/loss" in row or "eval/loss" in row for row in rows),
        measurements=measurements,
        baselines=baselines_of(rows),
        cost=_cost(rows, run_info.num_processes),
        command=shlex.join(run_info.command),
    )
    return card_merge.mark(str(card))


def architecture_label(model_type: str) -> str:
    """Return the name of an architecture, given the ``model_type`` of Transformers."""
    architecture = ARCHITECTURES.get(model_type)
    return architecture.label if architecture else model_type


def measurements_of(rows: Sequence[Mapping], weights_step: int) -> Iterator[Measurement]:
    """Yield the newest losses and scores of the weights of a step.

    Args:
        rows: the rows of metrics.jsonl.
        weights_step: the step of the weights. Evaluations of later weights are ignored.
    """
    newest = _newest(_rows_of_weights(rows, weights_step))
    for name, label in CARD_LOSSES.items():
        if name in newest:
            yield _loss(name, label, newest[name])
    for task in CARD_TASKS:
        for score in task.scores:
            name = task.metric(score)
            if name in newest:
                yield _score(task, score, newest[name])


def baselines_of(rows: Sequence[Mapping]) -> dict[str, str]:
    """Return the baselines on the validation text in bits per byte, by label."""
    newest = _newest(rows)
    return {
        label: f"{newest[name].value:.4f}"
        for name, label in CARD_BASELINES.items()
        if name in newest
    }


def _rows_of_weights(rows: Sequence[Mapping], weights_step: int) -> list[Mapping]:
    """Return the rows that describe the pushed weights or earlier ones.

    The test split is evaluated at the end of the run, with the weights of the best step. Its row
    has the last step.
    """
    return [row for row in rows if row["step"] <= weights_step or "test/loss" in row]


def measured_at(measurements: Sequence[Measurement], steps: set[int]) -> list[Measurement]:
    return [measurement for measurement in measurements if measurement.step in steps]


def metadata(
    recipe: keys.Recipe, repo_id: str = "", measurements: Sequence[Measurement] = ()
) -> ModelCardData:
    """Return the metadata of a card."""
    results = []
    for measurement in measurements:
        if measurement.result is not None:
            results.append(measurement.result)
    return ModelCardData(
        language=list(recipe.hub.language) or None,
        license=recipe.hub.license,
        base_model=_base_model(recipe.model.init_from),
        datasets=_dataset_ids(recipe) or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *recipe.tracking.tags],
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _base_model(init_from: str | None) -> str | None:
    """Return the Hub id of ``init_from`` without its revision, or None if it is not on the Hub."""
    if init_from is None or Path(init_from).exists():
        return None
    model_id, _, _ = init_from.partition("@")
    return model_id if MODEL_ID.fullmatch(model_id) else None


def _newest(rows: Iterable[Mapping]) -> dict[str, NewestValue]:
    """Return the last finite value of each metric."""
    newest = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                newest[name] = NewestValue(value, row)
    return newest


def _loss(name: str, label: str, newest: NewestValue) -> Measurement:
    """Return a loss. Its text is a part of the run's own data, never a complete public data set."""
    prefix, _, metric = name.partition("/")
    split = "validation" if prefix == "eval" else prefix
    result = EvalResult(
        **card_scores.TEXT_GENERATION,
        dataset_type="text",
        dataset_name="text held out from training",
        dataset_split=split,
        metric_type=metric,
        metric_name=label,
        metric_value=round(newest.value, 4),
    )
    return Measurement(label, f"{newest.value:.4f}", newest.row["step"], result)


def _score(task: Task, score: str, newest: NewestValue) -> Measurement:
    """Return a score of a task.

    The metadata contain only scores of all items of a public data set. The row of such a score has
    the revision of the data set.
    """
    row = newest.row
    label = f"{task.label} {score} ({task.scores[score]})"
    if score in task.shares:
        label += ", %"
    value = task.format_score(score, newest.value)
    standard_error = row.get(f"{task.metric(score)}_stderr", math.nan)
    error = task.format_score(score, standard_error)
    num_items = row.get(task.metric("items"), 0)
    text = f"{value} ± {error}, {num_items:,} items"

    revision = row.get(task.metric("revision"))
    if revision is None:
        text += ", not the complete data set"
        return Measurement(label, text, row["step"], None)
    result = card_scores.result(task, score, newest.value, revision)
    return Measurement(label, text, row["step"], result)


def _cost(rows: Sequence[Mapping], num_processes: int) -> dict[str, str]:
    """Return time, speed and energy of the training, as far as the rows state them."""
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    watts = [row["gpu/watts"] for row in rows if row.get("gpu/watts")]
    if not speeds:
        return {}
    seconds = _newest(rows)["elapsed_seconds"].value
    duration = timedelta(seconds=round(seconds))
    speed = statistics.median(speeds)
    cost = {
        "training time": f"{duration} (h:mm:ss), excluding evaluation and saving",
        "speed": f"{speed:,.0f} tokens/s (median of {len(speeds):,} logged values)",
    }
    if watts:
        joules = statistics.fmean(watts) * seconds * num_processes
        energy = joules / JOULES_PER_KILOWATT_HOUR
        cost["energy"] = (
            f"{energy:.3g} kWh, GPUs only "
            f"(mean power of one GPU by NVML x training time x {num_processes})"
        )
    return cost


def _dataset_ids(recipe: keys.Recipe) -> list[str]:
    """Return the ids of the data sets on the Hub that the run reads, each once."""
    dataset_ids: list[str] = []
    for source in recipe.data.resolved_sources:
        dataset_id = source.hub_id
        if dataset_id and MODEL_ID.fullmatch(dataset_id) and dataset_id not in dataset_ids:
            dataset_ids.append(dataset_id)
    return dataset_ids


def describe_data(recipe: keys.Recipe) -> str:
    """Return the names of a run's data sources, and the share of each if there are several."""
    sources = recipe.data.resolved_sources
    descriptions = [_describe_source(source) for source in sources]
    if len(sources) > 1:
        total = sum(source.weight for source in sources)
        for index, source in enumerate(sources):
            descriptions[index] += f", {source.weight / total:.0%}"
    return "; ".join(descriptions)


def _describe_source(source: keys.DataSource) -> str:
    """Return the name of a data source, with a link if it is a data set on the Hub."""
    dataset_id = source.hub_id
    if dataset_id is None:
        if source.data_dir:
            return f"the author's own files ({_list_files([source.data_dir])})"
        if source.data_files:
            return f"the author's own files ({_list_files(source.data_files)})"
        return "the source code of Python's standard library"
    text = escaped(dataset_id)
    if MODEL_ID.fullmatch(dataset_id):
        text = f"[{text}](https://huggingface.co/datasets/{dataset_id})"
    if source.dataset_config_name and not source.data_dir:
        text += f" ({escaped(source.dataset_config_name)})"
    return text


def _list_files(names: Sequence[str]) -> str:
    """Return the public names of files, or of the first ones if there are many."""
    listed = [escaped(public_file_name(name)) for name in names[:MAX_LISTED_FILES]]
    text = ", ".join(listed)
    num_others = len(names) - len(listed)
    return f"{text} and {num_others:,} more" if num_others else text


def escaped(value: object) -> str:
    """Return a value as one line that Markdown shows literally, without secrets."""
    line = " ".join(redact(str(value)).split())
    return MARKDOWN_CHARACTERS.sub(r"\\\1", line)


def code_block(code: str, language: str) -> str:
    """Return a Markdown code block, whose fence is longer than any backticks in the code."""
    longest = max((len(backticks) for backticks in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{redact(code).rstrip()}\n{fence}"
