"""The tasks that a run can be scored on; nothing else names them but their own files and keys."""

from pretrain.evaluation import hellaswag

TASKS = (hellaswag.TASK,)
