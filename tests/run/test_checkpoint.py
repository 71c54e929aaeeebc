"""A checkpoint is whole, or it is not taken."""

import builtins
import dataclasses
import errno
import importlib.util
import io
import json
import os
import random
import threading
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import in_fork
from runs import sign
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pretrain.base.errors import BadInput
from pretrain.optim import optimizers, schedule
from pretrain.recipe import keys
from pretrain.run import checkpoint

# Moments are made by hand: nothing here runs a backward pass, which the forks of test_train.py would not survive.


def make(seed: int = 0) -> tuple[GPT2LMHeadModel, torch.optim.AdamW]:
    model = gpt2(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update(model, optimizer, seed)
    return model, optimizer


def gpt2(seed: int, n_embd: int = 16, tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": n_embd, "vocab_size": 32, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied))


def llama(seed: int, n_embd: int = 16, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": n_embd}
    shape |= {"intermediate_size": 2 * n_embd, "vocab_size": 32, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied))


MODELS = pytest.mark.parametrize(
    "build",
    [gpt2, lambda seed: llama(seed, tied=False)],
    ids=["gpt2", "llama-untied"],
)


def update(model, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def save(folder, step: int, pair=None, **state):
    with checkpoint.Saver(folder, is_main=True, keep=0) as saver:
        saver.save(step, *(pair or make(step)), state)
    return folder / f"step-{step:08d}"


def save_and_rotate(folder, *steps: int) -> None:
    """Save as training does, keeping two."""
    with checkpoint.Saver(folder, is_main=True, keep=2) as saver:
        for step in steps:
            saver.save(step, *make(step), {})


def load(path, model, optimizer, name: str = "adamw") -> None:
    checkpoint.load(path, model, optimizer, optimizers.OPTIMIZERS[name].keeps)


def moments(model, optimizer) -> dict:
    return {
        (name, key): value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


@MODELS
def test_a_head_of_its_own_is_saved_a_tied_one_once_and_transformers_loads_either(tmp_path, build):
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, 0)
    path = save(tmp_path, 1, (model, optimizer))
    names = set(load_file(path / checkpoint.MODEL))
    assert names == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in names) is not model.config.tie_word_embeddings
    model.config.save_pretrained(path)
    loaded, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    other = build(1)
    checkpoint.load_weights(path, other)
    for copy in (loaded, other):
        assert (copy.lm_head.weight is copy.get_input_embeddings().weight) is model.config.tie_word_embeddings
        assert all(torch.equal(tensor, copy.state_dict()[name]) for name, tensor in model.state_dict().items())


ADAMW = keys.Optimizer(weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0)


def built(model, name: str = "adamw", **settings) -> torch.optim.Optimizer:
    optimizer = optimizers.build(model, dataclasses.replace(ADAMW, optimizer=name, **settings))
    schedule.set_lr(optimizer, 0.01)
    return optimizer


STEPS = {"adam_nesterov": True, "cautious": True, "embedding_lr_ratio": 2.0, "vector_lr_ratio": 0.1}


RESUMED = [("adamw", {}, gpt2), ("muon", {}, llama), ("adamw", STEPS, llama), ("muon", STEPS, gpt2)]
RESUMED += [("adamw_8bit", {}, gpt2)] * bool(importlib.util.find_spec("bitsandbytes"))


@pytest.mark.parametrize(("name", "more", "build"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path, build, name, more):
    model = build(0, n_embd=64, tied=False)
    optimizer = built(model, name, **more)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert min(sizes) < 4096 < max(sizes)  # adamw_8bit has moments of both kinds
    with checkpoint.Saver(tmp_path, is_main=True, keep=0) as saver:
        for step in (1, 2):
            update(model, optimizer, step)
            saver.prepare(model, optimizer)
        saver.save(2, model, optimizer, {})
        update(model, optimizer, 3)
    resumed = build(1, n_embd=64, tied=False)
    again = built(resumed, name, **more)
    load(tmp_path / "step-00000002", resumed, again, name)
    update(resumed, again, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
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
        fault = checkpoint.find_fault(path)
        # White space of the manifest may flip to other white space; every value in it must be as it was.
        assert fault or (name == checkpoint.MANIFEST and json.loads(data) == json.loads(bytes(changed))), name
        (path / name).write_bytes(data)
    assert checkpoint.find_fault(path) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_every_file_cut_short_or_missing_is_found_by_name(tmp_path, name):
    path = save(tmp_path, 1)
    data = (path / name).read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 2):
        (path / name).write_bytes(data[:size])
        assert name in checkpoint.find_fault(path)
    (path / name).unlink()
    assert name in checkpoint.find_fault(path)


def test_newest_that_verifies_is_taken_others_are_named_and_strangers_are_ignored(tmp_path):
    assert checkpoint.find_newest(tmp_path / "nothing") == (None, [])
    good = save(tmp_path, 1)
    (save(tmp_path, 2) / checkpoint.MODEL).write_bytes(b"x")
    for name in ("step-abc", "step-00000009.tmp", "tmp", "step-00000007"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    path, skipped = checkpoint.find_newest(tmp_path)
    assert path == good and checkpoint.read_state(path) == {"step": 1}
    assert [line.split("/")[-1] for line in skipped] == [
        "step-00000008: is not a folder",
        "step-00000007: manifest.json is missing",
        f"step-00000002: model.safetensors has 1 bytes, should have {(good / checkpoint.MODEL).stat().st_size}",
    ]
    good.rename(tmp_path / "step-00000005")
    assert "step 1" in checkpoint.find_fault(tmp_path / "step-00000005")
    with pytest.raises(BadInput, match="no checkpoint verifies"):
        checkpoint.find_newest(tmp_path)


def test_a_newest_checkpoint_that_cannot_be_read_is_named_and_the_sound_one_before_it_is_taken(tmp_path, monkeypatch):
    """A folder where a file should be, a link that leads nowhere, and a disk that answers EIO, at each file."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.MANIFEST):
        (bad / name).rename(tmp_path / "kept")
        for spoil in (Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path)):
            spoil(bad / name)
            path, (line,) = checkpoint.find_newest(tmp_path)
            assert path == good and line.startswith(f"{bad}: {name} ")
            checkpoint.files.remove(bad / name)
        (tmp_path / "kept").rename(bad / name)

        def failing(path, *args, real=open, name=name, **kwargs):
            if Path(path) == bad / name:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path, *args, **kwargs)

        with monkeypatch.context() as disk:
            disk.setattr(io, "open", failing)  # of Path.read_text
            disk.setattr(builtins, "open", failing)
            assert checkpoint.find_newest(tmp_path) == (good, [f"{bad}: {name} cannot be read (Input/output error)"])
        assert checkpoint.find_fault(bad) is None


def test_a_manifest_or_a_state_that_says_odd_things_is_damage_also_with_a_manifest_that_agrees(tmp_path):
    path = save(tmp_path, 2)
    manifest, state = path / checkpoint.MANIFEST, path / checkpoint.STATE
    for text in ('{"step": 3}', "[]", "{}", "[" * 100_000):
        state.write_text(text)
        sign(path)
        assert checkpoint.find_fault(path).startswith("state.json ")
    written = json.loads(manifest.read_text())
    for odd, words in (
        (written | {"step": "2"}, "manifest.json is of step '2'"),
        (written | {"step": 10**4000}, "manifest.json is of step 1000"),
        (written | {"files": []}, "manifest.json cannot be read (AttributeError: "),
        ("[" * 100_000, "manifest.json cannot be read (ValueError: nests too deeply)"),
    ):
        manifest.write_text(odd if isinstance(odd, str) else json.dumps(odd))
        assert checkpoint.find_fault(path).startswith(words)


def test_what_has_a_checkpoint_s_name_and_is_no_folder_is_replaced_and_files_of_killed_saves_go(tmp_path, caplog):
    (tmp_path / "kept").write_text("theirs")
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-00000002").symlink_to("nowhere")
    (tmp_path / "step-00000003").symlink_to(tmp_path / "kept")
    (tmp_path / ".step-00000009.tmp-01234567").write_text("a file")
    save_and_rotate(tmp_path, 1, 2, 3)
    assert not caplog.messages
    assert sorted(os.listdir(tmp_path)) == ["kept", "step-00000002", "step-00000003"]
    assert checkpoint.find_newest(tmp_path) == (tmp_path / "step-00000003", [])


def test_an_older_checkpoint_that_cannot_be_removed_is_said_and_the_new_one_stands(tmp_path, monkeypatch, caplog):
    save_and_rotate(tmp_path, 1, 2)
    saved = []
    denied = OSError(13, "Denied", str(tmp_path / "step-00000001"))
    monkeypatch.setattr(checkpoint.files, "remove", lambda path: (_ for _ in ()).throw(denied))
    with checkpoint.Saver(tmp_path, is_main=True, keep=2, saved=saved.append) as saver:
        saver.save(3, *make(3), {})
    assert saved == [tmp_path / "step-00000003"]
    (line,) = caplog.messages
    assert "an older checkpoint cannot be removed" in line and "step-00000001" in line


def test_a_run_knows_its_own_checkpoints_by_where_it_began(tmp_path):
    mine, begin = tmp_path / "mine", save(tmp_path / "theirs", 4)
    assert checkpoint.find_from(mine, begin) == (begin, [])
    origin = checkpoint.origin_of(begin)
    first = save(mine, 5, origin=origin)
    (save(mine, 6, origin=origin) / checkpoint.MODEL).write_bytes(b"x")
    (save(mine, 7) / checkpoint.STATE).write_text("[")
    path, skipped = checkpoint.find_from(mine, begin)
    named = [line.split("/")[-1].split(":")[0] for line in skipped]
    assert path == first and named == ["step-00000007", "step-00000006"]
    begin.rename(tmp_path / "kept")  # rotated away: the path is what is left to know it by
    assert checkpoint.find_from(mine, begin)[0] == first
    with pytest.raises(BadInput, match="no such checkpoint"):
        checkpoint.find_from(mine, tmp_path / "theirs" / "step-00000003")
    save(tmp_path / "theirs", 4, make(9))  # another run's, under the same name
    with pytest.raises(BadInput, match="step-00000006 exists and did not begin from it"):
        checkpoint.find_from(mine, begin)
    assert checkpoint.find_from(mine, first) == (first, ANY)  # it goes back


def test_a_run_that_went_back_replaces_what_stands_in_its_way(tmp_path):
    for begun in ("before", "after"):
        with checkpoint.Saver(tmp_path, is_main=True, keep=0) as saver:
            for time in ("first", "second"):  # the second save of a step by the same process is none
                saver.save(3, *make(3), {"begun": begun, "time": time})
        state = checkpoint.read_state(tmp_path / "step-00000003")
        assert (state["begun"], state["time"]) == (begun, "first")


def save_beside_two_threads(folder: Path) -> None:
    torch.set_num_threads(2)
    optimizer = torch.optim.AdamW((model := gpt2(0, n_embd=256)).parameters(), lr=1e-3)
    update(model, optimizer, 0)
    torch.ones(10**6).add_(1)  # training's threads are there
    before = len(os.listdir("/proc/self/task"))
    with checkpoint.Saver(folder, is_main=True, keep=0) as saver:
        saver.prepare(model, optimizer)
        saver.save(1, model, optimizer, {})
        saver.finish()
        assert len(os.listdir("/proc/self/task")) == before + 1  # the writer


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux, whose libgomp it is about")
def test_a_checkpoint_starts_no_threads_that_would_slow_training_on_a_cpu(tmp_path):
    in_fork(save_beside_two_threads, tmp_path)


def test_rotation_keeps_the_newest_and_goes_only_after_a_verified_save(tmp_path, monkeypatch, caplog):
    save_and_rotate(tmp_path, 1, 2, 3)
    assert not caplog.messages
    assert [p.name[-1] for p in checkpoint.list_checkpoints(tmp_path)] == ["3", "2"]
    monkeypatch.setattr(checkpoint, "find_fault", lambda path: "injected")
    save_and_rotate(tmp_path, 4)
    (line,) = caplog.messages
    assert "no checkpoint at step 4" in line and "injected" in line
    assert len(checkpoint.list_checkpoints(tmp_path)) == 3


def test_what_training_changes_after_the_call_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    """The writing is held back until the weights are others; a second save waits for the first."""
    go, real = threading.Event(), checkpoint._write_tensors
    monkeypatch.setattr(checkpoint, "_write_tensors", lambda *args: (go.wait(60), real(*args)))
    model, optimizer = make(7)
    before, moments_before = {k: v.clone() for k, v in model.state_dict().items()}, moments(model, optimizer)
    moments_before = {k: v.clone() for k, v in moments_before.items()}
    with checkpoint.Saver(tmp_path, is_main=True, keep=0) as saver:
        saver.save(1, model, optimizer, {})
        for tensor in (*model.parameters(), *moments(model, optimizer).values()):
            tensor.data.fill_(3)
        assert not checkpoint.list_checkpoints(tmp_path)  # training continues before it is there
        go.set()
        saver.save(2, model, optimizer, {})
        assert checkpoint.find_fault(tmp_path / "step-00000001") is None
    other = make(1)
    load(tmp_path / "step-00000001", *other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other[0].state_dict().items())
    assert all(torch.equal(tensor, moments_before[key]) for key, tensor in moments(*other).items())
    load(tmp_path / "step-00000002", *other)
    assert all((parameter == 3).all() for parameter in other[0].parameters())


def test_memory_made_ready_beside_training_is_what_the_first_save_copies_into(tmp_path):
    model, optimizer = make(7)
    with checkpoint.Saver(tmp_path, is_main=True, keep=0) as saver:
        saver.prepare(model, torch.optim.AdamW(model.parameters()))  # no update yet: no moments may be made up
        assert not saver._copies
        saver.prepare(model, optimizer)
        saver._preparing.result()
        room = dict(saver._copies)
        saver.save(1, model, optimizer, {})
        assert room and room.keys() == saver._copies.keys()
        assert all(tensor is room[key] for key, tensor in saver._copies.items())
    other = make(1)
    load(tmp_path / "step-00000001", *other)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other[0].state_dict().items())


def test_saving_over_a_damaged_checkpoint_replaces_it_and_keeps_the_good_ones(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (save(tmp_path, 3) / checkpoint.MODEL).unlink()
    assert not save_and_rotate(tmp_path, 2)
    assert [p.name[-1] for p in checkpoint.list_checkpoints(tmp_path)] == ["3", "2", "1"]
    assert not save_and_rotate(tmp_path, 3) and checkpoint.find_fault(tmp_path / "step-00000003") is None
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_failed_save_leaves_the_others_and_no_litter(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint.files, "fsync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    save(tmp_path, 2)
    assert "no checkpoint at step 2" in caplog.text and "No space left" in caplog.text
    assert os.listdir(tmp_path) == ["step-00000001"]


WEIGHT, MOMENT = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.weight/exp_avg"
SCALAR, EMBEDDING = "transformer.h.0.mlp.c_fc.weight/step", "transformer.wte.weight"


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        (checkpoint.MODEL, lambda t: t | {WEIGHT: t[WEIGHT].T.contiguous()}, f"{WEIGHT} is (64, 16) torch.float32"),
        (checkpoint.MODEL, lambda t: {}, " is not there"),
        (checkpoint.MODEL, lambda t: t | {"lm_head.weight": t[EMBEDDING] + 1}, "lm_head.weight is (32, 16)"),
        (checkpoint.OPTIMIZER, lambda t: t | {MOMENT: t[MOMENT].half()}, f"{MOMENT} is (16, 64) torch.float16"),
        (checkpoint.OPTIMIZER, lambda t: t | {SCALAR: torch.tensor(3)}, f"{SCALAR} is () torch.int64"),
        (checkpoint.OPTIMIZER, lambda t: {name: t[name] for name in t if name != MOMENT}, f"{MOMENT} is not there"),
        (checkpoint.OPTIMIZER, lambda t: t | {f"{MOMENT}/more": torch.ones(2)}, f"{MOMENT}/more is (2,) torch.float32"),
        (checkpoint.OPTIMIZER, None, "cannot be read (SafetensorError: "),
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
    sign(path)
    assert checkpoint.find_fault(path) is None
    model = gpt2(1)
    with pytest.raises(BadInput) as refused:
        load(path, model, built(model))
    (line,) = refused.value.lines
    assert line.startswith(f"{path / file}: ") and words in line


def in_two_processes(body, folder, *args) -> None:
    """Call ``body(rank, folder, *args)`` in two processes that talk over gloo."""
    mp.start_processes(grouped, (body, folder, *args), nprocs=2, start_method="fork")


def grouped(rank, body, folder, *args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    body(rank, folder, *args)
    dist.barrier()
    dist.destroy_process_group()


def fsdp(rank, folder, build):
    """Whether what FSDP2 shards is saved as what is whole, and is loaded from it."""
    whole = build(0)
    plain = built(whole)
    update(whole, plain, 0)
    if rank == 0:
        save(folder / "plain", 1, (whole, plain))
    dist.barrier()
    model = fully_shard(build(1), mesh=init_device_mesh("cpu", (2,)))
    sharded = built(model)
    load(folder / "plain" / "step-00000001", model, sharded)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with checkpoint.Saver(folder / "fsdp", is_main=rank == 0, keep=0) as saver:
        saver.save(1, model, sharded, {})
    if rank == 0:
        for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
            a, b = (load_file(folder / way / "step-00000001" / name) for way in ("plain", "fsdp"))
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@MODELS
def test_fsdp2_writes_what_one_process_writes_and_reads_it(tmp_path, build):
    in_two_processes(fsdp, tmp_path, build)
