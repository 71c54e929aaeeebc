"""Fit the speed estimate of ursa_minor/preflight/estimate.py, and compare it with measurements.

    python benchmarks/estimate_cards.py             # print the fit and the table
    python benchmarks/estimate_cards.py --write     # update the pages and configuration files

It prints the fitted constants, and one line for each GPU on which others have measured GPT-2 124M:
the rate of matrix products, the measured and the estimated tokens/s, their ratio, and the ratio if
this GPU is left out of the fit. At the end it prints how many estimates are within 10%, and the
error of other models of the speed.

The estimate for one token is

    seconds = C (1 / M + 1 / R) + B / (b W)

- C: floating-point operations
- M: the rate of matrix products that others measured on the GPU, or a share of its peak if there
  is no measurement
- B: bytes of memory traffic
- W: memory bandwidth of the GPU
- R, b: constants that minimize the sum of the relative errors over the twenty GPUs on which one
  script was measured

No GPU of this script is left out, and none has a separate constant. The data do not determine a
constant factor of M: 0.9 to 1.2 fit equally well. Our own measurement on an H100 is not in the fit.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import dataclasses
import re
import statistics
import textwrap

import numpy as np

from benchmarks.runs import ROOT, write_json
from ursa_minor.base import gpus, paths
from ursa_minor.preflight import estimate, run_estimate
from ursa_minor.recipe import loading

# docs/cards.md calls them (a), (b), ...
TRAINING_SOURCES = (
    gpus.SCRIPT,
    "nanoGPT, torch 2.0, karpathy/nanoGPT#225",
    "nanoGPT, torch 2.0, karpathy/nanoGPT#110",
    "build-nanogpt's steps, a public file",
    "build-nanogpt on Windows, not compiled, a public file",
)
MEASURED = [gpu for gpu in gpus.GPUS if gpu.training]
FITTED = [gpu for gpu in MEASURED if gpu.training.source == gpus.SCRIPT]
OTHERS = [gpu for gpu in MEASURED if gpu.training.source != gpus.SCRIPT]
# Tokens/s of languini-kitchen's GPT small (languini/projects/gpt/throughput_results.csv): fp16,
# compiled, no flash attention on any GPU, vocabulary of 16,384, context of 512.
LANGUINI = {
    "v100": 43_839,
    "rtx3090": 55_416,
    "rtx4090": 88_701,
    "a100": 135_107,
}
LANGUINI_SMALL = estimate.Shape(
    n_layer=12,
    n_embd=768,
    vocab_size=16_384,
    sequence_length=512,
)
# Other models of the speed, whose errors are printed for comparison: the arguments of ``fit``.
MODELS = {
    "0.9 M": {"share": 0.9},
    "1 M": {"share": 1.0},
    "1.1 M": {"share": 1.1},
    "1.2 M": {"share": 1.2},
    "without R": {"has_limit": False},
}
RECIPE = ROOT / "recipes" / "gpt2_124m.yaml"
# Entries of an estimate that docs/cards.md shows as an example.
EXAMPLE_LABELS = (
    "products",
    "memory",
    "micro-batch",
    "settings",
    "speed",
    "time",
    "energy",
    "cost",
)

# ---- The fit


def terms(gpu: gpus.Gpu) -> list[float]:
    """Return the terms of the estimate for a GPU, relative to its measured time per token.

    Returns:
        Three numbers: the operations at the rate M, the operations at 1 PFLOP/s, and the memory
        traffic at the bandwidth of the data sheet.
    """
    flops = estimate.computed_flops(estimate.GPT2_124M)
    traffic_bytes = estimate.memory_traffic_bytes(estimate.GPT2_124M)
    flops_per_second = gpu.product_teraflops * 1e12
    bytes_per_second = gpu.gigabytes_per_second * 1e9
    seconds = (
        flops / flops_per_second,
        flops / 1e15,
        traffic_bytes / bytes_per_second,
    )
    measured_tokens_per_second = gpu.training.figure
    return [term * measured_tokens_per_second for term in seconds]


def fit(measured_gpus: list[gpus.Gpu], share: float = 1.0, has_limit: bool = True) -> np.ndarray:
    """Return the coefficients of ``terms`` that minimize the sum of the absolute relative errors.

    Args:
        measured_gpus: the GPUs to fit.
        share: a constant factor of M.
        has_limit: whether the estimate has the term with R.

    Returns:
        Three numbers: 1 / ``share``, 1 / R in s/PFLOP (0 without this term), and 1 / b.
    """
    matrix = np.array([terms(gpu) for gpu in measured_gpus])
    fixed_term = matrix[:, 0] / share
    target = 1 - fixed_term
    first_free_term = 1 if has_limit else 2
    free_terms = matrix[:, first_free_term:]
    # Least squares with the weights 1 / |error|, repeated, converge to the least absolute errors.
    # Both sides of each equation are multiplied by the square root of its weight.
    factors = np.ones(len(measured_gpus))
    for _ in range(500):
        weighted_terms = free_terms * factors[:, None]
        weighted_target = target * factors
        coefficients, *_ = np.linalg.lstsq(weighted_terms, weighted_target, rcond=None)
        errors = np.abs(free_terms @ coefficients - target)
        factors = np.maximum(errors, 1e-3) ** -0.5
    if not has_limit:
        coefficients = [0.0, *coefficients]
    return np.array([1 / share, *coefficients])


def left_out(gpu: gpus.Gpu, **options) -> float:
    """Return estimated / measured speed of a GPU that is left out of the fit.

    Args:
        gpu: with a measured speed.
        options: of ``fit``.
    """
    others = [other for other in FITTED if other is not gpu]
    coefficients = fit(others, **options)
    estimated_over_measured_time = float(terms(gpu) @ coefficients)
    return 1 / estimated_over_measured_time


def speed(gpu: gpus.Gpu, shape: estimate.Shape = estimate.GPT2_124M) -> float:
    """Return the tokens/s that ursa_minor/preflight/estimate.py estimates."""
    return 1 / estimate.seconds_per_token(shape, gpu)


# ---- The report


def report() -> dict:
    """Print the fit and the table, and return them for the JSON file."""
    _, limit, bandwidth_share = 1 / fit(FITTED)
    print(f"fit           R = {limit:.3f} PFLOP/s, b = {bandwidth_share:.3f}")
    print("card          products TFLOP/s  measured  estimated  ratio  left out")
    rows = []
    for gpu in FITTED + OTHERS:
        row = measured_row(gpu)
        rows.append(row)
        print(table_line(gpu, row))
    geforce_share = gpus.reached_share(True)
    other_share = gpus.reached_share(False)
    print(f"* not measured: {other_share:.3f} of the peak, {geforce_share:.3f} for a GeForce")

    fitted_rows = rows[: len(FITTED)]
    ratios = [row["ratio"] for row in fitted_rows]
    left_out_ratios = [row["left_out_ratio"] for row in fitted_rows]
    num_close = count_close(ratios)
    num_close_left_out = count_close(left_out_ratios)
    print(f"within 10%    {num_close} of {len(FITTED)}, left out {num_close_left_out}")

    errors = {name: left_out_error(**options) for name, options in MODELS.items()}
    print(f"mean error    left out: {listed(errors, '.1%')}")

    languini_ratios = without_flash_attention()
    listed_ratios = listed(languini_ratios, ".2f")
    print(f"no flash      languini's GPT small, measured / estimated with it: {listed_ratios}")
    return {
        "model": "GPT-2 124M, 1,024 tokens",
        "coefficients": {
            "R": limit * 1e15,
            "b": bandwidth_share,
        },
        "used": {
            "R": estimate.PRODUCT_LIMIT,
            "b": estimate.BANDWIDTH_SHARE,
        },
        "shares_of_peak": {
            "GeForce": geforce_share,
            "other": other_share,
        },
        "cards": rows,
        "within_10_percent": num_close,
        "within_10_percent_left_out": num_close_left_out,
        "mean_error_left_out": errors,
        "languini_measured_over_estimated": languini_ratios,
    }


def listed(figures: dict[str, float], number_format: str) -> str:
    """Return names and figures in one line: ``a100 0.50, v100 0.40``."""
    entries = []
    for name, figure in figures.items():
        entries.append(f"{name} {figure:{number_format}}")
    return ", ".join(entries)


def count_close(ratios: list[float]) -> int:
    """Return how many ratios of estimated to measured speed differ from 1 by at most 10%."""
    return sum(abs(ratio - 1) <= 0.1 for ratio in ratios)


def left_out_error(**options) -> float:
    """Return the mean relative error of GPUs that are left out of the fit.

    Args:
        options: of ``fit``.
    """
    ratios = [left_out(gpu, **options) for gpu in FITTED]
    return statistics.fmean(abs(ratio - 1) for ratio in ratios)


def measured_row(gpu: gpus.Gpu) -> dict:
    """Return the figures of a GPU for the JSON file."""
    measured = gpu.training.figure
    estimated_speed = speed(gpu)
    row = {
        "card": gpu.name,
        "products_teraflops": round(gpu.product_teraflops, 1),
        "products_source": gpu.products and gpu.products.source,
        "measured": measured,
        "measured_source": gpu.training.source,
        "estimated": round(estimated_speed),
        "ratio": round(estimated_speed / measured, 3),
    }
    if gpu in FITTED:
        row["left_out_ratio"] = round(left_out(gpu), 3)
    return row


def table_line(gpu: gpus.Gpu, row: dict) -> str:
    """Return the line of a GPU in the table."""
    measured = row["measured"]
    estimated_speed = speed(gpu)
    ratio = estimated_speed / measured
    mark = " " if gpu.products else "*"
    if gpu in FITTED:
        left_out_ratio = row["left_out_ratio"]
        last_cell = f"{left_out_ratio:8.2f}"
    else:
        source = row["measured_source"]
        last_cell = f"  not fitted: {source}"
    cells = [
        f"{gpu.name:12}",
        f"{gpu.product_teraflops:15,.1f}{mark}",
        f"{measured:8,.0f}",
        f"{estimated_speed:9,.0f}",
        f"{ratio:5.2f}",
        last_cell,
    ]
    return "  ".join(cells)


def without_flash_attention() -> dict[str, float]:
    """Return the speed of languini's GPT small, relative to the estimate with flash attention."""
    ratios = {}
    for name, measured in LANGUINI.items():
        # The estimate assumes flash attention from compute capability 8.0 on.
        gpu = dataclasses.replace(gpus.find(name), capability=(8, 0))
        estimated_speed = speed(gpu, LANGUINI_SMALL)
        ratios[name] = measured / estimated_speed
    return ratios


# ---- Pages and files that state these figures


def estimated(gpu: gpus.Gpu, count: int = 1) -> dict:
    """Return the estimate that check_setup.py prints for GPT-2 124M on ``count`` GPUs."""
    recipe = loading.load_recipe(RECIPE)
    return run_estimate.estimate_run(recipe, gpu, count, 0.0)


def two_digits(number: float) -> str:
    """Return a number with two significant digits, as the pages state estimates: ``510,000``."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}"


def speed_in_words(measurement: gpus.Measurement, gpu: gpus.Gpu) -> str:
    """Return a measured speed as the header of a configuration file states it."""
    tokens_per_second = measurement.figure
    mfu = run_estimate.mfu(gpu, tokens_per_second)
    parts = []
    if measurement.micro_batch:
        parts.append(f"micro-batch {measurement.micro_batch}")
    parts.append(f"{tokens_per_second:,.0f} tokens/s")
    parts.append(f"{mfu:.0%} MFU ({measurement.source})")
    return ", ".join(parts)


def preset(text: str, gpu: gpus.Gpu, count: int, stem: str) -> str:
    """Return the accelerate configuration file of a number of GPUs.

    Args:
        text: the present file. The name of the GPU in its first line is kept, and so are lines
            that were written by hand: claims of others, and a command that installs packages.
        gpu: the GPU.
        count: the number of GPUs.
        stem: the name of the file without its suffix.
    """
    compiled = run_estimate.compiles(gpu.name)
    old_lines = text.splitlines()
    title, _, _ = old_lines[0].partition("):")
    compilation = "compiled" if compiled else "not compiled"
    lines = [
        f"{title}): {gpu.precision}, {compilation}.",
        f"#   accelerate launch --quiet --config_file accelerate_configs/{stem}.yaml \\",
        "#     train.py --recipe recipes/gpt2_124m.yaml",
        "# Training GPT-2 124M:",
        *_figures_of(gpu, count),
    ]
    for line in old_lines:
        if line.startswith("#   Claimed") or "pip install" in line:
            lines.append(line)

    lines.append("compute_environment: LOCAL_MACHINE # not a cloud service")
    if count > 1:
        lines.append("distributed_type: MULTI_GPU        # DDP: gradients are averaged")
        lines.append(f"num_processes: {count}                   # one per GPU")
    else:
        lines.append('distributed_type: "NO"             # one process')
        lines.append("num_processes: 1")
    reason = "fp32 weights, bf16 matrix products"
    if gpu.precision == "fp16":
        reason = "no bf16 before Ampere; gradients are scaled"
    lines.append(f"mixed_precision: {gpu.precision}              # {reason}")
    if compiled:
        lines.append("dynamo_config:")
        note = "torch.compile; the first update takes 1 to 2 minutes longer"
        lines.append(f"  dynamo_backend: INDUCTOR         # {note}")
    return "\n".join(lines) + "\n"


def _figures_of(gpu: gpus.Gpu, count: int) -> list[str]:
    """Return the lines of a header with speeds, and with good values of MFU for a single GPU."""
    row = estimated(gpu, count)
    micro_batch = row["per_device_train_batch_size"]
    tokens_per_second = two_digits(row["tokens_per_second"])
    mfu = row["mfu"]
    link = ""
    if count > 1:
        has_nvlink = gpu.link_gigabytes_per_second > 100
        link = ", over NVLink" if has_nvlink else ", over PCIe"
    lines = [
        f"#   Estimated: micro-batch {micro_batch}, {tokens_per_second} tokens/s, "
        f"{mfu:.0%} MFU{link} (ursa_minor/preflight/estimate.py)"
    ]
    if count == 1:
        by_others = "not known"
        if gpu.training:
            by_others = speed_in_words(gpu.training, gpu)
        by_us = "not yet"
        if gpu.own_training:
            by_us = speed_in_words(gpu.own_training, gpu)
        good, excellent = run_estimate.good_mfus(gpu)
        lines += [
            f"#   Measured by others: {by_others}",
            f"#   Measured by us: {by_us}",
            f"#   MFU: {good:.0%} or more is good, {excellent:.0%} is excellent",
        ]
    if gpu.usual_micro_batch:
        lines.append(f"#   Often recommended: micro-batch {gpu.usual_micro_batch}")
    return lines


def last_cells(gpu: gpus.Gpu, *, complete: bool) -> str:
    """Return the last cells of a GPU's row: the estimated speed, and the one measured by others.

    Args:
        gpu: the GPU.
        complete: add our own measurement and the good values of MFU, as docs/cards.md states them.
    """
    row = estimated(gpu)
    micro_batch = row["per_device_train_batch_size"]
    tokens_per_second = two_digits(row["tokens_per_second"])
    mfu = row["mfu"]
    cells = [f"{micro_batch}, {tokens_per_second}, {mfu:.0%}"]

    measured = "n/a"
    by_others = gpu.training
    by_us = gpu.own_training
    if by_others:
        micro_batch = by_others.micro_batch or "n/a"
        source = letter(by_others.source)
        measured = f"{micro_batch}, {by_others.figure:,.0f} ({source})"
    if complete and by_us:
        measured += f"; {by_us.micro_batch}, {by_us.figure:,.0f} (ours)"
    cells.append(measured)

    if complete:
        good, excellent = run_estimate.good_mfus(gpu)
        cells.append(f"{good:.0%}, {excellent:.0%}")
    return " | ".join(cells)


def letter(source: str) -> str:
    """Return the letter by which docs/cards.md refers to a source."""
    position = TRAINING_SOURCES.index(source)
    return "abcdefgh"[position]


def page(text: str, *, complete: bool) -> str:
    """Return a page with current figures in its table of GPUs and in its example for an A6000.

    Args:
        text: the page.
        complete: as ``last_cells`` has it.
    """
    for gpu in gpus.GPUS:
        row_pattern = rf"^(\| [^|]+ \| `{gpu.name}\.yaml`[^|]* \|).*$"
        cells = last_cells(gpu, complete=complete)
        text = re.sub(row_pattern, rf"\1 {cells} |", text, flags=re.MULTILINE)

    before, heading, example = text.partition("## Estimate time, memory and cost")
    return before + heading + update_example(example)


def update_example(example: str) -> str:
    """Return the text of a page with the current estimate for an A6000 as its example."""
    recipe = loading.load_recipe(RECIPE)
    a6000 = gpus.find("a6000")
    run = run_estimate.estimate_run(recipe, a6000, 1, 0.8)
    description = run_estimate.describe(recipe, a6000, run)
    # An entry is a line with a label, and the indented lines after it.
    for entry in re.findall(r"^\S.*(?:\n +.*)*", description, re.MULTILINE):
        label = entry.split()[0]
        if label in EXAMPLE_LABELS:
            old_entry = rf"^    {label} +\S.*(?:\n {{17}}.*)*$"
            new_entry = textwrap.indent(entry, " " * 4)
            example = re.sub(old_entry, new_entry, example, count=1, flags=re.MULTILINE)
    return example


def run_script(text: str) -> str:
    """Return scripts/run_gpt2_124m.sh with current speeds and hours in its comments."""

    def current_line(match: re.Match) -> str:
        count, name = match.groups()
        gpu = gpus.find(name)
        row = estimated(gpu, int(count))
        tokens_per_second = two_digits(row["tokens_per_second"])
        hours = row["hours"]
        return f"#   {count}x {name:9} {tokens_per_second:>11} {hours:7.1f}"

    pattern = r"^#   (\d)x (\w+) +[\d,]+ +[\d.]+$"
    return re.sub(pattern, current_line, text, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return the current content of each file that states these figures."""
    texts = {}
    presets = (ROOT / "accelerate_configs").glob("*.yaml")
    for path in sorted(presets):
        name, _, count = path.stem.partition("_x")
        gpu = gpus.find(name)
        if gpu:
            text = path.read_text(encoding="utf-8")
            texts[path] = preset(text, gpu, int(count or 1), path.stem)

    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    texts[readme] = page(text, complete=False)

    cards = ROOT / "docs" / "cards.md"
    text = cards.read_text(encoding="utf-8")
    texts[cards] = page(text, complete=True)

    script = ROOT / "scripts" / "run_gpt2_124m.sh"
    text = script.read_text(encoding="utf-8")
    texts[script] = run_script(text)
    return texts


def main(argv: list[str] | None = None) -> int:
    """Print the fit and the table, and write the JSON file and the pages if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=paths.argument,
        metavar="PATH",
        help="Also write the table to this file.",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="Update README.md, docs/cards.md, accelerate_configs/ and scripts/run_gpt2_124m.sh.",
    )
    args = parser.parse_args(argv)
    table = report()
    write_json(args.json, table)
    if args.write:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
