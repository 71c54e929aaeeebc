"""The pretended card is as strict as a card: what a card refuses it refuses, what a card waits for it counts."""

import os
from collections.abc import Callable

import numpy as np
import pretend_cuda
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from pretend_cuda import A6000, CARDS, CUDA, H200, T4, V100, Card, on
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.machine import cards, hardware
from pretrain.machine.accelerator import make_accelerator


def refused(kind: type[Exception], words: str, *calls: Callable) -> None:
    for call in calls:
        with pytest.raises(kind, match=words):
            call()


def test_a_tensor_of_the_card_is_no_memory_of_the_host():
    def work(machine):
        x = torch.arange(3.0, device="cuda")
        refused(TypeError, r"can't convert cuda:0 device type tensor to numpy", x.numpy, lambda: np.asarray(x))
        refused(RuntimeError, "cannot pin", x.pin_memory)
        assert (x.device, x.is_cuda, x.get_device(), x.cpu().device.type) == (CUDA, True, 0, "cpu")
        assert x.to("cuda:0") is x is x.cuda() and torch.as_tensor(x, device="cuda") is x
        assert x.cpu().numpy().tolist() == x.tolist() == [0.0, 1.0, 2.0]
        refused(RuntimeError, "invalid device ordinal", lambda: x.to("cuda:1"), lambda: torch.zeros(1, device="cuda:1"))

    on(A6000, work)


def test_two_sides_in_one_operation_are_refused():
    def work(machine):
        here, there, ids = torch.ones(3, 3), torch.ones(3, 3, device="cuda"), torch.zeros(3, dtype=torch.int64)
        number, row = torch.tensor(2.0), ids.to("cuda")
        refused(
            RuntimeError,
            "Expected all tensors to be on the same device",
            lambda: here + there,
            lambda: there @ here,
            lambda: torch.cat([there, here]),
            lambda: torch.stack([there.sum(), number]),
            lambda: F.embedding(ids, there),
            lambda: here[row],
            lambda: here.add_(there),
            lambda: number.add_(there.sum()),
            lambda: F.cross_entropy(there, ids),
            lambda: there.gather(0, ids[None]),
            lambda: torch.where(here > 0, there, there),
            lambda: torch._foreach_add([there], [here]),
            lambda: nn.Linear(3, 3)(there),
        )
        refused(RuntimeError, "generator", lambda: there.normal_(generator=torch.Generator()))
        assert (there * number).is_cuda and (there * 2).is_cuda and there[ids].is_cuda  # which a card takes too
        assert not here.copy_(there).is_cuda and there.copy_(here).is_cuda

    on(A6000, work)


def test_torch_cuda_is_pytorchs_own_and_refuses_what_is_not_answered():
    def work(machine):
        refused(AttributeError, "torch._C", torch.cuda.ipc_collect, torch.cuda.memory_snapshot)
        refused(AttributeError, "no streams and events", torch.cuda.Event, torch.cuda.Stream)
        refused(TypeError, "argument", lambda: torch.cuda.synchronize(0, 1), lambda: torch.cuda.mem_get_info(0, 1))
        refused(ValueError, "Expected a cuda device", lambda: torch.cuda.synchronize("cpu"))
        refused(AssertionError, "Invalid device id", lambda: torch.cuda.get_device_properties(1))
        refused(RuntimeError, "ordinal", lambda: torch.cuda.set_device(1), lambda: torch.cuda.max_memory_allocated(1))
        refused(AttributeError, "no attribute", lambda: torch.cuda.get_device_properties(0).memory_of_the_card)
        refused(TypeError, "argument", lambda: torch.compile(lambda: None, back_end="inductor"))
        assert torch.cuda.power_draw(0) == pretend_cuda.MILLIWATTS and torch.cuda.temperature(0) == pretend_cuda.CELSIUS
        assert torch.cuda.utilization(0) == pretend_cuda.UTILIZATION and machine.nvml_reads == 1

    on(A6000, work)


@pytest.mark.parametrize(
    ("what", "wait"),
    [
        ("read", lambda x: x[0].item()),
        ("read", lambda x: bool(x[0])),
        ("read", lambda x: x.cpu()),
        ("read", lambda x: x.tolist()),
        ("read", lambda x: x.nonzero()),
        ("read", lambda x: x[x > 0]),
        ("read", lambda x: torch.zeros(3).copy_(x)),
        ("write", lambda x: torch.tensor([1.0], device="cuda")),
        ("write", lambda x: x.new_tensor(1.0)),
        ("write", lambda x: torch.zeros(3).to("cuda", non_blocking=True)),  # from pageable memory
        ("write", lambda x: torch.zeros(3).pin_memory().to("cuda")),
        ("write", lambda x: x[torch.tensor([0])]),
        ("synchronize", lambda x: torch.cuda.synchronize()),
        (None, lambda x: torch.zeros(3).pin_memory().to("cuda", non_blocking=True)),
        (None, lambda x: torch.nn.utils.clip_grad_norm_([x], 1.0)),
        (None, lambda x: torch.arange(3, device="cuda").float().sum() * 2 + x[0]),
    ],
)
def test_each_wait_of_the_host_is_counted(what, wait):
    def work(machine):
        x = torch.ones(3, device="cuda")
        wait(x)
        assert dict(machine.waits) == ({(what, "elsewhere"): 1} if what else {})

    on(A6000, work)


def test_a_wait_is_named_by_the_function_of_the_product():
    def work(machine):
        names: dict = {}
        exec(compile("def read(x): return [x.item() for _ in range(2)]", f"{ROOT}/pretrain/made_up.py", "exec"), names)
        names["read"](torch.ones((), device="cuda"))
        assert dict(machine.waits) == {("read", "made_up.read"): 2}

    on(A6000, work)


def test_memory_under_a_copy_is_neither_read_nor_overwritten_before_the_host_has_waited():
    def work(machine):
        x = torch.arange(3.0, device="cuda")
        copied = x.to("cpu", non_blocking=True)
        assert copied.isnan().all()
        torch.cuda.synchronize()
        assert copied.tolist() == [0.0, 1.0, 2.0]
        pinned = torch.zeros(3).pin_memory()
        pinned.copy_(x, non_blocking=True)
        assert pinned.isnan().all() and x.sum().item() == 3.0 and pinned.tolist() == [0.0, 1.0, 2.0]
        moved = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        pinned.zero_()  # the copy is done
        assert moved.tolist() == [0.0, 1.0, 2.0]
        pinned.to("cuda", non_blocking=True)
        pinned.fill_(7.0)
        refused(RuntimeError, "overwritten while a copy", torch.cuda.synchronize)

    on(A6000, work)


def test_autocast_casts_what_it_casts_on_a_card():
    def work(machine):
        x, layer, norm = torch.randn(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        x, layer, norm = x.to("cuda"), layer.to("cuda"), norm.to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            half = layer(x)
            types = half, half @ half.mT, norm(half), half.softmax(-1), half.logsumexp(-1), half + half
            loss = F.cross_entropy(half, torch.zeros(4, dtype=torch.int64, device="cuda"))
        names = ["bfloat16", "bfloat16", "float32", "float32", "float32", "bfloat16"]
        assert [str(each.dtype) for each in types] == [
            f"torch.{name}" for name in names
        ] and loss.dtype == torch.float32
        loss.backward()
        assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.is_cuda

    on(A6000, work)


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_learned_is_what_a_cpu_learns(fused):
    def work(machine):
        losses = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(1)
            module = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 7))
            module[4].weight = module[0].weight  # tied
            module.to(device)
            assert module[4].weight is module[0].weight and {p.device.type for p in module.parameters()} == {device}
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
            ids = torch.arange(7).to(device)
            for _ in range(5):
                loss = F.cross_entropy(module(ids), ids.roll(1))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[:5] == losses[5:] and losses[4] < losses[0]

    on(A6000, work)


def test_a_gradient_goes_from_side_to_side():
    def work(machine):
        x = torch.ones(3, requires_grad=True)
        (x.to("cuda", torch.float64).sum() * 2).cpu().backward()
        assert x.grad.tolist() == [2.0, 2.0, 2.0] and not x.grad.is_cuda

    on(A6000, work)


def test_the_card_draws_numbers_of_its_own():
    def work(machine):
        torch.manual_seed(3)
        first, cpu = torch.rand(4, device="cuda").tolist(), torch.rand(4).tolist()
        torch.manual_seed(3)
        assert torch.rand(4).tolist() == cpu  # which what the card drew has not moved
        with torch.random.fork_rng([0]):
            assert torch.rand(4, device="cuda").tolist() == first
        assert F.dropout(torch.ones(64, device="cuda"), 0.5).eq(0).any()
        torch.cuda.manual_seed_all(3)
        assert torch.rand(4, device="cuda").tolist() == first
        torch.default_generator.manual_seed(3)  # the CPU's alone
        assert torch.rand(4, device="cuda").tolist() != first

    on(A6000, work)


def test_memory_is_counted_freed_and_runs_out():
    def work(machine):
        torch.cuda.reset_peak_memory_stats()
        x = torch.zeros(256, device="cuda")
        y = x.view(16, 16)[0]
        assert torch.cuda.memory_allocated() == 1024 and torch.cuda.mem_get_info() == (3072, 4096)
        del x
        assert torch.cuda.memory_allocated() == 1024  # a view of it is left
        refused(torch.OutOfMemoryError, "CUDA out of memory", lambda: torch.zeros(1024, device="cuda"))
        del y
        assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 1024
        assert torch.cuda.memory_reserved() == 1024
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0

    on(Card("small", (8, 0), 4096), work)


def test_deterministic_algorithms_are_asked_for_as_on_a_card():
    def work(machine):
        x = torch.ones(2, 2, device="cuda")
        torch.use_deterministic_algorithms(True)
        refused(RuntimeError, "does not have a deterministic implementation", lambda: x.cumsum(0))
        assert x.long().cumsum(0).is_cuda
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        refused(RuntimeError, "CUBLAS_WORKSPACE_CONFIG", lambda: x @ x)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        assert (x @ x).is_cuda

    on(A6000, work)


@pytest.mark.parametrize("error", pretend_cuda.OUT_OF_MEMORY)
def test_a_micro_batch_that_is_too_large_fails_as_the_card_says(error):
    def work(machine):
        table = torch.ones(5, 2, device="cuda")
        F.embedding(torch.zeros(2, 9, dtype=torch.int64, device="cuda"), table)
        with pytest.raises(RuntimeError) as caught:
            F.embedding(torch.zeros(3, 1, dtype=torch.int64, device="cuda"), table)
        assert isinstance(caught.value, torch.OutOfMemoryError) == (error == "allocator")

    on(Card("any", (8, 0), 2**30, most_sequences=2, error=error), work)


@pytest.mark.parametrize(
    ("card", "half", "masked", "kernel"),
    [
        (H200, torch.bfloat16, False, "cudnn"),
        (A6000, torch.bfloat16, False, "flash"),
        (A6000, torch.float32, False, "efficient"),
        (A6000, torch.bfloat16, True, "efficient"),
        (T4, torch.float16, False, "efficient"),
        (V100, torch.bfloat16, False, "math"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_attention_takes_the_kernel_that_the_card_has_and_computes_the_same(card, half, masked, kernel):
    def work(machine):
        query, key, value = torch.randn(3, 1, 2, 8, 16, device="cuda", dtype=half)
        mask = torch.ones(8, 8, dtype=torch.bool, device="cuda").tril() if masked else None
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not masked)
        assert list(machine.kernels) == [(kernel, "elsewhere")]
        expected = F.scaled_dot_product_attention(*(x.cpu().float() for x in (query, key, value)), is_causal=True)
        torch.testing.assert_close(out.cpu().float(), expected, atol=0.05, rtol=0.05)
        if card is T4:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                refused(RuntimeError, "No available kernel", lambda: F.scaled_dot_product_attention(query, key, value))

    on(card, work)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_the_product_chooses_for_each_card_what_it_can(card):
    def work(machine):
        device = hardware.this_device()
        modern = card.capability >= (8, 0)
        assert (device.kind, device.name, device.memory_bytes) == ("cuda", card.name, card.memory)
        assert (device.capability, device.count, device.compiles) == (card.capability, 1, True)
        assert device.precision == ("bf16" if modern else "fp16") and device.has_tf32 == modern
        accelerator = make_accelerator(device)
        assert accelerator.device.type == "cuda" and accelerator.mixed_precision == device.precision
        assert (accelerator.scaler is not None) != modern
        assert torch.get_float32_matmul_precision() == ("high" if modern else "highest")
        assert machine.allocator == "expandable_segments:True"
        assert hardware.device_name(CUDA) == card.name and hardware.free_memory_bytes(CUDA) == card.memory
        known = cards.find(card.name)
        assert (known is None) == (card is pretend_cuda.UNKNOWN)
        assert (cards.peak_flops(card.name, device.precision) is None) == (known is None)
        if known:
            assert known.precision == device.precision and abs(card.memory / 2**30 / known.memory_gib - 1) < 0.1

    on(card, work)
