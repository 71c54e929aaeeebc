"""Score the prediction of the last word of a passage, as in LAMBADA.

- acc: the fraction of words that greedy decoding gives.
- perplexity: exp of the mean negative log-likelihood of a word in nats.

Each score has a standard error. LAMBADA: Paperno et al. 2016, https://arxiv.org/abs/1606.06031.
"""

# The package computes the same scores in ursa_minor/evaluation/metrics.py, and a test checks that
# they are equal. This file does not import the package, because evaluate copies a metric into its
# cache and loads it where the package may not be importable. The package does not import this file,
# because evaluate and datasets take seconds to import.
import math

import datasets
import evaluate
import numpy as np


class LastWord(evaluate.Metric):
    """Compute the scores. Only numpy is needed.

    Args:
        predictions: the log-likelihood of each right word after its passage, in nats.
        references: 1 if greedy decoding gives the word, else 0.
    Returns:
        acc: a fraction. perplexity. acc_stderr, perplexity_stderr: their standard errors.
    Raises:
        ValueError: predictions are empty, a log-likelihood is not finite, or a reference is neither
            0 nor 1.
    Examples:
        >>> metric = evaluate.load("metrics/last_word")
        >>> metric.compute(predictions=[-0.5, -4.0], references=[1, 0])["acc"]
        0.5
    """

    def _info(self):
        # References are floats, because datasets would silently truncate 0.5 to the integer 0.
        features = {
            "predictions": datasets.Value("float64"),
            "references": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description=__doc__,
            citation="arXiv:1606.06031",
            inputs_description=LastWord.__doc__,
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references):
        if len(references) == 0:
            raise ValueError("there is nothing to score: predictions and references are empty")
        for number, (value, reference) in enumerate(zip(predictions, references, strict=True)):
            if value is None or not math.isfinite(value):
                raise ValueError(
                    f"predictions[{number}] = {value} is a log-likelihood that is not finite"
                )
            if reference not in (0, 1):
                raise ValueError(f"references[{number}] = {reference} is neither 0 nor 1")

        accuracy = float(np.mean(references))
        variance = accuracy * (1 - accuracy) / max(1, len(references) - 1)

        nats = np.asarray(predictions, dtype=np.float64)
        with np.errstate(over="ignore"):  # the perplexity of very unlikely words is infinite
            perplexity = float(np.exp(-nats.mean()))
        nats_stderr = 0.0
        if len(nats) > 1:
            nats_stderr = float(nats.std(ddof=1) / math.sqrt(len(nats)))
        return {
            "acc": accuracy,
            "acc_stderr": math.sqrt(variance),
            "perplexity": perplexity,
            "perplexity_stderr": perplexity * nats_stderr,
        }
