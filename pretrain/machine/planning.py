"""A budget to a run: which size, how many tokens, which loss to expect, and whether the data keep up. All estimated."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.base import cards
from pretrain.machine import forecast
from pretrain.machine.supply import SAMPLE, SAMPLES, Supply
from pretrain.recipe import keys
from pretrain.recipe.plan import MANY_EPOCHS

SIZES = ("gpt2_small", "gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m")  # recipes that a budget chooses from
TRAINING_SHARE = 0.9  # of the hours; evaluations of gpt2_124m take 7% on an H100, start and checkpoints the rest
LEAST_PARAMETERS = 5e7  # below, the law's level means nothing
FEWEST_UPDATES, LEAST_BATCH = 2000, 2**16  # a short run halves its recipe's batch for that, and not below
LAW = """Expected loss: L = 1.82 + 482/N^0.348 + 2085/D^0.366 (Besiroglu et al. 2024). It was fitted to MassiveText with a
vocabulary of 32,000, from 70M parameters and 5B tokens up: it ranks sizes, and your text and tokenizer have another level.
GPT-2 124M after 10.3B tokens of FineWeb: the law gives 3.00, llm.c measured 3.27."""


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the loss, in nats per token, of so many parameters, embeddings too, after tokens that are each read once.

    The form is that of Hoffmann et al. 2022, its fit to their runs that of Besiroglu et al. 2024 (arXiv 2404.10102).
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def plan(recipe: keys.Recipe, card: cards.Card, count: int, hours: float, given: Supply, price: float) -> dict | None:
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
        first = forecast.estimate_run(keys.replace(recipe, tokens_per_step=batch), card, count, 0)
        if not first["fits"] or first["shared_out"]:
            return None
        tokens = first["tokens_per_second"] * seconds
        changes = {} if math.isinf(given.speed) else more_text(recipe.data, tokens)  # what is prepared stays
        asked = given._replace(text=1e9 * SAMPLES[-1]) if changes else given
        if asked.waiting_seconds(tokens, 0) > seconds:
            tokens = asked.speed * seconds
        while tokens < FEWEST_UPDATES * batch and batch >= 2 * LEAST_BATCH:
            batch, rate = shared(batch / 2), rate / 2**0.5
    steps = max(1, int(tokens / batch))
    changes["max_steps"] = steps
    if steps < 10 * recipe.schedule.warmup_steps:
        changes["warmup_steps"] = steps // 10
    if batch != recipe.batch.tokens_per_step:
        changes |= {"tokens_per_step": batch, "learning_rate": float(f"{rate:.2g}")}
    planned = keys.replace(recipe, **changes)
    row = forecast.estimate_run(planned, card, count, price, asked)
    if row["gradient_checkpointing"] != recipe.model.gradient_checkpointing:
        changes["gradient_checkpointing"] = row["gradient_checkpointing"]
    text = min(asked.text, planned.data.limit_tokens or asked.text)
    row |= {"changes": changes, "updates": steps, "tokens_per_parameter": row["tokens"] / row["parameters"]}
    loss = expected_loss(row["parameters"], min(row["tokens"], MANY_EPOCHS * text))
    row["expected_loss"] = loss if row["parameters"] >= LEAST_PARAMETERS else None
    row["epochs"] = row["tokens"] / text if math.isfinite(text) else None
    row["all_hours"] = (row["hours"] + row["waiting_hours"]) / TRAINING_SHARE
    if price:
        row["cost"] = row["all_hours"] * price
    return row


def more_text(data: keys.Data, tokens: float) -> dict[str, Any]:
    """Return the recipe keys that give so many tokens, where FineWeb has a larger sample or more of the same."""
    sample = SAMPLE.fullmatch(data.dataset_config_name or "")
    if not sample or tokens <= min(1e9 * int(sample[1]), data.limit_tokens or math.inf):
        return {}
    needed = math.ceil(1.01 * tokens / 1e9)
    size = min((size for size in SAMPLES if size >= needed), default=SAMPLES[-1])
    return {"dataset_config_name": f"sample-{size}BT", "limit_tokens": 1000000000 * min(needed, size)}


def command(row: Mapping, path: str) -> str:
    """Return the command that trains a plan."""
    stem = cards.preset(row["card"], row["count"])
    changes = {"recipe": path, "run_name": f"{Path(path).stem}_{row['updates']}"} | row["changes"]
    flags = shlex.join(word for name, value in changes.items() for word in (f"--{name}", str(value)))
    return f"{cards.launcher(stem, row['count'])} train.py {flags}"


def describe(plans: Mapping[str, Mapping | None], best: str) -> str:
    """Return plans, by the recipe's path, as lines to read: a table of the sizes, then the best, which is not None."""
    row, rounded = plans[best] or {}, forecast.rounded
    hours = f"{rounded(row['all_hours'])} h: training {rounded(row['hours'])}, waiting for data"
    rest = f"{rounded(row['waiting_hours'])}, the rest for evaluations and checkpoints"
    lines = [f"{row['count']} x {row['card']}, {hours} {rest}"]
    lines += [f"cost {rounded(row['cost'])} at {row['price_per_hour']:g} an hour"] if "cost" in row else []
    table = [["  size", "parameters", "tokens/s", "tokens", "a parameter", "updates", "expected loss"]]
    for path, found in plans.items():
        cells = [""] * 5 + ["does not fit"]
        if found:
            cells = [f"{found['parameters'] / 1e6:.0f} M", rounded(found["tokens_per_second"])]
            cells += [
                forecast.in_short(found["tokens"]),
                rounded(found["tokens_per_parameter"]),
                f"{found['updates']:,}",
            ]
            cells += [f"{found['expected_loss']:.2f}" if found["expected_loss"] else "n/a"]
        table.append([f"{'*' if path == best else ' '} {Path(path).stem}", *cells])
    epochs = "" if row["epochs"] is None else f", {row['epochs']:.2f} epochs"
    lines += [
        "",
        *forecast.aligned(table),
        "",
        f"tokens    {row['tokens']:,}{epochs}",
        f"reader    {forecast.reader(row)}",
    ]
    if row["epochs"] and row["epochs"] > MANY_EPOCHS:
        why = f"more than {MANY_EPOCHS} epochs teach little (Muennighoff et al. 2023), and the expected loss"
        lines.append(f"note      {why} counts {MANY_EPOCHS}: give more text, or fewer hours")
    return "\n".join([*lines, "", command(row, best), "", LAW, forecast.SOURCES])
