"""Durable files: a reader sees the whole old file or the whole new one, also after a power cut."""

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
        "error: this needs Linux or macOS; on Windows use WSL 2: wsl --install, then all commands within it"
    )

log = logging.getLogger(__name__)

# Error numbers of operations that a file system does not offer. SMB, WSL's DrvFs, gocryptfs, 9p and FUSE file systems
# differ in the operations and in the numbers. EIO, ENOSPC and EDQUOT are real errors and never among these.
NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
NO_SYNC = NOT_SUPPORTED | {errno.EBADF}  # EBADF: only of a file that is open for writing
# As in PostgreSQL's fsync_fname.
NO_FOLDER_SYNC = NO_SYNC | {
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
}
NO_LOCKS = NOT_SUPPORTED | {errno.ENOLCK}
NO_MAPPING = NOT_SUPPORTED | {errno.ENODEV}
NO_MODES = NOT_SUPPORTED | {errno.EPERM}  # FAT and SMB, where modes come from the mount

PRIVATE = 0o600  # the mode of files that libraries create as temporary ones, such as safetensors'

# As /proc/mounts names them.
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|beegfs|gpfs|ceph|glusterfs|afs|9p|"
    r"fuse\.(sshfs|glusterfs|s3fs|gcsfuse|ceph.*|rclone)"
)


@contextlib.contextmanager
def skipping(numbers: frozenset[int]) -> Iterator[None]:
    """Leave the block quietly where it fails with one of these error numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut, as far as the file system can do that."""
    if path.is_dir():
        with skipping(NO_FOLDER_SYNC):
            _fsync(path, NO_FOLDER_SYNC)
    else:
        _fsync(path, NO_SYNC)


def _fsync(path: Path, unsupported: frozenset[int]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with skipping(unsupported):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder.

    Raises Unsupported where the file system cannot do that, as some object stores with folders.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            raise Unsupported(error.errno, "rename this", str(target)) from None
        raise


def apply_umask(paths: Iterable[Path]) -> None:
    """Give files that a library has created for their owner alone the mode that ``open`` would have given them.

    The umask cannot be read without changing it for all threads, and a folder may have an access control list. So a
    new file shows the mode.

    Args:
        paths: files in one folder, or in folders with the same rules. Only those with mode 0600 are changed.
    """
    private = [path for path in paths if stat.S_IMODE(path.lstat().st_mode) == PRIVATE]
    if not private:
        return
    example = private[0].with_name(f".mode-{uuid.uuid4().hex[:8]}")
    example.touch()
    mode = stat.S_IMODE(example.stat().st_mode)
    example.unlink()
    for path in private:
        with skipping(NO_MODES):
            path.chmod(mode)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system, such as a full disk's, the name of what was being written; writing itself names none."""
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it takes its place atomically, on error it goes."""
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
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
def making(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a new folder beside ``folder``; on success it takes its name, unless another process was first.

    Args:
        replace: what has the name makes way, by renaming, so that a reader never sees half of either.
    """
    temporary, old = (
        folder.with_name(f".{folder.name}.{why}-{uuid.uuid4().hex[:8]}") for why in ("tmp", "old")
    )
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
            if not folder.is_dir():
                raise
        fsync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Replace ``path`` by ``value`` as JSON, readable by people, atomically.

    Numbers that are not finite become null, as in ``to_json``.
    """
    write_text(path, to_json(value, indent=1, ensure_ascii=False) + "\n")


def to_json(value: object, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """Return a value as standard JSON, in which a number that is not finite is null.

    ``json.dumps`` would write NaN and Infinity, which JSON does not have and most parsers reject.

    Args:
        value: dicts, lists, tuples, strings, numbers, booleans and None.
        indent: spaces of each level; None writes one line.
        ensure_ascii: whether other characters are escaped.
    """
    standard = finite(value)
    return json.dumps(standard, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a copy of a value of JSON with None in place of each NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value that JSON stands for. Raises ValueError where it is none, or nests too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value of a file of JSON. Raises OSError, and ValueError as ``parse_json`` does."""
    return parse_json(path.read_text(encoding="utf-8"))


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a whole folder; another process may do so at the same time."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def unusable(folder: Path) -> str | None:
    """Return why a folder cannot be made, or nothing be written into it, as far as that is known before trying."""
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return None
    return f"{place} is not a folder that this user may write to"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def row_of(path: Path) -> dict[str, Any]:
    """Return what a manifest says of a file: its size in bytes, its SHA-256."""
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def problem_of(path: Path, row: dict[str, Any]) -> str | None:
    """Return how a file differs from its ``row_of`` then, or None where every byte is as it was. Raises OSError."""
    file_stat = path.lstat()
    if not stat.S_ISREG(file_stat.st_mode):
        return "is not a file"
    if file_stat.st_size != row["size"]:
        return f"has {file_stat.st_size} bytes, should have {row['size']}"
    return None if sha256(path) == row["sha256"] else "is damaged: its SHA-256 is another one"


@contextlib.contextmanager
def locked(path: Path, busy: str, status: int = 2, *, users: str = "processes") -> Iterator[None]:
    """Hold ``path`` as a lock that is released when this process ends.

    On a file system without locks, one line says that a second holder will not be detected, and the block runs.

    Args:
        busy: the message if another process has the lock; "{pid}" becomes its process id.
        status: the exit status of that message.
        users: the word for the processes that the lock separates, in the plural, for that line.

    Raises BadInput when another process holds it.
    """
    with open(path, "a+b", buffering=0) as file:
        try:
            with naming(path):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BadInput(
                busy.format(pid=file.read().decode().strip() or "unknown"), status
            ) from None
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
    """A file that text is appended to; what the disk does not take is kept for the next ``write``.

    When that returns, the system has the text: it outlives a kill, and after an ``fsync`` a power cut.

    Raises OSError where it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file, self._left = open(path, "ab", buffering=0), b""
        self._problem: str | None = None

    def write(self, text: str = "") -> str | None:
        """Append to the file; return what the user should know: that it cannot be written, and when it can again."""
        before, self._problem = self._problem, None
        self._left += text.encode("utf-8", "backslashreplace")
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
        except OSError as error:
            self._problem = error.strerror
        if self._problem and not before:
            return f"{self.path}: {self._problem}: new text is kept in memory and written later; {space_fix(self.path)}"
        return f"{self.path}: is complete again" if before and not self._problem else None

    def close(self) -> str | None:
        """Try once more, and close it; return what the user should know: that its end is lost."""
        self.write()
        self._file.close()
        lost = (
            f"{self.path}: {self._problem}: the end of the file is lost, {len(self._left):,} bytes"
        )
        return lost if self._problem else None


def network_mount(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the kind of network file system that ``path`` lies on, or None for a local one (or where it is unknown)."""
    path, longest, innermost = path.resolve(), 0, ""
    for line in mounts.read_text(errors="replace").splitlines() if mounts.is_file() else ():
        _, point, kind, *_ = line.split(" ")
        # So the kernel writes a space; of two at one place the later counts.
        if len(point) >= longest and path.is_relative_to(point.replace("\\040", " ")):
            longest, innermost = len(point), kind
    return innermost if NETWORK_FILE_SYSTEMS.fullmatch(innermost) else None
