"""What a run will take, before it is run: memory by part, tokens per second, hours, energy, cost. All estimated.

Plain values in, plain values out. Legend: L layers, d width, V vocabulary, T context, B sequences of a micro-batch.
"""

from dataclasses import dataclass

# Shares of the data sheet's figures that a well-written step reaches. With them the roofline gives 514k tokens/s for
# GPT-2 124M on an H100 and 200k on an A100, where llm.c measured 468k and about 218k. Not yet measured by us.
PEAK_SHARE, BANDWIDTH_SHARE = 0.75, 0.8
CONTEXT_BYTES = 0.8 * 2**30  # what CUDA and its libraries take of a card before the first tensor
MOST_TOKENS = 2**16  # of a micro-batch on a card
LOSS_ROWS = 2**13  # tokens whose logits exist at once (pretrain/model.py)
HEADROOM = 0.92  # of the free memory may be planned: the allocator's gaps take the rest


@dataclass(frozen=True)
class Shape:
    """A GPT-2's size."""

    n_layer: int
    n_embd: int
    vocab_size: int
    sequence_length: int

    @property
    def parameters(self) -> int:
        """Weights, each tied one once: 12 L d^2 + 13 L d + (V + T) d + 2 d."""
        d = self.n_embd
        return self.n_layer * (12 * d * d + 13 * d) + (self.vocab_size + self.sequence_length + 2) * d

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6 N + 12 L d T, N without position embeddings.

        The usual estimate (PaLM, appendix B): 6 per weight, and the attention products counted as if not causal.
        """
        weights = self.parameters - self.n_embd * self.sequence_length
        return 6 * weights + 12 * self.n_layer * self.n_embd * self.sequence_length


GPT2_124M = Shape(12, 768, 50304, 1024)


def memory(
    shape: Shape,
    *,
    micro_batch: int,
    half: bool,
    compiled: bool,
    checkpointing: bool = False,
    shards: int = 1,
    sharded: frozenset[str] = frozenset(),
    rows: int = LOSS_ROWS,
) -> dict[str, float]:
    """Return the bytes that training takes on one card, by part.

    Args:
        half: matrix products in bf16 or fp16 over fp32 weights.
        checkpointing: a block keeps its input only, and is computed again.
        shards: processes that share the parts named in ``sharded`` (weights, gradients, moments).
        rows: tokens whose logits exist at once.

    Bytes kept for the backward pass, a token and layer, in units of d. Half precision: the residual stream twice in
    fp32 (8), two layer norms' outputs (4), q, k, v (6), attention's output (2), the MLP's product before and after its
    GELU (16): 36. fp32: 64, for the layer norms' outputs are as wide as all else. A logit in half precision: itself,
    fp32, log-softmax and gradient at once: 12; a compiler keeps the half one and computes the rest again: 3. fp32: 12
    and 5. With more tokens than ``rows``: the logits of so many, and the head's gradient, fp32, beside the summed one.
    These agree with PyTorch's allocations on a CPU (benchmarks/memory.py); on a card they are not measured.
    """
    tokens, d, n = micro_batch * shape.sequence_length, shape.n_embd, shape.parameters
    block = 36 * d if half else 64 * d
    kept = shape.n_layer * 4 * d + block if checkpointing else shape.n_layer * block
    logits = min(tokens, rows) * shape.vocab_size * (12 if not compiled else 3 if half else 5)
    if tokens > rows:
        logits += 8 * shape.vocab_size * d
    part = {
        "weights": 4.0 * n,
        "gradients": 4.0 * n,
        "moments": 8.0 * n,
        "half copies": 2.0 * n if half else 0.0,
        "activations": float(tokens * kept),
        "logits": float(logits),
        # A compiled backward pass hands over all gradients at once, to be added to those there are, when its
        # activations are gone.
        "fresh gradients": max(0.0, 4.0 * n - tokens * kept) if compiled else 0.0,
        "context": CONTEXT_BYTES,
    }
    return {name: size / shards if name in sharded else size for name, size in part.items()}


def largest_micro_batch(free_bytes: float, ceiling: int, shape: Shape, **how) -> int:
    """Return the largest micro-batch up to ``ceiling`` whose memory fits; 0: not even one sequence does.

    ``how``: the arguments of ``memory``. ``free_bytes``: of the whole card, before CUDA's context.
    """
    for size in range(ceiling, 0, -1):
        if sum(memory(shape, micro_batch=size, **how).values()) <= HEADROOM * free_bytes:
            return size
    return 0


def first_micro_batch(
    shape: Shape, free_bytes: float, *, known: int | None, most_tokens: int = MOST_TOKENS, **how
) -> int:
    """Return where the search for a micro-batch begins; 0: not even one sequence fits.

    Args:
        known: the card's own, of GPT-2 124M; other models get what the memory model lets fit.
        most_tokens: of a micro-batch; more is not faster.
        how: the arguments of ``memory``.
    """
    most = max(1, most_tokens // shape.sequence_length)
    if known and shape == GPT2_124M and not how.get("checkpointing"):
        return min(known, most)
    return largest_micro_batch(free_bytes, most, shape, **how)


def seconds_per_token(shape: Shape, *, peak_flops: float, bandwidth: float) -> float:
    """Return one card's seconds a token: matrix products at the peak's share, then all else at the bandwidth's.

    Bytes moved forward and backward, half precision, compiled: a block reads and writes about 150 d, the loss 16 V.

    Args:
        peak_flops: FLOP/s, dense, fp32 accumulate.
        bandwidth: bytes per second of the card's memory.
    """
    moved = 150 * shape.n_layer * shape.n_embd + 16 * shape.vocab_size
    return shape.flops_per_token / (PEAK_SHARE * peak_flops) + moved / (BANDWIDTH_SHARE * bandwidth)


def exchange_seconds(shape: Shape, *, count: int, link: float) -> float:
    """Return the seconds of one gradient exchange: a ring moves 2 (n - 1) / n of the fp32 gradients over each link.

    Args:
        link: bytes per second between neighbours.
    """
    return 2 * (count - 1) / count * 4 * shape.parameters / link


def run(
    shape: Shape,
    *,
    tokens: int,
    tokens_per_step: int,
    peak_flops: float,
    bandwidth: float,
    count: int = 1,
    link: float = 20e9,
    watts: float = 0.0,
    price_per_hour: float = 0.0,
) -> dict[str, float]:
    """Return ``tokens_per_second``, ``mfu`` (a share of all cards' peak), ``hours``, ``kilowatt_hours``, ``cost``.

    Args:
        tokens: of the whole run.
        link: bytes per second between cards; 20e9 is a PCIe 4.0 slot, NVLink has 300e9 and more.
        watts: of one card.
        price_per_hour: of one card, in any currency.
    """
    alone = seconds_per_token(shape, peak_flops=peak_flops, bandwidth=bandwidth) * tokens_per_step / count
    step = alone + (exchange_seconds(shape, count=count, link=link) if count > 1 else 0.0)
    speed = tokens_per_step / step
    hours = tokens / speed / 3600
    return {
        "tokens_per_second": speed,
        "mfu": speed * shape.flops_per_token / (count * peak_flops),
        "hours": hours,
        "kilowatt_hours": hours * count * watts / 1000,
        "cost": hours * count * price_per_hour,
    }
