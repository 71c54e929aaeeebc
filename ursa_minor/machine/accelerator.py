"""The Accelerator: made as the accelerate YAML says, refused where the machine cannot, and what it wraps."""

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
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

MEETING_SECONDS = 0.05


def make_accelerator(
    device: Device, machine: keys.Machine | None = None, *, precision: str | None = None
) -> Accelerator:
    """Build the Accelerator as the accelerate YAML says, or, when none is given, as a preset would.

    Args:
        machine: None: every key's default.
        precision: without a YAML: this one (no, fp16, bf16); None: the best that the device has.

    Raises BadInput when the YAML or ``machine`` asks for what the device cannot do, with the fix, and for a launch
    that is incomplete.
    """
    machine = machine or keys.Machine()
    check_launch(os.environ)
    check_supported(device, os.environ, machine.tf32, machine.compile_mode)
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    wanted = os.environ["ACCELERATE_MIXED_PRECISION"] if launched else precision or device.precision
    # Otherwise a GPU adds up some gradients in the order in which its threads finish.
    if machine.deterministic:
        # cuBLAS reads this when it creates its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = (
            False  # finds errors only, and costs a pass over memory
        )
        torch._inductor.config.deterministic = (
            True  # or timings choose between kernels that round differently
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and device.kind == "cpu":  # otherwise Accelerate starts each process alone
        os.environ["ACCELERATE_USE_CPU"] = "true"
    timeout = timedelta(seconds=machine.ddp_timeout)
    _rendezvous(device, timeout)
    # None: what the launcher has written into the environment.
    backend = "inductor" if not launched and device.compiles else None
    mode = machine.compile_mode if machine.compile_mode != "default" else None
    compiler = TorchDynamoPlugin(backend=backend, mode=mode)
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(timeout=timeout),
    ]
    accelerator = Accelerator(
        mixed_precision=wanted, dynamo_plugin=compiler, kwargs_handlers=handlers
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
    use_tf32 = device.has_tf32 if machine.tf32 == "auto" else machine.tf32
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    return accelerator


def _rendezvous(device: Device, timeout: timedelta) -> None:
    """Connect the processes of a launch that starts lost ones anew, under a name of this start's own.

    The launchers' store outlives the processes: it still holds the addresses of the dead ones, and the new ones would
    call them (torch 2.13; https://github.com/pytorch/pytorch/issues/135712). Accelerate takes what is connected.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(
            rendezvous_name(store, rank, world_size, timeout.total_seconds()), store
        )
        here = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        dist.init_process_group("nccl" if device.kind == "cuda" else "gloo", **here)


def rendezvous_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a name that the processes alive now have in common, and that none before them had.

    Process 0 makes it and hands it to each that asks, until all have it; one that asked and died is answered in vain.
    The launchers' count of restarts is no such name: each machine counts for itself, and where its processes are started
    anew for another machine's sake it does not count.

    Raises TrainingStopped where one is missing for ``timeout`` seconds.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank:
        store.set(f"ask/{rank}", mine)
        with raise_on_lost_peer():
            name = store.get(f"answer/{mine}").decode()  # waits
        store.set(f"have/{name}/{rank}", "")
        return name
    missing = set(range(1, world_size))
    while missing:
        if time.monotonic() > until:
            late = pluralize(len(missing), "process", "processes")
            raise TrainingStopped(
                f"{late} did not come within {timeout:g} s (--ddp_timeout)", alone=True
            )
        for other in missing:
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", mine)
        time.sleep(MEETING_SECONDS)
        missing = {other for other in missing if not store.check([f"have/{mine}/{other}"])}
    return mine


def autocast(accelerator: Accelerator) -> contextlib.AbstractContextManager:
    """Compute in the run's mixed precision inside the block, also where FSDP does without autocast."""
    dtype = HALF_DTYPES.get(accelerator.mixed_precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(accelerator.device.type, dtype)


def check_supported(
    device: Device,
    environment: Mapping[str, str],
    tf32: bool | str = "auto",
    compile_mode: str = "default",
) -> None:
    """Raise BadInput with a line for each thing that the launcher's YAML or a setting asks for and ``device`` has not.

    Args:
        environment: as ``accelerate launch`` and ``torchrun`` set it.
    """
    wanted = environment.get("ACCELERATE_MIXED_PRECISION", device.precision)
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    # Without a launcher, make_accelerator chooses.
    if device.compiles and "ACCELERATE_MIXED_PRECISION" not in environment:
        compiler = "inductor"
    cpu, fsdp, deepspeed = (
        environment.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"
        for name in ("CPU", "FSDP", "DEEPSPEED")
    )
    card, processes = device.kind == "cuda", int(environment.get("LOCAL_WORLD_SIZE", "1"))
    why = (
        "is too old for its compiler, Triton"
        if device.compiler
        else "has no Triton here (pip install triton)"
    )
    broken = compatibility.BROKEN.get(("accelerate", accelerate.__version__))
    # fmt: off
    table = [
        (wanted == "fp8",
         "mixed_precision: fp8 is not supported here (docs/knobs.md says why); write mixed_precision: bf16"),
        (not card and (wanted == "fp16" or (wanted == "bf16" and device.kind == "cpu" and not cpu)),  # asked for: slow
         f"mixed_precision: {wanted}: the accelerate YAML is for a GPU, and PyTorch sees none (does nvidia-smi? is torch a "
         f"CPU build? run check_setup.py). Without a GPU: make train, or --config_file accelerate_configs/cpu.yaml"),
        (wanted == "bf16" and card and device.precision != "bf16",
         f"mixed_precision: bf16: {device.name} has no bf16; write mixed_precision: fp16 in the accelerate YAML"),
        (compiler == "inductor" and card and not device.compiles,
         f'dynamo_backend: INDUCTOR: {device.name} {why}; write dynamo_backend: "NO", or take conservative.yaml'),
        (compile_mode != "default" and (compiler != "inductor" or (compile_mode == "reduce-overhead" and not card)),
         f"compile_mode = {compile_mode}: has no effect with dynamo_backend: {compiler.upper()} on {device.name}; it needs "
         f"INDUCTOR, and reduce-overhead, by CUDA graphs, an NVIDIA card. Use --compile_mode default"),
        (card and processes > device.count,
         f"num_processes: {processes}, and PyTorch sees {pluralize(device.count, 'card', 'cards')} on this machine; write "
         f"num_processes: {device.count}, or check CUDA_VISIBLE_DEVICES"),
        (environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1",
         "gradient_accumulation_steps is derived here from tokens_per_step; take it out of the YAML and the environment"),
        (deepspeed,
         "distributed_type: DEEPSPEED is not used here; take zero1_x8.yaml, zero2_x8.yaml or zero3_x8.yaml instead"),
        # Without cards Accelerate would start processes that know nothing of each other.
        (fsdp and (not card or environment.get("FSDP_VERSION", "1") != "2" or wanted == "fp16"),
         "distributed_type: FSDP (ACCELERATE_USE_FSDP) needs NVIDIA cards, fsdp_version: 2 and mixed_precision: bf16 (an "
         "fp16 scaler is not supported); correct the accelerate YAML, or take accelerate_configs/cpu.yaml"),
        (fsdp and broken is not None,
         f"distributed_type: FSDP: with accelerate {accelerate.__version__}, {broken}; pip install -r requirements.txt"),
        (tf32 is True and not device.has_tf32,
         f"tf32 = true: {device.name} has no TF32 (Ampere and later have); use --tf32 auto"),
    ]
    # fmt: on
    if problems := [message for applies, message in table if applies]:
        raise BadInput(problems)


def prepare(
    loss_module: NextTokenLoss, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the module that returns the loss, wrapped (DDP, FSDP2), compiled and autocast, and the optimizer of it."""
    # The sharded weights are new tensors, which the optimizer needs.
    if accelerator.is_fsdp2:
        # Weights are gathered a block at a time.
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(
            loss_module.model._no_split_modules
        )
        training_module, prepared = accelerator.prepare(loss_module, optimizer)
        return training_module, prepared.optimizer
    return accelerator.prepare(loss_module), optimizer


def sync_gradients(
    module: torch.nn.Module, accelerator: Accelerator, *, enabled: bool
) -> contextlib.AbstractContextManager:
    """Exchange gradients between processes in this backward pass, or leave them, whole, for a later one."""
    return contextlib.nullcontext() if enabled else accelerator.no_sync(module)


def compiler_of(accelerator: Accelerator) -> str:
    """Return the backend of torch.compile, or no."""
    return accelerator.state.dynamo_plugin.backend.value.lower()


def check_kernels(device: Device) -> None:
    """Raise BadInput where this build of torch has no kernels for the card: its first product would be a traceback."""
    if device.capability is not None:
        verdict = compatibility.check_architecture(
            device.name, device.capability, torch.cuda.get_arch_list()
        )
        if verdict.level == compatibility.ERROR:
            raise BadInput(f"{verdict.text}; {verdict.fix}")


def check_cuda_graphs(gradient_accumulation_steps: int, accelerator: Accelerator) -> None:
    """Raise BadInput for CUDA graphs and several micro-batches: a graph run again overwrites gradients that wait.

    https://github.com/pytorch/pytorch/issues/169545
    """
    mode, count = accelerator.state.dynamo_plugin.mode, gradient_accumulation_steps
    if (
        accelerator.device.type == "cuda"
        and mode in ("reduce-overhead", "max-autotune")
        and count > 1
    ):
        fix = (
            "use --compile_mode max-autotune-no-cudagraphs, or a --tokens_per_step that fits in one"
        )
        problem = f"its CUDA graphs would overwrite the gradients of {count} micro-batches a step"
        raise BadInput(f"compile_mode = {mode}: {problem}; {fix}")
