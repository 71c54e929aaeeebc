"""prepare_data.py turns documents into shards once: exactly them, and the same after any kill."""

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
from ursa_minor.data.preparation import measure, shard_folder
from ursa_minor.data.sources.formats import text as text_reader
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import pretrained_tokenizer, shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.encoder import BATCH_CHARACTERS, DocumentEncoder

TINY = ("--recipe", "tiny.yaml")
FEW = ("--validation_tokens", "300", "--shard_tokens", "400")
ME = __file__


@pytest.fixture(autouse=True)
def short_proof(monkeypatch):
    """That tiktoken gives the tokenizer's ids takes a second to show, in each process, and is test_tokenization's."""
    monkeypatch.setattr(tokenization, "SAMPLE_TOKENS", 100)
    monkeypatch.setattr(tokenization, "HARD_TEXTS", [])


# A process that dies on the way, or is fed through a pipe: ``main`` of this file, run by ``fork``.


def main(argv: list[str] | None = None) -> int:
    """Prepare data as the environment says.

    KILL_AT = "op:N" kills before the N-th step that lasts (an id written, a file synced, renamed or deleted), "shard:N"
    after the N-th shard. STDIN = "R,W": a pipe to read. PIECES = bytes of a text file that are read at a time.
    """
    what, _, number = os.environ.pop("KILL_AT", "").partition(":")
    if what:
        kill_at(what, int(number))
    if pipe := os.environ.pop("STDIN", None):
        reading, writing = map(int, pipe.split(","))
        os.close(writing)
        os.dup2(reading, 0)
        sys.stdin = os.fdopen(0)
    if size := os.environ.pop("PIECES", None):
        text_reader.pieces.__defaults__ = (int(size),)
    return prepare_data.main(argv)


def kill_at(what: str, number: int) -> None:
    """Arrange for death by SIGKILL."""
    left = [number]

    def counted(owner, name, *, after=False) -> None:
        real = getattr(owner, name)

        def replaced(*args, **kwargs):
            result = real(*args, **kwargs) if after else None
            left[0] -= not after or result is not None
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result if after else real(*args, **kwargs)

        setattr(owner, name, replaced)

    steps = [
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (shutil, "rmtree"),
        (files, "fsync"),
    ]
    for owner, name in [*steps, (shards.ShardWriter, "fill")] if what == "op" else []:
        counted(owner, name)
    if what == "shard":
        counted(shards.ShardWriter, "finish", after=True)


def killed(kill: str, *flags: str) -> bool:
    """Run until death; return whether it died."""
    code = run_script(ME, *TINY, *flags, expect=None, KILL_AT=kill, PIECES="200").returncode
    assert code in (0, -signal.SIGKILL)
    return code != 0


# What was written.


def called(*flags: str, expect: int = 0) -> str:
    """Prepare in this process; return what was printed, or where it is refused, the one line that says why."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert prepare_data.main([*once((*TINY, *flags))]) == expect, err.getvalue()
    return out.getvalue() if expect == 0 else err.getvalue()


def folder_of(*flags: str) -> Path:
    return Path(called(*flags).strip().splitlines()[-1])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file; of a lock only that it is there."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: b"" if name.startswith(".lock") else data for name, data in files.items()}


def prepared_once(*flags: str) -> tuple[Path, dict[str, bytes]]:
    """The folder of these flags and what is in it when it is done at once; it is gone again."""
    folder = folder_of(*flags)
    whole = contents(folder)
    shutil.rmtree(folder)
    return folder, whole


def decoded(folder: Path, split: str) -> dict[int, list[str]]:
    """The documents of a split by source file, from its shards, each of which is as the manifest says."""
    tokenizer = pretrained_tokenizer.load(str(folder / "tokenizer"))
    end, sizes = tokenizer.eos_token_id, tokenization.token_bytes(tokenizer)
    ids: dict[int, list[int]] = {}
    for shard in manifests.read_manifest(folder).splits[split]:
        found, _ = shards.open_ids(folder / shard.file, shard.tokens)
        assert shards.files.sha256(folder / shard.file) == shard.sha256
        assert shard.text_bytes == sizes[found[found != end]].sum()
        ids.setdefault(shard.part, []).extend(found.tolist())
    documents = {}
    for part, found in ids.items():
        begins = [i for i, token in enumerate(found) if token == end]
        assert not begins or begins[0] == 0, "a file's first shard begins with a document"
        documents[part] = [
            tokenizer.decode(found[a + 1 : b]) for a, b in pairwise([*begins, len(found)])
        ]
    return documents


def counts(folder: Path, split: str = "train") -> dict[str, int]:
    return {name: n for name, n in manifests.read_manifest(folder).counts[split].items() if n}


def texts(number: int, seed: int = 0) -> list[str]:
    """Documents of one to sixty words, all different."""
    drawn = random.Random(seed)
    return [
        f"{seed} {i} " + " ".join(drawn.choices(WORDS, k=drawn.randrange(1, 60)))
        for i in range(number)
    ]


def write_table(path: Path, rows: list) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": rows}), path, row_group_size=7 if len(rows) < 100 else 500)
    else:
        lines = b"".join(json.dumps({"text": row}).encode() + b"\n" for row in rows)
        path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return str(path)


def write_tables(kind: str, *sizes: int) -> tuple[list[list[str]], tuple[str, ...]]:
    """Write files of documents; return these, and the flags to read them."""
    rows = [texts(size, seed) for seed, size in enumerate(sizes)]
    return rows, (
        "--data_files",
        *(write_table(Path(f"{i}.{kind}"), found) for i, found in enumerate(rows)),
    )


def split_in_two(rows: list[list[str]], tokens: int) -> tuple[list[str], dict[int, list[str]]]:
    """The rule: the first documents, to so many tokens (characters and one more), are the validation split."""
    held, train, done = [], {}, 0
    for part, documents in enumerate(rows):
        for document in documents:
            if done < tokens:
                held.append(document)
                done += len(document) + 1
            else:
                train.setdefault(part, []).append(document)
    return held, train


def test_shards_hold_exactly_the_documents_of_tables(workspace):
    rows, files = write_tables("jsonl.gz", 12, 30, 1, 9)
    whole = sum(len(text) + 1 for text in rows[0])  # to the last token of the first file
    for tokens in (300, whole, whole + 1):
        folder = folder_of(*files, "--validation_tokens", str(tokens), "--shard_tokens", "400")
        held, train = split_in_two(rows, tokens)
        found = decoded(folder, "validation")
        assert (
            sum((found[part] for part in sorted(found)), []) == held
            and decoded(folder, "train") == train
        )
        assert counts(folder) == {"documents": sum(map(len, train.values()))}
        assert counts(folder, "validation") == {"documents": len(held)}
        sizes: dict[int, list[int]] = {}
        for shard in manifests.read_manifest(folder).splits["train"]:
            sizes.setdefault(shard.part, []).append(shard.tokens)
        assert len(sizes) == len(train), "shards are cut where files end"
        assert all(set(found[:-1]) <= {400} and found[-1] <= 400 for found in sizes.values())


def split_by_lines() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the new split: a full stop and the line break behind it are one word."""
    made = json.loads(tokenization.train_bpe(texts(50), 400).backend_tokenizer.to_str())
    model = made["model"]
    model["vocab"][".\u010a"] = len(model["vocab"])
    model["merges"].append([".", "\u010a"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token="<|endoftext|>"
    )


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    """A byte-level tokenizer that knows every text."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenization.train_bpe(texts(50), 400).save_pretrained(folder)
    return str(folder)


def test_a_text_in_pieces_has_the_ids_of_the_whole_under_a_split_that_is_not_gpt2s_after_kills_too(
    workspace,
):
    """Where the pieces end between a full stop and a line break."""
    flags = (*source("text of another split"), "--limit_tokens", "3500")
    run_script(ME, *TINY, *flags, PIECES="200")
    (folder,) = Path("data").glob("0-*")
    train, tokenizer = (
        manifests.read_manifest(folder).splits["train"],
        pretrained_tokenizer.load("qwen"),
    )
    found = np.concatenate(
        [shards.open_ids(folder / shard.file, shard.tokens)[0] for shard in train]
    ).tolist()
    first, second = (Path(name).read_text() for name in flags[1:3])
    train = second[: int(len(first + second) * 0.9) - len(first)]
    wanted = [
        [tokenizer.eos_token_id, *ids] for ids in tokenization.Encoder(tokenizer)([first, train])
    ]
    assert counts(folder) == {"documents": 2} and found == sum(wanted, [])[: len(found)]
    assert 3500 <= len(found) < 3700
    whole, drawn = contents(folder), random.Random(3500)
    shutil.rmtree(folder)
    assert not all(killed(f"op:{drawn.randint(20, 120)}", *flags) for _ in range(60)), "no end"
    assert contents(folder) == whole


def test_odd_documents_are_counted_and_kept_as_they_are(workspace, bpe, monkeypatch):
    monkeypatch.setattr("ursa_minor.data.tokens.encoder.BATCH_CHARACTERS", 2000)
    long = " ".join(random.Random(1).choices(WORDS, k=5000))
    rows = [
        "first " * 100,
        "",
        " \n\t",
        None,
        "NUL \0 in it",
        "half \ud83d",
        "a <|endoftext|> b",
        "\udc00\ud800",
    ]
    rows += [long, "é \u2028 \U0001f600 \r\n end", "last"]
    path = write_table(Path("odd.jsonl"), rows)
    folder = folder_of("--data_files", path, "--tokenizer", bpe, "--validation_tokens", "10")
    kept = [
        "NUL \0 in it",
        "half \ufffd",
        "a <|endoftext|> b",
        "\ufffd\ufffd",
        long,
        rows[-2],
        "last",
    ]
    assert decoded(folder, "validation") == {0: rows[:1]}
    assert decoded(folder, "train") == {0: kept}
    assert counts(folder) == {"documents": 7, "without_text": 3, "surrogates_replaced": 2}


def test_limit_tokens_ends_after_the_document_that_reaches_it(workspace):
    rows, files = write_tables("parquet", 12, 30, 9)
    held, train = split_in_two(rows, 300)
    documents = [(part, text) for part, found in train.items() for text in found]
    for limit in (1, 400, 3000):
        folder = folder_of(*files, *FEW, "--limit_tokens", str(limit))
        found = decoded(folder, "train")
        number = sum(map(len, found.values()))
        assert [(part, text) for part, texts in found.items() for text in texts] == documents[
            :number
        ]
        before = sum(len(text) + 1 for _, text in documents[: number - 1])
        assert before < limit <= before + len(documents[number - 1][1]) + 1
        assert counts(folder) == {"documents": number} and decoded(folder, "validation") == {
            0: held
        }


SOURCES = {
    "tables": ("jsonl", (12, 16, 7), FEW),
    "long documents": ("parquet", (7, 9), ("--validation_tokens", "100", "--shard_tokens", "60")),
    "limit": (
        "jsonl",
        (12, 16, 7),
        ("--validation_tokens", "90", "--shard_tokens", "60", "--limit_tokens", "720"),
    ),
    "text": ("txt", (200,), ("--validation_fraction", "0.1", "--shard_tokens", "900")),
    "text of another split": ("lines", (90, 60), ("--shard_tokens", "500")),
}
LONG = ("long documents", "text", "text of another split")


def source(name: str) -> tuple[str, ...]:
    kind, sizes, flags = SOURCES[name]
    if kind == "txt":
        Path("own.txt").write_text(" ".join(texts(*sizes)))
        return ("--data_files", "own.txt", *flags)
    if kind == "lines":  # of documents that come in several pieces
        names = [f"{number}.txt" for number in range(len(sizes))]
        for number, name in enumerate(names):
            Path(name).write_text(".\n".join(texts(sizes[number], number)))
        split_by_lines().save_pretrained("qwen")
        return ("--data_files", *names, "--tokenizer", "qwen", *flags)
    return (*write_tables(kind, *sizes)[1], *flags)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
@pytest.mark.parametrize(
    "name", ["tables", "limit", *(pytest.param(n, marks=pytest.mark.slow) for n in LONG)]
)
def test_kills_at_any_place_change_no_byte_and_leave_nothing_over(workspace, name, seed):
    flags = source(name)
    folder, whole = prepared_once(*flags)
    drawn, kills = random.Random(f"{name} {seed}"), 0
    while killed(f"op:{drawn.randint(8, 100 if name.startswith('text') else 50)}", *flags):
        kills += 1
        assert kills < 60, "no end"
    assert kills >= 2 and contents(folder) == whole


@pytest.mark.parametrize(
    "name", ["tables", *(pytest.param(n, marks=pytest.mark.slow) for n in SOURCES)]
)
def test_shards_that_are_missing_or_changed_are_made_again_and_the_others_left(
    workspace, request, monkeypatch, name
):
    """In a complete folder and in one of a killed process; killed on the way, too."""
    flags, drawn = source(name), random.Random(name)
    folder, whole = prepared_once(*flags)
    numbers = (1, 3, None) if request.node.get_closest_marker("slow") else (3,)
    for kill in ("shard:6", "op:999"):  # the second comes too late
        shutil.rmtree(folder, ignore_errors=True)
        assert killed(kill, *flags) == (kill == "shard:6")
        for number in numbers:
            names = [shard.file for shard in manifests.read_manifest(folder).shards]
            before = {name: (folder / name).stat().st_mtime_ns for name in names}
            wrong = drawn.sample(sorted(before), number or len(names))
            for i, file in enumerate(wrong):
                damage(folder / file, i % 3)
            assert number != 3 or killed(f"op:{drawn.randint(2, 4)}", *flags)
            with monkeypatch.context() as patched:
                patched.setattr(text_reader.pieces, "__defaults__", (200,))
                called(*flags)
            after = {file: (folder / file).stat().st_mtime_ns for file in before}
            assert contents(folder) == whole
            assert {file for file in before if before[file] != after[file]} <= {*wrong}
            assert max(after.values()) <= (folder / "manifest.json").stat().st_mtime_ns, (
                "else they are hashed each time"
            )


def damage(path: Path, how: int) -> None:
    """Take a shard away, cut it, or change its last byte and leave its size and time."""
    if how == 0:
        path.unlink()
    elif how == 1:
        os.truncate(path, path.stat().st_size - 2)
    else:
        times = path.stat()
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_what_was_consumed_is_not_missing_and_a_whole_folder_needs_no_source(workspace):
    path = write_table(Path("0.jsonl"), texts(30))
    flags = ("--data_files", path, *FEW, "--stream_keep", "consumed")
    folder = folder_of(*flags)
    (folder / "train_00000_00000.bin").unlink()
    damage(folder / "train_00000_00001.bin", 2)
    called(*flags)
    (first, *others) = manifests.read_manifest(folder).splits["train"]
    assert not (folder / first.file).exists() and not [*manifests.find_problems(folder, others)]
    stat = Path(path).stat()
    write_table(Path("0.jsonl"), texts(30)[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size: taken for the same
    called(*flags)
    (folder / others[1].file).write_bytes(b"")
    refused = called(*flags, expect=2)
    assert re.search(
        rf"{folder}/{others[1].file} is missing or damaged, .* or delete {folder}", refused
    )


def test_a_tokenizer_that_was_changed_after_a_kill_stops_the_next_run(workspace):
    flags = source("tables")
    assert killed("shard:6", *flags)
    (path,) = Path("data").glob("0-*/tokenizer/tokenizer.json")
    named = json.loads(path.read_text())
    named["model"]["vocab"] = {
        text: len(named["model"]["vocab"]) - i for text, i in named["model"]["vocab"].items()
    }
    path.write_text(json.dumps(named))
    assert "is not the tokenizer that the shards in this folder were encoded with" in called(
        *flags, expect=2
    )


# What is refused.


def test_too_little_text_is_refused_with_a_number_that_works_and_no_text_with_the_column(workspace):
    rows, files = write_tables("jsonl", 9)
    refused = called(*files, "--validation_tokens", "100000", expect=2)
    (number,) = re.findall(
        r"text_column = text has \d+ tokens in total, .* --validation_tokens (\d+), ", refused
    )
    assert decoded(folder_of(*files, "--validation_tokens", number), "train")
    refused = called(
        *files, "--validation_tokens", str(sum(len(text) + 1 for text in rows[0])), expect=2
    )
    assert "the train split is empty" in refused
    path = write_table(Path("a.jsonl"), [None, "", " "])
    for tokenizer in ("characters", "bpe"):
        refused = called("--data_files", path, "--tokenizer", tokenizer, expect=2)
        assert (
            refused.count("error: ") == 1
            and "column text_column = text has 0 tokens in total" in refused
        )


def test_a_mixture_is_prepared_source_by_source(workspace, bpe):
    mixture = [
        {"weight": i + 1, "data_files": [write_table(Path(f"{i}.jsonl"), texts(9, i))]}
        for i in range(2)
    ]
    own = f"sources: {json.dumps(mixture)}\nvalidation_tokens: 30\n"
    Path("tiny.yaml").write_text(RECIPE.replace("tokenizer: characters", f"tokenizer: {bpe}") + own)
    only, both = called("--source", "1").split(), called().split()
    assert len(both) == 2 and only == both[1:]
    for i, folder in enumerate(both):
        documents = decoded(Path(folder), "validation")[0] + decoded(Path(folder), "train")[0]
        assert documents == texts(9, i)
    assert "has 2 sources" in called("--source", "2", expect=2)


# Looking without writing.


@pytest.mark.parametrize(("kind", "tokenizer"), [("parquet", "bpe"), ("txt", "characters")])
def test_a_dry_run_tells_the_amounts_and_leaves_nothing_behind(
    workspace, monkeypatch, kind, tokenizer
):
    monkeypatch.setattr(measure, "DRY_RUN_SECONDS", 0.05)
    shutil.rmtree("data")
    rows = texts(2000)  # uniform: any part of it tells of the whole
    if kind == "txt":
        Path("0.txt").write_text(" ".join(rows))
        flags = ("--data_files", "0.txt", "--tokenizer", tokenizer)
    else:
        halves = enumerate((rows[:1200], rows[1200:]))
        names = [write_table(Path(f"{i}.{kind}"), half) for i, half in halves]
        flags = ("--data_files", *names, "--validation_tokens", "300", "--tokenizer", tokenizer)
        flags += ("--tokenizer_vocab_size", "300")
    before = {*Path().rglob("*")}
    told, limited = (
        called(*flags, "--dry_run"),
        called(*flags, "--dry_run", "--limit_tokens", "5000"),
    )
    assert {*Path().rglob("*")} == before and " 5,000 tokens (estimated)" in limited
    tokens = int(re.search(r"([\d,]+) tokens \(estimated\)", told)[1].replace(",", ""))
    megabytes = float(re.search(r"([\d.,]+) MB on disk \(estimated", told)[1].replace(",", ""))
    folder = folder_of(*flags)
    assert f"{folder}: " in told
    true = shards.count_tokens(manifests.read_manifest(folder).shards)
    assert 0.8 * true < tokens < 1.2 * true and 0.8 * true < megabytes * 1e6 / 2 < 1.2 * true
    assert re.search(
        r"[\d.,]+ s at [\d.]+ MB/s of text, [\d,]+ tokens/s \(measured for \d+ s with \d+ thread",
        told,
    )


def test_whole_folders_of_every_maker_verify_from_anywhere_and_an_id_beyond_the_tokenizer_is_found(
    workspace, tmp_path_factory, monkeypatch
):
    (ours,) = workspace.glob("data/text-*")
    for name in ("theirs", "nano"):
        Path(name).mkdir()
    for name, number in (("train_000001", 50), ("val_000000", 20)):
        np.save(f"theirs/fineweb_{name}.npy", np.arange(number, dtype="<u2"))
    for name in ("train", "val"):
        np.arange(60, dtype="<u2").tofile(f"nano/{name}.bin")
    for name, number in (("theirs", 70), ("nano", 120)):
        whole = (
            f"{name}: 2 shards with {number} tokens are intact (checked: sizes (the folder has no"
        )
        assert whole in measure.verify(Path(name), 64)
    with pytest.raises(BadInput, match=r"has the id \d+"):
        measure.verify(Path("theirs"), 5)
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    tokens = shards.count_tokens(manifests.read_manifest(ours).shards)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert (
            prepare_data.main(["--verify", str(ours)])
            == prepare_data.main([f"--verify={ours}"])
            == 0
        )
    assert out.getvalue().count(f"{tokens:,} tokens are intact (checked: sizes, hashes") == 2
    assert "no such recipe" in called("--verify", str(ours), expect=2)


# Followed by train.py.


class Follower:
    """prepare_data.py --follow in a fork, with a pipe for its standard input."""

    def __init__(self, *flags: str):
        reading, self.writing = os.pipe()
        self.pid, self.out, self.err = start_script(
            ME, (*TINY, *flags, "--follow"), {"STDIN": f"{reading},{self.writing}"}
        )
        os.close(reading)
        self.prefetch(0)  # until then it only imports

    def prefetch(self, windows: int) -> None:
        os.write(self.writing, f"{windows}\n".encode())

    def close(self) -> int:
        os.close(self.writing)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait_for(self, number: int) -> None:
        """Wait until so many train shards are there, and see that it waits with them."""
        for _ in range(3000):
            if ready() >= number:
                break
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            assert not ended, (status, Path(self.err).read_text())
            select.select([], [], [], 0.01)
        select.select([], [], [], 0.3)
        assert ready() == number


def ready() -> int:
    """How many train shards the only manifest names."""
    found = [json.loads(path.read_text()) for path in Path("data").glob("*/manifest.json")]
    return len(found[0]["splits"]["train"]) if found else 0


def test_a_follower_runs_a_bounded_number_of_shards_ahead_and_ends_with_its_trainer(workspace):
    shutil.rmtree("data")
    flags = (*write_tables("jsonl", 120)[1], "--validation_tokens", "100", "--shard_tokens", "800")
    folder, whole = prepared_once(*flags)
    # A shard holds 799 // 16 = 49 windows; two shards ahead are 100: it waits with the third, and so on.
    follower = Follower(*flags, "--stream_keep", "consumed")
    follower.wait_for(3)
    busy = called(*flags, expect=75)
    assert f"{folder} is being prepared by process {follower.pid}. Wait" in busy
    for windows, number in ((48, 3), (100, 5), (300, 9)):
        follower.prefetch(windows)
        follower.wait_for(number)
    assert follower.close() not in (0, 2, 75)
    manifest = manifests.read_manifest(folder)
    named = {shard.file for shard in manifest.splits["train"]}
    assert {path.name for path in folder.glob("train_*")} == named, (
        "nothing half-made has a shard's name"
    )
    assert len(named) == 9 and not manifest.complete
    follower = Follower(*flags)  # one that keeps all goes to the end by itself
    assert (
        os.waitstatus_to_exitcode(os.waitpid(follower.pid, 0)[1]) == 0 and contents(folder) == whole
    )
    os.close(follower.writing)
    assert "prepared in" in Path(follower.out).read_text() and not Path(follower.err).read_text()


def test_a_follower_waits_while_another_process_prepares_the_folder(workspace, monkeypatch):
    (folder,) = workspace.glob("data/text-*")
    (folder / shards.MANIFEST).unlink()
    monkeypatch.setattr(
        prepare_data, "PrefetchTarget", lambda recipe: types.SimpleNamespace(wait=lambda rows: None)
    )
    with contextlib.ExitStack() as held:
        held.enter_context(files.locked(folder / ".lock", ""))
        monkeypatch.setattr(shard_folder.time, "sleep", lambda seconds: held.close())
        assert f"is being prepared by process {os.getpid()}" in called("--follow")
    assert manifests.is_complete(folder)


def test_rows_are_read_a_few_batches_ahead_only(bpe):
    """So that memory does not grow with the stream."""
    read, encode = [], DocumentEncoder(pretrained_tokenizer.load(bpe), bpe)
    next(encode(((read.append(6000) or "words " * 1000, True) for _ in range(10**6)), 0))
    assert sum(read) < (2 * encode.threads + 3) * BATCH_CHARACTERS


def ids_of_rows(texts: list[str]) -> list[list[int]]:
    (folder,) = Path("data").glob("*/tokenizer")
    shutil.copytree(folder, "tokenizer", dirs_exist_ok=True)
    encode = tokenization.Encoder(pretrained_tokenizer.load("tokenizer"))
    return [ids.tolist() for ids in encode(texts)]


def test_rows_of_ids_make_the_shards_that_their_texts_make(workspace):
    texts = [TEXT[start : start + 40 + start % 37] for start in range(0, 6000, 70)]
    end = [pretrained_tokenizer.load(str(next(Path("data").glob("*/tokenizer")))).eos_token_id]
    ids = [
        end * (number % 2) + row + end * (number % 3 == 0)
        for number, row in enumerate(ids_of_rows(texts))
    ]
    rows = [{"text": text, "tokens": each} for text, each in zip(texts, ids, strict=True)]
    rows.insert(3, {"text": None, "tokens": None})
    rows.insert(9, {"text": "", "tokens": []})
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet", row_group_size=20)
    shutil.rmtree("data")
    flags = (*FEW, "--data_files", "rows.parquet", "--tokenizer", "tokenizer")
    plain, given = folder_of(*flags), folder_of(*flags, "--token_column", "tokens")
    assert plain != given and len(list(plain.glob("*.bin"))) > 5
    assert {p.name: p.read_bytes() for p in plain.glob("*.bin")} == {
        p.name: p.read_bytes() for p in given.glob("*.bin")
    }
    one, two = (manifests.read_manifest(folder) for folder in (plain, given))
    for key in ("splits", "counts", "tokenizer", "complete"):
        assert getattr(one, key) == getattr(two, key)


@pytest.mark.parametrize(
    ("tokens", "flags", "words"),
    [
        (
            [1, 2],
            "--token_column tokenz",
            "has no column 'tokenz'. Choose a column that contains lists of ids",
        ),
        (
            [0.5, 1.5],
            "--token_column tokens",
            "column 'tokens' contains lists, not lists of ids",
        ),
        ([1, -2], "--token_column tokens", "row 0 is not a list of ids (integers from 0"),
        (
            [1, 99_999],
            "--token_column tokens",
            "contains the id 99999, but this tokenizer has",
        ),
    ],
)
def test_a_column_that_holds_no_ids_of_the_tokenizer_is_refused(workspace, tokens, flags, words):
    ids_of_rows([])
    Path("rows.jsonl").write_text(json.dumps({"tokens": tokens}) + "\n")
    asked = ("--data_files", "rows.jsonl", "--tokenizer", "tokenizer", *flags.split())
    assert words in called(*FEW, *asked, expect=2)
