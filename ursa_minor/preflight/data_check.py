"""Look at the data of a recipe before training, for check_setup.py.

Local data is examined in this process. Data behind URLs and on the Hub is examined in a child
process, which is ended after ``REMOTE_SECONDS``.
"""

import multiprocessing
from collections.abc import Collection, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput, TrainingStopped
from ursa_minor.data.preparation.data_report import DataReport
from ursa_minor.data.preparation.offline import offline_variable
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens.shards import count_tokens
from ursa_minor.preflight.compatibility import OK, TRYING, WARNING, Check
from ursa_minor.recipe import keys

REMOTE_SECONDS = 60
NAME = "data"  # of the checks


class DataLook(NamedTuple):
    """The result of reading the beginning of a source.

    Attributes:
        report: facts about the data.
        text_column: the column to read, if it is another one than that of the recipe. Otherwise
            empty.
    """

    report: DataReport
    text_column: str

    def checks(self) -> Iterator[Check]:
        """Yield a check result for each finding."""
        if self.text_column:
            text = f"{self.report.name}: the only column of text is {self.text_column!r}"
            yield Check(NAME, WARNING, text, f"use --text_column {self.text_column}")
        for finding in self.report.findings():
            yield Check(NAME, WARNING if finding.fix else OK, finding.text, finding.fix)

    def flags(self) -> dict[str, str]:
        """Return the recipe keys that follow from the data, and their values."""
        flags = dict(self.report.flags)
        if self.text_column:
            flags["text_column"] = self.text_column
        return flags


class DataExamination:
    """Look at the sources of a recipe, one after the other.

    Attributes:
        looks: the result for each source whose text was read.
    """

    def __init__(self, recipe: keys.Recipe):
        self._recipe = recipe
        self.looks: list[DataLook] = []

    @property
    def flags(self) -> dict[str, str]:
        """The recipe keys that follow from the data. A flag cannot change a part of a mixture."""
        if self._recipe.data.sources or not self.looks:
            return {}
        return self.looks[0].flags()

    def examine_local(self) -> Iterator[Check]:
        """Yield check results for the sources on this machine. The network is not used.

        Raises:
            BadInput: the data cannot be prepared, with the message of the preparation.
        """
        if not find_sources.has_data(self._recipe.data):
            yield Check(NAME, WARNING, "the recipe names no data", "use --data_files FILE...")
            return
        for config in self._recipe.data.resolved_sources:
            if not is_remote(config):
                yield from self._examine_local_source(config)

    def examine_remote(self, unreachable: Collection[str]) -> Iterator[Check]:
        """Yield check results for the sources that are behind URLs or on the Hub.

        Args:
            unreachable: the names of the network checks that have failed.

        Raises:
            BadInput: the data cannot be prepared, with the message of the preparation.
        """
        for config in self._recipe.data.resolved_sources:
            if is_remote(config):
                yield from self._examine_remote_source(config, unreachable)

    def _examine_local_source(self, config: keys.DataSource) -> Iterator[Check]:
        if config.is_token_folder:
            manifest = manifests.describe_folder(Path(str(config.data_dir)))
            num_tokens = count_tokens(manifest.splits["train"])
            text = f"{config.data_dir}: token shards with {num_tokens:,} train tokens"
            yield Check(NAME, OK, text)
            return
        if config.token_column:
            source = find_sources.find_source(config)
            yield Check(NAME, OK, f"{source.name}: token ids, which are read without a tokenizer")
            return
        yield Check(NAME, TRYING, "is being read, for about 10 s")
        try:
            data_look = look(config, loads_from_hub=False)
        except ImportError as error:  # the checks of the packages report it
            yield Check(NAME, WARNING, f"not read, because a package is missing: {error}")
            return
        self.looks.append(data_look)
        yield from data_look.checks()

    def _examine_remote_source(
        self, config: keys.DataSource, unreachable: Collection[str]
    ) -> Iterator[Check]:
        label = config.hub_id or (config.data_files or [""])[0]
        variable = offline_variable()
        if config.hub_id:
            folder = find_sources.find_source(config).folder
            if manifests.is_complete(folder):
                yield Check(NAME, OK, f"{label}: {folder} is completely prepared")
                return
        if variable:
            yield Check(NAME, OK, f"{label}: not read, because {variable} is set")
            return
        if unreachable:
            yield Check(NAME, WARNING, f"{label}: not read, because the network check failed")
            return
        if config.data_dir or config.token_column:
            yield Check(NAME, OK, f"{label}: token ids, which are read without a tokenizer")
            return
        yield Check(NAME, TRYING, f"{label} is being read, for at most {REMOTE_SECONDS} s")
        result = look_in_child(config)
        if isinstance(result, str):
            yield Check(NAME, WARNING, f"{label}: {result}")
            return
        self.looks.append(result)
        yield from result.checks()


def is_remote(config: keys.DataSource) -> bool:
    """Return whether a source is behind URLs or on the Hub."""
    return config.hub_id is not None or find_sources.has_urls(config)


def look(config: keys.DataSource, *, loads_from_hub: bool) -> DataLook:
    """Look at a source of text for some seconds.

    If a table has no column with the default name and only one other column of text, this column
    is read.

    Raises:
        BadInput: the data cannot be prepared.
    """
    # The import of Transformers takes seconds, and it may be missing.
    from ursa_minor.data.preparation import measure

    text_column = ""
    while True:
        source = find_sources.find_source(config)
        try:
            return DataLook(measure.examine(source, loads_from_hub=loads_from_hub), text_column)
        except BadInput as error:
            is_default = config.text_column == keys.FIELDS["text_column"].default
            if len(error.text_columns) != 1 or not is_default:
                raise
            text_column = error.text_columns[0]
            config = replace(config, text_column=text_column)


def look_in_child(config: keys.DataSource) -> DataLook | str:
    """Look at a source in a child process, which is ended after ``REMOTE_SECONDS``.

    Returns:
        The result, or a message that states why there is none.

    Raises:
        BadInput: the data cannot be prepared.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_look, args=(config, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(REMOTE_SECONDS):
            return f"no result after {REMOTE_SECONDS} s"
        result = receiver.recv()
    except EOFError:
        return "the process that read it has ended without a result"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(result, list):
        raise BadInput(result)
    return result


def _send_look(config: keys.DataSource, sender: Connection) -> None:
    """Send what ``look`` returns, the lines of a BadInput, or the message of another error."""
    result: DataLook | list[str] | str
    try:
        result = look(config, loads_from_hub=True)
    except BadInput as error:
        result = error.lines
    except (TrainingStopped, ImportError) as error:
        result = str(error)
    sender.send(result)
