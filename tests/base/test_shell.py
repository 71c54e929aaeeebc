"""Words of printed commands, which can be pasted into a shell."""

import re
import shlex

import pytest

from ursa_minor.base.shell import ollama_name, path_word


@pytest.mark.parametrize(
    "path", ["runs/a", "my runs/o'x", "runs/é ü", 'a"b', "$HOME;ls", "-x", "--out", "-"]
)
def test_path_is_one_word_and_no_flag(path):
    (word,) = shlex.split(path_word(path))

    assert word in (path, f"./{path}")
    assert not word.startswith("-")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Mine", "mine"),
        ("my model", "my-model"),
        ("Été 2026 (v1.2)", "ete-2026-v1.2"),
        ("a_b.c-d", "a_b.c-d"),
        ("--x", "x"),
        ("日本語", "model"),
        ("Straße", "strasse"),
        ("x" * 100, "x" * 80),
    ],
)
def test_ollama_name_has_valid_characters_only(name, expected):
    result = ollama_name(name)

    assert result == expected
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", result)
