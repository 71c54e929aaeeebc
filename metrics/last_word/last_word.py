"""The last word of a passage: whether greedy decoding gives it, and its perplexity, as LAMBADA has them.

acc: greedy decoding gives the word; perplexity: exp of the mean negative log-likelihood of a word, in nats. Each has its
standard error. LAMBADA: Paperno et al. 2016, https://arxiv.org/abs/1606.06031.
"""

# The package computes the same scores in ursa_minor/evaluation/metrics.py, and a test keeps both equal. This file does not
# import it, because evaluate copies a metric into its cache and loads it where the package may not be importable. The
# package does not import this file, because evaluate and datasets take seconds to import.
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
    Raises:
        ValueError: predictions are empty, a log-likelihood is not finite, or a reference is neither 0 nor 1.
    Examples:
        >>> metric = evaluate.load("metrics/last_word")
        >>> metric.compute(predictions=[-0.5, -4.0], references=[1, 0])["acc"]
        0.5
    """

    def _info(self):
        # References are floats here, because datasets would cut the fraction off from other numbers.
        features = {
            "predictions": datasets.Value("float64"),
            "references": datasets.Value("float64"),
        }
        about = {
            "description": __doc__,
            "citation": "arXiv:1606.06031",
            "inputs_description": LastWord.__doc__,
        }
        return evaluate.MetricInfo(features=datasets.Features(features), **about)

    def _compute(self, predictions, references):
        if len(references) == 0:
            raise ValueError("there is nothing to score: predictions and references are empty")
        for number, (value, reference) in enumerate(zip(predictions, references, strict=True)):
            if value is None or not math.isfinite(value):
                raise ValueError(f"predictions[{number}] = {value}: a log-likelihood is not finite")
            if reference not in (0, 1):
                raise ValueError(f"references[{number}] = {reference} is neither 0 nor 1")

        nats, share = np.asarray(predictions, dtype=np.float64), float(np.mean(references))
        found = {
            "acc": share,
            "acc_stderr": math.sqrt(share * (1 - share) / max(1, len(references) - 1)),
        }
        with np.errstate(over="ignore"):  # the perplexity of very unlikely words is infinite
            perplexity = float(np.exp(-nats.mean()))
        error = float(nats.std(ddof=1) / math.sqrt(len(nats))) if len(nats) > 1 else 0.0
        return found | {"perplexity": perplexity, "perplexity_stderr": perplexity * error}
