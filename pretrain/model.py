"""Stock GPT-2 of Transformers, the causal attention it trains with, its size.

Legend: B sequences, T tokens, E width, V vocabulary.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.activations import NewGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .errors import BadInput

CAUSAL = "ursa_causal"
# One fused kernel for the same function as GPT-2's gelu_new, which is eight elementwise ones outside a compiler.
TRAINING_ACTIVATION, STOCK_ACTIVATION = "gelu_pytorch_tanh", "gelu_new"


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
    """Attend over (B, heads, T, E/heads); return (B, T, heads, E/heads) and no weights, as Transformers expects."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def build(
    *,
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
    init_from: str | None = None,
    gradient_checkpointing: bool = False,
) -> GPT2LMHeadModel:
    """Build GPT-2 in fp32 with seeded random weights, or with those of ``init_from`` (a folder or Hub id).

    Args:
        gradient_checkpointing: in training keep each block's input only and compute the block again for its gradients.

    Raises BadInput when ``init_from`` cannot be loaded or has another shape.
    """
    register_causal_attention()
    config = GPT2Config(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        vocab_size=vocab_size,
        n_positions=sequence_length,
        resid_pdrop=resid_pdrop,
        embd_pdrop=embd_pdrop,
        attn_pdrop=attn_pdrop,
        activation_function=TRAINING_ACTIVATION,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        use_cache=False,
        attn_implementation=CAUSAL,
    )
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config)
    if init_from is not None:
        _copy_weights(model, init_from)
    if gradient_checkpointing:
        older = getattr(model, "gradient_checkpointing_enable", None)  # until Transformers 5.17 or so
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    return model


def _copy_weights(model: GPT2LMHeadModel, name: str) -> None:
    """Copy a source model's weights; rows of our vocabulary beyond its own start at the mean of its rows."""
    try:
        source = GPT2LMHeadModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # the Hub client, the cache and the parsers each raise their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"init_from = {name}: cannot be loaded as a GPT-2 ({reason})") from None
    if source.config.activation_function not in (TRAINING_ACTIVATION, STOCK_ACTIVATION):
        raise BadInput(f"init_from = {name}: activation_function = {source.config.activation_function}: not GPT-2's")
    state = source.state_dict()
    embedding_VE = state["transformer.wte.weight"]
    if extra := model.config.vocab_size - len(embedding_VE):
        if extra < 0:
            raise BadInput(
                f"init_from = {name}: has {len(embedding_VE)} vocabulary rows, vocab_size = "
                f"{model.config.vocab_size}; use --vocab_size {-(-len(embedding_VE) // 64) * 64}"
            )
        padding = embedding_VE.mean(0, keepdim=True).expand(extra, -1)
        embedding_VE = torch.cat([embedding_VE, padding])
    state["transformer.wte.weight"] = state["lm_head.weight"] = embedding_VE
    context = model.config.n_positions
    if len(state["transformer.wpe.weight"]) > context:
        state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:context]
    keys = ("n_layer", "n_head", "n_embd", "n_positions")
    differ = [key for key in keys if getattr(source.config, key) != getattr(model.config, key)]
    if source.config.n_positions > context:
        differ.remove("n_positions")
    if differ:
        values = ", ".join(f"{key} = {getattr(source.config, key)}" for key in differ)
        raise BadInput(f"init_from = {name}: its {values} must stand in the recipe too (sequence_length: n_positions)")
    model.load_state_dict(state)


def find(name: str) -> str:
    """Return what ``load`` takes: a run folder stands for its ``model/``, any other folder or Hub id for itself.

    Raises BadInput where there is no such folder, or the run has not written its model yet.
    """
    path = Path(name)
    if (path / "model").is_dir():
        return str(path / "model")
    if path.is_dir() and (path / "checkpoints").is_dir():
        raise BadInput(f"--model {name}: the run has not written model/ yet; it does so at its end")
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        raise BadInput(f"--model {name}: holds no model; give a folder with config.json and weights")
    if not path.exists() and (
        path.parts[0] == "runs" or path.parent.parent != Path() or path.parent.is_dir() and path.parent != Path()
    ):
        raise BadInput(f"--model {name}: no such folder (a Hub id is owner/name)")
    return name


def load(name: str) -> PreTrainedModel:
    """Load any causal language model of Transformers, in the precision it was saved in, for use, not for training.

    Its GELU runs as one kernel. Raises BadInput when it cannot be loaded.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    except Exception as error:  # the Hub client, the cache and the parsers each raise their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"--model {name}: cannot be loaded: {reason}") from None
    for module in list(model.modules()):
        for child, part in module.named_children():
            if isinstance(part, NewGELUActivation):
                setattr(module, child, nn.GELU(approximate="tanh"))
    return model.eval()


def count_parameters(model: GPT2LMHeadModel) -> int:
    """Return the number of weights, each tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())
