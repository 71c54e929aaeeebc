"""Bad input and problems of the machine: what the user can do about them, one line each, and the exit status."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ursa_minor.base.redaction import one_line, redact


class BadInput(ValueError):
    """One or more things the user can correct; ``lines`` holds one message each (file, key, value, rule, fix).

    ``alone``: only this process knows, so it prints them whichever it is.
    """

    def __init__(self, lines: str | Iterable[str], status: int = 2, *, alone: bool = False):
        self.status, self.alone = status, alone
        self.lines = [one_line(line) for line in ([lines] if isinstance(lines, str) else lines)]
        super().__init__("\n".join(self.lines))


class TrainingStopped(Exception):
    """The run cannot continue through no problem of the input (three bad updates in a row, for example); exit status 1.

    Attributes as BadInput's.
    """

    def __init__(self, message: str, *, alone: bool = False):
        self.lines, self.status, self.alone = [redact(message)], 1, alone
        super().__init__(*self.lines)


# Messages of a card's and a CPU's allocator, cuBLAS, cuDNN and NCCL; only the first has a class of its own.
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what failed inside the compiler, is a lack of memory of the device."""
    # An error of the compiler contains the original one.
    error = getattr(error, "inner_exception", None) or error
    named = type(error).__name__ == "OutOfMemoryError" or OUT_OF_MEMORY.search(str(error))
    return isinstance(error, RuntimeError) and bool(named)


# What a system call answers where the machine, not the program, is at problem, and what the user can do. Of the first kind
# is the place, which the user has chosen: bad input; of the second the machine's state: it may pass.
RIGHTS = "use another place, or change its permissions"
OTHER_PLACE = "a part of this path is a file, or a link that leads nowhere; give another place"
PLACE = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), RIGHTS) | {
    errno.ENOTDIR: OTHER_PLACE,
    errno.ELOOP: OTHER_PLACE,
    errno.EISDIR: "a file of ours goes there; move that folder away",
    errno.ENAMETOOLONG: "give a shorter name",
}
# The file system does not offer an operation. See files.NOT_SUPPORTED for the numbers of each operation.
OTHER_FILE_SYSTEM = (
    "use a folder on another file system, with --output_dir, or with --prepared_data_dir for data"
)
PLACE |= dict.fromkeys(
    (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV),
    f"this file system does not support the operation; {OTHER_FILE_SYSTEM}",
)
DISK_FAILS = "the disk, or the way to it, fails (dmesg shows more); the same command resumes once it works again"
RESUMES = "the same command resumes"
ERRNO_FIXES = {
    errno.ENOSPC: f"free some space; {RESUMES}",
    errno.EDQUOT: f"a quota limits space or the number of files (quota -s): delete some; {RESUMES}",
}
ERRNO_FIXES |= dict.fromkeys((errno.EIO, errno.ESTALE), DISK_FAILS)
ERRNO_FIXES |= {
    errno.EFBIG: "raise the limit (ulimit -f); the same command resumes",
    errno.EMFILE: "raise the limit (ulimit -n); the same command resumes",
    errno.ENFILE: "too many files are open on this machine; the same command resumes",
}
# Memory, as Python, the loader of libraries and the system's threads say that there is none left.
MEMORY = re.compile(
    r"failed to map segment|cannot allocate memory|can't start new thread|error return without exception set",
    re.IGNORECASE,
)
RUST = re.compile(r"\(os error (\d+)\)")  # so safetensors and tokenizers name it


class Unsupported(OSError):
    """A file system does not offer an operation that is needed.

    Args:
        number: the error number.
        operation: the missing operation as a verb, such as "rename this".
        path: of the file or folder.
    """

    def __init__(self, number: int, operation: str, path: str):
        reason = f"the file system cannot {operation} ({os.strerror(number)}); {OTHER_FILE_SYSTEM}"
        super().__init__(number, reason, path)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def lacks_inodes(path: Path) -> bool:
    """Return whether no file can be created on the disk of a file or folder, although it may have space left."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_files > 0 and disk.f_favail == 0  # a file system without inodes has 0 of 0


def space_fix(path: str | os.PathLike) -> str:
    """Return what to do about a full disk: free some space, or delete files if no inodes are left.

    Args:
        path: a file or folder on that disk. It may not exist yet.
    """
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if lacks_inodes(folder):
        return "no inodes are left there (df -i): delete files, of whatever size"
    return "free some space"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def errno_of(error: BaseException) -> int | None:
    """Return the number of a system call's answer behind an error, where it is one of ``PLACE`` or ``ERRNO_FIXES``."""
    if isinstance(error, (BadInput, TrainingStopped)):
        return None
    written = RUST.search(str(error))
    number = (
        int(written[1])
        if written
        else getattr(error, "errno", None)
        if isinstance(error, OSError)
        else None
    )
    return number if number in PLACE or number in ERRNO_FIXES else None


def machine_error(error: BaseException) -> BadInput | None:
    """Return a problem of the machine, or of a place on it, as one line; None: the error is of another kind.

    A place has a name; what is wrong with the machine may have none.
    """
    if isinstance(error, MemoryError) or MEMORY.search(str(error)):
        fix = "end other programs, or raise the limit (ulimit -v); the same command resumes"
        return BadInput(f"memory ran out: {fix}", 1, alone=True)
    if isinstance(error, Unsupported):
        return BadInput(str(error), 2, alone=True)
    number = errno_of(error)
    name = getattr(error, "filename", None)  # a path, a descriptor, or None
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if number is None or (number in PLACE and name is None):
        return None
    where = f"{name}: " if name is not None else ""
    if number in PLACE:
        return BadInput(f"{where}{os.strerror(number)}: {PLACE[number]}", 2, alone=True)
    fix = ERRNO_FIXES[number]
    if number == errno.ENOSPC and isinstance(name, (str, Path)):
        fix = f"{space_fix(name)}; {RESUMES}"
    return BadInput(f"{where}{os.strerror(number)}: {fix}", 1, alone=True)
