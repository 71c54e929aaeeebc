"""Bad input is said in the user's words, one line each, and becomes an exit status."""

import subprocess
import sys

import pytest
from conftest import ROOT

from pretrain.base.errors import BadInput, TrainingStopped, exit_on_bad_input


def raising(error):
    @exit_on_bad_input
    def main():
        raise error

    return main


def test_bad_input_prints_each_line_and_exits_2(capsys, monkeypatch):
    """Or with a status of its own; stopped training exits 1."""
    monkeypatch.delenv("RANK", raising=False)
    for error, status, err in (
        (BadInput(line for line in ("one", "two")), 2, "error: one\nerror: two\n"),
        (BadInput("busy", 75), 75, "error: busy\n"),
        (TrainingStopped("diverged"), 1, "error: diverged\n"),
    ):
        assert raising(error)() == status and capsys.readouterr() == ("", err)


def test_our_own_faults_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())()


def test_a_traceback_shows_no_secret_of_a_url():
    lines = (
        "import sys",
        "from pretrain.base.errors import exit_on_bad_input",
        "fetch = exit_on_bad_input(lambda url: open(url))",
        "fetch(sys.argv[1])",
    )
    url = "http://me:canary@127.0.0.1/a.csv?token=canary"
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), url], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr
    assert "FileNotFoundError" in done.stderr and "http://redacted@127.0.0.1/a.csv?redacted" in done.stderr
    assert "canary" not in done.stderr


def test_exit_status_of_main_is_passed_on_with_its_arguments():
    assert exit_on_bad_input(lambda n, *, more: n + more)(40, more=2) == 42
    assert exit_on_bad_input(lambda: None)() == 0


def test_what_all_processes_know_the_first_one_says_and_what_one_alone_knows_that_one(monkeypatch, capsys):
    everyone, alone = BadInput("one"), TrainingStopped("out of memory", alone=True)
    for rank, error, status, err in (
        ("0", everyone, 2, "error: one\n"),
        ("1", everyone, 2, ""),
        ("1", TrainingStopped("diverged"), 1, ""),
        ("1", alone, 1, "error: out of memory\n"),
    ):
        monkeypatch.setenv("RANK", rank)
        assert raising(error)() == status and capsys.readouterr().err == err
