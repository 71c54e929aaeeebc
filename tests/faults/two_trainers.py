"""Two commands on one folder at the same moment: one of them works, the other states who does, and nothing is lost."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage

BUSY = 75  # sysexits.h: EX_TEMPFAIL


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """16 races of trainers of one run, of runs that prepare one folder of data, and of two preparations."""
    whole, wanted = damage.finished(base, shared)
    documents = commands.prepared(whole)
    for number in range(16):
        kind, resumes = ("one run", "two runs", "two preparations", "one run")[number % 4], number % 8 >= 4

        def hit(folder: Path, kind=kind, resumes=resumes) -> str | None:
            commands.copy(whole if resumes and kind == "one run" else base, folder)
            if resumes and kind == "one run":
                shutil.rmtree(folder / damage.LAST)
            flags = [("--run_name", "tiny"), ("--run_name", "other" if kind == "two runs" else "tiny")]
            command = ("prepare_data.py", *damage.TRAIN[1:]) if kind == "two preparations" else damage.TRAIN
            started = [commands.Started(*command, *each, cwd=folder) for each in flags]
            ended = [each.wait() for each in started]
            refused = [each for each in ended if each.code != 0]
            for each in refused:
                if each.code == BUSY:  # another status, for those who start jobs
                    each.code = 2
                if kind == "two runs" or len(refused) == 2:
                    return f"refused: {each.stderr.strip()[-300:]}"
                if why := commands.fault_of(each, "is training there", "is being prepared"):
                    return why
            if kind == "two preparations":
                return None if commands.prepared(folder) == documents else "other text than one preparation has"
            run_dirs = {folder / "runs" / each[1] for each in flags}
            return next(filter(None, (commands.difference(commands.bits_of(path), wanted) for path in run_dirs)), None)

        yield f"{kind}{', resumed' if resumes else ''}", hit
