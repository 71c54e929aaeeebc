"""eval_hellaswag.py as a user calls it, and the score during training."""

import contextlib
import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TEXT, WORDS, run_script
from http_server import DataServer
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import eval_hellaswag
import eval_tasks
from ursa_minor.base import console
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
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

SCORES = [f"{score}{end}" for score in TASK.scores for end in ("", "_stderr")]
BPE = ("--tokenizer", "bpe", "--tokenizer_vocab_size", "300", "--vocab_size", "320")
TRAIN = ("train.py", "--recipe", "tiny.yaml", *BPE)
FILES = ("--tasks", "hellaswag", "--task_files", "hellaswag=items.jsonl")
LOCAL = ("--model", "runs/r", "--data_files", "items.jsonl")
SCORED = (*FILES, "--task_steps", "4")


def items(number: int = 40) -> list[dict]:
    """Items of the tests' own words, some longer than the tiny model's context."""
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    return [
        {
            "ind": i,
            "activity_label": words(1),
            "ctx_a": words(length := 1 + i % 14),
            "ctx_b": words(1),
            "ctx": words(length + 1),
            "endings": [words(draw.randint(1, 3)) for _ in range(4)],
            "label": draw.randrange(4),
        }
        for i in range(number)
    ]


def write_items(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def made(prepared_folder, tmp_path_factory) -> Path:
    """A folder with tiny.yaml, text.txt, its shards for a BPE, items.jsonl and a random model in runs/r/model."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(prepared_folder, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        run_script("prepare_data.py", "--recipe", "tiny.yaml", *BPE)
        write_items(Path("items.jsonl"), items())
        tokenizer = tokenization.train_bpe([TEXT], 300)
        shape = {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "vocab_size": 320,
            "sequence_length": 16,
            "seed": 1,
        }
        dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        Path("runs/r").mkdir(parents=True)
        stock_export.write(
            build(keys.Model(**shape, **dropout), eos_token_id=0), Path("runs/r/model"), tokenizer
        )
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch) -> Path:
    """That folder, as one's own."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_scored_beside_gpt2_and_ends_with_one_json_line(place):
    done = run_script("eval_hellaswag.py", *LOCAL, "--output", "out.jsonl")
    (line,) = map(json.loads, done.stdout.splitlines())
    assert set(SCORES) <= line.keys() and line["items"] == 40 and line["precision"] == "fp32"
    assert (
        f"{line['cut']} texts truncated from the left to fit the context" in done.stderr
        and line["cut"] > 0
    )
    assert re.search(r"^GPT-2 124M +28\.92 +31\.14 +29\.55$", done.stderr, re.MULTILINE)
    assert re.search(r"^GPT-2 774M +- +- +43\.20$", done.stderr, re.MULTILINE)
    shown = re.search(r"^runs/r +([\d.]+) ± ([\d.]+)", done.stderr, re.MULTILINE)
    assert float(shown[1]) == round(100 * line["acc"], 2) and float(shown[2]) == round(
        100 * line["acc_stderr"], 2
    )
    each = [json.loads(row) for row in Path("out.jsonl").read_text().splitlines()]
    assert [row["item"] for row in each] == [f"items.jsonl: line {n}" for n in range(1, 41)]
    for name in ("acc", "acc_norm", "acc_token_norm"):
        assert line[name] == pytest.approx(
            sum(row[f"{name}_prediction"] == row["label"] for row in each) / 40
        )


def test_a_wrong_flag_is_said_before_anything_is_scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, words in (
        (("--modle", "x"), "--modle: no such flag; did you mean --model?"),
        (("--batch_size", "none"), "--batch_size none: must be auto, or 1 or more"),
        (("--limit", "-1"), "--limit -1: must be 0 (all) or more"),
        (
            ("--output", "nowhere/x.jsonl"),
            "--output nowhere/x.jsonl: must be a file in a folder that exists",
        ),
        (("--output", "./items.jsonl"), "which would be overwritten"),
        (("--push_to_hub", "me/model"), "complete validation split"),
    ):
        with pytest.raises(BadInput, match=re.escape(words)):
            eval_hellaswag.parse([*LOCAL, *flags])


def test_scores_of_a_revision_are_not_pushed_as_the_newest():
    with pytest.raises(
        BadInput, match="--push_to_hub me/model: its card describes the newest version"
    ):
        eval_hellaswag.parse(["--model", "me/model@v1", "--push_to_hub", "me/model"])
    eval_hellaswag.parse(["--model", "me/model@v1", "--push_to_hub", "me/other"])


def test_a_run_says_which_items_its_context_does_not_hold_and_is_refused_where_it_holds_none(place):
    long = items(3)
    long[1]["endings"][2] = "on the mat of the dog, a red hat; on the hat of the cat, an old town!"
    write_items(Path("items.jsonl"), long)
    done = run_script(
        *TRAIN, *SCORED, "--run_name", "short", "--max_steps", "2", "--warmup_steps", "1"
    )
    assert re.search(r"score    2 HellaSwag items .*; left out, with an ending .*: 1", done.stderr)
    write_items(Path("items.jsonl"), long[1:2])
    done = run_script(*TRAIN, *SCORED, "--run_name", "none", expect=2)
    assert (
        "than the model's context of 16 tokens. The shortest of these endings has" in done.stderr
        and not Path("runs/none").exists()
    )


def test_scores_in_training_change_no_bit_of_it_take_none_of_its_time_and_are_the_scripts(
    place, monkeypatch
):
    """Whatever the number of processes; ``--eval_only`` scores the newest checkpoint, or any folder, too."""
    quiet = ("--eval_steps", "0", "--sample_steps", "0")
    run_script(*TRAIN, *quiet, "--run_name", "without")
    now, scored = [0.0], Evaluator.score

    def slow(*args):
        now[0] += 1000
        return scored(*args)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Evaluator, "score", slow)
    run_script(*TRAIN, *quiet, *SCORED, "--run_name", "with")
    weights = [load_file(f"runs/{name}/model/model.safetensors") for name in ("with", "without")]
    assert all((weights[0][key] == weights[1][key]).all() for key in weights[1])
    rows = [read_metrics(Path(f"runs/{name}/metrics.jsonl")) for name in ("with", "without")]
    updates = [[row for row in its if "train/loss" in row] for its in rows]
    losses = [[row["train/loss"] for row in its] for its in updates]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert all(row["elapsed_seconds"] == 0 for row in updates[0])
    in_training = [row for row in rows[0] if "hellaswag/acc" in row]
    assert [row["step"] for row in in_training] == [0, 4, 8, 12]
    done = run_script(
        "eval_hellaswag.py", "--model", "runs/with", "--data_files", "items.jsonl", processes=2
    )
    script = json.loads(done.stdout)
    assert [in_training[-1][f"hellaswag/{name}"] for name in SCORES] == [
        script[name] for name in SCORES
    ]
    for start in ((), ("--init_from", "runs/with/model")):
        flags = ("--eval_only", *FILES, *start, "--run_name", "with")
        line = json.loads(run_script(*TRAIN, *flags, processes=1 + bool(start)).stdout)
        assert [line[f"hellaswag/{name}"] for name in SCORES] == [script[name] for name in SCORES]
        assert line["eval/loss"] > 0


@pytest.fixture
def computes_nan(monkeypatch):
    """Every model computes NaN from now on."""
    scored = likelihood._score
    monkeypatch.setattr(likelihood, "_score", lambda *args: scored(*args) * math.nan)


def test_a_model_that_computes_nan_has_no_score(place, computes_nan):
    done = run_script("eval_hellaswag.py", *LOCAL, "--output", "out.jsonl", expect=2)
    assert (
        "error: items.jsonl: line 1: ending 1: the model computes no valid probabilities"
        in done.stderr
    )
    assert not done.stdout and not Path("out.jsonl").exists() and "Traceback" not in done.stderr
    done = run_script(*TRAIN[:3], "--eval_only", *FILES, "--init_from", "runs/r/model", expect=2)
    assert (
        "error: items.jsonl: line 1: ending 1: the model computes no valid" in done.stderr
        and not done.stdout
    )


def test_eval_only_has_no_loss_of_a_model_that_computes_nan(place, monkeypatch):
    monkeypatch.setattr(Evaluator, "loss", lambda *_: {"loss": math.nan, "bits_per_byte": math.nan})
    done = run_script(*TRAIN[:3], "--eval_only", "--init_from", "runs/r/model", expect=2)
    assert (
        "error: the validation split: the model computes no valid probabilities" in done.stderr
        and not done.stdout
    )


def test_a_run_trains_on_without_scores_that_are_nan(place, computes_nan):
    flags = ("--task_steps", "2", "--max_steps", "10", "--eval_steps", "0", "--sample_steps", "0")
    done = run_script(*TRAIN, *FILES, *flags, "--run_name", "nan", processes=2)
    assert (
        done.stderr.count("HellaSwag could not be computed at this step: items.jsonl: line 1") == 3
    )
    assert done.stderr.count("HellaSwag will not be computed again") == 1
    assert not any("hellaswag/acc" in row for row in read_metrics(Path("runs/nan/metrics.jsonl")))


def test_printed_scores_are_json_where_the_perplexity_is_infinite(monkeypatch, capsys):
    task = task_items.all_tasks()["lambada_openai"]
    line = {"acc": 0.0, "perplexity": math.inf, "perplexity_stderr": math.nan}
    monkeypatch.setattr(console, "start", lambda: None)
    monkeypatch.setattr(score_model, "run", lambda *asked: [(task, line)])
    assert eval_tasks.main(["--model", "me/model", "--tasks", "lambada_openai"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"acc": 0.0, "perplexity": None, "perplexity_stderr": None}


@pytest.fixture
def hub(place):
    """A Hub on localhost with HellaSwag's validation split and a model's card; its environment."""
    folder = place / "hub"
    (folder / "datasets/Rowan/hellaswag/data").mkdir(parents=True)
    table = pa.Table.from_pylist([row | {"label": str(row["label"])} for row in items()])
    pq.write_table(table, folder / "datasets" / TASK.dataset[0] / TASK.files[0])
    (folder / "models/me/model").mkdir(parents=True)
    (folder / "models/me/model/README.md").write_text(
        "---\nlicense: mit  # as agreed\n---\nMine.\n"
    )
    with DataServer(folder) as server:
        server.commit = TASK.revision
        server.environment = {
            "HF_HOME": str(place / "home"),
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "0",
        }
        server.environment["HF_ENDPOINT"] = server.url
        yield server


def test_the_hubs_items_come_by_their_commit_and_scores_go_into_a_models_card(
    place, hub, monkeypatch
):
    """With the real clients, against a Hub on localhost."""
    card = hub.folder / "models/me/model/README.md"
    monkeypatch.setattr(score_model, "check_complete", lambda *_: None)  # these are 40 items
    push = ("eval_hellaswag.py", "--model", "runs/r", "--push_to_hub", "me/model")
    done = run_script(*push, **hub.environment)
    asked = [line for line in hub.log if "Rowan/hellaswag" in line]
    assert asked and all(TASK.revision in line for line in asked if "/resolve/" in line)
    line = json.loads(done.stdout)
    assert line["dataset"] == f"Rowan/hellaswag@{TASK.revision[:7]}" and line["items"] == 40
    text = card.read_text()
    assert "license: mit  # as agreed\n" in text and text.endswith("---\nMine.\n")
    (group,) = ModelCard(text).data.to_dict()["model-index"][0]["results"]
    assert (
        group["dataset"]["type"] == "Rowan/hellaswag"
        and group["dataset"]["revision"] == TASK.revision
    )
    found = {metric["type"]: metric["value"] for metric in group["metrics"]}
    assert found == {name: round(100 * line[name], 2) for name in TASK.scores}
    assert "hf_secret" not in text + done.stdout + done.stderr
    done = run_script(*push[:-1], "me/none", expect=2)
    assert "--push_to_hub me/none: this model cannot be read" in done.stderr


def test_scores_of_some_items_are_not_pushed(place, hub):
    done = run_script(
        "eval_hellaswag.py",
        "--model",
        "runs/r",
        "--push_to_hub",
        "me/model",
        expect=2,
        **hub.environment,
    )
    assert "on all 10,042 items of Rowan/hellaswag, but only 40 would be scored" in done.stderr
    assert not any("/commit/" in line for line in hub.log)


def test_damaged_card_gets_no_scores(place, hub, monkeypatch):
    card = hub.folder / "models/me/model/README.md"
    card.write_text("---\nlicense: [mit\n---\nMine.\n")
    monkeypatch.setattr(score_model, "check_complete", lambda *_: None)
    push = ("eval_hellaswag.py", "--model", "runs/r", "--push_to_hub", "me/model")
    done = run_script(*push, expect=1, **hub.environment)
    assert "README.md was left unchanged: its metadata block is not valid YAML" in done.stderr
    assert (
        card.read_text() == "---\nlicense: [mit\n---\nMine.\n"
        and json.loads(done.stdout)["items"] == 40
    )


def test_scores_are_not_lost_when_the_card_cannot_be_written(tmp_path, monkeypatch, capsys, caplog):
    line = {"acc": 0.25, "acc_norm": 0.5, "acc_token_norm": 0.75}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "start", lambda: None)  # it would take this process's messages
    monkeypatch.setattr(score_model, "run", lambda *asked: [(TASK, line)])
    monkeypatch.setattr(card_scores, "check_model_exists", lambda model_id: None)
    monkeypatch.setattr(
        card_scores, "_add", lambda *_: (_ for _ in ()).throw(ConnectionError("gone"))
    )
    assert eval_hellaswag.main(["--model", "me/model", "--push_to_hub", "me/model"]) == 1
    assert (
        "--push_to_hub me/model: the scores were not pushed. gone" in caplog.text
        and json.loads(capsys.readouterr().out) == line
    )
