"""Token shards: ids on disk in llm.c's format, cut into windows, read in an order that is a pure function.

Legend: B sequences, T tokens. A window is T + 1 ids: inputs are the first T, targets the last T. Windows have
stride T, so each token is a target once; none crosses a shard. Position p of an epoch holds window
``order(seed, epoch)[p]``: processes, micro-batches and restarts cannot change it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from . import files
from .errors import BadInput

# llm.c (dev/data/data_common.py): 256 int32 of header: magic, version, number of tokens; then the ids.
HEADER_BYTES = 1024
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
SHARD_TOKENS = 100_000_000
SHUFFLE_BLOCK_TOKENS = 2**26  # windows are permuted inside blocks of this many tokens
MANIFEST = "manifest.json"


class ShardWriter:
    """Writes one split's ids as shards of at most ``shard_tokens``; ``close()`` returns their manifest rows."""

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.format, self.dtype = list(FORMATS.items())[vocab_size > 2**16]
        self.rows: list[dict] = []
        self._parts: list[np.ndarray] = []
        self._tokens = self._text_bytes = 0

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document's ids ((n,) integers); a document is cut where a shard is full."""
        self._text_bytes += text_bytes
        while len(ids):
            part = ids[: self.shard_tokens - self._tokens]
            self._parts.append(part.astype(self.dtype))
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self.shard_tokens:
                self._flush()

    def close(self) -> list[dict]:
        """Write what is left; return one row a shard: file, tokens, text_bytes, sha256."""
        if self._tokens:
            self._flush()
        return self.rows

    def _flush(self) -> None:
        path = self.folder / f"{self.split}_{len(self.rows):06d}.bin"
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:3] = [*self.format, self._tokens]
        with files.replacing(path) as temporary, open(temporary, "wb") as out:
            out.write(header.tobytes())
            for part in self._parts:
                out.write(part.tobytes())
            out.flush()
        row = {"file": path.name, "tokens": self._tokens, "text_bytes": self._text_bytes}
        self.rows.append(row | {"sha256": files.sha256(path)})
        self._parts, self._tokens, self._text_bytes = [], 0, 0


def read_manifest(folder: Path) -> dict | None:
    """Return a folder's manifest when it is complete, else None. Raises BadInput when it cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return manifest if manifest["complete"] and manifest["splits"]["train"] else None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a manifest ({error!r}); delete the folder and prepare it again") from None


def describe_folder(folder: Path) -> dict:
    """Return the manifest of a folder of shards: its own, or one made from the file names of others' shards.

    llm.c and modded-nanogpt name their files ``*_train_*.bin`` and ``*_val_*.bin``.
    """
    if not folder.is_dir():
        raise BadInput(f"data_dir = {folder}: no such folder; prepare_data.py makes one")
    if manifest := read_manifest(folder):
        return manifest
    if (folder / MANIFEST).exists():
        raise BadInput(f"data_dir = {folder}: its preparation was not finished; run prepare_data.py again")
    splits = {}
    for split, names in {"train": "*_train_*.bin", "validation": "*_val_*.bin"}.items():
        paths = sorted(folder.glob(names))
        if not paths:
            raise BadInput(
                f"data_dir = {folder}: holds no {split} shards ({names}) and no {MANIFEST}; give the "
                f"folder that prepare_data.py or llm.c's dev/data scripts wrote"
            )
        splits[split] = [{"file": path.name, "tokens": read_header(path)[0]} for path in paths]
    return {"splits": splits, "tokenizer": None, "complete": True}


def fingerprint(rows: list[dict]) -> str:
    """Return a SHA-256 of a split's contents: of its shards' tokens and hashes, in order, whatever folder they are in."""
    contents = [[row["file"], row["tokens"], row.get("sha256")] for row in rows]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def read_header(path: Path) -> tuple[int, np.dtype]:
    """Return (number of tokens, dtype) of a shard. Raises BadInput unless header and file size agree."""
    try:
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4")
            size = file.seek(0, 2)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"{path}: cut short: its size is no whole number of header words") from None
    if len(header) < HEADER_BYTES // 4:
        raise BadInput(f"{path}: {size} bytes are fewer than a shard's header of {HEADER_BYTES}")
    dtype = FORMATS.get((int(header[0]), int(header[1])))
    if dtype is None:
        raise BadInput(
            f"{path}: offset 0: magic {header[0]}, version {header[1]}: not a token shard (llm.c's magic is "
            f"20240520 version 1, or 20240801 version 7 for 32-bit ids)"
        )
    tokens = int(header[2])
    if size != HEADER_BYTES + tokens * dtype.itemsize:
        raise BadInput(
            f"{path}: the header says {tokens} tokens, that is {HEADER_BYTES + tokens * dtype.itemsize} bytes, the "
            f"file has {size}: cut short or damaged; fetch or prepare it again"
        )
    return tokens, dtype


class TokenShards:
    """One split as memory maps, cut into windows of ``sequence_length + 1`` ids.

    Args:
        rows: manifest rows of the split's shards.
        vocab_size: ids at or above it are refused.
        check_ids: read every id once now (what a manifest of ours already promises).

    Raises BadInput for a damaged shard, an id out of range, or a split shorter than one window.
    """

    def __init__(
        self, folder: Path, rows: list[dict], sequence_length: int, vocab_size: int, *, check_ids: bool = False
    ):
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self.paths = [folder / row["file"] for row in rows]
        self.maps = []
        for path, row in zip(self.paths, rows, strict=True):
            tokens, dtype = read_header(path)
            if tokens != row["tokens"]:
                raise BadInput(f"{path}: has {tokens} tokens, {MANIFEST} says {row['tokens']}: changed since then")
            shape = (tokens,)
            self.maps.append(np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=shape) if tokens else None)
            if check_ids and tokens:
                self._refuse_ids(self.maps[-1], path, 0)
        self.num_tokens = sum(row["tokens"] for row in rows)
        windows = [max(0, (row["tokens"] - 1) // sequence_length) for row in rows]
        self._ends = np.cumsum(windows)
        self.num_windows = int(self._ends[-1]) if windows else 0
        if not self.num_windows:
            raise BadInput(
                f"{folder}: the longest {rows[0]['file'].split('_')[0] if rows else ''} shard has "
                f"{max((row['tokens'] for row in rows), default=0)} tokens, fewer than one window of "
                f"sequence_length + 1 = {sequence_length + 1}. Give more text, or a smaller --sequence_length"
            )

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64, of the windows with these numbers."""
        length = self.sequence_length
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            shard = int(np.searchsorted(self._ends, index, side="right"))
            start = (int(index) - (int(self._ends[shard - 1]) if shard else 0)) * length
            rows[row] = self.maps[shard][start : start + length + 1]
            if rows[row].max() >= self.vocab_size:
                self._refuse_ids(rows[row], self.paths[shard], start)
        ids = torch.from_numpy(rows)
        return ids[:, :-1], ids[:, 1:]

    def _refuse_ids(self, ids: np.ndarray, path: Path, start: int) -> None:
        for begin in range(0, len(ids), 2**24):
            bad = np.flatnonzero(ids[begin : begin + 2**24] >= self.vocab_size)
            if len(bad):
                token = start + begin + int(bad[0])
                itemsize = read_header(path)[1].itemsize
                raise BadInput(
                    f"{path}: offset {HEADER_BYTES + token * itemsize}: token {token} is id "
                    f"{int(ids[begin + bad[0]])}, vocab_size = {self.vocab_size} ends at {self.vocab_size - 1}: "
                    f"these shards belong to another tokenizer, or vocab_size is too small"
                )


@dataclass(frozen=True)
class TrainOrder:
    """Which windows a process reads at a step: a pure function of seed and position, of nothing else."""

    num_windows: int
    sequence_length: int
    sequences_per_step: int
    micro_batch_size: int
    num_processes: int
    seed: int
    block_tokens: int = SHUFFLE_BLOCK_TOKENS

    def windows(self, step: int, micro_step: int, rank: int) -> np.ndarray:
        """Return the (B,) window numbers of one micro-batch; an epoch's end falls where it falls."""
        first = step * self.sequences_per_step
        first += (micro_step * self.num_processes + rank) * self.micro_batch_size
        return np.array([self._window(first + row) for row in range(self.micro_batch_size)])

    def _window(self, position: int) -> int:
        epoch, position = divmod(position, self.num_windows)
        block_windows = max(1, self.block_tokens // self.sequence_length)
        block, place = divmod(position, block_windows)
        length = min(block_windows, self.num_windows - block * block_windows)
        return block * block_windows + int(_permutation(self.seed, epoch, block, length)[place])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, block: int, length: int) -> np.ndarray:
    # RandomState's stream is frozen by NumPy's compatibility policy; Generator's is not. A run resumed under a newer
    # NumPy must read the same windows.
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch, block])))
    return state.permutation(length)


def eval_batches(
    shards: TokenShards, *, max_tokens: int, batch_size: int, rank: int, num_processes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this process's share of ``max_tokens`` (0 = all) of a split, each window once.

    The windows are spread evenly over the split: its first files are seldom like the rest.
    """
    count = shards.num_windows
    if max_tokens:
        count = min(count, max(1, max_tokens // shards.sequence_length))
    chosen = np.arange(count) * shards.num_windows // count
    mine = chosen[rank::num_processes]
    for begin in range(0, len(mine), batch_size):
        yield shards.batch(mine[begin : begin + batch_size])
