"""A task: questions of a data set that a model is scored on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TaskRow = Mapping[str, Any]  # of a data set
RULES = {
    "acc": "the likeliest ending",
    "acc_norm": "the likeliest ending per character",
    "acc_token_norm": "the likeliest ending per token",
}
LAST_WORD = {"acc": "the last word is what greedy decoding gives", "perplexity": "of the last word"}


class Question(NamedTuple):
    """A context and its endings.

    Attributes:
        context: of all endings, or one for each; an empty one is the beginning of a text.
        endings: what may follow it.
        gold: which of them is right.
        delimiter: what stands between context and ending.
        apart: ids of context and ending are those of two texts; else of one, as lm-evaluation-harness has it.
    """

    context: str | tuple[str, ...]
    endings: tuple[str, ...]
    gold: int
    delimiter: str = " "
    apart: bool = False


@dataclass(frozen=True)
class Text:
    """A field that contains one text.

    Attributes:
        is_scored: whether the text is one of the texts that are scored, rather than a context.
    """

    is_scored: bool = False


@dataclass(frozen=True)
class Texts:
    """A field that contains a list of ``count`` texts."""

    count: int


@dataclass(frozen=True)
class Choices:
    """A field that contains an object with a list of texts and a list with the label of each."""

    texts: str
    labels: str


@dataclass(frozen=True)
class Answer:
    """A field that contains the label of the right text.

    Attributes:
        labels: the permitted labels, in the order of the texts, or the name of the ``Choices``
            field whose labels are permitted.
    """

    labels: tuple[object, ...] | str


Field = Text | Texts | Choices | Answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """All that scripts, loop, metrics, curves and a model's card know of a test.

    Attributes:
        name: of its metrics, ``<name>/<score>``; lm-evaluation-harness's where it has the task.
        label: what people call it.
        scores: their names, and the rule of each.
        chance: the share that guessing scores; 0: none worth a line.
        size: how many items the whole test has; published figures are of these.
        dataset: of the Hub, and its split.
        files: the pattern of that split's files, and how many match it; of several files items are taken in turn.
        revision: the commit, where one is known; else the newest when a run begins.
        config: the data set's part; None: it has one.
        fields: the fields of a row and their kinds, which ``rows.validate`` checks.
        questions: converts a row that ``rows.validate`` has returned into a question, or into one
            question for each of two texts. Raises ValueError if the row is not an item.
        published: what others measured, by model and in the order of ``scores``, shares in per cent; None: not known.
        citations: ``MODEL, SIZE: source`` for each of these.
    """

    name: str
    label: str
    scores: Mapping[str, str]
    chance: float
    size: int
    dataset: tuple[str, str]
    files: tuple[str, int]
    fields: Mapping[str, Field]
    questions: Callable[[TaskRow], tuple[Question, ...]]
    revision: str | None = None
    config: str | None = None
    published: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    citations: tuple[str, ...] = ()

    def metric(self, score: str) -> str:
        """Return a score's name in metrics."""
        return f"{self.name}/{score}"

    @property
    def shares(self) -> list[str]:
        """The scores that are shares of 1, and shown in per cent."""
        return [score for score in self.scores if score != "perplexity"]

    def format_score(self, score: str, value: float) -> str:
        """Return a value of a score, or its error, as text: a share in per cent."""
        number = 100 * value if score in self.shares else value
        return f"{number:.2f}" if number < 1e5 else f"{number:.2e}"

    def with_errors(self, result: Mapping[str, float], unit: str = "") -> list[str]:
        """Return each score of a result with its standard error, as text; ``unit``: behind a share."""
        shares = dict.fromkeys(self.shares, unit)
        return [
            f"{self.format_score(score, result[score])}{shares.get(score, '')} ± {self.format_score(score, result[f'{score}_stderr'])}"
            for score in self.scores
        ]
