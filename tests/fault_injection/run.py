"""Run the fault-injection tests, and print those that fail.

    python tests/fault_injection/run.py                              a quarter of the cases
    python tests/fault_injection/run.py --full --json benchmarks/results
    python tests/fault_injection/run.py --tree ../older-checkout     test another checkout
    python tests/fault_injection/run.py --only cuts --case 17        one case; its folder is kept

A case passes if the command succeeds with the same digests, or number of documents, as a reference,
or if it ends with exit status 1 or 2 and a message that names the culprit. A traceback, a hang and
a wrong result are problems.
"""

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for fake_hub

import commands
import damage
import environment
import failing_hub
import full_disk
import kills
import recipe_files

ROOT = commands.HERE.parents[1]
SEED = 19  # The results of another seed are written to a file with its own name.
PART = 4  # Without --full every fourth case runs.
# Each campaign yields its cases from a base folder, a random generator and a folder for files that
# its cases share.
CAMPAIGNS: dict[str, Callable[[Path, random.Random, Path], Iterator[commands.Case]]] = {
    "bits": damage.flips,
    "cuts": damage.cuts,
    "kills": kills.cases,
    "disk": full_disk.cases,
    "recipes": recipe_files.cases,
    "hub": failing_hub.cases,
    "environment": environment.cases,
}


@dataclass
class CampaignResult:
    """The result of a campaign, as it is written to the JSON file.

    Args:
        tried: the number of cases.
        held: the number of cases that passed.
        seconds: the duration.
        problems: the number, title and problem of each case that failed.
    """

    tried: int
    held: int
    seconds: float
    problems: list[dict[str, Any]]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line and make its paths absolute."""
    parser = argparse.ArgumentParser(description="Run fault-injection tests.", allow_abbrev=False)
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to test (default: this one)"
    )
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=[], help="these campaigns")
    parser.add_argument("--case", type=int, help="only the case of this number; its folder is kept")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--full", action="store_true", help="all cases, not every fourth")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the results there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if not (args.tree / "train.py").is_file():
        parser.error(f"--tree {args.tree}: the folder contains no train.py")
    args.tree = args.tree.resolve()
    if args.json:
        args.json = args.json.resolve()
    return args


def main() -> int:
    """Run the requested campaigns. Return 1 if a case fails."""
    args = parse_arguments()
    commands.use_checkout(args.tree)
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.perf_counter()
    results = {}
    try:
        base = commands.prepare(scratch)
        for campaign in args.only or CAMPAIGNS:
            results[campaign] = run_campaign(campaign, args, base, scratch)
    finally:
        if args.case is None:
            shutil.rmtree(scratch, ignore_errors=True)

    seconds = time.perf_counter() - started
    tried = sum(result.tried for result in results.values())
    held = sum(result.held for result in results.values())
    summary = f"{held} of {tried} cases held, in {seconds / 60:.1f} min"
    print(f"{summary}; seed {args.seed}; tree {commit_of(args.tree)}")
    if args.json and args.case is None:
        totals = {"seconds": round(seconds), "tried": tried, "held": held}
        path = write_results(args, totals, results)
        print(f"written to {path}")
    return 0 if held == tried else 1


def select_cases(
    args: argparse.Namespace, cases: Iterator[commands.Case]
) -> list[tuple[int, commands.Case]]:
    """Return the requested cases with their numbers."""
    numbered = list(enumerate(cases))
    if args.case is not None:
        return numbered[args.case : args.case + 1]
    if args.full:
        return numbered
    return numbered[args.seed % PART :: PART]


def run_campaign(name: str, args: argparse.Namespace, base: Path, scratch: Path) -> CampaignResult:
    """Run the cases of a campaign in parallel and print those that fail."""
    started = time.perf_counter()
    shared = scratch / name
    shared.mkdir()
    rng = random.Random(f"{name} {args.seed}")
    cases = select_cases(args, CAMPAIGNS[name](base, rng, shared))
    problems = []

    def run_numbered(numbered: tuple[int, commands.Case]) -> None:
        number, case = numbered
        folder = shared / f"case-{number}"
        problem = run_case(case, folder)
        if problem:
            problems.append({"case": number, "what": case.title, "why": problem})
            print(f"{name} {number}: {case.title}: {problem}", flush=True)
        if args.case is None:
            outputs = shared.glob(f".{folder.name}-*")
            subprocess.run(["rm", "-rf", str(folder), *outputs], check=False)
        else:
            print(f"{name} {number}: {case.title}: {folder} is kept, with its output next to it")

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(run_numbered, cases))
    seconds = round(time.perf_counter() - started, 1)
    problems.sort(key=lambda problem: problem["case"])
    held = len(cases) - len(problems)
    print(f"{name}: {held} of {len(cases)} held, {seconds} s", flush=True)
    return CampaignResult(len(cases), held, seconds, problems)


def run_case(case: commands.Case, folder: Path) -> str | None:
    """Run a case in a new folder. Return its problem, or None if it passed."""
    folder.mkdir()
    try:
        return case.run(folder)
    except Exception:
        return f"error in the test itself: {traceback.format_exc()}"


def write_results(
    args: argparse.Namespace, totals: dict[str, int], results: dict[str, CampaignResult]
) -> Path:
    """Write the results to a JSON file, and return its path."""
    date = datetime.date.today().isoformat()
    content = {
        "date": date,
        "tree": commit_of(args.tree),
        "campaign": commit_of(ROOT),
        "seed": args.seed,
        "full": args.full,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        **totals,
        "campaigns": {name: asdict(result) for name, result in results.items()},
    }
    words = ["faults"]
    if args.tree != ROOT:
        words.append(commit_of(args.tree))
    words.append(date)
    if args.seed != SEED:
        words.append(f"seed{args.seed}")
    words += args.only
    path = args.json / f"{'-'.join(words)}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def commit_of(tree: Path) -> str:
    """Return the commit of a checkout, followed by + if files were changed."""
    command = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
