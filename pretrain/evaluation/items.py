"""A task's items: rows of its data set, from the Hub or from files, as questions.

Neither ``datasets`` nor a loading script is needed: the files are fetched at a commit and read here.
"""

import csv
import itertools
import logging
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.base.foreign import one_line
from pretrain.evaluation import tasks
from pretrain.evaluation.record import Question, Task

log = logging.getLogger(__name__)

FAULTS_SHOWN = 10


class Item(NamedTuple):
    """What is asked of a row; ``where``: file and line, for messages."""

    where: str
    questions: tuple[Question, ...]


class Items(list[Item]):
    """Items in order; ``commit``: of the data set, None for files."""

    commit: str | None = None


class Missing(BadInput):
    """A task's data set cannot be had: it is neither in the cache nor to be fetched, or it is not what it was."""


@cache
def records() -> dict[str, Task]:
    """Return every task by its name."""
    modules = (import_module(f"{tasks.__name__}.{file.name}") for file in pkgutil.iter_modules(tasks.__path__))
    return {task.name: task for module in modules for task in module.TASKS}


def read(task: Task, data_files: Sequence[str] | None = None, limit: int = 0, revision: str | None = None) -> Items:
    """Read items from JSON lines, Parquet or TSV, or the data set from the Hub (fetched once).

    Args:
        data_files: paths; None: the Hub's.
        limit: only the first so many; 0 = all.
        revision: the commit that is wanted; None: the task's own, else the newest.

    Raises BadInput with file and line of each fault (the first ten); Missing where it is the Hub's.
    """
    refused = Missing if data_files is None else BadInput
    paths, items = ([Path(name) for name in data_files or ()]), Items()
    if data_files is None:
        paths, items.commit = fetch(task, revision)
    faults: list[str] = []
    turns = itertools.zip_longest(*map(_rows, paths)) if len(paths) > 1 and data_files is None else ()
    rows = filter(None, itertools.chain.from_iterable(turns or map(_rows, paths)))
    for where, row in rows:
        if limit and len(items) + len(faults) == limit:
            break
        try:
            items.append(Item(where, _questions(task, row)))
        except ValueError as fault:
            faults.append(f"{where}: {fault}")
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more such items"] if len(faults) > FAULTS_SHOWN else []
        raise refused([*faults[:FAULTS_SHOWN], *more])
    if not items:
        raise refused(f"{', '.join(map(str, paths))}: holds no {task.label} item")
    return items


def fetch(task: Task, revision: str | None = None) -> tuple[list[Path], str]:
    """Return a data set's files in the cache, and their commit; what is not there is fetched. Raises Missing."""
    pattern, number = task.files
    wanted = revision or task.revision
    disable_progress_bars()
    get = partial(snapshot_download, task.dataset[0], repo_type="dataset", revision=wanted, allow_patterns=pattern)
    fault = None
    for local in (True, False) if wanted else (False, True):  # a commit that is here needs no network
        try:
            folder = Path(get(local_files_only=local))
        except Exception as error:  # the Hub's client, the cache and the network each raise their own kinds
            fault = fault if local else error
            continue
        if len(found := sorted(folder.glob(pattern))) == number:
            return found, folder.name
    name, split = task.dataset
    what = f"--include '{pattern}'" if number > 1 else pattern
    at = f" --revision {wanted}" if wanted else ""
    why = one_line(fault)[:300] if fault else f"its {split} split is not {pattern} at {wanted or 'its newest commit'}"
    raise Missing(
        f"{task.name} ({name} of the Hub) cannot be loaded: {why}. It is fetched once, with a network: "
        f"hf download {name} {what} --repo-type dataset{at}"
    )


def _questions(task: Task, row: object) -> tuple[Question, ...]:
    if not isinstance(row, dict):
        raise ValueError(f"is not a JSON object{f' ({row})' if isinstance(row, Exception) else ''}")
    if missing := [name for name in task.fields if row.get(name) is None]:
        raise ValueError(f"has no {', '.join(missing)}; a {task.label} item has {', '.join(task.fields)}")
    try:
        return task.questions(row)
    except (TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"is not a {task.label} item: {str(row)[:100]}") from None


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            for number, row in enumerate(pq.read_table(path).to_pylist(), 1):
                yield f"{path}: row {number}", row
        elif path.suffix == ".tsv":
            with open(path, encoding="utf-8", newline="") as text:
                for number, row in enumerate(csv.DictReader(text, delimiter="\t"), 1):
                    yield f"{path}: row {number}", row
        else:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}: line {number}", _parsed(line)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:  # pyarrow's: this is not a Parquet file
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(f"{path}: cannot be read: {reason}") from None


def _parsed(line: bytes) -> object:
    try:
        return files.parse_json(line)
    except ValueError as error:
        return error
