"""Two commands on one folder at the same moment: one of them works, the other states who does, and nothing is lost."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands
import damage

BUSY = 75  # sysexits.h: EX_TEMPFAIL


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """16 races of trainers of one run, of runs that prepare one folder of data, and of two preparations."""
    whole, wanted = commands.finished(base, shared)
    for number in range(16):
        kind = ("one run", "two runs", "two preparations", "one run resumed")[number % 4]
        yield kind, partial(race, whole if "resumed" in kind else base, kind, wanted, _prepared(whole))


def race(begin: Path, kind: str, wanted: dict, documents: object, folder: Path) -> str | None:
    """Be a case: two commands at once."""
    commands.copy(begin, folder)
    shutil.rmtree(folder / damage.LAST, ignore_errors=True)
    names = ("tiny", "other" if kind == "two runs" else "tiny")
    script = ("prepare_data.py" if kind == "two preparations" else "train.py", *commands.TRAIN[1:])
    started = [commands.Started((*script, "--run_name", name), folder) for name in names]
    refused = [done for done in [each.wait() for each in started] if done.code != 0]
    for done in refused:
        if done.code == BUSY:  # another status, for those who start jobs
            done.code = 2
        if kind == "two runs" or len(refused) == 2:
            return f"refused: {done.stderr.strip()[-300:]}"
        if why := commands.fault_of(done, "is training there", "is being prepared"):
            return why
    if kind == "two preparations":
        return None if _prepared(folder) == documents else "other text than one preparation has"
    found = [commands.bits_of(folder / "runs" / name) for name in names]
    return next(filter(None, (commands.difference(bits, wanted) for bits in found)), None)


def _prepared(folder: Path) -> object:
    """Return the documents and bytes of text of the only folder of shards, as its manifest counts them."""
    (path,) = (folder / "data").glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    documents = sum(counts.get("documents", 0) for counts in manifest["counts"].values())
    text_bytes = sum(row["text_bytes"] for rows in manifest["splits"].values() for row in rows)
    return manifest["complete"], documents, text_bytes
