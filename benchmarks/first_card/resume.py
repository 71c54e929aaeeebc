"""Parts c and c2: check that a resumed run equals an uninterrupted one, and measure the cost."""

import shutil
from pathlib import Path
from typing import NamedTuple

from benchmarks.first_card.runner import Part
from benchmarks.first_card.training import (
    empty_run_folder,
    losses_of,
    pace,
    train,
    write_recipe,
)


def exactness(part: Part) -> None:
    """Resume gpt2_124m, with and without deterministic kernels: is the result the same?"""
    recipe_keys = step_keys(part)
    recipe = write_recipe(part, "gpt2_124m")
    results = {}
    for deterministic in ("true", "false"):
        compare_resumed(part, recipe, recipe_keys, deterministic, results)
    if len(results) == 2:
        speed = {name: result["tokens_per_second"] for name, result in results.items()}
        cost = 1 - speed["true"] / speed["false"]
        part.note(
            f"deterministic costs {cost:.1%} of the tokens/s (one run after the other)",
            deterministic_costs=cost,
        )


def exactness_of_muon(part: Part) -> None:
    """Resume gpt2_124m_fast with deterministic kernels: is the result the same?"""
    recipe_keys = {"decay_ratio": 0.5, **step_keys(part)}
    compare_resumed(part, write_recipe(part, "gpt2_124m_fast"), recipe_keys, "true", {})


def step_keys(part: Part) -> dict:
    """Return recipe keys for a short run with a checkpoint in its middle."""
    steps = 12 if part.is_tiny else 40
    recipe_keys = {
        "max_steps": steps,
        "warmup_steps": 5,
        "save_steps": steps // 2,
        "save_total_limit": 0,
    }
    if not part.is_tiny:
        recipe_keys |= {"tokens_per_step": 131072, "per_device_train_batch_size": 32}
    return recipe_keys


class TrainedRun(NamedTuple):
    """The results of a run."""

    losses: dict[int, float]  # by step
    weights: bytes
    speed: dict  # as ``pace`` returns it


def compare_resumed(
    part: Part, recipe: Path, recipe_keys: dict, deterministic: str, results: dict
) -> None:
    """Train a run to its end, then again from its first checkpoint, and compare the results.

    Args:
        part: receives the figures.
        recipe: path of the recipe.
        recipe_keys: replace values of the recipe.
        deterministic: value of the key ``deterministic``, "true" or "false".
        results: of the part by ``deterministic``. The new result is added.
    """
    folder = empty_run_folder(part, f"exact_{deterministic}")
    all_keys = {"deterministic": deterministic, **recipe_keys, "run_name": folder.name}

    def train_run(kind: str) -> TrainedRun | None:
        title = f"{kind}, deterministic {deterministic}"
        if train(part, title, recipe, all_keys) is None:
            return None
        weights = (folder / "model" / "model.safetensors").read_bytes()
        memory_bytes = part.command.record["memory_bytes"]
        return TrainedRun(
            losses=losses_of(folder),
            weights=weights,
            speed=pace(folder, memory_bytes),
        )

    whole = train_run("whole")
    if whole is None:
        return
    # Go back to the checkpoint in the middle of the run.
    checkpoints = sorted((folder / "checkpoints").iterdir())
    for checkpoint in checkpoints[1:]:
        shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "model")
    resumed = train_run("resumed")
    if resumed is None:
        return

    is_equal = resumed.weights == whole.weights
    differences = [abs(loss - whole.losses[step]) for step, loss in resumed.losses.items()]
    largest_difference = max(differences)
    results[deterministic] = whole.speed | {
        "weights_equal": is_equal,
        "losses_apart": largest_difference,
    }
    comparison = "bitwise equal" if is_equal else "differ"
    tokens_per_second = whole.speed["tokens_per_second"]
    part.note(
        f"deterministic {deterministic}: resumed weights {comparison}, "
        f"losses apart by at most {largest_difference:.1e}; "
        f"{tokens_per_second:,.0f} tokens/s",
        exact=results,
    )
    if not is_equal and deterministic == "true":
        part.fail("deterministic true: the resumed run is not the run that was never stopped")
