"""Encode the items of a task for a tokenizer, and compute scores from a model's answers.

An item has one or two variants of its text (HellaSwag has two), and a question for each variant.

Legend: N items, E endings of an item.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.evaluation import metrics
from ursa_minor.evaluation.likelihood import EncodedQuestion, ModelAnswer, not_finite, tokens_read
from ursa_minor.evaluation.metrics import Metric
from ursa_minor.evaluation.task import Question, Task
from ursa_minor.evaluation.task_data import Item, Items


class EncodedPair(NamedTuple):
    """The ids of a context and of an ending after it."""

    context: list[int]
    ending: list[int]


EncodedItem = list[list[EncodedPair]]  # for each variant, the pairs of its endings


class EncodedTask:
    """The encoded items of a task. Items whose endings do not fit into the context are left out.

    Args:
        context_length: the number of tokens that the model can read; None if it has no limit. The
            last token of an ending is only predicted, not read.

    Attributes:
        items: the items that are scored.
        left_out: the number of items that are left out.
        commit: the commit of the data set; None for local files.
        revision: the commit of the public data set if all of its items are scored, else None.
        questions: the questions of the first variant in the order of the items, then those of the
            second variant. An item has several questions if its endings have different contexts.
        tokens: for each variant, N arrays (E,) with the lengths of the endings in tokens.
        characters: for the first variant, N arrays (E,) with the lengths in characters.
        gold: (N,) the index of the right ending of each item.

    Raises:
        BadInput: the tokenizer cannot encode an item, an ending has no token, or no item fits.
    """

    def __init__(
        self,
        task: Task,
        items: Items,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int | None = None,
    ):
        encoded_items = _encode_items(items, tokenizer)
        longest_endings = [_longest_ending(encoded_item) for encoded_item in encoded_items]
        max_length = math.inf if context_length is None else context_length
        fitting = [index for index, length in enumerate(longest_endings) if length <= max_length]
        if not fitting:
            raise BadInput(
                f"{task.label} cannot be scored, because every item has an ending that is longer "
                f"than the model's context of {context_length} tokens. The shortest of these "
                f"endings has {min(longest_endings)} tokens. Leave this task out, or use a model "
                f"with a larger --sequence_length"
            )

        self.task = task
        self.commit = items.commit
        self.items = [items[index] for index in fitting]
        self.left_out = len(items) - len(self.items)
        self.revision = None
        if items.complete and not self.left_out:
            self.revision = items.commit

        first_questions = [item.questions[0] for item in self.items]
        self.gold = np.array([question.gold for question in first_questions])
        self.characters = [
            np.array([len(ending) for ending in question.endings]) for question in first_questions
        ]

        self.tokens: list[list[np.ndarray]] = []
        self.questions: list[EncodedQuestion] = []
        fitting_items = [encoded_items[index] for index in fitting]
        for variant in zip(*fitting_items, strict=True):
            token_counts = []
            for pairs in variant:
                token_counts.append(np.array([len(pair.ending) for pair in pairs]))
                self.questions += _questions(pairs)
            self.tokens.append(token_counts)

    def longer_than(self, context_length: int | None) -> int:
        """Return the number of questions that exceed a context and are truncated from the left."""
        max_length = context_length or math.inf
        return sum(tokens_read(question) > max_length for question in self.questions)

    def sums(self, answers: Sequence[ModelAnswer], variant: int = 0) -> list[np.ndarray]:
        """Return N arrays (E,) with the log-likelihoods of the endings in nats.

        Args:
            answers: the answers to ``questions``.
            variant: the index of the variant of the text; -1 is the last one.
        """
        num_endings = [len(tokens) for tokens in chain.from_iterable(self.tokens)]
        all_nats = np.concatenate([answer.nats for answer in answers])
        ends = np.cumsum(num_endings)
        by_item = np.split(all_nats, ends[:-1])  # all items of the first variant come first
        variant_index = variant % len(self.tokens)
        start = variant_index * len(self.items)
        return by_item[start : start + len(self.items)]

    def predictions(self, answers: Sequence[ModelAnswer]) -> dict[str, np.ndarray]:
        """Return the chosen ending of each item by each score, (N,). Ties go to the first ending.

        For a task that predicts the last word, 0 is the right word and -1 is any other word.
        """
        if self.task.predicts_last_word:
            chosen = [0 if answer.greedy else -1 for answer in answers]
            return {"acc": np.array(chosen)}
        first_sums = self.sums(answers)
        last_sums = self.sums(answers, -1)  # the score per token uses the last variant
        predictions = {
            "acc": metrics.likeliest(first_sums),
            "acc_norm": metrics.likeliest(first_sums, self.characters),
            "acc_token_norm": metrics.likeliest(last_sums, self.tokens[-1]),
        }
        return {score: chosen for score, chosen in predictions.items() if score in self.task.scores}

    def result(
        self, answers: Sequence[ModelAnswer], compute: Mapping[str, Metric] = metrics.PLAIN
    ) -> dict[str, float]:
        """Return each score, its standard error (``<score>_stderr``), and the number of ``items``.

        Args:
            answers: the answers to ``questions``.
            compute: the metrics by name.

        Raises:
            BadInput: a log-likelihood is not finite. The message names the item.
        """
        self._check_finite(answers)
        if self.task.predicts_last_word:
            scores = compute["last_word"](
                predictions=np.concatenate(self.sums(answers)),
                references=np.array([answer.greedy for answer in answers]),
            )
        else:
            scores = self._multiple_choice(answers, 0, compute)
            if len(self.tokens) > 1:  # the score per token uses the last variant
                last_scores = self._multiple_choice(answers, -1, compute)
                for name in ("acc_token_norm", "acc_token_norm_stderr"):
                    scores[name] = last_scores[name]

        result: dict[str, float] = {}
        for score in self.task.scores:
            result[score] = scores[score]
            result[f"{score}_stderr"] = scores[f"{score}_stderr"]
        result["items"] = len(self.items)
        return result

    def result_by_part(self, answers: Sequence[ModelAnswer]) -> dict[str, dict[str, float]]:
        """Return the scores, standard errors and ``items`` of each part of a task with choices.

        The parts are in the order in which they occur. Every item must have one.
        """
        rows_by_part: dict[str, list[int]] = {}
        for index, item in enumerate(self.items):
            assert item.part is not None
            rows_by_part.setdefault(item.part, []).append(index)
        predictions = self.predictions(answers)
        results = {}
        for part, rows in rows_by_part.items():
            result: dict[str, float] = {}
            for score, chosen in predictions.items():
                result |= metrics.accuracy(chosen[rows] == self.gold[rows], score)
            result["items"] = len(rows)
            results[part] = result
        return results

    def _multiple_choice(
        self, answers: Sequence[ModelAnswer], variant: int, compute: Mapping[str, Metric]
    ) -> dict[str, float]:
        return compute["multiple_choice"](
            predictions=self.sums(answers, variant),
            characters=self.characters,
            tokens=self.tokens[variant],
            references=self.gold,
        )

    def _check_finite(self, answers: Sequence[ModelAnswer]) -> None:
        for variant in range(len(self.tokens)):
            sums = self.sums(answers, variant)
            for item, nats in zip(self.items, sums, strict=True):
                for number, value in enumerate(nats.tolist(), 1):
                    if not math.isfinite(value):
                        raise not_finite(f"{item.location}: ending {number}", value)

    def rows(self, answers: Sequence[ModelAnswer]) -> Iterator[dict]:
        """Yield the details of each item: log-likelihoods, lengths, predictions and the label.

        Log-likelihoods are sums in nats. Fields with ``raw_`` are those of the second variant.
        """
        sums = self.sums(answers)
        raw_sums = self.sums(answers, -1)
        predictions = self.predictions(answers)
        for index, item in enumerate(self.items):
            row = {
                "item": item.location,
                "label": int(self.gold[index]),
                "sum_logprob": sums[index].tolist(),
                "tokens": self.tokens[0][index].tolist(),
                "characters": self.characters[index].tolist(),
            }
            if len(self.tokens) > 1:
                row["raw_sum_logprob"] = raw_sums[index].tolist()
                row["raw_tokens"] = self.tokens[1][index].tolist()
            for score, chosen in predictions.items():
                row[f"{score}_prediction"] = int(chosen[index])
            yield row


def _encode_items(items: Items, tokenizer: PreTrainedTokenizerBase) -> list[EncodedItem]:
    """Encode all questions of the items. Raise BadInput for an item without a token."""
    # The tokenizer is called once for all questions, because it encodes many texts in parallel.
    questions = list(chain.from_iterable(item.questions for item in items))
    pairs = iter(encode(questions, tokenizer))
    encoded_items = []
    for item in items:
        encoded_item = []
        for question in item.questions:
            encoded_item.append([next(pairs) for _ in question.endings])
        _check_has_tokens(item, encoded_item)
        encoded_items.append(encoded_item)
    return encoded_items


def _check_has_tokens(item: Item, encoded_item: EncodedItem) -> None:
    for pair in chain.from_iterable(encoded_item):
        if not pair.context or not pair.ending:
            raise BadInput(
                f"{item.location}: the tokenizer returns no token for the context or for an "
                f"ending. Correct this item, or use another tokenizer"
            )


def _longest_ending(encoded_item: EncodedItem) -> int:
    return max(len(pair.ending) for pair in chain.from_iterable(encoded_item))


def _questions(pairs: Sequence[EncodedPair]) -> list[EncodedQuestion]:
    """Join successive endings that have the same context into one question."""
    questions = []
    for context, same_context in groupby(pairs, key=lambda pair: pair.context):
        questions.append((context, [pair.ending for pair in same_context]))
    return questions


class _TextPair(NamedTuple):
    """The text of a context, and of an ending with the delimiter before it."""

    context: str
    ending: str
    is_separate: bool  # see Question.encode_separately


def encode(questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> list[EncodedPair]:
    """Encode each ending of each question as lm-evaluation-harness and build-nanogpt do.

    - lm-evaluation-harness encodes context and ending as one text. The ids after those of the
      context alone are the ending. White space at the end of a context belongs to the ending.
    - build-nanogpt encodes context and ending as two texts (``Question.encode_separately``).

    Special tokens that the tokenizer puts before every text precede the context. An empty context
    becomes the token that starts a document.
    """
    pairs = _text_pairs(questions)
    context_texts = []
    full_texts = []  # context and ending, or the ending alone if it is encoded separately
    for pair in pairs:
        if pair.is_separate:
            context_texts.append(pair.context)
            full_texts.append(pair.ending)
        else:
            context_texts.append(pair.context.rstrip())
            full_texts.append(pair.context + pair.ending)
    ids_of_contexts = _ids(tokenizer, context_texts)
    ids_of_full_texts = _ids(tokenizer, full_texts)

    special_prefix = tokenizer("")["input_ids"]
    document_start = tokenizer.bos_token_id
    if document_start is None:
        document_start = tokenizer.eos_token_id
    encoded_pairs = []
    for pair, context_ids, full_ids in zip(pairs, ids_of_contexts, ids_of_full_texts, strict=True):
        ending_ids = full_ids
        if pair.context:
            if not pair.is_separate:
                ending_ids = full_ids[len(context_ids) :]
            encoded_pairs.append(EncodedPair(special_prefix + context_ids, ending_ids))
        else:
            if full_ids[:1] == [document_start]:  # do not repeat this token
                ending_ids = full_ids[1:]
            encoded_pairs.append(EncodedPair([document_start], ending_ids))
    return encoded_pairs


def _text_pairs(questions: Sequence[Question]) -> list[_TextPair]:
    pairs = []
    for question in questions:
        contexts = question.context
        if isinstance(contexts, str):
            contexts = (contexts,) * len(question.endings)
        for context, ending in zip(contexts, question.endings, strict=True):
            text = question.delimiter + ending
            pairs.append(_TextPair(context, text, question.encode_separately))
    return pairs


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text without the special tokens around it.

    Raises:
        BadInput: the tokenizer has no ids for a text.
    """
    unique_texts = list(dict.fromkeys(texts))
    try:
        encoded = tokenizer(unique_texts, add_special_tokens=False, verbose=False, truncation=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        message = (
            f"the tokenizer cannot encode the text of the items ({first_line(error)}). "
            f"Leave this task out, or use another tokenizer"
        )
        if "UNK" in str(error):
            message = (
                "the tokenizer cannot encode the text of the items, because it has ids only for "
                "the characters of the text that it was created from. Leave this task out, or use "
                "a model that was trained with --tokenizer bpe"
            )
        raise BadInput(message) from None
    ids_of_text = dict(zip(unique_texts, encoded["input_ids"], strict=True))
    return [ids_of_text[text] for text in texts]
