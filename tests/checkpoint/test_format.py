"""A checkpoint is whole, or it is not taken."""

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
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ROOT
from run_results import update_manifest
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.checkpoint.state import RunState
from ursa_minor.optim import optimizers, schedule
from ursa_minor.recipe import keys, loading
from ursa_minor.run import resume

# Moments are made by hand: nothing here runs a backward pass, which the forks of test_train.py would not survive.
ADAMW = keys.Optimizer(
    weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0
)
PARTS = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.MANIFEST)


def gpt2(seed: int, n_embd: int = 16, tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": n_embd, "vocab_size": 32, "n_positions": 8}
    return GPT2LMHeadModel(
        GPT2Config(**shape, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied)
    )


def llama(seed: int, n_embd: int = 16, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_size": n_embd,
        "vocab_size": 32,
    }
    return LlamaForCausalLM(
        LlamaConfig(**shape, intermediate_size=2 * n_embd, tie_word_embeddings=tied)
    )


def built(model, name: str = "adamw", **settings) -> torch.optim.Optimizer:
    optimizer = optimizers.build(model, dataclasses.replace(ADAMW, optimizer=name, **settings))
    schedule.set_lr(optimizer, 0.01)
    return optimizer


def make(seed: int = 0, build=gpt2) -> tuple:
    """Return a model and its optimizer after an update."""
    optimizer = built(model := build(seed))
    update(model, optimizer, seed)
    return model, optimizer


def update(model, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def save(folder: Path, *steps: int, keep: int = 0, pair=None, **state) -> Path:
    for step in steps:
        gathered = checkpoint.gather(*(pair or make(step)))
        tensors = tuple(
            {name: tensor.clone() for name, tensor in named.items()} for named in gathered
        )
        path = checkpoint.write(
            folder, tensors, {"step": step, "skipped_updates": 0, **state}, keep
        )
    return path


def load(path: Path, model, optimizer, name: str = "adamw") -> None:
    checkpoint.load(path, model, optimizer, optimizers.OPTIMIZERS[name].state_tensors)


def moments(model, optimizer) -> dict:
    return {
        (name, key): value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(folder)]


def saving(run_dir: Path, pair, first_step: int = 0) -> resume.Checkpoints:
    """Return what saves a run's checkpoints beside training."""
    recipe = loading.load_recipe(ROOT / "recipes" / "own_text.yaml", {"data_files": ["x"]})
    recipe = keys.replace(recipe, output_dir=str(run_dir))
    alone = SimpleNamespace(is_main_process=True, scaler=None)
    corpus = SimpleNamespace(identities=list)
    return resume.Checkpoints(recipe, corpus, *pair, alone, lambda path: None, first_step)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_head_of_its_own_is_saved_a_tied_one_once_and_transformers_loads_either(tmp_path, build):
    model, optimizer = make(0, build)
    path = save(tmp_path, 1, pair=(model, optimizer))
    names = set(load_file(path / checkpoint.MODEL))
    assert names == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in names) is not model.config.tie_word_embeddings
    model.config.save_pretrained(path)
    loaded, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    other = build(1)
    checkpoint.load_weights(path, other)
    for found in (loaded, other):
        assert (
            found.lm_head.weight is found.get_input_embeddings().weight
        ) is model.config.tie_word_embeddings
        assert all(
            torch.equal(tensor, found.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )


RESUMED = [("adamw", gpt2), ("muon", llama)]
if importlib.util.find_spec("bitsandbytes"):
    RESUMED.append(("adamw_8bit", gpt2))


@pytest.mark.parametrize(("name", "build"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path, build, name):
    model = build(0, n_embd=64, tied=False)
    optimizer = built(model, name)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert min(sizes) < 4096 < max(sizes)  # adamw_8bit has moments of both kinds
    for step in (1, 2):
        update(model, optimizer, step)
    path = save(tmp_path, 2, pair=(model, optimizer))
    update(model, optimizer, 3)
    resumed = build(1, n_embd=64, tied=False)
    again = built(resumed, name)
    load(path, resumed, again, name)
    update(resumed, again, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )
    mine, theirs = moments(model, optimizer), moments(resumed, again)
    assert mine.keys() == theirs.keys() and mine
    for key, value in mine.items():
        assert type(value) is type(theirs[key]), key
        kept, back = torch.as_tensor(value), torch.as_tensor(theirs[key])
        assert kept.dtype == back.dtype and torch.equal(kept, back), key


def test_every_single_flipped_bit_is_found(tmp_path):
    path = save(tmp_path, 1)
    chance = random.Random(0)
    for _ in range(200):
        name = chance.choice(sorted(os.listdir(path)))
        data = (path / name).read_bytes()
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(changed)
        problem = checkpoint.find_problem(path)
        # White space of the manifest may flip to other white space; every value in it must be as it was.
        assert problem or (
            name == checkpoint.MANIFEST and json.loads(data) == json.loads(bytes(changed))
        ), name
        (path / name).write_bytes(data)
    assert checkpoint.find_problem(path) is None


def test_newest_that_verifies_is_taken_others_are_named_and_strangers_are_ignored(tmp_path):
    assert checkpoint.find_newest(tmp_path / "nothing") == (None, [])
    good = save(tmp_path, 1)
    for name in ("step-abc", "step-00000009.tmp", "tmp", "step-00000007"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    path, skipped = checkpoint.find_newest(tmp_path)
    assert path == good and checkpoint.read_state(path)["step"] == 1
    whys = "Not a directory", "No such file or directory"
    lines = [
        f"step-{8 - i:08d}: manifest.json cannot be read ({why})" for i, why in enumerate(whys)
    ]
    assert [line.split("/")[-1] for line in skipped] == lines
    good.rename(tmp_path / "step-00000005")
    assert "step 1" in checkpoint.find_problem(tmp_path / "step-00000005")
    with pytest.raises(BadInput, match="no checkpoint is intact"):
        checkpoint.find_newest(tmp_path)


@pytest.mark.parametrize("name", PARTS)
def test_a_newest_checkpoint_that_cannot_be_read_is_named_and_the_sound_one_before_it_is_taken(
    tmp_path, monkeypatch, name
):
    """A file cut short or missing, a folder in its place, a link that leads nowhere, and a disk that answers EIO."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    data = (bad / name).read_bytes()
    cut = lambda path: path.write_bytes(data[:-2])  # noqa: E731
    for spoil in (
        cut,
        Path.touch,
        lambda path: None,
        Path.mkdir,
        lambda path: path.symlink_to("nowhere"),
    ):
        (bad / name).unlink()
        spoil(bad / name)
        path, (line,) = checkpoint.find_newest(tmp_path)
        assert path == good and line.startswith(f"{bad}: {name} ")
        files.remove(bad / name)
        (bad / name).write_bytes(data)

    def failing(path, *args, real=open, **kwargs):
        if Path(path) == bad / name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", failing)  # of Path.read_text
    monkeypatch.setattr(builtins, "open", failing)
    assert checkpoint.find_newest(tmp_path) == (
        good,
        [f"{bad}: {name} cannot be read (Input/output error)"],
    )


def test_a_manifest_or_a_state_that_says_odd_things_is_damage_also_with_a_manifest_that_agrees(
    tmp_path,
):
    path = save(tmp_path, 2)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    for text in ('{"step": 3}', "[]", "[" * 100_000):
        (path / checkpoint.STATE).write_text(text)
        update_manifest(path)
        assert checkpoint.find_problem(path).startswith("state.json ")
    for odd in (manifest | {"step": "2"}, manifest | {"files": []}, []):
        (path / checkpoint.MANIFEST).write_text(json.dumps(odd))
        assert checkpoint.find_problem(path).startswith("manifest.json ")


def test_a_run_knows_its_own_checkpoints_by_where_it_began(tmp_path):
    mine, begin = tmp_path / "mine", save(tmp_path / "theirs", 4)
    assert checkpoint.find_newest(mine, begin) == (begin, [])
    origin = checkpoint.origin_of(begin)
    first = save(mine, 5, origin=origin)
    (save(mine, 6, origin=origin) / checkpoint.MODEL).write_bytes(b"x")
    (save(mine, 7) / checkpoint.STATE).write_text("[")
    path, skipped = checkpoint.find_newest(mine, begin)
    named = [line.split("/")[-1].split(":")[0] for line in skipped]
    assert path == first and named == ["step-00000007", "step-00000006"]
    files.remove(begin)  # rotated away
    assert checkpoint.find_newest(mine, begin)[0] == first
    with pytest.raises(BadInput, match="step-00000003: there is no such folder"):
        checkpoint.find_newest(mine, tmp_path / "theirs" / "step-00000003")
    other = save(tmp_path / "theirs", 5)
    with pytest.raises(
        BadInput, match="mine contains checkpoints of a run that did not start .* --run_name"
    ):
        checkpoint.find_newest(mine, other)
    assert checkpoint.find_newest(mine, first) == (first, ANY)  # it goes back


def test_origin_is_known_from_any_path_and_states_none(tmp_path, monkeypatch):
    begin = save(tmp_path / "theirs", 4)
    origin = checkpoint.origin_of(begin)
    assert str(tmp_path) not in str(origin)
    first = save(tmp_path / "mine", 5, origin=origin)
    monkeypatch.chdir(tmp_path)
    begin.parent.rename("moved")
    for path in (Path("moved", begin.name), tmp_path / "moved" / begin.name):
        assert checkpoint.find_newest(tmp_path / "mine", path)[0] == first
    other = save(tmp_path / "other", 4)
    with (
        monkeypatch.context() as patch,
        pytest.raises(BadInput, match="checkpoints of a run that did not start"),
    ):
        patch.setattr(checkpoint, "_hash_of_weights", lambda path: "0" * 64)
        checkpoint.find_newest(tmp_path / "mine", other)


def test_rotation_keeps_the_newest_and_goes_only_after_a_verified_save(tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("theirs")
    (tmp_path / ".step-00000009.tmp-01234567").write_text("a file")
    save(tmp_path, 1, 2, 3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["kept", "step-00000002", "step-00000003"]
    (tmp_path / "step-00000003" / checkpoint.MODEL).unlink()
    save(tmp_path, 2, keep=2)
    assert steps_in(tmp_path) == [3, 2]  # a later one is not an older one
    save(tmp_path, 3, keep=2)  # the damaged one is replaced
    with monkeypatch.context() as damaged, pytest.raises(OSError, match="injected"):
        damaged.setattr(checkpoint, "find_problem", lambda path: "injected")
        save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [4, 3, 2]


def test_what_training_changes_after_the_call_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    """The writing is held back until the weights are others; a second save waits for the first."""
    go, folder = threading.Event(), tmp_path / "checkpoints"
    monkeypatch.setattr(
        checkpoint, "save_file", lambda *args, **how: (go.wait(60), save_file(*args, **how))
    )
    model, optimizer = make(7)
    before, moments_before = copy.deepcopy((model.state_dict(), moments(model, optimizer)))
    with saving(tmp_path, (model, optimizer)) as checkpoints:
        checkpoints.save(RunState(10, 1, step=1))
        for tensor in (*model.parameters(), *moments(model, optimizer).values()):
            tensor.data.fill_(3)
        assert not checkpoint.list_checkpoints(folder)  # training continues before it is there
        go.set()
        checkpoints.save(RunState(10, 1, step=2))
        assert checkpoint.find_problem(folder / "step-00000001") is None
    other = make(1)
    load(folder / "step-00000001", *other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other[0].state_dict().items())
    assert all(torch.equal(tensor, moments_before[key]) for key, tensor in moments(*other).items())
    load(folder / "step-00000002", *other)
    assert all((parameter == 3).all() for parameter in other[0].parameters())


def test_rows_are_on_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    order, fsync, rename = [], files.fsync, Path.rename
    (tmp_path / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(files, "fsync", lambda path: (order.append(path.name), fsync(path)))
    monkeypatch.setattr(
        Path, "rename", lambda path, new: (order.append(new.name), rename(path, new))
    )
    save(tmp_path / "checkpoints", 1)
    assert order.index("metrics.jsonl") < order.index("step-00000001") < order.index("checkpoints")


def test_failed_save_is_logged_and_leaves_the_others_and_no_litter(tmp_path, monkeypatch, caplog):
    save(tmp_path / "checkpoints", 1)
    monkeypatch.setattr(
        files, "fsync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with saving(tmp_path, make(2)) as checkpoints:
        checkpoints.save(RunState(10, 1, step=2))
    assert (
        "the checkpoint of step 2 was not saved" in caplog.text and "No space left" in caplog.text
    )
    assert "free some space; the run continues" in caplog.text
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_checkpoint_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()}
    assert modes == dict.fromkeys(PARTS, "0o644")


def test_checkpoint_is_read_where_files_cannot_be_mapped(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    expected = make(1)[0].state_dict()
    no_maps = OSError("No such device (os error 19)")  # the words of safetensors
    monkeypatch.setattr(checkpoint, "load_file", lambda file: (_ for _ in ()).throw(no_maps))
    model, optimizer = make(2)
    load(path, model, optimizer)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "there is no such folder;"),
        ("checkpoints/step-00000003", "there is no such folder;"),
        (
            "OWNER/gpt2",
            "there is no such folder (for a checkpoint on the Hub, write hub://OWNER/gpt2);",
        ),
        ("file", "this is not a folder;"),
        (".", "this folder contains checkpoints; the newest is checkpoints/step-00000002;"),
        (
            "checkpoints",
            "this folder contains checkpoints; the newest is checkpoints/step-00000002;",
        ),
        ("model", "this folder has no manifest.json, so it is not a checkpoint;"),
    ],
)
def test_path_without_a_checkpoint_is_explained(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    with pytest.raises(BadInput) as caught:
        checkpoint.find_newest(tmp_path / "runs" / "new" / "checkpoints", Path(name))
    (line,) = caught.value.lines
    assert line.startswith(f"resume_from_checkpoint = {name}: {message}")
    near = "; did you mean checkpoints/step-00000002?" if "00000003" in name else ""
    assert line.endswith(f"use auto, none or an intact step-XXXXXXXX folder{near}")


WEIGHT, MOMENT = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.weight/exp_avg"


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        (
            checkpoint.MODEL,
            lambda t: t | {WEIGHT: t[WEIGHT].T.contiguous()},
            f"{WEIGHT} is (64, 16) torch.float32",
        ),
        (checkpoint.MODEL, lambda t: {}, " is missing"),
        (
            checkpoint.OPTIMIZER,
            lambda t: t | {MOMENT: t[MOMENT].half()},
            f"{MOMENT} is (16, 64) torch.float16",
        ),
        (
            checkpoint.OPTIMIZER,
            lambda t: t | {f"{MOMENT}/more": torch.ones(2)},
            f"{MOMENT}/more is (2,) torch.float32",
        ),
        (checkpoint.OPTIMIZER, None, "cannot be read ("),
    ],
)
def test_tensors_that_are_not_the_run_s_are_refused_by_file_and_name_though_every_hash_agrees(
    tmp_path, file, edit, words
):
    path = save(tmp_path, 2)
    if edit:
        save_file(edit(load_file(path / file)), path / file)
    else:
        (path / file).write_bytes(b"x" * 100)
    update_manifest(path)
    assert checkpoint.find_problem(path) is None
    model = gpt2(1)
    with pytest.raises(BadInput) as refused:
        load(path, model, built(model))
    (line,) = refused.value.lines
    assert line.startswith(f"{path / file}: ") and words in line


def fsdp(rank: int, folder: Path) -> None:
    """Whether what FSDP2 shards is saved as what is whole, and is loaded from it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    whole = make(0, llama)
    if rank == 0:
        save(folder / "plain", 1, pair=whole)
    dist.barrier()
    model = fully_shard(llama(1), mesh=init_device_mesh("cpu", (2,)))
    sharded = built(model)
    load(folder / "plain" / "step-00000001", model, sharded)
    tensors = checkpoint.gather(model, sharded)
    if rank == 0:
        for found, wanted in zip(tensors, checkpoint.gather(*whole), strict=True):
            assert found.keys() == wanted.keys() and all(
                torch.equal(found[key], wanted[key]) for key in found
            )
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_writes_what_one_process_writes_and_reads_it(tmp_path):
    mp.start_processes(fsdp, (tmp_path,), nprocs=2, start_method="fork")
