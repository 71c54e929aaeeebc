"""What the terminal shows of what is logged."""

import contextlib
import io
import logging
import os
import sys

import pytest
from tqdm import tqdm

from ursa_minor.base import console

log = logging.getLogger("ursa_minor.room.file")


def test_a_line_goes_to_standard_error_once_as_it_is_and_an_error_is_called_one(capsys, caplog):
    for _ in range(3):
        console.start()
    log.debug("unseen")
    log.info("data     50% of {it}")
    log.warning("hub: waits")
    log.error("no push of step 1")
    logging.getLogger("somebody.else").warning("theirs")
    assert capsys.readouterr() == (
        "",
        "data     50% of {it}\nhub: waits\nerror: no push of step 1\n",
    )
    assert caplog.messages == ["theirs"]


def test_a_terminals_lines_are_broken_between_words_below_their_column_and_a_pipes_are_whole(
    monkeypatch,
):
    monkeypatch.setenv("COLUMNS", "40")
    words = "a small GPT-2 of 1.3M parameters that reads a little text"
    stream = io.StringIO()
    console.start(stream=stream)
    log.info(f"model    {words}")
    assert stream.getvalue() == f"model    {words}\n"
    stream.isatty = lambda: True
    log.info(f"model    {words}")
    lines = stream.getvalue().splitlines()[1:]
    assert (
        len(lines) > 1 and all(len(line) <= 40 for line in lines) and lines[1].startswith(" " * 9)
    )
    assert " ".join(line.removeprefix("model").strip() for line in lines) == words


def test_a_line_stands_beside_a_progress_bar(capsys):
    console.start()
    with tqdm(total=10, initial=3, ascii=True, mininterval=0) as bar:
        log.info("a line")
        bar.update(1)
    err = capsys.readouterr().err
    cleared, _, after = err.partition("a line\n")
    assert cleared.endswith("\r") and "3/10" in cleared and "4/10" in after


def test_a_run_s_log_holds_what_was_shown_before_and_after_it_is_begun(tmp_path, capsys):
    path = tmp_path / "run.log"
    console.start()
    log.info("\x1bc the plan of http://me:secret@h/x")
    console.log_to_file(path)
    log.info("step 1")
    console.say("error: bad data")  # as what ends a run is shown
    assert path.read_text() == "\\x1bc the plan of http://redacted@h/x\nstep 1\nerror: bad data\n"
    console.start()
    log.info("resumed")
    console.log_to_file(path)
    assert path.read_text().endswith("bad data\nresumed\n") and "resumed" in capsys.readouterr().err
    console.log_to_file(tmp_path / "nowhere" / "run.log")
    log.info("continues without")


def test_records_of_a_library_are_redacted(tmp_path, capsys):
    """The reader of a stream gives our handler to huggingface_hub, which reports its retries."""
    console.start()
    console.log_to_file(tmp_path / "run.log")
    (terminal,) = logging.getLogger("ursa_minor").handlers
    library = logging.Logger("huggingface_hub")
    library.addHandler(terminal)
    library.warning("HTTP Error 429 for %s", "https://me:secret@h/x?token=secret\x1b[2J")
    expected = "HTTP Error 429 for https://redacted@h/x?redacted\n"
    assert capsys.readouterr().err == expected
    assert (tmp_path / "run.log").read_text() == expected


def test_a_terminal_that_nobody_reads_any_more_ends_no_run_and_its_file_has_the_lines(
    tmp_path, monkeypatch
):
    """As `... 2>&1 | tee log` has it whose tee has died."""
    reader, writer = os.pipe()
    console.start()
    console.log_to_file(tmp_path / "run.log")
    with monkeypatch.context() as at, open(writer, "w") as terminal:
        at.setattr(sys, "stderr", terminal)
        log.info("one")
        assert os.read(reader, 10) == b"one\n"
        os.close(reader)
        log.info("two")
        log.info("three")
        sys.stderr.write("of a library")
        os.write(writer, b"of native code")
        console.say("error: four")
    assert (tmp_path / "run.log").read_text() == "one\ntwo\nthree\nerror: four\n"


def test_a_terminal_on_a_full_disk_ends_no_run(monkeypatch, capsys):
    console.start()
    with (
        monkeypatch.context() as full,
        contextlib.suppress(OSError),
        open("/dev/full", "w") as disk,
    ):
        full.setattr(sys, "stderr", disk)
        log.info("one")
    log.info("two")
    assert capsys.readouterr().err == "two\n"


def test_another_process_shows_only_the_errors_that_it_alone_knows(capsys):
    console.start(is_main=False)
    log.info("step 1")
    log.warning("a retry")
    log.error("no checkpoint at step 5")
    assert capsys.readouterr() == ("", "error: no checkpoint at step 5\n")


def test_lines_for_a_reader_go_to_its_pipe_at_once_and_one_that_has_gone_is_an_error(capsys):
    raw = io.BytesIO()
    console.start(stream=io.TextIOWrapper(raw, "utf-8"))
    log.info("validation: 3 tokens")
    assert raw.getvalue() == b"validation: 3 tokens\n" and capsys.readouterr() == ("", "")
    console.start(stream=open("/dev/full", "w"))
    with pytest.raises(OSError):
        log.info("x")


def test_generated_text_is_clean_on_a_terminal_and_byte_for_byte_in_a_pipe_or_file(
    tmp_path, monkeypatch
):
    text = "a\x1b[2J é \u202e中\n"
    with open(tmp_path / "out", "w", encoding="latin-1") as file, monkeypatch.context() as at:
        at.setattr(sys, "stdout", file)
        file.write("before ")
        console.write(text)
    assert (tmp_path / "out").read_bytes() == b"before " + text.encode()
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="latin-1") as terminal, monkeypatch.context() as at:
        at.setattr(sys, "stdout", terminal)
        console.write(text)
        assert os.read(ours, 100) == b"a\\x1b[2J \xe9 \\u202e\\u4e2d\r\n"
    os.close(ours)
