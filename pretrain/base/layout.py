"""Names in a run folder that several rooms know."""

import contextlib
import json
import re
import shutil
from pathlib import Path

METRICS, LOG = "metrics.jsonl", "run.log"
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
STEP = re.compile(r"step-(\d{8})")  # a checkpoint, a push, a tag
PARTIAL = re.compile(r"\.step-\d{8}\.tmp-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Return what a checkpoint, a push and a tag of this step are called."""
    return f"step-{step:08d}"


def clear_partial(folder: Path) -> None:
    """Remove the step folders that killed processes left half-made. Only for the holder of the run folder's lock."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if PARTIAL.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path)


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl; a torn last line (a kill while writing) is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows
