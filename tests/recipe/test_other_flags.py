"""Flags of other trainers: the answers name flags that exist, and every script gets answers for its own flags only."""

import re

import pytest
from conftest import ROOT

import check_setup
import generate
import prepare_data
from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import command_line, keys, other_flags

ROWS = [(trainer, row) for trainer, rows in other_flags.TRAINERS.items() for row in rows]
# Flags of train.py that are not recipe keys, and of the scripts for which there are answers.
MORE_FLAGS = {"recipe", "size", *command_line.TRAIN_MODES}
SCRIPT_FLAGS = {"nanoGPT's sample.py": {"prompt", "model"}, "other trainers": {"card"}}
# Words with underscores in an advice that are not flags of ours.
OTHER_WORDS = {
    "accelerate_configs",
    "global_batch_size",
    "config_file",
    "mixed_precision",
    "dynamo_backend",
}
OTHER_WORDS |= {"zero1_x8", "zero2_x8", "zero3_x8", "fsdp2_x8"}


def messages_of(parse, *words):
    with pytest.raises(BadInput) as caught:
        parse(list(words))
    return caught.value.lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--batch_size 8",
            "--batch_size is a flag of nanoGPT. Use --per_device_train_batch_size. It is an upper limit, or auto",
        ),
        ("--max-iters=5", "--max_iters is a flag of nanoGPT. Use --max_steps"),
        (
            "--dropout 0.1",
            "--dropout is a flag of nanoGPT. Use --resid_pdrop, --embd_pdrop and --attn_pdrop",
        ),
        ("-t 1024", "-t is a flag of llm.c. Use --sequence_length"),
        (
            "--num_train_epochs 3",
            "--num_train_epochs is a flag of Transformers. Use --max_steps. An epoch has ",
        ),
        ("--train.max_norm 1", "--train.max_norm is a flag of litgpt. Use --max_grad_norm"),
        (
            "--device-batch-size=8",
            "--device_batch_size is a flag of nanochat. Use --per_device_train_batch_size.",
        ),
        (
            "--dataloader_num_workers 4",
            "--dataloader_num_workers is a flag of Transformers. There is no DataLoader",
        ),
        ("--gpu a6000", "--gpu is a flag of other trainers. python train.py chooses the settings"),
        (
            "--warmup_ratio 0.1",
            "--warmup_ratio is a flag of Transformers. Use --warmup_steps. It is a number of steps: the ratio times ",
        ),
        (
            "--warmup_proportion 0.1",
            "--warmup_proportion is a flag of other trainers. Use --warmup_steps. It is a ",
        ),
        ("--do_eval", "--do_eval is a flag of Transformers. Use --eval_only. A run also validates"),
    ],
)
def test_flag_of_another_trainer_is_answered(words, message):
    (line,) = messages_of(command_line.parse_training, *words.split())
    assert line.startswith(message)


def test_key_of_another_trainer_is_answered_in_recipes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        (ROOT / "recipes/gpt2_124m.yaml").read_text() + "block_size: 512\nmodel_size: d12\n"
    )
    block_size, model_size = messages_of(command_line.parse_training, "--recipe", str(path))
    assert block_size == f"{path}: block_size is a flag of nanoGPT. Use sequence_length"
    assert model_size.startswith(f"{path}: model_size: no such key")  # --size is only a flag


@pytest.mark.parametrize(
    ("parse", "words", "message"),
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
        (
            prepare_data.main,
            "--dataset shakespeare",
            "--dataset is a flag of nanoGPT. Use --data_dir",
        ),
    ],
)
def test_scripts_suggest_only_flags_that_they_have(parse, words, message, capsys):
    if parse is prepare_data.main:
        assert parse(words.split()) == 2
        line = capsys.readouterr().err.removeprefix("error: ")
    else:
        (line,) = messages_of(parse, *words.split())
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("trainer", "row"), ROWS, ids=[f"{trainer}: {row.names}" for trainer, row in ROWS]
)
def test_suggested_flags_exist_and_the_others_do_not(trainer, row):
    ours = {*keys.FIELDS, *MORE_FLAGS}
    assert set(row.replacements.split()) <= ours | SCRIPT_FLAGS.get(trainer, set())
    assert row.replacements or row.advice
    mentioned = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", row.advice))
    assert mentioned <= ours | OTHER_WORDS
    assert not row.advice.endswith(".")
    if trainer != "nanoGPT's sample.py":
        assert not set(row.names.split()) & ours  # train.py would never look them up


def test_names_are_unique_within_a_script():
    train_flags = {*keys.FIELDS, *MORE_FLAGS}
    names = []
    for _, row in ROWS:
        if set(row.replacements.split()) <= train_flags:
            names += row.names.split()
    assert sorted(set(names)) == sorted(names)
