"""Verdicts on simulated facts: every combination that is known to be bad has its error and its fix."""

import pytest
from conftest import ROOT

from ursa_minor.base import cudnn, gpus
from ursa_minor.preflight import compatibility

# What the wheels hold (torch.cuda.get_arch_list()), as far as these tests need it.
CU126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90".split()  # noqa: SIM905
CU128 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120".split()  # noqa: SIM905
CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_110 sm_120 compute_120".split()  # noqa: SIM905


def test_our_own_requirements_take_the_versions_of_our_constraints():
    ranges, exact = (
        compatibility.read_ranges((ROOT / f"{name}.txt").read_text())
        for name in ("requirements", "constraints")
    )
    assert ranges.keys() == exact.keys() and "torch" in ranges
    for name, pin in exact.items():
        (version,) = (one.version for one in pin if one.operator == "==")
        assert ranges[name].contains(version) and any(
            one.operator in (">=", "==") for one in ranges[name]
        ), name


def test_another_version_warns_a_missing_package_is_an_error_and_an_optional_one_is_not():
    text = "torch>=2.11,<=2.13\nnumpy>=2.1,<=2.4.6  # why\nwandb==0.31.0\nnvidia-ml-py==13.0\ntqdm==4.0\n# x==1\n"
    found = compatibility.check_packages(
        compatibility.read_ranges(text), {"torch": "2.13.0+cpu", "numpy": "2.0.0", "wandb": None}
    )
    levels = {check.name: check.level for check in found}
    warned = dict.fromkeys(("numpy", "wandb", "nvidia-ml-py"), "warning")
    assert levels == warned | {"packages": "ok", "tqdm": "error"}
    numpy = next(check for check in found if check.name == "numpy")
    assert "2.0.0" in numpy.text and numpy.fix == 'pip install "numpy<=2.4.6,>=2.1"'
    assert found[0].text.startswith("1 of 5")


def test_a_version_that_fails_between_two_that_work_is_an_error_and_left_out_of_our_ranges():
    ranges = compatibility.read_ranges((ROOT / "requirements.txt").read_text())
    for (name, version), problem in compatibility.BROKEN.items():
        (check,) = compatibility.check_packages({name: ranges[name]}, {name: version})[-1:]
        assert (
            not ranges[name].contains(version) and check.level == "error" and problem in check.text
        )
        assert "pip install" in check.fix and f"!={version}" in check.fix


def build(version="2.13.0", cuda="13.0", *, usable=0, first=(8, 9), driver="580.95.05"):
    return compatibility.check_torch_build(version, cuda, usable, first, driver)


def test_a_build_that_finds_no_card_on_a_machine_with_one_is_an_error_with_the_remedy():
    bad = build("2.13.0+cpu", None)
    assert bad.level == build().level == "error" and "CPU build" in bad.text
    wheel = "pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
    assert wheel in bad.fix and "whl/cu126" in build("2.13.0+cpu", None, driver="550.54.14").fix
    assert "--index-url" in build("2.13.0+cpu", None, first=None).fix  # nvidia-smi gives none
    assert build(driver=None).level == build(usable=2).level == "ok"
    assert "CUDA_VISIBLE_DEVICES" in build().text


def test_a_driver_older_than_torchs_cuda_is_an_error_and_may_take_an_older_cuda_where_it_can():
    good = [("580.65.06", "13.0"), ("525.60.13", "12.6"), ("999.1", "99.0")]
    old = [("580.65.05", "13.0"), ("525.60.11", "12.8")]
    assert all(
        "finds no usable GPU" in build(cuda=cuda, driver=driver).text for driver, cuda in good
    )
    assert all("driver is too old" in build(cuda=cuda, driver=driver).text for driver, cuda in old)
    fixable = build(driver="550.54.14").fix
    assert "driver 580.65.06 or newer" in fixable and "whl/cu126" in fixable
    assert "whl" not in build(driver="470.82.01").fix


def test_every_card_of_the_table_is_served_by_its_own_kernels_and_by_the_wheels_we_name():
    wheels = {"cu126": CU126, "cu128": CU128, "cu130": CU130}
    for card in gpus.GPUS:
        own = f"sm_{card.capability[0]}{card.capability[1]}"
        assert compatibility.check_architecture(card.name, card.capability, [own]).level == "ok"
        for driver in ("550.54.14", "580.95.05", None):
            name = compatibility.reinstall_command(card.capability, driver).rpartition("/")[2]
            assert (
                compatibility.check_architecture(card.name, card.capability, wheels[name]).level
                == "ok"
            )


def test_kernels_serve_later_minors_of_their_major_and_ptx_anything_newer():
    good = (((8, 9), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "compute_90"), ((10, 3), "sm_100f"))
    bad = (((8, 0), "sm_86"), ((8, 9), "sm_90"), ((10, 3), "sm_100a"), ((7, 0), "compute_75"))
    assert all(compatibility.has_kernels(card, [kernels]) for card, kernels in good)
    assert not any(compatibility.has_kernels(card, [kernels]) for card, kernels in bad)


def test_a_card_without_kernels_is_an_error_that_names_the_wheels_that_serve_it():
    for capability, arch_list, driver, wheel in (
        ((7, 0), CU130, "580.95.05", "whl/cu126"),  # Volta
        ((12, 0), CU126, "570.86", "whl/cu128"),  # an old torch on a new card
        ((3, 5), CU130, "470.1", "no current torch"),  # Kepler
    ):
        verdict = compatibility.check_architecture("a card", capability, arch_list, driver)
        assert verdict.level == "error" and wheel in verdict.fix


@pytest.mark.parametrize(
    ("version", "text"),
    [(8902, "8.9.2"), (90100, "9.1.0"), (91900, "9.19.0"), (92600, "9.26.0"), (100203, "10.2.3")],
)
def test_cudnn_version_is_decoded(version, text):
    assert cudnn.version_text(version) == text


@pytest.mark.parametrize(
    ("capabilities", "version", "deprioritized", "level"),
    [
        ([(9, 0)], 91900, False, "warning"),
        ([(9, 0)], 92599, False, "warning"),
        ([(9, 0)], 8902, False, "warning"),
        ([(8, 0), (9, 0)], 92000, False, "warning"),
        ([(9, 0)], 92000, True, "ok"),
        ([(9, 0)], 92600, False, "ok"),
        ([(9, 0)], 100000, False, "ok"),
        ([(8, 0), (12, 0)], 92000, False, "ok"),
        ([], 92000, False, "ok"),
    ],
)
def test_old_cudnn_on_hopper_is_a_warning(capabilities, version, deprioritized, level):
    check = compatibility.check_cudnn_attention(capabilities, version, deprioritized=deprioritized)
    assert check.level == level and f"cuDNN {cudnn.version_text(version)}" in check.text
    assert ("export TORCH_CUDNN_SDPA_DEPRIORITIZED=1" in check.fix) == (level == "warning")


OWN = "/env/nvidia/cudnn/lib"


@pytest.mark.parametrize(
    ("version", "loaded", "search_path", "words"),
    [
        (92000, [f"{OWN}/libcudnn.so.9"], [OWN], None),
        (92000, [], [], None),
        (
            91900,
            ["/usr/lib/libcudnn.so.9"],
            [],
            "cuDNN 9.19.0 is loaded from /usr/lib/libcudnn.so.9 instead of the 9.20.0.48",
        ),
        (
            92000,
            [f"{OWN}/libcudnn.so.9", "/usr/lib/libcudnn_graph.so.9"],
            [],
            "loaded from /usr/lib/libcudnn_graph.so.9",
        ),
        (91900, [], [], "cuDNN 9.19.0 is loaded instead of the 9.20.0.48"),
        (
            92000,
            [f"{OWN}/libcudnn.so.9"],
            ["/usr/lib"],
            "/usr/lib in LD_LIBRARY_PATH contains another cuDNN",
        ),
    ],
)
def test_cudnn_that_shadows_the_package_is_a_warning(version, loaded, search_path, words):
    check = compatibility.check_cudnn_library(
        compatibility.CudnnLibrary(version, "9.20.0.48", OWN, loaded, search_path)
    )
    if words is None:
        assert check is None
    else:
        assert check.level == "warning" and words in check.text and "LD_LIBRARY_PATH" in check.fix


def test_a_disk_must_hold_the_checkpoints_and_should_hold_the_shards():
    for size, shards, level in (
        (30e9, True, "ok"),
        (20e9, True, "warning"),
        (30e9, False, "ok"),
        (4e9, False, "error"),
    ):
        check = compatibility.check_disk(int(size), 24.5e9, "/d", shards=shards)
        assert (
            check.level == level and bool(check.fix) == (level != "ok") and "24.5 GB" in check.text
        )
