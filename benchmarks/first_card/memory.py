"""Part g: compare the memory estimate with measured peaks."""

from pathlib import Path

from benchmarks.first_card.runner import Part
from benchmarks.first_card.training import write_recipe


def memory(part: Part) -> None:
    """Compare the memory estimate with measured peaks (benchmarks/memory_card.py)."""
    if not part.command.has_gpu:
        part.note("a rehearsal without a card: nothing to measure", memory=[])
        return
    recipe = write_recipe(part, "gpt2_124m")
    micro_batches = [2, 4] if part.is_tiny else [16, 64]
    flags = ["--recipes", recipe]
    flags += ["--micro_batch", *micro_batches]
    flags += ["--compiled", "yes"]
    flags += ["--checkpointing", "none", "full"]
    measured = part.run_benchmark("memory", "memory_card", *flags)
    if measured is None:
        return
    rows = []
    ratios = []
    for row in measured["rows"]:
        recipe_name = Path(row["recipe"]).name
        rows.append(row | {"recipe": recipe_name})
        if "problem" not in row:
            ratios.append(row["ratio"])
    if ratios:
        num_close = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
        part.note(
            f"estimated / measured {min(ratios):.2f} to {max(ratios):.2f}, "
            f"within 5% in {num_close} of {len(ratios)} cases",
            memory=rows,
        )
