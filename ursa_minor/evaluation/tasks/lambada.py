"""LAMBADA (Paperno et al. 2016): predict the last word of a passage.

The data set is the version that OpenAI prepared for GPT-2 (Radford et al. 2019).
Source: arXiv:1606.06031. License of the data: MIT.
"""

from ursa_minor.evaluation.task import LAST_WORD, Question, Task, TaskRow, Text


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the passage without its last word as the context, and that word as the ending."""
    context, _, last_word = row["text"].rpartition(" ")
    if not last_word.strip():
        raise ValueError(
            "text ends in white space, not in a word. Remove the white space at its end"
        )
    return (Question(context, (f" {last_word}",), 0, delimiter=""),)


TASKS = (
    Task(
        name="lambada_openai",
        label="LAMBADA",
        scores=LAST_WORD,
        chance=0.0,
        size=5_153,
        dataset=("EleutherAI/lambada_openai", "test"),
        revision="900124bf3b8235c6daf21033af9948b3f07346c4",
        files=("data/lambada_test_en.jsonl", 1),
        fields={"text": Text(is_scored=True)},
        questions=questions,
        published={"GPT-2 124M": (32.56, 40.06)},
        citations=(
            "GPT-2 124M: EleutherAI/lm-evaluation-harness#2159, measured on openai-community/gpt2",
        ),
    ),
)
