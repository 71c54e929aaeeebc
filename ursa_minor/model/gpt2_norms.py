"""How stock GPT-2 trains in half precision under a compiler: norms whose scale and shift go into the next product.

Legend: B sequences, T tokens, E width, F width behind a product.
"""

import functools

import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

# Compiled under autocast, a norm's scale and shift go into the weights of the product behind it: normalized, in half
# precision, is then what the product takes and all that both backward passes keep, and no gradient of scale and shift
# reads it once more. Everywhere else norm and product are the stock ones.


def fold_norms(model: GPT2LMHeadModel) -> None:
    """Have each block's norms and the products behind them compute so, in place; weights and names stay."""
    for block in model.transformer.h:
        for norm, product in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
            norm.forward = functools.partial(_normalize, norm)
            product.forward = functools.partial(_scale_and_multiply, norm, product)


def _normalize(norm: nn.LayerNorm, hidden_BTE: torch.Tensor) -> torch.Tensor:
    autocast = (
        torch.is_autocast_enabled(hidden_BTE.device.type) and norm.weight.dtype == torch.float32
    )
    if torch.compiler.is_compiling() and autocast:
        return _Normalized.apply(hidden_BTE, norm.eps)
    return nn.LayerNorm.forward(norm, hidden_BTE)


def _scale_and_multiply(
    norm: nn.LayerNorm, product: Conv1D, hidden_BTE: torch.Tensor
) -> torch.Tensor:
    # A stock norm; _Normalized handles half precision with fp32 weights.
    if hidden_BTE.dtype == product.weight.dtype:
        return Conv1D.forward(product, hidden_BTE)
    weight_EF = (norm.weight[:, None] * product.weight).to(hidden_BTE.dtype)
    bias_F = product.bias + (norm.bias[:, None] * product.weight).sum(0)
    return _Product.apply(hidden_BTE, weight_EF, bias_F)


class _Normalized(torch.autograd.Function):
    """LayerNorm (Ba et al. 2016) without scale and shift, computed in fp32, returned and kept in autocast's dtype."""

    @staticmethod
    def forward(ctx, hidden_BTE, eps):
        variance, mean = torch.var_mean(hidden_BTE.float(), -1, correction=0, keepdim=True)
        by_deviation = torch.rsqrt(variance + eps)
        out = ((hidden_BTE - mean) * by_deviation).to(
            torch.get_autocast_dtype(hidden_BTE.device.type)
        )
        ctx.save_for_backward(out, by_deviation)
        return out

    @staticmethod
    def backward(ctx, by_out):
        out, by_deviation = ctx.saved_tensors
        out, by_out = out.float(), by_out.float()
        along = (by_out * out).mean(-1, keepdim=True)
        return by_deviation * (by_out - by_out.mean(-1, keepdim=True) - out * along), None


class _Product(torch.autograd.Function):
    """A product and a bias, whose gradient is summed over tokens, then sequences.

    In that order a compiler makes the first sum in the kernel that writes what is summed, and need not read it again.
    """

    @staticmethod
    def forward(ctx, hidden_BTE, weight_EF, bias_F):
        ctx.save_for_backward(hidden_BTE, weight_EF)
        out = torch.addmm(bias_F.to(weight_EF.dtype), hidden_BTE.flatten(0, 1), weight_EF)
        return out.view(*hidden_BTE.shape[:2], -1)

    @staticmethod
    def backward(ctx, by_out):
        hidden_BTE, weight_EF = ctx.saved_tensors
        rows = by_out.flatten(0, 1)
        grad_hidden, by_weight = (
            (rows @ weight_EF.T).view_as(hidden_BTE),
            hidden_BTE.flatten(0, 1).T @ rows,
        )
        return grad_hidden, by_weight, by_out.sum(1, dtype=torch.float32).sum(0)
