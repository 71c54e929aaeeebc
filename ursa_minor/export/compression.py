"""Make a model smaller: set the smallest weights of its blocks to zero, or store them in int8.

Both change the matrices of the transformer blocks only. Embeddings, output head, norms and biases
stay as they are.
"""

import importlib.util
import logging
import re
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.utils import prune as pruning
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ursa_minor.base.errors import BadInput
from ursa_minor.model.architectures import file_names
from ursa_minor.model.finite import require_finite

PACKAGE = "bitsandbytes"
VERSION = "0.50.2"
INT8_MAX = 127
# bitsandbytes warns about unused kernels, and at each fp32 product.
logging.getLogger(PACKAGE).setLevel(logging.ERROR)


def require_int8() -> None:
    """Raise BadInput if the library for int8 is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise BadInput(
            f"--dtype int8: {PACKAGE} is not installed. "
            f"Install it: pip install {PACKAGE}=={VERSION}"
        )


def matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of a model that contain a matrix of a block, by name.

    Embeddings and the output head are left out.
    """
    head = model.get_output_embeddings()
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            modules[name] = module
    return modules


def unpruned(model: PreTrainedModel) -> list[str]:
    """Return the names of the matrices that ``prune`` leaves unchanged; see ``_other_matrices``."""
    return _other_matrices(model, [f"{name}.weight" for name in matrices(model)])


def unquantized(quantized: PreTrainedModel) -> list[str]:
    """Return the names of the matrices that are not in int8; see ``_other_matrices``."""
    return _other_matrices(quantized, _int8_weights(quantized))


def _other_matrices(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the names of a model's matrices other than ``names``, as in the exported file.

    A matrix that occurs in each block is named once, with * instead of the number of the block. A
    tied output head has the name of the embedding.
    """
    others: dict[str, None] = {}  # a set in the order of the model
    parameters = dict(model.named_parameters())
    for name, file_name in file_names(model.config.model_type, parameters).items():
        if parameters[name].dim() > 1 and name not in names:
            others[re.sub(r"\.\d+\.", ".*.", file_name)] = None
    return list(others)


def _int8_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the int8 matrices of a model, by name."""
    weights = {}
    for name, module in matrices(model).items():
        if module.weight.dtype == torch.int8:
            weights[f"{name}.weight"] = module.weight
    return weights


def prune(model: PreTrainedModel, share: float) -> None:
    """Set the weights of least magnitude of each matrix to zero, in place.

    Args:
        share: share of a matrix's weights that become zero, from 0 to 1.
    """
    for module in matrices(model).values():
        pruning.l1_unstructured(module, "weight", amount=float(share))
        pruning.remove(module, "weight")  # keeps the zeros, and removes the mask


def quantize(stock: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with its matrices in int8 (LLM.int8(), Dettmers et al. 2022).

    Each output of a matrix has its own scale. bitsandbytes is used because the matrices of GPT-2
    are of the class Conv1D, which the other int8 formats of Transformers (torchao, quanto and HQQ)
    skip.

    Args:
        stock: the model in fp16 (``stock.to_transformers``).

    Raises:
        BadInput: bitsandbytes can quantize no matrix of this architecture, or a quantized weight is
            not finite.
    """
    quantized = type(stock).from_pretrained(
        None,
        state_dict=stock.state_dict(),
        config=stock.config,
        dtype=stock.dtype,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
    )
    int8_weights = _int8_weights(quantized)
    if not int8_weights:
        raise BadInput(
            f"--dtype int8: {PACKAGE} cannot quantize any matrix of {type(stock).__name__}. "
            f"Use --dtype bf16"
        )
    for name, weight in int8_weights.items():
        require_finite(f"{name} in int8", dequantized(weight))
    quantized.generation_config = stock.generation_config
    return quantized


def dequantized(weight: nn.Parameter) -> torch.Tensor:
    """Return the values of an int8 matrix of bitsandbytes, (out, in) fp32.

    A row is stored as integers from -127 to 127 and the largest magnitude of the row (LLM.int8()).
    """
    scales = weight.SCB.float() / INT8_MAX
    return weight.data.float() * scales[:, None]


def upcast(model: PreTrainedModel) -> None:
    """Convert the weights of a model to fp32 in place, so that it computes in fp32.

    Most CPUs are ten times slower in half precision. Int8 matrices keep their dtype.
    """
    nn.Module.float(model)  # PreTrainedModel.float refuses a model with int8 matrices


def share_of_zeros(model: PreTrainedModel) -> float:
    """Return which share of the weights of a model's matrices is zero, from 0 to 1."""
    zeros = 0
    total = 0
    for module in matrices(model).values():
        zeros += (module.weight == 0).sum().item()
        total += module.weight.numel()
    return zeros / total


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the number of bytes of a model's weights, including the scales of int8.

    Tied weights are counted once.
    """
    bytes_by_address = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    return sum(bytes_by_address.values())
