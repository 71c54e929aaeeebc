"""Stock GPT-2 and Llama-type models of Transformers, new or to go on from, and the causal attention they train with.

Legend: B sequences, T tokens, E width, F width behind a product, V vocabulary.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import NewGELUActivation
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.pytorch_utils import Conv1D

from pretrain.base.errors import BadInput

CAUSAL = "ursa_causal"
# One fused kernel for the same function as GPT-2's gelu_new, which is eight elementwise ones outside a compiler.
TRAINING_ACTIVATION, STOCK_ACTIVATION = "gelu_pytorch_tanh", "gelu_new"
FLEX_WIDTH = 16  # of a head, at least: FlexAttention's kernel takes no narrower one


def register_causal_attention() -> None:
    """Teach Transformers an attention that tells SDPA "causal" instead of handing it a mask.

    Under torch.compile, Transformers' own path builds a (B, 1, T, T) mask (its packed-sequence check cannot skip while
    tracing: masking_utils.py, create_causal_mask), and a mask rules out the flash kernel. Padding and a cache do need
    a mask: there both functions hand over to Transformers' own.
    """
    AttentionInterface.register(CAUSAL, _causal_attention)
    AttentionMaskInterface.register(CAUSAL, _causal_mask)


def _causal_mask(*, q_length: int, kv_length: int, attention_mask=None, **kwargs) -> torch.Tensor | None:
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs)


def _causal_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attend over (B, heads, T, E/heads); return (B, T, heads, E/heads) and no weights, as Transformers expects.

    Keys and values may have fewer heads, each shared by a group of query heads.
    """
    if isinstance(attention_mask, BlockMask):
        if not dropout and query.shape[-1] >= FLEX_WIDTH:
            # Under autocast Llama's rotation leaves queries and keys in fp32.
            query, key = query.to(value.dtype), key.to(value.dtype)
            out = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None
        B, _, T, _ = query.shape
        attention_mask = create_mask(attention_mask.mask_mod, B, None, T, T, query.device)
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    # Flash alone takes groups as they are: the CPU's, and a card's from Ampere on, which is where bf16 is. Elsewhere
    # torch would leave its fast kernels.
    as_they_are = group > 1 and (value.device.type == "cpu" or value.dtype == torch.bfloat16)
    if group > 1 and not as_they_are:
        key, value = repeat_kv(key, group), repeat_kv(value, group)
    out = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=as_they_are
    )
    return out.transpose(1, 2), None


def within_documents(inputs_BT: torch.Tensor, *, separator: int, flex: bool | None = None) -> dict:
    """Return the arguments under which a model reads each document of a packed row as if it stood alone.

    A document begins at each separator; what stands before a row's first one counts as one too. Positions begin at 0
    in each document, and a token sees itself and what stands before it in its document.

    In torch.compile on a card the mask is FlexAttention's, whose kernel skips what lies between documents. Elsewhere,
    and with attention dropout or heads narrower than 16, neither of which it takes, SDPA gets a mask of T x T bytes a
    row: a CPU's flash kernel takes one; a card's does not, and the memory-efficient kernel computes all T x T.

    Args:
        inputs_BT: (B, T) int64 ids.
        separator: the id that stands before each document.
        flex: whether the mask is FlexAttention's; None: in torch.compile on a card.

    Returns ``position_ids``, (B, T) int64, and ``attention_mask``, a BlockMask or (B, 1, T, T) bool, True where seen.
    """
    (B, T), device = inputs_BT.shape, inputs_BT.device
    index_T = torch.arange(T, device=device)
    begins_BT = torch.where(inputs_BT == separator, index_T, 0).cummax(1).values

    def seen(row, head, query, key):
        return (begins_BT[row, query] <= key) & (key <= query)

    if flex is None:
        flex = inputs_BT.is_cuda and torch.compiler.is_compiling()
    if flex:
        mask = create_block_mask(seen, B, None, T, T, device)
        mask.ndim = 4  # GPT-2 asks, to tell a whole mask from one of padding
    else:
        row_B111 = torch.arange(B, device=device)[:, None, None, None]
        mask = seen(row_B111, None, index_T[:, None], index_T)
    return {"position_ids": index_T - begins_BT, "attention_mask": mask}


def build(
    *,
    architecture: str = "gpt2",
    n_layer: int,
    n_head: int,
    n_embd: int,
    vocab_size: int,
    sequence_length: int,
    resid_pdrop: float,
    embd_pdrop: float,
    attn_pdrop: float,
    eos_token_id: int,
    seed: int,
    num_key_value_heads: int | None = None,
    intermediate_size: int | None = None,
    tie_word_embeddings: bool = True,
    rope_theta: float = 10000.0,
    init_from: str | None = None,
    gradient_checkpointing: str = "none",
) -> PreTrainedModel:
    """Build GPT-2, or a Llama, in fp32 with seeded random weights, or go on from the model ``init_from``.

    Args:
        architecture: "gpt2" or "llama"; the latter has dropout in attention only, and no biases.
        intermediate_size: width within the MLP; None is GPT-2's 4 n_embd.
        init_from: a folder (of a model, or of a run) or Hub id. Its config is kept but for dropout, context and rows
            of the vocabulary; new rows begin at the mean of its own.
        gradient_checkpointing: what the backward pass computes again instead of keeping it: "none"; "mlp", the
            activation between an MLP's products; "full", whole blocks.

    Raises BadInput when ``init_from`` cannot be loaded whole, or has another shape.
    """
    register_causal_attention()
    torch.manual_seed(seed)
    training = {"use_cache": False}
    if architecture == "gpt2":
        training |= {"resid_pdrop": resid_pdrop, "embd_pdrop": embd_pdrop, "attn_pdrop": attn_pdrop}
        training["activation_function"] = TRAINING_ACTIVATION
    else:
        training["attention_dropout"] = attn_pdrop
    ids = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
    if init_from is not None:
        shape = {"architecture": architecture, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        shape |= {"num_key_value_heads": num_key_value_heads, "intermediate_size": intermediate_size}
        if architecture == "llama":
            shape |= {"tie_word_embeddings": tie_word_embeddings, "rope_theta": rope_theta}
        model = _go_on_from(init_from, shape, vocab_size, sequence_length, training)
    elif architecture == "gpt2":
        config = GPT2Config(
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            n_inner=intermediate_size,
            vocab_size=vocab_size,
            n_positions=sequence_length,
            attn_implementation=CAUSAL,
            **ids,
            **training,
        )
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            num_hidden_layers=n_layer,
            num_attention_heads=n_head,
            num_key_value_heads=num_key_value_heads,
            hidden_size=n_embd,
            intermediate_size=intermediate_size,
            vocab_size=vocab_size,
            max_position_embeddings=sequence_length,
            tie_word_embeddings=tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            rms_norm_eps=1e-5,
            attn_implementation=CAUSAL,
            **ids,
            **training,
        )
        model = LlamaForCausalLM(config)
    if architecture == "gpt2":
        for block in model.transformer.h:
            for norm, product in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
                norm.forward = functools.partial(_normalize, norm)
                product.forward = functools.partial(_scale_and_multiply, norm, product)
    if gradient_checkpointing == "mlp":
        _recompute_activations(model)
    elif gradient_checkpointing == "full":
        older = getattr(model, "gradient_checkpointing_enable", None)  # until Transformers 5.17 or so
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    return model


# Compiled under autocast, a norm's scale and shift go into the weights of the product behind it: normalised, in half
# precision, is then what the product takes and all that both backward passes keep, and no gradient of scale and shift
# reads it once more. Everywhere else norm and product are the stock ones.


def _normalize(norm: nn.LayerNorm, hidden_BTE: torch.Tensor) -> torch.Tensor:
    autocast = torch.is_autocast_enabled(hidden_BTE.device.type) and norm.weight.dtype == torch.float32
    if torch.compiler.is_compiling() and autocast:
        return _Normalized.apply(hidden_BTE, norm.eps)
    return nn.LayerNorm.forward(norm, hidden_BTE)


def _scale_and_multiply(norm: nn.LayerNorm, product: Conv1D, hidden_BTE: torch.Tensor) -> torch.Tensor:
    if hidden_BTE.dtype == product.weight.dtype:  # a stock norm's: half precision beside fp32 weights is _Normalized's
        return Conv1D.forward(product, hidden_BTE)
    weight_EF = (norm.weight[:, None] * product.weight).to(hidden_BTE.dtype)
    bias_F = product.bias + (norm.bias[:, None] * product.weight).sum(0)
    return _Product.apply(hidden_BTE, weight_EF, bias_F)


class _Normalized(torch.autograd.Function):
    """LayerNorm (Ba et al. 2016) without scale and shift, computed in fp32, returned and kept in autocast's dtype."""

    @staticmethod
    def forward(ctx, hidden_BTE, eps):
        variance, mean = torch.var_mean(hidden_BTE.float(), -1, correction=0, keepdim=True)
        by_deviation = torch.rsqrt(variance + eps)
        out = ((hidden_BTE - mean) * by_deviation).to(torch.get_autocast_dtype(hidden_BTE.device.type))
        ctx.save_for_backward(out, by_deviation)
        return out

    @staticmethod
    def backward(ctx, by_out):
        out, by_deviation = ctx.saved_tensors
        out, by_out = out.float(), by_out.float()
        along = (by_out * out).mean(-1, keepdim=True)
        return by_deviation * (by_out - by_out.mean(-1, keepdim=True) - out * along), None


class _Product(torch.autograd.Function):
    """A product and a bias, whose gradient is summed over tokens, then sequences.

    In that order a compiler makes the first sum in the kernel that writes what is summed, and need not read it again.
    """

    @staticmethod
    def forward(ctx, hidden_BTE, weight_EF, bias_F):
        ctx.save_for_backward(hidden_BTE, weight_EF)
        out = torch.addmm(bias_F.to(weight_EF.dtype), hidden_BTE.flatten(0, 1), weight_EF)
        return out.view(*hidden_BTE.shape[:2], -1)

    @staticmethod
    def backward(ctx, by_out):
        hidden_BTE, weight_EF = ctx.saved_tensors
        rows = by_out.flatten(0, 1)
        by_hidden, by_weight = (rows @ weight_EF.T).view_as(hidden_BTE), hidden_BTE.flatten(0, 1).T @ rows
        return by_hidden, by_weight, by_out.sum(1, dtype=torch.float32).sum(0)


def _recompute_activations(model: PreTrainedModel) -> None:
    """Have each MLP keep its products' results only, and compute what stands between them again (llm.c's -r 1)."""
    for module in model.modules():
        if isinstance(module, GPT2MLP):
            module.forward = functools.partial(_gpt2_mlp, module)
        elif isinstance(module, LlamaMLP):
            module.forward = functools.partial(_llama_mlp, module)


_recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # no dropout within


# The last product stands within, so that its input is not kept; it is not computed again, since nothing that the
# backward pass needs comes after it.
def _gpt2_mlp(mlp: GPT2MLP, hidden: torch.Tensor) -> torch.Tensor:
    return mlp.dropout(_recomputed(lambda inner: mlp.c_proj(mlp.act(inner)), mlp.c_fc(hidden)))


def _llama_mlp(mlp: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
    gated = mlp.gate_proj(hidden), mlp.up_proj(hidden)
    return _recomputed(lambda gate, up: mlp.down_proj(mlp.act_fn(gate) * up), *gated)


def source(
    name: str, *, sequence_length: int | None = None, vocab_size: int | None = None, **shape: object
) -> dict[str, str | int | float | bool | None]:
    """Return the recipe's model keys of a checkpoint (a folder, of a model or of a run, or a Hub id), from its config.

    vocab_size is its rows padded up to a multiple of 64; what only a Llama has is None for GPT-2, and intermediate_size
    where it is GPT-2's 4 n_embd. Raises BadInput when it cannot be loaded, is neither a GPT-2 nor a Llama-type model,
    or differs from what the arguments state: those keys (None: not stated), a context that it must have.
    """
    config = _source_config(name)
    keys, rows, context = _model_keys(config), config.vocab_size, config.max_position_embeddings
    own = keys | {"intermediate_size": keys["intermediate_size"] or 4 * keys["n_embd"]}
    faults = [
        f"init_from = {name}: {key} = {value}, the model's is {own[key]}; leave {key} out (--{key} none)"
        for key, value in shape.items()
        if value not in (None, own[key])
    ]
    if vocab_size is not None and vocab_size < rows:
        wide = f"its vocabulary has {rows} rows; use --vocab_size {_padded(rows)}, or leave it out"
        faults.append(f"init_from = {name}: vocab_size = {vocab_size}: {wide}")
    if sequence_length is not None and sequence_length > context:
        long = f"its context is {context} tokens; use --sequence_length {context}"
        faults.append(f"init_from = {name}: sequence_length = {sequence_length}: {long}")
    if faults:
        raise BadInput(faults)
    return keys


def _model_keys(config: PreTrainedConfig) -> dict[str, str | int | float | bool | None]:
    llama = config.model_type == "llama"
    width = config.intermediate_size if llama else config.n_inner
    return {
        "architecture": config.model_type,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "vocab_size": _padded(config.vocab_size),
        "num_key_value_heads": config.num_key_value_heads if llama else None,
        "intermediate_size": width if llama or width != 4 * config.n_embd else None,
        "tie_word_embeddings": config.tie_word_embeddings if llama else None,
        "rope_theta": float(config.rope_parameters["rope_theta"]) if llama else None,
    }


def _padded(rows: int) -> int:
    return -(-rows // 64) * 64


def _source_config(name: str) -> PreTrainedConfig:
    """Return the config of a model to go on from; BadInput where training would silently make another model of it."""
    try:
        config = AutoConfig.from_pretrained(find(name, "init_from ="), trust_remote_code=False)
    except BadInput:
        raise
    except Exception as error:  # the Hub client, the cache and the parsers each raise their own kinds
        raise BadInput(f"init_from = {name}: cannot be loaded ({_reason(error)})") from None
    if config.model_type not in ("gpt2", "llama"):
        raise BadInput(f"init_from = {name}: is a {config.model_type}; give a model of type gpt2 or llama")
    if getattr(config, "quantization_config", None):
        raise BadInput(f"init_from = {name}: its weights are quantized; give the model that it was made from")
    usual = {"activation_function": (STOCK_ACTIVATION, TRAINING_ACTIVATION), "tie_word_embeddings": (True,)}
    usual |= dict.fromkeys(
        ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), (False,)
    )
    if config.model_type == "gpt2":
        odd = {key: getattr(config, key) for key, values in usual.items() if getattr(config, key) not in values}
        if odd:
            raise BadInput(f"init_from = {name}: {k} = {v}: GPT-2's is {usual[k][0]}" for k, v in odd.items())
    return config


def _go_on_from(
    name: str, shape: dict[str, object], vocab_size: int, sequence_length: int, training: dict[str, object]
) -> PreTrainedModel:
    """Load a model in fp32 to train it on, with other dropout, context and rows of the vocabulary."""
    source(name, sequence_length=sequence_length, vocab_size=vocab_size, **shape)  # refuse what differs
    config = _source_config(name)
    rows, context = config.vocab_size, config.max_position_embeddings
    for key, value in training.items():
        setattr(config, key, value)
    how = {"dtype": torch.float32, "attn_implementation": CAUSAL, "output_loading_info": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(find(name), config=config, trust_remote_code=False, **how)
    except Exception as error:  # as above
        raise BadInput(f"init_from = {name}: cannot be loaded ({_reason(error)})") from None
    # The ones would stay noise, the others be left out; but for a buffer that old GPT-2s keep beside their weights.
    beside = [key for key in info["unexpected_keys"] if not key.endswith(".attn.masked_bias")]
    for fault, keys in (("lacks", sorted(info["missing_keys"])), ("has besides", sorted(beside))):
        if keys:
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise BadInput(f"init_from = {name}: its weights are not those of its config.json: it {fault} {shown}")
    if config.tie_word_embeddings and model.lm_head.weight is not model.get_input_embeddings().weight:
        raise BadInput(
            f"init_from = {name}: its config.json ties the head to the embedding, and its weights have two that "
            f'differ; write "tie_word_embeddings": false there'
        )
    if vocab_size > rows:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        with torch.no_grad():
            for part in (model.get_input_embeddings(), model.lm_head):
                part.weight[rows:] = part.weight[:rows].mean(0)
    if config.model_type == "gpt2" and sequence_length < context:
        positions = model.transformer.wpe.weight[:sequence_length].detach().clone()
        model.transformer.wpe = nn.Embedding.from_pretrained(positions, freeze=False)
        model.config.n_positions = sequence_length
    return model.train()


def _reason(error: Exception) -> str:
    """Return an error's first line, or its kind where it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def find(name: str, asked: str = "--model") -> str:
    """Return what ``load`` takes: a run folder stands for its ``model/``, any other folder or Hub id for itself.

    Raises BadInput, which begins with ``asked``, where there is no such folder or the run has not written its model.
    """
    path = Path(name)
    if (path / "model").is_dir():
        return str(path / "model")
    if path.is_dir() and (path / "checkpoints").is_dir():
        raise BadInput(
            f"{asked} {name}: the run has not written model/ yet; it does so at its end. Until then "
            f"python export_model.py {name} --out exports/{path.name} makes a model of its newest checkpoint"
        )
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        raise BadInput(f"{asked} {name}: holds no model; give a folder with config.json and weights")
    if not path.exists() and (
        path.parts[0] == "runs" or path.parent.parent != Path() or path.parent.is_dir() and path.parent != Path()
    ):
        raise BadInput(f"{asked} {name}: no such folder (a Hub id is owner/name)")
    return name


def load(name: str) -> PreTrainedModel:
    """Load any causal language model of Transformers, in the precision it was saved in, for use, not for training.

    Its GELU runs as one kernel. Raises BadInput when it cannot be loaded.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    except Exception as error:  # the Hub client, the cache and the parsers each raise their own kinds
        raise BadInput(f"--model {name}: cannot be loaded: {_reason(error)}") from None
    for module in list(model.modules()):
        for child, part in module.named_children():
            if isinstance(part, NewGELUActivation):
                setattr(module, child, nn.GELU(approximate="tanh"))
    return model.eval()


def count_parameters(model: PreTrainedModel) -> int:
    """Return the number of weights, each tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())
