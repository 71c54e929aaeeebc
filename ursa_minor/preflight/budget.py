"""A budget to a run: which size, how many tokens, which loss to expect, and whether the data keep up. All estimated."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ursa_minor.base import gpus, paths
from ursa_minor.preflight import run_estimate
from ursa_minor.preflight.data_throughput import DataThroughput
from ursa_minor.recipe import keys, sizes
from ursa_minor.recipe.batching import MANY_EPOCHS

# Recipes that a budget chooses from; the first is smaller than GPT-2.
RECIPES = ("gpt2_small", *(size.recipe for size in sizes.GPT2_SIZES))
TRAINING_SHARE = (
    0.9  # of the hours; evaluations of gpt2_124m take 7% on an H100, start and checkpoints the rest
)
LEAST_PARAMETERS = 5e7  # below, the law's level means nothing
# A short run halves the batch of its recipe to reach this number of updates, but not below.
FEWEST_UPDATES, LEAST_BATCH = (
    2000,
    2**16,
)
LAW = f"""Expected loss: L = 1.82 + 482/N^0.348 + 2085/D^0.366 (Besiroglu et al. 2024). It was fitted to MassiveText with a
vocabulary of 32,000, from 70M parameters and 5B tokens up: it ranks sizes, and your text and tokenizer have another level.
In D a text counts at most {MANY_EPOCHS} times.
GPT-2 124M after 10.3B tokens of FineWeb: the law gives 3.00, llm.c measured 3.27."""


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the loss, in nats per token, of so many parameters, embeddings too, after tokens that are each read once.

    The form is that of Hoffmann et al. 2022, its fit to their runs that of Besiroglu et al. 2024 (arXiv 2404.10102).
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def plan(
    recipe: keys.Recipe,
    card: gpus.Gpu,
    count: int,
    hours: float,
    given: DataThroughput,
    price: float,
) -> dict | None:
    """Return the estimate of a recipe cut or stretched to the hours, or None where no card holds it.

    Args:
        price: of all the cards an hour.

    Returns: ``forecast.estimate_run``'s row, and ``changes`` of the recipe, ``updates``, ``tokens_per_parameter``,
        ``expected_loss`` (None below ``LEAST_PARAMETERS``), ``epochs`` (None where the text's size is not known),
        ``all_hours``.
    """
    seconds, sequences = 3600 * TRAINING_SHARE * hours, recipe.model.sequence_length * count

    def shared(batch: float) -> int:
        return max(1, round(batch / sequences)) * sequences

    batch, rate = shared(recipe.batch.tokens_per_step), recipe.schedule.learning_rate
    for _ in range(2):  # a smaller batch has another speed
        first = run_estimate.estimate_run(
            keys.replace(recipe, tokens_per_step=batch), card, count, 0
        )
        if not first["fits"] or first["shared_out"]:
            return None
        tokens = first["tokens_per_second"] * seconds
        if given.waiting_seconds(tokens, 0) > seconds:
            tokens = given.speed * seconds
        while tokens < FEWEST_UPDATES * batch and batch >= 2 * LEAST_BATCH:
            batch, rate = shared(batch / 2), rate / 2**0.5
    steps = max(1, int(tokens / batch))
    changes: dict[str, Any] = {"run_name": f"{recipe.saving.name}_{steps}", "max_steps": steps}
    if steps < 10 * recipe.schedule.warmup_steps:
        changes["warmup_steps"] = steps // 10
    if batch != recipe.batch.tokens_per_step:
        changes |= {"tokens_per_step": batch, "learning_rate": float(f"{rate:.2g}")}
    row = run_estimate.estimate_run(keys.replace(recipe, **changes), card, count, price, given)
    if row["gradient_checkpointing"] != recipe.model.gradient_checkpointing:
        changes["gradient_checkpointing"] = row["gradient_checkpointing"]
    all_hours = (row["hours"] + row["waiting_hours"]) / TRAINING_SHARE
    loss = expected_loss(row["parameters"], min(row["tokens"], MANY_EPOCHS * given.text))
    row |= {
        "changes": changes,
        "updates": steps,
        "tokens_per_parameter": row["tokens"] / row["parameters"],
        "expected_loss": loss if row["parameters"] >= LEAST_PARAMETERS else None,
        "epochs": row["tokens"] / given.text if math.isfinite(given.text) else None,
        "all_hours": all_hours,
    }
    return row | ({"cost": all_hours * price} if price else {})


def command(row: Mapping, path: str, changes: Mapping[str, Any]) -> str:
    """Return the command that trains the recipe of an estimate, with changes."""
    flags = shlex.join(
        word for name, value in changes.items() for word in (f"--{name}", str(value))
    )
    launcher = gpus.launcher(gpus.preset(row["card"], row["count"]), row["count"])
    return f"{launcher} train.py --recipe {paths.quoted(path)} {flags}".rstrip()


def describe(plans: Mapping[str, Mapping | None], best: str) -> str:
    """Return plans, by the recipe's path, as lines to read: a table of the sizes, then the best, which is not None."""
    row, rounded, table = plans[best] or {}, run_estimate.rounded, []
    for path, found in plans.items():
        cells = {"  size": f"{'*' if path == best else ' '} {Path(path).stem}"}
        if found:
            cells |= {
                "parameters": f"{found['parameters'] / 1e6:.0f} M",
                "tokens/s": rounded(found["tokens_per_second"]),
                "tokens": run_estimate.in_short(found["tokens"]),
                "a parameter": rounded(found["tokens_per_parameter"]),
                "updates": f"{found['updates']:,}",
            }
        loss = found and found["expected_loss"]
        table.append(
            cells | {"expected loss": f"{loss:.2f}" if loss else "n/a" if found else "does not fit"}
        )
    hours = f"{rounded(row['all_hours'])} h: training {rounded(row['hours'])}, waiting for data"
    rest = f"{rounded(row['waiting_hours'])}, the rest for evaluations and checkpoints"
    lines = [f"{row['count']} x {row['card']}, {hours} {rest}"]
    lines += (
        [f"cost {rounded(row['cost'])} at {row['price_per_hour']:g} an hour"]
        if "cost" in row
        else []
    )
    lines += [
        "",
        *run_estimate.aligned(table),
        "",
        f"tokens    {row['tokens']:,}",
        f"reader    {run_estimate.reader(row)}",
    ]
    if row["epochs"] and row["epochs"] > MANY_EPOCHS:
        why = f"{row['epochs']:.1f} epochs: more than {MANY_EPOCHS} teach little, and the loss counts {MANY_EPOCHS}"
        lines.append(f"note      {why}: give more text, or fewer hours")
    return "\n".join(
        [*lines, "", command(row, best, row["changes"]), "", LAW, run_estimate.SOURCES]
    )
