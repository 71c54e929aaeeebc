"""Chat on a base model: a template, and tokens that take rows of the vocabulary's padding."""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import sampling
from ursa_minor.evaluation.likelihood import context_length
from ursa_minor.model.architectures import padded

log = logging.getLogger(__name__)

CHAT_TOKENS = BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
# ChatML, as many chat models speak it. `generation` marks what TRL's assistant_only_loss trains on: the assistant's words,
# and the token that ends them, so that the model learns to stop.
CHAT_TEMPLATE = "".join(
    map(
        str.strip, Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8").splitlines()
    )
)


def check_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput for a model with a template, without free rows, or whose tokenizer cannot write the template."""
    if tokenizer.chat_template is not None or {*CHAT_TOKENS} & {*tokenizer.get_vocab()}:
        raise BadInput(
            "--chat: the model has a chat template, or tokens of a chat, already; leave --chat out"
        )
    first, rows, needed = (
        1 + max(tokenizer.get_vocab().values()),
        model.config.vocab_size,
        len(CHAT_TOKENS),
    )
    if (free := rows - first) < needed:
        fix = f"train with --vocab_size {padded(first + needed)}, or --tokenizer_vocab_size {rows - needed} or less"
        raise BadInput(
            f"--chat: needs {needed} rows of padding, and {max(free, 0)} of {rows} are free; {fix}"
        )
    try:
        # Ids that the template adds to the messages.
        tokenization.Encoder(tokenizer)(["user\nassistant\nsystem"])
    except BadInput as error:
        raise BadInput(
            f"--chat: {error}; a chat needs a tokenizer that can write user, assistant and system"
        ) from None


def add_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a base model, in place, a chat template and the tokens it needs; the model keeps its size.

    The tokens' rows begin at the mean of all others (padding rows have learnt never to be). END stops generation beside
    the end of text; padding is a token of its own: were it the end of text, a tuned model would not learn to stop, for
    padding is left out of the loss (TRL #1623). Raises BadInput where ``check_chat`` does.
    """
    check_chat(model, tokenizer)
    first = 1 + max(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens({"pad_token": PAD, "extra_special_tokens": [BEGIN, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(list(CHAT_TOKENS))
    assert sorted(ids) == list(range(first, first + len(CHAT_TOKENS))), ids
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight[ids] = part.weight[:first].mean(0)
    generation = model.generation_config
    generation.suppress_tokens = [
        i for i in generation.suppress_tokens or () if i not in ids
    ] or None
    generation.eos_token_id = sorted({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)})
    generation.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    messages: Iterable[str],
    settings: sampling.Sampling,
    streamer: sampling.Streamer | None = None,
) -> None:
    """Answer each message through ``streamer``, with what was said before; an empty message begins anew.

    The oldest turns are forgotten where they would leave less than half of the context, or than ``max_new_tokens``, for
    the answer.
    """
    # How long a chat may be is asked below; the tokenizer need not warn of one that is about to be cut.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    context = context_length(model.config) or 2**31  # some models set no limit
    room = context - min(settings.max_new_tokens, context // 2)
    chat: list[dict[str, str]] = []
    for number, message in enumerate(messages):
        if not message:
            chat.clear()
            continue
        chat.append({"role": "user", "content": message})
        try:
            while len(ids := prompt_ids(tokenizer, chat)) > room and len(chat) > 1:
                del chat[:2]
            if len(ids) > room:
                raise BadInput(
                    f"this message has {len(ids):,} tokens; {room:,} at most fit with an answer"
                )
        except BadInput as error:
            log.warning(error)
            chat.pop()
            continue
        length = min(settings.max_new_tokens, context - len(ids))
        answer_settings = dataclasses.replace(
            settings, max_new_tokens=length, seed=settings.seed + number
        )
        new = sampling.sample(model, ids, tokenizer, answer_settings, streamer)
        chat.append(
            {"role": "assistant", "content": tokenization.decode_continuation(tokenizer, ids, new)}
        )


def prompt_ids(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]]) -> list[int]:
    """Return the ids of a chat up to where the assistant is to answer. Raises BadInput for what it cannot write."""
    tokenization.Encoder(tokenizer)([message["content"] for message in chat])
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
