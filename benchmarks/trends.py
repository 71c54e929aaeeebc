"""How the tuned settings of time_to_loss.py change with the size of the model: the first weights' scale, and Muon's lead.

    python benchmarks/trends.py --part scale --text tinyshakespeare.txt --json scale.json

trains at each width with each ``initializer_range``, both optimizers, 300 updates, rates x 128 / width.

    python benchmarks/corpus.py --out corpus.jsonl --megabytes 48
    python benchmarks/trends.py --part size --text corpus.jsonl --json size.json

trains models of 2M to 88M parameters on 5M and 10M tokens, 4,096 an update, with a byte-pair vocabulary of 4,096. AdamW
trains on all tokens, Muon on shares of them, with several multiples of the rate for each; Muon's share at AdamW's best loss
is interpolated. ``--text`` may also be a folder of prepare_data.py. On a card the runs are in bf16. Finished runs are
kept in --folder and not repeated; the JSON is written after each run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import itertools
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import yaml

from benchmarks.runs import ROOT, add_runs, commit, prepare_shards, train_once, write_json
from benchmarks.time_to_loss import TUNED, flags, steps_to
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.machine import hardware

SCALE_STEPS = 300
SCALES = (0.02, 0.03, 0.04, 0.06, 0.08)
ROOT_SCALE = 0.7  # of `size`: AdamW's initializer_range is this over the root of the width, as `scale` has found
SIZES = {"2M": (4, 160), "5M": (5, 256), "20M": (6, 512), "88M": (12, 768)}  # layers, width; heads are 32 wide
SHARES = (0.5, 0.7)  # of AdamW's updates, for Muon
BPE = {"tokenizer": "bpe", "tokenizer_vocab_size": 4096, "vocab_size": 4096, "sequence_length": 128}
STEP_TOKENS = 4096


class Runs:
    """Trains what it is asked for, several runs at a time, and writes the record after each."""

    def __init__(self, asked: argparse.Namespace, about: dict, keys: dict):
        self.asked, self.record, self.lock = asked, about | {"runs": []}, threading.Lock()
        recipe = yaml.safe_load((ROOT / "recipes" / "shakespeare_char.yaml").read_text()) | keys
        text = asked.text.resolve()
        if text.is_dir():
            del recipe["data_files"], recipe["validation_fraction"]
            recipe.pop("tokenizer_vocab_size", None)
            recipe |= {"data_dir": str(text), "tokenizer": str(text / "tokenizer")}
        else:
            recipe["data_files"] = [str(text)]
        asked.folder.mkdir(parents=True, exist_ok=True)
        self.recipe = asked.folder.resolve() / f"{asked.part}.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
        if not text.is_dir():
            prepare_shards(asked.folder, self.recipe, [])

    def all(self, jobs: Sequence[dict]) -> list[dict]:
        """Train the jobs; return them with their losses, in their order, without those that failed."""
        with ThreadPoolExecutor(self.asked.workers) as pool:
            done = list(pool.map(self.one, jobs))
        return [job for job in done if "loss" in job]

    def one(self, job: dict) -> dict:
        """Train a job: way, layers, width, steps, seed, rate (a multiple of the tuned one x 128 / width), scale or None."""
        width, settings = job["width"], dict(TUNED[job["way"]])
        settings["learning_rate"] *= job["rate"] * 128 / width
        settings["initializer_range"] = job["scale"] or settings["initializer_range"]
        words = flags(job["way"], settings, job["steps"])
        words += ["--n_layer", str(job["layers"]), "--n_embd", str(width), "--n_head", str(width // 32)]
        name = "-".join(str(value) for value in job.values())
        try:
            done = train_once(
                self.asked.folder, name, self.recipe, words, threads=1, seed=job["seed"], cpu=not self.asked.card
            )
            job = job | {"loss": done["loss"], "seconds": done["seconds"]}
        except SystemExit as error:  # such as a loss that is not finite; the other runs matter more
            job = job | {"problem": str(error)[-500:]}
        with self.lock:
            self.record["runs"].append(job)
            write_json(self.asked.json, self.record)
            print(name, job.get("problem", job.get("loss")), flush=True)
        return job


def scale(runs: Runs, asked: argparse.Namespace) -> None:
    """Train each width with each scale of the first weights; print a table."""
    cases = itertools.product(asked.widths, TUNED, SCALES, asked.seeds)
    done = runs.all(
        [
            {"way": way, "layers": 4, "width": width, "steps": SCALE_STEPS, "seed": seed, "rate": 1.0, "scale": value}
            for width, way, value, seed in cases
        ]
    )
    print(f"\n| width | optimizer | {' | '.join(map(str, SCALES))} |\n|---|---|{'---|' * len(SCALES)}")
    for width, way in itertools.product(asked.widths, TUNED):
        cells = []
        for value in SCALES:
            losses = [job["loss"] for job in done if (job["width"], job["way"], job["scale"]) == (width, way, value)]
            cells.append(f"{statistics.mean(losses):.3f}" if losses else "-")
        print(f"| {width} | {way} | {' | '.join(cells)} |")


def size(runs: Runs, asked: argparse.Namespace) -> None:
    """Train each size on each number of tokens; print Muon's share of AdamW's updates at AdamW's best loss."""
    jobs = []
    for name, tokens, seed in itertools.product(asked.sizes, asked.tokens, asked.seeds):
        layers, width = SIZES[name]
        steps = tokens // STEP_TOKENS
        base = {"layers": layers, "width": width, "seed": seed}
        value = round(ROOT_SCALE / width**0.5, 4)
        jobs += [{"way": "adamw", **base, "steps": steps, "rate": rate, "scale": value} for rate in asked.rates]
        for rate, share in itertools.product(asked.rates, SHARES):
            jobs.append({"way": "muon", **base, "steps": round(share * steps), "rate": rate, "scale": None})
    # Long runs first, so that no worker waits for one at the end.
    done = runs.all(sorted(jobs, key=lambda job: -job["steps"] * job["layers"] * job["width"] ** 2))
    print(
        "\n| size | tokens | seed | AdamW: rate, scale, loss | Muon: rate, losses | share |\n|---|---|---|---|---|---|"
    )
    for name, tokens, seed in itertools.product(asked.sizes, asked.tokens, asked.seeds):
        steps = tokens // STEP_TOKENS
        here = [job for job in done if job["width"] == SIZES[name][1] and job["seed"] == seed]
        adamw = [job for job in here if job["way"] == "adamw" and job["steps"] == steps]
        lengths = [round(share * steps) for share in SHARES]
        muon: dict[float, dict[int, float]] = {rate: {} for rate in asked.rates}
        for job in here:
            if job["way"] == "muon" and job["steps"] in lengths:
                muon[job["rate"]][job["steps"]] = job["loss"]
        whole = {rate: losses for rate, losses in muon.items() if len(losses) == len(lengths)}
        if not adamw or not whole:
            continue
        best, rate = min(adamw, key=lambda job: job["loss"]), min(whole, key=lambda rate: min(whole[rate].values()))
        share = steps_to(best["loss"], whole[rate]) / steps
        print(
            f"| {name} | {tokens:,} | {seed} | {best['rate']}, {best['scale']}, {best['loss']:.4f} | "
            f"{rate}, {', '.join(f'{whole[rate][length]:.4f}' for length in lengths)} | {share:.2f} |"
        )


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("scale", "size"), required=True)
    parser.add_argument("--text", type=Path, required=True, help="a text file, or a folder of prepare_data.py")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 384], help="of scale")
    parser.add_argument("--sizes", nargs="+", default=["2M", "5M"], choices=tuple(SIZES), help="of size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[5_000_000, 10_000_000], help="of size")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="of size: multiples of the rate"
    )
    add_runs(parser, "trends", seeds=(11, 12))
    asked = parser.parse_args(argv)
    if not asked.text.exists():
        raise BadInput(f"--text {asked.text}: is not there")
    found = hardware.this_device()
    asked.card = found.kind == "cuda"
    about = {"machine": found.name, "torch": torch.__version__, "commit": commit(), "part": asked.part}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    keys = {
        "validation_tokens": 2**19,
        "eval_tokens": 0,
        "tokens_per_step": STEP_TOKENS,
        "per_device_train_batch_size": STEP_TOKENS // 128,
    }
    runs = Runs(asked, about, BPE | keys if asked.part == "size" else {})
    {"scale": scale, "size": size}[asked.part](runs, asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
