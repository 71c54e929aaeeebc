"""Reject PEFT adapters, which are not complete models, with a command that merges them.

Does not import torch.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ursa_minor.base.errors import BadInput

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_no_adapter(folder: Path, where: str) -> None:
    """Raise BadInput if a folder contains a PEFT adapter, with or without a complete model.

    With both, Transformers loads the adapter where PEFT is installed and ignores it elsewhere.

    Args:
        folder: a model folder, which may be missing.
        where: beginning of the message: the option and its value.
    """
    if not _has_any(folder, (CONFIG, *WEIGHTS)):
        return
    fields = _read(folder / CONFIG)
    adapter = _quote(str(folder))
    tokenizer = adapter
    base_model = fields.get("base_model_name_or_path")
    if base_model and not _has_any(folder, TOKENIZER_FILES):
        tokenizer = _quote(base_model)
    raise BadInput(_message(where, fields, adapter, tokenizer, f"{folder}-merged"))


def check_no_hub_adapter(name: str, where: str) -> None:
    """Raise BadInput if a Hub id, or id@revision, is a repository with a PEFT adapter.

    A local path passes, because ``check_no_adapter`` checks it. So does a repository that cannot be
    reached, because loading the model reports that.

    Args:
        name: a Hub id, id@revision or a local path.
        where: beginning of the message: the option and its value.
    """
    if Path(name).exists():
        return
    from transformers.utils import cached_file  # imported here because it takes seconds

    repo_id, _, revision = name.partition("@")
    options: dict[str, Any] = {"revision": revision or None}
    for kind in ("gated_repo", "missing_entries", "connection_errors"):
        options[f"_raise_exceptions_for_{kind}"] = False
    try:
        config = cached_file(repo_id, CONFIG, **options)
    except OSError:  # no such repository
        return
    if config is None:
        return
    fields = _read(Path(config))
    adapter = _quote(repo_id)
    if revision:
        adapter += f", revision={_quote(revision)}"
    tokenizer = adapter
    base_model = fields.get("base_model_name_or_path")
    if base_model and not any(cached_file(repo_id, file, **options) for file in TOKENIZER_FILES):
        tokenizer = _quote(base_model)
    merged = f"{repo_id.rpartition('/')[2]}-merged"
    raise BadInput(_message(where, fields, adapter, tokenizer, merged))


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _read(config: Path) -> dict[str, Any]:
    """Return the fields of an adapter_config.json, or {} if it is missing or corrupted."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(fields, dict):
        return {}
    return fields


def _message(
    where: str, fields: Mapping[str, Any], adapter: str, tokenizer: str, merged: str
) -> str:
    """Return the error message, with a command that merges an adapter into a new folder.

    Args:
        where: beginning of the message: the option and its value.
        fields: contents of the adapter's adapter_config.json.
        adapter: arguments of ``from_pretrained`` that load the adapter, as Python code.
        tokenizer: the same for its tokenizer.
        merged: folder to write.
    """
    base_model = fields.get("base_model_name_or_path")
    if not base_model:
        return (
            f"{where} contains a PEFT adapter, and its {CONFIG} does not name the base model. Add "
            f"the entry base_model_name_or_path there, or use the model that the adapter was "
            f"merged into"
        )

    folder = _unused_folder(merged)
    kind = "AutoPeftModelForCausalLM"
    if fields.get("task_type") == "SEQ_CLS":  # a reward model
        kind = "AutoPeftModelForSequenceClassification"
        adapter += ", num_labels=1"
    program = (
        f"from peft import {kind} as Model; "
        "from transformers import AutoTokenizer as Tokenizer; "
        f"Model.from_pretrained({adapter}).merge_and_unload().save_pretrained({_quote(folder)}); "
        f"Tokenizer.from_pretrained({tokenizer}).save_pretrained({_quote(folder)})"
    )
    return (
        f"{where} contains a PEFT adapter for {base_model}. Merge it into the model first "
        f"(pip install peft), and then use {folder}: python -c {shlex.quote(program)}"
    )


def _quote(text: str) -> str:
    """Return a text as a Python string in double quotes, which shlex.quote does not escape."""
    return json.dumps(text, ensure_ascii=False)


def _unused_folder(name: str) -> str:
    """Return ``name``, with a number appended if that path exists."""
    if not Path(name).exists():
        return name
    number = 2
    while Path(f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"
