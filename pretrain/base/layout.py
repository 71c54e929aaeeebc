"""Names in a run folder that several rooms know."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pretrain.base import files

METRICS, LOG = "metrics.jsonl", "run.log"
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
STEP = re.compile(r"step-(\d{8})")  # a checkpoint, a push, a tag
PARTIAL = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]{8}")  # half-made; or moved aside for what comes in its place


def step_name(step: int) -> str:
    """Return the name of this step's checkpoint, push and tag."""
    return f"step-{step:08d}"


def clear_partial(folder: Path) -> None:
    """Remove what killed processes left half-made. Only for the holder of the run folder's lock.

    What was moved aside comes back, unless what was to come in its place is there.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = PARTIAL.fullmatch(path.name)
        if found and found[2] == "old" and not os.path.lexists(folder / found[1]):
            path.rename(folder / found[1])
        elif found:
            with contextlib.suppress(OSError):  # it harms nothing, and the next start tries again
                files.remove(path)


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl; a line that is none (a kill while writing has torn it) is left out."""
    return [row for _, row in lines_and_rows(path) if row is not None]


def lines_and_rows(path: Path) -> Iterator[tuple[str, dict | None]]:
    """Yield each line of a metrics.jsonl, and its row; None where it is not a mapping with a whole ``step``."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = None
                with contextlib.suppress(ValueError):
                    row = files.parse_json(line)
                yield line, row if isinstance(row, dict) and type(row.get("step")) is int else None
