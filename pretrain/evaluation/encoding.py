"""A task's items, encoded for a tokenizer, and what a model's answers score on them.

Legend: N items, Q questions in ids (an item has one or more of each of its texts), E endings of an item.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from pretrain.base.errors import BadInput, first_line
from pretrain.evaluation import likelihood, metrics, record
from pretrain.evaluation.items import Items
from pretrain.evaluation.likelihood import Answer
from pretrain.evaluation.record import Task


class Encoded:
    """Items, encoded for a tokenizer, those whose endings a model's context holds.

    Args:
        context_length: in tokens, of which an ending's last one is predicted, not read; None: no limit.

    Attributes:
        items: those that are scored; ``left_out``: how many others there were.
        commit: of the data set; None for files.
        questions: (context, endings) as ids, Q of them: those of a text in the items' order, then those of the next.
        tokens: of each text the endings' tokens, N times (E,).
        characters: of the first text the endings' characters, N times (E,).
        gold: the right endings, (N,).

    Raises BadInput where the tokenizer cannot write an item, or makes nothing of an ending, and where no item fits.
    """

    def __init__(self, task: Task, items: Items, tokenizer: PreTrainedTokenizerBase, context_length: int | None = None):
        self.task, self.commit = task, items.commit
        # Only the per-token score is of an item's last text.
        texts = {len(items[0].questions) - 1 if score == "acc_token_norm" else 0 for score in task.scores}
        asked = [encode([item.questions[text] for item in items], tokenizer) for text in sorted(texts)]
        tokens = [[np.array([len(ids) for _, ends in own for ids in ends]) for own in text] for text in asked]
        for i, item in enumerate(items):
            if not all(context for text in asked for context, _ in text[i]) or not all(
                size[i].all() for size in tokens
            ):
                raise BadInput(f"{item.where}: this tokenizer makes no token of its context or of one of its endings")
        longest = [max(size[i].max() for size in tokens) for i in range(len(items))]
        fits = [i for i, length in enumerate(longest) if context_length is None or length <= context_length]
        if not fits:
            raise BadInput(
                f"{task.label} cannot be scored: each item has an ending of more tokens than the model's context, "
                f"{context_length}; the longest has {max(longest)} (in training: --sequence_length, or --tasks without "
                f"{task.name})"
            )
        self.items, self.left_out = [items[i] for i in fits], len(items) - len(fits)
        self.gold = np.array([item.questions[0].gold for item in self.items])
        self.characters = [np.array([*map(len, item.questions[0].endings)]) for item in self.items]
        self.tokens = [[size[i] for i in fits] for size in tokens]
        self._asked = [[text[i] for i in fits] for text in asked]
        self.questions = [question for text in self._asked for own in text for question in own]

    def longer_than(self, context_length: int | None) -> int:
        """Return how many questions a model's context does not hold whole: they lose tokens from the left."""
        if context_length is None:
            return 0
        return sum(len(context) + max(map(len, ends)) - 1 > context_length for context, ends in self.questions)

    def sums(self, answers: Sequence[Answer], text: int = 0) -> list[np.ndarray]:
        """Return the log-likelihoods of each item's endings under one of its texts in nats, N times (E,)."""
        nats = iter([answer.nats for answer in answers])
        return [[np.concatenate([next(nats) for _ in own]) for own in asked] for asked in self._asked][text]

    def predictions(self, answers: Sequence[Answer]) -> dict[str, np.ndarray]:
        """Return the ending chosen under each score, (N,) each; of equals the first, as in the harness."""
        if self.task.scores is record.LAST_WORD:  # 0: the only ending; -1: another
            return {"acc": np.array([answer.greedy - 1 for answer in answers])}
        values = {"acc": (0, None), "acc_norm": (0, self.characters), "acc_token_norm": (-1, self.tokens[-1])}
        return {
            score: metrics.likeliest(self.sums(answers, text), lengths)
            for score, (text, lengths) in values.items()
            if score in self.task.scores
        }

    def result(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return each score as metrics have it, its ``_stderr``, and ``items``."""
        found = {}
        for score, chosen in self.predictions(answers).items():
            found |= metrics.accuracy(chosen == self.gold, score)
        if "perplexity" in self.task.scores:
            found |= metrics.perplexity(np.concatenate(self.sums(answers)))
        return found | {"items": len(self.items)}

    def rows(self, answers: Sequence[Answer]) -> Iterator[dict]:
        """Yield what is known of each item: sums in nats, tokens and characters of its endings, predictions, gold."""
        sums, raw, predictions = self.sums(answers), self.sums(answers, -1), self.predictions(answers)
        for i, item in enumerate(self.items):
            row = {"item": item.where, "label": int(self.gold[i]), "sum_logprob": sums[i].tolist()}
            row |= {"tokens": self.tokens[0][i].tolist(), "characters": self.characters[i].tolist()}
            if len(self.tokens) > 1:
                row |= {"raw_sum_logprob": raw[i].tolist(), "raw_tokens": self.tokens[1][i].tolist()}
            yield row | {f"{score}_prediction": int(chosen[i]) for score, chosen in predictions.items()}


def encode(asked: Sequence[record.Question], tokenizer: PreTrainedTokenizerBase) -> list[list[likelihood.Question]]:
    """Return questions as ids, one for each context, as lm-evaluation-harness and build-nanogpt make them.

    The harness encodes context and ending as one text and takes what follows the context's own ids; white space at a
    context's end belongs to the ending. An empty context is the token that begins a text. A beginning-of-text token
    that the tokenizer puts stands. Encoded apart (``Question.apart``), neither changes the other.
    """
    pairs = []  # a context, its endings, whether they are apart, whose they are
    for number, question in enumerate(asked):
        endings, context = [question.delimiter + ending for ending in question.endings], question.context
        alone = [(context, endings)] if isinstance(context, str) else zip(context, ([e] for e in endings), strict=True)
        pairs += [(context, endings, question.apart, number) for context, endings in alone]
    before = tokenizer("")["input_ids"]  # what the tokenizer puts before every text
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    contexts = iter(_ids(tokenizer, [context if apart else context.rstrip() for context, _, apart, _ in pairs]))
    texts = [ending if apart else context + ending for context, endings, apart, _ in pairs for ending in endings]
    texts_ids, found = iter(_ids(tokenizer, texts)), [[] for _ in asked]
    for context, endings, apart, number in pairs:
        ids = next(contexts)
        after = [next(texts_ids)[0 if apart else len(ids) :] for _ in endings]
        if context:
            found[number].append((before + ids, after))
        else:
            found[number].append(
                ([first], [ids[ids[:1] == [first] :] for ids in after])
            )  # it may begin with that token
    return found


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without the tokens that a tokenizer puts around every text."""
    try:
        encoded = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False, truncation=False
        )
    except Exception as error:  # tokenizers raises bare Exceptions
        remedy = "; its ids are the characters of one text: take tokenizer: bpe" if "UNK" in str(error) else ""
        raise BadInput(f"the tokenizer cannot write the items' text: {first_line(error)}{remedy}") from None
    return encoded["input_ids"]
