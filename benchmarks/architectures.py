"""GPT-2 against a Llama-type model of as many parameters, on as many tokens: the loss that train.py ends with.

    python benchmarks/architectures.py --text tinyshakespeare.txt --workers 2

recipes/shakespeare_char_muon.yaml (TinyShakespeare) and recipes/quickstart.yaml (Python's own source) as they stand, and
with the Llama-type's keys below; one thread a run. Several --rates are for fairness: the recipes' rate was found with
GPT-2. Seconds say nothing here: runs go side by side.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.runs import ROOT, add_runs, flag_words, prepare_shards, train_once, write_json
from pretrain.machine import estimate, hardware
from pretrain.recipe import reading

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
    add_runs(parser, "architectures")
    asked = parser.parse_args(argv)
    data = {"TinyShakespeare": ["--data_files", str(Path(asked.text).resolve())], "Python's source": []}
    for corpus in asked.corpora:
        prepare_shards(asked.folder, ROOT / "recipes" / f"{CORPORA[corpus][0]}.yaml", data[corpus])

    def one(job: tuple[int, str, float, str]) -> dict:
        seed, corpus, times, architecture = job
        stem, changes = CORPORA[corpus]
        path = ROOT / "recipes" / f"{stem}.yaml"
        recipe = reading.load_recipe(path, changes[architecture])
        rate = recipe.schedule.learning_rate * times
        flags = data[corpus] + flag_words({"eval_tokens": 0, "learning_rate": rate} | changes[architecture])
        name = f"{stem}-{architecture}-{times:g}-seed{seed}"
        row = train_once(asked.folder, name, path, flags, threads=1, seed=seed)
        shape = estimate.shape_of(recipe.model)
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
    write_json(asked.json, {"machine": hardware.this_device().name, "torch": torch.__version__, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
