"""PEFT adapters, which are not complete models: an error that says how to merge them. Needs no torch."""

import json
import shlex
from collections.abc import Mapping
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
    if not any((folder / name).is_file() for name in (CONFIG, *WEIGHTS)):
        return
    fields = _read(folder / CONFIG)
    tokenizer = _quote(str(folder))
    base_model = fields.get("base_model_name_or_path")
    if base_model and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = _quote(base_model)
    raise BadInput(_message(where, fields, _quote(str(folder)), tokenizer, f"{folder}-merged"))


def check_no_hub_adapter(name: str, where: str) -> None:
    """Raise BadInput if a Hub id, or id@revision, is a repository with a PEFT adapter.

    A local path passes, because ``check_no_adapter`` checks it. So does a repository that cannot be
    reached, because loading the model reports that.
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


def _read(config: Path) -> dict[str, Any]:
    """Return the fields of an adapter_config.json; none if it is missing or damaged."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _message(
    where: str, fields: Mapping[str, Any], adapter: str, tokenizer: str, merged: str
) -> str:
    """Return the error, with a command that merges an adapter into a new folder.

    Args:
        fields: of its adapter_config.json.
        adapter: arguments of ``from_pretrained`` that load the adapter, as Python code.
        tokenizer: the same for its tokenizer.
        merged: folder to write.
    """
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
    base_model = fields.get("base_model_name_or_path")
    if not base_model:
        return (
            f"{where} contains a PEFT adapter, and its {CONFIG} does not name the base model. Add the entry "
            f"base_model_name_or_path there, or use the model that the adapter was merged into"
        )
    trained_on = f" for {base_model}"
    return (
        f"{where} contains a PEFT adapter{trained_on}. Merge it into the model first (pip install peft), "
        f"and then use {folder}: python -c {shlex.quote(program)}"
    )


def _quote(text: str) -> str:
    """Return a text as a Python string with double quotes, which shlex.quote leaves readable."""
    return json.dumps(text, ensure_ascii=False)


def _unused_folder(name: str) -> str:
    """Return ``name``, with a number if it already exists, so that the command replaces nothing."""
    if not Path(name).exists():
        return name
    number = 2
    while Path(f"{name}-{number}").exists():
        number += 1
    return f"{name}-{number}"
