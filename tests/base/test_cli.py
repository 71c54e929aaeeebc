"""Start and end of a script: missing packages, signals, closed streams and exit statuses."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
# Every script imports at least one of these packages, each of which takes seconds.
SLOW_PACKAGES = ("numpy", "torch", "transformers", "datasets", "trl")
# Like transformers, this import raises another error when Ctrl-C interrupts it.
INTERRUPTED_IMPORT = """import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from None
"""
IMPORTING = "start    importing torch and Transformers\n"
COUNT_NULL_STREAMS = """import os, sys
from ursa_minor.base.cli import exit_on_bad_input
exit_on_bad_input(lambda: None)()
null = os.stat(os.devnull).st_rdev
sys.exit(40 + sum(os.fstat(number).st_rdev == null for number in range(3)))
"""
PRINT_MUCH = """import sys
from ursa_minor.base.cli import exit_on_bad_input
sys.exit(exit_on_bad_input(lambda: print("x" * {size}))())
"""
# The main thread receives a signal between two instructions, or while it waits in native code.
STOPPED_EARLY = """import ctypes, os, signal, threading, time
from ursa_minor.base import cli

signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in the scripts
cli.announce_early_stop()
threading.Timer(0.2, os.kill, (os.getpid(), signal.{name})).start()
{wait}
"""
WAITING = {"Python": "time.sleep(20)", "native": "while ctypes.CDLL(None).sleep(20): pass"}
UPLOADING = """import atexit, threading, time
from ursa_minor.base import cli

def main():
    {main}

threading.Thread(target=time.sleep, args=(10**6,)).start()
atexit.register(print, "closed", end="")
cli.run_and_exit(main, is_uploading=lambda: True)
"""


def restore_interrupts() -> None:
    """Undo that a shell ignores Ctrl-C for a command in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_with_imports(folder, code, **environment):
    """Run generate.py, which starts fastest, with this code in place of the slow packages.

    Standard error is returned without the line that announces the imports.
    """
    for name in SLOW_PACKAGES:
        (folder / f"{name}.py").write_text(code)
    process = subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), "--model", "a"],
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=restore_interrupts,
    )
    process.stderr = process.stderr.removeprefix(IMPORTING)
    return process


def test_interrupted_imports_end_without_output(tmp_path):
    process = run_with_imports(tmp_path, INTERRUPTED_IMPORT)

    assert process.returncode == -signal.SIGINT
    assert process.stdout == ""
    assert process.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_missing_packages_are_reported_with_a_fix(script):
    command = [sys.executable, "-S", str(ROOT / script)]  # -S hides the installed packages

    process = subprocess.run(command, capture_output=True, text=True)

    assert process.returncode == 1
    assert " is not installed" in process.stderr
    assert "make environment" in process.stderr
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "spin_count"), [({}, "3000"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_spin_count_respects_openmp_wait_policy(tmp_path, environment, spin_count):
    code = "import os; raise SystemExit(str(os.environ.get('GOMP_SPINCOUNT')))"

    process = run_with_imports(tmp_path, code, **environment)

    assert process.stderr == f"{spin_count}\n"


def test_lack_of_memory_during_imports_is_reported(tmp_path):
    code = "raise ImportError('libtorch_cpu.so: failed to map segment from shared')"

    process = run_with_imports(tmp_path, code)

    assert process.returncode == 1
    assert process.stderr.startswith("error: memory ran out: ")
    assert process.stderr.count("\n") == 1


def test_bad_input_exits_2_with_closed_streams():
    command = ["bash", "-c", '"$0" train.py --nope <&- >&- 2>&-', sys.executable]

    process = subprocess.run(command, cwd=ROOT)

    assert process.returncode == 2


def test_closed_streams_are_replaced_by_null_device():
    """Otherwise a file gets the descriptor of a stream, and warnings are written into the file."""
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, COUNT_NULL_STREAMS]

    process = subprocess.run(command, cwd=ROOT)

    assert process.returncode == 43


@pytest.mark.parametrize("size", [1, 100_000], ids=["fits-buffer", "exceeds-buffer"])
def test_output_without_reader_ends_without_traceback(size):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PRINT_MUCH.format(size=size)]

    process = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)

    assert process.returncode == 1
    assert process.stderr == b""


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stop_before_training_is_reported(name, wait):
    code = STOPPED_EARLY.format(name=name, wait=wait)

    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=15,
    )

    assert process.returncode == 128 + getattr(signal, name)
    assert process.stderr.startswith(f"stopped by {name} before training")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_early_signal_ends_run_without_traceback(workspace, name):
    """The run ends by the signal, or saves and exits with its status."""
    number = getattr(signal, name)
    for tenths in range(10, 50, 4):
        arguments = ["--recipe", "tiny.yaml", "--run_name", f"r{tenths}"]
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments],
            stderr=subprocess.PIPE,
            env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        )

        time.sleep(tenths / 10)
        process.send_signal(number)
        _, stderr = process.communicate()

        assert process.returncode in (-number, 128 + number, 0), (tenths, stderr)
        assert b"Traceback" not in stderr, (tenths, stderr)


@pytest.mark.parametrize(
    ("main", "status", "words"), [("return 3", 3, ""), ("raise ValueError('bug')", 1, "bug")]
)
def test_process_exits_while_a_thread_is_uploading(main, status, words):
    command = [sys.executable, "-c", UPLOADING.format(main=main)]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert process.returncode == status
    assert process.stdout == "closed"
    assert words in process.stderr
