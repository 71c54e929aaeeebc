"""Check that this machine can train a recipe, or estimate the resources of a run.

    python check_setup.py                                  # one line per check
    python check_setup.py --data_files my.txt              # also look at the data
    python check_setup.py --estimate --card a6000 --count 4
    python check_setup.py --estimate --all_cards           # a table of all known GPUs
    python check_setup.py --plan --card rtx4090 --budget 100 --price_per_card_hour 0.4

With --recipe or a flag for data, the data is examined as well, and the line ``launch`` is the
command that trains on it. Every recipe key for data is also an option.

An estimate is the memory, the speed, the hours and the energy of a run. A plan is the model size
and the number of tokens for a budget of hours or money.

Exit status: 0 if no check found an error, 1 if one did, 2 if an option or the recipe is invalid.
"""

import argparse
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import console, files, gpus, paths, terminal
from ursa_minor.base.cli import catch_interrupts, exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation.data_report import DataReport
from ursa_minor.data.sources import find as find_sources
from ursa_minor.preflight import budget, checks, data_size, run_estimate, train_command
from ursa_minor.preflight.compatibility import ERROR, OK, TRYING, WARNING, Check
from ursa_minor.preflight.data_check import DataExamination
from ursa_minor.recipe import command_line, keys, loading, rules, sizes
from ursa_minor.recipe.data_source import DATA_KEYS

log = logging.getLogger("ursa_minor.check_setup")

OWN_DATA_RECIPE = "recipes/own_text.yaml"  # the default if --data_files names data
CHECK_INDENT = " " * 9  # the result of a check follows its level, as in "ok       disk: "
MOST_GPUS_LOG2 = 12  # --size tries 1, 2, 4, ... up to 4,096 GPUs


class Option(NamedTuple):
    """A command-line option.

    Attributes:
        type: of its value. A bool needs no value; a number must be greater than 0.
    """

    name: str
    type: type
    metavar: str
    help: str


OPTIONS = {
    "checks": (
        Option(
            "recipe",
            str,
            "PATH",
            f"Recipe to check or to estimate. (default: {loading.DEFAULT_RECIPE}; with "
            f"--data_files, {OWN_DATA_RECIPE}; for --plan, the best of {len(budget.RECIPES)} "
            f"recipes)",
        ),
        Option("quick", bool, "", "Skip the trials of the compiler and of the all-reduce."),
        Option("json", bool, "", "Print one JSON object instead of text."),
    ),
    "estimates": (
        Option("estimate", bool, "", "Estimate the run instead of checking the machine."),
        Option(
            "card",
            str,
            "NAME",
            "GPU to estimate for, such as a6000 or rtx4090. (default: the GPUs of this machine)",
        ),
        Option("all_cards", bool, "", "Print a table of the estimates for all known GPUs."),
        Option(
            "count",
            int,
            "N",
            "Number of GPUs. (default: 1 with --card or --all_cards, otherwise all of this "
            "machine; with --size, the smallest number whose memory is sufficient)",
        ),
        Option(
            "size",
            str,
            "NAME",
            "Estimate the recipe for another model size, such as gpt2-xl or gpt3-175b.",
        ),
        Option("max_steps", int, "N", "Estimate for this number of updates."),
        Option(
            "num_train_epochs",
            float,
            "X",
            "Estimate for this number of times that the training text is read.",
        ),
        Option("tokens", float, "X", "Estimate for this number of tokens, such as 10e9."),
    ),
    "plans": (
        Option(
            "plan",
            bool,
            "",
            "Find the model size and the number of tokens for --hours or --budget.",
        ),
        Option(
            "hours",
            float,
            "X",
            "Hours to plan for, including evaluations and checkpoints.",
        ),
        Option("budget", float, "X", "Money to plan for, in the currency of the price."),
    ),
    "prices": (
        Option(
            "price_per_card_hour", float, "X", "Price of one GPU for one hour, in any currency."
        ),
        Option("price_per_machine_hour", float, "X", "Price of all GPUs together for one hour."),
    ),
}
# The recipe keys that are also options. A recipe file states a mixture.
DATA_OPTIONS = [name for name in keys.FIELDS if name in DATA_KEYS and name != "sources"]
DATA_HELP = "Recipe keys. The data is examined, and the launch command has these flags."
# Options of which only one can be used.
EXCLUSIVE = (
    ("card", "all_cards"),
    ("tokens", "max_steps"),
    ("tokens", "num_train_epochs"),
    ("max_steps", "num_train_epochs"),
    ("hours", "budget"),
    ("price_per_card_hour", "price_per_machine_hour"),
)
# Options that do not fit --plan.
CHOSEN_BY_PLAN = ("size", "tokens", "max_steps", "num_train_epochs", "all_cards")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Check the machine, estimate a run or plan one, and return the exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    catch_interrupts()
    if args.plan:
        show_plan(args)
        return 0
    flags = data_flags(args) | size_flags(args)
    length = length_flags(args, flags)
    if args.estimate:  # show the notes on the recipe, as the header of a run does
        console.start(stream=None if args.json else sys.stdout)
    recipe = load(args.recipe, flags | length, needs_length=args.estimate)
    if args.estimate:
        show_estimates(recipe, args, length)
        return 0
    return show_checks(recipe, args)


def data_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe keys for data that are on the command line, and their values."""
    flags = {}
    for name in DATA_OPTIONS:
        value = getattr(args, name)
        if value is not None:
            flags[name] = value
    return flags


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Options that only matter for an estimate imply ``--estimate``.

    Raises:
        BadInput: listing every invalid option.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--option value ...]",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            command_line.add_option(
                group, option.name, option.type, option.help, metavar=option.metavar
            )
    group = parser.add_argument_group("data", DATA_HELP)
    for name in DATA_OPTIONS:
        command_line.add_key(group, name)
    args = command_line.parse_flags(parser, argv)
    numbers = _given_numbers(args)
    problems = [*_invalid_values(args, numbers), *_invalid_plan_options(args)]
    if problems:
        raise BadInput(problems)

    if args.size or args.card or args.all_cards or numbers:
        args.estimate = True
    args.examines_data = bool(args.recipe or data_flags(args))
    if args.recipe:
        args.recipe = command_line.expand_option("recipe", args.recipe)
    elif args.data_files:
        args.recipe = OWN_DATA_RECIPE
    elif not args.plan:
        args.recipe = loading.DEFAULT_RECIPE
    return args


def _given_numbers(args: argparse.Namespace) -> dict[str, float]:
    """Return the values of the numeric options that were given, by name."""
    numbers = {}
    for option in chain.from_iterable(OPTIONS.values()):
        value = getattr(args, option.name)
        if option.type in (int, float) and value is not None:
            numbers[option.name] = value
    return numbers


def _invalid_values(args: argparse.Namespace, numbers: Mapping[str, float]) -> list[str]:
    """Return an error message for each number out of range and each pair of exclusive options."""
    problems = []
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            problems.append(f"--{name} {number}: must be greater than 0 and finite")
    for name, other_name in EXCLUSIVE:
        if getattr(args, name) and getattr(args, other_name):
            problems.append(f"--{name} and --{other_name} exclude each other. Use one of them")
    return problems


def _invalid_plan_options(args: argparse.Namespace) -> list[str]:
    """Return an error message for each option that does not fit ``--plan``, or needs it."""
    problems = []
    chosen = [name for name in CHOSEN_BY_PLAN if getattr(args, name)]
    if args.plan and chosen:
        names = ", ".join(f"--{name}" for name in chosen)
        problems.append(
            f"--plan chooses the size and the number of tokens for one type of GPU. Leave out "
            f"{names}"
        )
    if args.plan and data_flags(args):
        names = ", ".join(f"--{name}" for name in data_flags(args))
        problems.append(f"--plan plans a recipe with its own data. Leave out {names}")
    has_budget = bool(args.hours or args.budget)
    if args.plan and not has_budget:
        problems.append("--plan needs --hours or --budget")
    if has_budget and not args.plan:
        problems.append("--hours and --budget need --plan")
    if args.budget and not price_per_hour(args, count=1):
        problems.append("--budget needs --price_per_card_hour or --price_per_machine_hour")
    return problems


def size_flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the recipe flags for ``--size``."""
    if not args.size:
        return {}
    sizes.find_size(args.size)
    return {"size": args.size, "run_name": args.size}


def length_flags(args: argparse.Namespace, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the recipe flag for the length of the run, if an option states it.

    Args:
        args: the options of this script.
        flags: the other recipe flags.
    """
    if args.tokens:
        recipe = load(args.recipe, flags, needs_length=False)
        return {"max_steps": str(math.ceil(args.tokens / recipe.batch.tokens_per_step))}
    if args.max_steps:
        return {"max_steps": str(args.max_steps)}
    if args.num_train_epochs:
        return {"num_train_epochs": str(args.num_train_epochs).removesuffix(".0")}
    return {}


def load(
    path: str, flags: Mapping[str, Any] | None = None, *, needs_length: bool = True
) -> keys.Recipe:
    """Load a recipe, with the keys that its ``init_from`` model determines.

    Args:
        path: the recipe file, in the current folder or else in the repository.
        flags: see ``loading.load_recipe``.
        needs_length: see ``loading.load_recipe``.
    """
    recipe_file = paths.find_from_anywhere(Path(path))
    recipe = loading.load_recipe(recipe_file, flags, needs_length=needs_length)
    if recipe.model.init_from:
        # Imported here, because this script also runs without the packages that it imports.
        from ursa_minor.model import pretrained

        recipe = pretrained.complete(recipe)
    return recipe


def show_checks(recipe: keys.Recipe, args: argparse.Namespace) -> int:
    """Print each check result when it is known, or all of them as JSON.

    Returns:
        1 if one of them is an error, otherwise 0.
    """
    results = []
    examination = DataExamination(recipe)
    for check in _run_checks(recipe, args, examination):
        line = redact(str(check))
        if check.level == TRYING:
            _show_progress(line)
            continue
        _clear_progress()
        results.append(check)
        if not args.json:
            width = terminal.width_of(sys.stdout)
            print(terminal.wrap(line, width, indent=CHECK_INDENT), flush=True)

    levels = [check.level for check in results]
    if args.json:
        output = {"checks": [dataclasses.asdict(check) for check in results]}
        if args.examines_data:
            output["data"] = [dataclasses.asdict(look.report) for look in examination.looks]
        print(files.to_json(output, indent=1))
    else:
        errors = pluralize(levels.count(ERROR), "error", "errors")
        warnings = pluralize(levels.count(WARNING), "warning", "warnings")
        print(f"{errors}, {warnings}")
    return int(ERROR in levels)


def complete_length(
    recipe: keys.Recipe, reports: Sequence[DataReport]
) -> tuple[keys.Recipe, list[Check]]:
    """Return the recipe with the number of steps of num_train_epochs, and check results about it.

    If the number is not known, the returned recipe has one step. The check of the disks then counts
    the checkpoints and no shards. If train.py cannot compute it either, there are warnings.

    Args:
        recipe: the recipe.
        reports: the data reports of its sources, as far as the data was examined.
    """
    schedule = recipe.schedule
    problems = list(rules.epoch_problems(keys.to_dict(recipe)))
    length_checks = [Check("length", WARNING, problem) for problem in problems]
    needs_estimate = schedule.max_steps is None and not problems
    if needs_estimate and data_size.estimate_steps(recipe, reports) is None:
        text = f"num_train_epochs = {schedule.num_train_epochs:g}: {data_size.UNKNOWN_STEPS}"
        length_checks = [Check("length", OK, text)]
    if length_checks:
        recipe = keys.replace(recipe, num_train_epochs=None, max_steps=1)
        return recipe, length_checks
    recipe, note = data_size.complete_recipe(recipe, reports)
    return recipe, [Check("length", OK, note)] if note else []


def _run_checks(
    recipe: keys.Recipe, args: argparse.Namespace, examination: DataExamination
) -> Iterator[Check]:
    """Yield the results of all checks: of the data if it is examined, then of the machine.

    Args:
        recipe: the recipe.
        args: the options of this script.
        examination: looks at the data.

    Raises:
        BadInput: the data cannot be prepared.
    """
    network_checks = checks.examine_network(recipe)
    if not args.examines_data:
        recipe, length_checks = complete_length(recipe, reports=[])
        yield from length_checks
        flags = _launch_flags(args, length_checks)
        yield from checks.examine(recipe, args.recipe, flags, quick=args.quick)
        yield from network_checks
        return

    console.start()  # notes on the data, on standard error
    yield from examination.examine_local()
    unreachable = []
    for check in network_checks:
        if check.level in (ERROR, WARNING):
            unreachable.append(check.name)
        yield check
    yield from examination.examine_remote(unreachable)
    recipe, length_checks = complete_length(recipe, [look.report for look in examination.looks])
    yield from length_checks
    flags = _launch_flags(args, length_checks) | examination.flags
    if not find_sources.has_data(recipe.data):
        flags |= train_command.DATA_PLACEHOLDER
    yield from checks.examine(recipe, args.recipe, flags, quick=args.quick)


def _launch_flags(args: argparse.Namespace, length_checks: Sequence[Check]) -> dict[str, Any]:
    """Return the recipe flags of the launch command that do not follow from the data."""
    flags = data_flags(args)
    if any(check.level == WARNING for check in length_checks):
        flags |= train_command.LENGTH_PLACEHOLDER
    return flags


def _show_progress(line: str) -> None:
    """Show which check is running. On a terminal the next line replaces it."""
    if sys.stderr.isatty():
        width = terminal.width_of(sys.stderr) or terminal.DEFAULT_WIDTH
        one_line = line[: width - 1]  # the next line cannot replace a line that is broken
        print(f"\033[K{one_line}", end="\r", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\033[K", end="\r", file=sys.stderr, flush=True)


def show_estimates(
    recipe: keys.Recipe, args: argparse.Namespace, length: Mapping[str, str]
) -> None:
    """Print the estimate of a run on the selected GPUs, or a table for all known GPUs.

    Args:
        recipe: the recipe with all flags.
        args: the options of this script.
        length: the recipe flag for the length of the run (``length_flags``).
    """
    recipe, note = data_size.complete_recipe(recipe)
    if note:
        log.info(f"length   {note}")

    selected_gpus, counts = _select_gpus(args)
    for count in counts:
        price = price_per_hour(args, count)
        rows = [run_estimate.estimate_run(recipe, gpu, count, price) for gpu in selected_gpus]
        if rows[0]["fits"]:
            break
    if note:
        rows = [row | {"length": note} for row in rows]

    if args.all_cards and args.json:
        print(files.to_json(rows, indent=1))
        return
    if args.all_cards:
        print(run_estimate.table(recipe, rows))
        return
    (row,) = rows
    if args.json:
        print(files.to_json(row, indent=1))
        return
    print(run_estimate.describe(recipe, selected_gpus[0], row))
    if row["fits"] and not args.size:
        print(f"\n{_training_command(recipe, args, row, length)}")


def _select_gpus(args: argparse.Namespace) -> tuple[Sequence[gpus.Gpu], Sequence[int]]:
    """Return the GPUs to estimate for, and the numbers of them to try until the model fits."""
    if args.all_cards:
        return gpus.GPUS, [args.count or 1]
    gpu, count = select_gpu(args)
    if args.size and not args.count:
        return [gpu], [count << power for power in range(MOST_GPUS_LOG2 + 1)]
    return [gpu], [count]


def _training_command(
    recipe: keys.Recipe, args: argparse.Namespace, row: dict[str, Any], length: Mapping[str, str]
) -> str:
    """Return the command of an estimated run.

    Args:
        recipe: the recipe of the run.
        args: the options of this script.
        row: the estimate of the run.
        length: the recipe flag for the length of the run (``length_flags``).
    """
    changes = data_flags(args)
    if not find_sources.has_data(recipe.data):
        changes |= train_command.DATA_PLACEHOLDER
    changes |= length
    if row["gradient_checkpointing"] != recipe.model.gradient_checkpointing:
        changes["gradient_checkpointing"] = row["gradient_checkpointing"]
    return budget.command(row, args.recipe, changes)


def show_plan(args: argparse.Namespace) -> None:
    """Print the model size, the tokens and the command for a budget, next to the other sizes."""
    gpu, count = select_gpu(args)
    price = price_per_hour(args, count)
    hours = args.hours or args.budget / price
    recipe_paths = [f"recipes/{name}.yaml" for name in budget.RECIPES]
    if args.recipe:
        recipe_paths = [args.recipe]

    plans = {}
    for path in recipe_paths:
        recipe = load(path, needs_length=False)  # the plan sets the length
        plans[path] = budget.plan(recipe, gpu, count, hours, price)
    fitting_plans = {path: row for path, row in plans.items() if row}
    if not fitting_plans:
        raise BadInput(
            f"--plan: {count} x {gpu.name} has too little memory for {', '.join(plans)}. Use "
            f"--card with a larger GPU"
        )

    best = min(fitting_plans, key=lambda path: fitting_plans[path]["expected_loss"] or math.inf)
    if args.json:
        best_plan = fitting_plans[best]
        command = budget.command(best_plan, best, best_plan["changes"])
        print(files.to_json({"best": best, "command": command, "plans": plans}, indent=1))
    else:
        print(budget.describe(plans, best))


def select_gpu(args: argparse.Namespace) -> tuple[gpus.Gpu, int]:
    """Return the GPU to estimate for and how many of them: those of ``--card``, or of this machine.

    Raises:
        BadInput: there is no GPU of this name, or none in this machine.
    """
    names = [args.card]
    if not args.card:
        names = [row["name"] for row in checks.nvidia_smi()]
    if not names:
        known_names = ", ".join(gpu.name for gpu in gpus.GPUS)
        raise BadInput(f"No NVIDIA GPU found. Use --card with one of {known_names}, or --all_cards")
    gpu = gpus.find(names[0])
    several = gpus.find_several(names[0])
    if gpu is None and several is not None:
        launcher = gpus.launcher(gpus.preset(several.gpu.name, several.count), several.count)
        raise BadInput(
            f"--card {names[0]} names several GPUs. Use --card {several.gpu.name} --count "
            f"{several.count}. To train on them: {launcher} train.py"
        )
    if gpu is None:
        known_names = ", ".join(gpus.similar_gpus(names[0]))
        raise BadInput(
            f"{names[0]} is not a GPU in our table. Use --card with one of {known_names}, or "
            f"--all_cards"
        )
    return gpu, args.count or len(names)


def price_per_hour(args: argparse.Namespace, count: int) -> float:
    """Return the price of all GPUs together for one hour, or 0 if it was not given."""
    return args.price_per_machine_hour or count * (args.price_per_card_hour or 0)


if __name__ == "__main__":
    sys.exit(main())
