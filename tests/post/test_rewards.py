"""Rewards: a right completion has the reward 1, and a failing reward function counts as 0."""

import logging
import math

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post import rewards

FUNCTION = "def add(a, b):\n"


@pytest.mark.parametrize(
    ("name", "prompt", "completion", "expected"),
    [
        ("addition", "12+34=", " 46\n", 1),
        ("addition", "12+34=", "046", 0),
        ("brackets", "([", "])()", 1),
        ("brackets", "([", ")]", 0),
        ("brackets", "", "", 0),
        ("python_compiles", FUNCTION, "    return a + b\n", 1),
        ("python_compiles", FUNCTION, "    pass\n", 0),
        ("python_compiles", "x = 1\n", "# nothing\n", 0),
        pytest.param("python_compiles", "x = ", "(" * 5000, 0, id="5000 brackets"),
    ],
)
def test_right_completion_has_reward_one(name, prompt, completion, expected):
    reward = rewards.find_reward(name)

    assert reward(prompt, completion) == expected


def test_reward_may_be_function_of_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def short(prompt, completion):\n    return -len(completion)\n"
    )

    reward = rewards.load_reward("mine.py:short", None)

    assert reward(["a"], ["bcd"]) == [-3]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("adition", "no such reward.* addition, brackets, python_compiles"),
        ("nowhere.py:short", r"running nowhere\.py failed.* FileNotFoundError"),
        ("mine.py:long", r"mine\.py does not define a function named long"),
        ("broken.py:short", r"running broken\.py failed.* ZeroDivisionError"),
    ],
)
def test_unusable_reward_is_rejected(tmp_path, monkeypatch, name, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")

    with pytest.raises(BadInput, match=f"reward = {name}: .*{problem}"):
        rewards.find_reward(name)


@pytest.fixture
def characters():
    """Return a tokenizer whose padding token is not the end of text.

    Otherwise the end of a text would be treated as padding.
    """
    tokenizer = tokenization.make_characters(["abcd"])
    tokenizer.pad_token = "d"
    return tokenizer


@pytest.fixture
def classifier(characters):
    """Return a small reward model."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(characters),
        n_positions=12,
        n_layer=1,
        n_head=1,
        n_embd=8,
        num_labels=1,
        pad_token_id=characters.pad_token_id,
    )
    return GPT2ForSequenceClassification(config).eval()


def save(model, tokenizer, folder) -> str:
    """Save a model and its tokenizer, and return the path of the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_reward_model_scores_text_before_stop(characters, classifier, tmp_path):
    texts = ["ab", "abb", "a" * 40]
    expected = []
    for text in texts:
        ids = [*characters(text)["input_ids"], characters.eos_token_id]
        with torch.no_grad():
            expected.append(float(classifier(torch.tensor([ids[:12]])).logits))
    reward = rewards.load_reward(save(classifier, characters, tmp_path / "judge"), "c")

    values = reward(["a", "a", "a" * 40], ["bca", "bb", ""])

    assert values == pytest.approx(expected, abs=1e-6)
    assert reward.calls == 3


def test_language_model_is_not_a_reward_model(characters, classifier, tmp_path):
    folder = save(GPT2LMHeadModel(classifier.config), characters, tmp_path / "writer")

    with pytest.raises(BadInput, match="not a sequence classifier"):
        rewards.load_reward(folder, None)


def test_failed_calls_count_as_zero(caplog):
    """Only the first failure is logged."""
    values = {"a": 1.0, "b": math.nan, "c": math.inf, "d": "1.0", "e": None}  # "f" is missing
    reward = rewards.CheckedReward(
        "mine.py:short", lambda prompt, completion: values[completion], None
    )

    with caplog.at_level(logging.WARNING):
        result = reward(["p"] * 6, list("abcdef"), trainer_state=None)

    assert result == [1.0, 0, 0, 0, 0, 0]
    assert reward.calls == 6
    assert reward.failures == 5
    assert reward.__name__ == "short"
    assert reward.first_failure == "returned nan for prompt 'p', completion 'b'"
    assert len(caplog.records) == 1
    assert f"short {reward.first_failure}" in caplog.records[0].message


def test_reward_gets_last_message_and_text_before_stop():
    calls = []

    def record_call(prompt, completion):
        calls.append((prompt, completion))
        return 0

    reward = rewards.CheckedReward("mine", record_call, "\n")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answer = [{"role": "assistant", "content": "a"}]

    reward(["1+1=", messages], ["2\n", answer])

    assert calls == [("1+1=", "2"), ("u", "a")]
