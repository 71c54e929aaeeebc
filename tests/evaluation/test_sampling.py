"""Samples: never padding, beyond the context, seeded, and without a trace on the run."""

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

CONTEXT, USED, ROWS, END, MARK = 8, 12, 32, 11, 10


class Tokenizer:
    """What sampling asks of a tokenizer."""

    eos_token_id, all_special_ids = END, [MARK, END]

    def __len__(self):
        return USED

    def decode(self, ids, **_):
        return "".join(f"{i}\n" for i in ids)

    def convert_ids_to_tokens(self, token_id):
        return str(token_id)


@pytest.fixture
def model():
    torch.manual_seed(3)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": ROWS, "n_positions": CONTEXT}
    made = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=END, eos_token_id=END)).train()
    for (
        weight
    ) in made.parameters():  # far from uniform, so that what the model reads decides what it says
        weight.data.mul_(20.0 if weight.dim() > 1 else 1.0)
    favor(made, {END: -1e4})
    return made


def favor(model, logits):
    """Add a constant to some ids' logits, with nothing else changed (GPT-2's head has no bias of its own)."""
    bias = torch.zeros(ROWS)
    for i, value in logits.items():
        bias[i] = value
    model.lm_head.register_forward_hook(lambda module, args, out: out + bias)


def go(model, prompt=(1, 2), n=6, **changes):
    known = {"max_new_tokens": n, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 5}
    write = changes.pop("write", None)
    streamer = write and Streamer(Tokenizer(), write)
    return sample(model, list(prompt), Tokenizer(), Sampling(**(known | changes)), streamer)


def test_a_character_that_is_cut_at_the_end_of_a_text_is_left_out():
    made = tokenization.train_bpe(["a"], 300)
    ids, shown = tokenization.Encoder(made)(["一 a\ufffd 二"])[0].tolist(), []
    assert (
        tokenization.decode(made, ids[:-1]) == "一 a\ufffd "
        and tokenization.decode(made, ids) == "一 a\ufffd 二"
    )
    streamer = Streamer(made, shown.append)
    for new in [0, *ids[:-1]]:  # the first are a prompt's
        streamer.put(torch.tensor([new]))
    streamer.finish()
    assert "".join(shown) == "一 a\ufffd \n"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_padding_nor_a_mark_that_ends_no_text_is_sampled_however_likely(model, temperature):
    favor(model, dict.fromkeys((MARK, *range(USED, ROWS)), 1e4))
    ids = go(model, n=40, temperature=temperature)
    assert len(ids) == 40 and max(ids) < USED and MARK not in ids


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, 5 * CONTEXT])
def test_any_prompt_is_continued_far_beyond_the_context_and_a_streamer_gets_the_new_ids_and_one_end(
    model, length
):
    shown = []
    ids = go(model, prompt=[i % USED for i in range(length)], n=3 * CONTEXT, write=shown.append)
    assert len(ids) == 3 * CONTEXT and shown == [*(f"{i}\n" for i in ids), "\n"]


def test_within_the_context_greedy_ids_are_the_models_own(model):
    ids = [1, 2]
    for _ in range(CONTEXT - 2):
        with torch.no_grad():
            ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1, :USED].argmax()))
    assert go(model, temperature=0.0, n=CONTEXT - 2) == ids[2:]


def test_a_long_prompt_is_read_from_its_end(model):
    tail = [3, 1, 4, 1, 5, 9, 2]
    assert go(model, prompt=[7] * 30 + tail) == go(model, prompt=tail)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_global_random_state_and_mode_are_left_as_they_were(model, training):
    model.train(training)
    before = torch.get_rng_state()
    assert go(model, temperature=0.0) == go(model, temperature=0.0, seed=99)
    assert torch.equal(torch.get_rng_state(), before) and model.training is training


@pytest.mark.parametrize("kind", ["llama", "lower_case"])
def test_a_sample_is_the_text_of_its_prompt_and_new_ids(kind):
    tokenizer = odd_tokenizers.TOKENIZERS[kind]()
    settings = {
        "sample_tokens": 9,
        "sample_temperature": 0.0,
        "sample_top_k": 0,
        "sample_top_p": 1.0,
    }
    settings = SimpleNamespace(sample_prompts=["The river", "river "], **settings)
    recipe = SimpleNamespace(evaluation=settings, model=SimpleNamespace(seed=1))
    net = build_small_model(vocab_size=512)
    evaluator = Evaluator(
        recipe=recipe,
        corpus=SimpleNamespace(tokenizer=tokenizer),
        tests={},
        model=lambda: contextlib.nullcontext(net),
        accelerator=SimpleNamespace(is_main_process=True),
    )
    for prompt, (shown, text) in zip(settings.sample_prompts, evaluator.samples(), strict=True):
        prompt_ids = tokenization.encode_prompt(tokenizer, prompt)
        how = Sampling(max_new_tokens=9, temperature=0.0, top_k=0, top_p=1.0, seed=1)
        new_ids = sample(net, prompt_ids, tokenizer, how)
        assert shown + text == tokenization.decode(tokenizer, [*prompt_ids, *new_ids])


def test_a_seed_gives_the_sample_again_and_top_k_and_top_p_restrict_the_choice(model):
    greedy, drawn = go(model, temperature=0.0, n=20), go(model, n=20)
    assert go(model, n=20) == drawn not in (greedy, go(model, n=20, seed=6))
    assert go(model, n=20, top_k=1) == go(model, n=20, top_p=1e-6) == greedy


def test_end_of_text_ends_the_sample_and_is_not_in_it(model):
    favor(model, {END: 1e5})
    shown = []
    assert go(model, n=20, write=shown.append) == [] and shown == ["\n"]


def test_a_model_without_a_limit_of_its_context_writes_on():
    config = MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=ROWS, state_size=4)
    torch.manual_seed(3)
    ids = go(MambaForCausalLM(config), n=20)
    assert 0 < len(ids) <= 20 and max(ids) < USED


def test_what_a_models_generation_config_asks_for_has_no_part_in_it(model):
    plain = go(model)
    own = {
        "return_dict_in_generate": True,
        "stop_strings": ["a"],
        "num_beams": 3,
        "num_return_sequences": 2,
    }
    model.generation_config = GenerationConfig(**own, min_length=30, repetition_penalty=9.0)
    assert go(model) == plain
    assert model.generation_config.num_beams == 3
