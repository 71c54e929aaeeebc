"""Scores rows of tasks, from HF_ENDPOINT, with lm-eval's own task files and with ours: ``MODEL TEXT``.

evaluation/test_task_data.py runs it.

Prints a JSON object: of each task the items compared, how often a choice, or a log-likelihood by more than rounding,
differs, the largest difference of a log-likelihood in nats, and each score of both.
"""

import json
import sys
from pathlib import Path

import lm_eval
import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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


def make(kind: str, text: str):
    """A random GPT-2 under GPT-2's tokenizer; a random Llama, or a GPT-2 after 200 steps, both under a BPE of the text."""
    torch.manual_seed(1)
    if kind == "random":
        return gpt2_tokenizer(), GPT2LMHeadModel(
            GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=50304)
        ).eval()
    tokenizer = tokenization.train_bpe([text], 1024)
    if kind == "llama":
        shape = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "initializer_range": 0.1,
        }
        shape |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 384,
        }
        return tokenizer, LlamaForCausalLM(LlamaConfig(**shape, vocab_size=1024)).eval()
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=4, n_embd=96, vocab_size=1024, n_positions=256)
    )
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        begin = step * 512 % (len(ids) - 512)
        rows = ids[begin : begin + 512].view(8, 64)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tokenizer, model.eval()


def main() -> None:
    """Compare every task."""
    kind, path = sys.argv[1:]
    tokenizer, model = make(kind, Path(path).read_text(encoding="utf-8"))
    limit = likelihood.context_length(model.config)
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu", batch_size=2
    )
    theirs = lm_eval.simple_evaluate(
        harness, tasks=list(TASKS), task_manager=TaskManager(), bootstrap_iters=1000
    )
    found = {}
    for name in TASKS:
        task = task_data.all_tasks()[name]
        test = EncodedTask(task, task_data.read(task), tokenizer)
        answers = likelihood.log_likelihoods(model, test.questions, context_length=limit)
        ours, chosen, sums = test.result(answers), test.predictions(answers), test.sums(answers)
        if name == "blimp":  # ours come in turn from the parts in the order of their files
            parts = sorted(part for part in theirs["samples"] if part.startswith("blimp_"))
            order = sorted(parts, key=lambda part: part.removeprefix("blimp_"))
            samples = [theirs["samples"][part][0] for part in order]
        else:
            samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        differs, worst = 0, 0.0
        for i, sample in enumerate(samples):
            likelihoods = np.array([nats for nats, _ in sample["filtered_resps"]])
            gaps = np.abs(likelihoods - sums[i])
            rounding = 4 * np.spacing(
                np.abs(likelihoods).astype(np.float32)
            )  # lm-eval sums about 100 terms in fp32
            differs += bool((gaps > np.maximum(1e-4, rounding)).any())
            worst = max(worst, float(gaps.max()))
            for score in set(chosen) & set(sample) - {"perplexity"}:
                differs += bool(sample[score]) != (chosen[score][i] == test.gold[i])
            if len(likelihoods) > 1:
                differs += int(likelihoods.argmax() != chosen["acc"][i])
        row = {
            "items": len(samples),
            "ours": len(test.items),
            "cut": test.longer_than(limit),
            "differs": int(differs),
        }
        row["worst"] = worst
        row["scores"] = {
            score: [ours[score], theirs["results"][name][f"{score},none"]]
            for score in ours
            if isinstance(theirs["results"][name].get(f"{score},none"), float)
            and "perplexity_" not in score
        }
        found[name] = row
    print(json.dumps(found))


if __name__ == "__main__":
    main()
