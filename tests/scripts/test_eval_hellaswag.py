"""Tests of eval_hellaswag.py, and of HellaSwag scores during training."""

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import TEXT, WORDS, create_shared_folder, run_script
from http_server import DataServer
from huggingface_hub import ModelCard
from run_results import losses_by_step, metrics_rows
from safetensors.torch import load_file

import eval_hellaswag
import eval_tasks
from ursa_minor.base import console
from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, score_model
from ursa_minor.evaluation import task_data as task_items
from ursa_minor.evaluation.evaluator import Evaluator
from ursa_minor.evaluation.tasks.hellaswag import TASK
from ursa_minor.export import stock as stock_export
from ursa_minor.hub import card_scores
from ursa_minor.model.build import build
from ursa_minor.recipe import keys
from ursa_minor.reporting import clock

SCORE_NAMES = [*TASK.scores, *(f"{score}_stderr" for score in TASK.scores)]
BPE_FLAGS = ("--tokenizer", "bpe", "--tokenizer_vocab_size", "300", "--vocab_size", "320")
TRAIN = ("train.py", "--recipe", "tiny.yaml")
BPE_TRAIN = (*TRAIN, *BPE_FLAGS)
TASK_FLAGS = ("--tasks", "hellaswag", "--task_files", "hellaswag=items.jsonl")
SCORED_FLAGS = (*TASK_FLAGS, "--task_steps", "4")
QUIET_FLAGS = ("--eval_steps", "0", "--sample_steps", "0")
LOCAL_FLAGS = ("--model", "runs/r", "--data_files", "items.jsonl")
PUSH_SCORES = ("eval_hellaswag.py", "--model", "runs/r", "--push_to_hub", "me/model")
BROKEN_CARD = "---\nlicense: [mit\n---\nMine.\n"


def make_items(count: int = 40) -> list[dict]:
    """Make items of random words. Some are longer than the context of the tiny model."""
    rng = random.Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    items = []
    for index in range(count):
        length = 1 + index % 14
        item = {
            "ind": index,
            "activity_label": words(1),
            "ctx_a": words(length),
            "ctx_b": words(1),
            "ctx": words(length + 1),
            "endings": [words(rng.randint(1, 3)) for _ in range(4)],
            "label": rng.randrange(4),
        }
        items.append(item)
    return items


def write_items(items: list[dict]) -> None:
    """Write items.jsonl."""
    lines = [json.dumps(item) + "\n" for item in items]
    Path("items.jsonl").write_text("".join(lines), encoding="utf-8")


def write_random_model(folder: Path) -> None:
    """Write a small model with random weights and a BPE tokenizer."""
    model = build(
        keys.Model(
            n_layer=2,
            n_head=2,
            n_embd=32,
            vocab_size=320,
            sequence_length=16,
            seed=1,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        ),
        eos_token_id=0,
    )
    folder.parent.mkdir(parents=True)
    stock_export.write(model, folder, tokenization.train_bpe([TEXT], 300))


@pytest.fixture(scope="session")
def scoring_folder(prepared_folder, tmp_path_factory) -> Path:
    """Make a folder with tiny.yaml, text.txt, items.jsonl, runs/r/model and BPE shards.

    The shards are prepared here because a reader that train.py starts needs seconds to start.
    """

    def make() -> None:
        write_items(make_items())
        write_random_model(Path("runs/r/model"))
        run_script("prepare_data.py", "--recipe", "tiny.yaml", *BPE_FLAGS)
        run_script("prepare_data.py", "--recipe", "tiny.yaml", "--init_from", "runs/r/model")

    return create_shared_folder(tmp_path_factory, "scoring", make, template=prepared_folder)


@pytest.fixture
def workspace(scoring_folder, tmp_path, monkeypatch) -> Path:
    """Change to a copy of the scoring folder."""
    shutil.copytree(scoring_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_script_prints_scores_as_one_json_line(workspace):
    result = run_script("eval_hellaswag.py", *LOCAL_FLAGS, "--output", "out.jsonl")

    lines = result.stdout.splitlines()
    assert len(lines) == 1
    scores = json.loads(lines[0])
    assert scores.keys() >= set(SCORE_NAMES)
    assert scores["items"] == 40
    assert scores["precision"] == "fp32"
    assert scores["cut"] > 0
    assert f"{scores['cut']} texts truncated from the left" in result.stderr

    # The table compares the run with GPT-2.
    assert re.search(r"^GPT-2 124M +28\.92 +31\.14 +29\.55$", result.stderr, re.MULTILINE)
    assert re.search(r"^GPT-2 774M +- +- +43\.20$", result.stderr, re.MULTILINE)
    row = re.search(r"^runs/r +([\d.]+) ± ([\d.]+)", result.stderr, re.MULTILINE)
    assert float(row[1]) == round(100 * scores["acc"], 2)
    assert float(row[2]) == round(100 * scores["acc_stderr"], 2)

    predictions = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    names = [prediction["item"] for prediction in predictions]
    assert names == [f"items.jsonl: line {number}" for number in range(1, 41)]
    for score in ("acc", "acc_norm", "acc_token_norm"):
        num_correct = 0
        for prediction in predictions:
            num_correct += prediction[f"{score}_prediction"] == prediction["label"]
        assert scores[score] == pytest.approx(num_correct / 40)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--modle", "x"), ("--modle", "did you mean --model?")),
        (("--batch_size", "none"), ("--batch_size none", "1 or more")),
        (("--limit", "-1"), ("--limit -1", "0 (all) or more")),
        (("--output", "nowhere/x.jsonl"), ("--output nowhere/x.jsonl", "folder that exists")),
        (("--output", "./items.jsonl"), ("overwritten",)),
        (("--push_to_hub", "me/model"), ("complete validation split",)),
    ],
)
def test_invalid_flag_is_rejected_before_scoring(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadInput) as error:
        eval_hellaswag.parse([*LOCAL_FLAGS, *flags])

    for word in words:
        assert word in str(error.value)


def test_scores_of_old_revision_are_not_pushed():
    with pytest.raises(BadInput, match="--push_to_hub me/model: .* newest version"):
        eval_hellaswag.parse(["--model", "me/model@v1", "--push_to_hub", "me/model"])

    eval_hellaswag.parse(["--model", "me/model@v1", "--push_to_hub", "me/other"])


# Items longer than the context.


@pytest.fixture
def items_with_long_ending(workspace) -> list[dict]:
    """Return three items. An ending of the second one does not fit into the context."""
    items = make_items(3)
    ending = "on the mat of the dog, a red hat; on the hat of the cat, an old town!"
    items[1]["endings"][2] = ending
    return items


def test_too_long_item_is_left_out(items_with_long_ending):
    write_items(items_with_long_ending)
    flags = ("--run_name", "short", "--max_steps", "2", "--warmup_steps", "1")

    result = run_script(*BPE_TRAIN, *SCORED_FLAGS, *flags)

    assert re.search(r"2 HellaSwag items .*; left out, with an ending .*: 1", result.stderr)


def test_run_without_fitting_items_is_rejected(items_with_long_ending):
    write_items(items_with_long_ending[1:2])

    result = run_script(*BPE_TRAIN, *SCORED_FLAGS, "--run_name", "none", expect=2)

    assert "the model's context of 16 tokens" in result.stderr
    assert "The shortest of these endings" in result.stderr
    assert not Path("runs/none").exists()


# Scores during training.


@pytest.fixture
def slow_scores(monkeypatch) -> None:
    """Stop the clock of the reports, except that every score takes 1000 seconds."""
    state = SimpleNamespace(now=0.0)
    original_score = Evaluator.score

    def score(*args):
        state.now += 1000
        return original_score(*args)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: state.now))
    monkeypatch.setattr(Evaluator, "score", score)


def task_scores(row: dict) -> list[float]:
    """Return the scores of a row of metrics.jsonl."""
    return [row[f"hellaswag/{name}"] for name in SCORE_NAMES]


def test_scores_do_not_change_training(workspace, request):
    """The scores are those of the script and of --eval_only, for any number of processes."""
    run_script(*BPE_TRAIN, *QUIET_FLAGS, "--run_name", "without")
    request.getfixturevalue("slow_scores")

    run_script(*BPE_TRAIN, *QUIET_FLAGS, *SCORED_FLAGS, "--run_name", "with")
    model = ("--model", "runs/with", "--data_files", "items.jsonl")
    script = run_script("eval_hellaswag.py", *model, processes=2)
    eval_only = (*BPE_TRAIN, "--eval_only", *TASK_FLAGS, "--run_name", "with")
    checkpoint_line = run_script(*eval_only)
    model_line = run_script(*eval_only, "--init_from", "runs/with/model", processes=2)

    weights = load_file("runs/with/model/model.safetensors")
    for name, expected in load_file("runs/without/model/model.safetensors").items():
        assert torch.equal(weights[name], expected), name
    losses = losses_by_step("with")
    assert losses == losses_by_step("without")
    assert len(losses) == 12

    rows = metrics_rows("with")
    for row in rows:
        if "train/loss" in row:
            assert row["elapsed_seconds"] == 0
    scored_rows = [row for row in rows if "hellaswag/acc" in row]
    assert [row["step"] for row in scored_rows] == [0, 4, 8, 12]

    script_scores = json.loads(script.stdout)
    expected_scores = [script_scores[name] for name in SCORE_NAMES]
    assert task_scores(scored_rows[-1]) == expected_scores
    for result in (checkpoint_line, model_line):
        line = json.loads(result.stdout)
        assert task_scores(line) == expected_scores
        assert line["eval/loss"] > 0


# Models that compute NaN.


@pytest.fixture
def nan_likelihoods(monkeypatch) -> None:
    """Make every model compute NaN."""
    original_score = likelihood._score
    monkeypatch.setattr(likelihood, "_score", lambda *args: original_score(*args) * math.nan)


def test_script_rejects_model_that_computes_nan(workspace, nan_likelihoods):
    result = run_script("eval_hellaswag.py", *LOCAL_FLAGS, "--output", "out.jsonl", expect=2)

    assert "error: items.jsonl: line 1: ending 1" in result.stderr
    assert "no valid probabilities" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout
    assert not Path("out.jsonl").exists()


def test_eval_only_rejects_model_that_computes_nan(workspace, nan_likelihoods):
    flags = ("--eval_only", *TASK_FLAGS, "--init_from", "runs/r/model")

    result = run_script(*TRAIN, *flags, expect=2)

    assert "error: items.jsonl: line 1: ending 1" in result.stderr
    assert "no valid probabilities" in result.stderr
    assert not result.stdout


def test_eval_only_rejects_nan_loss(workspace, monkeypatch):
    loss = {"loss": math.nan, "bits_per_byte": math.nan}
    monkeypatch.setattr(Evaluator, "loss", lambda *_: loss)

    result = run_script(*TRAIN, "--eval_only", "--init_from", "runs/r/model", expect=2)

    assert "error: the validation split" in result.stderr
    assert "no valid probabilities" in result.stderr
    assert not result.stdout


def test_training_continues_without_nan_scores(workspace, nan_likelihoods):
    flags = (*QUIET_FLAGS, "--task_steps", "2", "--max_steps", "10", "--run_name", "nan")

    result = run_script(*BPE_TRAIN, *TASK_FLAGS, *flags, processes=2)

    message = "HellaSwag could not be computed at this step: items.jsonl: line 1"
    assert result.stderr.count(message) == 3
    assert result.stderr.count("HellaSwag will not be computed again") == 1
    for row in metrics_rows("nan"):
        assert "hellaswag/acc" not in row


def test_infinite_perplexity_is_valid_json(monkeypatch, capsys):
    task = task_items.all_tasks()["lambada_openai"]
    scores = {"acc": 0.0, "perplexity": math.inf, "perplexity_stderr": math.nan}
    monkeypatch.setattr(console, "start", lambda is_main: None)
    monkeypatch.setattr(score_model, "run", lambda *_: [(task, scores)])

    status = eval_tasks.main(["--model", "me/model", "--tasks", "lambada_openai"])

    assert status == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"acc": 0.0, "perplexity": None, "perplexity_stderr": None}


# Scores in a model card on the Hub.


def write_dataset(path: Path) -> None:
    """Write the items as the Parquet file of the data set, where labels are text."""
    rows = [item | {"label": str(item["label"])} for item in make_items()]
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def hub(workspace) -> Iterator[DataServer]:
    """Start a Hub with HellaSwag's validation split and a model card.

    Its ``environment`` has the variables that a script needs to use it.
    """
    folder = workspace / "hub"
    write_dataset(folder / "datasets" / TASK.dataset[0] / TASK.files[0])
    card = folder / "models/me/model/README.md"
    card.parent.mkdir(parents=True)
    card.write_text("---\nlicense: mit  # as agreed\n---\nMine.\n")
    with DataServer(folder) as server:
        server.commit = TASK.revision
        server.card = card
        server.environment = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(workspace / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_secret",
        }
        yield server


@pytest.fixture
def few_items_are_enough(monkeypatch) -> None:
    """Accept the 40 items as the complete validation split."""
    monkeypatch.setattr(score_model, "check_complete", lambda *_: None)


def test_scores_are_added_to_model_card(hub, few_items_are_enough):
    result = run_script(*PUSH_SCORES, **hub.environment)

    scores = json.loads(result.stdout)
    assert scores["dataset"] == f"Rowan/hellaswag@{TASK.revision[:7]}"
    assert scores["items"] == 40
    downloads = [line for line in hub.log if "Rowan/hellaswag" in line and "/resolve/" in line]
    assert downloads
    for line in downloads:
        assert TASK.revision in line

    text = hub.card.read_text()
    assert "license: mit  # as agreed\n" in text
    assert text.endswith("---\nMine.\n")
    results = ModelCard(text).data.to_dict()["model-index"][0]["results"]
    assert len(results) == 1
    assert results[0]["dataset"]["type"] == "Rowan/hellaswag"
    assert results[0]["dataset"]["revision"] == TASK.revision
    metrics = {metric["type"]: metric["value"] for metric in results[0]["metrics"]}
    assert metrics == {name: round(100 * scores[name], 2) for name in TASK.scores}
    assert "hf_secret" not in text + result.stdout + result.stderr


def test_push_to_missing_model_is_rejected(hub, few_items_are_enough):
    result = run_script(*PUSH_SCORES, "--push_to_hub", "me/none", expect=2, **hub.environment)

    assert "--push_to_hub me/none" in result.stderr
    assert "cannot be read" in result.stderr


def test_scores_of_some_items_are_not_pushed(hub):
    result = run_script(*PUSH_SCORES, expect=2, **hub.environment)

    assert "all 10,042 items of Rowan/hellaswag" in result.stderr
    assert "only 40" in result.stderr
    assert not [line for line in hub.log if "/commit/" in line]


def test_invalid_card_is_left_unchanged(hub, few_items_are_enough):
    hub.card.write_text(BROKEN_CARD)

    result = run_script(*PUSH_SCORES, expect=1, **hub.environment)

    assert "README.md was left unchanged" in result.stderr
    assert "not valid YAML" in result.stderr
    assert hub.card.read_text() == BROKEN_CARD
    assert json.loads(result.stdout)["items"] == 40


def test_scores_are_printed_if_push_fails(tmp_path, monkeypatch, capsys, caplog):
    scores = {"acc": 0.25, "acc_norm": 0.5, "acc_token_norm": 0.75}

    def fail(*_):
        raise ConnectionError("gone")

    monkeypatch.chdir(tmp_path)
    # console.start would take over the messages of this process.
    monkeypatch.setattr(console, "start", lambda is_main: None)
    monkeypatch.setattr(score_model, "run", lambda *_: [(TASK, scores)])
    monkeypatch.setattr(card_scores, "check_model_exists", lambda _: None)
    monkeypatch.setattr(card_scores, "_add", fail)

    status = eval_hellaswag.main(["--model", "me/model", "--push_to_hub", "me/model"])

    assert status == 1
    assert "--push_to_hub me/model" in caplog.text
    assert "not pushed. gone" in caplog.text
    assert json.loads(capsys.readouterr().out) == scores
