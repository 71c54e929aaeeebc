"""The try before the first step: it says whether a micro-batch fits, and leaves nothing behind."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from pretrain.base.errors import BadInput
from pretrain.machine import fit


def rehearse(step, parameters=(), **how):
    about = {"micro_batch": 3, "sequence_length": 5, "micro_batches": 1, "room_bytes": 0, "device": torch.device("cpu")}
    return fit.runs_out_of_memory(step, parameters, **(about | how))


def test_a_step_of_the_asked_size_is_tried():
    seen = []
    assert not rehearse(lambda inputs_BT, targets_BT: seen.append((inputs_BT, targets_BT)))
    ((inputs_BT, targets_BT),) = seen
    assert (
        inputs_BT is not targets_BT and inputs_BT.shape == targets_BT.shape == (3, 5) and inputs_BT.dtype == torch.int64
    )


def test_running_out_is_an_answer_and_any_other_error_is_not():
    def out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def cublas(*_):  # the handle that a card's first product makes
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def driver(*_):
        raise RuntimeError("CUDA error: out of memory")

    def wrong(*_):
        raise RuntimeError("something else")

    assert rehearse(out) and rehearse(cublas) and rehearse(driver)
    with pytest.raises(RuntimeError, match="something else"):
        rehearse(wrong)


def test_a_compiler_that_does_not_work_is_said_with_the_way_round_it():
    def uncompiled(*_):
        raise InductorError(RuntimeError("No working C++ compiler found"), None)

    with pytest.raises(BadInput, match=r"torch.compile fails .*: No working C\+\+ compiler.*dynamo_backend"):
        rehearse(uncompiled)


def test_memory_that_runs_out_while_compiling_is_lack_of_memory():
    def out(*_):
        raise BackendCompilerFailed(lambda: None, torch.OutOfMemoryError("CUDA out of memory"), None)

    assert rehearse(out)


@pytest.mark.parametrize("fails", [False, True])
def test_no_gradient_is_left_and_no_weight_is_touched(fails):
    layer = nn.Linear(4, 4)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}

    def step(*_):
        layer(torch.ones(2, 4)).sum().backward()
        if fails:
            raise torch.OutOfMemoryError("late")

    assert rehearse(step, layer.parameters()) is fails
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_gradients_of_the_first_micro_batch_are_there_in_the_second():
    layer, held = nn.Linear(4, 4), []

    def step(*_):
        held.append(layer.weight.grad is not None)
        layer(torch.ones(2, 4)).sum().backward()

    for micro_batches, seen in ((1, [False]), (2, [False, True]), (8, [False, True])):
        held.clear()
        rehearse(step, layer.parameters(), micro_batches=micro_batches)
        assert held == seen


def test_room_is_made_for_what_the_optimizer_will_keep(monkeypatch):
    made, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **how: made.append((size, how["dtype"])) or real(size, **how))
    rehearse(lambda *_: None, room_bytes=1000)
    assert made == [(1000, torch.uint8)]
