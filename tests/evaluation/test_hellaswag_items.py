"""HellaSwag: text and scores equal those of lm-evaluation-harness and build-nanogpt."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import normalizers, processors

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.likelihood import ModelAnswer
from ursa_minor.evaluation.tasks import hellaswag

ROW = {
    "activity_label": "Baking",
    "ctx_a": "A man bakes.",
    "ctx_b": "he",
    "ctx": "A man bakes. he",
    "endings": ["eats.", "sings a song.", "is a cake.", "runs off to the sea."],
    "label": 2,
}
DIFFICULT_TEXTS = [
    "Word é 中 \U0001f600",
    " [title] x",
    "two\n\tlines  ",
    "I'll: <|endoftext|>",
    "[step] 12",
]


def read(paths: list, limit: int = 0) -> task_data.Items:
    """Read the HellaSwag items of these files."""
    return task_data.read(hellaswag.TASK, paths, limit)


def write_lines(path: Path, *rows) -> Path:
    """Write a JSON lines file. A row that is a string is written unchanged."""
    lines = []
    for row in rows:
        line = row if isinstance(row, str) else json.dumps(row)
        lines.append(line + "\n")
    path.write_text("".join(lines))
    return path


def encode_rows(folder: Path, tokenizer, *rows, context_length=None) -> EncodedTask:
    """Write rows to items.jsonl, and read and encode this file."""
    path = write_lines(folder / "items.jsonl", *rows)
    return EncodedTask(hellaswag.TASK, read([path]), tokenizer, context_length)


@pytest.fixture(scope="module")
def character_tokenizer():
    """Return a tokenizer with one token for each character."""
    return tokenization.make_characters([json.dumps(ROW) + "Hé"])


# Text


def test_text_is_cleaned_like_in_harness(tmp_path):
    row = ROW | {
        "activity_label": " Food",
        "ctx_a": "[header] How to bake [title] Mix it.  Now [substeps] stir.",
        "ctx_b": "the Pan [title] HEAT[x] ",
        "ctx": "as It stands [step]  ",
        "endings": ["  [step] it ", "a [title] b", "[x]", "Two  spaces [y] here."],
    }
    path = write_lines(tmp_path / "items.jsonl", row)

    items = read([path])

    assert len(items) == 1
    cleaned, raw = items[0].questions
    assert cleaned.context == "Food: How to bake. Mix it. Now stir. The pan. heat"
    assert cleaned.endings == (" it", "a. b", "", "Two spaces here.")
    assert cleaned.gold == 2
    assert raw.context == row["ctx"]
    assert list(raw.endings) == row["endings"]
    assert raw.gold == 2


# Tokens


@pytest.mark.parametrize("has_first_token", [False, True], ids=["plain", "begins like Llama"])
def test_raw_context_and_endings_are_encoded_separately(tmp_path, has_first_token):
    tokenizer = tokenization.train_bpe([json.dumps(ROW)], 300)
    if has_first_token:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
        )
    rows = [ROW | {"ctx": text, "endings": DIFFICULT_TEXTS[1:]} for text in DIFFICULT_TEXTS]

    test = encode_rows(tmp_path, tokenizer, *rows)

    raw_questions = test.questions[len(rows) :]
    for row, (context, endings) in zip(rows, raw_questions, strict=True):
        assert context == tokenizer.encode(row["ctx"])
        assert (context[0] == tokenizer.eos_token_id) is has_first_token
        assert endings == [
            tokenizer.encode(f" {text}", add_special_tokens=False) for text in row["endings"]
        ]


def test_text_without_ids_is_rejected(tmp_path):
    tokenizer = tokenization.make_characters(["abc"])

    with pytest.raises(BadInput, match="tokenizer cannot encode.* --tokenizer bpe"):
        encode_rows(tmp_path, tokenizer, ROW)


def test_ending_without_tokens_is_rejected(tmp_path):
    tokenizer = tokenization.train_bpe(["abc"], 300)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("zzz", ""), normalizers.Strip()]
    )

    with pytest.raises(BadInput, match=r"items\.jsonl: line 2: .* no token"):
        encode_rows(tmp_path, tokenizer, ROW, ROW | {"endings": ["a", "b", "c", "zzz"]})


@pytest.mark.parametrize(
    ("context_length", "expected"), [(None, 0), (45, 0), (44, 1), (43, 2), (42, 3), (4, 6)]
)
def test_questions_longer_than_context_are_counted(
    tmp_path, character_tokenizer, context_length, expected
):
    """Only a cleaned context begins with the activity label, so it is 21 tokens longer."""
    rows = []
    for length in (40, 41, 42):
        rows.append(ROW | {"ctx": "b" * length, "endings": [" er", "a", "b", "c"]})

    test = encode_rows(tmp_path, character_tokenizer, *rows)

    assert max(tokens.max() for tokens in test.tokens[1]) == 4
    assert test.longer_than(context_length) == expected


ROWS_BY_ENDING = [
    ROW | {"endings": [" er", "a", "b", "c"], "label": 0},
    ROW | {"endings": ["b", "a", "b", "c"], "label": 1},
    ROW | {"endings": ["c", "a", "b", "c"], "label": 2},
]


@pytest.mark.parametrize(
    ("context_length", "expected"), [(None, [0, 1, 2]), (4, [0, 1, 2]), (3, [1, 2])]
)
def test_items_with_too_long_endings_are_skipped(
    tmp_path, character_tokenizer, context_length, expected
):
    test = encode_rows(
        tmp_path, character_tokenizer, *ROWS_BY_ENDING, context_length=context_length
    )

    assert test.gold.tolist() == expected
    assert len(test.items) == len(expected)
    assert test.left_out == 3 - len(expected)


def test_context_shorter_than_every_ending_is_rejected(tmp_path, character_tokenizer):
    with pytest.raises(BadInput) as error:
        encode_rows(tmp_path, character_tokenizer, *ROWS_BY_ENDING, context_length=1)

    message = str(error.value)
    assert message.startswith("HellaSwag cannot be scored")
    assert "context of 1 tokens" in message
    assert "shortest of these endings has 2 tokens" in message


# Scores


LOG_LIKELIHOODS = [
    [-4.0, -6.0, -10.0, -1.9],  # per character: -2, -1.5, -1.25, -1.9
    [-8.0, -8.0, -32.0, -9.0],  # a tie; per character: -4, -2, -4, -9
    [-0.5, -700.0, -800.0, -900.0],  # the likeliest cleaned ending is empty
    # The raw texts have 3, 9, 9 and 2 tokens.
    [-3.0, -9.0, -10.8, -1.9],  # per token: -1, -1, -1.2, -0.95
    [-6.0, -9.0, -9.0, -4.0],  # per token: -2, -1, -1, -2
    [-6.0, -9.0, -9.0, -4.0],
]


def test_prediction_is_likeliest_ending(tmp_path, character_tokenizer):
    endings = ["aa", "a [b] éé", "aaaaaaaa", "a"]
    row = ROW | {"endings": endings}
    row_with_empty_ending = ROW | {"endings": ["[a]", *endings[1:]]}
    test = encode_rows(tmp_path, character_tokenizer, row, row, row_with_empty_ending)
    answers = [ModelAnswer(np.array(nats), False) for nats in LOG_LIKELIHOODS]

    predictions = test.predictions(answers)

    assert test.characters[0].tolist() == [2, 4, 8, 1]
    assert test.tokens[1][0].tolist() == [3, 9, 9, 2]
    assert set(predictions) == {"acc", "acc_norm", "acc_token_norm"}
    assert predictions["acc"].tolist() == [3, 0, 0]
    assert predictions["acc_norm"].tolist() == [2, 1, 2]
    assert predictions["acc_token_norm"].tolist() == [3, 1, 1]


# Files


def test_limit_stops_before_invalid_rows(tmp_path):
    path = write_lines(tmp_path / "items.jsonl", ROW, ROW | {"label": 1}, "{")

    items = read([path, "no_such_file"], limit=2)

    assert [item.questions[0].gold for item in items] == [2, 1]


def test_first_three_invalid_rows_are_listed(tmp_path):
    path = write_lines(tmp_path / "items.jsonl", ROW, ROW, *["{"] * 13, ROW)

    with pytest.raises(BadInput) as error:
        read([path])

    lines = error.value.lines
    assert len(lines) == 4
    for number, line in zip(range(3, 6), lines, strict=False):
        assert line.startswith(f"{path}: line {number}: ")
        assert "not a JSON object" in line
    assert lines[3] == "10 more rows have an error"


def test_parquet_and_json_lines_have_same_items(tmp_path):
    rows = [
        ROW | {"label": "0", "ctx_a": "Number 0.", "ind": 0},
        ROW | {"label": "1", "ctx_a": "Number 1.", "ind": 1},
    ]
    json_lines = write_lines(tmp_path / "a.jsonl", *rows)
    parquet = tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)

    items = read([json_lines, parquet])

    assert [item.location for item in items] == [
        f"{json_lines}: line 1",
        f"{json_lines}: line 2",
        f"{parquet}: row 1",
        f"{parquet}: row 2",
    ]
    questions = [item.questions for item in items]
    assert questions[:2] == questions[2:]


def test_files_without_items_are_rejected(tmp_path):
    paths = [write_lines(tmp_path / name, "", " ") for name in ("a.jsonl", "b.jsonl")]

    with pytest.raises(BadInput, match=r"a\.jsonl, .*b\.jsonl contains no items of HellaSwag"):
        read(paths)
