"""Bad input: what the user can mend, in the user's words, one line each, and exit status 2."""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable

from pretrain.base.redaction import redact


class BadInput(ValueError):
    """One or more things the user can mend; ``lines`` holds one message each (file, key, value, rule, remedy)."""

    def __init__(self, lines: str | Iterable[str], status: int = 2):
        self.status = status
        self.lines = [redact(line) for line in ([lines] if isinstance(lines, str) else lines)]
        super().__init__("\n".join(self.lines))


class TrainingStopped(RuntimeError):
    """The run cannot go on through no fault of the input (three bad updates in a row, for example); exit status 1.

    ``alone``: only this process knows, so it prints it whichever it is.
    """

    def __init__(self, message: str, *, alone: bool = False):
        super().__init__(redact(message))
        self.alone = alone


# What the allocators of a card and of a CPU, cuBLAS, cuDNN and NCCL write; only the first has a class of its own.
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what failed inside the compiler, is a lack of memory of the device."""
    error = getattr(error, "inner_exception", None) or error  # the compiler's errors hold the one behind them
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingStopped):
        return False
    return type(error).__name__ == "OutOfMemoryError" or bool(OUT_OF_MEMORY.search(str(error)))


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a script's ``main``: BadInput prints its lines and returns 2, TrainingStopped returns 1.

    Any other error keeps its traceback, which shows no secret of a URL.
    Every process of a launch finds the same fault; only the first one prints it, unless it is known to one ``alone``.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> int:
        sys.excepthook = _print_traceback
        try:
            return main(*args, **kwargs) or 0
        except (BadInput, TrainingStopped) as error:
            from pretrain.base import console  # here, for its package may be what is missing

            if os.environ.get("RANK", "0") == "0" or getattr(error, "alone", False):
                for line in getattr(error, "lines", [str(error)]):
                    print(f"error: {line}", file=sys.stderr, flush=True)
                    console.keep(f"error: {line}")
            return getattr(error, "status", 1)

    return wrapper


def _print_traceback(*error) -> None:
    sys.stderr.write(redact("".join(traceback.format_exception(*error))))
