"""Check before a run that the model has an embedding for each id of the recipe's tokenizer."""

from transformers import AutoConfig

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.model import pretrained
from ursa_minor.model.architectures import padded_vocab_size
from ursa_minor.model.resolve import resolve_model
from ursa_minor.model.vocabulary import missing_rows_message, rows_needed
from ursa_minor.recipe import keys


def check_tokenizer_fits(recipe: keys.Recipe, stated_rows: int | None) -> None:
    """Check that the embedding of ``init_from`` has a row for each id of the recipe's tokenizer.

    A recipe that states ``vocab_size`` may add rows to the embedding. Without it, only rows of
    padding are added, and a tokenizer with more ids is considered a mistake.

    Args:
        recipe: a complete recipe (``pretrained.complete``).
        stated_rows: its ``vocab_size`` before it was completed.

    Raises:
        BadInput: the tokenizer has ids for which the embedding would have no row.
    """
    init_from = recipe.model.init_from
    name = recipe.data.tokenizer
    if init_from is None or name in keys.TRAINED_TOKENIZERS:
        return
    where = f"init_from = {init_from}"
    rows = stated_rows
    if rows is None:
        path = resolve_model(init_from, "init_from = ")
        rows = pretrained.from_pretrained(where, AutoConfig, path).vocab_size
    needed = rows_needed(pretrained_tokenizer.load(name))
    if needed <= rows:
        return
    if stated_rows is None:
        advice = f", or add rows with --vocab_size {padded_vocab_size(needed)}"
        raise BadInput(missing_rows_message(where, needed, rows) + advice)
    raise BadInput(
        f"vocab_size = {rows} is too small: the largest id of the tokenizer is {needed - 1}. "
        f"Use --vocab_size {padded_vocab_size(needed)}"
    )
