"""Names of the weights in a model folder, and the prefixes that wrappers of a model add to them.

Does not import torch.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.model.architectures import ARCHITECTURES

# Files of weights in the order in which Transformers looks for them.
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
INDEX_SUFFIX = ".index.json"
ZIP = b"PK\x03\x04"  # first bytes of the files that torch.save has written since version 1.6

COMPILED = "_orig_mod."  # torch.compile, of a model or of a submodule
WRAPPED = "module."  # DistributedDataParallel
LIGHTNING = "model."  # a LightningModule that has the model as its attribute ``model``


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that Transformers loads from a folder. All of them exist."""
    for file_name, index_name in (
        (SAFETENSORS_FILE, SAFETENSORS_INDEX),
        (TORCH_FILE, TORCH_INDEX),
    ):
        if (folder / file_name).is_file():
            return [folder / file_name]
        if (folder / index_name).is_file():
            file_names = set(_weight_map(folder / index_name).values())
            paths = [folder / name for name in sorted(file_names)]
            return [path for path in paths if path.is_file()]
    return []


def may_have_prefix(folder: Path) -> bool:
    """Return whether some weight names of a folder have a prefix, or could have one.

    The names in a ``pytorch_model.bin`` are not known without torch.
    """
    paths = weight_files(folder)
    if not paths:
        return False
    if paths == [folder / TORCH_FILE]:
        with open(paths[0], "rb") as file:
            return file.read(len(ZIP)) == ZIP  # the wrappers are younger than this format
    names = _names(folder, paths)
    new_names = without_prefixes(names, model_type(folder))
    return any(name != new_name for name, new_name in new_names.items())


def without_prefixes(names: Iterable[str], model_type: str | None) -> dict[str, str]:
    """Return the name of each weight without the prefixes of wrappers, by its name in the file.

    Wrappers may be nested. ``model.`` is a prefix only if no name starts like those of the
    architecture, because the weight names of Llama also start with ``model.``.

    Args:
        names: the names of all weights of a model.
        model_type: ``model_type`` of the config.
    """
    old_names = list(names)
    architecture = ARCHITECTURES.get(model_type or "")
    first_names = architecture.first_names if architecture else ()
    new_names = [name.replace(COMPILED, "") for name in old_names]
    prefix = _common_prefix(new_names, first_names)
    while prefix:
        new_names = [name.removeprefix(prefix) for name in new_names]
        prefix = _common_prefix(new_names, first_names)
    if len(set(new_names)) < len(old_names):  # two weights would have the same name
        new_names = old_names
    return dict(zip(old_names, new_names, strict=True))


def _common_prefix(names: list[str], first_names: tuple[str, ...]) -> str | None:
    """Return the prefix of a wrapper that all names have, or None."""
    if not names or any(name.startswith(first_names) for name in names):
        return None
    prefixes = (WRAPPED, LIGHTNING) if first_names else (WRAPPED,)
    for prefix in prefixes:
        if all(name.startswith(prefix) for name in names):
            return prefix
    return None


def model_type(folder: Path) -> str | None:
    """Return the ``model_type`` in the config.json of a folder, or None if it cannot be read."""
    try:
        config = files.read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _names(folder: Path, paths: list[Path]) -> list[str]:
    """Return the names of all weights. Files that cannot be read are left out.

    Args:
        folder: the model folder.
        paths: its files of weights, but not a single file of torch.save.
    """
    if paths == [folder / SAFETENSORS_FILE]:
        return _names_in_safetensors(paths[0])
    index = folder / SAFETENSORS_INDEX
    if not index.is_file():
        index = folder / TORCH_INDEX
    return list(_weight_map(index))


def _names_in_safetensors(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, or [] if it cannot be read.

    The file starts with the length of its JSON header in 8 bytes, little-endian.
    """
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            return []
        text = opened.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        return []
    if not isinstance(header, dict):
        return []
    return [name for name in header if name != "__metadata__"]


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each weight by an index, or {} if it cannot be read."""
    try:
        weight_map = files.read_json(index)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(weight_map, dict):
        return {}
    return {name: file for name, file in weight_map.items() if isinstance(file, str)}
