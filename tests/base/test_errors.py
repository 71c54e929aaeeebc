"""Errors that the user can fix: messages, exit statuses, and the processes that print them."""

import errno
import os

import pytest

from ursa_minor.base import cli, files
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput, TrainingStopped

FULL_DISK = "error: No space left on device: free some space"


def run_with_error(error):
    """Return the exit status of a script that raises this error."""

    def main():
        raise error

    return exit_on_bad_input(main)()


def error_line(capsys):
    """Return the only line on standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def write_to_full_disk():
    """Raise the error of Python for a full disk, which has no path."""
    with open("/dev/full", "w") as file:
        file.write("x")


def disk_with_inodes(total, free):
    """Return a function like os.statvfs for a disk with space and this number of inodes."""
    result = os.statvfs_result((4096, 4096, 100, 98, 98, total, free, free, 0, 255))
    return lambda path: result


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.EIO, "x", "a"), 1),
        (OSError(errno.EMFILE, "x", "a"), 1),
        (OSError(errno.EFBIG, "x", "a"), 1),
        (OSError(errno.ENOTDIR, "x", "file/a"), 2),
        (OSError(errno.ELOOP, "x", "loop"), 2),
        (OSError(errno.EISDIR, "x", "folder"), 2),
        (OSError(errno.ENAMETOOLONG, "x", "a" * 300), 2),
        (PermissionError(errno.EACCES, "x", b"runs/x"), 2),
    ],
)
def test_system_error_names_path_and_fix(capsys, error, status):
    assert run_with_error(error) == status
    line = error_line(capsys)
    prefix, path, problem, fix = line.split(": ", 3)
    assert prefix == "error"
    assert path == os.fsdecode(error.filename)
    assert problem == os.strerror(error.errno)
    assert fix


@pytest.mark.parametrize("name", ["file/a", "loop", "folder", "a" * 300], ids=lambda name: name[:6])
def test_unusable_path_is_bad_input(tmp_path, capsys, name):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()

    status = exit_on_bad_input(lambda: open(tmp_path / name))()

    assert status == 2
    assert error_line(capsys).startswith(f"error: {tmp_path / name}: ")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_lack_of_memory_is_reported(capsys, error):
    assert run_with_error(error) == 1
    assert error_line(capsys).startswith("error: memory ran out: ")


def test_path_of_system_error_is_redacted(capsys):
    status = run_with_error(OSError(errno.EROFS, "x", "http://me:canary@host/a"))

    assert status == 2
    expected = "error: http://redacted@host/a: Read-only file system: use another place"
    assert error_line(capsys).startswith(expected)


RUST_ERROR = Exception("I/O error: No space left on device (os error 28)")


def raise_rust_error():
    """Raise the error of a library in Rust for a full disk, which is not an OSError."""
    raise RUST_ERROR


@pytest.mark.parametrize("write", [write_to_full_disk, raise_rust_error])
def test_full_disk_is_reported(capsys, write):
    assert exit_on_bad_input(write)() == 1
    assert error_line(capsys).startswith(FULL_DISK)


@pytest.mark.parametrize("write", [write_to_full_disk, raise_rust_error])
def test_full_disk_error_gets_path_of_folder(tmp_path, write):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/runs'"),
        files.naming(tmp_path / "runs"),
    ):
        write()


@pytest.mark.parametrize("write", [write_to_full_disk, raise_rust_error])
def test_full_disk_error_gets_path_of_file(tmp_path, write):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/a'"),
        files.replacing(tmp_path / "a"),
    ):
        write()


@pytest.mark.parametrize("name", ["runs/new/file", b"runs/new/file"])
def test_disk_without_inodes_is_reported(monkeypatch, capsys, name):
    monkeypatch.setattr(os, "statvfs", disk_with_inodes(1000, 0))

    assert run_with_error(OSError(errno.ENOSPC, "No space left on device", name)) == 1
    line = error_line(capsys)
    assert line.startswith("error: runs/new/file: No space left on device: ")
    assert "no inodes are left there (df -i): delete files" in line
    assert line.endswith("; the same command resumes")


@pytest.mark.parametrize(
    ("total", "free"), [(0, 0), (1000, 1)], ids=["btrfs-has-no-inodes", "free-inodes"]
)
def test_full_disk_with_inodes_needs_space(monkeypatch, capsys, total, free):
    monkeypatch.setattr(os, "statvfs", disk_with_inodes(total, free))

    assert run_with_error(OSError(errno.ENOSPC, "x", "a")) == 1
    line = error_line(capsys)
    assert line.endswith("No space left on device: free some space; the same command resumes")


def test_full_disk_names_file_descriptor(capsys):
    """The error of an open descriptor has its number instead of a path."""
    assert run_with_error(OSError(errno.ENOSPC, "x", 3)) == 1
    expected = "error: 3: No space left on device: free some space; the same command resumes"
    assert error_line(capsys) == expected


def test_quota_may_limit_number_of_files(capsys):
    assert run_with_error(OSError(errno.EDQUOT, "x", "a")) == 1
    assert "a quota limits space or the number of files (quota -s)" in error_line(capsys)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOLCK])
def test_unsupported_operation_suggests_another_folder(capsys, number):
    assert run_with_error(OSError(number, "x", "runs/a")) == 2
    line = error_line(capsys)
    assert line.startswith("error: runs/a: ")
    assert "--output_dir" in line


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        FileNotFoundError(errno.ENOENT, "x", "a"),
        PermissionError(errno.EACCES, "x"),
    ],
)
def test_possible_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)) as caught:
        run_with_error(error)

    assert caught.value is error


@pytest.mark.parametrize(("kind", "status"), [(BadInput, 2), (TrainingStopped, 1)])
def test_error_message_is_redacted(capsys, kind, status):
    cause = OSError("cannot open http://me:canary@host/a.csv?token=canary \x1b]0;title\x07")

    assert run_with_error(kind(f"data_files: {cause}")) == status
    expected = (
        "error: data_files: cannot open http://redacted@host/a.csv?redacted \\x1b]0;title\\x07"
    )
    assert error_line(capsys) == expected


TWO_LINES = BadInput(["one", "two"])
BUSY = BadInput("busy", 75)
STOPPED = TrainingStopped("diverged")
STOPPED_HERE = TrainingStopped("out of memory", print_on_every_process=True)


@pytest.mark.parametrize(
    ("rank", "error", "status", "expected"),
    [
        ("0", TWO_LINES, 2, "error: one\nerror: two\n"),
        ("0", BUSY, 75, "error: busy\n"),
        ("0", STOPPED, 1, "error: diverged\n"),
        ("1", TWO_LINES, 2, ""),
        ("1", STOPPED, 1, ""),
        ("1", STOPPED_HERE, 1, "error: out of memory\n"),
    ],
)
def test_main_process_prints_common_errors(monkeypatch, capsys, rank, error, status, expected):
    monkeypatch.setenv("RANK", rank)

    assert run_with_error(error) == status
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(("rank", "expected"), [("0", []), ("1", [cli.SILENT_SECONDS])])
def test_silent_process_waits_for_main_process(monkeypatch, rank, expected):
    """torchrun ends all processes as soon as one has failed."""
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)

    assert run_with_error(BadInput("one")) == 2
    assert waits == expected


def test_lines_may_be_a_generator():
    error = BadInput(line for line in ("one", "two"))

    assert error.lines == ["one", "two"]


def test_wrapped_main_gets_its_arguments():
    main = exit_on_bad_input(lambda number, *, more: number + more)

    assert main(40, more=2) == 42
