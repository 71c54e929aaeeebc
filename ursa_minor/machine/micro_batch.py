"""The micro-batch: proposed by the memory model, tried before the first step, halved until it fits every process."""

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from ursa_minor.base.errors import BadInput, TrainingStopped, first_line, is_out_of_memory
from ursa_minor.base.stopping import StopRequest
from ursa_minor.base.wording import pluralize
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_cuda_graphs, compiler_of, sync_gradients
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import Plan, make_plan

log = logging.getLogger(__name__)

CPU_TOKENS = 2**13  # of a micro-batch that auto proposes without a card: more is not faster


def fit_micro_batch(
    recipe: keys.Recipe,
    training_module: nn.Module,
    accelerator: Accelerator,
    stop: StopRequest,
    *,
    begin: tuple[int | None, bool] = (None, False),
    moments_exist: bool = False,
) -> Plan:
    """Share a step after trying one micro-batch; auto: halve it until no process runs out of memory.

    FSDP2 keeps whole gradients until a step's last micro-batch if they find room beside the micro-batch, and exchanges
    them in each otherwise.

    Args:
        begin: where auto begins, instead of the memory model's proposal, and whether FSDP2 begins with an exchange in
            each micro-batch.
        moments_exist: whether the optimizer has allocated its moments, as in a resumed run.

    Raises BadInput, on all processes, when a given size does not fit, or not one sequence.
    """
    auto, ceiling = recipe.batch.per_device_train_batch_size == "auto", None
    device, exchange_each = accelerator.device, begin[1]
    recovers = hasattr(training_module, "reset_iter_state")  # FSDP2 from torch 2.13 on
    free = torch.tensor(
        [hardware.free_memory_bytes(device, accelerator.num_processes)], device=device
    )
    least_free = min(accelerator.gather(free).tolist())  # of all processes
    if auto:
        ceiling = begin[0] or propose_micro_batch(recipe, least_free, accelerator)

    shape = estimate.shape_of(recipe.model)
    how = _how(recipe, accelerator)
    # Memory that is not allocated yet.
    moments = 0 if moments_exist else estimate.memory(shape, micro_batch=1, **how)["moments"]

    def forward_and_backward(micro_batch: int) -> None:
        inputs_BT = torch.zeros(
            micro_batch, shape.sequence_length, dtype=torch.int64, device=device
        )
        # Two tensors and the same arguments as in training, or it would be compiled twice.
        # Under DDP gradients are not exchanged: another process may have failed.
        with sync_gradients(training_module, accelerator, enabled=accelerator.is_fsdp2):
            losses = training_module(inputs_BT, inputs_BT.clone(), with_cross_entropy=True)
            accelerator.backward(losses.objective)

    if compiler_of(accelerator) != "no":
        log.info("compiling: the first micro-batch takes a minute or two")
    while True:
        plan = make_plan(recipe, accelerator.num_processes, ceiling)
        size, several = plan.per_device_train_batch_size, plan.gradient_accumulation_steps > 1
        check_cuda_graphs(plan.gradient_accumulation_steps, accelerator)
        if accelerator.is_fsdp2:
            plan = dataclasses.replace(
                plan, exchange_each=several and (exchange_each or not recovers)
            )
            if not recovers:
                return plan
        # Whole gradients that wait are room: after a failure FSDP2 would add real ones to the next (torch 2.13).
        wait = accelerator.is_fsdp2 and several and not plan.exchange_each
        alike = accelerator.is_fsdp2 and device.type == "cuda"
        with equal_memory(least_free, device) if alike else contextlib.nullcontext():
            failed = runs_out_of_memory(
                functools.partial(forward_and_backward, size),
                training_module,
                micro_batches=1 if wait else plan.gradient_accumulation_steps,
                room_bytes=int(moments + (4 * shape.parameters if wait else 0)),
                device=device,
            )
        if not any(stop.any_of(failed)):
            return plan
        exchange_each, shown = wait, pluralize(size, "sequence", "sequences")
        if exchange_each:
            log.info(
                f"a micro-batch of {shown} beside whole gradients runs out of memory: trying without them"
            )
            continue
        ceiling = size // 2
        if not auto or not ceiling:
            raise BadInput(out_of_memory(recipe, size, device))
        log.info(f"a micro-batch of {shown} runs out of memory: trying {ceiling}")


@contextlib.contextmanager
def equal_memory(free_bytes: int, device: torch.device) -> Iterator[None]:
    """Let a process take ``free_bytes`` of its card inside the block, equal on all, so that all fail at the same place.

    FSDP2's forward pass is an exchange: the failure of one process alone would leave the others waiting in it. Its shards
    are padded to equal sizes.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(free_bytes / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def propose_micro_batch(recipe: keys.Recipe, free_bytes: float, accelerator: Accelerator) -> int:
    """Return where auto begins: the largest size that the memory model lets fit."""
    most = estimate.MOST_TOKENS if accelerator.device.type == "cuda" else CPU_TOKENS
    shape = estimate.shape_of(recipe.model)
    return max(
        1,
        estimate.largest_micro_batch(
            shape, free_bytes, most_tokens=most, **_how(recipe, accelerator)
        ),
    )


def _how(recipe: keys.Recipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return how the memory model is to count this run: the arguments of ``estimate.memory`` but for the sizes."""
    sharded = ["moments"] if recipe.optimizer.shard_optimizer else []
    if accelerator.is_fsdp2:
        sharded = ["weights", "gradients", "moments"]
        sharded += ["half copies"] if accelerator.state.fsdp_plugin.reshard_after_forward else []
    ddp = accelerator.num_processes > 1 and not accelerator.is_fsdp2
    return {
        "half": accelerator.mixed_precision != "no",
        "compiled": compiler_of(accelerator) != "no",
        "checkpointing": recipe.model.gradient_checkpointing,
        "optimizer": recipe.optimizer.optimizer,
        "shards": (estimate.IN_BUCKETS if ddp else {})
        | dict.fromkeys(sharded, accelerator.num_processes),
    }


def out_of_memory(recipe: keys.Recipe, size: int, device: torch.device) -> str:
    """Return the message of a lack of memory at a micro-batch of ``size`` sequences, with the fix."""
    return (
        f"per_device_train_batch_size = {recipe.batch.per_device_train_batch_size}: {hardware.device_name(device)} runs "
        f"out of memory at a micro-batch of {size} x {recipe.model.sequence_length} tokens. Use "
        f"--per_device_train_batch_size {max(1, size // 2)} or auto, or --gradient_checkpointing full, or on several cards "
        f"zero3_x8.yaml; what is learned stays the same. Else train a smaller model or length"
    )


@contextlib.contextmanager
def save_when_out_of_memory(
    recipe: keys.Recipe, plan: Plan, device: torch.device, save: Callable[[], object]
) -> Iterator[None]:
    """End the run with a checkpoint and a fix when memory runs out inside the block after all.

    This process does so alone: the others may be in an exchange already, and end with it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        save()
        message = out_of_memory(recipe, plan.per_device_train_batch_size, device)
        raise TrainingStopped(
            f"{message}; the run resumes from its newest checkpoint", alone=True
        ) from None


def runs_out_of_memory(
    forward_and_backward: Callable[[], None],
    module: nn.Module,
    *,
    micro_batches: int,
    room_bytes: int,
    device: torch.device,
) -> bool:
    """Return whether a step's micro-batches run out of memory, and leave nothing of them behind.

    Raises BadInput when the compiler cannot compile it.

    Args:
        forward_and_backward: of one micro-batch.
        module: whose gradients are made.
        micro_batches: of a step; of several two are tried, since the gradients of the first are there in the second.
        room_bytes: what must find room beside them: moments that the optimizer has not allocated yet.
    """
    failed = False
    try:
        room = torch.empty(room_bytes, dtype=torch.uint8, device=device)
        for _ in range(min(2, micro_batches)):
            forward_and_backward()
    except (RuntimeError, TorchDynamoException, InductorError) as error:
        # The exception is released after this block; its frames refer to tensors.
        failed = is_out_of_memory(error)
        if not failed:
            if not isinstance(error, (TorchDynamoException, InductorError)):
                raise
            reason = first_line(getattr(error, "inner_exception", None) or error)[:200]
            fix = 'dynamo_backend: "NO" in the accelerate YAML, or ACCELERATE_DYNAMO_BACKEND=no, trains without it'
            raise BadInput(
                f"torch.compile fails here: {reason}. check_setup.py has more; {fix}"
            ) from None
    finally:
        room = None  # noqa: F841  (freed here)
        for parameter in module.parameters():
            parameter.grad = None
    if failed:
        if hasattr(module, "reset_iter_state"):  # FSDP2: what an interrupted pass has gathered
            module.reset_iter_state()
        torch._dynamo.reset()  # a second size would be compiled as "any size", which is slower
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return failed
