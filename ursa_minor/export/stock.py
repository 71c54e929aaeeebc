"""Export a model as Transformers' own ("stock") model: safetensors, config and tokenizer.

While it trains, a model of this project uses its own attention and activation functions. The
exported config names the ones of Transformers instead, so that any program of the ecosystem loads
it. The files also contain what programs other than Transformers 5 read: ``docs/export.md`` lists
the programs.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ursa_minor.base import files
from ursa_minor.base.run_files import MODEL_FILE
from ursa_minor.model.architectures import ARCHITECTURES, file_names
from ursa_minor.model.dtypes import DTYPE_NAMES
from ursa_minor.model.finite import require_finite, require_stored

# The fix for a weight that a dtype cannot store.
WIDER = {
    torch.float32: "No export format can store this value. Export another checkpoint",
    torch.bfloat16: "Use --dtype fp32",
    torch.float16: "Use --dtype bf16 or --dtype fp32",
}
INDEX_FILE = "model.safetensors.index.json"
# The generic class of a tokenizer, under its name in Transformers 5 and under the name that
# Transformers 4, vLLM and llama.cpp's converter also know.
TOKENIZER_CLASS = "TokenizersBackend"
PORTABLE_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# Keys of tokenizer_config.json that describe how this process has loaded the tokenizer.
LOCAL_KEYS = ("is_local", "local_files_only")


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
    _rename_weights(folder, stock.config.model_type)
    files.apply_umask(folder.glob("*.safetensors"))
    _add_legacy_rope_keys(folder / "config.json")
    _save_tokenizer(stock, folder, tokenizer)


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the text of each file that ``write`` adds to the weights, by file name."""
    stock = _stock_skeleton(model.config, tokenizer, model.generation_config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock.config.save_pretrained(folder)
        stock.generation_config.save_pretrained(folder)
        _add_legacy_rope_keys(folder / "config.json")
        _save_tokenizer(stock, folder, tokenizer)
        paths = [path for path in folder.iterdir() if MODEL_FILE.fullmatch(path.name)]
        return {path.name: path.read_text(encoding="utf-8") for path in paths}


def _rename_weights(folder: Path, model_type: str) -> None:
    """Give the weights in the files of a folder the names of ``architectures.file_names``.

    Transformers loads both names. It cannot save other names than its own if the weights are
    quantized.
    """
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            names = file_names(model_type, opened.keys())
        if all(name == new_name for name, new_name in names.items()):
            continue
        tensors = load_file(file)
        with files.replacing(file) as temporary:
            save_file({names[name]: tensors[name] for name in tensors}, temporary, metadata)
    index_file = folder / INDEX_FILE
    if index_file.exists():
        index = files.read_json(index_file)
        names = file_names(model_type, index["weight_map"])
        index["weight_map"] = {names[name]: file for name, file in index["weight_map"].items()}
        files.write_json(index_file, index)


def _add_legacy_rope_keys(config_file: Path) -> None:
    """Add ``rope_theta`` and ``rope_scaling`` to a config.json with ``rope_parameters``.

    Transformers 4 and mlx-lm do not read ``rope_parameters``. Without the other keys they would use
    the default base of 10,000 without a warning. Transformers 5 reads all three.
    """
    config = files.read_json(config_file)
    parameters = config.get("rope_parameters")
    # Some architectures have several sets of parameters, one for each type of layer.
    if not parameters or "rope_theta" not in parameters:
        return
    config["rope_theta"] = parameters["rope_theta"]
    if parameters.get("rope_type", "default") != "default":
        scaling = dict(parameters)
        del scaling["rope_theta"]
        config["rope_scaling"] = scaling
    _write_json(config_file, config)


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
    """Write the files of the tokenizer so that they mean the same in every program.

    The values of tokenizer_config.json that are added here are those that Transformers 5 uses if
    they are missing. Other programs have other defaults.
    """
    tokenizer.model_max_length = getattr(
        stock.config, "max_position_embeddings", tokenizer.model_max_length
    )
    template = tokenizer.chat_template
    has_one_template = isinstance(template, str)
    # Several templates are stored in tokenizer_config.json only.
    tokenizer.save_pretrained(folder, save_jinja_files=has_one_template)

    config_file = folder / "tokenizer_config.json"
    config = files.read_json(config_file)
    for key in LOCAL_KEYS:
        config.pop(key, None)
    if config.get("tokenizer_class") == TOKENIZER_CLASS:
        config["tokenizer_class"] = PORTABLE_TOKENIZER_CLASS
    if "extra_special_tokens" in config:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("unk_token") is None and tokenizer.eos_token is not None:
        # CTranslate2 cannot open a model without an unknown token. A byte-level tokenizer never
        # uses it.
        config["unk_token"] = str(tokenizer.eos_token)
    config.setdefault("clean_up_tokenization_spaces", False)  # transformers.js: true
    if has_one_template:
        config["chat_template"] = template  # transformers.js and Transformers 4.46 read it here
    _write_json(config_file, config)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON file in the form of Transformers."""
    text = files.to_json(dict(sorted(value.items())), indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
