"""Tables with the scores of several models fit into 80 columns."""

from ursa_minor.evaluation import score_tables
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.recipe import keys

TASKS = [all_tasks()[name] for name in keys.TASK_NAMES if not name.startswith("multi")]
BLIMP = all_tasks()["blimp"]
LONGEST_PART = "coordinate_structure_constraint_complex_left_branch"


def make_line(step: int | None, task: str = "blimp", run: str | None = "runs/a", **fields) -> dict:
    """Return the scores of a checkpoint on a task."""
    tokens = None if step is None else 1024 * step
    line = {"model": f"{run}/{step}", "run": run, "step": step, "tokens": tokens, "task": task}
    line |= {"acc": 1.0, "acc_stderr": 0.1234, "items": 670, "left_out": 0}
    return line | fields


def test_row_has_step_tokens_and_score():
    lines = [make_line(0), make_line(64, acc=0.5)]

    table = score_tables.models_table([BLIMP], lines)

    rows = [line.split() for line in table.splitlines()]
    assert rows[:4] == [
        ["step", "tokens", "blimp"],
        ["runs/a"],
        ["0", "0", "100.00", "±", "12.34"],
        ["64", "65.5k", "50.00", "±", "12.34"],
    ]
    assert "By chance: blimp 50.00" in table


def test_tables_of_all_tasks_fit_into_80_columns():
    lines = [make_line(99_999_999, task.name) for task in TASKS]

    table = score_tables.models_table(TASKS, lines)

    for task in TASKS:
        assert f" {task.name}" in table
    assert table.count("100.00 ± 12.34") == len(TASKS)
    rows, _, _ = table.partition("First score")
    assert max(len(row) for row in rows.splitlines()) <= 80


def test_left_out_items_are_stated_once_per_run():
    lines = [make_line(step, run="runs/a") for step in (0, 1, 2)]
    for run in ("runs/b", "runs/c"):
        lines += [make_line(step, run=run, items=660, left_out=10) for step in (0, 1, 2)]

    table = score_tables.models_table([BLIMP], lines)

    note = " ".join(table.partition("The score")[2].split())
    assert note.startswith("of blimp leaves out 10 of 670 items")
    assert note.endswith("(runs/b, runs/c).")
    assert "fewer than 100" not in table


def test_few_items_are_noted_once():
    lines = [make_line(step, items=99) for step in (0, 1, 2)]

    table = score_tables.models_table([BLIMP], lines)

    assert " ".join(table.split()).count("blimp: With fewer than 100 items") == 1
    assert "leaves out" not in table


def test_single_item_has_no_standard_error():
    line = make_line(1, part=LONGEST_PART, acc=0.0, acc_stderr=0.0, items=1)

    table = score_tables.parts_table(BLIMP, [line])

    assert table.splitlines()[-1].split() == [LONGEST_PART, "0.00"]


def test_missing_and_unknown_values_are_dashes():
    lines = [make_line(None, run=None, model="me/model"), make_line(4, "piqa")]

    table = score_tables.models_table([BLIMP, all_tasks()["piqa"]], lines)

    rows = [line.split() for line in table.splitlines()]
    assert rows[1:3] == [["me/model"], ["-", "-", "100.00", "±", "12.34", "-"]]
    assert rows[3:5] == [["runs/a"], ["4", "4.1k", "-", "100.00", "±", "12.34"]]


def test_parts_of_newest_checkpoints_fit_into_80_columns():
    lines = []
    for run in ("runs/a", "runs/b", "runs/c"):
        for step in (0, 64, 8):
            lines.append(make_line(step, run=run, part=LONGEST_PART, acc=0.5))

    newest = score_tables.newest_of_runs(BLIMP, lines)
    table = score_tables.parts_table(BLIMP, newest)

    assert [line["model"] for line in newest] == ["runs/a/64", "runs/b/64", "runs/c/64"]
    assert table.count(LONGEST_PART) == 2  # the third run is in a second table
    assert max(len(row) for row in table.splitlines()) <= 80
