"""Durable files: whole or old, and locks that die with their holder."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.base import files
from pretrain.base.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from pretrain.base import files
from pretrain.base.errors import BadInput
try:
    with files.locked(Path(sys.argv[1]), "held by {pid}"):
        print("held", flush=True)
        sys.stdin.read()
except BadInput as error:
    print(error, flush=True)
"""


def other_process(lock):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_replacing_takes_the_place_of_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with files.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == path.parent
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_replacing_leaves_the_old_file_and_no_litter_on_error(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_replacing_syncs_the_bytes_before_and_the_folder_after_the_rename(tmp_path, monkeypatch):
    done = []
    real = os.replace
    monkeypatch.setattr(files, "fsync", lambda path: done.append(("fsync", path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("replace", a)), real(a, b)))
    with files.replacing(tmp_path / "a") as temporary:
        temporary.write_text("x")
    assert done == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


def test_a_folder_that_is_made_has_its_name_only_when_it_is_whole(tmp_path):
    folder = tmp_path / "made"
    with files.making(folder) as temporary:
        (temporary / "a").write_text("whole")
        (temporary / "deep").mkdir()
        assert not folder.exists() and temporary.parent == tmp_path and temporary.name.startswith(".made.")
    assert (folder / "a").read_text() == "whole" and (folder / "deep").is_dir()
    assert list(tmp_path.iterdir()) == [folder]


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


def test_a_folder_whose_making_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), files.making(tmp_path / "made") as temporary:
        (temporary / "a").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_making_syncs_the_names_after_the_rename(tmp_path, monkeypatch):
    done = []
    real = os.rename
    monkeypatch.setattr(files, "fsync", lambda path: done.append(("fsync", path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("rename", b)), real(a, b)))
    with files.making(tmp_path / "made"):
        pass
    assert done[-2:] == [("rename", tmp_path / "made"), ("fsync", tmp_path)]


def test_text_and_json_are_utf8(tmp_path):
    files.write_text(tmp_path / "t", "é中\n")
    assert (tmp_path / "t").read_bytes() == "é中\n".encode()
    files.write_json(tmp_path / "j", {"é": [1]})
    assert json.loads((tmp_path / "j").read_bytes()) == {"é": [1]} and "é".encode() in (tmp_path / "j").read_bytes()


def test_sha256_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_a_second_process_is_refused_with_the_holders_pid(tmp_path):
    with files.locked(tmp_path / "lock", "{pid}"):
        second = other_process(tmp_path / "lock")
        out, _ = second.communicate(timeout=20)
    assert out == f"held by {os.getpid()}\n"


def test_a_refused_lock_has_the_status_that_it_was_given(tmp_path):
    with files.locked(tmp_path / "lock", "x"):
        for words, status in (((), 2), ((75,), 75)):
            with pytest.raises(BadInput) as caught, files.locked(tmp_path / "lock", "held by {pid}", *words):
                pass
            assert caught.value.status == status and str(caught.value) == f"held by {os.getpid()}"
    with files.locked(tmp_path / "lock", "x", 75):
        pass


def test_lock_is_free_after_the_block_and_after_kill_9(tmp_path):
    lock = tmp_path / "lock"
    holder = other_process(lock)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"busy with {holder.pid}$"), files.locked(lock, "busy with {pid}"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    for _ in range(2):
        with files.locked(lock, "busy"):
            assert lock.read_text() == f"{os.getpid()}\n"


def network_mount(tmp_path, path, *mounts):
    """The answer where these are mounted: (place, kind)."""
    table = tmp_path / "mounts"
    table.write_text("".join(f"from {place} {kind} rw,relatime 0 0\n" for place, kind in mounts))
    return files.network_mount(Path(path), table)


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/home/data", None),
        ("/srv/data/x", "nfs4"),
        ("/srv", "nfs4"),
        ("/srv2/data", None),  # begins alike
        ("/srv/fast/data", None),  # a local disk under a network one
        ("/srv/fast/far/data", "fuse.sshfs"),  # and the other way round
        ("/srv/fast/farther", None),
        ("/my disk/data", "cifs"),
        ("/my", None),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_innermost_mount_decides_whether_a_folder_lies_on_the_network(tmp_path, path, kind, backwards):
    mounts = [("/", "overlay"), ("/srv", "nfs4"), ("/srv/fast", "ext4"), ("/srv/fast/far", "fuse.sshfs")]
    mounts += [(r"/my\040disk", "cifs"), ("/proc", "proc")]
    assert network_mount(tmp_path, path, *(mounts[::-1] if backwards else mounts)) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "fuse.s3fs"])
def test_network_file_systems_are_known(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "ext4"), ("/data", kind)) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "nfsd", "fuseblk", "fuse.lxcfs"])
def test_local_file_systems_are_no_network(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "nfs"), ("/data", kind)) is None


def test_a_link_lies_where_it_leads_to(tmp_path, monkeypatch):
    for name in ("here", "far"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far")
    mounts = [("/", "ext4"), (tmp_path / "far", "nfs")]
    assert network_mount(tmp_path, tmp_path / "here" / "link" / "data", *mounts) == "nfs"
    monkeypatch.chdir(tmp_path)
    assert network_mount(tmp_path, "far/data", *mounts) == "nfs" and network_mount(tmp_path, "here", *mounts) is None


def test_a_machine_without_a_table_of_mounts_or_with_an_odd_one_is_not_known(tmp_path):
    assert files.network_mount(tmp_path, tmp_path / "none") is None
    (tmp_path / "odd").write_bytes(b"\nx\nfrom /\nfrom \xff nfs rw 0 0\n")
    assert files.network_mount(tmp_path, tmp_path / "odd") is None
