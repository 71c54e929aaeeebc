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
    flags = ["--only", *variants]
    if "nanogpt" in variants:
        flags += ["--nanogpt", part.args.nanogpt]
    flags += ["--rounds", 1 if part.is_tiny else 3]
    flags += ["--steps_per_round", 1 if part.is_tiny else 10]
    flags += part.tiny_model_flags()
    title = f"micro-batch {micro_batch}, {', '.join(variants)}"
    measured = part.run_benchmark(title, "throughput", "--micro_batch", micro_batch, *flags)
    if measured is None:
        return

    (result,) = measured["micro_batches"]
    for name, row in result["variants"].items():
        if "problem" in row:
            part.fail(f"micro-batch {micro_batch}: {name}: {row['problem']}")
    phrases = []
    ours = result["variants"]["ours"]
    if "problem" not in ours:
        phrases.append(f"micro-batch {micro_batch}: {ours['tokens_per_second']:,.0f} tokens/s")
        if ours["mfu"]:
            phrases.append(f"{ours['mfu']:.1%} MFU")
        if ours["bytes"]:
            phrases.append(f"peak {ours['bytes'] / 2**30:.2f} GiB")
        for name, ratio in result["ours_over"].items():
            phrases.append(f"{ratio:.3f} times {name}")
    results = part.record.get("throughput", [])
    part.note(", ".join(phrases), throughput=[*results, result])


def ladder(part: Part) -> None:
    """Measure the usual speed-ups one after the other (benchmarks/ladder.py)."""
    flags = ["--rounds", 1 if part.is_tiny else 3]
    flags += ["--steps_per_round", 1 if part.is_tiny else 5]
    flags += ["--micro_batch", 2 if part.is_tiny else 16]
    flags += part.tiny_model_flags()
    measured = part.run_benchmark("ladder", "ladder", *flags)
    if measured is None:
        return
    ratios = []
    for rung in measured["micro_batches"][0]["rungs"]:
        if "problem" not in rung:
            ratios.append(f"{rung['rung']} {rung['over_first']:.2f}")
        elif not rung["problem"].startswith("skipped"):
            part.fail(f"ladder: {rung['rung']}: {rung['problem']}")
    phrase = f"times the first rung's tokens/s: {', '.join(ratios)}"
    part.note(phrase, ladder=measured["micro_batches"])


def compile_modes(part: Part) -> None:
    """Measure the start with a warm compiler cache, and compare compile modes."""
    cache = part.work / "compiler_cache"
    recipe = write_recipe(part, "gpt2_124m")
    recipe_keys = {"run_name": "cache", "max_steps": 2, "warmup_steps": 0}
    seconds = {}
    shutil.rmtree(cache, ignore_errors=True)
    for state in ("cold", "warm"):
        title = f"{state} cache"
        empty_run_folder(part, "cache")
        if train(part, title, recipe, recipe_keys, compiler_cache=cache) is None:
            break
        seconds[state] = part.record["programs"][title]
        phrase = f"2 steps, compiler cache {state}: {seconds[state]:.0f} s"
        part.note(phrase, cache_seconds=seconds)

    is_compiled = part.command.has_gpu or not part.is_tiny
    if is_compiled:
        for mode in ("descent", "autotune"):
            measure_variants(part, part.args.micro_batches[0], ["ours", mode])
