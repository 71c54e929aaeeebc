"""Train stock GPT-2 faster in half precision under torch.compile.

Under torch.compile and autocast, the scale and shift of each LayerNorm in a block are folded into
the weights of the matrix product that follows it. Then the normalized hidden state in half
precision is the input of the product, and the only tensor that both backward passes save. The
gradients of scale and shift do not read it another time. Everywhere else, LayerNorm and product are
the stock ones.

Symbols in shapes: B sequences, T tokens, E width of the model, F width after the product.
"""

import functools

import torch
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D


def fold_norms(model: GPT2LMHeadModel) -> None:
    """Make the LayerNorms in blocks, and the products that follow them, compute as described above.

    The model is modified in place. Names and values of its weights stay the same.
    """
    for block in model.transformer.h:
        _fold(block.ln_1, block.attn.c_attn)
        _fold(block.ln_2, block.mlp.c_fc)


def _fold(norm: nn.LayerNorm, product: Conv1D) -> None:
    norm.forward = functools.partial(_normalize, norm)
    product.forward = functools.partial(_scale_and_multiply, norm, product)


def _normalize(norm: nn.LayerNorm, hidden_BTE: torch.Tensor) -> torch.Tensor:
    autocast = torch.is_autocast_enabled(hidden_BTE.device.type)
    has_fp32_weights = norm.weight.dtype == torch.float32
    if torch.compiler.is_compiling() and autocast and has_fp32_weights:
        return _Normalized.apply(hidden_BTE, norm.eps)
    return nn.LayerNorm.forward(norm, hidden_BTE)


def _scale_and_multiply(
    norm: nn.LayerNorm, product: Conv1D, hidden_BTE: torch.Tensor
) -> torch.Tensor:
    # A stock norm has run: only _Normalized returns half precision while the weights are fp32.
    if hidden_BTE.dtype == product.weight.dtype:
        return Conv1D.forward(product, hidden_BTE)
    weight_EF = (norm.weight[:, None] * product.weight).to(hidden_BTE.dtype)
    shift_F = (norm.bias[:, None] * product.weight).sum(0)
    return _Product.apply(hidden_BTE, weight_EF, product.bias + shift_F)


class _Normalized(torch.autograd.Function):
    """LayerNorm (Ba et al. 2016) without scale and shift.

    It is computed in fp32. Its output is in the dtype of autocast, and is saved for the backward
    pass.
    """

    @staticmethod
    def forward(ctx, hidden_BTE, eps):
        variance, mean = torch.var_mean(hidden_BTE.float(), -1, correction=0, keepdim=True)
        inverse_deviation = torch.rsqrt(variance + eps)
        normalized = (hidden_BTE - mean) * inverse_deviation
        out = normalized.to(torch.get_autocast_dtype(hidden_BTE.device.type))
        ctx.save_for_backward(out, inverse_deviation)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        out, inverse_deviation = ctx.saved_tensors
        out = out.float()
        grad_out = grad_out.float()
        mean_product = (grad_out * out).mean(-1, keepdim=True)
        mean_grad = grad_out.mean(-1, keepdim=True)
        grad_hidden = inverse_deviation * (grad_out - mean_grad - out * mean_product)
        return grad_hidden, None


class _Product(torch.autograd.Function):
    """Multiply by a matrix and add a bias.

    The gradient of the bias is summed over tokens, then over sequences. In this order, the compiler
    computes the first sum in the kernel that writes the gradient, so the gradient is not read
    another time.
    """

    @staticmethod
    def forward(ctx, hidden_BTE, weight_EF, bias_F):
        ctx.save_for_backward(hidden_BTE, weight_EF)
        out = torch.addmm(bias_F.to(weight_EF.dtype), hidden_BTE.flatten(0, 1), weight_EF)
        return out.view(*hidden_BTE.shape[:2], -1)

    @staticmethod
    def backward(ctx, grad_out):
        hidden_BTE, weight_EF = ctx.saved_tensors
        grad_rows = grad_out.flatten(0, 1)
        grad_hidden = (grad_rows @ weight_EF.T).view_as(hidden_BTE)
        grad_weight = hidden_BTE.flatten(0, 1).T @ grad_rows
        grad_bias = grad_out.sum(1, dtype=torch.float32).sum(0)
        return grad_hidden, grad_weight, grad_bias
