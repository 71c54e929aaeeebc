"""Rewards: what is right is worth 1, and a reward that fails costs a zero, not the run."""

import logging
import math
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from pretrain.base.errors import BadInput
from pretrain.data import tokenization
from pretrain.post import rewards


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [("12+34=", " 46\n", 1), ("12+34=", "046", 0), ("9+1=", "", 0)],
)
def test_addition_is_the_sum_and_nothing_else(prompt, completion, value):
    assert rewards.addition(prompt, completion) == value


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [("([", "])()", 1), ("([", ")]", 0), ("([", "]", 0), ("(", ")x", 0), ("", "", 0)],
)
def test_brackets_close_in_order_and_all(prompt, completion, value):
    assert rewards.brackets(prompt, completion) == value


@pytest.mark.parametrize(
    ("prompt", "completion", "value"),
    [
        ("def add(a, b):\n", "    return a + b\n", 1),
        ("def add(a, b):\n", "    return a +\n", 0),
        ("def add(a, b):\n", "    pass\n", 0),
        ("x = 1\n", "# nothing\n", 0),
        ("x = ", "1", 1),
        ("x = 1\n", "return x", 0),
        ("x = 1\n", "y = '\\d'\n", 1),
        ("x = ", "(" * 5000, 0),
    ],
)
def test_python_compiles_and_the_completion_does_something(prompt, completion, value):
    assert rewards.python_compiles(prompt, completion) == value


def test_ones_own_reward_is_a_function_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("def short(prompt, completion):\n    return -len(completion)\n")
    assert rewards.find(f"{tmp_path}/mine.py:short")("a", "bcd") == -3
    assert rewards.find("brackets") is rewards.brackets


def test_a_reward_models_folder_scores_a_text_that_ends_as_it_was_trained_on(tmp_path):
    characters = tokenization.make_characters(["abcd"])
    characters.pad_token = "d"  # were it the end of text, a text's own end would be taken for padding
    torch.manual_seed(1)
    shape = {"vocab_size": len(characters), "n_positions": 12, "n_layer": 1, "n_head": 1, "n_embd": 8, "num_labels": 1}
    model = GPT2ForSequenceClassification(GPT2Config(**shape, pad_token_id=characters.pad_token_id)).eval()
    model.save_pretrained(tmp_path / "judge")
    characters.save_pretrained(tmp_path / "judge")
    reward = rewards.checked(str(tmp_path / "judge"), "c")
    ids = [[*characters(text)["input_ids"], characters.eos_token_id] for text in ("ab", "abb", "a" * 40)]
    wanted = [float(model(torch.tensor([row[:12]])).logits) for row in ids]
    assert reward(["a", "a", "a" * 40], ["bca", "bb", ""]) == pytest.approx(wanted, abs=1e-6) and reward.calls == 3
    GPT2LMHeadModel(model.config).save_pretrained(tmp_path / "writer")
    characters.save_pretrained(tmp_path / "writer")
    with pytest.raises(BadInput, match="is not a reward model but .'GPT2LMHeadModel'.; train one: trl reward"):
        rewards.checked(str(tmp_path / "writer"), None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "adition",
            "must be addition, brackets, python_compiles, the folder of a reward model, or a function of your own",
        ),
        ("nowhere.py:short", "there is no file nowhere.py"),
        ("mine.py:long", "mine.py has no function long"),
        ("broken.py:short", "broken.py cannot be run: ZeroDivisionError"),
        ("ends.py:short", "ends.py cannot be run: SystemExit: 0"),
        ("a" * 5000 + ".py:short", "there is no file a{200}[.]{3}$"),
    ],
)
def test_a_reward_that_is_not_there_is_named_with_what_to_give(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def short(prompt, completion):\n    return 0\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(BadInput, match=words):
        rewards.find(name)


def test_a_call_that_raises_or_gives_no_number_counts_zero_and_is_counted(caplog):
    given = {"a": 1.0, "b": math.nan, "c": math.inf, "d": "no number", "e": None}
    reward = rewards.CheckedReward("mine.py:short", lambda prompt, completion: given[completion], None)
    with caplog.at_level(logging.WARNING):
        assert reward(["p"] * 6, list("abcdef"), trainer_state=None) == [1.0, 0, 0, 0, 0, 0]
    assert (reward.calls, reward.faults) == (6, 5) and reward.__name__ == "short"
    assert reward.first_fault == "returned nan for prompt 'p', completion 'b'"
    assert [record.message for record in caplog.records] == [f"reward short {reward.first_fault}; this counts 0"]


class Unsayable(Exception):
    def __str__(self):
        return self.text


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (lambda p, c: sys.exit(3), "raised SystemExit: 3"),
        (lambda p, c: (recurse := lambda: recurse())(), "raised RecursionError: maximum recursion depth exceeded"),
        (lambda p, c: (_ for _ in ()).throw(GeneratorExit()), "raised GeneratorExit"),
        (lambda p, c: (_ for _ in ()).throw(Unsayable()), "raised test_rewards.Unsayable: <exception str() failed>"),
        (lambda p, c: "1.0", "returned '1.0'"),
        (lambda p, c: [1.0, 2.0], "raised TypeError"),
    ],
)
def test_a_reward_that_ends_the_program_or_recurses_for_ever_counts_zero_and_is_warned_of_once(reward, fault, caplog):
    checked = rewards.CheckedReward("mine", reward, None)
    assert checked(["p"] * 3, ["c"] * 3) == [0, 0, 0] and (checked.calls, checked.faults) == (3, 3)
    assert checked.first_fault.startswith(fault) and len(caplog.records) == 1


def test_ctrl_c_within_a_reward_stops_the_run():
    def interrupted(prompt, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards.CheckedReward("mine", interrupted, None)(["p"], ["c"])


def test_a_reward_sees_the_text_before_the_stop_and_the_last_message_of_a_chat():
    seen = []
    reward = rewards.CheckedReward("mine", lambda *words: seen.append(words) or 0, "\n")
    reward(["1+1=", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]],
           ["2\n", [{"role": "assistant", "content": "a"}]])  # fmt: skip
    assert seen == [("1+1=", "2"), ("u", "a")]
