"""Compatibility checks with simulated versions, drivers and GPUs: known bad combinations."""

import pytest
from conftest import ROOT

from ursa_minor.base import cudnn, gpus
from ursa_minor.preflight import compatibility

# The part of torch.cuda.get_arch_list() of each wheel that these tests need.
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU128 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]
WHEELS = {"cu126": CU126, "cu128": CU128, "cu130": CU130}
CUDNN_FOLDER = "/env/nvidia/cudnn/lib"
REQUIREMENTS = """
torch>=2.11,<=2.13
numpy>=2.1,<=2.4.6  # why
wandb==0.31.0
nvidia-ml-py==13.0
tqdm==4.0
# x==1
"""


# Packages


def read_range_file(name: str) -> dict:
    """Return the version range of each package in a requirements file."""
    return compatibility.read_ranges((ROOT / name).read_text())


def test_constraints_satisfy_requirements():
    ranges = read_range_file("requirements.txt")
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        ranges |= read_range_file(f"requirements/{path.name}")
    constraints = read_range_file("constraints.txt")

    assert "torch" in ranges
    assert ranges.keys() == constraints.keys()
    for name, pin in constraints.items():
        (version,) = (part.version for part in pin if part.operator == "==")
        assert ranges[name].contains(version), name
        operators = {part.operator for part in ranges[name]}
        assert ">=" in operators, name
        assert not operators & {"==", "<="}, name


def test_packages_outside_their_ranges_are_reported():
    ranges = compatibility.read_ranges(REQUIREMENTS)
    installed = {"torch": "2.13.0+cpu", "numpy": "2.0.0", "wandb": None}

    results = compatibility.check_packages(ranges, installed)

    checks = {check.name: check for check in results}
    # Optional packages cause only a warning if they are missing.
    assert {name: check.level for name, check in checks.items()} == {
        "packages": "ok",
        "numpy": "warning",
        "wandb": "warning",
        "nvidia-ml-py": "warning",
        "tqdm": "error",
    }
    assert "2.0.0" in checks["numpy"].text
    assert checks["numpy"].fix == 'pip install "numpy<=2.4.6,>=2.1"'
    assert results[0].text.startswith("1 of 5")


@pytest.mark.parametrize(("name", "version"), compatibility.BROKEN)
def test_broken_version_is_an_error(name, version):
    ranges = read_range_file("requirements.txt")

    results = compatibility.check_packages({name: ranges[name]}, {name: version})

    check = results[-1]
    assert not ranges[name].contains(version)
    assert check.level == "error"
    assert compatibility.BROKEN[name, version] in check.text
    assert "pip install" in check.fix
    assert f"!={version}" in check.fix


# The build of torch and the driver


def check_build(
    version: str = "2.13.0",
    cuda: str | None = "13.0",
    *,
    usable: int = 0,
    first: tuple[int, int] | None = (8, 9),
    driver: str | None = "580.95.05",
):
    """Check a build of torch on a machine with a GPU of which torch finds ``usable``."""
    return compatibility.check_torch_build(version, cuda, usable, first, driver)


def test_cpu_build_on_gpu_machine_is_an_error():
    check = check_build("2.13.0+cpu", None)

    assert check.level == "error"
    assert "CPU build" in check.text
    assert "pip install --force-reinstall torch==2.13.0 --index-url " in check.fix
    assert check.fix.rstrip().endswith("/whl/cu130")


def test_suggested_wheel_supports_the_driver():
    check = check_build("2.13.0+cpu", None, driver="550.54.14")

    assert "whl/cu126" in check.fix


def test_wheel_is_suggested_without_compute_capability():
    check = check_build("2.13.0+cpu", None, first=None)

    assert "--index-url" in check.fix


def test_unusable_gpu_is_an_error():
    check = check_build()

    assert check.level == "error"
    assert "CUDA_VISIBLE_DEVICES" in check.text


def test_machine_without_driver_is_ok():
    assert check_build(driver=None).level == "ok"


def test_usable_gpu_is_ok():
    assert check_build(usable=2).level == "ok"


@pytest.mark.parametrize(
    ("driver", "cuda"), [("580.65.06", "13.0"), ("525.60.13", "12.6"), ("999.1", "99.0")]
)
def test_sufficient_driver_is_not_blamed(driver, cuda):
    check = check_build(cuda=cuda, driver=driver)

    assert "finds no usable GPU" in check.text


@pytest.mark.parametrize(("driver", "cuda"), [("580.65.05", "13.0"), ("525.60.11", "12.8")])
def test_too_old_driver_is_reported(driver, cuda):
    check = check_build(cuda=cuda, driver=driver)

    assert "driver is too old" in check.text


def test_older_cuda_is_suggested_for_old_driver():
    check = check_build(driver="550.54.14")

    assert "driver 580.65.06 or newer" in check.fix
    assert "whl/cu126" in check.fix


def test_no_wheel_is_suggested_for_very_old_driver():
    check = check_build(driver="470.82.01")

    assert "whl" not in check.fix


# Kernels


@pytest.mark.parametrize("card", gpus.GPUS, ids=lambda card: card.name)
def test_gpu_in_table_is_supported_by_suggested_wheels(card):
    major, minor = card.capability
    architectures = [[f"sm_{major}{minor}"]]
    for driver in ("550.54.14", "580.95.05", None):
        wheel = compatibility.reinstall_command(card.capability, driver).rpartition("/")[2]
        architectures.append(WHEELS[wheel])

    for arch_list in architectures:
        check = compatibility.check_architecture(card.name, card.capability, arch_list)
        assert check.level == "ok"


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 9), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "compute_90"), ((10, 3), "sm_100f")],
)
def test_kernels_support_later_minor_versions(capability, architecture):
    assert compatibility.has_kernels(capability, [architecture])


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 0), "sm_86"), ((8, 9), "sm_90"), ((10, 3), "sm_100a"), ((7, 0), "compute_75")],
)
def test_kernels_do_not_support_other_gpus(capability, architecture):
    assert not compatibility.has_kernels(capability, [architecture])


@pytest.mark.parametrize(
    ("capability", "arch_list", "driver", "words"),
    [
        ((7, 0), CU130, "580.95.05", "whl/cu126"),
        ((12, 0), CU126, "570.86", "whl/cu128"),
        ((3, 5), CU130, "470.1", "no current torch"),
    ],
    ids=["Volta", "old torch on new GPU", "Kepler"],
)
def test_gpu_without_kernels_is_an_error(capability, arch_list, driver, words):
    check = compatibility.check_architecture("a GPU", capability, arch_list, driver)

    assert check.level == "error"
    assert words in check.fix


# cuDNN


@pytest.mark.parametrize(
    ("version", "text"),
    [(8902, "8.9.2"), (90100, "9.1.0"), (91900, "9.19.0"), (92600, "9.26.0"), (100203, "10.2.3")],
)
def test_cudnn_version_is_decoded(version, text):
    assert cudnn.version_text(version) == text


@pytest.mark.parametrize(
    ("capabilities", "version"),
    [([(9, 0)], 91900), ([(9, 0)], 92599), ([(9, 0)], 8902), ([(8, 0), (9, 0)], 92000)],
)
def test_old_cudnn_on_hopper_is_a_warning(capabilities, version):
    check = compatibility.check_cudnn_attention(capabilities, version, deprioritized=False)

    assert check.level == "warning"
    assert f"cuDNN {cudnn.version_text(version)}" in check.text
    assert "export TORCH_CUDNN_SDPA_DEPRIORITIZED=1" in check.fix


@pytest.mark.parametrize(
    ("capabilities", "version", "deprioritized"),
    [
        ([(9, 0)], 92000, True),
        ([(9, 0)], 92600, False),
        ([(9, 0)], 100000, False),
        ([(8, 0), (12, 0)], 92000, False),
        ([], 92000, False),
    ],
)
def test_cudnn_is_ok_otherwise(capabilities, version, deprioritized):
    check = compatibility.check_cudnn_attention(capabilities, version, deprioritized=deprioritized)

    assert check.level == "ok"
    assert f"cuDNN {cudnn.version_text(version)}" in check.text
    assert "TORCH_CUDNN_SDPA_DEPRIORITIZED=1" not in check.fix


def check_library(version: int, loaded: list[str], search_path: list[str]):
    """Check a loaded cuDNN if the installed package has version 9.20.0.48."""
    library = compatibility.CudnnLibrary(version, "9.20.0.48", CUDNN_FOLDER, loaded, search_path)
    return compatibility.check_cudnn_library(library)


@pytest.mark.parametrize(
    ("loaded", "search_path"),
    [([f"{CUDNN_FOLDER}/libcudnn.so.9"], [CUDNN_FOLDER]), ([], [])],
    ids=["loaded from package", "not loaded"],
)
def test_cudnn_of_package_is_accepted(loaded, search_path):
    assert check_library(92000, loaded, search_path) is None


@pytest.mark.parametrize(
    ("version", "loaded", "search_path", "words"),
    [
        (
            91900,
            ["/usr/lib/libcudnn.so.9"],
            [],
            ["cuDNN 9.19.0", "/usr/lib/libcudnn.so.9", "9.20.0.48"],
        ),
        (
            92000,
            [f"{CUDNN_FOLDER}/libcudnn.so.9", "/usr/lib/libcudnn_graph.so.9"],
            [],
            ["loaded from /usr/lib/libcudnn_graph.so.9"],
        ),
        (91900, [], [], ["cuDNN 9.19.0", "9.20.0.48"]),
        (
            92000,
            [f"{CUDNN_FOLDER}/libcudnn.so.9"],
            ["/usr/lib"],
            ["/usr/lib in LD_LIBRARY_PATH", "another cuDNN"],
        ),
    ],
    ids=["other library", "other sublibrary", "other version", "other folder first"],
)
def test_cudnn_that_shadows_package_is_a_warning(version, loaded, search_path, words):
    check = check_library(version, loaded, search_path)

    assert check.level == "warning"
    for word in words:
        assert word in check.text
    assert "LD_LIBRARY_PATH" in check.fix


# Disk space


@pytest.mark.parametrize(
    ("free_bytes", "shards", "level"),
    [
        (30e9, True, "ok"),
        (20e9, True, "warning"),
        (30e9, False, "ok"),
        (4e9, False, "error"),
    ],
)
def test_disk_space_is_compared_with_needed_space(free_bytes, shards, level):
    check = compatibility.check_disk(int(free_bytes), 24.5e9, "/d", shards=shards)

    assert check.level == level
    assert bool(check.fix) == (level != "ok")
    assert "24.5 GB" in check.text
