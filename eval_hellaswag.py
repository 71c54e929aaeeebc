"""Score a model on HellaSwag: a run, a model folder, or any causal language model of the Hub.

    python eval_hellaswag.py --model runs/gpt2_124m
    accelerate launch --multi_gpu eval_hellaswag.py --model openai-community/gpt2-xl --output scores.jsonl

Three scores with their standard errors, beside GPT-2's; then one JSON line on standard output. Other tasks: eval_tasks.py.
"""

import argparse
import json
import sys

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.evaluation import flags
from pretrain.model.find import find
from pretrain.recipe import reading

TASK = "hellaswag"


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Score, print the table and the JSON line, write and push what was asked for."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    find(asked.model)
    console.importing()
    # Here, for they take seconds: a wrong flag is answered at once.
    from pretrain.evaluation import scoring
    from pretrain.hub import client, scores

    client.bound_client()
    if asked.push_to_hub:
        scores.refuse_unknown(asked.push_to_hub)
    pushed = True
    for task, line in scoring.run(asked, [TASK]):
        pushed = not asked.push_to_hub or scores.push(asked.push_to_hub, task, line)
        print(json.dumps(line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description="Score a model on HellaSwag.", allow_abbrev=False)
    flags.add(parser)
    parser.add_argument("--push_to_hub", metavar="ID", help="put the scores into the card of this model of the Hub")
    asked = reading.parse_flags(parser, argv)
    faults = flags.faults_of(asked, [TASK])
    if asked.push_to_hub and (asked.limit or asked.task_files):
        faults.append("--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files")
    if faults:
        raise BadInput(faults)
    return asked


if __name__ == "__main__":
    sys.exit(main())
