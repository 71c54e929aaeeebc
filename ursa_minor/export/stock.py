"""Weights out of a run, as any program of the ecosystem loads them: the stock model, its config, its tokenizer."""

import copy
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ursa_minor.base import files
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.model.dtypes import DTYPE_NAMES
from ursa_minor.model.finite import require_finite, require_stored

# What to do about a weight that a dtype cannot store.
WIDER = {
    torch.float32: "No export format can store it",
    torch.bfloat16: "Use --dtype fp32",
    torch.float16: "Use --dtype bf16 or --dtype fp32",
}


def write(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write or replace ``folder`` as any program of the ecosystem loads it: the stock model in fp32 and its tokenizer.

    Raises OSError with the folder's name where the disk does not take it.
    """
    with files.making(folder, replace=True) as temporary:
        save(to_transformers(model, tokenizer), temporary, tokenizer)


def to_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype = torch.float32,
    trim_vocab: bool = False,
) -> PreTrainedModel:
    """Return Transformers' own model with these weights in ``dtype``, on the CPU, to be saved.

    Vocabulary rows beyond the tokenizer's ids are padding: ``trim_vocab`` leaves them out, else generation_config
    forbids them. Raises BadInput for a weight that is not finite, or that ``dtype`` cannot store.
    """
    stock = _stock(model.config, tokenizer, model.generation_config, dtype, trim_vocab)
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if name not in stock.all_tied_weights_keys:  # tied tensors are stored once
            weights[name] = _cast(
                name, tensor[: shapes[name][0]] if shapes[name] else tensor, dtype
            )
    loaded = stock.load_state_dict(weights, strict=False, assign=True)
    assert not loaded.unexpected_keys and {*loaded.missing_keys} <= {
        *stock.all_tied_weights_keys
    }, loaded
    stock.tie_weights()
    return stock


def save(stock: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights, config, generation_config and tokenizer into a folder."""
    stock.save_pretrained(folder)
    files.apply_umask(folder.glob("*.safetensors"))
    _save_tokenizer(stock, folder, tokenizer)


def describe(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the files that ``write`` adds to a model's weights, by name."""
    stock = _stock(config, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        stock.config.save_pretrained(folder)
        stock.generation_config.save_pretrained(folder)
        _save_tokenizer(stock, Path(folder), tokenizer)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}


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
    if architecture := ARCHITECTURES.get(config.model_type):  # any other model is stock already
        for key, value in architecture.in_training.items():
            if getattr(config, key) == value:
                setattr(config, key, architecture.required[key][0])
        for legacy_name, name in architecture.legacy_names.items():
            setattr(config, legacy_name, getattr(config, name))
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
        generation.do_sample = (
            True  # some published ones have a temperature without it, which cannot be saved again
        )
    stock.generation_config = generation
    return stock


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight on the CPU in ``dtype``.

    Raises BadInput if the weight is not finite, or if ``dtype`` cannot store its largest value.
    """
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor
    require_finite(name, tensor)
    cast = tensor.to(dtype)
    limit = torch.finfo(dtype).max
    require_stored(name, tensor, cast, limit=limit, label=DTYPE_NAMES[dtype], fix=WIDER[dtype])
    return cast


def _save_tokenizer(
    stock: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.model_max_length = getattr(
        stock.config, "max_position_embeddings", tokenizer.model_max_length
    )
    tokenizer.save_pretrained(folder)
    # The same class and key under the names that Transformers 4, vLLM and llama.cpp's converter know too.
    about = folder / "tokenizer_config.json"
    text = about.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    about.write_text(text.replace('"extra_special_tokens"', '"additional_special_tokens"'), "utf-8")
