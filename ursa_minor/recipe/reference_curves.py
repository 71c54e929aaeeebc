"""Loss curves of published runs, to be drawn next to the curve of a run (``reference_curve``)."""

import bisect
import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from ursa_minor.base import checkpoint_files, paths
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe.keys import TRAINED_TOKENIZERS

EXAMPLE = "recipes/references/gpt2_124m_llmc.yaml"


class Reference(NamedTuple):
    """The validation loss of a published run.

    Attributes:
        label: the name of the run.
        validation: the name of its validation text, which is not that of our runs.
        tokenizers: Hub ids of the tokenizer in whose tokens the losses are measured.
        vocabulary: number of tokens of this tokenizer.
        tokens: numbers of training tokens, in ascending order.
        losses: the loss after each number of tokens, in nats per token of its validation text.
    """

    label: str
    validation: str
    tokenizers: list[str]
    vocabulary: int
    tokens: list[float]
    losses: list[float]

    @property
    def legend_label(self) -> str:
        """The label in a picture. It states that the validation text is not that of our runs."""
        return f"{self.label} (its own validation set, of {self.validation})"

    def has_tokenizer(self, tokenizer: str) -> bool:
        """Return whether losses in nats per token of a tokenizer can be compared with these.

        A tokenizer in a local folder is compared by the number of its tokens. If the folder cannot
        be read, the answer is True: the run reports the error when it loads the tokenizer.

        Args:
            tokenizer: the recipe key.
        """
        if tokenizer in TRAINED_TOKENIZERS:
            return False
        if Path(tokenizer).is_dir():
            return _count_tokens(Path(tokenizer)) in (self.vocabulary, None)
        repo_id, _, _ = tokenizer.partition("@")
        return repo_id in self.tokenizers

    def has_line(self, most: float) -> bool:
        """Return whether the curve has a line, and not just a point, up to a number of tokens."""
        tokens, _ = self.until(most)
        return len(tokens) > 1

    def until(self, most: float) -> tuple[list[float], list[float]]:
        """Return the tokens and losses of the curve up to a number of tokens."""
        end = bisect.bisect_right(self.tokens, most)
        return self.tokens[:end], self.losses[:end]


def problems(name: str, tokenizer: str) -> Iterator[str]:
    """Yield the errors of a reference curve for a run.

    Args:
        name: the path of its file (``load``).
        tokenizer: the recipe key.
    """
    try:
        reference = load(name)
    except BadInput as error:
        yield str(error)
        return
    if reference.has_tokenizer(tokenizer):
        return
    yield (
        f"reference_curve = {name}: the losses are in nats per token of "
        f"{reference.tokenizers[0]}, which cannot be compared with those of tokenizer = "
        f"{tokenizer}. Leave it out (--reference_curve none)"
    )


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
            "which states label, source, validation, tokenizers, vocabulary, tokens_per_step, and "
            "a loss for each step"
        ) from None


def _read(path: Path) -> Reference:
    contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    tokens_per_step = contents["tokens_per_step"]
    loss_of_step = contents["loss"]
    tokens = [float(step * tokens_per_step) for step in loss_of_step]
    losses = [float(loss) for loss in loss_of_step.values()]
    tokenizers = [str(tokenizer) for tokenizer in contents["tokenizers"]]
    is_ascending = tokens == sorted(set(tokens))
    if not is_ascending or not all(math.isfinite(loss) for loss in losses):
        raise ValueError("the steps are not in ascending order, or a loss is not finite")
    if not tokenizers:
        raise ValueError("tokenizers is empty")
    return Reference(
        label=contents["label"],
        validation=contents["validation"],
        tokenizers=tokenizers,
        vocabulary=int(contents["vocabulary"]),
        tokens=tokens,
        losses=losses,
    )


def _count_tokens(folder: Path) -> int | None:
    """Return the number of tokens of a tokenizer in a folder, or None if it cannot be read."""
    folder = checkpoint_files.model_folder_of(folder) or folder
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        definition = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        tokens = set(definition["model"]["vocab"])
        tokens |= {added["content"] for added in definition["added_tokens"]}
        return len(tokens)
    return None
