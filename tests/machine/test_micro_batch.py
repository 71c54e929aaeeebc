"""The try before the first step: it says whether a micro-batch fits, and leaves nothing behind."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from ursa_minor.base.errors import BadInput
from ursa_minor.machine import micro_batch


def rehearse(step, module=None, **how):
    about = {"micro_batches": 1, "reserved_bytes": 0, "device": torch.device("cpu")}
    return micro_batch.runs_out_of_memory(step, module or nn.Module(), **(about | how))


def raising(error):
    def step(*_):
        raise error

    return step


def test_running_out_is_an_answer_by_whatever_name_and_fsdp2_forgets_the_pass():
    module = nn.Linear(4, 4)
    module.reset_iter_state = mock.Mock()
    assert not rehearse(lambda: None, module) and not module.reset_iter_state.called
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        BackendCompilerFailed(lambda: None, torch.OutOfMemoryError("CUDA out of memory"), None),
    ):
        assert rehearse(raising(error), module)
    assert module.reset_iter_state.call_count == 3


def test_any_other_error_is_none_and_a_compilers_is_named_with_the_way_round_it():
    with pytest.raises(RuntimeError, match="something else"):
        rehearse(raising(RuntimeError("something else")))
    with pytest.raises(
        BadInput, match=r"torch.compile fails .*: No working C\+\+ compiler.*dynamo_backend"
    ):
        rehearse(raising(InductorError(RuntimeError("No working C++ compiler found"), None)))


@pytest.mark.parametrize(
    "micro_batches, seen", [(1, [False]), (2, [False, True]), (8, [False, True])]
)
def test_gradients_of_the_first_micro_batch_are_there_in_the_second(micro_batches, seen):
    """And none is left, where it failed too, and no weight is touched."""
    layer, held = nn.Linear(4, 4), []
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    def step(*_):
        held.append(layer.weight.grad is not None)
        layer(torch.ones(2, 4)).sum().backward()
        if micro_batches == 8 and held[-1]:
            raise torch.OutOfMemoryError("late")

    assert rehearse(step, layer, micro_batches=micro_batches) is (micro_batches == 8)
    assert held == seen and all(parameter.grad is None for parameter in layer.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_the_size_that_is_tried_next_is_compiled_as_itself():
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs[-1].shape[0] if torch.is_tensor(inputs[-1]) else inputs[-1])
        return graph.forward

    run = torch.compile(nn.Linear(4, 4), backend=backend)

    def step(size):
        run(torch.ones(size, 4))
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert [rehearse(functools.partial(step, size)) for size in (8, 4, 2)] == [True, True, False]
    assert compiled == [8, 4, 2] and all(isinstance(size, int) for size in compiled)
