"""Score a model on HellaSwag: a run, a model folder, or any causal language model of the Hub.

    python eval_hellaswag.py --model runs/gpt2_124m
    accelerate launch --multi_gpu eval_hellaswag.py --model openai-community/gpt2-xl --output scores.jsonl

Three scores with their standard errors, beside GPT-2's; then one JSON line on standard output.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from pretrain.base import files
from pretrain.base.errors import BadInput, exit_on_bad_input
from pretrain.data import tokenization
from pretrain.evaluation import hellaswag, likelihood
from pretrain.hub import client
from pretrain.machine import hardware
from pretrain.machine.accelerator import make_accelerator
from pretrain.model import pretrained
from pretrain.recipe import reading

PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Score, print the table and the JSON line, write and push what was asked for."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    client.bound_client()
    disable_progress_bar()  # Transformers' own bars, over loading one file
    if asked.push_to_hub:
        refuse_push(asked)
    name = pretrained.find(asked.model)
    tokenizer = tokenization.load(name, of_model=True)
    items = hellaswag.read_items(asked.data_files, asked.limit)
    test = hellaswag.HellaSwag(items, tokenizer)
    # Without a YAML the model runs in the precision it was saved in, as in lm-evaluation-harness.
    accelerator = make_accelerator(hardware.this_device(), precision="no")
    model = pretrained.load(name).to(accelerator.device)
    limit = likelihood.context_length(model.config)
    cut = test.longer_than(limit)

    start = time.perf_counter()
    try:
        likelihoods = score(test, model, limit, asked.batch_size, accelerator)
    except KeyboardInterrupt:
        raise BadInput("stopped before all items were scored; nothing was written", 130) from None
    seconds = time.perf_counter() - start
    if not accelerator.is_main_process:
        return 0
    predictions = test.predictions(likelihoods)
    scores = report(test, predictions)
    precision = accelerator.mixed_precision
    line = {
        "model": asked.model,
        "dataset": ", ".join(asked.data_files or [f"{hellaswag.DATASET}@{hellaswag.REVISION[:7]}"]),
        "items": len(items),
        "cut": cut,
        "precision": PRECISIONS.get(str(model.dtype), str(model.dtype)) if precision == "no" else precision,
        **scores,
        "seconds": round(seconds, 2),
    }
    print(table(line, limit, hardware.device_name(accelerator.device)), file=sys.stderr)
    if asked.output:
        files.write_text(Path(asked.output), "".join(json.dumps(row) + "\n" for row in rows(test, likelihoods)))
        print(f"each item's sums and predictions: {asked.output}", file=sys.stderr)
    pushed = push(asked.push_to_hub, scores) if asked.push_to_hub else True
    print(json.dumps(line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description="Score a model on HellaSwag.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a run folder, its model/, any model folder, or a Hub id")
    parser.add_argument(
        "--data_files",
        nargs="+",
        metavar="FILE",
        help="items as JSON lines or Parquet; else the Hub's validation split",
    )
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N items (0 = all)")
    parser.add_argument(
        "--batch_size",
        default="auto",
        metavar="N",
        help="contexts at once, each with its four endings, or auto (default)",
    )
    parser.add_argument("--output", metavar="FILE", help="write a JSON line an item: sums, counts, predictions, label")
    parser.add_argument("--push_to_hub", metavar="ID", help="put the scores into the card of this model of the Hub")
    asked = reading.parse_flags(parser, argv)
    faults = []
    if asked.limit < 0:
        faults.append(f"--limit {asked.limit}: must be 0 (all) or more")
    if asked.batch_size != "auto" and not (asked.batch_size.isdecimal() and int(asked.batch_size)):
        faults.append(f"--batch_size {asked.batch_size}: must be auto, or 1 or more")
    if asked.output and (Path(asked.output).is_dir() or not Path(asked.output).absolute().parent.is_dir()):
        faults.append(f"--output {asked.output}: must be a file in a folder that exists")
    if asked.output and Path(asked.output).resolve() in {Path(name).resolve() for name in asked.data_files or ()}:
        faults.append(f"--output {asked.output}: is one of --data_files, which it would replace")
    if faults:
        raise BadInput(faults)
    asked.batch_size = None if asked.batch_size == "auto" else int(asked.batch_size)
    return asked


def score(
    test: hellaswag.HellaSwag, model, limit: int | None, batch_size: int | None, accelerator: Accelerator
) -> np.ndarray:
    """Return the log-likelihoods of all endings, (Q, 4), with a bar that shows the scores so far."""
    shown = accelerator.is_main_process
    mine, done = len(test.questions) // accelerator.num_processes, []
    interval = 0.2 if sys.stderr.isatty() else 30  # seconds: a log file gets a line now and then
    with tqdm(total=mine, unit="text", disable=not shown, mininterval=interval, dynamic_ncols=True) as bar:

        def progress(batch: np.ndarray, likelihoods: np.ndarray) -> None:
            done.extend(batch)
            bar.update(len(batch))
            if shown:
                scores = test.scores(test.predictions(likelihoods), done)
                bar.set_postfix({name: text(scores, name) for name in test.wanted if name in scores}, refresh=False)

        with accelerator.autocast():
            return likelihood.log_likelihoods(
                model,
                test.questions,
                context_length=limit,
                reduce_sum=lambda tensor: accelerator.reduce(tensor, "sum"),
                rank=accelerator.process_index,
                num_processes=accelerator.num_processes,
                batch_size=batch_size,
                progress=progress,
            )


def report(test: hellaswag.HellaSwag, predictions: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the scores, computed as a metric of the ``evaluate`` library: ours, local, without its downloads.

    Where it is not installed they are the same numbers, from the function that the metric calls.
    """
    if find_spec("evaluate") is None or find_spec("datasets") is None:
        return test.scores(predictions)
    import datasets  # both take seconds to import, and only the first process needs them
    import evaluate

    class HellaSwag(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            integer = datasets.Value("int64")
            return evaluate.MetricInfo(
                description=hellaswag.__doc__,
                citation="Zellers et al. 2019, HellaSwag: Can a Machine Really Finish Your Sentence?",
                inputs_description=f"predictions: chosen endings under {', '.join(test.wanted)}; references: labels",
                features=datasets.Features({"predictions": datasets.Sequence(integer), "references": integer}),
            )

        def _compute(self, predictions: list[list[int]], references: list[int]) -> dict[str, float]:
            right = np.array(predictions) == np.array(references)[:, None]
            found = {}
            for i, name in enumerate(test.wanted):
                found[name], found[f"{name}_stderr"] = hellaswag.share_and_error(right[:, i])
            return found

    with tempfile.TemporaryDirectory() as folder:  # it makes a folder of its own even when it keeps all in memory
        metric = HellaSwag(keep_in_memory=True, cache_dir=folder)
        chosen = np.stack([predictions[name] for name in test.wanted], axis=1)
        return metric.compute(predictions=chosen.tolist(), references=test.labels.tolist())


def rows(test: hellaswag.HellaSwag, likelihoods: np.ndarray) -> list[dict]:
    """Return what is known of each item: sums in nats, tokens and characters of each ending, predictions, label."""
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


def text(scores: dict[str, float], name: str) -> str:
    """Return a score and its error in per cent."""
    return f"{100 * scores[name]:.2f} ± {100 * scores[f'{name}_stderr']:.2f}"


def table(line: dict, limit: int | None, device: str) -> str:
    """Return the scores beside those of others."""
    known = {name: [f"{value:.2f}" if value else "-" for value in row] for name, row in hellaswag.PUBLISHED.items()}
    ours = [text(line, name) for name in hellaswag.SCORES]
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


def refuse_push(asked: argparse.Namespace) -> None:
    """Raise BadInput unless the scores will be what a card says they are, and the card can be found."""
    from huggingface_hub import HfApi

    if asked.limit or asked.data_files:
        raise BadInput(
            "--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files"
        )
    try:
        HfApi().model_info(asked.push_to_hub, timeout=30)
    except Exception as error:
        raise BadInput(f"--push_to_hub {asked.push_to_hub}: cannot be found: {str(error).splitlines()[0]}") from None


def push(model_id: str, scores: dict[str, float]) -> bool:
    """Put the scores, in per cent, into the model card's metadata; return whether that worked."""
    import evaluate

    rules = {"acc": "accuracy", "acc_norm": "accuracy, per character", "acc_token_norm": "accuracy, per token"}
    try:
        for name, rule in rules.items():
            evaluate.push_to_hub(
                model_id=model_id,
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=hellaswag.DATASET,
                dataset_name="HellaSwag",
                dataset_split="validation",
                dataset_revision=hellaswag.REVISION,
                metric_type=name,
                metric_name=rule,
                metric_value=round(100 * scores[name], 2),
                overwrite=True,
            )
    except Exception as error:  # the scores stand whatever the Hub says
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"error: --push_to_hub {model_id}: {reason}. The scores are below; push again", file=sys.stderr)
        return False
    print(f"scores pushed into the card of {model_id}", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main())
