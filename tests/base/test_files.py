"""Durable files: whole or old, and locks that die with their holder."""

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


def test_windows_is_answered_in_a_line_that_names_wsl_2():
    without = "import sys; sys.modules['fcntl'] = None; import ursa_minor.base.files"
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: this needs Linux or macOS; on Windows use WSL 2"
    )
    assert len(done.stderr.splitlines()) == 1


def test_replacing_takes_the_place_of_the_old_file(tmp_path, monkeypatch):
    """Its bytes are synced before it has its name, and the name after."""
    done, real, path = [], os.replace, tmp_path / "a"
    path.write_text("old")
    monkeypatch.setattr(files, "fsync", lambda path: done.append(("fsync", path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("replace", a)), real(a, b)))
    with files.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == path.parent
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert done == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


def test_what_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), files.create_folder(tmp_path / "made") as temporary:
        (temporary / "a").write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_made_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    folder, done, real = tmp_path / "made", [], os.rename
    monkeypatch.setattr(files, "fsync", lambda path: done.append(("fsync", path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("rename", b)), real(a, b)))
    with files.create_folder(folder) as temporary:
        (temporary / "a").write_text("whole")
        (temporary / "deep").mkdir()
        assert (
            not folder.exists()
            and temporary.parent == tmp_path
            and temporary.name.startswith(".made.")
        )
    assert (folder / "a").read_text() == "whole" and (folder / "deep").is_dir()
    assert list(tmp_path.iterdir()) == [folder] and done[-2:] == [
        ("rename", folder),
        ("fsync", tmp_path),
    ]


def test_a_folder_that_was_made_first_is_left_as_it_is(tmp_path):
    folder = tmp_path / "made"
    with files.create_folder(folder) as second:
        (second / "a").write_text("second")
        (second / "b").write_text("second")
        with files.create_folder(folder) as first:
            assert first != second
            (first / "a").write_text("first")
    assert [path.name for path in folder.iterdir()] == ["a"] and (
        folder / "a"
    ).read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_lock_is_refused_with_its_holders_pid_and_free_after_the_block_and_after_kill_9(tmp_path):
    lock, (ready, telling) = tmp_path / "lock", os.pipe()
    with files.locked(lock, "x"):
        assert lock.read_text() == f"{os.getpid()}\n"
    if not (holder := os.fork()):
        with files.locked(lock, "x"):
            os.write(telling, b"held")
            signal.pause()
    assert os.read(ready, 4) == b"held"
    for words, status in (((), 2), ((75,), 75)):
        with pytest.raises(BadInput, match=f"busy with {holder}$") as caught:
            files.locked(lock, "busy with {pid}", *words).__enter__()
        assert caught.value.status == status
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with files.locked(lock, "busy"):
        pass


def refusing(number):
    """Return a system call that fails with this error number."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


UNSUPPORTED = [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.EBADF])
def test_file_system_without_sync_is_written_to(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refusing(number))
    files.write_text(tmp_path / "a", "text")
    with files.create_folder(tmp_path / "made") as folder:
        (folder / "b").write_text("text")
    assert (tmp_path / "a").read_text() == (tmp_path / "made" / "b").read_text() == "text"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_real_error_of_a_sync_is_raised(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refusing(number))
    with pytest.raises(OSError) as caught:
        files.write_text(tmp_path / "a", "text")
    assert caught.value.errno == number and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EISDIR])
def test_folder_that_cannot_be_opened_is_not_synced(tmp_path, monkeypatch, number):
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *how: (refusing(number) if path == tmp_path else real)(path, *how)
    )
    files.fsync(tmp_path)
    with pytest.raises(OSError):
        monkeypatch.setattr(os, "open", refusing(number))
        files.fsync(tmp_path / "file")


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.ENOLCK])
def test_file_system_without_locks_is_reported_in_one_line(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(files.fcntl, "flock", refusing(number))
    with files.locked(tmp_path / "lock", "busy", users="trainers"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    reason = f"this file system has no locks ({os.strerror(number)})"
    assert caplog.messages == [
        f"{tmp_path}: {reason}: two trainers in the same folder will not be detected"
    ]


def test_real_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match="'.*lock'"), files.locked(tmp_path / "lock", "busy"):
        pass


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_file_system_that_cannot_rename_folders_is_named(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "rename", refusing(number))
    with pytest.raises(Unsupported) as caught, files.create_folder(tmp_path / "made"):
        pass
    (line,) = machine_error(caught.value).lines
    assert (
        line.startswith(f"{tmp_path}/made: the file system cannot rename this")
        and "--output_dir" in line
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0o027, 0o640)]
)
def test_files_of_a_library_get_the_mode_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with files.create_folder(tmp_path / "made") as folder:
            (folder / "sub").mkdir()
            for path in (folder / "a", folder / "sub" / "b"):
                path.touch(0o600)  # as safetensors and tempfile create files
            (folder / "script").touch(0o700)
        with files.replacing(tmp_path / "c") as path:
            path.touch(0o600)
    finally:
        os.umask(before)
    for path in (tmp_path / "made" / "a", tmp_path / "made" / "sub" / "b", tmp_path / "c"):
        assert path.stat().st_mode & 0o777 == mode
    assert (tmp_path / "made" / "script").stat().st_mode & 0o700 == 0o700
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "a",
        "b",
        "c",
        "made",
        "script",
        "sub",
    ]


@pytest.mark.parametrize("number", [*UNSUPPORTED, errno.EPERM])
def test_file_system_without_modes_is_written_to(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "chmod", refusing(number))
    with files.replacing(tmp_path / "a") as path:
        path.touch(0o600)
    assert (tmp_path / "a").exists()


class Disk:
    """A file on a disk that has ``room`` for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()


def test_no_line_is_lost_to_a_disk_that_is_full_for_a_while(tmp_path):
    path = tmp_path / "log"
    log = files.Log(path)
    assert log.write("one\n") is None and path.read_text() == "one\n"
    log._file = disk = Disk(log._file, room=2)
    assert log.write("two\n") == (
        f"{path}: No space left on device: new text is kept in memory and written later; free some space"
    )
    assert log.write("three\n") is None and path.read_text() == "one\ntw"  # that is said once
    disk.room = 100
    assert log.write("é\udcff\n") == f"{path}: is complete again"
    assert path.read_text() == "one\ntwo\nthree\né\\udcff\n"
    disk.room = 1
    lost = f"{path}: No space left on device: the end of the file is lost, 3 bytes"
    assert log.write("end\n") and log.close() == lost
    assert files.Log(path).close() is None


def test_log_on_a_disk_without_inodes_names_inodes(tmp_path, monkeypatch):
    log = files.Log(tmp_path / "log")
    log._file = Disk(log._file, room=0)
    monkeypatch.setattr(
        os, "statvfs", lambda place: os.statvfs_result((4096, 4096, 9, 9, 9, 9, 0, 0, 0, 255))
    )
    assert "no inodes are left there (df -i)" in log.write("one")


def test_a_folder_that_cannot_be_used_is_known_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(tmp_path)
    places = {
        "file": "file",
        "file/x/y": "file",
        "gone": "gone",
        "gone/x": "gone",
        "loop/x": "loop",
    }
    for name, problem in (places | dict.fromkeys(("new/x", ".", "link/new"))).items():
        for place in (Path(name), tmp_path / name):
            why = files.find_folder_problem(place)
            assert (
                f"{problem} is not a folder that this user may write to" in why
                if problem
                else why is None
            ), name
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path / "link")
    assert files.find_folder_problem(tmp_path / "link" / "x").startswith(
        f"{tmp_path / 'link'} is not a"
    )
    assert not (tmp_path / "new").exists()


def test_the_innermost_mount_decides_whether_a_folder_lies_on_the_network(tmp_path):
    (tmp_path / "link").symlink_to("/srv/data")
    table = tmp_path / "mounts"
    mounts = [
        ("/", "overlay"),
        ("/srv/fast/far", "fuse.sshfs"),
        ("/srv", "autofs"),
        ("/srv", "nfs4"),
    ]
    mounts += [
        ("/srv/fast", "ext4"),
        (r"/my\040disk", "cifs"),
        ("/proc", "proc"),
        ("/scratch", "lustre"),
    ]
    table.write_text("".join(f"from {place} {kind} rw,relatime 0 0\n" for place, kind in mounts))
    local = (
        "/home/data",
        "/srv2/data",
        "/srv/fast/data",
        "/srv/fast/farther",
        "/my",
    )  # some begin alike
    network = {
        "/srv/data/x": "nfs4",
        "/srv": "nfs4",
        "/srv/fast/far/data": "fuse.sshfs",
        "/my disk/data": "cifs",
    }
    for path, kind in (
        network | dict.fromkeys(local) | {"link/x": "nfs4", "/scratch/x": "lustre"}
    ).items():
        assert files.network_mount(tmp_path / path, table) == kind, path
        assert files.network_mount(tmp_path / path, tmp_path / "none") is None  # as macOS has it


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_null_where_a_number_is_not_finite(value, tmp_path):
    record = {
        "loss": value,
        "sums": [1.5, (value, 2)],
        "name": "NaN",
        "count": 3,
        "known": True,
        "none": None,
    }
    wanted = record | {"loss": None, "sums": [1.5, [None, 2]]}
    assert json.loads(files.to_json(record), parse_constant=pytest.fail) == wanted
    files.write_json(tmp_path / "a.json", record)
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == wanted
