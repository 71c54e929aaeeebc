"""Names of the files and folders in a run folder."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ursa_minor.base import files

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CURVES = "curves.png"
LOG = "run.log"
FINISH = "finished.json"
TRACKER_IDS = "trackers.json"
TENSORBOARD = "tensorboard"  # folder of its event files
MODEL_FOLDER = "model"
PENDING = "hub"  # folder of the pushes to send
CHECKPOINTS = "checkpoints"
# Files of a checkpoint:
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"

STEP = re.compile(r"step-(\d{8})")  # a checkpoint, a push, a tag
# Files that are unfinished, or that were moved aside to be replaced.
PARTIAL = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Return the name of this step's checkpoint, push and tag."""
    return f"step-{step:08d}"


def clear_partial(folder: Path) -> None:
    """Remove what killed processes left half-made. Only for the holder of the run folder's lock.

    What was moved aside comes back, unless what was to come in its place is there.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = PARTIAL.fullmatch(path.name)
        if match and match[2] == "old" and not os.path.lexists(folder / match[1]):
            path.rename(folder / match[1])
        elif match:
            with contextlib.suppress(OSError):  # it harms nothing, and the next start tries again
                files.remove(path)


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict]:
    """Yield the rows of a metrics.jsonl, without those that a kill has torn: all with an integer ``step``.

    A value that was not finite is None.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = None
            with contextlib.suppress(ValueError):
                row = files.parse_json(line)
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield row


@dataclass(frozen=True)
class Finish:
    """How a run ended: ``finished.json`` of its folder, written after ``model/``.

    Attributes:
        step: updates attempted.
        since_best: if early stopping ended the run, the number of evaluations after the lowest validation loss, else 0.
        has_checkpoint: whether a checkpoint of ``step`` was saved.
        origin: the checkpoint that the run started from (``resume_from_checkpoint``), if any: its name and the SHA-256
            of its weights.
    """

    step: int
    since_best: int = 0
    has_checkpoint: bool = True
    origin: dict[str, str] | None = None

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the run before max_steps."""
        return self.since_best > 0

    def write(self, run_dir: Path) -> None:
        """Write the file."""
        files.write_json(run_dir / FINISH, asdict(self))


def read_finish(run_dir: Path) -> Finish | None:
    """Return how the run in this folder ended; None if it has not ended, or if the file cannot be read."""
    try:
        return Finish(**files.read_json(run_dir / FINISH))
    except (OSError, ValueError, TypeError):
        return None
