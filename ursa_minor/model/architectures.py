"""Definitions of the model architectures, and what follows from the size of a model.

Needs neither torch nor Transformers to be imported. Legend: L layers, d width, K width of all heads of the keys, F width
within the MLP, V vocabulary, T context.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ursa_minor.recipe import keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """A model's size, in the recipe's words; ``n_head`` counts only where keys and values have fewer heads.

    Attributes:
        architecture: a name of ``ARCHITECTURES``.
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
    def definition(self) -> "Architecture":
        """The family's."""
        return ARCHITECTURES[self.architecture]

    @property
    def key_width(self) -> int:
        """K: the width of all heads of the keys, and of the values."""
        if self.num_key_value_heads is None or self.n_head is None:
            return self.n_embd
        return self.n_embd * self.num_key_value_heads // self.n_head

    @property
    def mlp_width(self) -> int:
        """F: the width within the MLP."""
        return self.intermediate_size or 4 * self.n_embd

    @property
    def hidden(self) -> int:
        """Weights of the blocks' matrices."""
        return self.n_layer * self.definition.block_matrices(self)

    @property
    def vectors(self) -> int:
        """Weights of norms and biases."""
        return (
            self.n_layer * self.definition.block_vectors(self)
            + self.definition.last_norm * self.n_embd
        )

    @property
    def positions(self) -> int:
        """Weights of learned position embeddings."""
        return self.sequence_length * self.n_embd if self.definition.positions else 0

    @property
    def parameters(self) -> int:
        """Weights, each tied one once: blocks and norms, embeddings of V and positions, V d more for an untied head."""
        embeddings = (
            self.vocab_size * self.n_embd * (1 if self.tie_word_embeddings else 2) + self.positions
        )
        return self.hidden + self.vectors + embeddings

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6 N + 12 L d T.

        N leaves out what is only looked up: position embeddings (T d), and an untied input embedding (V d).
        The usual estimate (PaLM, appendix B): 6 per weight, and the attention products counted as if not causal;
        fewer heads of keys save weights, but no attention product.
        """
        looked_up = self.positions + (
            0 if self.tie_word_embeddings else self.vocab_size * self.n_embd
        )
        return (
            6 * (self.parameters - looked_up)
            + 12 * self.n_layer * self.n_embd * self.sequence_length
        )


class Mlp(NamedTuple):
    """The names of an MLP's parts.

    Attributes:
        up_proj: the products from d to F; of two the first goes through the activation and gates the other.
        down_proj: the product from F to d.
    """

    up_proj: tuple[str, ...]
    activation: str
    down_proj: str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All that depends on a model's family. Which recipe keys it needs stands in ``keys.ARCHITECTURE_KEYS``.

    Attributes:
        name: the recipe's, and the ``model_type`` of Transformers.
        label: for people.
        config_names: what the config calls the recipe's keys of the shape.
        dropout_names: and those of dropout, which a model that is trained on may have otherwise.
        config_more: what the config of a recipe's model states beside these.
        required: config keys of a model to train on, and the values under which it trains as that model, stock first.
        in_training: which of these values training has.
        legacy_names: old config keys that other programs still read.
        positions: the module of learned position embeddings; None where positions are rotated.
        blocks: what the names of a block's weights have within, and no others.
        fused: endings of names of matrices that hold several maps side by side in their columns, and how many.
        mlp: for gradient_checkpointing = mlp.
        prepare: changes how the stock model computes in training, in place; names and weights stay.
        block_matrices, block_vectors: weights of a block: its matrices'; its norms' and biases'.
        last_norm: weights of the norm before the head, in d.
        saved_activation_bytes: what a block keeps of a token for the backward pass, and what of that "mlp" does not.
            Its tensors are 2 bytes an element in half precision, else 4; the residual stream before each norm is fp32,
            but with ``half_stream``, as FSDP2 has it.
        backward_bytes: bytes a token of the gradients within a block that is computed again.
        memory_traffic_bytes: bytes a token that a block's kernels beside matrix products must move, forward and backward.
    """

    name: str
    label: str
    config_names: Mapping[str, str]
    dropout_names: Mapping[str, str]
    config_more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    in_training: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legacy_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    positions: str | None = None
    blocks: str
    fused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mlp: Mlp
    prepare: Callable[["PreTrainedModel"], None] = lambda model: None
    block_matrices: Callable[[Shape], int]
    block_vectors: Callable[[Shape], int]
    last_norm: int
    saved_activation_bytes: Callable[..., tuple[int, int]]
    backward_bytes: Callable[[Shape], int]
    memory_traffic_bytes: Callable[[Shape], int]

    def config(self, model: keys.Model) -> dict[str, Any]:
        """Return the values of Transformers' config for a recipe's model."""
        stated = {name: getattr(model, key) for key, name in self.config_names.items()}
        stated = {name: value for name, value in stated.items() if value is not None}
        if (name := self.config_names.get("rope_theta")) in stated:
            stated[name] = {"rope_type": "default", "rope_theta": stated[name]}
        return {**self.config_more, **stated}

    def training_config(self, model: keys.Model) -> dict[str, Any]:
        """Return the config's values during training, also for a model that is trained on."""
        dropout = {name: getattr(model, key) for key, name in self.dropout_names.items()}
        return {**dropout, **self.in_training, "use_cache": False}

    def model_keys(self, config: "PreTrainedConfig") -> dict[str, Any]:
        """Return the recipe's model keys (``keys.MODEL_KEYS``) of a config of this family.

        vocab_size is padded up to a multiple of 64; intermediate_size is None where it is the 4 n_embd that the recipe
        need not state, and what the family has not is None.
        """
        values = {key: getattr(config, name) for key, name in self.config_names.items()}
        if rotation := values.get("rope_theta"):
            values["rope_theta"] = float(rotation["rope_theta"])
        values |= {"architecture": self.name, "vocab_size": padded(values["vocab_size"])}
        stated = "intermediate_size" in keys.ARCHITECTURE_KEYS[self.name]
        if not stated and values["intermediate_size"] == 4 * values["n_embd"]:
            values["intermediate_size"] = None
        return {key: values.get(key) for key in keys.MODEL_KEYS}


def padded(rows: int) -> int:
    """Return the rows of a vocabulary padded up to a multiple of 64."""
    return -(-rows // 64) * 64


# GPT-2: a block has 4 d^2 + 2 d F weights in matrices and 9 d + F in norms and biases; with F = 4 d all are
# L (12 d^2 + 13 d) + (V + T + 2) d.


def _fold_gpt2_norms(model: "PreTrainedModel") -> None:
    from ursa_minor.model import gpt2_norms

    gpt2_norms.fold_norms(model)


def _gpt2_saved(s: Shape, *, half: bool, compiled: bool, half_stream: bool) -> tuple[int, int]:
    """Stream 2 d fp32; norms' outputs 2 d, q, k, v 3 d, attention's output d, the MLP before and after its GELU 2 F.

    For F = 4 d: 36 d, and 64 d in fp32. Compiled in half precision it keeps no stream, for its norms keep what they
    return (gpt2.py): 28 d.
    """
    size, stream = 2 if half else 4, 2 * s.n_embd * (2 if half_stream else 4)
    saved = size * (6 * s.n_embd + 2 * s.mlp_width)
    return (0 if compiled and half and not half_stream else stream) + saved, size * s.mlp_width


GPT2 = Architecture(
    name="gpt2",
    label="GPT-2",
    config_names={
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "intermediate_size": "n_inner",
        "vocab_size": "vocab_size",
        "sequence_length": "n_positions",
    },
    dropout_names={
        "resid_pdrop": "resid_pdrop",
        "embd_pdrop": "embd_pdrop",
        "attn_pdrop": "attn_pdrop",
    },
    required={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    legacy_names={"n_ctx": "n_positions"},  # llama.cpp's converter
    # One fused kernel for the same function as gelu_new, which is eight elementwise ones outside a compiler.
    in_training={"activation_function": "gelu_pytorch_tanh"},
    positions="transformer.wpe",
    blocks=".h.",
    fused={"c_attn.weight": 3},  # query, key and value
    mlp=Mlp(("c_fc",), "act", "c_proj"),
    prepare=_fold_gpt2_norms,
    block_matrices=lambda s: 4 * s.n_embd**2 + 2 * s.n_embd * s.mlp_width,
    block_vectors=lambda s: 9 * s.n_embd + s.mlp_width,
    last_norm=2,
    saved_activation_bytes=_gpt2_saved,
    backward_bytes=lambda s: 8 * s.n_embd + 2 * s.mlp_width,
    # Norms with the residual stream 56 d, attention 24 d, GELU 10 F: 120 d.
    memory_traffic_bytes=lambda s: 80 * s.n_embd + 10 * s.mlp_width,
)


def _llama_saved(s: Shape, *, half: bool, compiled: bool, half_stream: bool) -> tuple[int, int]:
    """Stream 2 d fp32; norms' outputs 2 d, q d, k and v 2 K, attention's output d, gate, up, and their product 3 F.

    Not compiled, it keeps more: what each norm scales, 2 d fp32, silu(gate) F, and under autocast a copy of a norm's
    output for each product that takes it, 3 d.
    """
    size, stream = 2 if half else 4, 2 * s.n_embd * (2 if half_stream else 4)
    saved = 4 * s.n_embd + 2 * s.key_width + 3 * s.mlp_width
    if compiled:
        return stream + size * saved, size * s.mlp_width
    copies = 3 * s.n_embd if half and not half_stream else 0
    return 8 * s.n_embd + stream + size * (saved + s.mlp_width + copies), size * 2 * s.mlp_width


LLAMA = Architecture(
    name="llama",
    label="Llama-type",
    config_names={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "num_key_value_heads": "num_key_value_heads",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tie_word_embeddings",
        "rope_theta": "rope_parameters",
        "sequence_length": "max_position_embeddings",
    },
    dropout_names={"attn_pdrop": "attention_dropout"},
    config_more={"rms_norm_eps": 1e-5},
    blocks=".layers.",
    mlp=Mlp(("gate_proj", "up_proj"), "act_fn", "down_proj"),
    block_matrices=lambda s: (
        2 * s.n_embd**2 + 2 * s.n_embd * s.key_width + 3 * s.n_embd * s.mlp_width
    ),
    block_vectors=lambda s: 2 * s.n_embd,
    last_norm=1,
    saved_activation_bytes=_llama_saved,
    backward_bytes=lambda s: 8 * s.n_embd + 8 * s.mlp_width,
    # Norms with the residual stream 56 d, rotation 8 (d + K), attention 12 (d + K), SwiGLU 16 F.
    memory_traffic_bytes=lambda s: 56 * s.n_embd + 20 * (s.n_embd + s.key_width) + 16 * s.mlp_width,
)

ARCHITECTURES = {family.name: family for family in (GPT2, LLAMA)}
