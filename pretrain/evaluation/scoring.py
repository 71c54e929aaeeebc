"""HellaSwag for people: scored with a bar, a table beside others' scores, what is known of each item."""

import sys

import numpy as np
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedModel

from pretrain.evaluation import hellaswag, likelihood


def score(
    test: hellaswag.HellaSwag,
    model: PreTrainedModel,
    limit: int | None,
    batch_size: int | None,
    accelerator: Accelerator,
) -> list[np.ndarray]:
    """Return the log-likelihoods of each question's endings, (4,), with a bar."""
    mine = len(test.questions) // accelerator.num_processes
    interval = 0.2 if sys.stderr.isatty() else 30  # seconds: a log file gets a line now and then
    hidden = not accelerator.is_main_process
    with (
        tqdm(total=mine, unit="text", disable=hidden, mininterval=interval, dynamic_ncols=True) as bar,
        accelerator.autocast(),
    ):
        return likelihood.log_likelihoods(
            model,
            test.questions,
            context_length=limit,
            accelerator=accelerator,
            batch_size=batch_size,
            progress=lambda batch: bar.update(len(batch)),
        )


def rows(test: hellaswag.HellaSwag, likelihoods: list[np.ndarray]) -> list[dict]:
    """Return the results of each item: sums in nats, tokens and characters of each ending, predictions, label."""
    number, predictions = len(test.items), test.predictions(likelihoods)
    return [
        {
            "item": item.where,
            "label": item.label,
            "sum_logprob": likelihoods[i].tolist(),
            "tokens": test.tokens[i].tolist(),
            "characters": test.characters[i].tolist(),
            "raw_sum_logprob": likelihoods[number + i].tolist(),
            "raw_tokens": test.tokens[number + i].tolist(),
            **{f"{name}_prediction": int(predictions[name][i]) for name in test.wanted},
        }
        for i, item in enumerate(test.items)
    ]


def table(line: dict, limit: int | None, device: str) -> str:
    """Return the scores beside those of others."""
    known = {name: [f"{value:.2f}" if value else "-" for value in row] for name, row in hellaswag.PUBLISHED.items()}
    ours = [f"{100 * line[name]:.2f} ± {100 * line[f'{name}_stderr']:.2f}" for name in hellaswag.SCORES]
    body = {"": hellaswag.SCORES, line["model"][-40:]: ours, **known, "chance": ["25.00"] * len(ours)}
    width = max(map(len, body))
    cut = f", {line['cut']:,} texts cut from the left to {limit} tokens" if line["cut"] else ""
    return "\n".join(
        [
            "",
            f"HellaSwag, {line['items']:,} items of {line['dataset']}{cut}; {line['precision']} on {device}, "
            f"{line['items'] / line['seconds']:,.1f} items/s",
            "",
            *(f"{name:{width}}  " + "  ".join(f"{cell:>14}" for cell in cells) for name, cells in body.items()),
            "",
            "per cent ± standard error",
            "acc, acc_norm: lm-evaluation-harness's text and rule; acc_token_norm: build-nanogpt's and llm.c's",
            *hellaswag.CITATIONS,
        ]
    )
