"""Load the items of a task from the Hub or from local files, and convert them into questions.

The files of a data set are fetched at a commit and read without the ``datasets`` library.
"""

import itertools
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import one_line
from ursa_minor.evaluation.item_files import RawRow, read_published_rows, read_rows
from ursa_minor.evaluation.rows import validate
from ursa_minor.evaluation.task import Question, Task

PROBLEMS_SHOWN = 3
TIMEOUT_SECONDS = 30


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
    modules = (import_module(f"ursa_minor.evaluation.tasks.{file.name}") for file in found)
    return {task.name: task for module in modules for task in module.TASKS}


def read(
    task: Task,
    data_files: Sequence[str] | None = None,
    limit: int = 0,
    revision: str | None = None,
) -> Items:
    """Read the items of a task from files, or its data set from the Hub (fetched once).

    Args:
        data_files: paths of JSON lines, Parquet or TSV; None reads the data set.
        limit: the number of items to read from the beginning; 0 reads all.
        revision: the commit of the data set; None takes the task's own, else the newest.

    Raises:
        BadInput: the data set cannot be fetched, a file cannot be read, or rows are not items. The
            first rows are named with their file, line and field.
    """
    items = Items()
    raw_rows: Iterator[RawRow | None]
    if data_files is None:
        paths, items.commit = fetch(task, revision)
        # The items of the files alternate, so that a limit takes items of all parts.
        parts = itertools.zip_longest(*map(read_published_rows, paths))
        raw_rows = itertools.chain.from_iterable(parts)
    else:
        paths = [Path(name) for name in data_files]
        raw_rows = itertools.chain.from_iterable(read_rows(path, task.fields) for path in paths)
    present_rows = (row for row in raw_rows if row is not None)  # the parts differ in length

    problems: list[str] = []
    for where, value in itertools.islice(present_rows, limit or None):
        try:
            items.append(
                Item(where, task.questions(validate(task, value, is_published=data_files is None)))
            )
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise BadInput(_first_problems(problems))
    if not items:
        raise BadInput(f"{', '.join(map(str, paths))}: holds no {task.label} item")
    has_more = next(present_rows, None) is not None  # beyond the limit
    items.complete = items.commit is not None and len(items) == task.size and not has_more
    return items


def _first_problems(problems: list[str]) -> list[str]:
    left_out = len(problems) - PROBLEMS_SHOWN
    if left_out <= 0:
        return problems
    return [*problems[:PROBLEMS_SHOWN], f"and {left_out} more such items"]


def fetch(task: Task, revision: str | None = None) -> tuple[list[Path], str]:
    """Return a data set's files in the cache, and their commit; what is not there is fetched."""
    (name, split), (pattern, number), wanted = task.dataset, task.files, revision or task.revision
    disable_progress_bars()
    set_verbosity_error()  # of the client, whose own retries are as many lines
    get = partial(
        snapshot_download, name, repo_type="dataset", revision=wanted, allow_patterns=pattern
    )
    why = f"its {split} split is not {pattern}"
    for local in (
        (True, False) if wanted else (False, True)
    ):  # a commit that is here needs no network
        try:
            if not local:
                HfApi().dataset_info(
                    name, revision=wanted, timeout=TIMEOUT_SECONDS
                )  # fails at once without a network
            folder = Path(get(local_files_only=local))
            if len(paths := sorted(folder.glob(pattern))) == number:
                return paths, folder.name  # which is the commit
        except (
            Exception
        ) as error:  # the Hub's client, the cache and the network each raise their own kinds
            if not local:
                why = f"{type(error).__name__}: {one_line(error)}"[:200]
    what, at = (
        f"--include '{pattern}'" if number > 1 else pattern,
        f" --revision {wanted}" if wanted else "",
    )
    raise BadInput(
        f"{task.name} ({name} of the Hub) cannot be loaded: {why.rstrip('.')}. Fetch it once, with a network: "
        f"hf download {name} {what} --repo-type dataset{at}; or give items of your own, with {', '.join(task.fields)}: "
        f"--task_files {task.name}=FILE"
    )
