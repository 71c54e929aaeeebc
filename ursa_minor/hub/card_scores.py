"""A task's scores as results in the metadata of a model card on the Hub."""

import logging
from collections.abc import Mapping
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.evaluation.task import Task
from ursa_minor.hub import card_merge, client

log = logging.getLogger(__name__)

CARD = "README.md"
KIND = {"task_type": "text-generation", "task_name": "Text Generation"}


def check_model_exists(model_id: str) -> None:
    """Raise BadInput unless the card can be found."""
    try:
        client.api().model_info(model_id)
    except Exception as error:
        raise BadInput(
            f"--push_to_hub {model_id}: cannot be found: {client.describe(error)}"
        ) from None


def result(task: Task, score: str, value: float, revision: str) -> EvalResult:
    """Return a score as a card's metadata have it, the same wherever it was measured.

    Args:
        value: as it is measured: a share as a number from 0 to 1.
        revision: of the task's data set, all of whose items were scored.
    """
    return EvalResult(
        **KIND,
        dataset_type=task.dataset[0],
        dataset_name=task.label,
        dataset_config=task.config,
        dataset_split=task.dataset[1],
        dataset_revision=revision,
        metric_type=score,
        metric_name=f"{score} ({task.scores[score]})",
        metric_value=float(task.format_score(score, value)),
    )


def push(model_id: str, task: Task, revision: str, scores: Mapping[str, float]) -> bool:
    """Put a task's scores into the metadata of a model card; return whether that worked.

    Args:
        revision: of the task's data set, all of whose items were scored.
        scores: at least those that the task defines.
    """
    results = [result(task, name, scores[name], revision) for name in task.scores]
    index = eval_results_to_model_index(model_id.rpartition("/")[2], results)
    try:
        _add(model_id, index, f"Add {task.label} scores")
    except Exception as error:  # the scores are valid whatever the Hub answers
        if isinstance(error, card_merge.CannotMerge):
            why = f"its README.md is left as it is: {error}. {card_merge.FIX}"
        else:
            why = first_line(error)
        log.error(f"--push_to_hub {model_id}: {why}. The scores are below; push again")
        return False
    log.info(f"scores pushed into the card of {model_id}")
    return True


def _add(model_id: str, index: Any, title: str) -> None:
    api = client.api()
    info = api.model_info(model_id)
    has_card = CARD in {sibling.rfilename for sibling in info.siblings or ()}
    current = client.read_file(model_id, CARD, info.sha).decode() if has_card else ""
    merged = card_merge.add_results(current, index)
    if merged != current:
        change = CommitOperationAdd(CARD, merged.encode())
        api.create_commit(model_id, [change], commit_message=title, parent_commit=info.sha)
