"""Check that a model has an embedding row for each id of its tokenizer."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ursa_minor.base.errors import BadInput


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return 1 + the largest id of a tokenizer.

    This is more than ``len(tokenizer)`` if there are unused ids.
    """
    return 1 + max(tokenizer.get_vocab().values())


def check_embedding_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    """Raise BadInput if the tokenizer has ids beyond the rows of the model's embedding.

    Args:
        model: the loaded model.
        tokenizer: its tokenizer.
        where: beginning of the message: the option and its value.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    needed = rows_needed(tokenizer)
    if needed > rows:
        raise BadInput(missing_rows_message(where, needed, rows))


def missing_rows_message(where: str, needed: int, rows: int) -> str:
    """Return the error message for an embedding that has ``rows`` rows and lacks some."""
    return (
        f"{where}: the tokenizer has ids up to {needed - 1}, which need {needed} rows, but the "
        f"embedding of the model has {rows}. If tokens were added to the tokenizer, load the "
        f"model, call model.resize_token_embeddings({needed}) and save it again"
    )
