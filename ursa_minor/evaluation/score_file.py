"""Read and extend a file with the scores of several models, in JSON lines.

Each line has the scores of a model on a task, or on a part of it (``part``). A repeated command
finds the finished scores in this file. Does not import torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput

ScoreLine = dict[str, Any]
LINE_START = b'{"model": "'  # the first field of each line


class ScoreKey(NamedTuple):
    """What the scores of a line depend on. Each attribute is a field of the line.

    Attributes:
        model: the path or Hub id of the model.
        weights: a hash of its files (``model_list.fingerprint``), or None for a model of the Hub.
        task: the name of the task.
        items_sha256: a hash of its items.
        autocast: Accelerate's mixed precision: no, bf16 or fp16.
    """

    model: str
    weights: str | None
    task: str
    items_sha256: str
    autocast: str


class ScoreFile:
    """A file with scores. It contains complete lines only, even if a process is killed.

    Raises:
        BadInput: the file exists and is not such a file, or cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lines: list[ScoreLine] = []
        self._ends_with_line = True  # whether more lines may be appended
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise BadInput(f"--scores {self.path}: cannot be read ({error.strerror})") from None
        texts = data.split(b"\n")
        last_text = texts[-1]  # empty if the last line is complete
        for number, text in enumerate(texts, 1):
            line = _parse(text)
            if line is not None:
                self._lines.append(line)
            elif text.strip() and not (number == len(texts) and _is_unfinished(text)):
                raise BadInput(
                    f"--scores {self.path}: line {number} is not a line with the scores of a "
                    f"model. To keep this file, use another name"
                )
        self._ends_with_line = not last_text

    def find(self, key: ScoreKey) -> ScoreLine | None:
        """Return the newest scores on a complete task, or None if there are none."""
        for line in reversed(self._lines):
            if _key(line) == key and "part" not in line:
                return line
        return None

    def find_parts(self, key: ScoreKey) -> list[ScoreLine]:
        """Return the scores on the parts of a task."""
        return [line for line in self._lines if _key(line) == key and "part" in line]

    def add(self, key: ScoreKey, lines: Sequence[ScoreLine]) -> None:
        """Write the scores of a model on a task. They replace earlier ones of the same path.

        Raises:
            OSError: the file cannot be written. Its earlier lines are unchanged.
        """
        remaining = [line for line in self._lines if not _is_replaced(line, key)]
        is_appended = self._ends_with_line and len(remaining) == len(self._lines)
        self._lines = [*remaining, *lines]
        if is_appended:
            self._append(_text(lines))
        else:
            files.write_text(self.path, _text(self._lines))
            self._ends_with_line = True

    def _append(self, text: str) -> None:
        self._ends_with_line = False  # in case the disk is full
        with files.naming(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            with files.ignoring_errors(files.NO_SYNC):
                os.fsync(file.fileno())
        self._ends_with_line = True


def _parse(text: bytes) -> ScoreLine | None:
    """Return a line with scores, or None if it is something else."""
    try:
        line = files.parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not set(ScoreKey._fields) <= line.keys():
        return None
    return line


def _is_unfinished(text: bytes) -> bool:
    """Return whether a text is the beginning of a line that a killed process has not completed."""
    try:
        files.parse_json(text)
    except ValueError:
        return text.startswith(LINE_START) or LINE_START.startswith(text)
    return False


def _key(line: ScoreLine) -> ScoreKey:
    return ScoreKey(**{name: line[name] for name in ScoreKey._fields})


def _is_replaced(line: ScoreLine, key: ScoreKey) -> bool:
    """Return whether a line has scores of the same path, whose weights may have been others."""
    return _key(line)._replace(weights=key.weights) == key


def _text(lines: Sequence[ScoreLine]) -> str:
    return "".join(files.to_json(line) + "\n" for line in lines)
