"""Torch dtypes by the names of precisions that recipes, Accelerate and exports use."""

import torch

# The dtypes that autocast computes in.
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp32": torch.float32, **HALF_DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
