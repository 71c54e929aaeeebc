"""What post_train.py does of its own, where TRL is not installed: settings, prompts, a reward, a model's score.

post_child.main(["MODEL", "prompts.jsonl", "reward.py:cat"])
post_child.main(["--config", "post.yaml"])
post_child.main(["borders", "learning_rate", "seed"])       # a line of JSON for each value of ``VALUES``
post_child.main(["whole", "--config", "post.yaml"])         # post_train.py; without TRL, a stand-in is its trainer
post_child.main(["chatty", "FOLDER"])                       # write a small chat model
"""

import contextlib
import importlib.util
import json
import logging
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.hub import client
from pretrain.model import pretrained
from pretrain.post import problems, rewards

log = logging.getLogger("pretrain.post_child")
LONGEST = 3  # tokens of a completion
ACCEPTED = "these settings are accepted"
TRL = importlib.util.find_spec("trl") is not None
# In YAML's words, so that each is read as a user's is.
VALUES = (
    "0",
    "-0.0",
    "1",
    "-1",
    "2",
    "1.5",
    "''",
    "[]",
    "null",
    "true",
    str(10**30),
    "1e400",
    ".nan",
    "-.inf",
    "x" * 5000,
)
TASK = "model: m\nreward: addition\nprompts: p.jsonl\nheld_out: h.jsonl\noutput_dir: out\nuse_cpu: true\n"


@exit_on_bad_input
def main(argv: list[str]) -> int:
    """Read a file of settings, or score a model: its name, a file of prompts, a reward."""
    console.start(is_main=True)
    if hasattr(console, "clean_prints"):
        console.clean_prints()
    if argv[0].startswith("--"):
        return read_settings(argv)
    if argv[0] in ASKED:
        return ASKED[argv[0]](argv[1:])
    model_name, prompts, reward_name = argv
    client.bound_client()
    reward = rewards.CheckedReward(reward_name, rewards.find(reward_name), None)
    rows = problems.read("prompts", prompts)
    name = pretrained.find(model_name, "model =")
    tokenizer, model = tokenization.load(name, of_model=True), pretrained.load(name).float()
    problems.check(model, tokenizer, rows, LONGEST)
    value = problems.score(model, tokenizer, rows, reward, LONGEST)
    log.info(f"{len(rows)} prompts: {value:.3f}; {reward.faults} of {reward.calls} calls failed")
    return 0


def read_settings(argv: list[str]) -> int:
    """Read settings as post_train.py does; without TRL, those of Transformers' trainer, which TRL's extend."""
    if not importlib.util.find_spec("pretrain.post.settings"):  # an older tree
        import post_train

        return post_train.main(argv)
    from pretrain.post import settings

    settings.read(argv, config())
    raise BadInput(ACCEPTED)


def config() -> type:
    """Return TRL's GRPOConfig, or where it is not installed Transformers' with the keys of it that we have rules for."""
    if TRL:
        from trl import GRPOConfig

        return GRPOConfig
    from transformers import TrainingArguments

    @dataclass
    class Config(TrainingArguments):
        num_generations: int | None = 8
        max_completion_length: int | None = 256
        temperature: float = 1.0
        beta: float = 0.0
        scale_rewards: str = "group"
        loss_type: str = "dapo"

    return Config


def try_borders(keys: list[str]) -> int:
    """Print for each key, its kinds, and which of VALUES is taken (null), or refused with which lines."""
    import typing

    from pretrain.post import settings

    kind = config()
    hints = typing.get_type_hints(settings.Task) | typing.get_type_hints(kind) | settings.HINTS
    for key in keys or [
        name for name in hints if name in {*kind.__dataclass_fields__, *settings.Task.__dataclass_fields__}
    ]:
        for value in VALUES if keys else ():
            others = "".join(line for line in TASK.splitlines(keepends=True) if not line.startswith(f"{key}:"))
            Path("borders.yaml").write_text(f"{others}{key}: {value}\n")
            lines = None
            try:
                settings.read(["--config", "borders.yaml"], kind)
            except BadInput as error:
                lines = error.lines
            print(json.dumps([key, value, lines]))
        if not keys:
            options = typing.get_args(hints[key]) or (hints[key],)
            print(json.dumps([key, [getattr(one, "__name__", str(one)) for one in options]]))
    return 0


def run_whole(argv: list[str]) -> int:
    """Be post_train.py; the stand-in calls the reward and the report as TRL's trainer does, and changes no weight."""
    import post_train

    if not TRL:
        sys.modules["trl"] = types.SimpleNamespace(GRPOConfig=config(), GRPOTrainer=_Trainer)
    return post_train.main(argv)


class _Trainer:
    def __init__(self, model, reward_funcs, args, train_dataset, processing_class, callbacks):
        self.model, self.rewards, self.args, self.rows = model, reward_funcs, args, train_dataset
        self.callbacks, self.accelerator = callbacks, types.SimpleNamespace(is_main_process=True)
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)

    def remove_callback(self, kind: type) -> None:
        """Have none of Trainer's own."""

    def train(self, resume_from_checkpoint: str | None) -> None:
        """Take max_steps steps."""
        state = types.SimpleNamespace(global_step=0, max_steps=max(1, self.args.max_steps))
        for report in self.callbacks:
            report.on_train_begin(self.args, state, None)
        for step in range(1, state.max_steps + 1):
            state.global_step = step
            prompts = self.rows["prompt"][:2]
            completions = ["a" if isinstance(one, str) else [{"role": "assistant", "content": "a"}] for one in prompts]
            values = [value for reward in self.rewards for value in reward(prompts=prompts, completions=completions)]
            for report in self.callbacks:
                report.on_log(self.args, state, None, logs={"reward": sum(values) / len(values)})
        for report in self.callbacks:
            report.on_train_end(self.args, state, None)


def write_chatty(argv: list[str]) -> int:
    """Write a chat model that knows letters, digits and what a terminal obeys."""
    import string

    import small_models
    import torch

    from pretrain.model import export
    from pretrain.post import chat

    torch.manual_seed(3)
    tokenizer = tokenization.make_characters([string.printable + "é\x1b\x07\u202e"])
    model = small_models.built(sequence_length=96, n_embd=32, vocab_size=128)
    chat.add_chat(model, tokenizer)
    with contextlib.suppress(AttributeError):  # so that different questions have different answers
        torch.nn.init.normal_(model.transformer.wpe.weight, std=0.5)
    export.write(model, Path(argv[0]), tokenizer)
    return 0


ASKED = {"borders": try_borders, "whole": run_whole, "chatty": write_chatty}
