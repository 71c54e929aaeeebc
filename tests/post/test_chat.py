"""Chat tokens in the padding, a template that marks the assistant's words, and a conversation that fits the context."""

import logging

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
SAID = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}]


def pair(characters=LETTERS, **shape):
    tokenizer = tokenization.make_characters([characters])
    model = stock_copy(randomize_weights(build_small_model(**{"sequence_length": 64} | shape)))
    model.generation_config.suppress_tokens = list(range(len(tokenizer), model.config.vocab_size))
    return model, tokenizer


def chatty(**shape):
    model, tokenizer = pair(**shape)
    chat.add_chat(model, tokenizer)
    return model, tokenizer


def test_the_tokens_take_padding_rows_and_the_model_keeps_its_size(tmp_path):
    model, tokenizer = pair()
    before, rows = (
        {name: value.clone() for name, value in model.state_dict().items()},
        len(tokenizer),
    )
    chat.add_chat(model, tokenizer)
    stock_export.write(model, tmp_path / "chat", tokenizer)
    loaded, named = (
        kind.from_pretrained(tmp_path / "chat") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    new = [named.convert_tokens_to_ids(token) for token in (chat.BEGIN, chat.END, chat.PAD)]
    assert sorted(new) == [rows, rows + 1, rows + 2] and loaded.config.vocab_size == 64
    after = loaded.state_dict()
    for name, value in before.items():
        same = torch.ones(len(value), dtype=torch.bool)
        same[rows : rows + 3] = not name.endswith(("wte.weight", "lm_head.weight"))
        assert torch.equal(after[name][same], value[same]), name
    mean = before["transformer.wte.weight"][:rows].mean(0)
    assert torch.allclose(after["transformer.wte.weight"][new], mean.expand(3, -1))
    generation = loaded.generation_config
    assert generation.eos_token_id == sorted([named.eos_token_id, new[1]])
    assert generation.pad_token_id == named.pad_token_id == new[2] != named.eos_token_id
    assert generation.suppress_tokens == list(range(rows + 3, 64))


def test_the_template_marks_the_assistants_words_and_the_token_that_ends_them():
    _, tokenizer = chatty()
    text = tokenizer.apply_chat_template(SAID, tokenize=False)
    assert text == "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    begun = tokenizer.apply_chat_template(SAID[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(begun) and begun.endswith("<|im_start|>assistant\n")
    marked = tokenizer.apply_chat_template(
        SAID * 2, return_dict=True, return_assistant_tokens_mask=True
    )
    learnt = [
        i for i, use in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if use
    ]
    assert tokenizer.decode(learnt) == "hello<|im_end|>" * 2


def test_a_model_that_has_no_room_or_cannot_write_the_template_is_refused_with_what_can():
    for shape, words in (
        (
            {"vocab_size": 31},
            "3 rows .* 2 of its 31 rows .* --vocab_size 64, .* --tokenizer_vocab_size 28 or less",
        ),
        (
            {"characters": "0123456789+=\n"},
            "--chat: the tokenizer of the model cannot encode the words user, assistant",
        ),
    ):
        with pytest.raises(BadInput, match=words):
            chat.add_chat(*pair(**shape))
        with pytest.raises(BadInput, match="already has a chat template"):
            chat.add_chat(*chatty())


@pytest.fixture
def heard(monkeypatch):
    """Of messages to a model that answers "yes": each prompt that it gets, its ids, how many new ones it may have."""

    def converse(both, messages):
        asked, (model, tokenizer) = [], both
        ids = tokenizer("yes")["input_ids"]
        answer = lambda model, prompt, _, how, *__: (
            asked.append((prompt, how.max_new_tokens)) or ids
        )
        monkeypatch.setattr(chat.sampling, "sample", answer)
        chat.converse(model, tokenizer, messages, GREEDY)
        return [(tokenizer.decode(prompt), len(prompt), new) for prompt, new in asked]

    return converse


def test_a_conversation_remembers_until_the_context_is_full_and_an_empty_message_begins_a_new_one(
    heard,
):
    (_, *_), (second, *_), (third, *_) = asked = heard(
        chatty(sequence_length=80), ["one", "two", "x" * 12]
    )
    assert second.count("<|im_start|>") == 4 and "one" in second and "two" in second
    assert "one" not in third and "x" * 12 in third
    assert all(length + new <= 80 and new == 20 for _, length, new in asked)
    _, second = heard(chatty(sequence_length=200), ["one", "", "two"])  # room for both turns
    assert "one" not in second[0]


def test_a_message_that_does_not_fit_or_cannot_be_written_is_answered_with_a_reason_and_the_chat_goes_on(
    heard, caplog
):
    with caplog.at_level(logging.WARNING):
        assert len(heard(chatty(), ["x" * 60, "Ö", "ok"])) == 1
    assert (
        "this message has 79 tokens with the chat template, but only 44 fit"
        in caplog.records[0].message
    )
    assert "no id for 'Ö'" in caplog.records[1].message


def test_an_answer_keeps_its_first_space(monkeypatch):
    """It is decoded together with the chat before it, also where it is a part of the next prompt."""
    tokenizer, prompts, written = odd_tokenizers.llama_tokenizer(), [], []
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}river:"
    )
    model = stock_copy(randomize_weights(build_small_model(vocab_size=512, sequence_length=64)))
    stone = tokenizer.convert_tokens_to_ids("▁stone")

    def answer(model, ids, tokenizer, how, streamer):
        prompts.append(tokenizer.decode(ids))
        streamer.begin(ids)
        streamer.put(torch.tensor([ids]))
        streamer.put(torch.tensor([stone]))
        streamer.finish()
        return [stone]

    monkeypatch.setattr(chat.sampling, "sample", answer)
    chat.converse(
        model, tokenizer, ["a", "b"], GREEDY, sampling.Streamer(tokenizer, written.append)
    )
    assert "assistant: stone\n" in prompts[1] and written == [" stone", "\n"] * 2


def test_an_answer_ends_at_the_chats_end_token(monkeypatch):
    model, tokenizer = chatty()
    end, made = tokenizer.convert_tokens_to_ids(chat.END), []
    with torch.no_grad():
        model.lm_head.weight.zero_()  # tied: every logit is 0 but the end's
        model.transformer.ln_f.bias.fill_(1)
        model.transformer.wte.weight[end] = 1
    chat.converse(model, tokenizer, ["hi"], GREEDY, sampling.Streamer(tokenizer, made.append))
    assert made == ["\n"]
