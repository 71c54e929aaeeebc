"""Bad input: what the user can mend, said in the user's words, one line each, and exit status 2."""

import functools
import os
import sys
from collections.abc import Callable, Iterable


class BadInput(ValueError):
    """One or more things the user can mend; ``lines`` holds one message each (file, key, value, rule, remedy)."""

    def __init__(self, lines: str | Iterable[str], status: int = 2):
        self.status = status
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        super().__init__("\n".join(self.lines))


class TrainingStopped(RuntimeError):
    """The run cannot go on through no fault of the input (three bad updates in a row, say); exit status 1.

    ``alone``: only this process knows, so it speaks whichever it is.
    """

    def __init__(self, message: str, *, alone: bool = False):
        super().__init__(message)
        self.alone = alone


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a script's ``main``: BadInput prints its lines and returns 2, TrainingStopped returns 1.

    Every process of a launch finds the same fault; only the first one says it, unless it is known to one ``alone``.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except (BadInput, TrainingStopped) as error:
            if os.environ.get("RANK", "0") == "0" or getattr(error, "alone", False):
                for line in getattr(error, "lines", [str(error)]):
                    print(f"error: {line}", file=sys.stderr, flush=True)
            return getattr(error, "status", 1)

    return wrapper
