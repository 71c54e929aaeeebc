"""Prompts are read from rows, checked against the model, and completed greedily."""

import json

import odd_tokenizers
import pytest
import torch
from small_models import build_small_model, randomize_weights, stock_copy

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post import chat, rewards
from ursa_minor.post import prompts as prompt_sets

MESSAGES = [{"role": "user", "content": "a"}]
LETTERS = "abcdefghijklmnopqrstuvwxyz\n"


@pytest.fixture
def model():
    """Return a small model with random weights."""
    model = stock_copy(randomize_weights(build_small_model(sequence_length=32)))
    num_used = len(tokenization.make_characters([LETTERS]))
    model.generation_config.suppress_tokens = list(range(num_used, 64))
    return model


@pytest.fixture
def tokenizer():
    """Return a tokenizer with one token for each letter."""
    return tokenization.make_characters([LETTERS])


def write_rows(path, *rows) -> str:
    """Write a JSON lines file, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Reading


def test_prompts_are_column_of_current_files(tmp_path):
    path = write_rows(tmp_path / "p1.jsonl", {"prompt": "a", "more": 1}, {"prompt": "b", "more": 2})
    assert prompt_sets.read("prompts", path) == ["a", "b"]

    write_rows(tmp_path / "p1.jsonl", {"prompt": "changed"})
    write_rows(tmp_path / "p2.jsonl", {"prompt": "c"})
    assert prompt_sets.read("prompts", str(tmp_path / "p*.jsonl")) == ["changed", "c"]


def test_file_name_may_look_like_pattern(tmp_path):
    path = write_rows(tmp_path / "p[1].jsonl", {"prompt": MESSAGES})

    assert prompt_sets.read("prompts", path) == [MESSAGES]


def test_prompts_of_url_are_rejected():
    with pytest.raises(BadInput, match="must be in local files"):
        prompt_sets.read("prompts", "https://host/p.jsonl")


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("a.txt", [{"prompt": "a"}], r"local files of one format.* \.parquet, \.jsonl"),
        ("a.jsonl", [{"text": "a"}], "all rows must contain a text.* The columns are text"),
        ("a.jsonl", [{"prompt": "a"}, {"prompt": ""}], "all rows must contain a text"),
        ("a.jsonl", [{"prompt": [{"role": "user"}]}], "messages with role and content"),
        ("a.jsonl", ["no row"], "cannot be read|The columns are"),
    ],
    ids=["format", "column", "empty", "messages", "not an object"],
)
def test_rows_without_prompts_are_rejected(tmp_path, name, rows, problem):
    path = write_rows(tmp_path / name, *rows)

    with pytest.raises(BadInput, match=rf"held_out = .*{name}.*{problem}"):
        prompt_sets.read("held_out", path)


# Checks against the model


def test_prompts_with_ids_are_accepted(tokenizer):
    prompt_sets.check(tokenizer, ["abc"])


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (["abc", "Ö"], "no id for 'Ö'"),
        (["a", MESSAGES], "some prompts are texts, and some are lists of messages"),
        ([MESSAGES], r"no chat template.* export_model\.py RUN --chat"),
    ],
    ids=["no id", "mixed", "no template"],
)
def test_prompts_without_ids_are_rejected(tokenizer, prompts, problem):
    with pytest.raises(BadInput, match=problem):
        prompt_sets.check(tokenizer, prompts)


def drop_long(tokenizer, prompts, *, max_completion_length=5, context=32) -> list:
    """Return the prompts that fit."""
    return prompt_sets.drop_long(
        "prompts = p.jsonl",
        tokenizer,
        prompts,
        context=context,
        max_completion_length=max_completion_length,
    )


def test_long_prompts_are_dropped_with_warning(tokenizer, caplog):
    fitting = ["abc", "a" * 27]

    assert drop_long(tokenizer, fitting) == fitting
    assert not caplog.text
    assert drop_long(tokenizer, [*fitting, "a" * 28, "b" * 40]) == fitting
    assert "prompts = p.jsonl: 2 of 4 prompts are too long" in caplog.text


def test_prompts_fit_unlimited_context(tokenizer):
    assert drop_long(tokenizer, ["a" * 99], context=None) == ["a" * 99]


@pytest.mark.parametrize(
    ("prompt", "max_completion_length", "problem"),
    [
        ("a" * 27, 6, "26 tokens .* has 27 .* --max_completion_length 5 or less"),
        ("abc", 40, "0 tokens .* has 3 .* --max_completion_length 29 or less"),
        ("a" * 32, 1, "31 tokens .* has 32 tokens. Use shorter prompts"),
    ],
    ids=["one token", "long completion", "long prompt"],
)
def test_error_explains_why_no_prompt_fits(tokenizer, prompt, max_completion_length, problem):
    prompts = [prompt, prompt + "a" * 30]

    message = f"^prompts = p.jsonl: all 2 prompts are too long, .*context of 32 tokens .*{problem}"
    with pytest.raises(BadInput, match=message):
        drop_long(tokenizer, prompts, max_completion_length=max_completion_length)


def test_prompts_must_fill_one_batch():
    prompt_sets.require_batch("prompts = p", ["a"] * 8, completions=64, num_generations=8)

    with pytest.raises(BadInput, match="^prompts = p: a batch needs 8 prompts .* only 7"):
        prompt_sets.require_batch("prompts = p", ["a"] * 7, completions=64, num_generations=8)


def test_stop_is_one_token(model, tokenizer):
    prompt_sets.stop_at(model, tokenizer, "\n")

    line_break = tokenizer("\n")["input_ids"][0]
    expected = sorted([tokenizer.eos_token_id, line_break])
    assert model.generation_config.eos_token_id == expected


def test_stop_of_two_tokens_is_rejected(model, tokenizer):
    with pytest.raises(BadInput, match="stop = 'ab' is encoded as 2 tokens"):
        prompt_sets.stop_at(model, tokenizer, "ab")


# Completions


class RecordingReward:
    """A reward function that records its calls and always returns the same value."""

    def __init__(self, value: float):
        self.value = value
        self.calls = []

    def __call__(self, prompt, completion):
        self.calls.append((prompt, completion))
        return self.value


def complete_alone(model, tokenizer, prompt: str) -> str:
    """Return the greedy completion of a prompt before the line break."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.eval().generate(
        **inputs, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    text = tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)
    return text.partition("\n")[0]


class RewardForText(RecordingReward):
    """A recording reward function that gives nothing for an empty completion."""

    def __call__(self, prompt, completion):
        value = super().__call__(prompt, completion)
        return value if completion else 0


def test_held_out_prompts_are_completed_as_if_alone(model, tokenizer):
    prompt_sets.stop_at(model, tokenizer, "\n")
    prompts = ["a", "bcdefg", "xyz"]
    function = RewardForText(0.5)
    reward = rewards.CheckedReward("mine", function, "\n")
    model.train()

    value = prompt_sets.score(model, tokenizer, prompts, reward, 6)

    assert model.training
    completions = dict(function.calls)
    num_texts = sum(completion != "" for completion in completions.values())
    assert value == 0.5 * num_texts / 3
    for prompt in prompts:
        assert completions[prompt] == complete_alone(model, tokenizer, prompt)


def test_first_space_of_completion_is_kept():
    """GRPOTrainer decodes a completion alone, which loses the space before its first word."""
    tokenizer = odd_tokenizers.llama_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    function = RecordingReward(1.0)
    reward = rewards.CheckedReward("mine", function, None)
    stone = tokenizer.convert_tokens_to_ids("▁stone")
    model = stock_copy(build_small_model(vocab_size=512, sequence_length=32))

    def favor_stone(module, args, logits):
        return logits.index_fill(-1, torch.tensor([stone]), 1e4)

    model.lm_head.register_forward_hook(favor_stone)
    prompt_sets.stop_at(model, tokenizer, None)
    completion_ids = [[stone, stone, tokenizer.eos_token_id]]

    prompt_sets.score(model, tokenizer, ["the river"], reward, 2)
    trained = prompt_sets.with_completions_of(tokenizer, reward)
    values = trained(["the river"], ["stone stone"], completion_ids=completion_ids, step=1)
    values_without_ids = trained(["the river"], ["stone"])

    assert trained.__name__ == "mine"
    assert values == [1.0]
    assert values_without_ids == [1.0]
    completions = [completion for _, completion in function.calls]
    assert completions == [" stone stone", " stone stone", "stone"]


def test_reward_that_always_fails_is_rejected(model, tokenizer):
    prompt_sets.stop_at(model, tokenizer, None)
    reward = rewards.CheckedReward("addition", rewards.addition, None)

    message = "reward addition failed for every prompt.* ValueError: 'abc' is not an add"
    with pytest.raises(BadInput, match=message):
        prompt_sets.score(model, tokenizer, ["abc"], reward, 4)


def test_chats_are_completed_through_template(model):
    tokenizer = tokenization.make_characters([LETTERS + "<|>_"])
    chat.add_chat(model, tokenizer)
    prompt_sets.stop_at(model, tokenizer, None)
    function = RecordingReward(0)
    reward = rewards.CheckedReward("mine", function, None)
    messages = [{"role": "user", "content": "ab"}]

    prompt_sets.score(model, tokenizer, [messages], reward, 4)

    assert len(model.generation_config.eos_token_id) == 2
    assert [prompt for prompt, _ in function.calls] == ["ab"]
