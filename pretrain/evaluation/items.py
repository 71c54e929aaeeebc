"""A task's items: rows of its data set, from the Hub or from files, as questions.

Neither ``datasets`` nor a loading script is needed: the files are fetched at a commit and read here.
"""

import contextlib
import csv
import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from pretrain.base import files
from pretrain.base.errors import BadInput, first_line
from pretrain.base.foreign import one_line
from pretrain.evaluation.record import Question, Task

FAULTS_SHOWN, TIMEOUT_SECONDS = 3, 30


class Item(NamedTuple):
    """What is asked of a row; ``where``: file and line, for messages."""

    where: str
    questions: tuple[Question, ...]


class Items(list[Item]):
    """Items in order.

    Attributes:
        commit: of the data set; None for files.
        complete: whether these are all items of the task's public data set.
    """

    commit: str | None = None
    complete: bool = False


@cache
def records() -> dict[str, Task]:
    """Return every task by its name: those of the files in tasks/."""
    found = pkgutil.iter_modules([str(Path(__file__).parent / "tasks")])
    modules = (import_module(f"pretrain.evaluation.tasks.{file.name}") for file in found)
    return {task.name: task for module in modules for task in module.TASKS}


def read(task: Task, data_files: Sequence[str] | None = None, limit: int = 0, revision: str | None = None) -> Items:
    """Read items from JSON lines, Parquet or TSV, or the data set from the Hub (fetched once).

    Args:
        data_files: paths; None: the Hub's.
        limit: only the first so many; 0 = all.
        revision: the commit that is wanted; None: the task's own, else the newest.

    Raises BadInput where the Hub's cannot be had, and with file and line of each fault (the first three).
    """
    paths, items = ([Path(name) for name in data_files or ()]), Items()
    if data_files is None:
        paths, items.commit = fetch(task, revision)
    faults: list[str] = []
    parts = map(_rows, paths) if data_files else itertools.zip_longest(*map(_rows, paths))
    rows = filter(None, itertools.chain.from_iterable(parts))
    for where, row in itertools.islice(rows, limit or None):
        try:
            items.append(Item(where, _questions(task, row)))
        except ValueError as fault:
            faults.append(f"{where}: {fault}")
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more such items"] if len(faults) > FAULTS_SHOWN else []
        raise BadInput([*faults[:FAULTS_SHOWN], *more])
    if not items:
        raise BadInput(f"{', '.join(map(str, paths))}: holds no {task.label} item")
    has_more = next(rows, None) is not None  # beyond the limit
    items.complete = items.commit is not None and len(items) == task.size and not has_more
    return items


def fetch(task: Task, revision: str | None = None) -> tuple[list[Path], str]:
    """Return a data set's files in the cache, and their commit; what is not there is fetched."""
    (name, split), (pattern, number), wanted = task.dataset, task.files, revision or task.revision
    disable_progress_bars()
    set_verbosity_error()  # of the client, whose own retries are as many lines
    get = partial(snapshot_download, name, repo_type="dataset", revision=wanted, allow_patterns=pattern)
    why = f"its {split} split is not {pattern}"
    for local in (True, False) if wanted else (False, True):  # a commit that is here needs no network
        try:
            if not local:
                HfApi().dataset_info(name, revision=wanted, timeout=TIMEOUT_SECONDS)  # fails at once without a network
            folder = Path(get(local_files_only=local))
            if len(paths := sorted(folder.glob(pattern))) == number:
                return paths, folder.name  # which is the commit
        except Exception as error:  # the Hub's client, the cache and the network each raise their own kinds
            if not local:
                why = f"{type(error).__name__}: {one_line(error)}"[:200]
    what, at = f"--include '{pattern}'" if number > 1 else pattern, f" --revision {wanted}" if wanted else ""
    raise BadInput(
        f"{task.name} ({name} of the Hub) cannot be loaded: {why.rstrip('.')}. Fetch it once, with a network: "
        f"hf download {name} {what} --repo-type dataset{at}; or give items of your own, with {', '.join(task.fields)}: "
        f"--task_files {task.name}=FILE"
    )


def _questions(task: Task, row: Any) -> tuple[Question, ...]:
    with contextlib.suppress(ValueError):
        row = files.parse_json(row) if isinstance(row, bytes) else row
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    if missing := [name for name in task.fields if row.get(name) is None]:
        raise ValueError(f"has no {', '.join(missing)}; an item of {task.label} has {', '.join(task.fields)}")
    try:
        return task.questions(row)
    except (TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"is not an item of {task.label}: {str(row)[:100]}") from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each row and where it stands; one of JSON lines as it is written."""
    rows: list
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = pq.read_table(path).to_pylist()
        elif path.suffix == ".tsv":
            with open(path, encoding="utf-8", newline="") as text:
                rows = list(csv.DictReader(text, delimiter="\t"))
        else:
            rows = [line.strip() for line in path.read_bytes().split(b"\n")]
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's: this is not a Parquet file
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from None
    what = "row" if path.suffix in (".parquet", ".tsv") else "line"
    yield from ((f"{path}: {what} {number}", row) for number, row in enumerate(rows, 1) if row)
