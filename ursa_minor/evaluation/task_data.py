"""Load the items of a task from the Hub or from local files, and convert them into questions.

The files of a data set are fetched at a commit and read without the ``datasets`` library.
"""

import itertools
import logging
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
from ursa_minor.base.http import http_status_and_retry_after
from ursa_minor.base.redaction import one_line
from ursa_minor.base.retry import call_with_retries, check_temporary, describe
from ursa_minor.evaluation.item_files import RawRow, read_published_rows, read_rows
from ursa_minor.evaluation.rows import validate
from ursa_minor.evaluation.task import Question, Task

log = logging.getLogger(__name__)

PROBLEMS_SHOWN = 3
HUB_TIMEOUT_SECONDS = 30
RETRY_SECONDS = 60  # a run does not wait longer for a task


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
def all_tasks() -> dict[str, Task]:
    """Return every task by its name: those of the files in tasks/."""
    tasks = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent / "tasks")]):
        module = import_module(f"ursa_minor.evaluation.tasks.{file.name}")
        tasks |= {task.name: task for task in module.TASKS}
    return tasks


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
    """Return a data set's files in the cache, and their commit. Files that are not there are fetched.

    Args:
        revision: the commit; None takes the task's own, else the newest.

    Raises:
        BadInput: the data set cannot be fetched, or its files are not those of the task.
    """
    disable_progress_bars()
    set_verbosity_error()  # of the client, which prints a line for each of its own retries
    name, split = task.dataset
    pattern, number = task.files
    wanted = revision or task.revision
    # A known commit that is in the cache needs no network. The newest one is on the Hub.
    sources = (_find_in_cache, _fetch_from_hub) if wanted else (_fetch_from_hub, _find_in_cache)
    reason = f"its {split} split is not {pattern}"
    for find_folder in sources:
        try:
            folder = find_folder(task, wanted)
        except Exception as error:  # the client, the cache and the network have their own errors
            if find_folder is _fetch_from_hub:
                reason = f"{type(error).__name__}: {one_line(error)}"[:200]
            continue
        paths = sorted(folder.glob(pattern))
        if len(paths) == number:
            return paths, folder.name  # the name is the commit

    what = f"--include '{pattern}'" if number > 1 else pattern
    at = f" --revision {wanted}" if wanted else ""
    raise BadInput(
        f"{task.name} ({name} of the Hub) cannot be loaded: {reason.rstrip('.')}. "
        f"Fetch it once, with a network: hf download {name} {what} --repo-type dataset{at}; "
        f"or give items of your own, with {', '.join(task.fields)}: --task_files {task.name}=FILE"
    )


def _find_in_cache(task: Task, revision: str | None) -> Path:
    """Return the folder of a data set's files in the cache."""
    pattern, _ = task.files
    folder = snapshot_download(
        task.dataset[0],
        repo_type="dataset",
        revision=revision,
        allow_patterns=pattern,
        local_files_only=True,
    )
    return Path(folder)


def _fetch_from_hub(task: Task, revision: str | None) -> Path:
    """Fetch a data set's files, and return their folder in the cache. Errors that may pass are retried."""
    name, _ = task.dataset
    pattern, _ = task.files

    def log_retry(error: Exception, wait: float) -> None:
        log.warning(f"{task.name}: {describe(error)}; asked again in {wait:g} s")

    retry = partial(call_with_retries, log_retry=log_retry, deadline_seconds=RETRY_SECONDS)
    # Without a network this fails immediately, and a run trains without the task.
    ask = partial(HfApi().dataset_info, name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    retry(ask, check=_check_answered)
    download = partial(
        snapshot_download,
        name,
        repo_type="dataset",
        revision=revision,
        allow_patterns=pattern,
        local_files_only=False,
    )
    return Path(retry(download))


def _check_answered(error: Exception) -> float:
    """Return the seconds that the Hub asks to wait. Raise the error if it did not answer, or if the answer is final."""
    status, _ = http_status_and_retry_after(error)
    if status is None:
        raise error
    return check_temporary(error)
