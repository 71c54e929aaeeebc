"""Score a model on HellaSwag: a run, a model folder, or any causal language model of the Hub.

    python eval_hellaswag.py --model runs/gpt2_124m
    accelerate launch --multi_gpu eval_hellaswag.py --model openai-community/gpt2-xl --output scores.jsonl

Three scores with their standard errors, beside GPT-2's; then one JSON line on standard output. Other tasks: eval_tasks.py.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from pretrain.base import console, files
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.evaluation import flags
from pretrain.recipe import reading

log = logging.getLogger("pretrain.eval_hellaswag")

TASK = "hellaswag"
LEGEND = "acc, acc_norm: lm-evaluation-harness's text and rule; acc_token_norm: build-nanogpt's and llm.c's"


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Score, print the table and the JSON line, write and push what was asked for."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    # Here, for they take seconds: a wrong flag is answered at once.
    from transformers.utils.logging import disable_progress_bar

    from pretrain.evaluation import scoring
    from pretrain.hub import client, scores

    client.bound_client()
    disable_progress_bar()  # Transformers' own bars, over loading one file
    if asked.push_to_hub:
        scores.refuse_unknown(asked.push_to_hub)
    found = list(scoring.score(asked.model, [TASK], asked.data_files, asked.limit, asked.batch_size))
    if not found:  # another process prints
        return 0
    log.info(scoring.task_table(found[0], LEGEND))
    if asked.output:
        rows = found[0].test.rows(found[0].answers)
        files.write_text(Path(asked.output), "".join(json.dumps(row) + "\n" for row in rows))
        log.info(f"each item's sums and predictions: {asked.output}")
    pushed = scores.push(asked.push_to_hub, found[0].test.task, found[0].line) if asked.push_to_hub else True
    print(json.dumps(found[0].line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description="Score a model on HellaSwag.", allow_abbrev=False)
    flags.add(parser, "items as JSON lines or Parquet; else the Hub's validation split")
    parser.add_argument("--push_to_hub", metavar="ID", help="put the scores into the card of this model of the Hub")
    asked = reading.parse_flags(parser, argv)
    faults = flags.faults_of(asked)
    if asked.push_to_hub and (asked.limit or asked.data_files):
        faults.append("--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files")
    if faults:
        raise BadInput(faults)
    return asked


if __name__ == "__main__":
    sys.exit(main())
