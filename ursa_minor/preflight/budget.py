"""Plan a run for a budget of hours or money: which size, how many tokens, which loss to expect.

All figures are estimated.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import gpus
from ursa_minor.data.sources import find as find_sources
from ursa_minor.preflight import run_estimate, train_command
from ursa_minor.preflight.data_size import estimate_train_tokens
from ursa_minor.recipe import keys, sizes
from ursa_minor.recipe.batching import MANY_EPOCHS

# The recipes from which the size for a budget is chosen. The first is smaller than GPT-2.
RECIPES = ("gpt2_small", *(size.recipe for size in sizes.GPT2_SIZES))
# The share of the hours that is planned for training. Evaluations of gpt2_124m take 7% on an H100,
# the start and the checkpoints take the rest.
TRAINING_SHARE = 0.9
LEAST_PARAMETERS = 5e7  # for smaller models the expected loss is meaningless
# The batch of a short run is halved until the run has this many updates, or the batch is so small.
FEWEST_UPDATES = 2000
LEAST_BATCH = 2**16  # tokens
LAW = (
    f"Expected loss: L = 1.82 + 482/N^0.348 + 2085/D^0.366 for N parameters and D tokens "
    f"(Besiroglu et al. 2024). Of a repeated text, at most {MANY_EPOCHS} epochs count. The formula "
    f"was fitted to MassiveText with a vocabulary of 32,000, from 70M parameters and 5B tokens up. "
    f"It ranks sizes; the loss on another text or with another tokenizer is on another level. For "
    f"GPT-2 124M after 10.3B tokens of FineWeb, the formula gives 3.00, and llm.c measured 3.27."
)


def expected_loss(parameters: float, tokens: float) -> float:
    """Return the expected loss, in nats per token, after training on tokens that are not repeated.

    The form is that of Hoffmann et al. 2022. The coefficients are those that Besiroglu et al. 2024
    (arXiv 2404.10102) fitted to the same runs.

    Args:
        parameters: including the embeddings.
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def plan(recipe: keys.Recipe, gpu: gpus.Gpu, count: int, hours: float, price: float) -> dict | None:
    """Plan a run of a given number of hours: choose its updates and, if it is short, its batch.

    Args:
        count: number of GPUs.
        hours: for training, evaluations and checkpoints together.
        price: of all GPUs per hour. 0 if it is not known.

    Returns:
        The estimate of the run (``run_estimate.estimate_run``), with these keys in addition:

        - ``changes``: recipe keys to change, and their values
        - ``updates``, ``tokens_per_parameter``
        - ``expected_loss``: None for a model below ``LEAST_PARAMETERS``
        - ``epochs``: None if the size of the text is not known
        - ``all_hours``: including evaluations and checkpoints; ``cost`` is for these hours

        None if the GPUs cannot hold the model without sharding its weights.
    """
    # The plan replaces the length of the recipe. The speed of an update does not depend on it.
    recipe = keys.replace(
        recipe, num_train_epochs=None, max_steps=recipe.schedule.max_steps or FEWEST_UPDATES
    )
    seconds = 3600 * TRAINING_SHARE * hours
    batch = _choose_batch(recipe, gpu, count, seconds)
    if batch is None:
        return None

    updates = max(1, int(batch.run_tokens / batch.tokens_per_step))
    changes: dict[str, Any] = {
        "run_name": f"{recipe.saving.name}_{updates}",
        "max_steps": updates,
    }
    if updates < 10 * recipe.schedule.warmup_steps:
        changes["warmup_steps"] = updates // 10
    if batch.tokens_per_step != recipe.batch.tokens_per_step:
        changes["tokens_per_step"] = batch.tokens_per_step
        changes["learning_rate"] = float(f"{batch.learning_rate:.2g}")

    row = run_estimate.estimate_run(keys.replace(recipe, **changes), gpu, count, price)
    if row["gradient_checkpointing"] != recipe.model.gradient_checkpointing:
        changes["gradient_checkpointing"] = row["gradient_checkpointing"]
    train_tokens = estimate_train_tokens(recipe.data)
    if not find_sources.has_data(recipe.data):
        changes |= train_command.DATA_PLACEHOLDER
    row |= {
        "changes": changes,
        "updates": updates,
        "tokens_per_parameter": row["tokens"] / row["parameters"],
        "expected_loss": None,
        "epochs": None,
        "all_hours": row["hours"] / TRAINING_SHARE,
    }
    if row["parameters"] >= LEAST_PARAMETERS:
        useful_tokens = min(row["tokens"], MANY_EPOCHS * train_tokens)
        row["expected_loss"] = expected_loss(row["parameters"], useful_tokens)
    if math.isfinite(train_tokens):
        row["epochs"] = row["tokens"] / train_tokens
    if price:
        row["cost"] = row["all_hours"] * price
    return row


class _Batch(NamedTuple):
    """A batch size, and how far a run gets with it.

    Attributes:
        tokens_per_step: tokens of an update.
        learning_rate: proportional to the square root of the batch size.
        run_tokens: tokens that are trained in the time.
    """

    tokens_per_step: int
    learning_rate: float
    run_tokens: float


def _choose_batch(recipe: keys.Recipe, gpu: gpus.Gpu, count: int, seconds: float) -> _Batch | None:
    """Return the batch of the recipe, or a smaller one if the run would have too few updates.

    None if the GPUs cannot hold the model without sharding its weights.
    """
    # Each GPU computes at least one sequence.
    least_batch = recipe.model.sequence_length * count
    tokens_per_step = _round_to_multiple(recipe.batch.tokens_per_step, least_batch)
    learning_rate = recipe.schedule.learning_rate
    for _ in range(2):  # the second time with the speed of the batch that the first time chose
        row = run_estimate.estimate_run(
            keys.replace(recipe, tokens_per_step=tokens_per_step), gpu, count, price_per_hour=0
        )
        if not row["fits"] or row["shared_out"]:
            return None
        run_tokens = row["tokens_per_second"] * seconds
        while run_tokens < FEWEST_UPDATES * tokens_per_step and tokens_per_step >= 2 * LEAST_BATCH:
            tokens_per_step = _round_to_multiple(tokens_per_step / 2, least_batch)
            learning_rate /= 2**0.5
    return _Batch(tokens_per_step, learning_rate, run_tokens)


def _round_to_multiple(number: float, unit: int) -> int:
    """Return the multiple of ``unit`` that is nearest to a number, at least one ``unit``."""
    return max(1, round(number / unit)) * unit


def command(row: Mapping[str, Any], recipe_path: str, changes: Mapping[str, Any]) -> str:
    """Return the command that trains a recipe on the GPUs of an estimate.

    Args:
        changes: recipe keys to change, and their values.
    """
    count = row["count"]
    launcher = gpus.launcher(gpus.preset(row["card"], count), count)
    return f"{launcher} {train_command.quoted(recipe_path, changes)}"


def describe(plans: Mapping[str, Mapping[str, Any] | None], best: str) -> str:
    """Return plans as text: a table of the sizes, and the run and the command of the best one.

    Args:
        plans: plans (``plan``) by the path of their recipe.
        best: path of the recipe whose plan is recommended.
    """
    chosen = plans[best]
    assert chosen is not None
    rounded = run_estimate.rounded
    time = (
        f"{rounded(chosen['all_hours'])} h: {rounded(chosen['hours'])} for training, the rest for "
        f"evaluations and checkpoints"
    )
    summary = [run_estimate.labeled("time", time)]
    if "cost" in chosen:
        cost = f"{rounded(chosen['cost'])} at {chosen['price_per_hour']:g} per hour"
        summary.append(run_estimate.labeled("cost", cost))
    summary.append(run_estimate.labeled("tokens", f"{chosen['tokens']:,}"))
    if chosen["epochs"] and chosen["epochs"] > MANY_EPOCHS:
        note = (
            f"The text is read for {chosen['epochs']:.1f} epochs. More than {MANY_EPOCHS} epochs "
            f"hardly improve the model, and the expected loss counts only {MANY_EPOCHS}. Use more "
            f"text or fewer hours."
        )
        summary.append(run_estimate.labeled("note", note))

    gpu = gpus.find(chosen["card"])
    if chosen["count"] > 1 and gpu and gpu.is_geforce:
        summary.append(run_estimate.labeled("transfers", run_estimate.NO_PEER_TO_PEER))

    table = []
    for path, row in plans.items():
        table.append(_cells(path, row, is_best=path == best))
    lines = [
        f"{Path(best).stem} on {chosen['count']} x {chosen['card']}",
        "",
        *run_estimate.align_columns(table),
        "",
        *summary,
        "",
        command(chosen, best, chosen["changes"]),
        "",
        run_estimate.paragraph(LAW),
        run_estimate.paragraph(run_estimate.SOURCES),
    ]
    return "\n".join(lines)


def _cells(path: str, row: Mapping[str, Any] | None, *, is_best: bool) -> dict[str, str]:
    """Return the cells, by header, of a size in the table of sizes."""
    mark = "*" if is_best else " "
    cells = {"  size": f"{mark} {Path(path).stem}"}
    if row is None:
        return cells | {"expected loss": "does not fit"}
    loss = row["expected_loss"]
    return cells | {
        "parameters": f"{row['parameters'] / 1e6:.0f} M",
        "tokens/s": run_estimate.rounded(row["tokens_per_second"]),
        "tokens": run_estimate.abbreviate(row["tokens"]),
        "per parameter": run_estimate.rounded(row["tokens_per_parameter"]),
        "updates": f"{row['updates']:,}",
        "expected loss": f"{loss:.2f}" if loss else "n/a",
    }
