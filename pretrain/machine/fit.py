"""The micro-batch: proposed by the memory model, tried before the first step, halved until it fits every process."""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate import Accelerator
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from pretrain.base.errors import BadInput, TrainingStopped, first_line, is_out_of_memory
from pretrain.base.stopping import StopRequest
from pretrain.machine import estimate, hardware
from pretrain.machine.accelerator import compiler_of, refuse_cuda_graphs, sync_gradients
from pretrain.recipe import keys
from pretrain.recipe.plan import Plan, make_plan

log = logging.getLogger(__name__)

CPU_TOKENS = 2**13  # of a micro-batch that auto proposes without a card: more is not faster


def fit_micro_batch(
    recipe: keys.Recipe,
    training_module: nn.Module,
    accelerator: Accelerator,
    stop: StopRequest,
    *,
    begin: int | None = None,
    moments_exist: bool = False,
) -> Plan:
    """Share a step after trying one micro-batch; auto: halve it until no process runs out of memory.

    Args:
        begin: where auto begins, instead of the memory model's proposal.
        moments_exist: whether the optimizer has allocated its moments, as in a resumed run.

    Raises BadInput, on all processes, when a given size does not fit, or not one sequence.
    """
    auto, ceiling = recipe.batch.per_device_train_batch_size == "auto", None
    if auto:
        free_bytes = hardware.free_memory_bytes(accelerator.device, accelerator.num_processes)
        mine = begin or propose_micro_batch(recipe, free_bytes, accelerator)
        ceiling = min(accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist())

    def forward_and_backward(micro_batch: int) -> None:
        shape = micro_batch, recipe.model.sequence_length
        inputs_BT = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
        # No exchange, for another process may have failed. Two tensors, as in training: one compiles otherwise.
        with sync_gradients(training_module, accelerator, enabled=False):
            accelerator.backward(training_module(inputs_BT, inputs_BT.clone()))

    if compiler_of(accelerator) != "no":
        log.info("compiling: the first micro-batch takes a minute or two")
    while True:
        plan = make_plan(recipe, accelerator.num_processes, ceiling)
        size = plan.per_device_train_batch_size
        refuse_cuda_graphs(plan.gradient_accumulation_steps, accelerator)
        if accelerator.is_fsdp2:  # its forward pass is an exchange: one process's failure would leave the rest waiting
            return plan
        failed = runs_out_of_memory(
            functools.partial(forward_and_backward, size),
            training_module.parameters(),
            micro_batches=plan.gradient_accumulation_steps,
            room_bytes=0 if moments_exist else moment_bytes(recipe, accelerator),
            device=accelerator.device,
        )
        if not any(stop.any_of(failed)):
            return plan
        ceiling = size // 2
        if not auto or not ceiling:
            raise BadInput(out_of_memory(recipe, size, accelerator.device))
        log.info(f"a micro-batch of {size} sequences runs out of memory: trying {ceiling}")


def propose_micro_batch(recipe: keys.Recipe, free_bytes: float, accelerator: Accelerator) -> int:
    """Return where auto begins: the largest size that the memory model lets fit."""
    sharded = {"moments"} if recipe.optimizer.shard_optimizer else set()
    if accelerator.is_fsdp2:
        sharded = {"weights", "gradients", "moments"}
        sharded |= {"half copies"} if accelerator.state.fsdp_plugin.reshard_after_forward else set()
    fits = estimate.largest_micro_batch(
        estimate.shape_of(recipe.model),
        free_bytes,
        most_tokens=estimate.MOST_TOKENS if accelerator.device.type == "cuda" else CPU_TOKENS,
        half=accelerator.mixed_precision != "no",
        compiled=compiler_of(accelerator) != "no",
        checkpointing=recipe.model.gradient_checkpointing,
        optimizer=recipe.optimizer.optimizer,
        shards=dict.fromkeys(sharded, accelerator.num_processes),
    )
    return max(1, fits)


def moment_bytes(recipe: keys.Recipe, accelerator: Accelerator) -> int:
    """Return the bytes that the optimizer will keep on this process's device."""
    whole = estimate.moment_bytes(estimate.shape_of(recipe.model), recipe.optimizer.optimizer)
    return int(whole / (accelerator.num_processes if recipe.optimizer.shard_optimizer else 1))


def out_of_memory(recipe: keys.Recipe, size: int, device: torch.device) -> str:
    """Return the message of a lack of memory at a micro-batch of ``size`` sequences, with the remedy."""
    asked, length = recipe.batch.per_device_train_batch_size, recipe.model.sequence_length
    remedies = [f"--per_device_train_batch_size {size // 2}{' or auto' if asked != 'auto' else ''}"] if size > 1 else []
    remedies += [] if recipe.model.gradient_checkpointing == "full" else ["--gradient_checkpointing full"]
    remedies += [] if size > 1 else ["on several cards zero3_x8.yaml"]
    same = f"Use {', or '.join(remedies)}; what is learned stays the same" if remedies else "Nothing smaller is left"
    begun = "" if size > 1 else ". Else begin another run with a smaller model or --sequence_length"
    return (
        f"per_device_train_batch_size = {asked}: {hardware.device_name(device)} runs out of memory at a micro-batch of "
        f"{size} x {length} tokens. {same}{begun}"
    )


@contextlib.contextmanager
def save_when_out_of_memory(
    recipe: keys.Recipe, plan: Plan, device: torch.device, save: Callable[[], object]
) -> Iterator[None]:
    """End the run with a checkpoint and a remedy when memory runs out inside the block after all.

    This process does so alone: the others may be in an exchange already, and end with it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        save()
        message = out_of_memory(recipe, plan.per_device_train_batch_size, device)
        raise TrainingStopped(f"{message}; the run resumes from its newest checkpoint", alone=True) from None


def runs_out_of_memory(
    forward_and_backward: Callable[[], None],
    parameters: Iterable[nn.Parameter],
    *,
    micro_batches: int,
    room_bytes: int,
    device: torch.device,
) -> bool:
    """Return whether a step's micro-batches run out of memory, and leave nothing of them behind.

    Raises BadInput when the compiler cannot compile it.

    Args:
        forward_and_backward: of one micro-batch, without an exchange of gradients.
        parameters: whose gradients are made.
        micro_batches: of a step; of several two are tried, since the gradients of the first are there in the second.
        room_bytes: what must find room beside them: moments that the optimizer has not allocated yet.
    """
    parameters = list(parameters)
    failed = False
    try:
        room = torch.empty(room_bytes, dtype=torch.uint8, device=device)
        for _ in range(min(2, micro_batches)):
            forward_and_backward()
    except (RuntimeError, TorchDynamoException, InductorError) as error:
        failed = is_out_of_memory(error)  # the exception, whose frames hold tensors, is gone after this block
        if not failed and isinstance(error, (TorchDynamoException, InductorError)):
            cause = getattr(error, "inner_exception", None) or error
            reason = first_line(cause)[:200]
            raise BadInput(
                f"torch.compile fails on this machine: {reason}. check_setup.py has more; without the "
                f'compiler: dynamo_backend: "NO" in the accelerate YAML, or ACCELERATE_DYNAMO_BACKEND=no'
            ) from None
        if not failed:
            raise
    finally:
        room = None  # noqa: F841  (freed here)
        for parameter in parameters:
            parameter.grad = None
    if failed:
        torch._dynamo.reset()  # a second size would be compiled as "any size", which is slower
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return failed
