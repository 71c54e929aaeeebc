"""What a run of the tests wrote: its metrics, the state that it ends in, the windows that it read."""

import json
from pathlib import Path

from safetensors.torch import load_file

from ursa_minor.base import files
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
    """The lines of metrics.jsonl."""
    return read_metrics(Path("runs") / run_name / "metrics.jsonl")


def losses_by_step(run_name: str, key: str = "train/loss") -> dict[int, float]:
    """The loss of each step."""
    return {row["step"]: row[key] for row in metrics_rows(run_name) if key in row}


def final_state(run_name: str, step: int = 12) -> dict:
    """Everything of a checkpoint that must not depend on interruptions."""
    path = Path("runs") / run_name / "checkpoints" / f"step-{step:08d}"
    assert checkpoint.find_problem(path) is None
    state = json.loads((path / "state.json").read_text())
    for name in TIME_METRICS:
        state.pop(name, None)
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    return {"state": state} | {
        name: manifest[name]["sha256"] for name in (checkpoint.MODEL, checkpoint.OPTIMIZER)
    }


def load_weights(folder: Path) -> dict[str, list]:
    """The weights of a checkpoint or a model, whose tied head is none of its own."""
    found = load_file(folder / checkpoint.MODEL)
    return {name: tensor.tolist() for name, tensor in found.items() if name != "lm_head.weight"}


def update_manifest(path: Path) -> None:
    """Give a checkpoint that was edited a manifest that agrees with it."""
    manifest = files.read_json(path / "manifest.json")
    for name, row in manifest["files"].items():
        row.update(size=(path / name).stat().st_size, sha256=files.sha256(path / name))
    files.write_json(path / "manifest.json", manifest)


def read_window_log(path: Path, until: int = 12) -> dict[tuple, str]:
    """The last reading of each (step, micro_step, rank); a step done again must have read the same."""
    read: dict[tuple, str] = {}
    for line in path.read_text().splitlines():
        step, micro_step, rank, windows = line.split(" ", 3)
        key = (int(step), int(micro_step), int(rank))
        assert read.setdefault(key, windows) == windows, f"{key} read other windows after a restart"
    return {key: value for key, value in read.items() if key[0] < until}


def windows_by_step(path: str) -> dict[int, list[str]]:
    """The windows of each step of a ledger, in order, whichever process read them and however often."""
    steps: dict[int, set[str]] = {}
    for line in Path(path).read_text().splitlines():
        step, _, _, *windows = line.split()
        steps.setdefault(int(step), set()).update(windows)
    return {step: sorted(windows) for step, windows in steps.items()}
