"""Checkpoints: writing, verifying, choosing, rotating and loading them."""

import builtins
import copy
import dataclasses
import errno
import importlib.util
import io
import json
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ROOT
from run_results import update_manifest
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ursa_minor.base import checkpoint_files, files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import COMPLETE, RESUME_FILES, WEIGHTS
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.checkpoint.state import RunState
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock as stock_export
from ursa_minor.optim import optimizers, schedule
from ursa_minor.recipe import keys, loading
from ursa_minor.run import resume

ADAMW = keys.Optimizer(
    weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0
)
FILES = (*RESUME_FILES, checkpoint.MANIFEST)

MODEL_FILES = {"config.json": '{"model_type": "gpt2"}\n', "tokenizer.json": "{}\n"}


class Training(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def make_gpt2(seed: int, n_embd: int = 16, tied: bool = True) -> GPT2LMHeadModel:
    """Return a GPT-2 model of one layer with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=n_embd,
        vocab_size=32,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


def make_llama(seed: int, n_embd: int = 16, tied: bool = False) -> LlamaForCausalLM:
    """Return a Llama model of one layer with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_size=n_embd,
        vocab_size=32,
        intermediate_size=2 * n_embd,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    """Return an optimizer of the model with a learning rate of 0.01."""
    optimizer = optimizers.build(model, dataclasses.replace(ADAMW, optimizer=name))
    schedule.set_lr(optimizer, 0.01)
    return optimizer


def make_training(seed: int = 0, make_model: Callable = make_gpt2) -> Training:
    """Return a model and its optimizer after one update."""
    model = make_model(seed)
    training = Training(model, make_optimizer(model))
    update(training, seed)
    return training


def update(training: Training, seed: int) -> None:
    """Update the weights with random gradients.

    A backward pass would start threads, which the forks of other tests do not survive.
    """
    torch.manual_seed(seed)
    for parameter in training.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    training.optimizer.step()


def save(
    folder: Path,
    step: int,
    training: Training | None = None,
    *,
    keep: int = 0,
    kept: str | None = None,
    model_files: Mapping[str, str] = MODEL_FILES,
    **state,
) -> Path:
    """Write a checkpoint of this training, or of a new one that depends on the step only."""
    weights, moments = checkpoint.gather(*(training or make_training(step)))
    saved_state = {"step": step, "skipped_updates": 0, **state}
    contents = checkpoint.Contents(clone(weights), clone(moments), saved_state, model_files, kept)
    return checkpoint.write(folder, contents, keep)


def save_weights(folder: Path, step: int, *, keep: int = 0) -> Path:
    """Write a checkpoint that contains only a model, which depends on the step only."""
    weights = clone(checkpoint.gather_weights(make_gpt2(step)))
    contents = checkpoint.Contents(weights, None, {"step": step}, MODEL_FILES, WEIGHTS)
    return checkpoint.write(folder, contents, keep)


def clone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of these tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def load(path: Path, training: Training, name: str = "adamw") -> None:
    """Load a checkpoint into this training."""
    checkpoint.load(path, *training, optimizers.OPTIMIZERS[name].state_tensors)


def moments_of(training: Training) -> dict[tuple[str, str], torch.Tensor]:
    """Return the optimizer's state by the names of the parameter and of the moment."""
    moments = {}
    for name, parameter in training.model.named_parameters():
        for key, value in training.optimizer.state[parameter].items():
            moments[name, key] = value
    return moments


def assert_equal_tensors(tensors: dict, expected: dict) -> None:
    """Assert that both have the same names and bitwise identical values."""
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name], value), name


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    return [checkpoint_files.step_of(path) for path in checkpoint_files.list_checkpoints(folder)]


def complete_steps_in(folder: Path) -> list[int]:
    """Return the steps of the intact checkpoints with the optimizer's state, newest first."""
    steps = []
    for path in checkpoint_files.list_checkpoints(folder):
        if checkpoint_files.find_problem(path) is None:
            steps.append(checkpoint_files.step_of(path))
    return steps


def saving(run_dir: Path, training: Training) -> resume.Checkpoints:
    """Return the context manager that saves a run's checkpoints in the background."""
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    recipe = keys.replace(recipe, output_dir=str(run_dir))
    accelerator = SimpleNamespace(is_main_process=True, scaler=None)
    corpus = SimpleNamespace(identities=list)
    return resume.Checkpoints(
        recipe, corpus, *training, accelerator, MODEL_FILES, on_disk=lambda path: None
    )


def record_call(monkeypatch, calls: list[str], owner: object, name: str) -> None:
    """Append the file name of the last argument to ``calls`` whenever the function is called."""
    original = getattr(owner, name)

    def recorded(*paths):
        calls.append(paths[-1].name)
        return original(*paths)

    monkeypatch.setattr(owner, name, recorded)


# Contents.


@pytest.mark.parametrize("make_model", [make_gpt2, make_llama])
def test_transformers_loads_checkpoint(tmp_path, make_model):
    training = make_training(0, make_model)
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    model_files = stock_export.describe(training.model, tokenizer)
    path = save(tmp_path, 1, training, model_files=model_files)

    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    loaded_tokenizer = AutoTokenizer.from_pretrained(path)

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_weights(loaded, training.model)
    assert loaded_tokenizer.encode("abc") == tokenizer.encode("abc")


def test_checkpoint_has_files_of_model_and_training(tmp_path):
    path = save(tmp_path, 1)

    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    assert names == {*MODEL_FILES, *FILES}
    assert set(manifest["files"]) == names - {checkpoint.MANIFEST}
    # Some programs load every file of tensors in a model folder.
    assert [file.name for file in path.glob("*.safetensors")] == [checkpoint.MODEL]


@pytest.mark.parametrize("make_model", [make_gpt2, make_llama])
def test_saved_weights_are_restored(tmp_path, make_model):
    training = make_training(0, make_model)
    path = save(tmp_path, 1, training)
    model = make_model(1)

    checkpoint.load_weights(path, model)

    assert_same_weights(model, training.model)


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Assert that both models have the same weights, and that their heads are tied alike."""
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied is expected.config.tie_word_embeddings
    weights = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(("make_model", "has_head"), [(make_gpt2, False), (make_llama, True)])
def test_tied_head_is_saved_only_once(tmp_path, make_model, has_head):
    training = make_training(0, make_model)

    names = set(load_file(save(tmp_path, 1, training) / checkpoint.MODEL))

    prefix = "transformer." if make_model is make_gpt2 else ""
    assert names == {name.removeprefix(prefix) for name, _ in training.model.named_parameters()}
    assert ("lm_head.weight" in names) == has_head


OPTIMIZERS = [("adamw", make_gpt2), ("muon", make_llama)]
if importlib.util.find_spec("bitsandbytes"):
    OPTIMIZERS.append(("adamw_8bit", make_gpt2))


@pytest.mark.parametrize(("name", "make_model"), OPTIMIZERS)
def test_resumed_run_equals_uninterrupted_run(tmp_path, make_model, name):
    model = make_model(0, n_embd=64, tied=False)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert min(sizes) < 4096 < max(sizes)  # adamw_8bit stores 8-bit moments from 4096 values on
    uninterrupted = Training(model, make_optimizer(model, name))
    update(uninterrupted, 1)
    update(uninterrupted, 2)
    path = save(tmp_path, 2, uninterrupted)
    update(uninterrupted, 3)
    model = make_model(1, n_embd=64, tied=False)
    resumed = Training(model, make_optimizer(model, name))

    load(path, resumed, name)
    update(resumed, 3)

    assert_equal_tensors(
        dict(resumed.model.named_parameters()), dict(uninterrupted.model.named_parameters())
    )
    moments = moments_of(resumed)
    expected_moments = moments_of(uninterrupted)
    assert expected_moments
    assert moments.keys() == expected_moments.keys()
    for key, expected in expected_moments.items():
        assert type(moments[key]) is type(expected), key
        assert torch.as_tensor(moments[key]).dtype == torch.as_tensor(expected).dtype, key
        assert torch.equal(torch.as_tensor(moments[key]), torch.as_tensor(expected)), key


def test_checkpoint_has_state_of_its_step(tmp_path, monkeypatch):
    """Training changes the weights before they are written, and the second save waits."""
    may_write = threading.Event()

    def delayed_save_file(*args, **kwargs):
        may_write.wait(60)
        save_file(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", delayed_save_file)
    folder = tmp_path / "checkpoints"
    training = make_training(7)
    weights = copy.deepcopy(training.model.state_dict())
    moments = copy.deepcopy(moments_of(training))

    with saving(tmp_path, training) as checkpoints:
        checkpoints.save(RunState(10, 1, step=1))
        for tensor in (*training.model.parameters(), *moments_of(training).values()):
            tensor.data.fill_(3)
        saved_before_writing = checkpoint_files.list_checkpoints(folder)
        may_write.set()
        checkpoints.save(RunState(10, 1, step=2))
        first_problem = checkpoint_files.find_problem(folder / "step-00000001")

    assert not saved_before_writing
    assert first_problem is None
    loaded = make_training(1)
    load(folder / "step-00000001", loaded)
    assert_equal_tensors(loaded.model.state_dict(), weights)
    assert_equal_tensors(moments_of(loaded), moments)
    load(folder / "step-00000002", loaded)
    for parameter in loaded.model.parameters():
        assert (parameter == 3).all()


def test_metrics_are_synced_before_checkpoint_is_named(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}")
    calls: list[str] = []
    record_call(monkeypatch, calls, files, "fsync")
    record_call(monkeypatch, calls, Path, "rename")

    save(tmp_path / "checkpoints", 1)

    metrics = calls.index("metrics.jsonl")
    name = calls.index("step-00000001")
    folder = calls.index("checkpoints")
    assert metrics < name < folder


def test_failed_save_is_logged_and_removed(tmp_path, monkeypatch, caplog):
    def fail(path):
        raise OSError(errno.ENOSPC, "No space left")

    save(tmp_path / "checkpoints", 1)
    monkeypatch.setattr(files, "fsync", fail)

    with saving(tmp_path, make_training(2)) as checkpoints:
        checkpoints.save(RunState(10, 1, step=2))

    assert "the checkpoint of step 2 was not saved" in caplog.text
    assert "No space left" in caplog.text
    assert "free some space; the run continues" in caplog.text
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_checkpoint_files_have_mode_of_umask(tmp_path):
    previous_umask = os.umask(0o022)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(previous_umask)

    modes = {oct(file.stat().st_mode & 0o777) for file in path.rglob("*") if file.is_file()}
    assert modes == {"0o644"}


def test_checkpoint_loads_where_files_cannot_be_mapped(tmp_path, monkeypatch):
    def fail(file):
        raise OSError("No such device (os error 19)")  # the message of safetensors

    path = save(tmp_path, 1)
    expected = make_training(1)
    loaded = make_training(2)
    monkeypatch.setattr(checkpoint, "load_file", fail)

    load(path, loaded)

    assert_equal_tensors(loaded.model.state_dict(), expected.model.state_dict())


# Verification.


def test_every_flipped_bit_is_found(tmp_path):
    path = save(tmp_path, 1)
    generator = random.Random(0)

    for _ in range(200):
        name = generator.choice(FILES)
        data = (path / name).read_bytes()
        changed = bytearray(data)
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (path / name).write_bytes(changed)
        problem = checkpoint_files.find_problem(path)
        if problem is None:
            # The bit is in white space of the manifest, or in the row of a file of the model,
            # which is not verified.
            assert name == checkpoint.MANIFEST
            assert rows_of_resume_files(changed) == rows_of_resume_files(data)
        (path / name).write_bytes(data)

    assert checkpoint_files.find_problem(path) is None


def rows_of_resume_files(manifest: bytes) -> list[dict]:
    """Return the rows that a resumed run reads from the bytes of a manifest."""
    rows = json.loads(manifest)["files"]
    return [rows[name] for name in RESUME_FILES]


def test_other_files_may_be_edited(tmp_path):
    path = save(tmp_path, 1)

    (path / "config.json").write_text('{"model_type": "edited"}')
    (path / "tokenizer.json").unlink()
    (path / "notes.txt").write_text("The best run so far.")

    assert checkpoint_files.find_problem(path) is None


def test_checkpoint_of_older_layout_is_named(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"]["optimizer.safetensors"] = manifest["files"].pop(checkpoint.OPTIMIZER)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))

    problem = checkpoint_files.find_problem(path)

    assert problem is not None
    assert f"manifest.json does not list {checkpoint.OPTIMIZER}" in problem
    assert "another version" in problem


def truncate(path: Path, data: bytes) -> None:
    """Write the file without its last two bytes."""
    path.write_bytes(data[:-2])


def make_empty(path: Path, data: bytes) -> None:
    """Write an empty file."""
    path.touch()


def leave_missing(path: Path, data: bytes) -> None:
    """Write nothing."""


def make_folder(path: Path, data: bytes) -> None:
    """Create a folder with the name of the file."""
    path.mkdir()


def make_dangling_link(path: Path, data: bytes) -> None:
    """Create a link to a file that does not exist."""
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "damage", [truncate, make_empty, leave_missing, make_folder, make_dangling_link]
)
def test_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    intact = save(tmp_path, 1)
    damaged = save(tmp_path, 2)

    for name in FILES:
        file = damaged / name
        data = file.read_bytes()
        file.unlink()
        damage(file, data)
        path, (message,) = checkpoint.find_newest(tmp_path)
        assert path == intact
        assert message.startswith(f"{damaged}: {name} ")
        files.remove(file)
        file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_unreadable_checkpoint_is_skipped_and_named(tmp_path, monkeypatch, name):
    intact = save(tmp_path, 1)
    damaged = save(tmp_path, 2)

    def open_or_fail(path, *args, real_open=open, **kwargs):
        if Path(path) == damaged / name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", open_or_fail)  # for Path.read_text
    monkeypatch.setattr(builtins, "open", open_or_fail)

    path, (message,) = checkpoint.find_newest(tmp_path)

    assert path == intact
    assert message == f"{damaged}: {name} cannot be read (Input/output error)"


@pytest.mark.parametrize("text", ['{"step": 3}', "[]", "[" * 100_000], ids=["step", "list", "deep"])
def test_invalid_state_is_damage(tmp_path, text):
    path = save(tmp_path, 2)
    (path / checkpoint.STATE).write_text(text)
    update_manifest(path)

    assert checkpoint_files.find_problem(path).startswith(f"{checkpoint.STATE} ")


@pytest.mark.parametrize("changes", [{"step": "2"}, {"files": []}, None])
def test_invalid_manifest_is_damage(tmp_path, changes):
    path = save(tmp_path, 2)
    manifest = []
    if changes is not None:
        manifest = json.loads((path / checkpoint.MANIFEST).read_text()) | changes
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))

    assert checkpoint_files.find_problem(path).startswith("manifest.json ")


def test_renamed_checkpoint_is_damage(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "step-00000005")

    assert "step 1" in checkpoint_files.find_problem(tmp_path / "step-00000005")
    with pytest.raises(BadInput, match="no checkpoint is intact"):
        checkpoint.find_newest(tmp_path)


WEIGHT = "h.0.mlp.c_fc.weight"  # in the file of the weights
MOMENT = f"transformer.{WEIGHT}/exp_avg"


def transpose_weight(tensors: dict) -> None:
    """Give a weight another shape."""
    tensors[WEIGHT] = tensors[WEIGHT].T.contiguous()


def remove_all(tensors: dict) -> None:
    """Remove all tensors."""
    tensors.clear()


def convert_moment(tensors: dict) -> None:
    """Give a moment another dtype."""
    tensors[MOMENT] = tensors[MOMENT].half()


def add_moment(tensors: dict) -> None:
    """Add a moment that AdamW does not have."""
    tensors[f"{MOMENT}/more"] = torch.ones(2)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (checkpoint.MODEL, transpose_weight, f"{WEIGHT} is (64, 16) torch.float32"),
        (checkpoint.MODEL, remove_all, " is missing"),
        (checkpoint.OPTIMIZER, convert_moment, f"{MOMENT} is (16, 64) torch.float16"),
        (checkpoint.OPTIMIZER, add_moment, f"{MOMENT}/more is (2,) torch.float32"),
    ],
)
def test_tensors_of_another_model_are_rejected(tmp_path, name, edit, words):
    path = save(tmp_path, 2)
    tensors = load_file(path / name)
    edit(tensors)
    save_file(tensors, path / name)

    message = error_of_loading(path)

    assert message.startswith(f"{path / name}: ")
    assert words in message


def test_file_that_is_not_safetensors_is_rejected(tmp_path):
    path = save(tmp_path, 2)
    (path / checkpoint.OPTIMIZER).write_bytes(b"x" * 100)

    message = error_of_loading(path)

    assert message.startswith(f"{path / checkpoint.OPTIMIZER}: ")
    assert "cannot be read (" in message


def error_of_loading(path: Path) -> str:
    """Return the error of loading an edited checkpoint whose manifest agrees with it."""
    update_manifest(path)
    assert checkpoint_files.find_problem(path) is None
    model = make_gpt2(1)
    with pytest.raises(BadInput) as caught:
        load(path, Training(model, make_optimizer(model)))
    (message,) = caught.value.lines
    return message


# Choice of the checkpoint to resume from.


def test_new_run_has_no_checkpoint(tmp_path):
    assert checkpoint.find_newest(tmp_path / "nothing") == (None, [])


def test_newest_intact_checkpoint_is_found(tmp_path):
    intact = save(tmp_path, 1)
    for name in ("step-abc", "step-00000009.tmp", "tmp", "step-00000007"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")

    path, skipped = checkpoint.find_newest(tmp_path)

    assert path == intact
    assert checkpoint.read_state(path)["step"] == 1
    assert [message.split("/")[-1] for message in skipped] == [
        "step-00000008: manifest.json cannot be read (Not a directory)",
        "step-00000007: manifest.json cannot be read (No such file or directory)",
    ]


def test_run_without_checkpoints_resumes_at_its_origin(tmp_path):
    start = save(tmp_path / "theirs", 4)

    assert checkpoint.find_newest(tmp_path / "mine", start) == (start, [])


def test_run_resumes_at_its_own_intact_checkpoint(tmp_path):
    mine = tmp_path / "mine"
    start = save(tmp_path / "theirs", 4)
    origin = checkpoint.origin_of(start)
    intact = save(mine, 5, origin=origin)
    (save(mine, 6, origin=origin) / checkpoint.MODEL).write_bytes(b"x")
    (save(mine, 7) / checkpoint.STATE).write_text("[")

    path, skipped = checkpoint.find_newest(mine, start)

    assert path == intact
    skipped_paths = [message.split(":")[0] for message in skipped]
    assert skipped_paths == [str(mine / "step-00000007"), str(mine / "step-00000006")]


def test_run_resumes_without_its_removed_origin(tmp_path):
    mine = tmp_path / "mine"
    start = save(tmp_path / "theirs", 4)
    first = save(mine, 5, origin=checkpoint.origin_of(start))

    files.remove(start)  # as the rotation of the other run does

    assert checkpoint.find_newest(mine, start) == (first, [])
    with pytest.raises(BadInput, match="step-00000003: there is no such folder"):
        checkpoint.find_newest(mine, tmp_path / "theirs" / "step-00000003")


def test_run_of_another_origin_is_rejected(tmp_path):
    mine = tmp_path / "mine"
    start = save(tmp_path / "theirs", 4)
    save(mine, 5, origin=checkpoint.origin_of(start))
    other = save(tmp_path / "theirs", 5)

    with pytest.raises(BadInput, match=r"mine contains checkpoints of a run .* --run_name"):
        checkpoint.find_newest(mine, other)


def test_run_can_go_back_to_its_own_checkpoint(tmp_path):
    first = save(tmp_path, 5)
    save(tmp_path, 6)

    assert checkpoint.find_newest(tmp_path, first) == (first, ANY)


def test_origin_is_recognized_after_a_move(tmp_path, monkeypatch):
    start = save(tmp_path / "theirs", 4)
    origin = checkpoint.origin_of(start)
    first = save(tmp_path / "mine", 5, origin=origin)
    monkeypatch.chdir(tmp_path)

    start.parent.rename("moved")

    assert str(tmp_path) not in str(origin)
    for path in (Path("moved", start.name), tmp_path / "moved" / start.name):
        assert checkpoint.find_newest(tmp_path / "mine", path)[0] == first


def test_origin_is_recognized_by_its_weights(tmp_path):
    start = save(tmp_path / "theirs", 4)
    save(tmp_path / "mine", 5, origin=checkpoint.origin_of(start))
    other = save(tmp_path / "other", 4, make_training(9))  # the same step, other weights

    with pytest.raises(BadInput, match="checkpoints of a run that did not start"):
        checkpoint.find_newest(tmp_path / "mine", other)


NEWEST = "the newest is checkpoints/step-00000002"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "there is no such folder"),
        ("checkpoints/step-00000003", "there is no such folder"),
        ("OWNER/gpt2", "write hub://OWNER/gpt2"),
        ("file", "this is not a folder"),
        (".", NEWEST),
        ("checkpoints", NEWEST),
        ("model", "no manifest.json"),
    ],
)
def test_path_without_checkpoint_is_explained(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "checkpoints", 1)
    save(tmp_path / "checkpoints", 2)
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()

    with pytest.raises(BadInput) as caught:
        checkpoint.find_newest(tmp_path / "runs" / "new" / "checkpoints", Path(name))

    (message,) = caught.value.lines
    assert message.startswith(f"resume_from_checkpoint = {name}: ")
    assert words in message
    assert "use auto, none or an intact step-XXXXXXXX folder" in message
    has_suggestion = message.endswith("did you mean checkpoints/step-00000002?")
    assert has_suggestion == (name == "checkpoints/step-00000003")


# Rotation.


def test_rotation_keeps_newest_checkpoints_and_other_files(tmp_path):
    (tmp_path / "notes").write_text("theirs")
    (tmp_path / ".step-00000009.tmp-01234567").write_text("a file")

    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)

    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000002", "step-00000003"]


def test_rotation_removes_only_older_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)

    save(tmp_path, 2, keep=1)

    assert steps_in(tmp_path) == [3, 2]


def test_damaged_checkpoint_is_replaced(tmp_path):
    path = save(tmp_path, 3)
    (path / checkpoint.MODEL).unlink()

    save(tmp_path, 3)

    assert checkpoint_files.find_problem(path) is None


def test_rotation_needs_a_verified_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)
    save(tmp_path, 3)
    monkeypatch.setattr(checkpoint, "find_problem", lambda path: "injected")

    with pytest.raises(OSError, match="injected"):
        save(tmp_path, 4, keep=2)

    assert steps_in(tmp_path) == [4, 3, 2]


# Checkpoints that are kept for a learning curve.


def test_kept_weights_are_a_model_folder(tmp_path):
    model = make_gpt2(4)
    model_files = {"config.json": model.config.to_json_string()}
    weights = clone(checkpoint.gather_weights(model))
    contents = checkpoint.Contents(weights, None, {"step": 4}, model_files, WEIGHTS)

    path = checkpoint.write(tmp_path, contents)

    assert sorted(os.listdir(path)) == ["config.json", "manifest.json", "model.safetensors"]
    assert_same_weights(AutoModelForCausalLM.from_pretrained(path), model)
    assert checkpoint_files.find_model_problem(path) is None


def test_resume_ignores_kept_weights(tmp_path):
    complete = save(tmp_path, 3)
    damaged = save_weights(tmp_path, 4)
    (damaged / checkpoint.MODEL).write_bytes(b"x")
    save_weights(tmp_path, 8)

    assert checkpoint.find_newest(tmp_path) == (complete, [])
    assert checkpoint_files.list_resume_points(tmp_path) == [complete]


def test_run_with_only_kept_weights_is_new(tmp_path):
    save_weights(tmp_path, 0)

    assert checkpoint.find_newest(tmp_path) == (None, [])


def test_resuming_from_kept_weights_is_rejected(tmp_path):
    path = save_weights(tmp_path, 4)

    with pytest.raises(BadInput) as caught:
        checkpoint.read_state(path)

    assert f"resume_from_checkpoint = {path}" in str(caught.value)
    assert f"--init_from {path}" in str(caught.value)


@pytest.mark.parametrize("flipped", [0, -1])
def test_damaged_kept_weights_are_found(tmp_path, flipped):
    path = save_weights(tmp_path, 4)
    data = bytearray((path / checkpoint.MODEL).read_bytes())
    data[flipped] ^= 1
    (path / checkpoint.MODEL).write_bytes(data)

    assert "model.safetensors" in checkpoint_files.find_model_problem(path)


def test_removed_training_folder_is_damage(tmp_path):
    path = save(tmp_path, 4, kept=WEIGHTS)
    files.remove(path / "training")

    assert not checkpoint_files.is_weights_only(path)
    assert "training/optimizer.safetensors" in checkpoint_files.find_problem(path)


def test_complete_kept_checkpoints_are_not_counted(tmp_path):
    for step in range(8):
        save(tmp_path, step, keep=2, kept=COMPLETE if step in (0, 1, 2, 4) else None)

    assert complete_steps_in(tmp_path) == [7, 6, 4, 2, 1, 0]


def test_rotation_removes_only_training_of_kept_weights(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step, keep=2, kept=WEIGHTS)
    before = checkpoint_files.list_checkpoints(tmp_path)
    mine = tmp_path / "step-00000006" / "notes.txt"
    mine.write_text("mine")

    save_weights(tmp_path, 10, keep=2)
    assert complete_steps_in(tmp_path) == [9, 6]
    save(tmp_path, 12, keep=2)

    assert steps_in(tmp_path) == [12, 10, 9, 6, 3]
    assert complete_steps_in(tmp_path) == [12, 9]
    assert mine.read_text() == "mine"
    for path in before:
        assert checkpoint_files.find_model_problem(path) is None


def test_stripped_checkpoint_equals_one_saved_as_weights(tmp_path):
    training = make_training(1)
    for step in (1, 2, 3):
        path = save(tmp_path / "a", step, training, keep=2, kept=WEIGHTS)
    weights = clone(checkpoint.gather_weights(training.model))
    contents = checkpoint.Contents(weights, None, {"step": 1}, MODEL_FILES, WEIGHTS)

    other = checkpoint.write(tmp_path / "b", contents)

    path = tmp_path / "a" / other.name
    assert sorted(os.listdir(path)) == sorted(os.listdir(other))
    for name in os.listdir(other):
        assert (path / name).read_bytes() == (other / name).read_bytes(), name


class Killed(BaseException):
    """Stands for a SIGKILL."""


@pytest.mark.parametrize(
    ("function", "is_complete"), [("write_json", True), ("fsync", True), ("remove", False)]
)
def test_killed_rotation_leaves_checkpoint_or_model(tmp_path, monkeypatch, function, is_complete):
    """It is killed before the manifest is written, before it is renamed, or before the removal."""
    path = save(tmp_path, 1, kept=WEIGHTS)
    save(tmp_path, 2)
    newest = save(tmp_path, 3)
    original = getattr(files, function)

    def killed(target, *args):
        if path in target.parents:
            raise Killed
        original(target, *args)

    monkeypatch.setattr(files, function, killed)
    with pytest.raises(Killed):
        checkpoint._remove_older(newest, 2, ())
    monkeypatch.undo()

    assert (checkpoint_files.find_problem(path) is None) == is_complete
    assert checkpoint_files.is_weights_only(path) != is_complete
    assert checkpoint_files.find_model_problem(path) is None
    assert (path / "training" / "state.json").exists()

    # The next process completes it.
    (path / ".manifest.json.tmp-01234567").touch()
    checkpoint.clear_interrupted(tmp_path)
    save(tmp_path, 4, keep=2)
    assert sorted(os.listdir(path)) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert checkpoint_files.is_weights_only(path)


def keeping(
    run_dir: Path, training: Training, on_disk: Callable = lambda path: None, **changes
) -> resume.Checkpoints:
    """Return ``saving`` for a run that keeps the weights of steps 0 to 2."""
    checkpoints = saving(run_dir, training)
    kept = {"keep_checkpoints": ["0", "1", "2"], "keep_optimizer": False}
    checkpoints.recipe = keys.replace(checkpoints.recipe, **kept, **changes)
    checkpoints.on_disk = on_disk
    return checkpoints


def test_stop_at_kept_weights_saves_complete_checkpoint(tmp_path):
    path = tmp_path / "checkpoints" / "step-00000002"
    state = RunState(10, 1, step=2)
    with keeping(tmp_path, make_training()) as checkpoints:
        checkpoints.keep(state)
        checkpoints.finish()
        has_only_weights = checkpoint_files.is_weights_only(path)
        checkpoints.save(state)
        checkpoints.keep(state)

    assert has_only_weights
    assert checkpoint_files.find_problem(path) is None
    assert checkpoint_files.kept_as(path) == WEIGHTS


def test_resumed_checkpoint_becomes_kept(tmp_path):
    """The run is resumed with ``keep_checkpoints``, with which it did not start."""
    path = save(tmp_path / "checkpoints", 2)
    with keeping(tmp_path, make_training()) as checkpoints:
        checkpoints.saved_step = 2
        checkpoints.resumed_step = 2
        checkpoints.keep(RunState(10, 1, step=2))

    assert checkpoint_files.find_problem(path) is None
    assert checkpoint_files.kept_as(path) == WEIGHTS


def test_consumed_data_does_not_wait_for_kept_weights(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (0, 1, 2):
        save_weights(folder, step)
    for step in (30, 40, 50):
        save(folder, step)

    with keeping(tmp_path, make_training()) as checkpoints:
        oldest = checkpoints.oldest_step(RunState(100, 1, step=50, best_step=30))
        save(folder, 10, kept=COMPLETE)
        oldest_with_complete = checkpoints.oldest_step(RunState(100, 1, step=50, best_step=10))

    assert oldest == 40
    assert oldest_with_complete == 10


@pytest.mark.parametrize(("strategy", "is_pushed"), [("all_checkpoints", True), ("end", False)])
def test_kept_checkpoints_are_pushed_with_all_checkpoints(tmp_path, strategy, is_pushed):
    pushed: list[Path] = []
    changes = {"push_to_hub": True, "hub_strategy": strategy}
    with keeping(tmp_path, make_training(), pushed.append, **changes) as checkpoints:
        checkpoints.keep(RunState(10, 1, step=1))

    assert [path.name for path in pushed] == ["step-00000001"] * is_pushed


def test_kept_checkpoint_that_does_not_fit_is_reported(tmp_path, monkeypatch, caplog):
    def raise_disk_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with keeping(tmp_path, make_training()) as checkpoints:
        checkpoints.save(RunState(10, 1, step=1))
        checkpoints.finish()
        monkeypatch.setattr(checkpoint, "save_file", raise_disk_full)
        checkpoints.keep(RunState(10, 1, step=2))

    assert "the checkpoint of step 2 was not saved" in caplog.text
    assert steps_in(tmp_path / "checkpoints") == [1]


def test_best_checkpoint_stays_complete(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, kept=WEIGHTS)

    checkpoint._remove_older(tmp_path / "step-00000003", 1, [1])

    assert complete_steps_in(tmp_path) == [3, 1]


# Sharded models.


def check_sharded_checkpoints(rank: int, folder: Path) -> None:
    """Load checkpoints of one process into FSDP2 models, and compare the gathered tensors."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    for make_model in (make_gpt2, make_llama):
        check_sharded_checkpoint(rank, folder / make_model.__name__, make_model)
    dist.destroy_process_group()


def check_sharded_checkpoint(rank: int, folder: Path, make_model: Callable) -> None:
    """Do the work of ``check_sharded_checkpoints`` for a type of model."""
    unsharded = make_training(0, make_model)
    if rank == 0:
        save(folder, 1, unsharded)
    dist.barrier()
    model = fully_shard(make_model(1), mesh=init_device_mesh("cpu", (2,)))
    sharded = Training(model, make_optimizer(model))

    load(folder / "step-00000001", sharded)
    gathered = checkpoint.gather(*sharded)

    if rank == 0:
        weights, moments = checkpoint.gather(*unsharded)
        assert_equal_tensors(gathered[0], weights)
        assert_equal_tensors(gathered[1], moments)
    dist.barrier()


def check_sharded_beginning(rank: int, folder: Path) -> None:
    """Save and load an FSDP2 model before its first update. This must not count as an update."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    model = fully_shard(make_gpt2(1), mesh=init_device_mesh("cpu", (2,)))
    training = Training(model, make_optimizer(model))

    weights, moments = checkpoint.gather(*training)
    if rank == 0:
        assert_equal_tensors(weights, checkpoint.gather_weights(make_gpt2(1)))
        contents = checkpoint.Contents(
            weights, moments, {"step": 0, "skipped_updates": 0}, MODEL_FILES
        )
        checkpoint.write(folder, contents)
    dist.barrier()
    load(folder / "step-00000000", training)

    assert not moments
    assert not training.optimizer.state
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_checkpoint_before_first_update_has_no_moments(tmp_path):
    mp.start_processes(check_sharded_beginning, (tmp_path,), nprocs=2, start_method="fork")


def test_fsdp2_checkpoint_equals_that_of_one_process(tmp_path):
    mp.start_processes(check_sharded_checkpoints, (tmp_path,), nprocs=2, start_method="fork")
