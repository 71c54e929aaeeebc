"""The model card contains the measurements of the run, and special names do not break it."""

import logging
import re
import shlex
import warnings

import pytest
from conftest import ROOT
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index

from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation.task_data import all_tasks
from ursa_minor.evaluation.tasks.hellaswag import TASK as HELLASWAG
from ursa_minor.export import stock as stock_export
from ursa_minor.hub import card_merge, card_scores, model_card
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.model.build import build
from ursa_minor.recipe import keys, loading


def training_row(step: int) -> dict:
    """Return a row of metrics.jsonl about an update."""
    return {
        "step": step,
        "tokens": 100 * step,
        "train/loss": 5.0 - step / 100,
        "elapsed_seconds": 36.0 * step,
        "tokens_per_second": 1000.0 * step,
        "skipped_updates": 0,
    }


TRAINING_ROWS = [training_row(step) for step in range(10, 101, 10)]
VALIDATION_ROW = {
    "step": 100,
    "tokens": 10_000,
    "eval/loss": 3.123456,
    "eval/bits_per_byte": 1.0876543,
}
HELLASWAG_ROW = {
    "step": 100,
    "tokens": 10_000,
    "hellaswag/items": 10_042,
    "hellaswag/revision": HELLASWAG.revision,
    "hellaswag/acc": 0.28765,
    "hellaswag/acc_stderr": 0.00451,
    "hellaswag/acc_norm": 0.3001,
    "hellaswag/acc_norm_stderr": 0.00457,
    "hellaswag/acc_token_norm": 0.2955,
    "hellaswag/acc_token_norm_stderr": 0.00455,
}
ALL_ROWS = [*TRAINING_ROWS, VALIDATION_ROW, HELLASWAG_ROW]
RECIPE = {
    "run_name": "a_run",
    "dataset_name": "HuggingFaceFW/fineweb-edu",
    "dataset_config_name": "sample-10BT",
    "tokenizer": "openai-community/gpt2",
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "vocab_size": 50304,
    "sequence_length": 1024,
    "tokens_per_step": 1000,
    "max_steps": 200,
    "learning_rate": 6e-4,
    "seed": 1,
    "license": "mit",
    "language": ["en"],
    "tags": ["mine"],
    "sample_prompts": ["Hello"],
}
BASE = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
RUN_INFO = RunInfo(
    command=["python", "train.py"],
    hardware="NVIDIA A100",
    num_processes=1,
    precision="bf16",
    model_type="gpt2",
    parameters=124_475_904,
    flops_per_token=855_000_000,
    tokenizer_size=50257,
)
LOSSES = {"validation loss, nats per token": "3.1235", "validation, bits per byte": "1.0877"}


def make_card(
    rows: list[dict] = ALL_ROWS,
    *,
    repo_id: str = "me/a_run",
    best_step: int | None = None,
    recipe: dict | None = None,
    run_info: dict | None = None,
) -> str:
    """Return the model card of step 100.

    Args:
        rows: the rows of metrics.jsonl.
        repo_id: the repository of the push.
        best_step: the step of the weights, if these are not the last ones.
        recipe: changes of the recipe.
        run_info: changes of the run info.
    """
    changed_recipe = keys.replace(BASE, **RECIPE | (recipe or {}))
    changed_info = RunInfo(**vars(RUN_INFO) | (run_info or {}))
    return model_card.model_card(repo_id, 100, rows, changed_recipe, changed_info, best_step)


def metadata(text: str):
    """Return the metadata of a card."""
    return ModelCard(text).data


def listed_results(text: str) -> dict[str, str]:
    """Return the rows about results in the tables of a card."""
    pattern = r"^\| (.*(?:loss|byte|HellaSwag).*) \| (.*) \|$"
    return dict(re.findall(pattern, text, re.MULTILINE))


def result_names(text: str) -> list[tuple]:
    """Return (data set, config, split, revision, metric) of each result in a card's metadata."""
    names = []
    for result in metadata(text).eval_results or []:
        source = (result.dataset_type, result.dataset_config, result.dataset_split)
        names.append((*source, result.dataset_revision, result.metric_type))
    return names


def test_metadata_loads_without_warning(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        data = metadata(make_card())

    assert not caplog.records
    assert data.license == "mit"
    assert data.language == ["en"]
    assert data.datasets == ["HuggingFaceFW/fineweb-edu"]
    assert data.get("pipeline_tag") == "text-generation"
    assert data.library_name == "transformers"
    assert data.tags == ["ursa-minor", "mine"]
    assert data.base_model is None
    assert data.model_name == "a_run"


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("gpt2", "GPT-2"), ("llama", "Llama-type"), ("qwen2", "qwen2")],
)
def test_card_names_the_architecture(model_type, architecture):
    text = make_card(run_info={"model_type": model_type})

    assert f"A {architecture} language model with 124.5M parameters" in text
    assert "pre-trained from scratch" in text


@pytest.mark.parametrize("revision", ["", "@step-00000010"])
def test_base_model_is_id_without_revision(revision):
    text = make_card(recipe={"init_from": f"me/base{revision}"})

    assert f"initialized from me/base{revision} and trained" in text
    assert metadata(text).base_model == "me/base"


def test_local_base_model_is_not_in_metadata(tmp_path):
    text = make_card(recipe={"init_from": str(tmp_path)})

    assert metadata(text).base_model is None


def test_card_lists_the_measured_results():
    name = "HellaSwag {}, %"
    scores = {
        name.format("acc (lm-evaluation-harness)"): "28.77 ± 0.45, 10,042 items",
        name.format(
            "acc_norm (lm-evaluation-harness: per character)"
        ): "30.01 ± 0.46, 10,042 items",
        name.format(
            "acc_token_norm (build-nanogpt, llm.c: mean per token)"
        ): "29.55 ± 0.46, 10,042 items",
    }

    assert listed_results(make_card()) == LOSSES | scores


def test_metadata_contain_the_measured_results():
    results = metadata(make_card()).eval_results

    values = {(row.dataset_type, row.metric_type): row.metric_value for row in results}
    dataset = HELLASWAG.dataset[0]
    assert values == {
        ("text", "loss"): 3.1235,
        ("text", "bits_per_byte"): 1.0877,
        (dataset, "acc"): 28.77,
        (dataset, "acc_norm"): 30.01,
        (dataset, "acc_token_norm"): 29.55,
    }


def test_test_loss_is_listed():
    text = make_card([*TRAINING_ROWS, {"step": 100, "tokens": 10_000, "test/loss": 3.5}])

    assert listed_results(text) == {"test loss, nats per token": "3.5000"}


def test_baselines_are_listed_next_to_losses():
    baselines = {"step": 100, "baseline/bigram_bits_per_byte": 1.75, "baseline/gzip": 2.5}

    text = make_card([*TRAINING_ROWS, VALIDATION_ROW, baselines])

    labels = model_card.CARD_BASELINES.values()
    assert listed_results(text) == LOSSES | dict(zip(labels, ["1.7500", "2.5000"], strict=True))


def test_example_has_prompt_of_samples():
    with_prompts = model_card_of_prompts(["Hello"])
    without_prompts = model_card_of_prompts([])

    assert 'generate("Hello", ' in with_prompts
    assert 'generate("வணக்கம்", ' in without_prompts


def model_card_of_prompts(sample_prompts: list[str]) -> str:
    """Return the card of a run with these prompts whose samples.txt has a Tamil prompt."""
    recipe = keys.replace(BASE, **RECIPE | {"sample_prompts": sample_prompts})
    return model_card.model_card("me/a", 100, [], recipe, RUN_INFO, prompt="வணக்கம்")


def test_nan_is_not_listed():
    text = make_card([*TRAINING_ROWS, VALIDATION_ROW | {"eval/loss": float("nan")}])

    assert listed_results(text) == {"validation, bits per byte": "1.0877"}


@pytest.mark.parametrize("items", [35, 10_042])
def test_incomplete_score_is_not_in_metadata(items):
    # The last row has no revision, so its items are not those of the public data set.
    earlier_row = HELLASWAG_ROW | {"step": 90}
    last_row = HELLASWAG_ROW | {"hellaswag/items": items}
    del last_row["hellaswag/revision"]

    text = make_card([*TRAINING_ROWS, VALIDATION_ROW, earlier_row, last_row])

    assert {names[0] for names in result_names(text)} == {"text"}
    assert HELLASWAG.dataset[0] not in text
    score = listed_results(text)["HellaSwag acc (lm-evaluation-harness), %"]
    assert f"{items:,} items, not the complete data set" in score


def task_row(name: str, revision: str, score: float) -> dict:
    """Return a row of metrics.jsonl in which each score of a task has this value."""
    task = all_tasks()[name]
    row = {"step": 100, f"{name}/items": task.size, f"{name}/revision": revision}
    for score_name in task.scores:
        row[f"{name}/{score_name}"] = score
    return row


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "multiblimp_hin", "lambada_openai"])
def test_results_name_config_split_and_revision(name):
    task = all_tasks()[name]
    revision = "c" * 40

    text = make_card([*TRAINING_ROWS, task_row(name, revision, 0.5)])

    dataset, split = task.dataset
    expected = [(dataset, task.config, split, revision, score) for score in task.scores]
    assert result_names(text) == expected


@pytest.mark.parametrize(
    "sources",
    [None, [{"weight": 1, "dataset_name": "a/b"}, {"weight": 1, "dataset_name": "c/d"}]],
    ids=["one data set", "mixture"],
)
def test_loss_names_no_public_data_set(sources):
    rows = [*TRAINING_ROWS, VALIDATION_ROW, {"step": 100, "test/loss": 3.0}]

    text = make_card(rows, recipe={"sources": sources})

    assert result_names(text) == [
        ("text", None, "validation", None, "loss"),
        ("text", None, "validation", None, "bits_per_byte"),
        ("text", None, "test", None, "loss"),
    ]


@pytest.mark.parametrize("name", ["hellaswag", "arc_easy", "lambada_openai"])
def test_evaluation_replaces_score_of_training(name):
    task = all_tasks()[name]
    revision = str(task.revision)
    text = make_card([*TRAINING_ROWS, task_row(name, revision, 0.25)])
    scores = [card_scores.result(task, score, 0.5, revision) for score in task.scores]

    text = card_merge.add_results(text, eval_results_to_model_index("a_run", scores))

    results = metadata(text).eval_results
    assert len(results) == len(task.scores)
    values = {result.metric_type: result.metric_value for result in results}
    assert values == {score: float(task.format_score(score, 0.5)) for score in task.scores}


def test_best_model_has_results_of_its_step():
    best_row = VALIDATION_ROW | {"step": 60, "eval/loss": 2.5}
    test_row = {"step": 100, "test/loss": 2.75}
    rows = [*TRAINING_ROWS, best_row, VALIDATION_ROW, HELLASWAG_ROW, test_row]

    text = make_card(rows, best_step=60)

    assert "The weights are those of step 60, which had the lowest validation loss." in text
    assert "Results at step 60" in text
    assert 'revision="step-00000100"' in text
    assert listed_results(text) == {
        "validation loss, nats per token": "2.5000",
        "validation, bits per byte": "1.0877",
        "test loss, nats per token": "2.7500",
    }


def test_rows_of_later_steps_are_ignored():
    rows = [*TRAINING_ROWS, VALIDATION_ROW]
    later_row = VALIDATION_ROW | {"step": 110, "eval/loss": 2.0}

    assert make_card([*rows, later_row]) == make_card(rows)


def test_earlier_result_is_listed_with_its_step():
    text = make_card([*TRAINING_ROWS, VALIDATION_ROW | {"step": 90}])

    expected = {name: f"{value} (at step 90)" for name, value in LOSSES.items()}
    assert listed_results(text) == expected
    assert metadata(text).eval_results is None


def test_card_without_rows_has_no_results():
    text = make_card([])

    for absent in ("curves.png", "## Results", "training time", "tokens/s", "kWh", "model-index"):
        assert absent not in text, absent
    assert "| tokens | 100,000 |" in text  # 100 steps of 1,000, according to the recipe


def test_hellaswag_is_mentioned_only_with_score():
    with_score = make_card()
    without_score = make_card([*TRAINING_ROWS, VALIDATION_ROW])

    assert "hellaswag" in with_score.lower()
    assert "hellaswag" not in without_score.lower()


def test_card_describes_the_training():
    text = make_card()

    assert "| compute | 8.55e+13 FLOP, calculated from 855.0 MFLOP per token" in text
    assert "| training time | 1:00:00 (h:mm:ss), excluding evaluation" in text
    assert "| speed | 55,000 tokens/s (median of 10 logged values) |" in text
    assert "| hardware | NVIDIA A100 |" in text
    assert "| precision | bf16 |" in text
    assert "kWh" not in text


def test_measured_power_gives_the_energy():
    rows = [row | {"gpu/watts": 500.0} for row in TRAINING_ROWS]

    text = make_card(rows, run_info={"num_processes": 4})

    assert "| energy | 2 kWh, GPUs only (mean power" in text
    assert "x training time x 4)" in text


def test_padding_of_vocabulary_is_explained():
    padded = make_card()
    unpadded = make_card(run_info={"tokenizer_size": 50304})

    assert "50,304 rows for the 50,257 tokens" in padded
    assert "padding" not in unpadded


MIXTURE = [
    {"weight": 1, "dataset_name": "a/b"},
    {"weight": 1, "data_files": ["x.txt"]},
    {"weight": 1, "dataset_name": "c"},
]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, ["HuggingFaceFW/fineweb-edu"]),
        ({"dataset_name": "python_stdlib"}, None),
        ({"data_files": ["me/text.txt"]}, None),
        ({"data_dir": "me/shards"}, None),
        ({"sources": MIXTURE}, ["a/b", "c"]),
    ],
    ids=["data set", "built-in text", "files", "folder", "mixture"],
)
def test_only_hub_data_sets_are_in_metadata(recipe, expected):
    text = make_card([], recipe=recipe)

    assert metadata(text).datasets == expected


def test_mixture_with_files_is_described():
    assert "the author's own files" in make_card([], recipe={"sources": MIXTURE})


def test_command_can_be_copied_into_shell():
    run_name = "it's `a` $b\n```\n---"
    command = ["python", "train.py", "--run_name", run_name, "--data_files", "*.txt", ""]

    text = make_card(run_info={"command": command})

    ((_, code),) = re.findall(r"\n(````+)sh\n(.*?)\n\1\n", text, re.DOTALL)
    assert shlex.split(code) == command
    assert metadata(text).license == "mit"
    assert text.count("\n## Limitations") == 1


def headings(text: str) -> list[str]:
    """Return the headings of the second level."""
    return [line for line in text.splitlines() if line.startswith("## ")]


def find_line(text: str, start: str) -> str:
    """Return the first line of a card that starts with this text."""
    return next(line for line in text.splitlines() if line.startswith(start))


def body_without_code(card: ModelCard) -> str:
    """Return the text of a card without code blocks and comments."""
    body = re.sub(r"^(`{3,}).*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", body)


@pytest.mark.parametrize(
    "name",
    [
        "a|b",
        "<script>",
        "# head",
        "*x*",
        "a: b #c",
        "---",
        "```",
        "'\"",
        "[x](y)",
        "no",
        "{{a}}",
        "a\n---\nb",
    ],
)
def test_special_names_do_not_break_card(name):
    names = {
        "run_name": name,
        "dataset_name": name,
        "license": name,
        "language": [name],
        "tags": [name],
        "sample_prompts": [name],
    }

    text = make_card(repo_id=f"me/{name}", recipe=names, run_info={"hardware": name})

    card = ModelCard(text)
    assert card.data.tags[-1] == name
    assert card.data.license == name
    assert card.data.language == [name]
    assert headings(text) == headings(make_card())
    title = find_line(text, "# ").removeprefix("# ")
    assert re.sub(r"\\(.)", r"\1", title) == " ".join(name.split())
    assert not re.search(r"(?<!\\)[`*_\[\]<>#|]", title)
    assert len(re.findall(r"(?<!\\)\|", find_line(text, "| hardware |"))) == 3
    body = body_without_code(card)
    assert "<script>" not in body
    assert "](y)" not in body.replace("\\]", "")


def test_card_has_no_control_characters_or_passwords():
    name = "a\x1b[2J\x9b\u202e http://me:secret@h/x?token=secret"
    names = {"run_name": name, "dataset_name": name, "sample_prompts": [name]}

    text = make_card(recipe=names, run_info={"hardware": name, "command": ["python", name]})

    assert "\\x1b[2J" in text
    for forbidden in ("\x1b", "\x9b", "\u202e", "secret"):
        assert forbidden not in text


@pytest.fixture
def exported_model(tmp_path):
    """Export a tiny model to the folder me/a_run, whose relative path equals an id on the Hub."""
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    shape = keys.Model(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=64,
        sequence_length=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        seed=1,
    )
    model = build(shape, eos_token_id=tokenizer.eos_token_id)
    folder = tmp_path / "me" / "a_run"
    folder.parent.mkdir()
    stock_export.write(model, folder, tokenizer)
    return folder


def test_code_of_card_loads_the_model(exported_model, tmp_path, monkeypatch, capsys):
    local_text = {"dataset_name": "python_stdlib", "dataset_config_name": None, "tokenizer": "bpe"}
    text = make_card(recipe=local_text | {"sequence_length": 16, "sample_prompts": ["abc"]})
    (code,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)

    exec(code, {})

    assert capsys.readouterr().out.startswith("abc")
    assert len(code.splitlines()) == 4
    assert 'revision="step-00000100"' in code
