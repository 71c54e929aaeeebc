"""Converted checkpoints compute the same as the programs that wrote them.

The tests run these programs from checkouts, on the CPU:

- URSA_MINOR_NANOGPT: https://github.com/karpathy/nanoGPT, written with commit 3adf61e1
- URSA_MINOR_BUILD_NANOGPT: https://github.com/karpathy/build-nanogpt, commit 6104ab1
- URSA_MINOR_LLM_C: https://github.com/karpathy/llm.c, commit f1e2ace

    URSA_MINOR_NANOGPT=/tmp/nanoGPT python -m pytest -m slow -rP tests/model/test_other_trainers.py
"""

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, gpt2_tokenizer, run_script
from torch import nn

import generate
from ursa_minor.base.run_files import read_metrics
from ursa_minor.model import pretrained
from ursa_minor.model.resolve import resolve_model

pytestmark = pytest.mark.slow

NANOGPT = os.environ.get("URSA_MINOR_NANOGPT", "")
BUILD_NANOGPT = os.environ.get("URSA_MINOR_BUILD_NANOGPT", "")
LLM_C = os.environ.get("URSA_MINOR_LLM_C", "")
needs_nanogpt = pytest.mark.skipif(not NANOGPT, reason="URSA_MINOR_NANOGPT is not set")
needs_build_nanogpt = pytest.mark.skipif(
    not BUILD_NANOGPT, reason="URSA_MINOR_BUILD_NANOGPT is not set"
)
needs_llm_c = pytest.mark.skipif(not LLM_C, reason="URSA_MINOR_LLM_C is not set")

CONTEXT = 64
WINDOWS = 100
BATCH_SIZE = 5
NEW_TOKENS = 40
PROMPT = "The model "
TRAINING_FLAGS = {
    "device": "cpu",
    "log_interval": 100,
    "eval_iters": 5,
    "eval_interval": 100,
    "max_iters": 200,
    "block_size": CONTEXT,
    "batch_size": 8,
    "gradient_accumulation_steps": 1,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "dropout": 0.1,
    "learning_rate": 3e-3,
    "warmup_iters": 10,
    "dataset": "shakespeare_char",
    "out_dir": "out",
}
# build-nanogpt has no options, so these lines of its script are changed.
BUILD_NANOGPT_CHANGES = {
    "total_batch_size = 524288": "total_batch_size = 512",
    "B = 64 #": "B = 4 #",
    "T = 1024 #": f"T = {CONTEXT} #",
    "GPTConfig(vocab_size=50304)": (
        f"GPTConfig(vocab_size=50304, n_layer=2, n_head=2, n_embd=64, block_size={CONTEXT})"
    ),
    "warmup_steps = 715": "warmup_steps = 5",
    "max_steps = 19073": "max_steps = 10",
    "val_loss_steps = 20": "val_loss_steps = 1",
}
# In place of build-nanogpt's data set and of tiktoken, which download files.
HELLASWAG = """
import torch

def iterate_examples(split):
    yield {}

def render_example(example):
    return None, torch.ones(4, 8, dtype=torch.long), torch.ones(4, 8, dtype=torch.long), 0
"""
TIKTOKEN = """
class Encoding:
    def encode(self, text):
        return [1, 2, 3]

    def decode(self, ids):
        return str(ids)

def get_encoding(name):
    return Encoding()
"""
FINE_TUNING = f"""
init_from: out
data_files: [text.txt]
validation_fraction: 0.1
sequence_length: {CONTEXT}
resid_pdrop: 0.0
embd_pdrop: 0.0
attn_pdrop: 0.0
tokens_per_step: 512
max_steps: 50
per_device_train_batch_size: 8
learning_rate: 1.0e-3
min_lr_ratio: 1.0
warmup_steps: 0
lr_scheduler_type: constant
weight_decay: 0.1
adam_beta1: 0.9
adam_beta2: 0.95
adam_epsilon: 1.0e-8
max_grad_norm: 1.0
seed: 1
data_seed: 2
logging_steps: 1
eval_steps: 50
eval_tokens: 1280
sample_steps: 0
sample_prompts: []
sample_tokens: 4
save_steps: 25
run_name: tuned
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Make a folder with a text the current one, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    Path("text.txt").write_text("\n".join(pages), encoding="utf-8")
    Path("tune.yaml").write_text(FINE_TUNING)
    return tmp_path


def run(*command: str) -> None:
    """Run a Python script of another program in this folder."""
    environment = os.environ | {"PYTHONUTF8": "1", "PYTHONPATH": ".", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, *command], env=environment, check=True)


def load_module(path: Path) -> Any:
    """Import a file of a checkout."""
    name = f"checkout_{path.parent.name.replace('-', '_').replace('.', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Comparisons


def windows_of(ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of windows at even distances, (batches, batch, context)."""
    starts = np.linspace(0, len(ids) - CONTEXT - 1, WINDOWS).astype(int)
    windows = np.stack([ids[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)
    tensor = torch.from_numpy(windows).view(-1, BATCH_SIZE, CONTEXT + 1)
    return tensor[..., :-1].contiguous(), tensor[..., 1:].contiguous()


@torch.no_grad()
def compare(name: str, original: nn.Module, ids: np.ndarray, rows: int) -> None:
    """Compare logits and loss of a converted model with those of the original.

    Args:
        name: the checkpoint.
        original: the model of the other program. It returns logits and loss.
        ids: the tokens from which windows are taken.
        rows: number of ids of the original model.
    """
    model = pretrained.load(resolve_model(name)).float()
    original.eval()
    logit_errors = []
    losses = []
    losses_of_all_rows = []
    expected_losses = []
    for inputs, targets in zip(*windows_of(ids), strict=True):
        expected_logits, expected_loss = original(inputs, targets)
        all_logits = model(inputs).logits
        logits = all_logits[..., :rows]
        logit_errors.append((logits - expected_logits[..., :rows]).abs().max().item())
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
        loss_of_all_rows = F.cross_entropy(all_logits.flatten(0, 1), targets.flatten())
        losses_of_all_rows.append(loss_of_all_rows.item())
        expected_losses.append(expected_loss.item())

    loss = np.mean(losses)
    loss_error = abs(loss - np.mean(expected_losses))
    increase = np.mean(losses_of_all_rows) - loss
    print(f"{name}: loss {loss:.4f}, its error {loss_error:.1e}")
    print(f"error of the logits {max(logit_errors):.1e}")
    print(f"the added rows increase the loss by {increase:.1e}")
    assert max(logit_errors) < 1e-5
    assert loss_error < 1e-6


def greedy_text(name: str, capsys) -> str:
    """Return the text that generate.py prints for the prompt."""
    capsys.readouterr()
    flags = {
        "model": name,
        "prompt": PROMPT,
        "max_new_tokens": NEW_TOKENS,
        "temperature": 0,
        "top_k": 0,
    }
    arguments = []
    for option, value in flags.items():
        arguments += [f"--{option}", str(value)]
    assert generate.main(arguments) == 0
    return capsys.readouterr().out


@torch.no_grad()
def greedy_ids(original: nn.Module, prompt_ids: list[int]) -> list[int]:
    """Return the prompt and its continuation by the most likely tokens of the original model."""
    ids = torch.tensor([prompt_ids])
    for _ in range(NEW_TOKENS):
        logits = original(ids, ids)[0]
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


def train_on(name: str) -> None:
    """Train for 50 updates from a checkpoint, and check that the loss falls."""
    result = run_script("train.py", "--recipe", "tune.yaml", "--init_from", name)
    assert Path("runs/tuned/model/model.safetensors").is_file(), result.stderr
    rows = read_metrics(Path("runs/tuned/metrics.jsonl"))
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    print(f"validation loss {losses[0]:.4f} -> {losses[-1]:.4f} after 50 updates")
    assert losses[-1] < losses[0]


# nanoGPT


def prepare_nanogpt() -> None:
    """Copy the files of nanoGPT, and prepare our text as its character data set."""
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(NANOGPT, name), name)
    data = Path("data/shakespeare_char")
    data.mkdir(parents=True)
    shutil.copy(Path(NANOGPT, "data/shakespeare_char/prepare.py"), data)
    shutil.copy("text.txt", data / "input.txt")
    run(str(data / "prepare.py"))


def train_nanogpt(**flags) -> nn.Module:
    """Train with nanoGPT, and load its checkpoint as its sample.py does."""
    values = TRAINING_FLAGS | {"dtype": "float32", "compile": False} | flags
    run("train.py", *[f"--{name}={value}" for name, value in values.items()])
    nanogpt = load_module(Path(NANOGPT, "model.py"))
    checkpoint = torch.load("out/ckpt.pt", map_location="cpu")
    model = nanogpt.GPT(nanogpt.GPTConfig(**checkpoint["model_args"]))
    prefix = "_orig_mod."
    weights = {name.removeprefix(prefix): value for name, value in checkpoint["model"].items()}
    model.load_state_dict(weights)
    return model.eval()


@needs_nanogpt
@pytest.mark.parametrize(
    ("bias", "compiled"), [(True, False), (False, False), (False, True)], ids=str
)
def test_nanogpt_character_model_is_equal(capsys, bias, compiled):
    prepare_nanogpt()
    original = train_nanogpt(bias=bias, compile=compiled)
    meta = pickle.loads(Path("data/shakespeare_char/meta.pkl").read_bytes())
    ids = np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16)
    expected = greedy_ids(original, [meta["stoi"][character] for character in PROMPT])

    text = greedy_text("out", capsys)

    assert text.rstrip("\n") == "".join(meta["itos"][i] for i in expected).rstrip("\n")
    compare("out/ckpt.pt", original, ids, meta["vocab_size"])
    train_on("out")


@needs_nanogpt
def test_nanogpt_model_with_gpt2_tokenizer_is_equal(capsys):
    tokenizer = gpt2_tokenizer()
    ids = write_gpt2_tokens("data/text", tokenizer)
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(NANOGPT, name), name)
    original = train_nanogpt(
        dataset="text", bias=False, max_iters=20, eval_interval=20, eval_iters=1
    )
    tokenizer.backend_tokenizer.save("out/tokenizer.json")
    expected = greedy_ids(original, tokenizer.encode(PROMPT))

    text = greedy_text("out", capsys)

    assert text.rstrip("\n") == tokenizer.decode(expected).rstrip("\n")
    compare("out", original, ids, 50304)
    train_on("out/ckpt.pt")


def write_gpt2_tokens(folder: str, tokenizer) -> np.ndarray:
    """Write the text as GPT-2's ids in the files of nanoGPT, and return the ids."""
    ids = np.array(tokenizer.encode(Path("text.txt").read_text(encoding="utf-8")), dtype=np.uint16)
    Path(folder).mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        ids.tofile(Path(folder, name))
    return ids


# build-nanogpt


@needs_build_nanogpt
def test_build_nanogpt_model_is_equal(capsys, monkeypatch):
    tokenizer = gpt2_tokenizer()
    ids = write_gpt2_tokens("edu_fineweb10B", tokenizer)
    for split in ("train", "val"):
        np.save(f"edu_fineweb10B/{split}_000000.npy", ids)
        Path(f"edu_fineweb10B/{split}.bin").unlink()
    script = Path(BUILD_NANOGPT, "train_gpt2.py").read_text(encoding="utf-8")
    for old, new in BUILD_NANOGPT_CHANGES.items():
        assert old in script
        script = script.replace(old, new)
    Path("train_gpt2.py").write_text(script)
    Path("hellaswag.py").write_text(HELLASWAG)
    Path("tiktoken.py").write_text(TIKTOKEN)
    run("train_gpt2.py")
    model_code, _, _ = script.partition("import tiktoken")
    Path("model_only.py").write_text(model_code.replace("from hellaswag", "# from hellaswag"))
    module = load_module(Path("model_only.py").absolute())
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": CONTEXT}
    original = module.GPT(module.GPTConfig(vocab_size=50304, **shape)).eval()
    # The checkpoint contains an object of this class.
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", module.GPTConfig, raising=False)
    original.load_state_dict(torch.load("log/model_00009.pt", weights_only=False)["model"])
    tokenizer.backend_tokenizer.save("log/tokenizer.json")
    expected = greedy_ids(original, tokenizer.encode(PROMPT))

    text = greedy_text("log", capsys)

    assert text.rstrip("\n") == tokenizer.decode(expected).rstrip("\n")
    compare("log/model_00009.pt", original, ids, 50304)
    train_on("log")


# llm.c


@needs_llm_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llm_c_model_is_equal(capsys, dtype):
    tokenizer = gpt2_tokenizer()
    ids = write_gpt2_tokens("tokens", tokenizer)
    module = load_module(Path(LLM_C, "train_gpt2.py"))
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": CONTEXT}
    original = module.GPT(module.GPTConfig(vocab_size=50257, **shape)).eval()
    randomize(original)
    module.write_model(original, "gpt2_small.bin", dtype)
    if dtype == "bfloat16":
        original = original.bfloat16().float()
    tokenizer.backend_tokenizer.save("tokenizer.json")
    if dtype == "float32":
        expected = greedy_ids(original, tokenizer.encode(PROMPT))
        text = greedy_text("gpt2_small.bin", capsys)
        assert text.rstrip("\n") == tokenizer.decode(expected).rstrip("\n")
    compare("gpt2_small.bin", original, ids, 50257)
    train_on("gpt2_small.bin")


def randomize(model: nn.Module) -> None:
    """Replace the weights by random ones, also the biases, which are zero initially."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
