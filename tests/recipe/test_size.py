"""``--size``: the shape, learning rate, batch size and number of steps of another size of GPT-2."""

import json
import logging
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

import check_setup
import prepare_data
from ursa_minor.base import run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, keys, loading, sizes

SETTINGS = ("n_layer", "learning_rate", "tokens_per_step", "max_steps", "warmup_steps")


def recipe_path(name):
    return ROOT / "recipes" / f"{name}.yaml"


def write(folder, name, **changes):
    """Write a copy of a recipe with some values changed."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(recipe_path(name).read_text()) | changes))
    return path


def read(path, *words):
    """Return the keys that train.py reads, after a check that its data reader gets the same keys."""
    recipe, _, reader_argv = command_line.parse_training(["--recipe", str(path), *words])
    flags, _ = command_line.read_flags(reader_argv, "", prepare_data.EXTRAS)
    assert loading.load_recipe(Path(flags.pop("recipe")), flags) == recipe
    return keys.to_dict(recipe)


def settings(path, *words):
    found = read(path, *words)
    return tuple(found[name] for name in SETTINGS)


@pytest.mark.parametrize(
    ("recipe", "size", "wanted"),
    [
        ("gpt2_124m", "d24", (24, 3.0e-4, 2**19, 19073, 715)),
        ("gpt2_124m", "gpt2-medium", (24, 3.0e-4, 2**19, 19073, 715)),
        ("gpt2_124m", "gpt2-large", (36, 2.5e-4, 2**19, 19073, 715)),
        ("gpt2_124m", "gpt2-xl", (48, 2.0e-4, 2**20, 9537, 358)),
        ("gpt2_350m", "d48", (48, 2.0e-4, 2**20, 30000, 358)),
        ("gpt2_1558m", "gpt2", (12, 6.0e-4, 2**19, 64000, 716)),
    ],
)
def test_size_sets_gpt3_settings_for_the_same_tokens(recipe, size, wanted):
    assert settings(recipe_path(recipe), "--size", size) == wanted


@pytest.mark.parametrize(
    ("recipe", "changes", "size", "wanted"),
    [
        (
            "gpt2_350m",
            {
                "sequence_length": 512,
                "tokens_per_step": 2**18,
                "max_steps": 27100,
                "warmup_steps": 1000,
            },
            "d36",
            (36, 2.5e-4, 2**19, 13550, 500),
        ),
        (
            "gpt2_124m",
            {
                "sequence_length": 256,
                "tokens_per_step": 2**17,
                "max_steps": 19000,
                "warmup_steps": 950,
            },
            "d24",
            (24, 3.0e-4, 2**19, 4750, 238),
        ),
        ("gpt2_124m", {"sequence_length": 2048}, "d48", (48, 2.0e-4, 2**20, 9537, 358)),
    ],
)
def test_size_scales_recipes_with_another_context(tmp_path, recipe, changes, size, wanted):
    assert settings(write(tmp_path, recipe, **changes), "--size", size) == wanted


@pytest.mark.parametrize("recipe", ["gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m"])
def test_sizes_agree_with_the_recipes(recipe):
    values = yaml.safe_load(recipe_path(recipe).read_text())
    (size,) = [size for size in sizes.GPT2_SIZES if size.n_embd == values["n_embd"]]
    assert size.shape == {name: values[name] for name in sizes.SHAPE_KEYS}
    assert size.learning_rate == values["learning_rate"]
    assert size.tokens_per_step == values["tokens_per_step"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--learning_rate 1e-3", (48, 1e-3, 2**20, 9537, 358)),
        ("--tokens_per_step 262144", (48, 2.0e-4, 2**18, 38146, 1430)),
        ("--max_steps 1000", (48, 2.0e-4, 2**20, 1000, 358)),
        ("--max_steps 1000 --tokens_per_step 524288", (48, 2.0e-4, 2**19, 1000, 715)),
        ("--max_steps 100", (48, 2.0e-4, 2**20, 100, 25)),
        ("--warmup_steps 100", (48, 2.0e-4, 2**20, 9537, 100)),
        ("--warmup_steps 0", (48, 2.0e-4, 2**20, 9537, 0)),
        ("--optimizer adamw_8bit", (48, 2.0e-4, 2**20, 9537, 358)),
        ("--max_hours 8", (48, 2.0e-4, 2**20, 9537, 358)),
    ],
)
def test_flags_win_over_the_settings_of_a_size(words, wanted):
    for order in (["--size", "d48", *words.split()], [*words.split(), "--size", "d48"]):
        assert settings(recipe_path("gpt2_124m"), *order) == wanted


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
def test_size_changes_only_the_shape_of_other_recipes(caplog, recipe, words, reason):
    path = recipe_path(recipe)
    without_size = settings(path, *words.split())
    caplog.clear()
    flags, _ = command_line.read_flags(["--size", "d24", *words.split()], "", {})
    found = keys.to_dict(loading.load_recipe(path, flags))
    assert (found["n_layer"], found["n_head"], found["n_embd"]) == (24, 16, 1024)
    assert tuple(found[name] for name in SETTINGS[1:]) == without_size[1:]
    messages = [message for message in caplog.messages if message.startswith("size ")]
    assert messages == [
        "size     --size d24 sets n_layer = 24, n_head = 16, n_embd = 1024 only. "
        f"Learning rate, batch size and number of steps are unchanged, because {reason}"
    ]


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
    path = recipe_path(recipe)
    plain = loading.load_recipe(path)
    caplog.clear()
    assert loading.load_recipe(path, {"size": size}) == plain
    assert not caplog.messages


def test_run_recipe_repeats_its_size_without_another_change(tmp_path):
    sized = loading.load_recipe(recipe_path("gpt2_124m"), {"size": "d48"})
    path = tmp_path / run_files.RECIPE
    path.write_text(keys.as_yaml(sized))
    assert settings(path, "--size", "gpt2-xl") == tuple(
        keys.to_dict(sized)[name] for name in SETTINGS
    )
    back = loading.load_recipe(path, {"size": "d12"})
    assert (back.batch.tokens_per_step, back.schedule.learning_rate) == (2**19, 6.0e-4)
    assert back.schedule.max_steps == 19074


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("gpt2_124m", "--sequence_length 768"),
        ("gpt2_124m", "--sequence_length 100000"),
        ("gpt2_124m", "--sequence_length 1000"),
    ],
)
@pytest.mark.parametrize("size", ["d24", "d48"])
def test_batch_of_a_size_consists_of_whole_sequences(recipe, words, size):
    path = recipe_path(recipe)
    found = read(path, "--size", size, *words.split())
    usual = sizes.find_size(size).tokens_per_step
    assert found["tokens_per_step"] % found["sequence_length"] == 0
    assert abs(found["tokens_per_step"] - usual) <= usual / 8
    before = yaml.safe_load(path.read_text())
    tokens = before["max_steps"] * before["tokens_per_step"]
    assert (
        abs(found["max_steps"] * found["tokens_per_step"] - tokens) <= found["tokens_per_step"] / 2
    )


def test_batch_that_is_no_multiple_can_be_shared_equally():
    tokens = read(recipe_path("gpt2_124m"), "--size", "d48", "--sequence_length", "768")[
        "tokens_per_step"
    ]
    assert tokens // 768 % 64 == 0


@pytest.mark.parametrize("max_steps", range(90, 110, 3))
@pytest.mark.parametrize("decay_ratio", [0.1, 0.25, 0.7])
def test_rounding_does_not_let_wsd_phases_overlap(tmp_path, max_steps, decay_ratio):
    warmup_steps = int(max_steps * (1 - decay_ratio))
    schedule = {"lr_scheduler_type": "wsd", "decay_ratio": decay_ratio}
    path = write(tmp_path, "gpt2_124m", max_steps=max_steps, warmup_steps=warmup_steps, **schedule)
    found = read(path, "--size", "d48")
    assert abs(found["warmup_steps"] - warmup_steps / 2) <= 1
    assert found["warmup_steps"] + decay_ratio * found["max_steps"] <= found["max_steps"]


def test_header_states_what_a_size_sets(caplog):
    caplog.set_level(logging.INFO, "ursa_minor")
    loading.load_recipe(recipe_path("gpt2_124m"), {"size": "gpt2-xl", "learning_rate": "1e-3"})
    (message,) = caplog.messages
    assert message.startswith(
        "size     --size gpt2-xl sets n_layer = 48, n_head = 25, n_embd = 1600, "
        "tokens_per_step = 1048576 (was 524288), max_steps = 9537 (was 19073), warmup_steps = 358 (was 715)"
    )


def estimate(capsys, *words):
    """Return what check_setup.py prints on standard output."""
    assert check_setup.main(["--card", "h100", "--reader_tokens_per_second", "1e9", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "stated", "tokens"),
    [
        ([], "max_steps = 9537 (was 19073)", 9537 * 2**20),
        (
            ["--max_steps", "1e3"],
            "tokens_per_step = 1048576 (was 524288), warmup_steps",
            1000 * 2**20,
        ),
        (["--tokens", "2e9"], "tokens_per_step = 1048576 (was 524288), warmup_steps", 1908 * 2**20),
    ],
)
def test_estimate_agrees_with_training_and_states_the_size(capsys, words, stated, tokens):
    recipe = str(recipe_path("gpt2_124m"))
    row = json.loads(estimate(capsys, "--recipe", recipe, "--size", "gpt2-xl", "--json", *words))
    assert row["tokens"] == tokens
    out = estimate(capsys, "--recipe", recipe, "--size", "gpt2-xl", *words)
    assert out.startswith("size     --size gpt2-xl sets ") and stated in out.splitlines()[0]


@pytest.mark.parametrize("size", ["d13", "gpt3-175b"])
def test_unknown_size_is_refused(size):
    with pytest.raises(BadInput, match=f"--size {size}: must be d12, d24, d36, d48, gpt2"):
        command_line.parse_training(["--recipe", str(recipe_path("gpt2_124m")), "--size", size])


def test_problem_that_a_size_causes_is_reported_with_it(tmp_path):
    path = write(tmp_path, "llama_124m", num_key_value_heads=12)
    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, {"size": "d24"})
    assert caught.value.lines[0].startswith(
        "--size d24: num_key_value_heads = 12: must divide n_head = 16"
    )


def test_invalid_values_are_reported_rather_than_scaled(tmp_path):
    path = write(tmp_path, "gpt2_124m", max_steps="many")
    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, {"size": "d48", "tokens_per_step": "x"})
    assert [line.split(":")[0] for line in caught.value.lines] == ["--tokens_per_step x", str(path)]


@pytest.mark.parametrize("size", ["d12", "d24"])
def test_size_of_a_pretrained_model_is_an_error(size):
    flags, _ = command_line.read_flags(["--size", size, "--init_from", "some/model"], "", {})
    with pytest.raises(
        BadInput, match=f"--size {size}: init_from = some/model determines the shape of the model"
    ):
        loading.load_recipe(recipe_path("gpt2_124m"), flags)
