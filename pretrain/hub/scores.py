"""A task's scores in the card of a model on the Hub."""

import logging
from typing import Any

from pretrain.base.errors import BadInput, first_line
from pretrain.evaluation.record import Task
from pretrain.hub import client

log = logging.getLogger(__name__)


def refuse_unknown(model_id: str) -> None:
    """Raise BadInput unless the card can be found."""
    try:
        client.api().model_info(model_id)
    except Exception as error:
        raise BadInput(f"--push_to_hub {model_id}: cannot be found: {client.describe(error)}") from None


def data_of(task: Task) -> dict[str, Any]:
    """Return how a card's metadata name the data that a task's scores are of."""
    about: dict[str, Any] = {"dataset_type": task.dataset[0], "dataset_split": task.dataset[1]}
    return about | {"dataset_name": task.label, "dataset_revision": task.revision}


def push(model_id: str, task: Task, scores: dict[str, float]) -> bool:
    """Put a task's scores into the model card's metadata; return whether that worked."""
    import evaluate

    about = data_of(task) | {"task_type": "text-generation", "task_name": "Text Generation"}
    try:
        for name, rule in task.scores.items():
            score: dict[str, Any] = {"metric_type": name, "metric_name": f"{name} ({rule})"}
            score["metric_value"] = float(task.shown(name, scores[name]))
            evaluate.push_to_hub(model_id=model_id, overwrite=True, **about, **score)
    except Exception as error:  # the scores are valid whatever the Hub answers
        log.error(f"--push_to_hub {model_id}: {first_line(error)}. The scores are below; push again")
        return False
    log.info(f"scores pushed into the card of {model_id}")
    return True
