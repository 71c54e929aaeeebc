"""Durable files: a reader sees the old contents or the new ones, also after a power failure.

New files and folders are written under a temporary name, synchronized with the disk, and renamed.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ursa_minor.base.errors import BadInput, Unsupported, errno_of, space_fix

try:
    import fcntl
except ImportError:
    sys.exit(
        "error: this needs Linux or macOS; on Windows use WSL 2: wsl --install, then all commands "
        "within it"
    )

log = logging.getLogger(__name__)

# Error numbers of operations that a file system does not offer. SMB, WSL's DrvFs, gocryptfs, 9p and
# FUSE file systems differ in the operations and in the numbers. EIO, ENOSPC and EDQUOT are real
# errors and never among these.
NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
NO_SYNC = NOT_SUPPORTED | {errno.EBADF}  # EBADF: the file must be open for writing
NO_FOLDER_SYNC = NO_SYNC | {errno.EACCES, errno.EPERM, errno.EISDIR}  # as PostgreSQL's fsync_fname
NO_LOCKS = NOT_SUPPORTED | {errno.ENOLCK}
NO_MAPPING = NOT_SUPPORTED | {errno.ENODEV}
NO_MODES = NOT_SUPPORTED | {errno.EPERM}  # FAT and SMB, whose modes are options of the mount

LOCK_FILE = ".lock"  # name of the lock of a folder that only one process may write to
PRIVATE_MODE = 0o600  # of the temporary files that libraries such as safetensors create

# The types of network file systems in /proc/mounts.
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|beegfs|gpfs|ceph|glusterfs|afs|9p|"
    r"fuse\.(sshfs|glusterfs|s3fs|gcsfuse|ceph.*|rclone)"
)


@contextlib.contextmanager
def ignoring_errors(numbers: frozenset[int]) -> Iterator[None]:
    """Suppress an OSError of the block if it has one of these error numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def fsync(path: Path) -> None:
    """Make a file's contents, or a folder's list of files, survive a power failure.

    Nothing happens if the file system does not support it.
    """
    if path.is_dir():
        with ignoring_errors(NO_FOLDER_SYNC):
            _fsync(path, NO_FOLDER_SYNC)
    else:
        _fsync(path, NO_SYNC)


def _fsync(path: Path, unsupported: frozenset[int]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ignoring_errors(unsupported):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder.

    Raises:
        Unsupported: the file system cannot do that. Some object stores cannot rename folders.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            raise Unsupported(error.errno, "rename this", str(target)) from None
        raise


def apply_umask(paths: Iterable[Path]) -> None:
    """Give private files that a library has created the mode that ``open`` would have given them.

    The umask cannot be read without changing it for all threads, and a folder may have an access
    control list. Therefore the mode is read from a new file.

    Args:
        paths: files in one folder, or in folders with the same permissions. Only those with mode
            0600 are changed.
    """
    private = [path for path in paths if stat.S_IMODE(path.lstat().st_mode) == PRIVATE_MODE]
    if not private:
        return
    example = private[0].with_name(f".mode-{uuid.uuid4().hex[:8]}")
    example.touch()
    mode = stat.S_IMODE(example.stat().st_mode)
    example.unlink()
    for path in private:
        with ignoring_errors(NO_MODES):
            path.chmod(mode)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to errors of the operating system inside the block that do not contain one.

    An error of ``write`` or ``flush``, such as that of a full disk, does not name the file.
    """
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. Rename it to ``path`` on success, delete it on error.

    It is in the same folder as ``path``, so that the rename is atomic.
    """
    temporary = _temporary_path(path, "tmp")
    try:
        with naming(path):
            yield temporary
            apply_umask([temporary])
            fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def create_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new temporary folder. Rename it to ``folder`` on success, delete it on error.

    ``folder`` is never incomplete. If another process has created it in the meantime, the folder of
    that process remains.

    Args:
        folder: the folder to create.
        replace: whether an existing folder is replaced, and missing parents are created. The old
            folder is renamed first, so for a moment there is none; if the process is killed then,
            ``run_files.clear_partial`` restores the old one.
    """
    temporary = _temporary_path(folder, "tmp")
    old = _temporary_path(folder, "old")
    temporary.mkdir(parents=replace)
    try:
        with naming(folder):
            yield temporary
            paths = list(temporary.rglob("*"))
            apply_umask(path for path in paths if path.is_file() and not path.is_symlink())
            for path in [*paths, temporary]:
                fsync(path)
        if replace and folder.exists():
            rename(folder, old)
        try:
            rename(temporary, folder)
        except OSError:
            # Another process may have created the folder first. Its folder remains.
            if not folder.is_dir():
                raise
        fsync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_path(path: Path, purpose: str) -> Path:
    """Return a new path in the same folder. ``run_files.PARTIAL`` recognizes its name."""
    return path.with_name(f".{path.name}.{purpose}-{uuid.uuid4().hex[:8]}")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, replacing an existing one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as an indented JSON file atomically, replacing an existing one.

    NaN and infinity become null, as in ``to_json``.
    """
    write_text(path, to_json(value, indent=1, ensure_ascii=False) + "\n")


def to_json(value: object, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return a value as standard JSON, in which NaN and infinity are null.

    ``json.dumps`` would write NaN and Infinity, which JSON does not have and most parsers reject.

    Args:
        value: dicts, lists, tuples, strings, numbers, booleans and None.
        indent: spaces of each level; None writes one line.
        ensure_ascii: whether characters outside ASCII are escaped.
    """
    standard = finite(value)
    return json.dumps(standard, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a copy of a JSON value in which None replaces each NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not valid JSON, or has too many levels.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not valid JSON, or has too many levels.
    """
    return parse_json(path.read_text(encoding="utf-8"))


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a symbolic link (not its target).

    Another process may remove it at the same time.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def find_folder_problem(folder: Path) -> str | None:
    """Return why a folder cannot be created or written to, or None if it probably can.

    Nothing is created. Only the permissions of the folder, or of its first existing parent, are
    checked.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"{existing} is not a folder that this user may write to"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_row(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a file, as a manifest stores them."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def find_problem(path: Path, row: dict[str, Any]) -> str | None:
    """Return how a file differs from its manifest, or None if it is intact.

    Args:
        path: the file. A symbolic link is not accepted.
        row: what ``manifest_row`` returned when the file was written.

    Raises:
        OSError: the file cannot be read.
    """
    file_stat = path.lstat()
    if not stat.S_ISREG(file_stat.st_mode):
        return "is not a file"
    if file_stat.st_size != row["size"]:
        return f"has {file_stat.st_size} bytes instead of {row['size']}"
    if sha256(path) != row["sha256"]:
        return "is corrupted (SHA-256 mismatch)"
    return None


@contextlib.contextmanager
def locked(path: Path, busy: str, status: int = 2, *, users: str = "processes") -> Iterator[None]:
    """Hold a lock inside the block. The system releases it when the process ends.

    On a file system without locks, the block runs after a warning that another process in the same
    folder will not be detected.

    Args:
        path: the lock file. The process that has the lock writes its process id into it.
        busy: the message if another process has the lock. "{pid}" is replaced by its process id.
        status: the exit status of that message.
        users: plural noun in the warning for the processes that exclude each other.

    Raises:
        BadInput: another process has the lock.
    """
    with open(path, "a+b", buffering=0) as file:
        try:
            with naming(path):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().decode().strip() or "unknown"
            raise BadInput(busy.format(pid=pid), status) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            reason = f"this file system has no locks ({os.strerror(error.errno)})"
            log.warning(
                f"{path.parent}: {reason}: two {users} in the same folder will not be detected"
            )
        with naming(path):
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
        yield


class Log:
    """A text file that is appended to, and that loses nothing while the disk is full.

    After ``write`` has returned, the operating system has the text, so that it survives the end of
    the process. After ``fsync`` it also survives a power failure. Text that cannot be written is
    kept in memory until the next ``write``.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""
        self._problem: str | None = None  # of the last write

    def write(self, text: str = "") -> str | None:
        """Append to the file.

        Returns:
            A message for the user if the file can no longer be written, or can be written again.
            Otherwise None.
        """
        previous_problem = self._problem
        self._problem = None
        self._unwritten += text.encode("utf-8", "backslashreplace")
        try:
            while self._unwritten:
                num_written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[num_written:]
        except OSError as error:
            self._problem = error.strerror

        if self._problem and not previous_problem:
            fix = space_fix(self.path)
            return (
                f"{self.path}: {self._problem}: new text is kept in memory and written later; {fix}"
            )
        if previous_problem and not self._problem:
            return f"{self.path}: is complete again"
        return None

    def close(self) -> str | None:
        """Write the text that is kept in memory, and close the file.

        Returns:
            A message for the user if that text is lost, else None.
        """
        self.write()
        self._file.close()
        if not self._problem:
            return None
        num_lost = len(self._unwritten)
        return f"{self.path}: {self._problem}: the end of the file is lost, {num_lost:,} bytes"


def network_mount(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the type of the network file system that contains a path, such as ``nfs4``.

    Args:
        path: a file or folder. It may not exist yet.
        mounts: the kernel's table of mounts.

    Returns:
        None for a local file system, and on systems without this table.
    """
    if not mounts.is_file():
        return None
    path = path.resolve()
    innermost_length = 0
    innermost_type = ""
    for line in mounts.read_text(errors="replace").splitlines():
        _, mount_point, file_system_type, *_ = line.split(" ")
        mount_point = mount_point.replace("\\040", " ")  # the table's notation of a space
        # If two file systems have the same mount point, the later one hides the earlier one.
        if path.is_relative_to(mount_point) and len(mount_point) >= innermost_length:
            innermost_length = len(mount_point)
            innermost_type = file_system_type
    if NETWORK_FILE_SYSTEMS.fullmatch(innermost_type):
        return innermost_type
    return None
