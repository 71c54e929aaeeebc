"""Bad input and faults of the machine: what the user can do about them, one line each, and the exit status."""

import errno
import os
import re
from collections.abc import Iterable

from pretrain.base.foreign import clean, one_line


class BadInput(ValueError):
    """One or more things the user can correct; ``lines`` holds one message each (file, key, value, rule, remedy).

    ``alone``: only this process knows, so it prints them whichever it is.
    """

    def __init__(self, lines: str | Iterable[str], status: int = 2, *, alone: bool = False):
        self.status, self.alone = status, alone
        self.lines = [one_line(line) for line in ([lines] if isinstance(lines, str) else lines)]
        super().__init__("\n".join(self.lines))


class TrainingStopped(RuntimeError):
    """The run cannot continue through no fault of the input (three bad updates in a row, for example); exit status 1.

    ``alone``: only this process knows, so it prints it whichever it is.
    """

    def __init__(self, message: str, *, alone: bool = False):
        super().__init__(clean(message))
        self.alone = alone


# Messages of a card's and a CPU's allocator, cuBLAS, cuDNN and NCCL; only the first has a class of its own.
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what failed inside the compiler, is a lack of memory of the device."""
    error = getattr(error, "inner_exception", None) or error  # the compiler's errors hold the one behind them
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingStopped):
        return False
    return type(error).__name__ == "OutOfMemoryError" or bool(OUT_OF_MEMORY.search(str(error)))


# What a system call answers where the machine, not the program, is at fault. Of the first kind is the place, which the
# user has chosen: bad input; of the second the machine's state: it may pass.
PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG}
PLACE |= {errno.ENOLCK, errno.EOPNOTSUPP}
STATE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}
# Memory, as Python, the loader of libraries and the system's threads say that there is none left.
MEMORY = re.compile(
    r"failed to map segment|cannot allocate memory|can't start new thread|error return without exception set",
    re.IGNORECASE,
)
RUST = re.compile(r"\(os error (\d+)\)")  # so safetensors and tokenizers name it


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def errno_of(error: BaseException) -> int | None:
    """Return the number of a system call's answer behind an error, where it is one of ``PLACE`` or ``STATE``."""
    if isinstance(error, (BadInput, TrainingStopped)):
        return None
    written = RUST.search(str(error))
    number = int(written[1]) if written else getattr(error, "errno", None) if isinstance(error, OSError) else None
    return number if number in PLACE or number in STATE else None


def machine_fault(error: BaseException) -> BadInput | None:
    """Return a fault of the machine, or of a place on it, as one line; None: the error is of another kind.

    A place has a name; what is wrong with the machine may have none.
    """
    if isinstance(error, MemoryError) or MEMORY.search(str(error)):
        remedy = "end other programs, or raise the limit (ulimit -v); the same command resumes"
        return BadInput(f"memory ran out: {remedy}", 1, alone=True)
    number, name = errno_of(error), getattr(error, "filename", None)
    if number is None or (number in PLACE and name is None):
        return None
    where = f"{os.fsdecode(name) if isinstance(name, bytes) else name}: " if name is not None else ""
    if number in PLACE:
        return BadInput(f"{where}{os.strerror(number)}: use another place, or change its permissions", alone=True)
    remedy = "free some space, raise the limit (ulimit -n, -f) or repair the disk (dmesg); the same command resumes"
    return BadInput(f"{where}{os.strerror(number)}: {remedy}", 1, alone=True)
