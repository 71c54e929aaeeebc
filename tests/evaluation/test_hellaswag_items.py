"""HellaSwag's items are read, cleaned, encoded and scored as lm-evaluation-harness and build-nanogpt do it."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import normalizers, processors

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import task_data as task_items
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
NASTY = ["Word é 中 \U0001f600", " [title] x", "two\n\tlines  ", "I'll: <|endoftext|>", "[step] 12"]


read = partial(task_items.read, hellaswag.TASK)


def write(path, *rows):
    """A file of JSON lines; what is text already stands as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def encoded(folder, tokenizer, *rows, context_length=None):
    return EncodedTask(
        hellaswag.TASK, read([write(folder / "items.jsonl", *rows)]), tokenizer, context_length
    )


@pytest.fixture(scope="module")
def characters():
    """A token is a character."""
    return tokenization.make_characters([json.dumps(ROW) + "Hé"])


# Text


def test_text_is_cleaned_by_the_harness_rules(tmp_path):
    row = ROW | {
        "activity_label": " Food",
        "ctx_a": "[header] How to bake [title] Mix it.  Now [substeps] stir.",
        "ctx_b": "the Pan [title] HEAT[x] ",
        "ctx": "as It stands [step]  ",
        "endings": ["  [step] it ", "a [title] b", "[x]", "Two  spaces [y] here."],
    }
    (item,) = read([write(tmp_path / "items.jsonl", row)])
    cleaned, raw = item.questions
    assert cleaned.context == "Food: How to bake. Mix it. Now stir. The pan. heat"
    assert cleaned.endings == (" it", "a. b", "", "Two spaces here.")
    assert (
        raw.context == row["ctx"]
        and list(raw.endings) == row["endings"]
        and cleaned.gold == raw.gold == 2
    )


# Tokens


@pytest.mark.parametrize("begins", [False, True])
def test_raw_questions_have_the_ids_of_context_and_ending_apart(tmp_path, begins):
    """Also for a tokenizer that puts a token before each text, as Llama's does."""
    tokenizer = tokenization.train_bpe([json.dumps(ROW)], 300)
    if begins:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
        )
    rows = [ROW | {"ctx": context, "endings": NASTY[1:]} for context in NASTY]
    test = encoded(tmp_path, tokenizer, *rows)
    for row, (context, endings) in zip(rows, test.questions[len(rows) :], strict=True):
        assert (
            context == tokenizer.encode(row["ctx"])
            and (context[0] == tokenizer.eos_token_id) is begins
        )
        assert endings == [
            tokenizer.encode(f" {text}", add_special_tokens=False) for text in row["endings"]
        ]


def test_text_that_the_tokenizer_cannot_write_is_refused(tmp_path):
    with pytest.raises(
        BadInput, match="tokenizer cannot encode the text of the items, .* --tokenizer bpe"
    ):
        encoded(tmp_path, tokenization.make_characters(["abc"]), ROW)


def test_an_ending_that_becomes_no_token_is_refused_with_its_line(tmp_path):
    tokenizer = tokenization.train_bpe(["abc"], 300)
    swallow = [normalizers.Replace("zzz", ""), normalizers.Strip()]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(swallow)
    with pytest.raises(BadInput, match="items.jsonl: line 2: the tokenizer returns no token for"):
        encoded(tmp_path, tokenizer, ROW, ROW | {"endings": ["a", "b", "c", "zzz"]})


def test_questions_longer_than_the_context_are_counted(tmp_path, characters):
    """The cleaned ones begin with the label: 21 tokens and an ending; of the raw ones ctx and the ending count."""
    rows = [
        ROW | {"ctx": "b" * length, "endings": [" er", "a", "b", "c"]} for length in (40, 41, 42)
    ]
    test = encoded(tmp_path, characters, *rows)
    assert max(tokens.max() for tokens in test.tokens[1]) == 4
    assert [test.longer_than(limit) for limit in (None, 45, 44, 43, 42, 4)] == [0, 0, 1, 2, 3, 6]


def test_an_item_whose_ending_is_longer_than_the_context_is_left_out_and_counted(
    tmp_path, characters
):
    rows = [
        ROW | {"endings": [end, "a", "b", "c"], "label": n}
        for n, end in enumerate((" er", "b", "c"))
    ]
    for limit, left in ((None, [0, 1, 2]), (4, [0, 1, 2]), (3, [1, 2])):
        test = encoded(tmp_path, characters, *rows, context_length=limit)
        assert test.gold.tolist() == left and test.left_out == len(rows) - len(
            test.items
        ) == 3 - len(left)
    with pytest.raises(
        BadInput,
        match=r"^HellaSwag cannot be scored, .* context of 1 tokens\. The shortest of these endings has \d tokens",
    ):
        encoded(tmp_path, characters, *rows, context_length=1)


# Scores


LIKELIHOODS = [
    [-4.0, -6.0, -10.0, -1.9],  # per character: -2, -1.5, -1.25, -1.9
    [-8.0, -8.0, -32.0, -9.0],  # the same value twice; per character -4, -2, -4, -9
    [-0.5, -700.0, -800.0, -900.0],  # the likeliest is cleaned to nothing
    [-3.0, -9.0, -10.8, -1.9],  # raw, of 3, 9, 9 and 2 tokens: -1, -1, -1.2, -0.95
    [-6.0, -9.0, -9.0, -4.0],  # -2, -1, -1, -2
    [-6.0, -9.0, -9.0, -4.0],
]


def test_predictions_are_the_likeliest_ending_and_per_character_and_per_token_of_equals_the_first(
    tmp_path, characters
):
    """Of 2, 4, 8 and 1 characters once they are cleaned; raw, a character is a token, and a space more."""
    endings = ["aa", "a [b] éé", "aaaaaaaa", "a"]
    rows = [
        ROW | {"endings": endings},
        ROW | {"endings": endings},
        ROW | {"endings": ["[a]", *endings[1:]]},
    ]
    test = encoded(tmp_path, characters, *rows)
    assert test.characters[0].tolist() == [2, 4, 8, 1] and test.tokens[1][0].tolist() == [
        3,
        9,
        9,
        2,
    ]
    predictions = test.predictions([ModelAnswer(np.array(row), False) for row in LIKELIHOODS])
    wanted = {"acc": [3, 0, 0], "acc_norm": [2, 1, 2], "acc_token_norm": [3, 1, 1]}
    assert {name: chosen.tolist() for name, chosen in predictions.items()} == wanted


# Files


def test_limit_reads_only_the_first_items_and_without_it_the_first_three_faults_are_listed(
    tmp_path,
):
    path = write(tmp_path / "items.jsonl", ROW, ROW | {"label": 1}, *["{"] * 13, ROW)
    assert [item.questions[0].gold for item in read([path, "no_such_file"], limit=2)] == [2, 1]
    with pytest.raises(BadInput) as caught:
        read([path])
    *lines, last = caught.value.lines
    assert [line.split(" (")[0] for line in lines] == [
        f"{path}: line {n}: the row is not a JSON object. Write one JSON object per line, or use "
        "another format"
        for n in range(3, 6)
    ]
    assert last == "10 more rows have an error"


def test_parquet_gives_the_items_of_json_lines_and_files_are_joined(tmp_path):
    rows = [ROW | {"label": str(n % 4), "ctx_a": f"Number {n}.", "ind": n} for n in range(2)]
    lines, table = write(tmp_path / "a.jsonl", *rows), tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    both = read([lines, table])
    places = [f"{lines}: line 1", f"{lines}: line 2", f"{table}: row 1", f"{table}: row 2"]
    assert [item.location for item in both] == places
    assert [item.questions for item in both[:2]] == [item.questions for item in both[2:]]


def test_all_files_without_items_are_named(tmp_path):
    empty = [write(tmp_path / name, "", " ") for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(BadInput, match="a.jsonl, .*b.jsonl contains no items of HellaSwag"):
        read(empty)
