"""The plain metrics and those of the folder metrics/ reject the same input, and agree on any other."""

import math

import numpy as np
import pytest

from ursa_minor.evaluation import metrics, score_model

NAN, INF = math.nan, math.inf
CHOICE = {
    "predictions": [[-1.0, -2.0]],
    "characters": [[1, 2]],
    "tokens": [[1, 2]],
    "references": [1],
}
WORD = {"predictions": [-1.0, -2.0], "references": [1, 0]}
BAD_CHOICES = [
    ({"references": [5]}, "references"),
    ({"references": [2]}, "references"),
    ({"references": [-1]}, "references"),
    ({"references": [1.5]}, "references"),
    ({"predictions": [[NAN, -2.0]]}, "predictions"),
    ({"predictions": [[-1.0, -INF]]}, "predictions"),
    ({"predictions": [[-1.0, INF]]}, "predictions"),
    ({"predictions": [[-1.0, None]]}, "predictions"),
    ({"predictions": [[]], "characters": [[]], "tokens": [[]]}, "references|predictions"),
    (dict.fromkeys(CHOICE, []), "nothing to score"),
    ({"characters": [[1]]}, "characters"),
    ({"tokens": [[1, 2, 3]]}, "tokens"),
    ({"characters": [[-1, 2]]}, "characters"),
    ({"tokens": [[0.5, 2]]}, "tokens"),
    ({"references": [1, 1]}, "references"),
]
BAD_WORDS = [
    ({"references": [7, 0]}, "references"),
    ({"references": [-1, 0]}, "references"),
    ({"references": [0.5, 0]}, "references"),
    ({"predictions": [-1.0, NAN]}, "predictions"),
    ({"predictions": [-INF, -1.0]}, "predictions"),
    ({"predictions": [None, -1.0]}, "predictions"),
    (dict.fromkeys(WORD, []), "nothing to score"),
    ({"references": [1]}, "references"),
]
CASES = [("multiple_choice", CHOICE | change, word) for change, word in BAD_CHOICES]
CASES += [("last_word", WORD | change, word) for change, word in BAD_WORDS]


@pytest.mark.parametrize("kind", ["plain", "evaluate"])
@pytest.mark.parametrize(("name", "values", "word"), CASES)
@pytest.mark.filterwarnings("error")
def test_invalid_input_is_an_error_that_names_it(name, values, word, kind):
    compute = metrics.PLAIN if kind == "plain" else score_model.by_evaluate()
    with pytest.raises(ValueError, match=word):
        compute[name](**values)


@pytest.mark.parametrize("name, values", [("multiple_choice", CHOICE), ("last_word", WORD)])
def test_both_metrics_agree_on_valid_input(name, values):
    assert metrics.PLAIN[name](**values) == pytest.approx(score_model.by_evaluate()[name](**values))


@pytest.mark.filterwarnings("error")
def test_the_perplexity_of_impossible_words_is_infinite_in_both_metrics():
    for compute in (metrics.PLAIN, score_model.by_evaluate()):
        found = compute["last_word"](
            predictions=np.array([-900.0, -800.0]), references=np.array([0, 0])
        )
        assert found["perplexity"] == math.inf and found["acc"] == 0
