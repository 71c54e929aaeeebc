"""What a model's name stands for is known, or refused with the nearest, before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from pretrain.base.errors import BadInput
from pretrain.model.find import find

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import {0}; sys.exit({0}.main(sys.argv[1:]))"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/deutsch/model").mkdir(parents=True)


def test_a_run_stands_for_its_model_and_what_holds_none_is_refused_a_misspelt_run_with_the_nearest(runs):
    assert find("runs/deutsch") == "runs/deutsch/model" and find("openai-community/gpt2") == "openai-community/gpt2"
    with pytest.raises(BadInput, match=r"^--model runs/deutch: no such folder .*; did you mean runs/deutsch\?$"):
        find("runs/deutch")
    with pytest.raises(BadInput, match=r"^model = nowhere/at/all: no such folder \(a Hub id is owner/name\)$"):
        find("nowhere/at/all", "model = ")
    for name in ("deutsch", "deutch"):
        with pytest.raises(BadInput, match=f"^--model {name}: no such folder; did you mean runs/deutsch\\?$"):
            find(name)
    Path("runs/gpt2_124m").mkdir()
    assert find("gpt2") == "gpt2"  # an old id without an owner
    Path("text.txt").touch()
    for name in ("runs", "text.txt"):
        with pytest.raises(BadInput, match=f"^--model {name}: holds no model; give a folder with config.json"):
            find(name)


@pytest.mark.parametrize(
    "script, words",
    [
        ("generate", ["--model", "runs/deutch"]),
        ("eval_hellaswag", ["--model", "runs/deutch"]),
        ("eval_tasks", ["--model", "runs/deutch", "--tasks", "piqa"]),
        ("export_model", ["runs/deutch", "--out", "exports/deutch"]),
    ],
)
def test_a_misspelt_run_is_refused_before_torch_is_imported(runs, script, words):
    command = [sys.executable, "-c", WITHOUT_TORCH.format(script), *words]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean runs/deutsch?" in done.stderr, done.stderr
