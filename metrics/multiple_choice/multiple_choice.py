"""Multiple choice by likelihood: which ending does a model find the likeliest, in sum, per character, per token?

Scores of questions with any number of endings, from the log-likelihoods that a language model gives the endings: acc (the
likeliest in sum), acc_norm (per character, as lm-evaluation-harness) and acc_token_norm (per token, as build-nanogpt and
llm.c), each with its standard error, the sample's deviation / sqrt(n).
"""

import math

import datasets
import evaluate
import numpy as np


class MultipleChoice(evaluate.Metric):
    """The scores; nothing but numpy is needed to compute them.

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
        about |= {"reference_urls": ["https://blog.eleuther.ai/multiple-choice-normalization/"]}
        return evaluate.MetricInfo(features=datasets.Features(features), **about)

    def _compute(self, predictions, characters, tokens, references):
        found = {}
        for name, lengths in (("acc", None), ("acc_norm", characters), ("acc_token_norm", tokens)):
            right = 0
            for i, sums in enumerate(predictions):
                values = np.asarray(sums, dtype=np.float64)
                if lengths is not None:
                    size = np.asarray(lengths[i])
                    values = np.where(size > 0, values / np.maximum(size, 1), -np.inf)
                right += int(values.argmax() == references[i])
            share = found[name] = right / len(references)
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(references) - 1))
        return found
