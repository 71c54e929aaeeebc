"""Each choice in pretrain/optim/muon.py, and in its recipe, made otherwise: the loss that train.py then ends with.

    python benchmarks/muon_ablation.py --text tinyshakespeare.txt --workers 2

Runs recipes/shakespeare_char_muon.yaml (0.8M parameters) for 500 updates, one change at a time, one thread a run. What is
no recipe key is changed by setting pretrain/optim/muon.py's own names before the run starts. Seconds say nothing here:
runs go side by side.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.runs import ROOT, add_runs, prepare_shards, train_once, write_json
from pretrain.machine import hardware

# The polynomials of Amsel et al., https://arxiv.org/abs/2505.16932, each the best for the values that the last one left.
POLAR_EXPRESS = """
import torch
ROUNDS = [(8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518), (3.3184, -2.4885, 0.5100),
          (2.3007, -1.6689, 0.4188)]
def orthogonalize(matrices):
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (1.01 * torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in ROUNDS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
muon.orthogonalize = orthogonalize
"""
RECIPE = ROOT / "recipes" / "shakespeare_char_muon.yaml"
# What is changed: recipe flags, and Python that changes the module `muon` in the run's process.
CHANGES = {
    "as it is": ([], ""),
    "momentum 0.90": (["--muon_momentum", "0.9"], ""),
    "momentum 0.98": (["--muon_momentum", "0.98"], ""),
    "no Nesterov look-ahead": ([], "muon.Muon.__init__.__kwdefaults__['nesterov'] = False"),
    "learning rate x 0.5": (["--learning_rate", "5.0e-3"], ""),
    "learning rate x 2": (["--learning_rate", "2.0e-2"], ""),
    "Jordan's rule, sqrt(max(1, out / in)), at 0.02": (
        [],
        "muon.step_scale = lambda rows, columns: 2.0 * max(1, columns / rows) ** 0.5",
    ),
    "weight decay 0": (["--weight_decay", "0"], ""),
    "c_attn as one matrix": ([], "muon.parts = lambda name, record: 1"),
    "3 rounds of Newton-Schulz": ([], "muon.ROUNDS = 3"),
    "4 rounds of Newton-Schulz": ([], "muon.ROUNDS = 4"),
    "8 rounds of Newton-Schulz": ([], "muon.ROUNDS = 8"),
    "Polar Express, 5 rounds": ([], POLAR_EXPRESS),
    "MLP matrices only": ([], "muon.is_hidden = lambda name, record: '.mlp.' in name"),
    "attention matrices only": ([], "muon.is_hidden = lambda name, record: '.attn.' in name"),
    "embeddings too": ([], "muon.is_hidden = lambda name, record: True"),
    "cosine to 0.1": (["--lr_scheduler_type", "cosine", "--min_lr_ratio", "0.1"], ""),
    "wsd, the last half down": (["--lr_scheduler_type", "wsd", "--decay_ratio", "0.5"], ""),
}


def main(argv: list[str] | None = None) -> int:
    """Train every change with every seed; print its mean loss and the difference to the recipe as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="TinyShakespeare, 1,115,394 characters")
    parser.add_argument("--steps", type=int, default=500)
    add_runs(parser, "muon_ablation")
    asked = parser.parse_args(argv)
    base = ["--data_files", str(Path(asked.text).resolve()), "--max_steps", str(asked.steps)]
    base += ["--warmup_steps", str(asked.steps // 10)]
    prepare_shards(asked.folder, RECIPE, base)

    def one(job: tuple[int, str, int]) -> dict:
        number, name, seed = job
        flags, change = CHANGES[name]
        run_name = f"change{number}-{asked.steps}-seed{seed}"
        row = train_once(asked.folder, run_name, RECIPE, [*base, *flags], threads=1, seed=seed, change=change)
        print(f"{name:48} seed {seed}: {row['loss']:.4f}", flush=True)
        return row | {"change": name, "seed": seed}

    jobs = [(number, name, seed) for seed in asked.seeds for number, name in enumerate(CHANGES)]
    with ThreadPoolExecutor(asked.workers) as pool:
        rows = list(pool.map(one, jobs))
    found = {name: [row["loss"] for row in rows if row["change"] == name] for name in CHANGES}
    plain = statistics.mean(found["as it is"])
    print(f"\n{'change':48} loss (mean)  difference  each seed's")
    for name, losses in found.items():
        mean = statistics.mean(losses)
        print(f"{name:48} {mean:11.4f} {mean - plain:+11.4f}  {', '.join(f'{loss:.4f}' for loss in losses)}")
    about = {"machine": hardware.this_device().name, "torch": torch.__version__, "steps": asked.steps}
    write_json(asked.json, about | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
