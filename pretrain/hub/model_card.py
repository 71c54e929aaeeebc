"""README.md of a pushed model: metadata that the Hub reads, and what this run measured, in plain words."""

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
from typing import TypeGuard

import yaml

from pretrain.base import foreign
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
    if known := _known_loss(recipe)[0]:
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
    planned = "" if recipe.get("max_hours") else f" of {recipe['max_steps']:,}"  # the plan has another number
    start = f"trained on from {_text(recipe['init_from'])}" if recipe.get("init_from") else "pre-trained from scratch"
    prompt = next(iter(recipe.get("sample_prompts") or ()), "The")
    name, prompt = (json.dumps(text, ensure_ascii=False) for text in (repo_id, prompt))
    length = min(50, recipe["sequence_length"] // 2)  # prompt and completion must fit into the context
    code = f'generate = pipeline("text-generation", model={name}, revision="{step_name(step)}")\n'
    code += f'print(generate({prompt}, max_new_tokens={length})[0]["generated_text"])'
    results = _results(scored, of, recipe)
    if {"train/loss", "eval/loss"} & newest.keys():
        results.insert(0, "![Loss, learning rate and speed over tokens](curves.png)")
    if best_step is not None:
        number = len({row["step"] for row in rows if "eval/loss" in row})
        results.append(
            f"The weights are those of step {of:,}, whose validation loss is the lowest of {number} evaluations."
        )
    main = {key: recipe[key] for key in MAIN_KEYS.split() if recipe.get(key) is not None}
    record = ARCHITECTURES.get(facts.model_type)
    parts = [
        f"# {_text(recipe['run_name'])}",
        f"A {record.label if record else facts.model_type} language model of {facts.parameters / 1e6:,.1f}M parameters, "
        f"{start} on {_data(recipe)} with Ursa Minor; after step {step:,}{planned}.",
        "## Load",
        _fenced(f"from transformers import pipeline\n\n{code}", "python"),
        "Without `revision` it is the newest step.",
        *results,
        "## Recipe",
        "All numbers stand in [recipe.yaml](recipe.yaml); the main ones:",
        _fenced(yaml.safe_dump(main, sort_keys=False, allow_unicode=True), "yaml"),
        "## Training",
        _table([("", ""), *_training(rows, newest, step * recipe["tokens_per_step"], facts)]),
        "The command:",
        _fenced(shlex.join(facts.command), "sh"),
        "## Limits",
        _limits(recipe, facts.tokenizer_size),
    ]
    head, body = metadata(recipe, repo_id, _eval_results(measured, recipe)), foreign.clean("\n\n".join(parts))
    return str(ModelCard(f"{head}\n{body}\n"))  # checks the metadata


def _newest(rows: Iterable[Mapping]) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric, and its step."""
    return {name: (value, row["step"]) for row in rows for name, value in row.items() if _is_number(value)}


def metadata(recipe: Mapping, repo_id: str = "", results: Sequence = ()) -> str:
    """Return the head of a card, YAML between its fences; ``results``: EvalResults of this model."""
    from huggingface_hub import ModelCardData

    source = recipe.get("init_from")
    data = ModelCardData(
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
    return f"---\n{data.to_yaml()}\n---\n"


def _results(newest: Mapping, step: int, recipe: Mapping) -> list[str]:
    """Return the paragraphs with what was measured, and what others measured; none where nothing was."""
    others, (known, why), lines, notes = published(recipe), _known_loss(recipe), [], []
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
    if not lines:
        return []
    if "eval/loss" in newest:
        source = known and f"The published loss is from {known[2]}, on another held-out part of the same data."
        notes.append(source or f"No published loss stands beside it: {why}.")
    for task, count in items.items():
        notes.append(f"{task.label}: {count:,.0f} items.")
        shown = {whose.partition(",")[0] for score in task.scores for whose in others.get(task.metric(score), ())}
        if count == task.size:
            notes += [f"{_text(line)}." for line in task.citations if any(_is_about(line, whose) for whose in shown)]
        elif shown:
            notes.append(f"Published scores are for all {task.size:,}.")
    columns = 3 if any(beside for _, _, beside in lines) else 2
    table = _table([row[:columns] for row in [("", "this model", "published"), *lines]])
    return [f"## Results at step {step:,}", table, *([" ".join(notes)] if notes else [])]


def _is_about(source: str, whose: str) -> bool:
    """Whether a line as "GPT-2 124M, 1558M: where from" is the source of the figures of "GPT-2 1558M"."""
    return all(word in source.partition(":")[0] for word in whose.split())


def _training(rows: Sequence[Mapping], newest: Mapping, tokens: int, facts: Facts) -> list[tuple[str, str]]:
    """Return the rows of the table of what the run took."""
    flops, count, (joules, covered) = facts.flops_per_token, facts.num_processes, energy(rows)
    seconds, when = newest.get("elapsed_seconds", (0, 0))
    speeds = [row["tokens_per_second"] for row in rows if _is_number(row.get("tokens_per_second"))]
    speed = f"{statistics.median(speeds):,.0f} tokens/s, the median of {len(speeds):,} readings" if speeds else ""
    time = f"{timedelta(seconds=round(seconds))} (h:mm:ss) to step {when:,}; evaluating and saving not counted"
    used = "not measured"
    if covered:
        used = f"{joules * count / 3.6e6:.3g} kWh, the cards alone: one card's power (NVML) over "
        used += f"{covered / seconds:.0%} of the training time, times {count}"
    skipped = newest.get("skipped_updates", (0, 0))[0]
    lines = {"hardware": _text(facts.hardware), "processes": f"{count}", "precision": facts.precision}
    lines |= {"tokens": f"{tokens:,}", "training time": time if when else "", "speed": speed}
    lines["compute"] = f"{flops * tokens:.3g} FLOP, computed: {flops / 1e6:,.1f} MFLOP a token (6 N + 12 L d T)"
    lines |= {"energy": used, "updates skipped": f"{skipped:,}" if skipped else ""}
    return [line for line in lines.items() if line[1]]


def _limits(recipe: Mapping, tokenizer_size: int) -> str:
    text = (
        "- A base model: it continues a text. It follows no instructions and is not aligned; what it writes can be wrong, "
        "harmful or private. Not for use with people without checks of your own.\n"
        f"- It is small by today's measure. It knows what its data holds, errors and leanings included: {_data(recipe)}.\n"
        f"- It sees {recipe['sequence_length']:,} tokens at a time."
    )
    if recipe["vocab_size"] > tokenizer_size:
        text += (
            f"\n- Its vocabulary has {recipe['vocab_size']:,} rows, of which the tokenizer has {tokenizer_size:,}; the "
        )
        text += "rest is padding, and `generation_config.json` keeps it from being sampled."
    return text


def _eval_results(measured: Mapping[str, float], recipe: Mapping) -> list:
    """Return what the Hub shows of each figure that was measured, with the data that it was measured on."""
    from huggingface_hub import EvalResult

    names, results = _hub_data_sets(recipe), []
    loss: dict[str, str | None] = {"dataset_type": "text", "dataset_name": "text that was kept from training"}
    if len(names) == 1:
        name, subset = names[0]
        loss = {"dataset_type": name, "dataset_name": f"{name}, kept from training", "dataset_config": subset}
    own = {file.partition("=")[0] for file in recipe.get("task_files") or ()}
    for metric, (task, text) in MEASURES.items():
        if metric not in measured:
            continue
        split, _, kind = metric.partition("/")
        value, data = round(measured[metric], 4), loss | {"dataset_split": "test" if split == "test" else "validation"}
        if task:
            count, value = task.metric("items"), float(task.shown(kind, measured[metric]))
            items = f", {measured[count]:,.0f} items" if count in measured else ""
            data = {"dataset_type": task.name, "dataset_name": f"{task.label}{items}"}
            if task.name not in own:
                data |= {
                    "dataset_type": task.dataset[0],
                    "dataset_split": task.dataset[1],
                    "dataset_config": task.config,
                }
        about = {"metric_type": kind, "metric_name": text, "metric_value": value}
        results.append(EvalResult(task_type="text-generation", task_name="Text Generation", **data, **about))
    return results


def _sources(recipe: Mapping) -> list[tuple[tuple[str, str | None] | None, str]]:
    """Return of each source of the run its id and subset (None where it is not a data set), and what it is in words."""
    alone = recipe.get("data_dir") or recipe.get("data_files")
    found: list[tuple[tuple[str, str | None] | None, str]] = []
    for source in recipe["sources"] if recipe.get("sources") and not alone else [recipe]:
        name, subset = source.get("dataset_name"), source.get("dataset_config_name")
        link = "[{}](https://huggingface.co/datasets/{})"
        if fetched := REPOSITORY.fullmatch(source.get("data_dir") or ""):
            found.append(((fetched[1], None), f"the tokens of {link.format(_text(fetched[1]), fetched[1])}"))
        elif source.get("data_dir") or source.get("data_files"):
            found.append((None, f"{'token shards' if source.get('data_dir') else 'files'} of its author's"))
        elif not name or name == "python_stdlib":
            found.append((None, "the source of Python's standard library"))
        else:
            shown = link.format(_text(name), name) if HUB_ID.fullmatch(name) else f"[{_text(name)}]"
            found.append(((name, subset), f"{shown}{f' ({_text(subset)})' if subset else ''}"))
    return found


def _hub_data_sets(recipe: Mapping) -> list[tuple[str, str | None]]:
    return list(dict.fromkeys(name for name, _ in _sources(recipe) if name and HUB_ID.fullmatch(name[0])))


def _data(recipe: Mapping) -> str:
    return ", ".join(words for _, words in _sources(recipe))


def _known_loss(recipe: Mapping) -> tuple[tuple[float, str, str] | None, str]:
    """Return GPT-2's published loss that may stand beside a run of this recipe, or why none may."""
    (data_set, _), *more = _sources(recipe)
    known = None if more or not data_set else PUBLISHED_LOSS.get(data_set)
    if recipe["tokenizer"] not in GPT2_TOKENIZERS:
        return None, "this tokenizer is not known to be GPT-2's, so a token is something else"
    if known is None:
        return None, "none is known for this text"
    if recipe["sequence_length"] != GPT2_CONTEXT:
        here = recipe["sequence_length"]
        return None, f"it is for a context of {GPT2_CONTEXT:,} tokens, and this model's is {here:,}"
    return known, ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(str(value).split()))


def _fenced(text: str, language: str) -> str:
    """Return a block of code whose fence no backticks within can end."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
