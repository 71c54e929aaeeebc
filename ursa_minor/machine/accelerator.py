"""Create the Accelerator, check its settings, and wrap model and optimizer."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import accelerate
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.utils.deterministic
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.rendezvous import rendezvous

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.base.launch import check_launch
from ursa_minor.base.stopping import raise_on_lost_peer
from ursa_minor.base.wording import pluralize
from ursa_minor.machine.device import Device
from ursa_minor.model.dtypes import HALF_DTYPES
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.preflight import compatibility
from ursa_minor.recipe import keys

# Seconds between two checks for processes that are still missing.
MEETING_SECONDS = 0.05
# A launcher sets this environment variable from the accelerate YAML.
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def make_accelerator(
    device: Device, machine: keys.Machine | None = None, *, precision: str | None = None
) -> Accelerator:
    """Create the Accelerator with the settings of the accelerate YAML.

    Without a YAML, the settings are the best ones that the device supports.

    Args:
        device: the device of this process.
        machine: the machine keys of the recipe. Defaults to the default of each key.
        precision: no, fp16 or bf16, used without a YAML. Defaults to the best that the device
            supports.

    Raises:
        BadInput: the launch is incomplete, or the YAML or ``machine`` requests something that the
            device does not support.
    """
    machine = machine or keys.Machine()
    check_launch(os.environ)
    check_supported(device, os.environ, machine.tf32, machine.compile_mode)
    if machine.deterministic:
        _use_deterministic_kernels()

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    # Otherwise Accelerate would not connect processes on CPUs.
    if num_processes > 1 and device.kind == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    timeout = timedelta(seconds=machine.ddp_timeout)
    _connect_restarted_processes(device, timeout)

    is_launched = MIXED_PRECISION in os.environ
    mixed_precision = precision or device.precision
    if is_launched:
        mixed_precision = os.environ[MIXED_PRECISION]
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        dynamo_plugin=_compiler_settings(device, machine, is_launched=is_launched),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timeout),
        ],
    )
    if accelerator.num_processes != num_processes:
        raise BadInput(
            f"WORLD_SIZE = {num_processes}, but Accelerate makes it {accelerator.num_processes}, "
            f"so the processes would train separate models. Start them with torchrun or accelerate "
            f"launch, on NVIDIA GPUs or on CPUs"
        )
    # All processes are connected now. From here on, one that exits because of bad input cannot
    # interrupt another that is still connecting.
    accelerator.wait_for_everyone()

    if accelerator.is_fsdp2 and mixed_precision == "bf16":
        # Reduce gradients in fp32, as DDP does. Accelerate would average them, and the loss, in
        # bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    # Accelerate changes this setting if an fp32 run is compiled, so it is set afterwards.
    use_tf32 = device.has_tf32 if machine.tf32 == "auto" else machine.tf32
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    return accelerator


def _use_deterministic_kernels() -> None:
    """Make results on a GPU repeatable.

    Otherwise some gradients are summed in the order in which threads finish.
    """
    # cuBLAS reads the variable when it creates its first handle.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # This only helps to find errors, and writes all new memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Otherwise the compiler chooses between kernels that round differently by their speed.
    torch._inductor.config.deterministic = True


def _compiler_settings(
    device: Device, machine: keys.Machine, *, is_launched: bool
) -> TorchDynamoPlugin:
    """Return the settings of torch.compile. A value of None means that of the launcher."""
    backend = None
    if device.compiles and not is_launched:
        backend = "inductor"
    mode = None
    if machine.compile_mode != "default":
        mode = machine.compile_mode
    return TorchDynamoPlugin(backend=backend, mode=mode)


def _connect_restarted_processes(device: Device, timeout: timedelta) -> None:
    """Connect processes that a launcher may restart, under a name that is new at each start.

    The store of a launcher outlives the processes. It still contains the addresses of dead
    processes, and new ones would try to reach them (torch 2.13;
    https://github.com/pytorch/pytorch/issues/135712). Accelerate uses processes that are already
    connected.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    has_launcher_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not restarts or not has_launcher_store:
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = rendezvous_name(store, rank, world_size, timeout.total_seconds())
    dist.init_process_group(
        "nccl" if device.kind == "cuda" else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def rendezvous_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Agree on a name with the processes that are alive, which no earlier processes used.

    Process 0 creates the name and sends it to each process that asks, until all have confirmed it.
    A process may have asked and died. Then its answer stays unread, and its successor asks again.

    The launcher's count of restarts cannot be used as the name. Each machine counts its own
    restarts, and does not count those that another machine causes.

    Args:
        store: the store of the launcher.
        rank: rank of this process.
        world_size: number of processes.
        timeout: seconds to wait for the others.

    Raises:
        TrainingStopped: a process is missing after ``timeout`` seconds.
    """
    unique_id = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", unique_id)
        with raise_on_lost_peer():
            name = store.get(f"answer/{unique_id}").decode()  # waits for the answer
        store.set(f"have/{name}/{rank}", "")
        return name

    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            late = pluralize(len(missing), "process", "processes")
            raise TrainingStopped(
                f"{late} did not start within {timeout:g} s (--ddp_timeout)",
                print_on_every_process=True,
            )
        for other_rank in missing:
            if store.check([f"ask/{other_rank}"]):
                other_id = store.get(f"ask/{other_rank}").decode()
                store.set(f"answer/{other_id}", unique_id)
        time.sleep(MEETING_SECONDS)
        confirmed = {
            other_rank for other_rank in missing if store.check([f"have/{unique_id}/{other_rank}"])
        }
        missing -= confirmed
    return unique_id


def autocast(accelerator: Accelerator) -> contextlib.AbstractContextManager:
    """Compute in the mixed precision of the run inside the block.

    This also works under FSDP, which trains in half precision without autocast.
    """
    dtype = HALF_DTYPES.get(accelerator.mixed_precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(accelerator.device.type, dtype)


@dataclass(frozen=True)
class _Launch:
    """Settings of a launch.

    Attributes:
        precision: mixed precision: no, fp16, bf16 or fp8.
        compiler: backend of torch.compile in lower case, or no.
        use_cpu, fsdp, deepspeed: settings of the accelerate YAML.
        fsdp_version: 1 or 2, as text.
        local_processes: number of processes on this machine.
        accumulation_steps: gradient_accumulation_steps of the accelerate YAML, as text.
    """

    precision: str
    compiler: str
    use_cpu: bool
    fsdp: bool
    deepspeed: bool
    fsdp_version: str
    local_processes: int
    accumulation_steps: str

    @classmethod
    def read(cls, device: Device, environment: Mapping[str, str]) -> "_Launch":
        """Return the settings in the environment variables of a launcher, or the defaults."""

        def is_true(name: str) -> bool:
            return environment.get(name, "false").lower() == "true"

        compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
        # Without a launcher, make_accelerator chooses the compiler.
        if device.compiles and MIXED_PRECISION not in environment:
            compiler = "inductor"
        return cls(
            precision=environment.get(MIXED_PRECISION, device.precision),
            compiler=compiler,
            use_cpu=is_true("ACCELERATE_USE_CPU"),
            fsdp=is_true("ACCELERATE_USE_FSDP"),
            deepspeed=is_true("ACCELERATE_USE_DEEPSPEED"),
            fsdp_version=environment.get("FSDP_VERSION", "1"),
            local_processes=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            accumulation_steps=environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
        )


def check_supported(
    device: Device,
    environment: Mapping[str, str],
    tf32: bool | str = "auto",
    compile_mode: str = "default",
) -> None:
    """Raise BadInput with a message for each requested feature that ``device`` does not support.

    Args:
        device: the device of this process.
        environment: environment variables, as ``accelerate launch`` and ``torchrun`` set them.
        tf32: the recipe key: True, False or auto.
        compile_mode: the recipe key.
    """
    launch = _Launch.read(device, environment)
    problems = [
        *_precision_problems(device, launch),
        *_compiler_problems(device, launch, compile_mode),
        *_process_problems(device, launch),
        *_fsdp_problems(device, launch),
    ]
    if tf32 is True and not device.has_tf32:
        problems.append(
            f"tf32 = true: {device.name} does not support TF32, which GPUs have from Ampere on. "
            f"Use --tf32 auto"
        )
    if problems:
        raise BadInput(problems)


def _precision_problems(device: Device, launch: _Launch) -> Iterator[str]:
    precision = launch.precision
    if precision == "fp8":
        yield (
            "mixed_precision: fp8 is not supported (docs/configuration.md has the reason). Write "
            "mixed_precision: bf16 in the accelerate YAML"
        )
    if device.kind == "cuda":
        if precision == "bf16" and device.precision != "bf16":
            yield (
                f"mixed_precision: bf16: {device.name} does not support bf16. Write "
                f"mixed_precision: fp16 in the accelerate YAML"
            )
        return
    # On a CPU, bf16 is slow, so it is accepted only if the YAML also states use_cpu.
    is_unintended = precision == "bf16" and device.kind == "cpu" and not launch.use_cpu
    if precision == "fp16" or is_unintended:
        yield (
            f"mixed_precision: {precision}: the accelerate YAML is for a GPU, but PyTorch sees "
            f"none. Check that nvidia-smi shows one and that torch is not a CPU build (run "
            f"check_setup.py). Without a GPU, use make train, or --config_file "
            f"accelerate_configs/cpu.yaml"
        )


def _compiler_problems(device: Device, launch: _Launch, compile_mode: str) -> Iterator[str]:
    is_gpu = device.kind == "cuda"
    if launch.compiler == "inductor" and is_gpu and not device.compiles:
        if device.has_triton:
            reason = f"{device.name} is too old for Triton, the compiler's back end"
        else:
            reason = "the package triton is not installed (pip install triton)"
        yield (
            f'dynamo_backend: INDUCTOR: {reason}. Write dynamo_backend: "NO" in the accelerate '
            f"YAML, or use accelerate_configs/conservative.yaml"
        )
    needs_gpu = compile_mode == "reduce-overhead"
    has_effect = launch.compiler == "inductor" and (is_gpu or not needs_gpu)
    if compile_mode != "default" and not has_effect:
        yield (
            f"compile_mode = {compile_mode} has no effect with dynamo_backend: "
            f"{launch.compiler.upper()} on {device.name}. It needs INDUCTOR, and reduce-overhead "
            f"also needs the CUDA graphs of an NVIDIA GPU. Use --compile_mode default"
        )


def _process_problems(device: Device, launch: _Launch) -> Iterator[str]:
    if device.kind == "cuda" and launch.local_processes > device.count:
        yield (
            f"num_processes: {launch.local_processes}, but PyTorch sees "
            f"{pluralize(device.count, 'GPU', 'GPUs')} on this machine. Write num_processes: "
            f"{device.count} in the accelerate YAML, or check CUDA_VISIBLE_DEVICES"
        )
    if launch.accumulation_steps != "1":
        yield (
            "gradient_accumulation_steps is computed from tokens_per_step. Remove it from the "
            "accelerate YAML, and ACCELERATE_GRADIENT_ACCUMULATION_STEPS from the environment"
        )
    if launch.deepspeed:
        yield (
            "distributed_type: DEEPSPEED is not supported. Use zero1_x8.yaml, zero2_x8.yaml or "
            "zero3_x8.yaml of accelerate_configs instead"
        )


def _fsdp_problems(device: Device, launch: _Launch) -> Iterator[str]:
    if not launch.fsdp:
        return
    # Without GPUs, Accelerate would start processes that are not connected.
    is_gpu = device.kind == "cuda"
    if not is_gpu or launch.fsdp_version != "2" or launch.precision == "fp16":
        yield (
            "distributed_type: FSDP (ACCELERATE_USE_FSDP) needs NVIDIA GPUs, fsdp_version: 2 and "
            "mixed_precision: bf16, because its fp16 gradient scaler is not supported. Correct the "
            "accelerate YAML, or use accelerate_configs/cpu.yaml"
        )
    defect = compatibility.BROKEN.get(("accelerate", accelerate.__version__))
    if defect is not None:
        yield (
            f"distributed_type: FSDP does not work with accelerate {accelerate.__version__}: "
            f"{defect}. Run pip install -r requirements.txt"
        )


def prepare(
    loss_module: NextTokenLoss, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap the model and its loss for training.

    Args:
        loss_module: the model and its loss.
        optimizer: the optimizer of the model.
        accelerator: the Accelerator of this process.

    Returns:
        The module, wrapped by DDP or FSDP2, compiled and under autocast, and its optimizer.
    """
    if not accelerator.is_fsdp2:
        return accelerator.prepare(loss_module), optimizer
    # FSDP gathers the weights of one block at a time.
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(
        loss_module.model._no_split_modules
    )
    # The sharded weights are new tensors, so the optimizer is prepared as well.
    training_module, prepared = accelerator.prepare(loss_module, optimizer)
    return training_module, prepared.optimizer


def sync_gradients(
    module: torch.nn.Module, accelerator: Accelerator, *, enabled: bool
) -> contextlib.AbstractContextManager:
    """Control whether backward passes inside the block exchange gradients between processes.

    If not ``enabled``, each process accumulates its own full gradients until a later exchange.
    """
    if enabled:
        return contextlib.nullcontext()
    return accelerator.no_sync(module)


def compiler_of(accelerator: Accelerator) -> str:
    """Return the backend of torch.compile in lower case, or no."""
    return accelerator.state.dynamo_plugin.backend.value.lower()


def check_kernels(device: Device) -> None:
    """Raise BadInput if this build of torch has no kernels for the GPU."""
    if device.capability is None:
        return
    check = compatibility.check_architecture(
        device.name, device.capability, torch.cuda.get_arch_list()
    )
    if check.level == compatibility.ERROR:
        raise BadInput(f"{check.text}. To fix this: {check.fix}")


def check_cuda_graphs(gradient_accumulation_steps: int, accelerator: Accelerator) -> None:
    """Raise BadInput if CUDA graphs would be used with several micro-batches per step.

    A graph that runs again overwrites the gradients of the previous micro-batch
    (https://github.com/pytorch/pytorch/issues/169545).
    """
    mode = accelerator.state.dynamo_plugin.mode
    uses_graphs = accelerator.device.type == "cuda" and mode in CUDA_GRAPH_MODES
    if uses_graphs and gradient_accumulation_steps > 1:
        raise BadInput(
            f"compile_mode = {mode}: its CUDA graphs would overwrite the gradients of "
            f"{gradient_accumulation_steps} micro-batches per step. Use --compile_mode "
            f"max-autotune-no-cudagraphs, or a --tokens_per_step that fits into one micro-batch"
        )
