"""Measure how fast text becomes token ids on disk: prepare_data.py and two other programs.

    python benchmarks/encode.py
    python benchmarks/encode.py --megabytes 40 --rounds 3 --json encode.json
    python benchmarks/encode.py --memory 10 --json memory.json

It compares, with GPT-2's vocabulary and two processes or threads:

- ``ours``: the preparation of a source, as prepare_data.py runs it,
- ``datasets.map``: ``datasets.map(num_proc=2)`` with the fast tokenizer of Transformers,
- ``nanogpt``: the method of nanoGPT's data/openwebtext/prepare.py, ``datasets.map`` with tiktoken,
  then one file of uint16 ids (needs ``pip install tiktoken``).

The texts are English-like (documentation of the installed packages), source code, Hindi-like
(random words of Devanagari syllables), and JSON lines of the first. The programs take turns. For
each text the benchmark prints the median speed, the highest memory of all processes together, and
the ratio of our speed to that of the others. The speed excludes the start: each program also
encodes the first megabyte alone, whose tokens and time are subtracted.

With ``--memory``, it prepares this many gigabytes of documents of 1 MB instead, whose words never
repeat, and prints the memory of the process after each gigabyte.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from benchmarks import runs  # noqa: E402
from ursa_minor.base import paths  # noqa: E402
from ursa_minor.data.preparation.prepare import prepare  # noqa: E402
from ursa_minor.data.sources.find import find_source  # noqa: E402
from ursa_minor.data.tokens import pretrained_tokenizer  # noqa: E402
from ursa_minor.data.tokens.encoder import DocumentEncoder  # noqa: E402
from ursa_minor.recipe.keys import DataSource  # noqa: E402

PROCESSES = 2
SAMPLE_SECONDS = 0.05  # time between two measurements of memory
VALIDATION_TOKENS = 10_000
DEVANAGARI_CONSONANTS = [chr(code) for code in range(0x0915, 0x0939)]
DEVANAGARI_VOWELS = ["", "ा", "ि", "ी", "ु", "े", "ो", "ं"]


# ---- The texts.


def text_files(pattern: str) -> list[str]:
    """Return the text of files of the installed packages."""
    packages = Path(datasets.__file__).parent.parent
    texts = []
    for path in sorted(packages.rglob(pattern)):
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\0", "")
        if text.strip():
            texts.append(text)
    return texts


def pieces_of(texts: list[str], draw: random.Random) -> Iterator[str]:
    """Yield random pieces of 200 to 8,000 characters."""
    joined = "\n".join(texts)
    while True:
        size = draw.randint(200, 8000)
        begin = draw.randrange(max(1, len(joined) - size))
        yield joined[begin : begin + size]


def hindi_like(draw: random.Random) -> Iterator[str]:
    """Yield texts of random words, of which a few are frequent, as in a language."""
    words = []
    for _ in range(20_000):
        syllables = draw.randint(1, 5)
        letters = [
            draw.choice(DEVANAGARI_CONSONANTS) + draw.choice(DEVANAGARI_VOWELS)
            for _ in range(syllables)
        ]
        words.append("".join(letters))
    while True:
        ranks = [int(len(words) ** draw.random()) - 1 for _ in range(draw.randint(30, 1200))]
        yield " ".join(words[rank] for rank in ranks) + "।"


def beginning_of(file: Path) -> Path:
    """Return the file with the first megabyte of a text."""
    return file.with_name(f"beginning-{file.name}")


def write_texts(folder: Path, megabytes: float) -> dict[str, Path]:
    """Write a file of each kind of text, and return the files by their names in the table."""
    draw = random.Random(0)
    english = text_files("*.md") + text_files("METADATA") + text_files("*.rst")
    kinds = {
        "English-like": pieces_of(english, draw),
        "source code": pieces_of(text_files("*.py"), draw),
        "Hindi-like": hindi_like(draw),
    }
    files = {}
    for kind, texts in kinds.items():
        rows = []
        num_bytes = 0
        while num_bytes < megabytes * 1e6:
            text = next(texts)
            num_bytes += len(text.encode())
            rows.append({"text": text})
        path = folder / f"{kind.replace(' ', '-')}.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
        files[kind] = path
        first_rows = rows[: len(rows) // int(max(2, megabytes))]
        datasets.Dataset.from_list(first_rows).to_parquet(beginning_of(path))
        if kind == "English-like":
            lines = [json.dumps(row) + "\n" for row in rows]
            files["JSON lines"] = folder / "lines.jsonl"
            files["JSON lines"].write_text("".join(lines), encoding="utf-8")
            first_lines = "".join(lines[: len(first_rows)])
            beginning_of(files["JSON lines"]).write_text(first_lines, encoding="utf-8")
    return files


# ---- The programs. Each writes the ids of a file below a folder and returns their number.


def ours(file: Path, folder: Path) -> int:
    """Prepare a source as prepare_data.py does."""
    config = DataSource(
        data_files=[str(file)],
        tokenizer=str(folder / "tokenizer"),
        validation_tokens=VALIDATION_TOKENS,
        prepared_data_dir=str(folder / "data"),
        data_seed=0,
    )
    source = find_source(config)
    source.folder.mkdir(parents=True)
    prepare(source)
    manifest = json.loads((source.folder / "manifest.json").read_text())
    num_tokens = 0
    for shards in manifest["splits"].values():
        num_tokens += sum(shard["tokens"] for shard in shards)
    return num_tokens


def read_dataset(file: Path, folder: Path) -> datasets.Dataset:
    """Open a file with ``datasets``."""
    builder = "json" if file.suffix == ".jsonl" else "parquet"
    return datasets.load_dataset(
        builder, data_files=str(file), split="train", cache_dir=str(folder / "cache")
    )


def datasets_map(file: Path, folder: Path) -> int:
    """Encode with the fast tokenizer in ``datasets.map``, which writes Arrow files."""
    tokenizer = runs.gpt2_tokenizer()

    def encode(batch: dict) -> dict:
        ids = tokenizer(batch["text"])["input_ids"]
        return {"ids": ids, "length": [len(row) + 1 for row in ids]}

    dataset = read_dataset(file, folder)
    encoded = dataset.map(encode, batched=True, num_proc=PROCESSES, remove_columns=["text"])
    return int(np.sum(encoded["length"]))


def tiktoken_encoding():
    """Return GPT-2's encoding of tiktoken without a download."""
    import tiktoken
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = runs.gpt2_tokenizer()
    ranks = {}
    for token, token_id in tokenizer.get_vocab().items():
        if token_id != tokenizer.eos_token_id:
            ranks[bytes(byte_of[character] for character in token)] = token_id
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks=ranks,
        special_tokens={tokenizer.eos_token: tokenizer.eos_token_id},
    )


def nanogpt(file: Path, folder: Path) -> int:
    """Encode row by row with tiktoken in ``datasets.map``, then write one file of ids."""
    encoding = tiktoken_encoding()

    def encode(row: dict) -> dict:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "length": len(ids)}

    dataset = read_dataset(file, folder)
    encoded = dataset.map(encode, num_proc=PROCESSES, remove_columns=["text"])
    num_tokens = int(np.sum(encoded["length"]))
    output = np.memmap(folder / "train.bin", dtype=np.uint16, mode="w+", shape=(num_tokens,))
    position = 0
    num_parts = 64
    for number in range(num_parts):
        part = encoded.shard(num_shards=num_parts, index=number, contiguous=True)
        ids = np.concatenate(part.with_format("numpy")["ids"][:])
        output[position : position + len(ids)] = ids
        position += len(ids)
    output.flush()
    return num_tokens


PROGRAMS: dict[str, Callable[[Path, Path], int]] = {
    "ours": ours,
    "datasets.map": datasets_map,
    "nanogpt": nanogpt,
}


# ---- One measurement, in a separate process.


class MemoryPeak:
    """Record the highest memory of this process and its children together, in bytes."""

    def __init__(self):
        self.num_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self) -> "MemoryPeak":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(SAMPLE_SECONDS):
            total = 0
            for member in [process, *process.children(recursive=True)]:
                try:
                    total += member.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.num_bytes = max(self.num_bytes, total)


def measure(program: str, file: Path) -> dict:
    """Run a program once, and return its tokens and seconds without the start, and its memory."""
    first = run_once(program, beginning_of(file))
    complete = run_once(program, file)
    return {
        "tokens": complete["tokens"] - first["tokens"],
        "seconds": complete["seconds"] - first["seconds"],
        "bytes": complete["bytes"],
    }


def run_once(program: str, file: Path) -> dict:
    """Run a program, and return its tokens, seconds and memory peak."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs.gpt2_tokenizer().save_pretrained(folder / "tokenizer")
        pretrained_tokenizer.load(str(folder / "tokenizer"))  # the imports are not measured
        with MemoryPeak() as peak:
            started = time.perf_counter()
            num_tokens = PROGRAMS[program](file, folder)
            seconds = time.perf_counter() - started
    return {"tokens": num_tokens, "seconds": seconds, "bytes": peak.num_bytes}


def measure_in_process(program: str, file: Path) -> dict:
    """Run ``measure`` in a new process."""
    command = [sys.executable, __file__, "--measure", program, str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no output"]
        return {"problem": lines[-1]}
    return json.loads(result.stdout.splitlines()[-1])


# ---- Memory over a long preparation.


def unique_words(num_bytes: int, generator: np.random.Generator) -> str:
    """Return random words of a to z."""
    letters = generator.integers(ord("a"), ord("z") + 1, num_bytes, dtype=np.uint8)
    is_space = generator.random(num_bytes) < 1 / 7
    letters[is_space] = ord(" ")
    return letters.tobytes().decode()


def memory_over_time(gigabytes: float) -> list[dict]:
    """Encode unique documents, and return the memory after each gigabyte in MiB."""
    encode = DocumentEncoder(runs.gpt2_tokenizer(), "gpt2")
    generator = np.random.default_rng(0)
    num_documents = int(gigabytes * 1000)
    rows = ((unique_words(10**6, generator), True) for _ in range(num_documents))
    process = psutil.Process()
    history = []
    started = time.perf_counter()
    for number, _ in enumerate(encode(rows, 0), 1):
        if number % 1000 == 0:
            mebibytes = process.memory_info().rss / 2**20
            seconds = time.perf_counter() - started
            history.append({"gigabytes": number / 1000, "mebibytes": mebibytes})
            print(f"{number / 1000:5.0f} GB  {mebibytes:9,.0f} MiB  {seconds:7.0f} s", flush=True)
    return history


# ---- Report and command line.


def print_kind(kind: str, results: dict[str, list[dict]]) -> dict:
    """Print the rows of a kind of text, and return them for the JSON file."""
    rows = {}
    for program, measurements in results.items():
        problem = next((row["problem"] for row in measurements if "problem" in row), None)
        if problem:
            print(f"{kind:13} {program:13} {problem}")
            rows[program] = {"problem": problem}
            continue
        speeds = [row["tokens"] / row["seconds"] for row in measurements]
        median = statistics.median(speeds)
        peak = max(row["bytes"] for row in measurements)
        rows[program] = {"tokens_per_second": median, "speeds": speeds, "bytes": peak}
        our_speed = rows["ours"].get("tokens_per_second")
        ratio = f"{our_speed / median:7.2f}" if our_speed else "    n/a"
        megabytes = peak / 2**20
        print(f"{kind:13} {program:13} {median:12,.0f} {ratio} {megabytes:9,.0f}", flush=True)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=200.0,
        help="Size of each text. (default: 200)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="Number of turns of each program. (default: 3)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIGABYTES",
        help="Measure the memory of a preparation of this size instead.",
    )
    parser.add_argument(
        "--json",
        type=paths.argument,
        metavar="PATH",
        help="Also write the figures to this file.",
    )
    parser.add_argument(
        "--measure",
        nargs=2,
        help=argparse.SUPPRESS,
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure all programs on all texts, and print the table."""
    args = parse(argv)
    datasets.disable_progress_bars()
    if args.measure:
        program, file = args.measure
        print(json.dumps(measure(program, Path(file))))
        return 0
    if args.memory:
        history = memory_over_time(args.memory)
        runs.write_json(args.json, {"commit": runs.commit(), "memory": history})
        return 0
    folder = Path(tempfile.mkdtemp())
    try:
        files = write_texts(folder, args.megabytes)
        print(f"{'text':13} {'program':13} {'tokens/s':>12} {'ours/it':>7} {'peak MiB':>9}")
        table = {}
        for kind, file in files.items():
            results: dict[str, list[dict]] = {program: [] for program in PROGRAMS}
            for _ in range(args.rounds):
                for program in PROGRAMS:
                    results[program].append(measure_in_process(program, file))
            table[kind] = print_kind(kind, results)
    finally:
        shutil.rmtree(folder)
    record = {
        "commit": runs.commit(),
        "megabytes": args.megabytes,
        "rounds": args.rounds,
        "texts": table,
    }
    runs.write_json(args.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
