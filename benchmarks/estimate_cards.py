"""The estimated speed of GPT-2 124M beside what others measured on cards, and the fit that the estimate comes from.

    python benchmarks/estimate_cards.py             # measured, estimated, ratio, and the ratio with that card left out
    python benchmarks/estimate_cards.py --write     # put what the code says into the pages and the YAMLs' heads

Seconds a token are C (1 / M + 1 / R) + B / (b W): C FLOPs computed, M the rate of matrix products that others measured
on the card (where nobody did, a share of its peak), B bytes moved, W the bandwidth. R and b have the least sum of
relative errors over the twenty cards of one script, none left out and none with a coefficient of its own. A coefficient
before M would not be told: from 0.9 to 1.2 all fit alike. Our own figure of an H100 is not in the fit.
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

# As docs/cards.md names them: (a), (b), ...
TRAINING_SOURCES = (
    gpus.SCRIPT,
    "nanoGPT, torch 2.0, karpathy/nanoGPT#225",
    "nanoGPT, torch 2.0, karpathy/nanoGPT#110",
)
TRAINING_SOURCES += (
    "build-nanogpt's steps, a public file",
    "build-nanogpt on Windows, not compiled, a public file",
)
FITTED = [card for card in gpus.GPUS if card.training and card.training.source == gpus.SCRIPT]
OTHERS = [card for card in gpus.GPUS if card.training and card not in FITTED]
# Tokens/s of languini-kitchen's GPT small (languini/projects/gpt/throughput_results.csv): fp16, compiled, no flash
# attention on any card, 16,384 words, context 512.
LANGUINI = {"v100": 43_839, "rtx3090": 55_416, "rtx4090": 88_701, "a100": 135_107}
LANGUINI_SMALL = estimate.Shape(12, 768, 16_384, 512)
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


def terms(card: gpus.Gpu) -> list[float]:
    """Return seconds a token, as shares of those measured: at rate M, at 1 PFLOP/s, at the data sheet's bandwidth."""
    flops, moved = (
        estimate.computed_flops(estimate.GPT2_124M),
        estimate.memory_traffic_bytes(estimate.GPT2_124M),
    )
    seconds = (
        flops / (card.product_teraflops * 1e12),
        flops / 1e15,
        moved / (card.gigabytes_per_second * 1e9),
    )
    return [term * card.training.figure for term in seconds]


def fit(known: list[gpus.Gpu], share: float = 1.0, limited: bool = True) -> np.ndarray:
    """Return 1/``share`` (of M), 1/R (R in PFLOP/s; 0 where not ``limited``) and 1/b of least absolute relative errors."""
    matrix = np.array([terms(card) for card in known])
    left, free, weights = (
        1 - matrix[:, 0] / share,
        matrix[:, 1 if limited else 2 :],
        np.ones(len(known)),
    )
    for _ in range(500):  # least squares, weighted again, end at least absolute errors
        coefficients = np.linalg.lstsq(free * weights[:, None], left * weights, rcond=None)[0]
        weights = np.maximum(np.abs(free @ coefficients - left), 1e-3) ** -0.5
    return np.array([1 / share, *([] if limited else [0.0]), *coefficients])


def left_out(card: gpus.Gpu, **options) -> float:
    """Return estimated / measured of a card that the fit has not seen."""
    return 1 / float(terms(card) @ fit([other for other in FITTED if other is not card], **options))


def speed(card: gpus.Gpu, shape: estimate.Shape = estimate.GPT2_124M) -> float:
    """Return the tokens per second that ursa_minor/preflight/estimate.py says."""
    return 1 / estimate.seconds_per_token(shape, card)


def report() -> dict:
    """Print the table; return it."""
    _, limit, b = (1 / coefficient for coefficient in fit(FITTED))
    print(f"fit           R = {limit:.3f} PFLOP/s, b = {b:.3f}")
    print("card          products TFLOP/s  measured  estimated  ratio  left out")
    rows = []
    for card in FITTED + OTHERS:
        measured, estimated_speed = card.training.figure, speed(card)
        row = {"card": card.name, "products_teraflops": round(card.product_teraflops, 1)}
        row |= {"products_source": card.products and card.products.source, "measured": measured}
        row |= {
            "measured_source": card.training.source,
            "estimated": round(estimated_speed),
            "ratio": round(estimated_speed / measured, 3),
        }
        if card in FITTED:
            row["left_out_ratio"] = round(left_out(card), 3)
        rows.append(row)
        mark = " " if card.products else "*"
        tail = (
            f"{row['left_out_ratio']:8.2f}"
            if card in FITTED
            else f"  not fitted: {card.training.source}"
        )
        print(f"{card.name:12}  {card.product_teraflops:15,.1f}{mark}  {measured:8,.0f}  {estimated_speed:9,.0f}  "
              f"{estimated_speed / measured:5.2f}  {tail}")  # fmt: skip
    shares = {kind: gpus.reached_share(kind == "GeForce") for kind in ("GeForce", "other")}
    print(
        f"* nobody measured it: {shares['other']:.3f} of the peak, of a GeForce {shares['GeForce']:.3f}"
    )
    near = sum(abs(row["ratio"] - 1) <= 0.1 for row in rows[: len(FITTED)])
    near_left_out = sum(abs(row["left_out_ratio"] - 1) <= 0.1 for row in rows[: len(FITTED)])
    ways = {f"{share:g} M": {"share": share} for share in (0.9, 1.0, 1.1, 1.2)} | {
        "without R": {"limited": False}
    }
    error = {
        name: statistics.fmean(abs(left_out(card, **options) - 1) for card in FITTED)
        for name, options in ways.items()
    }
    print(f"within 10%    {near} of {len(FITTED)}, left out {near_left_out}")
    print(
        "mean error    left out: "
        + ", ".join(f"{name} {100 * value:.1f}%" for name, value in error.items())
    )
    with_flash = {
        name: dataclasses.replace(gpus.find(name), capability=(8, 0)) for name in LANGUINI
    }
    flash = {
        name: value / speed(with_flash[name], LANGUINI_SMALL) for name, value in LANGUINI.items()
    }
    print("no flash      languini's GPT small, measured / estimated with it: "
          + ", ".join(f"{name} {value:.2f}" for name, value in flash.items()))  # fmt: skip
    return {
        "model": "GPT-2 124M, 1,024 tokens",
        "coefficients": {"R": limit * 1e15, "b": b},
        "used": {"R": estimate.PRODUCT_LIMIT, "b": estimate.BANDWIDTH_SHARE},
        "shares_of_peak": shares,
        "cards": rows,
        "within_10_percent": near,
        "within_10_percent_left_out": near_left_out,
        "mean_error_left_out": error,
        "languini_measured_over_estimated": flash,
    }


# ---- what is printed elsewhere


def estimated(card: gpus.Gpu, count: int = 1) -> dict:
    """Return what check_setup.py says of GPT-2 124M on ``count`` of a card."""
    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml")
    return run_estimate.estimate_run(recipe, card, count, 0.0)


def two_digits(number: float) -> str:
    """Return a number as the pages give estimates: ``510,000``."""
    return f"{float(f'{number:.2g}'):,.0f}"


def speed_in_words(known: gpus.Measurement, card: gpus.Gpu) -> str:
    """Return a measured speed of one GPU, as the header of a YAML states it."""
    micro_batch = f"micro-batch {known.micro_batch}, " if known.micro_batch else ""
    mfu = run_estimate.mfu(card, known.figure)
    return f"{micro_batch}{known.figure:,.0f} tokens/s, {mfu:.0%} MFU ({known.source})"


def preset(text: str, card: gpus.Gpu, count: int, stem: str) -> str:
    """Return the accelerate configuration file of a number of GPUs.

    Args:
        text: the present file. The name of the GPU in its first line is kept, and so are lines
            that were written by hand: claims of others, and a command that installs packages.
        card: the GPU.
        count: the number of GPUs.
        stem: the name of the file without its suffix.
    """
    compiled = run_estimate.compiles(card.name)
    title, _, _ = text.splitlines()[0].partition("):")
    compilation = "compiled" if compiled else "not compiled"
    lines = [
        f"{title}): {card.precision}, {compilation}.",
        f"#   accelerate launch --config_file accelerate_configs/{stem}.yaml \\",
        "#     train.py --recipe recipes/gpt2_124m.yaml",
        "# Training GPT-2 124M:",
        *_figures_of(card, count),
    ]
    for line in text.splitlines():
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
    if card.precision == "fp16":
        reason = "no bf16 before Ampere; gradients are scaled"
    lines.append(f"mixed_precision: {card.precision}              # {reason}")
    if compiled:
        lines.append("dynamo_config:")
        note = "torch.compile; the first update takes 1 to 2 minutes longer"
        lines.append(f"  dynamo_backend: INDUCTOR         # {note}")
    return "\n".join([*lines, ""])


def _figures_of(card: gpus.Gpu, count: int) -> list[str]:
    """Return the lines of a header with speeds, and with good values of MFU for a single GPU."""
    row = estimated(card, count)
    micro_batch = row["per_device_train_batch_size"]
    tokens_per_second = two_digits(row["tokens_per_second"])
    speed = f"micro-batch {micro_batch}, {tokens_per_second} tokens/s, {row['mfu']:.0%} MFU"
    if count > 1:
        has_nvlink = card.link_gigabytes_per_second > 100
        speed += f", over {'NVLink' if has_nvlink else 'PCIe'}"
    lines = [f"#   Estimated: {speed} (ursa_minor/preflight/estimate.py)"]
    if count == 1:
        by_others = speed_in_words(card.training, card) if card.training else "not known"
        by_us = speed_in_words(card.own_training, card) if card.own_training else "not yet"
        good, excellent = run_estimate.good_mfus(card)
        lines += [
            f"#   Measured by others: {by_others}",
            f"#   Measured by us: {by_us}",
            f"#   MFU: {good:.0%} or more is good, {excellent:.0%} is excellent",
        ]
    if card.usual_micro_batch:
        lines.append(f"#   Often recommended: micro-batch {card.usual_micro_batch}")
    return lines


def last_cells(card: gpus.Gpu, *, all_of_them: bool) -> str:
    """Return the last cells of a card's row: estimated, measured by others; in docs/cards.md by us, too, and a good MFU."""
    row, known, our_figure = estimated(card), card.training, card.own_training
    cells = [
        f"{row['per_device_train_batch_size']}, {two_digits(row['tokens_per_second'])}, {100 * row['mfu']:.0f}%"
    ]
    cells.append(
        f"{known.micro_batch or 'n/a'}, {known.figure:,.0f} ({letter(known.source)})"
        if known
        else "n/a"
    )
    if all_of_them:
        cells[-1] += (
            f"; {our_figure.micro_batch}, {our_figure.figure:,.0f} (ours)" if our_figure else ""
        )
        cells.append(", ".join(f"{mfu:.0%}" for mfu in run_estimate.good_mfus(card)))
    return " | ".join(cells)


def letter(source: str) -> str:
    """Return the letter under which docs/cards.md names a source."""
    return "abcdefgh"[TRAINING_SOURCES.index(source)]


def page(text: str, *, all_of_them: bool = True) -> str:
    """Return a page with its rows of cards, and its example for an A6000, as the code gives them."""
    for card in gpus.GPUS:
        begin = rf"^(\| [^|]+ \| `{card.name}\.yaml`[^|]* \|).*$"
        cells = last_cells(card, all_of_them=all_of_them)
        text = re.sub(begin, rf"\1 {cells} |", text, flags=re.MULTILINE)
    recipe, card = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml"), gpus.find("a6000")
    before, begin, example = text.partition("## Estimate time, memory and cost")
    description = run_estimate.describe(
        recipe, card, run_estimate.estimate_run(recipe, card, 1, 0.8)
    )
    # An entry is a line with a label, and the indented lines after it.
    for entry in re.findall(r"^\S.*(?:\n +.*)*", description, re.MULTILINE):
        label = entry.split()[0]
        if label in EXAMPLE_LABELS:
            example = re.sub(
                rf"^    {label} +\S.*(?:\n {{17}}.*)*$",
                textwrap.indent(entry, " " * 4),
                example,
                count=1,
                flags=re.MULTILINE,
            )
    return before + begin + example


def arithmetic(text: str) -> str:
    """Return scripts/run_gpt2_124m.sh with the speeds and hours of its head as the code gives them."""

    def line(match: re.Match) -> str:
        row = estimated(gpus.find(match[2]), int(match[1]))
        return f"#   {match[1]}x {match[2]:9} {two_digits(row['tokens_per_second']):>11} {row['hours']:7.1f}"

    return re.sub(r"^#   (\d)x (\w+) +[\d,]+ +[\d.]+$", line, text, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return each page that gives such figures, with those of the code."""
    texts = {}
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        name, _, count = path.stem.partition("_x")
        if card := gpus.find(name):
            texts[path] = preset(path.read_text(encoding="utf-8"), card, int(count or 1), path.stem)
    for name in ("README.md", "docs/cards.md"):
        texts[ROOT / name] = page(
            (ROOT / name).read_text(encoding="utf-8"), all_of_them=name != "README.md"
        )
    script = ROOT / "scripts" / "run_gpt2_124m.sh"
    texts[script] = arithmetic(script.read_text(encoding="utf-8"))
    return texts


def main(argv: list[str] | None = None) -> int:
    """Print the fit and the table of cards; write JSON and pages where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=paths.argument, help="write the table here too")
    parser.add_argument(
        "--write", action="store_true", help="bring the tables, the YAMLs and the script up to date"
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
