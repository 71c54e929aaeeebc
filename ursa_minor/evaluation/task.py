"""Define a task: a data set whose rows become questions on which a model is scored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TaskRow = Mapping[str, Any]  # a row of a data set

# Each score and its rule. The rules are part of the metric names in model cards on the Hub. A later
# push replaces the values with the same name, so the wording must not change.
RULES = {
    "acc": "the likeliest ending",
    "acc_norm": "the likeliest ending per character",
    "acc_token_norm": "the likeliest ending per token",
}
LAST_WORD = {"acc": "the last word is what greedy decoding gives", "perplexity": "of the last word"}


class Question(NamedTuple):
    """A context and the endings among which a model chooses.

    Attributes:
        context: one context for all endings, or a tuple with one context for each ending. An empty
            context is the beginning of a document.
        endings: the texts that may follow the context.
        gold: the index of the right ending.
        delimiter: the text between a context and an ending.
        encode_separately: whether context and ending are encoded as two texts. By default they are
            encoded as one text, as in lm-evaluation-harness.
    """

    context: str | tuple[str, ...]
    endings: tuple[str, ...]
    gold: int
    delimiter: str = " "
    encode_separately: bool = False


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
    """A field that contains an object with a list of texts and a list with the label of each.

    Attributes:
        texts: the name of the list of texts.
        labels: the name of the list of labels.
    """

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
    """The definition of a task, from which scripts, metrics, curves and model cards are derived.

    Attributes:
        name: the prefix of its metrics, ``<name>/<score>``; the name in lm-evaluation-harness if
            the task exists there.
        label: the name in tables, pictures and messages.
        scores: the name of each score and the rule by which it is computed.
        chance: the score of random guessing as a fraction; 0 if it is not worth a line in a table.
        size: the number of items of the complete split, on which published scores are measured.
        dataset: the id of the data set on the Hub, and its split.
        files: a glob pattern for the files of the split, and the number of files that match it.
        fields: the fields of a row and their types, which ``rows.validate`` checks.
        questions: converts a row that ``rows.validate`` has returned into one question, or into two
            if there are two variants of the text. Raises ValueError if the row is not an item.
        revision: the commit of the data set; None for the newest commit when a run starts.
        config: the configuration of the data set; None if it has only one.
        part_field: the field with the name of the part that a row belongs to; None if the task has
            no parts.
        published: scores that others have measured, by the name of the model: one value for each of
            ``scores``, fractions in per cent, None if unknown.
        citations: the sources of the published scores, in the form ``MODEL, SIZE: source``.
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
    part_field: str | None = None
    published: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    citations: tuple[str, ...] = ()

    @property
    def predicts_last_word(self) -> bool:
        """Whether a question has a single ending, the last word of a text."""
        return self.scores is LAST_WORD

    @property
    def shares(self) -> list[str]:
        """The scores that are fractions, which are shown in per cent."""
        return [score for score in self.scores if score != "perplexity"]

    def metric(self, score: str) -> str:
        """Return the name of the metric of a score."""
        return f"{self.name}/{score}"

    def format_score(self, score: str, value: float) -> str:
        """Return the value or the standard error of a score as text; a fraction in per cent."""
        number = value
        if score in self.shares:
            number = 100 * value
        return f"{number:.2f}" if number < 1e5 else f"{number:.2e}"

    def format_with_errors(self, result: Mapping[str, float], unit: str = "") -> list[str]:
        """Return each score of a result with its standard error as text.

        Args:
            result: see ``format_with_error``.
            unit: unit that is written after each value in per cent.
        """
        texts = []
        for score in self.scores:
            value_unit = unit if score in self.shares else ""
            texts.append(self.format_with_error(score, result, value_unit))
        return texts

    def format_with_error(self, score: str, result: Mapping[str, float], unit: str = "") -> str:
        """Return a score of a result as text, with its standard error.

        The standard error is left out for a single item, because it is unknown.

        Args:
            result: the scores, their standard errors, and the number of ``items``.
            unit: is written after the score.
        """
        value = self.format_score(score, result[score])
        text = f"{value}{unit}"
        if result["items"] > 1:
            error = self.format_score(score, result[f"{score}_stderr"])
            text += f" ± {error}"
        return text
