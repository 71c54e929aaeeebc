"""Find the largest micro-batch that fits into the memory of every process.

The memory model proposes a size. It is tried before the first step, and halved until it fits.
"""

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

# Largest micro-batch in tokens that auto proposes on a CPU. A larger one is not faster.
CPU_TOKENS = 2**13


def fit_micro_batch(
    recipe: keys.Recipe,
    training_module: nn.Module,
    accelerator: Accelerator,
    stop: StopRequest,
    *,
    first_size: int | None = None,
    exchange_each: bool = False,
    moments_exist: bool = False,
) -> Plan:
    """Divide a step into micro-batches that fit into the memory of every process.

    Before the first step, this runs the forward and backward pass of up to two micro-batches. With
    per_device_train_batch_size = auto, the size is halved until no process runs out of memory.

    FSDP2 keeps unsharded gradients until the last micro-batch of a step if they fit into memory
    next to a micro-batch. Otherwise, it exchanges gradients in each micro-batch.

    Args:
        recipe: the recipe.
        training_module: the prepared model and loss.
        accelerator: the Accelerator of this process.
        stop: the request to stop, through which processes also share whether a trial failed.
        first_size: the size that auto tries first. Defaults to the proposal of the memory model.
        exchange_each: whether FSDP2 first tries to exchange gradients in each micro-batch.
        moments_exist: whether the optimizer has allocated its moments, as in a resumed run.

    Raises:
        BadInput: on all processes, if the size of the recipe does not fit, or with auto not even a
            single sequence.
    """
    device = accelerator.device
    free_bytes = hardware.free_memory_bytes(device, accelerator.num_processes)
    free_of_each = accelerator.gather(torch.tensor([free_bytes], device=device))
    least_free_bytes = min(free_of_each.tolist())
    is_auto = recipe.batch.per_device_train_batch_size == "auto"
    ceiling = None
    if is_auto:
        ceiling = first_size or propose_micro_batch(recipe, least_free_bytes, accelerator)
    future_bytes = 0.0 if moments_exist else _moment_bytes(recipe, accelerator)
    trial = _Trial(recipe, training_module, accelerator, least_free_bytes, future_bytes)

    if compiler_of(accelerator) != "no":
        log.info("compiling: the first micro-batch takes a minute or two")
    # From torch 2.13 on, FSDP2 can recover from an interrupted pass. Before, nothing is tried.
    can_recover = hasattr(training_module, "reset_iter_state")
    while True:
        plan = make_plan(recipe, accelerator.num_processes, ceiling)
        check_cuda_graphs(plan.gradient_accumulation_steps, accelerator)
        if accelerator.is_fsdp2:
            accumulates = plan.gradient_accumulation_steps > 1
            must_exchange = exchange_each or not can_recover
            plan = dataclasses.replace(plan, exchange_each=accumulates and must_exchange)
            if not can_recover:
                return plan

        (any_failed,) = stop.any_of(trial.fails(plan))
        if not any_failed:
            return plan

        size = plan.per_device_train_batch_size
        sequences = pluralize(size, "sequence", "sequences")
        exchange_each = trial.keeps_gradients(plan)
        if exchange_each:
            log.info(
                f"a micro-batch of {sequences} next to unsharded gradients runs out of memory: "
                f"trying to exchange gradients in each micro-batch"
            )
            continue
        ceiling = size // 2
        if not is_auto or ceiling == 0:
            raise BadInput(out_of_memory(recipe, size, device))
        log.info(f"a micro-batch of {sequences} runs out of memory: trying {ceiling}")


def _moment_bytes(recipe: keys.Recipe, accelerator: Accelerator) -> float:
    """Return the bytes of the moments that the first update allocates on one process."""
    shape = estimate.shape_of(recipe.model)
    parts = estimate.memory(shape, micro_batch=1, **_memory_settings(recipe, accelerator))
    return parts["moments"]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Trials of a micro-batch on this process.

    Attributes:
        recipe: the recipe.
        module: the prepared model and loss.
        accelerator: the Accelerator of this process.
        least_free_bytes: the smallest free memory of all processes.
        future_bytes: memory that the first update will allocate.
    """

    recipe: keys.Recipe
    module: nn.Module
    accelerator: Accelerator
    least_free_bytes: int
    future_bytes: float

    def keeps_gradients(self, plan: Plan) -> bool:
        """Return whether FSDP2 keeps unsharded gradients between the micro-batches of a plan."""
        accumulates = plan.gradient_accumulation_steps > 1
        return self.accelerator.is_fsdp2 and accumulates and not plan.exchange_each

    def fails(self, plan: Plan) -> bool:
        """Return whether this process runs out of memory with a plan."""
        # Unsharded gradients are simulated by reserved memory. After a failure, FSDP2 would add
        # real ones to those of the next trial (torch 2.13).
        micro_batches = plan.gradient_accumulation_steps
        reserved_bytes = self.future_bytes
        if self.keeps_gradients(plan):
            micro_batches = 1
            reserved_bytes += 4 * estimate.shape_of(self.recipe.model).parameters
        with _equal_memory_under_fsdp2(self.least_free_bytes, self.accelerator):
            return runs_out_of_memory(
                functools.partial(self._forward_and_backward, plan.per_device_train_batch_size),
                self.module,
                micro_batches=micro_batches,
                reserved_bytes=int(reserved_bytes),
                device=self.accelerator.device,
            )

    def _forward_and_backward(self, micro_batch: int) -> None:
        inputs_BT = torch.zeros(
            micro_batch,
            self.recipe.model.sequence_length,
            dtype=torch.int64,
            device=self.accelerator.device,
        )
        # Two tensors and the same arguments as in training, or it would be compiled twice.
        # Under DDP, gradients are not exchanged, because another process may have failed.
        with sync_gradients(self.module, self.accelerator, enabled=self.accelerator.is_fsdp2):
            losses = self.module(inputs_BT, inputs_BT.clone(), with_cross_entropy=True)
            self.accelerator.backward(losses.objective)


def _equal_memory_under_fsdp2(
    free_bytes: int, accelerator: Accelerator
) -> contextlib.AbstractContextManager:
    if accelerator.is_fsdp2 and accelerator.device.type == "cuda":
        return equal_memory(free_bytes, accelerator.device)
    return contextlib.nullcontext()


@contextlib.contextmanager
def equal_memory(free_bytes: int, device: torch.device) -> Iterator[None]:
    """Limit the GPU memory of this process to ``free_bytes`` inside the block.

    With an equal limit, all processes run out of memory at the same point, because the shards of
    FSDP2 are padded to equal sizes. Its forward pass exchanges weights, so a process that fails
    alone would leave the others waiting.
    """
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(free_bytes / total_bytes, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def propose_micro_batch(recipe: keys.Recipe, free_bytes: float, accelerator: Accelerator) -> int:
    """Return the largest micro-batch that fits according to the memory model, at least 1.

    Args:
        recipe: the recipe.
        free_bytes: free memory of the device.
        accelerator: the Accelerator of this process.
    """
    most_tokens = estimate.MOST_TOKENS if accelerator.device.type == "cuda" else CPU_TOKENS
    size = estimate.largest_micro_batch(
        estimate.shape_of(recipe.model),
        free_bytes,
        most_tokens=most_tokens,
        **_memory_settings(recipe, accelerator),
    )
    return max(1, size)


def _memory_settings(recipe: keys.Recipe, accelerator: Accelerator) -> dict[str, Any]:
    """Return the arguments of ``estimate.memory`` for this run, except the sizes."""
    num_processes = accelerator.num_processes
    # Number of processes that share each part of the memory.
    shards: dict[str, float] = {}
    if num_processes > 1 and not accelerator.is_fsdp2:
        shards.update(estimate.IN_BUCKETS)
    if accelerator.is_fsdp2:
        for part in ("weights", "gradients", "moments"):
            shards[part] = num_processes
        if accelerator.state.fsdp_plugin.reshard_after_forward:
            shards["half copies"] = num_processes
    elif recipe.optimizer.shard_optimizer:
        shards["moments"] = num_processes
    return {
        "half": accelerator.mixed_precision != "no",
        "compiled": compiler_of(accelerator) != "no",
        "checkpointing": recipe.model.gradient_checkpointing,
        "optimizer": recipe.optimizer.optimizer,
        "shards": shards,
    }


def out_of_memory(recipe: keys.Recipe, size: int, device: torch.device) -> str:
    """Return the error message for a micro-batch of ``size`` sequences that does not fit."""
    name = hardware.device_name(device)
    return (
        f"per_device_train_batch_size = {recipe.batch.per_device_train_batch_size}: {name} runs "
        f"out of memory at a micro-batch of {size} x {recipe.model.sequence_length} tokens. Use "
        f"--per_device_train_batch_size {max(1, size // 2)} or auto, --gradient_checkpointing "
        f"full, or zero3_x8.yaml on several GPUs. These are not hyperparameters. "
        f"Otherwise train a smaller model, or use a shorter --sequence_length"
    )


@contextlib.contextmanager
def save_when_out_of_memory(
    recipe: keys.Recipe, plan: Plan, device: torch.device, save: Callable[[], object]
) -> Iterator[None]:
    """Save a checkpoint and stop the run if memory runs out inside the block.

    This process does so alone. The others may be waiting in an exchange, and stop when it fails.

    Args:
        recipe: the recipe.
        plan: how a step is divided into micro-batches.
        device: the device of this process.
        save: function that saves a checkpoint.

    Raises:
        TrainingStopped: memory ran out. The message says how to use less.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        save()
        message = out_of_memory(recipe, plan.per_device_train_batch_size, device)
        raise TrainingStopped(
            f"{message}. The run resumes from its newest checkpoint", print_on_every_process=True
        ) from None


def runs_out_of_memory(
    forward_and_backward: Callable[[], None],
    module: nn.Module,
    *,
    micro_batches: int,
    reserved_bytes: int,
    device: torch.device,
) -> bool:
    """Return whether the micro-batches of a step run out of memory.

    Afterwards, their gradients and memory are freed.

    Args:
        forward_and_backward: function that runs one micro-batch.
        module: the module whose gradients it computes.
        micro_batches: number of micro-batches per step. At most two are tried, because the
            gradients of the first one are in memory during the second one.
        reserved_bytes: memory that must remain free, for tensors that are allocated later.
        device: the device of this process.

    Raises:
        BadInput: torch.compile failed for another reason.
    """
    failed = False
    reserved = None
    try:
        reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
        for _ in range(min(2, micro_batches)):
            forward_and_backward()
    except (RuntimeError, TorchDynamoException, InductorError) as error:
        # The memory is freed after this block, because the error refers to frames with tensors.
        failed = is_out_of_memory(error)
        if not failed:
            _raise_if_compiler_failed(error)
            raise
    finally:
        del reserved
        for parameter in module.parameters():
            parameter.grad = None
    if failed:
        # FSDP2: discard the weights that the interrupted pass has gathered.
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()
        # Otherwise the next size would be compiled for any size, which is slower.
        torch._dynamo.reset()
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return failed


def _raise_if_compiler_failed(error: Exception) -> None:
    """Raise BadInput if an error is one of torch.compile."""
    if not isinstance(error, (TorchDynamoException, InductorError)):
        return
    cause = getattr(error, "inner_exception", None) or error
    raise BadInput(
        f"torch.compile fails on this machine: {first_line(cause)[:200]}. Run check_setup.py for "
        f'details. To train without it, write dynamo_backend: "NO" in the accelerate YAML, or use '
        f"accelerate launch --quiet --dynamo_backend no"
    ) from None
