"""Spelling of flags: repeated flags, booleans, and fractions instead of numbers of steps."""

from pathlib import Path

import pytest
import yaml
from conftest import RECIPE

import check_setup
import compare_runs
import eval_hellaswag
import eval_tasks
import export_model
import generate
import prepare_data
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, keys, loading

STEP_KEYS = [name for name in keys.FIELDS if name.endswith("_steps")]


@pytest.fixture
def recipe_file(tmp_path):
    """Write a small recipe of 1,000 steps with a task."""
    changes = {"data_files": ["a.txt"], "max_steps": 1000, "tasks": ["piqa"], "task_steps": 500}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(RECIPE) | changes))
    return path


def append_line(path, line):
    """Append a line to a recipe file."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def parse(recipe_file, *words):
    """Return the keys and modes of train.py, and check that its data reader gets the same keys."""
    argv = ["--recipe", str(recipe_file), *words]
    recipe, modes, reader_argv = command_line.parse_training(argv)
    reader_flags, _ = command_line.read_flags(reader_argv, "", prepare_data.EXTRAS)
    reader_recipe = loading.load_recipe(Path(reader_flags.pop("recipe")), reader_flags)
    assert reader_recipe == recipe
    return keys.to_dict(recipe), modes


def value_of(recipe_file, key, *words):
    """Return the value of a key with these words on the command line."""
    values, _ = parse(recipe_file, *words)
    return values[key]


def error_of(recipe_file, *words):
    """Return the only line of the error that these words cause."""
    with pytest.raises(BadInput) as caught:
        parse(recipe_file, *words)
    (message,) = caught.value.lines
    return message


# Repeated flags.


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--max_steps 2 --max_steps 5", "max_steps", 5),
        ("--max-steps 2 --seed 3 --max_steps=5", "max_steps", 5),
        ("--max_steps=5 --max-steps 2", "max_steps", 2),
        ("--data_files a b --data_files c", "data_files", ["c"]),
        ("--data-files a --data_files=b --data_files c d", "data_files", ["c", "d"]),
        ("--language none --language a", "language", ["a"]),
        ("--report_to wandb --report_to none", "report_to", None),
        ("--push_to_hub --push_to_hub false", "push_to_hub", False),
        ("--push_to_hub=False --push-to-hub", "push_to_hub", True),
        ("--recipe none.yaml --recipe {recipe}", "max_steps", 1000),
        ("--size d12 --size d24", "n_layer", 24),
    ],
)
def test_last_of_repeated_flags_wins(recipe_file, words, key, value):
    words = words.format(recipe=recipe_file).split()

    assert value_of(recipe_file, key, *words) == value


@pytest.mark.parametrize(
    ("parse_script", "words", "name", "value"),
    [
        (generate.parse, "--model a --top-k 5 --top_k 7", "top_k", 7),
        (generate.parse, "--model a --chat --chat=false", "chat", False),
        (export_model.parse, "run --out a --dtype bf16 --dtype fp16", "dtype", "fp16"),
        (export_model.parse, "run --out a --text x y --text z", "text", ["z"]),
        (eval_tasks.parse, "--model a --tasks piqa blimp --tasks arc_easy", "tasks", ["arc_easy"]),
        (eval_hellaswag.parse, "--model a --limit 3 --limit=4", "limit", 4),
        (compare_runs.parse, "run --group seed --group data_seed", "group", ["data_seed"]),
        (check_setup.parse, "--card t4 --card a100 --count 2 --count 4", "count", 4),
        (check_setup.parse, "--quick --quick False", "quick", False),
    ],
)
def test_last_of_repeated_flags_wins_in_scripts(parse_script, words, name, value):
    args = parse_script(words.split())

    assert getattr(args, name) == value


# Booleans.


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "yes", "1", "t", "Y"])
def test_every_spelling_of_true_is_accepted(recipe_file, text):
    key = "load_best_model_at_end"

    assert value_of(recipe_file, key, f"--{key}", text) is True


@pytest.mark.parametrize("text", ["false", "False", "FALSE", "no", "0", "f", "N"])
def test_every_spelling_of_false_is_accepted(recipe_file, text):
    assert value_of(recipe_file, "eval_on_start", f"--eval-on-start={text}") is False


@pytest.mark.parametrize(
    "words", ["--push_to_hub", "--push-to-hub --seed 3", "--seed 3 --push_to_hub"]
)
def test_boolean_flag_without_value_is_true(recipe_file, words):
    assert value_of(recipe_file, "push_to_hub", *words.split()) is True


@pytest.mark.parametrize(("words", "value"), [("--tf32", True), ("--tf32 auto", "auto")])
def test_boolean_flag_may_also_be_auto(recipe_file, words, value):
    assert value_of(recipe_file, "tf32", *words.split()) == value


@pytest.mark.parametrize(
    ("words", "start", "problem"),
    [
        ("--push_to_hub maybe", "--push_to_hub maybe: ", "must be true or false"),
        ("--push_to_hub=", "--push_to_hub '': ", "must be true or false"),
        ("--tf32 Auto", "--tf32 Auto: ", "must be true or false, or auto"),
        ("--profile 2", "argument --profile: ", "must be true or false, not '2'"),
        ("--no_eval_on_start", "--no_eval_on_start: ", "Use --eval_on_start false"),
        ("--no-push-to-hub", "--no_push_to_hub: ", "Use --push_to_hub false"),
    ],
)
def test_invalid_boolean_is_rejected(recipe_file, words, start, problem):
    message = error_of(recipe_file, *words.split())

    assert message.startswith(start)
    assert message.endswith(problem)


@pytest.mark.parametrize("text", ["True", "TRUE", "yes", "on"])
def test_yaml_spellings_of_true_are_booleans(recipe_file, text):
    append_line(recipe_file, f"push_to_hub: {text}")

    assert value_of(recipe_file, "push_to_hub") is True


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('push_to_hub: "True"', "Write true without quotes"),
        ('push_to_hub: "0"', "Write false without quotes"),
        ('init_from: "null"\nnum_key_value_heads: "none"', "Write null without quotes"),
    ],
)
def test_quoted_yaml_literal_is_rejected_with_fix(recipe_file, line, fix):
    append_line(recipe_file, line)

    assert error_of(recipe_file).endswith(fix)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--eval_only", {"eval_only": True}),
        ("--eval-only True", {"eval_only": True}),
        ("--eval_only=yes --profile no", {"eval_only": True}),
        ("--eval_only false", {}),
        ("--profile --profile=False", {}),
        ("--extend_steps 5 --extend-steps 1e3", {"extend_steps": 1000}),
        ("--extend_steps 1", {"extend_steps": 1}),
    ],
)
def test_mode_takes_optional_boolean_value(recipe_file, words, expected):
    _, modes = parse(recipe_file, *words.split())

    assert modes == expected


@pytest.mark.parametrize(
    ("words", "overwrite"),
    [
        ("--overwrite runs/a --out b", True),
        ("--overwrite true runs/a --out b", True),
        ("--overwrite False runs/a --out b", False),
        ("--out b runs/a --overwrite", True),
    ],
)
def test_boolean_flag_does_not_take_positional_argument(words, overwrite):
    args = export_model.parse(words.split())

    assert args.model == "runs/a"
    assert args.overwrite == overwrite
    assert args.trim_vocab is False


def test_value_with_spaces_keeps_its_dashes(recipe_file):
    words = ["--data_files", "--my-file a.txt", "b", "--sample_prompts=--to-be or not-to-be"]

    values, _ = parse(recipe_file, *words)

    assert values["data_files"] == ["--my-file a.txt", "b"]
    assert values["sample_prompts"] == ["--to-be or not-to-be"]


# Fractions of max_steps.

FRACTION_PROBLEM = "fractions of max_steps are not supported"


@pytest.mark.parametrize(
    ("key", "text", "steps"),
    [
        *((key, "0.1", 100) for key in STEP_KEYS if key != "max_steps"),
        ("eval_steps", ".25", 250),
        ("eval_steps", "1e-4", 1),
        ("eval_steps", "50%", 500),
        ("eval_steps", "100%", 1000),
    ],
)
def test_fraction_of_steps_is_rejected_with_number(recipe_file, key, text, steps):
    message = error_of(recipe_file, f"--{key}", text)

    assert message.startswith(f"--{key} {text}: must be an integer")
    assert FRACTION_PROBLEM in message
    assert message.endswith(f"use --{key} {steps}")
    assert value_of(recipe_file, key, f"--{key}", str(steps)) == steps


@pytest.mark.parametrize(
    ("key", "text"),
    [*((key, "0.1") for key in STEP_KEYS), ("eval_steps", '"0.1"'), ("eval_steps", "1e-1")],
)
def test_fraction_of_steps_in_yaml_is_rejected(recipe_file, key, text):
    values = yaml.safe_load(recipe_file.read_text())
    values.pop(key, None)
    recipe_file.write_text(f"{yaml.safe_dump(values)}{key}: {text}\n")

    message = error_of(recipe_file)

    assert message.startswith(f"{recipe_file}: {key} = ")
    assert FRACTION_PROBLEM in message
    has_suggestion = "use --" in message
    assert has_suggestion == (key != "max_steps")


def test_fraction_refers_to_max_steps_flag(recipe_file):
    message = error_of(recipe_file, "--max_steps", "40", "--eval_steps", "0.1")

    assert message.startswith("--eval_steps 0.1: ")
    assert "40 steps" in message
    assert message.endswith("use --eval_steps 4")


@pytest.mark.parametrize("text", ["250.5", "-0.1", "0.0", "ten", "nan", "inf"])
def test_other_invalid_number_is_no_fraction(recipe_file, text):
    message = error_of(recipe_file, "--eval_steps", text)

    assert message == f"--eval_steps {text}: must be an integer"


@pytest.mark.parametrize(
    ("parse_script", "flag"),
    [(command_line.parse_training, "--extend_steps"), (check_setup.parse, "--max_steps")],
)
def test_fraction_in_other_flags_is_rejected(parse_script, flag):
    with pytest.raises(BadInput, match=FRACTION_PROBLEM):
        parse_script([flag, "0.1"])
