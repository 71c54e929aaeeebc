"""Checks that a model has an embedding for each id of its tokenizer."""

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.model import pretrained
from ursa_minor.model.architectures import padded
from ursa_minor.model.resolve import find
from ursa_minor.recipe import keys


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return 1 + the largest id of a tokenizer, which exceeds ``len(tokenizer)`` if ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def refuse_missing_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise BadInput if the tokenizer has ids beyond the rows of the model's embedding.

    Args:
        where: beginning of the message: the option and its value.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    needed = rows_needed(tokenizer)
    if needed > rows:
        raise BadInput(_message(where, needed, rows))


def refuse_larger_tokenizer(recipe: keys.Recipe, stated_rows: int | None) -> None:
    """Raise BadInput if the tokenizer of a recipe has ids beyond the embedding of ``init_from``.

    A recipe that states ``vocab_size`` may add rows to the embedding. Without it, only rows of
    padding are added, and a tokenizer with more ids is taken for a mistake.

    Args:
        recipe: a complete recipe (``pretrained.complete``).
        stated_rows: its ``vocab_size`` before it was completed.
    """
    init_from = recipe.model.init_from
    name = recipe.data.tokenizer
    if init_from is None or name in keys.TRAINED_TOKENIZERS:
        return
    where = f"init_from = {init_from}"
    rows = stated_rows
    if rows is None:
        rows = pretrained.loaded(where, AutoConfig, find(init_from, "init_from = ")).vocab_size
    needed = rows_needed(tokenization.load(name))
    if needed <= rows:
        return
    if stated_rows is None:
        advice = f", or add rows with --vocab_size {padded(needed)}"
        raise BadInput(_message(where, needed, rows) + advice)
    raise BadInput(
        f"vocab_size = {rows}: the largest id of the tokenizer is {needed - 1}; use --vocab_size {padded(needed)}"
    )


def _message(where: str, needed: int, rows: int) -> str:
    return (
        f"{where}: the tokenizer has ids up to {needed - 1}, which need {needed} rows, but the embedding "
        f"of the model has {rows}. If tokens were added to the tokenizer, load the model, call "
        f"model.resize_token_embeddings({needed}) and save it again"
    )
