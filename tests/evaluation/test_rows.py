"""Rows of every task are validated by the same rules."""

from decimal import Decimal

import pytest
import task_rows

from ursa_minor.evaluation import task_data
from ursa_minor.evaluation.rows import validate

TASKS = task_data.all_tasks()
ROWS = {
    "arc_easy": {
        "question": "Q",
        "choices": {"text": ["a", "b"], "label": ["1", "2"]},
        "answerKey": "2",
    },
    "piqa": {"goal": "G", "sol1": "a", "sol2": "b", "label": 1},
    "winogrande": {"sentence": "A _ b", "option1": "a", "option2": "b", "answer": "2"},
    "lambada_openai": {"text": "the last word"},
    "blimp": {"sentence_good": "a", "sentence_bad": "b"},
    "multiblimp_hin": {"sen": "a", "wrong_sen": "b"},
    "hellaswag": task_rows.hellaswag_rows(1)[0] | {"endings": ["a", "b", "c", "d"], "label": "1"},
}
ANSWERS = {"arc_easy": "answerKey", "piqa": "label", "winogrande": "answer", "hellaswag": "label"}
TEXTS = [
    ("arc_easy", "question"),
    ("piqa", "goal"),
    ("piqa", "sol2"),
    ("winogrande", "option1"),
    ("lambada_openai", "text"),
    ("blimp", "sentence_good"),
    ("multiblimp_hin", "wrong_sen"),
    ("hellaswag", "ctx"),
]


def question(task, **changes):
    return TASKS[task].questions(validate(TASKS[task], ROWS[task] | changes))[0]


@pytest.mark.parametrize(
    "kind", [str, int, float, Decimal, lambda number: f"{number}.0", lambda number: f" {number} "]
)
@pytest.mark.parametrize("task", ANSWERS)
def test_labels_are_compared_as_values(task, kind):
    label = int(ROWS[task][ANSWERS[task]])
    assert question(task, **{ANSWERS[task]: kind(label)}).gold == question(task).gold == 1


@pytest.mark.parametrize(
    "value", [True, None, [1], {"a": 1}, float("nan"), "", -1, 5, 1.5, "1.5", "one"]
)
@pytest.mark.parametrize("task", ANSWERS)
def test_a_value_that_is_no_label_is_an_error(task, value):
    with pytest.raises(ValueError, match=ANSWERS[task]):
        question(task, **{ANSWERS[task]: value})


@pytest.mark.parametrize(("task", "field"), TEXTS)
def test_a_number_as_text_is_converted(task, field):
    for value in (7, 7.5, Decimal("7.50")):
        assert validate(TASKS[task], ROWS[task] | {field: value})[field] == str(value)


@pytest.mark.parametrize("value", [True, None, ["a"], {"a": 1}, b"a", float("inf")])
@pytest.mark.parametrize(("task", "field"), TEXTS)
def test_a_value_that_is_no_text_is_an_error(task, field, value):
    with pytest.raises(ValueError, match=field):
        validate(TASKS[task], ROWS[task] | {field: value})


@pytest.mark.parametrize("convert", [lambda texts: texts, str])
def test_texts_of_a_list_may_be_numbers_or_json(convert):
    assert question("hellaswag", endings=convert([2, 3, 4, 5])).endings == ("2", "3", "4", "5")


@pytest.mark.parametrize(
    "endings",
    [["a"] * 3, ["a"] * 5, [], "abcd", '"abcd"', [["a"], "b", "c", "d"], ["a", None, 1, 2]],
)
def test_a_list_of_other_texts_is_an_error(endings):
    with pytest.raises(ValueError, match="endings"):
        question("hellaswag", endings=endings)


def test_numbers_are_choices_of_arc():
    choices = {"text": [2, 3, 4.5], "label": [1, "2", 3.0]}
    found = question("arc_easy", choices=choices, answerKey="3")
    assert found.endings == ("2", "3", "4.5") and found.gold == 2


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"text": ["a", "b", "c"], "label": ["A", "B", "C", "D"]},
            "choices has 3 texts and 4 labels",
        ),
        ({"text": ["a", "b"], "label": ["A"]}, "choices has 2 texts and 1 labels"),
        ({"text": [], "label": []}, "choices must have at least two texts, not 0"),
        ({"text": ["a"], "label": ["A"]}, "must have at least two"),
        ({"text": ["a", "b"], "label": ["A", "A"]}, "contains two equal labels"),
        ({"text": ["a", "b"], "label": [1, "1.0"]}, "contains two equal labels"),
        ({"text": ["a", "b"], "label": [True, False]}, "a label must be a text or a finite number"),
        ({"text": ["a", "b"]}, "must be an object with the lists text and label"),
        ({"text": "ab", "label": ["A", "B"]}, "choices.text must be a list of texts, not 'ab'"),
        ({"text": ["a", "b"], "label": "AB"}, "choices.label must be a list of labels, not 'AB'"),
        ([{"text": "a", "label": "A"}], "must be an object"),
    ],
)
def test_choices_need_a_label_for_each_text(choices, message):
    with pytest.raises(ValueError, match=message):
        question("arc_easy", choices=choices, answerKey="A")


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("piqa", {"sol1": ""}),
        ("blimp", {"sentence_bad": " "}),
        ("multiblimp_hin", {"sen": ""}),
        ("lambada_openai", {"text": ""}),
        ("hellaswag", {"endings": ["a", "", "c", "d"]}),
        ("arc_easy", {"choices": {"text": ["a", "\t"], "label": ["1", "2"]}}),
    ],
)
def test_empty_text_to_score_is_an_error(task, change):
    (field,) = change
    with pytest.raises(ValueError, match=f"^{field} contains an empty text"):
        validate(TASKS[task], ROWS[task] | change)
    assert validate(TASKS[task], ROWS[task] | change, is_published=True)


def test_half_of_a_surrogate_pair_is_an_error():
    with pytest.raises(ValueError, match="^sol1 = .* is not a character"):
        validate(TASKS["piqa"], ROWS["piqa"] | {"sol1": "a \ud800 b"})
