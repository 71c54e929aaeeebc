"""Multiple choice by likelihood: which ending does a model find the likeliest, in sum, per character, per token?

Scores of questions with any number of endings, from the log-likelihoods that a language model gives the endings: acc (the
likeliest in sum), acc_norm (per character, as lm-evaluation-harness) and acc_token_norm (per token, as build-nanogpt and
llm.c), each with its standard error, the sample's deviation / sqrt(n). See
https://blog.eleuther.ai/multiple-choice-normalization/.
"""

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
    Examples:
        >>> metric = evaluate.load("metrics/multiple_choice")
        >>> endings = {"characters": [[4, 9]], "tokens": [[1, 2]]}
        >>> metric.compute(predictions=[[-3.0, -4.0]], references=[1], **endings)["acc_norm"]
        1.0
    """

    def _info(self):
        counts = datasets.Sequence(datasets.Value("int64"))
        features = {"predictions": datasets.Sequence(datasets.Value("float64")), "characters": counts, "tokens": counts}
        features |= {"references": datasets.Value("int64")}
        about = {"description": __doc__, "inputs_description": MultipleChoice.__doc__}
        about |= {"citation": "https://github.com/EleutherAI/lm-evaluation-harness"}
        return evaluate.MetricInfo(features=datasets.Features(features), **about)

    def _compute(self, predictions, characters, tokens, references):
        found, ones = {}, [[1] * len(sums) for sums in predictions]
        for name, lengths in (("acc", ones), ("acc_norm", characters), ("acc_token_norm", tokens)):
            right = 0
            for sums, sizes, reference in zip(predictions, lengths, references, strict=True):
                means = [value / size if size else -math.inf for value, size in zip(sums, sizes, strict=True)]
                right += means.index(max(means)) == reference
            share = found[name] = right / len(references)
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(references) - 1))
        return found
