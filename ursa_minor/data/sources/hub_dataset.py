"""Resolve a data set of the Hub to the files of its splits, at one commit."""

from dataclasses import dataclass
from pathlib import PurePosixPath

import datasets
import huggingface_hub
from datasets.data_files import EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError
from datasets.packaged_modules.csv.csv import CsvConfig
from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

from ursa_minor.base.errors import BadInput
from ursa_minor.base.http import http_status_and_retry_after
from ursa_minor.base.retry import retry
from ursa_minor.base.wording import MAX_VALUES, did_you_mean, pluralize
from ursa_minor.data.sources import remote
from ursa_minor.data.sources.columns import Reader
from ursa_minor.data.sources.dataset_id import check_dataset_id
from ursa_minor.data.sources.files import READERS
from ursa_minor.recipe.keys import DataSource

PARQUET_CONVERSION = "refs/convert/parquet"  # branch in which the Hub stores its conversion
USE_CONVERSION = (
    f"Use the Hub's conversion to Parquet, if there is one: --dataset_revision {PARQUET_CONVERSION}"
)
MAX_URLS = 3  # number of URLs in a message
# Files of a data set that are not its text, by the beginning of their names.
OTHER_FILES = (".", "readme", "license", "dataset_infos.json")


@dataclass(frozen=True)
class HubDataset:
    """The files of a data set.

    Attributes:
        commit: the commit of the files.
        files: hf:// URLs of the files of the split train, and of validation if the source names
            a split for it.
        reader: reads the files.
    """

    commit: str
    files: dict[str, list[str]]
    reader: Reader


def open_dataset(config: DataSource, pinned: str | None) -> HubDataset:
    """Find the files of the splits that a source names.

    Args:
        config: the source.
        pinned: the commit to read, or None for the current commit of the revision.

    Raises:
        BadInput: the data set, its configuration or a split does not exist, or its files cannot be
            read.
        TrainingStopped: all attempts to reach the Hub failed.
    """
    name = str(config.dataset_name)
    check_dataset_id(name)
    commit = pinned or retry(name, _current_commit, name, config.dataset_revision)
    builder = retry(name, _load_builder, config, commit)
    reader = _reader_of_builder(builder)
    if reader is None:
        raise _unsupported_format(builder, config, commit)

    files_of_splits: dict[str, list[str]] = {}
    for split, urls in builder.config.data_files.items():
        files_of_splits[str(split)] = [str(url) for url in urls]
    files = {"train": _files_of_split("dataset_split", config.dataset_split, files_of_splits)}
    if config.validation_split:
        files["validation"] = _files_of_split(
            "validation_split", config.validation_split, files_of_splits
        )
    return HubDataset(commit, files, reader)


def _current_commit(name: str, revision: str | None) -> str:
    api = huggingface_hub.HfApi()
    try:
        info = api.dataset_info(name, revision=revision, timeout=remote.TIMEOUT_SECONDS)
    except RevisionNotFoundError:
        reason = "this data set has no such branch, tag or commit. Leave dataset_revision out"
        if revision == PARQUET_CONVERSION:
            reason = "the Hub has not converted this data set to Parquet. Download its files"
        raise BadInput(f"{name}: dataset_revision = {revision}: {reason}") from None
    except GatedRepoError as error:
        page = f"{huggingface_hub.constants.ENDPOINT}/datasets/{name}"
        status, _ = http_status_and_retry_after(error)
        raise BadInput(
            f"{name}: HTTP status {status}. This data set is gated. Accept its conditions at "
            f"{page}, log in with hf auth login, and check that you may read it"
        ) from None
    return info.sha


def _load_builder(config: DataSource, commit: str) -> datasets.DatasetBuilder:
    """Return the builder of a data set, which lists its files.

    Raises:
        BadInput: the data set or its configuration cannot be used. A temporary error of the
            network has its original type.
    """
    name = str(config.dataset_name)
    config_name = config.dataset_config_name
    try:
        return datasets.load_dataset_builder(name, config_name, revision=commit)
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        problem = _permanent_problem(error, config, commit)
        if problem is None:
            raise
        raise problem from None


def _permanent_problem(error: Exception, config: DataSource, commit: str) -> BadInput | None:
    """Return the message for an error of ``datasets``, or None if another attempt may succeed."""
    name = str(config.dataset_name)
    status, _ = http_status_and_retry_after(error, contexts=True)
    if isinstance(error, DataFilesNotFoundError | EmptyDatasetError) and status in (None, 404):
        return _no_table(config, commit)
    message = str(error)
    if "Config name is missing" in message or "BuilderConfig" in message:
        return _wrong_config(name, config.dataset_config_name, commit)
    if "Dataset scripts are no longer supported" in message:
        return BadInput(
            f"dataset_name = {name}: this data set is a loading script, which datasets no longer "
            f"runs. {USE_CONVERSION}"
        )
    if "Couldn't infer the same data file format" in message:
        return BadInput(
            f"dataset_name = {name}: the splits of this data set have different file formats. Use "
            f"the files of one format: --data_files 'hf://datasets/{name}/**/*.parquet'"
        )
    return None


def _wrong_config(name: str, config_name: str | None, commit: str) -> BadInput:
    """Return the error for a configuration that is missing or does not exist."""
    names = datasets.get_dataset_config_names(name, revision=commit)
    listed = _list([repr(other) for other in names])
    if config_name is None:
        return BadInput(
            f"dataset_name = {name}: this data set has several configurations. Available: "
            f"{listed}. Choose one with --dataset_config_name, for example "
            f"--dataset_config_name {names[0]}"
        )
    suggestion = did_you_mean(config_name, names)
    return BadInput(
        f"dataset_name = {name}: configuration {config_name!r} not found. Available: {listed}. "
        f"Choose one with --dataset_config_name{suggestion}"
    )


def _reader_of_builder(builder: datasets.DatasetBuilder) -> Reader | None:
    """Return the reader for the files of a data set, or None if there is none."""
    options = getattr(builder.config, "pd_read_csv_kwargs", None)
    if options not in (None, CsvConfig().pd_read_csv_kwargs):
        return None  # for example, a CSV with a different separator
    format_names = _format_names(builder)
    return next((reader for reader in READERS if reader.name in format_names), None)


def _format_names(builder: datasets.DatasetBuilder) -> set[str]:
    """Return names that include the file format of a data set.

    The class of the builder is named after the data set, its base class after the file format.
    """
    return {base.__name__.lower() for base in type(builder).__mro__}


def _unsupported_format(
    builder: datasets.DatasetBuilder, config: DataSource, commit: str
) -> BadInput:
    """Return the error for a data set of which ``datasets`` can read the files, but we cannot."""
    if "text" in _format_names(builder):
        return _no_table(config, commit)
    return BadInput(
        f"dataset_name = {config.dataset_name}: the files of this data set are not Parquet, JSON "
        f"lines, Arrow or plain CSV. {USE_CONVERSION}"
    )


def _no_table(config: DataSource, commit: str) -> BadInput:
    """Return the error for a data set without tables, with the URLs of its files."""
    name = str(config.dataset_name)
    paths = huggingface_hub.HfApi().list_repo_files(name, repo_type="dataset", revision=commit)
    paths = [path for path in paths if not _is_other_file(path)]
    if not paths:
        return BadInput(
            f"dataset_name = {name}: this data set contains no files of text. Use another one, or "
            f"check --dataset_revision"
        )
    revision = config.dataset_revision or "main"
    urls = [
        huggingface_hub.hf_hub_url(name, path, repo_type="dataset", revision=revision)
        for path in paths[:MAX_URLS]
    ]
    return BadInput(
        f"dataset_name = {name}: this data set contains no tables, but "
        f"{pluralize(len(paths), 'other file', 'other files')}: {_list(paths)}. If they are "
        f"text, use their URLs, so that each is one document: --data_files {' '.join(urls)}"
    )


def _list(names: list[str]) -> str:
    """Return the first names, and the number of all names if there are more."""
    listed = ", ".join(names[:MAX_VALUES])
    return listed if len(names) <= MAX_VALUES else f"{listed}, ... ({len(names)} in total)"


def _is_other_file(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.startswith(OTHER_FILES)


def _files_of_split(key: str, split: str, files_of_splits: dict[str, list[str]]) -> list[str]:
    """Return the files of a split.

    Args:
        key: the recipe key that names the split, for the message.
    """
    if split not in files_of_splits:
        names = list(files_of_splits)
        raise BadInput(
            f"{key} = {split}: this data set has no split named {split}. Its splits are: "
            f"{', '.join(names)}. Use, for example, --{key} {names[0]}"
        )
    return files_of_splits[split]
