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
    shape = estimate.shape_of(recipe.model)
    how: dict[str, Any] = {"half": True, "compiled": compiles(card.name), "optimizer": recipe.optimizer.optimizer}
    how["shards"] = estimate.IN_BUCKETS if count > 1 else {}
    if recipe.optimizer.shard_optimizer:
        how["shards"] = how["shards"] | {"moments": count}
    memory = 0.98 * card.memory_gib * 2**30  # the driver takes the rest
    for checkpointing in (recipe.model.gradient_checkpointing, "full"):
        if size := estimate.largest_micro_batch(shape, memory, checkpointing=checkpointing, **how):
            break
    if not size and count > 1:  # the model itself is sharded, as zero3_x8.yaml does, which is not compiled
        how |= {"compiled": False, "shards": dict.fromkeys(SHARED, count)}
        size = estimate.largest_micro_batch(shape, memory, checkpointing=checkpointing, **how)
    if isinstance(asked := recipe.batch.per_device_train_batch_size, int):
        size = min(size, asked)
    tokens = recipe.batch.tokens_per_step * recipe.schedule.max_steps
    row = {
        "card": card.name,
        "count": count,
        "memory_gib": card.memory_gib,
        "precision": card.precision,
        "compiled": how["compiled"],
        "products_teraflops": card.product_teraflops,
        "products_source": card.products and card.products.source,
        "parameters": shape.parameters,
        "flops_per_token": shape.flops_per_token,
        "tokens": tokens,
        "fits": bool(size),
        "shared_out": "weights" in how.get("shards", ()),
    }
    if not size:
        return row
    plan = make_plan(keys.replace(recipe, per_device_train_batch_size=size), count)
    size = plan.per_device_train_batch_size
    run = estimate.run(
        shape,
        card,
        tokens=tokens,
        tokens_per_step=recipe.batch.tokens_per_step,
        # full: the forward pass, a third of the work, is done once more. mlp: so little that it does not show.
        work=4 / 3 if checkpointing == "full" else 1.0,
        count=count,
    )
    taken = estimate.memory(shape, micro_batch=size, checkpointing=checkpointing, **how)
    row |= {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_checkpointing": checkpointing,
        "memory_bytes": {name: round(part) for name, part in taken.items()},
        **run,
    }
    if count == 1 and is_gpt2_124m(shape):
        row["measured_by_others"] = card.training and dataclasses.asdict(card.training)
        row["measured_by_us"] = card.ours and dataclasses.asdict(card.ours)
    row["reader"] = supply.words
    row["reader_tokens_per_second"] = supply.speed if math.isfinite(supply.speed) else None
    row["waiting_hours"] = supply.waiting_seconds(tokens, 3600 * run["hours"]) / 3600
    if price_per_hour:
        row["price_per_hour"] = price_per_hour
        row["cost"] = (run["hours"] + row["waiting_hours"]) * price_per_hour
    return row


def is_gpt2_124m(shape: estimate.Shape) -> bool:
    """Whether this is the model that others trained on the cards of pretrain/base/cards.csv."""
    names = ("architecture", "n_layer", "n_embd", "parameters", "sequence_length")
    return all(getattr(shape, name) == getattr(estimate.GPT2_124M, name) for name in names)


def speeds(card: cards.Card) -> dict[str, float]:
    """Return the tokens per second of GPT-2 124M on one card: estimated, and as others and we measured them."""
    known = {"others": card.training, "ours": card.ours}
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
    known, (good, excellent) = speeds(card), good_mfus(card)
    words = {"estimated": "estimated", "others": "by others", "ours": "by us"}
    said = ", ".join(f"{words[name]} {rounded(speed)}" for name, speed in known.items())
    advice = f"; often advised: micro-batch {card.advised}" if card.advised else ""
    return f"GPT-2 124M on one: tokens/s {said}; mfu good from {good:.0%}, excellent {excellent:.0%}{advice}"


def describe(recipe: keys.Recipe, card: cards.Card, row: dict) -> str:
    """Return an estimate as lines to read."""
    lines = [
        f"{recipe.saving.name} on {row['count']} x {card.name} ({card.memory_gib:g} GiB, {card.teraflops:g} TFLOP/s, "
        f"{card.gigabytes_per_second:g} GB/s, {card.watts} W: {card.source})",
        "",
        f"products     {products(card)}",
        f"parameters   {row['parameters']:,}",
        f"FLOPs        {row['flops_per_token'] / 1e6:,.0f} M a token, {row['flops_per_token'] * row['tokens']:.2e} for "
        f"{in_short(row['tokens'])} tokens",
    ]
    if not row["fits"]:
        return "\n".join([*lines, "memory       does not fit, not even one sequence with gradient checkpointing"])
    parts, size, chosen = row["memory_bytes"], row["per_device_train_batch_size"], row["gradient_checkpointing"]
    listed = ", ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items() if part)
    lines += [
        f"memory       {sum(parts.values()) / 2**30:.1f} GiB a card: {listed}",
        f"micro-batch  {size} sequences of {recipe.model.sequence_length:,} tokens, "
        f"{row['gradient_accumulation_steps']} a step "
        f"and card; {row['precision']}, {'compiled' if row['compiled'] else 'not compiled'}"
        f"{f', {chosen} gradient checkpointing' if chosen != 'none' else ''}",
    ]
    if row["shared_out"]:
        lines.append("             fits only with the model sharded (zero3_x8.yaml) and --gradient_checkpointing full")
    elif chosen != recipe.model.gradient_checkpointing:
        lines.append("             fits with --gradient_checkpointing full only, which is a third more work")
    hours = row["hours"]
    days = f" ({rounded(hours / 24)} days)" if hours >= 48 else ""
    gathering = ", gathering shared weights not counted" if row["shared_out"] else ""
    lines.append(f"speed        {rounded(row['tokens_per_second'])} tokens/s, {100 * row['mfu']:.0f}% MFU{gathering}")
    if "measured_by_others" in row:
        lines.append(f"others       {measured(card.training, 'others', row['tokens'])}")
    if row.get("measured_by_us"):
        lines.append(f"ours         {measured(card.ours, 'us', row['tokens'])}")
    lines += [
        f"time         {rounded(hours)} h{days}, evaluating and saving not counted",
        f"reader       {reader(row)}",
        f"energy       {rounded(row['kilowatt_hours'])} kWh, the cards alone at full power",
    ]
    if "cost" in row:
        lines.append(f"cost         {rounded(row['cost'])}, at {row['price_per_hour']:g} an hour for the machine")
    known = [] if row.get("measured_by_us") else ["Nothing of it is measured by us."]
    return "\n".join([*lines, "", *known, SOURCES])


def reader(row: Mapping[str, Any]) -> str:
    """Return whether the data keep up with an estimated run, and the remedy where they do not."""
    if row["reader_tokens_per_second"] is None:
        return f"{row['reader']}: no waiting"
    speed = f"{rounded(row['reader_tokens_per_second'])} tokens/s ({row['reader']})"
    if not row["waiting_hours"]:
        return f"{speed}: no waiting"
    return (
        f"{speed}: the cards wait {rounded(row['waiting_hours'])} h. Run prepare_data.py before they are rented, or "
        f"give more cores, several jobs (--num_jobs) or ready tokens (docs/data.md)"
    )


def products(card: cards.Card) -> str:
    """Return the rate of matrix products that an estimate takes, and where it is from."""
    rate = f"{rounded(card.product_teraflops)} TFLOP/s of matrix products"
    if card.products:
        return f"{rate}, measured by others ({card.products.source})"
    share = 100 * card.product_teraflops / card.teraflops
    return f"{rate}: never measured; {share:.0f}% of the peak, as measured cards reach"


def measured(known: cards.Measured | None, by: str, tokens: int) -> str:
    """Return a measurement of GPT-2 124M on a card, the time that it means for so many tokens, and who made it."""
    if not known:
        return "n/a, never measured"
    size = f"at micro-batch {known.micro_batch}, " if known.micro_batch else ""
    hours = rounded(tokens / known.figure / 3600)
    return f"{known.figure:,} tokens/s, so {hours} h, {size}measured by {by} ({known.source})"


def table(recipe: keys.Recipe, rows: list[dict]) -> str:
    """Return estimates as a table, a row a card."""
    body: list[dict[str, str]] = []
    for row in rows:
        cells = {"card": row["card"], "GiB": f"{row['memory_gib']:g}", "precision": row["precision"]}
        body.append(cells)
        if not row["fits"]:
            cells["micro-batch"] = "does not fit"
            continue
        mark = " *" if row["gradient_checkpointing"] == "full" else ""
        cells |= {"micro-batch": f"{row['per_device_train_batch_size']}{mark}"}
        cells |= {"tokens/s": rounded(row["tokens_per_second"]), "MFU": f"{100 * row['mfu']:.0f}%"}
        cells |= {"hours": rounded(row["hours"]), "kWh": rounded(row["kilowatt_hours"])}
        if "cost" in row:
            cells["cost"] = rounded(row["cost"])
        if "measured_by_others" in row:
            known = row["measured_by_others"]
            cells["tokens/s by others"] = f"{known['figure']:,}" if known else "never measured"
    heads = {head: head for cells in body for head in cells}
    widths = {head: max(len(cells.get(head, "")) for cells in [heads, *body]) for head in heads}
    first, guessed = rows[0], [row["card"] for row in rows if not row["products_source"]]
    lines = [
        f"{recipe.saving.name}: {first['parameters']:,} parameters, {in_short(first['tokens'])} tokens; each on "
        f"{first['count']} card{'s' if first['count'] > 1 else ''}",
        "",
    ]
    for cells in [heads, *body]:
        padded = [cells.get(head, "").rjust(width) for head, width in widths.items()]
        lines.append("  ".join([cells["card"].ljust(widths["card"]), *padded[1:]]).rstrip())
    lines.append("")
    if any(row.get("gradient_checkpointing") == "full" for row in rows):
        lines.append("* with --gradient_checkpointing full")
    mine = {row["card"]: row["measured_by_us"]["figure"] for row in rows if row.get("measured_by_us")}
    known = ", ".join(f"{name} {figure:,} tokens/s" for name, figure in mine.items())
    lines.append(f"Measured by us: {known}; nothing else." if known else "Nothing of it is measured by us.")
    if "tokens/s by others" in heads:
        lines.append("By others: sources in pretrain/base/cards.csv; not all with a step as good as that estimated.")
    if supplied := next((row for row in rows if row.get("reader")), None):
        waiting = [f"{row['card']} {rounded(row['waiting_hours'])} h" for row in rows if row.get("waiting_hours")]
        late = f"; waiting for data, not in the hours: {', '.join(waiting)}" if waiting else ", as fast as each needs"
        speed = supplied["reader_tokens_per_second"]
        lines.append(f"Data: {f'{rounded(speed)} tokens/s, ' if speed else ''}{supplied['reader']}{late}.")
    if guessed:
        lines.append(f"Matrix products never measured, taken as a share of the peak: {', '.join(guessed)}.")
    return "\n".join([*lines, SOURCES])


def compiles(preset: str) -> bool:
    """Return whether the accelerate YAML of this name compiles the model."""
    return "dynamo_config" in yaml.safe_load((cards.PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"))


def in_short(tokens: int) -> str:
    """Return a count in billions or millions."""
    return f"{tokens / 1e9:.1f} B" if tokens >= 1e9 else f"{tokens / 1e6:.1f} M"


def rounded(number: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{float(f'{number:.3g}'):,.0f}"
