"""Formulas that estimate a run before it starts: memory by part, tokens per second, hours, energy.

The functions take and return plain values and import no torch. The formulas use these symbols:

- L: layers
- d: width of the model (``n_embd``)
- V: size of the vocabulary
- T: length of a sequence
- N: parameters
"""

import dataclasses
from collections.abc import Mapping

from ursa_minor.base.gpus import Gpu
from ursa_minor.base.run_files import COMPLETE, WEIGHTS
from ursa_minor.model.architectures import Shape
from ursa_minor.optim.optimizers import OPTIMIZERS
from ursa_minor.recipe import kept_steps, keys

# The two constants of the speed, fitted by benchmarks/estimate_cards.py to the speeds of plain
# PyTorch GPT-2 124M on 20 GPUs. All 20 were measured by others.
# FLOP/s at which matrix products as narrow as those of GPT-2 124M saturate on the fastest GPUs.
PRODUCT_LIMIT = 2.05e15
BANDWIDTH_SHARE = 0.75  # of the memory bandwidth in the data sheet
# The share of the estimated speed that a GPU without flash attention reaches. The V100 of
# languini-kitchen is the only one that was measured: it reached 0.40. The same code, which does not
# use flash attention, reached 0.50 to 0.59 of the estimate on newer GPUs.
WITHOUT_FLASH = 0.4

CONTEXT_BYTES = 0.8 * 2**30  # memory of CUDA and its libraries before the first tensor
MOST_TOKENS = 2**16  # in a micro-batch on one GPU
LOSS_ROWS = 2**13  # tokens whose logits exist at the same time (ursa_minor/model/loss.py)
# The buckets of DDP hold each gradient a second time, as if half a process shared it.
IN_BUCKETS = {"gradients": 0.5}
# Bytes per weight of a checkpoint: weights and two moments in fp32, or only the weights.
COMPLETE_BYTES = 12
WEIGHT_BYTES = 4
HEADROOM = 0.92  # share of the free memory to plan with; gaps in the allocator take the rest

GPT2_124M = Shape(12, 768, 50304, 1024)


def shape_of(model: keys.Model) -> Shape:
    """Return the size of a recipe's model."""
    values = {}
    for field in dataclasses.fields(Shape):
        value = getattr(model, field.name)
        if value is not None:
            values[field.name] = value
    return Shape(**values)


def moment_bytes(shape: Shape, optimizer: str = "adamw") -> float:
    """Return the bytes of the optimizer's state for all weights of a model."""
    bytes_per_weight = OPTIMIZERS[optimizer].moments
    embeddings = shape.parameters - shape.hidden - shape.vectors
    return (
        bytes_per_weight.hidden * shape.hidden
        + bytes_per_weight.embeddings * embeddings
        + bytes_per_weight.vectors * shape.vectors
    )


def memory(
    shape: Shape,
    *,
    micro_batch: int,
    half: bool,
    compiled: bool,
    checkpointing: str = "none",
    optimizer: str = "adamw",
    shards: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the bytes of memory that training takes on one GPU, by part.

    The formulas were fitted to the peaks of PyTorch's allocator (benchmarks/memory_card.py on the
    simulated GPU, tests/simulated_gpu/null at d33aee3).

    Args:
        micro_batch: number of sequences.
        half: whether matrix products are computed in bf16 or fp16, with weights in fp32.
        compiled: whether the model is compiled.
        checkpointing: the activations that the backward pass recomputes. ``none``: no activations.
            ``mlp``: the one between the two products of the MLP. ``full``: all in a block, of which
            only the input is saved.
        optimizer: a name of ``OPTIMIZERS``.
        shards: number of processes that share a part, by the name of the part: ``weights``,
            ``half copies``, ``gradients`` or ``moments``. For DDP, ``IN_BUCKETS``.

    Returns:
        Bytes of ``weights``, ``gradients``, ``moments``, ``half copies`` of the weights,
        ``activations``, ``logits``, ``fresh gradients`` and ``context``.
    """
    shards = shards or {}
    tokens = micro_batch * shape.sequence_length
    saved_per_token, recomputed_per_token = _activation_bytes_per_token(
        shape,
        half=half,
        compiled=compiled,
        checkpointing=checkpointing,
        half_stream=half and "weights" in shards,
    )
    activations = tokens * saved_per_token
    # Blocks are recomputed after the loss has freed its memory.
    logits = _loss_bytes(shape, tokens, half=half, compiled=compiled)
    temporary = max(logits, tokens * recomputed_per_token)

    half_weights = shape.parameters
    casts_each_block = half and compiled and checkpointing == "full"
    if casts_each_block or "half copies" in shards:
        # The weights of one block at a time exist in half precision. The head is the largest part.
        half_weights = shape.vocab_size * shape.n_embd

    fresh_gradients = 0.0
    if compiled:
        # A compiled backward pass returns all gradients together, to be added to the accumulated
        # ones. By then its activations are freed.
        fresh_gradients = max(0.0, 4.0 * shape.parameters - (activations + temporary))

    parts = {
        "weights": 4.0 * shape.parameters,
        "gradients": 4.0 * shape.parameters,
        "moments": moment_bytes(shape, optimizer),
        "half copies": 2.0 * half_weights if half else 0.0,
        "activations": float(activations),
        "logits": float(temporary),
        "fresh gradients": fresh_gradients,
        "context": CONTEXT_BYTES,
    }
    return {name: size / shards.get(name, 1) for name, size in parts.items()}


def _activation_bytes_per_token(
    shape: Shape, *, half: bool, compiled: bool, checkpointing: str, half_stream: bool
) -> tuple[int, int]:
    """Return the bytes per token that all blocks save, and that the recomputation of a block needs.

    Args:
        half_stream: whether the residual stream is in half precision, as with FSDP2.
    """
    saved_per_block, mlp_activation = shape.definition.saved_activation_bytes(
        shape, half=half, compiled=compiled, half_stream=half_stream
    )
    if checkpointing == "none":
        return shape.n_layer * saved_per_block, 0
    if checkpointing == "mlp":
        return shape.n_layer * (saved_per_block - mlp_activation), mlp_activation

    input_bytes = (2 if half_stream else 4) * shape.n_embd
    recomputed = saved_per_block
    if compiled and half:
        # The gradients within the block exist at the same time.
        recomputed += shape.definition.backward_bytes(shape)
    return shape.n_layer * input_bytes, recomputed


def _loss_bytes(shape: Shape, tokens: int, *, half: bool, compiled: bool) -> int:
    """Return the bytes that the loss takes at its peak.

    Logits exist for at most ``LOSS_ROWS`` tokens at the same time.

    - Compiled in half precision: 2 bytes per logit, the gradient of the head in fp32 (4 V d), and
      22 d per token.
    - Compiled in fp32: 5 bytes per logit.
    - Not compiled: 12 bytes per logit, for the logit, its fp32 copy, its log-softmax and its
      gradient.

    Except in the first case, a loss over more than ``LOSS_ROWS`` tokens, which is computed in
    chunks, adds 8 V d for the gradient of the head and the sum of those of earlier chunks, and 12 d
    per token for the last hidden state and its gradient, each complete and in chunks.
    """
    head = shape.vocab_size * shape.n_embd
    num_logits = min(tokens, LOSS_ROWS) * shape.vocab_size
    if compiled and half:
        return 2 * num_logits + 4 * head + 22 * shape.n_embd * tokens
    bytes_per_logit = 5 if compiled else 12
    size = num_logits * bytes_per_logit
    if tokens > LOSS_ROWS:
        size += 8 * head + 12 * shape.n_embd * tokens
    return size


def largest_micro_batch(
    shape: Shape, free_bytes: float, *, most_tokens: int = MOST_TOKENS, **memory_options
) -> int:
    """Return the largest micro-batch whose memory fits, or 0 if not even one sequence fits.

    Args:
        free_bytes: free memory of the GPU before the CUDA context is created.
        most_tokens: upper limit for the tokens of a micro-batch. A larger one would not be faster.
        memory_options: the other arguments of ``memory``.
    """
    largest = max(1, most_tokens // shape.sequence_length)
    for micro_batch in range(largest, 0, -1):
        parts = memory(shape, micro_batch=micro_batch, **memory_options)
        if sum(parts.values()) <= HEADROOM * free_bytes:
            return micro_batch
    return 0


def computed_flops(shape: Shape) -> int:
    """Return the FLOPs per token that causal kernels compute: 6 N + 6 L d T.

    A causal kernel skips half of the attention products that ``Shape.flops_per_token`` counts.
    """
    return shape.flops_per_token - 6 * shape.n_layer * shape.n_embd * shape.sequence_length


def memory_traffic_bytes(shape: Shape) -> float:
    """Return the bytes per token that all kernels except matrix products move.

    This is for a forward and a backward pass, compiled, in half precision: the traffic that the
    kernels of a block need at least (120 d for GPT-2) times 1.25, and 16 V for the loss.
    """
    blocks = 1.25 * shape.n_layer * shape.definition.memory_traffic_bytes(shape)
    return blocks + 16 * shape.vocab_size


def seconds_per_token(shape: Shape, gpu: Gpu) -> float:
    """Return the seconds per token on one GPU.

    Matrix products run at the rate that the GPU reaches. All other kernels run afterwards, at the
    speed of its memory.
    """
    seconds_per_flop = 1 / (1e12 * gpu.product_teraflops) + 1 / PRODUCT_LIMIT
    products = computed_flops(shape) * seconds_per_flop
    bytes_per_second = BANDWIDTH_SHARE * 1e9 * gpu.gigabytes_per_second
    seconds = products + memory_traffic_bytes(shape) / bytes_per_second
    if not gpu.is_ampere_or_newer:
        seconds /= WITHOUT_FLASH
    return seconds


def kept_checkpoints(
    recipe: keys.Recipe,
    *,
    first_step: int = 0,
    last_step: int | None = None,
    existing: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """Return the checkpoints of ``keep_checkpoints`` that a run folder will contain.

    Steps whose checkpoints the run keeps anyway, because ``save_total_limit`` is 0, are left out.

    Args:
        first_step: the step at which the run starts or continues.
        last_step: the step at which it ends. None for the last step of the recipe.
        existing: the kept checkpoints that the folder contains already.

    Returns:
        For each step, ``COMPLETE`` or ``WEIGHTS``.
    """
    saving = recipe.saving
    if last_step is None:
        last_step = recipe.schedule.total_steps
    steps = kept_steps.all_kept(
        saving.keep_checkpoints or (), last_step, recipe.batch.tokens_per_step
    )
    contents = COMPLETE if saving.keep_optimizer else WEIGHTS
    kept = dict(existing or {})
    kept |= {step: contents for step in steps if step >= first_step}
    if saving.save_steps and not saving.save_total_limit:
        kept = {step: kept[step] for step in kept if step == 0 or step % saving.save_steps}
    return kept


def bytes_of_kept(recipe: keys.Recipe, kept: Mapping[int, str]) -> float:
    """Return the bytes of kept checkpoints: fp32 weights and, if they are complete, two moments."""
    parameters = shape_of(recipe.model).parameters
    total = 0.0
    for contents in kept.values():
        bytes_per_weight = COMPLETE_BYTES if contents == COMPLETE else WEIGHT_BYTES
        total += bytes_per_weight * parameters
    return total


def written_bytes(
    recipe: keys.Recipe, kept: Mapping[int, str] | None = None
) -> tuple[float, float]:
    """Return the most bytes that a run writes: its checkpoints, and the token shards it reads.

    Args:
        kept: see ``kept_checkpoints``. None for those of the entire run.
    """
    shape = shape_of(recipe.model)
    max_steps = recipe.schedule.total_steps
    save_steps = recipe.saving.save_steps

    num_checkpoints = recipe.saving.save_total_limit
    if not num_checkpoints and save_steps:
        num_checkpoints = max_steps // save_steps
    # The stored checkpoints and the one being written.
    checkpoint_bytes = float(COMPLETE_BYTES * shape.parameters * (num_checkpoints + 1))
    if kept is None:
        kept = kept_checkpoints(recipe)
    checkpoint_bytes += bytes_of_kept(recipe, kept)

    sources = recipe.data.resolved_sources
    if all(source.is_token_folder for source in sources):
        return checkpoint_bytes, 0.0
    tokens = recipe.batch.tokens_per_step * max_steps
    if recipe.schedule.num_train_epochs is not None:
        tokens = round(tokens / max(1.0, recipe.schedule.num_train_epochs))
    if recipe.data.limit_tokens:
        tokens = min(tokens, recipe.data.limit_tokens)
    bytes_per_token = 2 if shape.vocab_size <= 65_536 else 4
    return checkpoint_bytes, float(tokens * bytes_per_token)


def speed_and_energy(
    shape: Shape,
    gpu: Gpu,
    *,
    tokens: int,
    tokens_per_step: int,
    work: float = 1.0,
    count: int = 1,
) -> dict[str, float]:
    """Return the speed of a run and the time and the energy that it takes.

    Args:
        tokens: number of tokens of the entire run.
        tokens_per_step: number of tokens of an update, on all GPUs together.
        work: FLOPs of an update, relative to one without gradient checkpointing.
        count: number of GPUs.

    Returns:
        ``tokens_per_second``, ``mfu`` (a share of the peak of all GPUs), ``hours`` and
        ``kilowatt_hours``.
    """
    step_seconds = work * seconds_per_token(shape, gpu) * tokens_per_step / count
    # The all-reduce: a ring moves 2 (n - 1) / n of the fp32 gradients over each link.
    link_bytes_per_second = 1e9 * gpu.link_gigabytes_per_second
    step_seconds += 2 * (count - 1) / count * 4 * shape.parameters / link_bytes_per_second

    tokens_per_second = tokens_per_step / step_seconds
    hours = tokens / tokens_per_second / 3600
    peak_flops = count * 1e12 * gpu.teraflops
    return {
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * shape.flops_per_token / peak_flops,
        "hours": hours,
        "kilowatt_hours": hours * count * gpu.watts / 1000,
    }
