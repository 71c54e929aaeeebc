"""Recipe files: accepted values, rejected values, and suggested fixes that work."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact_url
from ursa_minor.base.run_files import Finish
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.recipe.batching import Plan, make_plan, steps_of_epochs

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CHANGES = {
    "data_files": ["a.txt"],
    "tokenizer": "bpe",
    "vocab_size": 512,
    "max_steps": 10,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "per_device_train_batch_size": 4,
}
BASE = {
    name: value
    for name, value in (yaml.safe_load(RECIPE) | CHANGES).items()
    if not name.startswith(("sample", "eval", "save", "logging", "valid"))
}
HUB_SOURCE = {"weight": 1.0, "dataset_name": "owner/name"}
FILE_SOURCE = {
    "weight": 2,
    "data_files": ["a.jsonl", "b.jsonl"],
    "text_column": "content",
    "validation_tokens": 7,
}
EXTRAS = {
    "dry": (bool, "help of dry"),
    "job": (int, "help of job"),
    "verify": (str, "help of verify"),
}
LLAMA = {
    "architecture": "llama",
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
RESUME_COMMAND = "python train.py --recipe runs/r/recipe.yaml"
NEW_RUN_COMMAND = f"{RESUME_COMMAND} --init_from runs/r --run_name r-2 --max_steps 12"


def write_text(folder, text, name="mine.yaml"):
    """Write a recipe file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def write_recipe(folder, **changes):
    """Write the base recipe with some values changed. None removes a key."""
    values = {name: value for name, value in (BASE | changes).items() if value is not None}
    return write_text(folder, yaml.safe_dump(values, sort_keys=False))


def write_line(folder, key, text):
    """Write the base recipe with the literal line ``key: text`` at its end."""
    values = dict(BASE)
    values.pop(key, None)
    if key == "data_dir":
        del values["data_files"]
    return write_text(folder, f"{yaml.safe_dump(values)}{key}: {text}\n")


def load(folder, **changes):
    """Load the base recipe with some values changed."""
    return loading.load_recipe(write_recipe(folder, **changes))


def load_copy(folder, recipe):
    """Write a recipe as YAML and load it again."""
    return loading.load_recipe(write_text(folder, keys.as_yaml(recipe), "copy.yaml"))


def errors_of(path, flags=None):
    """Return the lines of the error that loading the recipe raises."""
    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, flags)
    return caught.value.lines


def load_command(folder, *words):
    """Load the base recipe with these words of a command line, and return the extra flags too."""
    argv = ["--recipe", str(write_recipe(folder)), *words]
    flags, extras = command_line.read_flags(argv, "Description.", EXTRAS)
    path = Path(flags.pop("recipe"))
    return loading.load_recipe(path, flags), extras


def with_absolute_paths(recipe):
    """Return the recipe with absolute paths, as its YAML has them."""
    return keys.from_dict(keys.map_paths(keys.to_dict(recipe), keys.absolute))


def mixture(*sources, **changes):
    """Return the changes that make the base recipe read these sources."""
    return {"data_files": None, "tokenizer": "owner/tokenizer", "sources": list(sources)} | changes


def help_text(capsys, extras):
    """Return the text that --help prints."""
    with pytest.raises(SystemExit):
        command_line.read_flags(["--help"], "Description.", extras)
    return capsys.readouterr().out


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_repository_recipe_survives_yaml_round_trip(tmp_path, path):
    recipe = loading.load_recipe(path)

    # The copy has the name of a run's recipe, which is not a run name.
    copy = loading.load_recipe(write_text(tmp_path, keys.as_yaml(recipe), "recipe.yaml"))

    assert copy == with_absolute_paths(recipe)
    assert recipe.saving.run_name == path.stem
    assert recipe.saving.output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_repository_recipe_has_plan_for_one_process(path):
    recipe = loading.load_recipe(path)

    plan = make_plan(recipe, 1)

    sequences = plan.per_device_train_batch_size * plan.gradient_accumulation_steps
    assert sequences * recipe.model.sequence_length == recipe.batch.tokens_per_step
    if recipe.data.tokenizer == "bpe":  # fine-tuning adds the tokens of a chat
        assert recipe.model.vocab_size - recipe.data.tokenizer_vocab_size >= 3


def test_values_survive_yaml_round_trip(tmp_path):
    prompts = ["", "two\nlines\r\n", "é 中 \U0001f600", "yes", "1e3", " : # -"]
    path = write_recipe(
        tmp_path,
        sample_prompts=prompts,
        sample_steps=5,
        adam_epsilon=1e-9,
        learning_rate=3,
        init_from="gpt2",
    )
    recipe = loading.load_recipe(path, {"init_from": "none", "run_name": "mine"})

    copy = load_copy(tmp_path, recipe)

    assert recipe.evaluation.sample_prompts == prompts
    assert isinstance(recipe.schedule.learning_rate, float)
    assert recipe.model.init_from is None
    assert copy == with_absolute_paths(recipe)


def test_sources_survive_yaml_round_trip(tmp_path):
    shared = ["a.jsonl", "é.jsonl"]  # YAML writes a list that occurs twice as an alias
    sources = [
        HUB_SOURCE,
        FILE_SOURCE | {"data_files": shared},
        {"weight": 1e-9, "data_files": shared},
    ]
    recipe = load(tmp_path, **mixture(*sources, run_name="mine"))

    copy = load_copy(tmp_path, recipe)

    assert copy == with_absolute_paths(recipe)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("warmup_step", "3", "warmup_step: no such key; did you mean warmup_steps?"),
        ("lr_scheduler_type", "cosin", "did you mean cosine?"),
        ("report_to", "wandb", "must be a list of texts"),
        ("max_steps", "15e-1", "max_steps = 1.5: must be an integer"),
        ("weight_decay", ".nan", "weight_decay = nan: must be between"),
        ("data_dir", "hf://x", "hf://datasets/OWNER/NAME"),
        ("run_name", "2001-13-45", "month must be in 1..12"),
        ("n_layer", "null", "n_layer is missing and has no default"),
        ("save_total_limit", "1", "Use 2 or more"),
        ("task_steps", "5", "task_steps = 5: no tasks are set"),
        ("tasks", "[piqa]\ntask_files: [hellaswag=a]", "task_files = hellaswag=a: must be"),
        ("reference_curve", "none.yaml", "reference_curve = none.yaml: cannot be read"),
        ("token_column", "ids", "token_column = ids needs an existing tokenizer"),
        ("run_name", '"../x"', "letters, digits"),
        ("run_name", '""', "letters, digits"),
        ("run_name", r'"x\n"', "letters, digits"),
    ],
)
def test_invalid_line_is_reported_with_its_file(tmp_path, key, text, words):
    (message,) = errors_of(write_line(tmp_path, key, text))

    assert message.startswith(f"{tmp_path}/mine.yaml: ")
    assert words in message


def test_repeated_key_is_reported_with_both_lines(tmp_path):
    path = write_line(tmp_path, "tokenizer_split", "gpt2\nseed: 3")
    lines = path.read_text().splitlines()
    first_line = lines.index("seed: 1") + 1

    (message,) = errors_of(path)

    assert f"line {len(lines)}: seed is given twice" in message
    assert f"first in line {first_line}" in message


def test_yaml_syntax_error_is_reported_with_its_line(tmp_path):
    path = write_line(tmp_path, "run_name", "[1")
    end_of_file = len(path.read_text().splitlines()) + 1

    (message,) = errors_of(path)

    assert message.startswith(f"{path}: ")
    assert f"not a valid recipe: line {end_of_file}: " in message


@pytest.mark.parametrize(
    ("key", "text", "number"), [("learning_rate", '"0.1"', 0.1), ("max_steps", '"100"', 100)]
)
def test_quoted_number_is_rejected_with_working_literal(tmp_path, key, text, number):
    (message,) = errors_of(write_line(tmp_path, key, text))

    assert "YAML reads this as text" in message
    literal = re.search(r"Write (\S+) without quotes$", message)[1]
    recipe = loading.load_recipe(write_line(tmp_path, key, literal))
    assert keys.to_dict(recipe)[key] == number


@pytest.mark.parametrize("text", ["1e999", '"nan"', '"inf"'])
def test_number_that_is_not_finite_is_rejected(tmp_path, text):
    (message,) = errors_of(write_line(tmp_path, "learning_rate", text))

    assert "must be a number" in message
    assert "Write" not in message


@pytest.mark.parametrize(
    ("split_keys", "words"),
    [
        ({"dataset_split": "train[:10%]"}, "--limit_tokens"),
        ({"validation_split": "train"}, "is also dataset_split"),
    ],
)
def test_invalid_split_is_rejected_with_explanation(tmp_path, split_keys, words):
    source = {"data_files": None, "tokenizer": "owner/tokenizer", "dataset_name": "owner/name"}

    (message,) = errors_of(write_recipe(tmp_path, **source, **split_keys))

    ((key, value),) = split_keys.items()
    assert f": {key} = {value}: " in message
    assert words in message


def test_similar_recipe_name_is_suggested(tmp_path):
    write_text(tmp_path, "", "gpt2_124m.yaml")

    (message,) = errors_of(tmp_path / "gpt2_125m.yaml")

    assert "no such recipe" in message
    assert "did you mean" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- a\n", "a recipe is a mapping"),
        (b"tokenizer: caf\xe9\n", "not a valid recipe: 'utf-8'"),
    ],
)
def test_file_that_is_no_recipe_is_rejected(tmp_path, content, words):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)

    (message,) = errors_of(path)

    assert words in message


@pytest.mark.parametrize(("key", "text"), [("learning_rate", "6e-4"), ("max_steps", "1.5e3")])
def test_number_with_exponent_is_accepted(tmp_path, key, text):
    from_file = loading.load_recipe(write_line(tmp_path, key, text))
    from_flag = loading.load_recipe(write_recipe(tmp_path), {key: text})

    for recipe in (from_file, from_flag):
        value = keys.to_dict(recipe)[key]
        assert value == float(text)
        assert type(value) is keys.KEY_TYPES[key]


def test_text_with_exponent_stays_text(tmp_path):
    recipe = loading.load_recipe(write_line(tmp_path, "run_name", "1e5"))

    assert recipe.saving.run_name == "1e5"


def wrong_values(name):
    """Return values of types that this key does not accept."""
    key_type = keys.KEY_TYPES[name]
    values_by_type = {int: ["5", 5.5, [1]], float: ["x", [1.0]], str: [5, ["x"]]}
    values = [{"a": 1}, *values_by_type.get(key_type, ["x", [5], 5])]
    if name == "keep_checkpoints":  # a list of numbers and texts, or one of them
        values = [{"a": 1}, "x", ["x"], 5.5]
    if name not in keys.OPTIONAL_KEYS:
        values.append(None)
    if key_type is not bool:
        values.append(True)
    return values


WRONG_VALUES = {name: wrong_values(name) for name in keys.KEY_TYPES}


@pytest.mark.parametrize("index", range(max(map(len, WRONG_VALUES.values()))))
def test_wrong_type_is_rejected_for_every_key(tmp_path, index):
    values = {name: wrong[index % len(wrong)] for name, wrong in WRONG_VALUES.items()}

    lines = errors_of(write_text(tmp_path, yaml.safe_dump(values)))

    for name, message in zip(values, lines, strict=True):
        assert f"{name} = " in message
        assert "must be" in message


@pytest.mark.parametrize(("end", "step"), [(0, -1), (1, 1)], ids=["below", "above"])
def test_number_outside_range_is_rejected(tmp_path, end, step):
    ranges = {
        name: field.metadata["allowed"]
        for name, field in keys.FIELDS.items()
        if keys.KEY_TYPES[name] in (int, float)
    }
    values = {name: allowed[end] + step for name, allowed in ranges.items()}

    lines = errors_of(write_recipe(tmp_path, **values))

    assert len(values) > 30
    assert len(lines) == len(values)
    for name, (minimum, maximum) in ranges.items():
        words = f" {name} = {values[name]}: must be between {minimum} and {maximum}"
        assert sum(words in line for line in lines) == 1


def test_all_problems_are_reported_together(tmp_path):
    required = [name for name, field in keys.FIELDS.items() if field.default is keys.ABSENT]
    flags = {"eval_steps": "ten", "save_steps": "-1"}

    lines = errors_of(write_text(tmp_path, "color: red"), flags)

    assert len(required) > 7
    assert len(lines) == len(required) + 3
    for name in required:
        missing = [line for line in lines if f" {name} is missing" in line]
        assert len(missing) == 1
        assert f"--{name}" in missing[0]
    assert any(line.startswith("--eval_steps ten: must be an integer") for line in lines)


def test_secret_in_recipe_is_rejected_without_its_value(tmp_path):
    (message,) = errors_of(write_recipe(tmp_path, wandb_api_key="hunter2"))

    assert "wandb_api_key" in message
    assert "environment" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("words", ["--wandb_api_key=hunter2", "--wandb_api_key hunter2"])
def test_secret_in_flag_is_rejected_without_its_value(tmp_path, words):
    with pytest.raises(BadInput, match="--wandb_api_key") as caught:
        load_command(tmp_path, *words.split())

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--seed 99", "seed", 99),
        ("--learning-rate 6e-4", "learning_rate", 6e-4),
        ("--data_files b c", "data_files", ["b", "c"]),
        ("--report_to none", "report_to", None),
        ("--min_lr_ratio .5", "min_lr_ratio", 0.5),
        ("--language=--x-y", "language", ["--x-y"]),
        ("--size d48", "n_embd", 1600),
    ],
)
def test_flag_overrides_recipe_value(tmp_path, words, key, value):
    recipe, extras = load_command(tmp_path, *words.split())

    assert keys.to_dict(recipe)[key] == value
    assert recipe.saving.output_dir == "runs/mine"
    assert extras == {}


def test_extra_flag_has_its_own_type(tmp_path):
    _, extras = load_command(tmp_path, "--verify=3", "--job", "3", "--dry")

    assert extras == {"job": 3, "verify": "3", "dry": True}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # argparse would accept --max_step as an abbreviation.
        ("--max_step 1", ["--max_step: no such flag; did you mean --max_steps?"]),
        ("--document_separator ---", ["a value that consists of hyphens needs an equals sign"]),
        ("--job 3.5", ["argument --job: invalid int value: '3.5'"]),
        ("stray", ["stray is not a flag"]),
        ("--seed", ["argument --seed: expected one argument"]),
        ("--per_device_train_batch_size Auto", ["--per_device_train_batch_size Auto: must be"]),
        ("--max_steps -5", ["--max_steps -5: must be between 1 and"]),
        ("--n_head 7 --n_embd 16", ["--n_head 7, --n_embd 16: n_embd = 16: must be a multiple"]),
        ("--size d12 --n_head 12", ["--size d12 and --n_head both set the shape"]),
        (
            "--gpu rtx_a6000 --batch_size 5",
            ["--gpu is a flag of other trainers", "--batch_size is a flag of nanoGPT"],
        ),
    ],
)
def test_wrong_flag_is_reported_by_name(tmp_path, monkeypatch, words, expected):
    monkeypatch.setattr("sys.argv", ["train.py"])

    with pytest.raises(BadInput) as caught:
        load_command(tmp_path, *words.split())

    for message, start in zip(caught.value.lines, expected, strict=True):
        assert message.startswith(start)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--run_name=--profile"], "run_name", "--profile"),
        (
            ["--data_files", "--x y", "extend_steps", ""],
            "data_files",
            ["--x y", "extend_steps", ""],
        ),
    ],
)
def test_value_is_not_taken_for_a_mode(tmp_path, words, key, value):
    argv = ["--recipe", str(write_recipe(tmp_path)), *words]
    argv += ["--extend_steps", "5", "--profile", "--seed", "3e1"]

    recipe, modes, reader_argv = command_line.parse_training(argv)

    assert modes == {"extend_steps": 5, "profile": True}
    assert keys.to_dict(recipe)[key] == value
    reader_recipe, reader_modes, _ = command_line.parse_training(reader_argv)
    assert reader_recipe == recipe
    assert reader_modes == {}


def test_push_pending_needs_no_recipe():
    recipe, modes, reader_argv = command_line.parse_training(["--push-pending=runs/a"])

    assert recipe is None
    assert modes == {"push_pending": "runs/a"}
    assert reader_argv == []


@pytest.mark.parametrize("words", [["--profile"], ["--recipe", "x"]])
def test_push_pending_rejects_other_options(words):
    with pytest.raises(BadInput, match="--push_pending runs/a cannot be combined"):
        command_line.parse_training([*words, "--push_pending", "runs/a"])


def test_tasks_flag_needs_task_steps(tmp_path):
    argv = ["--recipe", str(write_recipe(tmp_path)), "--tasks", "piqa"]

    with pytest.raises(BadInput) as caught:
        command_line.parse_training(argv)
    _, modes, _ = command_line.parse_training([*argv, "--eval_only"])

    (message,) = caught.value.lines
    assert message.startswith("--tasks piqa: ")
    assert "task_steps = 0" in message
    assert "use --task_steps 250" in message
    assert modes == {"eval_only": True}


def profile_argv(folder, max_steps):
    """Return the command line of a profiled run with this number of steps."""
    path = write_recipe(folder, warmup_steps=1)
    return ["--recipe", str(path), "--max_steps", str(max_steps), "--profile"]


def test_run_too_short_for_profile_is_rejected(tmp_path):
    with pytest.raises(BadInput) as caught:
        command_line.parse_training(profile_argv(tmp_path, 12))

    (message,) = caught.value.lines
    assert message.startswith("--profile ")
    assert "max_steps = 12" in message
    assert "--max_steps 13" in message


@pytest.mark.parametrize(("max_steps", "words"), [(13, []), (12, ["--extend_steps=9"])])
def test_run_long_enough_for_profile_is_accepted(tmp_path, max_steps, words):
    argv = profile_argv(tmp_path, max_steps)

    _, modes, _ = command_line.parse_training([*argv, *words])

    assert modes["profile"]


def error_of_more_steps(folder, schedule, finish, *, has_checkpoint):
    """Return the error for max_steps = 20 in a run of 12 steps that has finished at step 8."""
    run_dir = folder / "runs/r"
    (run_dir / "model").mkdir(parents=True)
    if has_checkpoint:
        (run_dir / "checkpoints/step-00000008").mkdir(parents=True)
    finish.write(Path("runs/r"))
    changes = {"run_name": "r", "lr_scheduler_type": schedule, "decay_ratio": 0.2}
    before = keys.hyperparameters(load(folder, **changes, max_steps=12))
    longer = load(folder, **changes, max_steps=20)
    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(Path("run"), before, longer)
    (message,) = caught.value.lines
    return message


EARLY_STOP = Finish(step=8, since_best=2)
# max_hours had planned the 8 steps of this run.
SCHEDULE_END = Finish(step=8)
NO_PATIENCE = "--early_stopping_patience 0"


@pytest.mark.parametrize(
    ("schedule", "finish", "has_checkpoint", "commands"),
    [
        ("cosine", EARLY_STOP, True, [f"{RESUME_COMMAND} {NO_PATIENCE}", NEW_RUN_COMMAND]),
        ("cosine", EARLY_STOP, False, [NEW_RUN_COMMAND]),
        ("cosine", SCHEDULE_END, True, [NEW_RUN_COMMAND]),
        ("wsd", EARLY_STOP, True, [f"{RESUME_COMMAND} --extend_steps 8 {NO_PATIENCE}"]),
        ("wsd", EARLY_STOP, False, [NEW_RUN_COMMAND]),
        ("wsd", SCHEDULE_END, True, [f"{RESUME_COMMAND} --extend_steps 12"]),
    ],
    ids=[
        "cosine-early",
        "cosine-early-no-checkpoint",
        "cosine-end",
        "wsd-early",
        "wsd-early-no-checkpoint",
        "wsd-end",
    ],
)
def test_finished_run_suggests_commands_for_more_steps(
    tmp_path, monkeypatch, schedule, finish, has_checkpoint, commands
):
    monkeypatch.chdir(tmp_path)

    message = error_of_more_steps(tmp_path, schedule, finish, has_checkpoint=has_checkpoint)

    if finish is EARLY_STOP:
        assert "Early stopping ended it at step 8. " in message
    elif schedule == "cosine":
        assert "Its learning rate schedule has ended. " in message
    assert message.count("python train.py") == len(commands)
    assert commands[0] in message
    assert message.endswith(f": {commands[-1]}")


def test_help_shows_metavars_of_modes(capsys):
    output = help_text(capsys, command_line.TRAIN_MODES)

    assert "--extend_steps N " in output
    assert "--push_pending PATH" in output


def test_help_lists_usual_flags_first(capsys):
    output = help_text(capsys, EXTRAS)

    assert output.count("--max_steps N") == 1
    assert output.index("--max_steps N") < output.index("--dataset_config_name")


@pytest.mark.parametrize(
    "words", ["Description.", "--adam_beta2 X", "--tf32 [true|false|auto]", "help of dry"]
)
def test_help_contains_flags_with_their_values(capsys, words):
    assert words in help_text(capsys, EXTRAS)


@pytest.mark.parametrize("name", keys.FIELDS)
def test_help_of_a_key_consists_of_sentences(name):
    text = keys.FIELDS[name].metadata["help"]

    assert text[0].isupper()
    assert text.endswith(".")


@pytest.mark.parametrize(
    ("sequences", "limit", "micro_batch"), [(8, 4, 4), (8, 100, 8), (12, 5, 4), (7, 5, 1)]
)
def test_micro_batch_is_largest_divisor_within_limit(tmp_path, sequences, limit, micro_batch):
    recipe = load(tmp_path, tokens_per_step=sequences * 16, per_device_train_batch_size=limit)

    plan = make_plan(recipe, 1)

    assert plan == Plan(1, sequences, micro_batch, sequences // micro_batch)


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, Plan(2, 24, 12, 1)), (11, Plan(2, 24, 6, 2))]
)
def test_automatic_micro_batch_respects_measured_limit(tmp_path, limit, expected):
    recipe = load(tmp_path, per_device_train_batch_size="auto", tokens_per_step=24 * 16)

    assert make_plan(recipe, 2, limit) == expected


@pytest.mark.parametrize(("sequences", "processes"), [(10, 4), (1, 8)])
def test_batch_that_cannot_be_shared_has_working_fixes(tmp_path, sequences, processes):
    recipe = load(tmp_path, tokens_per_step=sequences * 16)

    with pytest.raises(BadInput, match="cannot share equally") as caught:
        make_plan(recipe, processes)

    message = str(caught.value)
    tokens = int(re.search(r"--tokens_per_step (\d+)", message)[1])
    make_plan(load(tmp_path, tokens_per_step=tokens), processes)
    suggested_processes = re.search(r"Use (.+?) processes", message)[1]
    for count in re.findall(r"\d+", suggested_processes):
        make_plan(recipe, int(count))


# Values that depend on each other.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"optimizer": "adamw_8bit", "shard_optimizer": True},
            "--shard_optimizer false, or --optimizer adamw",
        ),
        ({"lr_scheduler_type": "wsd", "warmup_steps": 9}, "Use --decay_ratio 0.09"),
        ({"tokens_per_step": 129}, "Use --tokens_per_step 128"),
        ({"n_head": 3}, "Use --n_head 2"),
        (LLAMA | {"num_key_value_heads": 3}, "must divide n_head = 2. Use 1 or 2"),
        (LLAMA | {"n_head": 32}, "n_embd / n_head = 1: must be even"),
        (LLAMA | {"resid_pdrop": 0.1}, "Use --resid_pdrop 0"),
        ({"rope_theta": 10000.0}, "use --architecture llama"),
        (mixture(HUB_SOURCE, FILE_SOURCE, tokenizer="bpe"), "needs an existing tokenizer"),
        (mixture(HUB_SOURCE | {"data_filez": ["a"]}), "number 1: data_filez: no such key"),
        (
            mixture(FILE_SOURCE, {"weight": float("nan"), "dataset_name": "a"}),
            "number 2: weight = ",
        ),
        (
            mixture(FILE_SOURCE, {"weight": 1, "data_files": []}),
            "number 2: no data source is named",
        ),
        (
            mixture(FILE_SOURCE, HUB_SOURCE | {"limit_tokens": -1}),
            "number 2: limit_tokens = -1: must be between 0 and",
        ),
        # The user's shards are never deleted.
        (
            {"data_files": None, "data_dir": "d", "stream_keep": "consumed"},
            "data_dir contains your own",
        ),
        (
            mixture(HUB_SOURCE, {"weight": 1, "data_dir": "d"}, stream_keep="consumed"),
            "data_dir contains your own",
        ),
    ],
)
def test_conflicting_values_are_rejected_with_fix(tmp_path, changes, words):
    (message,) = errors_of(write_recipe(tmp_path, **changes))

    assert message.startswith(f"{tmp_path}/mine.yaml: ")
    assert words in message


def test_extend_steps_rejects_max_hours(tmp_path):
    argv = ["--recipe", str(write_recipe(tmp_path)), "--extend_steps", "5"]

    with pytest.raises(BadInput, match="--max_hours has no effect with --extend_steps"):
        command_line.parse_training([*argv, "--max_hours", "1"])
    _, modes, _ = command_line.parse_training([*argv, "--max_hours", "0"])

    assert modes == {"extend_steps": 5}


# 0.55 * 100 is above 55 in floating point, and 0.555 * 100 is rounded to 56.
WSD = {"lr_scheduler_type": "wsd", "max_steps": 100, "warmup_steps": 45}


@pytest.mark.parametrize("decay_ratio", [0.55, 0.554])
def test_wsd_decay_steps_are_rounded(tmp_path, decay_ratio):
    recipe = load(tmp_path, **WSD, decay_ratio=decay_ratio)

    assert recipe.schedule.decay_ratio == decay_ratio


def test_wsd_overlap_is_found_after_rounding(tmp_path):
    (message,) = errors_of(write_recipe(tmp_path, **WSD, decay_ratio=0.555))

    assert "overlap" in message
    assert "Use --decay_ratio 0.55" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"muon_momentum": "0.9"}, "use --optimizer muon"),
        (
            {"min_lr_ratio": "0.2", "lr_scheduler_type": "constant"},
            "use --lr_scheduler_type cosine, linear or wsd",
        ),
        ({"initializer_range": "0.04", "init_from": "gpt2"}, "use --init_from none"),
        ({"early_stopping_patience": "3", "eval_steps": "0"}, "use --eval_steps 250"),
        ({"muon_momentum": "0.95"}, "use --optimizer muon"),  # the default value
    ],
)
def test_flag_without_effect_is_rejected(tmp_path, flags, words):
    name = next(iter(flags))
    values = {key: yaml.safe_load(text) for key, text in flags.items()}

    (message,) = errors_of(write_recipe(tmp_path), flags)
    recipe = load(tmp_path, **values)

    assert "has no effect with" in message
    assert message.endswith(words)
    assert keys.to_dict(recipe)[name] == values[name]  # a recipe file may contain such a key


def test_flag_that_switches_something_off_is_accepted(tmp_path):
    flags = {"early_stopping_patience": "0", "load_best_model_at_end": "false", "eval_steps": "0"}

    recipe = loading.load_recipe(write_recipe(tmp_path), flags)

    assert recipe.evaluation.eval_steps == 0


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "expected", "notes"),
    [
        ("20", "9", 9, []),
        ("20", "10", 10, ["is at least half of max_steps = 20"]),
        ("1", "1", 1, []),
        ("20", "21", 5, ["warmup_steps = 21 exceeds max_steps = 20"]),
    ],
)
def test_long_warmup_is_reported(tmp_path, caplog, max_steps, warmup_steps, expected, notes):
    caplog.set_level(logging.INFO, "ursa_minor")
    path = write_recipe(tmp_path, eval_steps=10)
    flags = {"max_steps": max_steps, "warmup_steps": warmup_steps}

    recipe = loading.load_recipe(path, flags)

    assert recipe.schedule.warmup_steps == expected
    for message, note in zip(caplog.messages, notes, strict=True):
        assert note in message


def test_few_evaluations_are_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ursa_minor")
    flags = {"max_steps": "20", "warmup_steps": "2", "eval_steps": "11"}

    loading.load_recipe(write_recipe(tmp_path, eval_steps=10), flags)

    assert "use --eval_steps 2" in caplog.text


def test_each_changed_hyperparameter_is_rejected(tmp_path):
    before = keys.hyperparameters(load(tmp_path))
    changed = load(tmp_path, seed=7, label_smoothing=0.1)

    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(Path("run"), before, changed)

    label_smoothing, seed = sorted(caught.value.lines)
    assert label_smoothing.startswith("run: label_smoothing ")
    assert "label_smoothing = 0.0" in label_smoothing
    assert "label_smoothing = 0.1" in label_smoothing
    assert "seed = 1" in seed
    assert "seed = 7" in seed
    assert "--run_name" in seed


def test_other_keys_of_a_run_may_change(tmp_path):
    before = keys.hyperparameters(load(tmp_path))
    changed = load(tmp_path, eval_steps=7, data_files=["b"])

    loading.check_same_hyperparameters(Path("run"), before, changed)


def test_run_without_a_current_key_is_rejected(tmp_path):
    recipe = load(tmp_path)
    before = keys.hyperparameters(recipe)
    del before["seed"]

    with pytest.raises(BadInput, match=r"another version .*\(seed\).* --run_name"):
        loading.check_same_hyperparameters(Path("run"), before, recipe)


def test_run_with_an_unknown_key_is_rejected(tmp_path):
    recipe = load(tmp_path)
    before = keys.hyperparameters(recipe) | {"gone": False}

    with pytest.raises(BadInput, match=r"another version .*\(gone\).* --run_name"):
        loading.check_same_hyperparameters(Path("run"), before, recipe)


# Data sources and models.


def test_source_of_a_mixture_inherits_recipe_settings(tmp_path):
    dataset_keys = {
        "dataset_config_name": "c",
        "dataset_revision": "r",
        "validation_files": ["v"],
    }
    settings = {
        "text_column": "t",
        "validation_fraction": 0.3,
        "validation_tokens": 5,
        "limit_tokens": 6,
        "shard_tokens": 77,
    }
    sources = [HUB_SOURCE, FILE_SOURCE, {"weight": 0.5, "data_dir": "d"}]

    data = load(tmp_path, **mixture(*sources, **dataset_keys, **settings)).data

    # A source never inherits the keys that name its data.
    inherited = dict.fromkeys(keys.SOURCE_NAMES) | settings
    for source, resolved in zip(sources, data.resolved_sources, strict=True):
        for name, value in (inherited | source).items():
            assert getattr(resolved, name) == value


SECRET_URL = "https://me:pw@h/a.jsonl?v=1&token=T"
SECRET_FILES = {"data_files": ["b.jsonl", SECRET_URL], "validation_files": [SECRET_URL]}


@pytest.mark.parametrize("is_mixture", [True, False])
def test_published_recipe_has_no_credentials(tmp_path, is_mixture):
    prompt = "https://me:pw@h/?go=on"
    changes = mixture(FILE_SOURCE | SECRET_FILES) if is_mixture else SECRET_FILES
    recipe = load(tmp_path, **changes, sample_prompts=[prompt])

    public = keys.redacted(recipe)

    assert public.keys() == keys.FIELDS.keys()
    assert public["sample_prompts"] == [prompt]
    source = public["sources"][0] if is_mixture else public
    assert redact_url(SECRET_URL) != SECRET_URL
    assert source["data_files"] == ["b.jsonl", redact_url(SECRET_URL)]
    assert source["validation_files"] == [redact_url(SECRET_URL)]
    assert keys.redacted(load_copy(tmp_path, recipe)) == public
    # The recipe itself keeps the credentials.
    private = recipe.data.sources[0] if is_mixture else keys.to_dict(recipe)
    assert private["data_files"] == SECRET_FILES["data_files"]


def test_yaml_of_a_url_identifies_the_same_file(tmp_path):
    url = "https://h/a.jsonl?v=1&token=T."  # in a sentence, the last dot would not be part of it

    copy = load_copy(tmp_path, load(tmp_path, data_files=[url]))

    assert copy.data.data_files == [redact_url(url)]


def test_yaml_keeps_path_with_question_mark(tmp_path):
    path = str(tmp_path / "a?token=1.jsonl")

    copy = load_copy(tmp_path, load(tmp_path, data_files=[path]))

    assert copy.data.data_files == [path]


SHAPELESS = dict.fromkeys(("tokenizer", *keys.MODEL_KEYS))


def test_pretrained_model_sets_shape_and_tokenizer(tmp_path):
    recipe = load(tmp_path, **SHAPELESS, init_from="owner/name")

    assert recipe.data.tokenizer == "owner/name"
    assert recipe.model.n_layer is None


def test_init_from_run_also_names_its_tokenizer(tmp_path):
    run_dir = tmp_path / "runs" / "r"
    (run_dir / "model").mkdir(parents=True)

    recipe = load(tmp_path, **SHAPELESS, init_from=str(run_dir))

    # The recipe stays the same when the run writes its model.
    assert recipe.model.init_from == str(run_dir)
    assert recipe.data.tokenizer == str(run_dir)


def test_architecture_is_gpt2_by_default(tmp_path):
    recipe = loading.load_recipe(write_line(tmp_path, "architecture", "null"))

    assert recipe.model.architecture == "gpt2"


def test_missing_llama_keys_have_working_suggestions(tmp_path):
    path = write_recipe(tmp_path, architecture="llama")

    flags = {}
    for message in errors_of(path):
        name, value = re.search(r"Use, for example, --(\w+) (\S+)$", message).groups()
        flags[name] = value

    assert flags == {
        "num_key_value_heads": "2",
        "intermediate_size": "128",
        "tie_word_embeddings": "true",
        "rope_theta": "10000.0",
    }
    assert loading.load_recipe(path, flags).model.intermediate_size == 128


def test_architecture_flag_names_every_missing_key(tmp_path):
    messages = errors_of(write_recipe(tmp_path), {"architecture": "llama"})

    names = [re.search(r"also needs (\w+)\.", message)[1] for message in messages]
    assert names == [
        "num_key_value_heads",
        "intermediate_size",
        "tie_word_embeddings",
        "rope_theta",
    ]
    for message in messages:
        assert message.startswith("--architecture llama: ")


def test_conflicting_source_flags_are_reported_without_file(tmp_path):
    flags = {"data_dir": "d", "dataset_name": "owner/name"}

    (message,) = errors_of(write_recipe(tmp_path), flags)

    assert message.startswith("--data_dir and --dataset_name are different data sources")


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        ("--learning_rat 1", 2, "did you mean --learning_rate?"),
        ("--help", 0, "--learning_rate"),
    ],
)
def test_command_line_is_parsed_before_torch_import(tmp_path, words, status, expected):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py", *words.split()]

    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == status
    assert expected in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


# The length of the run


@pytest.mark.parametrize(
    ("changes", "flags", "expected"),
    [
        ({}, {"num_train_epochs": "2.5"}, (None, 2.5)),
        ({"max_steps": None, "num_train_epochs": 3}, {}, (None, 3.0)),
        ({"max_steps": None, "num_train_epochs": 3}, {"max_steps": "7"}, (7, None)),
        ({"max_steps": None, "num_train_epochs": 3}, {"num_train_epochs": "0.5"}, (None, 0.5)),
        ({}, {"max_steps": "7", "num_train_epochs": "none"}, (7, None)),
    ],
)
def test_flag_replaces_length_of_recipe(tmp_path, changes, flags, expected):
    recipe = loading.load_recipe(write_recipe(tmp_path, **changes), flags)

    assert (recipe.schedule.max_steps, recipe.schedule.num_train_epochs) == expected


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"num_train_epochs": 2}, {}, ["mine.yaml", "num_train_epochs both state"]),
        ({"num_train_epochs": 2}, {"max_steps": "7"}, ["mine.yaml", "num_train_epochs both"]),
        ({}, {"max_steps": "7", "num_train_epochs": "2"}, ["--max_steps and --num_train_epochs"]),
        ({"max_steps": None}, {}, ["max_steps is missing", "num_train_epochs"]),
        ({}, {"num_train_epochs": "none", "max_steps": "none"}, ["max_steps is missing"]),
        ({}, {"num_train_epochs": "ten"}, ["--num_train_epochs ten", "a number"]),
        ({}, {"num_train_epochs": "0"}, ["--num_train_epochs 0", "between"]),
        ({}, {"num_train_epochs": "-1"}, ["--num_train_epochs -1", "between"]),
        ({}, {"num_train_epochs": "nan"}, ["--num_train_epochs nan", "between"]),
        ({}, {"num_train_epochs": "inf"}, ["--num_train_epochs inf", "between"]),
        ({}, {"num_train_epochs": "10%"}, ["--num_train_epochs 10%", "a number"]),
        ({}, {"num_train_epochs": "2", "warmup_steps": "0.1"}, ["--warmup_steps 0.1", "fraction"]),
    ],
)
def test_bad_length_is_rejected(tmp_path, changes, flags, words):
    (message,) = errors_of(write_recipe(tmp_path, **changes), flags)

    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"data_files": None, "dataset_name": "owner/name", "tokenizer": "gpt2"}, "owner/name"),
        ({"data_files": ["https://example.org/a.txt"]}, "URLs"),
        ({"data_files": ["a.txt", "https://example.org/a.jsonl"]}, "URLs"),
        ({"stream_keep": "consumed"}, "stream_keep"),
        (
            {"data_files": None, "tokenizer": "gpt2", "sources": [FILE_SOURCE, HUB_SOURCE]},
            "number 2",
        ),
    ],
)
def test_epochs_of_unknown_length_are_rejected(tmp_path, changes, word):
    path = write_recipe(tmp_path, **changes, max_steps=None, num_train_epochs=2)

    (message,) = errors_of(path)
    recipe = loading.load_recipe(path, needs_length=False)

    assert "num_train_epochs" in message
    assert "--max_steps" in message
    assert word in message
    assert recipe.schedule.num_train_epochs == 2


def test_epochs_and_consumed_shards_are_named_once(tmp_path):
    flags = {"num_train_epochs": "2", "stream_keep": "consumed"}

    (message,) = errors_of(write_recipe(tmp_path), flags)

    assert message.startswith("--stream_keep consumed: ")
    assert message.count("num_train_epochs") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"data_files": ["a.jsonl"]},
        {"data_files": None, "dataset_name": "python_stdlib"},
        {"data_files": None, "data_dir": "shards", "tokenizer": "gpt2"},
        {"data_files": None, "data_dir": "hf://datasets/owner/name", "tokenizer": "gpt2"},
    ],
)
def test_epochs_of_complete_data_are_accepted(tmp_path, changes):
    recipe = load(tmp_path, **changes, max_steps=None, num_train_epochs=2)

    with pytest.raises(ValueError, match="num_train_epochs"):
        _ = recipe.schedule.total_steps


def test_warmup_of_epochs_is_shortened_like_stated_steps(tmp_path):
    stated = load(tmp_path, max_steps=20, warmup_steps=100)
    unknown = load(tmp_path, max_steps=None, num_train_epochs=2, warmup_steps=100)

    completed = loading.with_max_steps(unknown, 20, logs_advice=True)

    assert unknown.schedule.warmup_steps == 100
    assert keys.replace(completed, num_train_epochs=None) == stated


def test_advice_is_given_for_computed_steps(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recipe = load(tmp_path, max_steps=None, num_train_epochs=2, warmup_steps=15)
    assert "--warmup_steps" not in caplog.text

    loading.with_max_steps(recipe, 20, logs_advice=True)

    assert "--warmup_steps 2" in caplog.text
    assert "--eval_steps 2" in caplog.text


@pytest.mark.parametrize(
    ("max_steps", "word"), [(20, "--decay_ratio 0.25"), (10**9 + 1, "1,000,000,001")]
)
def test_computed_steps_that_break_rules_are_rejected(tmp_path, max_steps, word):
    schedule = {"lr_scheduler_type": "wsd", "warmup_steps": 15, "decay_ratio": 0.5}
    recipe = load(tmp_path, max_steps=None, num_train_epochs=2, **schedule)

    with pytest.raises(BadInput) as caught:
        loading.with_max_steps(recipe, max_steps, logs_advice=False)

    (message,) = caught.value.lines
    assert "num_train_epochs = 2" in message
    assert word in message


@pytest.mark.parametrize(
    ("epochs", "num_windows", "expected"),
    [(1.0, 16, 2), (1.0, 17, 3), (0.1, 80, 1), (0.1, 240, 3), (2.5, 10, 4), (1e-6, 1, 1)],
)
def test_steps_of_epochs_are_exact_and_rounded_up(tmp_path, epochs, num_windows, expected):
    recipe = load(tmp_path)  # 8 sequences per step

    assert steps_of_epochs(epochs, num_windows, recipe) == expected


def test_recipe_of_run_keeps_epochs_only(tmp_path):
    recipe = load(tmp_path, max_steps=None, num_train_epochs=2)
    completed = loading.with_max_steps(recipe, 20, logs_advice=False)

    copied = load_copy(tmp_path, completed)

    assert copied.schedule.num_train_epochs == 2.0
    assert copied.schedule.max_steps is None


def test_size_leaves_epochs_unchanged(tmp_path):
    flags = {"data_files": ["a.txt"], "num_train_epochs": "2", "size": "gpt2-xl"}

    recipe = loading.load_recipe(ROOT / "recipes" / "gpt2_124m.yaml", flags)

    assert recipe.schedule.max_steps is None
    assert recipe.schedule.num_train_epochs == 2.0
    assert recipe.schedule.warmup_steps == 358  # 715 scaled to twice the batch
    assert recipe.batch.tokens_per_step == 2**20


@pytest.mark.parametrize("source", ["checkpoint", "finish"])
def test_steps_of_a_run_are_read_from_its_folder(tmp_path, source):
    write_recipe(tmp_path, max_steps=None, num_train_epochs=2).rename(tmp_path / "recipe.yaml")
    if source == "checkpoint":
        training = tmp_path / "checkpoints/step-00000003/training"
        training.mkdir(parents=True)
        (training / "state.json").write_text('{"science": {"max_steps": 9}}')
    else:
        Finish(step=9, max_steps=9).write(tmp_path)

    assert loading.load_run_recipe(tmp_path).schedule.max_steps == 9
    assert loading.read_run_recipe(tmp_path / "recipe.yaml")["max_steps"] == 9


def test_unknown_lengths_are_not_compared(tmp_path):
    before = keys.hyperparameters(load(tmp_path, max_steps=None, num_train_epochs=2))
    longer = load(tmp_path, max_steps=100, warmup_steps=50)

    loading.check_same_hyperparameters(Path("run"), before, longer)


def test_changed_epochs_name_the_steps_of_the_run(tmp_path):
    before = keys.hyperparameters(load(tmp_path, max_steps=10))
    recipe = load(tmp_path, max_steps=None, num_train_epochs=2)
    longer = loading.with_max_steps(recipe, 20, logs_advice=False)

    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(Path("run"), before, longer)

    (message,) = caught.value.lines
    assert "max_steps = 20 (num_train_epochs = 2)" in message
    assert "--max_steps 10" in message


def test_changed_epochs_name_the_epochs_of_the_run(tmp_path):
    recipe = load(tmp_path, max_steps=None, num_train_epochs=30000)
    before = loading.with_max_steps(recipe, 10, logs_advice=False)
    recipe_file = write_recipe(tmp_path, max_steps=None, num_train_epochs=30000)
    recipe_file = recipe_file.rename(tmp_path / "recipe.yaml")
    changed = keys.replace(recipe, num_train_epochs=2)
    longer = loading.with_max_steps(changed, 20, logs_advice=False)

    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(recipe_file, keys.hyperparameters(before), longer)

    (message,) = caught.value.lines
    assert "num_train_epochs = 2" in message
    assert "--num_train_epochs 30000" in message


def test_changed_warmup_is_no_change_of_epochs(tmp_path):
    recipe = load(tmp_path, max_steps=None, num_train_epochs=2, warmup_steps=5)
    run = loading.with_max_steps(recipe, 20, logs_advice=False)
    before = keys.hyperparameters(run)

    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(Path("run"), before, keys.replace(run, warmup_steps=6))

    (message,) = caught.value.lines
    assert "num_train_epochs" not in message
    assert "set warmup_steps back" in message


@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 10, 49])
def test_shortened_warmup_gets_no_other_advice(tmp_path, caplog, max_steps):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(BASE | {"warmup_steps": 50, "max_steps": max_steps}))
    caplog.set_level(logging.INFO, "ursa_minor")

    loading.load_recipe(path)

    notes = [message for message in caplog.messages if "warmup_steps" in message]
    assert len(notes) == 1
    assert "A quarter of max_steps is used" in notes[0]
