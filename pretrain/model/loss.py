"""The loss that a causal language model of Transformers trains with, which never makes all logits at once.

Legend: B sequences, T tokens, N = B T, E width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pretrain.model.attention import within_documents
from pretrain.recipe import keys

CARD_ROWS = 8192  # tokens whose logits a card holds at once


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
        self.model, self.label_smoothing, self.z_loss, self.context = model, label_smoothing, z_loss, context

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a fp32 scalar in nats per token; inputs and targets are (B, T) int64."""
        context = self.context(inputs_BT) if self.context else {}
        hidden = self.model.base_model(inputs_BT, use_cache=False, **context).last_hidden_state.flatten(0, 1)
        head, targets = self.model.get_output_embeddings(), targets_BT.flatten()
        training, vocab_size = torch.is_grad_enabled(), self.model.config.vocab_size
        cpu_rows = max(256, 2**20 // vocab_size) if vocab_size <= 2**14 else 2048
        rows = self.rows or ((CARD_ROWS if training else CARD_ROWS // 2) if hidden.is_cuda else cpu_rows)
        if training and len(targets) <= rows:
            logits = head(hidden).float()
            loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
            return loss + self.z_loss * logits.logsumexp(-1).square().mean() if self.z_loss else loss
        if training:
            total = _ChunkedLoss.apply(hidden, head.weight, targets, rows, self.label_smoothing, self.z_loss)
            return total / len(targets)
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        sums = [F.cross_entropy(head(rows).float(), ids, reduction="sum") for rows, ids in parts]
        return torch.stack(sums).sum() / len(targets)


def loss_module(model: PreTrainedModel, loss: keys.Loss, separator: int) -> NextTokenLoss:
    """Return the module that returns a recipe's loss; ``separator``: the id that stands before each document."""
    context = functools.partial(within_documents, separator=separator) if loss.document_mask else None
    return NextTokenLoss(model, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, context=context)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of a linear head's losses, and its gradients at once, some rows at a time.

    The gradients by hidden states and head cost two matrix products wherever they are computed; here they are while a
    part's logits are there, so that none must be kept. They are those of the sum, which fp16 can hold; the backward
    pass only scales them.
    """

    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, targets_N, rows, label_smoothing, z_loss):
        device = hidden_NE.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_NE.dtype
        head, vocabulary = weight_VE.to(dtype), torch.arange(len(weight_VE), device=hidden_NE.device)
        loss = torch.zeros((), device=hidden_NE.device)
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
            if label_smoothing:
                expected = torch.lerp(expected, logits.mean(-1, keepdim=True), label_smoothing)
            loss = loss + (total - expected).sum()
            # Softmax, minus what was expected; in place, and in one kernel where it is compiled.
            logits.sub_(total).exp_()
            if z_loss:
                loss = loss + z_loss * total.square().sum()
                logits.mul_(1 + 2 * z_loss * total)
            logits.add_(vocabulary == ids[:, None], alpha=label_smoothing - 1)
            if label_smoothing:
                logits.sub_(label_smoothing / len(weight_VE))
            grad_logits = logits.to(dtype)
            grad_head += grad_logits.T @ part
            grad_hidden.append(grad_logits @ head)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_head)
        ctx.hidden_dtype = hidden_NE.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden.to(ctx.hidden_dtype) * grad_loss, grad_head * grad_loss, None, None, None, None
