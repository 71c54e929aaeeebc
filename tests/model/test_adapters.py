"""A PEFT adapter is reported with the command that merges it."""

import json
import shlex
from pathlib import Path

import pytest
import transformers.utils

from ursa_minor.base.errors import BadInput
from ursa_minor.model import adapters
from ursa_minor.model.resolve import resolve_model
from ursa_minor.post import rewards


def write(folder: Path, *names: str, **fields: str) -> None:
    """Write empty files, and an adapter_config.json if it has fields."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    if fields:
        (folder / "adapter_config.json").write_text(json.dumps(fields))


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def program_of(error: BadInput) -> str:
    """Return the Python program that the message shows."""
    program = shlex.split(str(error).partition("python -c ")[2])[0]
    compile(program, "merge", "exec")
    return program


@pytest.mark.parametrize(
    ("folder", "names", "tokenizer"),
    [
        ("lora", (), "base"),
        ("lora", ("tokenizer.json",), "lora"),
        (
            "lora",
            ("config.json", "model.safetensors", "tokenizer.json"),
            "lora",
        ),  # next to a complete model
        ("it's", (), "base"),
        ("runs/r/model", ("config.json",), "base"),
    ],
)
def test_adapter_folder_is_refused_with_merge_command(workspace, folder, names, tokenizer):
    write(Path(folder), *names, base_model_name_or_path="base", task_type="CAUSAL_LM")
    name = folder.removesuffix("/model")
    with pytest.raises(
        BadInput, match=f"^--model {name} contains a PEFT adapter for base. Merge"
    ) as error:
        resolve_model(name)
    program = program_of(error.value)
    assert "AutoPeftModelForCausalLM as Model; " in program
    assert (
        f'Model.from_pretrained("{folder}").merge_and_unload().save_pretrained("{folder}-merged")'
        in program
    )
    assert f'Tokenizer.from_pretrained("{tokenizer}")' in program


def test_merge_command_writes_into_a_new_folder(workspace):
    write(Path("lora"), base_model_name_or_path="base")
    for name in ("lora-merged", "lora-merged-2"):
        Path(name).mkdir()
    with pytest.raises(BadInput, match="and then use lora-merged-3: "):
        resolve_model("lora")


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_damaged_adapter_is_refused_without_base_model(workspace, text):
    write(Path("lora"), "adapter_model.safetensors")
    Path("lora/adapter_config.json").write_text(text)
    with pytest.raises(
        BadInput, match="^model = lora contains a PEFT adapter, .* does not name the base model"
    ):
        resolve_model("lora", "model = ")


def test_adapter_of_reward_model_is_refused(workspace):
    write(Path("judge"), "config.json", base_model_name_or_path="base", task_type="SEQ_CLS")
    with pytest.raises(BadInput, match="^reward = judge contains a PEFT adapter") as error:
        rewards.load_reward("judge", None)
    program = program_of(error.value)
    assert "AutoPeftModelForSequenceClassification" in program and "num_labels=1" in program


@pytest.mark.parametrize(
    ("name", "source"), [("me/lora", '"me/lora"'), ("me/lora@v1", '"me/lora", revision="v1"')]
)
def test_adapter_on_the_hub_is_refused(workspace, monkeypatch, name, source):
    write(Path("cache"), base_model_name_or_path="you/base")
    asked = []

    def cached_file(repo_id, file, revision, **_):
        asked.append((repo_id, revision))
        return "cache/adapter_config.json" if file == "adapter_config.json" else None

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    with pytest.raises(
        BadInput, match=f"^--model {name} contains a PEFT adapter for you/base"
    ) as error:
        adapters.check_no_hub_adapter(name, f"--model {name}")
    program = program_of(error.value)
    assert (
        f"Model.from_pretrained({source})" in program
        and 'save_pretrained("lora-merged")' in program
    )
    assert set(asked) == {("me/lora", "v1" if "@" in name else None)}


def test_complete_models_and_unreachable_repositories_pass(workspace):
    write(Path("whole"), "config.json", "model.safetensors")
    adapters.check_no_adapter(Path("whole"), "")
    adapters.check_no_adapter(Path("nowhere"), "")
    adapters.check_no_hub_adapter("whole", "")
    adapters.check_no_hub_adapter("no-one/nothing", "")
