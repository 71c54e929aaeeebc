"""Estimates: sizes are the model's own, memory grows as it must, and no speed is above a card's peak."""

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

GPT2 = estimate.GPT2_124M
GROUPED = {
    "architecture": "llama",
    "n_head": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}
LLAMA = estimate.Shape(12, 768, 50304, 1024, **GROUPED)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
UNTIED = {
    "architecture": "llama",
    "n_head": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama_untied": estimate.Shape(2, 128, 1024, 1024, **UNTIED),
}
NO_CARD = {
    "cpu",
    "mps",
    "conservative",
    "zero1_x8",
    "zero2_x8",
    "zero3_x8",
    "fsdp2_x8",
    "multi_node_2x8",
}
PRESETS = [p for p in sorted((ROOT / "accelerate_configs").glob("*.yaml")) if p.stem not in NO_CARD]
HOW = {"half": True, "compiled": True}


def test_gpt2_124m_costs_what_is_published_and_its_logits_are_those_that_the_model_makes():
    shape = estimate.Shape(12, 768, 50257, 1024)
    assert (shape.parameters, GPT2.parameters) == (124_439_808, 124_475_904)
    assert shape.flops_per_token / 1e6 == pytest.approx(855, abs=1)
    assert estimate.LOSS_ROWS == GPU_ROWS


def stock(shape: estimate.Shape) -> torch.nn.Module:
    """A model of Transformers of this size, without memory for its weights."""
    about = {
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head or 12,
    }
    about |= {
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.sequence_length,
        "use_cache": False,
    }
    about |= {"tie_word_embeddings": shape.tie_word_embeddings, "attn_implementation": "eager"}
    with torch.device("meta"):
        if shape.architecture == "gpt2":
            return GPT2LMHeadModel(GPT2Config(**about))
        inner = shape.intermediate_size or 4 * shape.n_embd
        return LlamaForCausalLM(
            LlamaConfig(
                **about, num_key_value_heads=shape.num_key_value_heads, intermediate_size=inner
            )
        )


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_flops_are_those_that_pytorch_counts_in_forward_and_backward(shape):
    """And parameters those of Transformers' own models."""
    model, T = stock(shape), shape.sequence_length
    assert shape.parameters == model.num_parameters()
    mask, ids_BT = (
        torch.zeros(1, 1, T, T, device="meta"),
        torch.zeros(1, T, dtype=torch.int64, device="meta"),
    )
    with FlopCounterMode(display=False) as counter:
        model(ids_BT, attention_mask=mask, position_ids=ids_BT).logits.sum().backward()
    assert shape.flops_per_token * T == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.slow
def test_pages_that_give_figures_of_cards_are_as_the_code_would_write_them():
    pages = estimate_cards.pages()
    names = {"README.md", "cards.md", "run_gpt2_124m.sh", "rtx5090.yaml", "a100_x8.yaml"}
    assert {path.name for path in pages} >= names
    assert not [path.name for path, text in pages.items() if path.read_text() != text]
    rows = re.findall(
        r"\| `(\w+)\.yaml` \| \d+, [\d,]+, \d+% \| .*? \|", pages[ROOT / "docs/cards.md"]
    )
    assert {*rows} == {path.stem for path in PRESETS if "_x" not in path.stem}


def test_what_to_expect_of_a_card_stands_in_a_line():
    assert run_estimate.expectation(gpus.find("h100")) == (
        "GPT-2 124M on one GPU: tokens/s 440,000 estimated, 466,000 measured by others, "
        "525,000 measured by us; MFU good from 34%, excellent from 45%"
    )
    assert run_estimate.expectation(gpus.find("a6000")).endswith(
        "excellent from 52%; usual micro-batch: 32"
    )


def test_budget_table_of_the_page_is_the_plan(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/cards.md").read_text()
    (command,) = re.findall(
        r"^    python check_setup.py (--plan .*--budget .*)$", page, re.MULTILINE
    )
    words = [*command.split(), "--json", "--reader_tokens_per_second", "1e9"]
    assert check_setup.main(words) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    for path, plan in plans.items():
        (line,) = re.findall(rf"^\| `{Path(path).name}` \| .* \|$", page, re.MULTILINE)
        if plan is None:
            assert "does not fit" in line
            continue
        assert f" {plan['updates']:,} " in line
        assert f"{plan['expected_loss']:.2f}" in line


def test_no_card_is_estimated_faster_than_its_peak():
    for card in gpus.GPUS:
        for shape in (GPT2, LLAMA, estimate.Shape(48, 1600, 50304, 1024)):
            for count in (1, 8):
                done = estimate.speed_and_energy(
                    shape, card, tokens=10**9, tokens_per_step=2**19, count=count
                )
                products = done["tokens_per_second"] * estimate.computed_flops(shape)
                assert 0 < products < 1e12 * card.product_teraflops * count and 0 < done["mfu"] < 1


def test_the_estimate_is_the_fit_to_all_cards_of_one_script_and_within_a_tenth_for_fourteen_of_twenty():
    _, limit, share = 1 / estimate_cards.fit(estimate_cards.FITTED)
    assert (float(f"{1e15 * limit:.2e}"), round(share, 2)) == (
        estimate.PRODUCT_LIMIT,
        estimate.BANDWIDTH_SHARE,
    )
    kept = json.loads((ROOT / "benchmarks/results/estimate-cards-2026-11-22.json").read_text())
    for row in kept["cards"]:
        assert estimate_cards.speed(gpus.find(row["card"])) / row["measured"] == pytest.approx(
            row["ratio"], abs=1e-3
        )
    rows = [row for row in kept["cards"] if "left_out_ratio" in row]
    assert len(rows) == 20 and {row["measured_source"] for row in rows} == {gpus.SCRIPT}
    far = {row["card"]: f"{row['ratio']:.2f}" for row in rows if abs(row["ratio"] - 1) > 0.1}
    assert far.keys() == {"h100_nvl", "rtx6000ada", "rtxpro6000", "rtx4000ada", "l4", "l40"}
    told = (
        (ROOT / "docs/cards.md")
        .read_text()
        .partition("Estimated divided by measured speed")[2]
        .partition("our own H100")[0]
    )
    assert all(ratio in told for ratio in far.values())
    for name, llm_c in (("h100", 468_000), ("a100", 218_000)):
        assert estimate_cards.speed(gpus.find(name)) == pytest.approx(llm_c, rel=0.1)
    assert kept["languini_measured_over_estimated"]["v100"] == pytest.approx(
        estimate.WITHOUT_FLASH, abs=0.01
    )


def test_shards_take_their_part_and_a_compiled_backward_pass_holds_two_sets_of_gradients_at_its_end():
    def total(**how):
        return sum(estimate.memory(GPT2, micro_batch=8, half=True, compiled=False, **how).values())

    state = frozenset({"weights", "gradients", "moments"})
    sharded, whole = (total(shards=dict.fromkeys(state, count)) for count in (8, 1))
    assert sharded == pytest.approx(whole - 16 * GPT2.parameters * 7 / 8)
    fresh = [
        estimate.memory(GPT2, micro_batch=n, checkpointing="full", **HOW)["fresh gradients"]
        for n in (1, 64)
    ]
    assert 0 < fresh[0] < 4 * GPT2.parameters and fresh[1] == 0


def test_memory_is_within_5_percent_of_a_cards_allocator_in_nine_of_ten_cases():
    (path,) = (ROOT / "benchmarks" / "results").glob("memory-null-card-*.json")
    rows = [row for row in json.loads(path.read_text())["rows"] if "problem" not in row]
    ratios = [memory_card.estimated(row) / row["allocated"] for row in rows]
    assert sum(abs(ratio - 1) <= 0.05 for ratio in ratios) >= 0.9 * len(ratios) > 40
    assert min(ratios) > 0.93 and max(ratios) < 1.07


def test_ddps_buckets_are_a_set_of_gradients_more_as_counted_on_several_cards():
    (path,) = (ROOT / "benchmarks" / "results").glob("several-cards-*.json")
    rows = [
        row
        for row in json.loads(path.read_text())["rows"]
        if row["yaml"] != "fsdp2_x8" and row["cards"] == 2
    ]
    for row in rows:
        changes = dict(row["changes"])
        shards = (
            estimate.IN_BUCKETS | {"moments": 2}
            if changes.pop("shard_optimizer", False)
            else estimate.IN_BUCKETS
        )
        how = changes | {"checkpointing": row["checkpointing"], "shards": shards}
        parts = estimate.memory(GPT2, micro_batch=16, half=True, compiled=True, **how)
        assert sum(parts.values()) - parts["context"] == pytest.approx(row["allocated"], rel=0.05)
    assert len(rows) == 6


def test_the_largest_micro_batch_fits_and_one_more_would_not():
    size = estimate.largest_micro_batch(GPT2, 24 * 2**30, most_tokens=512 * 1024, **HOW)
    taken = [sum(estimate.memory(GPT2, micro_batch=n, **HOW).values()) for n in (size, size + 1)]
    assert taken[0] <= estimate.HEADROOM * 24 * 2**30 < taken[1]
    assert estimate.largest_micro_batch(GPT2, 2 * 2**30, **HOW) == 0


def test_memory_knows_what_muon_and_8_bits_save():
    adamw, muon, eight = (
        estimate.memory(GPT2, micro_batch=8, optimizer=name, **HOW)["moments"]
        for name in ("adamw", "muon", "adamw_8bit")
    )
    assert adamw - muon == 4 * 12 * 12 * 768 * 768 and adamw - eight > 5.9 * GPT2.parameters


def test_more_cards_take_less_time_but_not_less_energy():
    about = {"tokens": 10**10, "tokens_per_step": 2**19}
    one, eight = (
        estimate.speed_and_energy(GPT2, gpus.find("a6000"), **about, count=count)
        for count in (1, 8)
    )
    assert one["hours"] / 8 < eight["hours"] < one["hours"]
    assert eight["kilowatt_hours"] > one["kilowatt_hours"] == pytest.approx(0.3 * one["hours"])
    recipe = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
    held = [
        run_estimate.estimate_run(recipe, gpus.find("a6000"), count, 0.0)["memory_bytes"]
        for count in (1, 8)
    ]
    assert held[1]["gradients"] == 2 * held[0]["gradients"]


def held_after_forward(shape: estimate.Shape, checkpointing: str, half: bool) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the weights and their copies."""
    asked = keys.Model(**vars(shape), **NO_DROPOUT, seed=1, gradient_checkpointing=checkpointing)
    model = build.build(asked, eos_token_id=0).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copies = {
        2 * weight.numel()
        for name, weight in model.named_parameters()
        if ".0." in name and weight.ndim > 1
    }
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not (half and storage.nbytes() in copies):
            held[storage.data_ptr()] = storage
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.base_model(torch.zeros(1, shape.sequence_length, dtype=torch.int64))
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "mlp", "full"])
@pytest.mark.parametrize("architecture", keys.ARCHITECTURE_KEYS)
def test_a_block_keeps_what_the_real_one_does(architecture, checkpointing, half):
    grouped = (
        {"num_key_value_heads": 2, "intermediate_size": 320}
        if keys.ARCHITECTURE_KEYS[architecture]
        else {}
    )
    one, two = (estimate.Shape(n, 128, 512, 100, architecture, n_head=4, **grouped) for n in (1, 2))
    block, again = one.definition.saved_activation_bytes(
        one, half=half, compiled=False, half_stream=False
    )
    said = {"none": block, "mlp": block - again, "full": 4 * one.n_embd}[checkpointing]
    held = held_after_forward(two, checkpointing, half) - held_after_forward(
        one, checkpointing, half
    )
    assert held / one.sequence_length == pytest.approx(said, rel=0.02)
