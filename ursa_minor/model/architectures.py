"""Define the model architectures, and compute parameters, FLOPs and memory from a model's size.

Imports neither torch nor Transformers. Symbols in formulas:

- L: layers
- d: width of the model (n_embd)
- K: width of all key heads together, and of all value heads
- F: width of the MLP's hidden layer
- V: rows of the vocabulary
- T: context length in tokens
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ursa_minor.recipe import keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """The size of a model, by recipe keys.

    Attributes:
        architecture: a key of ``ARCHITECTURES``.
        n_head: number of query heads. It matters only if there are fewer key heads.
        num_key_value_heads: number of key heads and of value heads. Defaults to ``n_head``.
        intermediate_size: width of the MLP's hidden layer. Defaults to 4 n_embd.
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
        """The definition of the architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def key_width(self) -> int:
        """K: the width of all key heads together, and of all value heads."""
        if self.num_key_value_heads is None or self.n_head is None:
            return self.n_embd
        return self.n_embd * self.num_key_value_heads // self.n_head

    @property
    def mlp_width(self) -> int:
        """F: the width of the MLP's hidden layer."""
        return self.intermediate_size or 4 * self.n_embd

    @property
    def hidden(self) -> int:
        """Number of weights in the matrices of all blocks."""
        return self.n_layer * self.definition.block_matrices(self)

    @property
    def vectors(self) -> int:
        """Number of weights in all norms and biases."""
        blocks = self.n_layer * self.definition.block_vectors(self)
        return blocks + self.definition.last_norm * self.n_embd

    @property
    def positions(self) -> int:
        """Number of weights in learned position embeddings."""
        if self.definition.positions is None:
            return 0
        return self.sequence_length * self.n_embd

    @property
    def parameters(self) -> int:
        """Number of weights of the model. A head that is tied to the embedding is counted once."""
        embedding = self.vocab_size * self.n_embd
        head = 0 if self.tie_word_embeddings else embedding
        return self.hidden + self.vectors + embedding + head + self.positions

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass for one token: 6 N + 12 L d T.

        N is the number of weights in matrix products. It excludes embeddings that are only looked
        up: positions (T d), and the input embedding (V d) if the head is not tied to it.

        This is the usual estimate (PaLM, appendix B): 6 FLOPs per weight, plus the attention
        products without the savings of causal attention. Fewer key heads reduce the weights, but
        not the attention products.
        """
        lookups = self.positions
        if not self.tie_word_embeddings:
            lookups += self.vocab_size * self.n_embd
        attention = 12 * self.n_layer * self.n_embd * self.sequence_length
        return 6 * (self.parameters - lookups) + attention


class Mlp(NamedTuple):
    """The names of an MLP's submodules.

    Attributes:
        up_proj: linear layers from d to F. If there are two, the activation is applied to the
            output of the first, which is then multiplied by the output of the second.
        activation: the activation function.
        down_proj: the linear layer from F to d.
    """

    up_proj: tuple[str, ...]
    activation: str
    down_proj: str


class SavedActivations(NamedTuple):
    """Bytes per token that one block saves for its backward pass.

    Attributes:
        block: all saved activations.
        recomputed: the part that gradient_checkpointing = mlp recomputes instead of saving.
    """

    block: int
    recomputed: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Definition of an architecture. Its recipe keys are in ``keys.ARCHITECTURE_KEYS``.

    Attributes:
        name: name in recipes, and the ``model_type`` of Transformers.
        label: name in messages.
        config_names: for each recipe key of the model's shape, its key in the config of
            Transformers.
        dropout_names: the same for dropout. A model from ``init_from`` may have other values there.
        extra_config: further config values of a model that is trained from random weights.
        required: config keys of an ``init_from`` model, with the values that training supports.
            The first one is that of the original model.
        in_training: config values during training. They replace the first value of ``required`` by
            one that computes the same function faster.
        legacy_names: old config keys that other programs still read, with their current names.
        positions: module of the learned position embeddings, or None if positions are rotated.
        blocks: substring that only names of block parameters contain.
        file_prefix: prefix of parameter names that the files of weights leave out.
        first_names: the beginnings of weight names, with which a prefix that another program has
            added is recognized. Without them, such prefixes are kept.
        fused: suffixes of the names of matrices that contain several projections side by side in
            their columns, with the number of projections.
        mlp: names of the MLP's submodules, for gradient_checkpointing = mlp.
        prepare: modifies the stock model in place for faster training. It renames no weights.
        block_matrices: number of weights in the matrices of one block.
        block_vectors: number of weights in the norms and biases of one block.
        last_norm: number of weights in the norm before the head, divided by d.
        saved_activation_bytes: function of the shape, and of the flags ``half``, ``compiled`` and
            ``half_stream``. It returns ``SavedActivations``. Activations have 2 bytes per element
            if ``half``, else 4. The residual stream before each norm is fp32, or half precision
            with ``half_stream``, as under FSDP2.
        backward_bytes: bytes per token of the gradients inside a block that is recomputed.
        memory_traffic_bytes: bytes per token that the kernels of a block other than matrix products
            read and write in the forward and backward pass.
    """

    name: str
    label: str
    config_names: Mapping[str, str]
    dropout_names: Mapping[str, str]
    extra_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    in_training: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legacy_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    positions: str | None = None
    blocks: str
    file_prefix: str = ""
    first_names: tuple[str, ...] = ()
    fused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    mlp: Mlp
    prepare: Callable[["PreTrainedModel"], None] = lambda model: None
    block_matrices: Callable[[Shape], int]
    block_vectors: Callable[[Shape], int]
    last_norm: int
    saved_activation_bytes: Callable[..., SavedActivations]
    backward_bytes: Callable[[Shape], int]
    memory_traffic_bytes: Callable[[Shape], int]

    def config(self, model: keys.Model) -> dict[str, Any]:
        """Return the config values of Transformers for a recipe's model, without dropout."""
        config = dict(self.extra_config)
        for key, name in self.config_names.items():
            value = getattr(model, key)
            if value is None:
                continue
            if key == "rope_theta":
                value = {"rope_type": "default", "rope_theta": value}
            config[name] = value
        return config

    def training_config(self, model: keys.Model) -> dict[str, Any]:
        """Return the config values that training sets, also in a model from ``init_from``."""
        dropout = {name: getattr(model, key) for key, name in self.dropout_names.items()}
        return {**dropout, **self.in_training, "use_cache": False}

    def model_keys(self, config: "PreTrainedConfig") -> dict[str, Any]:
        """Return the recipe's model keys (``keys.MODEL_KEYS``) for a config of this architecture.

        Args:
            config: config of a pretrained model.

        Returns:
            vocab_size is padded to a multiple of 64. intermediate_size is None if the recipe may
            leave it out and it has its default of 4 n_embd. Keys that the architecture does not
            have are None.
        """
        values = {key: getattr(config, name) for key, name in self.config_names.items()}
        values["architecture"] = self.name
        values["vocab_size"] = padded_vocab_size(values["vocab_size"])
        rope_parameters = values.get("rope_theta")
        if rope_parameters:
            values["rope_theta"] = float(rope_parameters["rope_theta"])
        has_default_size = values["intermediate_size"] == 4 * values["n_embd"]
        if has_default_size and "intermediate_size" not in keys.ARCHITECTURE_KEYS[self.name]:
            values["intermediate_size"] = None
        return {key: values.get(key) for key in keys.MODEL_KEYS}


def padded_vocab_size(rows: int) -> int:
    """Return a number of vocabulary rows, rounded up to a multiple of 64."""
    return -(-rows // 64) * 64


def file_names(model_type: str, names: Iterable[str]) -> dict[str, str]:
    """Return the name of each weight in ``model.safetensors``, by its name in the model.

    Args:
        model_type: ``model_type`` of the model's config. If this project does not define it, the
            names are unchanged.
        names: names of parameters.
    """
    architecture = ARCHITECTURES.get(model_type)
    prefix = architecture.file_prefix if architecture else ""
    return {name: name.removeprefix(prefix) for name in names}


def _stream_bytes(shape: Shape, *, half_stream: bool) -> int:
    """Return the bytes per token of the residual stream before the two norms of a block."""
    return 2 * shape.n_embd * (2 if half_stream else 4)


# GPT-2. A block has 4 d^2 + 2 d F weights in matrices, and 9 d + F in norms and biases.
# With F = 4 d, the model has L (12 d^2 + 13 d) + (V + T + 2) d weights.


def _fold_gpt2_norms(model: "PreTrainedModel") -> None:
    # Imported here because the module imports torch.
    from ursa_minor.model import gpt2_norms

    gpt2_norms.fold_norms(model)


def _gpt2_saved(s: Shape, *, half: bool, compiled: bool, half_stream: bool) -> SavedActivations:
    """Return the activations that a block of GPT-2 saves per token.

    These are the residual stream before both norms (2 d), the outputs of the norms (2 d), query,
    key and value (3 d), the output of attention (d), and the MLP before and after its GELU (2 F).

    With F = 4 d, they take 36 d bytes in mixed precision and 64 d bytes in fp32. Compiled in mixed
    precision, the norms save their outputs instead of the stream (``gpt2_norms``): 28 d bytes.
    """
    element_bytes = 2 if half else 4
    saved = element_bytes * (6 * s.n_embd + 2 * s.mlp_width)
    has_folded_norms = compiled and half and not half_stream
    if not has_folded_norms:
        saved += _stream_bytes(s, half_stream=half_stream)
    return SavedActivations(saved, recomputed=element_bytes * s.mlp_width)


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
        # gelu, without the approximation by tanh, is that of nanoGPT.
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "tie_word_embeddings": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    # The converter of llama.cpp reads n_ctx.
    legacy_names={"n_ctx": "n_positions"},
    # The same function as gelu_new, in one fused kernel. Without torch.compile, gelu_new launches
    # eight elementwise kernels.
    in_training={"activation_function": "gelu_pytorch_tanh"},
    positions="transformer.wpe",
    blocks=".h.",
    # OpenAI's own files have no prefix. Transformers, vLLM and llama.cpp read both forms; mlx-lm
    # only reads OpenAI's.
    file_prefix="transformer.",
    first_names=("transformer.", "wte.", "wpe.", "h.", "ln_f.", "lm_head."),
    # Query, key and value.
    fused={"c_attn.weight": 3},
    mlp=Mlp(("c_fc",), "act", "c_proj"),
    prepare=_fold_gpt2_norms,
    block_matrices=lambda s: 4 * s.n_embd**2 + 2 * s.n_embd * s.mlp_width,
    block_vectors=lambda s: 9 * s.n_embd + s.mlp_width,
    last_norm=2,
    saved_activation_bytes=_gpt2_saved,
    backward_bytes=lambda s: 8 * s.n_embd + 2 * s.mlp_width,
    # Norms with the residual stream 56 d, attention 24 d, GELU 10 F. With F = 4 d: 120 d.
    memory_traffic_bytes=lambda s: 80 * s.n_embd + 10 * s.mlp_width,
)


def _llama_saved(s: Shape, *, half: bool, compiled: bool, half_stream: bool) -> SavedActivations:
    """Return the activations that a block of Llama saves per token.

    These are the residual stream before both norms (2 d), the outputs of the norms (2 d), query
    (d), key and value (2 K), the output of attention (d), and gate, up and their product (3 F).

    Without torch.compile, a block also saves the normalized input that each norm scales (2 d in
    fp32) and silu(gate) (F). Under autocast, each of the five matrix products that read the output
    of a norm saves its own copy (3 d more).
    """
    element_bytes = 2 if half else 4
    stream = _stream_bytes(s, half_stream=half_stream)
    elements = 4 * s.n_embd + 2 * s.key_width + 3 * s.mlp_width
    if compiled:
        saved = stream + element_bytes * elements
        return SavedActivations(saved, recomputed=element_bytes * s.mlp_width)

    normalized = 2 * 4 * s.n_embd
    elements += s.mlp_width
    if half and not half_stream:
        elements += 3 * s.n_embd
    saved = normalized + stream + element_bytes * elements
    return SavedActivations(saved, recomputed=2 * element_bytes * s.mlp_width)


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
    extra_config={"rms_norm_eps": 1e-5},
    blocks=".layers.",
    first_names=("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
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

ARCHITECTURES = {definition.name: definition for definition in (GPT2, LLAMA)}
