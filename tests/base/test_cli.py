"""A script ends at Ctrl-C without a traceback, and at what is missing with one line."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
# What takes seconds to import, of which each script imports one first.
SLOW = ("numpy", "torch", "transformers", "datasets", "trl")
# A signal in the middle of an import that makes another error of KeyboardInterrupt, as transformers does.
INTERRUPTED = """import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from None
"""


def started(tmp_path, script, *words, slow="raise SystemExit('torch is imported')", **environment):
    """Run a script where what takes seconds to import is ``slow``."""
    for name in SLOW:
        (tmp_path / f"{name}.py").write_text(slow)
    command = [sys.executable, str(ROOT / script), *words]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)} | environment
    audible = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a shell's background job ignores Ctrl-C
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, preexec_fn=audible
    )
    done.stderr = done.stderr.removeprefix("start    importing torch and Transformers\n")
    return done


def test_ctrl_c_during_the_imports_of_a_script_ends_it_without_a_word(tmp_path):
    done = started(tmp_path, "train.py", slow=INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_started_outside_the_environment_names_the_remedy(script):
    """So it imports first what also minds Ctrl-C."""
    command = [sys.executable, "-S", str(ROOT / script)]  # -S: no installed package is found
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 1
        and " is not installed" in done.stderr
        and "make environment" in done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_a_thread_that_waits_frees_its_core_soon_unless_the_user_has_said_how_threads_wait(
    tmp_path,
):
    slow = "import os; raise SystemExit(str(os.environ.get('GOMP_SPINCOUNT')))"
    for environment, count in (({}, "3000"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        assert started(tmp_path, "train.py", slow=slow, **environment).stderr == f"{count}\n"


def test_memory_that_runs_out_is_a_line_during_the_imports_too(tmp_path):
    done = started(
        tmp_path,
        "train.py",
        slow="raise ImportError('libtorch_cpu.so: failed to map segment from shared')",
    )
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: memory ran out: ")
        and done.stderr.count("\n") == 1
    )


def test_a_closed_standard_stream_is_nobodys_and_bad_input_still_2(tmp_path):
    """A file that was opened in its place would be written into by what warns."""
    show = "import os, sys; sys.exit(40 + sum(os.fstat(n).st_rdev == os.stat(os.devnull).st_rdev for n in range(3)))"
    command = ["bash", "-c", '"$0" train.py --nope <&- >&- 2>&-', sys.executable]
    assert subprocess.run(command, cwd=ROOT).returncode == 2
    start = (
        "from ursa_minor.base.cli import exit_on_bad_input as wrap; wrap(lambda: None)(); " + show
    )
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, start]
    assert subprocess.run(command, cwd=ROOT).returncode == 43


def test_output_that_nobody_reads_any_more_ends_a_script_without_a_traceback():
    for size in (1, 100_000):
        start = f"from ursa_minor.base.cli import exit_on_bad_input as wrap; exit(wrap(lambda: print('x' * {size}))())"
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-c", start], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_the_first_seconds_ends_a_run_by_that_signal_or_saved(workspace, name):
    for tenths in range(10, 50, 4):
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            "--recipe",
            "tiny.yaml",
            "--run_name",
            f"r{tenths}",
        ]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env=os.environ | {"ACCELERATE_USE_CPU": "true"}
        )
        time.sleep(tenths / 10)
        process.send_signal(getattr(signal, name))
        _, said = process.communicate()
        number = getattr(signal, name)
        assert process.returncode in (-number, 128 + number, 0) and b"Traceback" not in said, (
            tenths,
            said,
        )


BUSY = """import atexit, threading, time
from ursa_minor.base import cli

def main():
    {main}

threading.Thread(target=time.sleep, args=(10**6,)).start()
atexit.register(print, "closed", end="")
cli.run_and_exit(main, is_uploading=lambda: True)
"""


@pytest.mark.parametrize(
    ("main", "status", "words"), [("return 3", 3, ""), ("raise ValueError('bug')", 1, "bug")]
)
def test_process_exits_while_a_thread_is_uploading(main, status, words):
    done = subprocess.run(
        [sys.executable, "-c", BUSY.format(main=main)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (status, "closed")
    assert words in done.stderr
