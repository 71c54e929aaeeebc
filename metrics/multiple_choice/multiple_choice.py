"""Score multiple-choice questions by the log-likelihoods that a language model gives the endings.

The most likely ending of a question is chosen, and compared with the right one:

- acc: the ending with the highest log-likelihood.
- acc_norm: the highest log-likelihood per character, as in lm-evaluation-harness.
- acc_token_norm: the highest log-likelihood per token, as in build-nanogpt and llm.c.

A question may have any number of endings. Each score has a standard error, which is the standard
deviation of the sample divided by sqrt(n). See
https://blog.eleuther.ai/multiple-choice-normalization/.
"""

# The package computes the same scores in ursa_minor/evaluation/metrics.py, and a test checks that
# they are equal. This file does not import the package, because evaluate copies a metric into its
# cache and loads it where the package may not be importable. The package does not import this file,
# because evaluate and datasets take seconds to import.
import math

import datasets
import evaluate


class MultipleChoice(evaluate.Metric):
    """Compute the scores. No other package is needed.

    Args:
        predictions: for each question, the log-likelihoods of its endings, summed over the tokens,
            in nats.
        characters: for each question, the lengths of its endings in characters. An ending of length
            0 is never chosen by acc_norm.
        tokens: for each question, the lengths of its endings in tokens.
        references: the index of the right ending, from 0.
    Returns:
        acc, acc_norm, acc_token_norm: fractions. acc_stderr, acc_norm_stderr,
        acc_token_norm_stderr: their standard errors.
    Raises:
        ValueError: predictions are empty, a log-likelihood is not finite, a reference is not the
            index of an ending, or lengths do not match the endings.
    Examples:
        >>> metric = evaluate.load("metrics/multiple_choice")
        >>> endings = {"characters": [[4, 9]], "tokens": [[1, 2]]}
        >>> metric.compute(predictions=[[-3.0, -4.0]], references=[1], **endings)["acc_norm"]
        1.0
    """

    def _info(self):
        # Integers are floats here, because datasets would silently truncate 1.5 to the integer 1.
        lists = datasets.Sequence(datasets.Value("float64"))
        features = {
            "predictions": lists,
            "characters": lists,
            "tokens": lists,
            "references": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description=__doc__,
            citation="https://github.com/EleutherAI/lm-evaluation-harness",
            inputs_description=MultipleChoice.__doc__,
            features=datasets.Features(features),
        )

    def _compute(self, predictions, characters, tokens, references):
        if len(references) == 0:
            raise ValueError("there is nothing to score: predictions and references are empty")
        for number, (sums, reference) in enumerate(zip(predictions, references, strict=True)):
            _check_sums(f"predictions[{number}]", sums)
            if reference not in range(len(sums)):
                raise ValueError(
                    f"references[{number}] = {reference} is not the index of one of the "
                    f"{len(sums)} endings"
                )
            _check_lengths(f"characters[{number}]", characters[number], len(sums))
            _check_lengths(f"tokens[{number}]", tokens[number], len(sums))

        lengths_of_score = {
            "acc": [[1] * len(sums) for sums in predictions],
            "acc_norm": characters,
            "acc_token_norm": tokens,
        }
        scores = {}
        for name, lengths in lengths_of_score.items():
            num_right = 0
            for sums, sizes, reference in zip(predictions, lengths, references, strict=True):
                num_right += _likeliest(sums, sizes) == reference
            accuracy = num_right / len(references)
            variance = accuracy * (1 - accuracy) / max(1, len(references) - 1)
            scores[name] = accuracy
            scores[f"{name}_stderr"] = math.sqrt(variance)
        return scores


def _likeliest(sums, lengths):
    """Return the index of the ending with the highest mean log-likelihood. Ties go to the first."""
    means = []
    for value, length in zip(sums, lengths, strict=True):
        means.append(value / length if length else -math.inf)
    return means.index(max(means))


def _check_sums(where, sums):
    """Raise ValueError for a question without endings or with an invalid log-likelihood."""
    if len(sums) == 0:
        raise ValueError(f"{where} is empty: a question needs endings")
    for value in sums:
        if value is None or not math.isfinite(value):
            raise ValueError(f"{where} = {list(sums)} contains a log-likelihood that is not finite")


def _check_lengths(where, lengths, num_endings):
    """Raise ValueError unless there is a non-negative integer for each ending."""
    if len(lengths) != num_endings:
        raise ValueError(f"{where} has {len(lengths)} lengths for {num_endings} endings")
    for length in lengths:
        if length is None or length < 0 or length % 1 != 0:
            raise ValueError(
                f"{where} = {list(lengths)} contains a length that is not an integer of 0 or more"
            )
