"""Convert checkpoints of other trainers into model folders of Transformers.

- nanoGPT: ``ckpt.pt``, with or without biases; character models with the table of ``meta.pkl``
- build-nanogpt: ``model_*.pt``
- llm.c: ``model_*.bin`` and the files of its ``train_gpt2.py``, versions 3 (fp32) and 5 (bf16)
- model folders of Transformers in which the names of the weights have a prefix of torch.compile,
  DistributedDataParallel or Lightning

A file is converted once, into ``other_checkpoints.converted_folder``. The optimizer state is not
converted.

This is the only module that reads pickle files. Nothing in them is executed: ``torch.load`` with
``weights_only=True`` and the unpickler for ``meta.pkl`` construct only tensors and plain values.
They reject a file that needs more.
"""

import contextlib
import itertools
import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, GPT2Config
from transformers.utils import cached_file

from ursa_minor.base import files, other_checkpoints
from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.base.run_files import MODEL
from ursa_minor.base.wording import join_or
from ursa_minor.model import weight_names

log = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]

CONVERTED_FROM = "converted_from.json"  # names the original in a converted folder
TOKENIZER_FILE = "tokenizer.json"
META_FILE = "meta.pkl"  # nanoGPT's table of characters
END_OF_TEXT = "<|endoftext|>"
GPT2_REPOSITORY = "openai-community/gpt2"
GPT2_ROWS = range(50257, 50304 + 1)  # GPT-2's vocabulary, with or without padding
# First bytes of the files of torch.save before version 1.6; see also ``weight_names.ZIP``.
PICKLE = b"\x80\x02"
# The first number of llm.c's files.
LLM_C_MODEL = 20240326
OTHER_LLM_C_FILES = {
    20240327: "the debug state of train_gpt2.py",
    20240328: "a tokenizer",
    20240520: "tokens",
    20240527: "the state of an optimizer",
    20240801: "Llama 3 tokens",
    20240803: "a Llama 3 model",
}
LLM_C_HEADER_BYTES = 1024
LLM_C_DTYPES = {3: torch.float32, 5: torch.bfloat16}  # by version
# Matrices of torch.nn.Linear, (outputs, inputs). Transformers' GPT-2 stores (inputs, outputs).
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # buffers of old versions, which contain no weights
MAX_LAYERS = 10_000  # a larger number is that of a corrupted file
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Files of a model folder that are copied if its weights are renamed.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Shape:
    """The size of a GPT-2 in the terms of nanoGPT.

    Attributes:
        vocab_size: number of rows of the embedding.
        block_size: context length in tokens.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int


@dataclass(frozen=True)
class Checkpoint:
    """The model in a checkpoint of another trainer.

    Attributes:
        program: the program that wrote it.
        step: number of updates, or None if the file does not contain it.
        weights: parameters by their names in nanoGPT, complete and with the shapes of ``shape``.
        activation: name of the activation function in Transformers.
        dropout: probability of dropout.
        dataset: name of nanoGPT's data set, or None.
    """

    program: str
    step: int | None
    shape: Shape
    weights: Weights
    activation: str
    dropout: float = 0.0
    dataset: str | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model and the number of rows that its embedding needs."""

    tokenizer: Tokenizer
    rows: int

    @property
    def end_of_text_id(self) -> int:
        """The id of the end-of-text token."""
        return self.tokenizer.get_vocab()[END_OF_TEXT]


class Placeholder:
    """Takes the place of a class whose attributes are read. It has no methods."""


# Classes that a checkpoint of build-nanogpt contains, by the names in the file.
PLACEHOLDERS = ("__main__.GPTConfig", "argparse.Namespace")


def convert(file: Path, label: str) -> Path:
    """Return the folder with the converted copy of a checkpoint. Create it if it does not exist.

    Args:
        file: the checkpoint (``other_checkpoints.find_checkpoint``).
        label: beginning of error messages: the option and its value.

    Raises:
        BadInput: the file is not a checkpoint that can be converted, its tokenizer is missing, or
            the cache folder cannot be written.
    """
    folder = other_checkpoints.converted_folder(file)
    if folder.is_dir():
        _check_same_tokenizer(folder, file, label)
        return folder
    checkpoint = read(file, label)
    tokenizer_file = find_tokenizer_file(file.parent, checkpoint.dataset)
    vocabulary = find_vocabulary(checkpoint, tokenizer_file, file, label)
    with _creating(folder, label) as temporary:
        _write_model(checkpoint, vocabulary, temporary)
        _write_tokenizer(vocabulary, checkpoint.shape.block_size, temporary)
        origin = {
            "program": checkpoint.program,
            "file": str(file.absolute()),
            "dataset": checkpoint.dataset,
            "tokenizer": None if tokenizer_file is None else files.sha256(tokenizer_file),
        }
        (temporary / CONVERTED_FROM).write_text(json.dumps(origin, indent=1) + "\n")
        if other_checkpoints.converted_folder(file) != folder:
            raise BadInput(f"{label}: {file.name} was changed while it was read. Try again")
    updates = "" if checkpoint.step is None else f" of step {checkpoint.step:,}"
    log.info(f"{label}: converted the {checkpoint.program} checkpoint{updates} into {folder}")
    return folder


def _check_same_tokenizer(folder: Path, file: Path, label: str) -> None:
    """Raise BadInput if the tokenizer of a checkpoint has changed since it was converted."""
    origin = files.read_json(folder / CONVERTED_FROM)
    tokenizer_file = find_tokenizer_file(file.parent, origin["dataset"])
    if tokenizer_file is None or files.sha256(tokenizer_file) == origin["tokenizer"]:
        return
    raise BadInput(
        f"{label}: {tokenizer_file} has changed since this checkpoint was converted. If the new "
        f"file belongs to the checkpoint, delete the converted copy, {folder}"
    )


@contextlib.contextmanager
def _creating(folder: Path, label: str) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``folder`` (``files.create_folder``).

    Raises:
        BadInput: the folder cannot be created or written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.create_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        raise BadInput(
            f"{label}: the model must be converted, but its copy cannot be written to "
            f"{folder.parent} ({error.strerror}). Free some space, or set the environment variable "
            f"XDG_CACHE_HOME to another folder"
        ) from None


# Reading


def read(file: Path, label: str) -> Checkpoint:
    """Read a checkpoint of nanoGPT, build-nanogpt or llm.c.

    The weights are mapped into memory where possible.

    Raises:
        BadInput: the file is of another kind, incomplete or contradictory.
    """
    with open(file, "rb") as opened:
        start = opened.read(LLM_C_HEADER_BYTES)
    if start.startswith((weight_names.ZIP, PICKLE)):
        return _read_torch_file(file, label, is_zip=start.startswith(weight_names.ZIP))
    magic = int.from_bytes(start[:4], "little")
    if magic == LLM_C_MODEL and len(start) == LLM_C_HEADER_BYTES:
        return _read_llm_c(file, start, label)
    if magic in OTHER_LLM_C_FILES:
        raise BadInput(
            f"{label}: this file of llm.c contains {OTHER_LLM_C_FILES[magic]}. Use the file of a "
            f"GPT-2 model, such as model_00019560.bin"
        )
    raise BadInput(
        f"{label}: {file.name} is neither a file of torch.save nor a model of llm.c, or it is "
        f"truncated. Use a checkpoint of nanoGPT (ckpt.pt), build-nanogpt (model_*.pt) or llm.c "
        f"(model_*.bin), or a folder with config.json and weights"
    )


def load_torch_file(file: Path, label: str, *, is_zip: bool) -> Any:
    """Return the contents of a file of torch.save on the CPU. Nothing in it is executed.

    Raises:
        BadInput: the file is incomplete, or needs classes other than ``PLACEHOLDERS``.
    """
    classes = [(Placeholder, name) for name in PLACEHOLDERS]
    try:
        with torch.serialization.safe_globals(classes), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError:
        _raise_not_plain(file, label)
    except Exception as error:  # torch has no error class for corrupted files
        raise BadInput(
            f"{label}: {file.name} is incomplete or corrupted ({first_line(error)[:120]}). Copy it "
            f"again, or use another checkpoint"
        ) from None


def _raise_not_plain(file: Path, label: str) -> NoReturn:
    """Raise BadInput with the classes for which ``torch.load`` has rejected a file."""
    names: set[str] = set()
    with contextlib.suppress(Exception):  # old files, and corrupted ones
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    names -= set(PLACEHOLDERS)
    needed = f"the classes or functions {', '.join(sorted(names))}" if names else "Python objects"
    raise BadInput(
        f"{label}: {file.name} contains {needed}, and loading them could execute code of the file. "
        f"Nothing was loaded. In the program that wrote the file, save a checkpoint that contains "
        f"only tensors, numbers and texts in dictionaries and lists"
    )


def _read_torch_file(file: Path, label: str, *, is_zip: bool) -> Checkpoint:
    """Read a checkpoint of nanoGPT or build-nanogpt."""
    contents = load_torch_file(file, label, is_zip=is_zip)
    keys = set(contents) if isinstance(contents, Mapping) else set()
    if {"model", "model_args"} <= keys:
        config = contents["model_args"]
        program = "nanoGPT"
        activation = "gelu"
    elif {"model", "config"} <= keys:
        config = contents["config"]
        program = "build-nanogpt"
        activation = "gelu_new"
    else:
        raise BadInput(f"{label}: {file.name} {_problem_of_contents(contents)}")

    if isinstance(config, Placeholder):
        config = vars(config)
    if not isinstance(config, Mapping):
        raise BadInput(f"{label}: the configuration in {file.name} is not a dictionary")
    shape = _shape_of(config, label)
    weights = _complete(contents["model"], shape, config.get("bias"), label)
    training = contents.get("config")
    dataset = training.get("dataset") if isinstance(training, Mapping) else None
    step = contents.get("iter_num", contents.get("step"))
    dropout = config.get("dropout", 0.0)
    return Checkpoint(
        program=program,
        step=step if isinstance(step, int) else None,
        shape=shape,
        weights=weights,
        activation=activation,
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
        dataset=dataset if isinstance(dataset, str) else None,
    )


def _problem_of_contents(contents: Any) -> str:
    """Return why the contents of a file of torch.save are not a checkpoint, and a fix."""
    expected = "Use a checkpoint of nanoGPT (ckpt.pt) or build-nanogpt (model_*.pt)"
    if not isinstance(contents, Mapping):
        return f"contains an object of type {type(contents).__name__}, but no model. {expected}"
    if {"state", "param_groups"} <= set(contents):
        return f"contains the state of an optimizer, but no model. {expected}"
    if contents and all(isinstance(value, torch.Tensor) for value in contents.values()):
        return (
            f"contains weights, but not the configuration of the model. {expected}, or a folder "
            f"with config.json and weights"
        )
    names = ", ".join(sorted(map(str, contents)))
    return f"contains {names:.80}, but not the keys 'model' and 'model_args'. {expected}"


def _shape_of(config: Mapping[str, Any], label: str) -> Shape:
    """Return the size of a model by its configuration.

    Raises:
        BadInput: a value is missing or not a positive integer.
    """
    values = {}
    for name in Shape.__dataclass_fields__:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise BadInput(
                f"{label}: the configuration in the file has {name} = {value!r:.40}, which must be "
                f"a positive integer. Use another checkpoint"
            )
        values[name] = value
    if values["n_embd"] % values["n_head"]:
        raise BadInput(
            f"{label}: the configuration in the file has n_embd = {values['n_embd']}, which is not "
            f"a multiple of n_head = {values['n_head']}. Use another checkpoint"
        )
    if values["n_layer"] > MAX_LAYERS:
        raise BadInput(
            f"{label}: the configuration in the file has n_layer = {values['n_layer']}, more than "
            f"{MAX_LAYERS}. The file is corrupted. Use another checkpoint"
        )
    return Shape(**values)


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name in nanoGPT, in the order of llm.c's files."""
    d = shape.n_embd
    block: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (3 * d, d),
        "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (4 * d, d),
        "mlp.c_fc.bias": (4 * d,),
        "mlp.c_proj.weight": (d, 4 * d),
        "mlp.c_proj.bias": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["wte.weight"] = (shape.vocab_size, d)
    shapes["wpe.weight"] = (shape.block_size, d)
    for name, size in block.items():
        for layer in range(shape.n_layer):
            shapes[f"h.{layer}.{name}"] = size
    shapes["ln_f.weight"] = (d,)
    shapes["ln_f.bias"] = (d,)
    return shapes


def _complete(stored: Any, shape: Shape, has_bias: Any, label: str) -> Weights:
    """Return the parameters of a checkpoint, with zeros for the biases of a model without any.

    Args:
        stored: the tensors in the file. Their names may have the prefixes of ``weight_names``.
        shape: the size of the model by its configuration.
        has_bias: whether the model has biases by its configuration; None if that does not say.

    Raises:
        BadInput: the tensors are not those of the configuration.
    """
    if not isinstance(stored, Mapping):
        raise BadInput(f"{label}: 'model' in the file is not a dictionary of tensors")
    weights = _named_as_in_gpt2(stored)
    head = weights.pop("lm_head.weight", None)

    shapes = _shapes(shape)
    biases = {name for name in shapes if name.endswith(".bias")}
    stored_biases = sorted(biases & set(weights))
    if has_bias is False and stored_biases:
        raise _mismatch(label, f"it has bias = False, but {stored_biases[0]} is stored")
    if has_bias is not True and not stored_biases:
        for name in biases:
            weights[name] = torch.zeros(shapes[name], dtype=_dtype_of(weights))
    for name in sorted(shapes.keys() | weights.keys()):
        _check_tensor(name, weights.get(name), shapes.get(name), label)
    if head is not None and not torch.equal(head, weights["wte.weight"]):
        raise _mismatch(
            label, "lm_head.weight and transformer.wte.weight differ, but they must be tied"
        )
    return {name: weights[name] for name in shapes}


def _named_as_in_gpt2(stored: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the tensors without attention masks, by OpenAI's names, and ``lm_head.weight``."""
    new_names = weight_names.without_prefixes(map(str, stored), "gpt2")
    tensors = {}
    for name, tensor in stored.items():
        new_name = new_names[str(name)]
        if not new_name.endswith(MASKS):
            tensors[new_name.removeprefix("transformer.")] = tensor
    return tensors


def _dtype_of(weights: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype with which weights are written: their own, or fp32 if they differ."""
    dtypes = {getattr(tensor, "dtype", None) for tensor in weights.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return dtype if dtype in DTYPES else torch.float32


def _check_tensor(name: str, tensor: Any, expected: tuple[int, ...] | None, label: str) -> None:
    """Raise BadInput if a tensor is missing, superfluous, or not a floating-point one of a shape.

    Args:
        tensor: the tensor in the file, or None.
        expected: its shape by the configuration, or None if the model has no such parameter.
    """
    if expected is None:
        raise _mismatch(label, f"it has no {name}, which is stored")
    if not isinstance(tensor, torch.Tensor):
        raise _mismatch(label, f"{name} is missing")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise _mismatch(label, f"{name} is a sparse tensor, or one without values")
    shape = tuple(tensor.shape)
    if shape != expected or not tensor.is_floating_point():
        raise _mismatch(label, f"{name} is {shape} {tensor.dtype} instead of {expected}")


def _mismatch(label: str, problem: str) -> BadInput:
    return BadInput(
        f"{label}: the weights in the file do not match its configuration: {problem}. Use a "
        f"checkpoint that its program has written"
    )


def _read_llm_c(file: Path, header: bytes, label: str) -> Checkpoint:
    """Read a model of llm.c. The padding rows of its vocabulary are left out.

    llm.c leaves these rows out of the softmax, so they are not trained.
    """
    numbers = np.frombuffer(header, dtype="<i4").tolist()
    version = numbers[1]
    if version not in LLM_C_DTYPES:
        raise BadInput(
            f"{label}: version {version} of llm.c's files is not supported, only versions "
            f"{join_or(list(LLM_C_DTYPES))}. Write the file again with a newer llm.c"
        )
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    shape = _shape_of(dict(zip(names, numbers[2:7], strict=True)), label)
    padded_rows = numbers[7]
    if padded_rows < shape.vocab_size:
        raise BadInput(
            f"{label}: the header has {padded_rows} rows for a vocabulary of {shape.vocab_size}. "
            f"Use another checkpoint"
        )
    shapes = _shapes(shape)
    shapes["wte.weight"] = (padded_rows, shape.n_embd)
    dtype = LLM_C_DTYPES[version]
    counts = {name: int(np.prod(size)) for name, size in shapes.items()}
    expected_bytes = LLM_C_HEADER_BYTES + sum(counts.values()) * dtype.itemsize
    num_bytes = file.stat().st_size
    if num_bytes != expected_bytes:
        raise BadInput(
            f"{label}: {file.name} has {num_bytes:,} bytes, but a model of this shape has "
            f"{expected_bytes:,}. It is incomplete. Copy it again, or use another checkpoint"
        )
    # NumPy has no bf16. Copy-on-write, because torch requires writable memory.
    numpy_dtype = "<f4" if dtype == torch.float32 else "<i2"
    stored = np.memmap(file, dtype=numpy_dtype, mode="c", offset=LLM_C_HEADER_BYTES)
    tensors = torch.from_numpy(stored).view(dtype).split(list(counts.values()))
    weights = {}
    for tensor, (name, size) in zip(tensors, shapes.items(), strict=True):
        weights[name] = tensor.view(size)
    weights["wte.weight"] = weights["wte.weight"][: shape.vocab_size]
    step = other_checkpoints.step_of(file)
    return Checkpoint("llm.c", step, shape, weights, activation="gelu_new")


# Tokenizers


def find_tokenizer_file(folder: Path, dataset: str | None) -> Path | None:
    """Return the file that defines the tokenizer of a checkpoint, or None if there is none.

    Args:
        folder: the folder of the checkpoint.
        dataset: name of nanoGPT's data set.
    """
    for file in tokenizer_places(folder, dataset):
        if file.is_file():
            return file
    return None


def tokenizer_places(folder: Path, dataset: str | None) -> list[Path]:
    """Return the paths at which the tokenizer of a checkpoint is looked for, in this order."""
    places = [folder / TOKENIZER_FILE, folder / META_FILE]
    if dataset is not None:
        places.append(folder.absolute().parent / "data" / dataset / META_FILE)
    return places


def find_vocabulary(
    checkpoint: Checkpoint, tokenizer_file: Path | None, file: Path, label: str
) -> Vocabulary:
    """Return the tokenizer of a checkpoint.

    Args:
        tokenizer_file: the result of ``find_tokenizer_file``.
        file: the checkpoint.

    Raises:
        BadInput: there is no tokenizer, or it does not fit the model.
    """
    rows = checkpoint.shape.vocab_size
    if tokenizer_file is not None and tokenizer_file.name == TOKENIZER_FILE:
        return _vocabulary_of_file(tokenizer_file, rows, label)
    if tokenizer_file is not None:
        table = read_character_table(tokenizer_file, label)
        if table.rows == rows:
            tokenizer = _make_characters(table.ids)
            return Vocabulary(tokenizer, max(rows, len(table.ids) + 1))
        if rows not in GPT2_ROWS:
            raise BadInput(
                f"{label}: {tokenizer_file} has {table.rows} characters, but the model has {rows} "
                f"ids. Copy the {META_FILE} with which it was trained into {file.parent}"
            )
    if rows in GPT2_ROWS:
        return Vocabulary(_load_gpt2_tokenizer(file, label), rows)
    places = tokenizer_places(file.parent, checkpoint.dataset)
    raise BadInput(
        f"{label}: the tokenizer of this model, with {rows} ids, is missing. Copy nanoGPT's "
        f"{META_FILE}, or the {TOKENIZER_FILE} with which the model was trained, into "
        f"{file.parent} (not found: {', '.join(map(str, places))})"
    )


def _vocabulary_of_file(file: Path, rows: int, label: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json that the user has put next to a checkpoint."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no other error class
        raise BadInput(f"{label}: {file} cannot be read ({first_line(error)})") from None
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise BadInput(f"{label}: {file} has no token {END_OF_TEXT}, which must separate documents")
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= rows:
        raise BadInput(
            f"{label}: {file} has ids up to {largest_id}, but the model has {rows} ids. Use the "
            f"tokenizer with which the model was trained"
        )
    return Vocabulary(tokenizer, rows)


def _load_gpt2_tokenizer(file: Path, label: str) -> Tokenizer:
    """Return GPT-2's tokenizer from the cache of the Hub, or else from the Hub.

    Raises:
        BadInput: neither has it.
    """
    path = None
    with contextlib.suppress(OSError):
        path = cached_file(GPT2_REPOSITORY, TOKENIZER_FILE, local_files_only=True)
    try:
        path = path or cached_file(GPT2_REPOSITORY, TOKENIZER_FILE)
    except Exception as error:  # the Hub client raises errors of many classes
        raise BadInput(
            f"{label}: this model needs GPT-2's tokenizer, which is not in the cache of the Hub "
            f"and cannot be downloaded ({first_line(error)}). Copy {TOKENIZER_FILE} of "
            f"https://huggingface.co/{GPT2_REPOSITORY} into {file.parent}"
        ) from None
    return Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class CharacterTable:
    """nanoGPT's table of characters.

    Attributes:
        ids: the id of each character, from 0 without gaps.
        rows: the stated size of the vocabulary, which nanoGPT gives the model.
    """

    ids: dict[str, int]
    rows: int


class PlainUnpickler(pickle.Unpickler):
    """Unpickler for dicts, lists, strings and integers. It imports and calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"needs {module}.{name}, which could execute code")

    def persistent_load(self, identifier: Any) -> NoReturn:
        raise pickle.UnpicklingError("needs another file")


def read_character_table(file: Path, label: str) -> CharacterTable:
    """Read the ``meta.pkl`` of a character model of nanoGPT.

    Raises:
        BadInput: the file cannot be read without executing code, or is not a table of characters.
    """
    try:
        with open(file, "rb") as opened:
            meta = PlainUnpickler(opened).load()
    except OSError:
        raise
    except Exception as error:  # a corrupted pickle raises errors of many classes
        raise BadInput(
            f"{label}: {file} is not a table of characters ({first_line(error)}). Nothing in it "
            f"was executed. Create it again with the prepare.py of nanoGPT"
        ) from None
    problem = _problem_of_table(meta)
    if problem:
        raise BadInput(
            f"{label}: {file} is not a table of characters: {problem}. Create it again with the "
            f"prepare.py of nanoGPT"
        )
    ids = meta["stoi"]
    return CharacterTable(ids, meta.get("vocab_size", len(ids)))


def _problem_of_table(meta: Any) -> str | None:
    """Return why the contents of a ``meta.pkl`` are not a table of characters, or None."""
    if not isinstance(meta, dict) or not isinstance(meta.get("stoi"), dict):
        return "it has no dictionary 'stoi'"
    ids = meta["stoi"]
    for character, number in ids.items():
        if not isinstance(character, str) or type(number) is not int:
            return f"{character!r:.40} with the id {number!r:.40} is not a character with an id"
        is_surrogate = "\ud800" <= character <= "\udfff"
        if len(character) != 1 or is_surrogate:
            return f"{character!r:.40} is not one character"
    numbers = sorted(ids.values())
    if not numbers or numbers != list(range(len(ids))):
        return "the ids of 'stoi' are not consecutive numbers from 0"
    rows = meta.get("vocab_size", len(ids))
    if type(rows) is not int or rows < len(ids):
        return f"vocab_size is {rows!r:.40}, and there are {len(ids)} characters"
    return None


def _make_characters(ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer for a table of characters.

    The end-of-text token gets the next id. The definition is that of ``make_characters`` in
    ``data/tokens/tokenizer.py``.
    """
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


# Writing


def _write_model(checkpoint: Checkpoint, vocabulary: Vocabulary, folder: Path) -> None:
    """Write the weights, config.json and generation_config.json."""
    shape = checkpoint.shape
    dtype = _dtype_of(checkpoint.weights)
    weights = {}
    for name, tensor in checkpoint.weights.items():
        if name.endswith(TRANSPOSED):
            tensor = tensor.t()
        weights[name] = tensor.to(dtype).contiguous()
    weights["wte.weight"] = _with_rows(weights["wte.weight"], vocabulary.rows)
    save_file(weights, folder / MODEL, {"format": "pt"})

    end_of_text = vocabulary.end_of_text_id
    config = GPT2Config(
        architectures=["GPT2LMHeadModel"],
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        n_positions=shape.block_size,
        n_ctx=shape.block_size,  # the converter of llama.cpp reads it
        vocab_size=vocabulary.rows,
        activation_function=checkpoint.activation,
        resid_pdrop=checkpoint.dropout,
        embd_pdrop=checkpoint.dropout,
        attn_pdrop=checkpoint.dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        dtype=dtype,
    )
    config.save_pretrained(folder)
    num_ids = 1 + max(vocabulary.tokenizer.get_vocab().values())
    generation = GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        suppress_tokens=list(range(num_ids, vocabulary.rows)) or None,
    )
    generation.save_pretrained(folder)


def _with_rows(embedding: torch.Tensor, rows: int) -> torch.Tensor:
    """Return an embedding with added rows, which are the mean of the existing ones.

    Each added row then has at most the mean probability of the existing ones, because the
    exponential function is convex.
    """
    num_added = rows - len(embedding)
    if num_added == 0:
        return embedding
    mean = embedding.double().mean(0)
    added_rows = mean.expand(num_added, -1)
    return torch.cat([embedding, added_rows.to(embedding.dtype)])


def _write_tokenizer(vocabulary: Vocabulary, context: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary.tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": END_OF_TEXT,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


# Folders with prefixes in the names of the weights


def rename_weights(folder: Path, label: str) -> Path:
    """Return a converted copy of a model folder, in which the weights have Transformers' names.

    Args:
        folder: a folder with config.json, in whose weights ``weight_names.have_prefix`` has found
            prefixes.
        label: beginning of error messages: the option and its value.

    Raises:
        BadInput: a file of weights cannot be read, or the cache folder cannot be written.
    """
    weight_files = weight_names.weight_files(folder)
    tensors_by_file = {file: _load_weights(file, label) for file in weight_files}
    old_names = list(itertools.chain(*tensors_by_file.values()))
    new_names = weight_names.without_prefixes(old_names, weight_names.model_type(folder))
    if all(name == new_name for name, new_name in new_names.items()):
        return folder
    copied_files = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in COPIED_SUFFIXES and not path.name.endswith(weight_names.INDEX_SUFFIX)
    ]
    converted = other_checkpoints.converted_folder_of_files([*weight_files, *copied_files])
    if converted.is_dir():
        return converted
    with _creating(converted, label) as temporary:
        for path in copied_files:
            shutil.copyfile(path, temporary / path.name)
        _write_renamed(list(tensors_by_file.values()), new_names, temporary)
    log.info(f"{label}: removed prefixes from the names of the weights, in a copy: {converted}")
    return converted


def _write_renamed(shards: list[Weights], new_names: Mapping[str, str], folder: Path) -> None:
    """Write safetensors files with new names of the weights, and their index."""
    file_by_name: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        renamed = {new_names[name]: tensor for name, tensor in tensors.items()}
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(renamed, folder / file_name, {"format": "pt"})
        file_by_name |= dict.fromkeys(renamed, file_name)
    index = {"metadata": {}, "weight_map": file_by_name}
    files.write_json(folder / weight_names.SAFETENSORS_INDEX, index)


def _load_weights(file: Path, label: str) -> Weights:
    """Return the tensors of a file of weights. Each has its own memory, as safetensors requires."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except Exception as error:  # safetensors has no error class for corrupted files
            raise BadInput(f"{label}: {file.name} cannot be read ({first_line(error)})") from None
    contents = load_torch_file(file, label, is_zip=True)
    weights = {}
    for name, tensor in contents.items():
        if not isinstance(tensor, torch.Tensor):
            raise BadInput(f"{label}: {name} in {file.name} is not a tensor. Use another model")
        weights[name] = tensor.clone(memory_format=torch.contiguous_format)
    return weights
