"""Bits flipped, files cut, swapped, replaced and edited with their hashes, in checkpoints and shards.

The next start takes an older checkpoint and ends with the bits of the whole run, or states which file is damaged.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import numpy
import safetensors.numpy

Case = tuple[str, Callable[[Path], str | None]]
RUN = Path("runs/tiny")
LAST = RUN / "checkpoints" / f"step-{commands.STEPS:08d}"
BEFORE = LAST.with_name(f"step-{commands.STEPS - 3:08d}")
TRAIN = ("train.py", "--recipe", "tiny.yaml", "--save_total_limit", "0")
IN_CHECKPOINT = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def flips(base: Path, rng: random.Random, shared: Path) -> Iterator[Case]:
    """200 bits: of each file of the newest checkpoint, of shards that training then meets, and of shards at rest."""
    whole, wanted = finished(base, shared)
    shards = sorted(path.relative_to(whole) for path in (whole / "data").rglob("*.bin"))
    for _ in range(200):
        kind, seed = rng.choice(("checkpoint", "checkpoint", "checkpoint", "shard", "at rest")), rng.random()
        path = LAST / rng.choice(IN_CHECKPOINT) if kind == "checkpoint" else rng.choice(shards)

        def hit(folder: Path, kind=kind, path=path, seed=seed) -> str | None:
            commands.copy(whole, folder)
            flip(folder / path, seed, keep_time=kind == "at rest")
            if kind == "at rest":
                verify = ("prepare_data.py", "--recipe", "tiny.yaml", "--verify", str(path.parent))
                done = commands.run(*verify, cwd=folder)
                return commands.fault_of(done, path.name) if done.code else "the flipped bit was not seen"
            if kind == "shard":
                shutil.rmtree(folder / LAST)  # so that there is something to train
            done = commands.run(*TRAIN, cwd=folder)
            return ends(done, folder, wanted, path.name)

        yield f"{kind}: {path}", hit


def cuts(base: Path, rng: random.Random, shared: Path) -> Iterator[Case]:
    """Each way to damage a file, for each file of a checkpoint; edits with their hashes; shards."""
    whole, wanted = finished(base, shared)
    for name in IN_CHECKPOINT:
        for how in (cut, empty, remove, to_folder, to_dangling_link, append, swap):

            def hit(folder: Path, name=name, how=how, seed=rng.random()) -> str | None:  # noqa: B008
                commands.copy(whole, folder)
                how(folder / LAST / name, seed)
                return ends(commands.run(*TRAIN, cwd=folder), folder, wanted, name, LAST.name)

            yield f"{how.__name__} {name}", hit
    hashed = [(title, _hashed(name, change), (BEFORE.name, name)) for title, name, change in HASHED]
    for what, damage, culprits in (*hashed, ("two shards are swapped", _swapped_shards, ("train_",))):

        def hit(folder: Path, damage=damage, culprits=culprits) -> str | None:
            commands.copy(whole, folder)
            damage(folder)
            return ends(commands.run(*TRAIN, cwd=folder), folder, wanted, *culprits)

        yield what, hit
    for how in (cut, remove, empty, append, to_folder):

        def hit(folder: Path, how=how, seed=rng.random()) -> str | None:  # noqa: B008
            commands.copy(whole, folder)
            shutil.rmtree(folder / LAST)
            shards = sorted((folder / "data").rglob("train_*.bin"))
            shard = shards[int(seed * len(shards))]
            how(shard, seed)
            done = commands.run(*TRAIN, cwd=folder)
            if not done.code or (why := commands.fault_of(done, shard.name)):
                return ends(done, folder, wanted, shard.name) if not done.code else why
            # "prepare it again" has to mend it.
            if how is to_folder:
                shard.rmdir()
            again = commands.run("prepare_data.py", "--recipe", "tiny.yaml", cwd=folder)
            if again.code:
                return f"preparing again: {commands.fault_of(again, shard.name) or 'refused'}"
            return ends(commands.run(*TRAIN, cwd=folder), folder, wanted)

        yield f"{how.__name__} a shard, then prepare it again", hit


def finished(base: Path, shared: Path) -> tuple[Path, dict]:
    """Return a folder with a run that is complete, and its bits."""
    whole = shared / "whole"
    whole.mkdir()
    commands.copy(base, whole)
    done = commands.run(*TRAIN, cwd=whole)
    if done.code != 0:
        raise RuntimeError(f"the tree cannot train: {done.stderr}")
    return whole, commands.bits_of(whole / RUN)


def ends(done: commands.Done, folder: Path, wanted: dict, *culprits: str) -> str | None:
    """Return why a start after some damage does not hold: it names no culprit, or it ends with other bits."""
    if done.code != 0:
        return commands.fault_of(done, *culprits)
    if "Traceback" in done.stderr:
        return "success, with a traceback"
    return commands.difference(commands.bits_of(folder / RUN), wanted)


def flip(path: Path, seed: float, keep_time: bool = False) -> None:
    """Flip one bit of a file."""
    times, data = path.stat(), bytearray(path.read_bytes())
    place = int(seed * 8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut(path: Path, seed: float) -> None:
    """Keep the beginning of a file."""
    os.truncate(path, int(seed * path.stat().st_size))


def empty(path: Path, seed: float) -> None:
    """Keep nothing of a file."""
    os.truncate(path, 0)


def remove(path: Path, seed: float) -> None:
    """Remove a file."""
    path.unlink()


def append(path: Path, seed: float) -> None:
    """Add a byte to a file."""
    with open(path, "ab") as file:
        file.write(b"x")


def to_folder(path: Path, seed: float) -> None:
    """Put a folder where a file was."""
    path.unlink()
    path.mkdir()


def to_dangling_link(path: Path, seed: float) -> None:
    """Put a link to nothing where a file was."""
    path.unlink()
    path.symlink_to("nothing")


def swap(path: Path, seed: float) -> None:
    """Swap a file with the same one of the checkpoint before."""
    other = path.parent.with_name(BEFORE.name) / path.name
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    if seed < 0.5:  # else the older checkpoint stays sound
        other.write_bytes(mine)


def _hashed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change a file of a checkpoint, and its row in the manifest, so that the hashes agree; some steps are then trained."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder / LAST)
        file, manifest = folder / BEFORE / name, folder / BEFORE / "manifest.json"
        data = change(file.read_bytes())
        file.write_bytes(data)
        rows = json.loads(manifest.read_text())
        rows["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(rows))

    return damage


def _state(**fields: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        state = json.loads(data) | fields
        return json.dumps({key: value for key, value in state.items() if value is not ...}).encode()

    return change


def _tensors(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        tensors = safetensors.numpy.load(data)
        change(tensors)
        return safetensors.numpy.save({name: numpy.ascontiguousarray(values) for name, values in tensors.items()})

    return changed


def _largest(tensors: dict) -> str:
    return max(tensors, key=lambda name: (tensors[name].size, name))


def _each(change: Callable) -> Callable[[dict], object]:
    """Change the largest tensor."""
    return lambda tensors: tensors.update({_largest(tensors): change(tensors[_largest(tensors)])})


def _swapped_shards(folder: Path) -> None:
    first, second, *_ = sorted((folder / "data").rglob("train_*.bin"))
    mine, its = first.read_bytes(), second.read_bytes()
    first.write_bytes(its)
    second.write_bytes(mine)
    shutil.rmtree(folder / LAST)


TENSORS: dict[str, Callable[[dict], object]] = {
    "a shape is turned": _each(lambda values: values.T),
    "a row is missing": _each(lambda values: values[1:]),
    "flat": _each(lambda values: values.reshape(-1)),
    "whole numbers": _each(lambda values: values.astype("int32")),
    "twice the precision": _each(lambda values: values.astype("float64")),
    "half the precision": _each(lambda values: values.astype("float16")),
    "one is missing": lambda tensors: tensors.pop(_largest(tensors)),
    "one more": lambda tensors: tensors.update(more=tensors[_largest(tensors)]),
    "another name": lambda tensors: tensors.update(other=tensors.pop(_largest(tensors))),
    "none": lambda tensors: tensors.clear(),
}
STATES = ({"step": "12"}, {"step": None}, {"step": -1}, {"step": ...}, {"step": 1e400}, {"step": [12]}, {"more": 1})
NO_STATES = (b"", b"[]", b"null", b"3", b"{}", b"{", b"\xff", b"[" * 100_000)
WEIGHTS = ("model.safetensors", "optimizer.safetensors")
# Changes of one file, whose row in the manifest agrees with it: the title, the file, and its new bytes.
HASHED: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("state.json is of another step than its manifest", "state.json", _state(step=7)),
    *((f"state.json of {fields!r:.40}, hashed anew", "state.json", _state(**fields)) for fields in STATES),
    *((f"state.json {data!r:.20}, hashed anew", "state.json", lambda _, data=data: data) for data in NO_STATES),
    *((f"{name}: {how}, hashed anew", name, _tensors(TENSORS[how])) for name in WEIGHTS for how in TENSORS),
    *((f"{name}: random, hashed anew", name, lambda _: bytes(range(256)) * 9) for name in WEIGHTS),
]
