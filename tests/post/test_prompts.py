"""Prompts: read from rows, checked against the model, and completed greedily as each would be alone."""

import json

import odd_tokenizers
import pytest
import torch
from small_models import build_small_model, randomize_weights, stock_copy

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post import chat, rewards
from ursa_minor.post import prompts as prompt_sets

CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def pair():
    """A small model that has learnt nothing, and its tokenizer."""
    model = stock_copy(randomize_weights(build_small_model(sequence_length=32)))
    tokenizer = tokenization.make_characters(["".join(map(chr, range(97, 123))) + "\n"])
    model.generation_config.suppress_tokens = list(range(len(tokenizer), 64))
    return model, tokenizer


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def test_prompts_are_a_column_of_rows_texts_or_chats_in_files_as_they_are_now(tmp_path):
    texts = rows(tmp_path / "p1.jsonl", {"prompt": "a", "more": 1}, {"prompt": "b", "more": 2})
    assert prompt_sets.read("prompts", texts) == ["a", "b"]
    rows(tmp_path / "p1.jsonl", {"prompt": "changed"})
    rows(tmp_path / "p2.jsonl", {"prompt": "c"})
    assert prompt_sets.read("prompts", str(tmp_path / "p*.jsonl")) == ["changed", "c"]
    assert prompt_sets.read("prompts", rows(tmp_path / "p[1].jsonl", {"prompt": CHAT})) == [
        CHAT
    ]  # which is a glob, too
    with pytest.raises(BadInput, match="must be in local files"):
        prompt_sets.read("prompts", "https://host/p.jsonl")


def test_rows_that_hold_no_prompts_are_refused_by_file_and_rule(tmp_path):
    for name, values, words in (
        (
            "a.txt",
            [{"prompt": "a"}],
            "must be in local files of one format.* .parquet, .jsonl",
        ),
        (
            "a.jsonl",
            [{"text": "a"}],
            "'prompt', all rows must contain a text.* The columns are text",
        ),
        ("a.jsonl", [{"prompt": "a"}, {"prompt": ""}], "'prompt', all rows must contain a text"),
        ("a.jsonl", [{"prompt": [{"role": "user"}]}], "a list of messages with role and content"),
        ("a.jsonl", ["no row"], "cannot be read|The columns are"),
    ):
        with pytest.raises(BadInput, match=rf"held_out = .*{name}.*{words}"):
            prompt_sets.read("held_out", rows(tmp_path / name, *values))


def test_prompts_that_cannot_be_encoded_are_refused(pair):
    prompt_sets.check(pair[1], ["abc"])
    for prompts, words in (
        (["abc", "Ö"], "no id for 'Ö'"),
        (["a", CHAT], "some prompts are texts, and some are lists of messages"),
        ([CHAT], r"no chat template. .* export_model.py RUN --chat"),
    ):
        with pytest.raises(BadInput, match=words):
            prompt_sets.check(pair[1], prompts)


def drop_long(pair, prompts, max_completion_length=5, context=32):
    limits = {"context": context, "max_completion_length": max_completion_length}
    return prompt_sets.drop_long("prompts = p.jsonl", pair[1], prompts, **limits)


def test_prompts_longer_than_the_context_are_dropped_and_counted(pair, caplog):
    fits = ["abc", "a" * 27]
    assert drop_long(pair, fits) == fits and not caplog.text
    assert drop_long(pair, [*fits, "a" * 28, "b" * 40]) == fits
    assert (
        "prompts = p.jsonl: 2 of 4 prompts are too long and are not used, because with max_comp"
        in caplog.text
    )
    assert drop_long(pair, ["a" * 99], context=None) == ["a" * 99]


@pytest.mark.parametrize(
    ("prompt", "max_completion_length", "words"),
    [
        (
            "a" * 27,
            6,
            "leaves 26 tokens for a prompt. The shortest prompt has 27 .* --max_completion_length 5 or less",
        ),
        (
            "abc",
            40,
            "leaves 0 tokens for a prompt. The shortest prompt has 3 .* --max_completion_length 29 or less",
        ),
        (
            "a" * 32,
            1,
            "leaves 31 tokens for a prompt. The shortest prompt has 32 tokens. Use shorter prompts",
        ),
    ],
)
def test_an_error_explains_why_no_prompt_fits(pair, prompt, max_completion_length, words):
    with pytest.raises(
        BadInput,
        match=f"^prompts = p.jsonl: all 2 prompts are too long, because .*context of 32 tokens {words}",
    ):
        drop_long(pair, [prompt, prompt + "a" * 30], max_completion_length)


def test_prompts_must_fill_one_batch():
    prompt_sets.require_batch("prompts = p", ["a"] * 8, completions=64, num_generations=8)
    with pytest.raises(
        BadInput, match="^prompts = p: a batch needs 8 prompts .*, but only 7 are usable"
    ):
        prompt_sets.require_batch("prompts = p", ["a"] * 7, completions=64, num_generations=8)


def test_a_stop_is_one_token(pair):
    model, tokenizer = pair
    prompt_sets.stop_at(model, tokenizer, "\n")
    assert model.generation_config.eos_token_id == sorted(
        [tokenizer.eos_token_id, tokenizer("\n")["input_ids"][0]]
    )
    with pytest.raises(
        BadInput, match=r"stop = 'ab' is encoded as 2 tokens, but it must be a single"
    ):
        prompt_sets.stop_at(model, tokenizer, "ab")


def test_held_out_prompts_are_completed_greedily_as_each_alone(pair):
    model, tokenizer = pair
    prompt_sets.stop_at(model, tokenizer, "\n")
    prompts, seen = ["a", "bcdefg", "xyz"], {}
    reward = rewards.CheckedReward("mine", lambda p, c: seen.setdefault(p, c) and 0.5, "\n")
    model.train()
    value = prompt_sets.score(model, tokenizer, prompts, reward, 6)
    assert model.training and value == sum(0.5 for text in seen.values() if text) / 3
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.eval().generate(
            **ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        assert seen[prompt] == text.partition("\n")[0], prompt


def test_completions_are_decoded_with_their_prompts_in_training_and_held_out():
    """GRPOTrainer decodes a completion alone, which loses the space before its first word."""
    tokenizer, seen = odd_tokenizers.llama_tokenizer(), []
    tokenizer.pad_token = tokenizer.eos_token
    reward = rewards.CheckedReward(
        "mine", lambda prompt, completion: seen.append(completion) or 1.0, None
    )
    stone = tokenizer.convert_tokens_to_ids("▁stone")
    model = stock_copy(build_small_model(vocab_size=512, sequence_length=32))
    model.lm_head.register_forward_hook(
        lambda module, args, out: out.index_fill(-1, torch.tensor([stone]), 1e4)
    )
    prompt_sets.stop_at(model, tokenizer, None)
    prompt_sets.score(model, tokenizer, ["the river"], reward, 2)
    trained = prompt_sets.with_completions_of(tokenizer, reward)
    end = tokenizer.eos_token_id
    assert trained(
        ["the river"], ["stone stone"], completion_ids=[[stone, stone, end]], step=1
    ) == [1.0]
    assert trained(["the river"], ["stone"]) == [1.0] and trained.__name__ == "mine"
    assert seen == [" stone stone", " stone stone", "stone"]


def test_a_reward_that_always_fails_is_refused_before_training(pair):
    prompt_sets.stop_at(*pair, None)
    with pytest.raises(
        BadInput,
        match=r"reward addition failed for every prompt. The first call raised ValueError: 'abc' is not an add",
    ):
        prompt_sets.score(
            *pair, ["abc"], rewards.CheckedReward("addition", rewards.addition, None), 4
        )


def test_chats_are_completed_through_the_template(pair):
    model, _ = pair
    tokenizer = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz\n<|>_"])
    chat.add_chat(model, tokenizer)
    prompt_sets.stop_at(model, tokenizer, None)
    assert len(model.generation_config.eos_token_id) == 2
    seen = []
    reward = rewards.CheckedReward("mine", lambda *words: seen.append(words) or 0, None)
    prompt_sets.score(model, tokenizer, [[{"role": "user", "content": "ab"}]], reward, 4)
    assert [prompt for prompt, _ in seen] == ["ab"]
