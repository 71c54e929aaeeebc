"""Parse the command line and the environment of first_card.sh, and run the parts."""

import argparse
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import benchmarks.first_card
from benchmarks.first_card import gpu_tests, machine, memory, resume, speed, training
from benchmarks.first_card.data import carry
from benchmarks.first_card.runner import NO_TIME, Command, Part
from benchmarks.runs import ROOT
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput

PARTS = {
    "b": speed.throughput,
    "a": training.profiled_steps,
    "g": memory.memory,
    "c": resume.exactness,
    "c2": resume.exactness_of_muon,
    "h": speed.compile_modes,
    "i": training.fp16,
    "m": training.muon,
    "j": training.several_gpus,
    "t": gpu_tests.gpu_tests,
    "b2": speed.ladder,
    "report": training.report,
    "carry": carry,
}
# The parts of `all`, the most valuable first. The numbers are their seconds on an H100 if the
# command has DEFAULT_SECONDS. They overlap, because most parts take less.
ALL_PARTS = {
    "b": 220,
    "a": 130,
    "g": 190,
    "c": 240,
    "h": 260,
    "i": 90,
    "m": 90,
    "j": 120,
}
DEFAULT_SECONDS = 560
# A part is not started if less than this share of its time is left.
NECESSARY_SHARE = 0.7


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and the environment variables.

    Raises:
        BadInput: NANOGPT does not exist.
    """
    part_lines = []
    for name, part in PARTS.items():
        first_line, *_ = part.__doc__.splitlines()
        part_lines.append(f"  {name:7} {first_line}")
    listed_parts = "\n".join(part_lines)
    parser = argparse.ArgumentParser(
        prog="first_card.sh",
        description=f"{benchmarks.first_card.__doc__}\nParts:\n{listed_parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="Parts to run, or all. If none is given, this help is shown.",
    )
    args = parser.parse_args(argv)
    parts = []
    for name in args.parts:
        if name == "all":
            parts += ALL_PARTS
        elif name in PARTS:
            parts.append(name)
        else:
            names = ", ".join(PARTS)
            parser.error(f"no part {name}: choose from {names}, all")
    if not parts:
        parser.print_help()
    args.parts = parts
    read_environment(args)
    return args


def read_environment(args: argparse.Namespace) -> None:
    """Add the environment variables to the arguments.

    Raises:
        BadInput: NANOGPT does not exist.
    """
    variables = os.environ
    rehearse = variables.get("REHEARSE", "")
    args.tiny = rehearse not in ("", "0")
    args.seconds = int(variables.get("SECONDS_IN_ALL") or DEFAULT_SECONDS)
    default_micro_batches = "2" if args.tiny else "64"
    micro_batches = variables.get("MICRO_BATCHES") or default_micro_batches
    args.micro_batches = [int(word) for word in micro_batches.split()]

    default_work = ROOT / "runs" / "first_card"
    work = variables.get("WORK") or default_work
    args.work = Path(work).absolute()
    default_results = ROOT / "benchmarks" / "results"
    if args.tiny or args.parts == ["carry"]:  # nothing is measured
        default_results = args.work / "results"
    results = variables.get("RESULTS") or default_results
    args.results = Path(results).absolute()

    args.nanogpt = None
    nanogpt = variables.get("NANOGPT")
    if nanogpt:
        args.nanogpt = Path(nanogpt).absolute()
        if not args.nanogpt.exists():
            raise BadInput(f"NANOGPT={nanogpt}: the folder does not exist")


def run_part(name: str, command: Command, *, is_last: bool) -> Part:
    """Run a part within its share of the time, and print its row.

    Args:
        name: of the part.
        command: receives the results.
        is_last: whether the part may use all the time that is left.
    """
    seconds_in_all = command.args.seconds
    default_seconds = ALL_PARTS.get(name, DEFAULT_SECONDS)
    share = default_seconds / DEFAULT_SECONDS * seconds_in_all
    limit = seconds_in_all if is_last else share
    part = Part(name, command, limit)
    is_first = len(command.record["parts"]) == 1
    necessary_seconds = NECESSARY_SHARE * share
    try:
        if part.seconds_left < necessary_seconds and not is_first:
            part.fail(NO_TIME, cut_short=True)
        else:
            PARTS[name](part)
    except BadInput as error:
        part.fail(str(error))
    except Exception as error:  # whatever happens, the next part runs
        kind = type(error).__name__
        command.log(f"{name}: {kind}", traceback.format_exc())
        first_line, _, _ = str(error).partition("\n")
        part.fail(f"{kind}: {first_line[:300]}")
    part.note()
    print(part.record["row"], flush=True)
    return part


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Run the parts, and return 0, or 1 if there was a problem or the time did not suffice."""
    started = time.monotonic()
    args = parse(argv)
    if not args.parts:
        return 0
    about_machine = machine.about()
    needs_gpu = not args.tiny and args.parts != ["carry"]
    if needs_gpu and about_machine["kind"] != "cuda":
        raise BadInput(
            "no NVIDIA card: PyTorch finds none, so there is nothing to measure. python "
            "check_setup.py shows the reason. REHEARSE=1 tries a part with tiny sizes on the CPU"
        )
    # On SIGTERM exit with an exception, so that the child process is killed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.work.mkdir(parents=True, exist_ok=True)
    command = Command(args, about_machine, deadline=started + args.seconds)
    parts = []
    for name in args.parts:
        is_last = name == args.parts[-1]
        parts.append(run_part(name, command, is_last=is_last))

    print(f"written: {args.results}/{command.name}: .json, .txt", file=sys.stderr)
    cut_short = [part.name for part in parts if part.record["cut_short"]]
    if cut_short:
        names = " ".join(cut_short)
        print(f"found no time: bash benchmarks/first_card.sh {names}", file=sys.stderr)
    has_problems = any(part.record["problems"] for part in parts)
    return int(has_problems)
