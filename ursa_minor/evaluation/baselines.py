"""What needs no training, on the text that a run is validated on: a bigram model's loss, and gzip's bits per byte."""

import gzip
import math

import numpy as np
import torch

from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.data.tokens.tokenizer import decode

MOST_COUNTED_TOKENS = 2**23  # of the train split; counting more would take seconds
BATCH = 64


def baselines(corpus: Corpus, eval_tokens: int) -> dict[str, float]:
    """Return ``bigram`` (nats per token), ``bigram_bits_per_byte`` and ``gzip`` (bits per byte).

    Of a corpus that is large, a mixture or not whole: nothing.

    Args:
        eval_tokens: about so many tokens of the validation split, the same as validation takes; 0: all.
    """
    source, *others = corpus.sources
    if others or not corpus.whole or source.train.num_tokens > MOST_COUNTED_TOKENS:
        return {}
    where = {"device": torch.device("cpu"), "rank": 0, "num_processes": 1}
    held_out = corpus.eval_batches("validation", max_tokens=eval_tokens, batch_size=BATCH, **where)
    pairs_2N = np.concatenate([torch.stack(batch).flatten(1).numpy() for batch in held_out], axis=1)
    train = np.concatenate([ids for ids, _ in source.train.read_all()])
    losses = {"bigram": bigram_loss(train, pairs_2N, source.train.vocab_size)}
    if text := decode(corpus.tokenizer, pairs_2N[1].tolist()).encode():
        losses["bigram_bits_per_byte"] = (
            losses["bigram"] * pairs_2N.shape[1] / len(text) / math.log(2)
        )
        losses["gzip"] = 8 * len(gzip.compress(text)) / len(text)
    return losses


def bigram_loss(train: np.ndarray, pairs_2N: np.ndarray, vocab_size: int) -> float:
    """Return the mean loss (nats per token) of a bigram model, counted in ``train`` with Witten and Bell's smoothing.

    The probability of b after a is (count(a, b) + kinds(a) p(b)) / (count(a) + kinds(a)), where kinds(a) is how many
    different ids follow a, and p(b) = (count(b) + 1) / (all + vocab_size). See Chen and Goodman 1996, section 2.

    Args:
        train: ids, (M,).
        pairs_2N: ids and the ids that follow them, (2, N).
    """
    train = train.astype(np.int64)
    seen, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    firsts = seen // vocab_size
    total, kinds = (
        np.bincount(train[:-1], minlength=vocab_size),
        np.bincount(firsts, minlength=vocab_size),
    )
    share = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)
    before, after = pairs_2N.astype(np.int64)
    keys = before * vocab_size + after
    places = np.minimum(np.searchsorted(seen, keys), len(seen) - 1)
    count = np.where(seen[places] == keys, counts[places], 0)
    alone = total[before] == 0  # never seen before another id
    chance = (count + kinds[before] * share[after] + alone * share[after]) / (
        total[before] + kinds[before] + alone
    )
    return float(-np.log(chance).mean())
