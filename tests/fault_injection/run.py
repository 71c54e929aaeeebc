"""Attack the product in seeded campaigns, and print what held.

    python tests/fault_injection/run.py                              a quarter of each campaign's cases
    python tests/fault_injection/run.py --full --json benchmarks/results
    python tests/fault_injection/run.py --tree ../older-checkout     the same attacks on another checkout
    python tests/fault_injection/run.py --only cuts --case 17        one case, whose folder is kept

A case holds when the command ends in success with the bits, or the number of documents, that a reference has, or in
exit status 1 or 2 with one line that names the culprit. A traceback, a hang and a wrong result are problems.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for the server of the Hub

import commands
import damage
import environment
import failing_hub
import full_disk
import kills
import recipe_files

ROOT = commands.HERE.parents[1]
SEED = 19  # another one's results have a file of their own
PART = 4  # without --full every fourth case
# By name: what yields the cases.
CAMPAIGNS = {
    "bits": damage.flips,
    "cuts": damage.cuts,
    "kills": kills.cases,
    "disk": full_disk.cases,
}
CAMPAIGNS |= {
    "recipes": recipe_files.cases,
    "hub": failing_hub.cases,
    "environment": environment.cases,
}


def main() -> int:
    """Run the campaigns that were asked for; return 1 where a case does not hold."""
    parser = argparse.ArgumentParser(
        description="Attack the product in seeded campaigns.", allow_abbrev=False
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to attack (default: this one)"
    )
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=[], help="these campaigns")
    parser.add_argument("--case", type=int, help="only the case of this number; its folder is kept")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--full", action="store_true", help="all cases, not every fourth")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the results there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    tree, folder = asked.tree.resolve(), asked.json and asked.json.resolve()
    if not (tree / "train.py").is_file():
        parser.error(f"--tree {asked.tree}: holds no train.py")
    commands.use_checkout(tree)

    scratch, began = Path(tempfile.mkdtemp(prefix="faults-")), time.perf_counter()
    try:
        base = commands.prepare(scratch)
        results = {
            campaign: attack(campaign, asked, base, scratch) for campaign in asked.only or CAMPAIGNS
        }
    finally:
        if asked.case is None:
            shutil.rmtree(scratch, ignore_errors=True)
    tried, held = (sum(result[key] for result in results.values()) for key in ("tried", "held"))
    seconds = time.perf_counter() - began
    print(
        f"{held} of {tried} cases held, in {seconds / 60:.1f} min; seed {asked.seed}; tree {commit(tree)}"
    )
    if asked.json and asked.case is None:
        about = {
            "date": datetime.date.today().isoformat(),
            "tree": commit(tree),
            "campaign": commit(ROOT),
        }
        about |= {"seed": asked.seed, "full": asked.full, "python": platform.python_version()}
        about |= {"cpus": os.cpu_count(), "seconds": round(seconds), "tried": tried, "held": held}
        other = [] if tree == ROOT else [commit(tree)]
        seed = [] if asked.seed == SEED else [f"seed{asked.seed}"]
        path = folder / f"{'-'.join(['faults', *other, about['date'], *seed, *asked.only])}.json"
        path.write_text(
            json.dumps(about | {"campaigns": results}, indent=1, ensure_ascii=False) + "\n"
        )
        print(f"written to {path}")
    return 0 if held == tried else 1


def attack(name: str, asked: argparse.Namespace, base: Path, scratch: Path) -> dict:
    """Run a campaign's cases, print what does not hold, and return the counts.

    From the base folder, a random generator and a folder for what the cases share a campaign yields (title, hit) of each
    case; hit(folder) returns None, or why it does not hold.
    """
    began, problems = time.perf_counter(), []
    shared = scratch / name
    shared.mkdir()
    cases = list(enumerate(CAMPAIGNS[name](base, random.Random(f"{name} {asked.seed}"), shared)))
    if asked.case is not None:
        cases = cases[asked.case : asked.case + 1]
    elif not asked.full:
        cases = cases[asked.seed % PART :: PART]

    def one(numbered: tuple[int, tuple]) -> None:
        number, (title, hit) = numbered
        folder = shared / f"case-{number}"
        folder.mkdir()
        try:
            why = hit(folder)
        except Exception:
            why = f"the campaign itself fails: {traceback.format_exc()}"
        if why:
            problems.append({"case": number, "what": title, "why": why})
            print(f"{name} {number}: {title}: {why}", flush=True)
        if asked.case is None:
            subprocess.run(
                ["rm", "-rf", str(folder), *shared.glob(f".{folder.name}-*")], check=False
            )
        else:
            print(f"{name} {number}: {title}: kept in {folder}; what it printed is beside it")

    with ThreadPoolExecutor(asked.workers) as pool:
        list(pool.map(one, cases))
    seconds = round(time.perf_counter() - began, 1)
    problems.sort(key=lambda problem: problem["case"])
    print(f"{name}: {len(cases) - len(problems)} of {len(cases)} held, {seconds} s", flush=True)
    return {
        "tried": len(cases),
        "held": len(cases) - len(problems),
        "seconds": seconds,
        "problems": problems,
    }


def commit(tree: Path) -> str:
    """Return the commit of a checkout, with + where files differ from it."""
    git = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
