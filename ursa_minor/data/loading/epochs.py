"""Suggest how often a small text is read."""

import math

from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import MANY_EPOCHS

# How often texts of at most this many bytes are read (docs/own_text.md). The first row was measured
# with texts of up to 1 MB and models of width 128 (benchmarks/epochs_screen.py). The second row is
# extrapolated.
EPOCHS_BY_SIZE = ((4_000_000, 10), (20_000_000, 5))
BYTES_PER_TOKEN = 4  # of a text whose bytes are not known
# A note is logged if a text is read more often than suggested by this factor.
TOLERANCE = 1.25


def suggested_epochs(text_bytes: float) -> int:
    """Return how often a text should be read at most.

    Args:
        text_bytes: size of the training text in bytes.

    Returns:
        The number of epochs in ``EPOCHS_BY_SIZE`` for a small text, else ``MANY_EPOCHS``.
    """
    for most_bytes, epochs in EPOCHS_BY_SIZE:
        if text_bytes <= most_bytes:
            return epochs
    return MANY_EPOCHS


def note_on_epochs(
    recipe: keys.Recipe, text_bytes: float, num_tokens: int, tokens_read: int
) -> str:
    """Return advice for a run that reads a text too often, or an empty string.

    Args:
        recipe: of the run. It determines the option that the advice names.
        text_bytes: size of the training text in bytes, or 0 if it is not known.
        num_tokens: size of the training text in tokens.
        tokens_read: number of tokens of this text that the run reads.
    """
    text_bytes = text_bytes or BYTES_PER_TOKEN * num_tokens
    suggested = suggested_epochs(text_bytes)
    epochs = tokens_read / max(1, num_tokens)
    if epochs <= TOLERANCE * suggested:
        return ""

    note = (
        f"the run reads this text of {_size(text_bytes)} {epochs:.3g} times. For this size, "
        f"about {suggested} times are enough (docs/own_text.md). Later, the model mostly "
        f"memorizes the text, and the validation loss rises. "
    )
    has_one_source = len(recipe.data.resolved_sources) == 1
    if not has_one_source:
        note += "Use a lower weight for this source, or train for fewer steps"
    elif recipe.schedule.num_train_epochs is not None:
        note += f"Use --num_train_epochs {suggested}"
    else:
        steps = math.ceil(suggested * num_tokens / recipe.batch.tokens_per_step)
        note += f"Use --max_steps {steps}"
    if recipe.saving.load_best_model_at_end:
        note += "; model/ will contain the weights with the lowest validation loss in any case"
    return note


def _size(num_bytes: float) -> str:
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:.2g} MB"
    return f"{num_bytes / 1e9:.2g} GB"
