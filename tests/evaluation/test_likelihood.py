"""Endings beside one shared context are worth what each is worth alone, whatever the model, batches and processes."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig

from ursa_minor.evaluation import likelihood
from ursa_minor.model.build import build
from ursa_minor.recipe import keys

VOCAB, IDS = 64, 60  # rows of the embedding, of which the last are padding
CONTEXT = 24
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": VOCAB}
LLAMA = NO_END | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
OURS = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": VOCAB, "sequence_length": CONTEXT}
OURS |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5) | {"seed": 1}
SHARING = {
    "gpt2": NO_END | {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": CONTEXT},
    "llama": LLAMA,
    "ours": OURS,
}
ALONE = {  # windows that slide, positions without an end, a state
    "mistral": LLAMA | {"sliding_window": 4},
    "bloom": NO_END | {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mamba": NO_END | {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
}


def made(name):
    """A tiny model with weights so large that every token of a context matters."""
    torch.manual_seed(1)
    if name == "ours":
        model = build(keys.Model(**OURS), eos_token_id=0)
    else:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **(SHARING | ALONE)[name])
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


@pytest.fixture
def gpt2():
    return made("gpt2")


def questions(number, context=(2, 12), ending=(1, 8), seed=0, endings=(4,)):
    """Random questions with these numbers of endings in turn; lengths are drawn between the two numbers, both included."""
    draw = random.Random(seed)

    def ids(low, high):
        return [draw.randrange(IDS) for _ in range(draw.randint(low, high))]

    return [
        (ids(*context), [ids(*ending) for _ in range(endings[i % len(endings)])])
        for i in range(number)
    ]


@torch.no_grad()
def reference(model, asked, limit=CONTEXT):
    """One ending at a time, cut as lm-evaluation-harness cuts it (HFLM._loglikelihood_tokens)."""
    values = []
    for context, endings in asked:
        for ending in endings:
            read = (context + ending)[-(limit + 1) :][:-1]
            logs = model(torch.tensor([read])).logits[0, -len(ending) :].float().log_softmax(-1)
            values.append(logs[range(len(ending)), ending].double().sum().item())
    return np.array(values).reshape(len(asked), -1)


def score(
    model, asked, reduce_sum=lambda part: part, limit=CONTEXT, rank=0, num_processes=1, **more
):
    reduce = lambda part, how: reduce_sum(part)  # noqa: E731
    accelerator = SimpleNamespace(process_index=rank, num_processes=num_processes, reduce=reduce)
    found = likelihood.log_likelihoods(
        model, asked, context_length=limit, accelerator=accelerator, **more
    )
    sums = found and [answer.nats for answer in found]
    return np.stack(sums) if sums and len({len(endings) for endings in sums}) == 1 else sums


@contextmanager
def recorded(model):
    """Note for each call of a model the shape of its ids and the rows that its head computes."""
    shapes, rows = [], []

    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(
            lambda m, args: shapes.append(tuple(args[0].shape))
        ),
        model.get_output_embeddings().register_forward_hook(
            lambda m, args, out: rows.append(out.numel() // VOCAB)
        ),
    ]
    try:
        yield shapes, rows
    finally:
        for hook in hooks:
            hook.remove()


def longest(asked):
    return [len(context) + max(map(len, endings)) - 1 for context, endings in asked]


# What an ending is worth


@pytest.mark.parametrize("name", SHARING | ALONE)
def test_log_likelihoods_are_those_of_one_ending_at_a_time(name):
    model, asked = made(name), questions(9)
    asked += (
        questions(2, (1, 1), (1, 1)) + questions(2, (1, 1), (2, 8)) + questions(2, (2, 12), (1, 1))
    )
    wanted = reference(model, asked)
    turned = reference(model, [(context[::-1], endings) for context, endings in asked[:3]])
    assert np.median(np.abs(wanted[:3] - turned)) > 0.01, (
        "this model does not look at the context: nothing is tested"
    )
    got = score(model, asked)
    assert got.dtype == np.float64 and got.shape == (15, 4)
    assert np.abs(got - wanted).max() < 1e-4
    assert np.abs(score(model, asked[9:11]) - wanted[9:11]).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize("processes, count", [(2, 9), (3, 2)])
def test_questions_of_any_numbers_of_endings_are_worth_what_each_is_alone_on_any_number_of_processes(
    name, processes, count
):
    """Also one ending, one that is too long for the context, and a process that has no question."""
    model, asked = (
        made(name),
        (questions(2, (20, 40), endings=(2, 1)) + questions(7, endings=(5, 1, 2)))[:count],
    )
    wanted = [reference(model, [question]).ravel() for question in asked]
    parts, batches = [], []
    for rank in range(processes):
        noted = {
            "progress": batches.append,
            "rank": rank,
            "num_processes": processes,
            "batch_size": 3,
        }
        score(model, asked, lambda part: parts.append(part) or part, **noted)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    for got in (score(model, asked, batch_size=9), score(model, asked, lambda _: sum(parts))):
        assert [len(each) for each in got] == [len(each) for _, each in asked]
        assert np.abs(np.concatenate(list(got)) - np.concatenate(wanted)).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_what_is_longer_than_the_context_loses_tokens_from_the_left_as_in_the_harness(name):
    model = made(name)
    asked = (
        questions(4, (1, 40), (1, CONTEXT))
        + questions(2, (1, 40), (CONTEXT, CONTEXT))
        + questions(3, seed=1)
    )
    context, (_, *others) = asked[-1]
    asked.append((context[:2], [[1] * CONTEXT, *others]))  # only one of its endings is too long
    assert np.abs(score(model, asked) - reference(model, asked)).max() < 1e-4


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_last_token_of_an_ending_needs_no_place_in_the_context(gpt2, over):
    asked = questions(3, (CONTEXT - 6 + over,) * 2, (7, 7))
    assert {length - CONTEXT for length in longest(asked)} == {over}
    with recorded(gpt2) as (shapes, _):
        got = score(gpt2, asked, batch_size=3)
    assert shapes[-1][0] == (3 if over <= 0 else 12), "what fits is shared"
    assert np.abs(got - reference(gpt2, asked)).max() < 1e-4


def test_context_length_is_the_configurations_and_a_model_without_a_limit_reads_all():
    assert likelihood.context_length(GPT2Config(n_positions=77)) == 77
    assert likelihood.context_length(LlamaConfig(max_position_embeddings=78)) == 78
    assert likelihood.context_length(BloomConfig()) is None
    bloom, asked = made("bloom"), questions(3, (30, 40))
    assert (
        np.abs(score(bloom, asked, limit=None) - reference(bloom, asked, limit=1000)).max() < 1e-4
    )


# Sharing a context


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom"])
def test_a_context_is_computed_once_and_logits_only_where_an_ending_is_predicted(name):
    """Where a model can: another computes each ending by itself."""
    model, asked = made(name), questions(8)
    with recorded(model) as (shapes, rows):
        score(model, asked, batch_size=1)
    once = [
        ((1, len(context) + sum(map(len, e)) - len(e)), sum(map(len, e))) for context, e in asked
    ]
    if name in SHARING:
        assert sorted(zip(shapes[-8:], rows[-8:], strict=True)) == sorted(once)
    else:
        assert sorted(shapes[-8:]) == sorted((4, length) for length in longest(asked))


def test_half_precision_is_near_full_precision_and_still_shares(gpt2):
    asked = questions(8)
    wanted = score(gpt2, asked)
    with recorded(gpt2) as (mixed_shapes, _), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = score(gpt2, asked, batch_size=8)
    with recorded(gpt2.to(torch.bfloat16)) as (half_shapes, _):
        half = score(gpt2, asked, batch_size=8)
    assert mixed_shapes[-1][0] == half_shapes[-1][0] == 8
    for got in (mixed, half):
        assert 0 < np.abs(got - wanted).max() < 0.2


# What stands around it


def test_batches_are_halved_until_they_fit_the_memory_the_longest_first_also_on_the_way(gpt2):
    asked, seen, tried, room = questions(40), [], [], [40]
    wanted = score(gpt2, asked, batch_size=1)

    def refuse(module, args):
        tried.append(len(args[0]))
        if tried[-1] > (5 if seen else room[0]):
            raise torch.OutOfMemoryError(f"no room for {tried[-1]}")

    gpt2.get_input_embeddings().register_forward_pre_hook(refuse)
    got = score(gpt2, asked, batch_size=32, progress=seen.append)
    assert [size for size in tried if size > 5] == [20, 20, 10, 7] and tried[-5:] == [4] * 5
    assert np.abs(got - wanted).max() < 1e-5
    lengths = [longest(asked)[i] for batch in seen for i in batch]
    assert len(lengths) == 40 and lengths == sorted(lengths, reverse=True)
    seen.clear()
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        score(gpt2, asked)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_in_training_is_scored_without_dropout_and_left_as_it_was(training):
    model, asked = made("ours"), questions(6)
    wanted = reference(model, asked)
    model.train(training)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert np.abs(score(model, asked) - wanted).max() < 1e-4
    assert (
        torch.equal(torch.get_rng_state(), state)
        and (np.random.get_state()[1] == numpy_state).all()
    )
    assert all(module.training is training for module in model.modules())
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in model.parameters()
    )
    assert torch.is_grad_enabled() and not model.lm_head._forward_pre_hooks


def test_stop_here_or_of_another_process_abandons_the_work_and_still_joins_the_sum(gpt2):
    seen, sums = [], []
    noted = {
        "progress": lambda batch: seen.append(batch),
        "reduce_sum": lambda part: sums.append(part) or part,
    }
    assert (
        score(gpt2.train(), questions(9), batch_size=2, stop=lambda: len(seen) == 2, **noted)
        is None
    )
    assert len(seen) == 2 and len(sums) == 1 and sums[0].dtype == torch.float64 and gpt2.training
    other = torch.tensor([0.0] * 24 + [1.0], dtype=torch.float64)
    assert score(gpt2, questions(3), lambda part: part + other) is None


def test_a_single_ending_is_greedy_where_each_of_its_tokens_is_the_likeliest(gpt2):
    context, best = [5, 9, 3], []
    for _ in range(3):
        best.append(int(gpt2.eval()(torch.tensor([context + best])).logits[0, -1].argmax()))
    other, last = [(best[0] + 1) % 64, *best[1:]], [*best[:2], (best[2] + 1) % 64]
    asked = [(context, endings) for endings in ([best], [other], [last], [best, other])]
    for size in (1, 4):
        found = likelihood.log_likelihoods(gpt2, asked, context_length=CONTEXT, batch_size=size)
        assert [answer.greedy for answer in found] == [True, False, False, False]
