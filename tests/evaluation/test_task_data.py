"""Every task asks what lm-evaluation-harness asks, item by item; without a network a task is left out."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import task_rows
import torch
import yaml
from conftest import ROOT, run_script
from http_server import DataServer
from huggingface_hub import constants
from transformers import GPT2Config, GPT2LMHeadModel

import eval_tasks
from ursa_minor.base import retry
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, score_model, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.tasks import hellaswag
from ursa_minor.recipe import keys

SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture
def hub(tmp_path):
    """A Hub on localhost with the made rows; the environment of a process that asks it."""
    with DataServer(tmp_path / "hub") as server:
        server.keeps_commits = True
        yield server


def environment(server, home: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "llama", "trained"])
def test_every_item_of_every_task_is_scored_as_by_the_harness(kind, hub, tmp_path):
    """Of made rows; of HellaSwag, for the models without training, of 1,000 real ones where they are here."""
    harness = pytest.importorskip("lm_eval")
    group = Path(harness.__file__).parent / "tasks" / "blimp" / "_blimp.yaml"
    parts = [name.removeprefix("blimp_") for name in yaml.safe_load(group.read_text())["task"]]
    assert len(parts) == 67
    real, more = SHARED / "hellaswag_val_1000.jsonl", {}
    if kind != "trained" and real.exists():
        rows = [
            row | {"label": str(row["label"])}
            for row in map(json.loads, real.open(encoding="utf-8"))
        ]
        more = {"Rowan/hellaswag": {hellaswag.TASK.files[0]: rows}}
    task_rows.write_datasets(tmp_path / "hub", parts, more)
    text = tmp_path / "text.txt"
    rows = [
        row["text"] for row in task_rows.lambada_rows(5)
    ]  # short ones: some are learnt by heart
    text.write_text("\n".join([row for row in rows if len(row) < 200] * 40), encoding="utf-8")
    command = [sys.executable, "tests/against_lm_eval.py", kind, str(text)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    its = os.environ | environment(hub, tmp_path / "home") | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=its, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    assert len(found) == 8
    for name, row in found.items():
        assert row["items"] == row["ours"] >= 60 and not row["differs"], (name, row)
        assert row["scores"] and all(
            pytest.approx(b, 1e-6) == a for a, b in row["scores"].values()
        ), (name, row)
    if kind == "trained":
        assert found["arc_easy"]["cut"] and 0 < found["lambada_openai"]["scores"]["acc"][0] < 1


# Golden: what lm-eval 0.4.13 gave for the same rows, model and tokenizer (made with against_lm_eval.py's way)


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """The data sets' files under this folder, as if they had been fetched."""
    task_rows.write_datasets(tmp_path)

    def fetched(name, *, revision, **_):
        folder = tmp_path / "snapshots" / (revision or "c0ffee" + "0" * 34)
        folder.parent.mkdir(exist_ok=True)
        folder.unlink(missing_ok=True)
        folder.symlink_to(tmp_path / "datasets" / name)
        return str(folder)

    monkeypatch.setattr(task_data, "snapshot_download", fetched)
    monkeypatch.setattr(task_data.HfApi, "dataset_info", lambda *_, **__: None)


def numbered():
    """A tokenizer, and a GPT-2 whose weights no version of torch draws otherwise; its context cuts the longest rows."""
    tokenizer = tokenization.train_bpe([" ".join(task_rows.WORDS) * 3], 300, "gpt2")
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=300, n_positions=512)
    )
    draw = np.random.default_rng(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(draw.standard_normal(parameter.shape) * 0.3))
    return tokenizer, model.eval()


GOLDEN: dict[str, tuple[list[list[float]], dict[str, float]]] = {
    "arc_easy": (
        [
            [-24.2105, -168.714, -110.2754, -11.7128],
            [-23.2433, -79.8283, -71.5609, -120.9225, -194.366],
        ],
        {"acc": 0.265625, "acc_norm": 0.171875},
    ),
    "arc_challenge": (
        [[-36.5429, -47.7695, -17.0617], [-186.4622, -47.0925, -12.6482, -84.3237, -247.9128]],
        {"acc": 0.34375, "acc_norm": 0.265625},
    ),
    "piqa": ([[-276.389, -407.9774], [-166.2058, -473.2784]], {"acc": 0.578125, "acc_norm": 0.5}),
    "winogrande": ([[-147.7585, -147.9082], [-108.685, -107.1477]], {"acc": 0.6875}),
    "lambada_openai": ([[-11.4194], [-17.3505]], {"perplexity": 1654636541.1127343, "acc": 0.0}),
    "blimp": ([[-236.5155, -260.7274], [-56.4365, -56.7746]], {"acc": 0.835821}),
    "multiblimp_hin": (
        [[-117.9771, -180.8218], [-99.0753, -129.0264]],
        {"acc": 1.0, "acc_norm": 0.28125},
    ),
    "hellaswag": (
        [
            [-232.0709, -167.8939, -116.4433, -179.3027],
            [-132.2263, -223.5782, -161.8672, -212.5296],
        ],
        {"acc": 0.21875, "acc_norm": 0.265625},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tasks_items_are_scored_as_the_harness_scored_them(laid_out, name):
    tokenizer, model = numbered()
    test = EncodedTask(
        task_data.all_tasks()[name], task_data.read(task_data.all_tasks()[name]), tokenizer
    )
    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)
    sums, scores = GOLDEN[name]
    for found, wanted in zip(test.sums(answers), sums, strict=False):
        assert found == pytest.approx(wanted, abs=1e-3)
    result = test.result(answers)
    assert {score: result[score] for score in scores} == pytest.approx(scores, 1e-4)
    assert test.result(answers, score_model.by_evaluate()) == pytest.approx(
        result
    )  # the metrics of metrics/


# Another size of the public data set, --limit, the context, own files, and whether these are all items.
COMPLETE = {
    "all": ({}, 0, 512, False, True),
    "limit of all": ({}, 64, 512, False, True),
    "higher limit": ({}, 1000, 512, False, True),
    "limit": ({}, 63, 512, False, False),
    "shrunk": ({"size": 65}, 0, 512, False, False),
    "grown": ({"size": 63}, 0, 512, False, False),
    "limit of grown": ({"size": 63}, 63, 512, False, False),
    "own files": ({}, 0, 512, True, False),
    "short context": ({}, 0, 30, False, False),
}


@pytest.mark.parametrize("name", ["hellaswag", "multiblimp_hin"])
def test_revision_is_known_if_all_items_are_scored(laid_out, tmp_path, name):
    tokenizer, _ = numbered()
    for case, (change, limit, context, is_own, is_complete) in COMPLETE.items():
        task = replace(task_data.all_tasks()[name], **{"size": task_rows.ROWS} | change)
        own = shutil.copy(tmp_path / "datasets" / task.dataset[0] / task.files[0], tmp_path)
        if (
            is_own and Path(own).suffix == ".tsv"
        ):  # the public file is quoted, which is an error in an own file
            Path(own).write_text(
                Path(own).read_text(encoding="utf-8").replace('"', ""), encoding="utf-8"
            )
        found = task_data.read(task, [own] if is_own else None, limit)
        test = EncodedTask(task, found, tokenizer, context)
        assert test.revision == (found.commit if is_complete else None), case
        if not is_complete:
            with pytest.raises(
                BadInput,
                match=f"--push_to_hub me/m: .* on all {task.size} items of {task.dataset[0]}",
            ):
                score_model.check_complete([test], "me/m")


def test_every_name_of_the_recipe_has_a_record_and_no_other():
    assert set(task_data.all_tasks()) == set(keys.TASK_NAMES)
    for task in task_data.all_tasks().values():
        assert task.fields and task.size > 0
        assert all(len(values) == len(task.scores) for values in task.published.values())


ROWS = {
    "arc_easy": {
        "question": "Q",
        "choices": {"text": ["a", "c"], "label": ["A", "C"]},
        "answerKey": "A",
    },
    "piqa": {"goal": "G", "sol1": "a", "sol2": "b", "label": 0},
    "winogrande": {"sentence": "_", "option1": "a", "option2": "b", "answer": "1"},
    "hellaswag": task_rows.hellaswag_rows(1)[0],
}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("arc_easy", {"answerKey": "B"}, "answerKey must be A or C, not 'B'"),
        (
            "piqa",
            {"label": -1},
            "label must be 0 or 1, not -1. If this is a test split without answers",
        ),
        ("winogrande", {"sentence": "none"}, "sentence has no blank. Write the blank as _"),
        ("lambada_openai", {"text": "ends in space "}, "text ends in white space"),
        (
            "blimp",
            {"sentence_good": "a"},
            "missing: sentence_bad. An item of BLiMP must have sentence_good, sentence_bad",
        ),
        ("hellaswag", {"label": ""}, "label must be 0, 1, 2 or 3, not ''. If this is a test split"),
        ("hellaswag", {"endings": ["a", "b", "c"]}, "endings must have 4 texts, not 3"),
    ],
)
def test_a_row_that_is_no_item_is_refused_with_file_line_and_rule(tmp_path, name, change, words):
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(ROWS.get(name, {}) | change) + "\n")
    with pytest.raises(BadInput) as caught:
        task_data.read(task_data.all_tasks()[name], [str(tmp_path / "rows.jsonl")])
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl: line 2: ") and words in str(
        caught.value
    )


def test_items_of_several_parts_are_taken_in_turn_and_a_lacking_part_is_refused_with_the_command(
    laid_out, tmp_path
):
    first = task_data.read(task_data.all_tasks()["blimp"], limit=10)
    assert len({item.location.rpartition("/")[0] for item in first}) == 10, (
        "the first ones are of all"
    )
    next((tmp_path / "datasets/nyu-mll/blimp").glob("*/*.parquet")).unlink()
    wanted = r"blimp \(nyu-mll/blimp on the Hub\) cannot .*hf download nyu-mll/blimp --include"
    with pytest.raises(BadInput, match=wanted):
        task_data.read(task_data.all_tasks()["blimp"])


# Fetched from the Hub


@pytest.fixture
def waits(hub, tmp_path, monkeypatch):
    """Direct this process to the Hub on localhost. Return the waits, which take no time."""
    task_rows.write_datasets(tmp_path / "hub")
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    seconds = []
    monkeypatch.setattr(retry.time, "sleep", seconds.append)
    return seconds


# The client itself retries most statuses of a download, but not 409.
@pytest.mark.parametrize(
    ("request_line", "status"), [("/api/datasets/", "503"), ("/resolve/", "409")]
)
def test_task_is_fetched_again_after_a_passing_error(hub, waits, caplog, request_line, status):
    task = task_data.all_tasks()["lambada_openai"]
    hub.problems = [[request_line, status, 1]]
    paths, commit = task_data.fetch(task)
    assert [path.name for path in paths] == ["lambada_test_en.jsonl"]
    assert commit == task.revision
    assert waits == [1]
    assert f"HTTP status {status}). The next attempt starts in 1 s" in caplog.text


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("451", "451"), ("429:3600", "429"), ("reset", "disconnected")],
    ids=["final", "asks for a long wait", "no answer"],
)
def test_task_that_cannot_be_fetched_is_refused_immediately(hub, waits, answer, reason):
    task = task_data.all_tasks()["lambada_openai"]
    hub.problems = [["/api/datasets/", answer, 10**6]]
    with pytest.raises(BadInput, match=f"cannot be loaded: .*{reason}"):
        task_data.fetch(task)
    assert not waits
    assert len(hub.log) == 1


# In training

OWN = {
    "winogrande": {"sentence": "the _ sat", "option1": "cat", "option2": "dog", "answer": "1"},
    "lambada_openai": {"text": "the cat sat on the mat"},
}


def test_without_a_network_a_task_is_left_out_with_one_line_and_the_run_trains(workspace):
    flags = ("--tasks", "lambada_openai", "hellaswag", "--task_steps", "6", "--run_name", "offline")
    flags += ("--tokenizer", "bpe", "--tokenizer_vocab_size", "300", "--vocab_size", "320")
    empty = str(workspace / "empty")
    done = run_script("train.py", "--recipe", "tiny.yaml", *flags, HF_HOME=empty)
    lines = [line for line in done.stderr.splitlines() if " is not scored: " in line]
    assert (
        len(lines) == 2
        and "hf download EleutherAI/lambada_openai data/lambada_test_en.jsonl" in lines[0]
    )
    assert "Retrying" not in done.stderr and not any(
        "/acc" in name for row in rows("offline") for name in row
    )
    done = run_script(
        "eval_tasks.py", "--model", "runs/offline", "--tasks", "piqa", expect=2, HF_HOME=empty
    )
    assert (
        "hf download baber/piqa piqa_validation.parquet --repo-type dataset --revision 142f6d7"
        in done.stderr
    )
    assert (
        "or use your own items with the fields goal, sol1, sol2, label: --task_files piqa=PATH"
        in done.stderr
    )
    for name, row in OWN.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    own = ("--tasks", *OWN, "--task_files")
    done = run_script(
        "eval_tasks.py", "--model", "runs/offline", *own, *(f"{name}={name}.jsonl" for name in OWN)
    )
    assert [json.loads(line)["dataset"] for line in done.stdout.splitlines()] == [
        f"{name}.jsonl" for name in OWN
    ]
    assert "WinoGrande, 1 item of winogrande.jsonl" in done.stderr
    with pytest.raises(BadInput, match="--task_files piqa=winogrande.jsonl: must be NAME=PATH"):
        eval_tasks.parse(["--model", "runs/offline", *own, "piqa=winogrande.jsonl"])


def rows(run_name):
    return read_metrics(Path("runs") / run_name / "metrics.jsonl")


def test_a_run_is_scored_on_the_commit_that_it_began_with_whatever_the_hub_has_since(
    workspace, hub
):
    task_rows.write_datasets(workspace / "hub")
    hub.folder = workspace / "hub"
    where = environment(hub, workspace / "home")
    bpe = (
        "--tokenizer",
        "bpe",
        "--tokenizer_vocab_size",
        "300",
        "--vocab_size",
        "320",
        "--sequence_length",
        "240",
    )
    bpe += (
        "--tokens_per_step",
        "240",
        "--shuffle_block_tokens",
        "960",
        "--max_steps",
        "4",
        "--warmup_steps",
        "1",
    )
    command = (
        "train.py",
        "--recipe",
        "tiny.yaml",
        *bpe,
        "--save_steps",
        "2",
        "--run_name",
        "hindi",
    )
    command += ("--tasks", "multiblimp_hin", "--task_steps", "2", "--task_limit", "20")
    done = run_script(*command, **where)
    assert (
        f"20 MultiBLiMP hin items of jumelet/multiblimp at {hub.commit[:7]} every 2 steps"
        in done.stderr
    )
    assert [
        row["multiblimp_hin/items"] for row in rows("hindi") if "multiblimp_hin/acc" in row
    ] == [20, 20, 20]
    began, hub.commit = hub.commit, "beef" + "0" * 36
    shutil.rmtree("runs/hindi/checkpoints/step-00000004")
    done = run_script(*command, **where)
    assert f"jumelet/multiblimp at {began[:7]} every" in done.stderr
    saved = json.loads(Path("runs/hindi/checkpoints/step-00000004/state.json").read_text())
    assert saved["tasks"] == {"multiblimp_hin": began}
