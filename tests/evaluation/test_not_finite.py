"""A model that computes NaN has no scores and generates no text; a run goes on without them."""

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

PRECISIONS = [torch.float16, torch.bfloat16, torch.float32]
ROWS = {name: list(files.values())[0][8:14] for name, files in DATASETS.items()}
ROWS = {
    "arc_easy": ROWS["allenai/ai2_arc"],
    "piqa": ROWS["baber/piqa"],
    "winogrande": ROWS["allenai/winogrande"],
    "lambada_openai": ROWS["EleutherAI/lambada_openai"],
    "multiblimp_hin": ROWS["jumelet/multiblimp"],
    "hellaswag": ROWS["Rowan/hellaswag"],
    "blimp": [blimp_rows(part)[0] for part in range(3)],
}
HOW = sampling.Sampling(max_new_tokens=4, temperature=1.0, top_k=0, top_p=1.0, seed=1)


@functools.cache
def tokenizer():
    return tokenization.train_bpe([json.dumps(ROWS, ensure_ascii=False)], 300)


def encoded(task, folder):
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    record = task_data.all_tasks()[task]
    return EncodedTask(record, task_data.read(record, [str(path)]), tokenizer())


@pytest.mark.parametrize(
    ("task", "dtype"),
    [*((task, torch.float32) for task in ROWS), ("piqa", torch.float16), ("piqa", torch.bfloat16)],
    ids=str,
)
def test_a_task_has_no_score_and_the_item_is_named(task, dtype, tmp_path):
    test = encoded(task, tmp_path)
    model = overflowing_model(dtype, vocab_size=320, sequence_length=512)
    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)
    with pytest.raises(
        BadInput, match=r"items.jsonl: line 1: ending 1: the model computes no valid probabilities"
    ):
        test.result(answers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("question", [0, 4, 9])
def test_the_item_of_a_single_bad_ending_is_named(question, value, tmp_path):
    """HellaSwag has two questions for each item."""
    test = encoded("hellaswag", tmp_path)
    model = stock_copy(build_small_model(vocab_size=320, sequence_length=512))
    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)
    answers[question].nats[2] = value
    for compute in ({}, {"compute": score_model.by_evaluate()}):
        with pytest.raises(
            BadInput, match=rf"line {question % 6 + 1}: ending 3: .* \(its output is {value}\)"
        ):
            test.result(answers, **compute)


def greedy(temperature):
    return sampling.Sampling(max_new_tokens=4, temperature=temperature, top_k=0, top_p=1.0, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_no_text_is_generated_and_the_model_is_left_as_it_was(dtype, temperature):
    model = overflowing_model(dtype, vocab_size=320).train()
    config, written = model.generation_config, []
    streamer = sampling.Streamer(tokenizer(), written.append, with_prompt=True)
    with pytest.raises(
        BadInput, match="generating text: the model computes no valid probabilities"
    ):
        sampling.sample(model, [1, 2], tokenizer(), greedy(temperature), streamer)
    assert model.training and model.generation_config is config and not written


def test_a_token_that_is_never_chosen_may_have_no_probability():
    model = stock_copy(build_small_model(vocab_size=320))
    model.lm_head.register_forward_hook(
        lambda module, args, out: out.index_fill(-1, torch.tensor([5]), -torch.inf)
    )
    assert len(sampling.sample(model, [1, 2], tokenizer(), HOW)) == 4


def test_a_chat_and_post_trainings_prompts_raise_the_same_error():
    model, named = (
        overflowing_model(sequence_length=64),
        tokenization.make_characters(["user\nassistant\nsystem hi"]),
    )
    with pytest.raises(BadInput, match="computes no valid probabilities"):
        prompt_sets.score(model.train(), named, ["hi"], rewards.CheckedReward("mine", len, None), 4)
    assert model.training
    chat.add_chat(model, named)
    with pytest.raises(BadInput, match="computes no valid probabilities"):
        chat.converse(model, named, ["hi"], HOW)


# In training


def evaluator(**changes):
    parts = dict.fromkeys(("recipe", "corpus", "tests", "model", "accelerator"))
    return Evaluator(**parts | changes)


def test_a_score_is_off_after_three_skips_in_a_row(monkeypatch, caplog):
    task, results = SimpleNamespace(label="HellaSwag"), []
    monkeypatch.setattr(Evaluator, "score", lambda self, task: next(turns) or fail())

    def fail():
        raise likelihood.not_finite("items.jsonl: line 7", float("nan"))

    turns = iter([None, None, {"acc": 0.5}, None, None, None, {"acc": 1.0}])
    run = evaluator()
    with caplog.at_level(logging.WARNING):
        results = [run.score_or_skip(task) for _ in range(7)]
    assert results == [None, None, {"acc": 0.5}, None, None, None, None]
    skipped = [
        record.message
        for record in caplog.records
        if "HellaSwag could not be computed at this step: items.jsonl: line 7" in record.message
    ]
    assert (
        len(skipped) == 2 + MAX_SKIPS
        and "HellaSwag will not be computed again" in caplog.records[-1].message
    )


@pytest.mark.parametrize("is_main", [True, False])
def test_samples_are_skipped_and_every_process_takes_part(is_main, caplog):
    """A sharded model is gathered by all processes together."""
    gathered = []

    class Whole:
        def __call__(self):
            return self

        def __enter__(self):
            gathered.append(1)
            return overflowing_model(vocab_size=320)

        def __exit__(self, *_):
            pass

    settings = SimpleNamespace(
        sample_prompts=["a"],
        sample_tokens=2,
        sample_temperature=0.0,
        sample_top_k=0,
        sample_top_p=1.0,
    )
    recipe = SimpleNamespace(evaluation=settings, model=SimpleNamespace(seed=1))
    accelerator = SimpleNamespace(is_main_process=is_main)
    run = evaluator(
        recipe=recipe,
        corpus=SimpleNamespace(tokenizer=tokenizer()),
        model=Whole(),
        accelerator=accelerator,
    )
    with caplog.at_level(logging.WARNING):
        assert [run.samples() for _ in range(5)] == [[]] * 5
    assert len(gathered) == 5
    assert sum(
        "samples could not be computed at this step" in record.message for record in caplog.records
    ) == (MAX_SKIPS if is_main else 0)
