"""Estimates of a recipe on cards, beside measurements, ours and others', as lines and as a table."""

import math
from collections.abc import Mapping
from typing import Any

import yaml

from ursa_minor.base import gpus
from ursa_minor.base.wording import pluralize
from ursa_minor.preflight import estimate
from ursa_minor.preflight.data_throughput import PREPARED, DataThroughput
from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import make_plan

FIGURES = {
    "tokens/s": "tokens_per_second",
    "hours": "hours",
    "waiting": "waiting_hours",
    "kWh": "kilowatt_hours",
}
FIGURES |= {"cost": "cost"}  # of a table, by head
SHARED = ("weights", "gradients", "moments", "half copies")
SOURCES = "Memory, speed, time and energy are estimated (docs/cards.md says how well); parameters and FLOPs are counted."


def estimate_run(
    recipe: keys.Recipe,
    card: gpus.Gpu,
    count: int,
    price_per_hour: float,
    supply: DataThroughput = PREPARED,
) -> dict:
    """Return the estimate of a run on ``count`` of a card, as its preset would run it; ``fits`` is False where none does.

    Args:
        price_per_hour: of all the cards, in any currency.
        supply: of the recipe's data; ``waiting_hours`` is what the cards wait for it, which costs as much as training.
    """
    shape, shards = estimate.shape_of(recipe.model), dict(estimate.IN_BUCKETS if count > 1 else {})
    if recipe.optimizer.shard_optimizer:
        shards["moments"] = count
    how: dict[str, Any] = {"half": True, "compiled": compiles(card.name), "shards": shards}
    how |= {
        "optimizer": recipe.optimizer.optimizer,
        "checkpointing": recipe.model.gradient_checkpointing,
    }
    ways = [how, how | {"checkpointing": "full"}]
    if count > 1:  # the model itself is sharded, as zero3_x8.yaml does, which is not compiled
        ways.append(ways[-1] | {"compiled": False, "shards": dict.fromkeys(SHARED, count)})
    free = 0.98 * card.memory_gib * 2**30  # the driver takes the rest
    for how in ways:
        if size := estimate.largest_micro_batch(shape, free, **how):
            break
    tokens = recipe.batch.tokens_per_step * recipe.schedule.max_steps
    row = {
        "card": card.name,
        "count": count,
        "compiled": how["compiled"],
        "parameters": shape.parameters,
        "flops_per_token": shape.flops_per_token,
        "tokens": tokens,
        "fits": bool(size),
        "shared_out": "weights" in how["shards"],
    }
    if not size:
        return row
    asked = recipe.batch.per_device_train_batch_size
    plan = make_plan(recipe, count, size if asked == "auto" else min(size, asked))
    size = plan.per_device_train_batch_size
    # full: the forward pass, a third of the work, is done once more. mlp: so little that it does not show.
    work = 4 / 3 if how["checkpointing"] == "full" else 1.0
    run = estimate.run(
        shape,
        card,
        tokens=tokens,
        tokens_per_step=recipe.batch.tokens_per_step,
        work=work,
        count=count,
    )
    row |= {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_checkpointing": how["checkpointing"],
        "memory_bytes": estimate.memory(shape, micro_batch=size, **how),
        **run,
        "reader": supply.words,
        "reader_tokens_per_second": supply.speed if math.isfinite(supply.speed) else None,
        "waiting_hours": supply.waiting_seconds(tokens, 3600 * run["hours"]) / 3600,
    }
    if price_per_hour:
        row |= {
            "price_per_hour": price_per_hour,
            "cost": (row["hours"] + row["waiting_hours"]) * price_per_hour,
        }
    return row


def speeds(card: gpus.Gpu) -> dict[str, float]:
    """Return the tokens per second of GPT-2 124M on one card: estimated, and as others and we measured them."""
    known = {"by others": card.training, "by us": card.ours}
    found = {name: one.figure for name, one in known.items() if one}
    return {"estimated": 1 / estimate.seconds_per_token(estimate.GPT2_124M, card)} | found


def mfu(card: gpus.Gpu, tokens_per_second: float) -> float:
    """Return the MFU of GPT-2 124M at 1,024 tokens on one card."""
    return tokens_per_second * estimate.GPT2_124M.flops_per_token / card.teraflops / 1e12


def good_mfus(card: gpus.Gpu) -> tuple[float, float]:
    """Return a good MFU of GPT-2 124M, 0.9 of the least that is known of the card, and an excellent one, the highest."""
    shares = [mfu(card, speed) for speed in speeds(card).values()]
    return 0.9 * min(shares), max(shares)


def expectation(card: gpus.Gpu) -> str:
    """Return what to expect of one card with GPT-2 124M, in a line."""
    good, excellent = good_mfus(card)
    said = ", ".join(f"{name} {rounded(speed)}" for name, speed in speeds(card).items())
    advice = f"; often advised: micro-batch {card.advised}" if card.advised else ""
    return f"GPT-2 124M on one: tokens/s {said}; mfu good from {good:.0%}, excellent {excellent:.0%}{advice}"


def describe(recipe: keys.Recipe, card: gpus.Gpu, row: dict) -> str:
    """Return an estimate as lines to read."""
    guessed = f"never measured; {card.product_teraflops / card.teraflops:.0%} of the peak, as measured cards reach"
    origin = f"measured by others ({card.products.source})" if card.products else guessed
    flops, known = row["flops_per_token"], filter(None, (card.training, card.ours))
    said = {
        "products": f"{rounded(card.product_teraflops)} TFLOP/s of matrix products, {origin}",
        "parameters": f"{row['parameters']:,}",
        "FLOPs": f"{flops / 1e6:,.0f} M a token, {flops * row['tokens']:.2e} for {in_short(row['tokens'])} tokens",
        "memory": "does not fit, not even one sequence with gradient checkpointing",
    }
    if row["fits"]:
        parts, checkpointing = row["memory_bytes"], row["gradient_checkpointing"]
        listed = ", ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items() if part)
        how = [card.precision, "compiled" if row["compiled"] else "not compiled"]
        how += [f"--gradient_checkpointing {checkpointing}"] if checkpointing != "none" else []
        how += (
            ["sharded (zero3_x8.yaml), whose gathering is not counted"] if row["shared_out"] else []
        )
        said["memory"] = f"{sum(parts.values()) / 2**30:.1f} GiB a card: {listed}"
        said["micro-batch"] = (
            f"{row['per_device_train_batch_size']} sequences of {recipe.model.sequence_length:,} tokens, "
            f"{row['gradient_accumulation_steps']} a step and card; {', '.join(how)}"
        )
        said["speed"] = f"{rounded(row['tokens_per_second'])} tokens/s, {row['mfu']:.0%} MFU"
        said["time"] = f"{rounded(row['hours'])} h, evaluating and saving not counted"
        said["reader"] = reader(row)
        said["energy"] = f"{rounded(row['kilowatt_hours'])} kWh, the cards alone at full power"
        if "cost" in row:
            paid = rounded(row["hours"] + row["waiting_hours"])
            said["cost"] = (
                f"{rounded(row['cost'])} for {paid} h, at {row['price_per_hour']:g} an hour for the machine"
            )
    figures = [f"{one.figure:,.0f} tokens/s measured on one card ({one.source})" for one in known]
    said["GPT-2 124M"] = ", ".join(figures) or "never measured on this card"
    sheet = f"{card.memory_gib:g} GiB, {card.teraflops:g} TFLOP/s, {card.gigabytes_per_second:g} GB/s, {card.watts:g} W"
    title = f"{recipe.saving.name} on {row['count']} x {card.name} ({sheet}: {card.source})"
    return "\n".join([title, "", *(f"{name:13}{text}" for name, text in said.items()), "", SOURCES])


def reader(row: Mapping[str, Any]) -> str:
    """Return whether the data keep up with an estimated run, and the fix where they do not."""
    fix = (
        "Run prepare_data.py before they are rented, or use a machine with more CPU cores (--cores)"
    )
    waiting = (
        f"the cards wait {rounded(row['waiting_hours'])} h. {fix}"
        if row["waiting_hours"]
        else "no waiting"
    )
    speed = row["reader_tokens_per_second"]
    return (
        f"{rounded(speed)} tokens/s ({row['reader']}): {waiting}"
        if speed
        else f"{row['reader']}: {waiting}"
    )


def table(recipe: keys.Recipe, rows: list[dict]) -> str:
    """Return estimates as a table, a row for each of the cards that we know."""
    body = []
    for card, row in zip(gpus.GPUS, rows, strict=True):
        cells = {"card": card.name, "micro-batch": "does not fit"}
        if row["fits"]:
            mark = " *" if row["gradient_checkpointing"] == "full" else ""
            cells |= {
                "micro-batch": f"{row['per_device_train_batch_size']}{mark}",
                "MFU": f"{row['mfu']:.0%}",
            }
            cells |= {head: rounded(row[name]) for head, name in FIGURES.items() if name in row}
        measured = f"{card.training.figure:,.0f}" if card.training else "never"
        body.append(cells | {"124M, measured": measured})
    first = rows[0]
    title = f"{recipe.saving.name}: {first['parameters']:,} parameters, {in_short(first['tokens'])} tokens; each on "
    title += pluralize(first["count"], "card", "cards")
    notes = "* with --gradient_checkpointing full; waiting: hours for the data, beside the others; measured: tokens/s of "
    notes += "GPT-2 124M on one card, by others; --card NAME says more"
    return "\n".join([title, "", *aligned(body), "", notes, SOURCES])


def aligned(rows: list[dict[str, str]]) -> list[str]:
    """Return rows, by column, as a table's lines: its first column is aligned to the left, the others to the right."""
    heads = {head: head for row in rows for head in row}
    cells = [[row.get(head, "") for head in heads] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in cells
    ]


def compiles(preset: str) -> bool:
    """Return whether the accelerate YAML of this name compiles the model."""
    return "dynamo_config" in yaml.safe_load(
        (gpus.PRESETS / f"{preset}.yaml").read_text(encoding="utf-8")
    )


def in_short(tokens: int) -> str:
    """Return a count in billions or millions."""
    return f"{rounded(tokens / 1e9)} B" if tokens >= 1e9 else f"{rounded(tokens / 1e6)} M"


def rounded(number: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{float(f'{number:.3g}'):,.0f}"
