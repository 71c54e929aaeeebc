"""What is known of cards."""

import re
import shlex
import statistics
import subprocess

from conftest import ROOT

from benchmarks.estimate_cards import TRAINING_SOURCES
from ursa_minor.base import gpus

KNOWN = {
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3090 Ti": "rtx3090ti",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100_pcie",
    "NVIDIA A100-PCIE-40GB": "a100_pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "rtx_a6000": "a6000",
    "A100-SXM4-40GB": "a100_40gb",
    "a100 80gb": "a100",
    "4090": "rtx4090",
    "h100 pcie": "h100_pcie",
}
UNKNOWN = [
    "4070",
    "gh200",
    "30",
    "",
    "NVIDIA GeForce RTX 3080 Ti",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A10",
]
UNKNOWN += [
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
]


def test_a_card_is_found_by_the_drivers_name_and_one_that_only_begins_alike_is_another():
    assert {name: gpus.find(name).name for name in KNOWN} == KNOWN
    assert all(gpus.find(card.name) is card for card in gpus.GPUS) and not any(
        map(gpus.find, UNKNOWN)
    )


def test_an_unknown_card_is_answered_with_its_own_series_and_without_one_with_all():
    nearest = {
        "rtx_a4600": ["a6000", "a4500", "a4000", "a40"],
        "4070": ["rtx4090", "rtx4080", "rtx4060", "rtx4060ti"],
    }
    assert {name: gpus.similar_gpus(name) for name in nearest} == nearest
    assert gpus.similar_gpus("h800")[0] in ("h100", "h200") and gpus.similar_gpus("2080ti") == [
        c.name for c in gpus.GPUS
    ]


def test_each_card_has_one_name_and_each_of_its_figures_a_source():
    assert len({card.name for card in gpus.GPUS}) == len(gpus.GPUS)
    assert [card.name for card in gpus.GPUS if card.precision != "bf16"] == ["t4", "v100"]
    for card in gpus.GPUS:
        assert (
            card.source
            and card.teraflops > 0
            and card.watts > 0
            and (not card.products or card.products.source)
        )
        if known := card.training:
            assert known.source in TRAINING_SOURCES and (
                known.micro_batch or known.source != gpus.SCRIPT
            )
            assert (
                known.figure * 855e6 < card.product_teraflops * 1e12
            )  # nor does it train faster than it multiplies
        assert 0.55 < card.product_teraflops / card.teraflops < 1.15


def test_a_card_never_measured_in_products_is_taken_at_the_share_that_its_kind_reaches():
    for geforce in (True, False):
        kind = [card for card in gpus.GPUS if card.is_geforce == geforce]
        share = gpus.reached_share(geforce)
        assert share == statistics.median(
            card.products.figure / card.teraflops for card in kind if card.products
        )
        guessed = [card for card in kind if not card.products]
        assert guessed and all(card.product_teraflops == share * card.teraflops for card in guessed)
    assert (
        gpus.peak_flops("NVIDIA RTX A6000", "bf16")
        == gpus.peak_flops("NVIDIA RTX A6000", "fp16")
        == 154.8e12
    )
    assert (
        gpus.peak_flops("NVIDIA RTX A6000", "no") is None
        and gpus.peak_flops("CPU (x)", "bf16") is None
    )


def test_each_card_has_a_preset_and_some_have_one_for_so_many_of_them():
    for driver, count, stem in (
        ("NVIDIA GeForce RTX 4090", 2, "rtx4090_x2"),
        ("NVIDIA GeForce RTX 4090", 3, "rtx4090"),
        ("NVIDIA H100 PCIe", 8, "h100_x8"),
        ("NVIDIA GeForce RTX 3080 Ti", 2, "conservative"),
        (" ", 8, "cpu"),
    ):
        assert gpus.preset(driver, count) == stem and (gpus.PRESETS / f"{stem}.yaml").is_file()
        assert ("--multi_gpu" in gpus.launcher(stem, count)) == (count > 1 and "_x" not in stem)
    stems = [path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")]
    others = {"cpu", "mps", "conservative"}  # for any card
    assert {stem for stem in stems if not re.search(r"_\d?x\d", stem)} == {
        card.name for card in gpus.GPUS
    } | others


def test_make_train_and_ddp_train_take_the_cards_preset_and_so_many_processes():
    for driver, number, words in (
        ("NVIDIA RTX A6000", 4, "--config_file accelerate_configs/a6000_x4.yaml train.py"),
        (
            "NVIDIA RTX A6000",
            3,
            "--config_file accelerate_configs/a6000.yaml --multi_gpu --num_processes 3 train.py",
        ),
        ("", 2, "ACCELERATE_USE_CPU=true .venv/bin/torchrun --nproc_per_node 2 train.py"),
    ):
        target = "train" if number == 1 else "ddp-train"
        recipe = "gpt2_124m_openwebtext" if driver and number > 1 else "quickstart"
        command = [
            "make",
            "-n",
            "-C",
            str(ROOT),
            target,
            f"CARD={driver}",
            f"NGPUS={number}",
            "FLAGS=--max_steps 3",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"{words} --recipe recipes/{recipe}.yaml --max_steps 3" in " ".join(
            shlex.split(done.stdout)
        )
