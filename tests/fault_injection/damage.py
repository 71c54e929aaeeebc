"""Bits flipped, files cut, swapped, replaced and edited with their hashes, in checkpoints and shards.

The next start takes an older checkpoint and ends with the bits of the whole run, or states which file is damaged.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands
import numpy
import safetensors.numpy

LAST = commands.RUN / "checkpoints" / f"step-{commands.STEPS:08d}"
BEFORE = LAST.with_name(f"step-{commands.STEPS - 3:08d}")
IN_CHECKPOINT = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
# How a file is damaged, by a number from 0 to 1.
WAYS: dict[str, Callable[[Path, float], object]] = {
    "cut": lambda path, seed: os.truncate(path, int(seed * path.stat().st_size)),
    "empty": lambda path, _: os.truncate(path, 0),
    "append": lambda path, _: path.write_bytes(path.read_bytes() + b"x"),
    "remove": lambda path, _: path.unlink(),
    "to_folder": lambda path, _: (path.unlink(), path.mkdir()),
    "to_dangling_link": lambda path, _: (path.unlink(), path.symlink_to("nothing")),
    # With the same one of the checkpoint before, or that one's bytes alone.
    "swap": lambda path, seed: swap(
        path, path.parent.with_name(BEFORE.name) / path.name, both=seed < 0.5
    ),
}


def flips(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """200 bits: of each file of the newest checkpoint, of shards that training then meets, and of shards at rest."""
    whole, wanted = commands.finished_run(base, shared)
    shards = sorted(path.relative_to(whole) for path in (whole / "data").rglob("*.bin"))
    for _ in range(200):
        kind, seed = (
            rng.choice(("checkpoint", "checkpoint", "checkpoint", "shard", "at rest")),
            rng.random(),
        )
        path = LAST / rng.choice(IN_CHECKPOINT) if kind == "checkpoint" else rng.choice(shards)
        yield f"{kind}: {path}", partial(flipped, whole, wanted, kind, path, seed)


def flipped(
    whole: Path, wanted: dict, kind: str, path: Path, seed: float, folder: Path
) -> str | None:
    """Be a case: flip a bit."""
    damaged = commands.copy(whole, folder) / path
    times, data = damaged.stat(), bytearray(damaged.read_bytes())
    place = int(seed * 8 * len(data))
    data[place // 8] ^= 1 << place % 8
    damaged.write_bytes(data)
    if kind == "at rest":
        os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
        done = commands.run(
            ("prepare_data.py", *commands.TRAIN[1:3], "--verify", str(path.parent)), folder
        )
        return (
            commands.command_problem(done, path.name)
            if done.code
            else "the flipped bit was not seen"
        )
    if kind == "shard":
        shutil.rmtree(folder / LAST)  # so that there is something to train
    return commands.training_problem(
        commands.run(commands.TRAIN, folder), folder, wanted, path.name
    )


def cuts(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """Each way to damage a file, for each file of a checkpoint; edits with their hashes; shards."""
    whole, wanted = commands.finished_run(base, shared)
    each = [(how, name, rng.random()) for name in IN_CHECKPOINT for how in WAYS]
    rows = [
        (f"{how} {name}", partial(_way, how, LAST / name, seed), (name, LAST.name))
        for how, name, seed in each
    ]
    rows += [
        (f"{title}, hashed anew", partial(_hashed, name, change), (BEFORE.name, name))
        for title, name, change in HASHED
    ]
    rows.append(("two shards are swapped", _swapped_shards, ("train_",)))
    for title, damage, culprits in rows:
        yield title, partial(trained, damage, whole, wanted, culprits)
    for how in ("cut", "remove", "empty", "append", "to_folder"):
        yield (
            f"{how} a shard, then prepare it again",
            partial(prepared_again, whole, wanted, how, rng.random()),
        )


def trained(
    damage: Callable, whole: Path, wanted: dict, culprits: tuple[str, ...], folder: Path
) -> str | None:
    """Be a case: damage a copy of the folder, and train."""
    damage(commands.copy(whole, folder))
    return commands.training_problem(
        commands.run(commands.TRAIN, folder), folder, wanted, *culprits
    )


def prepared_again(whole: Path, wanted: dict, how: str, seed: float, folder: Path) -> str | None:
    """Be a case: damage a shard; "prepare it again" must repair it."""
    shutil.rmtree(commands.copy(whole, folder) / LAST)
    shards = sorted((folder / "data").rglob("train_*.bin"))
    shard = shards[int(seed * len(shards))]
    WAYS[how](shard, seed)
    done = commands.run(commands.TRAIN, folder)
    if not done.code or (why := commands.command_problem(done, shard.name)):
        return why if done.code else commands.training_problem(done, folder, wanted)
    if how == "to_folder":
        shard.rmdir()
    again = commands.run(("prepare_data.py", *commands.TRAIN[1:3]), folder)
    if again.code:
        return f"preparing again: {commands.command_problem(again, shard.name) or 'refused'}"
    return commands.training_problem(commands.run(commands.TRAIN, folder), folder, wanted)


def _way(how: str, path: Path, seed: float, folder: Path) -> None:
    WAYS[how](folder / path, seed)


def swap(path: Path, other: Path, both: bool = True) -> None:
    """Give a file the bytes of another, and that one its own."""
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    if both:
        other.write_bytes(mine)


def _swapped_shards(folder: Path) -> None:
    swap(*sorted((folder / "data").rglob("train_*.bin"))[:2])
    shutil.rmtree(folder / LAST)


def _hashed(name: str, change: Callable[[bytes], bytes], folder: Path) -> None:
    """Change a file of a checkpoint, and its row in the manifest, so that the hashes agree; some steps are then trained."""
    shutil.rmtree(folder / LAST)
    file, manifest = folder / BEFORE / name, folder / BEFORE / "manifest.json"
    file.write_bytes(data := change(file.read_bytes()))
    rows = json.loads(manifest.read_text())
    rows["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(rows))


def _state(fields: dict, data: bytes) -> bytes:
    state = json.loads(data) | fields
    return json.dumps({key: value for key, value in state.items() if value is not ...}).encode()


def _tensors(change: Callable[[dict, str], object], data: bytes) -> bytes:
    tensors = safetensors.numpy.load(data)
    change(tensors, max(tensors, key=lambda name: (tensors[name].size, name)))
    return safetensors.numpy.save(
        {name: numpy.ascontiguousarray(values) for name, values in tensors.items()}
    )


# Changes of tensors, the largest of which has a name.
TENSORS: dict[str, Callable[[dict, str], object]] = {
    "a shape is turned": lambda tensors, name: tensors.update({name: tensors[name].T}),
    "a row is missing": lambda tensors, name: tensors.update({name: tensors[name][1:]}),
    "flat": lambda tensors, name: tensors.update({name: tensors[name].reshape(-1)}),
    "whole numbers": lambda tensors, name: tensors.update({name: tensors[name].astype("int32")}),
    "twice the precision": lambda tensors, name: tensors.update(
        {name: tensors[name].astype("float64")}
    ),
    "half the precision": lambda tensors, name: tensors.update(
        {name: tensors[name].astype("float16")}
    ),
    "one is missing": lambda tensors, name: tensors.pop(name),
    "one more": lambda tensors, name: tensors.update(more=tensors[name]),
    "another name": lambda tensors, name: tensors.update(other=tensors.pop(name)),
    "none": lambda tensors, name: tensors.clear(),
}
STATES = [*({"step": step} for step in (7, "12", None, -1, ..., 1e400, [12])), {"more": 1}]
NO_STATES = (b"", b"[]", b"null", b"3", b"{}", b"{", b"\xff", b"[" * 100_000)
WEIGHTS = ("model.safetensors", "optimizer.safetensors")
# Changes of one file, whose row in the manifest agrees with it: the title, the file, and its new bytes.
HASHED: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    *((f"state.json of {fields!r}", "state.json", partial(_state, fields)) for fields in STATES),
    *((f"state.json {data!r:.20}", "state.json", lambda _, data=data: data) for data in NO_STATES),
    *(
        (f"{name}: {how}", name, partial(_tensors, TENSORS[how]))
        for name in WEIGHTS
        for how in TENSORS
    ),
    *((f"{name}: random", name, lambda _: bytes(range(256)) * 9) for name in WEIGHTS),
]
