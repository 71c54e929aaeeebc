"""Chat: its tokens, its template, and a conversation that fits into the context."""

import logging
from typing import NamedTuple

import odd_tokenizers
import pytest
import torch
from small_models import build_small_model, randomize_weights, stock_copy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import sampling
from ursa_minor.export import stock as stock_export
from ursa_minor.post import chat

LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
GREEDY = sampling.Sampling(max_new_tokens=20, temperature=0.0, top_k=0, top_p=1.0, seed=1)
MESSAGES = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}]


def make_model(characters=LETTERS, **changes):
    """Return a small model without chat, and its tokenizer."""
    tokenizer = tokenization.make_characters([characters])
    shape = {"sequence_length": 64} | changes
    model = stock_copy(randomize_weights(build_small_model(**shape)))
    model.generation_config.suppress_tokens = list(range(len(tokenizer), model.config.vocab_size))
    return model, tokenizer


def make_chat_model(**changes):
    """Return a small model with chat, and its tokenizer."""
    model, tokenizer = make_model(**changes)
    chat.add_chat(model, tokenizer)
    return model, tokenizer


def test_chat_tokens_take_padding_rows(tmp_path):
    model, tokenizer = make_model()
    num_used = len(tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    chat.add_chat(model, tokenizer)
    stock_export.write(model, tmp_path / "chat", tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "chat")
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")

    new_ids = loaded_tokenizer.convert_tokens_to_ids([chat.BEGIN, chat.END, chat.PAD])
    assert sorted(new_ids) == [num_used, num_used + 1, num_used + 2]
    assert loaded.config.vocab_size == 64
    after = loaded.state_dict()
    for name, value in before.items():
        is_unchanged = torch.ones(len(value), dtype=torch.bool)
        if name.endswith(("wte.weight", "lm_head.weight")):
            is_unchanged[new_ids] = False
        assert torch.equal(after[name][is_unchanged], value[is_unchanged]), name
    mean = before["transformer.wte.weight"][:num_used].mean(0)
    assert torch.allclose(after["transformer.wte.weight"][new_ids], mean.expand(3, -1))


def test_exported_generation_config_has_chat_tokens(tmp_path):
    model, tokenizer = make_model()
    num_used = len(tokenizer)

    chat.add_chat(model, tokenizer)
    stock_export.write(model, tmp_path / "chat", tokenizer)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "chat").generation_config
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")

    end_id, pad_id = loaded_tokenizer.convert_tokens_to_ids([chat.END, chat.PAD])
    assert config.eos_token_id == sorted([loaded_tokenizer.eos_token_id, end_id])
    assert config.pad_token_id == pad_id
    assert loaded_tokenizer.pad_token_id == pad_id
    assert loaded_tokenizer.eos_token_id != pad_id
    assert config.suppress_tokens == list(range(num_used + 3, 64))


def test_template_writes_roles_and_ends():
    _, tokenizer = make_chat_model()

    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)

    assert text == "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    assert text.startswith(prompt)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_template_marks_text_of_assistant():
    _, tokenizer = make_chat_model()

    encoded = tokenizer.apply_chat_template(
        MESSAGES * 2, return_dict=True, return_assistant_tokens_mask=True
    )

    ids = torch.tensor(encoded["input_ids"])
    mask = torch.tensor(encoded["assistant_masks"]).bool()
    assert tokenizer.decode(ids[mask]) == "hello<|im_end|>" * 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 31}, "3 rows .* 2 of its 31 .*--vocab_size 64, .*vocab_size 28 or less"),
        ({"characters": "0123456789+=\n"}, "--chat: .* cannot encode .* user, assistant"),
    ],
    ids=["no rows", "no letters"],
)
def test_unsuitable_model_is_rejected(changes, problem):
    model, tokenizer = make_model(**changes)

    with pytest.raises(BadInput, match=problem):
        chat.add_chat(model, tokenizer)


def test_model_is_trained_once_chat_tokens_differ():
    model, tokenizer = make_model()
    assert not chat.is_trained(model, tokenizer)

    chat.add_chat(model, tokenizer)
    assert not chat.is_trained(model, tokenizer)

    with torch.no_grad():
        model.get_input_embeddings().weight += torch.randn(64, 32)
    assert chat.is_trained(model, tokenizer)


def test_model_with_other_chat_template_is_trained():
    model, tokenizer = make_model()
    tokenizer.chat_template = "{{ messages }}"

    assert chat.is_trained(model, tokenizer)


def test_model_with_chat_is_rejected():
    model, tokenizer = make_chat_model()

    with pytest.raises(BadInput, match="already has a chat template"):
        chat.add_chat(model, tokenizer)


class Prompt(NamedTuple):
    """A prompt that a model gets, and the number of tokens that it may generate."""

    text: str
    length: int
    max_new_tokens: int


@pytest.fixture
def collect_prompts(monkeypatch):
    """Return a function that gives the prompts of a conversation with a model that answers yes."""

    def collect(model, tokenizer, messages) -> list[Prompt]:
        prompts = []

        def answer(model, prompt_ids, tokenizer, options, *_):
            text = tokenizer.decode(prompt_ids)
            prompts.append(Prompt(text, len(prompt_ids), options.max_new_tokens))
            return tokenizer("yes")["input_ids"]

        monkeypatch.setattr(chat.sampling, "sample", answer)
        chat.converse(model, tokenizer, messages, GREEDY)
        return prompts

    return collect


def test_oldest_messages_are_dropped_from_full_context(collect_prompts):
    model, tokenizer = make_chat_model(sequence_length=80)

    prompts = collect_prompts(model, tokenizer, ["one", "two", "x" * 12])

    assert len(prompts) == 3
    assert prompts[1].text.count("<|im_start|>") == 4
    assert "one" in prompts[1].text
    assert "two" in prompts[1].text
    assert "one" not in prompts[2].text
    assert "x" * 12 in prompts[2].text
    for prompt in prompts:
        assert prompt.max_new_tokens == 20
        assert prompt.length + prompt.max_new_tokens <= 80


def test_empty_message_starts_new_conversation(collect_prompts):
    model, tokenizer = make_chat_model(sequence_length=200)  # enough for both messages

    prompts = collect_prompts(model, tokenizer, ["one", "", "two"])

    assert len(prompts) == 2
    assert "one" not in prompts[1].text


def test_chat_continues_after_unusable_messages(collect_prompts, caplog):
    model, tokenizer = make_chat_model()

    with caplog.at_level(logging.WARNING):
        prompts = collect_prompts(model, tokenizer, ["x" * 60, "Ö", "ok"])

    assert len(prompts) == 1
    assert "79 tokens" in caplog.records[0].message
    assert "only 44 fit" in caplog.records[0].message
    assert "no id for 'Ö'" in caplog.records[1].message


def test_first_space_of_answer_is_kept(monkeypatch):
    """An answer is decoded together with the chat before it."""
    tokenizer = odd_tokenizers.llama_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}river:"
    )
    model = stock_copy(randomize_weights(build_small_model(vocab_size=512, sequence_length=64)))
    stone = tokenizer.convert_tokens_to_ids("▁stone")
    prompts = []
    written = []

    def answer(model, ids, tokenizer, options, streamer):
        prompts.append(tokenizer.decode(ids))
        streamer.begin(ids)
        streamer.put(torch.tensor([ids]))
        streamer.put(torch.tensor([stone]))
        streamer.finish()
        return [stone]

    monkeypatch.setattr(chat.sampling, "sample", answer)
    streamer = sampling.Streamer(tokenizer, written.append)

    chat.converse(model, tokenizer, ["a", "b"], GREEDY, streamer)

    assert "assistant: stone\n" in prompts[1]
    assert written == [" stone", "\n"] * 2


def test_answer_ends_at_end_token():
    model, tokenizer = make_chat_model()
    end_id = tokenizer.convert_tokens_to_ids(chat.END)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied to the embedding: all other logits are 0
        model.transformer.ln_f.bias.fill_(1)
        model.transformer.wte.weight[end_id] = 1
    written = []

    chat.converse(model, tokenizer, ["hi"], GREEDY, sampling.Streamer(tokenizer, written.append))

    assert written == ["\n"]
