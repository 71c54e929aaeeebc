"""What a run will take, before it is run: memory by part, tokens per second, hours, energy, cost. All estimated.

Plain values in, plain values out. Legend: L layers, d width, K width of all heads of the keys, F width within the MLP,
V vocabulary, T context, B sequences of a micro-batch.
"""

from dataclasses import dataclass

# Fitted to plain PyTorch GPT-2 124M on 20 cards, measured by others (benchmarks/estimate_cards.py); none by us.
PRODUCT_LIMIT = 2.05e15  # FLOP/s: what keeps products as narrow as these from the fastest cards' rates
BANDWIDTH_SHARE = 0.75  # of the data sheet's
# What a card without flash attention reaches of all this: languini-kitchen's V100, the only one measured, reached 0.40;
# the same code, which does not use flash attention, reached 0.50 to 0.59 on newer cards.
WITHOUT_FLASH = 0.4
CONTEXT_BYTES = 0.8 * 2**30  # what CUDA and its libraries take of a card before the first tensor
MOST_TOKENS = 2**16  # of a micro-batch on a card
LOSS_ROWS = 2**13  # tokens whose logits exist at once (pretrain/model/loss.py)
HEADROOM = 0.92  # of the free memory may be planned: the allocator's gaps take the rest


@dataclass(frozen=True)
class Shape:
    """A model's size, in the recipe's words; ``n_head`` counts only where keys and values have fewer heads.

    Attributes:
        architecture: gpt2 or llama.
        num_key_value_heads: None: as many as ``n_head``.
        intermediate_size: width within the MLP; None: 4 n_embd.
    """

    n_layer: int
    n_embd: int
    vocab_size: int
    sequence_length: int
    architecture: str = "gpt2"
    n_head: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool = True

    @property
    def key_width(self) -> int:
        """K: the width of all heads of the keys, and of the values."""
        return self.n_embd * self.num_key_value_heads // self.n_head if self.num_key_value_heads else self.n_embd

    @property
    def mlp_width(self) -> int:
        """F: the width within the MLP."""
        return self.intermediate_size or 4 * self.n_embd

    @property
    def parameters(self) -> int:
        """Weights, each tied one once.

        GPT-2: L (4 d^2 + 2 d F + 9 d + F) + (V + T) d + 2 d, which for F = 4 d is L (12 d^2 + 13 d) + (V + T + 2) d.
        Llama: L (2 d^2 + 2 d K + 3 d F + 2 d) + V d + d. An untied head: V d more.
        """
        d, f = self.n_embd, self.mlp_width
        if self.architecture == "llama":
            block, rest = 2 * d * d + 2 * d * self.key_width + 3 * d * f + 2 * d, d
        else:
            block, rest = 4 * d * d + 2 * d * f + 9 * d + f, (self.sequence_length + 2) * d
        return self.n_layer * block + self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + rest

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6 N + 12 L d T.

        N leaves out what is only looked up: GPT-2's position embeddings (T d), and an untied input embedding (V d).
        The usual estimate (PaLM, appendix B): 6 per weight, and the attention products counted as if not causal;
        fewer heads of keys save weights, but no attention product.
        """
        looked_up = self.sequence_length if self.architecture == "gpt2" else 0
        looked_up += 0 if self.tie_word_embeddings else self.vocab_size
        weights = self.parameters - looked_up * self.n_embd
        return 6 * weights + 12 * self.n_layer * self.n_embd * self.sequence_length


GPT2_124M = Shape(12, 768, 50304, 1024)


def moment_bytes(shape: Shape, optimizer: str = "adamw") -> float:
    """Return the bytes that the optimizer keeps of all weights.

    AdamW: two fp32 moments. adamw_8bit: two of a byte, and two fp32 scales for each 256 elements; norms and biases, whose
    tensors have fewer than 4,096 elements, keep fp32. Muon: one fp32 momentum of each matrix of a block, AdamW's of all
    else.
    """
    d, f = shape.n_embd, shape.mlp_width
    if shape.architecture == "llama":
        matrices, vectors = 2 * d * d + 2 * d * shape.key_width + 3 * d * f, 2 * d
    else:
        matrices, vectors = 4 * d * d + 2 * d * f, 9 * d + f
    small = shape.n_layer * vectors + (d if shape.architecture == "llama" else 2 * d)
    return {
        "adamw": 8.0 * shape.parameters,
        "adamw_8bit": (2 + 8 / 256) * (shape.parameters - small) + 8.0 * small,
        "muon": 8.0 * shape.parameters - 4.0 * shape.n_layer * matrices,
    }[optimizer]


def block_bytes(shape: Shape, *, half: bool, compiled: bool, half_stream: bool = False) -> tuple[int, int]:
    """Return the bytes that a block keeps for the backward pass, a token, and those of them that "mlp" does not keep.

    Tensors of a block in half precision (2 bytes an element, else 4), the residual stream before each norm in fp32:
    GPT-2: stream 2 d fp32; norms' outputs 2 d, q, k, v 3 d, attention's output d, the MLP before and after its GELU 2 F.
    For F = 4 d: 36 d, and 64 d in fp32. Compiled in half precision GPT-2 keeps no stream, for its norms keep what they
    return (pretrain/model/model.py): 28 d. Llama: stream 2 d fp32; norms' outputs 2 d, q d, k and v 2 K, attention's
    output d, gate, up, and their product 3 F. Not compiled, it keeps more: what each norm scales, 2 d fp32, silu(gate)
    F, and under autocast a copy of a norm's output for each product that takes it, 3 d.

    half_stream: the stream is in half precision too, as FSDP2 has it.
    """
    size, d, k, f = 2 if half else 4, shape.n_embd, shape.key_width, shape.mlp_width
    stream = 2 * d * (2 if half_stream else 4)
    if shape.architecture == "gpt2":
        return (0 if compiled and half and not half_stream else stream) + size * (6 * d + 2 * f), size * f
    if compiled:
        return stream + size * (4 * d + 2 * k + 3 * f), size * f
    return 8 * d + stream + size * (4 * d + 2 * k + 4 * f + (3 * d if half and not half_stream else 0)), size * 2 * f


def memory(
    shape: Shape,
    *,
    micro_batch: int,
    half: bool,
    compiled: bool,
    checkpointing: str = "none",
    optimizer: str = "adamw",
    shards: int = 1,
    sharded: frozenset[str] = frozenset(),
    rows: int = LOSS_ROWS,
) -> dict[str, float]:
    """Return the bytes that training takes on one card, by part.

    Args:
        half: matrix products in bf16 or fp16 over fp32 weights.
        checkpointing: what is computed again: none; mlp: the activation between the MLP's products; full: a block, of
            which the input only is kept.
        shards: processes that share the parts named in ``sharded`` (weights, half copies, gradients, moments).
        rows: tokens whose logits exist at once.

    Not compiled, a logit is there as itself, fp32, log-softmax and gradient: 12 bytes; with more tokens than ``rows``
    the logits of so many, the head's gradient in fp32 beside the summed one, and of each token its last hidden state and
    that one's gradient, whole and in parts, 12 d. Compiled in half precision: the logits of so many, the head's gradient
    once, 22 d a token; in fp32 5 bytes a logit. What is computed again of one block stands in the logits' place when
    these are gone; compiled and "full" it stands with the gradients within the block, 8 d + 2 F (Llama 8 F), and its casts
    of weights are made again too. Fitted to the allocator of a card (benchmarks/memory_card.py on the null card,
    docs/null_card.md).
    """
    tokens, d, n = micro_batch * shape.sequence_length, shape.n_embd, shape.parameters
    half_stream = half and "weights" in sharded
    block, again = block_bytes(shape, half=half, compiled=compiled, half_stream=half_stream)
    small = compiled and half
    beside = 8 * d + (8 if shape.architecture == "llama" else 2) * shape.mlp_width
    kept, later = {
        "none": (shape.n_layer * block, 0),
        "mlp": (shape.n_layer * (block - again), again),
        "full": (shape.n_layer * (2 if half_stream else 4) * d, block + (beside if small else 0)),
    }[checkpointing]
    head = shape.vocab_size * d
    if small:
        logits = 2 * min(tokens, rows) * shape.vocab_size + 4 * head + 22 * d * tokens
    else:
        logits = min(tokens, rows) * shape.vocab_size * (5 if compiled else 12)
        logits += 8 * head + 12 * d * tokens if tokens > rows else 0
    # Of the weights in half precision there is one block at a time where it is gathered, or cast, again.
    cast = head if small and checkpointing == "full" or "half copies" in sharded else n
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
    return {name: size / shards if name in sharded else size for name, size in part.items()}


def largest_micro_batch(shape: Shape, free_bytes: float, *, most_tokens: int = MOST_TOKENS, **how) -> int:
    """Return the largest micro-batch whose memory fits; 0: not even one sequence does.

    Args:
        free_bytes: of the whole card, before CUDA's context.
        most_tokens: of a micro-batch; more is not faster.
        how: the arguments of ``memory``.
    """
    for size in range(max(1, most_tokens // shape.sequence_length), 0, -1):
        if sum(memory(shape, micro_batch=size, **how).values()) <= HEADROOM * free_bytes:
            return size
    return 0


def computed_flops(shape: Shape) -> int:
    """Return the FLOPs a token that causal kernels compute: 6 N + 6 L d T, half of the attention products."""
    return shape.flops_per_token - 6 * shape.n_layer * shape.n_embd * shape.sequence_length


def moved_bytes(shape: Shape) -> float:
    """Return the bytes a token that are moved beside matrix products, forward and backward, half precision, compiled.

    A block reads and writes about 150 d, the loss 16 V. That is 1.25 times what GPT-2's kernels other than matrix
    products must move (norms with the residual stream 56 d, attention 24 d, GELU 10 F: 120 d), and so Llama's is taken:
    norms 56 d, rotation 8 (d + K), attention 12 (d + K), SwiGLU 16 F.
    """
    d, k, f = shape.n_embd, shape.key_width, shape.mlp_width
    block = 56 * d + (20 * (d + k) + 16 * f if shape.architecture == "llama" else 24 * d + 10 * f)
    return 1.25 * shape.n_layer * block + 16 * shape.vocab_size


def seconds_per_token(shape: Shape, *, product_flops: float, bandwidth: float, flash: bool = True) -> float:
    """Return one card's seconds a token: matrix products at the rate that it reaches, then all else at its bandwidth.

    Args:
        product_flops: FLOP/s that large matrix products reach.
        bandwidth: bytes per second of the card's memory, by its data sheet.
        flash: whether flash attention runs.
    """
    products = computed_flops(shape) * (1 / product_flops + 1 / PRODUCT_LIMIT)
    seconds = products + moved_bytes(shape) / (BANDWIDTH_SHARE * bandwidth)
    return seconds if flash else seconds / WITHOUT_FLASH


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
    product_flops: float,
    bandwidth: float,
    flash: bool = True,
    work: float = 1.0,
    count: int = 1,
    link: float = 20e9,
    watts: float = 0.0,
    price_per_hour: float = 0.0,
) -> dict[str, float]:
    """Return ``tokens_per_second``, ``mfu`` (a share of all cards' peak), ``hours``, ``kilowatt_hours``, ``cost``.

    Args:
        tokens: of the whole run.
        peak_flops: FLOP/s of a card by its data sheet, dense, fp32 accumulate.
        product_flops, bandwidth, flash: as ``seconds_per_token`` takes them.
        work: of a step, in those of one that computes nothing again.
        link: bytes per second between cards; 20e9 is a PCIe 4.0 slot, NVLink has 300e9 and more.
        watts: of one card.
        price_per_hour: of one card, in any currency.
    """
    token = work * seconds_per_token(shape, product_flops=product_flops, bandwidth=bandwidth, flash=flash)
    step = token * tokens_per_step / count
    step += exchange_seconds(shape, count=count, link=link) if count > 1 else 0.0
    speed = tokens_per_step / step
    hours = tokens / speed / 3600
    return {
        "tokens_per_second": speed,
        "mfu": speed * shape.flops_per_token / (count * peak_flops),
        "hours": hours,
        "kilowatt_hours": hours * count * watts / 1000,
        "cost": hours * count * price_per_hour,
    }
