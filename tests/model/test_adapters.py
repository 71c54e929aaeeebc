"""A PEFT adapter is refused with the command that merges it into its base model."""

import json
import shlex
from pathlib import Path

import pytest
import transformers.utils

from ursa_minor.base.errors import BadInput
from ursa_minor.model import adapters
from ursa_minor.model.resolve import resolve_model
from ursa_minor.post import rewards


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    """Make an empty folder the current one."""
    monkeypatch.chdir(tmp_path)


def write_model_folder(folder: str, *names: str, **adapter_config: str) -> None:
    """Write empty files, and an adapter_config.json if it has fields."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).touch()
    if adapter_config:
        (path / "adapter_config.json").write_text(json.dumps(adapter_config))


def merge_program(error: BadInput) -> str:
    """Return the Python program in a message, after a check of its syntax."""
    _, _, arguments = str(error).partition("python -c ")
    program = shlex.split(arguments)[0]
    compile(program, "merge", "exec")
    return program


@pytest.mark.parametrize(
    ("folder", "names", "tokenizer"),
    [
        ("lora", (), "base"),
        ("lora", ("tokenizer.json",), "lora"),
        ("lora", ("config.json", "model.safetensors", "tokenizer.json"), "lora"),
        ("it's", (), "base"),
        ("runs/r/model", ("config.json",), "base"),
    ],
    ids=["adapter", "with tokenizer", "with complete model", "quote in name", "run"],
)
def test_adapter_folder_is_refused_with_merge_command(folder, names, tokenizer):
    write_model_folder(folder, *names, base_model_name_or_path="base", task_type="CAUSAL_LM")
    name = folder.removesuffix("/model")

    with pytest.raises(BadInput) as error:
        resolve_model(name)

    message = str(error.value)
    assert message.startswith(f"--model {name} contains a PEFT adapter for base")
    program = merge_program(error.value)
    assert "AutoPeftModelForCausalLM" in program
    assert f'from_pretrained("{folder}").merge_and_unload()' in program
    assert f'save_pretrained("{folder}-merged")' in program
    assert f'Tokenizer.from_pretrained("{tokenizer}")' in program


def test_merge_command_writes_into_new_folder():
    write_model_folder("lora", base_model_name_or_path="base")
    Path("lora-merged").mkdir()
    Path("lora-merged-2").mkdir()

    with pytest.raises(BadInput, match="lora-merged-3"):
        resolve_model("lora")


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_damaged_adapter_is_refused_without_base_model(text):
    write_model_folder("lora", "adapter_model.safetensors")
    Path("lora/adapter_config.json").write_text(text)

    with pytest.raises(BadInput) as error:
        resolve_model("lora", "model = ")

    message = str(error.value)
    assert message.startswith("model = lora contains a PEFT adapter")
    assert "does not name the base model" in message


def test_adapter_of_reward_model_is_refused():
    adapter_config = {"base_model_name_or_path": "base", "task_type": "SEQ_CLS"}
    write_model_folder("judge", "config.json", **adapter_config)

    with pytest.raises(BadInput, match="^reward = judge contains a PEFT adapter") as error:
        rewards.load_reward("judge", None)

    program = merge_program(error.value)
    assert "AutoPeftModelForSequenceClassification" in program
    assert "num_labels=1" in program


@pytest.mark.parametrize(
    ("name", "revision", "source"),
    [
        ("me/lora", None, '"me/lora"'),
        ("me/lora@v1", "v1", '"me/lora", revision="v1"'),
    ],
)
def test_adapter_on_hub_is_refused(monkeypatch, name, revision, source):
    write_model_folder("cache", base_model_name_or_path="you/base")
    requests = set()

    def cached_file(repo_id, file, revision, **_):
        requests.add((repo_id, revision))
        if file == "adapter_config.json":
            return "cache/adapter_config.json"
        return None

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)

    with pytest.raises(BadInput) as error:
        adapters.check_no_hub_adapter(name, f"--model {name}")

    assert str(error.value).startswith(f"--model {name} contains a PEFT adapter for you/base")
    program = merge_program(error.value)
    assert f"Model.from_pretrained({source})" in program
    assert 'save_pretrained("lora-merged")' in program
    assert requests == {("me/lora", revision)}


def test_complete_model_is_accepted():
    write_model_folder("complete", "config.json", "model.safetensors")

    adapters.check_no_adapter(Path("complete"), "")
    adapters.check_no_hub_adapter("complete", "")


def test_missing_folder_is_accepted():
    adapters.check_no_adapter(Path("nowhere"), "")


def test_unreachable_repository_is_accepted():
    adapters.check_no_hub_adapter("no-one/nothing", "")
