"""The loss that a causal language model of Transformers trains with, which never makes all logits at once.

Legend: B sequences, T tokens, N = B T, E width, V vocabulary.
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

GPU_ROWS = 8192  # tokens whose logits a card holds at once


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
    """A model and its loss as one module, so that a compiler sees both and DDP wraps both.

    Logits exist a part at a time: on a card 8,192 rows (4,096 in evaluation, which is not compiled), where matrix
    products are as fast as with more; on a CPU so many that they stay in its cache, which is faster, or 2,048 where the
    vocabulary is so large that not even 256 do.

    Args:
        model: a causal language model whose head is one matrix, as GPT-2's and Llama's is, tied or not.
        label_smoothing: share of a target's probability that is spread evenly over the whole vocabulary (Szegedy et
            al. 2015, section 7). In training only, where gradients are enabled.
        z_loss: coefficient of the mean square of the logits' logarithm of the sum of exponentials, which keeps logits
            from drifting (PaLM, Chowdhery et al. 2022, section 5: 1e-4). In training only.
        context: returns further arguments of the model for (B, T) int64 inputs, as ``attention.within_documents`` does.
    """

    rows: int | None = None  # overrides the size of the parts

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        context: Callable[[torch.Tensor], dict] | None = None,
    ):
        super().__init__()
        self.model, self.label_smoothing, self.z_loss, self.context = (
            model,
            label_smoothing,
            z_loss,
            context,
        )

    def forward(
        self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, *, with_cross_entropy: bool = False
    ) -> torch.Tensor | Losses:
        """Return the mean loss, an fp32 scalar.

        Args:
            inputs_BT, targets_BT: (B, T) int64 token ids.
            with_cross_entropy: return ``Losses``, that is the plain cross entropy as well. It costs no
                further pass over the logits. Only where gradients are enabled.
        """
        context = self.context(inputs_BT) if self.context else {}
        outputs = self.model.base_model(inputs_BT, use_cache=False, **context)
        hidden_NE = outputs.last_hidden_state.flatten(0, 1)
        targets_N = targets_BT.flatten()
        if not torch.is_grad_enabled():
            return self._evaluation_loss(hidden_NE, targets_N)
        losses = self._training_losses(hidden_NE, targets_N)
        return losses if with_cross_entropy else losses.objective

    def _rows_at_once(self, hidden_NE: torch.Tensor) -> int:
        """Return the number of tokens whose logits are computed together."""
        if self.rows:
            return self.rows
        if hidden_NE.is_cuda:
            return GPU_ROWS if torch.is_grad_enabled() else GPU_ROWS // 2
        vocab_size = self.model.config.vocab_size
        return max(256, 2**20 // vocab_size) if vocab_size <= 2**14 else 2048

    def _evaluation_loss(self, hidden_NE: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        rows = self._rows_at_once(hidden_NE)
        parts = zip(hidden_NE.split(rows), targets_N.split(rows), strict=True)
        sums = [F.cross_entropy(head(part).float(), ids, reduction="sum") for part, ids in parts]
        return torch.stack(sums).sum() / len(targets_N)

    def _training_losses(self, hidden_NE: torch.Tensor, targets_N: torch.Tensor) -> Losses:
        head = self.model.get_output_embeddings()
        rows = self._rows_at_once(hidden_NE)
        if len(targets_N) <= rows:
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
            # F.cross_entropy(label_smoothing=...) computes the same, bit for bit, but does not
            # return the plain cross entropy, which is a step on the way.
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
    """Return the module that returns a recipe's loss; ``separator``: the id that stands before each document."""
    context = (
        functools.partial(within_documents, separator=separator) if loss.document_mask else None
    )
    return NextTokenLoss(
        model, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, context=context
    )


class _ChunkedLoss(torch.autograd.Function):
    """Sum of a linear head's losses, and its gradients at once, some rows at a time.

    Returns the sum of the cross entropy; with label smoothing or z-loss a tuple: the sum that is minimized, and the sum
    of the cross entropy, which has no gradient.

    The gradients by hidden states and head cost two matrix products wherever they are computed; here they are while a
    part's logits are there, so that none must be kept. They are those of the sum, which fp16 can hold; the backward
    pass only scales them.
    """

    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, targets_N, rows, label_smoothing, z_loss):
        device = hidden_NE.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_NE.dtype
        head, vocabulary = (
            weight_VE.to(dtype),
            torch.arange(len(weight_VE), device=hidden_NE.device),
        )
        has_terms = bool(label_smoothing or z_loss)
        cross_entropy = torch.zeros((), device=hidden_NE.device)
        objective = torch.zeros((), device=hidden_NE.device)
        grad_hidden: list[torch.Tensor] = []
        grad_head = torch.zeros_like(weight_VE)
        for part, ids in zip(hidden_NE.to(dtype).split(rows), targets_N.split(rows), strict=True):
            if grad_hidden:
                # Nothing is above infinity: a zero that is known only when the part before is done. Without it a compiler
                # computes the logits of all parts first, and holds them all.
                part = part + (grad_hidden[-1][0, 0] > math.inf).to(dtype)
            logits = (part @ head.T).float()
            total = logits.logsumexp(-1, keepdim=True)
            # The target's logit once more: read from the logits, it would keep a compiler from freeing them.
            expected = (part.float() * head[ids].float()).sum(-1, keepdim=True)
            cross_entropy = cross_entropy + (total - expected).sum()
            if label_smoothing:
                expected = torch.lerp(expected, logits.mean(-1, keepdim=True), label_smoothing)
            if has_terms:
                objective = objective + (total - expected).sum()
            # Softmax, minus what was expected; in place, and in one kernel where it is compiled.
            logits.sub_(total).exp_()
            if z_loss:
                objective = objective + z_loss * total.square().sum()
                logits.mul_(1 + 2 * z_loss * total)
            logits.add_(vocabulary == ids[:, None], alpha=label_smoothing - 1)
            if label_smoothing:
                logits.sub_(label_smoothing / len(weight_VE))
            grad_logits = logits.to(dtype)
            grad_head += grad_logits.T @ part
            grad_hidden.append(grad_logits @ head)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_head)
        ctx.hidden_dtype = hidden_NE.dtype
        if not has_terms:
            return cross_entropy
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        return (
            grad_hidden.to(ctx.hidden_dtype) * grad_loss,
            grad_head * grad_loss,
            None,
            None,
            None,
            None,
        )
