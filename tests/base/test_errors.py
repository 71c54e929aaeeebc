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
    monkeypatch.delenv("RANK", raising=False)
    assert raising(BadInput(["one", "two"]))() == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: one\nerror: two\n")


def test_status_of_bad_input_is_the_exit_status(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert raising(BadInput("busy", 75))() == 75 and raising(BadInput("bad"))() == 2
    assert capsys.readouterr().err == "error: busy\nerror: bad\n"
    assert BadInput(["a"]).status == 2 and BadInput(["a"], 75).status == 75


def test_stopped_training_exits_1_with_its_words(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert raising(TrainingStopped("diverged"))() == 1
    assert capsys.readouterr().err == "error: diverged\n"


def test_only_the_first_process_says_it_and_all_exit_alike(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert raising(BadInput("one"))() == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert raising(BadInput("one"))() == 2
    assert capsys.readouterr().err == "error: one\n"


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


def test_bad_input_is_a_value_error_that_holds_all_lines():
    error = BadInput(line for line in ("a", "b"))
    assert isinstance(error, ValueError) and error.lines == ["a", "b"] and str(error) == "a\nb"
    assert BadInput("alone").lines == ["alone"]


def test_what_one_process_alone_knows_it_says_whichever_it_is(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    for alone, said in ((False, ""), (True, "error: out of memory\n")):

        @exit_on_bad_input
        def main(alone=alone):
            raise TrainingStopped("out of memory", alone=alone)

        assert main() == 1 and capsys.readouterr().err == said
