"""Names of the files and folders in a run folder, and the contents of three of them.

``metrics.jsonl`` has the metrics of each step, ``samples.txt`` the texts that the model generated
during training, and ``finished.json`` states how the run ended.
"""

import ast
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from ursa_minor.base import files

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CURVES = "curves.png"
LOG = "run.log"
FINISH = "finished.json"
TRACKER_IDS = "trackers.json"
# Folders:
TENSORBOARD = "tensorboard"
MODEL_FOLDER = "model"
PENDING = "hub"  # pushes that are not yet sent
CHECKPOINTS = "checkpoints"
# Files of a checkpoint. Programs such as vLLM load every safetensors file of a model folder, so the
# optimizer's file is in a subfolder.
MODEL = "model.safetensors"
TRAINING = "training"
OPTIMIZER = f"{TRAINING}/optimizer.safetensors"
STATE = f"{TRAINING}/state.json"
MANIFEST = "manifest.json"
RESUME_FILES = (MODEL, OPTIMIZER, STATE)  # the files that a resumed run reads
# The entry "kept" in the manifest of a checkpoint that is kept for a learning curve. It is COMPLETE
# or WEIGHTS. With WEIGHTS, the checkpoint has no TRAINING folder, or loses it when it is no longer
# needed to resume the run.
KEPT = "kept"
COMPLETE = "complete"
WEIGHTS = "weights"
# The files of a model folder, with which Transformers loads it. Files of a tokenizer that are not
# listed, such as a SentencePiece model, repeat the contents of tokenizer.json.
MODEL_FILE = re.compile(
    r"(generation_)?config\.json|model[\w-]*\.safetensors(\.index\.json)?"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|merges\.txt|chat_template\.jinja"
)

# The line above each sample in samples.txt, which ``sample_heading`` writes. Groups: step, prompt.
SAMPLE_HEADING = re.compile(r"^==== step (\d+) · prompt (.*) ====$", re.MULTILINE)
STEP = re.compile(r"step-(\d{8})")  # name of a checkpoint, push or tag
# Temporary names of base/files.py: "tmp" for unfinished files and folders, and "old" for folders
# that are being replaced.
PARTIAL = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Return the name of the checkpoint, push and tag of a step."""
    return f"step-{step:08d}"


def tokens_name(step: int, tokens_per_step: int) -> str:
    """Return the tag of a step by the number of tokens, such as ``tokens-10M``.

    The number is the roundest one that this step is the first to reach: of the numbers above
    ``(step - 1) * tokens_per_step`` and up to ``step * tokens_per_step``, the one with the most
    zeros at its end, and the largest of several. Two steps never have the same tag.
    """
    tokens = step * tokens_per_step
    before = tokens - tokens_per_step
    unit = 10 ** len(str(tokens))
    while tokens // unit * unit <= before:
        unit //= 10
    rounded = tokens // unit * unit
    for suffix, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if rounded >= size:
            number = (Decimal(rounded) / size).normalize()
            return f"tokens-{number:f}{suffix}"
    return f"tokens-{rounded}"


def clear_partial(folder: Path) -> None:
    """Remove the unfinished files of killed processes. Restore folders that were being replaced.

    Call this only while holding the lock of the run folder.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        match = PARTIAL.fullmatch(path.name)
        if match is None:
            continue
        name, kind = match.groups()
        target = folder / name
        if kind == "old" and not os.path.lexists(target):
            # The process was killed between renaming the old folder and renaming the new one.
            path.rename(target)
        else:
            with contextlib.suppress(OSError):  # it does no harm, and the next start tries again
                files.remove(path)


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl as a list. See ``iterate_metrics``."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict]:
    """Yield the rows of a metrics.jsonl. Nothing is yielded if the file does not exist.

    Each row has an integer ``step``. NaN and infinity are None. Lines that a killed process has not
    completed are skipped.
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


def sample_heading(step: int, prompt: str) -> str:
    """Return the line above a sample in samples.txt."""
    return f"==== step {step} · prompt {prompt!r} ===="


def read_first_prompt(path: Path) -> str | None:
    """Return the prompt of the first sample in a samples.txt, or None if there is none."""
    if not path.is_file():
        return None
    heading = SAMPLE_HEADING.search(path.read_text(encoding="utf-8", errors="replace"))
    if heading is None:
        return None
    try:
        prompt = ast.literal_eval(heading[2])
    except (ValueError, SyntaxError):  # the user has edited the file
        return None
    return prompt if isinstance(prompt, str) else None


@dataclass(frozen=True)
class Finish:
    """How a run ended: the contents of ``finished.json``, which is written after ``model/``.

    Attributes:
        step: updates attempted.
        since_best: number of evaluations after the lowest validation loss if early stopping ended
            the run, else 0.
        has_checkpoint: whether a complete checkpoint of ``step`` was saved.
        weights_step: the step of the weights in ``model/``, or None if it is ``step``.
        origin: the checkpoint that the run started from (``resume_from_checkpoint``), or None. The
            keys are ``checkpoint``, its name, and ``sha256``, that of its weights.
        max_steps: the recipe's length of the run, which may have been computed from
            ``num_train_epochs``. None in the files of earlier versions.
    """

    step: int
    since_best: int = 0
    has_checkpoint: bool = True
    weights_step: int | None = None
    origin: dict[str, str] | None = None
    max_steps: int | None = None

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the run before max_steps."""
        return self.since_best > 0

    def write(self, run_dir: Path) -> None:
        """Write ``finished.json``."""
        files.write_json(run_dir / FINISH, asdict(self))


def read_finish(run_dir: Path) -> Finish | None:
    """Return how the run in a folder ended, or None if it has not ended.

    The result is also None if ``finished.json`` cannot be read.
    """
    try:
        return Finish(**files.read_json(run_dir / FINISH))
    except (OSError, ValueError, TypeError):
        return None
