"""Log records on the terminal and in run.log, and generated text on standard output."""

import contextlib
import io
import logging
import os
import sys

import pytest
from tqdm import tqdm

from ursa_minor.base import cli, console
from ursa_minor.base.errors import BadInput

log = logging.getLogger("ursa_minor.package.module")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_records_are_shown_once_on_standard_error(capsys, caplog):
    for _ in range(3):
        console.start()

    log.debug("unseen")
    log.info("data     50% of {value}")
    log.warning("hub: waits")
    log.error("no push of step 1")
    logging.getLogger("another.package").warning("theirs")

    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "data     50% of {value}\nhub: waits\nerror: no push of step 1\n"
    assert caplog.messages == ["theirs"]


LONG_TEXT = "a small GPT-2 of 1.3M parameters that reads a little text"


def test_long_line_is_wrapped_on_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    console.start(stream=stream)

    log.info(f"model    {LONG_TEXT}")

    first, *others = stream.getvalue().splitlines()
    assert others
    assert len(first) <= 40
    for line in others:
        assert len(line) <= 40
        assert line.startswith(" " * 9)
    parts = [first.removeprefix("model"), *others]
    assert " ".join(part.strip() for part in parts) == LONG_TEXT


def test_long_line_is_not_wrapped_in_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    console.start(stream=stream)

    log.info(f"model    {LONG_TEXT}")

    assert stream.getvalue() == f"model    {LONG_TEXT}\n"


def test_progress_bar_is_redrawn_after_a_line(capsys):
    console.start()

    with tqdm(total=10, initial=3, ascii=True, mininterval=0) as bar:
        log.info("a line")
        bar.update(1)

    before, _, after = capsys.readouterr().err.partition("a line\n")
    assert "3/10" in before
    assert before.endswith("\r")
    assert "4/10" in after


def test_log_file_contains_all_shown_lines(tmp_path):
    path = tmp_path / "run.log"
    console.start()

    log.info("\x1bc the plan of http://me:secret@h/x")
    console.log_to_file(path)
    log.info("step 1")
    console.say("error: bad data")

    assert path.read_text() == "\\x1bc the plan of http://redacted@h/x\nstep 1\nerror: bad data\n"


def test_log_file_is_continued(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text("step 1\n")
    console.start()

    log.info("resumed")
    console.log_to_file(path)

    assert path.read_text() == "step 1\nresumed\n"
    assert capsys.readouterr().err == "resumed\n"


def test_missing_log_folder_is_ignored(tmp_path, capsys):
    console.start()

    console.log_to_file(tmp_path / "missing" / "run.log")
    log.info("continues")

    assert capsys.readouterr().err == "continues\n"


def test_records_of_a_library_are_redacted(tmp_path, capsys):
    """The reader of a stream gives our handler to huggingface_hub, which reports its retries."""
    console.start()
    console.log_to_file(tmp_path / "run.log")
    (handler,) = logging.getLogger("ursa_minor").handlers
    library = logging.Logger("huggingface_hub")
    library.addHandler(handler)

    library.warning("HTTP Error 429 for %s", "https://me:secret@h/x?token=secret\x1b[2J")

    expected = "HTTP Error 429 for https://redacted@h/x?redacted\n"
    assert capsys.readouterr().err == expected
    assert (tmp_path / "run.log").read_text() == expected


def test_closed_terminal_does_not_end_run(tmp_path, monkeypatch):
    """For example, tee has ended in ``2>&1 | tee log``."""
    reader, writer = os.pipe()
    console.start()
    console.log_to_file(tmp_path / "run.log")

    with monkeypatch.context() as patch, open(writer, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        log.info("one")
        assert os.read(reader, 10) == b"one\n"
        os.close(reader)
        log.info("two")
        log.info("three")
        sys.stderr.write("of a library")
        os.write(writer, b"of native code")
        console.say("error: four")

    assert (tmp_path / "run.log").read_text() == "one\ntwo\nthree\nerror: four\n"


def test_terminal_on_full_disk_does_not_end_run(monkeypatch, capsys):
    console.start()

    terminal = open("/dev/full", "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        log.info("one")
    log.info("two")
    with contextlib.suppress(OSError):  # closing writes "one" again
        terminal.close()

    assert capsys.readouterr().err == "two\n"


def test_other_process_shows_errors_only(capsys):
    console.start(is_main=False)

    log.info("step 1")
    log.warning("a retry")
    log.error("no checkpoint at step 5")

    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "error: no checkpoint at step 5\n"


def test_record_is_written_to_stream_immediately(capsys):
    buffer = io.BytesIO()
    console.start(stream=io.TextIOWrapper(buffer, "utf-8"))

    log.info("validation: 3 tokens")

    assert buffer.getvalue() == b"validation: 3 tokens\n"
    assert capsys.readouterr() == ("", "")


def test_stream_that_cannot_be_written_is_an_error():
    console.start(stream=open("/dev/full", "w"))

    with pytest.raises(OSError):
        log.info("x")


GENERATED_TEXT = "a\x1b[2J é \u202e中\n"


def test_generated_text_is_unchanged_in_file(tmp_path, monkeypatch):
    path = tmp_path / "out"

    with open(path, "w", encoding="latin-1") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        file.write("before ")
        console.write(GENERATED_TEXT)

    assert path.read_bytes() == b"before " + GENERATED_TEXT.encode()


def test_generated_text_is_escaped_on_terminal(monkeypatch):
    reader, writer = os.openpty()

    with open(writer, "w", encoding="latin-1") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        console.write(GENERATED_TEXT)
        output = os.read(reader, 100)
    os.close(reader)

    assert output == b"a\\x1b[2J \xe9 \\u202e\\u4e2d\r\n"


def test_error_is_below_the_progress_bars(capsys):
    @cli.exit_on_bad_input
    def main():
        bar = tqdm(total=10, ascii=True)
        bar.update(3)
        raise BadInput("data_files = a.txt: no such file")

    assert main() == 2

    assert capsys.readouterr().err.splitlines()[-1] == "error: data_files = a.txt: no such file"
