"""Rules for the values of single keys and for combinations of values.

Each problem is one line: the key and its value, the rule, and a fix.
"""

import contextlib
import math
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ursa_minor.base import paths
from ursa_minor.base.wording import did_you_mean, join_or, shorten
from ursa_minor.recipe import data_source, kept_steps, keys, reference_curves
from ursa_minor.recipe.source_kind import URL_SCHEMES, SourceKind, source_kind

# Numbers such as 6e-4 and 1e5. PyYAML follows YAML 1.1, which requires a point and a sign in
# numbers with an exponent, and reads these as strings.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
# The words that HfArgumentParser of Transformers accepts for a boolean, in any case.
TRUE_WORDS = ("true", "t", "yes", "y", "1")
FALSE_WORDS = ("false", "f", "no", "n", "0")
BLANK_LINE_TYPO = re.compile(r"(blank|empty)[-_ ]?lines?", re.IGNORECASE)
# Conditions of keys that must not be stated in a recipe file where they have no effect.
CHECKED_IN_FILES = (keys.GPT2_ONLY, keys.LLAMA_ONLY, keys.TEXT_FILES)
FRACTION_RULE = "must be an integer number of steps; fractions of max_steps are not supported"
LENGTH_KEYS = ("max_steps", "num_train_epochs")  # a recipe states one of them
TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list[str]: "a list of texts, such as [a, b]",
    list[dict]: "a list of mappings",
}


def key_problem(name: str, value: Any) -> str | None:
    """Return the rule that the value of a key breaks, or None if the value is valid.

    The rule continues the sentence "NAME = VALUE: ...", as in "must be an integer".
    """
    metadata = keys.FIELDS[name].metadata
    value_type = keys.KEY_TYPES[name]
    is_none = value is None and name in keys.OPTIONAL_KEYS
    is_auto = value == "auto" and name in keys.AUTO_KEYS
    if is_none or is_auto:
        return None
    if name == "keep_checkpoints":
        return kept_steps.find_problem(value)
    if not _has_type(value, value_type):
        return _type_rule(name, value)
    if value_type in (int, float):
        least, most = metadata["allowed"]
        is_in_range = least <= value <= most  # false for NaN
        return None if is_in_range else f"must be between {least} and {most}"

    choices = metadata["allowed"]
    items = value if isinstance(value, list) else [value]
    for item in items:
        if choices and item not in choices:
            return f"must be {join_or(choices)}{did_you_mean(item, choices)}"
    return _rule_of_text(name, value)


def _rule_of_text(name: str, value: Any) -> str | None:
    """Return the rule that the text of a key breaks, or None. Other values break none."""
    if keys.FIELDS[name].metadata["path"] == "folder" and paths.is_url(value):
        return "must be a folder on this machine, not a URL"
    if name == "data_dir" and value.startswith("hf://") and not keys.REPOSITORY.fullmatch(value):
        return "must be a folder, or hf://datasets/OWNER/NAME[@REVISION][/FOLDER]"
    if name == "document_separator":
        return _separator_rule(value)
    if name in ("dataset_split", "validation_split") and not keys.SPLIT_NAME.fullmatch(value):
        return _split_rule(value)
    return None


def _separator_rule(value: str) -> str | None:
    """Return the rule that a document_separator breaks, or None."""
    if BLANK_LINE_TYPO.fullmatch(value) and value != keys.BLANK_LINE:
        return f"is not a known value. Did you mean {keys.BLANK_LINE}?"
    if "\\r\\n" in value:
        return "contains \\r, which is not an escape. Use \\n, which also matches \\r\\n"
    if not keys.separator_text(value).strip(" \t\r"):
        return (
            "must contain a line break or a character that is not white space. Use blank_line "
            "for documents between blank lines, or null if each file is one document"
        )
    return None


def _split_rule(split: str) -> str:
    """Return the rule for the name of a split. The value is a slice, a sum or another text."""
    rule = "must be the name of one split, such as train or validation"
    if "[" in split:
        name = split.partition("[")[0] or keys.DEFAULT_SPLIT
        return (
            f"{rule}. A slice would depend on the number of rows, which is not known while a data "
            f"set is streamed. Use {name}, and limit the training text with --limit_tokens N and "
            f"the validation text with --validation_tokens N"
        )
    if "+" in split:
        return f"{rule}. To read several splits, list each as a source of a mixture (sources)"
    return rule


def _type_rule(name: str, value: Any) -> str:
    """Return the rule for the type of a key, and a hint if quotes make the value a string."""
    rule = f"must be {type_name(keys.KEY_TYPES[name])}"
    if name in keys.AUTO_KEYS:
        rule += ", or auto"
    literal = _without_quotes(value, name) if isinstance(value, str) else None
    if literal is None:
        return rule
    return f"{rule}. YAML reads this as text because of the quotes. Write {literal} without quotes"


def recipe_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in combinations of values.

    Args:
        values: every key, with values that have passed ``key_problem``.
    """
    recipe = SimpleNamespace(**values)
    yield from _shape_problems(recipe)
    if not recipe.init_from:  # the architecture of another model is known when it is loaded
        yield from _architecture_problems(recipe)
    yield from _optimizer_problems(recipe)
    if recipe.max_steps is not None:
        yield from length_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _data_problems(recipe)
    if not RUN_NAME.fullmatch(recipe.run_name):
        yield (
            f"run_name = {shorten(recipe.run_name)!r}: must consist of 1 to 64 letters, digits, "
            "dots, underscores and hyphens, and must not begin with a dot"
        )
    if recipe.reference_curve is not None:
        yield from reference_curves.problems(recipe.reference_curve, recipe.tokenizer)


def _shape_problems(recipe: SimpleNamespace) -> Iterator[str]:
    """Yield the errors of sizes that must be multiples of each other."""
    length = recipe.sequence_length
    if recipe.tokens_per_step % length:
        nearest = max(1, round(recipe.tokens_per_step / length)) * length
        yield (
            f"tokens_per_step = {recipe.tokens_per_step}: must be a multiple of "
            f"sequence_length = {length}. Use --tokens_per_step {nearest}"
        )
    if recipe.n_embd and recipe.n_head and recipe.n_embd % recipe.n_head:
        nearest = min(divisors(recipe.n_embd), key=lambda heads: abs(heads - recipe.n_head))
        yield (
            f"n_embd = {recipe.n_embd}: must be a multiple of n_head = {recipe.n_head}. "
            f"Use --n_head {nearest}"
        )


def _architecture_problems(recipe: SimpleNamespace) -> Iterator[str]:
    """Yield the errors of the model's keys for its architecture."""
    needed = keys.ARCHITECTURE_KEYS.get(recipe.architecture, ())
    mlp_width = 64 * math.ceil(8 * recipe.n_embd / 192)  # 8/3 n_embd, rounded up
    usual_values = {
        "num_key_value_heads": recipe.n_head,
        "intermediate_size": mlp_width,
        "tie_word_embeddings": "true",
        "rope_theta": 10000.0,
    }
    for name, value in usual_values.items():
        if name in needed and getattr(recipe, name) is None:
            yield (
                f"architecture = {recipe.architecture}: this architecture also needs {name}. "
                f"Use, for example, --{name} {value}"
            )
    key_value_heads = recipe.num_key_value_heads
    if key_value_heads and recipe.n_head % key_value_heads:
        yield (
            f"num_key_value_heads = {key_value_heads}: must divide n_head = {recipe.n_head}. "
            f"Use {join_or(divisors(recipe.n_head))}"
        )
    head_size, remainder = divmod(recipe.n_embd, recipe.n_head)
    has_rotary_embeddings = "rope_theta" in needed
    if has_rotary_embeddings and not remainder and head_size % 2:
        yield (
            f"n_embd / n_head = {head_size}: must be even for rotary position embeddings. "
            "Change n_embd or n_head"
        )


def _optimizer_problems(recipe: SimpleNamespace) -> Iterator[str]:
    """Yield the errors of the optimizer."""
    if recipe.shard_optimizer and not keys.OPTIMIZER_CAN_SHARD[recipe.optimizer]:
        yield (
            f"optimizer = {recipe.optimizer}: its moments cannot be sharded "
            "(shard_optimizer = true). Use --shard_optimizer false, or --optimizer adamw"
        )


def several_lengths(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the error of a file or a command line that states the length of the run twice.

    Args:
        values: the keys and values of the file, or of the flags.
        where: the prefix of the keys in the message: ``--`` for flags.
    """
    names = [f"{where}{name}" for name in LENGTH_KEYS if values.get(name) is not None]
    if len(names) > 1:
        yield f"{' and '.join(names)} both state the length of the run. Keep one of them"


def length_problems(recipe: SimpleNamespace | keys.Schedule) -> Iterator[str]:
    """Yield the errors of the learning rate schedule for the length of the run.

    Args:
        recipe: the keys of the schedule as attributes. ``max_steps`` is known.
    """
    max_steps = recipe.max_steps
    assert max_steps is not None
    decay_steps = round(recipe.decay_ratio * max_steps)  # rounded as in optim/schedule.py
    has_overlap = recipe.warmup_steps + decay_steps > max_steps
    if recipe.lr_scheduler_type == "wsd" and has_overlap:
        longest = math.floor(100 * (1 - recipe.warmup_steps / max_steps)) / 100
        yield (
            f"warmup_steps = {recipe.warmup_steps}: the warm-up and the decay phase "
            f"(decay_ratio = {recipe.decay_ratio} of max_steps = {max_steps}) overlap. "
            f"Use --decay_ratio {longest}"
        )


def epoch_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why the length of a run in epochs cannot be computed before training.

    Args:
        values: every key.
    """
    if values["num_train_epochs"] is None:
        return
    if values["stream_keep"] == "consumed":
        yield (
            "stream_keep = consumed: shards are deleted after use, but the number of steps of "
            "num_train_epochs is known only when all data is prepared. State the length of the "
            "run as --max_steps N, or use --stream_keep all"
        )
    setting = f"num_train_epochs = {values['num_train_epochs']:g}"
    sources = values["sources"] or [values]
    for number, source in enumerate(sources, 1):
        stream = _unknown_length(source)
        if stream is None:
            continue
        place = f"source number {number}, {stream}," if values["sources"] else stream
        yield (
            f"{setting}: the length of {place} is not known before the text has been read. State "
            f"the length of the run as --max_steps N, or use a prepared folder (data_dir)"
        )


def _unknown_length(source: Mapping[str, Any]) -> str | None:
    """Return what a source is if its length is not known before it is read, else None."""
    kind = source_kind(source)
    if kind is SourceKind.DATASET:
        return f"the Hub data set {source['dataset_name']}"
    has_files = kind in (SourceKind.TEXT, SourceKind.TABLES)
    if has_files and any(name.startswith(URL_SCHEMES) for name in source["data_files"]):
        return "data_files behind URLs"
    return None


def _evaluation_problems(recipe: SimpleNamespace) -> Iterator[str]:
    """Yield the errors of checkpoints and tasks."""
    if recipe.save_total_limit == 1:
        yield (
            "save_total_limit = 1: one checkpoint is not enough, because it may be corrupted. "
            "Use 2 or more, or 0 to keep all checkpoints"
        )
    if recipe.task_steps and not recipe.tasks:
        yield f"task_steps = {recipe.task_steps}: no tasks are set. Use, for example, --tasks piqa"
    for assignment in recipe.task_files or ():
        task, _, file = assignment.partition("=")
        if task not in recipe.tasks or not file:
            setting = f"task_files = {shorten(assignment)}"
            yield f"{setting}: must be NAME=PATH, where NAME is one of tasks"


def _data_problems(recipe: SimpleNamespace) -> Iterator[str]:
    """Yield the errors of the tokenizer and the data source."""
    sources = recipe.sources or ()
    if recipe.tokenizer in keys.TRAINED_TOKENIZERS and (sources or recipe.token_column):
        reason = "a mixture" if sources else f"token_column = {recipe.token_column}"
        yield (
            f"tokenizer = {recipe.tokenizer}: this tokenizer is trained on the text of one source, "
            f"but {reason} needs an existing tokenizer. Use a Hub id, or a folder such as the "
            "tokenizer/ that prepare_data.py writes"
        )
    folders = [recipe.data_dir, *(source.get("data_dir") for source in sources)]
    has_local_shards = any(folder and not folder.startswith("hf://") for folder in folders)
    if recipe.stream_keep == "consumed" and has_local_shards:
        yield (
            "stream_keep = consumed: shards are deleted after use, but data_dir contains your own. "
            "Use --stream_keep all"
        )
    yield from _split_problems(recipe.dataset_split, recipe.validation_split)
    for number, source in enumerate(sources, 1):
        train_split = source.get("dataset_split", recipe.dataset_split)
        for problem in _split_problems(train_split, source.get("validation_split")):
            yield f"sources, number {number}: {problem}"


def _split_problems(train_split: str, validation_split: str | None) -> Iterator[str]:
    """Yield the error of a source that would be validated on the split that it is trained on."""
    if validation_split == train_split:
        yield (
            f"validation_split = {validation_split}: is also dataset_split, so the model would be "
            f"trained on its validation text. Leave validation_split out to hold out the first "
            f"documents of {train_split}"
        )


def source_problems(sources: Sequence[Mapping[Any, Any]] | None) -> Iterator[str]:
    """Yield the errors of a mixture. Its sources are checked like the recipe's own keys."""
    for number, source in enumerate(sources or (), 1):
        for problem in _problems_of_source(source):
            yield f"sources, number {number}: {problem}"


def _problems_of_source(source: Mapping[Any, Any]) -> Iterator[str]:
    known = ("weight", *keys.SOURCE_NAMES, *keys.SOURCE_RULES)
    for name, value in source.items():
        if name not in known:
            yield f"{name}: no such key{did_you_mean(str(name), known)}"
        elif name != "weight":
            problem = key_problem(name, value)
            if problem:
                yield f"{name} = {shorten(value)}: {problem}"

    weight: Any = source.get("weight")
    is_positive = _has_type(weight, float) and 0 < weight < math.inf
    if not is_positive:
        yield (
            f"weight = {shorten(weight)}: must be a positive number, the share of this source "
            "relative to the weights of the other sources"
        )
    yield from _separator_problems(source)
    stated = data_source.stated_sources(source)
    if not stated:
        yield "no data source is named. Add data_dir, data_files or dataset_name"
    if len(stated) > 1:
        yield f"{' and '.join(stated)} are different data sources. List each as a separate source"


def _separator_problems(source: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the error of a source of a mixture that is not text but states a separator."""
    separator = source.get("document_separator")
    files = source.get("data_files")
    if not separator or (files and key_problem("data_files", files)):
        return
    kind = source_kind(source)
    if kind not in (None, SourceKind.TEXT):
        yield (
            f"document_separator = {shorten(separator)}: has no effect with {kind.value} as the "
            "data source, because only text files are split. Leave it out"
        )


def ineffective_flags(values: Mapping[str, Any], flags: Collection[str]) -> Iterator[str]:
    """Yield the error of each flag that has no effect with the values of the other keys.

    A key of another architecture and a document_separator are errors in a recipe file as well.
    Other keys without effect are permitted there, because the recipe.yaml of a run states every
    key.

    Args:
        values: every key, and the modes of the command that are on.
        flags: the keys that the flags state.
    """
    for name, field in keys.FIELDS.items():
        is_checked_in_files = field.metadata["effect"] in CHECKED_IN_FILES
        is_default = values[name] == field.default
        is_checked = name in flags or (is_checked_in_files and not is_default)
        if not is_checked or data_source.is_off(name, values[name]):
            continue
        if data_source.has_effect(name, values):
            continue
        yield _no_effect(name, values)


def _no_effect(name: str, values: Mapping[str, Any]) -> str:
    """Return the error of a key that has no effect."""
    is_required = keys.FIELDS[name].default is keys.ABSENT
    can_be_zero = is_required and data_source.is_off(name, 0.0)
    fixes = [f"Use --{name} 0" if can_be_zero else "Leave it out"]
    reasons = []
    for violation, fix in data_source.violated_conditions(name, values):
        reasons.append(violation)
        if fix:
            fixes.append(f"use {fix}")
    setting = f"{name} = {shorten(values[name])}"
    return f"{setting}: has no effect with {' and '.join(reasons)}. {', or '.join(fixes)}"


def number_of(value: Any) -> Any:
    """Return the number that a text such as 6e-4 denotes, and any other value unchanged.

    A number without a fractional part is returned as an int.
    """
    if not isinstance(value, str) or not EXPONENT.fullmatch(value):
        return value
    number = float(value)
    if not math.isfinite(number):
        return value
    return int(number) if number.is_integer() else number


def boolean_of(text: str) -> bool | None:
    """Return the boolean that a text on the command line denotes, or None if it is not one."""
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    return None


def fraction_of_steps(name: str, value: Any) -> float | None:
    """Return the fraction of ``max_steps`` that a value such as 0.1 or 10% means, or None.

    Args:
        name: a recipe key, or another option. Those that end in _steps are numbers of steps.
        value: the value from YAML, or the text of a flag.
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
    """Return the rule that a fraction as a number of steps breaks, or None for other values."""
    fraction = fraction_of_steps(name, value)
    if fraction is None:
        return None
    if name == "max_steps" or max_steps is None or key_problem("max_steps", max_steps):
        return FRACTION_RULE
    steps = max(1, round(fraction * max_steps))
    return f"{FRACTION_RULE}. For {fraction:.4g} of the {max_steps:,} steps use --{name} {steps}"


def _without_quotes(text: str, name: str) -> str | None:
    """Return the YAML literal to write instead of a string in quotes, or None if there is none."""
    value = from_text(text, name)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and math.isfinite(value):
        return text
    return None


def _has_type(value: Any, value_type: Any) -> bool:
    """Return whether a value has the type of a key.

    An int is accepted as a float. A bool is not accepted as a number, although it is an int.
    """
    if is_list(value_type):
        (item_type,) = typing.get_args(value_type)
        return isinstance(value, list) and all(isinstance(item, item_type) for item in value)
    if isinstance(value, bool) or value_type is bool:
        return isinstance(value, bool) and value_type is bool
    if value_type is float:
        return isinstance(value, (int, float))
    return isinstance(value, value_type)


def from_text(text: str | list[str], name: str) -> Any:
    """Return the value of a flag, or its text if that does not have the type of the key.

    Args:
        text: the value as typed. Flags that take lists have a list of texts.
        name: the key.
    """
    value_type = keys.KEY_TYPES[name]
    if name in keys.OPTIONAL_KEYS and text in ("null", "none", ["null"], ["none"]):
        return None
    if value_type is bool:
        value = boolean_of(str(text))
        return text if value is None else value
    if value_type not in (int, float):
        return text
    number = number_of(text)
    if isinstance(number, int):
        return number
    with contextlib.suppress(ValueError):
        return value_type(text)
    return text


def is_list(value_type: Any) -> bool:
    """Return whether the type of a key is a list."""
    return typing.get_origin(value_type) is list


def type_name(value_type: Any) -> str:
    """Return the name of a type for messages."""
    return TYPE_NAMES.get(value_type, getattr(value_type, "__name__", str(value_type)))


def divisors(number: int) -> list[int]:
    """Return the integers that divide another one, smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
