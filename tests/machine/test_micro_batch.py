"""The memory trial before the first step reports whether a micro-batch fits, and has no effects."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from ursa_minor.base.errors import BadInput
from ursa_minor.machine import micro_batch


def out_of_memory() -> torch.OutOfMemoryError:
    """Return the error of a GPU that is full."""
    return torch.OutOfMemoryError("CUDA out of memory")


def runs_out(step: Callable, module: nn.Module | None = None, micro_batches: int = 1) -> bool:
    """Return whether the trial of a step on the CPU runs out of memory."""
    return micro_batch.runs_out_of_memory(
        step,
        module or nn.Module(),
        micro_batches=micro_batches,
        reserved_bytes=0,
        device=torch.device("cpu"),
    )


def failing_step(error: Exception) -> Callable:
    """Return a step that raises an error."""

    def step(*_):
        raise error

    return step


@pytest.fixture
def fsdp_module() -> nn.Module:
    """A module with the method by which FSDP2 forgets an incomplete forward pass."""
    module = nn.Linear(4, 4)
    module.reset_iter_state = mock.Mock()
    return module


def test_successful_step_fits(fsdp_module):
    assert not runs_out(lambda: None, fsdp_module)
    assert not fsdp_module.reset_iter_state.called


@pytest.mark.parametrize(
    "error",
    [
        out_of_memory(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        BackendCompilerFailed(lambda: None, out_of_memory(), None),
    ],
    ids=["torch", "cuBLAS", "compiler"],
)
def test_step_without_memory_does_not_fit(fsdp_module, error):
    assert runs_out(failing_step(error), fsdp_module)
    assert fsdp_module.reset_iter_state.call_count == 1


def test_other_error_is_raised():
    with pytest.raises(RuntimeError, match="something else"):
        runs_out(failing_step(RuntimeError("something else")))


def test_compiler_error_is_explained():
    error = InductorError(RuntimeError("No working C++ compiler found"), None)

    with pytest.raises(BadInput) as caught:
        runs_out(failing_step(error))

    message = str(caught.value)
    assert "torch.compile" in message
    assert "No working C++ compiler" in message
    assert "dynamo_backend" in message


class RecordingStep:
    """A step of a linear layer that records whether gradients exist when it starts.

    If ``fails_late`` is true, it runs out of memory with gradients.
    """

    def __init__(self, *, fails_late: bool = False):
        self.layer = nn.Linear(4, 4)
        self.fails_late = fails_late
        self.has_gradients = []

    def __call__(self, *_) -> None:
        self.has_gradients.append(self.layer.weight.grad is not None)
        self.layer(torch.ones(2, 4)).sum().backward()
        if self.fails_late and self.has_gradients[-1]:
            raise torch.OutOfMemoryError("late")


@pytest.mark.parametrize(
    ("micro_batches", "fails_late", "has_gradients"),
    [(1, False, [False]), (2, False, [False, True]), (8, True, [False, True])],
)
def test_second_micro_batch_has_gradients_of_first(micro_batches, fails_late, has_gradients):
    step = RecordingStep(fails_late=fails_late)

    result = runs_out(step, step.layer, micro_batches)

    assert result is fails_late
    assert step.has_gradients == has_gradients


@pytest.mark.parametrize(("micro_batches", "fails_late"), [(1, False), (2, False), (8, True)])
def test_trial_leaves_module_unchanged(micro_batches, fails_late):
    step = RecordingStep(fails_late=fails_late)
    before = {name: tensor.clone() for name, tensor in step.layer.state_dict().items()}

    runs_out(step, step.layer, micro_batches)

    for name, tensor in step.layer.state_dict().items():
        assert torch.equal(tensor, before[name])
    for parameter in step.layer.parameters():
        assert parameter.grad is None


def test_each_size_is_compiled_separately():
    """Otherwise the compiler would make the second size a variable."""
    compiled_sizes = []

    def backend(graph, inputs):
        batch = inputs[-1]
        compiled_sizes.append(batch.shape[0] if torch.is_tensor(batch) else batch)
        return graph.forward

    layer = torch.compile(nn.Linear(4, 4), backend=backend)

    def try_size(size: int) -> bool:
        def step(*_):
            layer(torch.ones(size, 4))
            if size > 2:
                raise out_of_memory()

        return runs_out(step)

    results = [try_size(8), try_size(4), try_size(2)]

    assert results == [True, True, False]
    assert compiled_sizes == [8, 4, 2]
    # A variable size would be a torch.SymInt.
    assert {type(size) for size in compiled_sizes} == {int}
