"""Find the source that a recipe names, without reading its text.

A source consists of text files, of Python's standard library, or of tables (a data set of the Hub,
or files in formats such as Parquet, JSON lines and CSV). A text file is one document, of which
every byte is kept, unless ``separated_text`` splits it at a separator. A row of a table is one
document. ``tables`` opens sources of tables.

The result contains the identity of the source, which names the folder of its shards, and how to
read the documents of each split in a fixed order. A split consists of parts: all text files are
one part, and each file of a table is one. A shard contains the text of one part only.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ursa_minor.base import checkpoint_files, files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources import separated_text, text_checks
from ursa_minor.data.sources.dataset_id import check_dataset_id
from ursa_minor.data.sources.files import find_files, no_such_file, reader_of, resolved_name
from ursa_minor.data.sources.formats import text as text_format
from ursa_minor.data.sources.remote import name_in_manifest
from ursa_minor.data.sources.stdlib import stdlib_files
from ursa_minor.recipe import keys
from ursa_minor.recipe.keys import Data, DataSource
from ursa_minor.recipe.source_kind import AUTO, STDLIB, URL_SCHEMES, path_of

# Maximum length of a source's name in the name of its folder. A file name has at most 255 bytes.
NAME_BYTES = 240
NO_DATA = (
    "no data is given. Use --data_files PATH... for text, Parquet or JSON lines, "
    "or --data_dir FOLDER for shards"
)
NO_VALIDATION = (
    "validation_fraction = 0: no text is left for the validation split. Use a share such as 0.1"
)
# The version of the identity. A higher version prepares all data again. Raise it when the same
# source would be read as different documents or divided into different shards.
FORMAT = 2
FORMAT_VERSIONS = {"csv": 3}  # versions of the table formats whose version differs
TOKENIZER_FILE = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|spiece|sentencepiece)"
)

# A piece of text (str), or the ids of a document ((tokens,) uint32), or NoText; and whether it is
# the beginning of a document.
SourceRow = tuple[Any, bool]
# The name of a part, and a function that yields its rows from a row number on.
Part = tuple[str, Callable[[int], Iterator[SourceRow]]]


class Repository(NamedTuple):
    """A folder of token files in a data set of the Hub."""

    repo_id: str
    revision: str | None
    folder: str


@dataclass(frozen=True)
class FoundSource:
    """A source that exists: where its shards are stored, and how to read its documents.

    Attributes:
        config: the data section of the recipe for this source.
        name: a short name for the folder.
        identity: everything that the shards depend on.
        parts: the parts of each split. None for tables.
        files: the files of each split of a source of tables. It is empty for a data set of the
            Hub, which lists its own files, and None for other sources.
        most_tokens: an upper bound for the tokens of the train split with any tokenizer. None if
            it is not known before the text is read.
        repository: the location of token files on the Hub. None for other sources.
        notes: sentences on the contents of the files, which are logged when they are prepared.
        text_files: the text files of the train split. It is empty for other sources.
    """

    config: DataSource
    name: str
    identity: Mapping[str, Any]
    parts: dict[str, list[Part]] | None = field(default=None, repr=False)
    files: Mapping[str, list[str]] | None = None
    most_tokens: int | None = None
    repository: Repository | None = None
    notes: tuple[str, ...] = ()
    text_files: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        """``<prepared_data_dir>/<name>-<fingerprint>``. The fingerprint is that of the identity."""
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        name = self.name.encode()[:NAME_BYTES].decode(errors="ignore")
        return Path(self.config.prepared_data_dir) / f"{name}-{digest[:12]}"


def find_source(config: DataSource) -> FoundSource:
    """Find a source without reading its text.

    Only text files behind URLs need the network, because they are downloaded.

    A tokenizer in a local folder is identified by the contents of its files, so that the shards
    are found again when the folder was moved.

    Args:
        config: one of ``recipe.data.resolved_sources``.

    Raises:
        BadInput: the source does not exist or cannot be used.
    """
    source = _find(config)
    contents = _tokenizer_contents(config.tokenizer)
    if "tokenizer" not in source.identity or contents is None:
        return source
    tokenizer = {**source.identity["tokenizer"], "tokenizer": contents}
    return dataclasses.replace(source, identity={**source.identity, "tokenizer": tokenizer})


def _tokenizer_contents(name: str) -> list[list[str]] | None:
    """Return the names and hashes of a tokenizer's files, or None if it is not a local folder."""
    if name in keys.TRAINED_TOKENIZERS:
        return None
    folder = checkpoint_files.model_folder_of(Path(name)) or Path(name)
    if not folder.is_dir():
        return None
    return [
        [path.name, files.sha256(path)]
        for path in sorted(folder.iterdir())
        if TOKENIZER_FILE.match(path.name)
    ]


def _find(config: DataSource) -> FoundSource:
    if config.data_dir:
        return _repository_source(config)
    if config.validation_files and not config.data_files:
        raise BadInput(
            "validation_files can be used with data_files only. Leave out validation_files. A part "
            "of any other source is held out for validation"
        )
    if config.data_files:
        return _files_source(config)
    if config.dataset_name == STDLIB:
        return _stdlib_source(config)
    if config.dataset_name:
        return _dataset_source(config)
    raise BadInput(NO_DATA)


def has_urls(config: DataSource) -> bool:
    """Return whether some files of a source are behind URLs, so that it may download them."""
    names = [*(config.data_files or ()), *(config.validation_files or ())]
    return any(name.startswith(URL_SCHEMES) for name in names)


def has_data(config: Data) -> bool:
    """Return whether a data section names any data. The recipe own_text does not."""
    return bool(config.data_dir or config.data_files or config.dataset_name or config.sources)


def check_source_exists(config: DataSource) -> None:
    """Check without reading any file that a source is given and that its local files exist.

    Raises:
        BadInput: no source is given, or a local file is missing.
    """
    if not has_data(config):
        raise BadInput(NO_DATA)
    if config.dataset_name:
        check_dataset_id(config.dataset_name)
    patterns_by_key = {
        "data_files": config.data_files or [],
        "validation_files": config.validation_files or [],
    }
    for key, patterns in patterns_by_key.items():
        for pattern in patterns:
            is_path = not pattern.startswith(URL_SCHEMES) and not has_magic(pattern)
            if is_path and not os.path.lexists(pattern):
                raise BadInput(no_such_file(key, pattern))


def _identity(config: DataSource, **of_kind: Any) -> dict[str, Any]:
    """Return the identity of a source.

    The manifest contains it in this order, and the name of the folder is a hash of it.

    Args:
        of_kind: additional entries for sources of this kind.
    """
    is_bpe = config.tokenizer == "bpe"
    tokenizer = {
        "tokenizer": config.tokenizer,
        "size": config.tokenizer_vocab_size if is_bpe else None,
        "split": config.tokenizer_split if is_bpe else None,
    }
    identity = {
        "format": FORMAT,
        "tokenizer": tokenizer,
        "token_column": config.token_column,
        "shard_tokens": config.shard_tokens,
        "limit_tokens": config.limit_tokens,
        **of_kind,
    }
    if config.data_files and config.data_format != AUTO:
        identity["data_format"] = config.data_format
    return identity


def _repository_source(config: DataSource) -> FoundSource:
    """Find token files in a data set of the Hub: hf://datasets/OWNER/NAME[@REVISION][/FOLDER]."""
    url = config.data_dir or ""
    match = keys.REPOSITORY.fullmatch(url)
    assert match is not None  # the rules of the recipe have checked it
    repo_id, revision, folder = match.groups()
    repository = Repository(repo_id, revision and unquote(revision), folder or "")
    identity = {
        "format": FORMAT,
        "data_dir": url.rstrip("/"),
        "limit_tokens": config.limit_tokens,
    }
    name = repo_id.rpartition("/")[2]
    return FoundSource(config, name, identity, repository=repository)


def _files_source(config: DataSource) -> FoundSource:
    """Find files of texts or of tables."""
    prepared_data_dir = Path(config.prepared_data_dir)
    train_files = find_files(
        "data_files", config.data_files or [], prepared_data_dir, config.data_format
    )
    validation_files = find_files(
        "validation_files", config.validation_files or [], prepared_data_dir, config.data_format
    )
    in_both = set(map(resolved_name, train_files)) & set(map(resolved_name, validation_files))
    if in_both:
        raise BadInput(
            f"validation_files: {min(in_both)} is also in data_files, so the model would be "
            f"trained on its validation text. Remove the file from one of the two keys"
        )

    example_of_format = {}
    for name in [*train_files, *validation_files]:
        reader = reader_of(name, config.data_format)
        format_name = reader.name if reader else None  # None for text
        example_of_format[format_name] = name
    if len(example_of_format) > 1:
        examples = " and ".join(sorted(example_of_format.values()))
        raise BadInput(
            f"data_files: {examples} have different file formats. Use files of one format"
        )

    splits = {"train": train_files}
    if validation_files:
        splits["validation"] = validation_files
    (format_name,) = example_of_format
    if format_name is None:
        return _text_source(config, splits)
    return _table_source(config, format_name, splits)


def _text_source(config: DataSource, splits: dict[str, list[str]]) -> FoundSource:
    if "validation" not in splits and not config.validation_fraction:
        raise BadInput(f"{NO_VALIDATION}, or --validation_files PATH")
    paths = {split: [Path(name) for name in names] for split, names in splits.items()}
    notes: tuple[str, ...] = ()
    if config.data_format == AUTO:
        for split, split_paths in paths.items():
            key = "data_files" if split == "train" else "validation_files"
            notes += tuple(text_checks.check_texts(key, split_paths))
    # A file for validation replaces the fraction.
    contents: dict[str, Any] = {"validation": config.validation_fraction}
    for split, split_paths in paths.items():
        contents[split] = [[path.name, files.sha256(path)] for path in split_paths]
    if config.document_separator is None:
        parts = _text_parts(paths, config.validation_fraction)
    else:
        contents["document_separator"] = keys.separator_text(config.document_separator)
        parts = _separated_parts(paths, config.document_separator, config.validation_fraction)
    return FoundSource(
        config,
        name=paths["train"][0].stem,
        identity=_identity(config, **contents),
        parts=parts,
        most_tokens=_most_tokens(paths["train"]),
        notes=notes,
        text_files=tuple(paths["train"]),
    )


def _table_source(
    config: DataSource, format_name: str, splits: dict[str, list[str]]
) -> FoundSource:
    identity = _identity(
        config, validation=config.validation_tokens, text_column=config.text_column
    )
    identity["format"] = FORMAT_VERSIONS.get(format_name, FORMAT)
    for split, names in splits.items():
        # Files for validation replace the number of tokens.
        identity[split] = [_stamp(name) for name in names]
    first_file = Path(path_of(splits["train"][0]))
    name, *_ = first_file.name.split(".")
    return FoundSource(config, _folder_name(name), identity, files=splits)


def _stdlib_source(config: DataSource) -> FoundSource:
    if not config.validation_fraction:
        raise BadInput(NO_VALIDATION)
    splits = stdlib_files(config.validation_fraction)
    hashes = []
    parts = {}
    for split, paths in splits.items():
        hashes += [[split, path.name, files.sha256(path)] for path in paths]
        parts[split] = [(STDLIB, _from_row(text_format.small_files, paths))]
    return FoundSource(
        config,
        name=STDLIB,
        identity=_identity(config, files=hashes),
        parts=parts,
        most_tokens=_most_tokens(splits["train"]),
    )


def _dataset_source(config: DataSource) -> FoundSource:
    """Describe a data set of the Hub. The Hub is not contacted."""
    identity = _identity(
        config,
        validation=config.validation_tokens,
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        dataset_revision=config.dataset_revision,
        text_column=config.text_column,
    )
    # The defaults are left out, so that folders of earlier versions keep their names.
    if config.dataset_split != keys.DEFAULT_SPLIT:
        identity["dataset_split"] = config.dataset_split
    if config.validation_split:
        # This split replaces the number of tokens.
        identity["validation"] = config.validation_split
    name = str(config.dataset_name).split("/")[-1]
    return FoundSource(config, _folder_name(name), identity, files={})


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _text_parts(paths: dict[str, list[Path]], validation_fraction: float) -> dict[str, list[Part]]:
    """Return the parts of text files by split.

    Without files for validation, the end of the text is the validation split.
    """
    train_paths = paths["train"]
    name = train_paths[0].name
    if "validation" in paths:
        return {
            split: [(name, _from_row(_text_rows, split_paths))]
            for split, split_paths in paths.items()
        }

    def rows(split: str) -> Iterator[SourceRow]:
        num_characters = sum(len(piece) for piece, _ in _text_rows(train_paths))
        # The number of characters, not of bytes, decides, as in nanoGPT.
        num_left = int(num_characters * (1 - validation_fraction))  # left for the train split
        has_begun = False
        for piece, begins_document in _text_rows(train_paths):
            text = piece[:num_left] if split == "train" else piece[num_left:]
            if text:
                yield text, begins_document or not has_begun
                has_begun = True
            num_left = max(0, num_left - len(piece))
            if num_left == 0 and split == "train":
                return

    return {split: [(name, _from_row(rows, split))] for split in ("train", "validation")}


def _separated_parts(
    paths: dict[str, list[Path]], document_separator: str, validation_fraction: float
) -> dict[str, list[Part]]:
    """Return the parts of text files with a separator by split.

    Without files for validation, the last documents are the validation split.
    """
    separator = separated_text.parse_separator(document_separator)
    train_paths = paths["train"]
    name = train_paths[0].name
    if "validation" in paths:

        def file_rows(split_paths: list[Path]) -> Iterator[SourceRow]:
            return _naming_all_problems(separated_text.rows(split_paths, separator), split_paths)

        return {
            split: [(name, _from_row(file_rows, split_paths))]
            for split, split_paths in paths.items()
        }
    text = separated_text.DividedText(train_paths, separator, validation_fraction)

    def split_rows(split: str) -> Iterator[SourceRow]:
        return _naming_all_problems(text.rows(split), train_paths)

    return {split: [(name, _from_row(split_rows, split))] for split in ("train", "validation")}


def _text_rows(paths: list[Path]) -> Iterator[SourceRow]:
    """Yield the pieces of text files, and for each whether it begins a document."""
    return _naming_all_problems(text_format.rows(paths), paths)


def _naming_all_problems(rows: Iterator[SourceRow], paths: list[Path]) -> Iterator[SourceRow]:
    """Yield the rows of text files.

    Raises:
        BadInput: files cannot be read. There is a line for each of them.
    """
    try:
        yield from rows
    except BadInput as error:
        raise BadInput(text_format.problems(paths) or error.lines) from None


def _from_row(
    rows: Callable[..., Iterator[SourceRow]], argument: Any
) -> Callable[[int], Iterator[SourceRow]]:
    """Return a function that yields ``rows(argument)`` from a row number on."""
    return lambda start: islice(rows(argument), start, None)


def _most_tokens(paths: list[Path]) -> int:
    """Return an upper bound of the number of tokens of text files with any tokenizer.

    It counts one token for each byte, and one for the beginning of each document.
    """
    return sum(path.stat().st_size + 1 for path in paths)


def _stamp(name: str) -> list:
    """Return the name, size and modification time of a file, or the name behind a URL.

    Tables are too large to hash them at each start.
    """
    if name.startswith(URL_SCHEMES):
        return [name_in_manifest(name)]
    stat = Path(name).stat()
    return [name_in_manifest(name), stat.st_size, stat.st_mtime_ns]
