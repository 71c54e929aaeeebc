"""Documents to a folder of token shards: in one process or in jobs, from where a killed one was, the same bytes always."""

import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.data import shards, tokenization
from pretrain.data.documents import BATCH_CHARACTERS, Document, DocumentEncoder, well_formed
from pretrain.data.progress import PrefetchTarget, Progress, log_amounts
from pretrain.data.remote import shown_name
from pretrain.data.sources import STDLIB, FoundSource, Part, find_source
from pretrain.recipe import keys
from pretrain.recipe.rules import counted

log = logging.getLogger(__name__)

BPE_SAMPLE_CHARACTERS = 100_000_000  # the beginning of the train split, on which a bpe is trained
DRY_RUN_SECONDS = 10
CORE_SECONDS = 1.0  # for which an estimate encodes


@dataclass(frozen=True)
class Job:
    """One of ``count`` processes that share a source: it prepares each file whose number is ``index`` modulo count."""

    index: int = 0
    count: int = 1

    @property
    def manifest(self) -> str:
        """The file in which it keeps where it is."""
        return f"manifest{self._suffix}.json"

    @property
    def lock(self) -> str:
        """The file that it holds."""
        return f".lock{self._suffix}"

    @property
    def _suffix(self) -> str:
        return "" if self.count == 1 else f".job-{self.index:05d}-of-{self.count:05d}"


@dataclass(frozen=True)
class Opened:
    """A source that is open.

    Attributes:
        parts: of each split.
        about: what a manifest says of it: commit, tokenizer, and versions, which are filled in while reading.
    """

    source: FoundSource
    parts: dict[str, list[Part]]
    encode: DocumentEncoder
    about: dict

    def write(
        self, split: str, place: dict[str, int], rows: list[dict], limit: int, folder: Path, job: Job = Job()
    ) -> Iterator[tuple[dict | None, dict[str, int], Document | None]]:
        """Write a split's shards into a folder; a split without parts takes its documents from the train split's.

        Args:
            place: where to begin: part, row, and how many ids from there on are left out.
            rows: of the split's shards that are there; the caller adds those that are yielded.
            limit: end with the document that reaches so many tokens, of ``rows`` too; 0: with the last part.
            job: whose parts are written.

        Yields the row of each shard that is full and where the next one begins; each document that is written to its
        end; and, where a part ends, the row of the shard that is not full, if any. A shard never holds text of two parts.
        """
        parts, done = self.parts.get(split, self.parts["train"]), sum(row["tokens"] for row in rows)
        sizes, shard_tokens = self.encode.bytes_per_token, self.source.config.shard_tokens
        for part in range(place["part"], len(parts)):
            if part % job.count != job.index:
                continue
            row, skip = (place["row"], place["token"]) if part == place["part"] else (0, 0)
            if 0 < limit <= done and not skip:  # a document that was begun is brought to its end
                return
            number = sum(shards.part_of(row) == part for row in rows)
            writer = shards.ShardWriter(folder, split, part, number, sizes, shard_tokens)
            current, end, following = -1, 0, {"part": part + 1, "row": 0, "token": 0}
            for document in self.encode(parts[part][1](row), row):
                first = end if document.row == current else 0  # a long text comes in pieces
                current, end = document.row, first + len(document.ids)
                if len(document.ids) < skip:
                    skip -= len(document.ids)
                    continue
                for shard, upto in writer.fill(document.ids, skip):
                    yield shard, {"part": part, "row": current, "token": first + upto}, None
                done, skip = done + len(document.ids) - skip, 0
                yield None, following, document
                if 0 < limit <= done:
                    following = {"part": part, "row": current + 1, "token": 0}
                    break
            yield writer.finish(), following, None


def prepare(source: FoundSource, job: Job, target: PrefetchTarget | None = None) -> None:
    """Write a source's shards from where an earlier process stopped; the manifest is replaced after each.

    ``target``: how far to go, when train.py follows.
    """
    folder, config = source.folder, source.config
    if others := [path for path in _of_jobs(folder) if _count(path) != job.count]:
        remedy = "when all are done, use --merge" if job.count == 1 else f"give --num_jobs {_count(others[0])}"
        raise BadInput(f"{folder} is being prepared in {_count(others[0])} jobs ({others[0].name}); {remedy}")
    if job.count > 1 and config.limit_tokens:
        raise BadInput("limit_tokens counts from the first file on, which no job of several can; use one job")
    manifest = shards.read_manifest(folder, job.manifest)
    opened = open_source(source, manifest, target)
    parts = opened.parts["train"]
    if manifest is None:
        splits, counts, begin = held_out_splits(opened, job)
        manifest = {
            "source": source.name,
            "identity": source.identity,
            **opened.about,
            "files": len(parts),
            "splits": splits | {"train": []},
            "counts": counts | {"train": {}},
            "train_begins": begin,
            "cursor": begin | {"file": file_at(parts, begin["part"])},
            "complete": False,
        }
        files.write_json(folder / job.manifest, manifest)
    elif not manifest["complete"]:
        manifest |= opened.about
        refuse_other_files(folder, manifest, parts)
    begun = time.perf_counter()
    if target:
        target.wait(manifest["splits"]["train"])
    if not manifest["complete"]:
        train_split(opened, job, manifest, target)
    if job.count == 1:
        finish(folder, manifest)
    else:
        files.write_json(folder / job.manifest, manifest | {"complete": True})
        log.info(f"job {job.index} of {job.count} is complete; when all are, join them with --merge")
    log_amounts(manifest)
    log.info(f"prepared in {time.perf_counter() - begun:.1f} s")


def open_source(source: FoundSource, manifest: dict | None, target: PrefetchTarget | None = None) -> Opened:
    """Open what is to be read. Raises BadInput when the folder's tokenizer is not the one that its manifest names."""
    folder, name = source.folder, source.config.tokenizer
    versions = manifest.get("versions", {}) if manifest else {}
    revision, parts = open_parts(source, manifest["revision"] if manifest else None, versions)
    tokenizer = open_tokenizer(source, parts)
    identity = {"name": name, "fingerprint": tokenization.fingerprint(tokenizer), "size": len(tokenizer)}
    if manifest and {**manifest["tokenizer"], "name": name} != identity:  # a local one may have been moved
        raise BadInput(f"{folder / 'tokenizer'} does not match the shards beside it; delete {folder}")
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if target else 0
    encode = DocumentEncoder(tokenizer, name, trainers, ids=source.config.token_column is not None)
    return Opened(source, parts, encode, {"revision": revision, "versions": versions, "tokenizer": identity})


def held_out_splits(opened: Opened, job: Job) -> tuple[dict[str, list[dict]], dict[str, dict], dict[str, int]]:
    """Write every split but train, in one go: training can then begin as soon as its first block is there.

    Without a validation part, the first documents of the train split are it, to ``validation_tokens``.

    Returns: rows and counts by split, and where the train split begins. A job but the first keeps only the last.
    """
    folder, config = opened.source.folder, opened.source.config
    begin = start = {"part": 0, "row": 0, "token": 0}
    if job.index:
        folder /= f".again{job.lock}"  # which repair, too, begins by clearing
        folder.mkdir(exist_ok=True)
    splits, counts = {}, {}
    for split in ("validation", *(name for name in opened.parts if name not in ("validation", "train"))):
        limit = 0 if split in opened.parts else config.validation_tokens
        if job.index and not limit:
            continue
        rows, tally = splits.setdefault(split, []), Counter()
        for shard, following, document in opened.write(split, start, rows, limit, folder):
            rows += [shard] if shard else []
            tally.update(document.counts if document else {})
            begin = following if limit else begin
        counts[split], done = dict(tally), sum(row["tokens"] for row in rows)
        if done < limit:
            key = "token_column" if config.token_column else "text_column"
            column = f"{opened.source.name}: {key} = {getattr(config, key)}"
            raise BadInput(
                f"{column} has {done} tokens in all, fewer than validation_tokens = {limit}; give --{key} with one of "
                f"more text, --validation_tokens {max(1, done // 10)}, or, with data_files, --validation_files"
            )
    if job.index:
        shutil.rmtree(folder)
        return {}, {}, begin
    return splits, counts, begin


def train_split(opened: Opened, job: Job, manifest: dict, target: PrefetchTarget | None) -> None:
    """Write the train split from the manifest's cursor on."""
    source, parts, rows = opened.source, opened.parts["train"], manifest["splits"]["train"]
    tally, folder, limit = Counter(manifest["counts"]["train"]), source.folder, source.config.limit_tokens
    progress = Progress(manifest, 0.0 if target else expected_text_bytes(source, parts) / job.count, limit)
    for shard, following, document in opened.write("train", manifest["cursor"], rows, limit, folder, job):
        if document:
            tally.update(document.counts)
            progress.count(document)
            continue
        # Of the document in which a shard has ended nothing is counted yet.
        rows += [shard] if shard else []
        manifest["counts"]["train"] = dict(tally)
        manifest["cursor"] = following | {"file": file_at(parts, following["part"])}
        files.write_json(folder / job.manifest, manifest)
        if target:  # which is far behind, maybe, and shards are kept few
            target.wait(rows)


def file_at(parts: list[Part], part: int) -> str | None:
    """Return the name of a source's file, as a manifest holds it; None behind the last one."""
    return shown_name(parts[part][0]) if part < len(parts) else None


def refuse_other_files(folder: Path, manifest: dict, parts: list[Part]) -> None:
    """Raise BadInput when files came or went since the manifest's cursor was written: it would be applied to another."""
    cursor, count = manifest["cursor"], manifest["files"]
    now = file_at(parts, cursor["part"])
    if (then := cursor.get("file", now)) != now or count != len(parts):
        raise BadInput(
            f"{folder}: stopped at {then or 'the end'}, file {cursor['part'] + 1} of {count}; the source now has "
            f"{now or 'no file'} there, of {len(parts)}. Give the same files, or, to read these again, delete the folder"
        )


def finish(folder: Path, manifest: dict) -> None:
    """Write the manifest of a folder that is complete: the same whatever stopped on the way, and however many jobs."""
    if not manifest["splits"]["train"]:
        raise BadInput(
            f"{folder}: no train text is left; use a smaller --validation_tokens, or --validation_files with data_files"
        )
    for path in folder.glob(".*.tmp*"):  # of killed processes
        files.remove(path)
    done = ("cursor", "train_begins") if manifest.get("versions") else ("cursor", "train_begins", "versions")
    kept = {name: value for name, value in manifest.items() if name not in done}
    files.write_json(folder / shards.MANIFEST, kept | {"complete": True})


def merge(folder: Path) -> None:
    """Join the manifests of all jobs into the folder's, and delete them.

    Raises BadInput while a job is missing, and where they are not of one source.
    """
    jobs = _of_jobs(folder)
    if not shards.is_complete(folder):
        count = _count(jobs[0]) if jobs else 1
        names = [Job(index, count).manifest for index in range(count)]
        found = {name: shards.read_manifest(folder, name) or {"complete": False} for name in names}
        if missing := [name for name, manifest in found.items() if not manifest["complete"]]:
            raise BadInput(f"{folder}: cannot be merged: {', '.join(missing)} not complete; run these jobs first")
        first, rows, tally = found[names[0]], [], Counter()
        for manifest in found.values():
            same = ("identity", "revision", "tokenizer", "files", "train_begins", "versions")
            unlike = [name for name in same if manifest.get(name) != first.get(name)]
            if unlike:
                raise BadInput(f"{folder}: {unlike[0]} has changed between the jobs; delete the folder and start again")
            rows += manifest["splits"]["train"]
            tally.update(manifest["counts"]["train"])
        first["splits"]["train"], first["counts"]["train"] = sorted(rows, key=lambda row: row["file"]), dict(tally)
        finish(folder, first)
        log.info(f"merged {count} jobs: {sum(row['tokens'] for row in rows):,} train tokens")
    for path in jobs:
        path.with_name(path.stem.replace("manifest", ".lock")).unlink(missing_ok=True)
        path.unlink()


def _of_jobs(folder: Path) -> list[Path]:
    """Return the manifests of the jobs that have begun to prepare a folder, in order."""
    return sorted(folder.glob("manifest.job-*-of-*.json"))


def _count(manifest: Path) -> int:
    return int(manifest.stem.rpartition("-")[2])


def open_parts(source: FoundSource, pinned: str | None, versions: dict) -> tuple[str | None, dict[str, list[Part]]]:
    """Return the pinned commit (None for files) and the parts of each split."""
    if source.parts is not None:
        return None, source.parts
    from pretrain.data import stream  # imports datasets, which text does not need

    return stream.open_tables(source, pinned, versions)


def open_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Return the folder's tokenizer: the one that is there, or trained on the train split, or loaded; and kept there."""
    path, config = source.folder / "tokenizer", source.config
    if not path.is_dir():
        tokenizer = make_tokenizer(source, parts)
        with files.making(path) as temporary:
            tokenizer.save_pretrained(temporary)
    # Of one that we made, the class is known, and AutoTokenizer would import torch.
    made = config.tokenizer in keys.TRAINED_TOKENIZERS
    return PreTrainedTokenizerFast.from_pretrained(path) if made else tokenization.load(str(path))


def make_tokenizer(source: FoundSource, parts: dict[str, list[Part]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a source asks for; nothing is written."""
    config = source.config
    if config.tokenizer == "bpe":
        texts = first_texts(parts["train"])
        return tokenization.train_bpe(texts, config.tokenizer_vocab_size, config.tokenizer_split)
    if config.tokenizer != "characters":
        return tokenization.load(config.tokenizer)
    every = chain.from_iterable(read(0) for found in parts.values() for _, read in found)
    return tokenization.make_characters(well_formed(text or "") for text, _ in every)


def first_texts(parts: list[Part]) -> Iterator[str]:
    """Yield the first texts of a split, as many as a bpe is trained on."""
    left = BPE_SAMPLE_CHARACTERS
    for text, _ in chain.from_iterable(read(0) for _, read in parts):
        if left <= 0:
            return
        left -= len(text or "")
        yield well_formed(text or "")


def expected_text_bytes(source: FoundSource, parts: list[Part]) -> float:
    """Return about how many bytes of text the train split has; 0 where that is not known."""
    if source.most_tokens:
        return source.most_tokens
    if source.config.token_column:
        return 0.0
    from pretrain.data import stream

    return stream.expected_text_bytes([name for name, _ in parts], source.config)


def dry_run(source: FoundSource) -> str:
    """Encode text for some seconds; return what all of it would take, as lines to read. Nothing is kept."""
    if source.config.token_column:
        raise BadInput("--dry_run: measures how fast text is encoded, and token_column holds none; leave it out")
    _, parts = open_parts(source, None, {})
    name, config = source.config.tokenizer, source.config
    if name in keys.TRAINED_TOKENIZERS:
        size = config.tokenizer_vocab_size if name == "bpe" else 257  # characters: at most all bytes
        tokenizer = tokenization.train_bpe(islice(first_texts(parts["train"]), 1000), size, config.tokenizer_split)
    else:
        tokenizer = tokenization.load(name)
    encode = DocumentEncoder(tokenizer, name)
    tokens, text_bytes, seconds = _timed(encode, parts["train"], DRY_RUN_SECONDS)
    if not text_bytes:
        raise BadInput(f"{source.name}: no text in its first rows")
    whole, itemsize = max(expected_text_bytes(source, parts["train"]), text_bytes), 2 if len(tokenizer) <= 2**16 else 4
    total = min(whole * tokens / text_bytes, config.limit_tokens or math.inf)
    held, used = counted(len(parts["train"]), "file", "files"), counted(encode.threads, "thread", "threads")
    lines = (
        f"{source.name}: {held}, about {whole / 1e6:,.1f} MB of text, {total:,.0f} tokens (estimated)",
        f"{source.folder}: {total * itemsize / 1e6:,.3f} MB on disk (estimated: {itemsize} bytes a token)",
        f"{total / tokens * seconds:,.1f} s at {text_bytes / seconds / 1e6:.1f} MB/s of text, "
        f"{tokens / seconds:,.0f} tokens/s (measured for {seconds:.0f} s with {used}, reading included)",
    )
    return "\n".join(lines)


@cache
def text_bytes_per_core() -> float:
    """Return how many bytes of text a core of this machine encodes in a second: Python's own, by a small bpe of it."""
    data = keys.Data(dataset_name=STDLIB, validation_fraction=0.05, tokenizer="bpe", data_seed=0)
    train = (find_source(data).parts or {})["train"]
    encode = DocumentEncoder(tokenization.train_bpe(islice(first_texts(train), 50), 2042), STDLIB)
    encode.threads = 1
    _, text_bytes, seconds = _timed(encode, train, CORE_SECONDS)
    return text_bytes / seconds


def _timed(encode: DocumentEncoder, parts: list[Part], limit: float) -> tuple[int, int, float]:
    """Encode documents for ``limit`` seconds; return tokens, bytes of text, and the seconds that these took.

    Documents come in batches: one that comes too late is not counted, nor the time that its batch took, but for the first.
    """
    started, tokens, text_bytes, seconds = time.perf_counter(), 0, 0, 0.0
    for document in chain.from_iterable(encode(read(0), 0) for _, read in parts):
        now = time.perf_counter() - started
        if now > limit and text_bytes >= BATCH_CHARACTERS:
            break
        tokens, text_bytes, seconds = tokens + len(document.ids), text_bytes + document.text_bytes, now
    return tokens, text_bytes, seconds


def verify(folder: Path, vocab_size: int) -> str:
    """Read every byte of a folder of shards; return a line that it is whole. Raises BadInput with every fault."""
    from pretrain.data.windows import Windows  # imports torch

    manifest = shards.describe_folder(folder)
    rows = [row for found in manifest["splits"].values() for row in found]
    if lines := [line for _, line in shards.faults(folder, rows)]:
        raise BadInput(lines)
    ids = Windows(1, manifest["tokenizer"]["size"] if manifest["tokenizer"] else vocab_size)
    for row in rows:
        ids.append(folder / row["file"], row["tokens"], *shards.open_ids(folder / row["file"]))
    ids.check_ids()
    hashed = "sizes, hashes" if manifest["tokenizer"] else "sizes (there are no hashes to compare with)"
    state = "" if manifest["complete"] else "; its preparation is not finished"
    whole = f"{len(rows)} shards, {ids.num_tokens:,} tokens are whole"
    return f"{folder}: {whole}: {hashed}, ids below {ids.vocab_size}{state}"
