"""Made rows of each task's data set, in its real schema; written from lm-eval 0.4.13's own task files.

The schemas: allenai/ai2_arc, baber/piqa, allenai/winogrande, EleutherAI/lambada_openai, nyu-mll/blimp and
jumelet/multiblimp as lm_eval/tasks/{arc,piqa,winogrande,lambada,blimp,multiblimp}/*.yaml read them; Rowan/hellaswag.
"""

import csv
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = re.findall(
    r"\S+",
    "the cat sat on a mat and saw two dogs run from water to fire because it is hot I'll don't 3.5 °C",
)
WORDS += [
    "naïve",
    "Straße",
    "中文",
    "हिन्दी",
    "🙂",
    "(see",
    "below)",
    "[title]",
    "A.",
    "\u00a0",
    "e\u0301",
]
LONG = 360  # words: more than the context of the models under test holds
ROWS = 64
PARTS = tuple(f"part_{number}" for number in range(67))  # of BLiMP, a row each


def _text(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))


def _lengths(number: int) -> tuple[int, int]:
    return (LONG, LONG + 10) if number == 7 else (1, 2) if number % 5 == 0 else (4, 14)


def arc_rows(seed: int) -> list[dict]:
    """3, 4 and 5 choices, labels in letters and in numbers; endings longer than their question."""
    draw, rows = random.Random(seed), []
    for number in range(ROWS):
        size = draw.choice((3, 4, 4, 5))
        labels = list("ABCDE" if number % 3 else "12345")[:size]
        choices = {"text": [_text(draw, 1, 9) for _ in labels], "label": labels}
        question = _text(draw, *_lengths(number)) if number != 3 else ""
        rows.append(
            {
                "id": str(number),
                "question": question,
                "choices": choices,
                "answerKey": draw.choice(labels),
            }
        )
    return rows


def piqa_rows(seed: int) -> list[dict]:
    """Two solutions of which one may be very long, or begin in white space."""
    draw, rows = random.Random(seed), []
    for number in range(ROWS):
        goal, sol1 = _text(draw, *_lengths(number)), " " * (number % 11 == 0) + _text(draw, 1, 25)
        rows.append(
            {"goal": goal, "sol1": sol1, "sol2": _text(draw, 1, 25), "label": draw.randint(0, 1)}
        )
    return rows


def winogrande_rows(seed: int) -> list[dict]:
    """A blank at the beginning, in the middle, twice; options of one word and of several."""
    draw, rows = random.Random(seed), []
    for number in range(ROWS):
        before = _text(draw, *_lengths(number)) + " " if number % 9 else ""
        after = (
            " " * (number % 4 != 0) + _text(draw, 1, 8) + (" and _ ." if number % 13 == 0 else ".")
        )
        options = {"option1": _text(draw, 1, 2), "option2": _text(draw, 1, 3)}
        rows.append({"sentence": f"{before}_{after}", **options, "answer": draw.choice("12")})
    return rows


def lambada_rows(seed: int) -> list[dict]:
    """Passages; one of a single word, with nothing before it, and some with two spaces or a line break before the last."""
    draw, rows = random.Random(seed), []
    for number in range(ROWS):
        gap = (
            ("  " if number % 10 == 1 else "\n " if number % 10 == 2 else " ")
            if number != 4
            else ""
        )
        passage = _text(draw, *_lengths(number)) if number != 4 else ""
        rows.append({"text": f"{passage}{gap}{draw.choice(WORDS).strip() or 'end'}"})
    return rows


def blimp_rows(part: int) -> list[dict]:
    """A pair of whole sentences; the columns that the data set has beside them."""
    good = _text(random.Random(part), 2, 30 if part == 7 else 10) + "."
    bad = " ".join(reversed(good.split(" "))) if part % 2 else good.replace(" ", " not ", 1)
    about = {"field": "syntax", "linguistics_term": "made", "UID": "made", "simple_LM_method": True}
    return [{"sentence_good": good, "sentence_bad": bad, **about, "pair_id": part}]


def multiblimp_rows(seed: int) -> list[dict]:
    """Pairs in Hindi, as rows of a TSV file, one with a quotation mark within."""
    draw, rows = random.Random(seed), []
    words = re.findall(r"\S+", "लड़का लड़की जाता जाती है हैं घर को पानी ने खाया खायी किताब")
    for number in range(ROWS):
        good = " ".join(draw.choice(words) for _ in range(draw.randint(2, 9)))
        good = f'उसने "{good}" कहा' if number == 5 else good
        rows.append(
            {
                "sen": good,
                "wrong_sen": f"{good} {draw.choice(words)}",
                "phenomenon": "SV-#",
                "lang": "hin",
            }
        )
    return rows


def hellaswag_rows(seed: int) -> list[dict]:
    """Items with headings in brackets."""
    draw, rows = random.Random(seed), []
    for number in range(ROWS):
        ctx_a, ctx_b = _text(draw, *_lengths(number)), draw.choice(("he", "they [step]", ""))
        row = {
            "activity_label": _text(draw, 1, 2),
            "ctx_a": ctx_a,
            "ctx_b": ctx_b,
            "ctx": f"{ctx_a} {ctx_b}".strip(),
        }
        rows.append(
            row
            | {"endings": [_text(draw, 1, 12) for _ in range(4)], "label": str(draw.randint(0, 3))}
        )
    return rows


# By data set: the files as they lie on the Hub, its configurations as its README names them.
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
CONFIGS = {  # of DATASETS' files: configuration and split
    "ARC-Easy": ("ARC-Easy", "test"),
    "ARC-Challenge": ("ARC-Challenge", "test"),
    "piqa_validation": ("default", "validation"),
    "winogrande_xl": ("winogrande_xl", "validation"),
    "lambada_test_en": ("default", "test"),
    "hin/": ("hin", "train"),
    "data/validation": ("default", "validation"),
}


def write_datasets(
    folder: Path, parts: Sequence[str] = PARTS, more: Mapping[str, dict] | None = None
) -> None:
    """Write every data set under ``folder/datasets/OWNER/NAME``, with a README whose head names the configurations.

    ``parts``: BLiMP's, by their names; ``more``: other rows than the made ones, as DATASETS has them.
    """
    pairs = {
        f"{part}/train-00000-of-00001.parquet": blimp_rows(number)
        for number, part in enumerate(parts)
    }
    for name, files in (DATASETS | {"nyu-mll/blimp": pairs} | dict(more or {})).items():
        root, configs = folder / "datasets" / name, []
        for file, rows in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                pq.write_table(pa.Table.from_pylist(rows), path)
            elif path.suffix == ".jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            else:
                with path.open("w", encoding="utf-8", newline="") as out:
                    writer = csv.DictWriter(out, list(rows[0]), delimiter="\t")
                    writer.writeheader()
                    writer.writerows(rows)
            configured = (found for begin, found in CONFIGS.items() if begin in file)
            config, split = next(configured, (file.partition("/")[0], "train"))
            splits = [
                f"  - split: {one}\n    path: {file}\n"
                for one in {split: 1, "train": 1, "validation": 1}
            ]
            configs.append(
                f"- config_name: {config}\n  data_files:\n" + "".join(splits)
            )  # lm-eval opens them all
        (root / "README.md").write_text(
            "---\nconfigs:\n" + "".join(configs) + "---\n", encoding="utf-8"
        )
