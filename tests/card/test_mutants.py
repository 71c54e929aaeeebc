"""Lines that only a card reaches are broken on purpose, one at a time, in a copy of the tree: tests/card must see each."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT


@dataclass(frozen=True)
class Mutant:
    """A line as it is, as it would be wrong, and what is wrong then."""

    file: str
    line: str
    broken: str
    fault: str


MUTANTS = [
    Mutant(
        "pretrain/evaluation/validation.py",
        "torch.as_tensor(bytes_per_token, device=device)",
        "torch.as_tensor(bytes_per_token)",
        "wrong side: a table on the CPU is indexed by targets on the card",
    ),
    Mutant(
        "pretrain/data/windows.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.to(device, non_blocking=True)",
        "the host waits for each batch: its memory is pageable",
    ),
    Mutant(
        "pretrain/data/windows.py",
        "torch.arange(sources[0].sequence_length + 1, device=device)",
        "torch.arange(sources[0].sequence_length + 1)",
        "wrong side: places on the CPU, ids on the card",
    ),
    Mutant(
        "pretrain/run/checkpoint.py",
        "return tensor.item() if count else tensor.to(device)",
        "return tensor.item() if count else tensor",
        "wrong side: a resumed run's moments stay on the CPU",
    ),
    Mutant(
        "pretrain/run/checkpoint.py",
        "return {name: room[name].copy_(tensor) for name, tensor in tensors.items()}",
        'return {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}',
        "missing sync: a checkpoint is written from memory that is still being copied to",
    ),
    Mutant(
        "pretrain/evaluation/likelihood.py",
        "targets.to(model.device).split(LOSS_ROWS)",
        "targets.split(LOSS_ROWS)",
        "wrong side: HellaSwag's targets stay on the CPU",
    ),
    Mutant(
        "pretrain/evaluation/likelihood.py",
        "\n@sdpa_kernel(KERNELS)\n",
        "\n",
        "on Hopper cuDNN plans attention anew for every batch",
    ),
    Mutant(
        "pretrain/machine/hardware.py",
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        "torch.cuda.is_available() and torch.cuda.init()\n"
        '        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        "too late: the allocator has read its settings",
    ),
    Mutant(
        "pretrain/machine/hardware.py",
        "torch.cuda.mem_get_info(device)[0]",
        "torch.cuda.mem_get_info(device, True)[0]",
        "an argument that torch.cuda has not",
    ),
    Mutant(
        "pretrain/machine/hardware.py",
        "torch.cuda.max_memory_allocated(device) / total",
        "torch.cuda.max_memory_allocated(device.index + 1) / total",
        "another card than there is",
    ),
    Mutant(
        "pretrain/optim/optim.py",
        "applied = math.isfinite(mean_loss) and math.isfinite(grad_norm)",
        "applied = bool(loss.isfinite()) and math.isfinite(grad_norm)",
        "a second read of the card an update",
    ),
    Mutant(
        "pretrain/optim/muon.py",
        "is_bf16_supported(including_emulation=False)",
        "is_bf16_supported()",
        "a T4 says that it has bf16, and emulates it",
    ),
    Mutant(
        "pretrain/machine/fit.py",
        "failed = is_out_of_memory(error)",
        "failed = isinstance(error, torch.OutOfMemoryError)",
        "cuBLAS's lack of memory ends the run",
    ),
    Mutant(
        "pretrain/machine/fit.py",
        "torch.cuda.reset_peak_memory_stats(device)",
        "torch.cuda.reset_peak_memory_stats(device, 0)",
        "an argument that torch.cuda has not",
    ),
    Mutant(
        "pretrain/model/model.py",
        "index_T = torch.arange(T, device=device)",
        "index_T = torch.arange(T)",
        "wrong side: the documents' mask",
    ),
    Mutant(
        "pretrain/model/loss.py",
        "torch.arange(len(weight_VE), device=hidden_NE.device)",
        "torch.arange(len(weight_VE))",
        "wrong side: the vocabulary's ids in the loss by parts",
    ),
    Mutant(
        "pretrain/machine/probes.py",
        "torch.cuda.synchronize(device)",
        "pass",
        "missing sync: what is timed is not done",
    ),
    Mutant(
        "export_model.py",
        "loaded = models.load(str(aside)).to(model.device)",
        "loaded = models.load(str(aside))",
        "the exported model is measured on the CPU",
    ),
    Mutant(
        "train.py",
        "torch.manual_seed(int(mixed >> np.uint64(1)))",
        "torch.default_generator.manual_seed(int(mixed >> np.uint64(1)))",
        "only the CPU is seeded: dropout on the card is no function of the step",
    ),
    Mutant(
        "train.py",
        "loss += micro_loss.detach() / plan.gradient_accumulation_steps",
        "loss += micro_loss.item() / plan.gradient_accumulation_steps",
        "a read of the card a micro-batch",
    ),
    Mutant(
        "generate.py",
        '.to("cuda" if torch.cuda.is_available() else "cpu")',
        '.to("cuda:1" if torch.cuda.is_available() else "cpu")',
        "another card than there is",
    ),
]


def outcome(tree: Path, folder: Path) -> subprocess.CompletedProcess:
    """Run the tests of the scripts on a card in a copy of the tree, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "tests/card/test_on_a_card.py", f"--basetemp={folder}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the tree."""
    shutil.copytree(ROOT / "pretrain", tmp_path / "tree" / "pretrain")
    shutil.copytree(ROOT / "tests", tmp_path / "tree" / "tests")
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path / "tree")
    return tmp_path / "tree"


@pytest.mark.slow
def test_the_tree_as_it_is_passes(tree, tmp_path):
    done = outcome(tree, tmp_path / "runs")
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.fault}")
def test_a_broken_line_is_seen(mutant, tree, tmp_path):
    source = (tree / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.line) == 1, "the line has changed: write the mutant anew"
    (tree / mutant.file).write_text(source.replace(mutant.line, mutant.broken), encoding="utf-8")
    done = outcome(tree, tmp_path / "runs")
    print(done.stdout[-3000:])
    assert done.returncode == 1
