"""The recipe: what it accepts, what it refuses, and that each fix it prints works."""

import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from conftest import RECIPE, ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact_url
from ursa_minor.base.run_files import Finish
from ursa_minor.recipe import command_line, keys, loading
from ursa_minor.recipe.batching import Plan, make_plan

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BASE = yaml.safe_load(RECIPE) | {
    "data_files": ["a.txt"],
    "tokenizer": "bpe",
    "vocab_size": 512,
    "max_steps": 10,
}
BASE |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {
    "per_device_train_batch_size": 4
}
BASE = {
    name: value
    for name, value in BASE.items()
    if not name.startswith(("sample", "eval", "save", "logging", "valid"))
}
HUB = {"weight": 1.0, "dataset_name": "owner/name"}
OWN = {
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
}
LLAMA |= {"rope_theta": 10000.0}


def write(folder, text=None, name="mine.yaml", **changes):
    path = folder / name
    if text is None:
        text = yaml.safe_dump(
            {k: v for k, v in (BASE | changes).items() if v is not None}, sort_keys=False
        )
    path.write_text(text, encoding="utf-8")
    return path


def line(folder, key, text):
    """A recipe whose ``key`` stands there as ``text``, letter by letter."""
    replaced = (key, "data_files") if key == "data_dir" else (key,)
    return write(
        folder,
        yaml.safe_dump({k: v for k, v in BASE.items() if k not in replaced}) + f"{key}: {text}\n",
    )


def refused(path, flags=None):
    with pytest.raises(BadInput) as caught:
        loading.load_recipe(path, flags)
    return caught.value.lines


def recipe(folder, **changes):
    return loading.load_recipe(write(folder, **changes))


def with_absolute_paths(recipe):
    return keys.from_dict(keys.map_paths(keys.to_dict(recipe), keys.absolute))


def mixture(*given, **changes):
    """What of a recipe makes it read these sources."""
    return {"data_files": None, "tokenizer": "owner/tokenizer", "sources": list(given)} | changes


def command(folder, *words):
    flags, chosen = command_line.read_flags(
        ["--recipe", str(write(folder)), *words], "Story.", EXTRAS
    )
    return loading.load_recipe(Path(flags.pop("recipe")), flags), chosen


def test_every_recipe_loads_survives_as_yaml_and_has_a_plan_for_one_process(tmp_path):
    assert len(RECIPES) > 5
    for path in RECIPES:
        loaded = loading.load_recipe(path)
        assert loading.load_recipe(
            write(tmp_path, keys.as_yaml(loaded), "recipe.yaml")
        ) == with_absolute_paths(loaded)
        assert (
            loaded.saving.run_name == path.stem and loaded.saving.output_dir == f"runs/{path.stem}"
        )
        plan = make_plan(loaded, 1)
        per_update = plan.per_device_train_batch_size * plan.gradient_accumulation_steps
        assert per_update * loaded.model.sequence_length == loaded.batch.tokens_per_step
        if loaded.data.tokenizer == "bpe":  # room for the tokens of a chat
            assert loaded.model.vocab_size - loaded.data.tokenizer_vocab_size >= 3


def test_a_recipe_survives_as_yaml_to_the_bit_also_without_values_taken_away(tmp_path):
    prompts = ["", "two\nlines\r\n", "é 中 \U0001f600", "yes", "1e3", " : # -"]
    path = write(
        tmp_path,
        sample_prompts=prompts,
        sample_steps=5,
        adam_epsilon=1e-9,
        learning_rate=3,
        init_from="gpt2",
    )
    given = loading.load_recipe(path, {"init_from": "none", "run_name": "mine"})
    assert given.evaluation.sample_prompts == prompts and isinstance(
        given.schedule.learning_rate, float
    )
    assert given.model.init_from is None
    shared = ["a.jsonl", "é.jsonl"]  # one list in two places: YAML writes it as an alias
    sources = (HUB, OWN | {"data_files": shared}, {"weight": 1e-9, "data_files": shared})
    for one in (given, recipe(tmp_path, **mixture(*sources, run_name="mine"))):
        assert loading.load_recipe(
            write(tmp_path, keys.as_yaml(one), "copy.yaml")
        ) == with_absolute_paths(one)


# A key, its text in the file, and what is said of it.
FAULTS = [
    ("warmup_step", "3", "warmup_step: no such key; did you mean warmup_steps?"),
    ("lr_scheduler_type", "cosin", "must be cosine, linear, wsd or constant; did you mean cosine?"),
    ("report_to", "wandb", "must be a list of texts, such as [a, b]"),
    ("max_steps", "15e-1", "max_steps = 1.5: must be an integer"),
    ("weight_decay", ".nan", "weight_decay = nan: must be between"),
    ("tokenizer_split", "gpt2\nseed: 3", "line 27: seed is given twice (first in line 19)"),
    ("data_dir", "hf://x", "must be a folder, or hf://datasets/OWNER/NAME[@REVISION][/FOLDER]"),
    ("run_name", "2001-13-45", "not a valid recipe: month must be in 1..12"),
    ("run_name", "[1", "not a valid recipe: line 27: "),
    ("n_layer", "null", "n_layer is missing and has no default"),
    ("save_total_limit", "1", "Use 2 or more, or 0 to keep all"),
    ("task_steps", "5", "task_steps = 5: no tasks are set. Use, for example, --tasks"),
    ("tasks", "[piqa]\ntask_files: [hellaswag=a]", "task_files = hellaswag=a: must be NAME=PATH"),
    ("reference_curve", "none.yaml", "reference_curve = none.yaml: cannot be read"),
    ("token_column", "ids", "but token_column = ids needs an existing tokenizer. Use a Hub id"),
    *(
        ("run_name", f'"{name}"', "letters, digits, dots, underscores and hyphens")
        for name in ("../x", "", "x\\n")
    ),
]


def test_a_fault_is_one_line_with_file_key_value_rule_and_remedy(tmp_path):
    for key, text, words in FAULTS:
        (message,) = refused(line(tmp_path, key, text))
        assert message.startswith(f"{tmp_path}/mine.yaml: ") and words in message


def test_number_in_quotes_is_refused_with_a_form_that_loads_or_none(tmp_path):
    for key, text in (("learning_rate", '"0.1"'), ("max_steps", '"100"')):
        (message,) = refused(line(tmp_path, key, text))
        assert "YAML reads this as text" in message
        written = re.search(r"Write (\S+) without quotes$", message)[1]
        assert keys.to_dict(loading.load_recipe(line(tmp_path, key, written)))[key] == float(
            text.strip('"')
        )
    for text in ("1e999", '"nan"', '"inf"'):
        (message,) = refused(line(tmp_path, "learning_rate", text))
        assert "must be a number" in message and "Write" not in message


def test_a_file_that_is_missing_or_no_recipe_is_bad_input(tmp_path):
    write(tmp_path, name="gpt2_124m.yaml")
    assert "no such recipe; did you mean" in refused(tmp_path / "gpt2_125m.yaml")[0]
    for content, words in (
        (b"- a\n", "a recipe is a mapping"),
        (b"tokenizer: caf\xe9\n", "not a valid recipe: 'utf-8'"),
    ):
        (tmp_path / "mine.yaml").write_bytes(content)
        assert words in refused(tmp_path / "mine.yaml")[0]


def test_a_number_with_an_exponent_is_a_number_in_a_file_and_as_a_flag(tmp_path):
    for key, text in (("learning_rate", "6e-4"), ("max_steps", "1.5e3")):
        for read in (
            loading.load_recipe(line(tmp_path, key, text)),
            loading.load_recipe(write(tmp_path), {key: text}),
        ):
            assert (
                keys.to_dict(read)[key] == float(text)
                and type(keys.to_dict(read)[key]) is keys.KEY_TYPES[key]
            )
    assert (
        loading.load_recipe(line(tmp_path, "run_name", "1e5")).saving.run_name == "1e5"
    )  # a text stays one


def test_wrong_type_is_refused_for_every_key(tmp_path):
    def wrong(name, wanted):
        values = {int: ["5", 5.5, [1]], float: ["x", [1.0]], str: [5, ["x"]]}.get(
            wanted, ["x", [5], 5]
        )
        return (
            [{"a": 1}, *values]
            + [None] * (name not in keys.OPTIONAL_KEYS)
            + [True] * (wanted is not bool)
        )

    asked = {name: wrong(name, wanted) for name, wanted in keys.KEY_TYPES.items()}
    for number in range(max(map(len, asked.values()))):
        values = {name: given[number % len(given)] for name, given in asked.items()}
        lines = refused(write(tmp_path, yaml.safe_dump(values)))
        assert len(lines) == len(values)
        for name, message in zip(values, lines, strict=True):
            assert f"{name} = " in message and "must be" in message, message


def test_out_of_range_is_refused_for_every_number(tmp_path):
    for end, beyond in ((0, -1), (1, 1)):
        ranges = {
            name: field.metadata["allowed"]
            for name, field in keys.FIELDS.items()
            if keys.KEY_TYPES[name] in (int, float)
        }
        values = {name: allowed[end] + beyond for name, allowed in ranges.items()}
        lines = refused(write(tmp_path, **values))
        assert len(lines) == len(values) > 30
        for name, (least, most) in ranges.items():
            assert (
                sum(
                    f" {name} = {values[name]}: must be between {least} and {most}" in line
                    for line in lines
                )
                == 1
            )


def test_each_key_without_default_must_be_stated_and_all_faults_come_at_once(tmp_path):
    needed = [name for name, field in keys.FIELDS.items() if field.default is keys.ABSENT]
    lines = refused(write(tmp_path, "color: red"), {"eval_steps": "ten", "save_steps": "-1"})
    assert len(lines) == len(needed) + 3 > 10
    for name in needed:
        assert (
            sum(
                f" {name} is missing" in message and f"set it with --{name}" in message
                for message in lines
            )
            == 1
        )
    assert any(message.startswith("--eval_steps ten: must be an integer") for message in lines)


def test_a_secret_in_a_recipe_or_a_flag_is_refused_and_not_repeated(tmp_path, name="wandb_api_key"):
    (message,) = refused(write(tmp_path, **{name: "hunter2"}))
    assert name in message and "environment" in message and "hunter2" not in message
    for words in ([f"--{name}=hunter2"], [f"--{name}", "hunter2"]):
        with pytest.raises(BadInput, match=f"--{name}") as caught:
            command(tmp_path, *words)
        assert "hunter2" not in str(caught.value)


def test_flag_beats_file_and_extra_flags_come_with_their_types_only_when_given(tmp_path):
    words = [
        "--seed",
        "99",
        "--learning-rate",
        "6e-4",
        "--data_files",
        "b",
        "c",
        "--verify=3",
        "--job",
        "3",
        "--dry",
    ]
    got, extras = command(
        tmp_path, *words, "--report_to", "none", "--min_lr_ratio", ".5", "--language=--x-y"
    )
    assert (got.model.seed, got.schedule.learning_rate, got.data.data_files) == (
        99,
        6e-4,
        ["b", "c"],
    )
    assert (got.tracking.report_to, got.schedule.min_lr_ratio, got.hub.language) == (
        None,
        0.5,
        ["--x-y"],
    )
    assert (
        got.saving.output_dir == "runs/mine"
        and command(tmp_path, "--size", "d48")[0].model.n_embd == 1600
    )
    assert extras == {"job": 3, "verify": "3", "dry": True} and command(tmp_path)[1] == {}


def test_a_flag_that_is_wrong_is_a_line_that_names_it_and_the_remedy(tmp_path, monkeypatch):
    for words, found in (
        (
            "--max_step 1",
            ["--max_step: no such flag; did you mean --max_steps?"],
        ),  # an abbreviation to argparse
        ("--job 3.5", ["argument --job: invalid int value: '3.5'"]),
        (
            "stray",
            [
                "stray is not a flag. Write each value after its flag, for example --max_steps 100. If this is "
            ],
        ),
        ("--seed", ["argument --seed: expected one argument"]),
        (
            "--per_device_train_batch_size Auto",
            ["--per_device_train_batch_size Auto: must be an integer, or auto"],
        ),
        ("--max_steps -5", ["--max_steps -5: must be between 1 and"]),
        (
            "--n_head 7 --n_embd 16",
            ["--n_head 7, --n_embd 16: n_embd = 16: must be a multiple of n_head = 7"],
        ),
        ("--size d12 --n_head 12", ["--size d12 and --n_head both set the shape"]),
        (
            "--gpu rtx_a6000 --batch_size 5",
            ["--gpu is a flag of other trainers. ", "--batch_size is a flag of nanoGPT. "],
        ),
    ):
        monkeypatch.setattr("sys.argv", ["train.py"])
        with pytest.raises(BadInput) as caught:
            command(tmp_path, *words.split())
        for message, begin in zip(caught.value.lines, found, strict=True):
            assert message.startswith(begin)


def test_no_value_is_a_mode_and_a_reader_is_given_what_the_run_was_given_letter_by_letter(tmp_path):
    for words in (["--run_name=--profile"], ["--data_files", "--x y", "extend_steps", ""]):
        more = ["--extend_steps", "5", "--profile", "--seed", "3e1"]
        given, modes, for_reader = command_line.parse_training(
            ["--recipe", str(write(tmp_path)), *words, *more]
        )
        assert modes == {"extend_steps": 5, "profile": True} and words[-1].rpartition("=")[
            2
        ] in str(keys.to_dict(given))
        assert command_line.parse_training(for_reader)[:2] == (given, {})


def test_push_pending_needs_no_recipe_and_stands_alone_and_tasks_need_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.parse_training(["--push-pending=runs/a"]) == (
        None,
        {"push_pending": "runs/a"},
        [],
    )
    for more in (["--profile"], ["--recipe", "x"]):
        with pytest.raises(
            BadInput, match="^--push_pending runs/a cannot be combined with other options"
        ):
            command_line.parse_training([*more, "--push_pending", "runs/a"])
    given = ["--recipe", str(write(tmp_path)), "--tasks", "piqa"]
    with pytest.raises(
        BadInput,
        match="--tasks piqa: has no effect with task_steps = 0. Leave it out, or use --task_steps 250",
    ):
        command_line.parse_training(given)
    assert command_line.parse_training([*given, "--eval_only"])[1] == {"eval_only": True}


@pytest.mark.parametrize(
    "max_steps, more, is_refused",
    [(12, [], True), (13, [], False), (12, ["--extend_steps=9"], False)],
)
def test_a_run_too_short_for_a_profile_is_refused(tmp_path, max_steps, more, is_refused):
    words = [
        "--recipe",
        str(write(tmp_path, warmup_steps=1)),
        "--max_steps",
        str(max_steps),
        "--profile",
        *more,
    ]
    with (
        pytest.raises(BadInput, match="^--profile .* max_steps = 12. Use --max_steps 13 or more")
        if is_refused
        else nullcontext()
    ):
        assert command_line.parse_training(words)[1]["profile"]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(
    "finish, has_checkpoint, expected",
    [
        (
            {"since_best": 2},
            True,
            "Early stopping ended it at step 8. To continue it to step 12: {} --early_stopping_patience 0. ",
        ),
        ({"since_best": 2}, False, "Early stopping ended it at step 8. "),
        ({}, True, "Its learning rate schedule has ended. "),
    ],
)
def test_more_max_steps_for_a_finished_run_names_the_true_reason(
    tmp_path, monkeypatch, schedule, finish, has_checkpoint, expected
):
    monkeypatch.chdir(tmp_path)
    for name in ["model"] + ["checkpoints/step-00000008"] * has_checkpoint:
        Path("runs/r", name).mkdir(parents=True)
    Finish(step=8, **finish).write(Path("runs/r"))
    changes = {"run_name": "r", "lr_scheduler_type": schedule, "decay_ratio": 0.2}
    before = keys.hyperparameters(recipe(tmp_path, **changes, max_steps=12))
    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(
            Path("run"), before, recipe(tmp_path, **changes, max_steps=20)
        )
    (message,) = caught.value.lines
    command = "python train.py --recipe runs/r/recipe.yaml"
    new = f"To start a new run from its weights: {command} --init_from runs/r --run_name r-2 --output_dir runs/r-2 --max_steps 12"
    if schedule == "wsd" and has_checkpoint:
        if finish:
            advice = (
                f"To train it to step 20: {command} --extend_steps 8 --early_stopping_patience 0"
            )
            assert message.endswith(f". Early stopping ended it at step 8. {advice}")
        else:  # max_hours had planned the 8 steps of the finished run
            assert message.endswith(f". To train it longer: {command} --extend_steps 12")
    else:
        assert message.endswith(f". {expected.format(command)}{new}")


def test_modes_with_a_value_have_short_metavars(capsys):
    with pytest.raises(SystemExit):
        command_line.read_flags(["--help"], "Story.", command_line.TRAIN_MODES)
    out = capsys.readouterr().out
    assert "--extend_steps N " in out and "--push_pending PATH" in out


def test_help_has_every_flag_with_its_values_the_usual_ones_first(capsys):
    with pytest.raises(SystemExit):
        command_line.read_flags(["--help"], "Story.", EXTRAS)
    out = capsys.readouterr().out
    assert all(
        words in out
        for words in ("Story.", "--adam_beta2 X", "--tf32 [true|false|auto]", "help of dry")
    )
    assert out.count("--max_steps N") == 1 and out.index("--max_steps N") < out.index(
        "--dataset_config_name"
    )


@pytest.mark.parametrize("name", keys.FIELDS)
def test_help_of_a_key_consists_of_sentences(name):
    help = keys.FIELDS[name].metadata["help"]
    assert help[0].isupper() and help.endswith(".")


def test_micro_batch_is_the_largest_divisor_at_or_below_the_ceiling(tmp_path):
    for sequences, ceiling, micro_batch in ((8, 4, 4), (8, 100, 8), (12, 5, 4), (7, 5, 1)):
        given = recipe(
            tmp_path, tokens_per_step=sequences * 16, per_device_train_batch_size=ceiling
        )
        assert make_plan(given, 1) == Plan(1, sequences, micro_batch, sequences // micro_batch)
    asked = recipe(tmp_path, per_device_train_batch_size="auto", tokens_per_step=24 * 16)
    assert [make_plan(asked, 2, ceiling) for ceiling in (None, 11)] == [
        Plan(2, 24, 12, 1),
        Plan(2, 24, 6, 2),
    ]


def test_plan_that_cannot_be_shared_prints_remedies_that_work(tmp_path):
    for sequences, processes in [(10, 4), (1, 8)]:
        given = recipe(tmp_path, tokens_per_step=sequences * 16)
        with pytest.raises(BadInput, match="cannot share equally") as caught:
            make_plan(given, processes)
        message = str(caught.value)
        tokens = int(re.search(r"--tokens_per_step (\d+)", message)[1])
        make_plan(loading.load_recipe(write(tmp_path), {"tokens_per_step": str(tokens)}), processes)
        for count in re.findall(r"\d+", re.search(r"Use (.+?) processes", message)[1]):
            make_plan(given, int(count))


# Values in combination.


def test_values_that_do_not_go_together_are_one_fault_with_the_remedy(tmp_path):
    for changes, words in (
        (
            {"optimizer": "adamw_8bit", "shard_optimizer": True},
            "--shard_optimizer false, or --optimizer adamw",
        ),
        ({"lr_scheduler_type": "wsd", "warmup_steps": 9}, "overlap. Use --decay_ratio 0.09"),
        (
            {"tokens_per_step": 129},
            "must be a multiple of sequence_length = 16. Use --tokens_per_step 128",
        ),
        ({"n_head": 3}, "n_embd = 32: must be a multiple of n_head = 3. Use --n_head 2"),
        (
            LLAMA | {"num_key_value_heads": 3},
            "num_key_value_heads = 3: must divide n_head = 2. Use 1 or 2",
        ),
        (LLAMA | {"n_head": 32}, "n_embd / n_head = 1: must be even"),
        (
            LLAMA | {"resid_pdrop": 0.1},
            "has no effect with architecture = llama. Use --resid_pdrop 0",
        ),
        (
            {"rope_theta": 10000.0},
            "has no effect with architecture = gpt2. Leave it out, or use --architecture llama",
        ),
        # Of a mixture.
        (mixture(HUB, OWN, tokenizer="bpe"), "but a mixture needs an existing tokenizer"),
        (mixture(HUB | {"data_filez": ["a"]}), "number 1: data_filez: no such key; did"),
        (mixture(OWN, {"weight": float("nan"), "dataset_name": "a"}), "number 2: weight = "),
        (
            mixture(OWN, {"weight": 1, "data_files": []}),
            "number 2: no data source is named",
        ),
        (
            mixture(OWN, HUB | {"limit_tokens": -1}),
            "number 2: limit_tokens = -1: must be between 0 and",
        ),
        # Shards of one's own are never deleted.
        (
            {"data_files": None, "data_dir": "d", "stream_keep": "consumed"},
            "data_dir contains your own. Use --stream_keep",
        ),
        (
            mixture(HUB, {"weight": 1, "data_dir": "d"}, stream_keep="consumed"),
            "data_dir contains your own",
        ),
    ):
        (message,) = refused(write(tmp_path, **changes))
        assert message.startswith(f"{tmp_path}/mine.yaml: ") and words in message


def test_extend_steps_refuses_max_hours(tmp_path):
    command = ["--recipe", str(write(tmp_path)), "--extend_steps", "5"]
    with pytest.raises(BadInput, match="--max_hours has no effect with --extend_steps"):
        command_line.parse_training([*command, "--max_hours", "1"])
    assert command_line.parse_training([*command, "--max_hours", "0"])[1] == {"extend_steps": 5}


@pytest.mark.parametrize("decay_ratio", [0.55, 0.554, 0.555])
def test_wsd_overlap_is_checked_with_rounded_decay_steps(tmp_path, decay_ratio):
    """0.55 * 100 is above 55 in floating point; 0.555 * 100 is rounded to 56."""
    changes = {
        "lr_scheduler_type": "wsd",
        "max_steps": 100,
        "warmup_steps": 45,
        "decay_ratio": decay_ratio,
    }
    path = write(tmp_path, **changes)
    if decay_ratio < 0.555:
        assert loading.load_recipe(path).schedule.decay_ratio == decay_ratio
    else:
        (message,) = refused(path)
        assert "overlap. Use --decay_ratio 0.55" in message


def test_flag_without_effect_is_refused(tmp_path):
    for flags, words in (
        ({"muon_momentum": "0.9"}, "optimizer = adamw. Leave it out, or use --optimizer muon"),
        (
            {"min_lr_ratio": "0.2", "lr_scheduler_type": "constant"},
            "use --lr_scheduler_type cosine, linear or wsd",
        ),
        (
            {"initializer_range": "0.04", "init_from": "gpt2"},
            "init_from = gpt2. Leave it out, or use --init_from none",
        ),
        (
            {"early_stopping_patience": "3", "eval_steps": "0"},
            "eval_steps = 0. Leave it out, or use --eval_steps 250",
        ),
        ({"muon_momentum": "0.95"}, "optimizer = adamw. Leave it out, or use --optimizer muon"),
    ):
        (message,) = refused(write(tmp_path), flags)
        assert message.endswith(words) and "has no effect with" in message
        in_file = {name: yaml.safe_load(value) for name, value in flags.items()}
        assert keys.to_dict(recipe(tmp_path, **in_file))[next(iter(flags))] == next(
            iter(in_file.values())
        )
    flags = {"early_stopping_patience": "0", "load_best_model_at_end": "false", "eval_steps": "0"}
    assert loading.load_recipe(write(tmp_path), flags).evaluation.eval_steps == 0


def test_a_warm_up_longer_than_the_run_is_a_quarter_of_it_half_warns_and_so_do_few_evaluations(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO, "ursa_minor")
    path, half = write(tmp_path, eval_steps=10), "is at least half of max_steps = 20"
    longer = "warmup_steps = 21 exceeds max_steps = 20"
    cases = [("20", "9", 9, ""), ("20", "10", 10, half), ("1", "1", 1, ""), ("20", "21", 5, longer)]
    for steps, warmup, rises, said in cases:
        caplog.clear()
        read = loading.load_recipe(path, {"max_steps": steps, "warmup_steps": warmup})
        assert (
            read.schedule.warmup_steps == rises
            and said in caplog.text
            and len(caplog.messages) == bool(said)
        )
    loading.load_recipe(path, {"max_steps": "20", "warmup_steps": "2", "eval_steps": "11"})
    assert "For ten points use --eval_steps 2" in caplog.text


def test_each_changed_hyperparameter_is_refused(tmp_path):
    before = keys.hyperparameters(recipe(tmp_path))
    with pytest.raises(BadInput) as caught:
        loading.check_same_hyperparameters(
            Path("run"), before, recipe(tmp_path, seed=7, label_smoothing=0.1)
        )
    label_smoothing, seed = sorted(caught.value.lines)
    assert label_smoothing.startswith("run: label_smoothing is fixed for a run.")
    assert "label_smoothing = 0.0, but the command has label_smoothing = 0.1" in label_smoothing
    assert "seed = 1, but the command has seed = 7. Use another --run_name" in seed
    loading.check_same_hyperparameters(
        Path("run"), before, recipe(tmp_path, eval_steps=7, data_files=["b"])
    )


@pytest.mark.parametrize("name", ["seed", "gone"])
def test_run_of_another_version_is_refused(tmp_path, name):
    """A key of the recipe is missing in the run, or the other way round."""
    before = {**keys.hyperparameters(recipe(tmp_path)), "gone": False}
    if name == "seed":
        del before["seed"], before["gone"]
    with pytest.raises(
        BadInput, match=rf"run was written by another version .* \({name}\)\. .* another --run_name"
    ):
        loading.check_same_hyperparameters(Path("run"), before, recipe(tmp_path))


# What a run reads.


def test_each_source_of_a_mixture_has_its_own_names_and_weight_and_the_recipes_rules(tmp_path):
    names = {"dataset_config_name": "c", "dataset_revision": "r", "validation_files": ["v"]}
    rules = {
        "text_column": "t",
        "validation_fraction": 0.3,
        "validation_tokens": 5,
        "limit_tokens": 6,
    }
    rules["shard_tokens"] = 77
    given = (HUB, OWN, {"weight": 0.5, "data_dir": "d"})
    data = recipe(tmp_path, **mixture(*given, **names, **rules)).data
    wanted = [dict.fromkeys(keys.SOURCE_NAMES) | rules | one for one in given]
    assert [source.weight for source in data.resolved_sources] == [
        one.pop("weight") for one in wanted
    ]
    assert [
        {name: vars(source)[name] for name in wanted[0]} for source in data.resolved_sources
    ] == wanted


def test_what_others_see_of_a_recipe_has_no_secret_of_any_source_and_survives(tmp_path):
    secret, prompt = "https://me:pw@h/a.jsonl?v=1&token=T", "https://me:pw@h/?go=on"
    files = {"data_files": ["b.jsonl", secret], "validation_files": [secret]}
    for changes in (mixture(OWN | files), files):
        given = recipe(tmp_path, **changes, sample_prompts=[prompt])
        public = keys.redacted(given)
        assert public.keys() == keys.FIELDS.keys() and public["sample_prompts"] == [prompt]
        copy = loading.load_recipe(write(tmp_path, keys.as_yaml(given), "copy.yaml"))
        assert keys.redacted(copy) == public
        for source in (public["sources"] or [public])[:1]:
            assert source["data_files"] == ["b.jsonl", redact_url(secret)] and secret != redact_url(
                secret
            )
            assert source["validation_files"] == [redact_url(secret)]
        assert (given.data.data_files or given.data.sources[0]["data_files"]) == files["data_files"]


def test_yaml_of_a_url_identifies_the_same_file(tmp_path):
    """Also if the URL ends in punctuation, which would not be a part of a URL in a sentence."""
    url = "https://h/a.jsonl?v=1&token=T."
    original = recipe(tmp_path, data_files=[url])
    copy = loading.load_recipe(write(tmp_path, keys.as_yaml(original), "copy.yaml"))
    assert copy.data.data_files == [redact_url(url)]


def test_yaml_keeps_a_path_that_looks_like_a_query(tmp_path):
    path = str(tmp_path / "a?token=1.jsonl")
    original = recipe(tmp_path, data_files=[path])
    copy = loading.load_recipe(write(tmp_path, keys.as_yaml(original), "copy.yaml"))
    assert copy.data.data_files == [path]


def test_a_model_or_run_that_is_begun_from_brings_shape_and_tokenizer_along(tmp_path):
    shapeless = dict.fromkeys(("tokenizer", *keys.MODEL_KEYS))
    found = recipe(tmp_path, **shapeless, init_from="owner/name")
    assert found.data.tokenizer == "owner/name" and found.model.n_layer is None
    (tmp_path / "runs" / "r" / "model").mkdir(parents=True)
    found = recipe(tmp_path, **shapeless, init_from=str(tmp_path / "runs" / "r"))
    assert found.model.init_from == found.data.tokenizer == str(tmp_path / "runs" / "r" / "model")
    assert loading.load_recipe(line(tmp_path, "architecture", "null")).model.architecture == "gpt2"


def test_what_a_llama_type_model_lacks_is_named_with_usual_values_that_work(tmp_path):
    messages = refused(write(tmp_path, architecture="llama"))
    assert len(messages) == 4
    flags = dict(
        re.search(r"Use, for example, --(\w+) (\S+)$", message).groups() for message in messages
    )
    usual = {"num_key_value_heads": "2", "intermediate_size": "128", "tie_word_embeddings": "true"}
    assert flags == usual | {"rope_theta": "10000.0"}
    assert (
        loading.load_recipe(write(tmp_path, architecture="llama"), flags).model.intermediate_size
        == 128
    )


def test_flag_architecture_names_every_missing_key(tmp_path):
    messages = refused(write(tmp_path), {"architecture": "llama"})
    assert [re.search(r"also needs (\w+)\.", message)[1] for message in messages] == [
        "num_key_value_heads",
        "intermediate_size",
        "tie_word_embeddings",
        "rope_theta",
    ]
    assert all(message.startswith("--architecture llama: ") for message in messages)


def test_conflicting_source_flags_are_not_blamed_on_the_file(tmp_path):
    (message,) = refused(write(tmp_path), {"data_dir": "d", "dataset_name": "owner/name"})
    assert message.startswith("--data_dir and --dataset_name are different data sources")


def test_a_typo_and_help_are_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for words, status, said in (
        (
            "train.py --learning_rat 1",
            2,
            "--learning_rat: no such flag; did you mean --learning_rate?",
        ),
        ("train.py --help", 0, "--learning_rate"),
    ):
        command = [sys.executable, *words.split()]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert (
            done.returncode == status
            and said in done.stdout + done.stderr
            and "Traceback" not in done.stderr
        )
