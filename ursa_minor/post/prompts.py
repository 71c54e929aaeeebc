"""Prompts to improve by and held-out ones, from files of rows, and what a model's greedy completions of them are worth."""

import logging
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.files import find_files
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import sampling
from ursa_minor.post.rewards import CheckedReward, ModelReward, TextOrMessages, plain
from ursa_minor.recipe.source_kind import TABLE_FORMATS, URL_SCHEMES

log = logging.getLogger(__name__)

BATCH_ROWS = 256  # completed at once


def read(key: str, path: str) -> list[TextOrMessages]:
    """Return the ``prompt`` column of files of rows (.jsonl, .parquet, .csv): texts, or the messages of chats.

    Args:
        path: found as one of ``data_files`` is: a name that exists is that file, any other may be a glob.

    Raises BadInput, which begins with ``key``, where there is no such file, column, or row.
    """
    import datasets  # here, for a card's image may lack it
    from datasets.data_files import DataFilesList

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs each error that it raises
    where = f"{key} = {path}"
    names = (
        []
        if path.startswith(URL_SCHEMES)
        else [os.path.abspath(name) for name in find_files(key, [path])]
    )
    kinds = {TABLE_FORMATS.get(Path(name).suffix) for name in names}
    if len(kinds) != 1 or None in kinds:
        raise BadInput(
            f"{where}: must be files of rows that are here, of one kind: {', '.join(TABLE_FORMATS)}"
        )
    try:  # streamed, so that nothing of an earlier file of this name is in a cache; a list of theirs is not expanded
        files = {"train": DataFilesList(names, [])}
        rows = list(datasets.load_dataset(*kinds, data_files=files, split="train", streaming=True))
    except Exception as error:  # each of datasets' readers raises its own kinds
        raise BadInput(f"{where}: cannot be read: {error.__cause__ or error!r}") from None
    prompts = [row.get("prompt") for row in rows]
    if (
        not prompts
        or len({type(prompt) for prompt in prompts}) != 1
        or not all(map(_is_prompt, prompts))
    ):
        columns = f"; the columns are {', '.join(rows[0])}" if rows else ""
        rule = (
            "must be a text, or each one's a list of messages with role and content, and none empty"
        )
        raise BadInput(f"{where}: each row's prompt {rule}{columns}")
    return prompts


def _is_prompt(value: Any) -> bool:
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    return bool(value) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[TextOrMessages]
) -> list[list[int]]:
    """Return the ids that TRL makes of prompts."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    return tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True
    )["input_ids"]


def check(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[TextOrMessages]) -> None:
    """Raise BadInput if the tokenizer cannot encode the prompts, or if chats have no template."""
    if len({type(prompt) for prompt in prompts}) > 1:
        raise BadInput(
            "prompts, held_out: some are texts and some are messages; give both in one form"
        )
    if not isinstance(prompts[0], str) and tokenizer.chat_template is None:
        fix = "python export_model.py RUN --chat --out FOLDER makes one that has"
        raise BadInput(f"the prompts are messages, and the model has no chat template; {fix}")
    tokenization.Encoder(tokenizer)([plain(prompt) for prompt in prompts])


def drop_long(
    where: str,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[TextOrMessages],
    *,
    context: int | None,
    max_completion_length: int,
) -> list[TextOrMessages]:
    """Return the prompts that fit into the context together with a completion; log how many do not.

    Args:
        where: beginning of the messages: the key and its value.
        tokenizer: of the model.
        prompts: all of one form, not empty.
        context: tokens that the model can read, or None if it has no limit.
        max_completion_length: new tokens.

    Raises BadInput if no prompt fits.
    """
    if context is None:
        return list(prompts)
    longest = context - max_completion_length
    # Transformers need not warn of prompts that are about to be dropped.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    lengths = [len(ids) for ids in encode(tokenizer, prompts)]
    fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= longest]
    rule = (
        f"with max_completion_length = {max_completion_length} the context of {context} tokens "
        f"leaves {max(longest, 0)} for a prompt"
    )
    if not fitting:
        shortest = min(lengths)
        advice = "Give shorter prompts, or a model with a longer context"
        if shortest < context:
            advice = (
                f"Use max_completion_length of {context - shortest} or less, or shorter prompts"
            )
        raise BadInput(
            f"{where}: all {len(prompts):,} prompts are too long: {rule}, and the shortest has {shortest}. {advice}"
        )
    dropped = len(prompts) - len(fitting)
    if dropped:
        log.warning(
            f"{where}: {dropped:,} of {len(prompts):,} prompts are dropped because they are too long: {rule}"
        )
    return fitting


def require_batch(
    where: str, prompts: Sequence[TextOrMessages], *, completions: int, num_generations: int
) -> None:
    """Raise BadInput if the prompts do not fill one batch: TRL would then end without a step.

    Args:
        where: beginning of the message: the key and its value.
        prompts: those that remain.
        completions: of a batch, on all processes (GRPOConfig.generation_batch_size).
        num_generations: completions of one prompt.
    """
    needed = completions // num_generations
    if len(prompts) < needed:
        raise BadInput(
            f"{where}: a batch takes {needed:,} prompts ({completions:,} completions, num_generations = "
            f"{num_generations}), and only {len(prompts):,} are usable. Give more prompts, or a lower "
            f"per_device_train_batch_size"
        )


def stop_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, stop: str | None) -> None:
    """Make the end of text, and the token ``stop``, end what the model generates."""
    ends = sampling.end_ids(model, tokenizer)
    if stop is not None:
        (ids,) = tokenization.Encoder(tokenizer)([stop])
        if len(ids) != 1:
            raise BadInput(
                f"stop = {stop!r}: must be one token of the model's tokenizer, and is {len(ids)}"
            )
        ends = [*ends, *ids.tolist()]
    model.generation_config.eos_token_id = sorted({*ends})


def completions_of(
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[TextOrMessages],
    completion_ids: Sequence[list[int]],
) -> list[str]:
    """Return the text of each completion, decoded together with its prompt."""
    return [
        tokenization.decode_continuation(tokenizer, prompt_ids, new_ids)
        for prompt_ids, new_ids in zip(encode(tokenizer, prompts), completion_ids, strict=True)
    ]


def with_completions_of(
    tokenizer: PreTrainedTokenizerFast, reward: CheckedReward | ModelReward
) -> Callable[..., list[float]]:
    """Return a reward function for GRPOTrainer that sees the same texts as ``score`` does.

    GRPOTrainer decodes the ids of a completion alone, so that a tokenizer like SentencePiece's
    loses the space before its first word.
    """

    def rewarded(
        prompts: Sequence[TextOrMessages],
        completions: Sequence[TextOrMessages],
        completion_ids: Sequence[list[int]] | None = None,
        **columns: object,
    ) -> list[float]:
        if completion_ids is not None:
            completions = completions_of(tokenizer, prompts, completion_ids)
        return reward(prompts, completions, **columns)

    rewarded.__name__ = reward.__name__
    return rewarded


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[TextOrMessages],
    reward: CheckedReward | ModelReward,
    longest: int,
) -> float:
    """Return the mean reward of greedy completions of at most ``longest`` tokens; of rewards 0 and 1, the share solved.

    Raises:
        BadInput: every call of the reward failed, or the model computes NaN.
    """
    was_training, generation_config, calls, problems = (
        model.training,
        model.generation_config,
        reward.calls,
        reward.problems,
    )
    model.eval()
    model.generation_config = GenerationConfig()  # its own may ask for beams, or to sample
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    values = []
    try:
        for start in range(0, len(prompts), BATCH_ROWS):
            texts = prompts[start : start + BATCH_ROWS]
            ids = encode(tokenizer, texts)
            width = max(map(len, ids))
            rows = torch.tensor(
                [[padding] * (width - len(row)) + row for row in ids], device=model.device
            )
            mask = torch.tensor(
                [[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device
            )
            out = model.generate(
                rows,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=False,
                eos_token_id=generation_config.eos_token_id,
                pad_token_id=padding,
                suppress_tokens=generation_config.suppress_tokens,
                logits_processor=sampling.checks_logits(),
            )
            values += reward(texts, completions_of(tokenizer, texts, out[:, width:].tolist()))
    finally:
        model.train(was_training).generation_config = generation_config
    if reward.problems - problems == reward.calls - calls:
        raise BadInput(
            f"reward {reward.__name__}: every call failed; the first {reward.first_problem}"
        )
    return statistics.fmean(values)
