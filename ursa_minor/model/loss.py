"""The training loss of a causal language model, computed for a chunk of tokens at a time.

So the logits of all tokens of a micro-batch are never in memory together.

Symbols in shapes: B sequences, T tokens, N = B T, E width of the model, V rows of the vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ursa_minor.model.attention import within_documents
from ursa_minor.recipe import keys

# Tokens whose logits are computed together on a GPU. With more, matrix products are not faster.
GPU_ROWS = 8192
# On a CPU, a chunk has about this many logits, so that they stay in its cache.
CPU_LOGITS = 2**20
MIN_CPU_ROWS = 256
# With a larger vocabulary, not even the logits of 256 rows stay in the cache. Then larger chunks
# are faster.
MAX_CACHED_VOCABULARY = 2**14
UNCACHED_CPU_ROWS = 2048


class Losses(NamedTuple):
    """The two losses of a training batch: fp32 scalars, means over its tokens.

    Without label smoothing and z-loss both are the same tensor.

    Attributes:
        objective: the loss that is minimized.
        cross_entropy: the plain cross entropy in nats per token, as in evaluation.
    """

    objective: torch.Tensor
    cross_entropy: torch.Tensor


class NextTokenLoss(nn.Module):
    """A model and its loss in one module, so that torch.compile and DDP process both together.

    Logits are computed for a chunk of tokens at a time (``_rows_per_chunk``).

    Args:
        model: a causal language model whose head is one matrix, tied or not, as in GPT-2 and Llama.
        label_smoothing: share of a target's probability that is spread evenly over the entire
            vocabulary (Szegedy et al. 2015, section 7). In training only.
        z_loss: coefficient of the mean square of the log-sum-exp of the logits, which keeps logits
            from drifting (PaLM, Chowdhery et al. 2022, section 5: 1e-4). In training only.
        context: function that returns further model arguments for (B, T) int64 token ids, such as
            ``attention.within_documents``.
    """

    rows: int | None = None  # overrides the number of tokens per chunk

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        context: Callable[[torch.Tensor], dict] | None = None,
    ):
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.context = context

    def forward(
        self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, *, with_cross_entropy: bool = False
    ) -> torch.Tensor | Losses:
        """Return the mean loss, an fp32 scalar.

        With gradients enabled this is the training objective, else the plain cross entropy.

        Args:
            inputs_BT: (B, T) int64 token ids.
            targets_BT: (B, T) int64 token ids that follow those of ``inputs_BT``.
            with_cross_entropy: return ``Losses``, which contain the plain cross entropy as well,
                without another pass over the logits. Requires gradients to be enabled.
        """
        context = self.context(inputs_BT) if self.context else {}
        outputs = self.model.base_model(inputs_BT, use_cache=False, **context)
        hidden_NE = outputs.last_hidden_state.flatten(0, 1)
        targets_N = targets_BT.flatten()
        if not torch.is_grad_enabled():
            return self._evaluation_loss(hidden_NE, targets_N)
        losses = self._training_losses(hidden_NE, targets_N)
        return losses if with_cross_entropy else losses.objective

    def _rows_per_chunk(self, hidden_NE: torch.Tensor) -> int:
        """Return the number of tokens whose logits are computed together."""
        if self.rows:
            return self.rows
        if hidden_NE.is_cuda:
            # Evaluation is not compiled, so it needs more memory per token.
            return GPU_ROWS if torch.is_grad_enabled() else GPU_ROWS // 2
        vocab_size = self.model.config.vocab_size
        if vocab_size > MAX_CACHED_VOCABULARY:
            return UNCACHED_CPU_ROWS
        return max(MIN_CPU_ROWS, CPU_LOGITS // vocab_size)

    def _evaluation_loss(self, hidden_NE: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        rows = self._rows_per_chunk(hidden_NE)
        sums = []
        for chunk, ids in zip(hidden_NE.split(rows), targets_N.split(rows), strict=True):
            logits = head(chunk).float()
            sums.append(F.cross_entropy(logits, ids, reduction="sum"))
        return torch.stack(sums).sum() / len(targets_N)

    def _training_losses(self, hidden_NE: torch.Tensor, targets_N: torch.Tensor) -> Losses:
        head = self.model.get_output_embeddings()
        rows = self._rows_per_chunk(hidden_NE)
        # On a CPU, the chunked loss is faster for a single chunk as well.
        if hidden_NE.is_cuda and len(targets_N) <= rows:
            return self._losses_of_logits(head(hidden_NE).float(), targets_N)
        sums = _ChunkedLoss.apply(
            hidden_NE, head.weight, targets_N, rows, self.label_smoothing, self.z_loss
        )
        if isinstance(sums, tuple):
            objective_sum, cross_entropy_sum = sums
            return Losses(objective_sum / len(targets_N), cross_entropy_sum / len(targets_N))
        cross_entropy = sums / len(targets_N)
        return Losses(cross_entropy, cross_entropy)

    def _losses_of_logits(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> Losses:
        if not (self.label_smoothing or self.z_loss):
            cross_entropy = F.cross_entropy(logits_NV, targets_N)
            return Losses(cross_entropy, cross_entropy)
        if self.label_smoothing:
            # F.cross_entropy(label_smoothing=...) gives the bitwise identical loss, but does not
            # return the plain cross entropy.
            log_probabilities_NV = F.log_softmax(logits_NV, dim=-1)
            cross_entropy = F.nll_loss(log_probabilities_NV, targets_N)
            sum_over_vocabulary = (-log_probabilities_NV.sum(-1)).mean()
            share = self.label_smoothing / logits_NV.shape[-1]
            objective = (1 - self.label_smoothing) * cross_entropy + sum_over_vocabulary * share
        else:
            cross_entropy = F.cross_entropy(logits_NV, targets_N)
            objective = cross_entropy
        if self.z_loss:
            objective = objective + self.z_loss * logits_NV.logsumexp(-1).square().mean()
        return Losses(objective, cross_entropy.detach())


def loss_module(model: PreTrainedModel, loss: keys.Loss, separator: int) -> NextTokenLoss:
    """Return the module that computes the loss of a recipe.

    Args:
        model: the model to train.
        loss: the loss keys of the recipe.
        separator: the id at the start of each document, for document_mask.
    """
    context = None
    if loss.document_mask:
        context = functools.partial(within_documents, separator=separator)
    return NextTokenLoss(
        model, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, context=context
    )


def _subtract_at_targets(logits_NV: torch.Tensor, targets_N: torch.Tensor, value: float) -> None:
    """Subtract a number from the column ``targets_N[n]`` of each row n, in place."""
    if torch.compiler.is_compiling():
        # The comparison becomes part of the kernel that writes the gradient. Indexing would be a
        # separate kernel, which reads and writes all logits.
        vocabulary_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
        logits_NV.add_(vocabulary_V == targets_N[:, None], alpha=-value)
    else:
        rows_N = torch.arange(len(targets_N), device=targets_N.device)
        logits_NV[rows_N, targets_N] -= value


class _ChunkedLoss(torch.autograd.Function):
    """Compute the loss of a linear head, and its gradients, for a chunk of rows at a time.

    The forward pass also computes the gradients with respect to the hidden states and the head,
    while the logits of a chunk exist. So no logits are saved, and no matrix product is added. These
    are the gradients of the sum over all rows, which fp16 can represent. The backward pass only
    scales them.

    Without label smoothing and z-loss, the result is the sum of the cross entropy. Otherwise it is
    a tuple of the sum of the objective, and the sum of the cross entropy, which has no gradient.
    """

    # torch.autograd.Function passes positional arguments only.
    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, targets_N, rows, label_smoothing, z_loss):  # noqa: PLR0917
        device = hidden_NE.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_NE.dtype
        head_VE = weight_VE.to(dtype)
        has_terms = bool(label_smoothing or z_loss)

        cross_entropy = torch.zeros((), device=hidden_NE.device)
        objective = torch.zeros((), device=hidden_NE.device)
        grad_hidden: list[torch.Tensor] = []
        grad_head = torch.zeros_like(weight_VE)
        for chunk, ids in zip(hidden_NE.to(dtype).split(rows), targets_N.split(rows), strict=True):
            if grad_hidden:
                # Add a zero that depends on the gradient of the previous chunk (no number is above
                # infinity). Otherwise a compiler computes the logits of all chunks first, and keeps
                # them all in memory.
                chunk = chunk + (grad_hidden[-1][0, 0] > math.inf).to(dtype)
            logits = (chunk @ head_VE.T).float()
            # The target's logit is computed again. Reading it from the logits would keep a compiler
            # from freeing them.
            target_logit = (chunk.float() * head_VE[ids].float()).sum(-1, keepdim=True)
            expected = target_logit
            if label_smoothing:
                expected = torch.lerp(expected, logits.mean(-1, keepdim=True), label_smoothing)

            # From here on, logits is overwritten: by the softmax, which takes one exponential per
            # logit, and then by the gradient with respect to the logits, which is the softmax minus
            # the target distribution.
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest).exp_()
            exp_sum = logits.sum(-1, keepdim=True)
            logits.div_(exp_sum)
            log_sum_exp = largest + exp_sum.log()

            cross_entropy = cross_entropy + (log_sum_exp - target_logit).sum()
            if has_terms:
                objective = objective + (log_sum_exp - expected).sum()
            if z_loss:
                objective = objective + z_loss * log_sum_exp.square().sum()
                logits.mul_(1 + 2 * z_loss * log_sum_exp)
            _subtract_at_targets(logits, ids, 1 - label_smoothing)
            if label_smoothing:
                logits.sub_(label_smoothing / len(weight_VE))

            grad_logits = logits.to(dtype)
            grad_head += grad_logits.T @ chunk
            grad_hidden.append(grad_logits @ head_VE)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_head)
        ctx.hidden_dtype = hidden_NE.dtype
        if not has_terms:
            return cross_entropy
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        # None for targets_N, rows, label_smoothing and z_loss.
        return (
            grad_hidden.to(ctx.hidden_dtype) * grad_loss,
            grad_head * grad_loss,
            None,
            None,
            None,
            None,
        )
