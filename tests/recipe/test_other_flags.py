"""Flags of other trainers: each error suggests a flag that exists in the same script."""

import re

import pytest
from conftest import ROOT

import check_setup
import generate
import prepare_data
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, keys, other_flags

TRAIN_FLAGS = {*keys.FIELDS, "recipe", "size", *command_line.TRAIN_MODES}
# Flags of the other scripts for which there are suggestions.
SCRIPT_FLAGS = {"nanoGPT's sample.py": {"prompt", "model"}, "other trainers": {"card"}}
# Words with underscores in the advice that are not our flags.
OTHER_WORDS = {
    "accelerate_configs",
    "check_setup",
    "config_file",
    "dry_run",
    "dynamo_backend",
    "eval_tasks",
    "fsdp2_x8",
    "gelu_new",
    "global_batch_size",
    "mixed_precision",
    "prepare_data",
    "zero1_x8",
    "zero2_x8",
    "zero3_x8",
}


def flag_cases(without=None):
    """Return a test case for each row of flags, except the rows of one trainer."""
    cases = []
    for trainer, rows in other_flags.TRAINERS.items():
        if trainer == without:
            continue
        for row in rows:
            cases.append(pytest.param(trainer, row, id=f"{trainer}: {row.names}"))
    return cases


def errors_of(parse, *words):
    """Return the lines of the error that these words of a command line cause."""
    with pytest.raises(BadInput) as caught:
        parse(list(words))
    return caught.value.lines


@pytest.mark.parametrize(
    ("words", "trainer", "fix"),
    [
        ("--batch_size 8", "nanoGPT", "Use --per_device_train_batch_size. It is an upper limit"),
        ("--batch_size 8", "nanoGPT", "The batch of an update is tokens_per_step"),
        ("--activation_function relu", "other trainers", "docs/extend.md shows how to train with"),
        ("--wd 0.1", "other trainers", "Use --weight_decay"),
        ("--checkpoint a", "other trainers", "Use --resume_from_checkpoint"),
        ("--config a.yaml", "other trainers", "Use --recipe"),
        ("--gpus 8", "other trainers", "torchrun"),
        ("--max-iters=5", "nanoGPT", "Use --max_steps"),
        ("--dropout 0.1", "nanoGPT", "Use --resid_pdrop, --embd_pdrop and --attn_pdrop"),
        ("-t 1024", "llm.c", "Use --sequence_length"),
        ("--epochs 3", "other trainers", "Use --num_train_epochs"),
        ("--train.max_norm 1", "litgpt", "Use --max_grad_norm"),
        ("--device-batch-size=8", "nanochat", "Use --per_device_train_batch_size."),
        ("--dataloader_num_workers 4", "Transformers", "no DataLoader"),
        ("--gpu a6000", "other trainers", "chooses the settings"),
        ("--warmup_ratio 0.1", "Transformers", "Use --warmup_steps. It is a number of steps"),
        ("--warmup_proportion 0.1", "other trainers", "Use --warmup_steps. It is a "),
        ("--do_eval", "Transformers", "Use --eval_only. A run also validates"),
    ],
)
def test_flag_of_another_trainer_is_answered(words, trainer, fix):
    (message,) = errors_of(command_line.parse_training, *words.split())

    flag = re.split("[ =]", words)[0]
    name = flag.lstrip("-").replace("-", "_")
    assert re.match(rf"--?{re.escape(name)} is a flag of {re.escape(trainer)}\. ", message)
    assert fix in message


def test_key_of_another_trainer_is_answered(tmp_path):
    path = tmp_path / "mine.yaml"
    recipe = (ROOT / "recipes/gpt2_124m.yaml").read_text()
    path.write_text(f"{recipe}block_size: 512\nmodel_size: d12\n")

    block_size, model_size = errors_of(command_line.parse_training, "--recipe", str(path))

    assert block_size == f"{path}: block_size is a flag of nanoGPT. Use sequence_length"
    assert model_size.startswith(f"{path}: model_size: no such key")  # --size is only a flag


@pytest.mark.parametrize(
    ("parse", "words", "start"),
    [
        (check_setup.parse, "--gpu a100", "--gpu is a flag of other trainers. Use --card"),
        (check_setup.parse, "--steps 100", "--steps is a flag of other trainers. Use --max_steps"),
        (check_setup.parse, "--batch_size 8", "--batch_size: no such flag"),
        (
            generate.parse,
            "--model a --start x",
            "--start is a flag of nanoGPT's sample.py. Use --prompt",
        ),
        (generate.parse, "--out_dir a", "--out_dir is a flag of nanoGPT's sample.py. Use --model"),
        (generate.parse, "--model a --num_workers 4", "--num_workers: no such flag"),
    ],
)
def test_script_suggests_only_its_own_flags(parse, words, start):
    (message,) = errors_of(parse, *words.split())

    assert message.startswith(start)


def test_prepare_data_suggests_its_own_flag(capsys):
    status = prepare_data.main(["--dataset", "shakespeare"])

    assert status == 2
    expected = "error: --dataset is a flag of nanoGPT. Use --data_dir"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(("trainer", "row"), flag_cases())
def test_suggested_flags_exist(trainer, row):
    known_flags = TRAIN_FLAGS | SCRIPT_FLAGS.get(trainer, set())
    mentioned = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", row.advice))

    assert set(row.replacements.split()) <= known_flags
    assert mentioned <= TRAIN_FLAGS | OTHER_WORDS
    assert row.replacements or row.advice
    assert not row.advice.endswith(".")


@pytest.mark.parametrize(("trainer", "row"), flag_cases(without="nanoGPT's sample.py"))
def test_flag_of_another_trainer_is_not_ours(trainer, row):
    """A flag of train.py would never be looked up among those of other trainers."""
    assert not set(row.names.split()) & TRAIN_FLAGS


def test_names_are_unique_within_train_py():
    names = []
    for rows in other_flags.TRAINERS.values():
        for row in rows:
            if set(row.replacements.split()) <= TRAIN_FLAGS:
                names += row.names.split()

    assert sorted(set(names)) == sorted(names)
