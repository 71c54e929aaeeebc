"""Tasks: their items and scores equal those of lm-evaluation-harness.

Also tested are the errors of data sets that cannot be loaded, and the scores of a training run.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import task_rows
import torch
import yaml
from conftest import ROOT, run_script
from http_server import DataServer
from huggingface_hub import constants
from run_results import metrics_rows
from transformers import GPT2Config, GPT2LMHeadModel

import eval_tasks
from ursa_minor.base import retry
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, score_model, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.tasks import hellaswag
from ursa_minor.recipe import keys

TASKS = task_data.all_tasks()
REAL_HELLASWAG = ROOT.parent / "shared" / "data" / "hellaswag_val_1000.jsonl"  # may be missing


@pytest.fixture
def hub(tmp_path):
    """Run a Hub on localhost that serves the folder hub/."""
    with DataServer(tmp_path / "hub") as server:
        server.keeps_commits = True
        yield server


def hub_environment(server: DataServer, home: Path) -> dict[str, str]:
    """Return the environment variables of a process that uses this Hub."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }


# Comparison with lm-evaluation-harness


def blimp_parts(harness) -> list[str]:
    """Return the names of BLiMP's parts in lm-eval."""
    path = Path(harness.__file__).parent / "tasks" / "blimp" / "_blimp.yaml"
    names = yaml.safe_load(path.read_text())["task"]
    return [name.removeprefix("blimp_") for name in names]


def real_hellaswag_rows() -> dict[str, dict]:
    """Return 1,000 real rows as an argument of ``write_datasets``, or nothing if missing."""
    if not REAL_HELLASWAG.exists():
        return {}
    rows = []
    for line in REAL_HELLASWAG.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append(row | {"label": str(row["label"])})
    return {"Rowan/hellaswag": {hellaswag.TASK.files[0]: rows}}


def write_training_text(path: Path) -> None:
    """Write the short texts of LAMBADA many times, so that a model memorizes some of them."""
    texts = [row["text"] for row in task_rows.lambada_rows(5)]
    short_texts = [text for text in texts if len(text) < 200]
    path.write_text("\n".join(short_texts * 40), encoding="utf-8")


def compare_with_harness(kind: str, text: Path, hub: DataServer, home: Path) -> dict[str, dict]:
    """Run against_lm_eval.py, and return its comparison of each task."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "tests/against_lm_eval.py", kind, str(text)],
        cwd=ROOT,
        env=os.environ | hub_environment(hub, home) | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "llama", "trained"])
def test_every_item_is_scored_like_in_harness(kind, hub, tmp_path):
    harness = pytest.importorskip("lm_eval")
    parts = blimp_parts(harness)
    other_rows = {} if kind == "trained" else real_hellaswag_rows()
    task_rows.write_datasets(tmp_path / "hub", parts, other_rows)
    text = tmp_path / "text.txt"
    write_training_text(text)

    comparisons = compare_with_harness(kind, text, hub, tmp_path / "home")

    print(json.dumps(comparisons, indent=1))
    assert len(parts) == 67
    assert len(comparisons) == 8
    for name, comparison in comparisons.items():
        assert comparison["items"] == comparison["harness_items"], name
        assert comparison["items"] >= 60, name
        assert comparison["differences"] == 0, name
        assert comparison["scores"], name
        for score, harness_score in comparison["scores"].values():
            assert score == pytest.approx(harness_score, 1e-6), name
    if kind == "trained":
        assert comparisons["arc_easy"]["truncated"] > 0
        accuracy, _ = comparisons["lambada_openai"]["scores"]["acc"]
        assert 0 < accuracy < 1


class HarnessResult(NamedTuple):
    """Results of lm-eval 0.4.13: log-likelihoods of the first two items, and scores."""

    sums: list[list[float]]
    scores: dict[str, float]


# Computed with the functions of against_lm_eval.py for the rows, model and tokenizer of this file.
HARNESS_RESULTS = {
    "arc_easy": HarnessResult(
        [
            [-24.2105, -168.714, -110.2754, -11.7128],
            [-23.2433, -79.8283, -71.5609, -120.9225, -194.366],
        ],
        {"acc": 0.265625, "acc_norm": 0.171875},
    ),
    "arc_challenge": HarnessResult(
        [[-36.5429, -47.7695, -17.0617], [-186.4622, -47.0925, -12.6482, -84.3237, -247.9128]],
        {"acc": 0.34375, "acc_norm": 0.265625},
    ),
    "piqa": HarnessResult(
        [[-276.389, -407.9774], [-166.2058, -473.2784]], {"acc": 0.578125, "acc_norm": 0.5}
    ),
    "winogrande": HarnessResult([[-147.7585, -147.9082], [-108.685, -107.1477]], {"acc": 0.6875}),
    "lambada_openai": HarnessResult(
        [[-11.4194], [-17.3505]], {"perplexity": 1654636541.1127343, "acc": 0.0}
    ),
    "blimp": HarnessResult([[-236.5155, -260.7274], [-56.4365, -56.7746]], {"acc": 0.835821}),
    "multiblimp_hin": HarnessResult(
        [[-117.9771, -180.8218], [-99.0753, -129.0264]], {"acc": 1.0, "acc_norm": 0.28125}
    ),
    "hellaswag": HarnessResult(
        [
            [-232.0709, -167.8939, -116.4433, -179.3027],
            [-132.2263, -223.5782, -161.8672, -212.5296],
        ],
        {"acc": 0.21875, "acc_norm": 0.265625},
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    """Return a BPE tokenizer of the words in the synthetic rows."""
    return tokenization.train_bpe([" ".join(task_rows.WORDS) * 3], 300, "gpt2")


@pytest.fixture(scope="module")
def model():
    """Return a GPT-2 with weights from NumPy, which do not depend on the version of torch.

    Its context is shorter than the longest rows.
    """
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=300, n_positions=512)
    model = GPT2LMHeadModel(config)
    generator = np.random.default_rng(7)
    with torch.no_grad():
        for parameter in model.parameters():
            weights = generator.standard_normal(parameter.shape) * 0.3
            parameter.copy_(torch.from_numpy(weights))
    return model.eval()


def use_datasets(folder: Path, snapshots: Path, monkeypatch) -> None:
    """Replace a download from the Hub with a link to a data set in a folder."""

    def fake_download(name, *, revision, **_):
        commit = revision or "c0ffee" + "0" * 34
        link = snapshots / commit
        snapshots.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder / "datasets" / name)
        return str(link)

    monkeypatch.setattr(task_data, "snapshot_download", fake_download)
    monkeypatch.setattr(task_data.HfApi, "dataset_info", lambda *_, **__: None)


@pytest.fixture(scope="module")
def datasets_folder(tmp_path_factory):
    """Return a folder with all synthetic data sets. Tests do not change it."""
    folder = tmp_path_factory.mktemp("task_data")
    task_rows.write_datasets(folder)
    return folder


@pytest.fixture
def cached_datasets(datasets_folder, tmp_path, monkeypatch):
    """Let the synthetic data sets be found without the Hub, and return their folder."""
    use_datasets(datasets_folder, tmp_path / "snapshots", monkeypatch)
    return datasets_folder


@pytest.mark.usefixtures("cached_datasets")
@pytest.mark.parametrize("name", HARNESS_RESULTS)
def test_scores_equal_recorded_scores_of_harness(name, tokenizer, model):
    test = EncodedTask(TASKS[name], task_data.read(TASKS[name]), tokenizer)
    expected = HARNESS_RESULTS[name]

    answers = likelihood.log_likelihoods(model, test.questions, context_length=512)
    result = test.result(answers)
    result_of_hub_metrics = test.result(answers, score_model.by_evaluate())

    for sums, expected_sums in zip(test.sums(answers)[:2], expected.sums, strict=True):
        assert sums == pytest.approx(expected_sums, abs=1e-3)
    for score, value in expected.scores.items():
        assert result[score] == pytest.approx(value, 1e-4)
    assert result_of_hub_metrics == pytest.approx(result)


# Completeness


class Selection(NamedTuple):
    """Which items are scored, and whether these are all items of the public data set."""

    size: int = task_rows.ROWS  # of the public data set, as the task defines it
    limit: int = 0
    context_length: int = 512
    uses_local_file: bool = False
    is_complete: bool = False


SELECTIONS = {
    "all": Selection(is_complete=True),
    "limit of all": Selection(limit=64, is_complete=True),
    "higher limit": Selection(limit=1000, is_complete=True),
    "limit": Selection(limit=63),
    "data set shrunk": Selection(size=65),
    "data set grew": Selection(size=63),
    "limit after data set grew": Selection(size=63, limit=63),
    "local file": Selection(uses_local_file=True),
    "short context": Selection(context_length=30),
}


def write_local_file(published: Path, folder: Path) -> Path:
    """Copy a published file. Remove the quotes of a TSV, which local files must not have."""
    path = folder / published.name
    shutil.copy(published, path)
    if path.suffix == ".tsv":
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace('"', ""), encoding="utf-8")
    return path


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS.keys())
@pytest.mark.parametrize("name", ["hellaswag", "multiblimp_hin"])
def test_revision_is_known_for_complete_data_set(
    cached_datasets, tmp_path, tokenizer, name, selection
):
    task = replace(TASKS[name], size=selection.size)
    paths = None
    if selection.uses_local_file:
        published = cached_datasets / "datasets" / task.dataset[0] / task.files[0]
        paths = [str(write_local_file(published, tmp_path))]

    items = task_data.read(task, paths, selection.limit)
    test = EncodedTask(task, items, tokenizer, selection.context_length)

    if selection.is_complete:
        assert test.revision == items.commit
        score_model.check_complete([test], "me/m")
        return
    assert test.revision is None
    message = f"--push_to_hub me/m: .* all {task.size} items of {task.dataset[0]}"
    with pytest.raises(BadInput, match=message):
        score_model.check_complete([test], "me/m")


def test_every_task_is_defined():
    assert set(TASKS) == set(keys.TASK_NAMES)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_task_definition_is_consistent(task):
    assert task.fields
    assert task.size > 0
    for values in task.published.values():
        assert len(values) == len(task.scores)


# Invalid rows and missing files

VALID_ROWS = {
    "arc_easy": {
        "question": "Q",
        "choices": {"text": ["a", "c"], "label": ["A", "C"]},
        "answerKey": "A",
    },
    "piqa": {"goal": "G", "sol1": "a", "sol2": "b", "label": 0},
    "winogrande": {"sentence": "_", "option1": "a", "option2": "b", "answer": "1"},
    "lambada_openai": {},
    "blimp": {},
    "hellaswag": task_rows.hellaswag_rows(1)[0],
}


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("arc_easy", {"answerKey": "B"}, "answerKey must be A or C"),
        ("piqa", {"label": -1}, "label must be 0 or 1, .* test split without answers"),
        ("winogrande", {"sentence": "none"}, "sentence has no blank"),
        ("lambada_openai", {"text": "ends in space "}, "text ends in white space"),
        ("blimp", {"sentence_good": "a"}, "missing: sentence_bad"),
        ("hellaswag", {"label": ""}, "label must be 0, 1, 2 or 3, .* test split"),
        ("hellaswag", {"endings": ["a", "b", "c"]}, "endings must have 4 texts"),
    ],
)
def test_invalid_row_is_rejected(tmp_path, name, change, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(VALID_ROWS[name] | change) + "\n")

    with pytest.raises(BadInput, match=f"^{path}: line 2: .*{problem}"):
        task_data.read(TASKS[name], [str(path)])


@pytest.mark.usefixtures("cached_datasets")
def test_limit_takes_items_of_different_parts():
    items = task_data.read(TASKS["blimp"], limit=10)

    folders = {item.location.rpartition("/")[0] for item in items}
    assert len(folders) == 10


def test_missing_part_is_rejected(tmp_path, monkeypatch):
    task_rows.write_datasets(tmp_path, parts=task_rows.PARTS[:-1])
    use_datasets(tmp_path, tmp_path / "snapshots", monkeypatch)

    with pytest.raises(BadInput) as error:
        task_data.read(TASKS["blimp"])

    message = str(error.value)
    assert message.startswith("blimp (nyu-mll/blimp on the Hub) cannot be loaded")
    assert "hf download nyu-mll/blimp --include" in message


# Download from the Hub


@pytest.fixture
def waits(hub, tmp_path, monkeypatch):
    """Let this process use the Hub on localhost. Return the waits, which take no time."""
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
def test_download_is_retried_after_temporary_error(hub, waits, caplog, request_line, status):
    task = TASKS["lambada_openai"]
    hub.problems = [[request_line, status, 1]]

    paths, commit = task_data.fetch(task)

    assert [path.name for path in paths] == ["lambada_test_en.jsonl"]
    assert commit == task.revision
    assert waits == [1]
    assert f"HTTP status {status}" in caplog.text
    assert "next attempt starts in 1 s" in caplog.text


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("451", "451"), ("429:3600", "429"), ("reset", "disconnected")],
    ids=["final", "long wait requested", "no answer"],
)
def test_permanent_error_is_not_retried(hub, waits, answer, reason):
    hub.problems = [["/api/datasets/", answer, 10**6]]

    with pytest.raises(BadInput, match=f"cannot be loaded: .*{reason}"):
        task_data.fetch(TASKS["lambada_openai"])

    assert not waits
    assert len(hub.log) == 1


# Scripts

LOCAL_ROWS = {
    "winogrande": {"sentence": "the _ sat", "option1": "cat", "option2": "dog", "answer": "1"},
    "lambada_openai": {"text": "the cat sat on the mat"},
}
SHORT_TRAINING = ("--recipe", "tiny.yaml", "--max_steps", "4", "--warmup_steps", "1")
SHORT_TRAINING += ("--save_steps", "2", "--sample_steps", "0", "--task_steps", "2")


def test_training_skips_tasks_without_network(workspace):
    result = run_script(
        "train.py",
        *SHORT_TRAINING,
        *("--tasks", "lambada_openai", "hellaswag"),
        *("--run_name", "offline"),
        HF_HOME=str(workspace / "empty"),
    )

    lines = [line for line in result.stderr.splitlines() if " is not scored: " in line]
    assert len(lines) == 2
    assert "hf download EleutherAI/lambada_openai data/lambada_test_en.jsonl" in lines[0]
    assert "Retrying" not in result.stderr
    for row in metrics_rows("offline"):
        assert not any("/acc" in name for name in row)


def test_eval_tasks_suggests_download_without_network(finished_run):
    result = run_script(
        "eval_tasks.py",
        *("--model", "runs/whole", "--tasks", "piqa"),
        expect=2,
        HF_HOME=str(finished_run / "empty"),
    )

    command = (
        "hf download baber/piqa piqa_validation.parquet --repo-type dataset --revision 142f6d7"
    )
    assert command in result.stderr
    assert "fields goal, sol1, sol2, label: --task_files piqa=PATH" in result.stderr


def test_eval_tasks_scores_local_files(finished_run):
    file_flags = []
    for name, row in LOCAL_ROWS.items():
        (finished_run / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        file_flags.append(f"{name}={name}.jsonl")

    result = run_script(
        "eval_tasks.py",
        *("--model", "runs/whole"),
        *("--tasks", *LOCAL_ROWS),
        *("--task_files", *file_flags),
    )

    output = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["dataset"] for line in output] == ["winogrande.jsonl", "lambada_openai.jsonl"]
    assert "WinoGrande, 1 item of winogrande.jsonl" in result.stderr


def test_file_of_unselected_task_is_rejected():
    flags = ["--model", "runs/a", "--tasks", "winogrande", "--task_files", "piqa=winogrande.jsonl"]

    with pytest.raises(BadInput, match="--task_files piqa=winogrande.jsonl: must be NAME=PATH"):
        eval_tasks.parse(flags)


def test_resumed_run_is_scored_on_same_commit(workspace, hub):
    # Short items with the characters of the training text fit the tokenizer and the context.
    rows = [{"sen": "the cat sat", "wrong_sen": "the cat hat"}] * 8
    task_rows.write_datasets(workspace / "hub", more={"jumelet/multiblimp": {"hin/data.tsv": rows}})
    first_commit = hub.commit
    flags = (*SHORT_TRAINING, "--run_name", "hindi")
    flags += ("--tasks", "multiblimp_hin", "--task_limit", "6")
    environment = hub_environment(hub, workspace / "home")
    last_checkpoint = Path("runs/hindi/checkpoints/step-00000004")

    first_result = run_script("train.py", *flags, **environment)
    hub.commit = "beef" + "0" * 36
    shutil.rmtree(last_checkpoint)
    second_result = run_script("train.py", *flags, **environment)

    source = f"jumelet/multiblimp at {first_commit[:7]} every 2 steps"
    assert f"6 MultiBLiMP hin items of {source}" in first_result.stderr
    assert f"jumelet/multiblimp at {first_commit[:7]} every" in second_result.stderr
    saved_state = json.loads((last_checkpoint / "training/state.json").read_text())
    assert saved_state["tasks"] == {"multiblimp_hin": first_commit}
    scored_rows = [row for row in metrics_rows("hindi") if "multiblimp_hin/acc" in row]
    assert [row["step"] for row in scored_rows] == [0, 2, 4]
    assert {row["multiblimp_hin/items"] for row in scored_rows} == {6}
