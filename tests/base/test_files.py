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

from pretrain.base import files
from pretrain.base.errors import BadInput


def test_windows_is_answered_in_a_line_that_names_wsl_2():
    without = "import sys; sys.modules['fcntl'] = None; import pretrain.base.files"
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: this needs Linux or macOS; on Windows use WSL 2")
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
    with pytest.raises(ZeroDivisionError), files.making(tmp_path / "made") as temporary:
        (temporary / "a").write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_made_has_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    folder, done, real = tmp_path / "made", [], os.rename
    monkeypatch.setattr(files, "fsync", lambda path: done.append(("fsync", path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("rename", b)), real(a, b)))
    with files.making(folder) as temporary:
        (temporary / "a").write_text("whole")
        (temporary / "deep").mkdir()
        assert not folder.exists() and temporary.parent == tmp_path and temporary.name.startswith(".made.")
    assert (folder / "a").read_text() == "whole" and (folder / "deep").is_dir()
    assert list(tmp_path.iterdir()) == [folder] and done[-2:] == [("rename", folder), ("fsync", tmp_path)]


def test_a_folder_that_was_made_first_is_left_as_it_is(tmp_path):
    folder = tmp_path / "made"
    with files.making(folder) as second:
        (second / "a").write_text("second")
        (second / "b").write_text("second")
        with files.making(folder) as first:
            assert first != second
            (first / "a").write_text("first")
    assert [path.name for path in folder.iterdir()] == ["a"] and (folder / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_lock_is_refused_with_its_holders_pid_and_free_after_the_block_and_after_kill_9(tmp_path, monkeypatch):
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
    no_locks = OSError(errno.ENOLCK, "No locks")  # of this file system: not taken for a holder
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(no_locks))
    with pytest.raises(OSError, match=f"'{lock}'"), files.locked(lock, "held by {pid}"):
        pass


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


def test_a_folder_that_cannot_be_used_is_known_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(tmp_path)
    places = {"file": "file", "file/x/y": "file", "gone": "gone", "gone/x": "gone", "loop/x": "loop"}
    for name, fault in (places | dict.fromkeys(("new/x", ".", "link/new"))).items():
        for place in (Path(name), tmp_path / name):
            why = files.unusable(place)
            assert f"{fault} is not a folder that this user may write to" in why if fault else why is None, name
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path / "link")
    assert files.unusable(tmp_path / "link" / "x").startswith(f"{tmp_path / 'link'} is not a")
    assert not (tmp_path / "new").exists()


def test_the_innermost_mount_decides_whether_a_folder_lies_on_the_network(tmp_path):
    (tmp_path / "link").symlink_to("/srv/data")
    table = tmp_path / "mounts"
    mounts = [("/", "overlay"), ("/srv/fast/far", "fuse.sshfs"), ("/srv", "autofs"), ("/srv", "nfs4")]
    mounts += [("/srv/fast", "ext4"), (r"/my\040disk", "cifs"), ("/proc", "proc"), ("/scratch", "lustre")]
    table.write_text("".join(f"from {place} {kind} rw,relatime 0 0\n" for place, kind in mounts))
    local = ("/home/data", "/srv2/data", "/srv/fast/data", "/srv/fast/farther", "/my")  # some begin alike
    network = {"/srv/data/x": "nfs4", "/srv": "nfs4", "/srv/fast/far/data": "fuse.sshfs", "/my disk/data": "cifs"}
    for path, kind in (network | dict.fromkeys(local) | {"link/x": "nfs4", "/scratch/x": "lustre"}).items():
        assert files.network_mount(tmp_path / path, table) == kind, path
        assert files.network_mount(tmp_path / path, tmp_path / "none") is None  # as macOS has it


def test_what_is_not_finite_is_null_in_json(tmp_path):
    value = {"loss": math.nan, "norms": [math.inf, (-math.inf, 1.5)], "step": 3, "name": "NaN"}
    expected = {"loss": None, "norms": [None, [None, 1.5]], "step": 3, "name": "NaN"}
    files.write_json(tmp_path / "a.json", value)
    for text in ((tmp_path / "a.json").read_text(), files.to_json(value)):
        assert json.loads(text, parse_constant=pytest.fail) == expected
