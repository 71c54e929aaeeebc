"""Reward functions: they score the completion of a prompt, usually from 0 to 1.

A reward is one of ``REWARDS``, a function in a user's file (``file.py:function``), or the folder of
a reward model.
"""

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

Reward = Callable[[str, str], float]  # maps a prompt and a completion to the reward
TextOrMessages = str | list[dict[str, str]]  # plain text, or the messages of a chat

ADDITION = re.compile(r"\s*(\d+)\s*\+\s*(\d+)\s*=\s*")
OPENING_BRACKETS = {")": "(", "]": "[", "}": "{", ">": "<"}


def addition(prompt: str, completion: str) -> float:
    """Return 1 if the completion is the sum that the prompt asks for, else 0.

    Args:
        prompt: an addition of two numbers, such as ``12+34=``.

    Raises:
        ValueError: the prompt is not an addition.
    """
    match = ADDITION.fullmatch(prompt)
    if match is None:
        raise ValueError(f"{prompt!r} is not an addition such as 12+34=")
    correct = int(match[1]) + int(match[2])
    return float(completion.strip() == str(correct))


def brackets(prompt: str, completion: str) -> float:
    """Return 1 if prompt and completion together are balanced brackets and nothing else, else 0."""
    completion = completion.strip()
    if not completion:
        return 0.0
    unclosed = []
    for character in prompt + completion:
        if character in OPENING_BRACKETS.values():
            unclosed.append(character)
        elif not unclosed or unclosed.pop() != OPENING_BRACKETS.get(character):
            return 0.0
    return 0.0 if unclosed else 1.0


def python_compiles(prompt: str, completion: str) -> float:
    """Return 1 if prompt and completion compile together, else 0.

    The completion must also do something. Comments, constants that stand alone and ``pass`` do
    nothing. The code is not run.
    """
    text = prompt + completion
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "completion", "exec", dont_inherit=True)
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    # Line and column in bytes, as the nodes of the tree have them.
    last_prompt_line = prompt.rpartition("\n")[2]
    prompt_end = (prompt.count("\n") + 1, len(last_prompt_line.encode()))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for statement in statements:
        statement_end = (statement.end_lineno, statement.end_col_offset)
        if _does_something(statement) and statement_end > prompt_end:
            return 1.0
    return 0.0


def _does_something(statement: ast.stmt) -> bool:
    """Return whether a statement does something.

    The definition of a function or class does nothing, but the statements in it may.
    """
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return not isinstance(statement, (*definitions, ast.Pass))


REWARDS = {reward.__name__: reward for reward in (addition, brackets, python_compiles)}


def find_reward(name: str) -> Reward:
    """Return the reward function of a name.

    Args:
        name: a key of ``REWARDS``, or ``file.py:function``. The file is run.

    Raises:
        BadInput: there is no such reward, or the file cannot be run.
    """
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise BadInput(
            f"reward = {name}: there is no such reward. Use {', '.join(REWARDS)}, the folder of a "
            f"reward model, or a function of your own as file.py:function"
        )
    try:
        reward = runpy.run_path(path).get(function)
    except Exception as error:
        raise BadInput(f"reward = {name}: running {path} failed. {_summary(error)}") from None
    if not callable(reward):
        raise BadInput(
            f"reward = {name}: {path} does not define a function named {function}. Correct the "
            f"name after the colon"
        )
    return reward


def _summary(error: Exception) -> str:
    """Return the type and message of an error, as the last line of its traceback shows them."""
    return format_exception_only(error)[-1].strip()


class CheckedReward:
    """A reward function in the form that GRPOTrainer calls.

    A call that raises, or does not return a finite number, has the reward 0. It is counted, and the
    first one is logged.

    Args:
        name: name of the reward in the settings.
        reward: the function.
        stop: the token that ends a completion, or None. The reward gets the text before this
            token, because the padding after it may decode to text.

    Attributes:
        calls: number of completions so far.
        failures: number of calls that failed.
        first_failure: description of the first call that failed, or None.
    """

    def __init__(self, name: str, reward: Reward, stop: str | None):
        self.__name__ = name.rpartition(":")[2]
        self.reward = reward
        self.stop = stop
        self.calls = 0
        self.failures = 0
        self.first_failure: str | None = None

    def __call__(
        self, prompts: Sequence[TextOrMessages], completions: Sequence[TextOrMessages], **_: object
    ) -> list[float]:
        """Return the reward of each completion."""
        return [
            self._score(plain(prompt), plain(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def _score(self, prompt: str, completion: str) -> float:
        self.calls += 1
        completion = before_stop(completion, self.stop)
        try:
            value = self.reward(prompt, completion)
            if math.isfinite(value):
                return float(value)
            problem = f"returned {value}"
        except Exception as error:  # isfinite also raises one if the value is not a number
            problem = f"raised {_summary(error)}"
        self.failures += 1
        if self.first_failure is None:
            self.first_failure = f"{problem} for prompt {prompt!r}, completion {completion!r}"
            log.warning(
                f"the reward function {self.__name__} {self.first_failure}. This completion has "
                f"the reward 0"
            )
        return 0.0


class ModelReward:
    """A reward model in the form that GRPOTrainer calls: a sequence classifier of ``trl reward``.

    Args:
        folder: folder of the model.
        stop: the token that ends a completion, or None (see ``CheckedReward``).

    Attributes:
        calls: number of completions so far.
        failures: 0, because no call fails.
        first_failure: None.

    Raises:
        BadInput: the folder contains no reward model, or it cannot be loaded.
    """

    def __init__(self, folder: str, stop: str | None):
        # This import takes seconds.
        from transformers import AutoConfig, pipeline

        self.__name__ = folder
        self.stop = stop
        self.calls = 0
        self.failures = 0
        self.first_failure = None
        try:
            architectures = AutoConfig.from_pretrained(folder).architectures
            if "ForSequenceClassification" not in str(architectures):
                raise BadInput(
                    f"reward = {folder}: this model is not a sequence classifier, so it cannot be "
                    f"a reward model. Train one: trl reward --config "
                    f"recipes/post/reward_model.yaml"
                )
            self.classifier = pipeline(
                "text-classification",
                folder,
                function_to_apply="none",
                device="cuda" if torch.cuda.is_available() else "cpu",
            )
        except (OSError, KeyError, RuntimeError) as error:
            raise BadInput(
                f"reward = {folder}: the reward model cannot be loaded ({_summary(error)}). Use a "
                f"folder that trl reward has written"
            ) from None
        self.tokenizer = self.classifier.tokenizer
        if not self.tokenizer.pad_token:  # RewardTrainer does the same
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def __call__(
        self, prompts: Sequence[TextOrMessages], completions: Sequence[TextOrMessages], **_: object
    ) -> list[float]:
        """Return the reward of each completion."""
        self.calls += len(prompts)
        texts = []
        for prompt, completion in zip(prompts, completions, strict=True):
            answer = before_stop(plain(completion), self.stop)
            texts.append(self._training_text(prompt, answer))
        scores = self.classifier(
            texts,
            batch_size=len(texts),
            padding=True,
            add_special_tokens=False,
            truncation=True,
            max_length=self.classifier.model.config.max_position_embeddings,
        )
        return [score["score"] for score in scores]

    def _training_text(self, prompt: TextOrMessages, answer: str) -> str:
        """Return prompt and answer as RewardTrainer joins and ends them."""
        if isinstance(prompt, str):
            return prompt + answer + self.tokenizer.eos_token
        messages = [*prompt, {"role": "assistant", "content": answer}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


def load_reward(name: str, stop: str | None) -> CheckedReward | ModelReward:
    """Return a reward in the form that GRPOTrainer calls.

    Args:
        name: a name that ``find_reward`` accepts, or the folder of a reward model.
        stop: the token that ends a completion, or None.
    """
    check_no_adapter(Path(name), f"reward = {name}")
    if Path(name, "config.json").is_file():
        return ModelReward(name, stop)
    return CheckedReward(name, find_reward(name), stop)


def before_stop(completion: str, stop: str | None) -> str:
    """Return the part of a completion before the token ``stop``."""
    return completion.partition(stop)[0] if stop else completion


def plain(text: TextOrMessages) -> str:
    """Return a text, or the content of the last message of a chat."""
    return text if isinstance(text, str) else text[-1]["content"]
