"""Parts b, b2 and h: compare the speed of train.py with other programs and other settings."""

import shutil

from benchmarks.first_card.runner import Part
from benchmarks.first_card.training import empty_run_folder, train, write_recipe


def throughput(part: Part) -> None:
    """Compare train.py, plain PyTorch, Trainer, nanoGPT (NANOGPT=...) and an upper bound."""
    variants = ["ours", "plain", "trainer", "ceiling"]
    if part.args.nanogpt:
        variants.insert(3, "nanogpt")
    for micro_batch in part.args.micro_batches:
        measure_variants(part, micro_batch, variants)


def measure_variants(part: Part, micro_batch: int, variants: list[str]) -> None:
    """Run benchmarks/throughput.py, and note speed, MFU, memory peak and ratios.

    Args:
        part: receives the figures.
        micro_batch: sequences per micro-batch.
        variants: of throughput.py.
    """
    flags = ["--micro_batch", micro_batch, "--only", *variants]
    if "nanogpt" in variants:
        flags += ["--nanogpt", part.args.nanogpt]
    flags += turn_flags(part, steps_per_round=10)
    listed_variants = ", ".join(variants)
    title = f"micro-batch {micro_batch}, {listed_variants}"
    measured = part.run_benchmark(title, "throughput", *flags)
    if measured is None:
        return

    (result,) = measured["micro_batches"]
    rows = result["variants"]
    for name, row in rows.items():
        problem = row.get("problem")
        if problem:
            part.fail(f"micro-batch {micro_batch}: {name}: {problem}")
    phrase = ""
    if "problem" not in rows["ours"]:
        description = describe(result)
        phrase = f"micro-batch {micro_batch}: {description}"
    results = part.record.get("throughput", [])
    part.note(phrase, throughput=[*results, result])


def describe(result: dict) -> str:
    """Return the speed of train.py, and its ratios to the other variants, for the row."""
    ours = result["variants"]["ours"]
    tokens_per_second = ours["tokens_per_second"]
    mfu = ours["mfu"]
    peak_bytes = ours["bytes"]
    phrases = [f"{tokens_per_second:,.0f} tokens/s"]
    if mfu:
        phrases.append(f"{mfu:.1%} MFU")
    if peak_bytes:
        gibibytes = peak_bytes / 2**30
        phrases.append(f"peak {gibibytes:.2f} GiB")
    for name, ratio in result["ours_over"].items():
        phrases.append(f"{ratio:.3f} times {name}")
    return ", ".join(phrases)


def turn_flags(part: Part, steps_per_round: int) -> list:
    """Return flags for three rounds of this length, or in a rehearsal for the shortest turns."""
    rounds = 3
    if part.is_tiny:
        rounds = 1
        steps_per_round = 1
    flags = ["--rounds", rounds, "--steps_per_round", steps_per_round]
    return flags + part.tiny_model_flags()


def ladder(part: Part) -> None:
    """Measure the usual speed-ups one after the other (benchmarks/ladder.py)."""
    micro_batch = 2 if part.is_tiny else 16
    flags = ["--micro_batch", micro_batch, *turn_flags(part, steps_per_round=5)]
    measured = part.run_benchmark("ladder", "ladder", *flags)
    if measured is None:
        return
    (result,) = measured["micro_batches"]
    ratios = []
    for row in result["rungs"]:
        name = row["rung"]
        problem = row.get("problem")
        if problem is None:
            ratio = row["over_first"]
            ratios.append(f"{name} {ratio:.2f}")
        elif not problem.startswith("skipped"):
            part.fail(f"ladder: {name}: {problem}")
    listed_ratios = ", ".join(ratios)
    part.note(f"times the first rung's tokens/s: {listed_ratios}", ladder=[result])


def compile_modes(part: Part) -> None:
    """Measure the start with a warm compiler cache, and compare compile modes."""
    cache = part.work / "compiler_cache"
    recipe = write_recipe(part, "gpt2_124m")
    recipe_keys = {
        "run_name": "cache",
        "max_steps": 2,
        "warmup_steps": 0,
    }
    seconds_by_state = {}
    shutil.rmtree(cache, ignore_errors=True)
    for state in ("cold", "warm"):
        title = f"{state} cache"
        empty_run_folder(part, "cache")
        output = train(part, title, recipe, recipe_keys, compiler_cache=cache)
        if output is None:
            break
        seconds = part.record["programs"][title]
        seconds_by_state[state] = seconds
        phrase = f"2 steps, compiler cache {state}: {seconds:.0f} s"
        part.note(phrase, cache_seconds=seconds_by_state)

    is_compiled = part.command.has_gpu or not part.is_tiny
    if is_compiled:
        micro_batch = part.args.micro_batches[0]
        for mode in ("descent", "autotune"):
            measure_variants(part, micro_batch, ["ours", mode])
