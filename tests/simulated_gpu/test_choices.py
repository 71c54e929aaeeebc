"""What is chosen on a card: sizes, types, kernels, backends and counts, each asked of what was done."""

import dataclasses
import functools
import types
from unittest import mock

import numpy
import pytest
import torch
from conftest import ROOT
from simulated_cuda import A6000, CUDA, H200, RTX_3060, T4, UNKNOWN, CudaTensor, run_on_gpu
from transformers import GPT2Config, GPT2ForSequenceClassification

from ursa_minor.base import cudnn, gpus
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, sampling
from ursa_minor.evaluation.validation import validation_loss
from ursa_minor.machine import device as hardware
from ursa_minor.machine import micro_batch
from ursa_minor.machine.accelerator import check_cuda_graphs, make_accelerator
from ursa_minor.model.attention import find_kernel
from ursa_minor.model.build import build
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.optim.muon import orthogonalize
from ursa_minor.post import rewards
from ursa_minor.preflight import checks
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.run import setup

MIB = 2**20
SHAPE = {"vocab_size": 64, "sequence_length": 16, "n_layer": 1, "n_head": 1, "n_embd": 8, "seed": 1}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(**shape) -> NextTokenLoss:
    """Build a GPT-2 of one layer, 8 wide, on the card, and its loss."""
    return NextTokenLoss(build(keys.Model(**SHAPE | shape), eos_token_id=0)).to(CUDA)


@pytest.mark.parametrize(
    ("card", "version", "variable", "level"),
    [
        (H200, 92000, None, "warning"),
        (H200, 92000, "1", "ok"),
        (H200, 92000, "0", "warning"),
        (H200, 92600, None, "ok"),
        (A6000, 92000, None, "ok"),
    ],
)
def test_check_setup_warns_of_old_cudnn_on_hopper(monkeypatch, card, version, variable, level):
    monkeypatch.delenv(cudnn.DEPRIORITIZED_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, variable)

    def work(machine):
        with mock.patch.object(torch.backends.cudnn, "version", lambda: version):
            results = {
                check.name: check for check in checks.examine_gpus("recipe.yaml", quick=True)
            }
        assert results["cudnn"].level == level, results["cudnn"]

    monkeypatch.setattr(checks, "examine_trials", lambda *_: iter(()))
    run_on_gpu(card, work)


def test_check_setup_reports_a_cudnn_that_torch_refuses(monkeypatch):
    def refuse():
        raise RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0)\nbut linked"
        )

    def work(machine):
        with mock.patch.object(torch.backends.cudnn, "version", refuse):
            (check,) = checks.examine_cudnn([(9, 0)])
        assert check.level == "error" and check.text.startswith("cuDNN version incompatibility")
        assert "LD_LIBRARY_PATH" in check.fix

    run_on_gpu(H200, work)


def test_libraries_are_found_where_they_are_loaded_and_searched(tmp_path, monkeypatch):
    (tmp_path / "libcudnn.so.9").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:{tmp_path}/empty:/nowhere")
    assert checks.library_folders("libcudnn") == [str(tmp_path.resolve())]
    assert any("torch" in path for path in checks.loaded_libraries("libc10"))
    assert checks.loaded_libraries("libcudnn") == []


@pytest.mark.parametrize(
    ("card", "precision", "kernel"),
    [(H200, "bf16", "cudnn"), (A6000, "bf16", "flash"), (H200, "no", "efficient")],
)
def test_attention_kernel_of_a_run_is_the_gpus(card, precision, kernel):
    def work(machine):
        recipe = keys.replace(
            loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml"), sequence_length=16
        )
        accelerator = make_accelerator(hardware.this_device(), keys.Machine(), precision=precision)
        plan = types.SimpleNamespace(per_device_train_batch_size=1)
        assert setup.attention_kernel(recipe, plan, accelerator) == kernel

    run_on_gpu(card, work)


def test_auto_proposes_what_fits_a_free_card_and_what_fits_beside_another_program():
    recipe, _, _ = command_line.parse_training(
        ["--recipe", str(ROOT / "recipes" / "gpt2_124m.yaml")]
    )

    def work(machine):
        accelerator = make_accelerator(hardware.this_device(), keys.Machine())

        def proposed() -> int:
            return micro_batch.propose_micro_batch(
                recipe, hardware.free_memory_bytes(CUDA), accelerator
            )

        free = proposed()
        machine.others = machine.card.memory // 2
        assert (free, proposed()) == (26, 6)

    run_on_gpu(RTX_3060, work)


def test_the_try_before_the_first_step_makes_room_on_the_card_and_leaves_neither_memory_nor_a_peak():
    def work(machine):
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        before, seen = machine.allocated, []

        def step():
            seen.append(machine.allocated)
            (layer.weight * layer.weight).sum().backward()

        assert not micro_batch.runs_out_of_memory(
            step, layer, micro_batches=2, reserved_bytes=64 * MIB, device=CUDA
        )
        assert min(seen) >= before + 64 * MIB
        assert machine.allocated == machine.peak == machine.reserved == before

    run_on_gpu(A6000, work)


def test_a_try_gets_what_the_fullest_of_several_cards_has_and_the_log_the_peak_of_memory():
    def work(machine):
        with micro_batch.equal_memory(MIB, CUDA), pytest.raises(torch.OutOfMemoryError):
            torch.zeros(MIB, device="cuda")
        torch.zeros(MIB, device="cuda")  # it is given back at once
        assert hardware.gpu_metrics(CUDA)["gpu/memory"] == machine.peak / machine.card.memory > 0

    run_on_gpu(A6000, work)


def test_a_card_makes_more_logits_at_once_than_a_cpu_keeps_in_its_cache():
    def work(machine):
        module, ids = (
            gpt2(vocab_size=8192, sequence_length=600),
            torch.zeros(1, 600, dtype=torch.int64, device="cuda"),
        )
        module(ids, ids)
        assert (
            machine.watched["_log_softmax float32", "loss.NextTokenLoss._losses_of_logits"] == 1
        )  # 2**20 / 8192 rows on a CPU

    run_on_gpu(A6000, work)


def test_a_loss_by_parts_and_muons_norms_are_computed_in_fp32_from_half_precision_products():
    def work(machine):
        module, ids = gpt2(), torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        module.rows = 8
        with torch.autocast("cuda", torch.bfloat16):
            module(ids, ids)
        orthogonalize(torch.ones(1, 8, 8, dtype=torch.float16, device="cuda"))
        for place, watched, product in (
            ("loss._ChunkedLoss.forward", {"exp_ float32", "logsumexp float32"}, "bfloat16"),
            ("muon.orthogonalize", {"linalg_vector_norm float32"}, "float16"),
        ):
            assert {what for what, where in machine.watched if where == place} == watched
            assert {what for what, where in machine.products if where == place} == {product}

    run_on_gpu(A6000, work)


@pytest.mark.parametrize(
    ("document_mask", "compiled", "kernel"),
    [(False, True, "flash"), (True, True, "flex"), (True, False, "efficient")],
)
def test_documents_apart_take_flex_attention_in_a_compiled_step(document_mask, compiled, kernel):
    def work(machine):
        wide = keys.Model(**SHAPE | {"n_embd": 64})
        how = {"document_mask": document_mask, "compiled": compiled}
        assert find_kernel(wide, 2, CUDA, torch.bfloat16, **how) == kernel

    run_on_gpu(A6000, work)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_cuda_graphs_are_refused_for_several_micro_batches(mode):
    def work(machine):
        accelerator = make_accelerator(hardware.this_device(), keys.Machine(compile_mode=mode))
        check_cuda_graphs(1, accelerator)
        words = f"compile_mode = {mode}.* of 2 micro-batches.* --compile_mode max-autotune-no-cudagraphs"
        with pytest.raises(BadInput, match=words):
            check_cuda_graphs(2, accelerator)

    run_on_gpu(A6000, work)


def test_modes_without_cuda_graphs_take_several_micro_batches():
    def work(machine):
        machine_keys = keys.Machine(compile_mode="max-autotune-no-cudagraphs")
        check_cuda_graphs(2, make_accelerator(hardware.this_device(), machine_keys))

    run_on_gpu(A6000, work)


def test_a_card_scores_a_cards_batches_and_gives_back_what_too_large_a_one_took():
    questions = [([1, 2, 3 + i % 5], [[4], [5, 6]]) for i in range(80)]

    def work(machine):
        model, sizes = gpt2().model, []
        score = functools.partial(likelihood.log_likelihoods, model, questions, context_length=16)
        whole = score(progress=lambda batch: sizes.append(len(batch)))
        assert sizes == [40, 40] and machine.emptied == 0
        machine.card = dataclasses.replace(machine.card, most_sequences=32)
        halved = score(progress=lambda batch: sizes.append(len(batch)))
        assert sizes[2:] == [27, 27, 26] and machine.emptied == 1
        assert all(
            numpy.allclose(one.nats, other.nats, atol=1e-5)
            for one, other in zip(whole, halved, strict=True)
        )

    run_on_gpu(A6000, work)


def test_a_sample_leaves_the_cards_generator_as_it_was():
    class Words:
        eos_token_id, all_special_ids = 0, [0]

        def __len__(self) -> int:
            return 64

    def work(machine):
        model, before = gpt2().model, machine.generator.get_state()
        how = sampling.Sampling(max_new_tokens=4, temperature=1.0, top_k=0, top_p=1.0, seed=3)
        assert len(sampling.sample(model, [1, 2], Words(), how)) <= 4
        assert torch.equal(machine.generator.get_state(), before)

    run_on_gpu(A6000, work)


def test_a_reward_model_judges_on_the_card(tmp_path):
    characters = tokenization.make_characters(["ab"])
    shape = {
        "vocab_size": len(characters),
        "n_positions": 8,
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
    }
    GPT2ForSequenceClassification(
        GPT2Config(**shape, num_labels=1, pad_token_id=characters.eos_token_id)
    ).save_pretrained(tmp_path)
    characters.save_pretrained(tmp_path)

    def work(machine):
        assert len(rewards.ModelReward(str(tmp_path), None)(["a", "b"], ["b", "ab"])) == 2
        assert machine.products  # of this process nothing else multiplies

    run_on_gpu(A6000, work)


@pytest.mark.parametrize("card, kind", [(A6000, "bfloat16"), (T4, "float16")])
def test_gpu_hot_multiplies_on_every_card_in_the_half_precision_that_it_has(
    monkeypatch, capfd, card, kind
):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_hot

    def work(machine):
        times = iter([0.0, 1.0, 3.0, 4.0])
        gpu_hot.SIZE, gpu_hot.ROUND, gpu_hot.time = (
            8,
            5,
            types.SimpleNamespace(perf_counter=lambda: next(times)),
        )
        assert gpu_hot.main(2) == 0
        assert {what: count for (what, _), count in machine.products.items()} == {kind: 5}

    run_on_gpu(card, work)
    assert capfd.readouterr().out.startswith(f"cuda:0 {card.name}  ")


def test_the_users_own_settings_of_the_allocator_stay(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)  # which a test before may have set
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")

    def work(machine):
        hardware.this_device()
        assert machine.allocator == "max_split_size_mb:128"

    run_on_gpu(A6000, work)


@pytest.mark.parametrize("card", [T4, A6000, UNKNOWN], ids=lambda card: card.name)
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
        assert accelerator.state.dynamo_plugin.backend.value == "INDUCTOR"
        assert torch.get_float32_matmul_precision() == (
            "high" if modern else "highest"
        )  # Accelerate has set it before
        make_accelerator(device, keys.Machine(tf32=False))
        assert torch.get_float32_matmul_precision() == "highest"
        assert machine.allocator == "expandable_segments:True"
        assert (
            hardware.device_name(CUDA) == card.name
            and hardware.free_memory_bytes(CUDA) == card.memory
        )
        known = gpus.find(card.name)
        assert (known is None) == (card is UNKNOWN)
        assert (gpus.peak_flops(card.name, device.precision) is None) == (known is None)
        if known:
            assert (
                known.precision == device.precision
                and abs(card.memory / 2**30 / known.memory_gib - 1) < 0.1
            )

    run_on_gpu(card, work)


def check_no_float64() -> None:
    """Make the simulated GPU one without float64, as Apple's are."""
    real = CudaTensor.__new__

    def new(cls, host):
        if host.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
            )
        return real(cls, host)

    CudaTensor.__new__ = staticmethod(new)
    hardware.NO_FLOAT64 = ("cuda",)


@pytest.mark.parametrize("endings", [1, 2])
def test_sums_need_no_float64_on_the_gpu(endings):
    def work(machine):
        module = gpt2()
        ids = torch.arange(32).reshape(2, 16) % 64
        bytes_per_token = numpy.arange(64)
        question = ([1, 2, 3], [[4, 5], [6]][:endings])

        def scores():
            loss = validation_loss(
                module, [(ids, ids)], device=CUDA, bytes_per_token=bytes_per_token
            )
            (answer,) = likelihood.log_likelihoods(module.model, [question], context_length=16)
            return [*loss.values(), *answer.nats]

        expected = scores()
        check_no_float64()
        with pytest.raises(TypeError):
            torch.zeros(1, dtype=torch.float64, device=CUDA)
        assert scores() == pytest.approx(expected, rel=1e-12)

    run_on_gpu(A6000, work)
