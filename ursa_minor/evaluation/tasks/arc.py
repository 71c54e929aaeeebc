"""ARC, Easy and Challenge (Clark et al. 2018): answer science questions from American schools.

A question has three to five answers. Source: arXiv:1803.05457. License of the data: CC BY-SA 4.0.
"""

from dataclasses import replace

from ursa_minor.evaluation.task import RULES, Answer, Choices, Question, Task, TaskRow, Text


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the question and its answers."""
    context = f"Question: {row['question']}\nAnswer:"
    return (Question(context, row["choices"], row["answerKey"]),)


EASY = Task(
    name="arc_easy",
    label="ARC-Easy",
    scores={name: RULES[name] for name in ("acc", "acc_norm")},
    chance=0.25,
    size=2_376,
    dataset=("allenai/ai2_arc", "test"),
    revision="210d026faf9955653af8916fad021475a3f00453",
    files=("ARC-Easy/test-00000-of-00001.parquet", 1),
    config="ARC-Easy",
    fields={
        "question": Text(),
        "choices": Choices(texts="text", labels="label"),
        "answerKey": Answer(labels="choices"),
    },
    questions=questions,
)
CHALLENGE = replace(
    EASY,
    name="arc_challenge",
    label="ARC-Challenge",
    size=1_172,
    files=("ARC-Challenge/test-00000-of-00001.parquet", 1),
    config="ARC-Challenge",
    published={"GPT-2 124M": (None, 22.70)},
    citations=(
        "GPT-2 124M: lm-evaluation-harness on gpt2, quoted in CortexLM/cortex#126 (acc_norm)",
    ),
)
TASKS = (EASY, CHALLENGE)
