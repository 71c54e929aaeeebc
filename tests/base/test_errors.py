"""Bad input is said in the user's words, one line each, and becomes an exit status."""

import errno
import os

import pytest

from ursa_minor.base import cli, files
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput, TrainingStopped


def raising(error):
    @exit_on_bad_input
    def main():
        raise error if isinstance(error, BaseException) else error() or AssertionError

    return main


def filled():
    with open("/dev/full", "w") as file:
        file.write("x")


def test_what_the_machine_refuses_is_one_line_with_the_name_of_the_place_and_no_traceback(
    tmp_path, capsys
):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {  # 1 where it may pass, 2 where the user has chosen the place
        1: [
            filled,
            *(OSError(number, "x", "a") for number in (errno.EIO, errno.EMFILE, errno.EFBIG)),
        ],
        2: [
            lambda: open(tmp_path / "file" / "a"),
            lambda: os.listdir(tmp_path / "loop"),
            lambda: open(tmp_path),
        ],
    }
    cases[2] += [
        lambda: open(tmp_path / ("a" * 300)),
        PermissionError(errno.EACCES, "x", b"runs/x"),
    ]
    for status, problems in cases.items():
        for problem in problems:
            assert raising(problem)() == status
            line = capsys.readouterr().err
            assert line.startswith("error: ") and line.count("\n") == 1 and line.count(": ") >= 2, (
                line
            )
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        assert raising(error)() == 1 and capsys.readouterr().err.startswith(
            "error: memory ran out: "
        )
    assert raising(OSError(errno.EROFS, "x", "http://me:canary@host/a"))() == 2
    assert capsys.readouterr().err.startswith(
        "error: http://redacted@host/a: Read-only file system: use another place"
    )


def test_a_full_disk_has_a_name_also_where_a_library_in_rust_meets_it(tmp_path, capsys):
    """So do errors that the write itself raised, which have none."""
    for problem in (filled, Exception("I/O error: No space left on device (os error 28)")):
        assert raising(problem)() == 1
        assert capsys.readouterr().err.startswith("error: No space left on device: free some space")
        with (
            pytest.raises(OSError, match="No space left on device: '.*/runs'"),
            files.naming(tmp_path / "runs"),
        ):
            raising(problem).__wrapped__()
        with (
            pytest.raises(OSError, match="No space left on device: '.*/a'"),
            files.replacing(tmp_path / "a"),
        ):
            raising(problem).__wrapped__()


def without_inodes(place):
    """What os.statvfs returns where 98% of the space is free and no file can be created."""
    return os.statvfs_result((4096, 4096, 100, 98, 98, 1000, 0, 0, 0, 255))


@pytest.mark.parametrize("name", ["runs/new/file", b"runs/new/file"])
def test_disk_without_inodes_names_inodes(monkeypatch, capsys, name):
    full = OSError(errno.ENOSPC, "No space left on device", name)
    monkeypatch.setattr(os, "statvfs", without_inodes)
    assert raising(full)() == 1
    line = capsys.readouterr().err
    assert line.startswith(
        "error: runs/new/file: No space left on device: no inodes are left there (df -i): delete files"
    )
    assert line.endswith("; the same command resumes\n")


def test_full_disk_behind_a_descriptor_has_one_line(capsys):
    """The error of an open descriptor has its number instead of a path."""
    assert raising(OSError(errno.ENOSPC, "x", 3))() == 1
    assert (
        capsys.readouterr().err
        == "error: 3: No space left on device: free some space; the same command resumes\n"
    )


@pytest.mark.parametrize("disk", [(0, 0), (1000, 1)])
def test_disk_with_inodes_or_none_at_all_needs_space(monkeypatch, capsys, disk):
    """Btrfs and others report 0 of 0 inodes."""
    files_total, files_free = disk
    result = os.statvfs_result((4096, 4096, 100, 0, 0, files_total, files_free, files_free, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda place: result)
    assert raising(OSError(errno.ENOSPC, "x", "a"))() == 1
    assert (
        "No space left on device: free some space; the same command resumes"
        in capsys.readouterr().err
    )


def test_quota_may_be_of_files(capsys):
    assert raising(OSError(errno.EDQUOT, "x", "a"))() == 1
    assert "a quota limits space or the number of files (quota -s)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOLCK])
def test_operation_that_a_file_system_lacks_names_another_place(capsys, number):
    assert raising(OSError(number, "x", "runs/a"))() == 2
    line = capsys.readouterr().err
    assert line.startswith("error: runs/a: ") and "--output_dir" in line and line.count("\n") == 1


def test_errors_that_may_be_our_own_bugs_keep_their_traceback():
    for error in (
        ZeroDivisionError(),
        FileNotFoundError(errno.ENOENT, "x", "a"),
        PermissionError(errno.EACCES, "x"),
    ):
        with pytest.raises(type(error)):
            raising(error)()


@pytest.mark.parametrize(("kind", "status"), [(BadInput, 2), (TrainingStopped, 1)])
def test_error_message_is_redacted(capsys, kind, status):
    quoted = OSError("cannot open http://me:canary@host/a.csv?token=canary \x1b]0;title\x07")
    assert raising(kind(f"data_files: {quoted}"))() == status
    expected = (
        "error: data_files: cannot open http://redacted@host/a.csv?redacted \\x1b]0;title\\x07\n"
    )
    assert capsys.readouterr().err == expected


def test_bad_input_prints_each_line_and_exits_2(monkeypatch, capsys):
    """Or with a status of its own. What all processes know, the first one says; what one alone knows, that one."""
    for rank, error, status, err in (
        ("0", BadInput(line for line in ("one", "two")), 2, "error: one\nerror: two\n"),
        ("0", BadInput("busy", 75), 75, "error: busy\n"),
        ("1", BadInput("one"), 2, ""),
        ("0", TrainingStopped("diverged"), 1, "error: diverged\n"),
        ("1", TrainingStopped("diverged"), 1, ""),
        (
            "1",
            TrainingStopped("out of memory", print_on_every_process=True),
            1,
            "error: out of memory\n",
        ),
    ):
        monkeypatch.setenv("RANK", rank)
        assert raising(error)() == status and capsys.readouterr() == ("", err)
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setenv(
        "TORCHELASTIC_RUN_ID", "none"
    )  # the first process prints before the launcher ends all
    for rank, expected in (("0", []), ("1", [cli.SILENT_SECONDS])):
        monkeypatch.setenv("RANK", rank)
        assert raising(BadInput("one"))() == 2 and waited == expected
    assert exit_on_bad_input(lambda n, *, more: n + more)(40, more=2) == 42
