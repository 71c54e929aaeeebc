"""Lines that only a card reaches are broken on purpose, one at a time, in a copy of the tree: tests/card must see each."""

import pytest
from breaking import Breakage, assert_seen, copy_tree, run_tests

TESTS = "tests/card/test_on_a_card.py"


def broken(file: str, line: str, wrong: str, fault: str) -> Breakage:
    """A line that only a card reaches."""
    return Breakage(file, line, wrong, fault, TESTS)


BREAKAGES = [
    broken(
        "pretrain/evaluation/validation.py",
        "torch.as_tensor(bytes_per_token, device=device)",
        "torch.as_tensor(bytes_per_token)",
        "wrong side: a table on the CPU is indexed by targets on the card",
    ),
    broken(
        "pretrain/data/windows.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.to(device, non_blocking=True)",
        "the host waits for each batch: its memory is pageable",
    ),
    broken(
        "pretrain/data/windows.py",
        "torch.arange(sources[0].sequence_length + 1, device=device)",
        "torch.arange(sources[0].sequence_length + 1)",
        "wrong side: places on the CPU, ids on the card",
    ),
    broken(
        "pretrain/run/checkpoint.py",
        "return tensor.item() if count else tensor.to(device)",
        "return tensor.item() if count else tensor",
        "wrong side: a resumed run's moments stay on the CPU",
    ),
    broken(
        "pretrain/run/checkpoint.py",
        "return {name: room[name].copy_(tensor) for name, tensor in tensors.items()}",
        'return {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}',
        "missing sync: a checkpoint is written from memory that is still being copied to",
    ),
    broken(
        "pretrain/evaluation/likelihood.py",
        "targets.to(model.device).split(LOSS_ROWS)",
        "targets.split(LOSS_ROWS)",
        "wrong side: HellaSwag's targets stay on the CPU",
    ),
    broken(
        "pretrain/evaluation/likelihood.py",
        "\n@sdpa_kernel(KERNELS)\n",
        "\n",
        "on Hopper cuDNN plans attention anew for every batch",
    ),
    broken(
        "pretrain/machine/hardware.py",
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        "torch.cuda.is_available() and torch.cuda.init()\n"
        '        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        "too late: the allocator has read its settings",
    ),
    broken(
        "pretrain/machine/hardware.py",
        "torch.cuda.mem_get_info(device)[0]",
        "torch.cuda.mem_get_info(device, True)[0]",
        "an argument that torch.cuda has not",
    ),
    broken(
        "pretrain/machine/hardware.py",
        "torch.cuda.max_memory_allocated(device) / total",
        "torch.cuda.max_memory_allocated(device.index + 1) / total",
        "another card than there is",
    ),
    broken(
        "pretrain/optim/update.py",
        "applied = math.isfinite(mean_loss) and math.isfinite(grad_norm)",
        "applied = bool(loss.isfinite()) and math.isfinite(grad_norm)",
        "a second read of the card an update",
    ),
    Breakage(
        "pretrain/optim/muon.py",
        "is_bf16_supported(including_emulation=False)",
        "is_bf16_supported()",
        "a T4 says that it has bf16, and emulates it",
        "tests/optim/test_muon.py::test_a_card_multiplies_in_what_its_tensor_cores_have",  # no pretended T4 emulates
    ),
    broken(
        "pretrain/machine/fit.py",
        "failed = is_out_of_memory(error)",
        "failed = isinstance(error, torch.OutOfMemoryError)",
        "cuBLAS's lack of memory ends the run",
    ),
    broken(
        "pretrain/machine/fit.py",
        "torch.cuda.reset_peak_memory_stats(device)",
        "torch.cuda.reset_peak_memory_stats(device, 0)",
        "an argument that torch.cuda has not",
    ),
    broken(
        "pretrain/model/attention.py",
        "index_T = torch.arange(T, device=device)",
        "index_T = torch.arange(T)",
        "wrong side: the documents' mask",
    ),
    broken(
        "pretrain/model/loss.py",
        "torch.arange(len(weight_VE), device=hidden_NE.device)",
        "torch.arange(len(weight_VE))",
        "wrong side: the vocabulary's ids in the loss by parts",
    ),
    broken(
        "pretrain/machine/probes.py",
        "torch.cuda.synchronize(device)",
        "pass",
        "missing sync: what is timed is not done",
    ),
    broken(
        "pretrain/run/conversion.py",
        "loaded = pretrained.load(str(aside)).to(model.device)",
        "loaded = pretrained.load(str(aside))",
        "the exported model is measured on the CPU",
    ),
    broken(
        "train.py",
        "torch.manual_seed(int(mixed >> np.uint64(1)))",
        "torch.default_generator.manual_seed(int(mixed >> np.uint64(1)))",
        "only the CPU is seeded: dropout on the card is no function of the step",
    ),
    broken(
        "train.py",
        "loss += micro_loss.detach() / plan.gradient_accumulation_steps",
        "loss += micro_loss.item() / plan.gradient_accumulation_steps",
        "a read of the card a micro-batch",
    ),
    broken(
        "generate.py",
        '.to("cuda" if torch.cuda.is_available() else "cpu")',
        '.to("cuda:1" if torch.cuda.is_available() else "cpu")',
        "another card than there is",
    ),
]


@pytest.mark.slow
def test_the_tree_as_it_is_passes(tmp_path):
    done = run_tests(copy_tree(tmp_path / "tree"), TESTS, tmp_path / "runs")
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: f"{breakage.file}: {breakage.promise}")
def test_a_broken_line_is_seen(breakage, tmp_path):
    assert_seen(breakage, tmp_path)
