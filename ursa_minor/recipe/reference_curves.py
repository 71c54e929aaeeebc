"""Loss curves of published runs, to be drawn next to the curve of a run (``reference_curve``)."""

import bisect
import math
from pathlib import Path
from typing import NamedTuple

import yaml

from ursa_minor.base import paths
from ursa_minor.base.errors import BadInput

EXAMPLE = "recipes/references/gpt2_124m_llmc.yaml"


class Reference(NamedTuple):
    """The validation loss of a published run.

    Attributes:
        label: the name of the run.
        validation: the name of its validation text, which is not that of our runs.
        tokens: numbers of training tokens, in ascending order.
        losses: the loss after each number of tokens, in nats per token of its validation text.
    """

    label: str
    validation: str
    tokens: list[float]
    losses: list[float]

    @property
    def legend_label(self) -> str:
        """The label in a picture. It states that the validation text is not that of our runs."""
        return f"{self.label} (its own validation set, of {self.validation})"

    def until(self, most: float) -> tuple[list[float], list[float]]:
        """Return the tokens and losses of the curve up to a number of tokens."""
        end = bisect.bisect_right(self.tokens, most)
        return self.tokens[:end], self.losses[:end]


def load(name: str) -> Reference:
    """Load a reference curve.

    Args:
        name: the path of a YAML file. If it does not exist, it is looked up in the repository.

    Raises:
        BadInput: the file cannot be read, or is not a reference curve.
    """
    path = Path(name) if Path(name).is_file() else paths.ROOT / name
    try:
        return _read(path)
    except (
        OSError,
        yaml.YAMLError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        reason = " ".join(str(error).split())  # one line
        raise BadInput(
            f"reference_curve = {name}: cannot be read ({reason}). Use a file such as {EXAMPLE}, "
            "which states label, source, validation, tokens_per_step, and a loss for each step"
        ) from None


def _read(path: Path) -> Reference:
    contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    tokens_per_step = contents["tokens_per_step"]
    loss_of_step = contents["loss"]
    tokens = [float(step * tokens_per_step) for step in loss_of_step]
    losses = [float(loss) for loss in loss_of_step.values()]
    is_ascending = tokens == sorted(set(tokens))
    if not is_ascending or not all(math.isfinite(loss) for loss in losses):
        raise ValueError("the steps are not in ascending order, or a loss is not finite")
    return Reference(contents["label"], contents["validation"], tokens, losses)
