"""Estimates of a run before it starts: memory by part, tokens per second, hours, energy, cost. All estimated.

Plain values in, plain values out. Legend: L layers, d width, K width of all heads of the keys, F width within the MLP,
V vocabulary, T context, B sequences of a micro-batch.
"""

import dataclasses
from collections.abc import Mapping

from ursa_minor.base.gpus import Gpu
from ursa_minor.model.architectures import Shape
from ursa_minor.optim.optimizers import OPTIMIZERS
from ursa_minor.recipe import keys

# Fitted to plain PyTorch GPT-2 124M on 20 cards, measured by others (benchmarks/estimate_cards.py); none by us.
PRODUCT_LIMIT = (
    2.05e15  # FLOP/s: what keeps products as narrow as these from the fastest cards' rates
)
BANDWIDTH_SHARE = 0.75  # of the data sheet's
# What a card without flash attention reaches of all this: languini-kitchen's V100, the only one measured, reached 0.40;
# the same code, which does not use flash attention, reached 0.50 to 0.59 on newer cards.
WITHOUT_FLASH = 0.4
CONTEXT_BYTES = 0.8 * 2**30  # what CUDA and its libraries take of a card before the first tensor
MOST_TOKENS = 2**16  # of a micro-batch on a card
LOSS_ROWS = 2**13  # tokens whose logits exist at once (ursa_minor/model/loss.py)
# "shared by half a process": DDP's buckets hold each gradient once more.
IN_BUCKETS = {"gradients": 0.5}
HEADROOM = 0.92  # of the free memory may be planned: the allocator's gaps take the rest

GPT2_124M = Shape(12, 768, 50304, 1024)


def shape_of(model: keys.Model) -> Shape:
    """Return the size of a recipe's model."""
    stated = {field.name: getattr(model, field.name) for field in dataclasses.fields(Shape)}
    return Shape(**{name: value for name, value in stated.items() if value is not None})


def moment_bytes(shape: Shape, optimizer: str = "adamw") -> float:
    """Return the bytes that the optimizer keeps of all weights, by its record's bytes a weight."""
    kept = OPTIMIZERS[optimizer].moments
    embeddings = shape.parameters - shape.hidden - shape.vectors
    return kept.hidden * shape.hidden + kept.embeddings * embeddings + kept.vectors * shape.vectors


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
    """Return the bytes that training takes on one card, by part.

    Args:
        half: matrix products in bf16 or fp16 over fp32 weights.
        checkpointing: what is computed again: none; mlp: the activation between the MLP's products; full: a block, of
            which the input only is kept.
        shards: how many processes share a part: weights, half copies, gradients, moments. Of DDP, ``IN_BUCKETS`` too.

    Not compiled, a logit is there as itself, fp32, log-softmax and gradient: 12 bytes; with more tokens than ``LOSS_ROWS``
    the logits of so many, the head's gradient in fp32 beside the summed one, and of each token its last hidden state and
    that one's gradient, whole and in parts, 12 d. Compiled in half precision: the logits of so many, the head's gradient
    once, 22 d a token; in fp32 5 bytes a logit. What is computed again of one block stands in the logits' place when
    these are gone; compiled and "full" it stands with the gradients within the block, and its casts
    of weights are made again too. Fitted to the allocator of a card (benchmarks/memory_card.py on the null card,
    tests/simulated_gpu/null at d33aee3).
    """
    tokens, d, n = micro_batch * shape.sequence_length, shape.n_embd, shape.parameters
    shards = shards or {}
    half_stream = half and "weights" in shards
    block, again = shape.definition.saved_activation_bytes(
        shape, half=half, compiled=compiled, half_stream=half_stream
    )
    small = compiled and half
    backward = shape.definition.backward_bytes(shape) if small else 0
    kept, later = {
        "none": (shape.n_layer * block, 0),
        "mlp": (shape.n_layer * (block - again), again),
        "full": (shape.n_layer * (2 if half_stream else 4) * d, block + backward),
    }[checkpointing]
    head = shape.vocab_size * d
    if small:
        logits = 2 * min(tokens, LOSS_ROWS) * shape.vocab_size + 4 * head + 22 * d * tokens
    else:
        logits = min(tokens, LOSS_ROWS) * shape.vocab_size * (5 if compiled else 12)
        logits += 8 * head + 12 * d * tokens if tokens > LOSS_ROWS else 0
    # Of the weights in half precision there is one block at a time where it is gathered, or cast, again.
    cast = head if (small and checkpointing == "full") or "half copies" in shards else n
    passing = tokens * kept + max(logits, tokens * later)
    part = {
        "weights": 4.0 * n,
        "gradients": 4.0 * n,
        "moments": moment_bytes(shape, optimizer),
        "half copies": 2.0 * cast if half else 0.0,
        "activations": float(tokens * kept),
        "logits": float(max(logits, tokens * later)),
        # A compiled backward pass hands over all gradients at once, to be added to those there are, when its
        # activations are gone.
        "fresh gradients": max(0.0, 4.0 * n - passing) if compiled else 0.0,
        "context": CONTEXT_BYTES,
    }
    return {name: size / shards.get(name, 1) for name, size in part.items()}


def largest_micro_batch(
    shape: Shape, free_bytes: float, *, most_tokens: int = MOST_TOKENS, **how
) -> int:
    """Return the largest micro-batch whose memory fits; 0: not even one sequence does.

    Args:
        free_bytes: of the whole card, before CUDA's context.
        most_tokens: of a micro-batch; more is not faster.
        how: the arguments of ``memory``.
    """
    sizes = range(max(1, most_tokens // shape.sequence_length), 0, -1)
    fitting = (
        n
        for n in sizes
        if sum(memory(shape, micro_batch=n, **how).values()) <= HEADROOM * free_bytes
    )
    return next(fitting, 0)


def computed_flops(shape: Shape) -> int:
    """Return the FLOPs a token that causal kernels compute: 6 N + 6 L d T, half of the attention products."""
    return shape.flops_per_token - 6 * shape.n_layer * shape.n_embd * shape.sequence_length


def memory_traffic_bytes(shape: Shape) -> float:
    """Return the bytes a token that are moved beside matrix products, forward and backward, half precision, compiled.

    That is 1.25 times what a block's kernels other than matrix products must move (GPT-2's 120 d: 150 d), and the
    loss's 16 V.
    """
    return (
        1.25 * shape.n_layer * shape.definition.memory_traffic_bytes(shape) + 16 * shape.vocab_size
    )


def seconds_per_token(shape: Shape, card: Gpu) -> float:
    """Return one card's seconds a token: matrix products at the rate that it reaches, then all else at its bandwidth."""
    products = computed_flops(shape) * (1 / (1e12 * card.product_teraflops) + 1 / PRODUCT_LIMIT)
    seconds = products + memory_traffic_bytes(shape) / (
        BANDWIDTH_SHARE * 1e9 * card.gigabytes_per_second
    )
    return seconds if card.modern else seconds / WITHOUT_FLASH


def written_bytes(recipe: keys.Recipe) -> tuple[float, float]:
    """Return the most that a run writes: the bytes of its checkpoints, and of the shards of the tokens that it reads."""
    shape, saving, steps = shape_of(recipe.model), recipe.saving, recipe.schedule.max_steps
    kept = saving.save_total_limit or (steps // saving.save_steps if saving.save_steps else 0)
    tokens = min(recipe.data.limit_tokens or float("inf"), recipe.batch.tokens_per_step * steps)
    fetched = not all(source.is_token_folder for source in recipe.data.resolved_sources)
    shards = tokens * (2 if shape.vocab_size <= 65_536 else 4) if fetched else 0.0
    # Weights and two moments in fp32, for the stored checkpoints and one that is being written.
    return 12.0 * shape.parameters * (kept + 1), float(shards)


def run(
    shape: Shape,
    card: Gpu,
    *,
    tokens: int,
    tokens_per_step: int,
    work: float = 1.0,
    count: int = 1,
) -> dict[str, float]:
    """Return ``tokens_per_second``, ``mfu`` (a share of all cards' peak), ``hours``, ``kilowatt_hours``.

    Args:
        tokens: of the whole run.
        work: of a step, in those of one that computes nothing again.
    """
    step = work * seconds_per_token(shape, card) * tokens_per_step / count
    # A ring moves 2 (n - 1) / n of the fp32 gradients over each link.
    step += 2 * (count - 1) / count * 4 * shape.parameters / (1e9 * card.link_gigabytes_per_second)
    speed = tokens_per_step / step
    hours = tokens / speed / 3600
    return {
        "tokens_per_second": speed,
        "mfu": speed * shape.flops_per_token / (count * 1e12 * card.teraflops),
        "hours": hours,
        "kilowatt_hours": hours * count * card.watts / 1000,
    }
