"""Name the precision that a loaded model computes in."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ursa_minor.model.dtypes import DTYPE_NAMES

BITSANDBYTES = "bitsandbytes"


def precision_of(model: PreTrainedModel, mixed_precision: str = "no") -> str:
    """Return the precision that a model computes in: fp32, bf16, fp16, int8, nf4, int4 (gptq), fp8, ...

    A quantized model also contains tensors in half precision (embeddings, norms): its precision is
    that of the matrices. Any other model has the precision of most of its weights.

    Args:
        mixed_precision: Accelerate's: no, bf16 or fp16. It replaces the precision of a model that is
            not quantized, and is named after that of a quantized one.
    """
    rules = getattr(model.config, "quantization_config", None)
    if rules is not None:
        precision = _quantized_precision(rules if isinstance(rules, dict) else rules.to_dict())
        return precision if mixed_precision == "no" else f"{precision}, {mixed_precision} autocast"
    if mixed_precision != "no":
        return mixed_precision
    sizes: Counter[torch.dtype] = Counter()
    for tensor in model.parameters():
        sizes[tensor.dtype] += tensor.numel()
    dtype = max(sizes, key=lambda dtype: sizes[dtype])
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _quantized_precision(rules: Mapping[str, Any]) -> str:
    """Return the precision of the matrices that a ``quantization_config`` describes."""
    method = rules.get("quant_method", BITSANDBYTES)  # its first versions wrote no method
    method = str(getattr(method, "value", method))
    if method == BITSANDBYTES:
        return "int8" if rules.get("load_in_8bit") else str(rules["bnb_4bit_quant_type"])
    for key in ("bits", "w_bit"):  # GPTQ, AWQ and others; older AWQ
        if isinstance(rules.get(key), int):
            return f"int{rules[key]} ({method})"
    if isinstance(rules.get("weights"), str):  # quanto, EETQ
        return f"{rules['weights']} ({method})"
    return method
