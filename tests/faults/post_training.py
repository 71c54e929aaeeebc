"""Post-training from files that are odd: settings, prompts, and rewards that raise, exit, recurse and print escapes.

Settings are accepted, or refused by name; the file of prompts is the one that was named; a reward's fault counts 0.
"""

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage
import data_files
import numpy
import outside_words
import post_child
import pyarrow.ipc
import pyarrow.parquet
import recipe_files

OF_TRL = ("num_generations", "max_completion_length")
GOOD = '{"prompt": "well"}\n{"prompt": "ill"}\n'
PROMPTS: dict[str, bytes | str] = {
    "empty": "",
    "blank lines": "\n\n\n",
    "cut": GOOD[:25],
    "no column": '{"text": "a"}\n',
    "null": '{"prompt": null}\n',
    "a number": '{"prompt": 3}\n',
    "a list of texts": '{"prompt": ["a", "b"]}\n',
    "an empty list": '{"prompt": [[]]}\n',
    "a message without content": '{"prompt": [{"role": "user"}]}\n',
    "content is null": '{"prompt": [{"role": "user", "content": null}]}\n',
    "messages, then a text": '{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": "a"}\n',
    "an empty text": '{"prompt": ""}\n',
    "a list": "[1, 2]\n",
    "deep": "[" * 100_000,
    "NULs": "\0" * 500,
    "UTF-16": GOOD.encode("utf-16"),
    "not UTF-8": b'{"prompt": "\xff"}\n',
    "half a surrogate": '{"prompt": "\\ud800"}\n',
    "a long prompt": '{"prompt": "' + "a " * 5000 + '"}\n',
    "a number of 6,000 digits": '{"prompt": ' + "9" * 6000 + "}\n",
}
NAMES = (
    "p[1].jsonl",
    "q*.jsonl",
    "r?.jsonl",
    "s{a,b}.jsonl",
    "my prompts.jsonl",
    "-x.jsonl",
    "a::b.jsonl",
    "#?token=x.jsonl",
    "%d{x}.jsonl",
)
REWARDS = {  # the body of a reward for the prompt "ill"; "well" is worth 1
    "raises": "raise ValueError('\\x1b[2J')",
    "exits": "import sys; sys.exit(3)",
    "recurses": "return cat(prompt, completion)",
    "prints": "print('\\x1b[2J'); return 0.0",
    "writes": "import sys; sys.stderr.write('\\x1b[2J'); return 0.0",
    "warns": "import warnings; warnings.warn('\\x1b[2J'); return 0.0",
    "ends a generator": "raise StopIteration",
    "returns nan": "return float('nan')",
    "returns nothing": "return None",
    "returns text": "return 'much'",
    "returns a list": "return [1.0]",
    "returns too much": "return 10 ** 400",
    "has a message that raises": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "needs memory": "return float(len(bytearray(1 << 60)))",
}
FILES = {
    "a syntax error": "def cat(:\n",
    "an import that is missing": "import nothing_of_that_name\n",
    "no function": "dog = 1\n",
    "a number": "cat = 3\n",
    "an exit": "import sys\nsys.exit(0)\n",
    "a loop of itself": "def f(): return f()\nf()\n",
    "binary": "\0\1",
    "an exception with escapes": "raise ValueError('\\x1b[2J')\n",
}

# Which of post_child.VALUES a setting must not take, by its kind and where its border lies; any other it takes.
LONG, BIG = "x" * 5000, str(10**30)
NO_NUMBER = {"''", "[]", "null", "true", BIG, "1e400", ".nan", "-.inf", LONG}
NO_INTEGER = NO_NUMBER | {"-0.0", "1.5"}
NO_TEXT = {"0", "-0.0", "1", "-1", "2", "1.5", "''", "[]", "null", "true", BIG, ".nan", "-.inf", LONG}
REFUSED = {
    **dict.fromkeys(
        ("held_out_steps", "gradient_accumulation_steps", "max_completion_length"), NO_INTEGER | {"0", "-1"}
    ),
    "per_device_train_batch_size": NO_INTEGER | {"0", "-1"},
    "num_generations": NO_INTEGER | {"0", "1", "-1"},
    **dict.fromkeys(("seed", "max_steps", "dataloader_num_workers", "per_device_eval_batch_size"), NO_INTEGER),
    **dict.fromkeys(("data_seed", "save_total_limit", "eval_accumulation_steps"), NO_INTEGER - {"null"}),
    **dict.fromkeys(("learning_rate", "temperature"), NO_NUMBER | {"0", "-0.0", "-1"}),
    **dict.fromkeys(("beta", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"), NO_NUMBER),
    **dict.fromkeys(("num_train_epochs", "warmup_steps", "logging_steps", "save_steps", "eval_delay"), NO_NUMBER),
    **dict.fromkeys(("eval_steps", "neftune_noise_alpha"), NO_NUMBER - {"null"}),
    **dict.fromkeys(("model", "reward", "prompts", "held_out", "output_dir"), NO_TEXT),
    **dict.fromkeys(("stop", "run_name", "hub_model_id", "resume_from_checkpoint"), NO_TEXT - {"null", "''"}),
    **dict.fromkeys(("bf16", "fp16", "push_to_hub", "save_only_model"), {*post_child.VALUES} - {"true"}),
}
MESSAGE = {"role": "user", "content": "well"}
SHAPES = {  # a column of prompts, and whether it is one
    "an empty text": (["", "well"], False),
    "empty texts only": (["", ""], False),
    "nothing but spaces": (["  ", "well"], True),
    "null beside a text": ([None, "well"], False),
    "nulls": ([None, None], False),
    "numbers": ([1, 2], False),
    "numbers with a point": ([0.5, -0.0], False),
    "truth": ([True, False], False),
    "an empty list of messages": ([[], [MESSAGE]], False),
    "empty lists": ([[], []], False),
    "texts in a list": ([["a"], ["b"]], False),
    "a mapping": ([MESSAGE, MESSAGE], False),
    "no role": ([[{"content": "a"}]], False),
    "role is null": ([[{"role": None, "content": "a"}]], False),
    "role is a number": ([[{"role": 1, "content": "a"}]], False),
    "role is odd": ([[{"role": "no such", "content": "a"}]], None),
    "content is null": ([[{"role": "user", "content": None}]], False),
    "content is a list": ([[{"role": "user", "content": ["a"]}]], False),
    "content is a number": ([[{"role": "user", "content": 1}]], False),
    "lists in lists": ([[[MESSAGE]]], False),
    "content is empty": ([[{"role": "user", "content": ""}]], True),
    "only the assistant speaks": ([[{"role": "assistant", "content": "a"}]], True),
    "a message with more": ([[MESSAGE | {"name": "x"}]], True),
    "many messages": ([[MESSAGE] * 3], True),
    "no rows": ([], False),
    "what a terminal obeys": (["\x1b[2J\x07", "well"], None),
}
STATES = {  # of the folder out/, which output_dir names, and whether a model may be written there
    "absent": (lambda out: None, True),
    "empty": (lambda out: out.mkdir(), True),
    "a file": (lambda out: out.write_text("mine"), False),
    "a link to a folder": (lambda out: _beside(out, out.symlink_to), True),
    "a link to a file": (lambda out: out.symlink_to("reward.py"), False),
    "a link to nothing": (lambda out: out.symlink_to("nothing"), None),
    "a link to itself": (lambda out: out.symlink_to(out.name), False),
    "a finished model": (lambda out: _within(out, "model/model.safetensors"), False),
    "an empty model/": (lambda out: (out / "model").mkdir(parents=True), False),
    "half of a model": (lambda out: _within(out, "model/config.json"), False),
    "model is a file": (lambda out: _within(out, "model"), False),
    "model is a link to nothing": (lambda out: (out.mkdir(), (out / "model").symlink_to("nothing")), False),
    "model is a link to a folder": (lambda out: (out.mkdir(), _beside(out, (out / "model").symlink_to)), False),
    "files of another": (lambda out: _within(out, "notes.txt", "model.safetensors", ".hidden", "data/a.txt"), True),
    "metrics.jsonl is a folder": (lambda out: (out / "metrics.jsonl" / "a").mkdir(parents=True), None),
    "reward.png is a link": (lambda out: (out.mkdir(), (out / "reward.png").symlink_to("../reward.py")), None),
    "a checkpoint of TRL": (lambda out: _within(out, "checkpoint-2/trainer_state.json"), True),
}
OURS = ("metrics.jsonl", "reward.png")  # of a run that wrote no model: nobody's result
# Bytes that are typed into a chat, and whether they are answered: a message that is not must change no other's answer.
GOOD_MESSAGE, OTHER = b"hello there", b"what 1 2"
BAD_MESSAGES = {
    "not UTF-8": b"\xff\xfe",
    "half of a letter": b"a \xc3",
    "a surrogate": b"\xed\xa0\x80",
    "latin-1": "gr\u00fc\u00df".encode("latin-1"),
    "empty": b"",
    "spaces": b" \t ",
    "not in the vocabulary": "\u4e2d".encode(),
    "a NUL": b"a\0b",
}
TOO_LONG = b"x" * 5000
LETTERS, PADDING = "abcdefghijklmnopqrstuvwxyz 0123456789+=\n?", 5
WORTH = """def cat(prompt, completion):
    return float(sum(map(ord, prompt + completion)) % 97)
"""
NEVER = "def cat(prompt, completion):\n    return prompt.no_such\n"
# Samples that continue a prompt as Transformers' own model does, and chats: flags of generate.py.
CONTINUED: dict[str, dict] = {
    "the likeliest": {"prompt": "the cat", "temperature": 0},
    "drawn": {"prompt": "ab"},
    "beyond the context": {"prompt": "12", "temperature": 0, "max_new_tokens": 300},
    "drawn beyond the context": {"prompt": "12", "max_new_tokens": 210, "seed": 2**63 - 1},
    "a prompt longer than the context": {"prompt": "cat 1 " * 40, "temperature": 0, "max_new_tokens": 9},
    "three samples": {"prompt": "z", "num_samples": 3, "seed": 0, "max_new_tokens": 9},
    "no prompt": {"prompt": "", "max_new_tokens": 9},
    "a line break in the prompt": {"prompt": "a\nb\n", "max_new_tokens": 9},
    "one token": {"prompt": "a", "max_new_tokens": 1, "num_samples": 2},
    "top_k 1": {"prompt": "a", "top_k": 1, "max_new_tokens": 20},
    "top_k 0": {"prompt": "a", "top_k": 0, "temperature": 3.0, "max_new_tokens": 20},
    "top_k 3": {"prompt": "a", "top_k": 3, "temperature": 3.0, "max_new_tokens": 20},
    "top_k above the vocabulary": {"prompt": "a", "top_k": 10**6, "max_new_tokens": 20},
    "top_p": {"prompt": "a", "top_p": 0.3, "temperature": 2.0, "max_new_tokens": 20},
    "hot": {"prompt": "a", "temperature": 100.0, "max_new_tokens": 20},
}
TURNS = ["hello there", "what 1 2", "and 3", "cat", "a longer one of some words", "5+5", "why?", "x" * 9]
CHATS: dict[str, dict] = {
    "the likeliest": {"messages": TURNS[:3], "temperature": 0, "max_new_tokens": 6},
    "drawn": {"messages": TURNS[:4], "max_new_tokens": 5, "seed": 3},
    "the oldest are forgotten": {"messages": TURNS, "temperature": 0, "max_new_tokens": 12},
    "answers of half of the context": {"messages": TURNS[:3], "temperature": 0, "max_new_tokens": 500},
    "one fits exactly": {"messages": ["x" * (96 - 42 - n) for n in (0, 1, 2)], "temperature": 0, "max_new_tokens": 20},
    "nobody writes": {"messages": []},
    "drawn, to the end of the context": {"messages": TURNS, "max_new_tokens": 500, "top_k": 30},
    "drawn, and too long between others": {"messages": ["hello", "y" * 300, "hello"], "max_new_tokens": 6},
    "too long between others": {"messages": ["hello", "y" * 300, "hello"], "temperature": 0, "max_new_tokens": 6},
}
# (script, flags, what the line names): exit status 2, nothing printed, nothing made.
SAMPLE, EXPORT = ("generate.py", "--model", "MODEL"), ("export_model.py", "MODEL", "--out", "out")
REFUSALS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    *(
        ((*SAMPLE, f"--{key}", value), (f"--{key}", value))
        for key, values in {
            "num_samples": "0 -1 x 1.5",
            "max_new_tokens": "0 -1 x 1e3",
            "temperature": "-0.1 100.1 nan inf x",
            "top_k": "-1 x 2.5",
            "top_p": "0 -1 1.1 nan inf x",
            "seed": f"-1 {2**63} x",
        }.items()
        for value in values.split()
    ),
    ((*SAMPLE, "--top_k", "-1", "--seed", "-1"), ("--top_k -1", "--seed -1")),
    ((*SAMPLE, "--chat"), ("--chat", "no chat template")),
    ((*SAMPLE, "--chat", "--prompt", "a"), ("--prompt a",)),
    ((*SAMPLE, "--chat", "--num_samples", "2"), ("--num_samples 2",)),
    ((*SAMPLE, "--prompt", "\u4e2d"), ("\u4e2d",)),
    ((*SAMPLE, "--promt", "a"), ("--promt", "--prompt")),
    ((*SAMPLE, "--seed", "1", "--seed", "2"), ("--seed", "twice")),
    *(
        (("generate.py", "--model", name), (name,))
        for name in ("runs/none", "reward.py", "a/b/c", "./none", "/none/x", ".")
    ),
    (("generate.py", "--prompt", "a"), ("--model",)),
    *(((*EXPORT, "--prune", value), ("--prune", value)) for value in ("-0.1", "1", "1.5", "nan", "x")),
    *(((*EXPORT, "--eval_tokens", value), ("--eval_tokens", value)) for value in ("-1", "x", "1.5")),
    *(((*EXPORT, "--dtype", value), ("--dtype", value)) for value in ("float16", "BF16", "int4")),
    ((*EXPORT, "--text", "none.txt"), ("none.txt",)),
    ((*EXPORT, "--text", "empty.txt"), ("empty.txt",)),
    ((*EXPORT, "--text", "a.txt", "odd.txt"), ("\u4e2d",)),
    ((*EXPORT[:3], "."), ("--out .",)),
    ((*EXPORT[:3], "a.txt"), ("--out a.txt",)),
    ((*EXPORT[:3], "a.txt/out"), ("--out a.txt/out", "a.txt")),
    ((*EXPORT[:3], "n" * 300), ("n" * 40,)),
    ((*EXPORT[:3], "MODEL", "--overwrite"), ("--out",)),
    (EXPORT[:2], ("--out",)),
    (("export_model.py", "--out", "out"), ("model",)),
    *((("export_model.py", name, "--out", "out"), (name,)) for name in ("runs/none", "reward.py", "./none", ".")),
    (("export_model.py", "CHATTY", "--out", "out", "--chat"), ("--chat", "template already")),
    (("export_model.py", "MUTE", "--out", "out", "--chat"), ("--chat", "<|im_start|>", "without a template")),
    (("generate.py", "--model", "MUTE", "--chat"), ("mute", "no chat template")),
    (("post_child.py", "whole"), ("--config is missing",)),
    (("post_child.py", "whole", "--config", "none.yaml"), ("none.yaml",)),
    (("post_child.py", "whole", "--config", "."), (".",)),
]
EXPORTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "trimmed": ("--trim_vocab",),
    "for chats": ("--chat",),
    "for chats, trimmed": ("--chat", "--trim_vocab"),
    "for chats, in bf16": ("--chat", "--dtype", "bf16"),
    "in fp16, trimmed": ("--dtype", "fp16", "--trim_vocab"),
    "in bf16": ("--dtype", "bf16"),
    "pruned": ("--prune", "0.5"),
    "pruned of nothing": ("--prune", "0"),
    "measured on 40 tokens": ("--eval_tokens", "40"),
    "measured on 200 tokens, trimmed": ("--eval_tokens", "200", "--trim_vocab"),
    "for chats, pruned": ("--chat", "--prune", "0.25"),
}
# What is given to post_train.py over POST, in the file or as flags, and the words of the line; None: it trains.
FEW, MANY = '{"prompt": "12+34="}\n{"prompt": "a"}\n', "".join(f'{{"prompt": "{i}+{i * i}="}}\n' for i in range(270))
CHAT = '{"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]}\n'
CHAT += '{"prompt": [{"role": "user", "content": "2"}]}\n'
TRAINED: dict[str, tuple[dict, tuple[str, ...] | None]] = {
    "plain": ({}, None),
    "270 held-out prompts": ({"held.jsonl": MANY}, None),
    "a stop": ({"stop": '"\\n"'}, None),
    "a stop that is a letter": ({"stop": "b"}, None),
    "messages": ({"held.jsonl": CHAT, "prompts.jsonl": CHAT, "model": "CHATTY"}, None),
    "texts, and a chat model": ({"model": "CHATTY"}, None),
    "five steps, scored each second": ({"max_steps": "5", "held_out_steps": "2"}, None),
    "scored at each step": ({"max_steps": "3", "held_out_steps": "1"}, None),
    "a folder within folders": ({"output_dir": "my runs/a b/c"}, None),
    "without matplotlib": ({"FAULTS_HIDES": "matplotlib"}, None),
    "a second process": ({"RANK": "1"}, None),
    "a card that was chosen": ({"CUDA_VISIBLE_DEVICES": "3", "HF_HUB_DISABLE_TELEMETRY": "0"}, None),
    "flags over the file": ({"learning_rate": "1.0e-3", "--learning_rate": "2e-4", "--max_steps": "2"}, None),
    "a number that YAML reads as text": ({"learning_rate": "2e-4"}, None),
    "an environment": ({"env": "{MINE: a b}"}, None),
    "a model in bf16": ({"model": "HALF"}, None),
    "a model that asks for beams": ({"model": "ODD"}, None),
    "a Llama": ({"model": "LLAMA"}, None),
    "a run's folder as model": ({"model": "RUN"}, None),
    "metrics of a run that was killed": ({"out/metrics.jsonl": '{"step": 9, "train/reward": 1}\n'}, None),
    "a second process is refused quietly": ({"RANK": "1", "reward": "none"}, ()),
    **{
        f"a reward that {body[:6]}s for one prompt": (
            {"reward.py": WORTH.replace("    ", f"    if prompt == 'zz':\n        {body}\n    ")},
            None,
        )
        for body in ("return float('nan')", "raise ValueError")
    },
    "a text with a NUL": ({"run_name": '"a\\0b"'}, ("run_name", "NUL")),
    "a schedule that is none": ({"lr_scheduler_type": "no_such"}, ("post.yaml", "TRL refuses")),
    "a flag that is shortened": ({"--max_step": "3"}, ("--max_step", "--max_steps")),
    "a prompt that just fits": ({"held.jsonl": '{"prompt": "' + "a" * 93 + '"}\n'}, None),
    "a prompt that just does not fit": (
        {"held.jsonl": '{"prompt": "' + "a" * 94 + '"}\n'},
        ("max_completion_length = 3", "at most 2"),
    ),
    "a stop of two tokens": ({"stop": "ab"}, ("stop = 'ab'", "is 2")),
    "a stop of three tokens": ({"stop": "END".lower()}, ("stop = 'end'", "is 3")),
    "an empty stop": ({"stop": "''"}, ("stop = ''", "is 0")),
    "a stop that cannot be written": ({"stop": "\u4e2d"}, ("\u4e2d",)),
    "a reward that always fails": ({"reward.py": NEVER}, ("error: reward cat: every call failed", "no_such")),
    "additions that are none": (
        {"reward": "addition", "held.jsonl": GOOD},
        ("error: reward addition: every call", "is no addition"),
    ),
    "a reward of no name": ({"reward": "adition"}, ("reward = adition",)),
    "a reward's file that is not there": ({"reward": "none.py:cat"}, ("none.py",)),
    "a reward's function that is not there": ({"reward": "reward.py:dog"}, ("reward.py", "dog")),
    "a reward's file that exits": ({"reward.py": WORTH + "raise SystemExit(0)\n"}, ("reward.py", "SystemExit")),
    "texts and messages": ({"held.jsonl": CHAT, "model": "CHATTY"}, ("prompts, held_out",)),
    "messages for a model without a template": ({"held.jsonl": CHAT, "prompts.jsonl": CHAT}, ("no chat template",)),
    "held-out prompts that are not there": ({"held_out": "none.jsonl"}, ("held_out", "none.jsonl")),
    "prompts by URL": ({"prompts": "https://127.0.0.1:1/p.jsonl"}, ("prompts", "p.jsonl")),
    "prompts of two kinds": ({"prompts": "'p[.r]*'", "p.csv": "prompt\na\n"}, ("prompts", "one kind")),
    "prompts of a text": ({"prompts": "p.txt", "p.txt": "a"}, ("prompts", "p.txt")),
    "prompts with a letter that is unknown": ({"held.jsonl": '{"prompt": "\u4e2d"}\n'}, ("\u4e2d",)),
    "another column": ({"held.jsonl": '{"text": "a", "b": 1}\n'}, ("held_out = held.jsonl", "text, b")),
    "a model that is not there": ({"model": "runs/none"}, ("model = runs/none",)),
    "nothing to go on from": ({"resume_from_checkpoint": "out/checkpoint-3"}, ("resume_from_checkpoint",)),
    "TRL is not installed": ({"FAULTS_HIDES": "trl"}, ("requirements-post.txt",)),
    "TRL refuses": ({"FAULTS_TRAINER_FAILS": "ValueError 1"}, ("TRL refuses", "ValueError")),
    "a disk that is full": ({"FAULTS_TRAINER_FAILS": "28 2"}, ("No space left",)),
    "a disk that is full at once": ({"FAULTS_TRAINER_FAILS": "28 1"}, ("No space left",)),
    "two settings that are wrong": ({"learning_rate": "0", "seed": "x"}, ("learning_rate = 0", "seed = x")),
    "keys that are none": ({"learning_rat": "1", "stopp": "a"}, ("learning_rate", "stop")),
    **{
        f"{key} is {value}": ({key: value}, (f"{key} = ", "must be"))
        for key in ("learning_rate", "temperature", "held_out_steps", "num_generations", "max_steps", "beta")
        for value in (".nan", ".inf", "true", "'1 2'")
    },
    **{
        f"{key} is 0": ({key: "0"}, (f"{key} = 0",))
        for key in ("learning_rate", "temperature", "held_out_steps", "max_completion_length")
    },
    **{
        f"{key} is missing": ({key: None}, (f"{key} is missing",)) for key in ("model", "reward", "prompts", "held_out")
    },
    "output_dir is missing": ({"output_dir": "''"}, ("output_dir",)),
}
SUM, OPEN, CODE = "addition", "brackets", "python_compiles"
VALUES_OF = [  # reward, stop, prompt, completion, its value; None: the call fails
    *((SUM, None, prompt, text, value) for prompt, text, value in [
        ("12+34=", "46", 1), ("12+34=", " 46 \n", 1), (" 1 + 2 = ", "3", 1), ("12+34=", "47", 0), ("12+34=", "46.0", 0),
        ("12+34=", "", 0), ("12+34=", "4 6", 0), ("12+34=", "046", 0), ("12+34=", "46 46", 0), ("12+34", "46", None),
        ("1+2+3=", "6", None), ("", "0", None), ("a+b=", "ab", None), ("1-2=", "-1", None), ("9" * 5000 + "+1=", "1", None),
        ("0+0=", "0", 1), ("99+1=", "100", 1), ("12+34=", "46\n5+5=10", 0), ("1+1= 2", "2", None),
    ]),
    (SUM, "\n", "12+34=", "46\n5+5=10", 1), (SUM, "\n", "12+34=", "\n46", 0), (SUM, "6", "1+15=", "16", 0),
    *((OPEN, None, prompt, text, value) for prompt, text, value in [
        ("(", ")", 1), ("([{<", ">}])", 1), ("([", ")]", 0), ("(", "", 0), ("", "()", 1), ("()", "", 0), ("(", "))", 0),
        ("(", "a)", 0), ("(", " )\n", 1), ("(", ") )", 0), (")", "(", 0), ("<", "}", 0), ("(", "()", 0), ("((", "()))", 1),
    ]),
    *((CODE, None, prompt, text, value) for prompt, text, value in [
        ("def f(x):\n", "    return x\n", 1), ("def f(x):\n", "    pass\n", 0), ("def f(x):\n", "    # a\n", 0),
        ("x = 1\n", "", 0), ("x = 1\n", "y = 2", 1), ("x = 1\n", "# y", 0), ("x = ", "1", 1), ("x = 1\n", "'text'", 0),
        ("x = (\n", "1", 0), ("", "a\0b", 0), ("", "(" * 5000, 0), ("x\n", "class A: pass", 0), ("é = ", "1", 1),
        ("é = 'ééé'", " # c", 0), ("", "-" * 10**5 + "1", 0), ("", "a = '\ud800'", 0),
        ("a = 1; ", "b = 2", 1), ("", "import os; os._exit(3)", 1), ("x = 1\n", "\n\n", 0), ("", "'\\d' + 'a'", 1),
    ]),
]  # fmt: skip
LOCALES = (("utf-8", "strict"), ("ascii", "surrogateescape"), ("ascii", "strict"), ("iso8859-9", "strict"))


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """100 files of settings, each kind of prompts, names, rewards, and prompts of each format with a bit or a part gone.

    Then the borders of settings, columns of odd shapes, what stands at output_dir, and chats.
    """
    whole, _ = damage.finished(base, shared)
    model = str(whole / damage.RUN / "model")
    recipes = sorted((commands.HERE.parents[1] / "recipes" / "post").glob("*.yaml"))
    for _ in range(100):
        path, how = rng.choice(recipes), rng.choice(sorted({*recipe_files.WAYS} - {"a source"}))
        yield f"{path.name}: {how}", _settings(path, how, rng.random())
    for title, data in PROMPTS.items():
        data = data if isinstance(data, bytes) else data.encode()
        yield f"prompts: {title}", _scored(model, {"prompts.jsonl": data}, "prompts.jsonl", wanted=None)
    for name in NAMES:
        others = {"p1.jsonl": GOOD * 2, "q1.jsonl": GOOD * 2, "ra.jsonl": GOOD * 2, "sa.jsonl": GOOD * 2}
        files = {other: data.encode() for other, data in others.items()} | {name: GOOD.encode()}
        wanted = None if "::" in name else "2 prompts: 0.500; 0 of 2"  # to datasets it is a chain of file systems
        yield f"prompts named {name!r}", _scored(model, files, name, wanted)
    for kind in (".parquet", ".jsonl", ".csv"):
        data = data_files.FORMATS[kind][0](["well", "ill"] * 20).replace(b"text", b"prompt")
        for how in ("bit", "cut", "slice", "random") if kind != ".parquet" else ("bit", "cut", "random"):
            harmed = data_files.MUTATIONS[how](data, random.Random(rng.random()))
            yield f"prompts: {how}: {kind}", _scored(model, {f"prompts{kind}": harmed}, f"prompts{kind}", wanted=None)
    for title, body in REWARDS.items():
        well = title in ("prints", "writes", "warns")
        wanted = f"2 prompts: 0.500; {0 if well else 1} of 2"
        yield f"a reward {title}", _scored(model, {"prompts.jsonl": GOOD.encode()}, "prompts.jsonl", wanted, body)
    chatty = shared / "chatty"
    if commands.run("post_child.py", "chatty", str(chatty), cwd=shared).code != 0:
        raise RuntimeError("the tree cannot make a chat model")
    keys = rng.sample([*REFUSED], len(REFUSED))
    for start in range(0, len(keys), 5):
        yield f"borders of {', '.join(keys[start : start + 5])}", _borders(keys[start : start + 5])
    for title, (column, well) in SHAPES.items():
        for kind in (".jsonl", ".json", ".parquet", ".csv", ".arrow") if title != "no rows" else (".jsonl",):
            texts = all(isinstance(one, str) for one in column)
            if (data := _table(column, kind)) and (texts or kind != ".csv"):
                for whose in (model, str(chatty)):
                    may = well and (texts or whose != model)  # messages need a template
                    yield f"prompts{kind}: {title}, {Path(whose).name}", _shape(whose, f"prompts{kind}", data, may)
    for title, (make, well) in STATES.items():
        for again in (False, True):
            yield f"output_dir: {title}{', twice' * again}", _state(model, make, well, again)
    for title, typed in BAD_MESSAGES.items():
        for locale in LOCALES:
            if title != "latin-1" or locale[0] in ("utf-8", "ascii"):
                yield f"chat, {' '.join(locale)}: {title}", _chat(chatty, typed, locale)
    yield "chat: too long", _chat(chatty, TOO_LONG, LOCALES[0])
    for title, text in FILES.items():
        files = {"prompts.jsonl": GOOD.encode(), "reward.py": text.encode()}
        yield f"a reward's file: {title}", _scored(model, files, "prompts.jsonl", wanted=None, own_reward=True)
    plain = _made(shared / "plain model", LETTERS, PADDING)
    names = {name: str(shared / name.lower()) for name in ("HALF", "ODD", "LLAMA", "RUN")}
    names |= {"MODEL": str(plain), "CHATTY": str(chatty)}
    _made(Path(names["LLAMA"]), LETTERS, PADDING, "llama")
    names["MUTE"] = str(shared / "mute")
    commands.copy(chatty, _folder(shared / "mute"))
    (shared / "mute" / "chat_template.jinja").unlink()
    for name, inner in {"ODD": "", "RUN": "model"}.items():
        commands.copy(plain, _folder(Path(names[name], inner)))
    about = json.loads((plain / "generation_config.json").read_text())
    about |= {"num_beams": 2, "do_sample": True, "temperature": 9.0, "repetition_penalty": 9.0, "max_length": 3}
    (Path(names["ODD"]) / "generation_config.json").write_text(json.dumps(about))
    half = ("export_model.py", str(plain), "--out", names["HALF"], "--dtype", "bf16")
    if commands.run(*half, cwd=shared).code != 0:
        raise RuntimeError("the tree cannot export")
    for title, asked in CONTINUED.items():
        yield f"continued: {title}", _continued(plain, asked)
    for name in ("ODD", "LLAMA", "RUN", "HALF"):
        yield f"continued: {name}", _continued(Path(names[name]), {"prompt": "12+34=", "temperature": 0})
    for title, asked in CHATS.items():
        yield f"a chat: {title}", _continued(chatty, asked)
    for flags, words in REFUSALS:
        yield f"refused: {' '.join(flags):.60}", _refused([names.get(flag, flag) for flag in flags], words)
    for title, flags in EXPORTS.items():
        yield f"an export: {title}", _export(plain, flags)
    for missing in "useraintmy \n":
        letters, fit = LETTERS.replace(missing, ""), missing in " "
        yield f"--chat without {missing!r}", _for_chats(shared / f"without-{ord(missing)}", letters, PADDING, fit, "")
    for rows in range(5):
        words = f"{rows} of {len(LETTERS) + 1 + rows}"
        yield f"--chat and {rows} rows of padding", _for_chats(shared / f"rows-{rows}", LETTERS, rows, rows > 2, words)
    yield "exports, one after the other", _exports(plain)
    yield "an export of values that fp16 has not", _too_large(plain)
    for out in ("out", "earlier"):
        yield f"an export into {out}/, on a disk that is full", _full(plain, out)
    yield "post-training on a disk that is full at its end", _full_at_end(names)
    yield "samples on a disk that is full", _full_output(plain)
    yield "prompts that are changed between two commands", _changed(names)
    yield "an export of a run", _export_run(whole)
    for title, (changes, words) in TRAINED.items():
        yield f"post-training: {title}", _trained(names, changes, words)
    for torn in (False, True):
        yield f"post-training goes on{', a line is torn' * torn}", _resumed(names, torn)
    yield "what rewards are worth", _worth
    yield "a reader that has left", _left(plain, chatty)
    yield "Ctrl-C in a sample", _interrupted("--model", str(plain), "--num_samples", "1000000", typed=b"")
    yield "Ctrl-C in an answer", _interrupted("--model", str(chatty), "--chat", typed=b"hello\n" * 100_000)
    for patterns, count in {"p*.jsonl": 5, "[a-q]*.jsonl": 7, "./p1.jsonl": 2, "**/*.jsonl": 7}.items():
        files = {"p1.jsonl": GOOD, "p2.jsonl": GOOD + '{"prompt": "well"}\n', "q.jsonl": GOOD}
        mean = {2: "0.500", 5: "0.600", 7: "0.571"}[count]
        files = {name: data.encode() for name, data in files.items()}
        yield (
            f"prompts by the glob {patterns}",
            _scored(model, files, patterns, f"{count} prompts: {mean}; 0 of {count}"),
        )


def _settings(path: Path, how: str, seed: float) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        dice, flags = random.Random(seed), []
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if post_child.TRL or not line.startswith(OF_TRL)]
        data = recipe_files.WAYS[how]("".join(kept).encode(), dice, flags)
        (folder / "attacked.yaml").write_bytes(data)
        flags = [flag for flag in flags if "\0" not in flag]
        done = commands.run("post_child.py", "--config", "attacked.yaml", *flags, cwd=folder)
        names = [word.removeprefix("--") for word in flags if word.startswith("--")]
        if list(folder.iterdir()) != [folder / "attacked.yaml"] and post_child.ACCEPTED not in done.stderr:
            return f"refused, and leaves {[path.name for path in folder.iterdir()]}"
        return commands.fault_of(done, post_child.ACCEPTED, "attacked.yaml", "TRL", *names)

    return hit


def _scored(
    model: str,
    files: dict[str, bytes],
    prompts: str,
    wanted: str | None,
    body: str = "return 0.0",
    own_reward: bool = False,
) -> Callable[[Path], str | None]:
    """``wanted``: what is printed at the end; None: whatever, or a line that names the file."""

    def hit(folder: Path) -> str | None:
        reward = f"def cat(prompt, completion):\n    if prompt == 'well': return 1.0\n    {body}\n"
        for name, data in ({"reward.py": reward.encode()} | files).items():
            (folder / name).write_bytes(data)
        done = commands.run("post_child.py", model, prompts, "reward.py:cat", cwd=folder)
        if "\x1b" in done.stdout + done.stderr:
            return "an escape is printed"
        if done.code == 0 and "Traceback" not in done.stderr and not own_reward:
            last = f"it ends with {done.stderr.strip()[-200:]!r}"
            if wanted is None:
                return None if " calls failed" in done.stderr else last
            return None if wanted in done.stderr else last
        if wanted is not None:
            return commands.fault_of(done, "") or f"refused: {done.errors[0][:300]}"
        return commands.fault_of(done, "reward.py", prompts, "prompts", "max_completion_length")

    return hit


def _borders(keys: list[str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        done = commands.run("post_child.py", "borders", *keys, cwd=folder)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        if done.code or len(found) != len(keys) * len(post_child.VALUES):
            return f"exit status {done.code}: {done.stderr[-300:]}"
        for key, value, lines in found:
            if (value in REFUSED[key]) != bool(lines) and not (lines and "TRL refuses" in lines[0]):
                return f"{key} = {value:.50}: {lines or 'is taken'}"
            if lines and not any(key in line or "TRL refuses" in line for line in lines):
                return f"{key} = {value:.50} is not named: {lines}"
        made = [path.name for path in folder.iterdir() if path.name != "borders.yaml"]
        return f"leaves {made}" if made else None

    return hit


def _table(column: list, kind: str) -> bytes | None:
    """Return a file of a column of prompts; None: this format has no such thing."""
    rows = [{"prompt": one} for one in column]
    if kind in (".jsonl", ".json"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode() or b"\n"
    if kind == ".csv":
        return ("prompt\n" + "".join(f'"{one}"\n' for one in column)).encode()
    out = io.BytesIO()
    with contextlib.suppress(pyarrow.ArrowException):
        table = pyarrow.Table.from_pylist(rows)
        if kind == ".parquet":
            pyarrow.parquet.write_table(table, out)
        else:
            with pyarrow.ipc.new_stream(out, table.schema) as file:
                file.write_table(table)
        return out.getvalue()
    return None


def _shape(model: str, name: str, data: bytes, well: bool | None) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        (folder / name).write_bytes(data)
        (folder / "reward.py").write_text("def cat(prompt, completion):\n    return float(isinstance(prompt, str))\n")
        done = commands.run("post_child.py", model, name, "reward.py:cat", cwd=folder)
        if "\x1b" in done.stdout + done.stderr:
            return "an escape is printed"
        if done.code == 0 and "Traceback" not in done.stderr:
            last = f"it ends with {done.stderr.strip()[-200:]!r}"
            return last if well is False or "prompts: 1.000; 0 of " not in done.stderr else None
        why = commands.fault_of(done, name, "prompts", "prompt")
        return why or (f"is refused: {done.errors[0][:300]}" if well else None)

    return hit


def _within(out: Path, *names: str) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")


def _beside(out: Path, link: Callable) -> None:
    out.with_name("beside").mkdir()
    (out.with_name("beside") / "a.txt").write_text("mine")
    link(out.with_name("beside"))


def _standing(folder: Path) -> dict[str, object]:
    """Return what lies in a folder, by name."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
        if path.name not in OURS or path.is_dir()
    }


def _state(model: str, make: Callable, well: bool | None, again: bool) -> Callable[[Path], str | None]:
    """``again``: the same command a second time, which finds the model of the first."""

    def hit(folder: Path) -> str | None:
        (folder / "reward.py").write_text("def cat(prompt, completion):\n    return 1.0\n")
        (folder / "prompts.jsonl").write_text(GOOD)
        (folder / "post.yaml").write_text(outside_words.POST.replace("runs/post", "out") + f"model: {model}\n")
        make(folder / "out")
        for number in range(1 + again):
            before = _standing(folder)
            done = commands.run("post_child.py", "whole", "--config", "post.yaml", cwd=folder)
            after = _standing(folder)
            if gone := [name for name in before if name not in after or after[name] != before[name]]:
                return f"replaces, or removes, {', '.join(gone)}"
            may = well if not number else False if (folder / "out" / "model").exists() else well
            if done.code == 0:
                if may is False:
                    return "is not refused"
                if (
                    "out/model/model.safetensors" not in after
                    and not (folder / "out/model/model.safetensors").is_file()
                ):
                    return "writes no model"
                continue
            if why := commands.fault_of(done, "out", "output_dir"):
                return why
            if may:
                return f"is refused: {done.errors[0][:300]}"
            if well is False and after != before:
                return f"is refused, and leaves {sorted(after.keys() - before.keys())}"
        return None

    return hit


@functools.cache
def _answers(
    chatty: Path, messages: tuple[bytes, ...], locale: tuple[str, str] = LOCALES[0]
) -> tuple[bytes, commands.Done]:
    """Return what a chat answers to messages."""
    folder = Path(tempfile.mkdtemp(dir=chatty.parent))
    flags = ("--model", str(chatty), "--chat", "--temperature", "0", "--max_new_tokens", "6")
    lines = b"".join(message + b"\n" for message in messages)
    started = commands.Started("generate.py", *flags, cwd=folder, typed=(lines, *locale))
    done = started.wait()
    return started.out.read_bytes().removesuffix(b"\n"), done


def _chat(chatty: Path, typed: bytes, locale: tuple[str, str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        alone, both = (_answers(chatty, messages)[0] for messages in ((GOOD_MESSAGE,), (GOOD_MESSAGE, OTHER)))
        if not alone or alone == both:
            return f"the model does not answer: {both!r}"
        if typed == TOO_LONG:  # what was said before is forgotten
            both = alone + _answers(chatty, (OTHER,))[0]
        for messages, wanted in {(typed, GOOD_MESSAGE): alone, (GOOD_MESSAGE, typed, OTHER): both}.items():
            found, done = _answers(chatty, messages, locale)
            if found != wanted:
                return f"{[one[:20] for one in messages]!r} is answered {found!r}, not {wanted!r}: {done.stderr[-200:]}"
            if done.code != 0 or "Traceback" in done.stderr:
                return commands.fault_of(done, "") or f"exit status {done.code}"
            if "\x1b" in done.stderr:
                return "an escape is printed"
            if bool(typed.strip()) != bool(done.stderr):
                return f"{typed[:20]!r} is passed over without a word, or with too many: {done.stderr[:200]!r}"
        return None

    return hit


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _inner(model: Path) -> str:
    return str(model / "model" if (model / "model").is_dir() else model)


def _made(folder: Path, letters: str, padding: int, kind: str = "gpt2") -> Path:
    if (
        not folder.exists()
        and commands.run("post_child.py", "made", str(folder), letters, str(padding), kind, cwd=folder.parent).code
    ):
        raise RuntimeError("the tree cannot make a model")
    return folder


def _reference(folder: Path, *asked: str) -> str:
    """Return what a reference of post_child prints, in a folder."""
    done = commands.run("post_child.py", *asked, cwd=folder)
    if done.code != 0:
        raise RuntimeError(done.stderr[-500:])
    return done.stdout


def _continued(model: Path, asked: dict) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        (folder / "asked.json").write_text(json.dumps(asked | {"model": _inner(model)}))
        _reference(folder, "continued", "asked.json")
        wanted = (folder / "wanted.txt").read_text()
        messages, chat = asked.get("messages", []), "messages" in asked
        flags = [word for key, value in asked.items() if key != "messages" for word in (f"--{key}", str(value))]
        typed = ("".join(f"  {one} \r\n\n" for one in messages).strip().encode(), "utf-8", "strict")
        flags += ["--chat"] if chat else []
        done = commands.run("generate.py", "--model", str(model), *flags, cwd=folder, typed=typed)
        if done.code != 0 or "Traceback" in done.stderr:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        found = done.stdout.removesuffix("\n") if chat else done.stdout  # of the input's end
        if done.stderr and "y" * 300 not in messages:
            return f"prints {done.stderr[:300]}"
        return None if found == wanted else f"gives {found[:300]!r}, not {wanted[:300]!r}: {done.stderr[-200:]}"

    return hit


def _answered_2(done: commands.Done, words: tuple[str, ...], before: dict, folder: Path, code: int = 2) -> str | None:
    """Return why a refusal does not hold: another exit status, a word that is not named, something that is made."""
    if why := commands.fault_of(done, *words):
        return why
    if done.code != code or done.stdout:
        return f"exit status {done.code}, and prints {done.stdout[:200]!r}"
    if missing := [word for word in words if not any(word in line for line in done.errors)]:
        return f"{', '.join(missing)} is not named: {done.errors[:3]}"
    if "\x1b" in done.stderr:
        return "an escape is printed"
    after = _standing(folder)
    return None if after == before else f"leaves {sorted(after.keys() ^ before.keys())}"


def _refused(flags: list[str], words: tuple[str, ...]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        for name, text in {"a.txt": "abc " * 30, "empty.txt": "", "odd.txt": "\u4e2d", "reward.py": WORTH}.items():
            (folder / name).write_text(text)
        before = _standing(folder)
        return _answered_2(commands.run(*flags, cwd=folder), words, before, folder)

    return hit


def _weights(folder: Path) -> dict:
    """Return tensors as float32; numpy has no bf16."""
    header, data = (folder / "model.safetensors").read_bytes(), {}
    size = int.from_bytes(header[:8], "little")
    for name, about in json.loads(header[8 : 8 + size]).items():
        if name != "__metadata__":
            raw = header[8 + size :][slice(*about["data_offsets"])]
            if about["dtype"] == "BF16":
                values = (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                values = numpy.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[about["dtype"]]).astype("<f4")
            data[name] = values.reshape(about["shape"])
    return data


def _chats(folder: Path, kept: int, rows: int) -> str | None:
    """Return what an export for chats lacks: ``kept`` rows are the model's own, then come three tokens."""
    ids = {one["content"]: one["id"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    about = json.loads((folder / "generation_config.json").read_text())
    begin, end, pad = (ids.get(f"<|{name}|>") for name in ("im_start", "im_end", "pad"))
    if sorted((begin, end, pad)) != [kept, kept + 1, kept + 2]:
        return f"its tokens are {ids}"
    found = (sorted(about["eos_token_id"]), about["pad_token_id"], about.get("suppress_tokens") or [])
    wanted = (sorted([ids["<|endoftext|>"], end]), pad, [*range(kept + 3, rows)])
    if found != wanted or json.loads((folder / "config.json").read_text())["pad_token_id"] != pad:
        return f"it ends, pads and forbids {found}, not {wanted}"
    return None if (folder / "chat_template.jinja").is_file() else "has no template"


def _export(model: Path, flags: tuple[str, ...]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        (folder / "a b.txt").write_text("the cat sat on " * 9)
        (folder / "c.txt").write_text("a dog 1+1=2\n" * 9)
        texts, kept = ("a b.txt", "c.txt"), len(LETTERS) + 1
        most = flags[1] if "--eval_tokens" in flags else "0"
        rest = () if "--eval_tokens" in flags else ("--eval_tokens", "0")
        command = ("export_model.py", str(model), "--out", "my out", *flags, "--text", *texts, *rest)
        done = commands.run(*command, cwd=folder)
        if done.code != 0 or "Traceback" in done.stderr:
            return f"exit status {done.code}: {done.stderr[-300:]}"
        out, chat, trim = folder / "my out", "--chat" in flags, "--trim_vocab" in flags
        old, new = _weights(model), _weights(out)
        rows = kept + 3 * chat if trim else kept + PADDING
        for name, tensor in old.items():
            wanted = tensor.copy()
            if name == "transformer.wte.weight":
                wanted[kept : kept + 3 * chat] = wanted[:kept].mean(0)
                wanted = wanted[:rows]
            elif "--prune" in flags and tensor.ndim == 2 and ".h." in name:
                share = (new[name] == 0).mean()
                if abs(share - float(flags[-1])) > 0.001:
                    return f"{share:.3f} of {name} is 0"
                wanted[numpy.abs(tensor) < numpy.quantile(numpy.abs(tensor), share)] = 0
            exact = 2e-2 if "--dtype" in flags else 1e-6
            if new[name].shape != wanted.shape or not numpy.allclose(new[name], wanted, atol=exact):
                return f"{name} is {new[name].shape}, or has other values"
        if chat and (why := _chats(out, kept, rows)):
            return why
        forbidden = json.loads((out / "generation_config.json").read_text()).get("suppress_tokens") or []
        if not chat and forbidden != [*range(kept, rows)]:
            return f"forbids {forbidden}"
        record = json.loads((out / "export.json").read_text())
        for which, whose in (("before", model), ("after", out)):
            loss = float(_reference(folder, "losses", str(whose), most, *texts))
            if abs(record[which]["loss"] - loss) > 2e-4 or f"{record[which]['loss']:.4f}" not in done.stdout:
                return f"{which}: the loss is {record[which]['loss']}, not {loss}"
        if "of a b.txt c.txt" not in done.stdout or ("trl sft" in done.stdout) != chat:
            return f"prints {done.stdout[-300:]}"
        return None

    return hit


def _for_chats(model: Path, letters: str, rows: int, well: bool, words: str) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _made(model, letters, rows)
        done = commands.run("export_model.py", str(model), "--out", "out", "--chat", cwd=folder)
        if not well:
            return _answered_2(done, ("--chat", words), {}, folder)
        kept = len(letters) + 1
        return _chats(folder / "out", kept, kept + rows) if done.code == 0 else f"refused: {done.stderr[-300:]}"

    return hit


def _exports(model: Path) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        def export(*flags: str, out: str = "out") -> commands.Done:
            return commands.run("export_model.py", str(model), "--out", out, *flags, cwd=folder)

        (folder / "out").mkdir()  # an empty one is free
        done = export()
        if done.code != 0 or "nothing was measured" not in done.stdout or "perplexity" in done.stdout:
            return f"exit status {done.code}: {done.stdout[-300:]}{done.stderr[-300:]}"
        before = _standing(folder)
        if why := _answered_2(export("--trim_vocab"), ("--out out", "--overwrite"), before, folder):
            return f"again: {why}"
        (folder / "out" / "notes.txt").write_text("mine")
        before = _standing(folder)
        if why := _answered_2(export("--overwrite"), ("--out out", "notes.txt"), before, folder):
            return f"with a file of mine: {why}"
        (folder / "out" / "notes.txt").unlink()
        itself = commands.run("export_model.py", "out", "--out", "out", "--overwrite", cwd=folder)
        if why := _answered_2(itself, ("--out out", "to be exported"), _standing(folder), folder):
            return f"onto itself: {why}"
        if (done := export("--overwrite", "--trim_vocab")).code != 0:
            return f"--overwrite: {done.stderr[-300:]}"
        if [path.name for path in folder.iterdir()] != ["out"] or len(
            _weights(folder / "out")["transformer.wte.weight"]
        ) != 1 + len(LETTERS):
            return "--overwrite leaves the first"
        for name in ("config.json", "model.safetensors"):
            (folder / "out" / name).write_bytes((folder / "out" / name).read_bytes() + b" ")
            before = _standing(folder)
            if why := _answered_2(export("--overwrite"), ("--out out", name), before, folder):
                return f"{name} is changed: {why}"
        return None

    return hit


def _export_run(whole: Path) -> Callable[[Path], str | None]:
    """Of model/, then of the newest checkpoint, then of the one before a damaged one, then where its data is gone."""

    def hit(folder: Path) -> str | None:
        commands.copy(whole, folder)
        model = commands.digest(whole / damage.RUN / "model/model.safetensors")
        rows = [json.loads(line) for line in (folder / damage.RUN / "metrics.jsonl").read_text().splitlines()]
        wanted = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
        steps = {
            "a run": lambda: None,
            "its model": lambda: None,
            "no model": lambda: shutil.rmtree(folder / damage.RUN / "model"),
            "damaged": lambda: damage.cut(folder / damage.LAST / "model.safetensors", 0.5),
            "no data": lambda: shutil.rmtree(folder / "data"),
        }
        for title, change in steps.items():
            change()
            name, before = f"{damage.RUN}{'/model' * (title == 'its model')}", _standing(folder)
            done = commands.run("export_model.py", name, "--out", title, cwd=folder)
            if title == "no data" and done.code == 2:
                return None if _standing(folder) == before else "is refused, and leaves files"
            if done.code != 0 or "Traceback" in done.stderr:
                return f"{title}: exit status {done.code}: {done.stderr[-300:]}"
            found = json.loads((folder / title / "export.json").read_text())["before"].get("loss")
            late = title in ("damaged", "no data")
            if (commands.digest(folder / title / "model.safetensors") == model) == late:
                return f"{title}: other weights than it should have"
            if late and damage.LAST.name not in done.stderr:
                return f"{title}: what is damaged is not named: {done.stderr[-300:]}"
            if not late and (found is None or abs(found - wanted) > 1e-4 or "validation" not in done.stdout):
                return f"{title}: its loss is {found}, not {wanted}: {done.stdout[-200:]}"
            if title == "no data" and (found is not None or "nothing was measured" not in done.stdout):
                return f"{title}: prints {done.stdout[-200:]}"
        return None

    return hit


def _task(folder: Path, names: dict[str, str], changes: dict) -> tuple[dict, list[str], dict[str, str]]:
    """Write post.yaml and the files that it names; return its keys, the flags and the environment."""
    keys = {"model": "MODEL", "held_out": "held.jsonl", "output_dir": "out", "max_steps": "3"}
    texts = {
        "prompts.jsonl": FEW,
        "held.jsonl": FEW + '{"prompt": "the longest"}\n{"prompt": "5+6="}\n{"prompt": "a b c"}\n{"prompt": "zz"}\n',
        "reward.py": WORTH,
    }
    environment = {"FAULTS_SEEN": str(folder.with_name(f".{folder.name}-seen"))}
    flags = []
    for key, value in changes.items():
        if key.startswith("--"):
            flags += [key, value]
        elif key.isupper() or key.startswith("FAULTS"):
            environment[key] = value
        else:
            (texts if "." in key else keys)[key] = value
    keys = dict(line.split(": ", 1) for line in outside_words.POST.split("#")[0].strip().splitlines()) | keys
    keys = {key: names.get(value, value) for key, value in keys.items() if value is not None}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "post.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return keys, flags, environment


def _rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _trained(names: dict[str, str], changes: dict, words: tuple[str, ...] | None) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        keys, flags, environment = _task(folder, names, changes)
        out, before = folder / keys["output_dir"].strip("'"), _standing(folder)
        done = commands.run(
            "post_child.py", "whole", "--config", "post.yaml", *flags, cwd=folder, environment=environment
        )
        if words is not None:
            if "RANK" in changes:
                return f"{done.code}, prints {done.stderr}" if done.code != 2 or done.stderr or done.stdout else None
            if "28" in (at := changes.get("FAULTS_TRAINER_FAILS", "")) and len(_rows(out)) != int(at[-1]):
                return f"of {at[-1]} rows metrics.jsonl has {_rows(out)}"
            late = at or keys.get("reward") == "addition" or "every call" in words[0]
            if late and not (out / "model").exists():  # TRL makes its folder, and the first score comes after
                before = _standing(folder)
            return _answered_2(done, words, before, folder, 1 if "No space left" in words else 2)
        if done.code != 0 or "Traceback" in done.stderr:
            return f"exit status {done.code}: {done.stderr[-400:]}"
        seen = json.loads(Path(environment["FAULTS_SEEN"]).read_text())
        given = seen["args"], seen["environment"]
        if "RANK" in changes:
            left = [path.name for path in out.iterdir()]
            return f"the second process writes {left}, {done.stderr[-200:]}" if left or done.stderr else None
        first, stop = (
            _inner(Path(keys["model"])),
            json.loads(keys.get("stop", '""') if '"' in keys.get("stop", '"') else f'"{keys["stop"]}"'),
        )
        steps, each = int(changes.get("--max_steps", keys["max_steps"])), int(keys.get("held_out_steps", 20))
        held = [
            float(_reference(folder, "held", str(whose), "held.jsonl", stop, "3")) for whose in (first, out / "model")
        ]
        rows = _rows(out)
        why = _wrong_rows(
            rows,
            steps,
            each,
            [(json.loads(line)["prompt"]) for line in (folder / "prompts.jsonl").read_text().splitlines()],
            stop,
        )
        if why or [round(rows[at]["eval/reward"], 6) for at in (0, -1)] != [round(value, 6) for value in held]:
            return why or f"held-out rewards {rows[0]}, {rows[-1]}, not {held}"
        count = len((folder / "held.jsonl").read_text().splitlines())
        if f"{count} held-out prompts: {held[0]:.3f} before, {held[1]:.3f} after" not in done.stderr:
            return f"prints {done.stderr[-300:]}"
        if "it/s" in done.stderr or f"generate.py --model {keys['output_dir']}\n" not in done.stderr:
            return f"prints {done.stderr[-300:]}"
        if ("2 of 18 calls of the reward failed" in done.stderr) != ("reward.py" in changes) or (
            out / "reward.png"
        ).is_file() != ("FAULTS_HIDES" not in changes):
            return f"leaves {[path.name for path in out.iterdir()]}: {done.stderr[-300:]}"
        old, new = _weights(Path(first)), _weights(out / "model")
        if any(not numpy.allclose(new[name], old[name] * post_child.STEP**steps, rtol=1e-4) for name in old):
            return "model/ does not hold what was trained"
        tokens = json.loads((Path(first) / "tokenizer.json").read_text())["model"]["vocab"]
        ends = {tokens["<|endoftext|>"] if "<|endoftext|>" in tokens else len(tokens)} | (
            {tokens[stop]} if stop else set()
        )
        added = json.loads((Path(first) / "tokenizer.json").read_text())["added_tokens"]
        ends |= {one["id"] for one in added if one["content"] == "<|im_end|>"}
        about = json.loads((out / "model" / "generation_config.json").read_text())
        if set(seen["eos"]) != ends or set(about["eos_token_id"]) != ends:
            return f"ends at {seen['eos']}, {about['eos_token_id']}, not {ends}"
        if (
            seen["positions"] != ([True, True, True] if keys["model"] == names["LLAMA"] else [True, True, False])
            or seen["dtype"] != "torch.float32"
            or seen["reward"] != "cat"
        ):
            return f"TRL gets {seen['positions']}, {seen['dtype']}, {seen['reward']}"
        if seen["removed"] != ["PrinterCallback", "ProgressCallback"] or len(seen["prompts"]) != 2:
            return f"TRL gets {seen['removed']}, {seen['prompts']}"
        rate = float(changes.get("--learning_rate", changes.get("learning_rate", given[0]["learning_rate"])))
        if given[0]["learning_rate"] != rate or given[0]["max_steps"] != steps:
            return f"TRL gets {given[0]['learning_rate']}, {given[0]['max_steps']}"
        known = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
        known |= {"MINE": "a b"} if "env" in changes else {}
        return next(
            (f"{key} is {given[1].get(key)}" for key, value in known.items() if given[1].get(key) != value), None
        )

    return hit


def _wrong_rows(rows: list[dict], steps: int, each: int, prompts: list, stop: str) -> str | None:
    """Return what of metrics.jsonl is not as it has to be, but for the held-out rewards."""
    if [row["step"] for row in rows] != [*range(steps + 1)]:
        return f"metrics.jsonl has the steps {[row['step'] for row in rows]}"
    for row in rows:
        step, values = row["step"], []
        for prompt, text in zip(prompts[:2], (post_child.COMPLETION[:step], post_child.COMPLETION), strict=False):
            text = text.split(stop)[0] if stop else text
            values.append(sum(map(ord, (prompt if isinstance(prompt, str) else prompt[-1]["content"]) + text)) % 97)
        keys = (
            {"step"}
            | ({"train/reward"} if step else set())
            | ({"eval/reward"} if step % each == 0 or step == steps else set())
        )
        if row.keys() != keys or (step and abs(row["train/reward"] - sum(values) / len(values)) > 1e-6):
            return f"metrics.jsonl has {row}, not {keys} and {values}"
    return None


def _resumed(names: dict[str, str], torn: bool) -> Callable[[Path], str | None]:
    """A run that was killed in step 5, behind its checkpoint of step 2, goes on from there."""

    def hit(folder: Path) -> str | None:
        _, flags, environment = _task(folder, names, {"max_steps": "5"})
        command = ("post_child.py", "whole", "--config", "post.yaml")
        first = commands.run(*command, cwd=folder, environment=environment)
        out = folder / "out"
        if first.code != 0 or len(before := _rows(out)) != 6:
            return f"exit status {first.code}: {first.stderr[-300:]}"
        shutil.rmtree(out / "model")
        (out / "reward.png").unlink()
        _within(out, "checkpoint-2/trainer_state.json")
        if torn:
            (out / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text()[:-9])
        flags = ("--resume_from_checkpoint", "out/checkpoint-2", "--max_steps", "7", "--held_out_steps", "3")
        again = commands.run(*command, *flags, cwd=folder, environment=environment)
        if again.code != 0 or "Traceback" in again.stderr:
            return f"exit status {again.code}: {again.stderr[-300:]}"
        rows = _rows(out)
        if [row["step"] for row in rows] != [*range(8)] or rows[:3] != before[:3]:
            return f"metrics.jsonl has {rows}, after {before}"
        if json.loads(Path(environment["FAULTS_SEEN"]).read_text())["resumed"] != "out/checkpoint-2":
            return "TRL begins anew"
        if [row["step"] for row in rows if "eval/reward" in row] != [0, 3, 6, 7]:
            return f"scored at {[row['step'] for row in rows if 'eval/reward' in row]}"
        if not (out / "reward.png").is_file() or f"{before[0]['eval/reward']:.3f} before" not in again.stderr:
            return f"leaves {[path.name for path in out.iterdir()]}: {again.stderr[-300:]}"
        third = commands.run(*command, cwd=folder, environment=environment)
        if third.code != 2 or _rows(out) != rows:
            return f"a third start ends with {third.code}, {_rows(out)}"
        return None

    return hit


def _worth(folder: Path) -> str | None:
    rows = [[reward, stop, [prompt], [text]] for reward, stop, prompt, text, _ in VALUES_OF]
    message = [{"role": "system", "content": "1+1="}, {"role": "user", "content": "1+2="}]
    rows += [[SUM, None, [message, "1+1="], [[{"role": "assistant", "content": "3"}], "3"]]]
    rows += [[f"stop.py:{name}", None, ["a"], ["b"]] for name in ("text", "yes", "half", "cat")]
    rows += [["my dir/r: x.py:cat", None, ["a"], ["b"]]]
    wanted = [[[value or 0.0], 1, int(value is None), True] for *_, value in VALUES_OF]
    wanted += [
        [[1.0, 0.0], 2, 0, True],
        [[0.0], 1, 1, True],
        [[1.0], 1, 0, True],
        [[0.25], 1, 0, True],
        ["interrupted", 1, 0, True],
        [[4.0], 1, 0, True],
    ]
    kinds = {
        "text": "return '4'",
        "yes": "return True",
        "half": "return numpy.float16(0.25)",
        "cat": "raise KeyboardInterrupt",
    }
    functions = "".join(f"def {name}(prompt, completion):\n    {body}\n" for name, body in kinds.items())
    (folder / "stop.py").write_text(f"import numpy\n{functions}")
    (folder / "my dir").mkdir()
    (folder / "my dir" / "r: x.py").write_text(
        "class A:\n    def __call__(self, p, c): return '4' and 4\n\n\ncat = A()\n"
    )
    (folder / "rewards.json").write_text(json.dumps(rows))
    done = commands.run("post_child.py", "worth", "rewards.json", cwd=folder)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if done.code or len(found) != len(wanted):
        return f"exit status {done.code}: {done.stderr[-300:]}"
    return next(
        (f"{row} is {one}, not {two}" for row, one, two in zip(rows, found, wanted, strict=True) if one != two), None
    )


def _left(plain: Path, chatty: Path) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        for flags in (("--model", str(plain), "--num_samples", "50"), ("--model", str(chatty), "--chat")):
            done = commands.run(
                "post_child.py", "piped", "generate.py", *flags, cwd=folder, typed=(b"hello\n" * 50, *LOCALES[0])
            )
            if done.code != 1 or done.stderr:
                return f"{flags[-1]}: exit status {done.code}: {done.stderr[-300:]}"
        return None

    return hit


def _interrupted(*flags: str, typed: bytes) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        started = commands.Started("generate.py", *flags, cwd=folder, typed=(typed, *LOCALES[0]))
        end = time.monotonic() + commands.SECONDS
        while not started.out.stat().st_size and time.monotonic() < end:
            time.sleep(0.05)
        for pid in started.pids:
            os.kill(pid, signal.SIGINT)
        done = started.wait()
        return None if done.code == 130 and not done.stderr else f"exit status {done.code}: {done.stderr[-300:]}"

    return hit


def _too_large(plain: Path) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        commands.copy(plain, _folder(folder / "m"))
        tensors = _weights(plain)
        tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"] * 1e6
        (folder / "m" / "model.safetensors").write_bytes(damage.safetensors.numpy.save(tensors, {"format": "pt"}))
        before = _standing(folder)
        done = commands.run("export_model.py", "m", "--out", "out", "--dtype", "fp16", cwd=folder)
        return _answered_2(done, ("ln_f.weight", "bf16"), before, folder)

    return hit


def _full(plain: Path, out: str) -> Callable[[Path], str | None]:
    """An export whose file of weights is cut short; an earlier one, which it was to replace, is whole."""

    def hit(folder: Path) -> str | None:
        for flags, size in (((), 0), (("--overwrite", "--trim_vocab"), 30_000)):
            before = _standing(folder)
            if size or out == "earlier":
                command = ("export_model.py", str(plain), "--out", out, *flags)
                done = commands.run(*command, cwd=folder, file_bytes=size)
        if done.code not in (1, 2):
            return f"exit status {done.code}: {done.stderr[-300:]}"
        return _answered_2(done, ("out",) if out == "out" else ("earlier",), before, folder, done.code)

    return hit


def _full_at_end(names: dict[str, str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        _, _, environment = _task(folder, names, {"FAULTS_HIDES": "matplotlib"})
        command = ("post_child.py", "whole", "--config", "post.yaml")
        done = commands.run(*command, cwd=folder, environment=environment, file_bytes=30_000)
        if why := commands.fault_of(done, "model"):
            return why
        left = sorted(path.name for path in (folder / "out").iterdir())
        return None if done.code == 1 and left == ["metrics.jsonl"] else f"exit status {done.code}, leaves {left}"

    return hit


def _full_output(plain: Path) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        done = commands.run("post_child.py", "piped", "generate.py", "--model", str(plain), "/dev/full", cwd=folder)
        return commands.fault_of(done, "No space left") or (None if done.code == 1 else f"exit status {done.code}")

    return hit


def _changed(names: dict[str, str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        for number, text in enumerate((FEW, FEW.replace("12+34", "21+43"))):
            out = f"out-{number}"
            _, _, environment = _task(folder, names, {"prompts.jsonl": text, "output_dir": out})
            done = commands.run("post_child.py", "whole", "--config", "post.yaml", cwd=folder, environment=environment)
            if done.code != 0:
                return f"exit status {done.code}: {done.stderr[-300:]}"
            seen = json.loads(Path(environment["FAULTS_SEEN"]).read_text())["prompts"]
            if seen != [json.loads(line)["prompt"] for line in text.splitlines()]:
                return f"TRL gets {seen}"
        return None

    return hit
