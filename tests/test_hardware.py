"""What the machine is said to be, and what it is refused."""

from pathlib import Path

import pytest
import torch

from pretrain import hardware
from pretrain.errors import BadInput


@pytest.fixture
def card(monkeypatch):
    """Call it with a name to pretend that the machine has that card."""

    def pretend(name, bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)

    return pretend


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("MIXED_PRECISION", "USE_CPU", "GRADIENT_ACCUMULATION_STEPS"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


def test_cpu_has_no_counted_memory():
    assert hardware.peak_memory_bytes(torch.device("cpu")) is None


def test_best_precision_of_a_cpu_is_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.best_precision() == "no"


def test_best_precision_is_what_the_card_can(card, monkeypatch):
    card("NVIDIA A100")
    assert hardware.best_precision() == "bf16"
    card("Tesla T4", bf16=False)
    assert hardware.best_precision() == "fp16"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert hardware.best_precision() == "no"


def test_fp16_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(BadInput, match='mixed_precision: fp16 needs a GPU; write mixed_precision: "no"'):
        hardware.make_accelerator()


def test_bf16_on_a_card_without_it_is_refused_with_the_remedy(card, monkeypatch):
    card("Tesla T4", bf16=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(BadInput, match="Tesla T4 has no bf16; write mixed_precision: fp16"):
        hardware.make_accelerator()


@pytest.mark.parametrize("value", ["4", "auto"])
def test_accumulation_in_the_accelerate_yaml_is_refused(monkeypatch, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", value)
    with pytest.raises(BadInput, match="gradient_accumulation_steps is derived here"):
        hardware.make_accelerator()


def test_cpu_is_named_with_its_threads():
    name = hardware.device_name(torch.device("cpu"))
    assert name.startswith("CPU (") and name.endswith(f"{torch.get_num_threads()} threads")
    assert hardware.processor_name() in name and hardware.processor_name()


def network_mount(tmp_path, path, *mounts):
    """The answer where these are mounted: (place, kind)."""
    table = tmp_path / "mounts"
    table.write_text("".join(f"from {place} {kind} rw,relatime 0 0\n" for place, kind in mounts))
    return hardware.network_mount(Path(path), table)


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/home/data", None),
        ("/srv/data/x", "nfs4"),
        ("/srv", "nfs4"),
        ("/srv2/data", None),  # begins alike
        ("/srv/fast/data", None),  # a local disk under a network one
        ("/srv/fast/far/data", "fuse.sshfs"),  # and the other way round
        ("/srv/fast/farther", None),
        ("/my disk/data", "cifs"),
        ("/my", None),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_innermost_mount_decides_whether_a_folder_lies_on_the_network(tmp_path, path, kind, backwards):
    mounts = [("/", "overlay"), ("/srv", "nfs4"), ("/srv/fast", "ext4"), ("/srv/fast/far", "fuse.sshfs")]
    mounts += [(r"/my\040disk", "cifs"), ("/proc", "proc")]
    assert network_mount(tmp_path, path, *(mounts[::-1] if backwards else mounts)) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p", "fuse.s3fs"])
def test_network_file_systems_are_known(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "ext4"), ("/data", kind)) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "nfsd", "fuseblk", "fuse.lxcfs"])
def test_local_file_systems_are_no_network(tmp_path, kind):
    assert network_mount(tmp_path, "/data", ("/", "nfs"), ("/data", kind)) is None


def test_a_link_lies_where_it_leads_to(tmp_path, monkeypatch):
    for name in ("here", "far"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far")
    mounts = [("/", "ext4"), (tmp_path / "far", "nfs")]
    assert network_mount(tmp_path, tmp_path / "here" / "link" / "data", *mounts) == "nfs"
    monkeypatch.chdir(tmp_path)
    assert network_mount(tmp_path, "far/data", *mounts) == "nfs" and network_mount(tmp_path, "here", *mounts) is None


def test_a_machine_without_a_table_of_mounts_or_with_an_odd_one_is_not_known(tmp_path):
    assert hardware.network_mount(tmp_path, tmp_path / "none") is None
    (tmp_path / "odd").write_bytes(b"\nx\nfrom /\nfrom \xff nfs rw 0 0\n")
    assert hardware.network_mount(tmp_path, tmp_path / "odd") is None
