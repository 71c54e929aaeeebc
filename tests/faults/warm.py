"""Imported once, before the forks: what each command of the tree under attack would import by itself, for seconds."""

import contextlib
import importlib
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", ACCELERATE_USE_CPU="true")

import commands  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import torch  # noqa: E402
from transformers import GenerationMixin, GPT2LMHeadModel  # noqa: E402, F401

torch.set_num_threads(1)
# An older tree has its rooms under other names: it then imports them in each fork.
for name in ("train", "prepare_data", "pretrain.data.stream", "pretrain.stream", "generate", "eval_hellaswag", "trl"):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
