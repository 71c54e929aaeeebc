"""The model card of an export states what is known about the model, and loads it."""

import re
import time
import warnings
from pathlib import Path

import pytest
from fake_hub import InjectedError
from huggingface_hub import ModelCard, constants
from push_helpers import REPO_ID
from small_models import build_small_model

from ursa_minor.base import files, run_files
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.export import stock
from ursa_minor.hub import export_card, origin
from ursa_minor.recipe import keys, loading

pytest_plugins = ["push_helpers"]
ROOT = Path(__file__).parents[2]
RECIPE = {
    "run_name": "mine",
    "data_files": ["/home/me/secret/text.txt"],
    "dataset_name": None,
    "dataset_config_name": None,
    "tokenizer": "characters",
    "sequence_length": 16,
    "tokens_per_step": 128,
    "max_steps": 200,
    "license": "mit",
    "language": ["en"],
    "sample_prompts": ["abc"],
    "sample_tokens": 5,
}
ROWS = [
    {"step": 50, "eval/loss": 3.0, "eval/bits_per_byte": 1.5},
    {"step": 100, "eval/loss": 2.0, "eval/bits_per_byte": 1.25},
    {"step": 100, "baseline/bigram_bits_per_byte": 1.75, "baseline/gzip": 2.5},
]
TOKENIZER = tokenization.make_characters(["abcdefghijklmnopqrstuvwxyz \n`#|_"])
MODEL = build_small_model()


def make_run(rows=ROWS, *, step: int = 100, last_step: int | None = None, **changes):
    """Return a run of RECIPE with these changes."""
    base = loading.load_recipe(ROOT / "recipes/gpt2_124m.yaml")
    recipe = keys.replace(base, **RECIPE | changes)
    prompts = recipe.evaluation.sample_prompts
    return origin.TrainingRun(
        recipe=recipe,
        step=step,
        last_step=last_step or step,
        rows=list(rows),
        prompt=prompts[0] if prompts else None,
    )


def make_card(run=None, *, model_origin: origin.Origin | None = None, **changes) -> str:
    """Return the card of an export of this run or origin."""
    values = {
        "name": "mine",
        "origin": model_origin or origin.Origin(name="mine", run=run or make_run()),
        "dtype": "fp32",
        "prune": 0.0,
        "gguf": None,
        "description": "",
        "has_chat_template": False,
        "can_chat": False,
        "loss_before": None,
        "loss_after": None,
        "measured_on": (),
    }
    return export_card.export_card(export_card.Export(**values | changes), MODEL, TOKENIZER)


def tables(text: str) -> dict[str, str]:
    """Return the rows of the tables of a card."""
    return dict(re.findall(r"^\| (\w.*) \| (.*) \|$", text, re.MULTILINE))


def section(text: str, heading: str) -> str:
    """Return the text below a heading of the second level, or an empty string."""
    _, _, rest = text.partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


# ---- a run


def test_card_states_data_steps_and_losses():
    rows = tables(make_card())

    assert rows["data"] == "the author's own files (text.txt)"
    assert rows["steps"] == "100 of 200"
    assert rows["tokens"] == "12,800"
    losses = [name for name in rows if "bits per byte" in name]
    assert [rows[name] for name in losses] == ["1.2500", "1.7500", "2.5000"]
    assert "bigram" in losses[1]
    assert "gzip" in losses[2]


def test_metadata_of_export_loads_without_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = ModelCard(make_card(gguf="f16", name="no: 'x'")).data

    assert data.license == "mit"
    assert data.language == ["en"]
    assert data.tags == ["ursa-minor", "gguf"]
    assert data.model_name == "no: 'x'"
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"loss": 2.0, "bits_per_byte": 1.25}


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"prune": 0.3}, {"dtype": "bf16"}], ids=str)
def test_changed_weights_have_no_results_in_metadata(changes):
    text = make_card(loss_before=2.0, loss_after=2.25, **changes)

    assert ModelCard(text).data.eval_results is None
    assert "was 2.0000 nats per token before the export, and 2.2500 after" in text
    assert "were measured before the export" in section(text, "Results")


def test_sample_continues_prompt_of_run():
    text = make_card()

    (sample,) = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    assert sample.startswith("abc")
    assert len(sample) > len("abc")
    assert 'generate("abc", ' in text


@pytest.mark.parametrize("model_origin", [origin.Origin(name="x"), None], ids=["model", "run"])
def test_prompt_without_run_is_generated(model_origin):
    run = make_run(sample_prompts=[])

    text = make_card(run, model_origin=model_origin)

    (prompt,) = re.findall(r'generate\("(.*?)", ', text)
    assert prompt != "The"
    assert section(text, "Sample").startswith(f"\n```text\n{prompt}")


def test_unencodable_prompt_leaves_out_sample():
    text = make_card(make_run(sample_prompts=["é"]))

    assert "## Sample" not in text
    assert 'generate("é", ' in text


def test_card_of_earlier_step_ignores_later_losses():
    text = make_card(make_run(step=50))

    rows = tables(text)
    assert rows["steps"] == "50 of 200"
    assert rows["tokens"] == "6,400"
    assert rows["validation, bits per byte"] == "1.5000"


def test_best_weights_are_named():
    text = make_card(make_run(step=50, last_step=100))

    assert tables(text)["steps"] == "50 of 200, at the lowest validation loss"
    assert tables(text)["validation, bits per byte"] == "1.5000"


def test_run_without_validation_has_no_results():
    text = make_card(make_run(rows=[{"step": 100, "train/loss": 2.0}]))

    assert "## Results" not in text
    assert tables(text)["steps"] == "100 of 200"


# ---- names and texts


SOURCES = [
    {"weight": 3, "data_files": ["/home/me/secret/a.txt", "https://u:pw@x.org/b.txt?token=t3xt"]},
    {"weight": 1, "dataset_name": "a/b"},
]


def test_data_is_described_without_paths_and_credentials():
    text = make_card(make_run(data_files=None, sources=SOURCES))

    data = tables(text)["data"]
    assert "a.txt" in data
    assert "https://redacted@x.org/b.txt" in data
    assert "75%; [a/b](https://huggingface.co/datasets/a/b), 25%" in data
    for private in ("home", "secret", "pw", "t3xt"):
        assert private not in text, private


def test_many_files_are_counted():
    run = make_run(data_files=[f"{number}.txt" for number in range(8)])

    assert tables(make_card(run))["data"].endswith("3.txt, 4.txt and 3 more)")


@pytest.mark.parametrize("name", ["```", "# a", "a|b", "---", "`a` _b_\n## c\n```\n"])
def test_special_texts_do_not_break_export_card(name):
    run = make_run(sample_prompts=[name.replace("-", "_")], license=name, language=[name])

    text = make_card(run, name=name, gguf="f16")

    card = ModelCard(text)
    assert card.data.license == name
    body = re.sub(r"^(`{3,}).*?^\1$", "", card.text, flags=re.DOTALL | re.MULTILINE)
    headings = [line for line in body.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Sample",
        "## Usage",
        "## Training",
        "## Results",
        "## Format",
        "## Limitations",
    ]


def test_description_is_markdown_without_secrets():
    text = make_card(description="See *this*: https://me:pw@x.org/a_b \n")

    assert "\n\nSee *this*: https://redacted@x.org/a_b\n\n" in text


# ---- kinds of exports


def test_int8_card_installs_bitsandbytes():
    assert "accelerate bitsandbytes\n" in make_card(dtype="int8")
    assert "bitsandbytes" not in make_card()


def test_gguf_card_has_llama_cpp_commands():
    usage = section(make_card(gguf="q8_0", name="My Model"), "Usage")

    assert "llama-cli -m 'My Model.gguf' -p abc\n" in usage
    assert "ollama create my-model -f Modelfile\nollama run my-model abc\n" in usage
    assert "from transformers import pipeline" in usage


def test_code_of_export_card_loads_model(tmp_path, monkeypatch, capsys):
    stock.write(MODEL, tmp_path / "mine", TOKENIZER)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)\n```", make_card(), re.DOTALL)

    exec(code, {})

    assert capsys.readouterr().out.startswith("abc")


def test_card_of_model_without_run_keeps_metadata():
    known = {
        "license": "apache-2.0",
        "language": "de",
        "datasets": ["a/b"],
        "tags": ["x"],
        "base_model": 3,
    }

    text = make_card(model_origin=origin.Origin(name="downloaded", metadata=known))

    data = ModelCard(text).data
    assert (data.license, data.language, data.datasets) == ("apache-2.0", "de", ["a/b"])
    assert data.base_model is None
    assert data.tags is None
    assert "exported from downloaded with Ursa Minor" in text
    assert "## Training" not in text


def test_card_of_hub_model_links_it():
    text = make_card(model_origin=origin.Origin(name="me/base@step-00000010"))

    assert ModelCard(text).data.base_model == "me/base"
    assert "](https://huggingface.co/me/base)" in text


# ---- origin


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """The folder of a finished run with the weights of step 50 in model/."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    stock.write(MODEL, folder / "model", TOKENIZER)
    recipe = keys.replace(make_run().recipe, sample_prompts=[])
    (folder / "recipe.yaml").write_text(keys.as_yaml(recipe))
    (folder / "metrics.jsonl").write_text("".join(files.to_json(row) + "\n" for row in ROWS))
    run_files.Finish(step=100, weights_step=50).write(folder)
    heading = run_files.sample_heading(0, "it's\n")
    (folder / "samples.txt").write_text(f"note\n\n{heading}\nit's\nx\n\n")
    return folder


@pytest.mark.parametrize("source", ["runs/mine", "runs/mine/model"])
def test_origin_of_run_has_step_of_weights(run_dir, source):
    found = origin.find(source, None, [])

    assert found.name == "mine"
    assert (found.run.step, found.run.last_step) == (50, 100)
    assert found.run.prompt == "it's\n"
    assert not found.is_base


def test_checkpoint_has_its_own_step(run_dir):
    checkpoint = run_dir / "checkpoints" / "step-00000030"
    checkpoint.mkdir(parents=True)

    found = origin.find(str(checkpoint), None, [])

    assert (found.name, found.run.step, found.run.last_step) == ("mine", 30, 30)
    assert origin.base_model_value(str(checkpoint)) == "mine@step-00000030"


def test_base_run_is_found_by_name(run_dir):
    value = origin.base_model_value("runs/mine/model")

    found = origin.find("runs/tuned", value, TOKENIZER.get_vocab())

    assert value == "mine@step-00000050"
    assert found.name == "mine"
    assert found.is_base
    assert (found.run.step, found.run.last_step) == (50, 100)


def test_run_with_other_tokens_is_not_base(run_dir):
    found = origin.find("runs/tuned", "mine@step-00000050", ["a"])

    assert found.name == "mine"
    assert found.run is None


@pytest.mark.parametrize("prompt", ["not a string", "3", "'a"])
def test_edited_samples_have_no_prompt(run_dir, prompt):
    (run_dir / "samples.txt").write_text(f"==== step 0 · prompt {prompt} ====\n")

    assert origin.find("runs/mine", None, []).run.prompt is None


def test_unreadable_recipe_is_reported(run_dir, caplog):
    (run_dir / "recipe.yaml").write_text("unknown_key: 1\n")

    assert origin.find("runs/mine", None, []).run is None
    assert "The model card does not describe the training" in caplog.text


def test_public_name_has_no_path(run_dir):
    Path("runs/tuned/model").mkdir(parents=True)

    assert origin.public_name("runs/tuned/model") == "tuned"
    assert origin.public_name(str(run_dir.resolve())) == "mine"
    assert origin.public_name("me/model@main") == "me/model@main"
    assert origin.base_model_value("me/model@main") == "me/model@main"


@pytest.mark.parametrize(("revision", "license"), [("", "mit"), ("@step-00000001", "bsd")])
def test_metadata_of_hub_model_are_read(server, tmp_path, monkeypatch, revision, license):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = server.make(REPO_ID)
    old_commit = repository.commit("old", {"README.md": b"---\nlicense: bsd\n---\n"})
    repository.tags["step-00000001"] = old_commit
    repository.commit("new", {"README.md": b"---\nlicense: mit\n---\n"})

    assert origin.find(REPO_ID + revision, None, []).metadata == {"license": license}


@pytest.mark.parametrize("text", [b"---\nlicense: [\n---\n", b"---\n", b"\xff", None])
def test_damaged_card_of_source_is_ignored(tmp_path, text):
    if text is not None:
        (tmp_path / "README.md").write_bytes(text)

    assert origin.find(str(tmp_path), None, []).metadata == {}


# ---- validation


def test_valid_card_has_no_problem(server):
    assert export_card.find_problem(make_card()) is None
    assert server.count("POST /api/validate-yaml") == 1


def test_rejected_metadata_are_reported(server):
    server.problems = [InjectedError("validate", status=400, message='"license" must be one of')]

    problem = export_card.find_problem(make_card())

    assert "The Hub rejects" in problem
    assert "license" in problem


@pytest.mark.parametrize("kind", ["drop", "hang", "status"])
def test_card_is_not_validated_without_hub(server, monkeypatch, kind):
    monkeypatch.setattr(export_card, "VALIDATION_SECONDS", 0.3)
    server.problems = [InjectedError("validate", kind=kind)]
    start = time.monotonic()

    problem = export_card.find_problem(make_card())

    assert "were not validated" in problem
    assert "\n" not in problem
    assert time.monotonic() - start < 5


def test_silent_name_lookup_ends(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(export_card, "VALIDATION_SECONDS", 0.1)
    monkeypatch.setattr(export_card, "_validate", lambda text: time.sleep(1))

    assert "did not answer in 0.1 seconds" in export_card.find_problem("")


def test_offline_card_is_not_validated():
    assert "HF_HUB_OFFLINE" in export_card.find_problem(make_card())


def test_missing_license_and_language_are_named():
    assert export_card.missing_metadata(make_card()) == []
    run = make_run(license="unknown", language=[])
    assert export_card.missing_metadata(make_card(run)) == ["license", "language"]
