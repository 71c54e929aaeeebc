"""Facts about cuDNN's attention, whose gradients with a mask can be NaN before cuDNN 9.26.

PyTorch prefers these kernels on Hopper GPUs in half precision. The defect is pytorch#196678, and
trl#7181 for DPO and KTO, whose padded batches have masks.
"""

import os

# The value 1 makes PyTorch prefer other attention kernels. PyTorch reads the variable when it
# computes attention for the first time.
DEPRIORITIZED_VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
FIXED = 92600  # first version without the defect, as torch.backends.cudnn.version() returns it
FIXED_TORCH = "2.15"  # the first release of torch that installs it
HOPPER = 9  # major compute capability


def is_deprioritized() -> bool:
    """Return whether the environment makes PyTorch prefer other attention kernels."""
    return os.environ.get(DEPRIORITIZED_VARIABLE, "0") not in ("", "0")


def version_text(version: int) -> str:
    """Return ``torch.backends.cudnn.version()`` as text.

    92000 is 9.20.0. Before cuDNN 9, the number had four digits: 8902 is 8.9.2.
    """
    if version >= 90_000:
        major, rest = divmod(version, 10_000)
    else:
        major, rest = divmod(version, 1_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"
