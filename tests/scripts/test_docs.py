"""The pages: their commands are understood, the walkthrough and the notebook run, and print what they say."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, TEXT, run_script

import check_setup
import compare_runs
import eval_hellaswag
import eval_tasks
import export_model
import generate
import prepare_data
from scripts import walkthrough_notebook
from ursa_minor.recipe import command_line, loading


def prepare_data_recipe(words):
    flags, _ = command_line.read_flags(words, "", prepare_data.EXTRAS)
    return loading.load_recipe(Path(flags.pop("recipe", loading.DEFAULT_RECIPE)), flags)


PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", ".github/CONTRIBUTING.md")]
PAGES += [ROOT / name for name in ("accelerate_configs/README.md", "recipes/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# What a script asks of its flags; a recipe, a model or a file need not be there.
PARSERS = {
    "check_setup.py": check_setup.parse,
    "compare_runs.py": compare_runs.parse,
    "eval_hellaswag.py": eval_hellaswag.parse,
    "eval_tasks.py": eval_tasks.parse,
    "export_model.py": export_model.parse,
    "generate.py": generate.parse,
    "post_train.py": lambda words: Path(
        words[words.index("--config") + 1]
    ).read_text(),  # its keys: test_post_train.py
    "prepare_data.py": prepare_data_recipe,
    "train.py": command_line.parse_training,
}
STANDS_FOR = {
    "$SLURM_ARRAY_TASK_ID": "0",
    "$seed": "1",
    "muon-$seed": "muon",
    "adamw-$seed": "adamw",
}
STANDS_FOR |= {"R": "recipes/quickstart.yaml", "MODEL": "runs/quickstart"}
STANDS_FOR |= {"runs/mine/recipe.yaml": "recipes/gpt2_124m_fast.yaml"}  # both use wsd
STANDS_FOR |= {"runs/NAME/recipe.yaml": "recipes/quickstart.yaml"}


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the scripts that a page's commands start, with their flags."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in re.findall(r"^    (.*(?:python|accelerate launch) .*)$", text, re.MULTILINE):
        words = [STANDS_FOR.get(word, word) for word in shlex.split(line, comments=True)]
        script = next((i for i, word in enumerate(words) if word in PARSERS), None)
        if script is not None:
            found.append((words[script], words[script + 1 :]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_is_understood(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for script, words in commands(page):
        PARSERS[script](words)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_estimates_of_a_page_run(page, monkeypatch):
    """Run the commands of check_setup.py that need neither a GPU nor a network."""
    monkeypatch.chdir(ROOT)
    for script, words in commands(page):
        if script != "check_setup.py" or not {"--card", "--all_cards"} & {*words}:
            continue
        if "--reader_tokens_per_second" not in words:  # measuring it takes a second
            words += ["--reader_tokens_per_second", "1e6"]
        assert check_setup.main(words) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_dry_runs_of_a_page_print_a_training_command(page, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"^ {4,}(DRY_RUN=1 .*)$", text, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert "train.py" in done.stdout


# What makes a run of the README one of seconds.
SMALL = "--max_steps 2 --n_layer 1 --n_head 2 --n_embd 32 --sequence_length 16 --tokens_per_step 64 --vocab_size 320"
SMALL += " --tokenizer_vocab_size 300 --eval_steps 0 --sample_steps 0 --save_steps 0"
SMALL += " --per_device_train_batch_size 2"


def test_readmes_commands_run_where_they_need_no_network_and_no_card(workspace, monkeypatch):
    run_script(
        "train.py",
        "--recipe",
        "tiny.yaml",
        *shlex.split(SMALL),
        "--run_name",
        "quickstart",
        "--tokenizer",
        "bpe",
    )
    for name in ("gpt2_124m", "adamw", "muon"):
        shutil.copytree("runs/quickstart", f"runs/{name}")
    Path("recipes").symlink_to(ROOT / "recipes")
    Path("my.txt").write_text(TEXT)
    Path("corpus").mkdir()
    pq.write_table(pa.table({"text": [TEXT[:3000], TEXT[3000:]]}), "corpus/a.parquet")
    row = {
        "activity_label": "a",
        "ctx_a": "the cat",
        "ctx_b": "sat",
        "ctx": "the cat sat",
        "label": 1,
    }
    Path("items.jsonl").write_text(
        json.dumps(row | {"endings": ["on", "the", "mat", "dog"]}) + "\n"
    )
    more = {
        "train.py": SMALL,
        "eval_hellaswag.py": "--data_files items.jsonl",
        "generate.py": "--max_new_tokens 8",
    }
    ran = []
    for script, words in commands(ROOT / "README.md"):
        needs_hub = (
            "recipes/gpt2_124m.yaml" in words
            or "recipes/finetune_shakespeare.yaml" in words
            or not words
        )
        if script == "generate.py" and "--chat" in words:
            continue  # what TRL has trained
        if not {"--estimate", "--plan"} & {*words} and (
            needs_hub or "openai-community/gpt2" in words
        ):
            continue
        pictures = {"PICTURES": "1"} if script == "compare_runs.py" else {}
        added = shlex.split(more.get(script, ""))
        if "--validation_tokens" in words:
            added += ["--validation_tokens", "100"]
        done = run_script(script, *words, *added, **pictures)
        ran.append((script, done.stdout + done.stderr))
    wanted = (
        "train export_model check_setup generate train eval_hellaswag compare_runs export_model"
    )
    assert [script for script, _ in ran] == [f"{name}.py" for name in wanted.split()]
    printed = "".join(text for _, text in ran)
    assert "1 x a6000" in printed and "runs/own_text/model/" in printed
    assert "acc_token_norm" in printed and Path("exports/gpt2/model.safetensors").is_file()


@pytest.mark.slow
def test_the_five_minute_experiment_runs_and_is_compared(workspace):
    Path("recipes").symlink_to(ROOT / "recipes")
    for script, words in commands(ROOT / "AGENTS.md"):
        more = shlex.split(SMALL) if script == "train.py" else []
        done = run_script(script, *words, *more, PICTURES="1")
    assert "learning_rate" in done.stdout and Path("runs/compare.png").is_file()


def test_pages_have_commands_of_every_script():
    found = {script for page in PAGES for script, _ in commands(page)}
    assert found == set(PARSERS) and sum(len(commands(page)) for page in PAGES) > 30


def test_the_walkthroughs_notebook_is_what_make_presets_writes_of_the_page():
    assert (
        walkthrough_notebook.NOTEBOOK.read_text(encoding="utf-8") == walkthrough_notebook.notebook()
    )


@pytest.mark.slow
def test_the_walkthroughs_notebook_runs_and_prints_lines_like_those_on_the_page():
    import nbformat
    from nbclient import NotebookClient

    page = (ROOT / "docs/walkthrough.md").read_text(encoding="utf-8")
    steps = re.findall(r"```python\n([^`]*?)```\n+((?:    [^\n]*\n)*)", page)
    assert len(steps) == 8
    text = walkthrough_notebook.NOTEBOOK.read_text(encoding="utf-8").replace(
        "updates = 300", "updates = 25"
    )
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(ROOT / "notebooks")}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")

    def without_figures(text):
        return re.sub(r"'[^']*'", "TEXT", re.sub(r"\d[\d,.e-]*", "N", text.replace("'def'", "def")))

    assert without_figures(printed) == without_figures(
        "".join(shown for _, shown in steps).replace("    ", "")
    )
    assert "bitwise identical: True" in printed and "the same batch again: True" in printed


@pytest.mark.slow
def test_the_notebook_runs_from_a_clone(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    (tmp_path / "clone" / "text.txt").write_text(TEXT)
    flags = "--dataset_name null --data_files text.txt --validation_fraction 0.1 --tokenizer_vocab_size 300"
    monkeypatch.setenv(
        "FLAGS", f"{flags} --max_steps 20 --eval_steps 10 --save_steps 10 --sample_steps 0"
    )
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path / "clone" / "notebooks")}}
    NotebookClient(notebook, timeout=600, resources=where).execute()
    printed = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert (
        "image/png" in printed
        and "runs/notebook/model/" in printed
        and "---- sample 2 of 2" in printed
    )


def test_the_notebooks_commands_are_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    cells = json.loads((ROOT / "notebooks/quickstart.ipynb").read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    found = [
        shlex.split(line.replace("{FLAGS}", "")) for line in lines if line.startswith("!python")
    ]
    assert [words[1] for words in found] == ["train.py", "generate.py"]
    for words in found:
        PARSERS[words[1]](words[2:])


def test_the_lines_that_tail_metrics_for_a_monitor_print_each_row_once_it_is_whole(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL
    )
    (code,) = (block for block in blocks if "train{{run" in block)
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "train/loss": 2.5, "train/grad_norm": null}\n{"step": 2, "tr')
    command = f"tail -n +1 -F {log} | {shlex.quote(sys.executable)} -c {shlex.quote(code)} r"
    watch = subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert watch.stdout is not None
    try:
        first = [watch.stdout.readline() for _ in range(2)]
        assert first == ['train{run="r",name="step"} 1\n', 'train{run="r",name="train/loss"} 2.5\n']
        with log.open("a") as file:
            file.write('ain/loss": 2.25}\n')
        assert [watch.stdout.readline() for _ in range(2)][
            1
        ] == 'train{run="r",name="train/loss"} 2.25\n'
    finally:
        os.killpg(watch.pid, signal.SIGKILL)
        watch.communicate()
