"""Gradients and updates of a small GPT-2 equal those of llm.c's C code.

Set URSA_MINOR_LLM_C to a checkout of https://github.com/karpathy/llm.c. The test was written with
its commit f1e2ace651495b74ae22d45d1723443fd00ecd3a. ``llm_c_driver.c`` includes train_gpt2.c from
the checkout. Both programs train the same model on the same tokens in fp32.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import build_small_model, random_ids, randomize_weights
from torch import nn
from transformers import GPT2LMHeadModel

from ursa_minor.model.loss import loss_module
from ursa_minor.optim import optimizers, schedule, update
from ursa_minor.recipe import keys

CHECKOUT = os.environ.get("URSA_MINOR_LLM_C", "")
DRIVER = Path(__file__).parent / "llm_c_driver.c"
MODEL_MAGIC = 20240326
FP32_VERSION = 3  # of the model file

VOCAB_SIZE = 257
PADDED_VOCAB_SIZE = 384  # llm.c ignores the rows that are added to the embedding
SHAPE = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 64,
    "vocab_size": VOCAB_SIZE,
    "sequence_length": 64,
}
BATCH_SIZE = 4
TOKENS = 48  # per sequence, fewer than there are positions
STEPS = 100
DIFFERENT_BATCHES = 4
ROWS = 50  # of the logits that our loss computes at a time; does not divide 4 * 48

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPSILON = 1e-8

# The tensors in the order of a model file. The tensors of a name with {} are those of all layers.
TENSORS = (
    "wte.weight",
    "wpe.weight",
    "h.{}.ln_1.weight",
    "h.{}.ln_1.bias",
    "h.{}.attn.c_attn.weight",
    "h.{}.attn.c_attn.bias",
    "h.{}.attn.c_proj.weight",
    "h.{}.attn.c_proj.bias",
    "h.{}.ln_2.weight",
    "h.{}.ln_2.bias",
    "h.{}.mlp.c_fc.weight",
    "h.{}.mlp.c_fc.bias",
    "h.{}.mlp.c_proj.weight",
    "h.{}.mlp.c_proj.bias",
    "ln_f.weight",
    "ln_f.bias",
)


class Result(NamedTuple):
    """The result of a training run.

    Attributes:
        gradients: gradients of the first step by name.
        losses: the loss of each step, before its update.
        weights: weights after the last step by name.
    """

    gradients: dict[str, torch.Tensor]
    losses: list[float]
    weights: dict[str, torch.Tensor]


# Training with this project


def make_batches() -> torch.Tensor:
    """Return batches of random ids that repeat, so that the model can learn them.

    Returns:
        (steps, sequences, tokens + 1) int64.
    """
    ids = random_ids(DIFFERENT_BATCHES, BATCH_SIZE, TOKENS + 1, below=VOCAB_SIZE)
    return ids.repeat(STEPS // DIFFERENT_BATCHES, 1, 1)


def build_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Build the AdamW of a recipe, but with weight decay of all tensors, as in llm.c's C code."""
    settings = keys.Optimizer(
        weight_decay=weight_decay,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        max_grad_norm=0.0,
    )
    optimizer = optimizers.build(model, settings)
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay
    schedule.set_lr(optimizer, LEARNING_RATE)
    return optimizer


def copy_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy tensors, under their names without the prefix of GPT2LMHeadModel."""
    return {name.removeprefix("transformer."): tensor.detach().clone() for name, tensor in named}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the gradients by name."""
    return copy_tensors((name, weight.grad) for name, weight in model.named_parameters())


def train(model: GPT2LMHeadModel, batches: torch.Tensor, weight_decay: float) -> Result:
    """Train a model with the loss, optimizer and update of this project."""
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, weight_decay)
    module = loss_module(model.train(), keys.Loss(), 0)
    module.rows = ROWS

    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for batch in batches:
        loss = module(batch[:, :-1], batch[:, 1:])
        loss.backward()
        gradients = gradients or gradients_of(model)
        outcome = update.update(
            optimizer,
            parameters,
            loss.detach(),
            max_grad_norm=0.0,
            scaler=None,
            reduce_mean=lambda means: means,
        )
        assert outcome.applied
        losses.append(outcome.loss)
    return Result(gradients, losses, copy_tensors(model.named_parameters()))


# Training with llm.c


def names_in_file(num_layers: int) -> list[str]:
    """Return the names of all tensors in the order of a model file."""
    names = []
    for name in TENSORS:
        layers = range(num_layers) if "{}" in name else range(1)
        names += [name.format(layer) for layer in layers]
    return names


def is_transposed(name: str) -> bool:
    """Return whether llm.c stores a matrix as (outputs, inputs). Conv1D has (inputs, outputs)."""
    return ".c_" in name and name.endswith(".weight")


def write_model(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights as a model file of llm.c."""
    header = np.zeros(256, dtype=np.int32)
    header[:8] = (
        MODEL_MAGIC,
        FP32_VERSION,
        SHAPE["sequence_length"],
        VOCAB_SIZE,
        SHAPE["n_layer"],
        SHAPE["n_head"],
        SHAPE["n_embd"],
        PADDED_VOCAB_SIZE,
    )
    with path.open("wb") as file:
        file.write(header.tobytes())
        for name in names_in_file(SHAPE["n_layer"]):
            tensor = weights[name]
            if is_transposed(name):
                tensor = tensor.T
            if name == "wte.weight":
                tensor = F.pad(tensor, (0, 0, 0, PADDED_VOCAB_SIZE - VOCAB_SIZE))
            file.write(tensor.contiguous().numpy().tobytes())


def write_batches(path: Path, batches: torch.Tensor) -> None:
    """Write the input of the driver."""
    numbers = [np.array([BATCH_SIZE, TOKENS, STEPS])]
    for batch in batches.numpy():
        numbers.append(batch[:, :-1].ravel())
        numbers.append(batch[:, 1:].ravel())
    path.write_bytes(np.concatenate(numbers).astype(np.int32).tobytes())


def read_tensors(file: BinaryIO, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Read the tensors of a model, in the order of a model file.

    Args:
        file: contains fp32 numbers.
        shapes: shapes of the tensors in our model by name.
    """
    tensors = {}
    for name in names_in_file(SHAPE["n_layer"]):
        shape = list(shapes[name])
        if is_transposed(name):
            shape.reverse()
        if name == "wte.weight":
            shape[0] = PADDED_VOCAB_SIZE
        numbers = np.fromfile(file, dtype=np.float32, count=math.prod(shape))
        tensor = torch.from_numpy(numbers).view(shape)
        if is_transposed(name):
            tensor = tensor.T
        tensors[name] = tensor

    embedding = tensors["wte.weight"]
    assert not embedding[VOCAB_SIZE:].any()
    tensors["wte.weight"] = embedding[:VOCAB_SIZE]
    return tensors


def compile_driver(folder: Path) -> Path:
    """Compile the driver, without the -Ofast of llm.c's Makefile, which rounds less exactly."""
    program = folder / "driver"
    options = ["-O3", "-w", "-I", CHECKOUT]
    subprocess.run(["gcc", *options, "-o", program, DRIVER, "-lm"], check=True)
    return program


def train_in_c(
    folder: Path, model: GPT2LMHeadModel, batches: torch.Tensor, weight_decay: float
) -> Result:
    """Train a model with llm.c. The model itself does not change."""
    program = compile_driver(folder)
    weights = copy_tensors(model.named_parameters())
    write_model(folder / "model.bin", weights)
    write_batches(folder / "batches.bin", batches)

    files = [folder / "model.bin", folder / "batches.bin", folder / "result.bin"]
    settings = [LEARNING_RATE, *BETAS, EPSILON, weight_decay]
    subprocess.run([program, *files, *map(str, settings)], check=True)

    shapes = {name: tensor.shape for name, tensor in weights.items()}
    with (folder / "result.bin").open("rb") as file:
        gradients = read_tensors(file, shapes)
        losses = np.fromfile(file, dtype=np.float32, count=STEPS)
        final_weights = read_tensors(file, shapes)
        assert not file.read()
    return Result(gradients, losses.tolist(), final_weights)


# The comparison


def largest_errors(
    tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the largest error in each tensor, (tensors,) fp32."""
    assert tensors.keys() == expected.keys()
    errors = []
    for name, tensor in tensors.items():
        difference = tensor - expected[name]
        errors.append(difference.abs().max())
    return torch.stack(errors)


def without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace the biases of the attention keys by zero.

    They add the same number to all attention scores of a query, so their exact gradient is zero.
    The gradient that is computed is a rounding error, and Adam turns it into updates of normal
    size.
    """
    changed = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("attn.c_attn.bias"):
            query, key, value = tensor.chunk(3)
            changed[name] = torch.cat([query, torch.zeros_like(key), value])
    return changed


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="URSA_MINOR_LLM_C is not set to a checkout of llm.c")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_gradients_and_updates_equal_llm_c(tmp_path, weight_decay):
    model = randomize_weights(build_small_model(**SHAPE))
    batches = make_batches()
    expected = train_in_c(tmp_path, model, batches, weight_decay)

    result = train(model, batches, weight_decay)

    gradient_errors = largest_errors(result.gradients, expected.gradients)
    zeros = {name: torch.zeros_like(gradient) for name, gradient in result.gradients.items()}
    gradient_sizes = largest_errors(zeros, expected.gradients)
    gradient_error = (gradient_errors / gradient_sizes).max().item()
    loss_error = np.abs(np.subtract(result.losses, expected.losses)).max()
    weights = without_key_biases(result.weights)
    expected_weights = without_key_biases(expected.weights)
    weight_error = largest_errors(weights, expected_weights).max().item()
    print(f"weight_decay {weight_decay}: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
    print(f"gradients: largest {gradient_sizes.max():.2f}, error {gradient_errors.max():.1e}")
    print(f"relative error of the gradients of a tensor: {gradient_error:.1e}")
    print(f"errors: losses {loss_error:.1e}, weights {weight_error:.1e}")
    assert result.losses[-1] < result.losses[0] - 1.0  # the model has learned
    assert gradient_error < 1e-5
    assert loss_error < 5e-5
    assert weight_error < 1e-4
