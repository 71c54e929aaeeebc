"""prepare_data.py writes exactly the documents of its sources as shards.

An interrupted preparation, repeated, writes the same bytes.
"""

import contextlib
import gzip
import io
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import RECIPE, TEXT, WORDS, once, run_script, start_script
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import prepare_data
import ursa_minor.data.sources.tables  # noqa: F401  (once, before the forks)
from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation import measure, overlap, progress, shard_folder
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import pretrained_tokenizer, shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import BATCH_CHARACTERS, DocumentEncoder

TINY_RECIPE = ("--recipe", "tiny.yaml")
SMALL_SHARDS = ("--validation_tokens", "300", "--shard_tokens", "400")
THIS_SCRIPT = __file__


@pytest.fixture(autouse=True)
def short_fastokens_check(monkeypatch) -> None:
    """Shorten the comparison of fastokens with the tokenizers library.

    test_tokenizer.py tests the comparison itself.
    """
    monkeypatch.setattr(tokenization, "SAMPLE_TOKENS", 100)
    monkeypatch.setattr(tokenization, "HARD_TEXTS", [])


# ---- prepare_data.py in a process that is killed, or that reads from a pipe


def main(argv: list[str] | None = None) -> int:
    """Prepare data in a fork, as the environment variables specify.

    - KILL_AT=operation:N kills the process before its N-th lasting operation (an id is written,
      a file is synced, renamed or deleted). KILL_AT=shard:N kills it after the N-th shard.
    - STDIN=R,W: the file descriptors of a pipe. Standard input is its reading end.
    - PIECES: the number of bytes of a text file that are read at a time.
    """
    kind, _, number = os.environ.pop("KILL_AT", "").partition(":")
    if kind == "operation":
        kill_before_operation(int(number))
    elif kind == "shard":
        kill_after_shard(int(number))
    pipe = os.environ.pop("STDIN", None)
    if pipe:
        read_standard_input_from(pipe)
    piece_bytes = os.environ.pop("PIECES", None)
    if piece_bytes:
        text_reader.pieces.__defaults__ = (int(piece_bytes),)
    return prepare_data.main(argv)


def read_standard_input_from(pipe: str) -> None:
    """Replace standard input by the reading end of a pipe."""
    read_end, write_end = map(int, pipe.split(","))
    os.close(write_end)
    os.dup2(read_end, 0)
    sys.stdin = os.fdopen(0)


class Countdown:
    """Kills this process with SIGKILL when ``count`` has been called ``number`` times."""

    def __init__(self, number: int):
        self.remaining = number

    def count(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_before_operation(number: int) -> None:
    """Kill this process before its lasting operation of this number."""
    countdown = Countdown(number)
    operations = [
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (shutil, "rmtree"),
        (files, "fsync"),
        (shards.ShardWriter, "fill"),
    ]
    for owner, name in operations:
        setattr(owner, name, count_calls(getattr(owner, name), countdown))


def count_calls(function: Callable, countdown: Countdown) -> Callable:
    """Return the function with a countdown before each call."""

    def counted(*args, **kwargs):
        countdown.count()
        return function(*args, **kwargs)

    return counted


def kill_after_shard(number: int) -> None:
    """Kill this process after the shard of this number."""
    countdown = Countdown(number)
    finish = shards.ShardWriter.finish

    def counted_finish(*args, **kwargs):
        shard = finish(*args, **kwargs)
        if shard is not None:
            countdown.count()
        return shard

    shards.ShardWriter.finish = counted_finish


def is_killed(kill_at: str, *flags: str) -> bool:
    """Prepare in a process with this KILL_AT, and return whether it was killed before its end."""
    flags = (*TINY_RECIPE, *flags)
    result = run_script(THIS_SCRIPT, *flags, expect=None, KILL_AT=kill_at, PIECES="200")
    assert result.returncode in (0, -signal.SIGKILL)
    return result.returncode != 0


# ---- helpers: prepare, and read the shards


def run_prepare(*flags: str, expect: int = 0) -> str:
    """Prepare in this process. Return the output, or the error message if ``expect`` is not 0."""
    output = io.StringIO()
    error = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        status = prepare_data.main(list(once((*TINY_RECIPE, *flags))))
    assert status == expect, error.getvalue()
    if expect:
        return error.getvalue()
    return output.getvalue()


def prepare(*flags: str) -> Path:
    """Prepare in this process and return the folder of the shards."""
    last_line = run_prepare(*flags).strip().splitlines()[-1]
    return Path(last_line)


def read_all_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of every file by its name. The contents of a lock do not count."""
    contents = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name.startswith(".lock"):
            contents[name] = b""
        elif path.is_file():
            contents[name] = path.read_bytes()
    return contents


def prepare_and_remove(*flags: str) -> tuple[Path, dict[str, bytes]]:
    """Prepare without interruption, and remove the folder.

    Returns:
        The folder, and the contents that it had.
    """
    folder = prepare(*flags)
    contents = read_all_files(folder)
    shutil.rmtree(folder)
    return folder, contents


def read_documents(folder: Path, split: str) -> dict[int, list[str]]:
    """Return the documents of a split by source file, and check each shard with the manifest."""
    tokenizer = pretrained_tokenizer.load(str(folder / "tokenizer"))
    bytes_of_token = tokenization.token_bytes(tokenizer)
    ids_by_part: dict[int, list[int]] = {}
    for shard in manifests.read_manifest(folder).splits[split]:
        ids, _ = shards.open_ids(folder / shard.file, shard.tokens)
        text_ids = ids[ids != tokenizer.eos_token_id]
        assert files.sha256(folder / shard.file) == shard.sha256
        assert shard.text_bytes == bytes_of_token[text_ids].sum()
        ids_by_part.setdefault(shard.part, []).extend(ids.tolist())
    return {part: split_into_documents(ids, tokenizer) for part, ids in ids_by_part.items()}


def split_into_documents(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the texts between the end-of-text ids, the first of which is at the start."""
    starts = [index for index, token in enumerate(ids) if token == tokenizer.eos_token_id]
    assert not starts or starts[0] == 0
    bounds = pairwise([*starts, len(ids)])
    return [tokenizer.decode(ids[start + 1 : end]) for start, end in bounds]


def read_counts(folder: Path, split: str = "train") -> dict[str, int]:
    """Return the counts of a split that are not 0."""
    counts = manifests.read_manifest(folder).counts[split]
    return {name: count for name, count in counts.items() if count}


# ---- helpers: documents and source files


def make_texts(number: int, seed: int = 0) -> list[str]:
    """Return different documents of one to sixty words."""
    generator = random.Random(seed)
    documents = []
    for index in range(number):
        words = generator.choices(WORDS, k=generator.randrange(1, 60))
        documents.append(f"{seed} {index} {' '.join(words)}")
    return documents


def write_table(path: Path, rows: list) -> str:
    """Write a Parquet or JSON lines file, compressed if it ends in .gz, and return its path."""
    if path.suffix == ".parquet":
        row_group_size = 7 if len(rows) < 100 else 500
        pq.write_table(pa.table({"text": rows}), path, row_group_size=row_group_size)
        return str(path)
    lines = b"".join(json.dumps({"text": row}).encode() + b"\n" for row in rows)
    if path.suffix == ".gz":
        lines = gzip.compress(lines, mtime=0)
    path.write_bytes(lines)
    return str(path)


def write_tables(kind: str, *sizes: int) -> tuple[list[list[str]], tuple[str, ...]]:
    """Write one file of documents for each size.

    Returns:
        The documents of each file, and the flags that read the files.
    """
    documents = [make_texts(size, seed) for seed, size in enumerate(sizes)]
    paths = [write_table(Path(f"{i}.{kind}"), texts) for i, texts in enumerate(documents)]
    return documents, ("--data_files", *paths)


def split_documents(
    documents: list[list[str]], validation_tokens: int
) -> tuple[list[str], dict[int, list[str]]]:
    """Split documents by the rule: the first ones, up to this many tokens, are for validation.

    A document has one token per character and one more.

    Returns:
        The validation documents, and the train documents by source file.
    """
    validation = []
    train: dict[int, list[str]] = {}
    tokens = 0
    for part, texts in enumerate(documents):
        for text in texts:
            if tokens < validation_tokens:
                validation.append(text)
                tokens += len(text) + 1
            else:
                train.setdefault(part, []).append(text)
    return validation, train


def split_by_lines() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that merges a full stop and the line break after it."""
    trained = tokenization.train_bpe(make_texts(50), 400)
    definition = json.loads(trained.backend_tokenizer.to_str())
    model = definition["model"]
    model["vocab"][".\u010a"] = len(model["vocab"])
    model["merges"].append([".", "\u010a"])
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    """A folder with a byte-level tokenizer, which encodes every text."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenization.train_bpe(make_texts(50), 400).save_pretrained(folder)
    return str(folder)


def write_tables_source() -> tuple[str, ...]:
    """Write three files with short documents."""
    _, flags = write_tables("jsonl", 12, 16, 7)
    return (*flags, *SMALL_SHARDS)


def write_long_documents_source() -> tuple[str, ...]:
    """Write two files whose documents are longer than a shard."""
    _, flags = write_tables("parquet", 7, 9)
    return (*flags, "--validation_tokens", "100", "--shard_tokens", "60")


def write_limited_source() -> tuple[str, ...]:
    """Write three files, of which a limited number of tokens is prepared."""
    _, flags = write_tables("jsonl", 12, 16, 7)
    limits = ("--validation_tokens", "90", "--shard_tokens", "60", "--limit_tokens", "720")
    return (*flags, *limits)


def write_text_source() -> tuple[str, ...]:
    """Write one text file."""
    Path("own.txt").write_text(" ".join(make_texts(200)))
    limits = ("--validation_fraction", "0.1", "--shard_tokens", "900")
    return ("--data_files", "own.txt", *limits)


def write_lines_source() -> tuple[str, ...]:
    """Write two text files and a tokenizer that splits text differently from GPT-2's."""
    for number, size in enumerate((90, 60)):
        Path(f"{number}.txt").write_text(".\n".join(make_texts(size, number)))
    split_by_lines().save_pretrained("lines_tokenizer")
    flags = ("--tokenizer", "lines_tokenizer", "--shard_tokens", "500")
    return ("--data_files", "0.txt", "1.txt", *flags)


# Each function writes the source into the current folder and returns the flags that read it.
SOURCES = {
    "tables": write_tables_source,
    "limit": write_limited_source,
    "long_documents": write_long_documents_source,
    "text": write_text_source,
    "lines": write_lines_source,
}


def parametrize_sources(*fast: str) -> pytest.MarkDecorator:
    """Parametrize a test by the sources. Those that are not named here are slow."""
    values = []
    for name in SOURCES:
        marks = () if name in fast else pytest.mark.slow
        values.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("source", values)


# ---- contents of the shards

FIRST_FILE_TOKENS = sum(len(text) + 1 for text in make_texts(12))


@pytest.mark.parametrize(
    "validation_tokens",
    [300, FIRST_FILE_TOKENS, FIRST_FILE_TOKENS + 1],
    ids=["inside_first_file", "end_of_first_file", "start_of_second_file"],
)
def test_shards_contain_exactly_the_documents(workspace, validation_tokens):
    documents, flags = write_tables("jsonl.gz", 12, 30, 1, 9)
    validation, train = split_documents(documents, validation_tokens)
    limits = ("--validation_tokens", str(validation_tokens), "--shard_tokens", "400")

    folder = prepare(*flags, *limits)

    validation_by_part = read_documents(folder, "validation")
    validation_texts = []
    for part in sorted(validation_by_part):
        validation_texts += validation_by_part[part]
    assert validation_texts == validation
    assert read_documents(folder, "train") == train
    train_documents = sum(len(texts) for texts in train.values())
    assert read_counts(folder) == {"documents": train_documents}
    assert read_counts(folder, "validation") == {"documents": len(validation)}


def test_shards_end_at_file_ends(workspace):
    _, flags = write_tables("jsonl.gz", 12, 30, 1, 9)

    folder = prepare(*flags, *SMALL_SHARDS)

    sizes: dict[int, list[int]] = {}
    for shard in manifests.read_manifest(folder).splits["train"]:
        sizes.setdefault(shard.part, []).append(shard.tokens)
    assert len(sizes) == 4
    for tokens in sizes.values():
        assert set(tokens[:-1]) <= {400}
        assert tokens[-1] <= 400


def prepare_in_pieces(*flags: str) -> Path:
    """Prepare text files in pieces of 200 bytes and return the folder of the shards."""
    run_script(THIS_SCRIPT, *TINY_RECIPE, *flags, PIECES="200")
    (folder,) = Path("data").glob("0-*")
    return folder


def test_text_in_pieces_has_ids_of_whole_text(workspace):
    # Some pieces end between a full stop and a line break, which this tokenizer merges.
    flags = (*write_lines_source(), "--limit_tokens", "3500")

    folder = prepare_in_pieces(*flags)

    ids = []
    for shard in manifests.read_manifest(folder).splits["train"]:
        ids += shards.open_ids(folder / shard.file, shard.tokens)[0].tolist()
    first = Path("0.txt").read_text()
    second = Path("1.txt").read_text()
    train_characters = int(len(first + second) * 0.9)
    tokenizer = pretrained_tokenizer.load("lines_tokenizer")
    encode = tokenization.Encoder(tokenizer)
    expected = []
    for document_ids in encode([first, second[: train_characters - len(first)]]):
        expected += [tokenizer.eos_token_id, *document_ids]
    assert read_counts(folder) == {"documents": 2}
    assert ids == expected[: len(ids)]
    assert 3500 <= len(ids) < 3700


def test_text_in_pieces_is_resumed_bitwise(workspace):
    flags = (*write_lines_source(), "--limit_tokens", "3500")
    folder = prepare_in_pieces(*flags)
    contents = read_all_files(folder)
    shutil.rmtree(folder)
    generator = random.Random(3500)

    kills = 0
    while is_killed(f"operation:{generator.randint(20, 120)}", *flags):
        kills += 1
        assert kills < 60, "the preparation makes no progress"

    assert kills
    assert read_all_files(folder) == contents


SEPARATED = ("--document_separator", "<|endoftext|>", "--shard_tokens", "900")


def write_separated(path: str, documents: list[str]) -> str:
    """Write documents with a separator to a text file, and return its path."""
    Path(path).write_text("\r\n<|endoftext|>\n".join(documents), newline="")
    return path


def test_separated_documents_have_ids_of_json_lines(workspace, bpe):
    train = [*make_texts(90), "long words " * 1000]
    validation = make_texts(9, 1)
    text_files = (write_separated("0.txt", train), write_separated("v.txt", validation))
    tables = (write_table(Path("0.jsonl"), train), write_table(Path("v.jsonl"), validation))
    shard_files = []

    for train_file, validation_file in (text_files, tables):
        flags = ("--data_files", train_file, "--validation_files", validation_file)
        separator = SEPARATED if train_file == "0.txt" else SEPARATED[2:]
        folder = prepare(*flags, "--tokenizer", bpe, *separator)
        shard_files.append({path.name: path.read_bytes() for path in folder.glob("*.bin")})

    of_text, of_tables = shard_files
    assert of_text == of_tables
    assert len(of_text) > 3


def write_repeated_text() -> tuple[str, ...]:
    """Write a text file whose last two documents are repetitions of earlier ones."""
    documents = make_texts(98)
    path = write_separated("0.txt", [*documents, documents[2], documents[50]])
    return ("--data_files", path, *SEPARATED)


def write_repeated_tables() -> tuple[str, ...]:
    """Write two tables. 2 of the 10 documents for validation are also in the other table."""
    documents = make_texts(98)
    validation = [*documents[:8], documents[12], documents[97]]
    train_file = write_table(Path("0.jsonl"), documents[8:])
    validation_file = write_table(Path("v.jsonl"), validation)
    files = ("--data_files", train_file, "--validation_files", validation_file)
    return (*files, "--shard_tokens", "900")


@pytest.mark.parametrize("write", [write_repeated_text, write_repeated_tables])
def test_repeated_documents_are_noted_despite_kills(workspace, write):
    flags = write()
    folder, contents = prepare_and_remove(*flags)
    generator = random.Random(0)

    kills = 0
    while is_killed(f"operation:{generator.randint(15, 70)}", *flags):
        kills += 1
        assert kills < 60, "the preparation makes no progress"

    assert kills >= 2
    assert read_all_files(folder) == contents
    manifest = manifests.read_manifest(folder)
    assert manifest.counts["validation"]["also_in_train"] == 2
    assert "2 of the " in manifests.overlap_note(manifest)


def test_repeated_documents_are_noted_at_every_start(workspace, monkeypatch):
    flags = write_repeated_tables()
    run_prepare(*flags)
    warnings = []
    monkeypatch.setattr(shard_folder.log, "warning", warnings.append)

    run_prepare(*flags)

    (note,) = warnings
    assert "2 of the " in note


def test_special_characters_are_kept(workspace, bpe, monkeypatch):
    monkeypatch.setattr("ursa_minor.data.tokens.encoder.BATCH_CHARACTERS", 2000)
    validation = "first " * 100
    long = " ".join(random.Random(1).choices(WORDS, k=5000))
    unchanged = ["NUL \0 in it", "a <|endoftext|> b", long, "é \u2028 \U0001f600 \r\n end", "last"]
    without_text = ["", " \n\t", None]
    lone_surrogates = ["half \ud83d", "\udc00\ud800"]
    rows = [validation, *without_text, *unchanged, *lone_surrogates]
    path = write_table(Path("odd.jsonl"), rows)

    folder = prepare("--data_files", path, "--tokenizer", bpe, "--validation_tokens", "10")

    assert read_documents(folder, "validation") == {0: [validation]}
    assert read_documents(folder, "train") == {0: [*unchanged, "half \ufffd", "\ufffd\ufffd"]}
    contents = ["empty values", "white space", "null"]
    expected = {"documents": 7, "without_text": 3, "surrogates_replaced": 2}
    expected |= {f"without_text: {name}": 1 for name in contents}
    assert read_counts(folder) == expected


@pytest.mark.parametrize("limit", [1, 400, 3000])
def test_limit_tokens_ends_after_a_document(workspace, limit):
    documents, flags = write_tables("parquet", 12, 30, 9)
    validation, train = split_documents(documents, 300)

    folder = prepare(*flags, *SMALL_SHARDS, "--limit_tokens", str(limit))

    prepared = read_documents(folder, "train")
    texts = []
    for part in prepared:
        texts += prepared[part]
        assert prepared[part] == train[part][: len(prepared[part])]
    expected = []
    for part in train:
        expected += train[part]
    assert texts == expected[: len(texts)]
    last_tokens = len(texts[-1]) + 1
    tokens = sum(len(text) + 1 for text in texts)
    assert tokens - last_tokens < limit <= tokens
    assert read_counts(folder) == {"documents": len(texts)}
    assert read_documents(folder, "validation") == {0: validation}


def test_mixture_is_prepared_source_by_source(workspace, bpe):
    sources = []
    for number in range(2):
        path = write_table(Path(f"{number}.jsonl"), make_texts(9, number))
        sources.append({"weight": number + 1, "data_files": [path]})
    recipe = RECIPE.replace("tokenizer: characters", f"tokenizer: {bpe}")
    own_keys = f"sources: {json.dumps(sources)}\nvalidation_tokens: 30\n"
    Path("tiny.yaml").write_text(recipe + own_keys)

    second_folder = run_prepare("--source", "1").strip()
    folders = run_prepare().split()

    assert len(folders) == 2
    assert folders[1] == second_folder
    for number, folder in enumerate(folders):
        (validation,) = read_documents(Path(folder), "validation").values()
        (train,) = read_documents(Path(folder), "train").values()
        assert validation + train == make_texts(9, number)
    assert "has 2 sources" in run_prepare("--source", "2", expect=2)


# ---- interrupted preparations and damaged shards


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
@parametrize_sources("tables", "limit")
def test_repeatedly_killed_preparation_writes_same_bytes(workspace, source, seed):
    flags = SOURCES[source]()
    folder, contents = prepare_and_remove(*flags)
    generator = random.Random(f"{source} {seed}")
    last_operation = 100 if source in ("text", "lines") else 50

    kills = 0
    while is_killed(f"operation:{generator.randint(8, last_operation)}", *flags):
        kills += 1
        assert kills < 60, "the preparation makes no progress"

    assert kills >= 2
    assert without_hashes(read_all_files(folder)) == without_hashes(contents)


def without_hashes(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without the hashes of the validation documents.

    They depend on the size of the pieces of a text file, which differs between the processes here.
    """
    return {name: data for name, data in contents.items() if name != overlap.FILE_NAME}


def damage(path: Path, kind: int) -> None:
    """Delete a shard (0), truncate it (1), or change its last byte but not its time (2)."""
    if kind == 0:
        path.unlink()
    elif kind == 1:
        os.truncate(path, path.stat().st_size - 2)
    else:
        status = path.stat()
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def modification_times(folder: Path, names: list[str]) -> dict[str, int]:
    """Return the modification time of each file in ns."""
    return {name: (folder / name).stat().st_mtime_ns for name in names}


def damage_some_shards(folder: Path, names: list[str], number: int | None) -> set[str]:
    """Damage this many shards (all if None), each in another way, and return their names."""
    generator = random.Random(f"{folder.name} {number}")
    damaged = generator.sample(sorted(names), number or len(names))
    for index, name in enumerate(damaged):
        damage(folder / name, index % 3)
    return set(damaged)


@pytest.mark.parametrize("is_interrupted", [True, False], ids=["interrupted", "complete"])
@pytest.mark.parametrize(
    "number",
    [
        3,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(None, marks=pytest.mark.slow, id="all"),
    ],
)
@parametrize_sources("tables")
def test_only_damaged_shards_are_written_again(
    workspace, monkeypatch, source, number, is_interrupted
):
    flags = SOURCES[source]()
    folder, contents = prepare_and_remove(*flags)
    kill_at = "shard:6" if is_interrupted else "operation:999"
    assert is_killed(kill_at, *flags) == is_interrupted
    names = [shard.file for shard in manifests.read_manifest(folder).shards]
    times = modification_times(folder, names)
    damaged = damage_some_shards(folder, names, number)
    if number == 3:
        operation = random.Random(f"{source} {kill_at}").randint(2, 4)
        assert is_killed(f"operation:{operation}", *flags)
    monkeypatch.setattr(text_reader.pieces, "__defaults__", (200,))

    prepare(*flags)

    assert without_hashes(read_all_files(folder)) == without_hashes(contents)
    new_times = modification_times(folder, names)
    rewritten = {name for name in names if times[name] != new_times[name]}
    assert rewritten <= damaged
    # A shard that is newer than the manifest would be hashed at each start.
    manifest_time = (folder / "manifest.json").stat().st_mtime_ns
    assert max(new_times.values()) <= manifest_time


@pytest.fixture
def consumed_shards(workspace) -> tuple[Path, tuple[str, ...]]:
    """A folder whose first train shard was consumed and deleted, and the flags that made it."""
    path = write_table(Path("0.jsonl"), make_texts(30))
    flags = ("--data_files", path, *SMALL_SHARDS, "--stream_keep", "consumed")
    folder = prepare(*flags)
    (folder / "train_00000_00000.bin").unlink()
    return folder, flags


def test_consumed_shard_is_not_written_again(consumed_shards):
    folder, flags = consumed_shards
    damage(folder / "train_00000_00001.bin", 2)

    prepare(*flags)

    first, *others = manifests.read_manifest(folder).splits["train"]
    assert not (folder / first.file).exists()
    assert not list(manifests.find_problems(folder, others))


def test_complete_folder_needs_no_source(consumed_shards):
    folder, flags = consumed_shards
    source = Path("0.jsonl")
    status = source.stat()
    write_table(source, make_texts(30)[::-1])
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))

    # The source has the same size and time, so it counts as unchanged.
    prepare(*flags)
    shard = folder / manifests.read_manifest(folder).splits["train"][2].file
    shard.write_bytes(b"")
    error = run_prepare(*flags, expect=2)

    assert f"{shard} is missing or damaged" in error
    assert f"or delete {folder}" in error


def test_tokenizer_changed_after_a_kill_is_rejected(workspace):
    flags = write_tables_source()
    assert is_killed("shard:6", *flags)
    (path,) = Path("data").glob("0-*/tokenizer/tokenizer.json")
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    reversed_ids = {text: len(vocabulary) - number for text, number in vocabulary.items()}
    tokenizer["model"]["vocab"] = reversed_ids
    path.write_text(json.dumps(tokenizer))

    error = run_prepare(*flags, expect=2)

    assert "is not the tokenizer that the shards in this folder were encoded with" in error


# ---- too little text


def test_too_little_text_suggests_validation_tokens(workspace):
    _, flags = write_tables("jsonl", 9)

    error = run_prepare(*flags, "--validation_tokens", "100000", expect=2)

    assert re.search(r"text_column = text has \d+ tokens in total", error)
    suggestion = re.search(r"--validation_tokens (\d+), ", error).group(1)
    folder = prepare(*flags, "--validation_tokens", suggestion)
    assert read_documents(folder, "train")


def test_empty_train_split_is_rejected(workspace):
    ((*texts,),), flags = write_tables("jsonl", 9)
    tokens = sum(len(text) + 1 for text in texts)

    error = run_prepare(*flags, "--validation_tokens", str(tokens), expect=2)

    assert "the train split is empty" in error


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_source_without_text_is_rejected(workspace, tokenizer):
    path = write_table(Path("a.jsonl"), [None, "", " "])

    error = run_prepare("--data_files", path, "--tokenizer", tokenizer, expect=2)

    assert error.count("error: ") == 1
    assert "column text_column = text has 0 tokens" in error


def test_rows_without_text_are_described_at_every_start(workspace, monkeypatch):
    warnings = []
    monkeypatch.setattr(progress.log, "warning", warnings.append)
    rows = [
        {"content" if number % 4 == 3 else "text": f"{number} {TEXT[:500]}"} for number in range(40)
    ]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--data_files", "a.jsonl", "--validation_tokens", "300")

    run_prepare(*flags)
    run_prepare(*flags)
    estimate = run_prepare(*flags, "--dry_run")

    first_warning, second_warning = warnings
    assert "25.0% of the rows (10 of 40)" in first_warning
    assert "other fields: content (10)" in first_warning
    assert second_warning == first_warning
    assert "25.0% of the rows" in estimate


# ---- --dry_run and --verify


def write_dry_run_source(kind: str) -> tuple[str, ...]:
    """Write 2,000 similar documents, so that a part of them is representative."""
    texts = make_texts(2000)
    if kind == "txt":
        Path("0.txt").write_text(" ".join(texts))
        return ("--data_files", "0.txt", "--tokenizer", "characters")
    paths = [
        write_table(Path("0.parquet"), texts[:1200]),
        write_table(Path("1.parquet"), texts[1200:]),
    ]
    tokenizer = ("--tokenizer", "bpe", "--tokenizer_vocab_size", "300")
    return ("--data_files", *paths, "--validation_tokens", "300", *tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "txt"])
def test_dry_run_estimates_without_writing_files(workspace, monkeypatch, kind):
    monkeypatch.setattr(measure, "DRY_RUN_SECONDS", 0.05)
    shutil.rmtree("data")
    flags = write_dry_run_source(kind)
    files_before = set(Path().rglob("*"))

    output = run_prepare(*flags, "--dry_run")
    limited_output = run_prepare(*flags, "--dry_run", "--limit_tokens", "5000")

    assert set(Path().rglob("*")) == files_before
    assert " 5,000 tokens (estimated)" in limited_output
    tokens = re.search(r"([\d,]+) tokens \(estimated\)", output).group(1)
    megabytes = re.search(r"([\d.,]+) MB on disk \(estimated", output).group(1)
    speed = (
        r"[\d.,]+ s at [\d.]+ MB/s of text, [\d,]+ tokens/s \(measured for \d+ s with \d+ thread"
    )
    assert re.search(speed, output)
    folder = prepare(*flags)
    assert f"{folder}: " in output
    prepared_tokens = shards.count_tokens(manifests.read_manifest(folder).shards)
    estimated_bytes = float(megabytes.replace(",", "")) * 1e6
    assert int(tokens.replace(",", "")) == pytest.approx(prepared_tokens, rel=0.2)
    assert estimated_bytes / 2 == pytest.approx(prepared_tokens, rel=0.2)


def write_shards_of_llm_c(folder: Path) -> None:
    """Write 70 tokens with the file names of llm.c, as NumPy files."""
    folder.mkdir()
    np.save(folder / "fineweb_train_000001.npy", np.arange(50, dtype="<u2"))
    np.save(folder / "fineweb_val_000000.npy", np.arange(20, dtype="<u2"))


def write_shards_of_nano_gpt(folder: Path) -> None:
    """Write 120 tokens with the file names of nanoGPT."""
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(60, dtype="<u2").tofile(folder / name)


def test_shards_of_other_tools_are_verified(tmp_path):
    write_shards_of_llm_c(tmp_path / "llm_c")
    write_shards_of_nano_gpt(tmp_path / "nano_gpt")

    llm_c = measure.verify(tmp_path / "llm_c", 64)
    nano_gpt = measure.verify(tmp_path / "nano_gpt", 64)

    checked = "are intact (checked: sizes (the folder has no"
    assert f"llm_c: 2 shards with 70 tokens {checked}" in llm_c
    assert f"nano_gpt: 2 shards with 120 tokens {checked}" in nano_gpt


def test_id_beyond_vocabulary_fails_verification(tmp_path):
    write_shards_of_llm_c(tmp_path / "llm_c")

    with pytest.raises(BadInput, match=r"has the id \d+"):
        measure.verify(tmp_path / "llm_c", 5)


@pytest.mark.parametrize("form", ["separate", "joined"])
def test_folder_is_verified_from_another_folder(
    prepared_folder, tmp_path, monkeypatch, capsys, form
):
    (folder,) = prepared_folder.glob("data/text-*")
    tokens = shards.count_tokens(manifests.read_manifest(folder).shards)
    monkeypatch.chdir(tmp_path)
    flags = ["--verify", str(folder)] if form == "separate" else [f"--verify={folder}"]

    assert prepare_data.main(flags) == 0

    output = capsys.readouterr().out
    assert f"{tokens:,} tokens are intact (checked: sizes, hashes" in output


def test_preparation_needs_no_length_of_run():
    flags = {"recipe": "recipes/own_text.yaml", "dataset_name": "foo/bar"}

    recipe = prepare_data.load_recipe(flags, serves_training=False)

    assert recipe.schedule.num_train_epochs == 10
    assert recipe.data.dataset_name == "foo/bar"


def test_verify_with_missing_recipe_is_rejected(prepared_folder, tmp_path, monkeypatch):
    (folder,) = prepared_folder.glob("data/text-*")
    monkeypatch.chdir(tmp_path)

    assert "no such recipe" in run_prepare("--verify", str(folder), expect=2)


# ---- --follow: prepare a few shards ahead of train.py


class Follower:
    """prepare_data.py --follow in a fork, with a pipe as its standard input."""

    def __init__(self, *flags: str):
        read_end, self.write_end = os.pipe()
        environment = {"STDIN": f"{read_end},{self.write_end}"}
        arguments = (*TINY_RECIPE, *flags, "--follow")
        self.pid, self.output, self.errors = start_script(THIS_SCRIPT, arguments, environment)
        os.close(read_end)
        self.request(0)  # before the first request it only imports

    def request(self, windows: int) -> None:
        """Request shards for windows up to this number, as train.py does."""
        os.write(self.write_end, f"{windows}\n".encode())

    def close_pipe(self) -> None:
        """Close the pipe, as the end of train.py does."""
        os.close(self.write_end)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def wait_for_shards(self, number: int) -> None:
        """Wait until this many train shards exist, and check that no other one follows."""
        for _ in range(3000):
            if count_train_shards() >= number:
                break
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            assert not ended, (status, Path(self.errors).read_text())
            select.select([], [], [], 0.01)
        select.select([], [], [], 0.3)
        assert count_train_shards() == number


def count_train_shards() -> int:
    """Return the number of train shards in the only manifest, 0 if none exists."""
    for path in Path("data").glob("*/manifest.json"):
        return len(json.loads(path.read_text())["splits"]["train"])
    return 0


@pytest.fixture
def follower_flags(workspace) -> tuple[str, ...]:
    """The flags of a source whose shards contain 799 // 16 = 49 windows each."""
    shutil.rmtree("data")
    _, flags = write_tables("jsonl", 120)
    return (*flags, "--validation_tokens", "100", "--shard_tokens", "800")


def test_follower_prepares_two_shards_ahead(follower_flags):
    # Two shards ahead are 100 windows, which end in the third shard.
    follower = Follower(*follower_flags, "--stream_keep", "consumed")
    follower.wait_for_shards(3)

    busy_error = run_prepare(*follower_flags, expect=75)
    for windows, number in ((48, 3), (100, 5), (300, 9)):
        follower.request(windows)
        follower.wait_for_shards(number)
    follower.close_pipe()
    status = follower.wait()

    assert f"is being prepared by process {follower.pid}. Wait" in busy_error
    assert status not in (0, 2, 75)
    (folder,) = Path("data").iterdir()
    manifest = manifests.read_manifest(folder)
    names = {shard.file for shard in manifest.splits["train"]}
    assert len(names) == 9
    assert {path.name for path in folder.glob("train_*")} == names
    assert not manifest.complete


def test_follower_that_keeps_shards_prepares_all(follower_flags):
    folder, contents = prepare_and_remove(*follower_flags)

    follower = Follower(*follower_flags)
    status = follower.wait()

    follower.close_pipe()
    assert status == 0
    assert read_all_files(folder) == contents
    assert "prepared in" in Path(follower.output).read_text()
    assert not Path(follower.errors).read_text()


def test_follower_waits_while_folder_is_locked(workspace, monkeypatch):
    (folder,) = workspace.glob("data/text-*")
    (folder / shards.MANIFEST).unlink()
    no_target = types.SimpleNamespace(wait=lambda rows: None)
    monkeypatch.setattr(prepare_data, "PrefetchTarget", lambda recipe: no_target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.locked(folder / ".lock", ""))
        monkeypatch.setattr(shard_folder.time, "sleep", lambda seconds: stack.close())

        output = run_prepare("--follow")

    assert f"is being prepared by process {os.getpid()}" in output
    assert manifests.is_complete(folder)


def test_encoder_reads_only_some_batches_ahead(bpe):
    # Otherwise the memory grows with the stream.
    encode = DocumentEncoder(pretrained_tokenizer.load(bpe), bpe)
    document = "words " * 1000
    characters_read = 0

    def stream() -> Iterator[tuple[str, bool]]:
        nonlocal characters_read
        for _ in range(10**6):
            characters_read += len(document)
            yield document, True

    next(encode(stream(), 0))

    assert characters_read < (2 * encode.threads + 3) * BATCH_CHARACTERS


# ---- --token_column: a column of ids


@pytest.fixture
def saved_tokenizer(workspace) -> PreTrainedTokenizerFast:
    """The tokenizer of the workspace, copied to the folder tokenizer."""
    (folder,) = Path("data").glob("*/tokenizer")
    shutil.copytree(folder, "tokenizer")
    return pretrained_tokenizer.load("tokenizer")


def make_token_rows(tokenizer: PreTrainedTokenizerFast) -> list[dict]:
    """Return rows of texts and their ids, some of which begin or end with the end-of-text id."""
    texts = [TEXT[start : start + 40 + start % 37] for start in range(0, 6000, 70)]
    rows = []
    for number, ids in enumerate(tokenization.Encoder(tokenizer)(texts)):
        tokens = ids.tolist()
        if number % 2:
            tokens = [tokenizer.eos_token_id, *tokens]
        if number % 3 == 0:
            tokens = [*tokens, tokenizer.eos_token_id]
        rows.append({"text": texts[number], "tokens": tokens})
    rows.insert(3, {"text": None, "tokens": None})
    rows.insert(9, {"text": "", "tokens": []})
    return rows


def read_shard_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the shards by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def test_token_column_gives_shards_of_its_texts(saved_tokenizer):
    rows = make_token_rows(saved_tokenizer)
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet", row_group_size=20)
    shutil.rmtree("data")
    flags = (*SMALL_SHARDS, "--data_files", "rows.parquet", "--tokenizer", "tokenizer")

    text_folder = prepare(*flags)
    token_folder = prepare(*flags, "--token_column", "tokens")

    assert text_folder != token_folder
    shard_files = read_shard_files(text_folder)
    assert len(shard_files) > 5
    assert read_shard_files(token_folder) == shard_files
    text_manifest = manifests.read_manifest(text_folder)
    token_manifest = manifests.read_manifest(token_folder)
    for key in ("splits", "counts", "tokenizer", "complete"):
        assert getattr(text_manifest, key) == getattr(token_manifest, key)


@pytest.mark.parametrize(
    ("tokens", "column", "phrase"),
    [
        ([1, 2], "tokenz", "has no column 'tokenz'"),
        ([0.5, 1.5], "tokens", "contains lists, not lists of ids"),
        ([1, -2], "tokens", "row 0 is not a list of ids"),
        ([1, 99_999], "tokens", "contains the id 99999"),
    ],
    ids=["missing_column", "fractions", "negative", "beyond_vocabulary"],
)
def test_invalid_token_column_is_rejected(saved_tokenizer, tokens, column, phrase):
    Path("rows.jsonl").write_text(json.dumps({"tokens": tokens}) + "\n")
    flags = ("--data_files", "rows.jsonl", "--tokenizer", "tokenizer", "--token_column", column)

    error = run_prepare(*SMALL_SHARDS, *flags, expect=2)

    assert phrase in error
