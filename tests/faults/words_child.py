"""The doors through which words of others reach a person, one after the other, without the work that leads there.

words_child.main(["terminal", "words.json"])
words_child.main(["left", "1", "generate.py", "--model", "m"])  # a script, whose standard output's reader leaves
words_child.main(["check", "urls"])
"""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import logging
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import threading
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from tqdm import tqdm

from pretrain.base import console, files, foreign
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput, TrainingStopped

LIBRARIES = (
    "huggingface_hub",
    "datasets",
    "transformers",
    "urllib3",
    "httpx",
    "fsspec",
    "wandb",
    "trl.trainer",
    "py.warnings",
)


def main(argv: list[str]) -> int | None:
    """Let each of the words of a file (JSON, a list) through a door; or check something; or run a script in odd streams."""
    if argv[0] in STREAMS:
        STREAMS[argv[0]](int(argv[1]))
        sys.argv = argv[2:]
        try:
            return importlib.import_module(Path(argv[2]).stem).main(argv[3:])
        finally:
            for end in at_end:
                end()
    if argv[0] == "check":
        return exit_on_bad_input(CHECKS[argv[1]])()
    return _through(argv)


@exit_on_bad_input
def _through(argv: list[str]) -> int | None:
    door, file = argv
    words = json.loads(Path(file).read_text())
    console.start(is_main=True)
    return DOORS[door](words)


def _terminal(words: list[str]) -> None:
    log = logging.getLogger("pretrain.words_child")
    Path("runs/words").mkdir(parents=True)
    for number, word in enumerate(words):
        if number == len(words) // 2:
            console.keep_in(Path("runs/words/run.log"))  # the file has what came before it, too
        (log.info, log.warning, log.error)[number % 3]("of %s", word)


def _libraries(words: list[str]) -> None:
    for number, word in enumerate(words):
        library = logging.Logger(LIBRARIES[number % len(LIBRARIES)])
        library.addHandler(logging.StreamHandler(sys.stderr))
        library.warning("of %s, %d", word, number)
        library.warning(f"of {word}")
        library.error("%d: %s", word)  # which its format does not fit
        try:
            raise ValueError(word)
        except ValueError:
            library.exception("failed", stack_info=True)


def _warnings(words: list[str]) -> None:
    warnings.simplefilter("always")
    for word in words:
        warnings.warn(word, stacklevel=1)
        warnings.showwarning(word, UserWarning, "a.py", 1)


class _Falls:
    def __init__(self, word: str):
        self.word = word

    def __del__(self):
        raise ValueError(self.word)


def _tracebacks(words: list[str]) -> None:
    def fail(word: str) -> None:
        try:
            raise KeyError(word)
        except KeyError:
            raise RuntimeError(f"while {word}")  # noqa: B904

    for word in words:
        thread = threading.Thread(target=fail, args=(word,))
        thread.start()
        thread.join()
        _Falls(word)
        try:
            fail(word)
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)


def _errors(words: list[str]) -> int:
    def end(error: Exception) -> None:
        raise error

    for word in words:
        for error in (BadInput(word), BadInput([f"of {word}", word]), TrainingStopped(word)):
            exit_on_bad_input(end)(error)
            print(error, *error.args, file=sys.stderr)
    return 2


def _prints(words: list[str]) -> None:
    console.clean_prints()
    for word in words:
        print("of", word)
        sys.stderr.write(f"{word}\n")
        sys.stderr.writelines([f"{word}\n"])
        print({"a": word}, file=sys.stderr)


def _generated(words: list[str]) -> None:
    """Into a pipe every byte; on a terminal the rest of the same."""
    pipe, kept = os.pipe(), os.dup(1)
    os.dup2(pipe[1], 1)
    for word in words:
        console.write(word)
        if (found := os.read(pipe[0], 2**16)) != word.encode():
            os.write(2, b"other bytes in a pipe: " + found.hex().encode())
    main_end, terminal = pty.openpty()
    os.dup2(terminal, 1)
    for word in words:
        console.write(f"{word}\n")
        os.write(kept, os.read(main_end, 2**16).replace(b"\r\n", b"\n"))
    os.dup2(kept, 1)


def _cleaned(words: list[str]) -> None:
    """What files are given: as one text, in one line, twice."""
    for word in words:
        print(foreign.clean(word), foreign.one_line(word), foreign.clean(foreign.clean(word)), sep="\n")
        print(json.dumps(traceback.format_exception_only(BadInput(word)), ensure_ascii=False))


DOORS = {
    "terminal": _terminal,
    "libraries": _libraries,
    "warnings": _warnings,
    "tracebacks": _tracebacks,
    "errors": _errors,
    "prints": _prints,
    "generated": _generated,
    "cleaned": _cleaned,
}


# Texts that cleaning leaves as they are.
FRIENDLY = (
    "",
    "a\tb\nc",
    "mail me@h.org, or a.b@c.d",
    "hf://datasets/me/x@main/a.jsonl and hub://me/run@abc",
    "see https://h/x, then (https://h:80/y). http://[::1]:80/x",
    "5:30 // none; a//b; file:///a/b; C:\\a\\b; \\x1b",
    "/x?a=1&b=2, why? /a?no",
    "a token, a secret; authorization: none; cookies: 3",
    "é 🦣 עברית العربية 👩\u200d👧 a\xa0b\xad",
    "true 12345678 'a' \"b\" <c>",
    "step 3: loss 2.5 | 50%",
)
REDACTED = {
    "https://u:p@h/x": "https://redacted@h/x",
    "https://u:p@w@h:8/x": "https://redacted@h:8/x",
    "https://u:a/b@h/x": "https://redacted",
    "https://h/x#f": "https://h/x",
    "https://h/x?token=a#f": "https://h/x?redacted",
    "https://h/x?b=2&a=1&token=s": "https://h/x?redacted=" + hashlib.sha256(b"a=1&b=2").hexdigest()[:12],
    "https://h/x?sv=1&se=2&sig=s": "https://h/x?redacted",
    "https://h/x?sv=1": "https://h/x?redacted=" + hashlib.sha256(b"sv=1").hexdigest()[:12],
    "https://h/x?redacted": "https://h/x?redacted",
    "https://redacted@h/x?redacted=0123456789ab": "https://redacted@h/x?redacted=0123456789ab",
    "hf://datasets/a@b/c": "hf://datasets/a@b/c",
}
RENEWED = (
    "Expires AWSAccessKeyId Signature X-Amz-Date X-Amz-Expires X-Amz-Signature X-Goog-Date X-Goog-Signature Policy "
)
RENEWED += "Key-Pair-Id token access_token sig q-sign-time x-oss-signature OSSAccessKeyId GoogleAccessId exp hdnts user"
URLS = {"https://h/x": True, "http://u:p@[::1]:8/x?a=1": True, "https://h:x/": False, "https://h /x": False}
URLS |= {"https://h/a{b}": False, "https://[::1/x": False, "https://u:a/b@h/x": False, "https://h:99999/": False}
# What ends a command, its exit status (None: a traceback), and what its line holds.
ENDS: list[tuple[Exception, int | None, tuple[str, ...]]] = [
    *(
        (OSError(number, "why", "a b.bin"), 1, ("a b.bin: ", os.strerror(number), more))
        for number, more in (
            (errno.ENOSPC, "free some space"),
            (errno.EDQUOT, "free some space"),
            (errno.EFBIG, "ulimit -f"),
            (errno.EIO, "dmesg"),
            (errno.ESTALE, "dmesg"),
            (errno.EMFILE, "ulimit -n"),
            (errno.ENFILE, "too many files"),
        )
    ),
    *(
        (OSError(number, "why", b"a b.bin"), 2, ("a b.bin: ", os.strerror(number)))
        for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
    ),
    *(
        (OSError(number, "why", "x"), 2, ("x: ", os.strerror(number)))
        for number in (errno.ENAMETOOLONG, errno.ENOLCK, errno.EOPNOTSUPP)
    ),
    (OSError(errno.ENOSPC, "why"), 1, (os.strerror(errno.ENOSPC), "free some space")),
    (OSError(errno.EACCES, "why"), None, ()),
    (OSError(errno.ECONNRESET, "why", "x"), None, ()),
    (RuntimeError("I/O error: No space left on device (os error 28)"), 1, ("No space", "free some space")),
    (Exception("File too large (os error 27)"), 1, ("ulimit -f",)),
    (MemoryError(), 1, ("memory", "ulimit -v")),
    (RuntimeError("can't start new thread"), 1, ("memory",)),
    (ImportError("x.so: failed to map segment from shared object"), 1, ("memory",)),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, ("memory",)),
    (BadInput("key = 3: must be 4"), 2, ("key = 3: must be 4",)),
    (BadInput(["a\n\tb", "c"], 1), 1, ("error: a b\nerror: c\n",)),
    (TrainingStopped("three bad updates"), 1, ("three bad updates",)),
    (TrainingStopped("another one", alone=True), 1, ("another one",)),
    (BadInput("of this process", alone=True), 2, ("of this process",)),
    (KeyError("x"), None, ()),
]
ENTRY = """
import sys, threading, warnings, logging
from pretrain.base.entry import exit_on_bad_input
@exit_on_bad_input
def main():
    {0}
status = main()
{1}
sys.exit(status)
"""
SECRET = "https://canaryuser:canarypass@h/x?token=canaryquery \x1b[2J"
# How a process ends by itself: what its main does, its exit status, and what it prints then.
PROCESSES = {
    "raise KeyError(S) from ValueError(S)": (1, "Traceback"),
    "raise ExceptionGroup(S, [ValueError(S)])": (1, "ExceptionGroup"),
    "e = ValueError('x'); e.add_note(S); raise e": (1, "ValueError: x"),
    "t = threading.Thread(target=int, args=(S,)); t.start(); t.join()": (0, "invalid literal"),
    "warnings.warn(S)": (0, "UserWarning"),
    "logging.getLogger('a.b').error(S)": (0, "redacted"),
    "raise KeyboardInterrupt": (-2, ""),
    "return 3": (3, ""),
    "pass THEN raise OSError(28, 'x', 'a.bin')": (1, "error: a.bin: No space"),
    "pass THEN raise KeyboardInterrupt": (-2, ""),
    "raise OSError(28, 'x', 'a.bin')": (1, "error: a.bin: No space"),
}


def _friendly() -> None:
    os.environ["A_KEY"], os.environ["B_TOKEN"], os.environ["KEYBOARD"] = "true", "1234567", "canary-1"
    for text in FRIENDLY:
        assert foreign.clean(text) == text, (text, foreign.clean(text))
        record = logging.getLogRecordFactory()("a", 20, "a.py", 1, "%s, %d", (text, 3), None)
        assert (record.msg, record.args) == ("%s, %d", (text, 3)), record.args
    assert foreign.clean("of canary-1") == "of canary-1"
    assert foreign.one_line(" a \n\t b\tc\n") == "a b c"
    os.environ["A_KEY"], os.environ["B_TOKEN"] = "12345678", "12345678/9"
    assert foreign.clean("12345678 12345678/9") == "(A_KEY) (B_TOKEN)", foreign.clean("12345678 12345678/9")


def _urls() -> None:
    for url, wanted in REDACTED.items():
        assert foreign.redact_url(url) == wanted, (url, foreign.redact_url(url))
        assert foreign.clean(f"of '{url}'.") == f"of '{wanted}'.", foreign.clean(f"of '{url}'.")
        hidden = url in ("https://h/x?redacted", "https://redacted@h/x?redacted=0123456789ab")
        assert foreign.is_redacted(url) is hidden and not foreign.is_redacted("https://h/x"), url
        assert foreign.is_redacted(wanted) is ("redacted" in wanted), wanted
    for name in RENEWED.split():
        for way in (str, str.lower, str.upper):
            one, other, third = (f"https://h/x?v={v}&{way(name)}={value}" for v, value in ((1, 2), (1, 3), (2, 3)))
            known = [foreign.redact_url(url) for url in (one, other, third)]
            assert known[0] == known[1] != known[2], known
    assert not foreign.is_redacted("https://u:p@h/x?redacted")
    for url, wanted in URLS.items():
        assert foreign.is_url(url) is wanted, url


def _ends() -> None:
    def end(error: Exception) -> None:
        raise error

    for rank in ("0", "1"):
        os.environ["RANK"] = rank
        for error, status, pieces in ENDS:
            with contextlib.redirect_stderr(io.StringIO()) as shown:
                try:
                    found = exit_on_bad_input(end)(error)
                except Exception:
                    found = None
            silent = isinstance(error, (BadInput, TrainingStopped)) and not error.alone and rank == "1"
            said, pieces = shown.getvalue(), () if silent else pieces
            lines = 2 if pieces and "\nerror" in pieces[0] else bool(pieces)
            assert found == status and all(piece in said for piece in pieces), (error, rank, found, said)
            assert said.count("\n") == ("\n" + said).count("\nerror: ") == lines, (error, rank, said)


def _processes() -> None:
    for does, (status, said) in PROCESSES.items():
        entry = ENTRY.format(*f"S = {SECRET!r}; {does}".split(" THEN "), "")
        done = subprocess.run([sys.executable, "-c", entry], capture_output=True, text=True)
        assert done.returncode == status and said in done.stderr and bool(said) == bool(done.stderr), (does, done)
        assert not any(secret in done.stderr for secret in ("canary", "\x1b")), (does, done)
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):  # and a file that is opened then is not taken for one of them
        does = "print('a'); sys.stderr.write('b'); input if sys.stdin else 1/0; open('kept', 'w').write('c')"
        words = [sys.executable, "-c", ENTRY.format(does, "")]
        done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, text=True)
        assert done.returncode == 0 and Path("kept").read_text() == "c", (closed, done)
        assert done.stderr == ("" if "2>" in closed else "b") and done.stdout == (
            "" if " >&" in f" {closed}" else "a\n"
        )


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _files() -> None:
    """What a log, and a file that takes another's place, do on a full disk, and after it."""
    path = Path("a b.log")
    path.write_text("before\n")
    log = files.Log(path)
    assert log.write("one\n") is None and path.read_text() == "before\none\n"
    _limit(13)
    news = log.write("two\nthree\n")
    assert news and "a b.log: File too large" in news and log.write("four\n") is None
    _limit(-1)
    assert log.write("é\udc80\n") == "a b.log: is whole again" and log.close() is None
    assert path.read_text() == "before\none\ntwo\nthree\nfour\né\\udc80\n"
    log = files.Log(path)
    _limit(path.stat().st_size)
    log.write("kept\n")
    _limit(-1)
    assert log.close() is None and path.read_text().endswith("\nkept\n")
    log = files.Log(path)
    _limit(path.stat().st_size)
    log.write("lost\n")
    assert "a b.log: File too large: its end is lost, 5 bytes" in (log.close() or "")
    _limit(-1)
    path.write_text("old")
    writers = {
        "text": lambda temporary: temporary.write_text("x" * 10**5),
        "safetensors": lambda temporary: save_file({"a": numpy.zeros(10**5)}, temporary),
        "tokenizers": lambda temporary: Tokenizer(models.WordLevel({"x" * 10**5: 0})).save(str(temporary)),
    }
    for name, write in writers.items():
        for kept in ("a b.log", "folder"):

            @exit_on_bad_input
            def put(kept=kept, write=write) -> None:
                if kept == "folder":
                    with files.making(Path(kept)) as temporary:
                        write(temporary / "file")
                with files.replacing(Path(kept)) as temporary:
                    write(temporary)

            with contextlib.redirect_stderr(io.StringIO()) as shown:
                _limit(1000)
                status = put()
                _limit(-1)
            said = shown.getvalue()
            assert status == 1 and said.startswith(f"error: {kept}: File too large") and said.count("\n") == 1, said
            assert path.read_text() == "old" and sorted(os.listdir()) == ["a b.log"], (name, os.listdir())
    with files.making(Path("folder")) as temporary:
        (temporary / "a").write_text("1")
    with files.making(Path("folder")) as temporary:  # another was first
        (temporary / "a").write_text("2")
    assert Path("folder/a").read_text() == "1"
    with files.making(Path("folder"), replace=True) as temporary:
        (temporary / "b").write_text("3")
    assert sorted(str(path) for path in Path().rglob("*")) == ["a b.log", "folder", "folder/b"]
    mounts, spaced = Path("mounts"), "/a b"
    mounts.write_text("x / ext4 rw\ny /a\\040b nfs4 rw\nz /a\\040b/c xfs rw\nw /d fuse.sshfs rw\n")
    kinds = {spaced: "nfs4", f"{spaced}/e": "nfs4", f"{spaced}/c/e": None, "/d/e": "fuse.sshfs", "/dd": None}
    for place, wanted in kinds.items():
        assert files.network_mount(Path(place), mounts) == wanted, place


def _console() -> None:
    sys.stdout = open("out", "w")  # which keeps what is printed until it is told
    print("first")
    console.write("second\udc80\x1b\n")
    assert Path("out").read_bytes() == b"first\nsecond\x80\x1b\n"
    log = logging.getLogger("pretrain.x")
    shown = io.StringIO()
    console.start(stream=shown)
    log.info("one")
    Path("folder").mkdir()
    console.keep_in(Path("folder"))  # which is no file: no run ends at that
    console.keep_in(Path("a.log"))
    log.error("two")
    console.say("three")
    assert Path("a.log").read_text() == "one\nerror: two\nthree\n", Path("a.log").read_text()
    assert shown.getvalue() == "one\nerror: two\n" and not logging.getLogger("pretrain").propagate
    shown = io.StringIO()
    console.start(is_main=False, stream=shown)
    log.warning("four")
    log.error("five")
    assert shown.getvalue() == "error: five\n"
    sys.stdout = io.StringIO()
    console.clean_prints()
    assert sys.stdout.write("\x1b\n") == 2 and not sys.stdout.isatty()
    assert sys.stdout.stream.getvalue() == "\\x1b\n"


class _Tracker:
    def __init__(self, name: str):
        self.name, self.rows, self.ended = name, [], False

    def log(self, values: dict, step: int) -> None:
        print("loud")
        if self.name == "hangs":
            threading.Event().wait()
        if self.name == "raises":
            raise ValueError(f"{SECRET}\n of it.")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.ended = True


def _trackers() -> None:
    """One that hangs and one that raises are off, with a line each; another gets each row once, and what it lacks."""
    from pretrain.run import trackers

    made = {name: _Tracker(name) for name in ("hangs", "raises", "works")}
    trackers._start = lambda name, *more: (made[name], {"train": 1})
    trackers.CALL_SECONDS = 3  # a busy machine answers within
    shown = io.StringIO()
    console.start(stream=shown)
    recipe = SimpleNamespace(
        tracking=SimpleNamespace(names=list(made)), saving=SimpleNamespace(run_dir=Path(), name="x")
    )
    rows = [{"step": step, "train/loss": float(step)} for step in (1, 2)]
    run = trackers.Trackers(recipe, 0, ids={"works": "id"}, rows=rows, sent=rows)
    run.log(3, {"step": 3, "train/loss": None, "train/lr": 2.0})
    run.log(3, {"step": 3, "train/loss": 4.0})
    run.log(3, {"step": 3, "eval/loss": 5.0})
    run.log(3, {"samples": [("a", "b")]})  # which only those that are tested show
    run.close()
    wanted = [(2, {"train/loss": 2.0}), (3, {"train/lr": 2.0}), (3, {"eval/loss": 5.0})]
    assert made["works"].rows == wanted and made["works"].ended and not made["raises"].ended, made["works"].rows
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("hangs: off from here: TimeoutError: no answer in 3 s. "), lines
    assert lines[1].startswith("raises: off from here: ValueError: https://redacted@h/x?redacted \\x1b[2J of it. "), (
        lines
    )
    kept = json.loads(Path("trackers.json").read_text())
    assert kept == {"works": "id", "sent": {"train": 2, "samples": 1}}, kept


def _full(number: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def _left(number: int) -> None:
    """A pipe whose reader leaves after a line."""
    (read, write), kept = os.pipe(), os.dup(number)
    os.dup2(write, number)
    os.close(write)

    def head() -> None:
        with open(read, "rb") as pipe:
            os.write(kept, pipe.readline())

    threading.Thread(target=head, daemon=True).start()


def _gone(number: int) -> None:
    """A terminal that is no longer there."""
    main_end, terminal = pty.openpty()
    os.dup2(terminal, number)
    os.close(main_end)


def _shut(number: int) -> None:
    name = ("stdin", "stdout", "stderr")[number]
    os.close(number)
    setattr(sys, name, None)


def _tty(number: int) -> None:
    """A terminal; all that it is given goes to what was there before."""
    (main_end, terminal), kept = pty.openpty(), os.dup(number)
    termios.tcsetwinsize(terminal, (24, 120))  # a progress bar fills it
    os.dup2(terminal, number)
    os.close(terminal)

    def pass_on() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(main_end, 2**16):
                os.write(kept, data.replace(b"\r\n", b"\n"))

    thread = threading.Thread(target=pass_on)
    thread.start()
    at_end.append(lambda: (os.dup2(kept, number), thread.join()))


def _signalled(number: int) -> None:
    """A signal as soon as the third step is evaluated."""
    write = tqdm.write

    def write_and_signal(line: str, **how: TextIO) -> None:
        write(line, **how)
        if line.startswith("step 3: "):
            os.kill(os.getpid(), number)

    tqdm.write = write_and_signal


def _nohup(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    _signalled(number)


at_end: list = []
STREAMS = {"full": _full, "left": _left, "gone": _gone, "shut": _shut, "tty": _tty}
STREAMS |= {"signal": _signalled, "nohup": _nohup}
CHECKS = {"friendly": _friendly, "urls": _urls, "ends": _ends, "processes": _processes, "files": _files}
CHECKS |= {"console": _console, "trackers": _trackers}
