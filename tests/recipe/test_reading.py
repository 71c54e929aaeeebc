"""The recipe: what it accepts, what it refuses, and that each remedy it prints works."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT

from pretrain.base.errors import BadInput
from pretrain.base.foreign import redact_url
from pretrain.recipe import keys, reading
from pretrain.recipe.plan import Plan, make_plan

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASE = yaml.safe_load(RECIPE) | {"data_files": ["a.txt"], "tokenizer": "bpe", "vocab_size": 512, "max_steps": 10}
BASE |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"per_device_train_batch_size": 4}
BASE = {
    name: value for name, value in BASE.items() if not name.startswith(("sample", "eval", "save", "logging", "valid"))
}
HUB = {"weight": 1.0, "dataset_name": "owner/name"}
OWN = {"weight": 2, "data_files": ["a.jsonl", "b.jsonl"], "text_column": "content", "validation_tokens": 7}
EXTRAS = {"dry": (bool, "help of dry"), "job": (int, "help of job"), "verify": (str, "help of verify")}


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
        reading.load_recipe(path, flags)
    return caught.value.lines


def recipe(folder, **changes):
    return reading.load_recipe(write(folder, **changes))


def mixture(folder, *given, **changes):
    """A recipe that reads these sources."""
    return write(folder, **{"data_files": None, "tokenizer": "owner/tokenizer", "sources": list(given)} | changes)


def parsed(words, description, extras):
    flags, chosen = reading.read_flags(words, description, extras)
    return reading.load_recipe(Path(flags.pop("recipe")), flags), chosen


def command(folder, *words):
    return parsed(["--recipe", str(write(folder)), *words], "Story.", EXTRAS)


def test_every_recipe_loads_survives_as_yaml_and_has_a_plan_for_one_process(tmp_path):
    assert len(RECIPES) > 5
    for path in RECIPES:
        loaded = reading.load_recipe(path)
        assert reading.load_recipe(write(tmp_path, keys.as_yaml(loaded), "recipe.yaml")) == loaded
        assert loaded.saving.run_name == path.stem and loaded.saving.output_dir == f"runs/{path.stem}"
        plan = make_plan(loaded, 1)
        per_update = plan.per_device_train_batch_size * plan.gradient_accumulation_steps
        assert per_update * loaded.model.sequence_length == loaded.batch.tokens_per_step
        if loaded.data.tokenizer == "bpe":  # room for the tokens of a chat
            assert loaded.model.vocab_size - loaded.data.tokenizer_vocab_size >= 3


def test_a_recipe_survives_as_yaml_to_the_bit_also_without_values_taken_away(tmp_path):
    prompts = ["", "two\nlines\r\n", "é 中 \U0001f600", "yes", "1e3", " : # -", "\x00"]
    path = write(tmp_path, sample_prompts=prompts, sample_steps=5, adam_epsilon=1e-9, learning_rate=3, init_from="gpt2")
    given = reading.load_recipe(path, {"init_from": "none", "run_name": "mine"})
    assert given.evaluation.sample_prompts == prompts and isinstance(given.schedule.learning_rate, float)
    assert given.model.init_from is None
    assert reading.load_recipe(write(tmp_path, keys.as_yaml(given), "copy.yaml")) == given


def test_a_misspelt_key_and_a_wrong_choice_name_the_nearest(tmp_path):
    (message,) = refused(write(tmp_path, warmup_step=3))
    assert "warmup_step: no such key" in message and "did you mean warmup_steps?" in message and "mine.yaml" in message
    (message,) = refused(write(tmp_path, lr_scheduler_type="cosin"))
    assert "cosine, linear, wsd or constant" in message and "did you mean cosine?" in message
    assert refused(write(tmp_path, report_to="wandb"))[0].endswith("must be a list of texts, is text; write [wandb]")


def test_duplicate_key_is_refused_with_both_lines(tmp_path):
    (message,) = refused(write(tmp_path, yaml.safe_dump(BASE, sort_keys=False) + "tokenizer: bpe\n"))
    assert f"tokenizer is given twice (first in line {1 + list(BASE).index('tokenizer')})" in message


@pytest.mark.parametrize("key, text", [("learning_rate", "6e-4"), ("max_steps", "1.5e3")])
def test_a_number_with_an_exponent_is_a_number_in_a_file_and_as_a_flag(tmp_path, key, text):
    for recipe in (reading.load_recipe(line(tmp_path, key, text)), reading.load_recipe(write(tmp_path), {key: text})):
        assert keys.flat(recipe)[key] == float(text) and type(keys.flat(recipe)[key]) is keys.TYPES[key]


def test_a_text_that_looks_like_a_number_stays_text_and_a_part_is_no_whole_number(tmp_path):
    assert reading.load_recipe(line(tmp_path, "run_name", "1e5")).saving.run_name == "1e5"
    (message,) = refused(line(tmp_path, "max_steps", "15e-1"))
    assert "max_steps = 1.5: must be an integer" in message
    with pytest.raises(BadInput, match="--max_steps 15e-1: must be an integer"):
        reading.load_recipe(write(tmp_path), {"max_steps": "15e-1"})


def test_number_in_quotes_is_refused_with_a_form_that_loads_or_none(tmp_path):
    for key, text in (("learning_rate", '"0.1"'), ("max_steps", '"100"')):
        (message,) = refused(line(tmp_path, key, text))
        written = re.search(r"write (\S+) without quotes$", message)[1]
        assert keys.flat(reading.load_recipe(line(tmp_path, key, written)))[key] == float(text.strip('"'))
    for text in ("1e999", '"nan"', '"inf"'):
        (message,) = refused(line(tmp_path, "learning_rate", text))
        assert "must be a number" in message and "write" not in message


def test_wrong_type_is_refused_for_every_key(tmp_path):
    def wrong(name, wanted):
        values = {int: ["5", 5.5, [1]], float: ["x", [1.0]], str: [5, ["x"]]}.get(wanted, ["x", [5], 5])
        return [{"a": 1}, *values] + [None] * (name not in keys.OPTIONAL) + [True] * (wanted is not bool)

    asked = {name: wrong(name, wanted) for name, wanted in keys.TYPES.items()}
    for number in range(max(map(len, asked.values()))):
        values = {name: given[number % len(given)] for name, given in asked.items()}
        lines = refused(write(tmp_path, yaml.safe_dump(values)))
        assert len(lines) == len(values)
        for name, message in zip(values, lines, strict=True):
            assert f"{name} = " in message and "must be" in message, message


@pytest.mark.parametrize("end, beyond", [("low", -1), ("high", 1)])
def test_out_of_range_is_refused_for_every_number(tmp_path, end, beyond):
    numbers = {name: field.metadata for name, field in keys.FIELDS.items() if field.metadata["low"] is not None}
    values = {name: about[end] + beyond for name, about in numbers.items()}
    lines = refused(write(tmp_path, **values))
    assert len(lines) == len(values) > 30
    for name, about in numbers.items():
        wanted = f" {name} = {values[name]}: must be between {about['low']} and {about['high']}"
        assert sum(wanted in message for message in lines) == 1


def test_numbers_that_are_not_finite_are_refused_in_a_file_and_as_a_flag(tmp_path):
    for key, words in (("weight_decay", ".nan"), ("weight_decay", "-.inf"), ("seed", "9" * 400)):
        (message,) = refused(line(tmp_path, key, words))
        assert key in message and "must be between" in message
    for flag in ("nan", "1e999"):
        (message,) = refused(write(tmp_path), {"learning_rate": flag})
        assert "learning_rate" in message and "must be between" in message


def test_each_key_without_default_must_be_stated(tmp_path):
    needed = [name for name, field in keys.FIELDS.items() if field.default is keys.ABSENT]
    lines = refused(write(tmp_path, "color: red"))
    assert len(needed) > 10
    for name in needed:
        assert sum(f" {name} is missing" in message and "state it" in message for message in lines) == 1


def test_all_faults_come_at_once(tmp_path):
    path = write(tmp_path, n_layer=0, seed="x", lr_scheduler_type="cosin", tokenizer=None, color="red")
    lines = refused(path, {"max_steps": "ten"})
    assert len(lines) == 6
    for name in ("n_layer", "seed", "lr_scheduler_type", "tokenizer", "color", "max_steps"):
        assert sum(name in line for line in lines) >= 1


def test_a_secret_in_a_recipe_or_a_flag_is_refused_and_not_repeated(tmp_path, name="wandb_api_key"):
    (message,) = refused(write(tmp_path, **{name: "hunter2"}))
    assert name in message and "environment" in message and "hunter2" not in message
    for words in ([f"--{name}=hunter2"], [f"--{name}", "hunter2"]):
        with pytest.raises(BadInput, match=f"--{name}") as caught:
            command(tmp_path, *words)
        assert "hunter2" not in str(caught.value)


def test_unknown_flag_is_one_fault_that_names_the_nearest(tmp_path):
    for words, wrong, nearest in (
        (["--learning_rte=1"], "--learning_rte", "--learning_rate"),
        (["--max_step", "1"], "--max_step", "--max_steps"),  # argparse would take it as an abbreviation
        (["--verfy", "folder"], "--verfy", "--verify"),
    ):
        with pytest.raises(BadInput) as caught:
            command(tmp_path, *words)
        assert caught.value.lines == [f"{wrong}: no such flag; did you mean {nearest}?"]


def test_flag_beats_file_and_extra_flags_come_with_their_types_only_when_given(tmp_path):
    words = ["--seed", "99", "--learning_rate", "6e-4", "--data_files", "b", "c", "--verify=3", "--job", "3", "--dry"]
    got, extras = command(tmp_path, *words, "--report_to", "none", "--min_lr_ratio", ".5", "--tags=--x")
    assert (got.model.seed, got.schedule.learning_rate, got.data.data_files) == (99, 6e-4, ["b", "c"])
    assert (got.tracking.report_to, got.schedule.min_lr_ratio, got.tracking.tags) == (None, 0.5, ["--x"])
    assert extras == {"job": 3, "verify": "3", "dry": True} and command(tmp_path)[1] == {}


@pytest.mark.parametrize(
    "words, found",
    [
        (["--job", "3.5"], "--job 3.5: must be an integer"),
        (["--dry=true"], "dry"),  # a switch
        (["stray"], "^stray: is not a flag"),
        (["--push_to_hub", "True"], "--push_to_hub True: must be true or false"),
        (["--seed"], "--seed"),
        (["--sources", "x"], "--sources: no such flag$"),
    ],
)
def test_a_flag_that_is_used_wrongly_is_bad_input_not_an_exit(tmp_path, words, found):
    with pytest.raises(BadInput, match=found):
        command(tmp_path, *words)


@pytest.mark.parametrize(
    "words",
    [
        *([f"--run_name={name}"] for name in ("profile", "--profile", "-1e-3")),
        ["--data_files=--x y"],
        ["--data_files", "profile", "extend_steps"],
        ["--sample_prompts", "", "- a"],
    ],
)
def test_no_value_is_a_mode_and_a_reader_is_given_what_the_run_was_given_letter_by_letter(tmp_path, words):
    more = ["--extend_steps", "5", "--profile", "--seed", "3e1"]
    given, modes, for_reader = reading.parse_training(["--recipe", str(write(tmp_path)), *words, *more])
    flag, _, value = words[0].removeprefix("--").partition("=")
    assert modes == {"extend_steps": 5, "profile": True} and value in str(keys.flat(given)[flag])
    assert parsed(for_reader, "", {"source": (int, "")}) == (given, {})


def test_push_pending_needs_no_recipe_and_stands_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--push_pending", "runs/a"], ["--push-pending=runs/a"]):
        assert reading.parse_training(words) == (None, {"push_pending": "runs/a"}, [])
    for more in (["--profile"], ["--seed", "1"], ["--recipe", "x"]):
        with pytest.raises(BadInput, match="^--push_pending runs/a: stands alone; leave the other flags out$"):
            reading.parse_training([*more, "--push_pending", "runs/a"])


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (["--seed", "1", "--job", "2", "--seed=3"], "--seed 1, --seed 3"),
        (["--learning-rate", "1e-3", "--learning_rate", "1e-3"], "--learning_rate 1e-3, --learning_rate 1e-3"),
        (["--data_files", "a", "b", "--data_files", "c"], "--data_files a b, --data_files c"),
        (["--dry", "--dry"], "--dry, --dry"),
    ],
)
def test_a_flag_given_twice_is_refused_with_both_values(tmp_path, words, both):
    with pytest.raises(BadInput) as caught:
        command(tmp_path, *words)
    assert caught.value.lines == [f"{both}: given twice; keep one of them"]


def test_a_value_below_zero_is_answered_by_its_keys_own_rule(tmp_path):
    for name, value in (("max_steps", "-.5E+2"), ("learning_rate", "-1e-3"), ("rope_theta", "-inf")):
        with pytest.raises(BadInput, match=f"{name}.*: must (be|lie)"):
            command(tmp_path, f"--{name}", value)


def test_help_can_be_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(["--help"], "Story.", EXTRAS)
    out = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("Story.", "--adam_beta2 X", "--max_steps N ", "--tf32 true|false|auto", "--dry ", "help of dry"):
        assert words in out
    usual, first = out.index("--max_steps N"), out.index("--dataset_config_name")
    assert out.count("--max_steps N") == 1 and usual < first  # the usual ones first
    assert "--sources" not in out


def test_a_file_that_is_no_recipe_is_bad_input(tmp_path):
    path = tmp_path / "mine.yaml"
    for content, words in (
        *((text, "a recipe is a mapping") for text in (b"", b"- a\n- b\n")),
        *((text, "not a recipe: ") for text in (b"a: [1\n", b"a: b: c\n")),
        (b"? [1, 2]\n: 3\n", "not a recipe: line 1: a key must be a plain word"),
        (b"tokenizer: caf\xe9\n", "cannot be read as text"),
    ):
        path.write_bytes(content)
        assert "mine.yaml" in refused(path)[0] and words in refused(path)[0]
    assert "cannot be read" in refused(tmp_path)[0]


def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, name="gpt2_124m.yaml")
    (message,) = refused(tmp_path / "gpt2_125m.yaml")
    assert "no such recipe" in message and "gpt2_124m.yaml?" in message


def test_micro_batch_is_the_largest_divisor_at_or_below_the_ceiling(tmp_path):
    for sequences, ceiling, processes, micro_batch in ((8, 4, 1, 4), (8, 100, 1, 8), (12, 5, 1, 4), (7, 5, 1, 1)):
        given = recipe(tmp_path, tokens_per_step=sequences * 16, per_device_train_batch_size=ceiling)
        assert make_plan(given, processes) == Plan(processes, sequences, micro_batch, sequences // micro_batch)
    asked = recipe(tmp_path, per_device_train_batch_size="auto", tokens_per_step=24 * 16)
    plans = [make_plan(asked, 2, ceiling) for ceiling in (None, 100, 12, 11, 5, 1)]
    assert [plan.per_device_train_batch_size for plan in plans] == [12, 12, 12, 6, 4, 1]
    assert {plan.per_device_train_batch_size * plan.gradient_accumulation_steps for plan in plans} == {12}


def test_plan_that_cannot_be_shared_prints_remedies_that_work(tmp_path):
    for sequences, processes in [(10, 4), (1, 8)]:
        given = recipe(tmp_path, tokens_per_step=sequences * 16)
        with pytest.raises(BadInput, match="cannot share equally") as caught:
            make_plan(given, processes)
        message = str(caught.value)
        tokens = int(re.search(r"--tokens_per_step (\d+)", message)[1])
        make_plan(reading.load_recipe(write(tmp_path), {"tokens_per_step": str(tokens)}), processes)
        for count in re.findall(r"\d+", re.search(r"Use (.+?) processes", message)[1]):
            make_plan(given, int(count))


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        *[("tokens_per_step", tokens, r"the nearest is (\d+)") for tokens in (1, 129)],
        ("n_head", 3, r"--n_head (\d+)"),
        ("save_total_limit", 1, r"Use (2) or more"),
    ],
)
def test_a_number_that_goes_with_no_other_is_refused_with_one_that_does(tmp_path, name, value, remedy):
    (message,) = refused(write(tmp_path, **{name: value}))
    assert reading.load_recipe(write(tmp_path), {name: re.search(remedy, message)[1]})


def test_run_name_decides_the_run_folder_and_one_that_leaves_it_is_refused(tmp_path):
    assert recipe(tmp_path, run_name="b.1_x-y").saving.output_dir == "runs/b.1_x-y"
    assert recipe(tmp_path, output_dir="/else/where").saving.output_dir == "/else/where"
    for name in ("../x", "", "x" * 65, "x\n"):
        assert "run_name" in refused(write(tmp_path, run_name=name))[0]
    assert "run_name" in refused(write(tmp_path, name="my run.yaml"))[0]  # which is the run's name too


def test_changed_science_is_refused_key_by_key_and_nothing_else_is(tmp_path):
    """A key that is younger than the run had its default."""
    before = keys.fixed(recipe(tmp_path))
    del before["max_hours"], before["max_steps"]
    for changes, faults in (
        ({"data_files": ["b"], "eval_steps": 7}, []),
        (
            {"seed": 7, "init_from": "gpt2", "architecture": "gpt2"},
            ["init_from = none, asked for gpt2", "seed = 1, asked for 7"],
        ),
        ({"max_hours": 2}, ["max_hours = 0.0, asked for 2.0"]),
    ):
        with pytest.raises(BadInput) as caught:
            reading.refuse_changed_science(Path("run"), before, recipe(tmp_path, **changes))
        first, *lines = caught.value.lines
        wanted = sorted([*faults, "max_steps = none, asked for 10"])
        if faults:
            assert sorted(line.strip() for line in lines) == wanted and "Give another --run_name" in first
        else:
            assert first.startswith(f"run: {wanted[0]}: fixed for a run. ") and not lines
    reading.refuse_changed_science(Path("run"), before | {"max_steps": 10}, recipe(tmp_path, eval_steps=7))


def test_a_new_bpe_has_the_new_split_and_a_run_that_exists_keeps_its_own(tmp_path):
    path, run_dir = write(tmp_path), tmp_path / "run"
    place = {"output_dir": str(run_dir)}

    def split_of(recipe: Path, **flags: str) -> str:
        return reading.load_recipe(recipe, place | flags).data.tokenizer_split

    assert split_of(path) == "qwen35" and split_of(path, tokenizer_split="gpt2") == "gpt2"
    run_dir.mkdir()
    older = write(run_dir, name=reading.RUN_RECIPE)  # from before there was the key
    assert split_of(path) == split_of(older) == "gpt2" and split_of(path, tokenizer_split="qwen35") == "qwen35"
    older.write_text(keys.as_yaml(reading.load_recipe(path, place)))
    assert "tokenizer_split: gpt2" in older.read_text() and split_of(path) == "gpt2"
    older.write_text(keys.as_yaml(reading.load_recipe(path, place | {"tokenizer_split": "qwen35"})))
    assert split_of(path) == split_of(older) == "qwen35"
    write(run_dir, name=reading.RUN_RECIPE, tokenizer="characters")
    assert split_of(path) == "qwen35"
    older.write_text("tokenizer_split: 3\n")  # faulty: refused where the run folder is opened
    assert split_of(path) == "qwen35"


def test_auto_is_a_word_of_the_keys_that_say_so(tmp_path):
    assert recipe(tmp_path, per_device_train_batch_size="auto", tf32=True).machine.tf32 is True
    path = write(tmp_path)
    read = reading.load_recipe(path, {"per_device_train_batch_size": "auto", "tf32": "false"})
    assert (read.batch.per_device_train_batch_size, read.machine.tf32) == ("auto", False)
    assert reading.load_recipe(path, {"per_device_train_batch_size": "7"}).batch.per_device_train_batch_size == 7
    for flags in ({"per_device_train_batch_size": "Auto"}, {"tf32": "yes"}, {"max_steps": "auto"}):
        (message,) = refused(path, flags)
        assert next(iter(flags)) in message
    assert "must be an integer, or auto" in refused(path, {"per_device_train_batch_size": "Auto"})[0]


def test_a_warm_up_longer_than_the_run_is_a_quarter_of_it_one_that_fits_stays_and_half_warns(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pretrain")
    path = write(tmp_path, eval_steps=10)
    for steps, warmup, warned in ((20, "9", 0), (20, "10", 1), (1, "1", 0), (20, "11", 1), (20, "20", 1)):
        caplog.clear()
        read = reading.load_recipe(path, {"max_steps": str(steps), "warmup_steps": warmup})
        assert read.schedule.warmup_steps == int(warmup)
        assert caplog.text.count("is half of max_steps = 20 or more") == len(caplog.messages) == warned
    cut = reading.load_recipe(path, {"max_steps": "20", "warmup_steps": "21"})
    assert cut.schedule.warmup_steps == 5 and "warmup_steps = 21 is longer than the run, max_steps = 20" in caplog.text
    assert reading.load_recipe(path, {"max_steps": "3", "warmup_steps": "4"}).schedule.warmup_steps == 1


def test_a_size_is_gpt_2s_shape_by_either_name_and_stands_without_other_flags_of_the_shape(tmp_path):
    def shape(*words):
        model = parsed(["--recipe", str(write(tmp_path)), *words], "", {})[0].model
        return model.n_layer, model.n_head, model.n_embd

    assert shape("--size", "d12") == shape("--size", "gpt2") == (12, 12, 768)
    assert shape("--size", "gpt2-xl") == shape("--size", "d48") == (48, 25, 1600)
    assert shape("--size", "d24") == (24, 16, 1024) and shape("--size", "d36") == (36, 20, 1280)
    with pytest.raises(BadInput, match="--size d12 and --n_embd: both give the shape; leave one out"):
        shape("--size", "d12", "--n_embd", "768")
    with pytest.raises(BadInput, match="--size d13: must be d12, d24, .* or gpt2-xl"):
        shape("--size", "d13")


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["--batch_size", "8"], ["--batch_size: a flag of nanoGPT; here it is: per_device_train_batch_size"]),
        (["--gpu", "4090"], ["--gpu: a flag of other scripts; here it is: YAML card"]),
        (["-b", "8"], ["-b: a flag of llm.c; here it is: per_device_train_batch_size; a ceiling, or auto"]),
        (["--grad_accum_steps", "8"], ["not needed: derived: tokens_per_step / (per_device_train_batch_size x"]),
        (["--gradient_accumulation_steps", "8"], ["tokens_per_step = gradient_accumulation_steps * "]),
        (["--max_length", "8", "--max_iters", "5"], ["sequence_length", "nanoGPT; here it is: max_steps"]),
        (["-z", "1"], ["it is: shard_optimizer, YAML yaml"]),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_ours(tmp_path, monkeypatch, words, answers):
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(BadInput) as caught:
        parsed(["--recipe", str(write(tmp_path)), *words], "", {})
    *lines, command = caught.value.lines
    assert command.startswith("the whole command here: ") and len(lines) == len(answers)
    assert all(answer in line for answer, line in zip(answers, lines, strict=True))


# What a run reads.


def test_each_source_of_a_mixture_has_its_own_names_and_weight_and_the_recipes_rules(tmp_path):
    names = {"dataset_name": "x", "dataset_config_name": "c", "dataset_revision": "r", "validation_files": ["v"]}
    rules = {
        "text_column": "t",
        "validation_fraction": 0.3,
        "validation_tokens": 5,
        "limit_tokens": 6,
        "shard_tokens": 77,
    }
    data = reading.load_recipe(mixture(tmp_path, HUB, OWN, {"weight": 0.5, "data_dir": "d"}, **names, **rules)).data
    none = dict.fromkeys(keys.SOURCE_NAMES)
    wanted = [none | rules | given for given in (HUB, OWN, {"weight": 0.5, "data_dir": "d"})]
    assert keys.weights(data) == tuple(given.pop("weight") for given in wanted)
    assert [{name: vars(source)[name] for name in wanted[0]} for source in keys.sources(data)] == wanted


def test_data_dir_goes_before_data_files_before_sources_before_dataset_name(tmp_path):
    """A flag too: before the file's mixture."""
    path, files = mixture(tmp_path, HUB, dataset_name="n"), {"data_files": ["f"]}
    for flags, wanted in ((files | {"data_dir": "d"}, "d"), (files, ["f"]), ({}, "owner/name")):
        data = reading.load_recipe(path, flags).data
        (source,) = keys.sources(data)
        assert (source.data_dir or source.data_files or source.dataset_name) == wanted and keys.weights(data) == (1.0,)
    (source,) = keys.sources(recipe(tmp_path, data_files=None, dataset_name="n").data)
    assert source.dataset_name == "n"


def test_a_mixture_survives_as_yaml(tmp_path):
    shared = ["a.jsonl", "é.jsonl"]  # one list in two places: YAML writes it as an alias
    path = mixture(tmp_path, HUB, OWN | {"data_files": shared}, {"weight": 1e-9, "data_files": shared}, run_name="mine")
    given = reading.load_recipe(path)
    assert reading.load_recipe(write(tmp_path, keys.as_yaml(given), "copy.yaml")) == given
    assert given.data.sources[2] == {"weight": 1e-9, "data_files": shared}


def test_what_others_see_of_a_recipe_has_no_secret_of_any_source_and_survives(tmp_path):
    secret, prompt = "https://me:pw@h/a.jsonl?v=1&token=T", "https://me:pw@h/?go=on"
    files = {"data_files": ["b.jsonl", secret], "validation_files": [secret]}
    for given in (
        mixture(tmp_path, OWN | files, sample_prompts=[prompt]),
        write(tmp_path, **files, sample_prompts=[prompt]),
    ):
        given = reading.load_recipe(given)
        public = keys.public(given)
        assert public.keys() == keys.FIELDS.keys() and public["sample_prompts"] == [prompt]
        copy = reading.load_recipe(write(tmp_path, keys.as_yaml(given), "copy.yaml"))
        assert keys.public(copy) == public == keys.public(given) | {name: keys.flat(copy)[name] for name in public}
        for source in (public["sources"] or [public])[:1]:
            assert source["data_files"][0] == "b.jsonl" and source["data_files"][1:] == source["validation_files"]
            assert redact_url(secret) == source["validation_files"][0] != secret
        read = given.data.data_files or given.data.sources[0]["data_files"]
        assert read == files["data_files"]


@pytest.mark.parametrize(
    "source, words",
    [
        ({"dataset_name": "a"}, "weight is missing"),
        *[({"weight": n, "dataset_name": "a"}, "must be a number above 0") for n in (0, "1", float("nan"), 10**400)],
        ({"weight": 1, "validation_files": ["v"], "data_files": []}, "give data_dir, data_files or dataset_name"),
        (HUB | {"wait": 1}, "wait: no such key; did you mean weight?"),
        ({"weight": 1, "data_files": "a.txt"}, "data_files = a.txt: must be a list of texts, is text"),
        (HUB | {"limit_tokens": -1}, "limit_tokens = -1: must be between 0 and"),
    ],
)
def test_each_fault_of_a_source_is_named_once_with_its_number(tmp_path, source, words):
    (message,) = refused(mixture(tmp_path, OWN, source))
    assert message.startswith(f"{tmp_path}/mine.yaml: sources, number 2: ") and words in message
    assert message.count("mine.yaml") == 1


def test_a_mixture_that_is_no_list_of_mappings_is_refused(tmp_path):
    for text in ("{weight: 1}", "[a, b]"):
        assert "must be a list of mappings" in refused(line(tmp_path, "sources", text))[0]
    assert "weight is given twice" in refused(line(tmp_path, "sources", "[{weight: 1, dataset_name: a, weight: 2}]"))[0]
    assert "sources is empty" in refused(mixture(tmp_path))[0]
    replaced = mixture(tmp_path, HUB | {"data_filez": ["a"]}, data_files=["f"])  # recipe.yaml will hold it
    assert "data_filez: no such key; did you mean data_files?" in refused(replaced)[0]
    assert len(refused(mixture(tmp_path, {"weight": 0}, {"dataset_nam": 1}, tokenizer="bpe"))) == 6


def test_a_mixture_with_a_tokenizer_made_from_one_text_is_refused(tmp_path):
    (message,) = refused(mixture(tmp_path, HUB, OWN, tokenizer="bpe"))
    assert "tokenizer = bpe: a mixture needs one tokenizer" in message
    assert reading.load_recipe(mixture(tmp_path, HUB, OWN, tokenizer="bpe"), {"data_files": ["f"]})


@pytest.mark.parametrize("changes", [{"data_dir": "d"}, {"sources": [HUB, {"weight": 1, "data_dir": "d"}]}])
def test_shards_of_ones_own_are_never_deleted(tmp_path, changes):
    given = {"data_files": None, "tokenizer": "owner/tokenizer"} | changes
    (message,) = refused(write(tmp_path, **given, stream_keep="consumed"))
    assert "data_dir holds yours" in message and "--stream_keep all" in message
    assert recipe(tmp_path, **given, stream_keep="all")


LLAMA = {"architecture": "llama", "num_key_value_heads": 1, "intermediate_size": 96, "tie_word_embeddings": True}
LLAMA |= {"rope_theta": 10000.0}


def test_a_model_or_run_that_is_begun_from_brings_shape_and_tokenizer_along(tmp_path):
    shapeless = dict.fromkeys(("tokenizer", *keys.MODEL_KEYS))
    found = reading.load_recipe(write(tmp_path, **shapeless, init_from="owner/name"))
    assert found.data.tokenizer == "owner/name" and found.model.n_layer is None
    (tmp_path / "runs" / "r" / "model").mkdir(parents=True)
    found = reading.load_recipe(write(tmp_path, **shapeless, init_from=str(tmp_path / "runs" / "r")))
    assert found.model.init_from == found.data.tokenizer == str(tmp_path / "runs" / "r" / "model")


def test_without_a_model_the_shape_must_be_stated_and_no_architecture_is_the_default(tmp_path):
    assert "n_layer is missing" in refused(line(tmp_path, "n_layer", "null"))[0]
    assert reading.load_recipe(line(tmp_path, "architecture", "null")).model.architecture == "gpt2"


def test_what_a_llama_type_model_lacks_is_named_with_usual_values_that_work(tmp_path):
    messages = refused(write(tmp_path, architecture="llama"))
    assert len(messages) == 4
    flags = dict(re.search(r"usual: --(\w+) (\S+)$", message).groups() for message in messages)
    usual = {"num_key_value_heads": "2", "intermediate_size": "128", "tie_word_embeddings": "true"}
    assert flags == usual | {"rope_theta": "10000.0"}
    assert reading.load_recipe(write(tmp_path, architecture="llama"), flags).model.intermediate_size == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_key_value_heads": 2, "n_head": 3, "n_embd": 96},
            "num_key_value_heads = 2 must divide n_head = 3; 1 or 3 does",
        ),
        ({"n_head": 32}, "n_embd / n_head = 1: rotary positions turn pairs"),
        ({"resid_pdrop": 0.1}, "resid_pdrop = 0.1: has no effect with architecture = llama; use --resid_pdrop 0"),
        ({"architecture": "lama"}, "must be gpt2 or llama; did you mean llama?"),
    ],
)
def test_what_a_llama_type_model_cannot_have_is_refused(tmp_path, change, words):
    (message,) = refused(write(tmp_path, **LLAMA | change))
    assert words in message


def test_gpt2_refuses_what_only_llama_has(tmp_path):
    lines = refused(write(tmp_path, num_key_value_heads=1, tie_word_embeddings=True, rope_theta=10000.0))
    assert len(lines) == 3 and all(
        "architecture = gpt2; leave it out, or use --architecture llama" in line for line in lines
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adamw_8bit", "shard_optimizer": True}, "--shard_optimizer false, or --optimizer adamw"),
        ({"report_to": ["none", "wandb"]}, "none stands alone"),
        ({"project_name": "ursa minor"}, "project_name = ursa minor: letters, digits, _ . and - only"),
        ({"lr_scheduler_type": "wsd", "warmup_steps": 9}, "overlap. Use --decay_ratio 0.09"),
    ],
)
def test_values_that_do_not_go_together_are_refused(tmp_path, changes, words):
    (message,) = refused(write(tmp_path, **changes))
    assert words in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"muon_momentum": "0.9"}, "optimizer = adamw; leave it out, or use --optimizer muon"),
        ({"decay_ratio": "0.3"}, "lr_scheduler_type = cosine; leave it out, or use --lr_scheduler_type wsd"),
        ({"min_lr_ratio": "0.2", "lr_scheduler_type": "constant"}, "use --lr_scheduler_type cosine, linear or wsd"),
        ({"initializer_range": "0.04", "init_from": "gpt2"}, "init_from = gpt2; leave it out, or use --init_from none"),
    ],
)
def test_a_flag_without_effect_is_refused_and_a_default_a_zero_or_a_key_of_the_file_is_not(tmp_path, flags, words):
    with pytest.raises(BadInput, match="has no effect with") as caught:
        reading.load_recipe(write(tmp_path), flags)
    assert caught.value.lines[0].endswith(words)
    in_file = {name: yaml.safe_load(value) for name, value in flags.items()}
    assert keys.flat(recipe(tmp_path, **in_file))[next(iter(flags))] == next(iter(in_file.values()))
    flags = {"muon_momentum": "0.95", "decay_ratio": "0.2", "min_lr_ratio": "0", "lr_scheduler_type": "constant"}
    assert reading.load_recipe(write(tmp_path), flags).schedule.lr_scheduler_type == "constant"


@pytest.mark.parametrize(
    "words, status, said",
    [
        ("train.py --learning_rat 1", 2, "--learning_rat: no such flag; did you mean --learning_rate?"),
        (
            "train.py --recipe recipes/quickstart.yaml --n_head 7",
            2,
            "error: --n_head 7: n_embd = 128 must be a multiple of n_head",
        ),
        ("train.py --help", 0, "--learning_rate"),
        ("generate.py --model x --top_p 2", 2, "--top_p 2.0: must be above 0, at most 1"),
    ],
)
def test_a_typo_and_help_are_answered_before_torch_is_imported(tmp_path, words, status, said):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    script, *flags = words.split()
    command = [sys.executable, str(ROOT / script), *flags]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout + done.stderr and "Traceback" not in done.stderr
