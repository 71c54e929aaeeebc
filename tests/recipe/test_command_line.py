"""How flags are written on a command line: repeated flags, booleans, and fractions given as numbers of steps."""

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
    """A small recipe for 1,000 steps."""
    values = yaml.safe_load(RECIPE) | {"data_files": ["a.txt"], "max_steps": 1000}
    values |= {"tasks": ["piqa"], "task_steps": 500}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def read(recipe_file, *words):
    """Return the keys and the modes that train.py reads, after a check that its data reader gets the same keys."""
    recipe, modes, reader_argv = command_line.parse_training(["--recipe", str(recipe_file), *words])
    flags, _ = command_line.read_flags(reader_argv, "", prepare_data.EXTRAS)
    assert loading.load_recipe(Path(flags.pop("recipe")), flags) == recipe
    return keys.to_dict(recipe), modes


def refused(recipe_file, *words):
    with pytest.raises(BadInput) as caught:
        read(recipe_file, *words)
    return caught.value.lines


@pytest.mark.parametrize(
    ("words", "name", "value"),
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
def test_last_of_repeated_flags_wins(recipe_file, words, name, value):
    found, _ = read(recipe_file, *words.format(recipe=recipe_file).split())
    assert found[name] == value


@pytest.mark.parametrize(
    ("parse", "words", "name", "value"),
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
def test_last_of_repeated_flags_wins_in_every_script(parse, words, name, value):
    assert getattr(parse(words.split()), name) == value


@pytest.mark.parametrize("text", ["true", "True", "TRUE", "yes", "1", "t", "Y"])
def test_every_spelling_of_true_is_accepted(recipe_file, text):
    assert read(recipe_file, "--load_best_model_at_end", text)[0]["load_best_model_at_end"] is True


@pytest.mark.parametrize("text", ["false", "False", "FALSE", "no", "0", "f", "N"])
def test_every_spelling_of_false_is_accepted(recipe_file, text):
    assert read(recipe_file, f"--eval-on-start={text}")[0]["eval_on_start"] is False


@pytest.mark.parametrize(
    "words", ["--push_to_hub", "--push-to-hub --seed 3", "--seed 3 --push_to_hub"]
)
def test_boolean_flag_without_value_is_true(recipe_file, words):
    assert read(recipe_file, *words.split())[0]["push_to_hub"] is True


def test_bare_boolean_that_may_be_auto_is_true(recipe_file):
    assert read(recipe_file, "--tf32")[0]["tf32"] is True
    assert read(recipe_file, "--tf32", "auto")[0]["tf32"] == "auto"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--push_to_hub maybe", "--push_to_hub maybe: must be true or false"),
        ("--push_to_hub=", "--push_to_hub : must be true or false"),
        ("--tf32 Auto", "--tf32 Auto: must be true or false, or auto"),
        ("--profile 2", "argument --profile: must be true or false, not '2'"),
        ("--no_eval_on_start", "--no_eval_on_start: no such flag. Use --eval_on_start false"),
        ("--no-push-to-hub", "--no_push_to_hub: no such flag. Use --push_to_hub false"),
    ],
)
def test_other_boolean_values_are_refused(recipe_file, words, message):
    assert refused(recipe_file, *words.split()) == [message]


@pytest.mark.parametrize("text", ["True", "TRUE", "yes", "on"])
def test_yaml_spellings_of_true_are_booleans(recipe_file, text):
    with recipe_file.open("a") as file:
        file.write(f"push_to_hub: {text}\n")
    assert read(recipe_file)[0]["push_to_hub"] is True


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('push_to_hub: "True"', "Write true without quotes"),
        ('push_to_hub: "0"', "Write false without quotes"),
        ('init_from: "null"\nnum_key_value_heads: "none"', "Write null without quotes"),
    ],
)
def test_quoted_yaml_value_is_refused_with_its_literal(recipe_file, line, fix):
    with recipe_file.open("a") as file:
        file.write(f"{line}\n")
    (message,) = refused(recipe_file)
    assert message.endswith(fix)


@pytest.mark.parametrize(
    ("words", "modes"),
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
def test_modes_take_an_optional_boolean_value(recipe_file, words, modes):
    assert read(recipe_file, *words.split())[1] == modes


@pytest.mark.parametrize(
    ("words", "overwrite"),
    [
        ("--overwrite runs/a --out b", True),
        ("--overwrite true runs/a --out b", True),
        ("--overwrite False runs/a --out b", False),
        ("--out b runs/a --overwrite", True),
    ],
)
def test_bare_switch_leaves_a_positional_argument_alone(words, overwrite):
    arguments = export_model.parse(words.split())
    assert (arguments.model, arguments.overwrite, arguments.trim_vocab) == (
        "runs/a",
        overwrite,
        False,
    )


def test_value_with_spaces_keeps_its_dashes(recipe_file):
    found, _ = read(
        recipe_file, "--data_files", "--my-file a.txt", "b", "--sample_prompts=--to-be or not-to-be"
    )
    assert found["data_files"] == ["--my-file a.txt", "b"]
    assert found["sample_prompts"] == ["--to-be or not-to-be"]


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
def test_fraction_of_steps_is_refused_with_the_number(recipe_file, key, text, steps):
    (message,) = refused(recipe_file, f"--{key}", text)
    assert message.startswith(f"--{key} {text}: must be an integer")
    assert "fractions of max_steps are not supported" in message
    assert message.endswith(f"use --{key} {steps}")
    assert read(recipe_file, f"--{key}", str(steps))[0][key] == steps


@pytest.mark.parametrize(
    ("key", "text"),
    [*((key, "0.1") for key in STEP_KEYS), ("eval_steps", '"0.1"'), ("eval_steps", "1e-1")],
)
def test_fraction_of_steps_in_yaml_is_refused(recipe_file, key, text):
    values = yaml.safe_load(recipe_file.read_text())
    values.pop(key, None)
    recipe_file.write_text(f"{yaml.safe_dump(values)}{key}: {text}\n")
    (message,) = refused(recipe_file)
    assert (
        message.startswith(f"{recipe_file}: {key} = ")
        and "fractions of max_steps are not supported" in message
    )
    assert ("use --" in message) == (key != "max_steps")


def test_fraction_refers_to_the_max_steps_flag(recipe_file):
    (message,) = refused(recipe_file, "--max_steps", "40", "--eval_steps", "0.1")
    assert message.startswith("--eval_steps 0.1: ") and message.endswith(
        "For 0.1 of the 40 steps use --eval_steps 4"
    )


@pytest.mark.parametrize("text", ["250.5", "-0.1", "0.0", "ten", "nan", "inf"])
def test_other_numbers_of_steps_are_no_fractions(recipe_file, text):
    (message,) = refused(recipe_file, "--eval_steps", text)
    assert message == f"--eval_steps {text}: must be an integer"


@pytest.mark.parametrize("parse", [command_line.parse_training, check_setup.parse])
def test_fraction_in_a_flag_that_is_no_key_is_refused(parse):
    flag = "--max_steps" if parse is check_setup.parse else "--extend_steps"
    with pytest.raises(BadInput, match="fractions of max_steps are not supported"):
        parse([flag, "0.1"])
