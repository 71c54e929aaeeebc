"""Turn a recipe's text into folders of token shards, once: documents -> tokenizer -> ids -> shards.

    python prepare_data.py --recipe recipes/own_text.yaml --data_files my.txt
    python prepare_data.py --recipe recipes/gpt2_124m.yaml --dry_run
    python prepare_data.py --verify data/fineweb-edu-0123456789ab

It takes the same recipe and flags as train.py, which starts it in the background (``--follow``) when the shards are
not all there. The same command goes on where a stopped or killed one was: manifest.json, replaced after each shard,
says which row of which file comes next.
"""

import functools
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from pretrain.base import console, files
from pretrain.base.errors import BadInput, exit_on_bad_input
from pretrain.data import shards, sources, tokenization
from pretrain.data.windows import Windows
from pretrain.hub import client
from pretrain.recipe import keys, reading

log = logging.getLogger("pretrain.prepare_data")

BATCH_CHARACTERS = 2**20  # text that a thread encodes at a time
BPE_SAMPLE_CHARACTERS = 100_000_000  # the beginning of the train split, on which a bpe is trained
DRY_RUN_SECONDS = 10
SHOW_SECONDS, SHOW_LINE_SECONDS = 0.5, 10.0  # between two looks at the bar; between two lines without one
BUSY = 75  # exit status while another process prepares the folder (sysexits.h: EX_TEMPFAIL)
AHEAD_SHARDS = 2  # with stream_keep = consumed: how far the reader runs ahead of the trainer
EXTRAS = {
    "verify": (str, "check every byte of this folder of shards, and stop"),
    "dry_run": (bool, "read for some seconds and say the size on disk and the time of all of it"),
    "job_index": (int, "prepare this job's share of the source's files; from 0"),
    "num_jobs": (int, "how many jobs share the source's files"),
    "merge": (bool, "join what the jobs have prepared"),
    "source": (int, "only this one of the recipe's sources; from 0"),
    "follow": (bool, "started by train.py: standard input says how far to go, and closes when that process dies"),
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Prepare the recipe's data and print where it lies."""
    client.bound_client()
    recipe, extras = reading.parse_command(
        sys.argv[1:] if argv is None else argv, "Turn text into folders of token shards.", EXTRAS
    )
    console.start(stream=sys.stdout if "follow" in extras else None)  # train.py reads it from there
    if "verify" in extras:
        return verify(
            Path(extras["verify"]), recipe.model.vocab_size or 2**32
        )  # a model that is begun from has its own
    job = Job(extras.get("job_index", 0), extras.get("num_jobs", 1))
    if not 0 <= job.index < job.count:
        raise BadInput(f"--job_index {job.index}: jobs are numbered 0 to num_jobs - 1 = {job.count - 1}")
    found = keys.sources(recipe.data)
    if not 0 <= (only := extras.get("source", 0)) < len(found):
        raise BadInput(f"--source {only}: the recipe has {len(found)}, numbered from 0")
    if all(asked.data_dir for asked in found):
        raise BadInput(f"data_dir = {found[0].data_dir} is a folder of shards already: there is nothing to prepare")
    for index, asked in enumerate(found):
        if asked.data_dir or extras.get("source", index) != index:
            continue
        source = sources.find_source(asked)
        if "dry_run" in extras:
            dry_run(source, recipe)
            continue
        folder = source.folder
        folder.mkdir(parents=True, exist_ok=True)
        pace = Pace(recipe, asked.shard_tokens) if "follow" in extras else None
        with files.locked(folder / job.lock, f"{folder} is being prepared by process {{pid}}; wait for it", BUSY):
            if "merge" in extras:
                merge(folder)
            elif not (shards.read_manifest(folder) or {"complete": False})["complete"]:
                prepare(source, recipe, asked, job, pace)
        if pace is None:
            print(folder)
    return 0


@dataclass(frozen=True)
class Job:
    """One of ``count`` processes that share a source: it prepares each file whose number is ``index`` modulo count."""

    index: int
    count: int

    @property
    def manifest(self) -> str:
        """The file in which it keeps where it is."""
        return shards.MANIFEST if self.count == 1 else f"manifest.job-{self.index:05d}-of-{self.count:05d}.json"

    @property
    def lock(self) -> str:
        """The file that it holds."""
        return ".lock" if self.count == 1 else f".lock.job-{self.index:05d}-of-{self.count:05d}"


class Document(NamedTuple):
    """A row, encoded: ids (n,) with the end-of-text token before a document's first ones; none where it has no text."""

    row: int
    ids: np.ndarray
    text_bytes: int
    counts: dict[str, int]


def prepare(
    source: sources.FoundSource, recipe: keys.Recipe, rules: keys.WantedSource, job: Job, pace: "Pace | None"
) -> None:
    """Write a source's shards from where an earlier process stopped; the manifest is replaced after each.

    Args:
        rules: the source's own keys: shard_tokens, validation_tokens, limit_tokens.
        pace: how far to go, when train.py follows.
    """
    folder = source.folder
    if job.count == 1 and (others := sorted(folder.glob("manifest.job-*.json"))):
        raise BadInput(f"{folder} is being prepared in jobs ({others[0].name}); when all are done, use --merge")
    if job.count > 1 and rules.limit_tokens:
        raise BadInput("limit_tokens counts from the first file on, which no job of several can; use one job")
    progress = Progress(pace)
    manifest = shards.read_manifest(folder, job.manifest)
    revision, parts = open_parts(source, manifest["revision"] if manifest else None)
    tokenizer = open_tokenizer(folder, recipe, parts)
    identity = {
        "name": recipe.data.tokenizer,
        "fingerprint": tokenization.fingerprint(tokenizer),
        "size": len(tokenizer),
    }
    if manifest and manifest["tokenizer"] != identity:
        raise BadInput(f"{folder / 'tokenizer'} is not what the shards beside it were made with; delete {folder}")
    encode = Encoder(tokenizer, recipe.data.tokenizer, pace)
    write = functools.partial(
        shards.ShardWriter,
        folder,
        vocab_size=len(tokenizer),
        bytes_per_token=encode.bytes_per_token,
        shard_tokens=rules.shard_tokens,
    )
    if manifest is None:
        splits, counts, begin = held_out_splits(parts, encode, write, rules.validation_tokens, keep=job.index == 0)
        manifest = {
            "source": source.name,
            "identity": source.identity,
            "revision": revision,
            "tokenizer": identity,
            "files": len(parts["train"]),
            "splits": splits | {"train": []},
            "counts": counts | {"train": {}},
            "train_begins": begin,
            "cursor": begin | {"file": file_at(parts["train"], begin["part"])},
            "complete": False,
        }
        files.write_json(folder / job.manifest, manifest)
    elif not manifest["complete"]:
        shards.refuse_changed(folder, manifest["splits"]["train"])
        refuse_other_files(folder, manifest, parts["train"])
    progress.begin(manifest, source, parts["train"], rules.limit_tokens, job)
    if not manifest["complete"]:
        train_split(manifest, folder / job.manifest, parts["train"], encode, write, rules.limit_tokens, job, progress)
    if job.count == 1:
        finish(folder, manifest)
    else:
        files.write_json(folder / job.manifest, manifest | {"complete": True})
        log.info(f"job {job.index} of {job.count} is complete; when all are, join them with --merge")
    progress.end(manifest)


def held_out_splits(
    parts: dict[str, list[sources.Part]],
    encode: "Encoder",
    write: functools.partial[shards.ShardWriter],
    validation_tokens: int,
    *,
    keep: bool,
) -> tuple[dict[str, list[dict]], dict[str, dict], dict[str, int]]:
    """Write every split but train, in one go: training can then begin as soon as its first block is there.

    Without a validation part, the first documents of the train split are it, to ``validation_tokens``.

    Returns: rows and counts by split, and where the train split begins. With ``keep`` False only the last is found.
    """
    begin = {"part": 0, "row": 0, "token": 0}
    splits, counts = {}, {}
    for split in ("validation", *(name for name in parts if name not in ("validation", "train"))):
        limit = 0 if split in parts else validation_tokens
        if not keep and not limit:
            continue
        shards.clear_partial(folder=write.args[0], split=split) if keep else None
        rows, tally, done = [], Counter(), 0
        for number, (_, read) in enumerate(parts.get(split, parts["train"])):
            writer = write(split, number, 0) if keep else None
            for document in encode(read(0), 0):
                taken = 0
                while writer and taken < len(document.ids):
                    taken += writer.add(document.ids[taken:])
                    rows += [row] if writer.full and (row := writer.finish()) else []
                done += len(document.ids)
                tally.update(document.counts)
                if limit and done >= limit:
                    begin = {"part": number, "row": document.row + 1, "token": 0}
                    break
            rows += [row] if writer and (row := writer.finish()) else []
            if limit and done >= limit:
                break
        if limit and done < limit:
            raise BadInput(
                f"validation_tokens = {limit}: the source has {done} tokens in all; use --validation_tokens "
                f"{max(1, done // 10)}, or, with data_files, give --validation_files"
            )
        splits[split], counts[split] = rows, dict(tally)
    return (splits, counts, begin) if keep else ({split: [] for split in splits}, {}, begin)


def train_split(
    manifest: dict,
    manifest_path: Path,
    parts: list[sources.Part],
    encode: "Encoder",
    write: functools.partial[shards.ShardWriter],
    limit_tokens: int,
    job: Job,
    progress: "Progress",
) -> None:
    """Write the train split from the manifest's cursor on. A shard never holds text of two parts."""
    rows, begin, cursor = manifest["splits"]["train"], manifest["train_begins"], manifest["cursor"]
    tally, done = Counter(manifest["counts"]["train"]), sum(row["tokens"] for row in rows)

    def keep(finished: dict | None, **next_cursor: int) -> None:
        """Enter a finished shard, and where the next one begins: the document that it ended in is not yet counted."""
        rows.extend([finished] if finished else [])
        manifest["counts"]["train"] = dict(tally)
        manifest["cursor"] = next_cursor | {"file": file_at(parts, next_cursor["part"])}
        files.write_json(manifest_path, manifest)
        progress.shard(rows)

    for part in range(cursor["part"], len(parts)):
        if part % job.count != job.index or part < begin["part"]:
            continue
        place = cursor if part == cursor["part"] else begin if part == begin["part"] else {"row": 0, "token": 0}
        if 0 < limit_tokens <= done and not place["token"]:  # a document that was begun is brought to its end
            continue
        shards.clear_partial(write.args[0], "train", part)
        writer = write("train", part, sum(row["file"].startswith(f"train_{part:05d}_") for row in rows))
        taken = place["token"]  # of the first document: an earlier process ended its last shard inside of it
        for document in encode(parts[part][1](place["row"]), place["row"]):
            while taken < len(document.ids):
                added = writer.add(document.ids[taken:])
                taken, done = taken + added, done + added
                if writer.full:
                    keep(writer.finish(), part=part, row=document.row, token=taken)
            taken = 0
            tally.update(document.counts)
            progress.count(document)
            if 0 < limit_tokens <= done:
                break
        keep(writer.finish(), part=part + 1, row=0, token=0)


def file_at(parts: list[sources.Part], part: int) -> str | None:
    """Return the name of a source's file, as a manifest holds it; None behind the last one."""
    return sources.shown_name(parts[part][0]) if part < len(parts) else None


def refuse_other_files(folder: Path, manifest: dict, parts: list[sources.Part]) -> None:
    """Raise BadInput when files came or went since the manifest's cursor was written: it would be applied to another."""
    part, count = manifest["cursor"]["part"], manifest["files"]
    now = file_at(parts, part)
    then = manifest["cursor"].get("file", now)
    if (then, count) != (now, len(parts)):
        raise BadInput(
            f"{folder}: stopped at {then or 'the end'}, file {part + 1} of {count}; the source now has "
            f"{now or 'no file'} there, of {len(parts)}. Give the same files, or to read these anew delete the folder"
        )


def finish(folder: Path, manifest: dict) -> None:
    """Write the manifest of a folder that is complete: the same whatever stopped on the way, and however many jobs."""
    if not manifest["splits"]["train"]:
        raise BadInput(
            f"{folder}: no train text is left; use a smaller --validation_tokens, or --validation_files with data_files"
        )
    for path in folder.glob(".*.tmp-*"):  # of killed processes
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    kept = {name: value for name, value in manifest.items() if name not in ("cursor", "train_begins")}
    files.write_json(folder / shards.MANIFEST, kept | {"complete": True})


def merge(folder: Path) -> None:
    """Join the manifests of all jobs into the folder's, and delete them. Raises BadInput while a job is missing."""
    names = sorted(path.name for path in folder.glob("manifest.job-*.json"))
    found = {name: manifest for name in names if (manifest := shards.read_manifest(folder, name))}
    if not (shards.read_manifest(folder) or {"complete": False})["complete"]:
        join(folder, found)
    for name in found:
        (folder / name.replace("manifest", ".lock").removesuffix(".json")).unlink(missing_ok=True)
        (folder / name).unlink()


def join(folder: Path, found: dict[str, dict]) -> None:
    """Write the folder's manifest from those of all jobs. Raises BadInput while a job is missing."""
    count = int(next(iter(found))[-10:-5]) if found else 0
    wanted = [Job(index, count).manifest for index in range(count)]
    if not found or set(found) != set(wanted) or not all(manifest["complete"] for manifest in found.values()):
        missing = [name for name in wanted if name not in found or not found[name]["complete"]]
        raise BadInput(f"{folder}: cannot be merged: {', '.join(missing) or 'jobs'} not complete; run these jobs first")
    first, *others = (found[name] for name in wanted)
    tally = Counter(first["counts"]["train"])
    for other in others:
        for name in ("identity", "revision", "tokenizer", "files", "train_begins"):
            if other[name] != first[name]:
                raise BadInput(f"{folder}: the jobs disagree about {name}; delete the folder and prepare it again")
        first["splits"]["train"] += other["splits"]["train"]
        tally.update(other["counts"]["train"])
    first["counts"]["train"] = dict(tally)
    first["splits"]["train"].sort(key=lambda row: row["file"])
    finish(folder, first)
    tokens = sum(row["tokens"] for row in first["splits"]["train"])
    log.info(f"merged {count} jobs: {tokens:,} train tokens")


def open_parts(source: sources.FoundSource, pinned: str | None) -> tuple[str | None, dict[str, list[sources.Part]]]:
    """Return the pinned commit (None for files) and the parts of each split."""
    if source.tables is None:
        assert source.parts is not None  # a source has one of the two
        return None, source.parts
    from pretrain.data import stream  # imports datasets, which text does not need

    return stream.open_tables(**source.tables, pinned=pinned)


def open_tokenizer(folder: Path, recipe: keys.Recipe, parts: dict[str, list[sources.Part]]) -> PreTrainedTokenizerFast:
    """Return the folder's tokenizer: the one that is there, or trained on the train split, or loaded; and kept there."""
    path = folder / "tokenizer"
    if not path.is_dir():
        if recipe.data.tokenizer == "bpe":
            tokenizer = tokenization.train_bpe(first_texts(parts["train"]), recipe.data.tokenizer_vocab_size)
        elif recipe.data.tokenizer == "characters":
            every = chain.from_iterable(read(0) for found in parts.values() for _, read in found)
            tokenizer = tokenization.make_characters(well_formed(text or "") for text, _ in every)
        else:
            tokenizer = tokenization.load(recipe.data.tokenizer)
        with files.making(path) as temporary:
            tokenization.save(tokenizer, temporary)
    return tokenization.load(str(path))


def first_texts(parts: list[sources.Part]) -> Iterator[str]:
    """Yield the first texts of a split, as many as a bpe is trained on."""
    left = BPE_SAMPLE_CHARACTERS
    for text, _ in chain.from_iterable(read(0) for _, read in parts):
        if left <= 0:
            return
        left -= len(text or "")
        yield well_formed(text or "")


def well_formed(text: str) -> str:
    """Replace each half of a surrogate pair, which JSON can carry and UTF-8 cannot, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Encoder:
    """Rows to ids, on all cores that training leaves, in order.

    Attributes:
        bytes_per_token: (vocabulary,) int64, bytes of text that each id stands for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, pace: "Pace | None"):
        self.bytes_per_token = tokenization.token_bytes(tokenizer)
        self._encode = tokenization.make_encoder(tokenizer)
        self._name, self._end_of_text = name, np.array([tokenizer.eos_token_id], dtype=np.uint32)
        self._prefix = int(tokenization.marks_spaces(tokenizer))  # bytes that it may set before a text
        # A long text comes in pieces that end where GPT-2's pattern does; another tokenizer gets the whole.
        self._takes_pieces = name in keys.TRAINED_TOKENIZERS or self._encode.name == "tiktoken"
        trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if pace else 0
        self.threads = max(1, len(os.sched_getaffinity(0)) - trainers)

    def __call__(self, rows: Iterator[sources.Row], first_row: int) -> Iterator[Document]:
        """Yield each row's Document, in order. Raises BadInput for a tokenizer that changes the text."""
        numbered: Iterator[tuple[int, str | None, bool]] = (
            (number, text, begins) for number, (text, begins) in enumerate(rows, first_row)
        )
        if not self._takes_pieces:
            numbered = whole_documents(numbered)
        with ThreadPoolExecutor(self.threads) as pool:
            waiting = deque()
            for batch in batched(numbered, BATCH_CHARACTERS):
                waiting.append(pool.submit(self._documents, batch))
                if len(waiting) > 2 * self.threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def _documents(self, batch: list[tuple[int, str | None, bool]]) -> list[Document]:
        texts, sizes, replaced = [], 0, set()
        for number, text, _ in batch:
            if text is None:
                continue
            try:
                size = len(text.encode("utf-8"))
            except UnicodeEncodeError:
                text = well_formed(text)
                size = len(text.encode("utf-8"))
                replaced.add(number)
            texts.append(text)
            sizes += size
        encodings = iter(self._encode(texts))
        documents, found = [], 0
        for number, text, begins in batch:
            ids = np.empty(0, dtype=np.uint32) if text is None else next(encodings)
            text_bytes = int(self.bytes_per_token[ids].sum())
            found += text_bytes
            counts = {"documents": int(begins and text is not None), "without_text": int(text is None)}
            counts["surrogates_replaced"] = int(number in replaced)
            if begins and text is not None:
                ids = np.concatenate([self._end_of_text, ids])
            documents.append(Document(number, ids, text_bytes, counts))
        if not 0 <= found - sizes <= self._prefix * len(texts):
            raise BadInput(
                f"tokenizer = {self._name}: its ids stand for {found} bytes where the text has {sizes}: it changes the "
                f"text, so bits per byte would be wrong. Use a byte-level one"
            )
        return documents


def whole_documents(rows: Iterable[tuple[int, str | None, bool]]) -> Iterator[tuple[int, str | None, bool]]:
    """Join the pieces of each document; it has the number of its first row."""
    held: list[str] = []
    first = 0
    for number, text, begins in rows:
        if held and (begins or text is None):
            yield first, "".join(held), True
            held = []
        if text is None:
            yield number, None, True
            continue
        first = number if not held else first
        held.append(text)
    if held:
        yield first, "".join(held), True


def batched(rows: Iterable[tuple], characters: int) -> Iterator[list[tuple]]:
    """Group rows so that each group holds about this many characters."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row[1] or "") + 1
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Pace:
    """What train.py says on standard input: how many windows it will soon need. It ends this process by closing it."""

    def __init__(self, recipe: keys.Recipe, shard_tokens: int):
        self.sequence_length, self.bounded = recipe.model.sequence_length, recipe.data.stream_keep == "consumed"
        self.ahead = AHEAD_SHARDS * shard_tokens // recipe.model.sequence_length
        self._wanted, self._changed = 0, threading.Condition()
        os.nice(10)  # the trainer goes first where they share cores
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self._wanted = int(line)
                self._changed.notify()
        os._exit(1)  # the trainer is gone; the next one goes on from the manifest

    def wait(self, rows: list[dict]) -> None:
        """With stream_keep = consumed, return when the trainer has come near the last of these shards."""
        windows = sum(max(0, row["tokens"] - 1) // self.sequence_length for row in rows)
        with self._changed:
            while self.bounded and windows >= self._wanted + self.ahead:
                self._changed.wait()


class Progress:
    """What the user sees: a bar on a terminal, a line now and then without one, a line a shard when train.py follows."""

    def __init__(self, pace: Pace | None):
        self.pace, self._bar, self._started = pace, None, time.perf_counter()

    def begin(
        self, manifest: dict, source: sources.FoundSource, parts: list[sources.Part], limit_tokens: int, job: Job
    ) -> None:
        """Begin where an earlier process has ended."""
        self._started = self._shown = time.perf_counter()
        rows = manifest["splits"]["train"]
        self._tokens, self._limit = sum(row["tokens"] for row in rows), limit_tokens
        self._documents = manifest["counts"]["train"].get("documents", 0)
        self._bytes = self._bytes_before = sum(row["text_bytes"] for row in rows)
        if self.pace:
            self.pace.wait(rows)
            return
        self._total = expected_text_bytes(source, parts) / job.count
        if sys.stderr.isatty():
            self._bar = tqdm(total=self._total, initial=self._bytes, unit="B", unit_scale=True, dynamic_ncols=True)

    def count(self, document: Document) -> None:
        """Note a document; show it now and then."""
        self._documents += document.counts["documents"]
        self._tokens += len(document.ids)
        self._bytes += document.text_bytes
        now = time.perf_counter()
        if self.pace or now - self._shown < (SHOW_SECONDS if self._bar is not None else SHOW_LINE_SECONDS):
            return
        self._shown = now
        total = self._total
        if self._limit:
            total = min(total, self._limit * self._bytes / max(1, self._tokens))
        if self._bar is not None:
            self._bar.total = max(total, self._bytes)
            self._bar.set_postfix_str(f"{self._documents:,} documents, {self._tokens:,} tokens", refresh=False)
            self._bar.update(self._bytes - self._bar.n)
            return
        speed = (self._bytes - self._bytes_before) / (now - self._started)
        left = f", about {max(0.0, total - self._bytes) / speed / 60:.1f} min left" if total else ""
        log.info(f"{self._documents:,} documents, {self._tokens:,} tokens, {speed / 1e6:.1f} MB/s{left}")

    def shard(self, rows: list[dict]) -> None:
        """Note a finished shard; wait here when the trainer is far behind and shards are kept few."""
        if not self.pace:
            return
        if (now := time.perf_counter()) - self._shown > SHOW_LINE_SECONDS or len(rows) == 1:
            self._shown = now
            tokens, speed = (
                sum(row["tokens"] for row in rows),
                (self._bytes - self._bytes_before) / (now - self._started),
            )
            log.info(f"{tokens:,} train tokens are ready ({speed / 1e6:.3g} MB/s of text)")
        self.pace.wait(rows)

    def end(self, manifest: dict) -> None:
        """Log what there is now."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for split, rows in manifest["splits"].items():
            tokens, text_bytes = sum(row["tokens"] for row in rows), sum(row["text_bytes"] for row in rows)
            counts = ", ".join(f"{n:,} {name}" for name, n in manifest["counts"].get(split, {}).items() if n)
            if tokens:
                log.info(
                    f"{split}: {tokens:,} tokens, {text_bytes / 1e6:.2f} MB, {text_bytes / tokens:.2f} bytes per token; "
                    f"{counts.replace('_', ' ')}"
                )
        log.info(f"prepared in {time.perf_counter() - self._started:.1f} s")


def expected_text_bytes(source: sources.FoundSource, parts: list[sources.Part]) -> float:
    """Return about how many bytes of text the train split has; 0 where that cannot be told."""
    if source.tables is None:
        return source.most_tokens or 0.0
    from pretrain.data import stream

    return stream.expected_text_bytes([name for name, _ in parts], source.tables["text_column"])


def dry_run(source: sources.FoundSource, recipe: keys.Recipe) -> None:
    """Encode text for some seconds and print what all of it would take. Nothing is kept."""
    _, parts = open_parts(source, None)
    if recipe.data.tokenizer in keys.TRAINED_TOKENIZERS:
        size = recipe.data.tokenizer_vocab_size if recipe.data.tokenizer == "bpe" else 257  # bytes for characters
        tokenizer = tokenization.train_bpe(islice(first_texts(parts["train"]), 1000), size)
    else:
        tokenizer = tokenization.load(recipe.data.tokenizer)
    encode = Encoder(tokenizer, recipe.data.tokenizer, None)
    expected = expected_text_bytes(source, parts["train"])
    started, tokens, text_bytes = time.perf_counter(), 0, 0
    for document in chain.from_iterable(encode(read(0), 0) for _, read in parts["train"]):
        tokens, text_bytes = tokens + len(document.ids), text_bytes + document.text_bytes
        if (seconds := time.perf_counter() - started) > DRY_RUN_SECONDS:
            break
    if not text_bytes:
        raise BadInput(f"{source.name}: no text in its first rows")
    total = max(expected, text_bytes) * tokens / text_bytes
    if limit := source.identity["limit_tokens"]:
        total = min(total, limit)
    itemsize = 2 if len(tokenizer) <= 2**16 else 4
    print(
        f"{source.name}: {len(parts['train'])} file(s), about {max(expected, text_bytes) / 1e6:,.1f} MB of text, "
        f"{total:,.0f} tokens (estimated)\n"
        f"{source.folder}: {total * itemsize / 1e6:,.3f} MB on disk (estimated: {itemsize} bytes a token)\n"
        f"{total / tokens * seconds:,.1f} s at {text_bytes / seconds / 1e6:.1f} MB/s of text, "
        f"{tokens / seconds:,.0f} tokens/s (measured for {seconds:.0f} s with {encode.threads} thread(s), reading included)"
    )


def verify(folder: Path, vocab_size: int) -> int:
    """Read every byte of a folder of shards and print that it is whole. Raises BadInput with every fault."""
    manifest = shards.describe_folder(folder)
    rows = [row for found in manifest["splits"].values() for row in found]
    shards.verify(folder, rows)
    if manifest["tokenizer"]:
        vocab_size = manifest["tokenizer"]["size"]
    ids = Windows(1, vocab_size)
    for row in rows:
        ids.append(folder / row["file"], row["tokens"], *shards.open_ids(folder / row["file"]))
    ids.check_ids()
    hashed = "sizes, hashes" if manifest["tokenizer"] else "sizes (there are no hashes to compare with)"
    state = "" if manifest["complete"] else "; its preparation is not finished"
    print(f"{folder}: {len(rows)} shards, {ids.num_tokens:,} tokens are whole: {hashed}, ids below {vocab_size}{state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
