"""What is known of cards."""

import subprocess

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT

from pretrain import cards

# What is left is for any card: cpu, mps, conservative, sharded, several machines.
CARD_PRESETS = [
    path for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")) if cards.named(path.stem.partition("_x")[0])
]


@pytest.mark.parametrize(
    "driver, name",
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_card_is_found_by_the_drivers_name(driver, name):
    assert cards.find(driver).name == name == cards.named(name).name


@pytest.mark.parametrize(
    "driver",
    ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 NVL"]
    + ["NVIDIA RTX A1000", "NVIDIA A10", "NVIDIA L40", "AMD Instinct MI300X", "Some Card 9000", ""],
)
def test_a_name_that_only_begins_alike_is_no_known_card(driver):
    assert cards.find(driver) is None


def test_each_card_has_one_name_and_is_found_by_no_other_pattern():
    assert len({card.name for card in cards.CARDS}) == len(cards.CARDS)
    assert all(card.source and card.teraflops > 0 and card.watts > 0 for card in cards.CARDS)


def test_bf16_and_tf32_come_with_ampere():
    old = {card.name for card in cards.CARDS if card.precision == "fp16"}
    assert old == {"t4", "v100"} == {card.name for card in cards.CARDS if not card.has_tf32}


def test_the_peak_is_the_named_cards_with_tensor_cores_only():
    assert cards.peak_flops("NVIDIA RTX A6000", "bf16") == cards.peak_flops("NVIDIA RTX A6000", "fp16") == 154.8e12
    assert cards.peak_flops("NVIDIA RTX A6000", "no") is None and cards.peak_flops("CPU (x)", "bf16") is None


@pytest.mark.parametrize("card", CARD_PRESETS, ids=lambda path: path.stem)
def test_a_preset_asks_for_what_its_card_can(card):
    name, _, count = card.stem.partition("_x")
    known, text = cards.named(name), card.read_text()
    loaded = load_config_from_file(str(card))
    assert loaded.mixed_precision == known.precision and loaded.num_processes == int(count or 1)
    assert loaded.distributed_type.value == ("MULTI_GPU" if count else "NO")
    assert f"({known.memory_gib:g} GB" in text and "not measured" in text
    assert f"micro-batch {known.micro_batch}" in text if known.micro_batch else "micro-batch" in text
    assert 4 <= len(text.splitlines()) <= 11


def test_there_is_a_preset_for_each_card_of_the_table_but_the_slower_twin():
    assert {path.stem for path in CARD_PRESETS if "_x" not in path.stem} == {c.name for c in cards.CARDS} - {
        "h100_pcie"
    }


@pytest.mark.parametrize(
    "driver, preset",
    [
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Quadro P4000", "conservative"),
        ("NVIDIA GeForce GTX 1080 Ti", "conservative"),
        ("", "cpu"),
    ],
)
def test_make_train_chooses_the_cards_preset(driver, preset):
    command = ["make", "-n", "-C", str(ROOT), "train", f"CARD={driver}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"--config_file accelerate_configs/{preset}.yaml" in done.stdout


@pytest.mark.parametrize(
    "driver, count, stem",
    [
        ("NVIDIA GeForce RTX 4090", 1, "rtx4090"),
        ("NVIDIA GeForce RTX 4090", 2, "rtx4090_x2"),
        ("NVIDIA GeForce RTX 4090", 3, "rtx4090"),
        ("NVIDIA H100 PCIe", 1, "h100"),
        ("NVIDIA H100 PCIe", 8, "h100_x8"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 1, "conservative"),
        ("NVIDIA GeForce RTX 3090 Ti", 2, "conservative"),
        (" ", 8, "cpu"),
    ],
)
def test_a_preset_is_the_cards_own_for_so_many_of_them(driver, count, stem):
    assert cards.preset(driver, count) == stem and (cards.PRESETS / f"{stem}.yaml").is_file()


def test_each_preset_of_a_card_is_what_its_driver_s_name_leads_to():
    for card in cards.CARDS:
        assert cards.preset_of(card) in (card.name, card.name.partition("_")[0])


def test_only_cards_with_nvlink_have_a_faster_link_than_pcie():
    assert {card.name for card in cards.CARDS if card.link_gigabytes_per_second > 20} == {"a100", "h100", "h200"}


@pytest.mark.parametrize(
    "driver, number, words",
    [
        ("NVIDIA RTX A6000", 4, "--config_file accelerate_configs/a6000_x4.yaml  train.py"),
        ("NVIDIA RTX A6000", 3, "--config_file accelerate_configs/a6000.yaml --multi_gpu --num_processes 3 train.py"),
        ("NVIDIA RTX A6000", 1, "--config_file accelerate_configs/a6000.yaml  train.py"),
        ("Some Card", 2, "--config_file accelerate_configs/conservative.yaml --multi_gpu --num_processes 2 train.py"),
        ("", 2, "ACCELERATE_USE_CPU=true .venv/bin/torchrun --nproc_per_node 2 train.py"),
    ],
)
def test_make_ddp_train_launches_so_many_processes(driver, number, words):
    command = ["make", "-n", "-C", str(ROOT), "ddp-train", f"CARD={driver}", f"NGPUS={number}", "FLAGS=--max_steps 3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert words in done.stdout and "--recipe recipes/quickstart.yaml --max_steps 3" in done.stdout
