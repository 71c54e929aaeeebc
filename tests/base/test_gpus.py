"""Known GPUs: their names, measured rates and launch presets."""

import re
import shlex
import statistics
import subprocess

import pytest
from conftest import ROOT

from benchmarks.estimate_cards import TRAINING_SOURCES
from ursa_minor.base import gpus

GPU_NAMES = [gpu.name for gpu in gpus.GPUS]
MEASURED_IN_TRAINING = [gpu for gpu in gpus.GPUS if gpu.training]


def gpu_id(gpu):
    """Return the id of a test case."""
    return gpu.name


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("rtx_a6000", "a6000"),
        ("A100-SXM4-40GB", "a100_40gb"),
        ("a100 80gb", "a100"),
        ("4090", "rtx4090"),
        ("h100 pcie", "h100_pcie"),
    ],
)
def test_gpu_is_found_by_driver_name(driver_name, name):
    assert gpus.find(driver_name).name == name


@pytest.mark.parametrize("gpu", gpus.GPUS, ids=gpu_id)
def test_gpu_is_found_by_its_own_name(gpu):
    assert gpus.find(gpu.name) is gpu


@pytest.mark.parametrize(
    "name",
    [
        "4070",
        "gh200",
        "30",
        "",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_unknown_gpu_is_not_found(name):
    assert gpus.find(name) is None


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("rtx_a4600", ["a6000", "a4500", "a4000", "a40"]),
        ("4070", ["rtx4090", "rtx4080", "rtx4060", "rtx4060ti"]),
    ],
)
def test_similar_gpus_are_of_the_same_series(name, similar):
    assert gpus.similar_gpus(name) == similar


def test_nearest_gpu_is_first():
    assert gpus.similar_gpus("h800")[0] in ("h100", "h200")


def test_gpu_of_unknown_series_gets_all_names():
    assert gpus.similar_gpus("2080ti") == GPU_NAMES


def test_gpu_names_are_unique():
    assert len(set(GPU_NAMES)) == len(GPU_NAMES)


def test_gpus_without_bf16_are_known():
    without_bf16 = [gpu.name for gpu in gpus.GPUS if gpu.precision != "bf16"]

    assert without_bf16 == ["t4", "v100"]


@pytest.mark.parametrize("gpu", gpus.GPUS, ids=gpu_id)
def test_figures_of_a_gpu_have_sources(gpu):
    assert gpu.source
    assert gpu.teraflops > 0
    assert gpu.watts > 0
    if gpu.products:
        assert gpu.products.source
    assert 0.55 < gpu.product_teraflops / gpu.teraflops < 1.15


@pytest.mark.parametrize("gpu", MEASURED_IN_TRAINING, ids=gpu_id)
def test_measured_training_rate_is_plausible(gpu):
    training = gpu.training

    assert training.source in TRAINING_SOURCES
    if training.source == gpus.SCRIPT:
        assert training.micro_batch
    # Training takes 855e6 floating-point operations per token. It cannot be faster than products.
    assert training.figure * 855e6 < gpu.product_teraflops * 1e12


@pytest.mark.parametrize("is_geforce", [True, False])
def test_unmeasured_gpu_has_median_share_of_peak(is_geforce):
    same_kind = [gpu for gpu in gpus.GPUS if gpu.is_geforce == is_geforce]
    shares = [gpu.products.figure / gpu.teraflops for gpu in same_kind if gpu.products]
    unmeasured = [gpu for gpu in same_kind if not gpu.products]

    share = gpus.reached_share(is_geforce)

    assert share == statistics.median(shares)
    assert unmeasured
    for gpu in unmeasured:
        assert gpu.product_teraflops == share * gpu.teraflops


@pytest.mark.parametrize(
    ("driver_name", "precision", "flops"),
    [
        ("NVIDIA RTX A6000", "bf16", 154.8e12),
        ("NVIDIA RTX A6000", "fp16", 154.8e12),
        ("NVIDIA RTX A6000", "no", None),
        ("CPU (x)", "bf16", None),
    ],
)
def test_peak_flops_are_known_for_half_precision(driver_name, precision, flops):
    assert gpus.peak_flops(driver_name, precision) == flops


@pytest.mark.parametrize(
    ("driver_name", "count", "stem", "needs_multi_gpu"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "rtx4090_x2", False),
        ("NVIDIA GeForce RTX 4090", 3, "rtx4090", True),
        ("NVIDIA H100 PCIe", 8, "h100_x8", False),
        ("NVIDIA GeForce RTX 3080 Ti", 2, "conservative", True),
        (" ", 8, "cpu", True),
    ],
)
def test_preset_depends_on_gpu_and_count(driver_name, count, stem, needs_multi_gpu):
    assert gpus.preset(driver_name, count) == stem
    assert (gpus.PRESETS / f"{stem}.yaml").is_file()
    assert ("--multi_gpu" in gpus.launcher(stem, count)) == needs_multi_gpu


def test_every_gpu_has_a_preset():
    stems = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    single_gpu_stems = {stem for stem in stems if not re.search(r"_\d?x\d", stem)}

    assert single_gpu_stems == {*GPU_NAMES, "cpu", "mps", "conservative"}


A6000_X4 = "--config_file accelerate_configs/a6000_x4.yaml train.py"
A6000_X3 = "--config_file accelerate_configs/a6000.yaml --multi_gpu --num_processes 3 train.py"
CPU_X2 = "ACCELERATE_USE_CPU=true .venv/bin/torchrun --nproc_per_node 2 train.py"


@pytest.mark.parametrize(
    ("driver_name", "count", "recipe", "words"),
    [
        ("NVIDIA RTX A6000", 4, "gpt2_124m_openwebtext", A6000_X4),
        ("NVIDIA RTX A6000", 3, "gpt2_124m_openwebtext", A6000_X3),
        ("", 2, "quickstart", CPU_X2),
    ],
    ids=["preset-for-count", "preset-for-one", "cpu"],
)
def test_make_ddp_train_uses_preset_of_gpus(driver_name, count, recipe, words):
    variables = [f"CARD={driver_name}", f"NGPUS={count}", "FLAGS=--max_steps 3"]
    command = ["make", "-n", "-C", str(ROOT), "ddp-train", *variables]

    process = subprocess.run(command, capture_output=True, text=True, check=True)

    output = " ".join(shlex.split(process.stdout))
    assert f"{words} --recipe recipes/{recipe}.yaml --max_steps 3" in output


@pytest.mark.parametrize(
    ("name", "gpu", "count"),
    [
        ("rtx4090_x8", "rtx4090", 8),
        ("8x4090", "rtx4090", 8),
        ("4 x RTX 3090", "rtx3090", 4),
        ("a100_40gb_x8", "a100_40gb", 8),
        ("NVIDIA H100 x 2", None, 2),
    ],
)
def test_name_of_several_gpus_is_split(name, gpu, count):
    several = gpus.find_several(name)

    assert several is not None
    assert several.count == count
    assert gpu is None or several.gpu.name == gpu


@pytest.mark.parametrize("name", ["rtx4090", "zzz_x8", "zero3_x8", "rtx4099", ""])
def test_other_names_are_not_several_gpus(name):
    assert gpus.find_several(name) is None
