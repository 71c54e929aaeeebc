"""Write run folders with checkpoints of random models, without training."""

import json
from pathlib import Path

import yaml
from conftest import TEXT

from ursa_minor.base import files
from ursa_minor.base.run_files import MANIFEST, MODEL, RECIPE, step_name
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock
from ursa_minor.model.build import build
from ursa_minor.recipe import keys

TOKENS_PER_STEP = 64
SHAPE = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "vocab_size": 320,
    "sequence_length": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def write_model(folder: Path, seed: int, vocab_size: int = 300) -> Path:
    """Write a model folder with random weights and a BPE tokenizer of ``vocab_size`` ids."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    model = build(keys.Model(**SHAPE, seed=seed), eos_token_id=0)
    stock.write(model, folder, tokenization.train_bpe([TEXT], vocab_size))
    return folder


def write_recipe(run: Path, **recipe) -> None:
    """Write the recipe.yaml of a run."""
    run.mkdir(parents=True, exist_ok=True)
    values = {"run_name": run.name, "tokens_per_step": TOKENS_PER_STEP} | recipe
    (run / RECIPE).write_text(yaml.safe_dump(values))


def write_checkpoint(run: Path, step: int, seed: int, vocab_size: int = 300) -> Path:
    """Write a checkpoint with weights only and its manifest."""
    folder = write_model(run / "checkpoints" / step_name(step), seed, vocab_size)
    row = files.manifest_row(folder / MODEL)
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": {MODEL: row}}))
    return folder


def write_run(run: Path, steps: tuple[int, ...], vocab_size: int = 300, **recipe) -> Path:
    """Write a run with a checkpoint of other random weights at each step."""
    write_recipe(run, **recipe)
    for step in steps:
        write_checkpoint(run, step, seed=step + 100 * recipe.get("seed", 0), vocab_size=vocab_size)
    return run
