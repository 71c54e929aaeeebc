"""README.md of a pushed model: metadata that the Hub reads, and what this run measured, in plain words.

Its text is model_card.jinja. Names and texts from outside go into it through ``_text`` and ``_fenced`` only.
"""

import itertools
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from pretrain.base.foreign import clean
from pretrain.base.layout import step_name
from pretrain.evaluation.items import records
from pretrain.evaluation.record import Task
from pretrain.machine.facts import Facts
from pretrain.model.architectures import ARCHITECTURES
from pretrain.recipe.keys import REPOSITORY

# Loss of OpenAI's GPT-2 124M on held-out text, context 1,024, as others measured it: nats per token, data, source. The
# 3.425 stands in a notebook that does not name its data; llm.c's runs of that week validate on FineWeb.
PUBLISHED_LOSS = {
    ("HuggingFaceFW/fineweb-edu", "sample-10BT"): (3.2924, "FineWeb-Edu", "build-nanogpt, play.ipynb"),
    ("HuggingFaceFW/fineweb", "sample-10BT"): (3.4250, "FineWeb", "llm.c, dev/vislog.ipynb"),
    ("Skylion007/openwebtext", None): (3.12, "OpenWebText", "nanoGPT, README.md"),
}
TEMPLATE = Path(__file__).with_name("model_card.jinja")
GPT2_TOKENIZERS = {"gpt2", *(f"openai-community/gpt2{size}" for size in ("", "-medium", "-large", "-xl"))}
SIZES = {(12, 768): "GPT-2 124M", (24, 1024): "GPT-2 355M", (36, 1280): "GPT-2 774M", (48, 1600): "GPT-2 1558M"}
GPT2_CONTEXT = 1024
LOSSES = {
    "eval/loss": "validation loss, nats per token",
    "eval/bits_per_byte": "validation, bits per byte",
    "test/loss": "test loss, nats per token",
    "test/bits_per_byte": "test, bits per byte",
}
TASKS = list(records().values())
# By its name in metrics: the task of a score (None: a loss of the text), and its name in words.
MEASURES: dict[str, tuple[Task | None, str]] = {name: (None, text) for name, text in LOSSES.items()} | {
    task.metric(score): (task, f"{task.label} {score} ({rule}){', %' * (score in task.shares)}")
    for task in TASKS
    for score, rule in task.scores.items()
}
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAIN_KEYS = (
    "dataset_name dataset_config_name tokenizer architecture n_layer n_head n_embd vocab_size sequence_length resid_pdrop "
    "embd_pdrop attn_pdrop tokens_per_step max_steps optimizer learning_rate lr_scheduler_type warmup_steps min_lr_ratio "
    "weight_decay adam_beta1 adam_beta2 max_grad_norm seed data_seed eval_tokens"
)


def published(recipe: Mapping) -> dict[str, dict[str, float]]:
    """Return published figures that a run of this recipe may be compared with: metric -> model -> value."""
    found: dict[str, dict[str, float]] = {}
    if known := _known_loss(recipe):
        found["eval/loss"] = {f"GPT-2 124M on {known[1]}": known[0]}
    nearest = SIZES.get((recipe["n_layer"], recipe["n_embd"]), "GPT-2 124M")
    names = {nearest: nearest} | ({"GPT-3 124M": "GPT-3 124M, its own text"} if nearest == "GPT-2 124M" else {})
    for task, (name, label) in itertools.product(TASKS, names.items()):
        for score, value in zip(task.scores, task.published.get(name, ()), strict=False):
            if value is not None:
                found.setdefault(task.metric(score), {})[label] = value / 100 if score in task.shares else value
    return found


def energy(rows: Sequence[Mapping]) -> tuple[float, float]:
    """Return the joules of the card whose ``gpu/watts`` the rows hold, and the seconds of training that they cover.

    The trapezoid between each two neighboring updates that both have a reading.
    """
    read = [(row["elapsed_seconds"], row.get("gpu/watts")) for row in rows if "elapsed_seconds" in row]
    joules = seconds = 0.0
    for (start, before), (end, after) in zip(read, read[1:], strict=False):
        if _is_number(before) and _is_number(after) and end > start:
            joules += (before + after) / 2 * (end - start)
            seconds += end - start
    return joules, seconds


def model_card(
    repo_id: str, step: int, rows: Sequence[Mapping], recipe: Mapping, facts: Facts, best_step: int | None = None
) -> str:
    """Return the README.md of the model after ``step`` updates; a figure without a row of this run is not in it.

    Args:
        repo_id: owner/name on the Hub.
        rows: of metrics.jsonl; those of later steps are left out.
        recipe: the run's keys and values, all of them.
        best_step: where the weights are from, if not from ``step``: that of the lowest validation loss.
    """
    from huggingface_hub import ModelCard

    rows = [row for row in rows if row.get("step", math.inf) <= step]
    newest, of = _newest(rows), step if best_step is None else best_step
    # The test split is scored once, with the weights that are here.
    scored = _newest(row for row in rows if row["step"] <= of or "test/loss" in row)
    measured = {name: value for name, (value, when) in scored.items() if when in (of, step)}
    record = ARCHITECTURES.get(facts.model_type)
    prompt = next(iter(recipe.get("sample_prompts") or ()), "The")
    name, prompt = (json.dumps(text, ensure_ascii=False) for text in (repo_id, prompt))
    length = min(50, recipe["sequence_length"] // 2)  # prompt and completion must fit into the context
    code = f"""from transformers import pipeline

generate = pipeline("text-generation", model={name}, revision="{step_name(step)}")
print(generate({prompt}, max_new_tokens={length})[0]["generated_text"])"""
    main = {key: recipe[key] for key in MAIN_KEYS.split() if recipe.get(key) is not None}
    seconds, when = newest.get("elapsed_seconds", (0, 0))
    speeds = [row["tokens_per_second"] for row in rows if _is_number(row.get("tokens_per_second"))]
    (joules, covered), (results, notes) = energy(rows), _results(scored, of, recipe)
    values: dict[str, Any] = {
        "text": _text,
        "fenced": _fenced,
        "recipe": recipe,
        "facts": facts,
        "step": step,
        "of": of,
    }
    values |= {"kind": record.label if record else facts.model_type, "code": code}
    values |= {"data": ", ".join(words for _, words in _sources(recipe))}
    values |= {"curves": {"train/loss", "eval/loss"} & newest.keys(), "results": results, "notes": notes}
    values |= {"published": any(beside for *_, beside in results)}
    values |= {"evaluations": len({row["step"] for row in rows if "eval/loss" in row})}
    values |= {"main": yaml.safe_dump(main, sort_keys=False, allow_unicode=True), "command": shlex.join(facts.command)}
    values |= {"tokens": step * recipe["tokens_per_step"], "time": timedelta(seconds=round(seconds)), "when": when}
    values |= {"readings": len(speeds), "speed": statistics.median(speeds or [0]), "joules": joules, "covered": covered}
    values |= {"skipped": newest.get("skipped_updates", (0, 0))[0]}
    data = metadata(recipe, repo_id, _eval_results(measured, recipe))
    return f"{ModelCard.from_template(data, template_path=str(TEMPLATE), **values)}\n"


def _newest(rows: Iterable[Mapping]) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric, and its step."""
    return {name: (value, row["step"]) for row in rows for name, value in row.items() if _is_number(value)}


def metadata(recipe: Mapping, repo_id: str = "", results: Sequence = ()) -> Any:
    """Return the ModelCardData, the head of a card; ``results``: EvalResults of this model."""
    from huggingface_hub import ModelCardData

    source = recipe.get("init_from")
    return ModelCardData(
        language=list(recipe.get("language") or ()) or None,
        license=recipe.get("license") or "unknown",
        base_model=source if source and HUB_ID.fullmatch(source) and not Path(source).exists() else None,
        datasets=[name for name, _ in _hub_data_sets(recipe)] or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *(recipe.get("tags") or ())],
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=list(results) or None,
    )


def _results(newest: Mapping, step: int, recipe: Mapping) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return lines of what was measured, how much, and what others measured; and notes on them."""
    others, known, lines, notes = published(recipe), _known_loss(recipe), [], []
    items = {task: newest[task.metric("items")][0] for task in TASKS if task.metric("items") in newest}
    for name, (task, text) in MEASURES.items():
        if name in newest:
            value, when = newest[name]
            number = partial(task.shown, name.partition("/")[2]) if task else "{:.4f}".format
            error = f" ± {number(newest[f'{name}_stderr'][0])}" if f"{name}_stderr" in newest else ""
            late = "" if when == step else f" (at step {when:,})"
            theirs = {} if task and items.get(task) != task.size else others.get(name, {})
            beside = "; ".join(f"{whose}: {number(figure)}" for whose, figure in theirs.items())
            lines.append((text, f"{number(value)}{error}{late}", beside))
    if "eval/loss" in newest and known:
        notes.append(f"The published loss is from {known[2]}, on another held-out part of the same data.")
    elif "eval/loss" in newest:
        texts = ", ".join(text for _, text, _ in PUBLISHED_LOSS.values())
        notes.append(
            f"No published loss stands beside it: those known are for GPT-2's tokenizer, a context of {GPT2_CONTEXT:,} "
            f"tokens, and one of these texts: {texts}."
        )
    for task, count in items.items():
        notes.append(f"{task.label}: {count:,.0f} items.")
        shown = {whose.partition(",")[0] for score in task.scores for whose in others.get(task.metric(score), ())}
        if count == task.size:
            notes += [f"{_text(line)}." for line in task.citations if any(_is_about(line, whose) for whose in shown)]
        elif shown:
            notes.append(f"Published scores are for all {task.size:,}.")
    return lines, notes


def _is_about(source: str, whose: str) -> bool:
    """Whether a line as "GPT-2 124M, 1558M: where from" is the source of the figures of "GPT-2 1558M"."""
    return all(word in source.partition(":")[0] for word in whose.split())


def _eval_results(measured: Mapping[str, float], recipe: Mapping) -> list:
    """Return what the Hub shows of each figure that was measured, with the data that it was measured on."""
    from huggingface_hub import EvalResult

    names, results = _hub_data_sets(recipe), []
    own = {file.partition("=")[0] for file in recipe.get("task_files") or ()}
    for metric, (task, text) in MEASURES.items():
        if metric not in measured:
            continue
        split, _, kind = metric.partition("/")
        value, subset, where, name = round(measured[metric], 4), None, "text", "text that was kept from training"
        part: str | None = "test" if split == "test" else "validation"
        if task:
            value, count = float(task.shown(kind, measured[metric])), task.metric("items")
            where, name, part = task.name, task.label, None
            if count in measured:
                name += f", {measured[count]:,.0f} items"
            if task.name not in own:
                (where, part), subset = task.dataset, task.config
        elif len(names) == 1:
            where, subset = names[0]
            name = f"{where}, kept from training"
        data = {"dataset_type": where, "dataset_name": name, "dataset_config": subset, "dataset_split": part}
        about = {"metric_type": kind, "metric_name": text, "metric_value": value}
        results.append(EvalResult(task_type="text-generation", task_name="Text Generation", **data, **about))
    return results


def _sources(recipe: Mapping) -> list[tuple[tuple[str, str | None] | None, str]]:
    """Return of each source of the run its id and subset (None where it is not a data set), and what it is in words."""
    alone = recipe.get("data_dir") or recipe.get("data_files")
    found: list[tuple[tuple[str, str | None] | None, str]] = []
    for source in recipe["sources"] if recipe.get("sources") and not alone else [recipe]:
        folder, files = source.get("data_dir") or "", source.get("data_files")
        name, subset = source.get("dataset_name"), source.get("dataset_config_name")
        if fetched := REPOSITORY.fullmatch(folder):
            found.append(((fetched[1], None), f"the tokens of {_link(fetched[1])}"))
        elif folder or files:
            found.append((None, f"{'token shards' if folder else 'files'} of its author's"))
        elif not name or name == "python_stdlib":
            found.append((None, "the source of Python's standard library"))
        else:
            found.append(((name, subset), _link(name) + (f" ({_text(subset)})" if subset else "")))
    return found


def _link(name: str) -> str:
    return f"[{_text(name)}]" + (f"(https://huggingface.co/datasets/{name})" if HUB_ID.fullmatch(name) else "")


def _hub_data_sets(recipe: Mapping) -> list[tuple[str, str | None]]:
    return list(dict.fromkeys(name for name, _ in _sources(recipe) if name and HUB_ID.fullmatch(name[0])))


def _known_loss(recipe: Mapping) -> tuple[float, str, str] | None:
    """Return GPT-2's published loss that may stand beside a run of this recipe, its text and source; None: none may."""
    (data_set, _), *more = _sources(recipe)
    alike = recipe["tokenizer"] in GPT2_TOKENIZERS and recipe["sequence_length"] == GPT2_CONTEXT
    return PUBLISHED_LOSS.get(data_set) if alike and data_set and not more else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(clean(str(value)).split()))


def _fenced(text: str, language: str) -> str:
    """Return a block of code whose fence no backticks within can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{clean(text).rstrip()}\n{fence}"
