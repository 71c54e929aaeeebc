"""Score a model on tasks: a run, a model folder, or any causal language model of the Hub.

    python eval_tasks.py --model runs/gpt2_124m --tasks lambada_openai arc_easy
    accelerate launch --multi_gpu eval_tasks.py --model openai-community/gpt2 --tasks blimp --output scores.jsonl

A table a task, scores with their standard errors beside others' and chance; then a JSON line a task on standard output.
"""

import argparse
import json
import sys

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.evaluation import flags
from pretrain.model.find import find
from pretrain.recipe import keys, reading, rules


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Score, print the table and the JSON lines, write what was asked for."""
    asked = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    find(asked.model)
    console.importing()
    # Here, for they take seconds: a wrong flag is answered at once.
    from pretrain.evaluation import scoring
    from pretrain.hub import client

    client.bound_client()
    for task, line in scoring.run(asked, asked.tasks):
        print(json.dumps({"task": task.name} | line), flush=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(description="Score a model on tasks.", allow_abbrev=False)
    flags.add(parser)
    tasks_help = f"tasks: {rules.either(keys.TASKS)}; multiblimp_LANGUAGE"
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help=tasks_help)
    asked = reading.parse_flags(parser, argv)
    asked.tasks = list(dict.fromkeys(asked.tasks))
    known, faults = keys.TASKS, flags.faults_of(asked, asked.tasks)
    for name in asked.tasks:
        if name not in known:
            faults.append(f"--tasks {name}: must be {rules.either(known)}{rules.nearest(name, known)}")
    if faults:
        raise BadInput(faults)
    return asked


if __name__ == "__main__":
    sys.exit(main())
