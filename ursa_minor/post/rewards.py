"""Rewards that a program checks: what a completion of a prompt is worth. A user's own is ``file.py:function``."""

import ast
import logging
import math
import re
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import format_exception_only

import torch

from ursa_minor.base.errors import BadInput
from ursa_minor.model.adapters import check_no_adapter

log = logging.getLogger(__name__)

Reward = Callable[[str, str], float]  # of (prompt, completion)
TextOrMessages = str | list[dict[str, str]]  # plain, or the messages of a chat

CLOSES = {")": "(", "]": "[", "}": "{", ">": "<"}


def addition(prompt: str, completion: str) -> float:
    """Return 1 where ``completion`` is the sum that ``prompt`` asks for, as ``12+34=``; else 0."""
    match = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*=\s*", prompt)
    if match is None:
        raise ValueError(f"{prompt!r} is not an addition")
    return float(completion.strip() == str(int(match[1]) + int(match[2])))


def brackets(prompt: str, completion: str) -> float:
    """Return 1 where prompt and completion together are brackets that close in order, and nothing else; else 0."""
    opened = []
    for character in prompt + completion.strip():
        if character in CLOSES.values():
            opened.append(character)
        elif not opened or opened.pop() != CLOSES.get(character):
            return 0.0
    return float(not opened and bool(completion.strip()))


def python_compiles(prompt: str, completion: str) -> float:
    """Return 1 where prompt and completion together compile, and the completion does something; else 0.

    Comments, bare constants and ``pass`` do nothing. Nothing is run.
    """
    text = prompt + completion
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "completion", "exec", dont_inherit=True)
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    prompt_end = (prompt.count("\n") + 1, len(prompt.rpartition("\n")[2].encode()))
    done = (
        (node.end_lineno, node.end_col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass))
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )
    return float(any(end > prompt_end for end in done))


REWARDS = {reward.__name__: reward for reward in (addition, brackets, python_compiles)}


def find_reward(name: str) -> Reward:
    """Return a reward by name, or the function of a user's own file, as ``file.py:function``; the file is run."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        kinds = f"{', '.join(REWARDS)}, the folder of a reward model, or a function of your own as file.py:function"
        raise BadInput(f"reward = {name}: must be {kinds}")
    try:
        reward = runpy.run_path(path).get(function)
    except Exception as error:
        raise BadInput(
            f"reward = {name}: {path} cannot be run: {format_exception_only(error)[-1].strip()}"
        ) from None
    if not callable(reward):
        raise BadInput(f"reward = {name}: {path} has no function {function}")
    return reward


class CheckedReward:
    """A reward as GRPOTrainer calls it; a call that raises, or returns no finite number, counts 0 and is counted.

    Args:
        stop: what ends a completion; the reward is given the text before it, as padding behind it may be text.

    Attributes:
        calls, problems: how many there were.
        first_problem: what the first was, None where there was none.
    """

    def __init__(self, name: str, reward: Reward, stop: str | None):
        self.__name__, self.reward, self.stop = name.rpartition(":")[2], reward, stop
        self.calls = self.problems = 0
        self.first_problem: str | None = None

    def __call__(
        self, prompts: Sequence[TextOrMessages], completions: Sequence[TextOrMessages], **_: object
    ) -> list[float]:
        """Return each completion's reward."""
        return [self._one(plain(p), plain(c)) for p, c in zip(prompts, completions, strict=True)]

    def _one(self, prompt: str, completion: str) -> float:
        self.calls += 1
        completion = completion.partition(self.stop)[0] if self.stop else completion
        try:
            value = self.reward(prompt, completion)
            if math.isfinite(value):
                return float(value)
            problem = f"returned {value}"
        except Exception as error:  # also of what is no number
            problem = f"raised {format_exception_only(error)[-1].strip()}"
        self.problems += 1
        if self.first_problem is None:
            self.first_problem = f"{problem} for prompt {prompt!r}, completion {completion!r}"
            log.warning(f"reward {self.__name__} {self.first_problem}; this counts 0")
        return 0.0


class ModelReward:
    """What a reward model, as ``trl reward`` leaves it in a folder, says of prompts and their completions.

    Has CheckedReward's attributes; no call fails. Raises BadInput where the folder holds another kind of model.
    """

    def __init__(self, folder: str, stop: str | None):
        from transformers import AutoConfig, pipeline  # here, for they take seconds

        self.__name__, self.stop = folder, stop
        self.calls, self.problems, self.first_problem = 0, 0, None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            if "ForSequenceClassification" not in str(
                kind := AutoConfig.from_pretrained(folder).architectures
            ):
                raise BadInput(
                    f"reward = {folder}: is not a reward model but {kind}; train one: trl reward"
                )
            self.judge = pipeline(
                "text-classification", folder, function_to_apply="none", device=device
            )
        except (OSError, KeyError, RuntimeError) as error:
            raise BadInput(
                f"reward = {folder}: cannot be loaded: {format_exception_only(error)[-1].strip()}"
            ) from None
        tokenizer = self.tokenizer = self.judge.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # as RewardTrainer does

    def __call__(
        self, prompts: Sequence[TextOrMessages], completions: Sequence[TextOrMessages], **_: object
    ) -> list[float]:
        """Return each completion's reward; texts are ended as TRL's RewardTrainer ends them."""
        self.calls += len(prompts)
        answers = [
            plain(completion).partition(self.stop)[0] if self.stop else plain(completion)
            for completion in completions
        ]
        texts = [
            prompt + answer + self.tokenizer.eos_token
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": answer}], tokenize=False
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        cut = {"truncation": True, "max_length": self.judge.model.config.max_position_embeddings}
        scores = self.judge(
            texts, batch_size=len(texts), padding=True, add_special_tokens=False, **cut
        )
        return [row["score"] for row in scores]


def checked(name: str, stop: str | None) -> CheckedReward | ModelReward:
    """Return the reward of a name: one of ours, a user's own, or a reward model's folder."""
    check_no_adapter(Path(name), f"reward = {name}")
    if Path(name, "config.json").is_file():
        return ModelReward(name, stop)
    return CheckedReward(name, find_reward(name), stop)


def plain(text: TextOrMessages) -> str:
    """Return a text, or the content of the last message of a chat."""
    return text if isinstance(text, str) else text[-1]["content"]
