"""HellaSwag (Zellers et al. 2019): choose the right one of four endings.

The scores are computed on two versions of the text:

- ``acc`` and ``acc_norm`` use the text of lm-evaluation-harness. It starts with the activity label,
  ``ctx_b`` is capitalized, and text in brackets is removed.
- ``acc_token_norm`` uses ``ctx`` and the endings unchanged, as build-nanogpt and llm.c do.

Source: arXiv:1905.07830. License of the data: MIT.
"""

import re

from ursa_minor.evaluation.task import Answer, Question, Task, TaskRow, Text, Texts

ENDINGS = 4


def questions(row: TaskRow) -> tuple[Question, ...]:
    """Return the question of lm-evaluation-harness, and the question with the unchanged text."""
    endings = row["endings"]
    right = row["label"]
    second_sentence = row["ctx_b"].capitalize()
    context = _clean(f"{row['activity_label']}: {row['ctx_a']} {second_sentence}")
    cleaned_endings = tuple(_clean(ending) for ending in endings)
    cleaned = Question(context, cleaned_endings, right)
    raw = Question(row["ctx"], endings, right, encode_separately=True)
    return cleaned, raw


def _clean(text: str) -> str:
    """Remove the brackets that the headings of WikiHow have left in a text.

    The steps are those of lm_eval/tasks/hellaswag in lm-evaluation-harness.
    """
    text = text.strip().replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return text.replace("  ", " ")


TASK = Task(
    name="hellaswag",
    label="HellaSwag",
    scores={
        "acc": "lm-evaluation-harness",
        "acc_norm": "lm-evaluation-harness: per character",
        "acc_token_norm": "build-nanogpt, llm.c: mean per token",
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
        "GPT-2 124M, 1558M: build-nanogpt, hellaswag.py "
        "(scores of OpenAI's weights by build-nanogpt and by lm-evaluation-harness)",
        "GPT-2 355M, 774M: llm.c, dev/vislog.ipynb",
        "GPT-3 124M: Brown et al. 2020, table H.1 (zero-shot, with OpenAI's text and rule)",
    ),
)
TASKS = (TASK,)
