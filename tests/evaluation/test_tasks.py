"""Every task asks what lm-evaluation-harness asks, item by item; without a network a task is left out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import task_rows
import yaml
from conftest import ROOT
from data_server import DataServer


@pytest.fixture
def hub(tmp_path):
    """A Hub on localhost with the made rows; the environment of a process that asks it."""
    with DataServer(tmp_path / "hub") as server:
        server.keeps_commits = True
        yield server


def environment(server, home: Path) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "evaluation"), os.environ.get("PYTHONPATH", "")]
    hub = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return os.environ | hub | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "trained"])
def test_every_item_of_every_task_is_scored_as_by_the_harness(kind, hub, tmp_path):
    harness = pytest.importorskip("lm_eval")
    group = Path(harness.__file__).parent / "tasks" / "blimp" / "_blimp.yaml"
    parts = [name.removeprefix("blimp_") for name in yaml.safe_load(group.read_text())["task"]]
    assert len(parts) == 67
    task_rows.lay_out(tmp_path / "hub", parts)
    text = tmp_path / "text.txt"
    rows = [row["text"] for row in task_rows.lambada(5) if len(row["text"]) < 200]  # short ones: some are learnt by heart
    text.write_text("\n".join(rows * 40), encoding="utf-8")
    command = [sys.executable, "tests/evaluation/against_lm_eval.py", kind, str(text)]
    done = subprocess.run(command, cwd=ROOT, env=environment(hub, tmp_path / "home"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert len(found) == 8
    for name, row in found.items():
        assert row["items"] == row["ours"] >= 60 and not row["differs"] and row["worst"] < 1e-4, (name, row)
        assert row["scores"] and all(pytest.approx(b, 1e-6) == a for a, b in row["scores"].values()), (name, row)
    if kind == "trained":
        assert found["arc_easy"]["cut"] and 0 < found["lambada_openai"]["scores"]["acc"][0] < 1
