"""BLiMP and MultiBLiMP: choose the grammatical one of two sentences.

Each sentence is scored completely, as the beginning of a document. Scores of this task rise earlier
in training than those of the other tasks.

- BLiMP: Warstadt et al. 2020, arXiv:1912.00582. License of the data: CC BY 4.0.
- MultiBLiMP: Jumelet et al. 2025, arXiv:2504.02768. License of the data: CC BY-SA 4.0.
"""

from dataclasses import replace

from ursa_minor.evaluation.task import RULES, Question, Task, TaskRow, Text
from ursa_minor.recipe import keys

# Each paradigm is one part of the data set with 1,000 pairs. Because all parts have the same size,
# the mean over all items is also the mean over the parts.
PARADIGMS = 67


def pair(row: TaskRow) -> tuple[Question, ...]:
    """Return a pair of BLiMP. As in lm-evaluation-harness, a space precedes each sentence."""
    return (Question("", (row["sentence_good"], row["sentence_bad"]), 0),)


def multiblimp_pair(row: TaskRow) -> tuple[Question, ...]:
    """Return a pair of MultiBLiMP. Nothing precedes the sentences."""
    return (Question("", (row["sen"], row["wrong_sen"]), 0, delimiter=""),)


BLIMP = Task(
    name="blimp",
    label="BLiMP",
    scores={"acc": RULES["acc"]},
    chance=0.5,
    size=67_000,
    dataset=("nyu-mll/blimp", "train"),
    revision="877fba0801ffb7cbd8c39c1ff314a46f053f6036",
    files=("*/train-00000-of-00001.parquet", PARADIGMS),
    part_field="UID",
    fields={"sentence_good": Text(is_scored=True), "sentence_bad": Text(is_scored=True)},
    questions=pair,
)


def _multiblimp_task(code: str, size: int) -> Task:
    return replace(
        BLIMP,
        name=f"multiblimp_{code}",
        label=f"MultiBLiMP {code}",
        scores={name: RULES[name] for name in ("acc", "acc_norm")},
        size=size,
        dataset=("jumelet/multiblimp", "train"),
        revision=None,
        files=(f"{code}/data.tsv", 1),
        config=code,
        part_field=None,
        fields={"sen": Text(is_scored=True), "wrong_sen": Text(is_scored=True)},
        questions=multiblimp_pair,
    )


MULTIBLIMP = [_multiblimp_task(code, size) for code, size in keys.MULTIBLIMP.items()]
TASKS = (BLIMP, *MULTIBLIMP)
