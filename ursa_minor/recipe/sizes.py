"""Model sizes that ``--size`` selects, and their changes to a recipe.

``--size`` always sets the shape of the model. In a recipe that trains a GPT-2 of another size with
AdamW, it also sets the learning rate and the batch size that GPT-3 used for that size, and scales
the number of steps so that the run reads the same number of tokens. Explicit flags take precedence.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ursa_minor.base import wording
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import keys, rules

SHAPE_KEYS = ("n_layer", "n_head", "n_embd")
SCALED_KEYS = ("max_steps", "warmup_steps")  # max_steps not if num_train_epochs is stated
ADAMW = ("adamw", "adamw_8bit")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model size.

    Attributes:
        names: values of ``--size``.
        label: name in tables of published scores; empty if there are none.
        recipe: name of the file in recipes/ that trains this size; empty if there is none.
        learning_rate: peak learning rate with AdamW.
        tokens_per_step: batch size in tokens.
    """

    names: tuple[str, ...]
    n_layer: int
    n_head: int
    n_embd: int
    learning_rate: float
    tokens_per_step: int
    label: str = ""
    recipe: str = ""

    @property
    def shape(self) -> dict[str, int]:
        """The recipe keys of the shape and their values."""
        return {name: getattr(self, name) for name in SHAPE_KEYS}


# The shapes of GPT-2 under the names of llm.c and Transformers. Learning rates and batch sizes are
# those of the GPT-3 models of about the same number of parameters: Small, Medium, Large and XL
# (Brown et al. 2020, table 2.1). The batch sizes are rounded to powers of two, as in the recipes.
GPT2_SIZES = (
    Size(
        names=("d12", "gpt2"),
        n_layer=12,
        n_head=12,
        n_embd=768,
        learning_rate=6.0e-4,
        tokens_per_step=2**19,
        label="GPT-2 124M",
        recipe="gpt2_124m",
    ),
    Size(
        names=("d24", "gpt2-medium"),
        n_layer=24,
        n_head=16,
        n_embd=1024,
        learning_rate=3.0e-4,
        tokens_per_step=2**19,
        label="GPT-2 355M",
        recipe="gpt2_350m",
    ),
    Size(
        names=("d36", "gpt2-large"),
        n_layer=36,
        n_head=20,
        n_embd=1280,
        learning_rate=2.5e-4,
        tokens_per_step=2**19,
        label="GPT-2 774M",
        recipe="gpt2_774m",
    ),
    Size(
        names=("d48", "gpt2-xl"),
        n_layer=48,
        n_head=25,
        n_embd=1600,
        learning_rate=2.0e-4,
        tokens_per_step=2**20,
        label="GPT-2 1558M",
        recipe="gpt2_1558m",
    ),
)
# Sizes of GPT-3 itself (the same table), for the estimates of check_setup.py. 3.2M tokens are
# rounded to 3 * 2**20, which many processes can share equally.
GPT3_SIZES = (
    Size(
        names=("gpt3-125m",),
        n_layer=12,
        n_head=12,
        n_embd=768,
        learning_rate=6.0e-4,
        tokens_per_step=2**19,
    ),
    Size(
        names=("gpt3-6.7b",),
        n_layer=32,
        n_head=32,
        n_embd=4096,
        learning_rate=1.2e-4,
        tokens_per_step=2**21,
    ),
    Size(
        names=("gpt3-175b",),
        n_layer=96,
        n_head=96,
        n_embd=12288,
        learning_rate=0.6e-4,
        tokens_per_step=3 * 2**20,
    ),
)
ALL_SIZES = (*GPT2_SIZES, *GPT3_SIZES)


@dataclass(frozen=True)
class SizeChange:
    """What ``--size`` changes in a recipe.

    Attributes:
        settings: recipe keys and their new values.
        note: one line for the header of a run; empty if nothing changes.
    """

    settings: dict[str, Any]
    note: str = ""


def names_of(sizes: Sequence[Size]) -> list[str]:
    """Return the names of the sizes: the first name of each size, then the others."""
    first_names = []
    other_names = []
    for size in sizes:
        first_name, *others = size.names
        first_names.append(first_name)
        other_names += others
    return first_names + other_names


def find_size(name: str, sizes: Sequence[Size] = ALL_SIZES) -> Size:
    """Return the size with this name.

    Raises:
        BadInput: no size has this name.
    """
    for size in sizes:
        if name in size.names:
            return size
    names = names_of(sizes)
    raise BadInput(
        f"--size {name}: must be {wording.join_or(names)}{wording.did_you_mean(name, names)}"
    )


def check(name: str, flags: Collection[str], sizes: Sequence[Size] = GPT2_SIZES) -> None:
    """Raise BadInput if the size is unknown, or if other flags also set the shape."""
    problems = []
    for key in SHAPE_KEYS:
        if key in flags:
            problems.append(
                f"--size {name} and --{key} both set the shape of the model. Leave out one of them"
            )
    try:
        find_size(name, sizes)
    except BadInput as error:
        problems += error.lines
    if problems:
        raise BadInput(problems)


def change(name: str, recipe: dict[str, Any], flags: Mapping[str, Any]) -> SizeChange:
    """Return what ``--size NAME`` changes in a recipe.

    Args:
        recipe: keys and values of the recipe file, unchecked.
        flags: the other flags of the command line, as text. Their values are not replaced.
    """
    size = find_size(name)
    flag_values = {key: rules.from_text(text, key) for key, text in flags.items()}
    model = (recipe | flag_values).get("init_from")
    if model is not None:
        raise BadInput(
            f"--size {name}: init_from = {model} determines the shape of the model. "
            "Leave out --size"
        )
    if _has_shape_of(size, recipe):
        return SizeChange(size.shape)

    changes = [f"{key} = {value}" for key, value in size.shape.items()]
    reason = _why_only_the_shape_changes(recipe, recipe | flag_values)
    if reason:
        note = (
            f"size     --size {name} sets {', '.join(changes)} only. Learning rate, batch size and "
            f"number of steps are unchanged, because {reason}"
        )
        return SizeChange(size.shape, note)

    new_settings: dict[str, Any] = {}
    for key, value in _training_settings(size, recipe, flag_values).items():
        old_value = recipe.get(key)
        if value != old_value:
            new_settings[key] = value
            changes.append(f"{key} = {value} (was {old_value})")
    note = f"size     --size {name} sets {', '.join(changes)}"
    if new_settings:
        note += ". Learning rate and batch size are those of GPT-3"
        if "max_steps" in new_settings:
            note += ", and the number of tokens is unchanged"
        note += ". Explicit flags override these values"
    return SizeChange(size.shape | new_settings, note)


def _has_shape_of(size: Size, recipe: Mapping[str, Any]) -> bool:
    return all(recipe.get(key) == value for key, value in size.shape.items())


def _why_only_the_shape_changes(recipe: Mapping[str, Any], with_flags: Mapping[str, Any]) -> str:
    """Return why a size's learning rate and batch size do not suit a recipe; empty if they do.

    Args:
        recipe: keys and values of the recipe file.
        with_flags: the same, with the values of the flags.
    """
    # The recipe file counts as well: its learning rate was chosen for its own optimizer.
    for owner, settings in (("the recipe's ", recipe), ("", with_flags)):
        architecture = settings.get("architecture") or "gpt2"
        if architecture != "gpt2":
            return f"{owner}architecture = {architecture} is not GPT-2"
        optimizer = settings.get("optimizer", "adamw")
        if optimizer not in ADAMW:
            return f"{owner}optimizer = {optimizer} is not AdamW"
    if not any(_has_shape_of(size, recipe) for size in GPT2_SIZES):
        return "the recipe's own shape is not one of GPT-2's sizes"
    mlp_width = with_flags.get("intermediate_size")
    if mlp_width is not None:
        return f"intermediate_size = {mlp_width} is given"
    needed = ("tokens_per_step", "sequence_length", *SCALED_KEYS)
    for settings in (recipe, with_flags):
        for key in needed:
            if rules.key_problem(key, settings.get(key)):
                return f"{key} is not valid"  # the recipe is refused for it
    return ""


def _training_settings(
    size: Size,
    recipe: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """Return learning rate, batch size and numbers of steps for a size, except those in flags.

    Args:
        recipe: keys and values of the recipe file; those used here are valid.
        flags: keys and values of the flags; likewise.
    """
    with_flags = {**recipe, **flags}
    tokens_per_step = flags.get("tokens_per_step")
    if tokens_per_step is None:
        sequence_length = with_flags["sequence_length"]
        tokens_per_step = _batch_of_whole_sequences(size.tokens_per_step, sequence_length)

    settings = {"learning_rate": size.learning_rate, "tokens_per_step": tokens_per_step}
    for key in SCALED_KEYS:
        if recipe.get(key) is None:
            continue
        settings[key] = _same_tokens(recipe[key], recipe["tokens_per_step"], tokens_per_step)
    scales_length = "max_steps" in settings and "max_steps" not in flags
    if with_flags.get("lr_scheduler_type") == "wsd" and scales_length:
        settings["warmup_steps"] = _warmup_before_decay(settings, recipe, with_flags)
    return {key: value for key, value in settings.items() if key not in flags}


def _batch_of_whole_sequences(tokens: int, sequence_length: int) -> int:
    """Return a batch size close to ``tokens`` that consists of whole sequences.

    If ``tokens`` itself is not a multiple of the sequence length, the number of sequences is a
    multiple of a power of two (up to 64), so that several processes can share them equally. The
    result differs from ``tokens`` by at most 1/16 if a batch has 8 sequences or more.
    """
    if tokens % sequence_length == 0:
        return tokens
    sequences = tokens / sequence_length
    group = 1
    while group < 64 and 16 * group <= sequences:
        group *= 2
    return max(1, round(sequences / group)) * group * sequence_length


def _same_tokens(steps: int, old_tokens_per_step: int, new_tokens_per_step: int) -> int:
    """Return the number of steps that reads the same number of tokens with the new batch size.

    The result is at least 1, unless ``steps`` is 0.
    """
    if steps == 0:
        return 0
    return max(1, math.floor(steps * old_tokens_per_step / new_tokens_per_step + 0.5))


def _warmup_before_decay(
    settings: Mapping[str, Any],
    recipe: Mapping[str, Any],
    with_flags: Mapping[str, Any],
) -> int:
    """Return the scaled warm-up, shortened if rounding makes it overlap with the decay of wsd."""
    warmup_steps = settings["warmup_steps"]
    max_steps = settings["max_steps"]
    decay_ratio = with_flags.get("decay_ratio", keys.FIELDS["decay_ratio"].default)
    if rules.key_problem("decay_ratio", decay_ratio):
        return warmup_steps  # the recipe is refused for it

    def fits(warmup_steps: int, max_steps: int) -> bool:
        return warmup_steps + decay_ratio * max_steps <= max_steps

    # An overlap that the recipe itself has is reported later.
    if fits(warmup_steps, max_steps) or not fits(recipe["warmup_steps"], recipe["max_steps"]):
        return warmup_steps
    return math.floor((1 - decay_ratio) * max_steps)
