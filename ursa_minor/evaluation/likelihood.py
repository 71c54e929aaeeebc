"""How likely a model finds each of several endings of a context.

In the families that are trained here the context is computed once for all of them: a row holds a context and then its
endings side by side; a mask lets each ending see the context and itself, and its positions continue from the context's
end. Logits are computed only where an ending is predicted.

Legend: E endings of a question, B rows, T tokens of the longest row, R predicted tokens, V vocabulary.
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

EncodedQuestion = tuple[list[int], list[list[int]]]  # a context's ids, each ending's ids


class ModelAnswer(NamedTuple):
    """What a model makes of a question.

    Attributes:
        nats: the log-likelihood of every ending after the context, (E,) float64.
        greedy: whether greedy decoding gives its only ending; False where there are several.
    """

    nats: np.ndarray
    greedy: bool


# Questions at once: with fewer a GPU idles. On a CPU 8 was 5% faster than 4 and than 16 (measured, 2 cores).
GPU_BATCH_SIZE, CPU_BATCH_SIZE = 64, 8
# cuDNN's attention, which Hopper takes first, prepares itself for every new shape (others measured 0.44 s each, FunASR
# issue 3704), and here each batch, and in a sample each token, has one of its own.
SCORING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SCORED_ROWS = 256  # logits that become fp32 losses at once


def context_length(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model can read, or None where its configuration sets no limit."""
    config = config.get_text_config()
    names = ("n_positions", "max_position_embeddings", "n_ctx")  # lm-evaluation-harness's order
    return next((length for name in names if (length := getattr(config, name, None))), None)


def not_finite(where: str, value: float) -> BadInput:
    """Return the error of a model that computes NaN or infinity instead of probabilities.

    Args:
        where: the item, prompt or text that the model was given.
        value: the log-likelihood, loss or logit that is not finite.
    """
    return BadInput(
        f"{where}: the model computes no valid probabilities (its output is {value}). Either its "
        f"training has diverged, and an earlier checkpoint is needed, or its activations overflow "
        f"in half precision. A float16 model may work after a conversion to float32: "
        f"python export_model.py MODEL --dtype fp32 --out FOLDER"
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
    """Return how likely the endings of each question are. All processes return the same.

    But for rounding it depends neither on the number of processes nor on ``batch_size``. No random number is drawn,
    dropout is off, and the model is left as it was.

    Args:
        model: not a compiled one (shapes change with each batch), and not a DDP wrapper.
        questions: each with any number of endings; neither a context nor an ending is empty.
        context_length: what is longer loses tokens of its context from the left; None: no limit.
        accelerator: of the processes that share the questions; None: this one scores all.
        batch_size: questions at once, halved when memory is short; None: as many as suit the device.
        progress: called after each batch with its questions' numbers.
        stop: asked before each batch; True abandons the work (None is returned, on every process).
    """
    was_training = model.training
    # Of each question the place of its first ending among all endings.
    begins = np.cumsum([0, *(len(endings) for _, endings in questions)])
    # Sums of log-likelihoods, and the number of tokens that are not the most likely ones.
    results = np.zeros((2, begins[-1]))
    # Of other families each ending is computed by itself: windows may slide, positions be counted, states be carried.
    shared = model.config.model_type in ARCHITECTURES
    size = batch_size or (GPU_BATCH_SIZE if model.device.type == "cuda" else CPU_BATCH_SIZE)
    rank, num_processes = (
        (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    )
    # Alike in length, the longest first, which needs the most memory.
    order = sorted(range(len(questions)), key=lambda i: (-tokens_read(questions[i]), i))
    todo, stopped = np.array(order[rank::num_processes]), False
    model.eval()
    try:
        while len(todo) and not (stopped := stop()):
            batch = np.array_split(todo, -(-len(todo) // size))[0]
            places = np.concatenate([np.arange(begins[i], begins[i + 1]) for i in batch])
            try:
                results[:, places] = _score(
                    model, [questions[i] for i in batch], context_length, shared
                )
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
                size //= 2
                torch.cuda.empty_cache()
                continue
            todo = todo[len(batch) :]
            progress(batch)
    finally:
        model.train(was_training)
    sums = torch.tensor(
        [*results.ravel(), stopped], dtype=torch.float64, device=float64_device(model.device)
    )
    sums = (accelerator.reduce(sums, "sum") if accelerator else sums).cpu().numpy()
    if sums[-1]:
        return None
    parts = np.split(sums[:-1].reshape(2, -1), begins[1:-1], axis=1)
    return [ModelAnswer(nats, len(nats) == 1 and not wrong[0]) for nats, wrong in parts]


def tokens_read(question: EncodedQuestion) -> int:
    """Return the tokens that a model reads of the longest ending: its last one is only predicted."""
    context, endings = question
    return len(context) + max(map(len, endings)) - 1


def _score(
    model: PreTrainedModel, batch: list[EncodedQuestion], limit: int | None, shared: bool
) -> np.ndarray:
    """Return of a batch's endings, one question's after the other's, the log-likelihoods and the tokens that are not the
    likeliest, (2, endings) float64; the latter only where a question has a single ending.
    """
    rows: list[EncodedQuestion] = []
    for context, endings in batch:
        if shared and tokens_read((context, endings)) <= (limit or math.inf):
            rows.append((context, endings))
        else:  # each ending by itself, with as much context as fits before it
            contexts = [
                context if limit is None else context[-(limit - len(ids) + 1) :] for ids in endings
            ]
            rows += [(context, [ids]) for context, ids in zip(contexts, endings, strict=True)]
    inputs, places, targets, owners = _pack(rows)
    inputs, places = (
        {name: tensor.to(model.device) for name, tensor in inputs.items()},
        places.to(model.device),
    )
    # (B, 1, T, T): each token attends to the context and to its own ending.
    if "branch" in inputs:
        branch_BT = inputs.pop("branch")
        seen_BTT = (branch_BT[:, None, :] == 0) | (branch_BT[:, None, :] == branch_BT[:, :, None])
        inputs["attention_mask"] = seen_BTT.tril()[:, None]
    if shared:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        logits_RV = model.get_output_embeddings()(hidden.flatten(0, 1)[places])
    else:
        logits_RV = model(**inputs, use_cache=False).logits.flatten(0, 1)[places]
    parts = zip(
        logits_RV.split(SCORED_ROWS), targets.to(model.device).split(SCORED_ROWS), strict=True
    )
    # The argmax needs another pass over the logits.
    alone = any(len(endings) == 1 for _, endings in batch)
    exact = float64_device(model.device)
    scores = []
    for logits, ids in parts:
        nats = -F.cross_entropy(logits.float(), ids, reduction="none").to(exact).double()
        misses = torch.zeros_like(nats)
        if alone:
            misses = logits.argmax(-1).ne(ids).to(exact).double()
        scores.append(torch.stack([nats, misses]))
    return np.stack([np.bincount(owners, row) for row in torch.cat(scores, 1).cpu().numpy()])


def _pack(
    rows: Sequence[EncodedQuestion],
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, np.ndarray]:
    """Lay rows out, padded at their right end. An ending's last id is a target only.

    Returns: ``input_ids`` (B, T) and, where a row has several endings, ``position_ids`` and ``branch`` (B, T; 0 the
    context, then the endings' numbers); the places of the flattened (B * T) that predict, (R,); their targets, (R,);
    which ending, counted over all rows, each belongs to, (R,).
    """
    length = max(len(context) + sum(len(ids) - 1 for ids in endings) for context, endings in rows)
    ids_BT, positions_BT, branch_BT = (
        np.zeros((len(rows), length), dtype=np.int64) for _ in range(3)
    )
    places, targets, sizes = [], [], []
    for row, (context, endings) in enumerate(rows):
        end = len(context)
        ids_BT[row, :end], positions_BT[row, :end] = context, range(end)
        for number, ids in enumerate(endings, 1):
            begin, end = end, end + len(ids) - 1
            ids_BT[row, begin:end] = ids[:-1]
            positions_BT[row, begin:end] = range(len(context), len(context) + end - begin)
            branch_BT[row, begin:end] = number
            places += [row * length + place for place in (len(context) - 1, *range(begin, end))]
            targets += ids
            sizes.append(len(ids))
        # Padding attends to the context and itself, and no token attends to it.
        branch_BT[row, end:] = len(endings) + 1
    inputs = {"input_ids": torch.from_numpy(ids_BT)}
    if any(len(endings) > 1 for _, endings in rows):
        inputs |= {
            "position_ids": torch.from_numpy(positions_BT),
            "branch": torch.from_numpy(branch_BT),
        }
    return (
        inputs,
        torch.tensor(places),
        torch.tensor(targets),
        np.repeat(np.arange(len(sizes)), sizes),
    )
