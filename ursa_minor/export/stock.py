"""Export a model as Transformers' own ("stock") model: safetensors, config and tokenizer.

While it trains, a model of this project uses its own attention and activation functions. The
exported config names the ones of Transformers instead, so that any program of the ecosystem loads
it. The weights have the same names in both.
"""

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

# The fix for a weight that a dtype cannot store.
WIDER = {
    torch.float32: "No export format can store this value. Export another checkpoint",
    torch.bfloat16: "Use --dtype fp32",
    torch.float16: "Use --dtype bf16 or --dtype fp32",
}
# Names in tokenizer_config.json that only Transformers 5 knows, and the names for the same class
# and key that Transformers 4, vLLM and llama.cpp's converter also know.
PORTABLE_NAMES = {
    '"TokenizersBackend"': '"PreTrainedTokenizerFast"',
    '"extra_special_tokens"': '"additional_special_tokens"',
}


def write(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the stock model in fp32 and its tokenizer into ``folder``, which is replaced.

    Raises:
        BadInput: a weight is NaN or infinite.
        OSError: the disk does not take the files. The error has the name of the folder.
    """
    with files.create_folder(folder, replace=True) as temporary:
        save(to_transformers(model, tokenizer), temporary, tokenizer)


def to_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype = torch.float32,
    trim_vocab: bool = False,
) -> PreTrainedModel:
    """Return the stock model with the weights of ``model``, on the CPU, ready to be saved.

    Args:
        model: a model of this project, or any causal language model of Transformers.
        tokenizer: tokenizer of the model. Vocabulary rows beyond its ids are padding.
        dtype: dtype of the returned weights.
        trim_vocab: whether to leave out the padding rows. Otherwise generation_config suppresses
            their ids.

    Raises:
        BadInput: a weight is not finite, or ``dtype`` cannot store it.
    """
    stock = _stock_skeleton(model.config, tokenizer, model.generation_config, dtype, trim_vocab)
    shapes = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    tied_names = set(stock.all_tied_weights_keys)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in tied_names:  # a tied weight is stored once, under its other name
            continue
        # trim_vocab shortens the embedding and the output head. All other tensors keep their rows.
        is_scalar = len(shapes[name]) == 0
        rows = tensor if is_scalar else tensor[: shapes[name][0]]
        weights[name] = _cast(name, rows, dtype)
    loaded = stock.load_state_dict(weights, strict=False, assign=True)
    assert not loaded.unexpected_keys, loaded
    assert set(loaded.missing_keys) <= tied_names, loaded
    stock.tie_weights()
    return stock


def save(stock: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights, config, generation_config and tokenizer into a folder."""
    stock.save_pretrained(folder)
    files.apply_umask(folder.glob("*.safetensors"))
    _save_tokenizer(stock, folder, tokenizer)


def describe(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the text of each file that ``write`` adds to the weights, by file name."""
    stock = _stock_skeleton(config, tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock.config.save_pretrained(folder)
        stock.generation_config.save_pretrained(folder)
        _save_tokenizer(stock, folder, tokenizer)
        return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def _stock_skeleton(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None = None,
    dtype: torch.dtype = torch.float32,
    trim_vocab: bool = False,
) -> PreTrainedModel:
    """Return the stock model with its final configuration, on the meta device.

    A module on the meta device has shapes, but no memory for weights.

    Args:
        generation: generation_config of the trained model, or None for the defaults.
    """
    num_ids = 1 + max(tokenizer.get_vocab().values())
    config = _stock_config(config)
    config.dtype = dtype
    if trim_vocab:
        config.vocab_size = min(num_ids, config.vocab_size)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stock.config.architectures = [type(stock).__name__]
    stock.generation_config = _stock_generation_config(
        generation or stock.generation_config, num_ids, config.vocab_size
    )
    return stock


def _stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config in which the stock model's values replace those of training."""
    config = type(config).from_dict(config.to_dict())
    config.use_cache = True
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:  # a model that this project cannot train is stock already
        return config
    for key, value in architecture.in_training.items():
        if getattr(config, key) == value:
            stock_value = architecture.required[key][0]
            setattr(config, key, stock_value)
    for legacy_name, name in architecture.legacy_names.items():
        setattr(config, legacy_name, getattr(config, name))
    return config


def _stock_generation_config(
    generation: GenerationConfig, num_ids: int, vocab_size: int
) -> GenerationConfig:
    """Return a copy of a generation_config that suppresses the padding ids and can be saved.

    Args:
        num_ids: number of ids of the tokenizer. The ids from here to ``vocab_size`` are padding.
    """
    generation = copy.deepcopy(generation)
    suppressed = [token_id for token_id in generation.suppress_tokens or () if token_id < num_ids]
    suppressed += range(num_ids, vocab_size)
    generation.suppress_tokens = suppressed or None
    generation.use_cache = True
    if generation.pad_token_id is None:
        eos = generation.eos_token_id
        generation.pad_token_id = eos[0] if isinstance(eos, list) else eos
    try:
        generation.validate(strict=True)
    except ValueError:
        # Some published models set a temperature without do_sample. Transformers loads such a
        # configuration, but refuses to save it.
        generation.do_sample = True
    return generation


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
    config_file = folder / "tokenizer_config.json"
    text = config_file.read_text(encoding="utf-8")
    for name, portable_name in PORTABLE_NAMES.items():
        text = text.replace(name, portable_name)
    config_file.write_text(text, encoding="utf-8")
