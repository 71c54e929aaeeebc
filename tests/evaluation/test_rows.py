"""The rows of every task are validated by the same rules."""

from decimal import Decimal

import pytest
import task_rows

from ursa_minor.evaluation import task_data
from ursa_minor.evaluation.rows import validate
from ursa_minor.evaluation.task import Question

TASKS = task_data.all_tasks()
HELLASWAG_ROW = task_rows.hellaswag_rows(1)[0]
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
    "hellaswag": HELLASWAG_ROW | {"endings": ["a", "b", "c", "d"], "label": "1"},
}
ANSWER_FIELDS = [
    ("arc_easy", "answerKey"),
    ("piqa", "label"),
    ("winogrande", "answer"),
    ("hellaswag", "label"),
]
TEXT_FIELDS = [
    ("arc_easy", "question"),
    ("piqa", "goal"),
    ("piqa", "sol2"),
    ("winogrande", "option1"),
    ("lambada_openai", "text"),
    ("blimp", "sentence_good"),
    ("multiblimp_hin", "wrong_sen"),
    ("hellaswag", "ctx"),
]


def make_question(task: str, **changes) -> Question:
    """Return the first question of the valid row of a task, with some fields changed."""
    row = validate(TASKS[task], ROWS[task] | changes)
    return TASKS[task].questions(row)[0]


@pytest.mark.parametrize(
    "convert",
    [str, int, float, Decimal, lambda number: f"{number}.0", lambda number: f" {number} "],
    ids=["text", "int", "float", "decimal", "text of float", "text with spaces"],
)
@pytest.mark.parametrize(("task", "field"), ANSWER_FIELDS)
def test_labels_are_compared_as_values(task, field, convert):
    label = convert(int(ROWS[task][field]))

    question = make_question(task, **{field: label})

    assert question.gold == 1
    assert make_question(task).gold == 1


@pytest.mark.parametrize(
    "value", [True, None, [1], {"a": 1}, float("nan"), "", -1, 5, 1.5, "1.5", "one"]
)
@pytest.mark.parametrize(("task", "field"), ANSWER_FIELDS)
def test_invalid_label_is_rejected(task, field, value):
    with pytest.raises(ValueError, match=field):
        make_question(task, **{field: value})


@pytest.mark.parametrize("value", [7, 7.5, Decimal("7.50")])
@pytest.mark.parametrize(("task", "field"), TEXT_FIELDS)
def test_number_becomes_text(task, field, value):
    row = validate(TASKS[task], ROWS[task] | {field: value})

    assert row[field] == str(value)


@pytest.mark.parametrize("value", [True, None, ["a"], {"a": 1}, b"a", float("inf")])
@pytest.mark.parametrize(("task", "field"), TEXT_FIELDS)
def test_other_value_is_not_a_text(task, field, value):
    with pytest.raises(ValueError, match=field):
        validate(TASKS[task], ROWS[task] | {field: value})


@pytest.mark.parametrize("endings", [[2, 3, 4, 5], "[2, 3, 4, 5]"], ids=["numbers", "json"])
def test_list_of_texts_may_contain_numbers(endings):
    assert make_question("hellaswag", endings=endings).endings == ("2", "3", "4", "5")


@pytest.mark.parametrize(
    "endings",
    [["a"] * 3, ["a"] * 5, [], "abcd", '"abcd"', [["a"], "b", "c", "d"], ["a", None, 1, 2]],
)
def test_invalid_list_of_texts_is_rejected(endings):
    with pytest.raises(ValueError, match="endings"):
        make_question("hellaswag", endings=endings)


def test_choices_of_arc_may_be_numbers():
    choices = {"text": [2, 3, 4.5], "label": [1, "2", 3.0]}

    question = make_question("arc_easy", choices=choices, answerKey="3")

    assert question.endings == ("2", "3", "4.5")
    assert question.gold == 2


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"text": ["a", "b", "c"], "label": ["A", "B", "C", "D"]}, "3 texts and 4 labels"),
        ({"text": ["a", "b"], "label": ["A"]}, "2 texts and 1 labels"),
        ({"text": [], "label": []}, "at least two texts, not 0"),
        ({"text": ["a"], "label": ["A"]}, "at least two"),
        ({"text": ["a", "b"], "label": ["A", "A"]}, "two equal labels"),
        ({"text": ["a", "b"], "label": [1, "1.0"]}, "two equal labels"),
        ({"text": ["a", "b"], "label": [True, False]}, "label must be a text or a finite number"),
        ({"text": ["a", "b"]}, "must be an object with the lists text and label"),
        ({"text": "ab", "label": ["A", "B"]}, r"choices\.text must be a list of texts, not 'ab'"),
        ({"text": ["a", "b"], "label": "AB"}, r"choices\.label must be a list of labels, not 'AB'"),
        ([{"text": "a", "label": "A"}], "must be an object"),
    ],
)
def test_choices_need_label_for_each_text(choices, problem):
    with pytest.raises(ValueError, match=problem):
        make_question("arc_easy", choices=choices, answerKey="A")


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        ("piqa", "sol1", ""),
        ("blimp", "sentence_bad", " "),
        ("multiblimp_hin", "sen", ""),
        ("lambada_openai", "text", ""),
        ("hellaswag", "endings", ["a", "", "c", "d"]),
        ("arc_easy", "choices", {"text": ["a", "\t"], "label": ["1", "2"]}),
    ],
)
def test_empty_text_is_allowed_only_if_published(task, field, value):
    row = ROWS[task] | {field: value}

    with pytest.raises(ValueError, match=f"^{field} contains an empty text"):
        validate(TASKS[task], row)
    assert validate(TASKS[task], row, is_published=True)


def test_half_of_surrogate_pair_is_rejected():
    row = ROWS["piqa"] | {"sol1": "a \ud800 b"}

    with pytest.raises(ValueError, match=r"^sol1 = .* is not a character"):
        validate(TASKS["piqa"], row)
