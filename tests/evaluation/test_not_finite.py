"""A model that computes NaN gets no scores and generates no text, and its training continues."""

import functools
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from small_models import build_small_model, overflowing_model, stock_copy
from task_rows import DATASETS, blimp_rows

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, sampling, score_model, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.evaluator import MAX_SKIPS, Evaluator
from ursa_minor.post import chat, rewards
from ursa_minor.post import prompts as prompt_sets

NO_PROBABILITIES = "the model computes no valid probabilities"


def first_rows(dataset: str) -> list[dict]:
    """Return six short rows of the first file of a data set."""
    rows = next(iter(DATASETS[dataset].values()))
    return rows[8:14]


ROWS = {
    "arc_easy": first_rows("allenai/ai2_arc"),
    "piqa": first_rows("baber/piqa"),
    "winogrande": first_rows("allenai/winogrande"),
    "lambada_openai": first_rows("EleutherAI/lambada_openai"),
    "multiblimp_hin": first_rows("jumelet/multiblimp"),
    "hellaswag": first_rows("Rowan/hellaswag"),
    "blimp": [blimp_rows(part)[0] for part in range(3)],
}


@functools.cache
def bpe_tokenizer():
    """Return a BPE tokenizer of the rows."""
    return tokenization.train_bpe([json.dumps(ROWS, ensure_ascii=False)], 300)


def encode_task(name: str, folder) -> EncodedTask:
    """Write the rows of a task to items.jsonl, and read and encode this file."""
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    task = task_data.all_tasks()[name]
    return EncodedTask(task, task_data.read(task, [str(path)]), bpe_tokenizer())


def sampling_options(temperature: float = 1.0) -> sampling.Sampling:
    """Return the options of a sample of four tokens."""
    return sampling.Sampling(max_new_tokens=4, temperature=temperature, top_k=0, top_p=1.0, seed=1)


# Scores


def check_task_is_rejected(name, dtype, folder) -> None:
    """Check that no score of a task is computed and that the message names the first item."""
    test = encode_task(name, folder)
    model = overflowing_model(dtype, vocab_size=320, sequence_length=512)

    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)

    with pytest.raises(BadInput, match=rf"items\.jsonl: line 1: ending 1: {NO_PROBABILITIES}"):
        test.result(answers)


@pytest.mark.parametrize("task", ROWS)
def test_invalid_probabilities_have_no_score(task, tmp_path):
    check_task_is_rejected(task, torch.float32, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_overflow_has_no_score(dtype, tmp_path):
    check_task_is_rejected("piqa", dtype, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("question", "line"), [(0, 1), (4, 5), (9, 4)])
def test_item_with_invalid_ending_is_named(question, line, value, tmp_path):
    """HellaSwag has two questions for each of the six items."""
    test = encode_task("hellaswag", tmp_path)
    model = stock_copy(build_small_model(vocab_size=320, sequence_length=512))
    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)
    answers[question].nats[2] = value
    message = rf"line {line}: ending 3: .* \(its output is {value}\)"

    with pytest.raises(BadInput, match=message):
        test.result(answers)
    with pytest.raises(BadInput, match=message):
        test.result(answers, compute=score_model.by_evaluate())


# Generated text


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_invalid_probabilities_generate_no_text(dtype, temperature):
    model = overflowing_model(dtype, vocab_size=320).train()
    generation_config = model.generation_config
    written = []
    streamer = sampling.Streamer(bpe_tokenizer(), written.append, with_prompt=True)
    options = sampling_options(temperature)

    with pytest.raises(BadInput, match=f"generating text: {NO_PROBABILITIES}"):
        sampling.sample(model, [1, 2], bpe_tokenizer(), options, streamer)

    assert not written
    assert model.training
    assert model.generation_config is generation_config


def test_single_token_may_have_zero_probability():
    model = stock_copy(build_small_model(vocab_size=320))

    def exclude_token(module, args, logits):
        return logits.index_fill(-1, torch.tensor([5]), -torch.inf)

    model.lm_head.register_forward_hook(exclude_token)

    new_ids = sampling.sample(model, [1, 2], bpe_tokenizer(), sampling_options())

    assert len(new_ids) == 4


@pytest.fixture
def chat_characters():
    """Return a tokenizer of the characters in the names of chat roles."""
    return tokenization.make_characters(["user\nassistant\nsystem hi"])


def test_held_out_prompts_have_no_reward(chat_characters):
    model = overflowing_model(sequence_length=64).train()
    reward = rewards.CheckedReward("mine", len, None)

    with pytest.raises(BadInput, match=NO_PROBABILITIES):
        prompt_sets.score(model, chat_characters, ["hi"], reward, 4)

    assert model.training


def test_chat_gives_no_answer(chat_characters):
    model = overflowing_model(sequence_length=64)
    chat.add_chat(model, chat_characters)

    with pytest.raises(BadInput, match=NO_PROBABILITIES):
        chat.converse(model, chat_characters, ["hi"], sampling_options())


# During training


def make_evaluator(**parts) -> Evaluator:
    """Create an evaluator of which only some parts are used."""
    unused = dict.fromkeys(("recipe", "corpus", "tests", "model", "accelerator"))
    return Evaluator(**unused | parts)


def test_score_is_disabled_after_three_consecutive_skips(monkeypatch, caplog):
    # A score of None cannot be computed.
    scores = iter([None, None, {"acc": 0.5}, None, None, None, {"acc": 1.0}])

    def next_score(self, task):
        score = next(scores)
        if score is None:
            raise likelihood.not_finite("items.jsonl: line 7", float("nan"))
        return score

    monkeypatch.setattr(Evaluator, "score", next_score)
    evaluator = make_evaluator()
    task = SimpleNamespace(label="HellaSwag")

    with caplog.at_level(logging.WARNING):
        results = [evaluator.score_or_skip(task) for _ in range(7)]

    assert results == [None, None, {"acc": 0.5}, None, None, None, None]
    skip_message = "HellaSwag could not be computed at this step: items.jsonl: line 7"
    messages = [record.message for record in caplog.records]
    skip_messages = [message for message in messages if skip_message in message]
    assert len(skip_messages) == 2 + MAX_SKIPS
    assert "HellaSwag will not be computed again" in messages[-1]


class ShardedModel:
    """A context manager that gathers a model, and counts how often it did."""

    def __init__(self, model):
        self.model = model
        self.num_gathered = 0

    def __call__(self):
        return self

    def __enter__(self):
        self.num_gathered += 1
        return self.model

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("is_main", [True, False], ids=["main process", "other process"])
def test_every_process_gathers_model_for_skipped_samples(is_main, caplog):
    settings = SimpleNamespace(
        sample_prompts=["a"],
        sample_tokens=2,
        sample_temperature=0.0,
        sample_top_k=0,
        sample_top_p=1.0,
    )
    model = ShardedModel(overflowing_model(vocab_size=320))
    evaluator = make_evaluator(
        recipe=SimpleNamespace(evaluation=settings, model=SimpleNamespace(seed=1)),
        corpus=SimpleNamespace(tokenizer=bpe_tokenizer()),
        model=model,
        accelerator=SimpleNamespace(is_main_process=is_main),
    )

    with caplog.at_level(logging.WARNING):
        samples = [evaluator.samples() for _ in range(5)]

    assert samples == [[]] * 5
    assert model.num_gathered == 5
    expected_warnings = MAX_SKIPS if is_main else 0
    assert caplog.text.count("samples could not be computed at this step") == expected_warnings
