"""Load the items of a task from the Hub or from local files, and convert them into questions.

The files of a data set are fetched at a commit and read without the ``datasets`` library.
"""

import hashlib
import itertools
import logging
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
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
RETRY_SECONDS = 60  # time limit for retries after temporary errors


class Item(NamedTuple):
    """The questions that a row of a data set has become.

    Attributes:
        location: the file and the line of the row, for messages.
        questions: one question for each variant of the text.
        part: the name of the part that the row belongs to, or None if the row has no such field.
    """

    location: str
    questions: tuple[Question, ...]
    part: str | None = None


class Items(list[Item]):
    """The items of a task in order.

    Attributes:
        commit: the commit of the data set; None for local files.
        complete: whether these are all items of the task's public data set.
    """

    commit: str | None = None
    complete: bool = False


@cache
def all_tasks() -> dict[str, Task]:
    """Return every task that the modules in tasks/ define, by its name."""
    tasks = {}
    folder = Path(__file__).parent / "tasks"
    for module_info in pkgutil.iter_modules([str(folder)]):
        module = import_module(f"ursa_minor.evaluation.tasks.{module_info.name}")
        for task in module.TASKS:
            tasks[task.name] = task
    return tasks


def read(
    task: Task,
    data_files: Sequence[str] | None = None,
    limit: int = 0,
    revision: str | None = None,
) -> Items:
    """Read the items of a task from local files, or from its data set on the Hub (fetched once).

    Args:
        data_files: paths of JSON lines, Parquet or TSV files; None reads the data set.
        limit: the number of items to read from the beginning; 0 reads all.
        revision: the commit of the data set; None takes the commit that the task defines, or else
            the newest one.

    Raises:
        BadInput: the data set cannot be fetched, a file cannot be read, or a row is not an item.
            The message names file, line and field of the first such rows.
    """
    items = Items()
    is_published = data_files is None
    raw_rows: Iterator[RawRow | None]
    if data_files is None:
        paths, items.commit = fetch(task, revision)
        # The items of the files alternate, so that a limit takes items of all parts.
        rows_of_files = [read_published_rows(path) for path in paths]
        raw_rows = itertools.chain.from_iterable(itertools.zip_longest(*rows_of_files))
    else:
        paths = [Path(name) for name in data_files]
        raw_rows = itertools.chain.from_iterable(read_rows(path, task.fields) for path in paths)
    # zip_longest gives None for a file that has ended before the others.
    present_rows = (row for row in raw_rows if row is not None)

    problems: list[str] = []
    for location, value in itertools.islice(present_rows, limit or None):
        try:
            row = validate(task, value, is_published=is_published)
            questions = task.questions(row)
        except ValueError as error:
            problems.append(f"{location}: {error}")
        else:
            items.append(Item(location, questions, _part(task, value)))
    if problems:
        raise BadInput(_first_problems(problems))
    if not items:
        file_names = ", ".join(str(path) for path in paths)
        raise BadInput(
            f"{file_names} contains no items of {task.label}. Use a file with at least one item"
        )
    has_more = next(present_rows, None) is not None  # beyond the limit
    items.complete = is_published and len(items) == task.size and not has_more
    return items


def _part(task: Task, row: object) -> str | None:
    """Return the name of the part that a row belongs to, or None if it has none."""
    if task.part_field is None or not isinstance(row, dict):
        return None
    part = row.get(task.part_field)
    return part if isinstance(part, str) and part.strip() else None


def hash_items(items: Items) -> str:
    """Return the beginning of a SHA-256 of the questions of items and of their parts."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.questions, item.part)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]


def check_parts(tasks_and_items: Mapping[Task, Items]) -> None:
    """Check that at least one task has parts, and that its items name theirs.

    Raises:
        BadInput: this is not the case.
    """
    with_parts = [task for task in tasks_and_items if task.part_field]
    if not with_parts:
        raise BadInput(
            "--by_part: no task of --tasks has parts. Add the task blimp, or leave out --by_part"
        )
    for task in with_parts:
        for item in tasks_and_items[task]:
            if item.part is None:
                raise BadInput(
                    f"--by_part: {item.location} has no {task.part_field}, the name of its part. "
                    f"Add this field to each row, or leave out --by_part"
                )


def _first_problems(problems: list[str]) -> list[str]:
    num_hidden = len(problems) - PROBLEMS_SHOWN
    if num_hidden <= 0:
        return problems
    return [*problems[:PROBLEMS_SHOWN], f"{num_hidden} more rows have an error"]


def fetch(task: Task, revision: str | None = None) -> tuple[list[Path], str]:
    """Return the files of a data set in the cache, and their commit. Missing files are fetched.

    Args:
        revision: the commit; None takes the commit that the task defines, or else the newest one.

    Raises:
        BadInput: the data set cannot be fetched, or its files are not those of the task.
    """
    disable_progress_bars()
    set_verbosity_error()  # the client would print a line for each of its own retries
    name, split = task.dataset
    pattern, num_files = task.files
    commit = revision or task.revision
    # A known commit may be in the cache, which needs no network. Which commit is the newest one is
    # only known by the Hub.
    sources = [_fetch_from_hub, _find_in_cache]
    if commit:
        sources = [_find_in_cache, _fetch_from_hub]
    reason = f"the files of its {split} split do not match {pattern}"
    for find_folder in sources:
        try:
            folder = find_folder(task, commit)
        except Exception as error:  # the client, the cache and the network have their own errors
            if find_folder is _fetch_from_hub:
                reason = f"{type(error).__name__}: {one_line(error)}"[:200]
            continue
        paths = sorted(folder.glob(pattern))
        if len(paths) == num_files:
            return paths, folder.name  # the name is the commit

    selection = f"--include '{pattern}'" if num_files > 1 else pattern
    command = f"hf download {name} {selection} --repo-type dataset"
    if commit:
        command += f" --revision {commit}"
    fields = ", ".join(task.fields)
    noun = "field" if len(task.fields) == 1 else "fields"
    raise BadInput(
        f"{task.name} ({name} on the Hub) cannot be loaded: {reason.rstrip('.')}. Either download "
        f"it once, with a network connection ({command}), or use your own items with "
        f"the {noun} {fields}: --task_files {task.name}=PATH"
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
    """Fetch the files of a data set and return their folder in the cache.

    Errors that may pass are retried for up to ``RETRY_SECONDS``.
    """
    name, _ = task.dataset
    pattern, _ = task.files

    def log_retry(error: Exception, wait: float) -> None:
        log.warning(
            f"The data set of {task.name} cannot be loaded now ({describe(error)}). "
            f"The next attempt starts in {wait:g} s"
        )

    retry = partial(call_with_retries, log_retry=log_retry, deadline_seconds=RETRY_SECONDS)
    # This request fails immediately without a network, so a run starts without the task.
    request_info = partial(
        HfApi().dataset_info, name, revision=revision, timeout=HUB_TIMEOUT_SECONDS
    )
    retry(request_info, check=_check_answered)
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
    """Return the number of seconds that the Hub asks to wait.

    Raises:
        Exception: the error itself, if the Hub did not answer or its answer is final.
    """
    status, _ = http_status_and_retry_after(error)
    if status is None:
        raise error
    return check_temporary(error)
