"""Corrupt checkpoints and shards: flipped bits, and truncated, swapped, replaced or edited files.

The next start must resume from an older checkpoint and end with the digests of the uninterrupted
run, or name the corrupted file.
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
WEIGHTS = ("model.safetensors", "training/optimizer.safetensors")
CHECKPOINT_FILES = (*WEIGHTS, "training/state.json", "manifest.json")
# The newest checkpoint is chosen most often. Shards "at rest" are verified, not trained on.
FLIP_KINDS = ("checkpoint", "checkpoint", "checkpoint", "shard", "at rest")
Tensors = dict[str, numpy.ndarray]

# Mutations of a file. The second argument is a number from 0 to 1.


def truncate(path: Path, fraction: float) -> None:
    """Keep this fraction of the file."""
    os.truncate(path, int(fraction * path.stat().st_size))


def empty(path: Path, fraction: float) -> None:
    """Remove the contents of the file."""
    os.truncate(path, 0)


def append(path: Path, fraction: float) -> None:
    """Append a byte to the file."""
    path.write_bytes(path.read_bytes() + b"x")


def remove(path: Path, fraction: float) -> None:
    """Delete the file."""
    path.unlink()


def replace_by_folder(path: Path, fraction: float) -> None:
    """Replace the file by a folder."""
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path: Path, fraction: float) -> None:
    """Replace the file by a link to a missing file."""
    path.unlink()
    path.symlink_to("nothing")


def swap_with_older_file(path: Path, fraction: float) -> None:
    """Swap the file with the same one of the older checkpoint, or only copy that one."""
    swap(path, path.parent.with_name(BEFORE.name) / path.name, both=fraction < 0.5)


FILE_MUTATIONS: dict[str, Callable[[Path, float], None]] = {
    "cut": truncate,
    "empty": empty,
    "append": append,
    "remove": remove,
    "to_folder": replace_by_folder,
    "to_dangling_link": replace_by_dangling_link,
    "swap": swap_with_older_file,
}
SHARD_MUTATIONS = ("cut", "remove", "empty", "append", "to_folder")


def swap(path: Path, other: Path, *, both: bool = True) -> None:
    """Write the bytes of the other file to the first one and, if ``both``, the other way round."""
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    if both:
        other.write_bytes(data)


# Flipped bits.


def flips(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield 200 flipped bits in the newest checkpoint and in shards."""
    whole, expected = commands.finished_run(base, shared)
    shards = sorted(path.relative_to(whole) for path in (whole / "data").rglob("*.bin"))
    checkpoint_files = [LAST / name for name in CHECKPOINT_FILES]
    for _ in range(200):
        kind = rng.choice(FLIP_KINDS)
        fraction = rng.random()
        path = rng.choice(checkpoint_files if kind == "checkpoint" else shards)
        if kind == "at rest":
            run = partial(verify_flipped_shard, whole, path, fraction)
        else:
            run = partial(train_on_flipped_bit, whole, expected, path, fraction)
        yield commands.Case(f"{kind}: {path}", run)


def flip_bit(path: Path, fraction: float) -> None:
    """Flip the bit at this fraction of the file."""
    data = bytearray(path.read_bytes())
    index = int(fraction * 8 * len(data))
    data[index // 8] ^= 1 << index % 8
    path.write_bytes(data)


def train_on_flipped_bit(
    whole: Path, expected: dict, path: Path, fraction: float, folder: Path
) -> str | None:
    """Flip a bit in a copy of the finished run, and start it again."""
    commands.copy(whole, folder)
    flip_bit(folder / path, fraction)
    if path.parts[0] == "data":
        shutil.rmtree(folder / LAST)  # Otherwise no step is left to train.
    result = commands.run(commands.TRAIN, folder)
    return commands.training_problem(result, folder, expected, path.name)


def verify_flipped_shard(whole: Path, path: Path, fraction: float, folder: Path) -> str | None:
    """Flip a bit of a shard without changing its times, and verify the shards."""
    shard = commands.copy(whole, folder) / path
    stat = shard.stat()
    flip_bit(shard, fraction)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = commands.run((*commands.PREPARE, "--verify", str(path.parent)), folder)
    if result.code == 0:
        return "the flipped bit was not detected"
    return commands.command_problem(result, path.name)


# Corrupted files.


def cuts(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield each mutation of each checkpoint file, edits with valid hashes, and mutated shards."""
    whole, expected = commands.finished_run(base, shared)
    for name in CHECKPOINT_FILES:
        for mutation in FILE_MUTATIONS:
            mutate = partial(mutate_checkpoint_file, mutation, name, rng.random())
            run = partial(train_after, mutate, whole, expected, (name, LAST.name))
            yield commands.Case(f"{mutation} {name}", run)
    for title, name, change in hashed_changes():
        mutate = partial(change_with_hash, name, change)
        run = partial(train_after, mutate, whole, expected, (BEFORE.name, name))
        yield commands.Case(f"{title}, with a valid hash", run)
    run = partial(train_after, swap_shards, whole, expected, ("train_",))
    yield commands.Case("two shards are swapped", run)
    for mutation in SHARD_MUTATIONS:
        run = partial(prepare_again, whole, expected, mutation, rng.random())
        yield commands.Case(f"{mutation} a shard, then prepare it again", run)


def train_after(
    mutate: Callable[[Path], None],
    whole: Path,
    expected: dict,
    culprits: tuple[str, ...],
    folder: Path,
) -> str | None:
    """Mutate a copy of the finished run, and start it again."""
    mutate(commands.copy(whole, folder))
    result = commands.run(commands.TRAIN, folder)
    return commands.training_problem(result, folder, expected, *culprits)


def prepare_again(
    whole: Path, expected: dict, mutation: str, fraction: float, folder: Path
) -> str | None:
    """Corrupt a shard. Training must fail and suggest prepare_data.py, which must repair it."""
    shutil.rmtree(commands.copy(whole, folder) / LAST)
    shards = sorted((folder / "data").rglob("train_*.bin"))
    shard = shards[int(fraction * len(shards))]
    FILE_MUTATIONS[mutation](shard, fraction)
    result = commands.run(commands.TRAIN, folder)
    if result.code == 0:
        return commands.training_problem(result, folder, expected)
    problem = commands.command_problem(result, shard.name)
    if problem:
        return problem

    if mutation == "to_folder":
        shard.rmdir()
    repair = commands.run(commands.PREPARE, folder)
    if repair.code != 0:
        problem = commands.command_problem(repair, shard.name) or "rejected"
        return f"preparing again: {problem}"
    return commands.training_problem(commands.run(commands.TRAIN, folder), folder, expected)


def mutate_checkpoint_file(mutation: str, name: str, fraction: float, folder: Path) -> None:
    """Mutate a file of the newest checkpoint."""
    FILE_MUTATIONS[mutation](folder / LAST / name, fraction)


def swap_shards(folder: Path) -> None:
    """Swap two shards and delete the newest checkpoint, so that steps are left to train."""
    first, second, *_ = sorted((folder / "data").rglob("train_*.bin"))
    swap(first, second)
    shutil.rmtree(folder / LAST)


def change_with_hash(name: str, change: Callable[[bytes], bytes], folder: Path) -> None:
    """Change a file of the older checkpoint and its hash in the manifest.

    The newest checkpoint is deleted, so that steps are left to train.
    """
    shutil.rmtree(folder / LAST)
    file = folder / BEFORE / name
    manifest = folder / BEFORE / "manifest.json"
    data = change(file.read_bytes())
    file.write_bytes(data)
    content = json.loads(manifest.read_text())
    content["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(content))


# Changes of a file that the manifest agrees with.


def change_state(fields: dict, data: bytes) -> bytes:
    """Update these fields of state.json. A field with the value ``...`` is removed."""
    state = json.loads(data) | fields
    return json.dumps({key: value for key, value in state.items() if value is not ...}).encode()


def replace_contents(contents: bytes, data: bytes) -> bytes:
    """Replace all bytes of a file."""
    return contents


def change_tensors(change: Callable[[Tensors, str], None], data: bytes) -> bytes:
    """Change the tensors of a file. The change gets all tensors and the largest one's name."""
    tensors = safetensors.numpy.load(data)
    largest = max(tensors, key=lambda name: (tensors[name].size, name))
    change(tensors, largest)
    contiguous = {name: numpy.ascontiguousarray(values) for name, values in tensors.items()}
    return safetensors.numpy.save(contiguous)


def transpose(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].T


def drop_row(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][1:]


def flatten(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].reshape(-1)


def cast(dtype: str, tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].astype(dtype)


def drop_tensor(tensors: Tensors, name: str) -> None:
    del tensors[name]


def add_tensor(tensors: Tensors, name: str) -> None:
    tensors["more"] = tensors[name]


def rename_tensor(tensors: Tensors, name: str) -> None:
    tensors["other"] = tensors.pop(name)


def drop_all_tensors(tensors: Tensors, name: str) -> None:
    tensors.clear()


TENSOR_CHANGES: dict[str, Callable[[Tensors, str], None]] = {
    "a transposed tensor": transpose,
    "a missing row": drop_row,
    "a flat tensor": flatten,
    "integers": partial(cast, "int32"),
    "twice the precision": partial(cast, "float64"),
    "half the precision": partial(cast, "float16"),
    "a missing tensor": drop_tensor,
    "an additional tensor": add_tensor,
    "another name": rename_tensor,
    "no tensors": drop_all_tensors,
}
STATE_STEPS = (7, "12", None, -1, ..., 1e400, [12])
INVALID_STATES = (b"", b"[]", b"null", b"3", b"{}", b"{", b"\xff", b"[" * 100_000)


def hashed_changes() -> Iterator[tuple[str, str, Callable[[bytes], bytes]]]:
    """Yield the title of each change, the name of the file, and the function that changes it."""
    states = [{"step": step} for step in STATE_STEPS]
    states.append({"more": 1})
    for fields in states:
        yield f"state.json of {fields!r}", "training/state.json", partial(change_state, fields)
    for data in INVALID_STATES:
        yield f"state.json {data!r:.20}", "training/state.json", partial(replace_contents, data)
    for name in WEIGHTS:
        for title, change in TENSOR_CHANGES.items():
            yield f"{name}: {title}", name, partial(change_tensors, change)
    for name in WEIGHTS:
        yield f"{name}: random", name, partial(replace_contents, bytes(range(256)) * 9)
