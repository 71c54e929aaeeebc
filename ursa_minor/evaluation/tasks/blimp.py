"""BLiMP (Warstadt et al. 2020) and MultiBLiMP (Jumelet et al. 2025): which of two sentences is grammatical?

Each sentence is scored whole, from the beginning of a text: no other task moves as early in training.
arXiv:1912.00582 and arXiv:2504.02768; licenses of the data: CC BY 4.0 and CC BY-SA 4.0.
"""

from dataclasses import replace

from ursa_minor.evaluation.task import RULES, Question, Task, TaskRow, Text
from ursa_minor.recipe import keys

PARADIGMS = 67  # of 1,000 pairs each, so that the mean over items is the mean over parts


def pair(row: TaskRow) -> tuple[Question, ...]:
    """Return BLiMP's pair; lm-evaluation-harness puts a space before each sentence."""
    return (Question("", (row["sentence_good"], row["sentence_bad"]), 0),)


def multiblimp_pair(row: TaskRow) -> tuple[Question, ...]:
    """Return MultiBLiMP's pair, with nothing before it."""
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
    fields={"sentence_good": Text(is_scored=True), "sentence_bad": Text(is_scored=True)},
    questions=pair,
)


def _of_language(code: str, size: int) -> Task:
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
        fields={"sen": Text(is_scored=True), "wrong_sen": Text(is_scored=True)},
        questions=multiblimp_pair,
    )


TASKS = (BLIMP, *(_of_language(code, size) for code, size in keys.MULTIBLIMP.items()))
