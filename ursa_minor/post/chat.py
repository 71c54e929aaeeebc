"""Add a chat template and its tokens to a base model, and chat with a model.

The tokens of the template take rows of the vocabulary that are padding, so the model keeps its
size.
"""

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
from ursa_minor.model.architectures import padded_vocab_size

log = logging.getLogger(__name__)

BEGIN = "<|im_start|>"
END = "<|im_end|>"
PAD = "<|pad|>"
CHAT_TOKENS = (BEGIN, END, PAD)
Messages = list[dict[str, str]]  # each has the keys role and content


def _read_template() -> str:
    """Return the template of chatml.jinja in one line, without its indentation."""
    template_file = Path(__file__).with_name("chatml.jinja")
    lines = template_file.read_text(encoding="utf-8").splitlines()
    return "".join(line.strip() for line in lines)


# ChatML, the template of many chat models. Its `generation` blocks mark the tokens that TRL's
# assistant_only_loss trains on: the assistant's answers, and the token that ends each of them, so
# that the model learns to stop.
CHAT_TEMPLATE = _read_template()


def check_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput if no chat template can be added to a model.

    This is so if the model has one already, if the padding of the vocabulary is too small for the
    new tokens, or if the tokenizer cannot encode the text of the template.
    """
    vocab = tokenizer.get_vocab()
    if tokenizer.chat_template is not None or any(token in vocab for token in CHAT_TOKENS):
        raise BadInput(
            "--chat: the model already has a chat template, or a token that this template adds. "
            "Leave out --chat"
        )
    needed = len(CHAT_TOKENS)
    used = 1 + max(vocab.values())
    rows = model.config.vocab_size
    free = max(rows - used, 0)
    if free < needed:
        raise BadInput(
            f"--chat: the chat tokens need {needed} rows of padding in the vocabulary, but only "
            f"{free} of its {rows} rows are padding. Leave out --chat, or train a model with "
            f"--vocab_size {padded_vocab_size(used + needed)}, or with --tokenizer_vocab_size "
            f"{rows - needed} or less"
        )
    try:
        # The template adds these words to the messages.
        tokenization.Encoder(tokenizer)(["user\nassistant\nsystem"])
    except BadInput:
        raise BadInput(
            "--chat: the tokenizer of the model cannot encode the words user, assistant and "
            "system, which a chat needs. Leave out --chat, or train a model with --tokenizer bpe"
        ) from None


def add_chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Add the chat template and its tokens to a base model and its tokenizer, in place.

    - The rows of the new tokens start at the mean of all used rows. Rows of padding are not a good
      start, because training has made their tokens improbable.
    - END stops the generation, in addition to the end of text.
    - Padding gets its own token. If the end of text were also the padding, a fine-tuned model
      would not learn to stop, because the loss leaves out padding (TRL #1623).

    Raises:
        BadInput: the template cannot be added (``check_chat``).
    """
    check_chat(model, tokenizer)
    num_used = 1 + max(tokenizer.get_vocab().values())
    tokenizer.add_special_tokens({"pad_token": PAD, "extra_special_tokens": [BEGIN, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in CHAT_TOKENS]
    assert sorted(ids) == list(range(num_used, num_used + len(CHAT_TOKENS))), ids

    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[ids] = module.weight[:num_used].mean(0)

    end_id = vocabulary[END]
    generation = model.generation_config
    suppressed = [token_id for token_id in generation.suppress_tokens or () if token_id not in ids]
    generation.suppress_tokens = suppressed or None
    generation.eos_token_id = sorted({tokenizer.eos_token_id, end_id})
    generation.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id


def is_trained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a model was trained on chats after ``add_chat``.

    Before, the rows of the new tokens are equal. A model with another chat template is assumed to
    be trained.
    """
    vocab = tokenizer.get_vocab()
    if not all(token in vocab for token in CHAT_TOKENS):
        return tokenizer.chat_template is not None
    ids = [vocab[token] for token in CHAT_TOKENS]
    rows = model.get_input_embeddings().weight[ids]
    return not bool((rows == rows[0]).all())


def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    messages: Iterable[str],
    settings: sampling.Sampling,
    streamer: sampling.Streamer | None = None,
) -> None:
    """Answer each message through ``streamer``. An answer takes the earlier messages into account.

    ``max_new_tokens`` of the context are reserved for the answer, or half of the context if that is
    less. If the chat does not fit into the rest, its oldest messages and answers are removed. A
    message that is too long even alone, or that cannot be encoded, gets a warning and no answer.

    Args:
        messages: the messages of the user. An empty message starts a new chat.
    """
    # The length of a chat is limited below, so the tokenizer's warning is not needed.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    context = context_length(model.config) or 2**31  # some models have no limit
    max_prompt_length = context - min(settings.max_new_tokens, context // 2)
    chat: Messages = []
    for number, message in enumerate(messages):
        if not message:
            chat.clear()
            continue
        chat.append({"role": "user", "content": message})
        try:
            ids = fit_into_context(tokenizer, chat, max_prompt_length)
        except BadInput as error:
            log.warning(error)
            chat.pop()
            continue
        answer_settings = dataclasses.replace(
            settings,
            max_new_tokens=min(settings.max_new_tokens, context - len(ids)),
            seed=settings.seed + number,
        )
        new_ids = sampling.sample(model, ids, tokenizer, answer_settings, streamer)
        answer = tokenization.decode_continuation(tokenizer, ids, new_ids)
        chat.append({"role": "assistant", "content": answer})


def fit_into_context(
    tokenizer: PreTrainedTokenizerFast, chat: Messages, max_length: int
) -> list[int]:
    """Remove the oldest turns of a chat until its prompt fits, and return the ids of the prompt.

    Args:
        chat: pairs of a message and its answer, and at the end the message to answer.
        max_length: maximum length of the prompt in tokens.

    Raises:
        BadInput: the last message alone is too long, or the tokenizer cannot encode it.
    """
    ids = prompt_ids(tokenizer, chat)
    while len(ids) > max_length and len(chat) > 1:
        del chat[:2]
        ids = prompt_ids(tokenizer, chat)
    if len(ids) > max_length:
        raise BadInput(
            f"this message has {len(ids):,} tokens with the chat template, but only "
            f"{max_length:,} fit into the context together with an answer. Write a shorter message"
        )
    return ids


def prompt_ids(tokenizer: PreTrainedTokenizerFast, chat: Messages) -> list[int]:
    """Return the ids of a chat, up to the place where the assistant's answer begins.

    Raises:
        BadInput: the tokenizer cannot encode a message.
    """
    tokenization.Encoder(tokenizer)([message["content"] for message in chat])
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]
