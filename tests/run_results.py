"""Read the results of a test's run: metrics, final state, and the windows that it read."""

from pathlib import Path

from safetensors.torch import load_file

from ursa_minor.base import checkpoint_files, files
from ursa_minor.base.run_files import read_metrics
from ursa_minor.checkpoint import format as checkpoint

TINY_RECIPE = ("--recipe", "tiny.yaml")
TIME_METRICS = (
    "elapsed_seconds",
    "wall_seconds",
    "tokens_per_second",
    "ms_per_step",
    "data_wait_seconds",
)


def metrics_rows(run_name: str) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return read_metrics(Path("runs") / run_name / "metrics.jsonl")


def losses_by_step(run_name: str, key: str = "train/loss") -> dict[int, float]:
    """Return the loss (or another metric) of each step that has one."""
    return {row["step"]: row[key] for row in metrics_rows(run_name) if key in row}


def final_state(run_name: str, step: int = 12) -> dict:
    """Return the parts of a checkpoint that must not depend on interruptions."""
    path = Path("runs") / run_name / "checkpoints" / f"step-{step:08d}"
    assert checkpoint_files.find_problem(path) is None
    state = files.read_json(path / "training/state.json")
    for name in TIME_METRICS:
        state.pop(name, None)
    manifest = files.read_json(path / "manifest.json")["files"]
    return {
        "state": state,
        checkpoint.MODEL: manifest[checkpoint.MODEL]["sha256"],
        checkpoint.OPTIMIZER: manifest[checkpoint.OPTIMIZER]["sha256"],
    }


def load_weights(folder: Path) -> dict[str, list]:
    """Return the weights of a checkpoint or model without the output layer, which is tied."""
    tensors = load_file(folder / checkpoint.MODEL)
    return {name: tensor.tolist() for name, tensor in tensors.items() if name != "lm_head.weight"}


def update_manifest(path: Path) -> None:
    """Make the manifest of an edited checkpoint agree with its files."""
    manifest = files.read_json(path / "manifest.json")
    for name, row in manifest["files"].items():
        row["size"] = (path / name).stat().st_size
        row["sha256"] = files.sha256(path / name)
    files.write_json(path / "manifest.json", manifest)


def read_window_log(path: Path, until: int = 12) -> dict[tuple, str]:
    """Return the windows of each (step, micro_step, rank) before the step ``until``.

    A step that was repeated after a restart must have read the same windows.
    """
    windows_by_key: dict[tuple, str] = {}
    for line in path.read_text().splitlines():
        step, micro_step, rank, windows = line.split(" ", 3)
        key = (int(step), int(micro_step), int(rank))
        earlier_windows = windows_by_key.setdefault(key, windows)
        assert earlier_windows == windows, f"{key} read other windows after a restart"
    return {key: windows for key, windows in windows_by_key.items() if key[0] < until}


def windows_by_step(path: str) -> dict[int, list[str]]:
    """Return the sorted windows of each step of a window log, without duplicates.

    The result does not depend on which process read a window.
    """
    steps: dict[int, set[str]] = {}
    for line in Path(path).read_text().splitlines():
        step, _, _, *windows = line.split()
        steps.setdefault(int(step), set()).update(windows)
    return {step: sorted(windows) for step, windows in steps.items()}
