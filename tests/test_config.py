"""The recipe: what it accepts, what it refuses, and that each remedy it prints works."""

import re
from pathlib import Path

import pytest
import yaml

from pretrain import config
from pretrain.errors import BadInput

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
BASE = {
    "data_files": ["a.txt"],
    "tokenizer": "bpe",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": 512,
    "sequence_length": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tokens_per_step": 128,
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.001,
    "min_lr_ratio": 0.1,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1.0e-8,
    "max_grad_norm": 1.0,
    "seed": 1,
    "data_seed": 2,
}
NUMBERS = [name for name, field in config.FIELDS.items() if field.metadata["low"] is not None]


def write(folder, text=None, name="mine.yaml", **changes):
    path = folder / name
    if text is None:
        text = yaml.safe_dump({k: v for k, v in (BASE | changes).items() if v is not None}, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


def line(folder, key, text):
    """A recipe whose ``key`` stands there as ``text``, letter by letter."""
    return write(folder, yaml.safe_dump({k: v for k, v in BASE.items() if k != key}) + f"{key}: {text}\n")


def refused(path, flags=None):
    with pytest.raises(BadInput) as caught:
        config.load_recipe(path, flags)
    return caught.value.lines


def recipe(folder, **changes):
    return config.load_recipe(write(folder, **changes))


def test_recipes_exist():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_survives_as_yaml(path, tmp_path):
    loaded = config.load_recipe(path)
    copy = tmp_path / "recipe.yaml"
    copy.write_text(config.as_yaml(loaded), encoding="utf-8")
    assert config.load_recipe(copy) == loaded
    assert loaded.run_name == path.stem and loaded.output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_for_one_process(path):
    loaded = config.load_recipe(path)
    plan = config.make_plan(loaded, 1)
    per_update = plan.per_device_train_batch_size * plan.gradient_accumulation_steps
    assert per_update * loaded.sequence_length == loaded.tokens_per_step


def test_as_yaml_keeps_prompts_and_numbers_to_the_bit(tmp_path):
    prompts = ["", "two\nlines\r\n", "é 中 \U0001f600", "yes", "1e3", " : # -", "\x00"]
    given = recipe(tmp_path, sample_prompts=prompts, sample_steps=5, adam_epsilon=1e-9, learning_rate=3)
    assert given.sample_prompts == prompts and isinstance(given.learning_rate, float)
    copy = write(tmp_path, config.as_yaml(given), "copy.yaml")
    assert config.load_recipe(copy) == given


def test_misspelt_key_names_the_nearest(tmp_path):
    (message,) = refused(write(tmp_path, warmup_step=3))
    assert "warmup_step: no such key" in message and "did you mean warmup_steps?" in message and "mine.yaml" in message


def test_duplicate_key_is_refused_with_both_lines(tmp_path):
    (message,) = refused(write(tmp_path, yaml.safe_dump(BASE, sort_keys=False) + "tokenizer: bpe\n"))
    first = list(BASE).index("tokenizer") + 2  # data_files takes two lines
    assert f"tokenizer stands twice (first in line {first})" in message


@pytest.mark.parametrize("key, text", [("learning_rate", "6e-4"), ("adam_epsilon", "1e-8"), ("max_steps", "1e3")])
def test_number_that_yaml_reads_as_text_is_refused_with_a_form_that_loads(tmp_path, key, text):
    (message,) = refused(line(tmp_path, key, text))
    written = re.search(r"write (\S+)$", message)[1]
    assert getattr(config.load_recipe(line(tmp_path, key, written)), key) == float(text)


@pytest.mark.parametrize("text", ["1e999", '"nan"', '"inf"'])
def test_text_that_is_no_finite_number_gets_no_remedy_that_fails_again(tmp_path, text):
    (message,) = refused(line(tmp_path, "learning_rate", text))
    assert "must be a number" in message and "write inf" not in message and "write nan" not in message


@pytest.mark.parametrize("name", list(config.FIELDS))
def test_wrong_type_is_refused_for_every_key(tmp_path, name):
    wanted = config.TYPES[name]
    wrong = [{"a": 1}, True] + ([] if config._is_optional(wanted) else [None])
    wrong += {int: ["5", 5.5, [1]], float: ["x", [1.0]], str: [5, ["x"]]}.get(config._bare(wanted), ["x", [5], 5])
    for value in wrong:
        path = write(tmp_path, yaml.safe_dump(BASE | {name: value}))
        (message,) = refused(path)
        assert f"{name} = " in message and "must be" in message, value


@pytest.mark.parametrize("name", NUMBERS)
def test_out_of_range_is_refused_for_every_number(tmp_path, name):
    about = config.FIELDS[name].metadata
    for value in (about["low"] - 1, about["high"] + 1):
        (message,) = refused(write(tmp_path, **{name: value}))
        assert f"{name} = {value}: must lie between {about['low']} and {about['high']}" in message


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, text):
    (message,) = refused(line(tmp_path, "weight_decay", text))
    assert "weight_decay" in message and "must lie between" in message


@pytest.mark.parametrize("flag", ["nan", "inf", "-inf", "1e999"])
def test_flags_that_are_not_finite_are_refused(tmp_path, flag):
    (message,) = refused(write(tmp_path), {"learning_rate": flag})
    assert "learning_rate" in message and "must lie between" in message


def test_an_integer_too_long_for_a_float_is_refused(tmp_path):
    (message,) = refused(line(tmp_path, "seed", "9" * 400))
    assert "seed" in message and "must lie between" in message


@pytest.mark.parametrize("name", [n for n, f in config.FIELDS.items() if f.default is config.ABSENT])
def test_each_key_without_default_must_be_stated(tmp_path, name):
    (message,) = refused(write(tmp_path, **{name: None}))
    assert f"{name} is missing" in message and "state it" in message


def test_all_faults_come_at_once(tmp_path):
    path = write(tmp_path, n_layer=0, seed="x", lr_scheduler_type="cosin", tokenizer=None, colour="red")
    lines = refused(path, {"max_steps": "ten"})
    assert len(lines) == 6
    for name in ("n_layer", "seed", "lr_scheduler_type", "tokenizer", "colour", "max_steps"):
        assert sum(name in line for line in lines) >= 1


def test_wrong_choice_names_the_nearest(tmp_path):
    (message,) = refused(write(tmp_path, lr_scheduler_type="cosin"))
    assert "cosine, linear or constant" in message and "did you mean cosine?" in message


@pytest.mark.parametrize("name", ["hub_token", "wandb_api_key", "password", "my_secret"])
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(tmp_path, name):
    (message,) = refused(write(tmp_path, **{name: "hunter2"}))
    assert name in message and "environment" in message and "hunter2" not in message


@pytest.mark.parametrize(
    "words, wrong, nearest",
    [
        (["--learning_rte=1"], "--learning_rte", "--learning_rate"),
        (["--learning_rte", "1"], "--learning_rte", "--learning_rate"),
        (["--max_step", "1"], "--max_step", "--max_steps"),  # argparse would take it as an abbreviation
        (["--dri"], "--dri", "--dry"),
    ],
)
def test_unknown_flag_is_one_fault_that_names_the_nearest(tmp_path, words, wrong, nearest):
    with pytest.raises(BadInput) as caught:
        config.parse_command(["--recipe", str(write(tmp_path)), *words], "x", {"dry": "help"})
    assert re.fullmatch(rf"{wrong}\b.*: no such flag; did you mean {nearest}\?", caught.value.lines[0])
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize("words", [["--hub_token=hunter2"], ["--hub_token", "hunter2"]])
def test_a_secret_given_as_a_flag_is_refused_and_not_repeated(tmp_path, words):
    with pytest.raises(BadInput, match="--hub_token") as caught:
        config.parse_command(["--recipe", str(write(tmp_path)), *words], "x", {})
    assert "hunter2" not in str(caught.value)


def test_flag_without_value_is_bad_input_not_an_exit(tmp_path):
    with pytest.raises(BadInput, match="--seed"):
        config.parse_command(["--recipe", str(write(tmp_path)), "--seed"], "x", {})


def test_flag_beats_file(tmp_path):
    words = ["--recipe", str(write(tmp_path)), "--seed", "99", "--learning_rate", "6e-4", "--data_files", "b", "c"]
    got, switches = config.parse_command([*words, "--dry"], "x", {"dry": "help"})
    assert (got.seed, got.learning_rate, got.data_files, got.n_layer) == (99, 6e-4, ["b", "c"], BASE["n_layer"])
    assert switches == {"dry"}
    assert config.parse_command(words, "x", {"dry": "help"})[1] == set()


def test_flag_none_takes_an_optional_value_away(tmp_path):
    got = config.load_recipe(write(tmp_path, init_from="gpt2"), {"init_from": "none"})
    assert got.init_from is None


def test_help_can_be_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        config.parse_command(["--help"], "Story.", {})
    assert caught.value.code == 0 and "--adam_beta2" in capsys.readouterr().out


def test_python_tags_are_refused_and_not_run(tmp_path):
    made = tmp_path / "made"
    lines = refused(line(tmp_path, "tokenizer", f'!!python/object/apply:os.mkdir ["{made}"]'))
    assert "not a recipe" in lines[0] and not made.exists()


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"tokenizer: caf\xe9\n")
    assert "latin.yaml: cannot be read as text" in refused(path)[0]


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    assert "a recipe is a mapping" in refused(write(tmp_path, text))[0]


@pytest.mark.parametrize("text", ["a: [1\n", "a: b: c\n", "? [1, 2]\n: 3\n", "a: \x00\n", "run_name: 2024-13-45\n"])
def test_broken_yaml_is_bad_input(tmp_path, text):
    assert "mine.yaml: not a recipe: " in refused(write(tmp_path, text))[0]


def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, name="gpt2_124m.yaml")
    (message,) = refused(tmp_path / "gpt2_125m.yaml")
    assert "no such recipe" in message and "gpt2_124m.yaml?" in message


def test_a_folder_is_no_recipe(tmp_path):
    assert "cannot be read" in refused(tmp_path)[0]


@pytest.mark.parametrize(
    "sequences, ceiling, processes, micro_batch, accumulation",
    [(8, 4, 1, 4, 2), (8, 8, 1, 8, 1), (8, 100, 1, 8, 1), (12, 5, 1, 4, 3), (7, 5, 1, 1, 7), (12, 5, 2, 3, 2)],
)
def test_micro_batch_is_the_largest_divisor_at_or_below_the_ceiling(
    tmp_path, sequences, ceiling, processes, micro_batch, accumulation
):
    given = recipe(tmp_path, tokens_per_step=sequences * 16, per_device_train_batch_size=ceiling)
    assert config.make_plan(given, processes) == config.Plan(processes, sequences, micro_batch, accumulation)


def test_plan_that_cannot_be_shared_prints_remedies_that_work(tmp_path):
    for sequences, processes in [(8, 3), (10, 4), (7, 2), (1, 8)]:
        given = recipe(tmp_path, tokens_per_step=sequences * 16)
        with pytest.raises(BadInput, match="cannot share equally") as caught:
            config.make_plan(given, processes)
        message = str(caught.value)
        tokens = int(re.search(r"--tokens_per_step (\d+)", message)[1])
        config.make_plan(config.load_recipe(write(tmp_path), {"tokens_per_step": str(tokens)}), processes)
        for count in re.findall(r"\d+", re.search(r"Use (.+?) processes", message)[1]):
            config.make_plan(given, int(count))


@pytest.mark.parametrize("tokens", [1, 15, 100, 129, 1000])
def test_tokens_per_step_remedy_works(tmp_path, tokens):
    (message,) = refused(write(tmp_path, tokens_per_step=tokens))
    nearest = re.search(r"the nearest is (\d+)", message)[1]
    assert config.load_recipe(write(tmp_path), {"tokens_per_step": nearest})


def test_width_and_heads_remedy_works(tmp_path):
    (message,) = refused(write(tmp_path, n_head=3))
    assert config.load_recipe(write(tmp_path, n_head=int(re.search(r"n_head (\d+) is", message)[1])))


def test_warm_up_remedy_works(tmp_path):
    (message,) = refused(write(tmp_path, warmup_steps=11))
    assert config.load_recipe(write(tmp_path), {"warmup_steps": re.search(r"--warmup_steps (\d+)", message)[1]})
    assert recipe(tmp_path, warmup_steps=10)


def test_one_kept_checkpoint_is_refused(tmp_path):
    assert "Use 2 or more" in refused(write(tmp_path, save_total_limit=1))[0]
    assert recipe(tmp_path, save_total_limit=0) and recipe(tmp_path, save_total_limit=2)


def test_samples_without_prompts_are_refused(tmp_path):
    assert "sample_prompts" in refused(write(tmp_path, sample_steps=1))[0]


@pytest.mark.parametrize("data", [{"data_files": ["a"]}, {"data_files": None, "dataset_name": "python_stdlib"}])
def test_nothing_to_validate_on_is_refused(tmp_path, data):
    (message,) = refused(write(tmp_path, validation_fraction=0.0, **data))
    assert "nothing to validate on" in message


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "x" * 65, "..", "x\n"])
def test_run_name_that_leaves_its_folder_is_refused(tmp_path, name):
    assert "run_name" in refused(write(tmp_path, run_name=name))[0]


def test_run_name_from_an_odd_file_name_obeys_the_same_rule(tmp_path):
    path = write(tmp_path, name="my run.yaml")
    assert "run_name" in refused(path)[0]


def test_run_name_decides_the_run_folder(tmp_path):
    assert recipe(tmp_path, run_name="b.1_x-y").output_dir == "runs/b.1_x-y"
    assert recipe(tmp_path, output_dir="/else/where").output_dir == "/else/where"


def test_science_excludes_what_may_change(tmp_path):
    fixed = config.science(recipe(tmp_path))
    may_change = {"per_device_train_batch_size", "logging_steps", "eval_steps", "eval_tokens", "sample_steps"}
    may_change |= {"sample_prompts", "sample_tokens", "save_steps", "save_total_limit", "output_dir", "run_name"}
    may_change |= {"resume_from_checkpoint"}
    assert not fixed.keys() & may_change
    assert fixed.keys() >= {"n_layer", "max_steps", "learning_rate", "seed", "data_seed", "tokens_per_step"}


def test_tokenizer_identity_holds_the_size_only_where_it_counts(tmp_path):
    sizes = [recipe(tmp_path, tokenizer_vocab_size=size) for size in (300, 400)]
    assert config.source(sizes[0])["tokenizer"] != config.source(sizes[1])["tokenizer"]
    sizes = [recipe(tmp_path, tokenizer="characters", tokenizer_vocab_size=size) for size in (300, 400)]
    assert config.source(sizes[0])["tokenizer"] == config.source(sizes[1])["tokenizer"]
