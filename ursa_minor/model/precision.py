"""Name the precision that a loaded model computes in."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ursa_minor.model.dtypes import DTYPE_NAMES

BITSANDBYTES = "bitsandbytes"


def precision_of(model: PreTrainedModel, mixed_precision: str = "no") -> str:
    """Return the precision that a model computes in, such as fp32, bf16, int8, nf4 or int4 (gptq).

    A quantized model also contains tensors in half precision (embeddings, norms): its precision is
    that of the matrices. Any other model has the precision of most of its weights.

    Args:
        model: the loaded model.
        mixed_precision: Accelerate's setting: no, bf16 or fp16. It replaces the precision of a
            model that is not quantized. For a quantized model it is appended, as in "int8, bf16
            autocast".
    """
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None:
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        precision = _quantized_precision(quantization)
        if mixed_precision != "no":
            precision += f", {mixed_precision} autocast"
        return precision
    if mixed_precision != "no":
        return mixed_precision

    elements: Counter[torch.dtype] = Counter()
    for tensor in model.parameters():
        elements[tensor.dtype] += tensor.numel()
    dtype = max(elements, key=lambda dtype: elements[dtype])
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _quantized_precision(config: Mapping[str, Any]) -> str:
    """Return the precision of the matrices that a ``quantization_config`` describes."""
    # The first versions of bitsandbytes did not write the method.
    method = config.get("quant_method", BITSANDBYTES)
    method = str(getattr(method, "value", method))
    if method == BITSANDBYTES:
        if config.get("load_in_8bit"):
            return "int8"
        return str(config["bnb_4bit_quant_type"])
    # GPTQ and AWQ write "bits", older versions of AWQ "w_bit".
    for key in ("bits", "w_bit"):
        if isinstance(config.get(key), int):
            return f"int{config[key]} ({method})"
    # quanto and EETQ write "weights".
    if isinstance(config.get("weights"), str):
        return f"{config['weights']} ({method})"
    return method
