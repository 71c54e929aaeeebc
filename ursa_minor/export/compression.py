"""Smaller models: the blocks' matrices with zeros for their smallest weights, or in int8; and what of it is in a model."""

import importlib.util
import logging

import torch
from torch import nn
from torch.nn.utils import prune as pruning
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ursa_minor.base.errors import BadInput
from ursa_minor.model.finite import require_finite

PACKAGE, VERSION = "bitsandbytes", "0.50.2"
# bitsandbytes warns about unused kernels, and at each fp32 product.
logging.getLogger(PACKAGE).setLevel(logging.ERROR)


def require_int8() -> None:
    """Raise BadInput when the library for int8 is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise BadInput(
            f"--dtype int8: {PACKAGE} is not installed: pip install {PACKAGE}=={VERSION}"
        )


def matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a model's matrices by name, without embeddings and output head."""
    head = model.get_output_embeddings()
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, Conv1D)) and m is not head
    }


def prune(model: PreTrainedModel, share: float) -> None:
    """Set ``share`` (0 to 1) of each matrix to zero, in place: its smallest weights."""
    for module in matrices(model).values():
        pruning.l1_unstructured(module, "weight", amount=float(share))
        pruning.remove(module, "weight")


def quantize(stock: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its matrices in int8, a scale for each output, and the rest as it is.

    bitsandbytes, because GPT-2's matrices are Conv1D, which of Transformers' int8 formats only this one takes: torchao,
    quanto and HQQ pass them over. Raises BadInput for an architecture without a matrix that it takes.
    """
    # LLM.int8() (Dettmers 2022).
    weights, rules = (
        stock.state_dict(),
        BitsAndBytesConfig(load_in_8bit=True),
    )
    options = {"config": stock.config, "dtype": stock.dtype, "quantization_config": rules}
    quantized = type(stock).from_pretrained(None, state_dict=weights, **options)
    if not any(module.weight.dtype == torch.int8 for module in matrices(quantized).values()):
        raise BadInput(
            f"--dtype int8: {PACKAGE} finds no matrix in {type(stock).__name__}; use --dtype bf16"
        )
    for name, module in matrices(quantized).items():
        if module.weight.dtype == torch.int8:
            require_finite(f"{name}.weight in int8", dequantized(module.weight))
    quantized.generation_config = stock.generation_config
    return quantized


def dequantized(weight: nn.Parameter) -> torch.Tensor:
    """Return the values of an int8 matrix of bitsandbytes, (out, in) fp32.

    A row is stored as integers from -127 to 127 and the largest value of the row (LLM.int8()).
    """
    scales = weight.SCB.float() / 127
    return weight.data.float() * scales[:, None]


def widen(model: PreTrainedModel) -> None:
    """Let a model compute in fp32 with the weights that it has, in place: most CPUs are ten times slower in half."""
    nn.Module.float(model)  # Transformers' own refuses int8, whose matrices stay


def share_of_zeros(model: PreTrainedModel) -> float:
    """Return which share of the matrices' weights is zero."""
    weights = [module.weight for module in matrices(model).values()]
    return sum((weight == 0).sum().item() for weight in weights) / sum(
        weight.numel() for weight in weights
    )


def weight_bytes(model: PreTrainedModel) -> int:
    """Return how many bytes the weights take, each tied one once, scales of int8 included."""
    return sum(
        {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values()
    )
