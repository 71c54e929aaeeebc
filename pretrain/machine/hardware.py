"""What this machine is and can do, what it shall use of that, and the Accelerator that does.

A ``Device`` is plain values, so that any card can be pretended.
"""

import contextlib
import functools
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.utils.deterministic
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, TorchDynamoPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.rendezvous import rendezvous
from torch.utils._triton import has_triton_package

from pretrain.base.errors import BadInput

# As /proc/mounts names them.
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|beegfs|gpfs|ceph|glusterfs|afs|9p|"
    r"fuse\.(sshfs|glusterfs|s3fs|gcsfuse|ceph.*|rclone)"
)
# Of a micro-batch. Others measured 2% from twice as many on an H100, 4% on an RTX 5090 (one GPT-2 124M script on 20
# cards, RunPod, PyTorch 2.8).
ENOUGH_TOKENS = 2**14
AMPERE, COMPILED = (8, 0), (7, 0)  # the first compute capabilities with bf16 and TF32, and with Triton


@dataclass(frozen=True)
class Device:
    """What a process computes on.

    Attributes:
        kind: cuda, mps or cpu.
        memory_bytes: of one card; of a CPU the machine's.
        capability: of the least capable visible card, as NVIDIA counts it; None elsewhere.
        count: cards of this machine.
        compiler: whether Triton is installed, which torch.compile needs on a card.
    """

    kind: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    count: int = 0
    compiler: bool = False

    @property
    def precision(self) -> str:
        """The best mixed precision: bf16 where the card has it, else fp16 on a card, else no (fp32)."""
        if self.kind != "cuda":
            return "no"
        return "bf16" if self.capability >= AMPERE else "fp16"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile works and is worth its time."""
        return self.kind == "cuda" and self.compiler and self.capability >= COMPILED

    @property
    def has_tf32(self) -> bool:
        """Whether fp32 matrix products may run as TF32."""
        return self.kind == "cuda" and self.capability >= AMPERE


def this_device() -> Device:
    """Return what this process computes on, as ``accelerate`` would choose it too."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    # Blocks of varying size leave gaps in CUDA's memory; segments that grow do not (Linux only, and not under WSL). The
    # allocator reads this once, when the card is first asked for anything.
    named = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not named and sys.platform == "linux" and "microsoft" not in platform.release().lower():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if torch.cuda.is_available() and not forced:
        cards = range(torch.cuda.device_count())
        mine = torch.cuda.get_device_properties(min(int(os.environ.get("LOCAL_RANK", "0")), len(cards) - 1))
        least = min(torch.cuda.get_device_capability(card) for card in cards)
        return Device("cuda", mine.name, mine.total_memory, least, len(cards), has_triton_package())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.backends.mps.is_available() and not forced:
        return Device("mps", "mps", memory)
    return Device("cpu", f"CPU ({processor_name()}), {torch.get_num_threads()} threads", memory)


def make_accelerator(
    device: Device,
    *,
    precision: str | None = None,
    tf32: bool | str = "auto",
    compile_mode: str = "default",
    deterministic: bool = False,
    timeout: float = 600.0,
) -> Accelerator:
    """Build the Accelerator as the accelerate YAML says, or, when none is given, as a preset would.

    Args:
        precision: without a YAML: this one (no, fp16, bf16); None: the best that the device has.
        tf32: whether fp32 matrix products run as TF32; auto: where the card can.
        compile_mode: of torch.compile; default: the YAML's dynamo_mode.
        deterministic: take only kernels that give the same bits each time. Otherwise a card adds up embedding gradients,
            and flash attention's, in the order in which its threads come.
        timeout: seconds that a process waits for the others.

    Raises BadInput when the YAML, ``tf32`` or ``compile_mode`` asks for what the device cannot do, with the remedy.
    """
    refuse_impossible(device, os.environ, tf32, compile_mode)
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    wanted = os.environ["ACCELERATE_MIXED_PRECISION"] if launched else precision or device.precision
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # finds errors only, and costs a pass over memory
        torch._inductor.config.deterministic = True  # or timings choose between kernels that round differently
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and device.kind == "cpu":  # or Accelerate starts each one for itself
        os.environ["ACCELERATE_USE_CPU"] = "true"
    _meet_after_restart(device, timeout)
    accelerator = Accelerator(
        mixed_precision=wanted,
        dynamo_plugin=TorchDynamoPlugin(  # None: what the launcher has written into the environment
            backend="inductor" if not launched and device.compiles else None,
            mode=compile_mode if compile_mode != "default" else None,
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)),
        ],
    )
    if accelerator.num_processes != processes:
        raise BadInput(
            f"WORLD_SIZE = {processes}, but Accelerate makes it {accelerator.num_processes}: the processes would train "
            f"apart. Start them with torchrun or accelerate launch, on NVIDIA cards or on CPUs"
        )
    # All are connected: one that refuses its input from here on cannot cut off another that still connects.
    accelerator.wait_for_everyone()
    if accelerator.is_fsdp2 and wanted == "bf16":
        # As DDP does it; Accelerate would average in bf16, and round the loss.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    # After Accelerate, which sets it for itself when a compiler meets fp32.
    use_tf32 = device.has_tf32 if tf32 == "auto" else tf32
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    return accelerator


def _meet_after_restart(device: Device, timeout: float) -> None:
    """Connect the processes that a launcher has restarted, under a name of this attempt's own.

    Where the launcher's store outlives the processes it still holds the addresses of the dead ones, and the new ones
    would call them (torch 2.13; https://github.com/pytorch/pytorch/issues/135712). Accelerate takes what is connected.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        dist.init_process_group(
            "nccl" if device.kind == "cuda" else "gloo",
            store=dist.PrefixStore(f"restart-{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )


def autocast(accelerator: Accelerator) -> contextlib.AbstractContextManager:
    """Compute in the run's mixed precision inside the block, also where FSDP does without autocast."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return torch.autocast(accelerator.device.type, dtype) if dtype else contextlib.nullcontext()


def refuse_impossible(
    device: Device, environment: Mapping[str, str], tf32: bool | str = "auto", compile_mode: str = "default"
) -> None:
    """Raise BadInput with a line for each thing that the launcher's YAML or a setting asks for and ``device`` has not.

    Args:
        environment: as ``accelerate launch`` and ``torchrun`` set it.
    """
    wanted = environment.get("ACCELERATE_MIXED_PRECISION", device.precision)
    faults = []
    if wanted == "fp8":
        faults.append(
            "mixed_precision: fp8 is not supported here (docs/knobs.md says why); write mixed_precision: bf16 in the "
            "accelerate YAML"
        )
    elif wanted != "no" and device.kind == "cpu" and environment.get("ACCELERATE_USE_CPU", "false").lower() != "true":
        faults.append(
            f"mixed_precision: {wanted}: the accelerate YAML is for a GPU, and PyTorch sees none (does nvidia-smi? is "
            f"torch a CPU build? run check_setup.py). Without a GPU: --config_file accelerate_configs/cpu.yaml"
        )
    elif wanted == "fp16" and device.kind != "cuda":
        faults.append('mixed_precision: fp16 needs a GPU; write mixed_precision: "no" in the accelerate YAML')
    elif wanted == "bf16" and device.kind == "cuda" and device.precision != "bf16":
        faults.append(
            f"mixed_precision: bf16: {device.name} has no bf16; write mixed_precision: fp16 in the accelerate YAML"
        )
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if device.compiles and "ACCELERATE_MIXED_PRECISION" not in environment:  # no launcher: as make_accelerator chooses
        compiler = "inductor"
    if compiler == "inductor" and device.kind == "cuda" and not device.compiles:
        why = "is too old for its compiler, Triton" if device.compiler else "has no Triton here (pip install triton)"
        faults.append(
            f'dynamo_backend: INDUCTOR: {device.name} {why}; write dynamo_backend: "NO", or take '
            f"accelerate_configs/conservative.yaml"
        )
    elif compile_mode != "default" and compiler != "inductor":
        can = device.compiles or device.kind == "cpu"
        faults.append(
            f"compile_mode = {compile_mode}: nothing is compiled here (dynamo_backend: {compiler.upper()}); "
            f"{'write dynamo_backend: INDUCTOR in the accelerate YAML, or ' if can else ''}use --compile_mode default"
        )
    elif compile_mode == "reduce-overhead" and device.kind != "cuda":
        faults.append(
            f"compile_mode = {compile_mode}: is made of CUDA graphs, and there is no NVIDIA card here; use --compile_mode "
            f"default, or max-autotune-no-cudagraphs"
        )
    if device.kind == "cuda" and (processes := int(environment.get("LOCAL_WORLD_SIZE", "1"))) > device.count:
        faults.append(
            f"num_processes: {processes} processes on this machine, and PyTorch sees {device.count} card(s); write "
            f"num_processes: {device.count}, or look at CUDA_VISIBLE_DEVICES"
        )
    if environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        faults.append(
            "gradient_accumulation_steps is derived here from tokens_per_step; take it out of the accelerate YAML, or "
            "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        faults.append(
            "distributed_type: DEEPSPEED is not used here; take accelerate_configs/zero1_x8.yaml, zero2_x8.yaml or "
            "zero3_x8.yaml, which need no further package"
        )
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if device.kind != "cuda":  # Accelerate would start processes that know nothing of each other
            faults.append(
                "distributed_type: FSDP (ACCELERATE_USE_FSDP) needs NVIDIA cards. Without a GPU: --config_file "
                "accelerate_configs/cpu.yaml"
            )
        if environment.get("FSDP_VERSION", "1") != "2":
            faults.append("fsdp_version: 1 (FSDP_VERSION) is not supported here; write fsdp_version: 2")
        if wanted == "fp16":
            faults.append(
                "mixed_precision: fp16 under FSDP: its gradient scaler is not supported here; use DDP or bf16"
            )
    if tf32 is True and not device.has_tf32:
        faults.append(f"tf32 = true: {device.name} has no TF32 (Ampere and later have); use --tf32 auto")
    if faults:
        raise BadInput(faults)


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


def free_memory_bytes(device: torch.device, num_processes: int = 1) -> int:
    """Return the memory that this process may plan with: a card's free part and its own; of a CPU its share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS does not tell
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // num_processes


def gauges(device: torch.device) -> dict[str, float]:
    """Return ``gpu/memory`` (peak allocated, a share of the card), ``gpu/utilization`` (a share), ``gpu/watts``.

    The last two come from NVML, at most once a second, for each reading takes milliseconds of the host; they are left
    out where nvidia-ml-py or the driver does not give them. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    return {"gpu/memory": torch.cuda.max_memory_allocated(device) / total, **_nvml(device, int(time.monotonic()))}


@functools.lru_cache(maxsize=1)
def _nvml(device: torch.device, second: int) -> dict[str, float]:
    try:
        return {
            "gpu/utilization": torch.cuda.utilization(device) / 100,
            "gpu/watts": torch.cuda.power_draw(device) / 1000,
        }
    except Exception:  # no nvidia-ml-py, a virtual card, a driver of another age: NVML has a kind of error for each
        return {}


def hint(read: Mapping[str, float], *, micro_batch: int, most: int, tokens: int, waiting: float) -> str | None:
    """Return the one thing to try first for a better use of the card, if any.

    Args:
        read: what ``gauges`` gave.
        micro_batch, most: sequences of a micro-batch, and of this process's share of a step.
        tokens: of a micro-batch.
        waiting: share of the training time in which batches were waited for.
    """
    if waiting > 0.1:
        return f"the device waits for data {waiting:.0%} of the time: is the data on a slow or network disk?"
    if read.get("gpu/utilization", 1.0) < 0.7:
        return (
            f"the card is busy only {read['gpu/utilization']:.0%} of the time: is the data on a slow disk, the "
            f"micro-batch small, or another program on the card? docs/gpu_tuning.md has the order in which to look"
        )
    memory = read.get("gpu/memory")
    if memory is not None and memory > 0.95:
        return (
            f"{memory:.0%} of the card's memory is in use: should it run out, --per_device_train_batch_size "
            f"{max(1, micro_batch // 2)} goes on from the last checkpoint"
        )
    if memory is not None and memory < 0.8 and micro_batch < most and tokens < ENOUGH_TOKENS:
        return (
            f"only {memory:.0%} of the card's memory is in use: a larger --per_device_train_batch_size than "
            f"{micro_batch} would fit, and may be faster"
        )
    return None
