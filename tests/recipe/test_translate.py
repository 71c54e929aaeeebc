"""Other trainers' commands in our words: each is parsed by the real parser, and its plan compared with numbers worked out
by hand from the trainer's own defaults and configuration files."""

import io
import itertools
import re
import shlex

import pytest
from conftest import ROOT

from pretrain.base.errors import BadInput
from pretrain.recipe import keys, reading, translate
from pretrain.recipe.plan import make_plan

LLM_C = (
    'mpirun -np 8 ./train_gpt2cu -i "dev/data/fineweb10B/fineweb_train_*.bin" -j "dev/data/fineweb10B/fineweb_val_*.bin" '
    '-o log124M -e "d12" -b 64 -t 1024 -d 524288 -r 1 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -v 250 -s 20000 -h 1'
)
BLOCK = """{
    "enable_amp": True, "amp_dtype": "fp16", "max_length": 768, "batch_size": 8, "eval_steps": 1000,
    "eval_iters": 50, "logging_steps": 50,  # conservative
    "dataloader_num_workers": 2, "dataloader_pin_memory": True, "dataloader_persistent_workers": True,
}"""
CHARACTERS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64"
    " --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
CLM = (
    "python run_clm.py --model_name_or_path openai-community/gpt2 --dataset_name wikitext --dataset_config_name "
    "wikitext-2-raw-v1 --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --do_train --output_dir /tmp/clm"
)
SCRATCH = "python run_clm.py --model_type gpt2 --tokenizer_name gpt2 --train_file my.txt --max_steps 5000 "
A, C = "accelerate launch --config_file accelerate_configs/", "python train.py"
GPT2 = {"tokens_per_step": 524288, "learning_rate": 6e-4, "warmup_steps": 715, "eval_steps": 250}
GPT2 |= {"sequence_length": 1024}
SHAKESPEARE = {"dataset_name": None, "dataset_config_name": None, "validation_fraction": 0.1}
NANOGPT = GPT2 | {"max_steps": 600000, "warmup_steps": 2000, "eval_steps": 1000, "min_lr_ratio": 0.1}
NANOGPT |= {"logging_steps": 10, "dataset_name": "Skylion007/openwebtext"}
# A command; what ours begins with; values of our keys; a plan: processes, a card's micro-batch, micro-batches a step.
COMMANDS = [
    # What the sources print.
    ("python train_optimized.py --gpu auto --steps 100", C, GPT2 | {"max_steps": 100, "warmup_steps": 25}, (1, 64, 8)),
    ("torchrun --nproc_per_node=2 train_optimized.py --gpu rtx_a6000", f"{A}a6000_x2.yaml", GPT2, (2, 64, 4)),
    ("python optimization_setup.py", "python check_setup.py", {}, (1, 64, 8)),
    (
        LLM_C,
        "torchrun --standalone --nproc_per_node 8 train.py",
        GPT2
        | {"warmup_steps": 700, "min_lr_ratio": 0.0, "weight_decay": 0.1, "save_steps": 5000, "sample_steps": 20000}
        | {"data_dir": "dev/data/fineweb10B", "output_dir": "log124M", "tasks": ["hellaswag"], "task_steps": 250}
        | {"gradient_checkpointing": "mlp", "shard_optimizer": True, "eval_tokens": 20 * 64 * 1024 * 8}
        | {"per_device_train_batch_size": 64, "max_steps": 18865},
        (8, 64, 1),
    ),
    ("uv run python prepare.py", "python prepare_data.py", {"validation_tokens": 4434897}, (1, 64, 8)),
    ("make ddp-train NGPUS=8", "torchrun --standalone --nproc_per_node 8 train.py", GPT2, (8, 64, 1)),
    (
        BLOCK,
        f"{A}conservative.yaml --mixed_precision fp16 train.py",
        {"sequence_length": 768, "per_device_train_batch_size": 8, "eval_steps": 1000, "logging_steps": 50}
        | {"eval_tokens": 50 * 8 * 768, "tokens_per_step": 491520},
        (1, 8, 80),
    ),
    # nanoGPT's README and configurations.
    (
        "python train.py config/train_gpt2.py --batch_size=32",
        C,
        NANOGPT
        | {"tokens_per_step": 40 * 32 * 1024, "eval_tokens": 200 * 32 * 1024, "per_device_train_batch_size": 32},
        (1, 32, 40),
    ),
    (
        "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=1234 train.py "
        "config/train_gpt2.py --compile=False --dtype=float16",
        f"{A}conservative.yaml --multi_gpu --num_processes 8 --mixed_precision fp16 train.py",
        NANOGPT | {"tokens_per_step": 491520},
        (8, 12, 5),
    ),
    (
        f"python train.py {CHARACTERS}",
        f"{A}cpu.yaml",
        {"tokens_per_step": 768, "max_steps": 2000, "n_embd": 128, "embd_pdrop": 0.0, "eval_tokens": 20 * 12 * 64}
        | {"eval_steps": 250, "logging_steps": 1, "learning_rate": 1e-3, "min_lr_ratio": 0.1},
        (1, 12, 1),
    ),
    (
        "python train.py config/finetune_shakespeare.py",
        C,
        {"init_from": "openai-community/gpt2", "tokens_per_step": 32768, "max_steps": 20, "learning_rate": 3e-5}
        | {"lr_scheduler_type": "constant", "eval_steps": 5},
        (1, 1, 32),
    ),
    ("python train.py --dataset=shakespeare_char", C, SHAKESPEARE | {"tokenizer": "characters"}, (1, 16, 1)),
    # run_clm.py.
    (
        CLM,
        C,
        {"init_from": "openai-community/gpt2", "dataset_name": "wikitext", "dataset_config_name": "wikitext-2-raw-v1"}
        | {"tokens_per_step": 8 * 1024, "learning_rate": 5e-5, "lr_scheduler_type": "linear", "min_lr_ratio": 0.0}
        | {"weight_decay": 0.0, "adam_beta2": 0.999, "warmup_steps": 0, "save_steps": 500},
        (1, 8, 1),
    ),
    (
        f"{SCRATCH} --config_name gpt2-medium --block_size 512 --optim adamw_bnb_8bit "
        "--warmup_ratio 0.1 --gradient_accumulation_steps 4 --lr_scheduler_type cosine",
        C,
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "sequence_length": 512, "optimizer": "adamw_8bit"}
        | {"data_files": ["my.txt"], "max_steps": 5000, "warmup_steps": 500, "tokens_per_step": 4 * 8 * 512}
        | {"min_lr_ratio": 0.0, "lr_scheduler_type": "cosine"},
        (1, 8, 4),
    ),
    # Others, and how people type.
    (
        "$ CUDA_VISIBLE_DEVICES=0 nohup python3 train.py --gpu 'NVIDIA GeForce RTX 4090' --lr 1e-3 > log.txt &",
        f"CUDA_VISIBLE_DEVICES=0 {A}rtx4090.yaml train.py",
        {"learning_rate": 1e-3},
        (1, 64, 8),
    ),
    ("cd llm.c && mpirun -np 4 \\\n ./train_gpt2cu -b 32 -z 3", f"{A}zero3_x8.yaml", {"warmup_steps": 0}, (4, 32, 1)),
]


@pytest.mark.parametrize(("theirs", "begin", "wanted", "plan"), COMMANDS)
def test_a_foreign_command_is_one_of_ours_with_the_same_numbers(theirs, begin, wanted, plan):
    command, notes = translate.translate(theirs)
    assert command.startswith(begin) and not [note for note in notes if "not known here" in note]
    _, script, rest = re.split(r"(\w+\.py)", command, maxsplit=1)
    if script == "check_setup.py":
        return
    argv, (processes, micro_batch, accumulation) = shlex.split(rest), plan
    read = reading.load_recipe(ROOT / argv[1]) if script == "prepare_data.py" else reading.parse_training(argv)[0]
    found = keys.flat(read)
    assert {name: found[name] for name in wanted} == wanted
    assert make_plan(read, processes, ceiling=micro_batch).gradient_accumulation_steps == accumulation


def test_each_word_without_a_counterpart_has_a_line_with_the_reason():
    _, notes = translate.translate(BLOCK)
    assert [note.partition(":")[0] for note in notes] == [
        "--dataloader_num_workers 2",
        "--dataloader_pin_memory True",
        "--dataloader_persistent_workers True",
    ]
    assert all("no DataLoader" in note for note in notes)
    _, notes = translate.translate("python x.py --epochs 3 --lr 1e-3 --mystery 5 --gpu rtx_4070")
    assert any(note.startswith("max_steps = 3 * train_tokens / tokens_per_step: set it yourself") for note in notes)
    assert "--mystery 5: not known here; left out" in notes
    assert translate.translate("./train_gpt2cu -b 4 -h 0")[0].endswith("--task_steps 0")
    assert translate.translate("train.py config/x.py --lr 1")[1] == [
        "config/x.py: not known here; give its settings as flags"
    ]
    assert "rtx_4070: not a known card; of its kind are known: rtx4090, rtx4080, rtx4060, rtx4060ti" in notes


def test_what_is_not_a_trainers_command_is_refused():
    for text in ("foo", "ls -l", "", "python x.py", "'"):
        with pytest.raises(BadInput):
            translate.translate(text)


def test_the_mode_prints_the_command_what_the_parser_refuses_of_it_and_reads_standard_input(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        reading.parse_training(["--translate", "train_optimized.py", "--gpu", "a30", "--n_head", "7"])
    out = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and out[0].startswith(f"{A}a30.yaml train.py --recipe recipes/gpt2_124m.yaml")
    assert out[1].startswith("it is refused: ") and "n_head" in out[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(BLOCK))
    with pytest.raises(SystemExit):
        reading.parse_training(["--translate", "-"])
    assert "--eval_tokens 307200" in capsys.readouterr().out


def test_every_rule_leads_to_keys_of_ours_and_no_other_scripts_flag_is_one():
    trainers = translate.book()["trainers"]
    of_scripts = "size eval_only model prompt num_samples max_new_tokens temperature top_k"
    ours = {*keys.FIELDS, *of_scripts.split()}
    for trainer, rows in trainers.items():
        for name in ", ".join(rows).split(", "):
            rule = translate.find(f"--{name}", [trainer])
            targets = itertools.chain.from_iterable(rule.cases.values())
            assert not [name for name in targets if not name.startswith("launch.") and name not in ours], rule
            assert trainer != "other scripts" or name not in keys.FIELDS
    for row in translate.book()["programs"]:
        assert (ROOT / row.get("script", "train.py")).is_file() and row["trainer"] in trainers
        for recipe in (row.get("recipe", "quickstart"), *row.get("fits", {}).values()):
            assert (ROOT / "recipes" / f"{recipe}.yaml").is_file()
