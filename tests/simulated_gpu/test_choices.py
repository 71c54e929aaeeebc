"""The choice of batch sizes, data types, kernels and backends on a simulated GPU."""

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
GPT2_124M_RECIPE = ROOT / "recipes" / "gpt2_124m.yaml"
SHAPE = {
    "vocab_size": 64,
    "sequence_length": 16,
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 8,
    "seed": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def build_gpt2_loss(**shape) -> NextTokenLoss:
    """Build a GPT-2 with one layer of width 8 on the GPU, and its loss."""
    model = build(keys.Model(**SHAPE | shape), eos_token_id=0)
    return NextTokenLoss(model).to(CUDA)


def zero_ids(*shape: int) -> torch.Tensor:
    """Return token ids on the GPU, all 0."""
    return torch.zeros(*shape, dtype=torch.int64, device="cuda")


def recorded_at(counts: dict, place: str) -> set[str]:
    """Return the entries of a counter that belong to a function of the product."""
    return {what for what, where in counts if where == place}


# cuDNN


@pytest.mark.parametrize(
    ("model", "version", "variable", "level"),
    [
        (H200, 92000, None, "warning"),
        (H200, 92000, "1", "ok"),
        (H200, 92000, "0", "warning"),
        (H200, 92600, None, "ok"),
        (A6000, 92000, None, "ok"),
    ],
)
def test_check_setup_warns_of_old_cudnn_on_hopper(monkeypatch, model, version, variable, level):
    monkeypatch.setattr(checks, "examine_trials", lambda *_: iter(()))
    monkeypatch.delenv(cudnn.DEPRIORITIZED_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, variable)

    def work(gpu):
        with mock.patch.object(torch.backends.cudnn, "version", lambda: version):
            results = checks.examine_gpus("recipe.yaml", quick=True)
            by_name = {check.name: check for check in results}
        assert by_name["cudnn"].level == level, by_name["cudnn"]

    run_on_gpu(model, work)


def test_check_setup_reports_incompatible_cudnn():
    def refuse():
        raise RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0)\nbut linked"
        )

    def work(gpu):
        with mock.patch.object(torch.backends.cudnn, "version", refuse):
            (check,) = checks.examine_cudnn([(9, 0)])
        assert check.level == "error"
        assert check.text.startswith("cuDNN version incompatibility")
        assert "LD_LIBRARY_PATH" in check.fix

    run_on_gpu(H200, work)


def test_library_is_found_in_search_path(tmp_path, monkeypatch):
    (tmp_path / "libcudnn.so.9").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:{tmp_path}/empty:/nowhere")

    folders = checks.library_folders("libcudnn")

    assert folders == [str(tmp_path.resolve())]


def test_loaded_library_is_found():
    loaded = checks.loaded_libraries("libc10")

    assert any("torch" in path for path in loaded)
    assert checks.loaded_libraries("libcudnn") == []


# The device and the accelerator


@pytest.mark.parametrize("model", [T4, A6000, UNKNOWN], ids=lambda model: model.name)
def test_device_has_properties_of_gpu(model):
    is_modern = model.capability >= (8, 0)

    def work(gpu):
        device = hardware.this_device()
        assert device.kind == "cuda"
        assert device.name == model.name
        assert device.memory_bytes == model.memory
        assert device.capability == model.capability
        assert device.count == 1
        assert device.compiles
        assert device.precision == ("bf16" if is_modern else "fp16")
        assert device.has_tf32 == is_modern
        assert hardware.device_name(CUDA) == model.name
        assert hardware.free_memory_bytes(CUDA) == model.memory

    run_on_gpu(model, work)


@pytest.mark.parametrize("model", [T4, A6000, UNKNOWN], ids=lambda model: model.name)
def test_accelerator_uses_capabilities_of_gpu(model):
    is_modern = model.capability >= (8, 0)

    def work(gpu):
        device = hardware.this_device()
        accelerator = make_accelerator(device)
        assert accelerator.device.type == "cuda"
        assert accelerator.mixed_precision == device.precision
        assert (accelerator.scaler is not None) == (not is_modern)
        assert accelerator.state.dynamo_plugin.backend.value == "INDUCTOR"
        assert gpu.allocator_settings == "expandable_segments:True"

        products = torch.get_float32_matmul_precision()
        assert products == ("high" if is_modern else "highest")
        # The value above is still set when the second accelerator is created.
        make_accelerator(device, keys.Machine(tf32=False))
        assert torch.get_float32_matmul_precision() == "highest"

    run_on_gpu(model, work)


@pytest.mark.parametrize("model", [T4, A6000], ids=lambda model: model.name)
def test_known_gpu_is_found_in_table(model):
    precision = "bf16" if model.capability >= (8, 0) else "fp16"

    row = gpus.find(model.name)

    assert row.precision == precision
    assert model.memory / 2**30 == pytest.approx(row.memory_gib, rel=0.1)
    assert gpus.peak_flops(model.name, precision) is not None


def test_unknown_gpu_has_no_peak():
    assert gpus.find(UNKNOWN.name) is None
    assert gpus.peak_flops(UNKNOWN.name, "bf16") is None


def test_allocator_settings_of_user_are_kept(monkeypatch):
    # An earlier test of this process may have set the old variable.
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")

    def work(gpu):
        hardware.this_device()
        assert gpu.allocator_settings == "max_split_size_mb:128"

    run_on_gpu(A6000, work)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_cuda_graphs_are_refused_for_several_micro_batches(mode):
    def work(gpu):
        accelerator = make_accelerator(hardware.this_device(), keys.Machine(compile_mode=mode))
        check_cuda_graphs(1, accelerator)
        with pytest.raises(BadInput) as error:
            check_cuda_graphs(2, accelerator)
        message = str(error.value)
        assert f"compile_mode = {mode}" in message
        assert "2 micro-batches" in message
        assert "--compile_mode max-autotune-no-cudagraphs" in message

    run_on_gpu(A6000, work)


def test_modes_without_cuda_graphs_accept_several_micro_batches():
    def work(gpu):
        settings = keys.Machine(compile_mode="max-autotune-no-cudagraphs")
        check_cuda_graphs(2, make_accelerator(hardware.this_device(), settings))

    run_on_gpu(A6000, work)


# Memory


def test_proposed_micro_batch_fits_free_memory():
    recipe, _, _ = command_line.parse_training(["--recipe", str(GPT2_124M_RECIPE)])

    def work(gpu):
        accelerator = make_accelerator(hardware.this_device(), keys.Machine())

        def propose() -> int:
            free = hardware.free_memory_bytes(CUDA)
            return micro_batch.propose_micro_batch(recipe, free, accelerator)

        assert propose() == 26
        gpu.used_by_others = gpu.model.memory // 2
        assert propose() == 6

    run_on_gpu(RTX_3060, work)


def test_memory_trial_leaves_no_memory_allocated():
    def work(gpu):
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        before = gpu.allocated
        allocated_in_step = []

        def step():
            allocated_in_step.append(gpu.allocated)
            (layer.weight * layer.weight).sum().backward()

        failed = micro_batch.runs_out_of_memory(
            step, layer, micro_batches=2, reserved_bytes=64 * MIB, device=CUDA
        )

        assert not failed
        assert min(allocated_in_step) >= before + 64 * MIB
        assert gpu.allocated == before
        assert gpu.peak == before
        assert gpu.reserved == before

    run_on_gpu(A6000, work)


def test_memory_trial_is_limited_to_equal_memory():
    """The limit is the free memory of the fullest GPU."""

    def work(gpu):
        with micro_batch.equal_memory(MIB, CUDA), pytest.raises(torch.OutOfMemoryError):
            torch.zeros(MIB, device="cuda")
        # The limit does not apply after the block.
        torch.zeros(MIB, device="cuda")

    run_on_gpu(A6000, work)


def test_memory_metric_is_the_peak():
    def work(gpu):
        torch.zeros(MIB, device="cuda")  # freed immediately
        assert gpu.allocated == 0
        expected = gpu.peak / gpu.model.memory
        assert expected > 0
        assert hardware.gpu_metrics(CUDA)["gpu/memory"] == expected

    run_on_gpu(A6000, work)


# Data types and kernels


@pytest.mark.parametrize(
    ("model", "precision", "kernel"),
    [(H200, "bf16", "cudnn"), (A6000, "bf16", "flash"), (H200, "no", "efficient")],
)
def test_attention_kernel_depends_on_gpu_and_precision(model, precision, kernel):
    recipe = keys.replace(loading.load_recipe(GPT2_124M_RECIPE), sequence_length=16)
    plan = types.SimpleNamespace(per_device_train_batch_size=1)

    def work(gpu):
        accelerator = make_accelerator(hardware.this_device(), keys.Machine(), precision=precision)
        assert setup.attention_kernel(recipe, plan, accelerator) == kernel

    run_on_gpu(model, work)


@pytest.mark.parametrize(
    ("document_mask", "compiled", "kernel"),
    [(False, True, "flash"), (True, True, "flex"), (True, False, "efficient")],
)
def test_compiled_document_mask_uses_flex_attention(document_mask, compiled, kernel):
    wide_model = keys.Model(**SHAPE | {"n_embd": 64})
    options = {"document_mask": document_mask, "compiled": compiled}

    def work(gpu):
        assert find_kernel(wide_model, 2, CUDA, torch.bfloat16, **options) == kernel

    run_on_gpu(A6000, work)


def test_gpu_computes_all_logits_together():
    """A CPU would compute 2**20 / 8192 = 128 of the 600 rows at a time."""

    def work(gpu):
        module = build_gpt2_loss(vocab_size=8192, sequence_length=600)
        ids = zero_ids(1, 600)
        module(ids, ids)
        calls = gpu.watched["_log_softmax float32", "loss.NextTokenLoss._losses_of_logits"]
        assert calls == 1

    run_on_gpu(A6000, work)


def test_chunked_loss_is_computed_in_fp32():
    def work(gpu):
        module = build_gpt2_loss()
        module.rows = 8
        ids = zero_ids(2, 16)
        with torch.autocast("cuda", torch.bfloat16):
            module(ids, ids)
        place = "loss._ChunkedLoss.forward"
        assert recorded_at(gpu.watched, place) == {"exp_ float32"}
        assert recorded_at(gpu.products, place) == {"bfloat16"}

    run_on_gpu(A6000, work)


def test_muon_norm_is_computed_in_fp32():
    def work(gpu):
        orthogonalize(torch.ones(1, 8, 8, dtype=torch.float16, device="cuda"))
        place = "muon.orthogonalize"
        assert recorded_at(gpu.watched, place) == {"linalg_vector_norm float32"}
        assert recorded_at(gpu.products, place) == {"float16"}

    run_on_gpu(A6000, work)


@pytest.mark.parametrize(("model", "dtype"), [(A6000, "bfloat16"), (T4, "float16")])
def test_gpu_hot_multiplies_in_supported_half_precision(monkeypatch, capfd, model, dtype):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import gpu_hot

    def work(gpu):
        times = iter([0.0, 1.0, 3.0, 4.0])
        gpu_hot.SIZE = 8
        gpu_hot.ROUND = 5
        gpu_hot.time = types.SimpleNamespace(perf_counter=lambda: next(times))
        assert gpu_hot.main(2) == 0
        products = {what: count for (what, _), count in gpu.products.items()}
        assert products == {dtype: 5}

    run_on_gpu(model, work)
    assert capfd.readouterr().out.startswith(f"cuda:0 {model.name}  ")


# Evaluation


def test_scoring_halves_batch_when_memory_runs_out():
    questions = [([1, 2, 3 + number % 5], [[4], [5, 6]]) for number in range(80)]
    batch_sizes = []

    def progress(batch):
        batch_sizes.append(len(batch))

    def work(gpu):
        score = functools.partial(
            likelihood.log_likelihoods,
            build_gpt2_loss().model,
            questions,
            context_length=16,
            progress=progress,
        )
        expected = score()
        assert batch_sizes == [40, 40]
        assert gpu.cache_clears == 0
        batch_sizes.clear()

        gpu.model = dataclasses.replace(gpu.model, most_sequences=32)
        scores = score()
        assert batch_sizes == [27, 27, 26]
        assert gpu.cache_clears == 1
        for answer, reference in zip(scores, expected, strict=True):
            assert numpy.allclose(answer.nats, reference.nats, atol=1e-5)

    run_on_gpu(A6000, work)


class Words:
    """A tokenizer of 64 words."""

    eos_token_id = 0
    all_special_ids = (0,)

    def __len__(self) -> int:
        return 64


def test_sampling_does_not_change_gpu_generator():
    settings = sampling.Sampling(max_new_tokens=4, temperature=1.0, top_k=0, top_p=1.0, seed=3)

    def work(gpu):
        model = build_gpt2_loss().model
        before = gpu.generator.get_state()
        sample = sampling.sample(model, [1, 2], Words(), settings)
        assert len(sample) <= 4
        assert torch.equal(gpu.generator.get_state(), before)

    run_on_gpu(A6000, work)


@pytest.fixture
def reward_model(tmp_path) -> str:
    """The folder of a tiny reward model with its tokenizer."""
    tokenizer = tokenization.make_characters(["ab"])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=8,
        n_layer=1,
        n_head=1,
        n_embd=8,
        num_labels=1,
        pad_token_id=tokenizer.eos_token_id,
    )
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_reward_model_runs_on_gpu(reward_model):
    def work(gpu):
        reward = rewards.ModelReward(reward_model, None)
        assert len(reward(["a", "b"], ["b", "ab"])) == 2
        # Nothing else in this process multiplies matrices.
        assert gpu.products

    run_on_gpu(A6000, work)


def remove_float64_support() -> None:
    """Make the simulated GPU reject float64, as Apple's GPUs do."""
    real_new = CudaTensor.__new__

    def new(cls, host):
        if host.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework "
                "doesn't support float64"
            )
        return real_new(cls, host)

    CudaTensor.__new__ = staticmethod(new)
    hardware.NO_FLOAT64 = ("cuda",)


@pytest.mark.parametrize("num_endings", [1, 2])
def test_sums_need_no_float64_on_gpu(num_endings):
    ids = torch.arange(32).reshape(2, 16) % 64
    question = ([1, 2, 3], [[4, 5], [6]][:num_endings])

    def compute_scores(module: NextTokenLoss) -> list[float]:
        losses = validation_loss(
            module, [(ids, ids)], device=CUDA, bytes_per_token=numpy.arange(64)
        )
        (answer,) = likelihood.log_likelihoods(module.model, [question], context_length=16)
        return [*losses.values(), *answer.nats]

    def work(gpu):
        module = build_gpt2_loss()
        expected = compute_scores(module)
        remove_float64_support()
        with pytest.raises(TypeError):
            torch.zeros(1, dtype=torch.float64, device=CUDA)
        assert compute_scores(module) == pytest.approx(expected, rel=1e-12)

    run_on_gpu(A6000, work)
