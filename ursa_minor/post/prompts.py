"""Read prompts from files, check them against the model, and score the model on held-out ones."""

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.files import find_files
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import sampling
from ursa_minor.post.rewards import CheckedReward, ModelReward, TextOrMessages, plain
from ursa_minor.recipe.source_kind import TABLE_FORMATS, URL_SCHEMES

log = logging.getLogger(__name__)

BATCH_ROWS = 256  # number of held-out prompts that are completed together


def read(key: str, path: str) -> list[TextOrMessages]:
    """Return the ``prompt`` column of .jsonl, .parquet or .csv files: texts, or messages of chats.

    Args:
        key: key of the settings, for messages.
        path: a file, or a glob pattern if there is no file of this name.

    Raises:
        BadInput: there is no such file, column or row. The message begins with ``key``.
    """
    # Imported here because the image of a machine with GPUs may not contain the package.
    import datasets
    from datasets.data_files import DataFilesList

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # datasets also logs its errors
    label = f"{key} = {path}"
    names = []
    if not path.startswith(URL_SCHEMES):
        names = [str(Path(name).absolute()) for name in find_files(key, [path])]
    formats = {TABLE_FORMATS.get(Path(name).suffix) for name in names}
    if len(formats) != 1 or None in formats:
        raise BadInput(
            f"{label}: the prompts must be in local files of one format. Use files with one of "
            f"these suffixes: {', '.join(TABLE_FORMATS)}"
        )
    (file_format,) = formats
    try:
        # Streaming reads the file itself, and not a copy of an earlier file of this name in the
        # cache. A DataFilesList is not expanded as a glob.
        data_files = {"train": DataFilesList(names, [])}
        rows = list(
            datasets.load_dataset(file_format, data_files=data_files, split="train", streaming=True)
        )
    except Exception as error:  # the readers of datasets raise errors of many types
        raise BadInput(
            f"{label} cannot be read ({error.__cause__ or error!r}). Correct the file, or use "
            f"another one"
        ) from None
    prompts = [row.get("prompt") for row in rows]
    is_valid = all(_is_prompt(prompt) for prompt in prompts)
    if len({type(prompt) for prompt in prompts}) != 1 or not is_valid:
        columns = f". The columns are {', '.join(rows[0])}" if rows else ""
        raise BadInput(
            f"{label}: in the column 'prompt', all rows must contain a text, or all rows must "
            f"contain a list of messages with role and content. No row may be empty{columns}"
        )
    return prompts


def _is_prompt(value: Any) -> bool:
    """Return whether a value is a text or a list of messages, and not empty."""
    if not value:
        return False
    if isinstance(value, list):
        return all(_is_message(message) for message in value)
    return isinstance(value, str)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[TextOrMessages]
) -> list[list[int]]:
    """Return the ids of each prompt, as TRL encodes it."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    encoded = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True
    )
    return encoded["input_ids"]


def check(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[TextOrMessages]) -> None:
    """Raise BadInput if the tokenizer cannot encode the prompts, or if chats have no template."""
    if len({type(prompt) for prompt in prompts}) > 1:
        raise BadInput(
            "prompts, held_out: some prompts are texts, and some are lists of messages. Use the "
            "same form in all files"
        )
    if not isinstance(prompts[0], str) and tokenizer.chat_template is None:
        raise BadInput(
            "prompts, held_out: the prompts are messages, but the model has no chat template. Add "
            "one with: python export_model.py RUN --chat --out FOLDER"
        )
    tokenization.Encoder(tokenizer)([plain(prompt) for prompt in prompts])


def drop_long(
    label: str,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[TextOrMessages],
    *,
    context: int | None,
    max_completion_length: int,
) -> list[TextOrMessages]:
    """Return the prompts that fit into the context together with a completion.

    The number of dropped prompts is logged.

    Args:
        label: beginning of the messages: the key and its value.
        tokenizer: tokenizer of the model.
        prompts: the prompts, which all have the same form. There is at least one.
        context: number of tokens that the model can read, or None if it has no limit.
        max_completion_length: maximum number of tokens of a completion.

    Raises:
        BadInput: no prompt fits.
    """
    if context is None:
        return list(prompts)
    # The prompts that are too long are dropped below, so the tokenizer's warning is not needed.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    max_prompt_length = context - max_completion_length
    lengths = [len(ids) for ids in encode(tokenizer, prompts)]
    fitting = []
    for prompt, length in zip(prompts, lengths, strict=True):
        if length <= max_prompt_length:
            fitting.append(prompt)
    reason = (
        f"with max_completion_length = {max_completion_length} the context of {context} tokens "
        f"leaves {max(max_prompt_length, 0)} tokens for a prompt"
    )
    if not fitting:
        shortest = min(lengths)
        fix = "Use shorter prompts, or a model with a longer context"
        if shortest < context:
            fix = (
                f"Use --max_completion_length {context - shortest} or less, or use shorter prompts"
            )
        raise BadInput(
            f"{label}: all {len(prompts):,} prompts are too long, because {reason}. The shortest "
            f"prompt has {shortest} tokens. {fix}"
        )
    num_dropped = len(prompts) - len(fitting)
    if num_dropped:
        log.warning(
            f"{label}: {num_dropped:,} of {len(prompts):,} prompts are too long and are not used, "
            f"because {reason}"
        )
    return fitting


def require_batch(
    label: str, prompts: Sequence[TextOrMessages], *, completions: int, num_generations: int
) -> None:
    """Raise BadInput if the prompts do not fill one batch: TRL would then end without a step.

    Args:
        label: beginning of the message: the key and its value.
        prompts: the prompts that are used.
        completions: number of completions in a batch of all processes
            (GRPOConfig.generation_batch_size).
        num_generations: number of completions of one prompt.
    """
    needed = completions // num_generations
    if len(prompts) < needed:
        raise BadInput(
            f"{label}: a batch needs {needed:,} prompts ({completions:,} completions, "
            f"num_generations = {num_generations}), but only {len(prompts):,} are usable. Use more "
            f"prompts, or a smaller --per_device_train_batch_size"
        )


def stop_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, stop: str | None) -> None:
    """Make the model end a text at the end-of-text token and at the token ``stop``.

    Raises:
        BadInput: ``stop`` is not one token.
    """
    end_ids = set(sampling.end_ids(model, tokenizer))
    if stop is not None:
        (stop_ids,) = tokenization.Encoder(tokenizer)([stop])
        if len(stop_ids) != 1:
            raise BadInput(
                f"stop = {stop!r} is encoded as {len(stop_ids)} tokens, but it must be a single "
                f"token of the model's tokenizer. Use another string, or leave out stop"
            )
        end_ids.update(stop_ids.tolist())
    model.generation_config.eos_token_id = sorted(end_ids)


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
    """Return a reward function for GRPOTrainer that gets the same texts as in ``score``.

    GRPOTrainer decodes the ids of a completion alone. With a tokenizer like SentencePiece's, the
    completion would lose the space before its first word.
    """

    def reward_of_decoded(
        prompts: Sequence[TextOrMessages],
        completions: Sequence[TextOrMessages],
        completion_ids: Sequence[list[int]] | None = None,
        **columns: object,
    ) -> list[float]:
        if completion_ids is not None:
            completions = completions_of(tokenizer, prompts, completion_ids)
        return reward(prompts, completions, **columns)

    reward_of_decoded.__name__ = reward.__name__
    return reward_of_decoded


class _PaddedPrompts(NamedTuple):
    """Left-padded prompts: ids and attention mask, both (batch, sequence) int64."""

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor


def _pad_left(rows: list[list[int]], pad_id: int, device: torch.device) -> _PaddedPrompts:
    width = max(len(row) for row in rows)
    padded_rows = []
    masks = []
    for row in rows:
        padding = width - len(row)
        padded_rows.append([pad_id] * padding + row)
        masks.append([0] * padding + [1] * len(row))
    return _PaddedPrompts(
        torch.tensor(padded_rows, device=device), torch.tensor(masks, device=device)
    )


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[TextOrMessages],
    reward: CheckedReward | ModelReward,
    max_completion_length: int,
) -> float:
    """Return the mean reward of greedy completions.

    If the rewards are 0 and 1, this is the share of solved prompts.

    Args:
        max_completion_length: maximum number of tokens of a completion.

    Raises:
        BadInput: every call of the reward failed, or the model computes NaN.
    """
    was_training = model.training
    generation_config = model.generation_config
    calls_before = reward.calls
    failures_before = reward.failures
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = tokenizer.eos_token_id
    values = []
    model.eval()
    # The model's own configuration may select beam search or sampling.
    model.generation_config = GenerationConfig()
    try:
        for start in range(0, len(prompts), BATCH_ROWS):
            batch = prompts[start : start + BATCH_ROWS]
            padded = _pad_left(encode(tokenizer, batch), pad_id, model.device)
            output_BT = model.generate(
                padded.ids_BT,
                attention_mask=padded.mask_BT,
                max_new_tokens=max_completion_length,
                do_sample=False,
                eos_token_id=generation_config.eos_token_id,
                pad_token_id=pad_id,
                suppress_tokens=generation_config.suppress_tokens,
                logits_processor=sampling.checks_logits(),
            )
            completion_ids = output_BT[:, padded.ids_BT.shape[1] :].tolist()
            values += reward(batch, completions_of(tokenizer, batch, completion_ids))
    finally:
        model.train(was_training)
        model.generation_config = generation_config
    new_calls = reward.calls - calls_before
    new_failures = reward.failures - failures_before
    if new_failures == new_calls:
        raise BadInput(
            f"the reward {reward.__name__} failed for every prompt. The first call "
            f"{reward.first_failure}. Correct the reward function or the prompts"
        )
    return statistics.fmean(values)
