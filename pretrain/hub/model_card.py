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
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAIN_KEYS = (
    "dataset_name dataset_config_name tokenizer architecture n_layer n_head n_embd vocab_size sequence_length resid_pdrop "
    "embd_pdrop attn_pdrop tokens_per_step max_steps optimizer learning_rate lr_scheduler_type warmup_steps min_lr_ratio "
    "weight_decay adam_beta1 adam_beta2 max_grad_norm seed data_seed eval_tokens"
)
LIMITS = """\
- A base model: it continues a text. It follows no instructions and is not aligned; what it writes can be wrong, harmful
  or private. Not for use with people without checks of your own.
- It is small by today's measure. It knows what its data holds, errors and leanings included: {data}.
- It sees {length:,} tokens at a time."""


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
    rows = [row for row in rows if row.get("step", math.inf) <= step]
    of = step if best_step is None else best_step
    # The test split is scored once, with the weights that are here.
    results = _results(_newest(row for row in rows if row["step"] <= of or "test/loss" in row), of, recipe)
    if any({"train/loss", "eval/loss"} & row.keys() for row in rows):
        results.insert(0, "![Loss, learning rate and speed over tokens](curves.png)")
    if best_step is not None:
        number = len({row["step"] for row in rows if "eval/loss" in row})
        lowest = f"whose validation loss is the lowest of {number} evaluations"
        results.append(f"The weights are those of step {of:,}, {lowest}.")
    planned = "" if recipe.get("max_hours") else f" of {recipe['max_steps']:,}"  # the plan has another number
    start = f"trained on from {_text(recipe['init_from'])}" if recipe.get("init_from") else "pre-trained from scratch"
    prompt = next(iter(recipe.get("sample_prompts") or ()), "The")
    name, prompt = (json.dumps(text, ensure_ascii=False) for text in (repo_id, prompt))
    length = min(50, recipe["sequence_length"] // 2)  # prompt and completion must fit into the context
    code = [
        "from transformers import pipeline",
        "",
        f'generate = pipeline("text-generation", model={name}, revision="{step_name(step)}")',
        f'print(generate({prompt}, max_new_tokens={length})[0]["generated_text"])',
    ]
    main = {key: recipe[key] for key in MAIN_KEYS.split() if recipe.get(key) is not None}
    record = ARCHITECTURES.get(facts.model_type)
    data = ", ".join(words for _, words in _sources(recipe))
    parts = [
        f"# {_text(recipe['run_name'])}",
        f"A {record.label if record else facts.model_type} language model of "
        f"{facts.parameters / 1e6:,.1f}M parameters, {start} on {data} with Ursa Minor; after step {step:,}{planned}.",
        "## Load",
        _fenced("\n".join(code), "python"),
        "Without `revision` it is the newest step.",
        *results,
        "## Recipe",
        "All numbers stand in [recipe.yaml](recipe.yaml); the main ones:",
        _fenced(yaml.safe_dump(main, sort_keys=False, allow_unicode=True), "yaml"),
        "## Training",
        _table([("", ""), *_training(rows, step * recipe["tokens_per_step"], facts)]),
        "The command:",
        _fenced(shlex.join(facts.command), "sh"),
        "## Limits",
        LIMITS.format(data=data, length=recipe["sequence_length"]),
    ]
    body = foreign.clean("\n\n".join(parts))
    return f"{metadata(recipe)}\n{body}\n"


def metadata(recipe: Mapping) -> str:
    """Return the head of a card, YAML between its fences."""
    from huggingface_hub import ModelCardData

    source = recipe.get("init_from")
    names = [found[0] for found, _ in _sources(recipe) if found and HUB_ID.fullmatch(found[0])]
    data = ModelCardData(
        language=list(recipe.get("language") or ()) or None,
        license=recipe.get("license") or "unknown",
        base_model=source if source and HUB_ID.fullmatch(source) and not Path(source).exists() else None,
        datasets=list(dict.fromkeys(names)) or None,
        pipeline_tag="text-generation",
        library_name="transformers",
        tags=["ursa-minor", *(recipe.get("tags") or ())],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _newest(rows: Iterable[Mapping]) -> dict[str, tuple[float, int]]:
    """Return the last value of each metric, and its step."""
    return {name: (value, row["step"]) for row in rows for name, value in row.items() if _is_number(value)}


def _results(newest: Mapping[str, tuple[float, int]], step: int, recipe: Mapping) -> list[str]:
    """Return the paragraphs with what was measured, and what others measured; none where nothing was."""
    others, known, notes = published(recipe), _known_loss(recipe), []
    rows = [(name, text, "{:.4f}".format, others.get(name, {})) for name, text in LOSSES.items()]
    if "eval/loss" in newest and known:
        notes.append(f"The published loss is from {known[2]}, on another held-out part of the same data.")
    for task in TASKS:
        items, _ = newest.get(task.metric("items"), (0, 0))
        for score, rule in task.scores.items():
            name, text = task.metric(score), f"{task.label} {score} ({rule}){', %' * (score in task.shares)}"
            rows.append((name, text, partial(task.shown, score), others.get(name, {}) if items == task.size else {}))
        if items:
            notes.append(f"{task.label}: {items:,.0f} of its {task.size:,} items.")
            notes += [f"{_text(line)}." for line in task.citations if items == task.size]
    lines = [("", "this model", "published")]
    for name, text, number, theirs in rows:
        if name in newest:
            value, when = newest[name]
            error = f" ± {number(newest[f'{name}_stderr'][0])}" if f"{name}_stderr" in newest else ""
            late = "" if when == step else f" (at step {when:,})"
            beside = "; ".join(f"{whose}: {number(figure)}" for whose, figure in theirs.items())
            lines.append((text, f"{number(value)}{error}{late}", beside))
    return [f"## Results at step {step:,}", _table(lines), " ".join(notes)] if len(lines) > 1 else []


def _training(rows: Sequence[Mapping], tokens: int, facts: Facts) -> list[tuple[str, str]]:
    """Return the rows of the table of what the run took."""
    lines = [("hardware", _text(facts.hardware)), ("processes", f"{facts.num_processes}")]
    lines += [("precision", facts.precision), ("tokens", f"{tokens:,}")]
    newest, flops = _newest(rows), facts.flops_per_token
    if "elapsed_seconds" in newest:
        seconds, when = newest["elapsed_seconds"]
        shown = timedelta(seconds=round(seconds))
        lines.append(("training time", f"{shown} (h:mm:ss) to step {when:,}; evaluating and saving not counted"))
    if speeds := [row["tokens_per_second"] for row in rows if _is_number(row.get("tokens_per_second"))]:
        lines.append(("speed", f"{statistics.median(speeds):,.0f} tokens/s, the median of {len(speeds):,} readings"))
    lines.append(("compute", f"{flops * tokens:.3g} FLOP, computed: {flops / 1e6:,.1f} MFLOP a token (6 N + 12 L d T)"))
    if skipped := newest.get("skipped_updates", (0, 0))[0]:
        lines.append(("updates skipped", f"{skipped:,}"))
    return lines


def _sources(recipe: Mapping) -> list[tuple[tuple[str, str | None] | None, str]]:
    """Return of each source of the run its id and subset (None where it is not a data set), and what it is in words."""
    alone = recipe.get("data_dir") or recipe.get("data_files")
    found: list[tuple[tuple[str, str | None] | None, str]] = []
    for source in recipe["sources"] if recipe.get("sources") and not alone else [recipe]:
        name, subset = source.get("dataset_name"), source.get("dataset_config_name")
        if fetched := REPOSITORY.fullmatch(source.get("data_dir") or ""):
            link = f"https://huggingface.co/datasets/{fetched[1]}"
            found.append(((fetched[1], None), f"the tokens of [{_text(fetched[1])}]({link})"))
        elif source.get("data_dir"):
            found.append((None, "token shards of its author's"))
        elif source.get("data_files"):
            found.append((None, "files of its author's"))
        elif not name or name == "python_stdlib":
            found.append((None, "the source of Python's standard library"))
        else:
            link = f"(https://huggingface.co/datasets/{name})" if HUB_ID.fullmatch(name) else ""
            found.append(((name, subset), f"[{_text(name)}]{link}{f' ({_text(subset)})' if subset else ''}"))
    return found


def _known_loss(recipe: Mapping) -> tuple[float, str, str] | None:
    """Return GPT-2's published loss that may stand beside a run of this recipe: same data, tokenizer and context."""
    (data_set, _), *more = _sources(recipe)
    same = recipe["tokenizer"] in GPT2_TOKENIZERS and recipe["sequence_length"] == GPT2_CONTEXT
    return PUBLISHED_LOSS.get(data_set) if data_set and same and not more else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _text(value: object) -> str:
    """Return one line of text that Markdown shows as it stands."""
    return re.sub(r"([\\`*_\[\]<>#|~$&!])", r"\\\1", " ".join(str(value).split()))


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
