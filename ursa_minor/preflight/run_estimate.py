"""Estimate the run of a recipe on GPUs, and describe the estimate as text or as a table."""

import sys
from collections.abc import Mapping
from typing import Any

import yaml

from ursa_minor.base import gpus, terminal
from ursa_minor.base.run_files import WEIGHTS
from ursa_minor.base.wording import pluralize
from ursa_minor.model.architectures import Shape
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import make_plan

GPU_MEMORY_SHARE = 0.98  # of the nominal memory; the driver takes the rest
# Parts of the memory that are sharded over all GPUs with zero3_x8.yaml.
SHARDED_PARTS = ("weights", "gradients", "moments", "half copies")
# Columns of the table of GPUs: header -> key of an estimate.
TABLE_COLUMNS = {
    "tokens/s": "tokens_per_second",
    "hours": "hours",
    "kWh": "kilowatt_hours",
    "cost": "cost",
}
TABLE_NOTES = (
    "* with --gradient_checkpointing full",
    "124M, measured: tokens/s of GPT-2 124M on one GPU, measured by others",
    "",
    "--card NAME shows more about one GPU.",
)
SOURCES = (
    "Memory, speed, time and energy are estimated (accuracy: docs/cards.md). Parameters and FLOPs "
    "are counted."
)
LABEL_WIDTH = 13
NO_PEER_TO_PEER = (
    "GeForce GPUs have no peer-to-peer transfers over PCIe: they exchange gradients through the "
    "memory of the computer. If the first update hangs, set NCCL_P2P_DISABLE=1 "
    "(docs/gpu_tuning.md)"
)


def estimate_run(recipe: keys.Recipe, gpu: gpus.Gpu, count: int, price_per_hour: float) -> dict:
    """Estimate a run on ``count`` GPUs, with the settings of their accelerate YAML.

    Args:
        price_per_hour: of all GPUs together, in any currency. 0 if it is not known.

    Returns:
        A JSON object. It always has the keys ``card``, ``count``, ``compiled``, ``parameters``,
        ``flops_per_token``, ``tokens``, ``checkpoint_bytes`` (the most that all checkpoints take
        on disk), ``fits`` (whether the memory suffices) and ``shared_out`` (whether weights are
        sharded over the GPUs). If it fits, it also has

        - ``per_device_train_batch_size``, ``gradient_accumulation_steps``,
          ``gradient_checkpointing``
        - ``memory_bytes``: see ``estimate.memory``
        - ``tokens_per_second``, ``mfu``, ``hours``, ``kilowatt_hours``
        - ``price_per_hour``, ``cost``, if there is a price
    """
    shape = estimate.shape_of(recipe.model)
    free_bytes = GPU_MEMORY_SHARE * gpu.memory_gib * 2**30
    for memory_options in _memory_options(recipe, gpu, count):
        largest = estimate.largest_micro_batch(shape, free_bytes, **memory_options)
        if largest:
            break

    tokens = recipe.batch.tokens_per_step * recipe.schedule.total_steps
    row = {
        "card": gpu.name,
        "count": count,
        "compiled": memory_options["compiled"],
        "parameters": shape.parameters,
        "flops_per_token": shape.flops_per_token,
        "tokens": tokens,
        "checkpoint_bytes": estimate.written_bytes(recipe)[0],
        "fits": bool(largest),
        "shared_out": "weights" in memory_options["shards"],
    }
    if not largest:
        return row

    micro_batch = largest
    if recipe.batch.per_device_train_batch_size != "auto":
        micro_batch = min(largest, recipe.batch.per_device_train_batch_size)
    batch_plan = make_plan(recipe, count, micro_batch)
    micro_batch = batch_plan.per_device_train_batch_size
    row |= {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch_plan.gradient_accumulation_steps,
        "gradient_checkpointing": memory_options["checkpointing"],
        "memory_bytes": estimate.memory(shape, micro_batch=micro_batch, **memory_options),
    }
    row |= _speed(shape, recipe, gpu, count, memory_options["checkpointing"])
    if price_per_hour:
        row |= {"price_per_hour": price_per_hour, "cost": row["hours"] * price_per_hour}
    return row


def _memory_options(recipe: keys.Recipe, gpu: gpus.Gpu, count: int) -> list[dict[str, Any]]:
    """Return arguments of ``estimate.memory``: the recipe's, then some that need less memory.

    The others are gradient checkpointing of entire blocks and, on several GPUs, sharding of the
    model as well (zero3_x8.yaml, which does not compile the model).
    """
    shards: dict[str, float] = {}
    if count > 1:
        shards |= estimate.IN_BUCKETS
    if recipe.optimizer.shard_optimizer:
        shards["moments"] = count
    as_in_recipe = {
        "half": True,
        "compiled": compiles(gpu.name),
        "shards": shards,
        "optimizer": recipe.optimizer.optimizer,
        "checkpointing": recipe.model.gradient_checkpointing,
    }
    checkpointed = as_in_recipe | {"checkpointing": "full"}
    if count == 1:
        return [as_in_recipe, checkpointed]
    sharded = checkpointed | {"compiled": False, "shards": dict.fromkeys(SHARDED_PARTS, count)}
    return [as_in_recipe, checkpointed, sharded]


def _speed(
    shape: Shape, recipe: keys.Recipe, gpu: gpus.Gpu, count: int, checkpointing: str
) -> dict[str, float]:
    """Return the speed and energy of a run (``estimate.speed_and_energy``)."""
    work = 1.0
    if checkpointing == "full":
        # The forward pass, a third of the work, is done twice. What "mlp" does twice is negligible.
        work = 4 / 3
    return estimate.speed_and_energy(
        shape,
        gpu,
        tokens=recipe.batch.tokens_per_step * recipe.schedule.total_steps,
        tokens_per_step=recipe.batch.tokens_per_step,
        work=work,
        count=count,
    )


def speeds(gpu: gpus.Gpu) -> dict[str, float]:
    """Return the estimated and measured tokens per second of GPT-2 124M on one GPU, by origin."""
    figures = {"estimated": 1 / estimate.seconds_per_token(estimate.GPT2_124M, gpu)}
    if gpu.training:
        figures["measured by others"] = gpu.training.figure
    if gpu.own_training:
        figures["measured by us"] = gpu.own_training.figure
    return figures


def mfu(gpu: gpus.Gpu, tokens_per_second: float) -> float:
    """Return the MFU of GPT-2 124M at 1,024 tokens on one GPU."""
    return tokens_per_second * estimate.GPT2_124M.flops_per_token / gpu.teraflops / 1e12


def good_mfus(gpu: gpus.Gpu) -> tuple[float, float]:
    """Return a good and an excellent MFU of GPT-2 124M on one GPU.

    Excellent is the highest MFU that is estimated or was measured, good is 0.9 of the lowest one.
    """
    shares = [mfu(gpu, speed) for speed in speeds(gpu).values()]
    return 0.9 * min(shares), max(shares)


def expectation(gpu: gpus.Gpu) -> str:
    """Return the expected speed and MFU of GPT-2 124M on one GPU, as one line."""
    figures = []
    for origin, speed in speeds(gpu).items():
        figures.append(f"{rounded(speed)} {origin}")
    good, excellent = good_mfus(gpu)
    line = f"GPT-2 124M on one GPU: tokens/s {', '.join(figures)}; "
    line += f"MFU good from {good:.0%}, excellent from {excellent:.0%}"
    if gpu.usual_micro_batch:
        line += f"; usual micro-batch: {gpu.usual_micro_batch}"
    return line


def describe(recipe: keys.Recipe, gpu: gpus.Gpu, row: Mapping[str, Any]) -> str:
    """Return an estimate (``estimate_run``) as text of several lines."""
    flops = row["flops_per_token"]
    all_flops = flops * row["tokens"]
    tokens = abbreviate(row["tokens"])
    texts = {
        "GPU": _data_sheet(gpu),
        "products": _product_speed(gpu),
        "parameters": f"{row['parameters']:,}",
        "FLOPs": f"{flops / 1e6:,.0f} M per token, {all_flops:.2e} for {tokens} tokens",
        "memory": "does not fit, not even one sequence with gradient checkpointing",
    }
    if row["fits"]:
        texts |= _describe_fitting_run(recipe, gpu, row)
    if recipe.saving.keep_checkpoints:
        texts["checkpoints"] = describe_kept(recipe, estimate.kept_checkpoints(recipe))
    if row["count"] > 1 and gpu.is_geforce:
        texts["transfers"] = NO_PEER_TO_PEER
    texts["GPT-2 124M"] = _measured_speeds(gpu)

    title = f"{recipe.saving.name} on {row['count']} x {gpu.name}"
    lines = [labeled(label, text) for label, text in texts.items()]
    return "\n".join([title, "", *lines, "", paragraph(SOURCES)])


def describe_kept(recipe: keys.Recipe, kept: Mapping[int, str]) -> str:
    """Return the number and the disk use of kept checkpoints (``estimate.kept_checkpoints``)."""
    number = pluralize(len(kept), "checkpoint", "checkpoints")
    num_weights = sum(contents == WEIGHTS for contents in kept.values())
    kinds = f"{num_weights} with weights only"
    if num_weights == 0:
        kinds = "complete"
    elif num_weights == len(kept):
        kinds = "weights only"
    kept_bytes = estimate.bytes_of_kept(recipe, kept)
    most_bytes, _shard_bytes = estimate.written_bytes(recipe, kept)
    return (
        f"{number} kept by keep_checkpoints ({kinds}): {gigabytes(kept_bytes)}; with the others "
        f"at most {gigabytes(most_bytes)} on disk"
    )


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    if size < 1e9:
        return f"{rounded(size / 1e6)} MB"
    return f"{rounded(size / 1e9)} GB"


def _data_sheet(gpu: gpus.Gpu) -> str:
    return (
        f"{gpu.memory_gib:g} GiB, {gpu.teraflops:g} TFLOP/s, {gpu.gigabytes_per_second:g} GB/s, "
        f"{gpu.watts:g} W ({gpu.source})"
    )


def _product_speed(gpu: gpus.Gpu) -> str:
    """Return the speed of matrix products and where the figure comes from."""
    speed = f"{rounded(gpu.product_teraflops)} TFLOP/s in matrix products"
    if gpu.products:
        return f"{speed}, measured by others ({gpu.products.source})"
    share = gpu.product_teraflops / gpu.teraflops
    return f"{speed}, never measured: {share:.0%} of the peak, as on the GPUs that were measured"


def _measured_speeds(gpu: gpus.Gpu) -> str:
    """Return the measured speeds of GPT-2 124M on one GPU."""
    texts = []
    for measurement in (gpu.training, gpu.own_training):
        if measurement:
            speed = f"{measurement.figure:,.0f} tokens/s"
            texts.append(f"{speed} measured on one GPU ({measurement.source})")
    return ", ".join(texts) or "never measured on this GPU"


def _describe_fitting_run(
    recipe: keys.Recipe, gpu: gpus.Gpu, row: Mapping[str, Any]
) -> dict[str, str]:
    """Return the texts, by label, on a run whose memory suffices."""
    sizes = []
    for name, size in row["memory_bytes"].items():
        if size:
            sizes.append(f"{name} {size / 2**30:.1f}")
    memory_gib = sum(row["memory_bytes"].values()) / 2**30
    micro_batch = row["per_device_train_batch_size"]
    sequence_length = recipe.model.sequence_length
    micro_batches = row["gradient_accumulation_steps"]
    speed = rounded(row["tokens_per_second"])
    hours = rounded(row["hours"])
    energy = rounded(row["kilowatt_hours"])
    texts = {
        "memory": f"{memory_gib:.1f} GiB per GPU: {', '.join(sizes)}",
        "micro-batch": f"{micro_batch} sequences of {sequence_length:,} tokens; "
        f"{micro_batches} per update on each GPU",
        "settings": _settings(gpu, row),
        "speed": f"{speed} tokens/s, {row['mfu']:.0%} MFU",
        "time": f"{hours} h, without evaluations and checkpoints",
        "energy": f"{energy} kWh, for the GPUs only, at full power",
    }
    if "cost" in row:
        cost = rounded(row["cost"])
        price = f"{row['price_per_hour']:g} per hour for the machine"
        texts["cost"] = f"{cost} for {hours} h, at {price}"
    return texts


def _settings(gpu: gpus.Gpu, row: Mapping[str, Any]) -> str:
    """Return the settings that determine the memory of an estimated run."""
    settings = [gpu.precision, "compiled" if row["compiled"] else "not compiled"]
    if row["gradient_checkpointing"] != "none":
        settings.append(f"--gradient_checkpointing {row['gradient_checkpointing']}")
    if row["shared_out"]:
        settings.append("sharded (zero3_x8.yaml; the time to gather the weights is not included)")
    return ", ".join(settings)


def table(recipe: keys.Recipe, rows: list[dict]) -> str:
    """Return the estimates for all known GPUs as a table.

    Args:
        rows: an estimate (``estimate_run``) for each of ``gpus.GPUS``.
    """
    body = []
    for gpu, row in zip(gpus.GPUS, rows, strict=True):
        cells = {"GPU": gpu.name, "micro-batch": "does not fit"}
        if row["fits"]:
            mark = " *" if row["gradient_checkpointing"] == "full" else ""
            cells["micro-batch"] = f"{row['per_device_train_batch_size']}{mark}"
            cells["MFU"] = f"{row['mfu']:.0%}"
            for header, key in TABLE_COLUMNS.items():
                if key in row:
                    cells[header] = rounded(row[key])
        measured = f"{gpu.training.figure:,.0f}" if gpu.training else "never"
        body.append(cells | {"124M, measured": measured})

    first = rows[0]
    title = (
        f"{recipe.saving.name}: {first['parameters']:,} parameters, "
        f"{abbreviate(first['tokens'])} tokens; on {pluralize(first['count'], 'GPU', 'GPUs')} each"
    )
    notes = [paragraph(note) for note in (*TABLE_NOTES, SOURCES)]
    if first["count"] > 1:
        notes.append(paragraph(f"{NO_PEER_TO_PEER}."))
    return "\n".join([paragraph(title), "", *align_columns(body), "", *notes])


def align_columns(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of a table: its first column aligned to the left, the others to the right.

    On a narrow terminal, the columns are divided into blocks.

    Args:
        rows: cells by header. A row may lack cells.
    """
    headers: dict[str, None] = {}  # in the order in which they appear
    for row in rows:
        headers |= dict.fromkeys(row)
    lines = [list(headers)]
    for row in rows:
        lines.append([row.get(header, "") for header in headers])

    return terminal.align(lines, terminal.width_of(sys.stdout), numbers_right=True)


def labeled(label: str, text: str) -> str:
    """Return a text after its label. Its lines are wrapped and indented below each other."""
    indent = " " * LABEL_WIDTH
    return terminal.wrap(text, _text_width(), label.ljust(LABEL_WIDTH), indent)


def paragraph(text: str) -> str:
    """Return a text wrapped for standard output."""
    return terminal.wrap(text, _text_width())


def _text_width() -> int:
    return terminal.width_of(sys.stdout) or terminal.DEFAULT_WIDTH


def compiles(preset: str) -> bool:
    """Return whether the accelerate YAML of this name compiles the model."""
    config = yaml.safe_load((gpus.PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"))
    return "dynamo_config" in config


def abbreviate(tokens: int) -> str:
    """Return a number of tokens in billions or millions."""
    if tokens >= 1e9:
        return f"{rounded(tokens / 1e9)} B"
    return f"{rounded(tokens / 1e6)} M"


def rounded(number: float) -> str:
    """Return a number with three significant digits and without an exponent."""
    if abs(number) < 1000:
        return f"{number:.3g}"
    return f"{float(f'{number:.3g}'):,.0f}"
