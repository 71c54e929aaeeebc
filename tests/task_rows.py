"""Synthetic rows for the data set of each task, in the schema of the real data set.

The schemas follow the task files of lm-eval 0.4.13 (arc, piqa, winogrande, lambada, blimp and
multiblimp) and the data set Rowan/hellaswag.
"""

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SENTENCE = (
    "the cat sat on a mat and saw two dogs run from water to fire because it is hot "
    "I'll don't 3.5 °C"
)
WORDS = SENTENCE.split()
WORDS += ["naïve", "Straße", "中文", "हिन्दी", "🙂", "(see", "below)"]
WORDS += ["[title]", "A.", "\u00a0", "e\u0301"]
HINDI_SENTENCE = "लड़का लड़की जाता जाती है हैं घर को पानी ने खाया खायी किताब"
HINDI_WORDS = HINDI_SENTENCE.split()
LONG = 360  # words: longer than the context of the tested models
ROWS = 64
PARTS = tuple(f"part_{number}" for number in range(67))  # parts of BLiMP, with one row each


def _text(draw: random.Random, low: int, high: int) -> str:
    """Return ``low`` to ``high`` random words."""
    count = draw.randint(low, high)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def _lengths(number: int) -> tuple[int, int]:
    """Return the least and the largest number of words in the first text of a row."""
    if number == 7:
        return LONG, LONG + 10
    if number % 5 == 0:
        return 1, 2
    return 4, 14


def arc_rows(seed: int) -> list[dict]:
    """Return questions with 3 to 5 choices, labelled by letters or numbers; one has no text."""
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        size = draw.choice((3, 4, 4, 5))
        all_labels = "ABCDE" if number % 3 else "12345"
        labels = list(all_labels[:size])
        texts = [_text(draw, 1, 9) for _ in labels]
        question = ""
        if number != 3:
            question = _text(draw, *_lengths(number))
        row = {
            "id": str(number),
            "question": question,
            "choices": {"text": texts, "label": labels},
            "answerKey": draw.choice(labels),
        }
        rows.append(row)
    return rows


def piqa_rows(seed: int) -> list[dict]:
    """Return goals with two solutions, some of which begin with a space."""
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        goal = _text(draw, *_lengths(number))
        first_solution = _text(draw, 1, 25)
        if number % 11 == 0:
            first_solution = " " + first_solution
        row = {
            "goal": goal,
            "sol1": first_solution,
            "sol2": _text(draw, 1, 25),
            "label": draw.randint(0, 1),
        }
        rows.append(row)
    return rows


def winogrande_rows(seed: int) -> list[dict]:
    """Return sentences with a blank at the beginning, in the middle, or with two blanks."""
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        before = ""
        if number % 9:
            before = _text(draw, *_lengths(number)) + " "
        after = _text(draw, 1, 8)
        if number % 4:
            after = " " + after
        end = "." if number % 13 else " and _ ."
        row = {
            "sentence": f"{before}_{after}{end}",
            "option1": _text(draw, 1, 2),
            "option2": _text(draw, 1, 3),
            "answer": draw.choice("12"),
        }
        rows.append(row)
    return rows


def lambada_rows(seed: int) -> list[dict]:
    """Return passages with one or two spaces or a line break before the last word.

    One passage is a single word without any context.
    """
    draw = random.Random(seed)
    gaps = {1: "  ", 2: "\n "}
    rows = []
    for number in range(ROWS):
        context = ""
        if number != 4:
            context = _text(draw, *_lengths(number)) + gaps.get(number % 10, " ")
        last_word = draw.choice(WORDS).strip() or "end"
        rows.append({"text": context + last_word})
    return rows


def blimp_rows(part: int) -> list[dict]:
    """Return one pair of sentences, with the other columns of the data set."""
    draw = random.Random(part)
    good = _text(draw, 2, 30 if part == 7 else 10) + "."
    bad = good.replace(" ", " not ", 1)
    if part % 2:
        bad = " ".join(reversed(good.split(" ")))
    row = {
        "sentence_good": good,
        "sentence_bad": bad,
        "field": "syntax",
        "linguistics_term": "made",
        "UID": "made",
        "simple_LM_method": True,
        "pair_id": part,
    }
    return [row]


def multiblimp_rows(seed: int) -> list[dict]:
    """Return pairs of Hindi sentences, one of them with quotation marks."""
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        count = draw.randint(2, 9)
        good = " ".join(draw.choice(HINDI_WORDS) for _ in range(count))
        if number == 5:
            good = f'उसने "{good}" कहा'
        row = {
            "sen": good,
            "wrong_sen": f"{good} {draw.choice(HINDI_WORDS)}",
            "phenomenon": "SV-#",
            "lang": "hin",
        }
        rows.append(row)
    return rows


def hellaswag_rows(seed: int) -> list[dict]:
    """Return items, some of them with a heading in brackets."""
    draw = random.Random(seed)
    rows = []
    for number in range(ROWS):
        ctx_a = _text(draw, *_lengths(number))
        ctx_b = draw.choice(("he", "they [step]", ""))
        row = {
            "activity_label": _text(draw, 1, 2),
            "ctx_a": ctx_a,
            "ctx_b": ctx_b,
            "ctx": f"{ctx_a} {ctx_b}".strip(),
            "endings": [_text(draw, 1, 12) for _ in range(4)],
            "label": str(draw.randint(0, 3)),
        }
        rows.append(row)
    return rows


# The rows of each file, by data set and path on the Hub.
DATASETS = {
    "allenai/ai2_arc": {
        "ARC-Easy/test-00000-of-00001.parquet": arc_rows(1),
        "ARC-Challenge/test-00000-of-00001.parquet": arc_rows(2),
    },
    "baber/piqa": {"piqa_validation.parquet": piqa_rows(3)},
    "allenai/winogrande": {"winogrande_xl/validation-00000-of-00001.parquet": winogrande_rows(4)},
    "EleutherAI/lambada_openai": {"data/lambada_test_en.jsonl": lambada_rows(5)},
    "jumelet/multiblimp": {"hin/data.tsv": multiblimp_rows(6)},
    "Rowan/hellaswag": {"data/validation-00000-of-00001.parquet": hellaswag_rows(8)},
}
# The configuration and the split of each file of DATASETS, by a part of its path.
CONFIGS = {
    "ARC-Easy": ("ARC-Easy", "test"),
    "ARC-Challenge": ("ARC-Challenge", "test"),
    "piqa_validation": ("default", "validation"),
    "winogrande_xl": ("winogrande_xl", "validation"),
    "lambada_test_en": ("default", "test"),
    "hin/": ("hin", "train"),
    "data/validation": ("default", "validation"),
}


def _config_and_split(file: str) -> tuple[str, str]:
    """Return the configuration and the split of a file: for BLiMP, its folder and train."""
    for part, config_and_split in CONFIGS.items():
        if part in file:
            return config_and_split
    folder, _, _ = file.partition("/")
    return folder, "train"


def _readme_entry(file: str) -> str:
    """Return the entry of a file in the list of configurations of a README.

    The file is named for every split, because lm-eval opens all splits.
    """
    config, split = _config_and_split(file)
    entry = f"- config_name: {config}\n  data_files:\n"
    for name in dict.fromkeys((split, "train", "validation")):
        entry += f"  - split: {name}\n    path: {file}\n"
    return entry


def _write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as Parquet, JSON lines or quoted TSV, depending on the suffix of the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        lines = [json.dumps(row) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
            writer.writeheader()
            writer.writerows(rows)


def write_datasets(
    folder: Path, parts: Sequence[str] = PARTS, more: Mapping[str, dict] | None = None
) -> None:
    """Write each data set to ``folder/datasets/OWNER/NAME``, with a README like on the Hub.

    Args:
        folder: the folder of a ``DataServer``.
        parts: the names of BLiMP's parts.
        more: rows that are added to DATASETS or replace some of them.
    """
    blimp_files = {}
    for number, part in enumerate(parts):
        blimp_files[f"{part}/train-00000-of-00001.parquet"] = blimp_rows(number)
    datasets = DATASETS | {"nyu-mll/blimp": blimp_files} | dict(more or {})

    for name, files in datasets.items():
        root = folder / "datasets" / name
        for file, rows in files.items():
            _write_rows(root / file, rows)
        entries = "".join(_readme_entry(file) for file in files)
        (root / "README.md").write_text(f"---\nconfigs:\n{entries}---\n", encoding="utf-8")
