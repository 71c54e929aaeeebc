"""WinoGrande (Sakaguchi et al. 2019): choose the one of two names that fills the blank.

The task uses partial evaluation (Trinh and Le 2018): each context ends with one of the names, and
both contexts have the same ending, the text after the blank.
Source: arXiv:1907.10641. License of the data: CC BY.
"""

from ursa_minor.evaluation.task import RULES, Answer, Question, Task, TaskRow, Text


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the text after the blank as the ending of two contexts, one with each name."""
    before, blank, after = row["sentence"].partition("_")
    if not blank:
        raise ValueError("sentence has no blank. Write the blank as _")
    contexts = (before + row["option1"], before + row["option2"])
    ending = after.strip()
    return (Question(contexts, (ending, ending), row["answer"]),)


TASKS = (
    Task(
        name="winogrande",
        label="WinoGrande",
        scores={"acc": RULES["acc"]},
        chance=0.5,
        size=1_267,
        dataset=("allenai/winogrande", "validation"),
        revision="01e74176c63542e6b0bcb004dcdea22d94fb67b5",
        files=("winogrande_xl/validation-00000-of-00001.parquet", 1),
        config="winogrande_xl",
        fields={
            "sentence": Text(),
            "option1": Text(),
            "option2": Text(),
            "answer": Answer(labels=(1, 2)),
        },
        questions=questions,
        published={"GPT-2 124M": (51.62,)},
        citations=("GPT-2 124M: lm-evaluation-harness on gpt2, quoted in CortexLM/cortex#126",),
    ),
)
