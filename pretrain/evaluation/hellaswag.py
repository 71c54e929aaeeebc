"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest after a context? In three scores.

- ``acc``, ``acc_norm``: on lm-evaluation-harness's text (activity label, ctx_b capitalised, brackets cleaned away) the
  likeliest ending, and the likeliest per character.
- ``acc_token_norm``: build-nanogpt's and llm.c's: on ``ctx`` as it stands the likeliest ending per token.

Legend: N items, Q questions (an item's text under one rule), 4 endings each.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_download
from transformers import PreTrainedTokenizerBase

from pretrain.base import files
from pretrain.base.errors import BadInput
from pretrain.evaluation.record import Task

DATASET, FILE = "Rowan/hellaswag", "data/validation-00000-of-00001.parquet"
REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"
FIELDS = ("activity_label", "ctx_a", "ctx_b", "ctx", "endings", "label")
ENDINGS = 4
FAULTS_SHOWN = 10
HARNESS, OTHERS = "lm-evaluation-harness", "build-nanogpt, llm.c"
RULES = {"acc": HARNESS, "acc_norm": f"{HARNESS}: per character", "acc_token_norm": f"{OTHERS}: mean per token"}
SCORES = tuple(RULES)
# What others measured, in per cent, in the order of SCORES; None: not found published under this rule.
PUBLISHED = {
    "GPT-2 124M": (28.92, 31.14, 29.55),
    "GPT-2 355M": (None, None, 37.52),
    "GPT-2 774M": (None, None, 43.20),
    "GPT-2 1558M": (40.04, 50.89, 48.93),
    "GPT-3 124M": (None, None, 33.7),
}
CITATIONS = (
    "GPT-2 124M, 1558M: build-nanogpt, hellaswag.py (its own and the harness's scores of OpenAI's weights)",
    "GPT-2 355M, 774M: llm.c, dev/vislog.ipynb",
    "GPT-3 124M: Brown et al. 2020, table H.1 (zero-shot, OpenAI's own text and rule)",
)


@dataclass(frozen=True)
class Item:
    """A question as it was written: context and endings for the harness's scores, and as they stand."""

    where: str  # file and line, for messages
    context: str
    endings: tuple[str, ...]
    raw_context: str
    raw_endings: tuple[str, ...]
    label: int


def read_items(data_files: Sequence[str] | None = None, limit: int = 0) -> list[Item]:
    """Read items from JSON lines or Parquet, or the validation split from the Hub (10,042 items, fetched once).

    Args:
        data_files: paths; None: the Hub's, at a fixed commit.
        limit: only the first so many; 0 = all.

    Raises BadInput where they cannot be had, and with file and line of each fault (the first ten).
    """
    paths = [_fetch()] if data_files is None else [Path(name) for name in data_files]
    items, faults = [], []
    for where, row in (found for path in paths for found in _rows(path)):
        if limit and len(items) + len(faults) == limit:
            break
        try:
            items.append(_item(where, row))
        except BadInput as fault:
            faults += fault.lines
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more such items"] if len(faults) > FAULTS_SHOWN else []
        raise BadInput([*faults[:FAULTS_SHOWN], *more])
    if not items:
        raise BadInput(f"{', '.join(map(str, paths))}: holds no HellaSwag item")
    return items


class HellaSwag:
    """Items, encoded for a tokenizer and some of the ``SCORES``.

    Attributes:
        questions: (context, four endings) as ids, Q of them: those of each text in the items' order.

    Raises BadInput where the tokenizer cannot write an item, or makes nothing of an ending.
    """

    def __init__(self, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, scores: Sequence[str] = SCORES):
        self.items, self.wanted = items, scores
        self.questions: list[tuple[list[int], list[list[int]]]] = []
        if {"acc", "acc_norm"} & set(scores):
            self.questions += _harness_questions(items, tokenizer)
        if "acc_token_norm" in scores:
            self.questions += _raw_questions(items, tokenizer)
        for number, (context, endings) in enumerate(self.questions):
            if not context or not all(endings):
                where = items[number % len(items)].where
                raise BadInput(f"{where}: this tokenizer makes no token of its context or of one of its endings")
        self.tokens = np.array([[len(ids) for ids in endings] for _, endings in self.questions])
        self.characters = np.array([[len(ending) for ending in item.endings] for item in items])
        self.labels = np.array([item.label for item in items])

    def longer_than(self, context_length: int | None) -> int:
        """Return how many questions a model's context does not hold whole: they lose tokens from the left.

        Raises BadInput where the longest ending alone does not fit (its last token is predicted, not read).
        """
        if context_length is None:
            return 0
        if (longest := self.tokens.max()) > context_length:
            raise BadInput(
                f"HellaSwag cannot be scored: the longest ending of these items has {longest} tokens with this tokenizer, "
                f"and the model's context is {context_length}; it needs at least {longest} (in training: "
                f"--sequence_length, or --hellaswag_steps 0)"
            )
        lengths = np.array([len(context) for context, _ in self.questions]) + self.tokens.max(1) - 1
        return int((lengths > context_length).sum())

    def predictions(self, likelihoods: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the ending chosen under each score, (N,) each; of equals the first, as in the harness.

        Args:
            likelihoods: of each question the log-likelihoods of its endings in nats, (4,).
        """
        number = len(self.items)
        first, last = np.stack(likelihoods[:number]), np.stack(likelihoods[-number:])
        values = {
            "acc": first,
            # An ending of brackets only is cleaned to nothing, and never the likeliest.
            "acc_norm": np.where(self.characters, first / np.maximum(1, self.characters), -np.inf),
            "acc_token_norm": last / self.tokens[-number:],
        }
        return {score: values[score].argmax(1) for score in self.wanted}

    def scores(self, predictions: dict[str, np.ndarray]) -> dict[str, float]:
        """Return each score and its standard error (``acc``, ``acc_stderr``, ...) as shares of 1.

        The error is the sample's deviation / sqrt(n), as the harness has it.
        """
        result = {}
        for score in self.wanted:
            share = float((predictions[score] == self.labels).mean())
            result[score] = share
            result[f"{score}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(self.labels) - 1))
        return result

    def result(self, likelihoods: Sequence[np.ndarray]) -> dict[str, float]:
        """Return the scores of these log-likelihoods (as ``predictions`` has them), and ``items``."""
        return self.scores(self.predictions(likelihoods)) | {"items": len(self.items)}


TASK = Task(
    name="hellaswag",
    label="HellaSwag",
    scores=RULES,
    chance=1 / ENDINGS,
    size=10_042,
    dataset=(DATASET, "validation"),
    published=PUBLISHED,
    citations=CITATIONS,
    read=read_items,
    encode=HellaSwag,
)


def _fetch() -> Path:
    try:
        return Path(hf_hub_download(DATASET, FILE, repo_type="dataset", revision=REVISION))
    except Exception as error:  # the Hub's client, the cache and the network each raise their own kinds
        raise BadInput(
            f"HellaSwag ({DATASET} of the Hub) cannot be loaded: {_first_line(error)}. It needs a network "
            f"once; else give a file with its items: train.py --hellaswag_files FILE (or --hellaswag_steps 0), "
            f"eval_hellaswag.py --data_files FILE"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with open(path, "rb") as file:
            if path.suffix == ".parquet":
                import pyarrow.parquet as pq

                for number, row in enumerate(pq.read_table(file).to_pylist(), 1):
                    yield f"{path}: row {number}", row
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = files.parse_json(line)
                    except ValueError as error:
                        row = error
                    yield f"{path}: line {number}", row
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # pyarrow's: this is not a Parquet file
        raise BadInput(f"{path}: cannot be read: {_first_line(error)}") from None


def _item(where: str, row: object) -> Item:
    if not isinstance(row, dict):
        raise BadInput(f"{where}: is not a JSON object{f' ({row})' if isinstance(row, Exception) else ''}")
    if missing := [name for name in FIELDS if row.get(name) is None]:
        raise BadInput(f"{where}: has no {', '.join(missing)}; a HellaSwag item has {', '.join(FIELDS)}")
    label, ctx_a, ctx_b, ctx, endings, answer = (row[name] for name in FIELDS)
    if not isinstance(endings, list) or len(endings) != ENDINGS:
        raise BadInput(f"{where}: endings must be a list of {ENDINGS} texts")
    if not all(isinstance(text, str) for text in (label, ctx_a, ctx_b, ctx, *endings)):
        raise BadInput(f"{where}: activity_label, ctx_a, ctx_b, ctx and each of endings must be text")
    for number, ending in enumerate(endings):
        if not ending.strip():
            raise BadInput(f"{where}: ending {number} is empty")
    if not ctx.strip():
        raise BadInput(f"{where}: ctx is empty")
    if str(answer) not in map(str, range(ENDINGS)):
        hint = "; the test split has none: take the validation split" if answer == "" else ""
        raise BadInput(f"{where}: label = {answer!r}: must be 0, 1, 2 or 3{hint}")
    context = _clean(f"{label}: {ctx_a} {ctx_b.capitalize()}")
    return Item(where, context, tuple(map(_clean, endings)), ctx, tuple(endings), int(answer))


def _clean(text: str) -> str:
    """Clean a text as the harness does (lm_eval/tasks/hellaswag): WikiHow's headings left brackets behind."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _harness_questions(items: Sequence[Item], tokenizer: PreTrainedTokenizerBase) -> list:
    """Encode context and ending as one text and take what follows the context's own ids, as the harness does.

    White space at a context's end belongs to the ending. A beginning-of-text token that the tokenizer puts stands.
    """
    contexts = _ids(tokenizer, [item.context.rstrip() for item in items])
    wholes = iter(_ids(tokenizer, [f"{item.context} {ending}" for item in items for ending in item.endings]))
    return [(context, [next(wholes)[len(context) :] for _ in range(ENDINGS)]) for context in contexts]


def _raw_questions(items: Sequence[Item], tokenizer: PreTrainedTokenizerBase) -> list:
    """Encode context and ending apart, as build-nanogpt does; a beginning-of-text token that the tokenizer puts stands."""
    contexts = _ids(tokenizer, [item.raw_context for item in items])
    texts = [f" {ending}" for item in items for ending in item.raw_endings]
    endings = iter(_ids(tokenizer, texts, add_special_tokens=False))
    return [(context, [next(endings) for _ in range(ENDINGS)]) for context in contexts]


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
    try:
        encoded = tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False, truncation=False
        )
    except Exception as error:  # tokenizers raises bare Exceptions
        raise BadInput(f"the tokenizer cannot write HellaSwag's text: {_first_line(error)}") from None
    return encoded["input_ids"]
