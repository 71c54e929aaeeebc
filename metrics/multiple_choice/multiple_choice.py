"""Multiple choice by likelihood: which ending does a model find the likeliest, in sum, per character, per token?

Scores of questions with any number of endings, from the log-likelihoods that a language model gives the endings: acc (the
likeliest in sum), acc_norm (per character, as lm-evaluation-harness) and acc_token_norm (per token, as build-nanogpt and
llm.c), each with its standard error, the sample's deviation / sqrt(n). See
https://blog.eleuther.ai/multiple-choice-normalization/.
"""

# The package computes the same scores in ursa_minor/evaluation/metrics.py, and a test keeps both equal. This file does not
# import it, because evaluate copies a metric into its cache and loads it where the package may not be importable. The
# package does not import this file, because evaluate and datasets take seconds to import.
import math

import datasets
import evaluate


class MultipleChoice(evaluate.Metric):
    """The scores; nothing but Python is needed to compute them.

    Args:
        predictions: of each question the log-likelihoods of its endings, sums in nats.
        characters: of each question its endings' lengths in characters; an ending without any is never the likeliest.
        tokens: of each question its endings' lengths in tokens.
        references: the number of the right ending, from 0.
    Returns:
        acc, acc_norm, acc_token_norm: shares of 1; acc_stderr, acc_norm_stderr, acc_token_norm_stderr.
    Raises:
        ValueError: predictions are empty, a log-likelihood is not finite, a reference is not the number of an ending, or
            lengths do not match the endings.
    Examples:
        >>> metric = evaluate.load("metrics/multiple_choice")
        >>> endings = {"characters": [[4, 9]], "tokens": [[1, 2]]}
        >>> metric.compute(predictions=[[-3.0, -4.0]], references=[1], **endings)["acc_norm"]
        1.0
    """

    def _info(self):
        # Whole numbers are floats here, because datasets would cut the fraction off from others.
        values = datasets.Sequence(datasets.Value("float64"))
        features = {"predictions": values, "characters": values, "tokens": values}
        features |= {"references": datasets.Value("float64")}
        about = {"description": __doc__, "inputs_description": MultipleChoice.__doc__}
        about |= {"citation": "https://github.com/EleutherAI/lm-evaluation-harness"}
        return evaluate.MetricInfo(features=datasets.Features(features), **about)

    def _compute(self, predictions, characters, tokens, references):
        if len(references) == 0:
            raise ValueError("there is nothing to score: predictions and references are empty")
        for number, (sums, reference) in enumerate(zip(predictions, references, strict=True)):
            _check_sums(f"predictions[{number}]", sums)
            if reference not in range(len(sums)):
                raise ValueError(
                    f"references[{number}] = {reference} is not the number of one of {len(sums)} endings"
                )
            _check_lengths(f"characters[{number}]", characters[number], len(sums))
            _check_lengths(f"tokens[{number}]", tokens[number], len(sums))

        found, ones = {}, [[1] * len(sums) for sums in predictions]
        for name, lengths in (("acc", ones), ("acc_norm", characters), ("acc_token_norm", tokens)):
            right = 0
            for sums, sizes, reference in zip(predictions, lengths, references, strict=True):
                means = [
                    value / size if size else -math.inf
                    for value, size in zip(sums, sizes, strict=True)
                ]
                right += means.index(max(means)) == reference
            share = found[name] = right / len(references)
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(references) - 1))
        return found


def _check_sums(where, sums):
    """Raise ValueError for a question without endings, or with a log-likelihood that is not finite."""
    if len(sums) == 0:
        raise ValueError(f"{where} is empty: a question needs endings")
    for value in sums:
        if value is None or not math.isfinite(value):
            raise ValueError(f"{where} = {list(sums)}: a log-likelihood is not finite")


def _check_lengths(where, lengths, endings):
    """Raise ValueError unless there is a length for each ending: a whole number that is not negative."""
    if len(lengths) != endings:
        raise ValueError(f"{where} has {len(lengths)} lengths for {endings} endings")
    for length in lengths:
        if length is None or length < 0 or length % 1 != 0:
            raise ValueError(
                f"{where} = {list(lengths)}: a length is not a whole number of 0 or more"
            )
