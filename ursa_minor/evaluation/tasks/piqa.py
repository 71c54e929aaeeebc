"""PIQA (Bisk et al. 2020): choose the one of two solutions that reaches an everyday goal.

Source: arXiv:1911.11641. License of the data: not stated.
"""

from ursa_minor.evaluation.task import RULES, Answer, Question, Task, TaskRow, Text


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the goal and its two solutions."""
    context = f"Question: {row['goal']}\nAnswer:"
    return (Question(context, (row["sol1"], row["sol2"]), row["label"]),)


TASKS = (
    Task(
        name="piqa",
        label="PIQA",
        scores={name: RULES[name] for name in ("acc", "acc_norm")},
        chance=0.5,
        size=1_838,
        dataset=("baber/piqa", "validation"),
        revision="142f6d7367fd9877f0fb3b5734ea6a545f54cdd1",
        files=("piqa_validation.parquet", 1),
        fields={
            "goal": Text(),
            "sol1": Text(is_scored=True),
            "sol2": Text(is_scored=True),
            "label": Answer(labels=(0, 1)),
        },
        questions=questions,
        published={"GPT-2 124M": (None, 62.51)},
        citations=(
            "GPT-2 124M: lm-evaluation-harness on gpt2, quoted in CortexLM/cortex#126 (acc_norm)",
        ),
    ),
)
