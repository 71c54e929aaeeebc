"""Stock GPT-2 of Transformers, the causal attention it trains with, its loss, its size, its export.

Legend: B sequences, T tokens, E width, V vocabulary.
"""

import contextlib
import copy
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import NewGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import files
from .errors import BadInput

CAUSAL = "ursa_causal"
CARD_ROWS = 8192  # tokens whose logits a card holds at once
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


class NextTokenLoss(nn.Module):
    """A model and its loss as one module, so that a compiler sees both and DDP wraps both.

    Logits exist a part at a time: on a card 8,192 rows (4,096 in evaluation, which is not compiled), where matrix
    products are as fast as with more; on a CPU so many that they stay in its cache, which is faster.
    """

    rows: int | None = None  # another size of the parts

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a fp32 scalar in nats per token; inputs and targets are (B, T) int64."""
        hidden = self.model.transformer(inputs_BT, use_cache=False).last_hidden_state.flatten(0, 1)
        targets = targets_BT.flatten()
        training, vocab_size = torch.is_grad_enabled(), self.model.config.vocab_size
        in_cache = max(256, 2**20 // vocab_size)
        rows = self.rows or ((CARD_ROWS if training else CARD_ROWS // 2) if hidden.is_cuda else in_cache)
        if training and len(targets) <= rows:
            return F.cross_entropy(self.model.lm_head(hidden).float(), targets)
        if training:
            return _ChunkedLoss.apply(hidden, self.model.lm_head.weight, targets, rows) / len(targets)
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        sums = [F.cross_entropy(self.model.lm_head(rows).float(), ids, reduction="sum") for rows, ids in parts]
        return torch.stack(sums).sum() / len(targets)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of cross-entropies of a linear head, and its gradients at once, some rows at a time.

    The gradients by hidden states and head cost two matrix products wherever they are computed; here they are while a
    part's logits are there, so that none must be kept. They are those of the sum, which fp16 can hold; the backward
    pass only scales them.
    """

    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, targets_N, rows):
        device = hidden_NE.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_NE.dtype
        head, vocabulary = weight_VE.to(dtype), torch.arange(len(weight_VE), device=hidden_NE.device)
        loss = torch.zeros((), device=hidden_NE.device)
        by_hidden, by_head = [], torch.zeros_like(weight_VE)
        for part, ids in zip(hidden_NE.to(dtype).split(rows), targets_N.split(rows), strict=True):
            logits = (part @ head.T).float()
            total = logits.logsumexp(-1, keepdim=True)
            loss = loss + (total - logits.gather(-1, ids[:, None])).sum()
            # Softmax, minus one at the target; in place, and in one kernel where it is compiled.
            logits.sub_(total).exp_().add_(vocabulary == ids[:, None], alpha=-1)
            by_logits = logits.to(dtype)
            by_hidden.append((by_logits @ head).to(hidden_NE.dtype))
            by_head += by_logits.T @ part
        ctx.save_for_backward(torch.cat(by_hidden), by_head)
        return loss

    @staticmethod
    def backward(ctx, by_loss):
        by_hidden, by_head = ctx.saved_tensors
        return by_hidden * by_loss, by_head * by_loss, None, None


def count_parameters(model: GPT2LMHeadModel) -> int:
    """Return the number of weights, each tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def export(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write ``folder`` as any program of the ecosystem loads it: the stock model in fp32 and its tokenizer."""
    with replacing(folder) as aside:
        save(as_stock(model, tokenizer), aside, tokenizer)


def as_stock(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype = torch.float32,
    trim_vocab: bool = False,
) -> PreTrainedModel:
    """Return Transformers' own model with these weights in ``dtype``, on the CPU, to be saved.

    Vocabulary rows beyond the tokenizer's ids are padding: ``trim_vocab`` leaves them out, else generation_config
    forbids them. Raises BadInput for a weight that ``dtype`` cannot hold.
    """
    stock = _stock(model.config, tokenizer, model.generation_config, dtype, trim_vocab)
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if name not in stock.all_tied_weights_keys:  # those are one tensor with another
            weights[name] = _cast(name, tensor[: shapes[name][0]] if shapes[name] else tensor, dtype)
    loaded = stock.load_state_dict(weights, strict=False, assign=True)
    assert not loaded.unexpected_keys and {*loaded.missing_keys} <= {*stock.all_tied_weights_keys}, loaded
    stock.tie_weights()
    return stock


def save(stock: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights, config, generation_config and tokenizer into a folder."""
    stock.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # which safetensors lets nobody else read
        path.chmod((folder / "config.json").stat().st_mode)
    _save_tokenizer(stock, folder, tokenizer)


def describe(config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write into a folder what ``export`` writes of a model of this config, but for its weights."""
    stock = _stock(config, tokenizer)
    stock.config.save_pretrained(folder)
    stock.generation_config.save_pretrained(folder)
    _save_tokenizer(stock, folder, tokenizer)


def _stock(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None = None,
    dtype: torch.dtype = torch.float32,
    trim_vocab: bool = False,
) -> PreTrainedModel:
    """Return Transformers' own model, without weights (on the meta device), configured to be used."""
    config = type(config).from_dict(config.to_dict())
    config.use_cache, config.dtype = True, dtype
    if getattr(config, "activation_function", None) == TRAINING_ACTIVATION:
        config.activation_function = STOCK_ACTIVATION
    if config.model_type == "gpt2":
        config.n_ctx = config.n_positions  # its old name, which llama.cpp's converter reads
    ids = 1 + max(tokenizer.get_vocab().values())
    if trim_vocab:
        config.vocab_size = min(ids, config.vocab_size)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stock.config.architectures = [type(stock).__name__]
    generation = copy.deepcopy(generation or stock.generation_config)
    allowed = [i for i in generation.suppress_tokens or () if i < ids]
    generation.suppress_tokens = [*allowed, *range(ids, config.vocab_size)] or None
    generation.use_cache = True
    if generation.pad_token_id is None:
        eos = generation.eos_token_id
        generation.pad_token_id = eos[0] if isinstance(eos, list) else eos
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True  # some published ones have a temperature without it, which cannot be saved again
    stock.generation_config = generation
    return stock


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    if not cast.isfinite().all() and tensor.isfinite().all():
        raise BadInput(
            f"{name} has values up to {tensor.abs().max():.6g}, and {str(dtype).removeprefix('torch.')} ends at "
            f"{torch.finfo(dtype).max:.6g}; use --dtype bf16 or fp32"
        )
    return cast


def _save_tokenizer(stock: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.model_max_length = getattr(stock.config, "max_position_embeddings", tokenizer.model_max_length)
    tokenizer.save_pretrained(folder)
    about = folder / "tokenizer_config.json"
    # The same class under the name that Transformers 4, vLLM and llama.cpp's converter know too.
    about.write_text(about.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), "utf-8")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a new folder beside ``folder``; on success it takes its place by renaming, on error it goes.

    So a reader never sees half of it.
    """
    aside = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in [*aside.iterdir(), aside]:
            files.fsync(path)
        old = folder.with_name(f".{folder.name}.old-{uuid.uuid4().hex[:8]}")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        files.fsync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
