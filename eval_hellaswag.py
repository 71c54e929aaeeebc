"""Score a model on HellaSwag: a run, a model folder, or any causal language model of the Hub.

    python eval_hellaswag.py --model runs/gpt2_124m
    accelerate launch --multi_gpu eval_hellaswag.py --model openai-community/gpt2-xl --output scores.jsonl

Three scores with their standard errors, beside GPT-2's; then one JSON line on standard output.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from pretrain.base import console, files
from pretrain.base.entry import catch_interrupts, exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.recipe import reading

log = logging.getLogger("pretrain.eval_hellaswag")

PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Score, print the table and the JSON line, write and push what was asked for."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    # Here, for they take seconds: a wrong flag is answered at once.
    from transformers.utils.logging import disable_progress_bar

    from pretrain.data import tokenization
    from pretrain.evaluation import hellaswag, likelihood, scoring
    from pretrain.hub import client, scores
    from pretrain.machine import hardware
    from pretrain.machine.accelerator import make_accelerator
    from pretrain.model import pretrained

    client.bound_client()
    disable_progress_bar()  # Transformers' own bars, over loading one file
    if asked.push_to_hub:
        scores.refuse_unknown(asked.push_to_hub)
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
    catch_interrupts()
    try:
        likelihoods = scoring.score(test, model, limit, asked.batch_size, accelerator)
    except KeyboardInterrupt:
        raise BadInput("stopped before all items were scored; nothing was written", 130) from None
    seconds = time.perf_counter() - start
    if not accelerator.is_main_process:
        return 0
    found = test.scores(test.predictions(likelihoods))
    precision = accelerator.mixed_precision
    line = {
        "model": asked.model,
        "dataset": ", ".join(asked.data_files or [f"{hellaswag.DATASET}@{hellaswag.REVISION[:7]}"]),
        "items": len(items),
        "cut": cut,
        "precision": PRECISIONS.get(str(model.dtype), str(model.dtype)) if precision == "no" else precision,
        **found,
        "seconds": round(seconds, 2),
    }
    log.info(scoring.table(line, limit, hardware.device_name(accelerator.device)))
    if asked.output:
        files.write_text(Path(asked.output), "".join(json.dumps(row) + "\n" for row in scoring.rows(test, likelihoods)))
        log.info(f"each item's sums and predictions: {asked.output}")
    pushed = scores.push(asked.push_to_hub, found) if asked.push_to_hub else True
    print(json.dumps(line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description="Score a model on HellaSwag.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a run folder, its model/, any model folder, or a Hub id")
    files_help = "items as JSON lines or Parquet; else the Hub's validation split"
    parser.add_argument("--data_files", nargs="+", metavar="FILE", help=files_help)
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N items (0 = all)")
    batch_help = "contexts at once, each with its four endings, or auto (default)"
    parser.add_argument("--batch_size", default="auto", metavar="N", help=batch_help)
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
    if asked.push_to_hub and (asked.limit or asked.data_files):
        faults.append("--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files")
    if faults:
        raise BadInput(faults)
    asked.batch_size = None if asked.batch_size == "auto" else int(asked.batch_size)
    return asked


if __name__ == "__main__":
    sys.exit(main())
