"""What post_train.py does of its own, where TRL is not installed: settings, prompts, a reward, a model's score.

post_child.main(["MODEL", "prompts.jsonl", "reward.py:cat"])
post_child.main(["--config", "post.yaml"])
post_child.main(["borders", "learning_rate", "seed"])       # a line of JSON for each value of ``VALUES``
post_child.main(["whole", "--config", "post.yaml"])         # post_train.py; without TRL, a stand-in is its trainer
post_child.main(["chatty", "FOLDER"])                       # write a small chat model
post_child.main(["made", "FOLDER", "LETTERS", "3"])         # a model of these letters and so many rows of padding
post_child.main(["worth", "rewards.json"])                  # print what rewards return
post_child.main(["piped", "generate.py", "--model", "m"])   # a command whose reader has left

References, by Transformers' own model and nothing of the product:

post_child.main(["continued", "asked.json"])                # texts that continue a prompt, or answer a chat's messages
post_child.main(["held", "FOLDER", "held_out.jsonl", "stop", "3"])  # what post-training prints: a mean reward
post_child.main(["losses", "FOLDER", "0", "a.txt", "b.txt"])     # of a model on documents
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import runpy
import statistics
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.hub import client
from pretrain.model import pretrained
from pretrain.post import problems, rewards

log = logging.getLogger("pretrain.post_child")
LONGEST = 3  # tokens of a completion
COMPLETION, STEP = "ab\ncd", 1.25  # of the stand-in
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

    hidden = os.environ.get("FAULTS_HIDES", "").split()
    if "trl" not in hidden and (not TRL or "FAULTS_SEEN" in os.environ):
        sys.modules["trl"] = types.SimpleNamespace(GRPOConfig=config(), GRPOTrainer=_Trainer)
    sys.modules |= dict.fromkeys(hidden)  # as where they are not installed
    return post_train.main(argv)


class _Trainer:
    """Each step trains every weight by a rule: it becomes STEP times what it was. Seen is what TRL would have got."""

    def __init__(self, model, reward_funcs, args, train_dataset, processing_class, callbacks):
        self.model, self.rewards, self.args, self.rows = model, reward_funcs, args, train_dataset
        is_main = os.environ.get("RANK", "0") == "0"
        self.callbacks, self.accelerator = callbacks, types.SimpleNamespace(is_main_process=is_main)
        self.tokenizer, self.removed = processing_class, []
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)

    def remove_callback(self, kind: type) -> None:
        """Have none of Trainer's own."""
        self.removed.append(kind.__name__)

    def train(self, resume_from_checkpoint: str | None) -> None:
        """Take max_steps steps, behind the checkpoint's."""
        begun = int(resume_from_checkpoint.rpartition("-")[2]) if resume_from_checkpoint else 0
        state = types.SimpleNamespace(global_step=begun, max_steps=max(1, self.args.max_steps))
        if os.environ.get("FAULTS_SEEN"):
            Path(os.environ["FAULTS_SEEN"]).write_text(json.dumps(self.seen() | {"resumed": resume_from_checkpoint}))
        for report in self.callbacks:
            report.on_train_begin(self.args, state, None)
        for step in range(begun + 1, state.max_steps + 1):
            kind, at = os.environ.get("FAULTS_TRAINER_FAILS", "ValueError 0").split()
            if step == int(at):
                raise ValueError("odd \x1b[2J") if kind == "ValueError" else OSError(int(kind), os.strerror(int(kind)))
            state.global_step = step
            prompts = self.rows["prompt"][:2]
            texts = [COMPLETION[:step], COMPLETION]
            completions = [
                text if isinstance(one, str) else [{"role": "assistant", "content": text}]
                for one, text in zip(prompts, texts, strict=False)
            ]
            more = {"completion_ids": [[1]] * len(prompts), "trainer_state": state}
            values = [value for r in self.rewards for value in r(prompts=prompts, completions=completions, **more)]
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(STEP)
            for report in self.callbacks:
                report.on_log(self.args, state, None, logs={"loss": 0.0, "reward": sum(values) / len(values)})
                report.on_log(self.args, state, None, logs={"train_runtime": 1.0})
        for report in self.callbacks:
            report.on_train_end(self.args, state, None)

    def seen(self) -> dict:
        """Return what a trainer is given, and whether a row that is padded is read as alone."""
        row, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 5, 6, 7]])
        mask = (torch.arange(5) > 1).long()[None]
        with torch.no_grad():
            alone, with_mask = self.model(row).logits, self.model(padded, attention_mask=mask).logits[:, 2:]
            cache = self.model(padded[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
            last = self.model(padded[:, 4:], attention_mask=mask, past_key_values=cache).logits
            shifted = self.model(row, attention_mask=row > 0, position_ids=torch.tensor([[3, 4, 5]])).logits
        pairs = ((alone, with_mask), (alone[:, 2:], last), (alone, shifted))
        return {
            "args": {key: value for key, value in vars(self.args).items() if isinstance(value, (str, int, float))},
            "environment": dict(os.environ),
            "prompts": list(self.rows["prompt"]),
            "eos": self.model.generation_config.eos_token_id,
            "dtype": str(self.model.dtype),
            "tokens": len(self.tokenizer),
            "removed": sorted(self.removed),
            "positions": [torch.allclose(one, other, atol=1e-3) for one, other in pairs],
            "reward": self.rewards[0].__name__,
        }


def write_chatty(argv: list[str]) -> int:
    """Write a chat model that knows letters, digits and what a terminal obeys."""
    import string

    from pretrain.model import export
    from pretrain.post import chat

    model, tokenizer = _made(string.printable + "é\x1b\x07\u202e", 128 - 105)
    chat.add_chat(model, tokenizer)
    with torch.no_grad():  # some answers end by themselves
        rows = model.get_input_embeddings().weight
        rows[tokenizer.convert_tokens_to_ids(chat.END)] = rows[tokenizer.convert_tokens_to_ids("D")] * 1.1
    export.write(model, Path(argv[0]), tokenizer)
    return 0


def write_made(argv: list[str]) -> int:
    """Write a model of each of some letters, its text's end, and some rows of padding."""
    from pretrain.model import export

    model, tokenizer = _made(argv[1], int(argv[2]), argv[3])
    export.write(model, Path(argv[0]), tokenizer)
    return 0


def _made(letters: str, padding: int, kind: str = "gpt2") -> tuple:
    import small_models

    from pretrain.model import build
    from pretrain.recipe import keys

    tokenizer = tokenization.make_characters([letters])
    shape = small_models.SHAPE | {"sequence_length": 96, "vocab_size": len(tokenizer) + padding}
    if kind == "llama":
        shape |= {"architecture": kind, "num_key_value_heads": 1, "intermediate_size": 48}
        shape |= {"tie_word_embeddings": True, "rope_theta": 1e4, "resid_pdrop": None, "embd_pdrop": None}
    model = build.build(keys.Model(**shape), eos_token_id=tokenizer.eos_token_id)
    small_models.randomize(model)  # so that different questions have different answers
    with torch.no_grad():  # some texts end by themselves; the padding is likelier than any letter
        rows = model.get_input_embeddings().weight
        rows[tokenizer.eos_token_id] = rows[24] * 1.1
        rows[len(tokenizer) :] = rows[27] * 4
    return model, tokenizer


def print_worth(argv: list[str]) -> int:
    """Print of each of a file's rows (reward, stop, prompts, completions) the values, and how many calls failed."""
    for name, stop, prompts, completions in json.loads(Path(argv[0]).read_text()):
        reward = rewards.CheckedReward(name, rewards.find(name), stop)
        try:
            values = reward(prompts=prompts, completions=completions, more=1)
        except KeyboardInterrupt:
            values = "interrupted"
        print(json.dumps([values, reward.calls, reward.faults, math.isfinite(reward.calls)]))
    return 0


def run_piped(argv: list[str]) -> int:
    """Be a command whose standard output is a pipe that nobody reads any more, or the device that is named last."""
    reader, writer = os.pipe()
    os.close(reader)
    if argv[-1].startswith("/dev/"):
        writer = os.open(argv.pop(), os.O_WRONLY)
    os.dup2(writer, 1)
    os.close(writer)
    return importlib.import_module(Path(argv[0]).stem).main(argv[1:])


def _stock(folder: str) -> tuple:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def _continued(model, tokenizer, ids: list[int], ends: set[int], seed: int, how: dict) -> str:
    """Return what follows ids, a token at a time, without a cache; the window slides as docs say."""
    context, new = model.config.max_position_embeddings, []
    window = ids[1 - context :]
    torch.manual_seed(seed)
    for _ in range(how["max_new_tokens"]):
        row = model(torch.tensor([window])).logits[0, -1]
        row[len(tokenizer) :] = -math.inf
        if how["temperature"]:
            row = row / how["temperature"]
            if how["top_k"]:
                row[row < row.topk(min(how["top_k"], len(row))).values[-1]] = -math.inf
            order = row.argsort()
            kept = row[order].softmax(-1).cumsum(-1) > 1 - how["top_p"]
            if how["top_p"] < 1:
                row[order[~kept]] = -math.inf
            token = int(torch.multinomial(row.softmax(-1)[None], 1))
        else:
            token = int(row.argmax())
        if token in ends:
            break
        new.append(token)
        window.append(token)
        if len(window) == context:
            window = window[-(context // 2) :]
    return tokenizer.decode(new, skip_special_tokens=True)


def _chat_ids(tokenizer, said: list[tuple[str, str]]) -> list[int]:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    return tokenizer(f"{text}<|im_start|>assistant\n")["input_ids"]


def print_continued(argv: list[str]) -> int:
    """Write into wanted.txt what generate.py has to print: samples behind a prompt, or the answers to messages."""
    asked = json.loads(Path(argv[0]).read_text())
    model, tokenizer = _stock(asked["model"])
    how = {
        "max_new_tokens": 200,
        "temperature": 0.8,
        "top_k": 200,
        "top_p": 1.0,
        "seed": 1337,
        "num_samples": 1,
    } | asked
    eos, context = tokenizer.eos_token_id, model.config.max_position_embeddings
    Path("wanted.txt").touch()
    if "prompt" in asked:
        for number in range(how["num_samples"]):
            title = f"---- sample {number + 1} of {how['num_samples']}\n" if how["num_samples"] > 1 else ""
            ids = tokenizer(asked["prompt"])["input_ids"] or [eos]
            text = asked["prompt"] + _continued(model, tokenizer, ids, {eos}, how["seed"] + number, how)
            with open("wanted.txt", "a") as file:
                file.write(f"{title}{text}\n")
        return 0
    ends = {eos, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    said, room, longest = [], context - min(how["max_new_tokens"], context // 2), how["max_new_tokens"]
    for number, message in enumerate(asked["messages"]):
        said.append(("user", message))
        while len(ids := _chat_ids(tokenizer, said)) > room and len(said) > 1:
            said = said[2:]
        if len(ids) > room:
            said = []
            continue
        how["max_new_tokens"] = min(longest, context - len(ids))
        said.append(("assistant", _continued(model, tokenizer, ids, ends, how["seed"] + number, how)))
        with open("wanted.txt", "a") as file:
            file.write(said[-1][1] + "\n")
    return 0


def print_held(argv: list[str]) -> int:
    """Print the mean of the reward in reward.py over greedy completions of prompts, each made alone."""
    folder, file, stop, longest = argv
    (model, tokenizer), reward = _stock(folder), runpy.run_path("reward.py")["cat"]
    model = model.float()
    how = {"max_new_tokens": int(longest), "temperature": 0}
    ends, values = {tokenizer.eos_token_id, *tokenizer(stop)["input_ids"]}, []
    if tokenizer.chat_template:
        ends.add(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    for row in map(json.loads, Path(file).read_text().splitlines()):
        prompt, chat = row["prompt"], not isinstance(row["prompt"], str)
        said = [(one["role"], one["content"]) for one in prompt] if chat else []
        ids = _chat_ids(tokenizer, said) if chat else tokenizer(prompt)["input_ids"]
        values.append(0.0)
        with contextlib.suppress(ValueError):  # of a reward, which counts 0
            value = reward(said[-1][1] if chat else prompt, _continued(model, tokenizer, ids, ends, 0, how))
            values[-1] = value if math.isfinite(value) else 0.0
    print(statistics.fmean(values))
    return 0


def print_losses(argv: list[str]) -> int:
    """Print a model's loss on so many tokens (0: all) of documents, in windows as long as its context."""
    model, tokenizer = _stock(argv[0])
    model, most = model.float(), int(argv[1])
    ids = [i for name in argv[2:] for i in (tokenizer.eos_token_id, *tokenizer(Path(name).read_text())["input_ids"])]
    ids = ids[: most + 1] if most else ids
    window = min(model.config.max_position_embeddings, len(ids) - 1)
    starts = range(0, len(ids) - window, window)
    rows = torch.tensor([ids[start : start + window + 1] for start in starts])
    with torch.inference_mode():
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
    print(torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item())
    return 0


ASKED = {
    "borders": try_borders,
    "whole": run_whole,
    "chatty": write_chatty,
    "made": write_made,
    "worth": print_worth,
    "piped": run_piped,
    "continued": print_continued,
    "held": print_held,
    "losses": print_losses,
}
