"""The file of --scores: finished scores are found, and no line is lost or incomplete."""

import json
from pathlib import Path

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.evaluation.score_file import ScoreFile, ScoreKey

KEY = ScoreKey("runs/a/checkpoints/step-00000004", "abc", "blimp", "123", "no")


def make_line(key: ScoreKey = KEY, **fields) -> dict:
    """Return a line with scores."""
    return {**key._asdict(), "acc": 0.5, **fields}


@pytest.fixture
def path(tmp_path) -> Path:
    """The path of a file with one line."""
    path = tmp_path / "scores.jsonl"
    ScoreFile(path).add(KEY, [make_line()])
    return path


def read_lines(path: Path) -> list[dict]:
    """Return the lines of a file."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_written_scores_are_found(path):
    assert ScoreFile(path).find(KEY) == make_line()


@pytest.mark.parametrize("field", ScoreKey._fields)
def test_other_model_or_options_are_not_found(path, field):
    assert ScoreFile(path).find(KEY._replace(**{field: "other"})) is None


def test_scores_of_changed_checkpoint_are_replaced(path):
    changed = KEY._replace(weights="new")
    other_task = KEY._replace(task="piqa")
    score_file = ScoreFile(path)
    score_file.add(other_task, [make_line(other_task)])

    score_file.add(changed, [make_line(changed, acc=0.6)])

    assert read_lines(path) == [make_line(other_task), make_line(changed, acc=0.6)]


def test_scores_of_other_items_are_kept(path):
    fewer_items = KEY._replace(items_sha256="456")

    ScoreFile(path).add(fewer_items, [make_line(fewer_items)])

    assert read_lines(path) == [make_line(), make_line(fewer_items)]


def test_parts_belong_to_their_task(path):
    score_file = ScoreFile(path)
    parts = [make_line(part="x"), make_line(part="y")]
    score_file.add(KEY, [*parts, make_line(parts=2)])

    read_again = ScoreFile(path)

    assert read_again.find(KEY) == make_line(parts=2)
    assert read_again.find_parts(KEY) == parts


@pytest.mark.parametrize("unfinished", [b"{", b'{"model": "runs/a', b'{"model": "\xc3', b" "])
def test_unfinished_last_line_is_replaced(path, unfinished):
    other = KEY._replace(task="piqa")
    path.write_bytes(path.read_bytes() + unfinished)

    score_file = ScoreFile(path)
    score_file.add(other, [make_line(other)])

    assert score_file.find(KEY) == make_line()
    assert read_lines(path) == [make_line(), make_line(other)]


def test_last_line_without_newline_is_kept(path):
    other = KEY._replace(task="piqa")
    path.write_bytes(path.read_bytes().rstrip())

    ScoreFile(path).add(other, [make_line(other)])

    assert read_lines(path) == [make_line(), make_line(other)]


@pytest.mark.parametrize(
    "text",
    [
        "mine\n",
        '{"goal": "dry wet shoes"}\n',
        "[1]\n",
        "null\n",
        "mine",
        '{"goal": "dry',
        '{"goal": 1}',
        '{"model": "a"}',
    ],
)
def test_other_file_is_rejected_and_kept(path, text):
    path.write_text(text)

    with pytest.raises(BadInput) as error:
        ScoreFile(path)

    assert f"--scores {path}: line 1" in str(error.value)
    assert path.read_text() == text


def test_damaged_line_in_the_middle_is_rejected(path):
    path.write_text('{"model": \n' + path.read_text())

    with pytest.raises(BadInput, match="line 1 is not a line with the scores"):
        ScoreFile(path)


def test_empty_file_is_extended(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.touch()

    ScoreFile(path).add(KEY, [make_line()])

    assert read_lines(path) == [make_line()]
