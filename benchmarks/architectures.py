"""GPT-2 against a Llama-type model of as many parameters, on as many tokens: the loss that train.py ends with.

    python benchmarks/architectures.py --text tinyshakespeare.txt --workers 2

recipes/shakespeare_char_muon.yaml (TinyShakespeare) and recipes/quickstart.yaml (Python's own source) as they stand, and
with the Llama-type's keys below; one thread a run. Several --rates are for fairness: the recipes' rate was found with
GPT-2. Seconds say nothing here: runs go side by side.
"""

import sys
from pathlib import Path

# The repository takes this folder's place in the search: tokenize.py here has the name of a standard module.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

import train
from benchmarks.runs import ROOT, train_once
from pretrain.machine import hardware
from pretrain.recipe import keys, reading

LLAMA = {"architecture": "llama", "num_key_value_heads": "2", "tie_word_embeddings": "true", "rope_theta": "10000"}
# The width within the MLP makes the number of parameters GPT-2's.
CORPORA = {
    "TinyShakespeare": ("shakespeare_char_muon", {"gpt2": {}, "llama": LLAMA | {"intermediate_size": "392"}}),
    "Python's source": ("quickstart", {"gpt2": {}, "llama": LLAMA | {"intermediate_size": "400"}}),
}


def main(argv: list[str] | None = None) -> int:
    """Train each architecture on each corpus at each rate with each seed; print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="TinyShakespeare, 1,115,394 characters")
    parser.add_argument("--corpora", nargs="+", default=list(CORPORA), choices=list(CORPORA))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the recipe's learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", default="architectures", help="for the runs; finished ones are not repeated")
    parser.add_argument("--json", help="write the figures here too")
    asked = parser.parse_args(argv)
    folder = Path(asked.folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"TinyShakespeare": ["--data_files", str(Path(asked.text).resolve())], "Python's source": []}
    for corpus in asked.corpora:  # makes the shards, once
        stem = CORPORA[corpus][0]
        short = ["--max_steps", "2", "--warmup_steps", "1"]
        train_once(folder, f"warm-up-{stem}", ROOT / "recipes" / f"{stem}.yaml", [*data[corpus], *short], threads=1)

    def one(job: tuple[int, str, float, str]) -> dict:
        seed, corpus, times, architecture = job
        stem, keys = CORPORA[corpus]
        path = ROOT / "recipes" / f"{stem}.yaml"
        recipe = reading.load_recipe(path, keys[architecture])
        rate = recipe.schedule.learning_rate * times
        flags = [*data[corpus], "--eval_tokens", "0", "--seed", str(seed), "--data_seed", str(seed)]
        flags += [word for name, value in keys[architecture].items() for word in (f"--{name}", value)]
        flags += ["--learning_rate", str(rate)]
        row = train_once(folder, f"{stem}-{architecture}-{times:g}-seed{seed}", path, flags, threads=1)
        shape = train.recipe_shape(recipe)
        print(f"{corpus:16} {architecture:6} rate {rate:<8g} seed {seed}: {row['loss']:.4f}", flush=True)
        about = {"corpus": corpus, "architecture": architecture, "rate": rate, "seed": seed}
        return row | about | {"parameters": shape.parameters, "flops_per_token": shape.flops_per_token}

    jobs = [
        (seed, corpus, times, architecture)
        for seed in asked.seeds
        for corpus in asked.corpora
        for times in asked.rates
        for architecture in CORPORA[corpus][1]
    ]
    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(one, jobs))
    print(f"\n{'corpus':16} {'model':6} {'parameters':>10} {'MFLOP a token':>13} {'rate':>8}  loss (mean), each seed's")
    for corpus in asked.corpora:
        for architecture in CORPORA[corpus][1]:
            mine = [row for row in rows if (row["corpus"], row["architecture"]) == (corpus, architecture)]
            for rate in sorted({row["rate"] for row in mine}):
                losses = [row["loss"] for row in mine if row["rate"] == rate]
                size = f"{mine[0]['parameters']:10,} {mine[0]['flops_per_token'] / 1e6:13.2f}"
                each = ", ".join(f"{loss:.4f}" for loss in losses)
                print(f"{corpus:16} {architecture:6} {size} {rate:8g}  {statistics.mean(losses):.4f}: {each}")
    if asked.json:
        about = {"machine": hardware.this_device().name, "torch": torch.__version__}
        Path(asked.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
