"""Score the rows of all tasks with lm-eval and with this project: ``MODEL TEXT``.

evaluation/test_task_data.py runs this program with HF_ENDPOINT set to a local server. MODEL is
random, llama or trained, and TEXT is the path of a text for the tokenizer.

The output is a JSON object with the fields of ``Comparison`` for each task.
"""

import dataclasses
import json
import sys
from pathlib import Path

import lm_eval
import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.runs import gpt2_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask

TASKS = (
    "arc_easy",
    "arc_challenge",
    "piqa",
    "winogrande",
    "lambada_openai",
    "blimp",
    "multiblimp_hin",
    "hellaswag",
)


@dataclasses.dataclass
class Comparison:
    """How the results of this project and of lm-eval compare for one task."""

    items: int  # of this project
    harness_items: int
    truncated: int  # questions longer than the context
    differences: int  # choices, and log-likelihoods that differ by more than rounding
    largest_difference: float  # of a log-likelihood, in nats
    scores: dict[str, tuple[float, float]]  # of this project and of lm-eval


def make(kind: str, text: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Create a tokenizer and a model.

    Args:
        kind: "random" (a GPT-2 and its tokenizer), "llama" (a random Llama and a BPE tokenizer of
            the text) or "trained" (a GPT-2 after 200 steps on the text, and the same tokenizer).
        text: the training text.
    """
    torch.manual_seed(1)
    if kind == "random":
        config = GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=50304)
        return gpt2_tokenizer(), GPT2LMHeadModel(config).eval()
    tokenizer = tokenization.train_bpe([text], 1024)
    if kind == "llama":
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            max_position_embeddings=384,
            vocab_size=1024,
        )
        return tokenizer, LlamaForCausalLM(config).eval()
    config = GPT2Config(n_layer=2, n_head=4, n_embd=96, vocab_size=1024, n_positions=256)
    model = GPT2LMHeadModel(config)
    train(model, torch.tensor(tokenizer(text, verbose=False)["input_ids"]))
    return tokenizer, model.eval()


def train(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Train a model for 200 steps of 8 sequences of 64 tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        start = step * 512 % (len(ids) - 512)
        rows = ids[start : start + 512].view(8, 64)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def harness_samples(harness_results: dict, task_name: str) -> list[dict]:
    """Return the samples of lm-eval in the order of this project's items."""
    samples = harness_results["samples"]
    if task_name != "blimp":
        return sorted(samples[task_name], key=lambda sample: sample["doc_id"])
    # The items of BLiMP alternate between its parts, in the order of the file names.
    parts = [name for name in samples if name.startswith("blimp_")]
    parts.sort(key=lambda part: part.removeprefix("blimp_"))
    return [samples[part][0] for part in parts]


def compare(harness_results: dict, test: EncodedTask, answers: list, limit: int) -> Comparison:
    """Compare the answers of this project with the results of lm-eval."""
    name = test.task.name
    samples = harness_samples(harness_results, name)
    predictions = test.predictions(answers)
    sums = test.sums(answers)
    differences = 0
    largest_difference = 0.0
    for i, sample in enumerate(samples):
        harness_sums = np.array([nats for nats, _ in sample["filtered_resps"]])
        gaps = np.abs(harness_sums - sums[i])
        # lm-eval adds about 100 terms in fp32.
        rounding = 4 * np.spacing(np.abs(harness_sums).astype(np.float32))
        differences += int((gaps > np.maximum(1e-4, rounding)).any())
        largest_difference = max(largest_difference, float(gaps.max()))
        for score in set(predictions) & set(sample) - {"perplexity"}:
            is_correct = predictions[score][i] == test.gold[i]
            differences += int(bool(sample[score]) != is_correct)
        if len(harness_sums) > 1:
            differences += int(harness_sums.argmax() != predictions["acc"][i])

    harness_scores = harness_results["results"][name]
    scores = {}
    for score, value in test.result(answers).items():
        harness_score = harness_scores.get(f"{score},none")
        if isinstance(harness_score, float) and "perplexity_" not in score:
            scores[score] = (value, harness_score)
    return Comparison(
        items=len(test.items),
        harness_items=len(samples),
        truncated=test.longer_than(limit),
        differences=differences,
        largest_difference=largest_difference,
        scores=scores,
    )


def main() -> None:
    """Compare every task."""
    kind, path = sys.argv[1:]
    tokenizer, model = make(kind, Path(path).read_text(encoding="utf-8"))
    limit = likelihood.context_length(model.config)
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu", batch_size=2
    )
    harness_results = lm_eval.simple_evaluate(
        harness, tasks=list(TASKS), task_manager=TaskManager(), bootstrap_iters=1000
    )

    comparisons = {}
    for name in TASKS:
        task = task_data.all_tasks()[name]
        test = EncodedTask(task, task_data.read(task), tokenizer)
        answers = likelihood.log_likelihoods(model, test.questions, context_length=limit)
        comparison = compare(harness_results, test, answers, limit)
        comparisons[name] = dataclasses.asdict(comparison)
    print(json.dumps(comparisons))


if __name__ == "__main__":
    main()
