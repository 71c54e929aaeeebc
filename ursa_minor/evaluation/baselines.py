"""Compute baselines that need no training: the loss of a bigram model and the size after gzip."""

import gzip
import math

import numpy as np
import torch

from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.data.tokens.tokenizer import decode

MAX_COUNTED_TOKENS = 2**23  # train tokens in which bigrams are counted. More would take seconds.
BATCH_SIZE = 64  # number of validation windows that are read together


def baselines(corpus: Corpus, eval_tokens: int) -> dict[str, float]:
    """Return the baselines of a corpus on its validation split.

    Args:
        eval_tokens: the approximate number of validation tokens to use, as in the validation of
            the run; 0 uses all.

    Returns:
        ``bigram`` in nats per token, ``bigram_bits_per_byte``, and ``gzip`` in bits per byte. The
        last two are missing if the tokens decode to an empty text. The dictionary is empty for a
        corpus that is a mixture, incomplete, or larger than ``MAX_COUNTED_TOKENS``.
    """
    is_mixture = len(corpus.sources) > 1
    train_split = corpus.sources[0].train
    if is_mixture or not corpus.stays_complete or train_split.num_tokens > MAX_COUNTED_TOKENS:
        return {}

    pairs_2N = _validation_pairs(corpus, eval_tokens)
    train_ids = np.concatenate([ids for ids, _ in train_split.read_all()])
    loss = bigram_loss(train_ids, pairs_2N, train_split.vocab_size)
    losses = {"bigram": loss}

    text = decode(corpus.tokenizer, pairs_2N[1].tolist()).encode()
    if text:
        num_targets = pairs_2N.shape[1]
        losses["bigram_bits_per_byte"] = loss * num_targets / len(text) / math.log(2)
        losses["gzip"] = 8 * len(gzip.compress(text)) / len(text)
    return losses


def _validation_pairs(corpus: Corpus, eval_tokens: int) -> np.ndarray:
    """Return the inputs and the targets of the validation split, (2, N)."""
    batches = corpus.eval_batches(
        "validation",
        max_tokens=eval_tokens,
        batch_size=BATCH_SIZE,
        device=torch.device("cpu"),
        rank=0,
        num_processes=1,
    )
    flat_batches = [torch.stack(batch).flatten(1).numpy() for batch in batches]
    return np.concatenate(flat_batches, axis=1)


def bigram_loss(train: np.ndarray, pairs_2N: np.ndarray, vocab_size: int) -> float:
    """Return the mean loss of a bigram model with Witten-Bell smoothing in nats per token.

    The probability of id b after id a is (count(a, b) + types(a) p(b)) / (count(a) + types(a)).
    types(a) is the number of different ids that follow a in ``train``. p(b) is the smoothed
    unigram probability (count(b) + 1) / (len(train) + vocab_size). See Chen and Goodman 1996,
    section 2.

    Args:
        train: (M,) ids in which the bigrams are counted.
        pairs_2N: (2, N) ids, and the id that follows each of them.
    """
    train = train.astype(np.int64)
    unigram_counts = np.bincount(train, minlength=vocab_size)
    unigram_probabilities = (unigram_counts + 1) / (len(train) + vocab_size)

    # A bigram (a, b) is represented by the number a * vocab_size + b.
    bigrams, bigram_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)
    follower_types = np.bincount(bigrams // vocab_size, minlength=vocab_size)

    # Look up the count of each evaluated bigram; a bigram that is not in `train` has count 0.
    context, target = pairs_2N.astype(np.int64)
    evaluated = context * vocab_size + target
    index = np.minimum(np.searchsorted(bigrams, evaluated), len(bigrams) - 1)
    counts = np.where(bigrams[index] == evaluated, bigram_counts[index], 0)

    # After an id that nothing follows in `train`, the probability is that of the unigram.
    is_unseen = context_counts[context] == 0
    target_probabilities = unigram_probabilities[target]
    numerator = (
        counts + follower_types[context] * target_probabilities + is_unseen * target_probabilities
    )
    denominator = context_counts[context] + follower_types[context] + is_unseen
    return float(-np.log(numerator / denominator).mean())
