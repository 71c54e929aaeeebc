"""ARC (Clark et al. 2018): science questions of American schools, Easy and Challenge, with three to five answers.

arXiv:1803.05457; license of the data: CC BY-SA 4.0.
"""

from dataclasses import replace

from pretrain.evaluation.record import RULES, Question, Row, Task, gold


def questions(row: Row) -> tuple[Question, ...]:
    """Return the question with its answers; the right one is named by its label, a letter or a number."""
    right = gold("answerKey", row["answerKey"], row["choices"]["label"])
    return (Question(f"Question: {row['question']}\nAnswer:", tuple(row["choices"]["text"]), right),)


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
    fields=("question", "choices", "answerKey"),
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
    citations=("GPT-2 124M: lm-evaluation-harness on gpt2, as CortexLM/cortex#126 quotes it (acc_norm)",),
)
TASKS = (EASY, CHALLENGE)
