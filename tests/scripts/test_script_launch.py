"""Scripts that run on several processes explain how to start them."""

import importlib

import pytest

FLAGS = {
    "train": ["--recipe", "recipes/quickstart.yaml"],
    "eval_tasks": ["--model", "runs/none", "--tasks", "piqa"],
    "eval_hellaswag": ["--model", "runs/none"],
    "post_train": ["--config", "recipes/post/addition.yaml"],
}


@pytest.mark.parametrize("script", FLAGS)
def test_incomplete_launch_ends_with_one_line(monkeypatch, capsys, script):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    main = importlib.import_module(script).main

    assert main(FLAGS[script]) == 2

    lines = capsys.readouterr().err.splitlines()
    messages = [line for line in lines if not line.startswith("start ")]
    assert len(messages) == 1
    assert "torchrun --nproc_per_node N or accelerate launch" in messages[0]


@pytest.mark.parametrize("script", ["train", "eval_tasks", "eval_hellaswag"])
def test_local_rank_flag_suggests_torchrun(capsys, script):
    main = importlib.import_module(script).main

    assert main(["--local-rank=0", *FLAGS[script]]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --local_rank is not needed here")
    assert "torchrun --nproc_per_node N" in line
