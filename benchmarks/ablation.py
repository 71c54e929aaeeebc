"""Fewer tokens on the unchanged GPT-2: each change to a recipe, and the validation loss that train.py then ends with.

    python benchmarks/ablation.py --text tinyshakespeare.txt --workers 2 --json screen.json        # 500 updates, seed 1
    python benchmarks/ablation.py --text tinyshakespeare.txt --workers 2 --json best.json --steps 2000 --seeds 1 2 3 \
        --only 'as it is' 'momentum 0.95' 'warm-up of a tenth'
    python benchmarks/ablation.py --recipe recipes/own_text.yaml --text tinyshakespeare.txt --steps 3400 --json own.json \
        --set muon_momentum=0.9 --only 'as it is' 'dropout 0.2'

A change is recipe keys, or a patch of the product: a file of benchmarks/results/patches that runs before training does.
These are candidates that did not pay, and so are no part of the product. What stands in --json is not run again, so that a
campaign goes on where it was interrupted. Seconds say nothing here: runs go side by side, one thread each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import hashlib
import json
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.runs import ROOT, add_runs, commit, prepare_shards, train_once, write_json
from pretrain.machine import hardware
from pretrain.recipe import keys, reading

RECIPE, PATCHES = ROOT / "recipes" / "shakespeare_char_muon.yaml", ROOT / "benchmarks" / "results" / "patches"


def patch(file: str, **settings: object) -> str:
    """Return the Python of a file of PATCHES with other values of the names that it sets in its first lines."""
    lines = (PATCHES / file).read_text().splitlines()
    for name, value in settings.items():
        (place,) = (number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
        lines[place] = f"{name} = {value!r}"
    return "\n".join([*lines, ""])


def changes(steps: int) -> dict[str, tuple[str, str]]:
    """Return each change by name: recipe flags, and Python that runs first, where ``muon`` is the product's module.

    Args:
        steps: of the run, for those that depend on them.
    """
    return {
        "as it is": ("", ""),
        # Muon's own choices, made otherwise.
        "learning rate x 0.5": ("learning_rate*0.5", ""),
        "learning rate x 0.7": ("learning_rate*0.7", ""),
        "learning rate x 1.4": ("learning_rate*1.4", ""),
        "learning rate x 2": ("learning_rate*2", ""),
        "momentum 0.80": ("muon_momentum=0.8", ""),
        "momentum 0.90": ("muon_momentum=0.9", ""),
        "momentum 0.95": ("muon_momentum=0.95", ""),
        "warm-up of a tenth": (f"warmup_steps={steps // 10}", ""),
        "no warm-up": ("warmup_steps=0", ""),
        "cosine to 0.1": ("lr_scheduler_type=cosine min_lr_ratio=0.1", ""),
        "wsd, the last half down": ("lr_scheduler_type=wsd decay_ratio=0.5", ""),
        "no Nesterov look-ahead": ("", "muon.Muon.__init__.__kwdefaults__['nesterov'] = False"),
        "Jordan's rule of size": ("", "muon.step_scale = lambda rows, columns: 2.0 * max(1, columns / rows) ** 0.5"),
        "c_attn as one matrix": ("", "muon.parts = lambda name, record: 1"),
        "3 rounds of Newton-Schulz": ("", "muon.ROUNDS = 3"),
        "embeddings by Muon too": ("", "muon.is_hidden = lambda name, record: True"),
        "gradients not clipped": ("max_grad_norm=0", ""),
        "gradients clipped at 0.3": ("max_grad_norm=0.3", ""),
        # Decay.
        "decay 0": ("weight_decay=0", ""),
        "decay x 3": ("weight_decay*3", ""),
        "decay x 10": ("weight_decay*10", ""),
        "decay falls with the rate": ("", patch("muon_update.py", FALLING=True)),
        "decay where update and weight agree": ("", patch("muon_update.py", CAUTIOUS=True)),
        # AdamW's side.
        "embeddings' rate x 0.3": ("", patch("adamw_rates.py", EMBEDDINGS=0.3)),
        "embeddings' rate x 3": ("", patch("adamw_rates.py", EMBEDDINGS=3.0)),
        "positions' rate x 0.3": ("", patch("adamw_rates.py", POSITIONS=0.3)),
        "positions' rate x 3": ("", patch("adamw_rates.py", POSITIONS=3.0)),
        "norms' and biases' rate x 0.3": ("", patch("adamw_rates.py", VECTORS=0.3)),
        "norms' and biases' rate x 3": ("", patch("adamw_rates.py", VECTORS=3.0)),
        "AdamW's rates x 0.5": ("", patch("adamw_rates.py", EMBEDDINGS=0.5, POSITIONS=0.5, VECTORS=0.5)),
        "beta1 0.8": ("adam_beta1=0.8", ""),
        "beta1 0.95": ("adam_beta1=0.95", ""),
        "beta2 0.95": ("adam_beta2=0.95", ""),
        # Muon's relatives.
        "Polar Express": ("", patch("muon_update.py", POLAR_EXPRESS=True)),
        "rows made equal first": ("", patch("muon_update.py", EQUAL_ROWS=True)),
        "NorMuon": ("", patch("muon_update.py", NORMUON=True)),
        "SOAP-Muon": ("", patch("soap_muon.py")),
        "EMA-Nesterov": ("", patch("ema_nesterov.py", STEPS=steps)),
        # Data.
        "windows of a half for 30%": ("", patch("short_windows.py", STAGES=[(0.3, 2)])),
        "windows of a quarter for 20%, a half to 50%": ("", patch("short_windows.py", STAGES=[(0.2, 4), (0.5, 2)])),
        "half the batch for half the tokens": (f"max_steps={steps * 3 // 2}", patch("batch_ramp.py", STEPS=steps)),
        "half the batch, twice the steps": (f"tokens_per_step*0.5 learning_rate*0.7 max_steps={2 * steps}", ""),
        # A text that is read many times.
        "windows moved each epoch": ("", patch("moved_windows.py")),
        "mean of the last weights": ("", patch("averaged_weights.py", STEPS=steps)),
        "dropout 0.1": ("resid_pdrop=0.1 embd_pdrop=0.1 attn_pdrop=0.1", ""),
        "dropout 0.2": ("resid_pdrop=0.2 embd_pdrop=0.2 attn_pdrop=0.2", ""),
        "dropout 0.3": ("resid_pdrop=0.3 embd_pdrop=0.3 attn_pdrop=0.3", ""),
        "dropout 0.4": ("resid_pdrop=0.4 embd_pdrop=0.4 attn_pdrop=0.4", ""),
        # The model: stock GPT-2 in any case.
        "untied head, from 0": ("", patch("untied_head.py", DEVIATION=0.0)),
        "untied head, from noise": ("", patch("untied_head.py", DEVIATION=0.02)),
        "c_proj from 0": ("", patch("initialization.py", C_PROJ=0.0)),
        "c_proj from 3 times its noise": ("", patch("initialization.py", C_PROJ=3.0)),
        "other matrices from 2 times their noise": ("", patch("initialization.py", OTHERS=2.0)),
        "other matrices from half their noise": ("", patch("initialization.py", OTHERS=0.5)),
        "positions from sinusoids": ("", patch("initialization.py", SINUSOIDS=True)),
        "heads that begin at the tokens before": ("", patch("initialization.py", LOCAL=4.0)),
    }


def words_of(flags: str, recipe: dict) -> list[str]:
    """Return ``key=value`` and ``key*factor`` as train.py's words; a factor is of the recipe's value."""
    found = []
    for word in flags.split():
        if "*" in word:
            name, factor = word.split("*")
            number = recipe[name] * float(factor)
            found += [f"--{name}", f"{number:g}" if isinstance(recipe[name], float) else str(round(number))]
        else:
            name, value = word.split("=", 1)
            found += [f"--{name}", value]
    return found


def main(argv: list[str] | None = None) -> int:
    """Train every change with every seed; print its mean loss and the difference to the recipe as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="TinyShakespeare, 1,115,394 characters; none: the recipe's own data")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=500, help="of the recipe's size")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys of every run")
    parser.add_argument("--only", nargs="+", choices=list(changes(500)), metavar="CHANGE", help="these; default: all")
    parser.add_argument(
        "--together", nargs="+", default=[], choices=list(changes(500)), metavar="CHANGE", help="in every run"
    )
    add_runs(parser, "ablation", seeds=(1,))
    asked = parser.parse_args(argv)
    asked.recipe, asked.folder = asked.recipe.resolve(), asked.folder.resolve()
    found = changes(asked.steps)
    recipe = keys.flat(reading.load_recipe(asked.recipe))
    base = [f"max_steps={asked.steps}", f"warmup_steps={min(recipe['warmup_steps'], asked.steps // 10)}"]
    text = ["--data_files", str(Path(asked.text).resolve())] if asked.text else []
    prepare_shards(asked.folder, asked.recipe, [*text, *words_of(" ".join([*base, *asked.set]), recipe)])
    # What a run learns from, whatever its comments and paths: rows of one machine are known on another.
    same = [json.dumps(recipe, default=str), hashlib.sha256(Path(text[1]).read_bytes()).hexdigest() if text else ""]
    kept = Path(asked.json) if asked.json else asked.folder / "rows.json"
    rows = json.loads(kept.read_text())["rows"] if kept.is_file() else []
    about = {"machine": hardware.this_device().name, "torch": torch.__version__}
    writing = threading.Lock()

    def one(job: tuple[str, int]) -> dict:
        name, seed = job
        chosen = [found[each] for each in (*asked.together, name)]
        flags = words_of(" ".join([*base, *asked.set, *(flags for flags, _ in chosen)]), recipe)
        change = "\n".join(python for _, python in chosen)
        key = hashlib.sha256("\n".join([*same, *flags, change]).encode()).hexdigest()[:12]
        known = next((row for row in rows if row["key"] == key and row["seed"] == seed), None)
        if known is None:
            run = train_once(
                asked.folder, f"{key}-seed{seed}", asked.recipe, [*text, *flags], threads=1, seed=seed, change=change
            )
            known = {"change": name, "together": asked.together, "set": asked.set, "recipe": asked.recipe.name}
            known |= {"asked_steps": asked.steps, "seed": seed, **run, "key": key, "commit": commit()}
            with writing:
                rows.append(known)
                write_json(kept, about | {"rows": rows})
        print(f"{name:48} seed {seed}: {known['loss']:.4f}", flush=True)
        return known | {"change": name}

    jobs = [(name, seed) for seed in asked.seeds for name in asked.only or found]
    with ThreadPoolExecutor(asked.workers) as pool:
        done = list(pool.map(one, jobs))
    print_table(done)
    return 0


def print_table(rows: list[dict]) -> None:
    """Print each change's mean loss, its difference to the recipe as it is where that was run, and each seed's loss."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["change"], []).append(row["loss"])
    plain = statistics.mean(losses["as it is"]) if "as it is" in losses else None
    print(f"\n{'change':48} loss (mean)  difference  each seed's")
    for name, found in sorted(losses.items(), key=lambda item: statistics.mean(item[1])):
        mean = statistics.mean(found)
        difference = f"{mean - plain:+11.4f}" if plain else " " * 11
        print(f"{name:48} {mean:11.4f} {difference}  {', '.join(f'{loss:.4f}' for loss in found)}")


if __name__ == "__main__":
    sys.exit(main())
