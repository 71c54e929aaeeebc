"""What a key's value may be, and which values go together; each fault is one line: file, key, value, rule, remedy."""

import contextlib
import difflib
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pretrain.recipe.keys import (
    ABSENT,
    ARCHITECTURES,
    FIELDS,
    SOURCE_NAMES,
    SOURCE_RULES,
    TRAINED_TOKENIZERS,
    TYPES,
    UNSHARDED,
    Auto,
)

# PyYAML, which follows YAML 1.1, reads 6e-4 and 1e5 as text: it asks for a point and a sign.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def key_faults(path: Path, name: str, value: Any) -> list[str]:
    """Return what is wrong with the value of one key."""
    field, wanted = FIELDS[name].metadata, TYPES[name]
    where = f"{path}: {name} = {shown(value)}"
    if (value is None and is_optional(wanted)) or (value == "auto" and _may_be_auto(wanted)):
        return []
    if not _fits(value, wanted):
        hint = ""
        if isinstance(value, str) and bare(wanted) in (int, float):
            with contextlib.suppress(ValueError):
                if math.isfinite(number := float(value)):
                    hint = f"; YAML reads this as text, write {_number_text(number, bare(wanted))}"
        if isinstance(value, str) and is_list(wanted) and not is_mappings(wanted):
            hint = f"; write [{value}]"
        return [f"{where}: must be {type_name(wanted)}, is {type_name(type(value))}{hint}"]
    for chosen in (value if isinstance(value, list) else [value]) if field["choices"] else ():
        if chosen not in field["choices"]:
            return [f"{where}: must be {either(field['choices'])}{nearest(chosen, field['choices'])}"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = field["low"], field["high"]
        if not low <= value <= high:  # NaN lies between nothing
            return [f"{where}: must lie between {low} and {high} ({field['help']})"]
    return []


def recipe_faults(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with values that are each what its key may be."""
    r, faults = SimpleNamespace(**values), []
    if r.tokens_per_step % r.sequence_length:
        nearest = max(1, round(r.tokens_per_step / r.sequence_length)) * r.sequence_length
        faults.append(
            f"{path}: tokens_per_step = {r.tokens_per_step} must be a multiple of sequence_length = "
            f"{r.sequence_length}; the nearest is {nearest}"
        )
    if r.n_embd and r.n_head and r.n_embd % r.n_head:
        heads = [n for n in range(1, r.n_embd + 1) if r.n_embd % n == 0]
        near = min(heads, key=lambda n: abs(n - r.n_head))
        faults.append(f"{path}: n_embd = {r.n_embd} must be a multiple of n_head = {r.n_head}; n_head {near} is")
    faults += _architecture_faults(path, r)
    if r.shard_optimizer and r.optimizer in UNSHARDED:
        faults.append(
            f"{path}: optimizer = {r.optimizer} with shard_optimizer = true: its moments cannot be shared out; use "
            f"--shard_optimizer false, or --optimizer adamw"
        )
    if r.warmup_steps > r.max_steps:
        faults.append(
            f"{path}: warmup_steps = {r.warmup_steps} is more than max_steps = {r.max_steps}: the peak would "
            f"never be reached. Use --warmup_steps {max(1, r.max_steps // 20)}"
        )
    if r.lr_scheduler_type == "wsd" and r.warmup_steps + r.decay_ratio * r.max_steps > r.max_steps:
        faults.append(
            f"{path}: warmup_steps = {r.warmup_steps} and the decay, decay_ratio = {r.decay_ratio} of max_steps = "
            f"{r.max_steps}, overlap. Use --decay_ratio {math.floor(100 * (1 - r.warmup_steps / r.max_steps)) / 100}"
        )
    if r.save_total_limit == 1:
        faults.append(
            f"{path}: save_total_limit = 1: two checkpoints are the least that survive damage to the newest one. "
            f"Use 2 or more, or 0 for all"
        )
    if r.sample_steps and not r.sample_prompts:
        faults.append(f"{path}: sample_steps = {r.sample_steps} needs sample_prompts: at least one text")
    if r.sources is not None and not (r.data_dir or r.data_files):
        faults += _mixture_faults(path, r)
    mixture = () if r.data_dir or r.data_files else r.sources or ()
    if r.stream_keep == "consumed" and (r.data_dir or any(source.get("data_dir") for source in mixture)):
        faults.append(
            f"{path}: stream_keep = consumed deletes shards that training has read, and data_dir holds yours. Use "
            f"--stream_keep all"
        )
    if "none" in (r.report_to or ()) and len(r.report_to) > 1:
        faults.append(f"{path}: report_to = {shown(r.report_to)}: none stands alone; leave it out, or the others")
    run_name = path.stem if r.run_name is None else r.run_name
    if not RUN_NAME.fullmatch(run_name):
        faults.append(f"{path}: run_name = {run_name!r}: letters, digits and . _ - only, no leading dot, at most 64")
    return faults


def _architecture_faults(path: Path, r: SimpleNamespace) -> list[str]:
    """Return what of the model's keys the architecture has not, lacks, or cannot do; init_from brings its own."""
    faults = []
    needed = ARCHITECTURES.get(r.architecture, ())
    for name, field in FIELDS.items():
        other, among = field.metadata["only"] or (None, ())
        if other == "architecture" and r.architecture not in (None, *among) and getattr(r, name) not in (None, 0):
            remedy = f"use --{name} 0" if field.default is ABSENT else "leave it out"
            faults.append(
                f"{path}: {name} = {shown(getattr(r, name))}: architecture = {r.architecture} has none; {remedy}, or use "
                f"--architecture {either(among)}"
            )
    if not r.init_from:
        wide = -(-8 * r.n_embd // 192) * 64
        usual = {"num_key_value_heads": r.n_head, "intermediate_size": wide, "tie_word_embeddings": "true"}
        for name, value in (usual | {"rope_theta": 10000.0}).items():
            if name in needed and getattr(r, name) is None:
                help = FIELDS[name].metadata["help"].removeprefix("llama: ")
                faults.append(f"{path}: architecture = {r.architecture} needs {name} ({help}); usual: --{name} {value}")
        if r.num_key_value_heads and r.n_head % r.num_key_value_heads:
            fits = [n for n in range(1, r.n_head + 1) if r.n_head % n == 0]
            faults.append(
                f"{path}: num_key_value_heads = {r.num_key_value_heads} must divide n_head = {r.n_head}; "
                f"{either(fits)} does"
            )
        if "rope_theta" in needed and r.n_embd % r.n_head == 0 and r.n_embd // r.n_head % 2:
            faults.append(
                f"{path}: n_embd / n_head = {r.n_embd // r.n_head}: rotary positions turn pairs, so it must be even"
            )
    return faults


def _mixture_faults(path: Path, r: SimpleNamespace) -> list[str]:
    """Return what is wrong with ``sources``; each is checked as the recipe's own keys are."""
    faults = []
    if not r.sources:
        faults.append(f"{path}: sources is empty: list at least one mapping with weight and dataset_name or data_files")
    if r.sources and r.tokenizer in TRAINED_TOKENIZERS:
        faults.append(
            f"{path}: tokenizer = {r.tokenizer}: a mixture needs one tokenizer for all its sources: give a Hub id or a "
            f"folder, for example the tokenizer/ that prepare_data.py made for one of them"
        )
    for number, source in enumerate(r.sources or (), 1):
        where = f"{path}: sources, number {number}"
        for name, value in source.items():
            if name == "weight":
                if not _fits(value, float) or not 0 < value < 1e300:  # YAML has integers that no float holds
                    faults.append(f"{where}: weight = {shown(value)}: must be a number above 0")
            elif name not in (*SOURCE_NAMES, *SOURCE_RULES):
                faults.append(
                    f"{where}: {name}: no such key{nearest(str(name), ('weight', *SOURCE_NAMES, *SOURCE_RULES))}"
                )
            else:
                faults += [fault.replace(f"{path}:", f"{where}:", 1) for fault in key_faults(path, name, value)]
        if "weight" not in source:
            faults.append(f"{where}: weight is missing: its share of the windows, relative to the other weights")
        if not any(source.get(name) for name in ("data_dir", "data_files", "dataset_name")):
            faults.append(f"{where}: give data_dir, data_files or dataset_name")
    return faults


def idle_flags(values: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """Return a fault for each flag that has no effect beside the others; a default or a zero does no harm."""
    faults = []
    for name in flags:
        other, among = FIELDS[name].metadata["only"] or (None, ())
        if other and values[other] not in (None, *among) and values[name] not in (None, 0, FIELDS[name].default):
            faults.append(
                f"--{name} {shown(values[name])}: has no effect with {other} = {values[other]}; leave it out, or use "
                f"--{other} {either(among)}"
            )
    return faults


def number_of(value: Any) -> Any:
    """Return the number that a text such as 6e-4 stands for, an int where it is whole; all else as it is."""
    if not isinstance(value, str) or not EXPONENT.fullmatch(value) or not math.isfinite(number := float(value)):
        return value
    return int(number) if number.is_integer() else number


def bare(wanted: Any) -> Any:
    """``int`` of ``int | None`` and of ``int | Auto``."""
    if is_optional(wanted) or _may_be_auto(wanted):
        return next(arg for arg in typing.get_args(wanted) if arg not in (type(None), Auto))
    return wanted


def is_optional(wanted: Any) -> bool:
    """Return whether a key's type allows none."""
    return type(None) in typing.get_args(wanted)


def _may_be_auto(wanted: Any) -> bool:
    return Auto in typing.get_args(wanted)


def is_list(wanted: Any) -> bool:
    """Return whether a key's type is a list."""
    return typing.get_origin(bare(wanted)) is list


def is_mappings(wanted: Any) -> bool:
    """Return whether a key's type is a list of mappings."""
    return bare(wanted) == list[dict]


def _fits(value: Any, wanted: Any) -> bool:
    wanted = bare(wanted)
    if is_mappings(wanted):
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if is_list(wanted):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def from_text(text: str | list[str], wanted: Any) -> Any:
    """Read a flag's text; raises ValueError where it is not of the wanted type."""
    kind = bare(wanted)
    if is_optional(wanted) and text in ("null", "none", ["null"], ["none"]):
        return None
    if _may_be_auto(wanted) and text == "auto":
        return text
    if is_list(wanted):
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if kind is int and isinstance(number := number_of(text), int):
        return number
    return kind(text)


def type_name(wanted: Any) -> str:
    """Return a type in plain words."""
    if is_mappings(wanted):
        return "a list of mappings"
    if is_list(wanted):
        return "a list of texts"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    name = names.get(bare(wanted), getattr(wanted, "__name__", str(wanted)))
    return f"{name}, or auto" if _may_be_auto(wanted) else name


def _number_text(number: float, wanted: type) -> str:
    if wanted is int:
        return str(int(number)) if number.is_integer() else "a whole number"
    text = repr(number)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def nearest(word: str, names, prefix: str = "") -> str:
    """Return "; did you mean X?" where a name is close to a word, else nothing."""
    match = difflib.get_close_matches(str(word), list(names), n=1)
    return f"; did you mean {prefix}{match[0]}?" if match else ""


def either(values: Sequence) -> str:
    """Return values as "a, b or c"."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
