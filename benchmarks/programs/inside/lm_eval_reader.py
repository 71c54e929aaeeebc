"""Score texts with lm-eval: log-likelihoods of endings, and of whole texts (rolling)."""

import numpy as np
from exchange import answer_all
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def answer(request: dict) -> dict:
    """Return log-likelihoods in nats."""
    harness = HFLM(pretrained=request["path"], device="cpu", batch_size=1)
    pairs = [tuple(pair) for pair in request["pairs"]]
    endings = harness.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    documents = [(text,) for text in request["documents"]]
    rolling = harness.loglikelihood_rolling(
        instances("loglikelihood_rolling", documents), disable_tqdm=True
    )
    return {
        "endings": np.array([nats for nats, _ in endings]),
        "rolling": np.array(rolling),
    }


def instances(request_type: str, arguments: list[tuple]) -> list[Instance]:
    """Return the requests of lm-eval for these arguments."""
    return [Instance(request_type, {}, row, index) for index, row in enumerate(arguments)]


if __name__ == "__main__":
    answer_all(answer)
