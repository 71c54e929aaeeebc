"""``--size``: the shape, learning rate, batch size and number of steps of another GPT-2 size."""

import json
import logging
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from conftest import ROOT

import check_setup
import prepare_data
from ursa_minor.base import run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, keys, loading, sizes


class Settings(NamedTuple):
    """The settings that --size changes, without the width and the number of heads."""

    n_layer: int
    learning_rate: float
    tokens_per_step: int
    max_steps: int
    warmup_steps: int


MEDIUM = Settings(24, 3.0e-4, 2**19, 19073, 715)
XL = Settings(48, 2.0e-4, 2**20, 9537, 358)


def recipe_path(name):
    """Return the path of a recipe of the repository."""
    return ROOT / "recipes" / f"{name}.yaml"


def write_copy(folder, name, **changes):
    """Write a copy of a recipe with some values changed."""
    path = folder / "mine.yaml"
    values = yaml.safe_load(recipe_path(name).read_text())
    path.write_text(yaml.safe_dump(values | changes))
    return path


def parse(path, *words):
    """Return the keys of train.py, and check that its data reader gets the same keys."""
    recipe, _, reader_argv = command_line.parse_training(["--recipe", str(path), *words])
    reader_flags, _ = command_line.read_flags(reader_argv, "", prepare_data.EXTRAS)
    reader_recipe = loading.load_recipe(Path(reader_flags.pop("recipe")), reader_flags)
    assert reader_recipe == recipe
    return keys.to_dict(recipe)


def load_with_flags(name, *words):
    """Load a recipe of the repository with these flags."""
    flags, _ = command_line.read_flags(list(words), "", {})
    return loading.load_recipe(recipe_path(name), flags)


def settings_of(values):
    """Return the settings among the values of a recipe."""
    return Settings(*(values[name] for name in Settings._fields))


def estimate(capsys, *words):
    """Return the output of check_setup.py for gpt2-xl."""
    argv = ["--card", "h100", "--recipe", str(recipe_path("gpt2_124m")), "--size", "gpt2-xl"]
    argv += words
    assert check_setup.main(argv) == 0
    return capsys.readouterr().out


# Settings of a size.


@pytest.mark.parametrize(
    ("recipe", "size", "expected"),
    [
        ("gpt2_124m", "d24", MEDIUM),
        ("gpt2_124m", "gpt2-medium", MEDIUM),
        ("gpt2_124m", "gpt2-large", Settings(36, 2.5e-4, 2**19, 19073, 715)),
        ("gpt2_124m", "gpt2-xl", XL),
        ("gpt2_350m", "d48", Settings(48, 2.0e-4, 2**20, 30000, 358)),
        ("gpt2_1558m", "gpt2", Settings(12, 6.0e-4, 2**19, 64000, 716)),
    ],
)
def test_size_sets_gpt3_settings_for_same_tokens(recipe, size, expected):
    values = parse(recipe_path(recipe), "--size", size)

    assert settings_of(values) == expected


SHORT_CONTEXT = {
    "sequence_length": 512,
    "tokens_per_step": 2**18,
    "max_steps": 27100,
    "warmup_steps": 1000,
}
SHORTEST_CONTEXT = {
    "sequence_length": 256,
    "tokens_per_step": 2**17,
    "max_steps": 19000,
    "warmup_steps": 950,
}


@pytest.mark.parametrize(
    ("recipe", "changes", "size", "expected"),
    [
        ("gpt2_350m", SHORT_CONTEXT, "d36", Settings(36, 2.5e-4, 2**19, 13550, 500)),
        ("gpt2_124m", SHORTEST_CONTEXT, "d24", Settings(24, 3.0e-4, 2**19, 4750, 238)),
        ("gpt2_124m", {"sequence_length": 2048}, "d48", XL),
    ],
    ids=["512", "256", "2048"],
)
def test_size_scales_recipes_with_another_context(tmp_path, recipe, changes, size, expected):
    path = write_copy(tmp_path, recipe, **changes)

    values = parse(path, "--size", size)

    assert settings_of(values) == expected


@pytest.mark.parametrize("recipe", ["gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m"])
def test_size_agrees_with_its_recipe(recipe):
    values = yaml.safe_load(recipe_path(recipe).read_text())

    (size,) = [size for size in sizes.GPT2_SIZES if size.n_embd == values["n_embd"]]

    assert size.shape == {name: values[name] for name in sizes.SHAPE_KEYS}
    assert size.learning_rate == values["learning_rate"]
    assert size.tokens_per_step == values["tokens_per_step"]


@pytest.mark.parametrize("is_size_first", [True, False])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--learning_rate 1e-3", XL._replace(learning_rate=1e-3)),
        ("--tokens_per_step 262144", Settings(48, 2.0e-4, 2**18, 38146, 1430)),
        ("--max_steps 1000", XL._replace(max_steps=1000)),
        ("--max_steps 1000 --tokens_per_step 524288", Settings(48, 2.0e-4, 2**19, 1000, 715)),
        ("--max_steps 100", XL._replace(max_steps=100, warmup_steps=25)),
        ("--warmup_steps 100", XL._replace(warmup_steps=100)),
        ("--warmup_steps 0", XL._replace(warmup_steps=0)),
        ("--optimizer adamw_8bit", XL),
        ("--max_hours 8", XL),
    ],
)
def test_flag_overrides_setting_of_size(words, expected, is_size_first):
    flags = words.split()
    argv = ["--size", "d48", *flags] if is_size_first else [*flags, "--size", "d48"]

    values = parse(recipe_path("gpt2_124m"), *argv)

    assert settings_of(values) == expected


@pytest.mark.parametrize(
    ("recipe", "words", "reason"),
    [
        ("gpt2_124m_fast", "", "the recipe's optimizer = muon is not AdamW"),
        ("gpt2_124m_fast", "--optimizer adamw", "the recipe's optimizer = muon is not AdamW"),
        ("gpt2_124m", "--optimizer muon", "optimizer = muon is not AdamW"),
        ("llama_124m", "", "the recipe's architecture = llama is not GPT-2"),
        ("shakespeare_bpe", "", "the recipe's own shape is not one of GPT-2's sizes"),
        ("gpt2_small", "", "the recipe's own shape is not one of GPT-2's sizes"),
        ("gpt2_124m", "--intermediate_size 3072", "intermediate_size = 3072 is given"),
    ],
)
def test_size_changes_only_shape_of_other_recipes(caplog, recipe, words, reason):
    flags = words.split()
    without_size = settings_of(parse(recipe_path(recipe), *flags))
    caplog.clear()

    values = keys.to_dict(load_with_flags(recipe, "--size", "d24", *flags))

    assert values["n_layer"] == 24
    assert values["n_head"] == 16
    assert values["n_embd"] == 1024
    assert settings_of(values) == without_size._replace(n_layer=24)
    notes = [message for message in caplog.messages if message.startswith("size ")]
    (note,) = notes
    assert "--size d24 sets n_layer = 24, n_head = 16, n_embd = 1024 only" in note
    assert note.endswith(f"because {reason}")


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("gpt2_124m", "d12"),
        ("gpt2_124m", "gpt2"),
        ("gpt2_124m_fast", "gpt2"),
        ("gpt2_1558m", "gpt2-xl"),
    ],
)
def test_own_size_of_a_recipe_changes_nothing(caplog, recipe, size):
    without_size = load_with_flags(recipe)
    caplog.clear()

    with_size = load_with_flags(recipe, "--size", size)

    assert with_size == without_size
    assert not caplog.messages


# Recipes of runs.


@pytest.fixture
def xl_run(tmp_path):
    """Write the recipe of a run of GPT-2 XL."""
    path = tmp_path / run_files.RECIPE
    path.write_text(keys.as_yaml(load_with_flags("gpt2_124m", "--size", "d48")))
    return path


def test_repeated_size_does_not_change_run_recipe(xl_run):
    values = parse(xl_run, "--size", "gpt2-xl")

    assert settings_of(values) == XL


def test_size_of_run_recipe_can_be_reversed(xl_run):
    recipe = loading.load_recipe(xl_run, {"size": "d12"})

    assert recipe.batch.tokens_per_step == 2**19
    assert recipe.schedule.learning_rate == 6.0e-4
    assert recipe.schedule.max_steps == 19074


# Rounding.


@pytest.mark.parametrize("sequence_length", [768, 100_000, 1000])
@pytest.mark.parametrize("size", ["d24", "d48"])
def test_batch_of_a_size_has_whole_sequences(sequence_length, size):
    path = recipe_path("gpt2_124m")
    before = yaml.safe_load(path.read_text())
    total_tokens = before["max_steps"] * before["tokens_per_step"]
    usual_batch = sizes.find_size(size).tokens_per_step

    values = parse(path, "--size", size, "--sequence_length", str(sequence_length))

    batch = values["tokens_per_step"]
    assert batch % sequence_length == 0
    assert abs(batch - usual_batch) <= usual_batch / 8
    assert abs(values["max_steps"] * batch - total_tokens) <= batch / 2


def test_rounded_batch_can_be_shared_equally():
    values = parse(recipe_path("gpt2_124m"), "--size", "d48", "--sequence_length", "768")

    sequences = values["tokens_per_step"] // 768
    assert sequences % 64 == 0


@pytest.mark.parametrize("max_steps", range(90, 110, 3))
@pytest.mark.parametrize("decay_ratio", [0.1, 0.25, 0.7])
def test_rounded_wsd_phases_do_not_overlap(tmp_path, max_steps, decay_ratio):
    warmup_steps = int(max_steps * (1 - decay_ratio))
    path = write_copy(
        tmp_path,
        "gpt2_124m",
        lr_scheduler_type="wsd",
        decay_ratio=decay_ratio,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
    )

    values = parse(path, "--size", "d48")

    assert abs(values["warmup_steps"] - warmup_steps / 2) <= 1
    decay_steps = decay_ratio * values["max_steps"]
    assert values["warmup_steps"] + decay_steps <= values["max_steps"]


# Messages.


def test_header_states_settings_of_size(caplog):
    caplog.set_level(logging.INFO, "ursa_minor")

    load_with_flags("gpt2_124m", "--size", "gpt2-xl", "--learning_rate", "1e-3")

    (message,) = caplog.messages
    assert message.startswith(
        "size     --size gpt2-xl sets n_layer = 48, n_head = 25, n_embd = 1600, "
        "tokens_per_step = 1048576 (was 524288), max_steps = 9537 (was 19073), "
        "warmup_steps = 358 (was 715)"
    )


@pytest.mark.parametrize(
    ("words", "max_steps", "max_steps_note"),
    [
        ("", 9537, "max_steps = 9537 (was 19073), "),
        ("--max_steps 1e3", 1000, ""),
        ("--tokens 2e9", 1908, ""),
    ],
)
def test_estimate_agrees_with_training(capsys, words, max_steps, max_steps_note):
    row = json.loads(estimate(capsys, "--json", *words.split()))
    output = estimate(capsys, *words.split())

    assert row["tokens"] == max_steps * 2**20
    first_line = output.splitlines()[0]
    assert first_line.startswith("size     --size gpt2-xl sets ")
    assert f"tokens_per_step = 1048576 (was 524288), {max_steps_note}warmup_steps" in first_line


@pytest.mark.parametrize("size", ["d13", "gpt3-175b"])
def test_unknown_size_is_rejected(size):
    with pytest.raises(BadInput, match=f"--size {size}: must be d12, d24, d36, d48, gpt2"):
        command_line.parse_training(["--recipe", str(recipe_path("gpt2_124m")), "--size", size])


def test_conflict_with_size_names_the_flag(tmp_path):
    path = write_copy(tmp_path, "llama_124m", num_key_value_heads=12)

    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, {"size": "d24"})

    message = caught.value.lines[0]
    assert message.startswith("--size d24: num_key_value_heads = 12")
    assert "n_head = 16" in message


def test_invalid_values_are_reported_unscaled(tmp_path):
    path = write_copy(tmp_path, "gpt2_124m", max_steps="many")

    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, {"size": "d48", "tokens_per_step": "x"})

    flag_message, file_message = caught.value.lines
    assert flag_message.startswith("--tokens_per_step x:")
    assert file_message.startswith(f"{path}:")


@pytest.mark.parametrize("size", ["d12", "d24"])
def test_size_of_pretrained_model_is_rejected(size):
    with pytest.raises(BadInput) as caught:
        load_with_flags("gpt2_124m", "--size", size, "--init_from", "some/model")

    message = str(caught.value)
    assert message.startswith(f"--size {size}: init_from = some/model")
    assert "shape of the model" in message
