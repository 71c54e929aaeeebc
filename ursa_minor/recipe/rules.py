"""The rules of keys' values and of their combinations; each problem is one line: key, value, rule, fix."""

import contextlib
import math
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ursa_minor.base import paths
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import did_you_mean, join_or, shorten
from ursa_minor.recipe import data_source, keys, reference_curves

# PyYAML, which follows YAML 1.1, reads 6e-4 and 1e5 as text: it asks for a point and a sign.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
# The words that HfArgumentParser of Transformers accepts for a boolean, in any case.
TRUE_WORDS = ("true", "t", "yes", "y", "1")
FALSE_WORDS = ("false", "f", "no", "n", "0")
FRACTION_RULE = (
    "must be an integer: fractions of max_steps are not supported, give the number of steps"
)
TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
TYPE_NAMES |= {list[str]: "a list of texts, as [a, b]", list[dict]: "a list of mappings"}


def key_problem(name: str, value: Any) -> str | None:
    """Return what a key's value must be, where it is not; None: it is."""
    about, value_type = keys.FIELDS[name].metadata, keys.KEY_TYPES[name]
    if (value is None and name in keys.OPTIONAL_KEYS) or (
        value == "auto" and name in keys.AUTO_KEYS
    ):
        return None
    if not _fits(value, value_type):
        must = f"must be {type_name(value_type)}{', or auto' if name in keys.AUTO_KEYS else ''}"
        if isinstance(value, str) and (unquoted := _without_quotes(value, name)):
            must += f"; YAML reads this as text, write {unquoted} without quotes"
        return must
    if value_type in (int, float):
        least, most = about["allowed"]
        # NaN is not in the range either.
        return (
            None
            if least <= value <= most
            else f"must be between {least} and {most} ({about['help']})"
        )
    for item in value if isinstance(value, list) else [value]:
        if about["allowed"] and item not in about["allowed"]:
            return f"must be {join_or(about['allowed'])}{did_you_mean(item, about['allowed'])}"
    if about["path"] == "folder" and paths.is_url(value):
        return "must be a folder on this machine, and this is a URL"
    if name == "data_dir" and value.startswith("hf://") and not keys.REPOSITORY.fullmatch(value):
        return "must be a folder, or hf://datasets/OWNER/NAME[@REVISION][/FOLDER]"
    return None


def recipe_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of values in combination."""
    r = SimpleNamespace(**values)
    if r.tokens_per_step % r.sequence_length:
        near = max(1, round(r.tokens_per_step / r.sequence_length)) * r.sequence_length
        rule = f"must be a multiple of sequence_length = {r.sequence_length}; the nearest is {near}"
        yield f"tokens_per_step = {r.tokens_per_step}: {rule}"
    if r.n_embd and r.n_head and r.n_embd % r.n_head:
        near = min(divisors(r.n_embd), key=lambda n: abs(n - r.n_head))
        yield f"n_embd = {r.n_embd}: must be a multiple of n_head = {r.n_head}; use --n_head {near}"
    if not r.init_from:  # which brings its own
        yield from _architecture_problems(r)
    if r.shard_optimizer and not keys.OPTIMIZER_CAN_SHARD[r.optimizer]:
        fix = "use --shard_optimizer false, or --optimizer adamw"
        yield f"optimizer = {r.optimizer}: its moments cannot be sharded (shard_optimizer = true); {fix}"
    decay_steps = round(r.decay_ratio * r.max_steps)  # as optim/schedule.py rounds
    if r.lr_scheduler_type == "wsd" and r.warmup_steps + decay_steps > r.max_steps:
        longest = math.floor(100 * (1 - r.warmup_steps / r.max_steps)) / 100
        shares = f"warmup_steps = {r.warmup_steps}, decay_ratio = {r.decay_ratio} of max_steps = {r.max_steps}"
        yield f"{shares}: warm-up and decay overlap. Use --decay_ratio {longest}"
    if r.save_total_limit == 1:
        yield "save_total_limit = 1: the newest checkpoint may be damaged. Use 2 or more, or 0 for all"
    if r.task_steps and not r.tasks:
        yield f"task_steps = {r.task_steps}: needs tasks, for example --tasks hellaswag"
    for file in r.task_files or ():
        if not (file.partition("=")[0] in r.tasks and file.partition("=")[2]):
            yield f"task_files = {shorten(file)}: must be NAME=FILE, with a NAME that is among tasks"
    mixture = r.sources
    if r.tokenizer in keys.TRAINED_TOKENIZERS and (mixture or r.token_column):
        reason = "a mixture" if mixture else f"token_column = {r.token_column}"
        fix = "give a Hub id, or a folder such as the tokenizer/ that prepare_data.py makes"
        yield f"tokenizer = {r.tokenizer}: is made from one source's text, and {reason} needs one that exists; {fix}"
    folders = [str(source.get("data_dir") or "hf://") for source in (values, *(mixture or ()))]
    if r.stream_keep == "consumed" and not all(folder.startswith("hf://") for folder in folders):
        yield "stream_keep = consumed: deletes shards once read, and data_dir holds yours. Use --stream_keep all"
    if not RUN_NAME.fullmatch(r.run_name):
        yield f"run_name = {shorten(r.run_name)!r}: letters, digits and . _ - only, no leading dot, at most 64"
    if r.reference_curve is not None:
        try:
            reference_curves.load(r.reference_curve)
        except BadInput as error:
            yield str(error)


def _architecture_problems(r: SimpleNamespace) -> Iterator[str]:
    """Yield the problems of the model's keys for its architecture."""
    needed = keys.ARCHITECTURE_KEYS.get(r.architecture, ())
    usual = {"num_key_value_heads": r.n_head, "intermediate_size": -(-8 * r.n_embd // 192) * 64}
    for name, value in (usual | {"tie_word_embeddings": "true", "rope_theta": 10000.0}).items():
        if name in needed and getattr(r, name) is None:
            help = keys.FIELDS[name].metadata["help"].removeprefix("llama: ")
            yield f"architecture = {r.architecture} needs {name} ({help}); usual: --{name} {value}"
    if r.num_key_value_heads and r.n_head % r.num_key_value_heads:
        heads = f"num_key_value_heads = {r.num_key_value_heads}: must divide n_head = {r.n_head}"
        yield f"{heads}; use {join_or(divisors(r.n_head))}"
    width, rest = divmod(r.n_embd, r.n_head)
    if "rope_theta" in needed and not rest and width % 2:
        yield f"n_embd / n_head = {width}: rotary positions turn pairs, so it must be even"


def source_problems(sources: Sequence[Mapping[Any, Any]] | None) -> Iterator[str]:
    """Yield the errors of a mixture. Its sources are checked like the recipe's own keys."""
    for number, source in enumerate(sources or (), 1):
        for problem in _source_problems(source):
            yield f"sources, number {number}: {problem}"


def _source_problems(source: Mapping[Any, Any]) -> Iterator[str]:
    known = ("weight", *keys.SOURCE_NAMES, *keys.SOURCE_RULES)
    for name, value in source.items():
        if name not in known:
            yield f"{name}: no such key{did_you_mean(str(name), known)}"
        elif name != "weight" and (problem := key_problem(name, value)):
            yield f"{name} = {shorten(value)}: {problem}"
    weight: Any = source.get("weight")
    if not (_fits(weight, float) and 0 < weight < math.inf):
        yield f"weight = {shorten(weight)}: must be a number above 0, its share of the windows beside the other weights"
    stated = data_source.stated_sources(source)
    if not stated:
        yield "give data_dir, data_files or dataset_name"
    if len(stated) > 1:
        yield f"{' and '.join(stated)} are different data sources; list each as a source of its own"


def ineffective_flags(values: Mapping[str, Any], flags: Collection[str]) -> Iterator[str]:
    """Yield the error of each flag that has no effect with the values of the other keys.

    Args:
        values: every key, and the modes of the command that are on.
        flags: the keys that the flags state.

    A key of another architecture is an error in a recipe file, too. Other keys without effect are permitted there,
    because the recipe.yaml of a run states every key.
    """
    for name, field in keys.FIELDS.items():
        is_model_key = field.metadata["effect"] in (keys.GPT2_ONLY, keys.LLAMA_ONLY)
        is_default = values[name] == field.default
        is_checked = name in flags or (is_model_key and not is_default)
        if not is_checked or data_source.is_off(name, values[name]):
            continue
        if data_source.has_effect(name, values):
            continue
        yield _no_effect(name, values)


def _no_effect(name: str, values: Mapping[str, Any]) -> str:
    violations = []
    is_required = keys.FIELDS[name].default is keys.ABSENT
    can_be_zero = is_required and data_source.is_off(name, 0.0)
    fixes = [f"use --{name} 0" if can_be_zero else "leave it out"]
    for violation, fix in data_source.violated_conditions(name, values):
        violations.append(violation)
        if fix:
            fixes.append(f"use {fix}")
    return f"{name} = {shorten(values[name])}: has no effect with {' and '.join(violations)}; {', or '.join(fixes)}"


def number_of(value: Any) -> Any:
    """Return the number that a text such as 6e-4 stands for, an int where it is whole; all else as it is."""
    if (
        not isinstance(value, str)
        or not EXPONENT.fullmatch(value)
        or not math.isfinite(number := float(value))
    ):
        return value
    return int(number) if number.is_integer() else number


def boolean_of(text: str) -> bool | None:
    """Return the boolean that is written as ``text`` on a command line; None if it is not one."""
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    return None


def fraction_of_steps(name: str, value: Any) -> float | None:
    """Return the fraction of ``max_steps`` that a value such as 0.1 or 10% means, or None.

    Args:
        name: a recipe key, or another option. Those that end in _steps count steps.
        value: as YAML or a flag gives it.
    """
    text = str(value)
    is_integer = text.isdecimal() or isinstance(number_of(value), int)
    if is_integer or not name.endswith("_steps"):
        return None
    try:
        fraction = float(text.removesuffix("%"))
    except ValueError:
        return None
    if text.endswith("%"):
        fraction /= 100
    is_fraction = 0 < fraction < 1 or (text.endswith("%") and fraction == 1)
    return fraction if is_fraction else None


def fraction_error(name: str, value: Any, max_steps: Any) -> str | None:
    """Return the error of a fraction as a number of steps, or None for other values."""
    fraction = fraction_of_steps(name, value)
    if fraction is None:
        return None
    if name == "max_steps" or key_problem("max_steps", max_steps):
        return FRACTION_RULE
    steps = max(1, round(fraction * max_steps))
    return f"{FRACTION_RULE}. For {fraction:.4g} of the {max_steps:,} steps use --{name} {steps}"


def _without_quotes(text: str, name: str) -> str | None:
    """Return the YAML literal to write instead of a quoted text; None if no value is meant."""
    value = from_text(text, name)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and math.isfinite(value):
        return text
    return None


def _fits(value: Any, value_type: Any) -> bool:
    if is_list(value_type):
        return isinstance(value, list) and all(
            isinstance(item, typing.get_args(value_type)) for item in value
        )
    if isinstance(value, bool) or value_type is bool:
        return isinstance(value, bool) and value_type is bool
    return isinstance(value, (int, float) if value_type is float else value_type)


def from_text(text: str | list[str], name: str) -> Any:
    """Return the value that a key's flag stands for; the text itself where it is not of the key's type."""
    value_type = keys.KEY_TYPES[name]
    if name in keys.OPTIONAL_KEYS and text in ("null", "none", ["null"], ["none"]):
        return None
    if value_type is bool:
        value = boolean_of(str(text))
        return text if value is None else value
    with contextlib.suppress(ValueError):
        if value_type in (int, float):
            return number if isinstance(number := number_of(text), int) else value_type(text)
    return text


def is_list(value_type: Any) -> bool:
    """Return whether a key's type is a list."""
    return typing.get_origin(value_type) is list


def type_name(value_type: Any) -> str:
    """Return a type in plain words."""
    return TYPE_NAMES.get(value_type, getattr(value_type, "__name__", str(value_type)))


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide another, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
