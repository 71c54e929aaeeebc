"""A task's items, encoded for a tokenizer, and what a model's answers score on them.

Legend: N items, E endings of an item.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from transformers import PreTrainedTokenizerBase

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.evaluation import metrics
from ursa_minor.evaluation.likelihood import EncodedQuestion, ModelAnswer, not_finite, tokens_read
from ursa_minor.evaluation.metrics import Metric
from ursa_minor.evaluation.task import LAST_WORD, Question, Task
from ursa_minor.evaluation.task_data import Items


class EncodedTask:
    """Items, encoded for a tokenizer, those whose endings a model's context holds.

    Args:
        context_length: in tokens, of which an ending's last one is predicted, not read; None: no limit.

    Attributes:
        items: those that are scored; ``left_out``: how many others there were.
        commit: of the data set; None for files.
        revision: of the public data set, if all of its items are scored; else None.
        questions: (context, endings) as ids: those of a text in the items' order, then those of the next.
        tokens: of each text the endings' tokens, N times (E,).
        characters: of the first text the endings' characters, N times (E,).
        gold: the right endings, (N,).

    Raises BadInput where the tokenizer cannot write an item, or makes nothing of an ending, and where no item fits.
    """

    def __init__(
        self,
        task: Task,
        items: Items,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int | None = None,
    ):
        self.task, self.commit = task, items.commit
        pairs = iter(encode([question for item in items for question in item.questions], tokenizer))
        encoded_items = [
            [[next(pairs) for _ in question.endings] for question in item.questions]
            for item in items
        ]
        for item, texts in zip(items, encoded_items, strict=True):
            if not all(context and ending for text in texts for context, ending in text):
                raise BadInput(
                    f"{item.where}: this tokenizer makes no token of its context or of one of its endings"
                )
        longest = [
            max(len(ending) for text in texts for _, ending in text) for texts in encoded_items
        ]
        fits = [
            i for i, most in enumerate(longest) if context_length is None or most <= context_length
        ]
        if not fits:
            raise BadInput(
                f"{task.label} cannot be scored: each item has an ending of more tokens than the model's context, "
                f"{context_length}; the longest has {max(longest)} (in training: --sequence_length, or other --tasks)"
            )
        self.items, self.left_out = [items[i] for i in fits], len(items) - len(fits)
        self.revision = items.commit if items.complete and not self.left_out else None
        self.gold = np.array([item.questions[0].gold for item in self.items])
        self.characters = [np.array([*map(len, item.questions[0].endings)]) for item in self.items]
        by_text = list(zip(*(encoded_items[i] for i in fits), strict=True))
        self.tokens = [
            [np.array([len(ending) for _, ending in item_pairs]) for item_pairs in text]
            for text in by_text
        ]
        self.questions: list[EncodedQuestion] = [
            (context, [ending for _, ending in same])
            for text in by_text
            for item_pairs in text
            for context, same in groupby(item_pairs, key=lambda pair: pair[0])
        ]

    def longer_than(self, context_length: int | None) -> int:
        """Return how many questions a model's context does not hold whole: they lose tokens from the left."""
        return sum(
            tokens_read(question) > (context_length or math.inf) for question in self.questions
        )

    def sums(self, answers: Sequence[ModelAnswer], text: int = 0) -> list[np.ndarray]:
        """Return the log-likelihoods of each item's endings under one of its texts in nats, N times (E,)."""
        sizes = [len(tokens) for token_counts in self.tokens for tokens in token_counts]
        by_item = np.split(
            np.concatenate([answer.nats for answer in answers]), np.cumsum(sizes)[:-1]
        )
        begin = text % len(self.tokens) * len(self.items)
        return by_item[begin : begin + len(self.items)]

    def predictions(self, answers: Sequence[ModelAnswer]) -> dict[str, np.ndarray]:
        """Return the ending chosen under each score, (N,) each; of equals the first, as in the harness."""
        if self.task.scores is LAST_WORD:  # 0: the only ending; -1: another
            return {"acc": np.array([answer.greedy - 1 for answer in answers])}
        # Only the per-token score is of an item's last text.
        values = {
            "acc": (0, None),
            "acc_norm": (0, self.characters),
            "acc_token_norm": (-1, self.tokens[-1]),
        }
        return {
            score: metrics.likeliest(self.sums(answers, text), lengths)
            for score, (text, lengths) in values.items()
            if score in self.task.scores
        }

    def result(
        self, answers: Sequence[ModelAnswer], compute: Mapping[str, Metric] = metrics.PLAIN
    ) -> dict[str, float]:
        """Return each score, its ``_stderr``, and ``items``.

        Args:
            compute: the metrics by name.

        Raises:
            BadInput: a log-likelihood is not finite. The message names the item.
        """
        self._check_finite(answers)
        if self.task.scores is LAST_WORD:
            nats, greedy = (
                np.concatenate(self.sums(answers)),
                np.array([answer.greedy for answer in answers]),
            )
            scores = compute["last_word"](predictions=nats, references=greedy)
        else:
            shared_inputs = {"characters": self.characters, "references": self.gold}
            of_texts = [
                compute["multiple_choice"](
                    predictions=self.sums(answers, text), tokens=tokens, **shared_inputs
                )
                for text, tokens in enumerate(self.tokens)
            ]
            # Only the per-token score is of an item's last text.
            scores = of_texts[0] | {
                name: of_texts[-1][name] for name in ("acc_token_norm", "acc_token_norm_stderr")
            }
        names = [f"{score}{end}" for score in self.task.scores for end in ("", "_stderr")]
        return {name: scores[name] for name in names} | {"items": len(self.items)}

    def _check_finite(self, answers: Sequence[ModelAnswer]) -> None:
        for text in range(len(self.tokens)):
            for item, nats in zip(self.items, self.sums(answers, text), strict=True):
                invalid = np.flatnonzero(~np.isfinite(nats))
                if invalid.size:
                    ending = int(invalid[0])
                    raise not_finite(f"{item.where}: ending {ending + 1}", float(nats[ending]))

    def rows(self, answers: Sequence[ModelAnswer]) -> Iterator[dict]:
        """Yield what is known of each item: sums in nats, tokens and characters of its endings, predictions, gold."""
        sums, raw, predictions = (
            self.sums(answers),
            self.sums(answers, -1),
            self.predictions(answers),
        )
        for i, item in enumerate(self.items):
            row = {"item": item.where, "label": int(self.gold[i]), "sum_logprob": sums[i].tolist()}
            row |= {"tokens": self.tokens[0][i].tolist(), "characters": self.characters[i].tolist()}
            if len(self.tokens) > 1:
                row |= {
                    "raw_sum_logprob": raw[i].tolist(),
                    "raw_tokens": self.tokens[1][i].tolist(),
                }
            yield row | {
                f"{score}_prediction": int(chosen[i]) for score, chosen in predictions.items()
            }


def encode(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """Return each ending of each question as (context, ending) in ids, as the harness and build-nanogpt make them.

    lm-evaluation-harness encodes context and ending as one text and takes what follows the context's own ids; white
    space at a context's end belongs to the ending. An empty context is the token that begins a text. A
    beginning-of-text token that the tokenizer puts stands. Encoded apart (``Question.apart``), neither changes the other.
    """
    flat = []  # of each ending
    for question in questions:
        contexts = question.context
        if isinstance(contexts, str):
            contexts = (contexts,) * len(question.endings)
        for context, ending in zip(contexts, question.endings, strict=True):
            flat.append((context, question.delimiter + ending, question.apart))
    before = tokenizer("")["input_ids"]  # what the tokenizer puts before every text
    first = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    heads = _ids(tokenizer, [context if apart else context.rstrip() for context, _, apart in flat])
    texts = _ids(
        tokenizer, [ending if apart else context + ending for context, ending, apart in flat]
    )
    pairs = []
    for (context, _, apart), head, ids in zip(flat, heads, texts, strict=True):
        if context:
            pairs.append((before + head, ids if apart else ids[len(head) :]))
        else:
            pairs.append((first, ids[ids[:1] == first :]))  # it may begin with that token
    return pairs


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without the tokens that a tokenizer puts around every text."""
    different = list(dict.fromkeys(texts))
    try:
        encoded = tokenizer(different, add_special_tokens=False, verbose=False, truncation=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        fix = (
            "; its ids are the characters of one text: take tokenizer: bpe"
            if "UNK" in str(error)
            else ""
        )
        raise BadInput(
            f"the tokenizer cannot write the items' text: {first_line(error)}{fix}"
        ) from None
    known = dict(zip(different, encoded["input_ids"], strict=True))
    return [known[text] for text in texts]
