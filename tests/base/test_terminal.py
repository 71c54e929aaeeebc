"""Text and tables in the width of a terminal."""

import io

import pytest

from ursa_minor.base import terminal

TABLE = [["", "adamw", "muon", "lion"], ["loss", "2.00", "1.80", "1.95"]]


@pytest.mark.parametrize("width", [None, 80])
def test_wide_table_has_one_block(width):
    assert terminal.align(TABLE, width) == ["      adamw  muon  lion", "loss  2.00   1.80  1.95"]


def test_narrow_table_repeats_its_first_column():
    lines = terminal.align(TABLE, 18)

    assert lines == ["      adamw  muon", "loss  2.00   1.80", "", "      lion", "loss  1.95"]


def test_too_narrow_table_has_a_block_per_column():
    lines = terminal.align(TABLE, 1)

    assert lines.count("") == 2
    assert lines[0].split() == ["adamw"]


def test_numbers_are_aligned_to_the_right():
    rows = [["name", "steps"], ["a", "1"]]

    assert terminal.align(rows, None, numbers_right=True) == ["name  steps", "a         1"]


def test_text_is_wrapped_between_words():
    text = terminal.wrap("one two three\n\nfour --long_flag_without_spaces", 12, indent="  ")

    assert text == "one two\n  three\n\nfour\n  --long_flag_without_spaces"


def test_text_without_a_width_is_not_wrapped():
    assert terminal.wrap("word " * 100, None) == "word " * 100


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("0", None), ("x", None), ("", None)])
def test_width_is_that_of_columns(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)

    assert terminal.width_of(io.StringIO()) == width
