"""Durable files: atomic replacement, locks, logs, mounts, and errors of file systems."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput, Unsupported, machine_error

UNSUPPORTED = [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS]


def failing_call(number):
    """Return a system call that fails with this error number."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def calls(monkeypatch):
    """Return the calls of fsync, os.replace and os.rename, with the file that each one concerns."""
    calls = []
    real_replace = os.replace
    real_rename = os.rename

    def fsync(path):
        calls.append(("fsync", path))

    def replace(source, target):
        calls.append(("replace", source))
        real_replace(source, target)

    def rename(source, target):
        calls.append(("rename", target))
        real_rename(source, target)

    monkeypatch.setattr(files, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", rename)
    return calls


def test_windows_is_answered_with_wsl_2():
    code = "import sys; sys.modules['fcntl'] = None; import ursa_minor.base.files"

    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Linux or macOS" in line
    assert "WSL 2" in line


# Atomic writes.


def test_file_is_synced_before_it_is_replaced(tmp_path, calls):
    path = tmp_path / "a"
    path.write_text("old")

    with files.replacing(path) as temporary:
        temporary.write_text("new")
        text_before = path.read_text()

    assert temporary.parent == path.parent
    assert text_before == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    assert calls == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


def test_failed_replacement_keeps_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")

    with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_folder_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), files.create_folder(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("half")
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


def test_folder_is_named_when_complete(tmp_path, calls):
    folder = tmp_path / "folder"

    with files.create_folder(folder) as temporary:
        (temporary / "a").write_text("text")
        (temporary / "deep").mkdir()
        exists_early = folder.exists()

    assert not exists_early
    assert temporary.parent == tmp_path
    assert temporary.name.startswith(".folder.")
    assert (folder / "a").read_text() == "text"
    assert (folder / "deep").is_dir()
    assert list(tmp_path.iterdir()) == [folder]
    assert calls[-2:] == [("rename", folder), ("fsync", tmp_path)]


def test_folder_of_another_process_is_kept(tmp_path):
    folder = tmp_path / "folder"

    with files.create_folder(folder) as slower:
        (slower / "a").write_text("slower")
        (slower / "b").write_text("slower")
        with files.create_folder(folder) as faster:
            (faster / "a").write_text("faster")

    assert slower != faster
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_text() == "faster"
    assert list(tmp_path.iterdir()) == [folder]


# Locks.


@pytest.fixture
def lock_holder(tmp_path):
    """Return the process id of a process that holds ``tmp_path / "lock"``."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        with files.locked(tmp_path / "lock", "x"):
            os.write(writer, b"held")
            signal.pause()
    assert os.read(reader, 4) == b"held"
    yield process_id
    if not has_ended(process_id):
        kill(process_id)
    os.close(reader)
    os.close(writer)


def kill(process_id):
    """Kill a child process and wait for its end."""
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)


def has_ended(process_id):
    """Return whether there is no such child process any more."""
    try:
        os.waitpid(process_id, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def test_lock_file_contains_process_id(tmp_path):
    with files.locked(tmp_path / "lock", "x"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize(("arguments", "status"), [((), 2), ((75,), 75)])
def test_held_lock_is_rejected_with_its_holder(tmp_path, lock_holder, arguments, status):
    with pytest.raises(BadInput, match=f"busy with {lock_holder}$") as caught:
        files.locked(tmp_path / "lock", "busy with {pid}", *arguments).__enter__()

    assert caught.value.status == status


def test_lock_of_a_killed_process_is_free(tmp_path, lock_holder):
    kill(lock_holder)

    with files.locked(tmp_path / "lock", "busy"):
        pass


def test_lock_is_free_after_the_block(tmp_path):
    for _ in range(2):
        with files.locked(tmp_path / "lock", "busy"):
            pass


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.ENOLCK])
def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(files.fcntl, "flock", failing_call(number))

    with files.locked(tmp_path / "lock", "busy", users="trainers"):
        text = (tmp_path / "lock").read_text()

    assert text == f"{os.getpid()}\n"
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: this file system has no locks ({os.strerror(number)})")
    assert "two trainers in the same folder" in message


def test_other_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", failing_call(errno.EIO))

    with pytest.raises(OSError, match=r"'.*lock'"), files.locked(tmp_path / "lock", "busy"):
        pass


# File systems that lack an operation.


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.EBADF])
def test_file_system_without_sync_is_written_to(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", failing_call(number))

    files.write_text(tmp_path / "a", "text")
    with files.create_folder(tmp_path / "folder") as folder:
        (folder / "b").write_text("text")

    assert (tmp_path / "a").read_text() == "text"
    assert (tmp_path / "folder" / "b").read_text() == "text"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_other_error_of_a_sync_is_raised(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", failing_call(number))

    with pytest.raises(OSError) as caught:
        files.write_text(tmp_path / "a", "text")

    assert caught.value.errno == number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EISDIR])
def test_folder_that_cannot_be_opened_is_not_synced(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "open", failing_call(number))

    files.fsync(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EISDIR])
def test_file_that_cannot_be_opened_is_an_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "open", failing_call(number))

    with pytest.raises(OSError):
        files.fsync(tmp_path / "file")


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_file_system_without_folder_renames_is_reported(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "rename", failing_call(number))

    with pytest.raises(Unsupported) as caught, files.create_folder(tmp_path / "folder"):
        pass

    (line,) = machine_error(caught.value).lines
    assert line.startswith(f"{tmp_path}/folder: the file system cannot rename this")
    assert "--output_dir" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.EPERM])
def test_file_system_without_modes_is_written_to(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "chmod", failing_call(number))

    with files.replacing(tmp_path / "a") as path:
        path.touch(0o600)

    assert (tmp_path / "a").exists()


# Permissions.


@pytest.fixture
def set_umask():
    """Return os.umask, and restore the umask after the test."""
    previous = os.umask(0o022)
    yield os.umask
    os.umask(previous)


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0o027, 0o640)]
)
def test_private_files_get_mode_of_umask(tmp_path, set_umask, umask, mode):
    """safetensors and tempfile create files that only their owner may read."""
    set_umask(umask)

    with files.create_folder(tmp_path / "folder") as folder:
        (folder / "sub").mkdir()
        (folder / "a").touch(0o600)
        (folder / "sub" / "b").touch(0o600)
        (folder / "script").touch(0o700)
    with files.replacing(tmp_path / "c") as path:
        path.touch(0o600)

    for name in ("folder/a", "folder/sub/b", "c"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
    assert (tmp_path / "folder/script").stat().st_mode & 0o700 == 0o700
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["a", "b", "c", "folder", "script", "sub"]


# Logs.


class Disk:
    """A file on a disk that has space for a number of bytes."""

    def __init__(self, file, space):
        self.file = file
        self.space = space

    def write(self, data):
        if self.space == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.space])
        self.space -= written
        return written

    def close(self):
        self.file.close()


@pytest.fixture
def log(tmp_path):
    """Return a log with the line "one"."""
    log = files.Log(tmp_path / "log")
    assert log.write("one\n") is None
    return log


def test_log_appends_to_its_file(tmp_path, log):
    assert (tmp_path / "log").read_text() == "one\n"
    assert log.close() is None
    log = files.Log(tmp_path / "log")
    log.write("two\n")
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_full_disk_of_a_log_is_reported_once(tmp_path, log):
    log._file = Disk(log._file, space=2)

    first = log.write("two\n")
    second = log.write("three\n")

    assert first.startswith(f"{tmp_path / 'log'}: No space left on device: ")
    assert "kept in memory" in first
    assert "free some space" in first
    assert second is None
    assert (tmp_path / "log").read_text() == "one\ntw"


def test_log_is_completed_when_disk_has_space(tmp_path, log):
    disk = Disk(log._file, space=2)
    log._file = disk
    log.write("two\n")

    disk.space = 100
    message = log.write("é\udcff\n")

    assert message == f"{tmp_path / 'log'}: is complete again"
    assert (tmp_path / "log").read_text() == "one\ntwo\né\\udcff\n"


def test_lost_end_of_a_log_is_reported(tmp_path, log):
    log._file = Disk(log._file, space=1)
    log.write("end\n")

    message = log.close()

    assert message.startswith(f"{tmp_path / 'log'}: No space left on device: ")
    assert "3 bytes" in message


def test_log_on_a_disk_without_inodes_names_inodes(log, monkeypatch):
    log._file = Disk(log._file, space=0)
    disk = os.statvfs_result((4096, 4096, 9, 9, 9, 9, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)

    assert "no inodes are left there (df -i)" in log.write("two")


# Folders and mounts.


@pytest.fixture
def folder_with_links(tmp_path, monkeypatch):
    """Work in a folder with a file, a link to the folder, and two broken links."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_absolute", [True, False])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("file", "file"),
        ("file/x/y", "file"),
        ("gone", "gone"),
        ("gone/x", "gone"),
        ("loop/x", "loop"),
    ],
)
def test_path_that_cannot_be_a_folder_is_named(folder_with_links, name, problem, is_absolute):
    path = folder_with_links / name if is_absolute else Path(name)

    message = files.find_folder_problem(path)

    assert f"{problem} is not a folder that this user may write to" in message


@pytest.mark.parametrize("is_absolute", [True, False])
@pytest.mark.parametrize("name", ["new/x", ".", "link/new"])
def test_possible_folder_is_accepted_without_creating_it(folder_with_links, name, is_absolute):
    path = folder_with_links / name if is_absolute else Path(name)
    names = os.listdir(folder_with_links)

    assert files.find_folder_problem(path) is None
    assert os.listdir(folder_with_links) == names


def test_folder_without_write_permission_is_named(folder_with_links, monkeypatch):
    link = folder_with_links / "link"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != link)

    assert files.find_folder_problem(link / "x").startswith(f"{link} is not a folder")


MOUNTS = r"""
from / overlay rw,relatime 0 0
from /srv/fast/far fuse.sshfs rw,relatime 0 0
from /srv autofs rw,relatime 0 0
from /srv nfs4 rw,relatime 0 0
from /srv/fast ext4 rw,relatime 0 0
from /my\040disk cifs rw,relatime 0 0
from /proc proc rw,relatime 0 0
from /scratch lustre rw,relatime 0 0
""".lstrip()


@pytest.fixture
def mount_table(tmp_path):
    """Return a file like /proc/mounts. ``link`` in the same folder leads to /srv/data."""
    (tmp_path / "link").symlink_to("/srv/data")
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    return table


@pytest.mark.parametrize(
    ("path", "file_system"),
    [
        ("/srv/data/x", "nfs4"),
        ("/srv", "nfs4"),
        ("/srv/fast/far/data", "fuse.sshfs"),
        ("/my disk/data", "cifs"),
        ("/scratch/x", "lustre"),
        ("link/x", "nfs4"),
        ("/home/data", None),
        ("/srv2/data", None),
        ("/srv/fast/data", None),
        ("/srv/fast/farther", None),
        ("/my", None),
    ],
)
def test_innermost_mount_determines_network_file_system(mount_table, path, file_system):
    path = mount_table.parent / path

    assert files.network_mount(path, mount_table) == file_system


def test_network_mount_is_unknown_without_mount_table(tmp_path):
    assert files.network_mount(Path("/srv/data/x"), tmp_path / "none") is None  # as on macOS


# JSON.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_null_for_number_not_finite(value, tmp_path):
    values = {
        "loss": value,
        "sums": [1.5, (value, 2)],
        "name": "NaN",
        "count": 3,
        "known": True,
        "none": None,
    }
    expected = values | {"loss": None, "sums": [1.5, [None, 2]]}

    text = files.to_json(values)
    files.write_json(tmp_path / "a.json", values)

    # parse_constant is called for NaN and Infinity.
    assert json.loads(text, parse_constant=pytest.fail) == expected
    saved_text = (tmp_path / "a.json").read_text()
    assert json.loads(saved_text, parse_constant=pytest.fail) == expected
