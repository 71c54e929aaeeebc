"""Estimates of parameters, FLOPs, memory and speed, compared with real models and measurements."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import check_setup
from benchmarks import estimate_cards, memory_card
from ursa_minor.base import gpus
from ursa_minor.model import build
from ursa_minor.model.loss import GPU_ROWS
from ursa_minor.preflight import estimate, run_estimate
from ursa_minor.recipe import keys, loading

RESULTS = ROOT / "benchmarks" / "results"
CARDS_PAGE = ROOT / "docs" / "cards.md"
GPT2 = estimate.GPT2_124M
GPT2_1558M = estimate.Shape(48, 1600, 50304, 1024)
LLAMA = estimate.Shape(
    12,
    768,
    50304,
    1024,
    architecture="llama",
    n_head=12,
    num_key_value_heads=4,
    intermediate_size=2048,
)
UNTIED_LLAMA = estimate.Shape(
    2,
    128,
    1024,
    1024,
    architecture="llama",
    n_head=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
COMPILED_BF16 = {"half": True, "compiled": True}
# Accelerate configurations that are not for one GPU model.
GENERAL_CONFIGS = {
    "cpu",
    "mps",
    "conservative",
    "zero1_x8",
    "zero2_x8",
    "zero3_x8",
    "fsdp2_x8",
    "multi_node_2x8",
}


# Parameters and FLOPs


def test_gpt2_124m_has_published_size():
    shape = estimate.Shape(12, 768, 50257, 1024)

    assert shape.parameters == 124_439_808
    assert shape.flops_per_token == pytest.approx(855e6, abs=1e6)


def test_padded_vocabulary_counts_as_parameters():
    assert GPT2.parameters == 124_475_904


def test_estimate_assumes_rows_of_the_loss():
    assert estimate.LOSS_ROWS == GPU_ROWS


def stock_model(shape: estimate.Shape) -> torch.nn.Module:
    """Build a model of Transformers with this shape on the meta device."""
    options = {
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head or 12,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.sequence_length,
        "use_cache": False,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attn_implementation": "eager",
    }
    if shape.architecture == "gpt2":
        model_class = GPT2LMHeadModel
        config = GPT2Config(**options)
    else:
        model_class = LlamaForCausalLM
        config = LlamaConfig(
            **options,
            num_key_value_heads=shape.num_key_value_heads,
            intermediate_size=shape.intermediate_size or 4 * shape.n_embd,
        )
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.parametrize(
    "shape", [GPT2, LLAMA, UNTIED_LLAMA], ids=["gpt2", "llama", "untied_llama"]
)
def test_parameters_and_flops_equal_pytorchs_count(shape):
    length = shape.sequence_length
    model = stock_model(shape)
    mask = torch.zeros(1, 1, length, length, device="meta")
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")

    with FlopCounterMode(display=False) as counter:
        logits = model(ids, attention_mask=mask, position_ids=ids).logits
        logits.sum().backward()

    assert shape.parameters == model.num_parameters()
    expected = counter.get_total_flops()
    assert shape.flops_per_token * length == pytest.approx(expected, rel=0.02)


# The page about GPUs


@pytest.mark.slow
def test_pages_contain_current_estimates():
    pages = estimate_cards.pages()

    names = {path.name for path in pages}
    assert names >= {
        "README.md",
        "cards.md",
        "run_gpt2_124m.sh",
        "rtx5090.yaml",
        "a100_x8.yaml",
    }
    outdated = [path.name for path, text in pages.items() if path.read_text() != text]
    assert outdated == []


def test_page_lists_every_gpu_configuration():
    page = CARDS_PAGE.read_text()
    configs = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    single_gpu_configs = {name for name in configs - GENERAL_CONFIGS if "_x" not in name}

    rows = re.findall(r"\| `(\w+)\.yaml` \| \d+, [\d,]+, \d+% \| .*? \|", page)

    assert set(rows) == single_gpu_configs


def test_expected_speed_is_one_line():
    assert run_estimate.expectation(gpus.find("h100")) == (
        "GPT-2 124M on one GPU: tokens/s 440,000 estimated, 466,000 measured by others, "
        "525,000 measured by us; MFU good from 34%, excellent from 45%"
    )


def test_expected_speed_includes_usual_micro_batch():
    text = run_estimate.expectation(gpus.find("a6000"))

    assert text.endswith("excellent from 52%; usual micro-batch: 32")


def test_budget_table_of_page_equals_plan(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = CARDS_PAGE.read_text()
    (flags,) = re.findall(r"^    python check_setup.py (--plan .*--budget .*)$", page, re.M)

    status = check_setup.main([*flags.split(), "--json"])

    assert status == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    for path, plan in plans.items():
        (row,) = re.findall(rf"^\| `{Path(path).name}` \| .* \|$", page, re.M)
        if plan is None:
            assert "does not fit" in row
        else:
            assert f" {plan['updates']:,} " in row
            assert f"{plan['expected_loss']:.2f}" in row


# Speed


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("shape", [GPT2, LLAMA, GPT2_1558M], ids=["gpt2", "llama", "gpt2_1558m"])
def test_estimated_speed_is_below_peak(shape, count):
    for card in gpus.GPUS:
        result = estimate.speed_and_energy(
            shape, card, tokens=10**9, tokens_per_step=2**19, count=count
        )

        flops = result["tokens_per_second"] * estimate.computed_flops(shape)
        peak = 1e12 * card.product_teraflops * count
        assert 0 < flops < peak, card.name
        assert 0 < result["mfu"] < 1, card.name


@pytest.fixture(scope="module")
def speed_results() -> dict:
    """The stored comparison of estimated and measured speeds."""
    path = RESULTS / "estimate-cards-2026-11-22.json"
    return json.loads(path.read_text())


def test_speed_constants_are_the_fit():
    _, product_limit, bandwidth_share = 1 / estimate_cards.fit(estimate_cards.FITTED)

    assert float(f"{1e15 * product_limit:.2e}") == estimate.PRODUCT_LIMIT
    assert round(bandwidth_share, 2) == estimate.BANDWIDTH_SHARE


def test_stored_speed_ratios_equal_current_estimates(speed_results):
    for row in speed_results["cards"]:
        ratio = estimate_cards.speed(gpus.find(row["card"])) / row["measured"]
        assert ratio == pytest.approx(row["ratio"], abs=1e-3), row["card"]


def test_speed_is_within_tenth_for_most_gpus(speed_results):
    """Of 20 GPUs measured with the same script, 6 differ by more than a tenth."""
    rows = [row for row in speed_results["cards"] if "left_out_ratio" in row]
    _, _, text = CARDS_PAGE.read_text().partition("Estimated divided by measured speed")
    text, _, _ = text.partition("our own H100")

    inexact = {row["card"]: row["ratio"] for row in rows if abs(row["ratio"] - 1) > 0.1}

    assert len(rows) == 20
    assert {row["measured_source"] for row in rows} == {gpus.SCRIPT}
    assert set(inexact) == {"h100_nvl", "rtx6000ada", "rtxpro6000", "rtx4000ada", "l4", "l40"}
    for ratio in inexact.values():
        assert f"{ratio:.2f}" in text


@pytest.mark.parametrize(("name", "llm_c_speed"), [("h100", 468_000), ("a100", 218_000)])
def test_speed_is_within_tenth_of_llm_c(name, llm_c_speed):
    assert estimate_cards.speed(gpus.find(name)) == pytest.approx(llm_c_speed, rel=0.1)


def test_speed_without_flash_attention_equals_measurement(speed_results):
    measured = speed_results["languini_measured_over_estimated"]["v100"]

    assert measured == pytest.approx(estimate.WITHOUT_FLASH, abs=0.01)


def test_more_gpus_need_less_time_but_more_energy():
    card = gpus.find("a6000")
    options = {"tokens": 10**10, "tokens_per_step": 2**19}

    one = estimate.speed_and_energy(GPT2, card, **options, count=1)
    eight = estimate.speed_and_energy(GPT2, card, **options, count=8)

    assert one["hours"] / 8 < eight["hours"] < one["hours"]
    assert one["kilowatt_hours"] == pytest.approx(0.3 * one["hours"])
    assert eight["kilowatt_hours"] > one["kilowatt_hours"]


# Memory


def total_memory(shape: estimate.Shape = GPT2, **options) -> float:
    """Return the estimated memory of a run in bytes, all parts together."""
    return sum(estimate.memory(shape, **options).values())


def test_sharded_state_needs_its_part_of_memory():
    options = {"micro_batch": 8, "half": True, "compiled": False}
    state = ("weights", "gradients", "moments")

    unsharded = total_memory(shards=dict.fromkeys(state, 1), **options)
    sharded = total_memory(shards=dict.fromkeys(state, 8), **options)

    saved = 16 * GPT2.parameters * 7 / 8
    assert sharded == pytest.approx(unsharded - saved)


def test_compiled_backward_needs_second_set_of_gradients():
    """The second set exists at the end, when a large batch has freed its activations."""
    options = COMPILED_BF16 | {"checkpointing": "full"}

    small = estimate.memory(GPT2, micro_batch=1, **options)["fresh gradients"]
    large = estimate.memory(GPT2, micro_batch=64, **options)["fresh gradients"]

    assert 0 < small < 4 * GPT2.parameters
    assert large == 0


def test_memory_estimate_is_close_to_allocator():
    """Nine of ten cases are within 5 percent."""
    (path,) = RESULTS.glob("memory-null-card-*.json")
    rows = json.loads(path.read_text())["rows"]
    rows = [row for row in rows if "problem" not in row]

    ratios = [memory_card.estimated(row) / row["allocated"] for row in rows]

    close = [ratio for ratio in ratios if abs(ratio - 1) <= 0.05]
    assert len(ratios) * 0.9 > 40
    assert len(close) >= 0.9 * len(ratios)
    assert min(ratios) > 0.93
    assert max(ratios) < 1.07


def two_gpu_rows() -> list[dict]:
    """Return the stored measurements on two GPUs without FSDP."""
    (path,) = RESULTS.glob("several-cards-*.json")
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["yaml"] != "fsdp2_x8" and row["cards"] == 2]


def test_ddp_buckets_need_second_set_of_gradients():
    rows = two_gpu_rows()

    assert len(rows) == 6
    for row in rows:
        options = dict(row["changes"])
        shards = estimate.IN_BUCKETS
        if options.pop("shard_optimizer", False):
            shards = shards | {"moments": 2}
        parts = estimate.memory(
            GPT2,
            micro_batch=16,
            checkpointing=row["checkpointing"],
            shards=shards,
            **COMPILED_BF16,
            **options,
        )
        total = sum(parts.values()) - parts["context"]
        assert total == pytest.approx(row["allocated"], rel=0.05)


def test_run_on_several_gpus_includes_ddp_buckets():
    recipe = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
    card = gpus.find("a6000")

    one = run_estimate.estimate_run(recipe, card, 1, 0.0)["memory_bytes"]
    eight = run_estimate.estimate_run(recipe, card, 8, 0.0)["memory_bytes"]

    assert eight["gradients"] == 2 * one["gradients"]


def test_largest_micro_batch_just_fits():
    limit = 24 * 2**30

    size = estimate.largest_micro_batch(GPT2, limit, most_tokens=512 * 1024, **COMPILED_BF16)

    available = estimate.HEADROOM * limit
    assert total_memory(micro_batch=size, **COMPILED_BF16) <= available
    assert total_memory(micro_batch=size + 1, **COMPILED_BF16) > available


def test_largest_micro_batch_is_zero_if_none_fits():
    assert estimate.largest_micro_batch(GPT2, 2 * 2**30, **COMPILED_BF16) == 0


def test_muon_and_8_bit_moments_save_memory():
    def moments(optimizer: str) -> float:
        parts = estimate.memory(GPT2, micro_batch=8, optimizer=optimizer, **COMPILED_BF16)
        return parts["moments"]

    hidden_parameters = 12 * 12 * 768 * 768
    assert moments("adamw") - moments("muon") == 4 * hidden_parameters
    assert moments("adamw") - moments("adamw_8bit") > 5.9 * GPT2.parameters


def saved_bytes(shape: estimate.Shape, checkpointing: str, half: bool) -> int:
    """Return the bytes that a forward pass saves for the backward pass, except the weights.

    Copies of the first block's matrices in half precision do not count either.
    """
    recipe = keys.Model(**vars(shape), **NO_DROPOUT, seed=1, gradient_checkpointing=checkpointing)
    model = build.build(recipe, eos_token_id=0).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copy_sizes = set()
    for name, weight in model.named_parameters():
        if half and ".0." in name and weight.ndim > 1:
            copy_sizes.add(2 * weight.numel())
    # The storages are kept, so that no address is used twice.
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() not in copy_sizes:
            storages[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.base_model(torch.zeros(1, shape.sequence_length, dtype=torch.int64))
    return sum(storage.nbytes() for storage in storages.values())


def shape_with_layers(n_layer: int, architecture: str) -> estimate.Shape:
    """Return a small shape, with grouped attention where the architecture has it."""
    options = {}
    if keys.ARCHITECTURE_KEYS[architecture]:
        options = {"num_key_value_heads": 2, "intermediate_size": 320}
    return estimate.Shape(n_layer, 128, 512, 100, architecture, n_head=4, **options)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "mlp", "full"])
@pytest.mark.parametrize("architecture", keys.ARCHITECTURE_KEYS)
def test_estimated_activations_equal_saved_tensors(architecture, checkpointing, half):
    one = shape_with_layers(1, architecture)
    two = shape_with_layers(2, architecture)
    block, recomputed = one.definition.saved_activation_bytes(
        one, half=half, compiled=False, half_stream=False
    )
    estimates = {"none": block, "mlp": block - recomputed, "full": 4 * one.n_embd}

    difference = saved_bytes(two, checkpointing, half) - saved_bytes(one, checkpointing, half)

    bytes_per_token = difference / one.sequence_length
    assert bytes_per_token == pytest.approx(estimates[checkpointing], rel=0.02)
