"""The loss that a causal language model of Transformers trains with, which never makes all logits at once.

Legend: B sequences, T tokens, N = B T, E width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

CARD_ROWS = 8192  # tokens whose logits a card holds at once


class NextTokenLoss(nn.Module):
    """A model and its loss as one module, so that a compiler sees both and DDP wraps both.

    Logits exist a part at a time: on a card 8,192 rows (4,096 in evaluation, which is not compiled), where matrix
    products are as fast as with more; on a CPU so many that they stay in its cache, which is faster.
    """

    rows: int | None = None  # another size of the parts

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a fp32 scalar in nats per token; inputs and targets are (B, T) int64."""
        hidden = self.model.transformer(inputs_BT, use_cache=False).last_hidden_state.flatten(0, 1)
        targets = targets_BT.flatten()
        training, vocab_size = torch.is_grad_enabled(), self.model.config.vocab_size
        in_cache = max(256, 2**20 // vocab_size)
        rows = self.rows or ((CARD_ROWS if training else CARD_ROWS // 2) if hidden.is_cuda else in_cache)
        if training and len(targets) <= rows:
            return F.cross_entropy(self.model.lm_head(hidden).float(), targets)
        if training:
            return _ChunkedLoss.apply(hidden, self.model.lm_head.weight, targets, rows) / len(targets)
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        sums = [F.cross_entropy(self.model.lm_head(rows).float(), ids, reduction="sum") for rows, ids in parts]
        return torch.stack(sums).sum() / len(targets)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of cross-entropies of a linear head, and its gradients at once, some rows at a time.

    The gradients by hidden states and head cost two matrix products wherever they are computed; here they are while a
    part's logits are there, so that none must be kept. They are those of the sum, which fp16 can hold; the backward
    pass only scales them.
    """

    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, targets_N, rows):
        device = hidden_NE.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_NE.dtype
        head, vocabulary = weight_VE.to(dtype), torch.arange(len(weight_VE), device=hidden_NE.device)
        loss = torch.zeros((), device=hidden_NE.device)
        by_hidden, by_head = [], torch.zeros_like(weight_VE)
        for part, ids in zip(hidden_NE.to(dtype).split(rows), targets_N.split(rows), strict=True):
            logits = (part @ head.T).float()
            total = logits.logsumexp(-1, keepdim=True)
            loss = loss + (total - logits.gather(-1, ids[:, None])).sum()
            # Softmax, minus one at the target; in place, and in one kernel where it is compiled.
            logits.sub_(total).exp_().add_(vocabulary == ids[:, None], alpha=-1)
            by_logits = logits.to(dtype)
            by_hidden.append((by_logits @ head).to(hidden_NE.dtype))
            by_head += by_logits.T @ part
        ctx.save_for_backward(torch.cat(by_hidden), by_head)
        return loss

    @staticmethod
    def backward(ctx, by_loss):
        by_hidden, by_head = ctx.saved_tensors
        return by_hidden * by_loss, by_head * by_loss, None, None
