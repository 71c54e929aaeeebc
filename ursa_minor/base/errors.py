"""Errors that the user can fix: bad input, a stopped run, and errors of the operating system.

Each error has a message of one or more lines and an exit status. ``cli.exit_on_bad_input`` prints
them.
"""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ursa_minor.base.redaction import one_line, redact


class BadInput(ValueError):
    """One or more errors in the input that the user can correct.

    Attributes:
        lines: one message for each error. It names the file or option, the problem and the fix.
        status: exit status of the script.
        print_on_every_process: whether every process of a launch that raises the error prints it.
            Otherwise only the main process does, because all processes find the same error.
        text_columns: if a table does not have the column that is read, its columns of text.
    """

    def __init__(
        self,
        lines: str | Iterable[str],
        status: int = 2,
        *,
        print_on_every_process: bool = False,
        text_columns: Iterable[str] = (),
    ):
        if isinstance(lines, str):
            lines = [lines]
        self.lines = [one_line(line) for line in lines]
        self.status = status
        self.print_on_every_process = print_on_every_process
        self.text_columns = tuple(text_columns)
        super().__init__("\n".join(self.lines))


class TrainingStopped(Exception):
    """The run cannot continue although its input is valid.

    For example, the loss is not finite in three updates in a row. The attributes are those of
    ``BadInput``. The exit status is 1.
    """

    def __init__(self, message: str, *, print_on_every_process: bool = False):
        self.lines = [redact(message)]
        self.status = 1
        self.print_on_every_process = print_on_every_process
        super().__init__(*self.lines)


# Messages of the allocators of CUDA and of the CPU, and of cuBLAS, cuDNN and NCCL. Only the first
# one has its own error class.
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device has too little memory, also if torch.compile reports the error."""
    error = getattr(error, "inner_exception", None) or error  # an error of the compiler has one
    if not isinstance(error, RuntimeError):
        return False
    has_class = type(error).__name__ == "OutOfMemoryError"
    return has_class or OUT_OF_MEMORY.search(str(error)) is not None


CHANGE_PERMISSIONS = "use another place, or change its permissions"
OTHER_PATH = (
    "a part of this path is a file, or a link to a path that does not exist; use another path"
)
OTHER_FILE_SYSTEM = (
    "use a folder on another file system, with --output_dir, or with --prepared_data_dir for data"
)
# See files.NOT_SUPPORTED for the error numbers of each operation.
MISSING_OPERATION = f"this file system does not support the operation; {OTHER_FILE_SYSTEM}"
RESUMES = "the same command resumes"
DISK_FAILS = f"the disk or its connection fails (see dmesg); {RESUMES} once it works again"

# Errors of a path that the user has chosen, and their fixes. The path is bad input: status 2.
PATH_FIXES = {
    errno.EACCES: CHANGE_PERMISSIONS,
    errno.EPERM: CHANGE_PERMISSIONS,
    errno.EROFS: CHANGE_PERMISSIONS,
    errno.ENOTDIR: OTHER_PATH,
    errno.ELOOP: OTHER_PATH,
    errno.EISDIR: "a file must be written at this path; move the folder away",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOLCK: MISSING_OPERATION,
    errno.ENOTSUP: MISSING_OPERATION,
    errno.EOPNOTSUPP: MISSING_OPERATION,
    errno.ENOSYS: MISSING_OPERATION,
    errno.ENODEV: MISSING_OPERATION,
}
# Errors of the state of the machine, which may change, and their fixes: status 1.
MACHINE_FIXES = {
    errno.ENOSPC: f"free some space; {RESUMES}",
    errno.EDQUOT: f"a quota limits space or the number of files (quota -s): delete some; {RESUMES}",
    errno.EIO: DISK_FAILS,
    errno.ESTALE: DISK_FAILS,
    errno.EFBIG: f"raise the limit (ulimit -f); {RESUMES}",
    errno.EMFILE: f"raise the limit (ulimit -n); {RESUMES}",
    errno.ENFILE: f"too many files are open on this machine; {RESUMES}",
}
# Messages of Python, of the loader of libraries and of threads when memory runs out.
NO_MEMORY = re.compile(
    r"failed to map segment|cannot allocate memory|can't start new thread"
    r"|error return without exception set",
    re.IGNORECASE,
)
RUST_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")  # in errors of safetensors and tokenizers


class Unsupported(OSError):
    """A file system does not offer a required operation.

    Args:
        number: the error number.
        operation: the missing operation as a verb, such as "rename this".
        path: the file or folder.
    """

    def __init__(self, number: int, operation: str, path: str):
        reason = f"the file system cannot {operation} ({os.strerror(number)}); {OTHER_FILE_SYSTEM}"
        super().__init__(number, reason, path)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def lacks_inodes(path: Path) -> bool:
    """Return whether the disk of a file or folder has no inodes left.

    No file can be created on such a disk, even if it has space.
    """
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    has_inodes = disk.f_files > 0  # some file systems have no inodes at all
    return has_inodes and disk.f_favail == 0


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
    """Return the first line of an error's message, or the name of its class without a message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def errno_of(error: BaseException) -> int | None:
    """Return the error number of the system call that failed.

    Libraries written in Rust state the number only in the message.

    Returns:
        A key of ``PATH_FIXES`` or ``MACHINE_FIXES``, or None for any other error.
    """
    if isinstance(error, BadInput | TrainingStopped):
        return None
    number = None
    rust_match = RUST_ERROR_NUMBER.search(str(error))
    if rust_match:
        number = int(rust_match[1])
    elif isinstance(error, OSError):
        number = error.errno
    if number in PATH_FIXES or number in MACHINE_FIXES:
        return number
    return None


def machine_error(error: BaseException) -> BadInput | None:
    """Return an error of the operating system as a message with a fix, or None for other errors.

    Errors of a path are recognized only if the path is known. Errors of the machine, such as a full
    disk, may come without one.
    """
    if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
        fix = f"end other programs, or raise the limit (ulimit -v); {RESUMES}"
        return BadInput(f"memory ran out: {fix}", 1, print_on_every_process=True)
    if isinstance(error, Unsupported):
        return BadInput(str(error), 2, print_on_every_process=True)
    number = errno_of(error)
    if number is None:
        return None

    path = getattr(error, "filename", None)  # also a file descriptor
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if number in PATH_FIXES:
        if path is None:
            return None
        message = f"{path}: {os.strerror(number)}: {PATH_FIXES[number]}"
        return BadInput(message, 2, print_on_every_process=True)
    fix = MACHINE_FIXES[number]
    if number == errno.ENOSPC and isinstance(path, str | Path):
        fix = f"{space_fix(path)}; {RESUMES}"
    message = f"{os.strerror(number)}: {fix}"
    if path is not None:
        message = f"{path}: {message}"
    return BadInput(message, 1, print_on_every_process=True)
