"""The last word of a passage: whether greedy decoding gives it, and its perplexity, as LAMBADA has them.

acc: greedy decoding gives the word; perplexity: exp of the mean negative log-likelihood of a word, in nats. Each has its
standard error. LAMBADA: Paperno et al. 2016, https://arxiv.org/abs/1606.06031.
"""

import math

import datasets
import evaluate
import numpy as np


class LastWord(evaluate.Metric):
    """The scores; nothing but numpy is needed to compute them.

    Args:
        predictions: the log-likelihood of each right word after its passage, in nats.
        references: 1 where greedy decoding gives the word, else 0.
    Returns:
        acc: a share of 1; perplexity; acc_stderr, perplexity_stderr.
    Examples:
        >>> metric = evaluate.load("metrics/last_word")
        >>> metric.compute(predictions=[-0.5, -4.0], references=[1, 0])["acc"]
        0.5
    """

    def _info(self):
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        about = {"description": __doc__, "citation": "arXiv:1606.06031", "inputs_description": LastWord.__doc__}
        return evaluate.MetricInfo(features=datasets.Features(features), **about)

    def _compute(self, predictions, references):
        nats, share = np.asarray(predictions, dtype=np.float64), float(np.mean(references))
        found = {"acc": share, "acc_stderr": math.sqrt(share * (1 - share) / max(1, len(references) - 1))}
        perplexity = float(np.exp(-nats.mean()))
        error = float(nats.std(ddof=1) / math.sqrt(len(nats))) if len(nats) > 1 else 0.0
        return found | {"perplexity": perplexity, "perplexity_stderr": perplexity * error}
