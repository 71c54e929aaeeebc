"""The plain metrics and those of the folder metrics/ reject the same input and agree otherwise."""

import math

import numpy as np
import pytest

from ursa_minor.evaluation import metrics, score_model

NAN = math.nan
INF = math.inf
CHOICE = {
    "predictions": [[-1.0, -2.0]],
    "characters": [[1, 2]],
    "tokens": [[1, 2]],
    "references": [1],
}
WORD = {"predictions": [-1.0, -2.0], "references": [1, 0]}
EMPTY_CHOICE = {"predictions": [], "characters": [], "tokens": [], "references": []}
EMPTY_WORD = {"predictions": [], "references": []}
# Changes of valid input, and the word that the message must contain.
INVALID_CHOICES = [
    ({"references": [5]}, "references"),
    ({"references": [2]}, "references"),
    ({"references": [-1]}, "references"),
    ({"references": [1.5]}, "references"),
    ({"predictions": [[NAN, -2.0]]}, "predictions"),
    ({"predictions": [[-1.0, -INF]]}, "predictions"),
    ({"predictions": [[-1.0, INF]]}, "predictions"),
    ({"predictions": [[-1.0, None]]}, "predictions"),
    ({"predictions": [[]], "characters": [[]], "tokens": [[]]}, "references|predictions"),
    (EMPTY_CHOICE, "nothing to score"),
    ({"characters": [[1]]}, "characters"),
    ({"tokens": [[1, 2, 3]]}, "tokens"),
    ({"characters": [[-1, 2]]}, "characters"),
    ({"tokens": [[0.5, 2]]}, "tokens"),
    ({"references": [1, 1]}, "references"),
]
INVALID_WORDS = [
    ({"references": [7, 0]}, "references"),
    ({"references": [-1, 0]}, "references"),
    ({"references": [0.5, 0]}, "references"),
    ({"predictions": [-1.0, NAN]}, "predictions"),
    ({"predictions": [-INF, -1.0]}, "predictions"),
    ({"predictions": [None, -1.0]}, "predictions"),
    (EMPTY_WORD, "nothing to score"),
    ({"references": [1]}, "references"),
]
INVALID_INPUTS = [("multiple_choice", CHOICE | change, word) for change, word in INVALID_CHOICES]
INVALID_INPUTS += [("last_word", WORD | change, word) for change, word in INVALID_WORDS]


@pytest.fixture(params=["plain", "evaluate"])
def compute(request):
    """Return the functions of the metrics by name."""
    if request.param == "plain":
        return metrics.PLAIN
    return score_model.by_evaluate()


@pytest.mark.parametrize(("name", "values", "word"), INVALID_INPUTS)
@pytest.mark.filterwarnings("error")
def test_invalid_input_is_rejected(compute, name, values, word):
    with pytest.raises(ValueError, match=word):
        compute[name](**values)


@pytest.mark.parametrize(("name", "values"), [("multiple_choice", CHOICE), ("last_word", WORD)])
def test_metrics_agree_on_valid_input(name, values):
    expected = score_model.by_evaluate()[name](**values)

    assert metrics.PLAIN[name](**values) == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
def test_perplexity_of_impossible_words_is_infinite(compute):
    scores = compute["last_word"](
        predictions=np.array([-900.0, -800.0]), references=np.array([0, 0])
    )

    assert scores["perplexity"] == math.inf
    assert scores["acc"] == 0
