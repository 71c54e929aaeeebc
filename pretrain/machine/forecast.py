"""Estimates of a recipe on cards, beside measurements, ours and others', as lines and as a table."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import yaml

from pretrain.base import cards
from pretrain.machine import estimate
from pretrain.machine.supply import PREPARED, Supply
from pretrain.recipe import keys
from pretrain.recipe.plan import make_plan
from pretrain.recipe.rules import counted

FIGURES = {"hours": "hours", "waiting": "waiting_hours", "kWh": "kilowatt_hours", "cost": "cost"}  # of a table
SHARED = ("weights", "gradients", "moments", "half copies")
SOURCES = (
    "Memory, speed, time and energy are estimated (docs/cards.md says how well); parameters and FLOPs are counted."
)


def estimate_run(
    recipe: keys.Recipe, card: cards.Card, count: int, price_per_hour: float, supply: Supply = PREPARED
) -> dict:
    """Return the estimate of a run on ``count`` of a card, as its preset would run it; ``fits`` is False where none does.

    Args:
        price_per_hour: of all the cards, in any currency.
        supply: of the recipe's data; ``waiting_hours`` is what the cards wait for it, which costs as much as training.
    """
    shape, shards = estimate.shape_of(recipe.model), dict(estimate.IN_BUCKETS if count > 1 else {})
    if recipe.optimizer.shard_optimizer:
        shards["moments"] = count
    plain = {"half": True, "compiled": compiles(card.name), "shards": shards, "optimizer": recipe.optimizer.optimizer}
    ways: list[dict[str, Any]] = [plain | {"checkpointing": recipe.model.gradient_checkpointing}]
    ways.append(plain | {"checkpointing": "full"})
    if count > 1:  # the model itself is sharded, as zero3_x8.yaml does, which is not compiled
        ways.append(ways[-1] | {"compiled": False, "shards": dict.fromkeys(SHARED, count)})
    memory = 0.98 * card.memory_gib * 2**30  # the driver takes the rest
    sizes = ((estimate.largest_micro_batch(shape, memory, **how), how) for how in ways)
    size, how = next((found for found in sizes if found[0]), (0, ways[-1]))
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
    size = size if asked == "auto" else min(size, asked)
    plan = make_plan(keys.replace(recipe, per_device_train_batch_size=size), count)
    size = plan.per_device_train_batch_size
    # full: the forward pass, a third of the work, is done once more. mlp: so little that it does not show.
    work = 4 / 3 if how["checkpointing"] == "full" else 1.0
    run = estimate.run(shape, card, tokens=tokens, tokens_per_step=recipe.batch.tokens_per_step, work=work, count=count)
    waiting = supply.waiting_seconds(tokens, 3600 * run["hours"]) / 3600
    row |= {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_checkpointing": how["checkpointing"],
        "memory_bytes": estimate.memory(shape, micro_batch=size, **how),
        **run,
        "reader": supply.words,
        "reader_tokens_per_second": supply.speed if math.isfinite(supply.speed) else None,
        "waiting_hours": waiting,
    }
    if count == 1 and dataclasses.replace(shape, n_head=None) == estimate.GPT2_124M:  # which the table's cards trained
        row["measured_by_others"] = card.training and dataclasses.asdict(card.training)
        row["measured_by_us"] = card.ours and dataclasses.asdict(card.ours)
    if price_per_hour:
        row |= {"price_per_hour": price_per_hour, "cost": (run["hours"] + waiting) * price_per_hour}
    return row


def speeds(card: cards.Card) -> dict[str, float]:
    """Return the tokens per second of GPT-2 124M on one card: estimated, and as others and we measured them."""
    known = {"by others": card.training, "by us": card.ours}
    found = {name: float(one.figure) for name, one in known.items() if one}
    return {"estimated": 1 / estimate.seconds_per_token(estimate.GPT2_124M, card)} | found


def mfu(card: cards.Card, tokens_per_second: float) -> float:
    """Return the MFU of GPT-2 124M at 1,024 tokens on one card."""
    return tokens_per_second * estimate.GPT2_124M.flops_per_token / card.teraflops / 1e12


def good_mfus(card: cards.Card) -> tuple[float, float]:
    """Return a good MFU of GPT-2 124M, 0.9 of the least that is known of the card, and an excellent one, the highest."""
    shares = [mfu(card, speed) for speed in speeds(card).values()]
    return 0.9 * min(shares), max(shares)


def expectation(card: cards.Card) -> str:
    """Return what to expect of one card with GPT-2 124M, in a line."""
    good, excellent = good_mfus(card)
    said = ", ".join(f"{name} {rounded(speed)}" for name, speed in speeds(card).items())
    advice = f"; often advised: micro-batch {card.advised}" if card.advised else ""
    return f"GPT-2 124M on one: tokens/s {said}; mfu good from {good:.0%}, excellent {excellent:.0%}{advice}"


def describe(recipe: keys.Recipe, card: cards.Card, row: dict) -> str:
    """Return an estimate as lines to read."""
    flops = row["flops_per_token"]
    said = {"products": products(card), "parameters": f"{row['parameters']:,}"}
    said["FLOPs"] = f"{flops / 1e6:,.0f} M a token, {flops * row['tokens']:.2e} for {in_short(row['tokens'])} tokens"
    said["memory"] = "does not fit, not even one sequence with gradient checkpointing"
    if row["fits"]:
        parts, chosen = row["memory_bytes"], row["gradient_checkpointing"]
        listed = ", ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items() if part)
        said["memory"] = f"{sum(parts.values()) / 2**30:.1f} GiB a card: {listed}"
        how = [card.precision, "compiled" if row["compiled"] else "not compiled"]
        how += [f"{chosen} gradient checkpointing"] if chosen != "none" else []
        said["micro-batch"] = (
            f"{row['per_device_train_batch_size']} sequences of {recipe.model.sequence_length:,} tokens, "
            f"{row['gradient_accumulation_steps']} a step and card; {', '.join(how)}"
        )
        if row["shared_out"]:
            said["fits"] = "sharded (zero3_x8.yaml) with --gradient_checkpointing full only; gathering is not counted"
        elif chosen != recipe.model.gradient_checkpointing:
            said["fits"] = "with --gradient_checkpointing full only, which is a third more work"
        said["speed"] = f"{rounded(row['tokens_per_second'])} tokens/s, {row['mfu']:.0%} MFU"
        for name, known in (("others", card.training), ("us", card.ours)):
            if f"measured_by_{name}" in row:
                said[f"by {name}"] = measured(known, row["tokens"])
        said["time"] = f"{rounded(row['hours'])} h, evaluating and saving not counted"
        said["reader"] = reader(row)
        said["energy"] = f"{rounded(row['kilowatt_hours'])} kWh, the cards alone at full power"
        if "cost" in row:
            paid = rounded(row["hours"] + row["waiting_hours"])
            said["cost"] = f"{rounded(row['cost'])} for {paid} h, at {row['price_per_hour']:g} an hour for the machine"
    sheet = f"{card.memory_gib:g} GiB, {card.teraflops:g} TFLOP/s, {card.gigabytes_per_second:g} GB/s, {card.watts} W"
    title = f"{recipe.saving.name} on {row['count']} x {card.name} ({sheet}: {card.source})"
    return "\n".join([title, "", *(f"{name:13}{text}" for name, text in said.items()), "", SOURCES])


def reader(row: Mapping[str, Any]) -> str:
    """Return whether the data keep up with an estimated run, and the remedy where they do not."""
    remedy = "Run prepare_data.py before they are rented, or give more cores or several jobs (--num_jobs; docs/data.md)"
    waiting = f"the cards wait {rounded(row['waiting_hours'])} h. {remedy}" if row["waiting_hours"] else "no waiting"
    return f"{data(row)}: {waiting}"


def data(row: Mapping[str, Any]) -> str:
    """Return how fast the data of an estimated run come, and what limits them."""
    speed = row["reader_tokens_per_second"]
    return f"{rounded(speed)} tokens/s ({row['reader']})" if speed else row["reader"]


def products(card: cards.Card) -> str:
    """Return the rate of matrix products that an estimate takes, and where it is from."""
    rate, share = (
        f"{rounded(card.product_teraflops)} TFLOP/s of matrix products",
        card.product_teraflops / card.teraflops,
    )
    guessed = f"never measured; {share:.0%} of the peak, as measured cards reach"
    return f"{rate}, measured by others ({card.products.source})" if card.products else f"{rate}: {guessed}"


def measured(known: cards.Measured | None, tokens: int) -> str:
    """Return a measurement of GPT-2 124M on a card, and the time that it means for so many tokens."""
    if not known:
        return "n/a, never measured"
    size = f"at micro-batch {known.micro_batch}, " if known.micro_batch else ""
    return f"{known.figure:,} tokens/s, so {rounded(tokens / known.figure / 3600)} h, {size}measured ({known.source})"


def table(recipe: keys.Recipe, rows: list[dict]) -> str:
    """Return estimates as a table, a row for each of the cards that we know."""
    body: list[dict[str, str]] = []
    for card, row in zip(cards.CARDS, rows, strict=True):
        cells = {"card": card.name, "GiB": f"{card.memory_gib:g}", "precision": card.precision}
        cells["micro-batch"] = "does not fit"
        if row["fits"]:
            mark = " *" if row["gradient_checkpointing"] == "full" else ""
            cells["micro-batch"] = f"{row['per_device_train_batch_size']}{mark}"
            cells |= {"tokens/s": rounded(row["tokens_per_second"]), "MFU": f"{row['mfu']:.0%}"}
            cells |= {head: rounded(row[name]) for head, name in FIGURES.items() if name in row}
            known = {by: row[f"measured_by_{by}"] for by in ("others", "us") if f"measured_by_{by}" in row}
            cells |= {f"by {by}": f"{one['figure']:,}" if one else "never measured" for by, one in known.items()}
        body.append(cells)
    heads, first = {head: head for cells in body for head in cells}, rows[0]
    guessed = ", ".join(card.name for card in cards.CARDS if not card.products)
    lines = [
        f"{recipe.saving.name}: {first['parameters']:,} parameters, {in_short(first['tokens'])} tokens; each on "
        f"{counted(first['count'], 'card', 'cards')}\n",
        *aligned([[cells.get(head, "") for head in heads] for cells in [heads, *body]]),
        "\n* with --gradient_checkpointing full; waiting: hours for the data, beside the others",
        *[f"Data: {data(row)}." for row in rows if row["fits"]][:1],
        "What others measured has its source in pretrain/base/cards.csv; not all with a step as good as that estimated.",
        f"Matrix products never measured, taken as a share of the peak: {guessed}.",
    ]
    return "\n".join([*lines, SOURCES])


def aligned(rows: list[list[str]]) -> list[str]:
    """Return a table's rows as lines: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def compiles(preset: str) -> bool:
    """Return whether the accelerate YAML of this name compiles the model."""
    return "dynamo_config" in yaml.safe_load((cards.PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"))


def in_short(tokens: int) -> str:
    """Return a count in billions or millions."""
    return f"{tokens / 1e9:.1f} B" if tokens >= 1e9 else f"{tokens / 1e6:.1f} M"


def rounded(number: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{float(f'{number:.3g}'):,.0f}"
