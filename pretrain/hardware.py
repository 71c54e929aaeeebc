"""What this machine is and can do: name, precision, compiler; and the Accelerator that uses it."""

import os
import platform
import re
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from .errors import BadInput

# As /proc/mounts names them.
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|beegfs|gpfs|ceph|glusterfs|afs|9p|"
    r"fuse\.(sshfs|glusterfs|s3fs|gcsfuse|ceph.*|rclone)"
)


def make_accelerator(precision: str | None = None) -> Accelerator:
    """Build the Accelerator as the accelerate YAML says, or, when none is given, as a preset would.

    Args:
        precision: without a YAML: this one (no, fp16, bf16); None: the best that the card has.

    Raises BadInput when the YAML asks for a precision that the device cannot do, with the remedy.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    wanted = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if launched else precision or best_precision()
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    if wanted == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(
            f"mixed_precision: bf16: {torch.cuda.get_device_name()} has no bf16; write mixed_precision: fp16 in the "
            f"accelerate YAML"
        )
    if wanted == "fp16" and not cuda:
        raise BadInput('mixed_precision: fp16 needs a GPU; write mixed_precision: "no" in the accelerate YAML')
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        raise BadInput(
            "gradient_accumulation_steps is derived here from tokens_per_step; take it out of the accelerate YAML, or "
            "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    backend = None
    if not launched and cuda:
        backend = "inductor"
    # No buffer of GPT-2 changes in training, so there is nothing to broadcast at each forward.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(mixed_precision=wanted, dynamo_backend=backend, kwargs_handlers=[ddp])


def best_precision() -> str:
    """Return bf16 where the card has it, else fp16 on a card, else no (fp32)."""
    if not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        return "no"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def device_name(device: torch.device) -> str:
    """Return the card's or the processor's name, with what limits it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU ({processor_name()}), {torch.get_num_threads()} threads"
    return str(device)


def processor_name() -> str:
    """Return the processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def network_mount(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the kind of network file system that ``path`` lies on, or None for a local one (or where it is unknown)."""
    if not mounts.is_file():
        return None
    path = path.resolve()
    found = (line.split()[1:3] for line in mounts.read_text(errors="replace").splitlines() if line.count(" ") > 2)
    # The kernel writes a space in a mount point as \\040. The longest mount point that holds the path is the one.
    over = [(point, kind) for point, kind in found if path.is_relative_to(point.replace("\\040", " "))]
    kind = max(reversed(over), key=lambda entry: len(entry[0]), default=("", ""))[1]  # of two at one place the later
    return kind if NETWORK_FILE_SYSTEMS.fullmatch(kind) else None


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most device memory that was allocated at once, or None where it is not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
