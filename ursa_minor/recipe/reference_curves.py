"""The validation loss of a published run, as a file that a recipe names, for pictures."""

import bisect
import math
from pathlib import Path
from typing import NamedTuple

import yaml

from ursa_minor.base import paths
from ursa_minor.base.errors import BadInput


class Reference(NamedTuple):
    """A run of others: tokens, rising, and the losses there, in nats per token of *its* validation text."""

    label: str
    validation: str
    tokens: list[float]
    losses: list[float]

    @property
    def words(self) -> str:
        """The name in a picture: whose run, and that it was validated on another text than ours."""
        return f"{self.label} (its own validation set, of {self.validation})"

    def until(self, most: float) -> tuple[list[float], list[float]]:
        """Return the curve up to so many tokens."""
        end = bisect.bisect_right(self.tokens, most)
        return self.tokens[:end], self.losses[:end]


def load(name: str) -> Reference:
    """Read a reference curve; a name that is not here is one of the repository. Raises BadInput where it is not one."""
    path = Path(name) if Path(name).is_file() else paths.ROOT / name
    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
        tokens = [float(step * contents["tokens_per_step"]) for step in contents["loss"]]
        curve = Reference(
            contents["label"],
            contents["validation"],
            tokens,
            [*map(float, contents["loss"].values())],
        )
        if tokens != sorted({*tokens}) or not all(map(math.isfinite, curve.losses)):
            raise ValueError("its steps do not rise, or a loss is not finite")
    except (
        OSError,
        yaml.YAMLError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise BadInput(
            f"reference_curve = {name}: cannot be read ({' '.join(str(error).split())}); give a file like "
            f"recipes/references/gpt2_124m_llmc.yaml: label, source, validation, tokens_per_step, loss by step"
        ) from None
    return curve
