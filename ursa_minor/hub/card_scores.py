"""Add the scores of a task to the metadata of a model card on the Hub."""

import logging
from collections.abc import Mapping
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.evaluation.task import Task
from ursa_minor.hub import card_merge, client
from ursa_minor.hub.card_metadata import CARD_FILE

log = logging.getLogger(__name__)

TEXT_GENERATION = {"task_type": "text-generation", "task_name": "Text Generation"}


def check_model_exists(model_id: str) -> None:
    """Raise BadInput if the model is not on the Hub, or if the login may not read it."""
    try:
        client.api().model_info(model_id)
    except Exception as error:
        raise BadInput(
            f"--push_to_hub {model_id}: this model cannot be read ({client.describe(error)}). "
            f"Check the id, and log in with an account that may read the model: hf auth login"
        ) from None


def result(task: Task, score: str, value: float, revision: str) -> EvalResult:
    """Return a score as it appears in the metadata of a card.

    Training and ``eval_tasks.py`` use the same form, so a newer value replaces the older one.

    Args:
        score: a name in ``task.scores``.
        value: the measured value. A share is a number from 0 to 1.
        revision: commit of the task's data set, all of whose items were scored.
    """
    dataset_id, split = task.dataset
    return EvalResult(
        **TEXT_GENERATION,
        dataset_type=dataset_id,
        dataset_name=task.label,
        dataset_config=task.config,
        dataset_split=split,
        dataset_revision=revision,
        metric_type=score,
        metric_name=f"{score} ({task.scores[score]})",
        metric_value=float(task.format_score(score, value)),
    )


def push(model_id: str, task: Task, revision: str, scores: Mapping[str, float]) -> bool:
    """Add the scores of a task to the model card on the Hub.

    Args:
        model_id: OWNER/NAME on the Hub.
        revision: commit of the task's data set, all of whose items were scored.
        scores: the value of each score. Names that are not scores of the task are ignored.

    Returns:
        Whether the scores are on the Hub. The reason for a failure is logged.
    """
    results = [result(task, name, scores[name], revision) for name in task.scores]
    index = eval_results_to_model_index(model_id.rpartition("/")[2], results)
    try:
        _add(model_id, index, f"Add {task.label} scores")
    except Exception as error:  # the scores are valid even if the Hub refuses them
        reason = first_line(error)
        if isinstance(error, card_merge.CannotMerge):
            reason = f"{CARD_FILE} was left unchanged: {error}. {card_merge.FIX}"
        log.error(
            f"--push_to_hub {model_id}: the scores were not pushed. {reason}. The scores are "
            f"printed below. Run the same command again to push them"
        )
        return False
    log.info(f"The scores were added to the model card of {model_id}")
    return True


def _add(model_id: str, index: Any, title: str) -> None:
    """Add results to the card of a model in one commit, unless the card has them already."""
    api = client.api()
    info = api.model_info(model_id)
    names = {file.rfilename for file in info.siblings or ()}
    current = ""
    if CARD_FILE in names:
        current = client.read_file(model_id, CARD_FILE, info.sha).decode()
    merged = card_merge.add_results(current, index)
    if merged != current:
        change = CommitOperationAdd(CARD_FILE, merged.encode())
        api.create_commit(model_id, [change], commit_message=title, parent_commit=info.sha)
