"""Before it costs: what this machine is and lacks, what a run will take.

    python check_setup.py                                       # a line a check; --quick leaves out the slow ones
    python check_setup.py --estimate --card a6000 --count 4     # memory, tokens/s, hours, kWh; --all_cards for a table
    python check_setup.py --plan --card rtx4090 --budget 100 --price_per_card_hour 0.4    # the size and tokens for it

Exit status: 0 no error found, 1 an error, 2 flags or a recipe that make no sense.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from ursa_minor.base import console, files, gpus, paths
from ursa_minor.base.cli import catch_interrupts, exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact
from ursa_minor.base.wording import pluralize
from ursa_minor.preflight import budget, checks, data_throughput, run_estimate
from ursa_minor.preflight.compatibility import ERROR, TRYING, WARNING
from ursa_minor.recipe import command_line, keys, loading, sizes

CARD_CORES = 8  # that are rented with a card
FLAGS: dict[
    str, tuple[type, str]
] = {  # what each takes (bool: nothing; a number: above 0) and does
    "recipe": (
        str,
        f"default: {loading.DEFAULT_RECIPE}; of --plan: the best of {len(budget.RECIPES)}",
    ),
    "quick": (bool, "without compiler and all-reduce"),
    "json": (bool, "one JSON object on standard output, not lines"),
    "estimate": (bool, "what the recipe will take, not what the machine is"),
    "card": (str, "estimate for this card (a6000, rtx4090, ...)"),
    "all_cards": (bool, "estimate for every card we know: a table"),
    "size": (str, "estimate the recipe for another size (gpt2-xl, gpt3-175b, ...)"),
    "plan": (bool, "the size and tokens for --hours, or for --budget"),
    "count": (int, "estimate for this many cards"),
    "hours": (float, "to plan for, evaluations and checkpoints within them"),
    "budget": (float, "to plan for, in the currency of the price"),
    "max_steps": (int, "estimate for this many updates"),
    "tokens": (float, "estimate for this many tokens (10e9)"),
    "cores": (
        int,
        f"of the machine with the cards; default: this one's, {CARD_CORES} a card for --card",
    ),
    "link_megabytes_per_second": (float, "from where the text is to that machine"),
    "price_per_card_hour": (float, "of a card, in any currency"),
    "price_per_machine_hour": (float, "of all its cards"),
    "reader_tokens_per_second": (
        float,
        "instead of measuring: prepare_data.py --dry_run prints it",
    ),
}
EITHER = {
    "card": "all_cards",
    "tokens": "max_steps",
    "hours": "budget",
    "price_per_card_hour": "price_per_machine_hour",
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Check or estimate, as the flags say; return the exit status."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    catch_interrupts()
    if asked.plan:
        return show_plan(asked)
    flags = size_flags(asked) if asked.size else {}
    if asked.estimate:  # the notes on the recipe are those that the header of a run shows
        console.start(stream=None if asked.json else sys.stdout)
    recipe = load(asked.recipe, flags)
    return show_estimates(recipe, asked) if asked.estimate else show_checks(recipe, asked)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    for name, (kind, what) in FLAGS.items():
        command_line.add_option(parser, name, kind, what, metavar="NAME" if kind is str else "N")
    asked = command_line.parse_flags(parser, argv)
    values = vars(asked)
    given = {
        name: value
        for name, value in values.items()
        if FLAGS[name][0] in (int, float) and value is not None
    }
    found, priced = asked.size or asked.tokens or asked.max_steps, price_of(asked, 1)
    table = [
        (not 0 < number < math.inf, f"--{name} {number}: must be more than 0")
        for name, number in given.items()
    ]
    table += [
        (values[a] and values[b], f"--{a} and --{b}: give one of them") for a, b in EITHER.items()
    ]
    table += [
        (
            asked.plan and (found or asked.all_cards),
            "--plan: finds size and tokens, for one kind of card",
        ),
        (
            asked.plan != bool(asked.hours or asked.budget),
            "--plan: goes with --hours H, or with --budget MONEY",
        ),
        (
            asked.budget and not priced,
            "--budget: give --price_per_card_hour or --price_per_machine_hour, too",
        ),
    ]
    if problems := [message for wrong, message in table if wrong]:
        raise BadInput(problems)
    asked.estimate |= any((asked.size, asked.card, asked.all_cards, given))
    if asked.recipe:
        asked.recipe = command_line.expand_option("recipe", asked.recipe)
    elif not asked.plan:
        asked.recipe = loading.DEFAULT_RECIPE
    return asked


def size_flags(asked: argparse.Namespace) -> dict[str, str]:
    """Return ``--size`` as recipe flags, with the number of steps if other flags give it."""
    sizes.find_size(asked.size)
    flags = {"size": asked.size, "run_name": asked.size}
    if asked.tokens:
        recipe = load(asked.recipe, flags)
        flags["max_steps"] = str(math.ceil(asked.tokens / recipe.batch.tokens_per_step))
    elif asked.max_steps:
        flags["max_steps"] = str(asked.max_steps)
    return flags


def load(path: str, flags: Mapping[str, str] | None = None) -> keys.Recipe:
    """Return a recipe, with what its ``init_from`` brings along."""
    recipe = loading.load_recipe(paths.find_from_anywhere(Path(path)), flags)
    if recipe.model.init_from:
        from ursa_minor.model import pretrained  # it needs the packages, which may be missing

        recipe = pretrained.complete(recipe)
    return recipe


def show_checks(recipe: keys.Recipe, asked: argparse.Namespace) -> int:
    """Print the verdicts as they come, or all as JSON; return 1 where one is an error."""
    found = []
    for check in chain(
        checks.examine(recipe, asked.recipe, quick=asked.quick), checks.examine_network(recipe)
    ):
        trying, line = check.level == TRYING, redact(str(check))
        if sys.stderr.isatty():  # what is waited for is shown for as long as it is
            print(f"\033[K{line if trying else ''}", end="\r", file=sys.stderr, flush=True)
        elif trying:
            print(line, file=sys.stderr, flush=True)
        if not trying:
            found.append(check)
            if not asked.json:
                print(line, flush=True)
    levels = [check.level for check in found]
    if asked.json:
        print(files.to_json({"checks": [dataclasses.asdict(check) for check in found]}, indent=1))
    else:
        print(
            ", ".join(
                pluralize(levels.count(level), level, f"{level}s") for level in (ERROR, WARNING)
            )
        )
    return int(ERROR in levels)


def show_estimates(recipe: keys.Recipe, asked: argparse.Namespace) -> int:
    """Print what the recipe takes on one card, on several, or on each that we know."""
    if asked.tokens:
        asked.max_steps = math.ceil(asked.tokens / recipe.batch.tokens_per_step)
    if asked.max_steps:
        recipe = keys.replace(recipe, max_steps=asked.max_steps)
    which, first = (gpus.GPUS, asked.count or 1) if asked.all_cards else wanted_card(asked)
    searched = asked.size and not (asked.count or asked.all_cards)  # the fewest that hold the model
    for count in (first << power for power in range(13 if searched else 1)):
        given, price = supply_of(recipe, asked, count), price_of(asked, count)
        rows = [run_estimate.estimate_run(recipe, card, count, price, given) for card in which]
        if rows[0]["fits"]:
            break
    if asked.json:
        print(files.to_json(rows if asked.all_cards else rows[0], indent=1))
    elif asked.all_cards:
        print(run_estimate.table(recipe, rows))
    else:
        print(run_estimate.describe(recipe, which[0], rows[0]))
        if rows[0]["fits"] and not asked.size:
            changes = {"max_steps": asked.max_steps} if asked.max_steps else {}
            if rows[0]["gradient_checkpointing"] != recipe.model.gradient_checkpointing:
                changes["gradient_checkpointing"] = rows[0]["gradient_checkpointing"]
            print(f"\n{budget.command(rows[0], asked.recipe, changes)}")
    return 0


def show_plan(asked: argparse.Namespace) -> int:
    """Print the size, tokens and command for the hours or the budget, beside the other sizes."""
    (card,), count = wanted_card(asked)
    price = price_of(asked, count)
    hours, plans = asked.hours or asked.budget / price, {}
    for path in (
        [asked.recipe] if asked.recipe else [f"recipes/{name}.yaml" for name in budget.RECIPES]
    ):
        recipe = load(path)
        plans[path] = budget.plan(
            recipe, card, count, hours, supply_of(recipe, asked, count), price
        )
    held = {path: row for path, row in plans.items() if row}
    if not held:
        raise BadInput(
            f"--plan: {count} x {card.name} holds none of {', '.join(plans)}; give a larger --card"
        )
    best = min(held, key=lambda path: held[path]["expected_loss"] or math.inf)
    said = {
        "best": best,
        "command": budget.command(held[best], best, held[best]["changes"]),
        "plans": plans,
    }
    print(files.to_json(said, indent=1) if asked.json else budget.describe(plans, best))
    return 0


def wanted_card(asked: argparse.Namespace) -> tuple[tuple[gpus.Gpu, ...], int]:
    """Return the card that was asked for, or this machine's, and how many. Raises BadInput where there is none."""
    found = [asked.card] if asked.card else [card["name"] for card in checks.nvidia_smi()]
    name = found[0] if found else "no NVIDIA card"
    if (card := gpus.find(name)) is None:
        near = ", ".join(gpus.similar_gpus(name))
        raise BadInput(
            f"{name}: not a card in our table; give --card, one of {near}, or --all_cards"
        )
    return (card,), asked.count or len(found)


def price_of(asked: argparse.Namespace, count: int) -> float:
    """Return the price of all cards an hour."""
    return asked.price_per_machine_hour or count * (asked.price_per_card_hour or 0)


def supply_of(
    recipe: keys.Recipe, asked: argparse.Namespace, count: int
) -> data_throughput.DataThroughput:
    """Return what the recipe's data give on the machine that was asked for."""
    return data_throughput.supply(
        recipe.data,
        trainers=count,
        cores=asked.cores
        or (count * CARD_CORES if asked.card or asked.all_cards else len(os.sched_getaffinity(0))),
        link=1e6 * (asked.link_megabytes_per_second or 0),
        speed=asked.reader_tokens_per_second or 0,
    )


if __name__ == "__main__":
    sys.exit(main())
