"""The last word of a passage: whether greedy decoding gives it, and its perplexity."""

import math

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """
Scores of last words, as LAMBADA has them: acc (greedy decoding gives the word) and perplexity (exp of the mean negative
log-likelihood of a word, in nats), each with its standard error.
"""

_KWARGS_DESCRIPTION = """
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

_CITATION = """
@inproceedings{paperno2016lambada, author = {Paperno, Denis and others}, title = {The {LAMBADA} dataset}, year = {2016},
               booktitle = {Proceedings of ACL}, url = {https://arxiv.org/abs/1606.06031}}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class LastWord(evaluate.Metric):
    """The scores; nothing but numpy is needed to compute them."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        nats, share = np.asarray(predictions, dtype=np.float64), float(np.mean(references))
        found = {"acc": share, "acc_stderr": math.sqrt(share * (1 - share) / max(1, len(references) - 1))}
        perplexity = float(np.exp(-nats.mean()))
        error = float(nats.std(ddof=1) / math.sqrt(len(nats))) if len(nats) > 1 else 0.0
        return found | {"perplexity": perplexity, "perplexity_stderr": perplexity * error}
