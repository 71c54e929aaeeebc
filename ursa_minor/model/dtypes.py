"""Torch dtypes of the precisions that recipes, Accelerate and the exports name."""

import torch

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # those that autocast computes in
DTYPES = {"fp32": torch.float32, **HALF_DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
