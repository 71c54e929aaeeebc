"""How a script begins and ends: words from outside are made safe to show; each fault is a line and an exit status."""

import functools
import os
from collections.abc import Callable

from pretrain.base import foreign
from pretrain.base.errors import BadInput, TrainingStopped, machine_fault


def exit_on_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap a script's ``main``: BadInput prints its lines and returns 2, TrainingStopped returns 1.

    So do errors of the system that are no bug of ours: a full disk 1, a place that may not be written 2. Any other error
    keeps its traceback, which shows no secret of a URL.
    Every process of a launch finds the same fault; only the first one prints it, unless it is known to one ``alone``.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs) -> int:
        foreign.guard()
        try:
            return main(*args, **kwargs) or 0
        except (BadInput, TrainingStopped) as error:
            _print(error, alone=getattr(error, "alone", False))
            return getattr(error, "status", 1)
        except Exception as error:
            if (fault := machine_fault(error)) is None:
                raise
            _print(fault, alone=True)
            return fault.status

    return wrapper


def _print(error: BadInput | TrainingStopped, *, alone: bool) -> None:
    from pretrain.base import console  # here, for the package that it needs may be what is missing

    if os.environ.get("RANK", "0") == "0" or alone:
        for line in getattr(error, "lines", [str(error)]):
            console.say(f"error: {line}")
