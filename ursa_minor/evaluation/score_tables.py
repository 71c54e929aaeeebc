"""Show the scores of several models, or of the parts of a task, in tables of 80 columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from ursa_minor.base import terminal
from ursa_minor.base.wording import pluralize, with_unit
from ursa_minor.evaluation.task import Task

ScoreLine = Mapping[str, Any]  # the scores of a model on a task

MIN_RELIABLE_ITEMS = 100  # with fewer items, the standard errors are too large
UNRELIABLE = (
    f"With fewer than {MIN_RELIABLE_ITEMS} items, neither a score nor its standard error is "
    f"reliable."
)

STEP_WIDTH = 8
TOKENS_WIDTH = 7
CELL_WIDTH = 15  # at least the longest name of a task, and 100.00 ± 10.00
PART_WIDTH = 51  # the longest name of a part of BLiMP
PART_CELL_WIDTH = 13  # 100.00 ± 0.00
GAP = "  "
WIDTH = 80
# The numbers of columns that fit into this width.
TASKS_PER_ROW = 3
MODELS_PER_ROW = 2


def models_table(tasks: Sequence[Task], lines: Sequence[ScoreLine]) -> str:
    """Return a table with a row for each checkpoint and a column for each task.

    The checkpoints of a run follow its name. Models without a step have rows of their own.

    Args:
        tasks: the tasks in order. If the row would be too long, further tasks follow below.
        lines: the scores of complete tasks.
    """
    blocks = []
    for start in range(0, len(tasks), TASKS_PER_ROW):
        row_tasks = tasks[start : start + TASKS_PER_ROW]
        blocks.append(_block(row_tasks, lines))
    score_names = ", ".join(dict.fromkeys(first_score(task) for task in tasks))
    legend = f"First score of each task ({score_names}), in per cent ± standard error."
    chances = ", ".join(_chance(task) for task in tasks if task.chance)
    if chances:
        legend += f"\nBy chance: {chances}"
    for note in _left_out_notes(tasks, lines):
        legend += f"\n{terminal.wrap(note, WIDTH)}"
    small_tasks = [line["task"] for line in lines if line["items"] < MIN_RELIABLE_ITEMS]
    if small_tasks:
        names = ", ".join(dict.fromkeys(small_tasks))
        legend += f"\n{terminal.wrap(f'{names}: {UNRELIABLE}', WIDTH)}"
    return "\n\n".join([*blocks, legend])


def _left_out_notes(tasks: Sequence[Task], lines: Sequence[ScoreLine]) -> list[str]:
    """Return a line for each number of items of a task that was left out, with its runs."""
    notes = []
    for task in tasks:
        runs_by_number: dict[tuple[int, int], list[str]] = {}
        for line in lines:
            if line["task"] == task.name and line["left_out"]:
                number = (line["left_out"], line["left_out"] + line["items"])
                runs_by_number.setdefault(number, []).append(line["run"] or line["model"])
        for (left_out, total), runs in runs_by_number.items():
            names = ", ".join(dict.fromkeys(runs))
            notes.append(
                f"The score of {task.name} leaves out {left_out:,} of "
                f"{pluralize(total, 'item', 'items')}, because an ending is longer than the "
                f"context ({names})."
            )
    return notes


def _chance(task: Task) -> str:
    percent = 100 * task.chance
    return f"{task.name} {percent:.2f}"


def _block(tasks: Sequence[Task], lines: Sequence[ScoreLine]) -> str:
    """Return a table with a column for each of a few tasks."""
    names = [task.name for task in tasks]
    rows = [_row("step", "tokens", names)]
    previous_heading = None
    for model, scores in _by_model(lines).items():
        first_line = next(iter(scores.values()))
        step = first_line["step"]
        heading = model if step is None else first_line["run"]
        if heading != previous_heading:
            rows.append(heading)
        previous_heading = heading
        cells = [_score(task, scores.get(task.name)) for task in tasks]
        step_text = "-" if step is None else str(step)
        rows.append(_row(step_text, _tokens(first_line["tokens"]), cells))
    return "\n".join(rows)


def _row(step: str, tokens: str, cells: Sequence[str]) -> str:
    padded = [step.rjust(STEP_WIDTH), tokens.rjust(TOKENS_WIDTH)]
    padded += [cell.rjust(CELL_WIDTH) for cell in cells]
    return GAP.join(padded)


def _by_model(lines: Sequence[ScoreLine]) -> dict[str, dict[str, ScoreLine]]:
    """Return the line of each task by the name of the model and of the task."""
    models: dict[str, dict[str, ScoreLine]] = {}
    for line in lines:
        models.setdefault(line["model"], {})[line["task"]] = line
    return models


def first_score(task: Task) -> str:
    """Return the score of a task that tables and pictures of several models show.

    It is a fraction.
    """
    return task.shares[0]


def _score(task: Task, line: ScoreLine | None) -> str:
    if line is None:
        return "-"
    return task.format_with_error(first_score(task), line)


def _tokens(tokens: int | None) -> str:
    """Return a number of tokens with three digits and a unit."""
    if tokens is None:
        return "-"
    return with_unit(tokens, digits=3)


def newest_of_runs(task: Task, part_lines: Sequence[ScoreLine]) -> list[ScoreLine]:
    """Return the scores on the parts of a task that the newest checkpoint of each run has.

    A model that belongs to no run counts as a run.
    """
    newest: dict[str, ScoreLine] = {}
    task_lines = [line for line in part_lines if line["task"] == task.name]
    for line in task_lines:
        run = line["run"] or line["model"]
        step = -1 if line["step"] is None else line["step"]
        newest_step = newest[run]["step"] if run in newest else None
        if newest_step is None or step >= newest_step:
            newest[run] = line
    models = {line["model"] for line in newest.values()}
    return [line for line in task_lines if line["model"] in models]


def parts_table(task: Task, part_lines: Sequence[ScoreLine]) -> str:
    """Return a table with a row for each part of a task and a column for each model.

    Args:
        part_lines: the scores on the parts, with ``model`` and ``part``.
    """
    models = list(dict.fromkeys(line["model"] for line in part_lines))
    blocks = []
    for start in range(0, len(models), MODELS_PER_ROW):
        row_models = models[start : start + MODELS_PER_ROW]
        blocks.append(_parts_block(task, row_models, part_lines))
    return "\n\n".join(blocks)


def _parts_block(task: Task, models: Sequence[str], part_lines: Sequence[ScoreLine]) -> str:
    by_part: dict[str, dict[str, ScoreLine]] = {}
    for line in part_lines:
        by_part.setdefault(line["part"], {})[line["model"]] = line

    parts = pluralize(len(by_part), "part", "parts")
    lines = [f"{task.label}, {parts}, {first_score(task)} in per cent ± standard error"]
    for number, model in enumerate(models, 1):
        lines.append(f"({number}) {model}")
    numbers = [f"({number})" for number in range(1, len(models) + 1)]
    lines.append(_parts_row("", numbers))
    for part, scores in by_part.items():
        cells = [_score(task, scores.get(model)) for model in models]
        lines.append(_parts_row(part, cells))
    return "\n".join(lines)


def _parts_row(part: str, cells: Sequence[str]) -> str:
    name = part[:PART_WIDTH]
    padded = [name.ljust(PART_WIDTH)]
    padded += [cell.rjust(PART_CELL_WIDTH) for cell in cells]
    return " ".join(padded)
