"""Files of text, tables and tokens that are odd, damaged, or not what their name says: read whole, or refused by name.

What a file holds is counted by readers of its own, in the most direct way that its format's library has.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import commands

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
UNPACK = {"": bytes, ".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}
TEXTS = (
    "a plain text",
    'with "quotes", commas, and\na second line',
    "None",
    "NA",
    "nan",
    "null",
    "12",
    "1e5",
    "true",
    "ünïcödé 🦣 漢字",
    " leading and trailing ",
    "<|endoftext|>",
    "a,b;c\td",
    "\\n is not a newline",
)
COLUMNS = {  # what else a column named text may hold
    "numbers": [1, 2.5, 3],
    "lists": [["a", "b"], ["c"]],
    "true and false": [True, False],
    "nothing": [None, None],
    "bytes": [b"abc", b"def"],
}


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """300 files: good ones of each format, random bytes under each name, mutations of good ones, columns of no text."""
    for kind in FORMATS:
        for packed in PACK:
            read = not packed or kind not in (".txt", ".parquet", ".arrow")  # those are to be unpacked first
            yield (
                f"{'good' if read else 'packed'} {kind}{packed}",
                _case(rng, kind, packed, "good" if read else "packed"),
            )
        yield f"{kind} under another name", _case(rng, kind, "", "renamed")
    for kind in (".parquet", ".arrow", ".jsonl"):
        for column in COLUMNS:
            if column != "bytes" or kind != ".jsonl":
                yield f"{kind}: a column of {column}", _case(rng, kind, "", "column", column)
    yield ".csv: a column of numbers", _case(rng, ".csv", "", "column", "numbers")
    for name in (
        "caf\udce9.txt",
        "x" * 245 + ".txt",
        "a\nb.txt",
        "a[1].jsonl",
        "b*?.txt",
        "-x.txt",
        " .csv",
        "a::b.csv",
    ):
        yield f"a file named {name!r:.30}", _case(rng, Path(name).suffix, "", "named", name)
    for _ in range(185):
        kind, packed = rng.choice(list(FORMATS)), rng.choice(("", "", "", *list(PACK)[1:]))
        if kind == ".parquet":
            packed = ""
        how = rng.choice(("bit", "cut", "slice", "doubled", "appended", "random"))
        yield f"{how}: {kind}{packed}", _case(rng, kind, packed, how)
    for number in range(40):
        yield f"shards: {SHARDS[number % len(SHARDS)]}", _shards(rng, SHARDS[number % len(SHARDS)])


def _case(rng: random.Random, kind: str, packed: str, how: str, detail: str = "") -> Callable[[Path], str | None]:
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        dice = random.Random(seed)
        texts = [f"{i} {dice.choice(TEXTS)} {commands.text(i, 8)}" for i in range(40)]
        texts += dice.sample(TEXTS, len(TEXTS))
        if how == "column":
            texts = COLUMNS[detail] * 10
        data = PACK[packed](FORMATS[kind][0](texts))
        if how in MUTATIONS:
            data = MUTATIONS[how](data, dice)
        name = detail if how == "named" else f"attacked{kind}{packed}"
        if how == "renamed":
            name = f"attacked{dice.choice([other for other in FORMATS if other != kind])}"
        path = folder / name
        path.write_bytes(data)
        done = _prepare(folder, "--data_files", f"./{name}")
        if done.code != 0:
            if how == "good":
                return f"refused: {(done.errors or [done.stderr])[0][:300]}"
            return commands.fault_of(done, name, repr(name), ascii(name).strip("'"), "attacked") or _patient(done)
        if "Traceback" in done.stderr:
            return "success, with a traceback"
        wanted = None if how == "packed" else reference(name, data)
        found = commands.prepared(folder)
        if wanted is None:
            return f"read as {found}, and the reference reader refuses it"
        return None if found == wanted else f"(documents, bytes) {found}, the reference reader's are {wanted}"

    return hit


def _prepare(folder: Path, *flags: str) -> commands.Done:
    commands.copy(folder.parents[1] / "base", folder)
    return commands.run("prepare_data.py", "--recipe", "tiny.yaml", *flags, cwd=folder, hasty=True)


def _patient(done: commands.Done) -> str | None:
    # A file of this disk does not get better by waiting.
    return "a permanent fault of a local file is tried again and again" if "try 3 of" in done.stderr else None


def reference(name: str, data: bytes) -> tuple[int, int] | None:
    """Return how many documents a file holds and their bytes of text; None: it cannot be read as what it is named."""
    packed = next((suffix for suffix in list(PACK)[1:] if name.endswith(suffix)), "")
    kind = Path(name.removesuffix(packed)).suffix
    if kind not in FORMATS or kind == ".txt":
        kind, packed = ".txt", ""
    try:
        texts = FORMATS[kind][1](UNPACK[packed](data))
    except Exception:  # whatever a library calls it: the file is damaged
        return None
    if kind == ".txt":
        return 2, len(data)  # one document, cut into train and validation
    kept = [text for text in texts if isinstance(text, str) and text.strip()]
    sizes = [len(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()) for text in kept]
    return len(kept), sum(sizes)


def _read_csv(data: bytes) -> list:
    rows = list(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
    place = rows[0].index("text")
    if any(len(row) > len(rows[0]) for row in rows):
        raise ValueError("a row has more fields than the header")
    return [row[place] if place < len(row) else None for row in rows[1:] if row]


def _write_csv(texts: list) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL if isinstance(texts[0], str) else csv.QUOTE_MINIMAL)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode()


def _read_json(data: bytes) -> list:
    values = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    if not any(isinstance(value, dict) and "text" in value for value in values[:256]):
        raise ValueError("no such column")
    return [value.get("text") if isinstance(value, dict) else None for value in values]


def _write_json(texts: list) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def _table(texts: list):
    import pyarrow as pa

    return pa.table({"id": list(range(len(texts))), "text": texts})


def _write_parquet(texts: list) -> bytes:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(_table(texts), out, row_group_size=16)
    return out.getvalue()


def _read_parquet(data: bytes) -> list:
    import pyarrow.parquet as pq

    return pq.read_table(io.BytesIO(data), columns=["text"]).column("text").to_pylist()


def _write_arrow(texts: list) -> bytes:
    import pyarrow as pa

    out, table = io.BytesIO(), _table(texts)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    return out.getvalue()


def _read_arrow(data: bytes) -> list:
    import pyarrow as pa

    table = pa.ipc.open_stream(io.BytesIO(data)).read_all()
    table.validate(full=True)
    return table.column("text").to_pylist()


def _read_text(data: bytes) -> list:
    if not data or b"\0" in data:
        raise ValueError("no text")
    return [data.decode()]


# How each format is written, and read.
FORMATS: dict[str, tuple[Callable[[list], bytes], Callable[[bytes], list]]] = {
    ".txt": (lambda texts: "\n".join(map(str, texts)).encode(), _read_text),
    ".parquet": (_write_parquet, _read_parquet),
    ".jsonl": (_write_json, _read_json),
    ".json": (_write_json, _read_json),
    ".ndjson": (_write_json, _read_json),
    ".csv": (_write_csv, _read_csv),
    ".arrow": (_write_arrow, _read_arrow),
}


def _bit(data: bytes, dice: random.Random) -> bytes:
    found = bytearray(data)
    found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _slice(data: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(data))
    return data[:begin] + data[begin + dice.randint(1, 200) :]


def _doubled(data: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(data))
    return data[:begin] + data[begin : begin + dice.randint(1, 200)] + data[begin:]


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit": _bit,
    "cut": lambda data, dice: data[: dice.randrange(len(data))],
    "slice": _slice,
    "doubled": _doubled,
    "appended": lambda data, dice: data + dice.randbytes(dice.randint(1, 100)),
    "random": lambda data, dice: dice.randbytes(dice.randint(1, 5000)),
}


SHARDS = (
    "cut",
    "bit in the header",
    "random",
    "negative count",
    "half an id",
    "pickle",
    "ids too large",
    "no validation",
)


def _shards(rng: random.Random, how: str) -> Callable[[Path], str | None]:
    """Attack folders of llm.c's, NumPy's and nanoGPT's token files, which train.py is given."""
    seed = rng.random()

    def hit(folder: Path) -> str | None:
        dice = random.Random(seed)
        commands.copy(folder.parents[1] / "base", folder)
        (folder / "theirs").mkdir()
        maker = dice.choice(("llm.c", "numpy", "nanoGPT"))
        suffix = {"llm.c": "x_{}_0.bin", "numpy": "x_{}_0.npy", "nanoGPT": "{}.bin"}[maker]
        names = {split: folder / "theirs" / suffix.format(split) for split in ("train", "val")}
        for path in names.values():
            path.write_bytes(_tokens(maker, 3000, dice))
        path = names["train"]
        data = path.read_bytes()
        if how == "no validation":
            names["val"].unlink()
        elif how == "cut":
            path.write_bytes(data[: dice.randrange(40)])
        elif how == "bit in the header":
            place = dice.randrange(12)
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :])
        elif how == "random":
            path.write_bytes(dice.randbytes(2001))
        elif how == "negative count":
            path.write_bytes(struct.pack("<3i", 20240520, 1, -5) + data[12:])
        elif how == "half an id":
            path.write_bytes(data + b"x")
        elif how == "pickle":
            path.write_bytes(
                b"\x93NUMPY\x01\x00F\x00{'descr': '|O', 'fortran_order': False, 'shape': (9,), }".ljust(80) + b"\n"
            )
        elif how == "ids too large":
            path.write_bytes(data[:1500] + b"\xff\xff" * 20 + data[1540:])
        few = ("--max_steps", "2", "--warmup_steps", "1", "--eval_steps", "0")
        done = commands.run("train.py", "--recipe", "tiny.yaml", "--data_dir", "theirs", *few, cwd=folder)
        if done.code == 0 and maker == "nanoGPT" and how in ("cut", "bit in the header", "negative count", "pickle"):
            return None  # nothing in these files shows it, but for ids that are too large
        return commands.fault_of(done, path.name, "theirs") if done.code else "trained on, without a word"

    return hit


def _tokens(maker: str, count: int, dice: random.Random) -> bytes:
    ids = struct.pack(f"<{count}H", *(dice.randrange(300) for _ in range(count)))
    if maker == "llm.c":
        return struct.pack("<3i", 20240520, 1, count).ljust(1024, b"\0") + ids
    if maker == "numpy":
        head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({count},), }}".encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + ids
    return ids
