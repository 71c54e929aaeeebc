"""The model card holds what the run measured, nothing else, and no name in it can break it."""

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
from ursa_minor.evaluation.tasks.hellaswag import TASK
from ursa_minor.export import stock as stock_export
from ursa_minor.hub import card_merge, card_scores, model_card
from ursa_minor.machine.run_info import RunInfo
from ursa_minor.model.build import build
from ursa_minor.recipe import keys, loading

UPDATES = [
    {
        "step": step,
        "tokens": 100 * step,
        "train/loss": 5.0 - step / 100,
        "elapsed_seconds": 36.0 * step,
    }
    | {"tokens_per_second": 1000.0 * step, "skipped_updates": 0}
    for step in range(10, 101, 10)
]
VALIDATED = {"step": 100, "tokens": 10_000, "eval/loss": 3.123456, "eval/bits_per_byte": 1.0876543}
SCORED = {
    "step": 100,
    "tokens": 10_000,
    "hellaswag/items": 10_042,
    "hellaswag/revision": TASK.revision,
}
SCORED |= {"hellaswag/acc": 0.28765, "hellaswag/acc_stderr": 0.00451}
SCORED |= {
    "hellaswag/acc_norm": 0.3001,
    "hellaswag/acc_norm_stderr": 0.00457,
    "hellaswag/acc_token_norm": 0.2955,
}
SCORED["hellaswag/acc_token_norm_stderr"] = 0.00455
RECIPE = {
    "run_name": "a_run",
    "dataset_name": "HuggingFaceFW/fineweb-edu",
    "dataset_config_name": "sample-10BT",
}
RECIPE |= {
    "tokenizer": "openai-community/gpt2",
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "vocab_size": 50304,
}
RECIPE |= {
    "sequence_length": 1024,
    "tokens_per_step": 1000,
    "max_steps": 200,
    "learning_rate": 6e-4,
    "seed": 1,
}
RECIPE |= {"license": "mit", "language": ["en"], "tags": ["mine"], "sample_prompts": ["Hello"]}
OWN = RECIPE | {"dataset_name": "python_stdlib", "dataset_config_name": None, "tokenizer": "bpe"}
BASE = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")


def make(rows=(*UPDATES, VALIDATED, SCORED), recipe=RECIPE, **other) -> str:
    repo_id, best_step = other.pop("repo_id", "me/a_run"), other.pop("best_step", None)
    facts = {
        "command": ["python", "train.py"],
        "hardware": "NVIDIA A100",
        "num_processes": 1,
        "precision": "bf16",
    }
    facts |= {
        "model_type": "gpt2",
        "parameters": 124_475_904,
        "flops_per_token": 855_000_000,
        "tokenizer_size": 50257,
    }
    recipe = keys.replace(BASE, **recipe)
    return model_card.model_card(repo_id, 100, rows, recipe, RunInfo(**facts | other), best_step)


def figures(text: str) -> dict[str, str]:
    """What a card says was measured."""
    return dict(re.findall(r"^\| (.*(?:loss|byte|HellaSwag).*) \| (.*) \|$", text, re.MULTILINE))


def test_metadata_loads_without_a_warning_and_says_what_the_hub_reads(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        data = ModelCard(make()).data
    assert not caplog.records
    expected = {"license": "mit", "language": ["en"], "datasets": ["HuggingFaceFW/fineweb-edu"]}
    expected |= {
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["ursa-minor", "mine"],
    }
    assert {name: data.get(name) for name in expected} == expected
    assert data.base_model is None and data.model_name == "a_run"


def test_the_architecture_is_the_model_s_and_a_model_that_was_trained_on_names_its_base(tmp_path):
    for model_type, words in {"gpt2": "GPT-2", "llama": "Llama-type", "qwen2": "qwen2"}.items():
        assert f"A {words} language model with 124.5M parameters, pre-trained from scratch" in make(
            model_type=model_type
        )
    text = make(recipe=RECIPE | {"init_from": "openai-community/gpt2"})
    assert (
        "initialized from openai-community/gpt2 and trained" in text
        and ModelCard(text).data.base_model == "openai-community/gpt2"
    )
    assert ModelCard(make(recipe=RECIPE | {"init_from": str(tmp_path)})).data.base_model is None


LOSSES = {"validation loss, nats per token": "3.1235", "validation, bits per byte": "1.0877"}


def test_the_figures_are_exactly_those_that_were_measured():
    scores = {
        "acc (lm-evaluation-harness)": "28.77 ± 0.45",
        "acc_norm (lm-evaluation-harness: per character)": "30.01 ± 0.46",
    }
    scores |= {"acc_token_norm (build-nanogpt, llm.c: mean per token)": "29.55 ± 0.46"}
    scores = {f"HellaSwag {name}, %": f"{value}, 10,042 items" for name, value in scores.items()}
    assert figures(make()) == LOSSES | scores
    index = {
        (one.dataset_type, one.metric_type): one.metric_value
        for one in ModelCard(make()).data.eval_results
    }
    text, task = "text", TASK.dataset[0]
    wanted = {
        (text, "loss"): 3.1235,
        (text, "bits_per_byte"): 1.0877,
        (task, "acc"): 28.77,
        (task, "acc_norm"): 30.01,
    }
    assert index == wanted | {(task, "acc_token_norm"): 29.55}
    test = {"step": 100, "tokens": 10_000, "test/loss": 3.5}
    assert figures(make([*UPDATES, test])) == {"test loss, nats per token": "3.5000"}
    nan = make([*UPDATES, VALIDATED | {"eval/loss": float("nan")}])
    assert figures(nan) == {"validation, bits per byte": "1.0877"}


def results(text: str) -> list[tuple]:
    """What a card's metadata say was measured."""
    found = ModelCard(text).data.eval_results or []
    names = ("dataset_type", "dataset_config", "dataset_split", "dataset_revision", "metric_type")
    return [tuple(getattr(one, name) for name in names) for one in found]


@pytest.mark.parametrize("items", [35, 10_042])
def test_metadata_have_scores_of_all_public_items_only(items):
    row = {name: value for name, value in SCORED.items() if not name.endswith("revision")}
    text = make([*UPDATES, VALIDATED, SCORED | {"step": 90}, row | {"hellaswag/items": items}])
    assert {one[0] for one in results(text)} == {"text"} and TASK.dataset[0] not in text
    assert (
        f"{items:,} items, not the complete data set"
        in figures(text)["HellaSwag acc (lm-evaluation-harness), %"]
    )


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "multiblimp_hin", "lambada_openai"])
def test_results_name_part_split_and_revision(name):
    task = all_tasks()[name]
    row = {"step": 100, f"{name}/items": task.size, f"{name}/revision": "c" * 40}
    row |= {f"{name}/{score}": 0.5 for score in task.scores}
    data, split = task.dataset
    expected = [(data, task.config, split, "c" * 40, score) for score in task.scores]
    assert results(make([*UPDATES, row])) == expected


@pytest.mark.parametrize(
    "sources", [None, [{"weight": 1, "dataset_name": "a/b"}, {"weight": 1, "dataset_name": "c/d"}]]
)
def test_loss_claims_no_public_data_set(sources):
    rows = [*UPDATES, VALIDATED, {"step": 100, "test/loss": 3.0}]
    text = make(rows, recipe=RECIPE | {"sources": sources})
    splits = [
        ("text", None, "validation", None, "loss"),
        ("text", None, "validation", None, "bits_per_byte"),
    ]
    assert results(text) == [*splits, ("text", None, "test", None, "loss")]


@pytest.mark.parametrize("name", ["hellaswag", "arc_easy", "lambada_openai"])
def test_evaluation_replaces_the_score_of_training(name):
    task = all_tasks()[name]
    row = {"step": 100, f"{name}/items": task.size, f"{name}/revision": str(task.revision)}
    row |= {f"{name}/{score}": 0.25 for score in task.scores}
    scored = [card_scores.result(task, score, 0.5, str(task.revision)) for score in task.scores]
    text = card_merge.add_results(
        make([*UPDATES, row]), eval_results_to_model_index("a_run", scored)
    )
    found = {one.metric_type: one.metric_value for one in ModelCard(text).data.eval_results}
    assert len(results(text)) == len(task.scores)
    assert found == {score: float(task.format_score(score, 0.5)) for score in task.scores}


def test_base_model_is_the_id_without_revision():
    text = make(recipe=RECIPE | {"init_from": "me/base@step-00000010"})
    assert ModelCard(text).data.base_model == "me/base"
    assert "initialized from me/base@step-00000010 and trained" in text


def test_the_figures_of_a_best_model_are_those_of_its_step_and_the_test_splits():
    best = VALIDATED | {"step": 60, "eval/loss": 2.5}
    card = make([*UPDATES, best, VALIDATED, SCORED, {"step": 100, "test/loss": 2.75}], best_step=60)
    assert "The weights are those of step 60, which had the lowest validation loss." in card
    wanted = {"validation loss, nats per token": "2.5000", "test loss, nats per token": "2.7500"}
    assert figures(card) == LOSSES | wanted
    assert (
        "Results at step 60" in card
        and "HellaSwag" not in card
        and 'revision="step-00000100"' in card
    )


def test_rows_of_later_steps_are_not_used_and_what_was_measured_earlier_says_when():
    later = VALIDATED | {"step": 110, "eval/loss": 2.0}
    assert make([*UPDATES, VALIDATED, later]) == make([*UPDATES, VALIDATED])
    earlier = {name: f"{figure} (at step 90)" for name, figure in LOSSES.items()}
    card = make([*UPDATES, VALIDATED | {"step": 90}])
    assert figures(card) == earlier and ModelCard(card).data.eval_results is None


def test_no_figure_where_there_is_no_row():
    text = make([])
    for absent in ("curves.png", "## Results", "training time", "tokens/s", "kWh", "model-index"):
        assert absent not in text, absent
    assert "| tokens | 100,000 |" in text  # 100 steps of 1,000, by the recipe
    assert "hellaswag" in make().lower() and "hellaswag" not in make([*UPDATES, VALIDATED]).lower()


def test_figures_of_training_are_the_runs():
    text = make()
    assert "| compute | 8.55e+13 FLOP, calculated from 855.0 MFLOP per token" in text
    assert "| training time | 1:00:00 (h:mm:ss), excluding evaluation" in text and "kWh" not in text
    assert "| speed | 55,000 tokens/s (median of 10 logged values) |" in text
    steady = make([row | {"gpu/watts": 500.0} for row in UPDATES], num_processes=4)
    assert "| energy | 2 kWh, GPUs only (mean power" in steady and "x training time x 4)" in steady
    assert "| hardware | NVIDIA A100 |" in text and "| precision | bf16 |" in text
    assert "50,304 rows for the 50,257 tokens" in text and "padding" not in make(
        tokenizer_size=50304
    )


def test_only_ids_of_the_hub_are_data_sets_of_the_metadata():
    mixture = [
        {"weight": 1, "dataset_name": "a/b"},
        {"weight": 1, "data_files": ["x.txt"]},
        {"weight": 1, "dataset_name": "c"},
    ]
    for change, expected in [
        ({}, ["HuggingFaceFW/fineweb-edu"]),
        ({"dataset_name": "python_stdlib"}, None),
        ({"data_files": ["me/text.txt"]}, None),
        ({"data_dir": "me/shards"}, None),
        ({"sources": mixture}, ["a/b", "c"]),
    ]:
        assert ModelCard(make(recipe=RECIPE | change)).data.datasets == expected, change
    assert "the author's own files" in make(recipe=RECIPE | {"sources": mixture})


def test_the_command_can_be_pasted_back():
    words = [
        "python",
        "train.py",
        "--run_name",
        "it's `a` $b\n```\n---",
        "--data_files",
        "*.txt",
        "",
    ]
    text = make(command=words)
    (block,) = re.findall(r"\n(````+)sh\n(.*?)\n\1\n", text, re.DOTALL)
    assert shlex.split(block[1]) == words
    assert ModelCard(text).data.license == "mit" and text.count("\n## Limitations") == 1


def test_no_name_breaks_the_card():
    wanted = [line for line in make().splitlines() if line.startswith("## ")]
    nasty = (
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
    )
    for name in nasty:
        names = {
            "run_name": name,
            "tags": [name],
            "dataset_name": name,
            "license": name,
            "language": [name],
        }
        text = make(
            recipe=RECIPE | names | {"sample_prompts": [name]}, hardware=name, repo_id=f"me/{name}"
        )
        card, lines = ModelCard(text), text.splitlines()
        assert (card.data.tags[-1], card.data.license, card.data.language) == (name, name, [name])
        assert [line for line in lines if line.startswith("## ")] == wanted
        title = next(line for line in lines if line.startswith("# ")).removeprefix("# ")
        assert re.sub(r"\\(.)", r"\1", title) == " ".join(name.split())
        assert not re.search(r"(?<!\\)[`*_\[\]<>#|]", title)
        (hardware,) = [line for line in lines if line.startswith("| hardware |")]
        assert len(re.findall(r"(?<!\\)\|", hardware)) == 3
        body = re.sub(r"^(`{3,}).*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
        body = re.sub(r"<!--.*?-->", "", body)  # what the push wrote, as JSON
        assert "<script>" not in body and "](y)" not in body.replace("\\]", "")


def test_no_name_steers_the_terminal_that_shows_the_card():
    odd = "a\x1b[2J\x9b\u202e http://me:secret@h/x?token=secret"
    names = {"run_name": odd, "dataset_name": odd, "sample_prompts": [odd]}
    text = make(recipe=RECIPE | names, hardware=odd, command=["python", odd])
    assert "\\x1b[2J" in text and not [
        one for one in ("\x1b", "\x9b", "\u202e", "secret") if one in text
    ]


def test_its_lines_load_the_model_as_they_stand(tmp_path, monkeypatch, capsys):
    tokenizer = tokenization.make_characters(["abcdefghij \n"])
    shape = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 64,
        "sequence_length": 16,
        "seed": 1,
    }
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = build(keys.Model(**shape), eos_token_id=tokenizer.eos_token_id)
    (tmp_path / "me").mkdir()
    stock_export.write(
        model, tmp_path / "me" / "a_run", tokenizer
    )  # a folder of this name stands for the Hub
    text = make(recipe=OWN | {"sequence_length": 16, "sample_prompts": ["abc"]})
    (code,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert len(code.splitlines()) == 4 and 'revision="step-00000100"' in code
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("abc")
