"""Log-likelihoods: endings that share a context have the same values as endings computed alone.

This holds for every model type, batch size and number of processes.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig

from ursa_minor.evaluation import likelihood
from ursa_minor.model.build import build
from ursa_minor.recipe import keys

VOCAB_SIZE = 64
USED_IDS = 60  # the other rows of the embedding are padding
CONTEXT = 24
NO_SPECIAL_IDS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "vocab_size": VOCAB_SIZE,
}
LLAMA = NO_SPECIAL_IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
TRAINED_MODEL = {  # built from a recipe, as for training
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": VOCAB_SIZE,
    "sequence_length": CONTEXT,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
    "seed": 1,
}
MODELS_THAT_SHARE_CONTEXT = {
    "gpt2": NO_SPECIAL_IDS | {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": CONTEXT},
    "llama": LLAMA,
    "trained": TRAINED_MODEL,
}
OTHER_MODELS = {  # with a sliding window, without a limit of positions, with a recurrent state
    "mistral": LLAMA | {"sliding_window": 4},
    "bloom": NO_SPECIAL_IDS | {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mamba": NO_SPECIAL_IDS | {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
}
MODELS = MODELS_THAT_SHARE_CONTEXT | OTHER_MODELS


def make_model(name: str):
    """Create a tiny model with weights so large that every token of a context matters."""
    torch.manual_seed(1)
    if name == "trained":
        model = build(keys.Model(**TRAINED_MODEL), eos_token_id=0)
    else:
        config = AutoConfig.for_model(name, **MODELS[name])
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


@pytest.fixture
def gpt2():
    """Return a tiny GPT-2."""
    return make_model("gpt2")


def random_ids(generator: random.Random, lengths: tuple[int, int]) -> list[int]:
    """Return random ids. ``lengths`` are the least and the largest length."""
    length = generator.randint(*lengths)
    return [generator.randrange(USED_IDS) for _ in range(length)]


def random_questions(number, context=(2, 12), ending=(1, 8), *, seed=0, num_endings=(4,)):
    """Return random questions.

    Args:
        context: the least and the largest length of a context.
        ending: the least and the largest length of an ending.
        num_endings: the numbers of endings, which alternate.
    """
    generator = random.Random(seed)
    questions = []
    for i in range(number):
        context_ids = random_ids(generator, context)
        count = num_endings[i % len(num_endings)]
        endings = [random_ids(generator, ending) for _ in range(count)]
        questions.append((context_ids, endings))
    return questions


@torch.no_grad()
def compute_separately(model, questions, limit=CONTEXT) -> list[np.ndarray]:
    """Compute each ending alone, truncated as in lm-eval (HFLM._loglikelihood_tokens)."""
    values = []
    for context, endings in questions:
        nats = []
        for ending in endings:
            inputs = (context + ending)[-(limit + 1) :][:-1]
            logits = model(torch.tensor([inputs])).logits[0, -len(ending) :]
            log_probabilities = logits.float().log_softmax(-1)[range(len(ending)), ending]
            nats.append(log_probabilities.double().sum().item())
        values.append(np.array(nats))
    return values


class FakeAccelerator:
    """One of several processes that share the questions.

    Args:
        other_parts: the sum of the results of the other processes.
    """

    def __init__(self, process_index=0, num_processes=1, other_parts=0):
        self.process_index = process_index
        self.num_processes = num_processes
        self.other_parts = other_parts
        self.reduced = []

    def reduce(self, tensor, reduction):
        self.reduced.append(tensor)
        return tensor + self.other_parts


def score(model, questions, limit=CONTEXT, **options) -> list[np.ndarray]:
    """Return the log-likelihoods of the endings of each question."""
    answers = likelihood.log_likelihoods(model, questions, context_length=limit, **options)
    return [answer.nats for answer in answers]


def largest_difference(values: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest difference between the log-likelihoods of two lists of endings."""
    assert [len(nats) for nats in values] == [len(nats) for nats in expected]
    return np.abs(np.concatenate(values) - np.concatenate(expected)).max()


class Recording(NamedTuple):
    """The calls of a model."""

    input_shapes: list[tuple[int, ...]]
    num_logits: list[int]  # the number of positions for which the head computes logits


@contextmanager
def record_calls(model) -> Iterator[Recording]:
    """Record the calls of a model."""
    recording = Recording([], [])

    def record_input(module, args):
        recording.input_shapes.append(tuple(args[0].shape))

    def record_output(module, args, output):
        recording.num_logits.append(output.numel() // VOCAB_SIZE)

    hooks = [
        model.get_input_embeddings().register_forward_pre_hook(record_input),
        model.get_output_embeddings().register_forward_hook(record_output),
    ]
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def longest_inputs(questions) -> list[int]:
    """Return the number of ids that a model reads for the longest ending of each question."""
    lengths = []
    for context, endings in questions:
        longest_ending = max(len(ending) for ending in endings)
        lengths.append(len(context) + longest_ending - 1)
    return lengths


# Values


@pytest.mark.parametrize("name", MODELS)
def test_values_equal_those_of_separate_endings(name):
    model = make_model(name)
    single_tokens = random_questions(2, (1, 1), (1, 1))
    questions = random_questions(9) + single_tokens
    questions += random_questions(2, (1, 1), (2, 8)) + random_questions(2, (2, 12), (1, 1))
    expected = compute_separately(model, questions)

    values = score(model, questions)
    values_of_single_tokens = score(model, single_tokens)

    assert {nats.dtype for nats in values} == {np.dtype(np.float64)}
    assert largest_difference(values, expected) < 1e-4
    assert largest_difference(values_of_single_tokens, expected[9:11]) < 1e-4
    # The comparison would prove nothing for a model that ignores the context.
    reversed_questions = [(context[::-1], endings) for context, endings in questions[:3]]
    reversed_values = compute_separately(model, reversed_questions)
    effects = np.abs(np.concatenate(expected[:3]) - np.concatenate(reversed_values))
    assert np.median(effects) > 0.01


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize(("num_processes", "num_questions"), [(2, 9), (3, 2)])
def test_processes_share_questions(name, num_processes, num_questions):
    """The numbers of endings differ, some questions are too long, and one process may be idle."""
    model = make_model(name)
    questions = random_questions(2, (20, 40), num_endings=(2, 1))
    questions += random_questions(7, num_endings=(5, 1, 2))
    questions = questions[:num_questions]
    expected = [compute_separately(model, [question])[0] for question in questions]
    batches = []
    parts = []

    for rank in range(num_processes):
        accelerator = FakeAccelerator(rank, num_processes, other_parts=sum(parts))
        values_of_last_process = score(
            model, questions, accelerator=accelerator, batch_size=3, progress=batches.append
        )
        parts += accelerator.reduced
    values_of_single_process = score(model, questions, batch_size=9)

    scored_questions = np.concatenate(batches)
    assert sorted(scored_questions.tolist()) == list(range(num_questions))
    assert largest_difference(values_of_last_process, expected) < 1e-4
    assert largest_difference(values_of_single_process, expected) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_long_questions_are_truncated_like_in_harness(name):
    model = make_model(name)
    questions = random_questions(4, (1, 40), (1, CONTEXT))
    questions += random_questions(2, (1, 40), (CONTEXT, CONTEXT))
    questions += random_questions(3, seed=1)
    context, endings = questions[-1]
    question_with_one_long_ending = (context[:2], [[1] * CONTEXT, *endings[1:]])
    questions.append(question_with_one_long_ending)

    values = score(model, questions)

    assert largest_difference(values, compute_separately(model, questions)) < 1e-4


@pytest.mark.parametrize(("excess", "num_rows"), [(-1, 3), (0, 3), (1, 12)])
def test_last_token_needs_no_place_in_context(gpt2, excess, num_rows):
    """The last token of an ending is not read. Questions that fit share their context."""
    context_length = CONTEXT - 6 + excess
    questions = random_questions(3, (context_length, context_length), (7, 7))

    with record_calls(gpt2) as recording:
        values = score(gpt2, questions, batch_size=3)

    assert set(longest_inputs(questions)) == {CONTEXT + excess}
    assert recording.input_shapes[-1][0] == num_rows
    assert largest_difference(values, compute_separately(gpt2, questions)) < 1e-4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_positions=77), 77),
        (LlamaConfig(max_position_embeddings=78), 78),
        (BloomConfig(), None),
    ],
    ids=["gpt2", "llama", "bloom"],
)
def test_context_length_comes_from_config(config, expected):
    assert likelihood.context_length(config) == expected


def test_unlimited_model_reads_long_contexts():
    bloom = make_model("bloom")
    questions = random_questions(3, (30, 40))

    values = score(bloom, questions, limit=None)

    assert largest_difference(values, compute_separately(bloom, questions, limit=1000)) < 1e-4


# Shared contexts


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_shared_context_is_computed_once(name):
    model = make_model(name)
    questions = random_questions(8)
    expected = []
    for context, endings in questions:
        num_predicted = sum(len(ending) for ending in endings)
        num_read = len(context) + num_predicted - len(endings)
        expected.append(((1, num_read), num_predicted))

    with record_calls(model) as recording:
        score(model, questions, batch_size=1)

    calls = list(zip(recording.input_shapes[-8:], recording.num_logits[-8:], strict=True))
    assert sorted(calls) == sorted(expected)


def test_other_model_computes_endings_separately():
    bloom = make_model("bloom")
    questions = random_questions(8)

    with record_calls(bloom) as recording:
        score(bloom, questions, batch_size=1)

    expected = [(4, length) for length in longest_inputs(questions)]
    assert sorted(recording.input_shapes[-8:]) == sorted(expected)


@pytest.mark.parametrize("uses_autocast", [True, False], ids=["autocast", "bf16 weights"])
def test_half_precision_shares_context(gpt2, uses_autocast):
    questions = random_questions(8)
    expected = score(gpt2, questions)
    precision = torch.autocast("cpu", dtype=torch.bfloat16)
    if not uses_autocast:
        gpt2.to(torch.bfloat16)
        precision = nullcontext()

    with record_calls(gpt2) as recording, precision:
        values = score(gpt2, questions, batch_size=8)

    assert recording.input_shapes[-1][0] == 8
    assert 0 < largest_difference(values, expected) < 0.2


# Memory, state and interruption


class LimitedMemory:
    """A forward pre-hook that fails for batches larger than ``limit``."""

    def __init__(self, limit: int):
        self.limit = limit
        self.batch_sizes = []

    def __call__(self, module, args):
        batch_size = len(args[0])
        self.batch_sizes.append(batch_size)
        if batch_size > self.limit:
            raise torch.OutOfMemoryError(f"no memory for {batch_size} rows")


def test_batches_are_halved_until_they_fit(gpt2):
    """The longest questions come first. Memory becomes scarce after the first batch."""
    questions = random_questions(40)
    expected = score(gpt2, questions, batch_size=1)
    memory = LimitedMemory(40)
    batches = []

    def reduce_memory(batch):
        batches.append(batch)
        memory.limit = 5

    gpt2.get_input_embeddings().register_forward_pre_hook(memory)
    values = score(gpt2, questions, batch_size=32, progress=reduce_memory)

    assert [size for size in memory.batch_sizes if size > 5] == [20, 20, 10, 7]
    assert memory.batch_sizes[-5:] == [4] * 5
    assert largest_difference(values, expected) < 1e-5
    scored_questions = np.concatenate(batches)
    lengths = np.array(longest_inputs(questions))[scored_questions].tolist()
    assert len(lengths) == 40
    assert lengths == sorted(lengths, reverse=True)


def test_too_little_memory_is_an_error(gpt2):
    gpt2.get_input_embeddings().register_forward_pre_hook(LimitedMemory(0))

    with pytest.raises(torch.OutOfMemoryError):
        score(gpt2, random_questions(40))


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_scoring_leaves_model_unchanged(is_training):
    model = make_model("trained")
    questions = random_questions(6)
    expected = compute_separately(model, questions)
    model.train(is_training)
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()

    values = score(model, questions)

    assert largest_difference(values, expected) < 1e-4  # without dropout
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert {module.training for module in model.modules()} == {is_training}
    for parameter in model.parameters():
        assert parameter.grad is None
        assert parameter.requires_grad
    assert torch.is_grad_enabled()
    assert not model.lm_head._forward_pre_hooks


def test_stopped_process_still_joins_the_sum(gpt2):
    gpt2.train()
    accelerator = FakeAccelerator()
    batches = []

    answers = likelihood.log_likelihoods(
        gpt2,
        random_questions(9),
        context_length=CONTEXT,
        accelerator=accelerator,
        batch_size=2,
        progress=batches.append,
        stop=lambda: len(batches) == 2,
    )

    assert answers is None
    assert len(batches) == 2
    assert len(accelerator.reduced) == 1
    assert accelerator.reduced[0].dtype == torch.float64
    assert gpt2.training


def test_stop_of_another_process_ends_scoring(gpt2):
    # The last of these values counts the processes that were stopped.
    other_parts = torch.tensor([0.0] * 24 + [1.0], dtype=torch.float64)

    answers = likelihood.log_likelihoods(
        gpt2,
        random_questions(3),
        context_length=CONTEXT,
        accelerator=FakeAccelerator(other_parts=other_parts),
    )

    assert answers is None


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_means_every_token_is_likeliest(gpt2, batch_size):
    context = [5, 9, 3]
    likeliest = []
    for _ in range(3):
        logits = gpt2(torch.tensor([context + likeliest])).logits[0, -1]
        likeliest.append(int(logits.argmax()))
    other_first = [(likeliest[0] + 1) % VOCAB_SIZE, *likeliest[1:]]
    other_last = [*likeliest[:2], (likeliest[2] + 1) % VOCAB_SIZE]
    questions = [
        (context, [likeliest]),
        (context, [other_first]),
        (context, [other_last]),
        (context, [likeliest, other_first]),
    ]

    answers = likelihood.log_likelihoods(
        gpt2, questions, context_length=CONTEXT, batch_size=batch_size
    )

    assert [answer.greedy for answer in answers] == [True, False, False, False]
