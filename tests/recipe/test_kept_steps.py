"""The values of keep_checkpoints, and the steps that they mean."""

import pytest
from conftest import ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import kept_steps, keys, loading

RECIPE = (ROOT / "recipes" / "own_text.yaml").read_text(encoding="utf-8")


def load_from_file(tmp_path, yaml_value: str) -> keys.Recipe:
    """Return the recipe own_text with this text as the value of keep_checkpoints."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{RECIPE}\nkeep_checkpoints: {yaml_value}\n")
    return loading.load_recipe(path, {"data_files": ["x"]})


def load_from_flag(*values: str) -> keys.Recipe:
    """Return the recipe own_text with this flag."""
    flags = {"data_files": ["x"], "keep_checkpoints": list(values)}
    return loading.load_recipe(ROOT / "recipes" / "own_text.yaml", flags)


@pytest.mark.parametrize(
    ("yaml_value", "expected"),
    [
        ("log2", ["log2"]),
        ("100", ["100"]),
        ("[0, 100, 10M, 1.5B]", ["0", "100", "10M", "1.5B"]),
        ("[1_000, 1e3]", ["1000", "1e3"]),
        ("['7']", ["7"]),
        ("[]", []),
        ("null", None),
    ],
)
def test_recipe_file_states_steps_and_tokens(tmp_path, yaml_value, expected):
    recipe = load_from_file(tmp_path, yaml_value)

    assert recipe.saving.keep_checkpoints == expected


def test_flag_states_list_or_none():
    assert load_from_flag("log2").saving.keep_checkpoints == ["log2"]
    assert load_from_flag("0", "10M").saving.keep_checkpoints == ["0", "10M"]
    assert load_from_flag("none").saving.keep_checkpoints is None


def test_recipe_of_run_folder_has_same_steps(tmp_path):
    recipe = load_from_file(tmp_path, "[0, 100, 10M]")
    path = tmp_path / "recipe.yaml"
    path.write_text(keys.as_yaml(recipe))

    assert loading.load_recipe(path).saving.keep_checkpoints == ["0", "100", "10M"]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("-1", "negative"),
        ("-5M", "negative"),
        ("1.5", "integer"),
        ("10m", "10M"),
        ("10Q", "suffix"),
        ("10 M", "neither"),
        ("1__0", "neither"),
        ("log", "did you mean log2"),
        ("LOG2", "did you mean log2"),
        ("nan", "neither"),
        ("inf", "neither"),
        ("1e999", "suffix"),
        ("9" * 5000, "neither"),
        ("٣", "neither"),
        ("", "empty"),
        (" ", "empty"),
        ("0,5,10K", "Separate the values with spaces"),
        ("5,", "Separate the values with spaces"),
        ("0;5", "Separate the values with spaces"),
    ],
)
def test_invalid_value_is_rejected(value, word):
    with pytest.raises(BadInput) as caught:
        load_from_flag("0", value)

    (message,) = caught.value.lines
    assert message.startswith("--keep_checkpoints 0 ")
    assert word in message


def test_empty_value_is_quoted():
    with pytest.raises(BadInput) as caught:
        load_from_flag("")

    assert str(caught.value).startswith("--keep_checkpoints '': ")


@pytest.mark.parametrize("yaml_value", ["true", "[true]", "1.5", "[[1]]", "{a: 1}", "[null]"])
def test_invalid_type_is_rejected(tmp_path, yaml_value):
    with pytest.raises(BadInput) as caught:
        load_from_file(tmp_path, yaml_value)

    assert "keep_checkpoints" in str(caught.value)
    assert "must be log2, or a list" in str(caught.value)


def test_keep_optimizer_needs_kept_checkpoints():
    flags = {"data_files": ["x"], "keep_optimizer": "false"}

    with pytest.raises(BadInput) as caught:
        loading.load_recipe(ROOT / "recipes" / "own_text.yaml", flags)

    assert "keep_optimizer" in str(caught.value)
    assert "--keep_checkpoints log2" in str(caught.value)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (["log2"], [0, 1, 2, 4, 8, 10]),
        (["0", "3", "3", "10", "11"], [0, 3, 10]),
        (["0K", "1K", "1.001K", "2K", "1B"], [0, 10]),
        (["0.1K", "100", "0.2K", "0.201K"], [1, 2, 3]),
        (["log2", "5"], [0, 1, 2, 4, 5, 8, 10]),
        ([], []),
    ],
)
def test_values_mean_steps(points, expected):
    """The run has 10 steps of 100 tokens."""
    assert kept_steps.all_kept(points, 10, 100) == expected
    kept = [step for step in range(11) if kept_steps.is_kept(points, step, 100, is_last=step == 10)]
    assert kept == expected


def test_large_number_of_tokens_is_exact():
    tokens_per_step = 3
    points = ["123456789012345.678901B"]

    (step,) = kept_steps.listed_steps(points, tokens_per_step).values()

    assert step == 41152263004115226300334


def test_last_step_is_kept_with_log2_only():
    assert kept_steps.is_kept(["log2"], 7, 100, is_last=True)
    assert not kept_steps.is_kept(["log2"], 7, 100, is_last=False)
    assert not kept_steps.is_kept(["6"], 7, 100, is_last=True)


def test_values_after_last_step_are_beyond():
    assert kept_steps.beyond(["log2", "10", "11", "1K", "1.001K"], 10, 100) == ["11", "1.001K"]
