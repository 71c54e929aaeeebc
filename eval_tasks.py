"""Score a model on tasks: a run, a model folder, or any causal language model of the Hub.

    python eval_tasks.py --model runs/gpt2_124m --tasks lambada_openai arc_easy
    accelerate launch --multi_gpu eval_tasks.py --model openai-community/gpt2 --tasks blimp --output scores.jsonl

A table a task, scores with their standard errors beside others' and chance; then a JSON line a task on standard output.
"""

import argparse
import os
import sys

from ursa_minor.base import console, files, wording
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import refuse_incomplete_launch
from ursa_minor.evaluation import flags
from ursa_minor.model.resolve import find
from ursa_minor.recipe import keys, loading


@exit_on_bad_input
def main(argv: list[str] | None = None, task: str | None = None) -> int:
    """Score, print the tables and the JSON lines, write and push what was asked for; ``task``: the only one."""
    asked = parse(sys.argv[1:] if argv is None else argv, task)
    refuse_incomplete_launch(os.environ)
    console.start()
    find(asked.model)
    console.importing()
    # Here, for they take seconds: a wrong flag is answered at once.
    from ursa_minor.evaluation import score_model
    from ursa_minor.hub import card_scores, client

    client.bound_client()
    if asked.push_to_hub:
        card_scores.refuse_unknown(asked.push_to_hub)
    pushed = True
    for record, line in score_model.run(asked):
        if asked.push_to_hub:
            # Only HellaSwag's scores can be pushed, whose revision is fixed.
            pushed = card_scores.push(asked.push_to_hub, record, str(record.revision), line)
        print(files.to_json(line), flush=True)
    return 0 if pushed else 1


def parse(argv: list[str], task: str | None = None) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense. ``task``: the only one, whose scores may be pushed."""
    parser = argparse.ArgumentParser(description=f"Score a model on {task or 'tasks'}.", allow_abbrev=False)
    flags.add(parser)
    if task:
        parser.add_argument("--push_to_hub", metavar="ID", help="put the scores into the card of this model of the Hub")
    else:
        tasks_help = f"tasks: {wording.either(keys.TASKS)}; multiblimp_LANGUAGE"
        parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help=tasks_help)
    parser.set_defaults(tasks=[task], alone=bool(task), push_to_hub=None)
    asked = loading.parse_flags(parser, argv)
    asked.tasks = list(dict.fromkeys(asked.tasks))
    known, faults = keys.TASKS, flags.faults_of(asked)
    if asked.push_to_hub and (asked.limit or asked.task_files):
        faults.append("--push_to_hub: a card's scores are of the whole validation split: without --limit, --data_files")
    model_id, _, revision = asked.model.partition("@")
    if revision and asked.push_to_hub == model_id:
        faults.append(f"--push_to_hub {model_id}: its card describes the newest version, and --model another one")
    unknown = [name for name in asked.tasks if name not in known]
    faults += [f"--tasks {name}: must be {wording.either(known)}{wording.nearest(name, known)}" for name in unknown]
    if faults:
        raise BadInput(faults)
    return asked


if __name__ == "__main__":
    sys.exit(main())
