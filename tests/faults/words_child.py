"""The doors through which words of others reach a person, one after the other, without the work that leads there.

words_child.main(["terminal", "words.json"])
"""

import json
import logging
import os
import pty
import sys
import threading
import traceback
import warnings
from pathlib import Path

from pretrain.base import console, foreign
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput, TrainingStopped

LIBRARIES = (
    "huggingface_hub",
    "datasets",
    "transformers",
    "urllib3",
    "httpx",
    "fsspec",
    "wandb",
    "trl.trainer",
    "py.warnings",
)


@exit_on_bad_input
def main(argv: list[str]) -> int | None:
    """Let each of the words of a file (JSON, a list) through a door."""
    door, file = argv
    words = json.loads(Path(file).read_text())
    console.start(is_main=True)
    return DOORS[door](words)


def _terminal(words: list[str]) -> None:
    log = logging.getLogger("pretrain.words_child")
    Path("runs/words").mkdir(parents=True)
    for number, word in enumerate(words):
        if number == len(words) // 2:
            console.keep_in(Path("runs/words/run.log"))  # the file has what came before it, too
        (log.info, log.warning, log.error)[number % 3]("of %s", word)


def _libraries(words: list[str]) -> None:
    for number, word in enumerate(words):
        library = logging.Logger(LIBRARIES[number % len(LIBRARIES)])
        library.addHandler(logging.StreamHandler(sys.stderr))
        library.warning("of %s, %d", word, number)
        library.warning(f"of {word}")
        library.error("%d: %s", word)  # which its format does not fit
        try:
            raise ValueError(word)
        except ValueError:
            library.exception("failed", stack_info=True)


def _warnings(words: list[str]) -> None:
    warnings.simplefilter("always")
    for word in words:
        warnings.warn(word, stacklevel=1)
        warnings.showwarning(word, UserWarning, "a.py", 1)


class _Falls:
    def __init__(self, word: str):
        self.word = word

    def __del__(self):
        raise ValueError(self.word)


def _tracebacks(words: list[str]) -> None:
    def fail(word: str) -> None:
        try:
            raise KeyError(word)
        except KeyError:
            raise RuntimeError(f"while {word}")  # noqa: B904

    for word in words:
        thread = threading.Thread(target=fail, args=(word,))
        thread.start()
        thread.join()
        _Falls(word)
        try:
            fail(word)
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)


def _errors(words: list[str]) -> int:
    def end(error: Exception) -> None:
        raise error

    for word in words:
        for error in (BadInput(word), BadInput([f"of {word}", word]), TrainingStopped(word)):
            exit_on_bad_input(end)(error)
            print(error, *error.args, file=sys.stderr)
    return 2


def _prints(words: list[str]) -> None:
    console.clean_prints()
    for word in words:
        print("of", word)
        sys.stderr.write(f"{word}\n")
        sys.stderr.writelines([f"{word}\n"])
        print({"a": word}, file=sys.stderr)


def _generated(words: list[str]) -> None:
    """Into a pipe every byte; on a terminal the rest of the same."""
    pipe, kept = os.pipe(), os.dup(1)
    os.dup2(pipe[1], 1)
    for word in words:
        console.write(word)
        if (found := os.read(pipe[0], 2**16)) != word.encode():
            os.write(2, b"other bytes in a pipe: " + found.hex().encode())
    main_end, terminal = pty.openpty()
    os.dup2(terminal, 1)
    for word in words:
        console.write(f"{word}\n")
        os.write(kept, os.read(main_end, 2**16).replace(b"\r\n", b"\n"))
    os.dup2(kept, 1)


def _cleaned(words: list[str]) -> None:
    """What files are given: as one text, in one line, twice."""
    for word in words:
        print(foreign.clean(word), foreign.one_line(word), foreign.clean(foreign.clean(word)), sep="\n")
        print(json.dumps(traceback.format_exception_only(BadInput(word)), ensure_ascii=False))


DOORS = {
    "terminal": _terminal,
    "libraries": _libraries,
    "warnings": _warnings,
    "tracebacks": _tracebacks,
    "errors": _errors,
    "prints": _prints,
    "generated": _generated,
    "cleaned": _cleaned,
}
