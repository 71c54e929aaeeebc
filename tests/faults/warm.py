"""Imported once, before the forks: what each command of the tree under attack would import by itself, for seconds."""

import contextlib
import importlib
import os

import commands

os.environ.update(commands.ALONE)

import matplotlib.pyplot  # noqa: E402, F401
import torch  # noqa: E402
from transformers import GenerationMixin, GPT2LMHeadModel  # noqa: E402, F401

torch.set_num_threads(1)
# An older tree has its rooms under other names: it then imports them in each fork.
for name in ("train", "prepare_data", "pretrain.data.stream", "pretrain.stream", "generate", "eval_hellaswag", "trl"):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
