"""Each script that trains or scores on several processes explains how it is started."""

import importlib

import pytest

SCRIPTS = {
    "train": ["--recipe", "recipes/quickstart.yaml"],
    "eval_tasks": ["--model", "runs/none", "--tasks", "piqa"],
    "eval_hellaswag": ["--model", "runs/none"],
    "post_train": ["--config", "recipes/post/addition.yaml"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_incomplete_launch_ends_with_one_line(monkeypatch, capsys, script):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert importlib.import_module(script).main(SCRIPTS[script]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("start ")]
    assert len(lines) == 1 and "torchrun --nproc_per_node N or accelerate launch" in lines[0]


@pytest.mark.parametrize("script", ["train", "eval_tasks", "eval_hellaswag"])
def test_flag_of_torch_distributed_launch_names_torchrun(capsys, script):
    assert importlib.import_module(script).main(["--local-rank=0", *SCRIPTS[script]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --local_rank is not needed here")
    assert "torchrun --nproc_per_node N" in line
