"""Compute the log-likelihoods that a model gives to the endings of a context.

For the architectures of this package the context is computed once for all of its endings. A row of
the input contains the context and then all endings, side by side. A mask lets each ending attend to
the context and to itself only, and its positions continue from the end of the context. Logits are
computed only at the positions where an ending is predicted.

Legend: E endings of a question, B rows, T tokens of the longest row, R predicted tokens,
V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig, PreTrainedModel

from ursa_minor.base.errors import BadInput, is_out_of_memory
from ursa_minor.machine.device import float64_device
from ursa_minor.model.architectures import ARCHITECTURES

EncodedQuestion = tuple[list[int], list[list[int]]]  # the ids of a context and of each ending


class ModelAnswer(NamedTuple):
    """The result of a model for one question.

    Attributes:
        nats: (E,) float64 log-likelihood of each ending after the context.
        greedy: whether greedy decoding gives the only ending; False if there are several endings.
    """

    nats: np.ndarray
    greedy: bool


# The number of questions per batch. With fewer, a GPU is not fully used. On a CPU with 2 cores, 8
# was measured to be 5% faster than 4 and 16.
GPU_BATCH_SIZE = 64
CPU_BATCH_SIZE = 8
# The kernel of cuDNN is left out, which PyTorch prefers on Hopper GPUs, because it needs a
# preparation for each new shape (0.44 s in FunASR issue 3704). Here the shape changes with each
# batch, and in `sampling` with each token.
SCORING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SCORED_ROWS = 256  # rows of logits that are converted to fp32 losses at a time


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model can read, or None if its config has no limit."""
    config = config.get_text_config()
    # The order of the names is that of lm-evaluation-harness.
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        length = getattr(config, name, None)
        if length:
            return length
    return None


def not_finite(location: str, value: float) -> BadInput:
    """Return the error for a model that computes NaN or infinity instead of probabilities.

    Args:
        location: the item, prompt or text that the model was given.
        value: the log-likelihood, loss or logit that is not finite.
    """
    return BadInput(
        f"{location}: the model computes no valid probabilities (its output is {value}). If its "
        f"training has diverged, use an earlier checkpoint. If the model is in float16, convert it "
        f"to float32: python export_model.py MODEL --dtype fp32 --out FOLDER"
    )


@torch.no_grad()
@sdpa_kernel(SCORING_KERNELS)
def log_likelihoods(
    model: PreTrainedModel,
    questions: Sequence[EncodedQuestion],
    *,
    context_length: int | None,
    accelerator: Accelerator | None = None,
    batch_size: int | None = None,
    progress: Callable[[np.ndarray], object] = lambda batch: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[ModelAnswer] | None:
    """Return the log-likelihoods of the endings of each question, the same on all processes.

    The result does not depend on the number of processes or on ``batch_size``, except for rounding.
    No random number is drawn, dropout is off, and the model is left as it was.

    Args:
        model: the model. It must not be compiled, because the shapes change with each batch, and
            must not be a DDP wrapper.
        questions: the questions, with any number of endings. No context or ending is empty.
        context_length: the number of tokens that the model can read, or None without a limit.
            Longer contexts are truncated from the left.
        accelerator: the processes that share the questions, or None if this process scores all.
        batch_size: the number of questions per batch, or None to choose it for the device. It is
            halved when memory runs out.
        progress: function that is called after each batch with the indices of its questions.
        stop: function that is called before each batch. If it returns True, the work ends on all
            processes.

    Returns:
        An answer for each question, or None if any process was stopped.
    """
    if batch_size is None:
        batch_size = GPU_BATCH_SIZE if model.device.type == "cuda" else CPU_BATCH_SIZE
    rank = 0
    num_processes = 1
    if accelerator is not None:
        rank = accelerator.process_index
        num_processes = accelerator.num_processes
    # Other model types compute each ending separately: they may have a sliding window, count
    # positions themselves, or carry a state from token to token.
    shares_context = model.config.model_type in ARCHITECTURES

    # The endings of all questions are numbered in order. Those of question i start at starts[i].
    starts = np.cumsum([0, *(len(endings) for _, endings in questions)])
    # Two values for each ending: the log-likelihood in nats, and the number of tokens that are not
    # the most likely ones. Each process fills in those of its questions; the others stay 0.
    results = np.zeros((2, starts[-1]))

    # Questions of similar length are in the same batch. The longest come first, because they need
    # the most memory.
    order = sorted(range(len(questions)), key=lambda i: (-tokens_read(questions[i]), i))
    remaining = np.array(order[rank::num_processes])
    stopped = False
    was_training = model.training
    model.eval()
    try:
        while len(remaining):
            stopped = stop()
            if stopped:
                break
            num_batches = math.ceil(len(remaining) / batch_size)
            batch = np.array_split(remaining, num_batches)[0]
            batch_questions = [questions[i] for i in batch]
            batch_endings = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in batch])
            try:
                results[:, batch_endings] = _score(
                    model, batch_questions, context_length, shares_context
                )
            except RuntimeError as error:
                if batch_size == 1 or not is_out_of_memory(error):
                    raise
                batch_size //= 2
                torch.cuda.empty_cache()
                continue
            remaining = remaining[len(batch) :]
            progress(batch)
    finally:
        model.train(was_training)

    # Add up the results of all processes, and the number of processes that were stopped.
    totals = torch.tensor(
        [*results.ravel(), stopped], dtype=torch.float64, device=float64_device(model.device)
    )
    if accelerator is not None:
        totals = accelerator.reduce(totals, "sum")
    totals = totals.cpu().numpy()
    if totals[-1]:
        return None
    by_question = np.split(totals[:-1].reshape(2, -1), starts[1:-1], axis=1)
    answers = []
    for nats, misses in by_question:
        is_greedy = len(nats) == 1 and not misses[0]
        answers.append(ModelAnswer(nats, is_greedy))
    return answers


def tokens_read(question: EncodedQuestion) -> int:
    """Return the number of tokens that a model reads for the longest ending of a question.

    The last token of an ending is only predicted, not read.
    """
    context, endings = question
    longest_ending = max(len(ending) for ending in endings)
    return len(context) + longest_ending - 1


def _score(
    model: PreTrainedModel,
    batch: Sequence[EncodedQuestion],
    context_length: int | None,
    shares_context: bool,
) -> np.ndarray:
    """Return the log-likelihoods of a batch's endings and their numbers of unlikely tokens.

    Returns:
        (2, endings) float64: the log-likelihood in nats, and the number of tokens that are not the
        most likely ones. The number is only computed if a question has a single ending, because it
        needs another pass over the logits; otherwise it is 0.
    """
    packed = _pack(_rows(batch, context_length, shares_context))
    device = model.device
    inputs = {name: tensor.to(device) for name, tensor in packed.inputs.items()}
    predicted_at = packed.predicted_at.to(device)
    targets = packed.targets.to(device)
    if "branch" in inputs:
        inputs["attention_mask"] = _branch_mask(inputs.pop("branch"))

    if shares_context:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        logits_RV = model.get_output_embeddings()(hidden.flatten(0, 1)[predicted_at])
    else:
        logits_RV = model(**inputs, use_cache=False).logits.flatten(0, 1)[predicted_at]

    has_single_ending = any(len(endings) == 1 for _, endings in batch)
    scores_2R = _score_tokens(logits_RV, targets, count_misses=has_single_ending)
    return np.stack([np.bincount(packed.ending_index, values) for values in scores_2R])


def _score_tokens(
    logits_RV: torch.Tensor, targets: torch.Tensor, *, count_misses: bool
) -> np.ndarray:
    """Return the log-likelihood of each target, and 1 if it is not the most likely id, (2, R).

    Args:
        targets: (R,) ids.
        count_misses: whether the second row is computed; otherwise it is 0.
    """
    # Parts of the rows are converted to fp32 at a time, because all logits would need much memory.
    device = float64_device(logits_RV.device)
    parts = zip(logits_RV.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
    scores = []
    for logits, ids in parts:
        losses = F.cross_entropy(logits.float(), ids, reduction="none")
        nats = -losses.to(device).double()
        misses = torch.zeros_like(nats)
        if count_misses:
            misses = logits.argmax(-1).ne(ids).to(device).double()
        scores.append(torch.stack([nats, misses]))
    return torch.cat(scores, 1).cpu().numpy()


def _rows(
    batch: Sequence[EncodedQuestion], context_length: int | None, shares_context: bool
) -> list[EncodedQuestion]:
    """Return the rows that a model computes for a batch of questions.

    A question is one row if its endings can share the context and all fit into the model's context.
    Otherwise each ending is a row, with as many tokens of the context as fit before it.
    """
    max_length = context_length or math.inf
    rows: list[EncodedQuestion] = []
    for context, endings in batch:
        if shares_context and tokens_read((context, endings)) <= max_length:
            rows.append((context, endings))
            continue
        for ids in endings:
            row_context = context
            if context_length is not None:
                row_context = context[-(context_length - len(ids) + 1) :]
            rows.append((row_context, [ids]))
    return rows


def _branch_mask(branch_BT: torch.Tensor) -> torch.Tensor:
    """Return the mask (B, 1, T, T) with which a token attends to the context and its own ending."""
    is_context_B1T = branch_BT[:, None, :] == 0
    is_same_branch_BTT = branch_BT[:, None, :] == branch_BT[:, :, None]
    return (is_context_B1T | is_same_branch_BTT).tril()[:, None]


class PackedBatch(NamedTuple):
    """Rows of token ids, padded at the right, and the positions whose predictions are scored.

    Attributes:
        inputs: ``input_ids`` (B, T). If a row has several endings, also ``position_ids`` (B, T) and
            ``branch`` (B, T), which is 0 for the context and the number of the ending, from 1, for
            its tokens.
        predicted_at: (R,) indices into the flattened (B * T) whose logits are needed.
        targets: (R,) the id that is expected after each of them.
        ending_index: (R,) the ending to which each of them belongs, counted over all rows.
    """

    inputs: dict[str, torch.Tensor]
    predicted_at: torch.Tensor
    targets: torch.Tensor
    ending_index: np.ndarray


def _pack(rows: Sequence[EncodedQuestion]) -> PackedBatch:
    """Place the context and endings of each row side by side.

    The last id of an ending is a target, but not an input.
    """
    num_columns = max(_row_length(row) for row in rows)
    shape = (len(rows), num_columns)
    ids_BT = np.zeros(shape, dtype=np.int64)
    positions_BT = np.zeros(shape, dtype=np.int64)
    branch_BT = np.zeros(shape, dtype=np.int64)
    predicted_at: list[int] = []
    targets: list[int] = []
    ending_lengths = []
    for row, (context, endings) in enumerate(rows):
        end = len(context)
        ids_BT[row, :end] = context
        positions_BT[row, :end] = np.arange(end)
        for number, ids in enumerate(endings, 1):
            start = end
            end = start + len(ids) - 1
            ids_BT[row, start:end] = ids[:-1]
            positions_BT[row, start:end] = len(context) + np.arange(len(ids) - 1)
            branch_BT[row, start:end] = number
            # The first id of the ending is predicted at the end of the context.
            columns = [len(context) - 1, *range(start, end)]
            predicted_at += [row * num_columns + column for column in columns]
            targets += ids
            ending_lengths.append(len(ids))
        # Padding attends to the context and itself, and no other token attends to it.
        branch_BT[row, end:] = len(endings) + 1

    inputs = {"input_ids": torch.from_numpy(ids_BT)}
    if any(len(endings) > 1 for _, endings in rows):
        inputs["position_ids"] = torch.from_numpy(positions_BT)
        inputs["branch"] = torch.from_numpy(branch_BT)
    return PackedBatch(
        inputs=inputs,
        predicted_at=torch.tensor(predicted_at),
        targets=torch.tensor(targets),
        ending_index=np.repeat(np.arange(len(ending_lengths)), ending_lengths),
    )


def _row_length(row: EncodedQuestion) -> int:
    """Return the number of tokens of a row, in which the last id of each ending is left out."""
    context, endings = row
    return len(context) + sum(len(ids) - 1 for ids in endings)
