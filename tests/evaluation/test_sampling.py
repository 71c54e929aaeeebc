"""Samples contain no padding, may exceed the context, depend on a seed, and leave no trace."""

import contextlib
from types import SimpleNamespace

import odd_tokenizers
import pytest
import torch
from small_models import build_small_model
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation.evaluator import Evaluator
from ursa_minor.evaluation.sampling import Sampling, Streamer, sample

CONTEXT = 8
VOCAB_SIZE = 12  # ids of the tokenizer
NUM_ROWS = 32  # rows of the model's embedding; the rows after VOCAB_SIZE are padding
END_OF_TEXT = 11
OTHER_SPECIAL_ID = 10


class FakeTokenizer:
    """The parts of a tokenizer that sampling uses."""

    eos_token_id = END_OF_TEXT
    all_special_ids = (OTHER_SPECIAL_ID, END_OF_TEXT)

    def __len__(self):
        return VOCAB_SIZE

    def decode(self, ids, **_):
        return "".join(f"{token_id}\n" for token_id in ids)

    def convert_ids_to_tokens(self, token_id):
        return str(token_id)


def add_to_logits(model, values: dict[int, float]) -> None:
    """Add constants to the logits of some ids."""
    bias = torch.zeros(NUM_ROWS)
    for token_id, value in values.items():
        bias[token_id] = value
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + bias)


@pytest.fixture
def model():
    """Return a GPT-2 whose output depends strongly on its input and that never ends a text."""
    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=NUM_ROWS,
        n_positions=CONTEXT,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
    )
    model = GPT2LMHeadModel(config).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(20.0)
    add_to_logits(model, {END_OF_TEXT: -1e4})
    return model


def generate(model, prompt=(1, 2), write=None, **changes) -> list[int]:
    """Return the new ids of a sample. ``write`` gets the text."""
    options = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5}
    tokenizer = FakeTokenizer()
    streamer = None
    if write is not None:
        streamer = Streamer(tokenizer, write)
    return sample(model, list(prompt), tokenizer, Sampling(**options | changes), streamer)


def test_incomplete_character_at_end_is_omitted():
    tokenizer = tokenization.train_bpe(["a"], 300)
    ids = tokenization.Encoder(tokenizer)(["一 a\ufffd 二"])[0].tolist()
    written = []
    streamer = Streamer(tokenizer, written.append)

    prompt_id = 0
    for token_id in [prompt_id, *ids[:-1]]:
        streamer.put(torch.tensor([token_id]))
    streamer.finish()

    assert "".join(written) == "一 a\ufffd \n"
    assert tokenization.decode(tokenizer, ids[:-1]) == "一 a\ufffd "
    assert tokenization.decode(tokenizer, ids) == "一 a\ufffd 二"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_padding_and_special_ids_are_not_sampled(model, temperature):
    excluded_ids = [OTHER_SPECIAL_ID, *range(VOCAB_SIZE, NUM_ROWS)]
    add_to_logits(model, dict.fromkeys(excluded_ids, 1e4))

    ids = generate(model, max_new_tokens=40, temperature=temperature)

    assert len(ids) == 40
    assert not set(ids) & set(excluded_ids)


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, 5 * CONTEXT])
def test_text_continues_beyond_context(model, length):
    prompt = [i % VOCAB_SIZE for i in range(length)]
    written = []

    ids = generate(model, prompt, write=written.append, max_new_tokens=3 * CONTEXT)

    assert len(ids) == 3 * CONTEXT
    assert written == [*(f"{token_id}\n" for token_id in ids), "\n"]


def test_greedy_ids_are_likeliest_ids(model):
    ids = [1, 2]
    model.eval()
    for _ in range(CONTEXT - 2):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, :VOCAB_SIZE]
        ids.append(int(logits.argmax()))

    assert generate(model, temperature=0.0, max_new_tokens=CONTEXT - 2) == ids[2:]


def test_long_prompt_is_truncated_from_left(model):
    end = [3, 1, 4, 1, 5, 9, 2]

    assert generate(model, [7] * 30 + end) == generate(model, end)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_sampling_leaves_mode_and_random_state_unchanged(model, is_training):
    model.train(is_training)
    random_state = torch.get_rng_state()

    ids = generate(model, temperature=0.0)
    ids_of_other_seed = generate(model, temperature=0.0, seed=99)

    assert ids == ids_of_other_seed  # without dropout
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training is is_training


@pytest.mark.parametrize("kind", ["llama", "lower_case"])
def test_sample_is_text_of_prompt_and_new_ids(kind):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    model = build_small_model(vocab_size=512)
    prompts = ["The river", "river "]
    settings = SimpleNamespace(
        sample_prompts=prompts,
        sample_tokens=9,
        sample_temperature=0.0,
        sample_top_k=0,
        sample_top_p=1.0,
    )
    evaluator = Evaluator(
        recipe=SimpleNamespace(evaluation=settings, model=SimpleNamespace(seed=1)),
        corpus=SimpleNamespace(tokenizer=tokenizer),
        tests={},
        model=lambda: contextlib.nullcontext(model),
        accelerator=SimpleNamespace(is_main_process=True),
    )

    samples = evaluator.samples()

    options = Sampling(max_new_tokens=9, temperature=0.0, top_k=0, top_p=1.0, seed=1)
    for prompt, (prompt_text, new_text) in zip(prompts, samples, strict=True):
        prompt_ids = tokenization.encode_prompt(tokenizer, prompt)
        new_ids = sample(model, prompt_ids, tokenizer, options)
        expected = tokenization.decode(tokenizer, [*prompt_ids, *new_ids])
        assert prompt_text + new_text == expected


def test_same_seed_gives_same_sample(model):
    ids = generate(model, max_new_tokens=20)

    assert generate(model, max_new_tokens=20) == ids
    assert generate(model, max_new_tokens=20, seed=6) != ids
    assert generate(model, max_new_tokens=20, temperature=0.0) != ids


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}], ids=["top_k", "top_p"])
def test_limited_choice_is_greedy(model, limit):
    greedy_ids = generate(model, temperature=0.0, max_new_tokens=20)

    assert generate(model, max_new_tokens=20, **limit) == greedy_ids


def test_end_of_text_ends_sample(model):
    add_to_logits(model, {END_OF_TEXT: 1e5})
    written = []

    ids = generate(model, write=written.append)

    assert ids == []
    assert written == ["\n"]


def test_model_without_context_limit_generates_text():
    torch.manual_seed(3)
    config = MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=NUM_ROWS, state_size=4)

    ids = generate(MambaForCausalLM(config), max_new_tokens=20)

    assert 0 < len(ids) <= 20
    assert max(ids) < VOCAB_SIZE


def test_generation_config_of_model_is_ignored(model):
    expected = generate(model)
    model.generation_config = GenerationConfig(
        return_dict_in_generate=True,
        stop_strings=["a"],
        num_beams=3,
        num_return_sequences=2,
        min_length=30,
        repetition_penalty=9.0,
    )

    ids = generate(model)

    assert ids == expected
    assert model.generation_config.num_beams == 3
