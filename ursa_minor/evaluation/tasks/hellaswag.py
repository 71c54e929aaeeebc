"""HellaSwag (Zellers et al. 2019): which of four endings does a model find likeliest after a context? In three scores.

- ``acc``, ``acc_norm``: on lm-evaluation-harness's text (activity label, ctx_b capitalized, brackets cleaned away) the
  likeliest ending, and the likeliest per character.
- ``acc_token_norm``: build-nanogpt's and llm.c's: on ``ctx`` as it stands the likeliest ending per token.

arXiv:1905.07830; license of the data: MIT.
"""

import re

from ursa_minor.evaluation.task import Answer, Question, Task, TaskRow, Text, Texts

ENDINGS = 4
HARNESS, OTHERS = "lm-evaluation-harness", "build-nanogpt, llm.c"


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the harness's question, and the same on the text as it stands."""
    endings = row["endings"]
    right = row["label"]
    context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    cleaned = Question(context, tuple(map(_clean, endings)), right)
    raw = Question(row["ctx"], endings, right, apart=True)
    return cleaned, raw


def _clean(text: str) -> str:
    """Clean a text as the harness does (lm_eval/tasks/hellaswag): WikiHow's headings left brackets behind."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


TASK = Task(
    name="hellaswag",
    label="HellaSwag",
    scores={
        "acc": HARNESS,
        "acc_norm": f"{HARNESS}: per character",
        "acc_token_norm": f"{OTHERS}: mean per token",
    },
    chance=1 / ENDINGS,
    size=10_042,
    dataset=("Rowan/hellaswag", "validation"),
    revision="218ec52e09a7e7462a5400043bb9a69a41d06b76",
    files=("data/validation-00000-of-00001.parquet", 1),
    fields={
        "activity_label": Text(),
        "ctx_a": Text(),
        "ctx_b": Text(),
        "ctx": Text(),
        "endings": Texts(count=ENDINGS),
        "label": Answer(labels=tuple(range(ENDINGS))),
    },
    questions=questions,
    published={
        "GPT-2 124M": (28.92, 31.14, 29.55),
        "GPT-2 355M": (None, None, 37.52),
        "GPT-2 774M": (None, None, 43.20),
        "GPT-2 1558M": (40.04, 50.89, 48.93),
        "GPT-3 124M": (None, None, 33.7),
    },
    citations=(
        "GPT-2 124M, 1558M: build-nanogpt, hellaswag.py (its own and the harness's scores of OpenAI's weights)",
        "GPT-2 355M, 774M: llm.c, dev/vislog.ipynb",
        "GPT-3 124M: Brown et al. 2020, table H.1 (zero-shot, OpenAI's own text and rule)",
    ),
)
TASKS = (TASK,)
