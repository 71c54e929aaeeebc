"""Run the programs of a part within its time limit, and write the results while they arrive.

The main classes are ``Command``, one call of first_card.sh with its result files, and ``Part``, one
of the parts that it runs.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.runs import ROOT, flag_words, write_json
from ursa_minor.base import gpus

TINY_MODEL = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "vocab_size": 1024,
    "sequence_length": 64,
}
ERROR_LINE = re.compile(r"(\w+\.)*(error|\w+Error)\b.*: ")
LEAST_SECONDS = 10  # no program is started if less time is left
NO_TIME = "not reached, the time was up"


class Command:
    """One call of first_card.sh: its arguments, its record, and the files that it writes.

    Args:
        args: of the command line and the environment.
        machine: from ``machine.about``. These are the first entries of the record.
        deadline: value of ``time.monotonic()`` at which the command must end.
    """

    def __init__(self, args: argparse.Namespace, machine: dict, deadline: float):
        self.args = args
        self.deadline = deadline
        self.has_gpu = machine["kind"] == "cuda"
        gpu_name = machine["machine"] if self.has_gpu else ""
        self.preset = gpus.preset(gpu_name)
        self.record = machine | {
            "yaml": f"{self.preset}.yaml",
            "rehearsal": args.tiny,
            "parts": {},
        }
        date = machine["date"]
        time_of_day = time.strftime("%H%M%S")
        self.name = f"first-card-{self.preset}-{date}-{time_of_day}"

    def write(self) -> None:
        """Write the record to the JSON file."""
        folder = self.args.results
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.name}.json", self.record)

    def log(self, title: str, output: str) -> None:
        """Append the output of a program to the text file."""
        folder = self.args.results
        folder.mkdir(parents=True, exist_ok=True)
        end_of_output = output[-200_000:]
        with open(folder / f"{self.name}.txt", "a", encoding="utf-8") as file:
            file.write(f"## {title}\n{end_of_output}\n")

    def row(self, part: str, phrases: list[str]) -> str:
        """Return the row of a part for the tables of benchmarks/results/README.md.

        Args:
            part: its name.
            phrases: the result, or an empty list if there is none yet.
        """
        record = self.record
        origin = [
            record["date"],
            record["commit"],
            record["machine"],
        ]
        driver = record["driver"]
        versions = record["versions"]
        if driver:
            origin.append(f"driver {driver}")
        for package in ("torch", "transformers"):
            package_version = versions.get(package)
            origin.append(f"{package} {package_version}")

        command = f"bash benchmarks/first_card.sh {part}"
        if part == "report":
            command = "make card-report"

        result = "; ".join(phrases or ["nothing yet"])
        if self.args.tiny:
            result = f"**a rehearsal: no measurement**; {result}"

        cells = [
            ", ".join(origin),
            f"`{command}`",
            f"{result}; [JSON]({self.name}.json)",
        ]
        joined_cells = " | ".join(escape_cell(cell) for cell in cells)
        return f"| {joined_cells} |"


def escape_cell(text: str) -> str:
    """Return a text without vertical bars and line breaks, which would end a cell of a table."""
    words = text.replace("|", "/").split()
    return " ".join(words)


class Part:
    """A part that is being run: its time limit, its programs, and its entry in the record.

    Args:
        name: of the part.
        command: that runs it.
        seconds: time limit of the part.
    """

    def __init__(self, name: str, command: Command, seconds: float):
        self.name = name
        self.command = command
        self.args = command.args
        self.work = command.args.work
        self.is_tiny = command.args.tiny
        self.started = time.monotonic()
        self.deadline = min(self.started + seconds, command.deadline)
        self.record = {"problems": [], "cut_short": False}
        command.record["parts"][name] = self.record
        self.phrases: list[str] = []  # the result in the row

    @property
    def seconds_left(self) -> float:
        """Seconds until this part must end."""
        return self.deadline - time.monotonic()

    def note(self, phrase: str = "", **figures) -> None:
        """Add figures to the record, and write it immediately.

        Args:
            phrase: describes the figures in the row.
            figures: entries of the record.
        """
        if phrase:
            self.phrases.append(phrase)
        self.record.update(figures)
        seconds = time.monotonic() - self.started
        self.record["seconds"] = round(seconds, 1)
        phrases = self.phrases + self.record["problems"]
        self.record["row"] = self.command.row(self.name, phrases)
        self.command.write()

    def fail(self, problem: str, *, cut_short: bool = False) -> None:
        """Add a problem to the record. The part continues with what does not depend on it.

        Args:
            problem: a short description.
            cut_short: whether more time would have helped.
        """
        print(f"{self.name}: {problem}", file=sys.stderr, flush=True)
        self.record["problems"].append(problem)
        self.record["cut_short"] |= cut_short
        self.note()

    def run(self, title: str, arguments: list, cwd: Path, **environment: str) -> str | None:
        """Run Python with these arguments within the time that is left.

        Args:
            title: of the program in messages and in the record.
            arguments: for Python.
            cwd: the working directory.
            environment: additional environment variables.

        Returns:
            The output, or None if the program failed or was stopped. The reason is then among the
            problems of the part.
        """
        if self.seconds_left < LEAST_SECONDS:
            self.fail(f"{title}: {NO_TIME}", cut_short=True)
            return None
        log_name = re.sub("[^a-z0-9]+", "-", title.lower())
        log = self.work / "logs" / f"{self.name}-{log_name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(
            f"{self.name}: {title} ({log}; {self.seconds_left:.0f} s left)",
            file=sys.stderr,
            flush=True,
        )
        started = time.monotonic()
        command = [sys.executable, *map(str, arguments)]
        status = run_until(command, log, cwd, environment, timeout=self.seconds_left)
        seconds = time.monotonic() - started

        output = log.read_text(errors="replace")
        programs = self.record.setdefault("programs", {})
        programs[title] = round(seconds, 1)
        self.command.log(f"{self.name}: {title}: {seconds:.1f} s", output)
        if status == 0:
            return output
        reason = f"exit status {status}"
        if status is None:
            reason = "stopped, no time was left"
        error = error_line(output)
        self.fail(f"{title}: {reason}: {error}", cut_short=status is None)
        return None

    def run_benchmark(self, title: str, script: str, *flags) -> dict | None:
        """Run a benchmark of the folder benchmarks/.

        Returns:
            Its JSON file, which may be incomplete if the benchmark failed, or None if there is
            none.
        """
        json_file = self.work / f"{script}.json"
        json_file.unlink(missing_ok=True)
        program = ROOT / "benchmarks" / f"{script}.py"
        arguments = [program, *flags, "--json", json_file]
        output = self.run(title, arguments, ROOT)
        if output is None and not json_file.is_file():
            return None
        return json.loads(json_file.read_text())

    def tiny_model_flags(self) -> list[str]:
        """Return the flags of a benchmark in a rehearsal: a tiny model, on a CPU without compiler.

        The list is empty if this is not a rehearsal.
        """
        if not self.is_tiny:
            return []
        flags = flag_words(TINY_MODEL)
        if not self.command.has_gpu:
            flags += ["--compile", "false"]
        return flags


def run_until(
    command: list[str], log: Path, cwd: Path, environment: dict[str, str], timeout: float
) -> int | None:
    """Run a program with this repository on its PYTHONPATH. Kill it when its time is up.

    Args:
        command: program and arguments.
        log: file for its output.
        cwd: its working directory.
        environment: additional environment variables.
        timeout: in seconds.

    Returns:
        The exit status, or None if the program was killed.
    """
    python_path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(python_path)
    variables |= environment
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a launcher and its children can be killed together
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            if status != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return status


def error_line(output: str) -> str:
    """Return the line of a program's output that most likely states why it failed."""
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    # The traceback of accelerate's launcher comes last, and does not state the cause.
    other_lines = [line for line in lines if "CalledProcessError" not in line]
    errors = [line for line in other_lines if ERROR_LINE.match(line)]
    candidates = errors or lines or ["no output"]
    line = candidates[-1]
    return line[:300]
