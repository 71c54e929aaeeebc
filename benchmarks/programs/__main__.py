"""Run every program on the models, write programs.json and the table of docs/export.md.

    python -m benchmarks.programs                                   # or make programs
    python -m benchmarks.programs --only mlx-lm CTranslate2

The programs are installed from PyPI and npm. A program that cannot be installed gets the row "not
run". The exit status is 1 if a comparison differs by more than its limit, or if a known problem
no longer occurs.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks import runs
from benchmarks.programs import comparison, environments, models, table, texts
from benchmarks.programs.comparison import Answer
from benchmarks.programs.definitions import PROGRAMS, TRANSFORMERS, Program
from ursa_minor.base import paths

INSIDE = Path(__file__).resolve().parent / "inside"
DEFAULT_CACHE = runs.ROOT / "build" / "programs"
REFERENCE = "transformers_reader.py"
NEW_TOKENS = 16
TIME_LIMIT = 1800  # seconds for one command


class Failed(Exception):
    """A command of a program failed."""


class Comparer:
    """Runs programs on the exported models and compares their answers with the reference."""

    def __init__(self, work: Path, cache: Path, product: dict[str, Answer]):
        """Prepare the comparison.

        Args:
            work: folder that contains exports/.
            cache: folder with the environments.
            product: answers of the product itself, by the name of the export.
        """
        self._work = work
        self._cache = cache
        self._product = product
        self._references: dict[str, Answer] = {}

    def row(self, program: Program) -> dict:
        """Return the row of a program for the JSON file."""
        row = {
            "program": program.name,
            "version": program.version,
            "packages": program.packages,
            "commands": program.commands,
            "date": datetime.date.today().isoformat(),
            "commit": runs.commit(),
            "machine": machine(),
        }
        try:
            row |= self._compare(program)
        except environments.NotInstalled as error:
            row |= {"status": "not run", "reason": str(error)}
        except (Failed, subprocess.TimeoutExpired) as error:
            row |= {"status": "failed", "reason": str(error)}
        return row

    def _compare(self, program: Program) -> dict:
        """Run a program, and return the results by kind of model."""
        folder = None
        python = sys.executable
        environment = environments.of_project()
        if program.packages is not None:
            folder = environments.prepare(program, self._cache)
            python = str(folder / "bin" / "python")
            environment = environments.variables(program, folder)
        for command in self._commands(program):
            self._run(["bash", "-c", command], environment)
        if program.example:
            self._run([python, str(program.example)], environment)

        script = str(INSIDE / program.script)
        interpreter = "node" if program.npm else python
        answers = self._answers(program, [interpreter, script], environment, folder)
        self._compute_references(program.models.values())
        results = {}
        for kind, export in program.models.items():
            results[kind] = self._result(program, kind, export, answers[kind])
        passes = all(result["passes"] for result in results.values())
        return {"status": "equal" if passes else "differs", "results": results}

    def _commands(self, program: Program) -> Iterator[str]:
        """Yield the commands of a program, those that contain {model} for each exported folder."""
        for command in program.commands:
            if "{model}" not in command:
                yield command
                continue
            for export in program.models.values():
                yield command.format(model=models.EXPORTS / export)

    def _result(self, program: Program, kind: str, export: str, answer: Answer) -> dict:
        """Compare the answer for one model."""
        error = answer.values.get("error")
        if error:
            return {"export": export, "passes": False, "error": error}
        reference = self._references[export]
        is_reference = f"transformers=={program.version}" == TRANSFORMERS
        if is_reference and kind in self._product:
            answer = self._product[kind]  # the reference is compared with the product itself
        if answer.endings is not None and reference.endings is None:
            product_scores = models.scores(self._work / models.EXPORTS / export)
            reference.endings = product_scores["endings"]
            reference.rolling = product_scores["rolling"]
        limits = dict(program.limits)
        if kind != table.LLAMA:
            limits |= program.gpt2_limits
        comparisons = comparison.compare(answer, reference, limits)
        symptoms = answer.values.get("symptoms", {})
        passes = bool(comparisons or symptoms) and all(one.passes for one in comparisons)
        return {
            "export": export,
            "passes": passes and all(symptoms.values()),
            "comparisons": [dataclasses.asdict(one) for one in comparisons],
            "symptoms": symptoms,
        }

    def _compute_references(self, exports: Collection[str]) -> None:
        """Compute the answers of Transformers in this project's environment, where missing."""
        missing = {export: export for export in exports if export not in self._references}
        if not missing:
            return
        program = Program("reference", "", None, REFERENCE, missing)
        command = [sys.executable, str(INSIDE / REFERENCE)]
        self._references |= self._answers(program, command, environments.of_project(), None)
        for export in missing:
            error = self._references[export].values.get("error")
            if error:
                raise SystemExit(f"Transformers in this environment, {export}: {error}")

    def _answers(
        self, program: Program, command: list[str], environment, folder: Path | None
    ) -> dict[str, Answer]:
        """Run the script of a program on all of its models."""
        answer_folder = Path(tempfile.mkdtemp(prefix=f"{program.environment}-", dir=self._work))
        requests = [self._request(kind, export) for kind, export in program.models.items()]
        request = {"program": program.name, "environment": str(folder), "models": requests}
        request_file = answer_folder / "request.json"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        self._run([*command, str(request_file), str(answer_folder)], environment)
        num_prompts = len(requests[0]["prompts"])
        return {
            kind: comparison.read_answer(answer_folder / kind, num_prompts)
            for kind in program.models
        }

    def _request(self, kind: str, export: str) -> dict:
        """Return the request for one model: its folder, texts and prompts."""
        folder = self._work / models.EXPORTS / export
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        num_ids = len(vocabulary["model"]["vocab"])
        return {
            "name": kind,
            "path": str(models.EXPORTS / export),
            "texts": texts.random_texts(),
            "pairs": texts.PAIRS,
            "documents": texts.DOCUMENTS,
            "prompts": texts.prompts(num_ids),
            "chat": texts.CHAT if kind.startswith("chat") else None,
            "new_tokens": NEW_TOKENS,
        }

    def _run(self, command: list[str], environment) -> None:
        """Run a command in the work folder. Raises Failed with its last line of output."""
        process = subprocess.run(
            command,
            cwd=self._work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
        if process.returncode:
            print(process.stderr[-3000:], file=sys.stderr)
            raise Failed(runs.last_line(process.stderr, f"exit status {process.returncode}"))


def machine() -> str:
    """Return a description of this machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"Python {platform.python_version()}"
    return f"{platform.system()} {platform.machine()}, {count} CPU cores, {python}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PROGRAM",
        help="Run these programs only, for example mlx-lm. The other rows are kept.",
    )
    parser.add_argument(
        "--environments",
        type=paths.argument,
        default=DEFAULT_CACHE,
        metavar="PATH",
        help="Folder with the environments of the programs. (default: build/programs)",
    )
    parser.add_argument(
        "--work",
        type=paths.argument,
        metavar="PATH",
        help="Folder for the models. Models that it already contains are used again. (default: a "
        "temporary folder)",
    )
    parser.add_argument(
        "--json",
        type=paths.argument,
        default=table.RESULTS,
        metavar="PATH",
        help="Result file. (default: benchmarks/results/programs.json)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the programs, and write the JSON file and the page."""
    args = parse(argv)
    selected = [
        program for program in PROGRAMS if args.only is None or is_selected(program, args.only)
    ]
    if not selected:
        raise SystemExit(f"--only {' '.join(args.only)}: no such program. See {args.json}")
    if f"transformers=={version('transformers')}" != TRANSFORMERS:
        raise SystemExit(f"The reference needs {TRANSFORMERS}: make environment")
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    if Path(args.json).exists():
        rows = read_rows(Path(args.json))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.work or temporary).resolve()
        work.mkdir(parents=True, exist_ok=True)
        comparer = Comparer(work, Path(args.environments).resolve(), models.make_all(work))
        for program in selected:
            row = comparer.row(program)
            rows[program.environment] = row
            write_rows(rows, args.json)
            print(f"{program.name} {program.version}: {row['status']}", flush=True)
    if Path(args.json).resolve() == table.RESULTS:
        table.write_page()
    statuses = {rows[program.environment]["status"] for program in selected}
    return 0 if statuses <= {"equal", "not run"} else 1


def is_selected(program: Program, names: list[str]) -> bool:
    """Return whether --only names a program, with or without its version."""
    full_name = f"{program.name} {program.version}"
    return bool({program.name, full_name, program.environment} & set(names))


def write_rows(rows: dict[str, dict], file: str | Path) -> None:
    """Write the rows in the order of ``PROGRAMS``."""
    known = [program.environment for program in PROGRAMS]
    runs.write_json(file, {"programs": [rows[name] for name in known if name in rows]})


def read_rows(file: Path) -> dict[str, dict]:
    """Return the rows of a JSON file by the name of the program's environment."""
    rows = json.loads(file.read_text(encoding="utf-8"))["programs"]
    by_key = {(row["program"], row["version"]): row for row in rows}
    return {
        program.environment: by_key[program.name, program.version]
        for program in PROGRAMS
        if (program.name, program.version) in by_key
    }


if __name__ == "__main__":
    sys.exit(main())
