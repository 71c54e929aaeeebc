"""Rewards: what is right is worth 1, and a reward that fails costs a zero, not the run."""

import logging
import math

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post import rewards

ADD = "def add(a, b):\n"


def test_what_is_right_and_whole_is_worth_1():
    for reward, prompt, completion, value in (
        ("addition", "12+34=", " 46\n", 1),
        ("addition", "12+34=", "046", 0),
        ("brackets", "([", "])()", 1),
        ("brackets", "([", ")]", 0),
        ("brackets", "", "", 0),
        ("python_compiles", ADD, "    return a + b\n", 1),
        ("python_compiles", ADD, "    pass\n", 0),
        ("python_compiles", "x = 1\n", "# nothing\n", 0),
        ("python_compiles", "x = ", "(" * 5000, 0),
    ):
        assert rewards.find_reward(reward)(prompt, completion) == value


def test_ones_own_reward_is_a_function_of_a_file_and_one_that_is_not_there_is_named_with_what_to_give(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def short(prompt, completion):\n    return -len(completion)\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert rewards.load_reward("mine.py:short", None)(["a"], ["bcd"]) == [-3]
    for name, words in (
        (
            "adition",
            "there is no such reward. Use addition, brackets, python_compiles, the folder of a reward model, or a function of your",
        ),
        ("nowhere.py:short", "running nowhere.py failed. FileNotFoundError"),
        ("mine.py:long", "mine.py does not define a function named long"),
        ("broken.py:short", "running broken.py failed. ZeroDivisionError"),
    ):
        with pytest.raises(BadInput, match=f"reward = {name}: {words}"):
            rewards.find_reward(name)


def test_a_reward_models_folder_scores_a_text_that_ends_as_it_was_trained_on(tmp_path):
    characters = tokenization.make_characters(["abcd"])
    characters.pad_token = (
        "d"  # were it the end of text, a text's own end would be taken for padding
    )
    torch.manual_seed(1)
    shape = {
        "vocab_size": len(characters),
        "n_positions": 12,
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
        "num_labels": 1,
    }
    model = GPT2ForSequenceClassification(
        GPT2Config(**shape, pad_token_id=characters.pad_token_id)
    ).eval()
    for folder, kind in (("judge", model), ("writer", GPT2LMHeadModel(model.config))):
        kind.save_pretrained(tmp_path / folder)
        characters.save_pretrained(tmp_path / folder)
    reward = rewards.load_reward(str(tmp_path / "judge"), "c")
    ids = [
        [*characters(text)["input_ids"], characters.eos_token_id]
        for text in ("ab", "abb", "a" * 40)
    ]
    wanted = [float(model(torch.tensor([row[:12]])).logits) for row in ids]
    assert (
        reward(["a", "a", "a" * 40], ["bca", "bb", ""]) == pytest.approx(wanted, abs=1e-6)
        and reward.calls == 3
    )
    with pytest.raises(BadInput, match="is not a sequence classifier.*Train one"):
        rewards.load_reward(str(tmp_path / "writer"), None)


def test_a_call_that_raises_or_gives_no_number_counts_zero_and_is_counted_and_the_first_is_shown(
    caplog,
):
    given = {"a": 1.0, "b": math.nan, "c": math.inf, "d": "1.0", "e": None}  # and nothing for "f"
    reward = rewards.CheckedReward(
        "mine.py:short", lambda prompt, completion: given[completion], None
    )
    with caplog.at_level(logging.WARNING):
        assert reward(["p"] * 6, list("abcdef"), trainer_state=None) == [1.0, 0, 0, 0, 0, 0]
    assert (reward.calls, reward.failures) == (6, 5) and reward.__name__ == "short"
    assert reward.first_failure == "returned nan for prompt 'p', completion 'b'"
    assert [record.message for record in caplog.records] == [
        f"the reward function short {reward.first_failure}. This completion has the reward 0"
    ]


def test_a_reward_sees_the_text_before_the_stop_and_the_last_message_of_a_chat():
    seen = []
    reward = rewards.CheckedReward("mine", lambda *words: seen.append(words) or 0, "\n")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    reward(["1+1=", chat], ["2\n", [{"role": "assistant", "content": "a"}]])
    assert seen == [("1+1=", "2"), ("u", "a")]
