"""Commands of the documentation are valid and run. The notebooks print the output on the pages."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [ROOT / name for name in ("accelerate_configs/README.md", "recipes/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


# Files with commands that users copy, and those whose commands are not ours to change: recorded
# ones, and descriptions of older versions.
COMMAND_SUFFIXES = (".cfg", ".ipynb", ".jinja", ".md", ".py", ".sh", ".yaml", ".yml")
COMMAND_FILES = ("Dockerfile", "Makefile")
RECORDED_COMMANDS = ("CHANGELOG.md", "benchmarks/results/", "tests/")


# ---- the commands of a page


def parse_preparation(words: list[str]):
    """Return the recipe of a prepare_data.py command."""
    flags, _ = command_line.read_flags(words, "", prepare_data.EXTRAS)
    recipe = flags.pop("recipe", loading.DEFAULT_RECIPE)
    return loading.load_recipe(Path(recipe), flags)


def read_post_training_config(words: list[str]) -> str:
    """Return the text of the config of a post_train.py command. test_post_train.py parses it."""
    return Path(words[words.index("--config") + 1]).read_text()


# The parsers check the flags. Models and data files need not exist.
PARSERS = {
    "check_setup.py": check_setup.parse,
    "compare_runs.py": compare_runs.parse,
    "eval_hellaswag.py": eval_hellaswag.parse,
    "eval_tasks.py": eval_tasks.parse,
    "export_model.py": export_model.parse,
    "generate.py": generate.parse,
    "post_train.py": read_post_training_config,
    "prepare_data.py": parse_preparation,
    "train.py": command_line.parse_training,
}
PLACEHOLDERS = {
    "$SLURM_ARRAY_TASK_ID": "0",
    "$seed": "1",
    "muon-$seed": "muon",
    "adamw-$seed": "adamw",
    "$rate": "1e-3",
    "rate-$rate": "rate",
    "tinyshakespeare.txt)": "my.txt",
    "$folder/tokenizer": "bpe",
    "R": "recipes/quickstart.yaml",
    "MODEL": "runs/quickstart",
    "runs/mine/recipe.yaml": "recipes/gpt2_124m_fast.yaml",  # both use the schedule wsd
    "runs/NAME/recipe.yaml": "recipes/quickstart.yaml",
    "saved": "saved/data.arrow",  # a folder, which the parser would look for
}


class Command(NamedTuple):
    """A command of a page."""

    script: str
    words: list[str]
    launcher: str  # "python" or "accelerate"


def read_commands(page: Path, *, excluded_section: str = "") -> list[Command]:
    """Return the commands of a page that start one of the scripts.

    Args:
        page: the page.
        excluded_section: heading of a section that is left out.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    if excluded_section:
        text = re.sub(rf"^## {re.escape(excluded_section)}\n.*?^## ", "", text, flags=re.M | re.S)
    commands = []
    for line in re.findall(r"^    (.*(?:python|accelerate launch) .*)$", text, re.MULTILINE):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
        for index, word in enumerate(words):
            if word in PARSERS:
                launcher = "accelerate" if "accelerate" in words[:index] else "python"
                commands.append(Command(word, words[index + 1 :], launcher))
                break
    return commands


parametrize_pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@parametrize_pages
def test_commands_of_a_page_are_valid(page, monkeypatch):
    monkeypatch.chdir(ROOT)

    for command in read_commands(page):
        PARSERS[command.script](command.words)


def launches_without_quiet(text: str) -> list[str]:
    """Return the beginnings of commands in a text that lack --quiet, also across lines."""
    joined = re.sub(r'"\n\s*f?"', "", text)  # adjacent strings of Python
    return re.findall(r"accelerate launch[\s#\\]+(?!--quiet)(?:--\w|[\w/]+\.py).{20}", joined)


def test_launch_commands_end_with_our_message():
    """Without --quiet, accelerate prints a traceback below the message of a failed script."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")

    launches = {}
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        is_checked = path.suffix in COMMAND_SUFFIXES or path.name in COMMAND_FILES
        if is_checked and path.is_file() and not name.startswith(RECORDED_COMMANDS):
            launches[name] = launches_without_quiet(path.read_text())

    assert launches
    assert not any(launches.values()), launches


@pytest.mark.parametrize(
    "text",
    [
        "accelerate launch --config_file a.yaml train.py\n",
        'print("use accelerate launch "\n    "--config_file a.yaml train.py")',
        "# accelerate launch \\\n#   --config_file a.yaml train.py",
        "accelerate launch train.py --recipe recipes/own_text.yaml",
    ],
)
def test_launch_without_quiet_is_found(text):
    assert launches_without_quiet(text)
    assert not launches_without_quiet(text.replace("launch ", "launch --quiet "))


def test_pages_have_commands_of_every_script():
    commands = []
    for page in PAGES:
        commands += read_commands(page)

    assert {command.script for command in commands} == set(PARSERS)
    assert len(commands) > 30


@parametrize_pages
def test_estimates_of_a_page_run(page, monkeypatch):
    """Run the commands of check_setup.py that need neither a GPU nor a network."""
    monkeypatch.chdir(ROOT)

    for command in read_commands(page):
        words = list(command.words)
        if command.script != "check_setup.py" or not {"--card", "--all_cards"} & set(words):
            continue
        assert check_setup.main(words) == 0


@parametrize_pages
def test_dry_runs_of_a_page_print_training_command(page, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    text = page.read_text(encoding="utf-8")

    for line in re.findall(r"^ {4,}(DRY_RUN=1 .*)$", text, re.MULTILINE):
        command = ["bash", "-c", line]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "train.py" in process.stdout


# ---- the commands that need neither a GPU nor a network are run

# Flags that shorten a run to seconds.
SHORT_RUN = (
    "--max_steps 2 --n_layer 1 --n_head 2 --n_embd 32 --sequence_length 16 --tokens_per_step 64"
    " --vocab_size 320 --tokenizer_vocab_size 300 --eval_steps 0 --sample_steps 0 --save_steps 2"
    " --per_device_train_batch_size 2"
)
ADDED_FLAGS = {
    "train.py": SHORT_RUN,
    "eval_hellaswag.py": "--data_files items.jsonl",
    "generate.py": "--max_new_tokens 8",
}
LOCAL_RECIPES = ("recipes/quickstart.yaml", "recipes/quickstart_llama.yaml")
LOCAL_RECIPES += ("recipes/own_text.yaml",)
# Commands with these words are only parsed, although their recipe or model is local.
EXCEPTIONS = {
    "openai-community/": "a model of the Hub",
    "ME/": "a repository on the Hub",
    "--extend_steps": "needs the checkpoint of a finished run, see test_train.py",
    "--eval_tokens": "needs evaluations, which SHORT_RUN switches off",
    "--group": "needs runs with different recipes, see test_compare_runs.py",
    "--verify": "names a folder of the reader, see test_prepare_data.py",
    "~/": "a checkpoint of the reader, see tests/model/test_other_trainers.py",
    "babylm": "reads ten million words",
    "--dtype int8": "takes long, see test_export_model.py",
}


def runs_locally(command: Command) -> bool:
    """Return whether a command needs neither a GPU nor a network."""
    text = " ".join(command.words)
    if command.launcher == "accelerate":
        return False
    if any(exception in text for exception in EXCEPTIONS):
        return False
    if command.script in ("train.py", "prepare_data.py"):
        return any(recipe in command.words for recipe in LOCAL_RECIPES)
    if command.script == "eval_tasks.py":
        return "--task_files" in command.words
    if command.script == "generate.py":
        return "--chat" not in command.words  # a chat model is trained with TRL
    # Without --card, check_setup.py checks this machine. post_train.py needs TRL.
    if command.script == "check_setup.py":
        return "--card" in command.words
    return command.script != "post_train.py"


def write_documented_files() -> None:
    """Write the data files that commands of the pages read into the current folder."""
    half = len(TEXT) // 2
    texts = [TEXT[:half], TEXT[half:]]
    for folder in ("corpus", "books", "custom_texts", "filtered"):
        Path(folder).mkdir()
    for name in ("my.txt", "your_data.txt", "held_out.txt", "books/a.txt", "custom_texts/a.txt"):
        Path(name).write_text(TEXT)
    documents = [" ".join(TEXT.split()[start : start + 25]) for start in range(0, 2500, 25)]
    for name in ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"):
        Path(name).write_text("\n<|endoftext|>\n".join(documents))
    Path("poems.txt").write_text("\n\n".join(documents))
    Path("names.txt").write_text("\n".join(documents))
    pq.write_table(pa.table({"text": texts}), "corpus/a.parquet")
    for name, column in (("corpus.jsonl.gz", "content"), ("filtered/a.jsonl.gz", "text")):
        rows = "".join(json.dumps({column: text}) + "\n" for text in texts)
        Path(name).write_bytes(gzip.compress(rows.encode()))
    context = {"activity_label": "a", "ctx_a": "the cat", "ctx_b": "sat", "ctx": "the cat sat"}
    endings = {"endings": ["on", "the", "mat", "dog"], "label": 1}
    hellaswag_item = json.dumps(context | endings) + "\n"
    Path("items.jsonl").write_text(hellaswag_item)
    Path("ten.jsonl").write_text(hellaswag_item)
    piqa_item = {"goal": "the cat", "sol1": "sat", "sol2": "fell", "label": 0}
    Path("my.jsonl").write_text(json.dumps(piqa_item) + "\n")
    pair = {"sentence_good": "the cat sat", "sentence_bad": "cat the sat", "UID": "order"}
    Path("pairs.jsonl").write_text(json.dumps(pair) + "\n")
    russian_pair = {"sen": "the cat sat", "wrong_sen": "cat the sat"}
    Path("russian.jsonl").write_text(json.dumps(russian_pair) + "\n")


@pytest.fixture
def documented_folder(workspace) -> Path:
    """A current folder with the recipes, the data files of the pages, and the run trained."""
    Path("recipes").symlink_to(ROOT / "recipes")
    write_documented_files()
    flags = ("--recipe", "tiny.yaml", *SHORT_RUN.split(), "--tokenizer", "bpe")
    run_script("train.py", *flags, "--run_name", "trained")
    return workspace


def run_command(command: Command) -> str:
    """Run a command on small data, and return its output."""
    words = [*command.words, *ADDED_FLAGS.get(command.script, "").split()]
    if "--validation_tokens" in words:
        words += ["--validation_tokens", "100"]
    if command.script == "train.py":
        recipe, _, _ = command_line.parse_training(command.words)
        if "--eval_only" not in words:
            shutil.rmtree(f"runs/{recipe.saving.name}", ignore_errors=True)
        if "--data_files" not in words:  # the recipe's text takes half a minute
            words += ["--data_files", "my.txt", "--validation_fraction", "0.1"]
    else:
        copy_trained_run(words)
    # Scores of several checkpoints are drawn as well.
    draws = command.script in ("compare_runs.py", "eval_tasks.py")
    environment = {"PICTURES": "1"} if draws else {}
    result = run_script(command.script, *words, **environment)
    return result.stdout + result.stderr


def copy_trained_run(words: list[str]) -> None:
    """Create the runs that a command names."""
    for word in words:
        run, _, _ = word.partition("/checkpoints/*")
        if run.startswith("runs/") and not Path(run).exists():
            shutil.copytree("runs/trained", run)


@pytest.mark.slow
def test_local_commands_of_readme_run(documented_folder):
    commands = [command for command in read_commands(ROOT / "README.md") if runs_locally(command)]

    output = "".join(run_command(command) for command in commands)

    assert [command.script for command in commands] == [
        "generate.py",
        "train.py",
        "generate.py",
        "export_model.py",
        "check_setup.py",
        "eval_hellaswag.py",
    ]
    assert "1 x rtx4090" in output
    assert "runs/own_text/model/" in output
    assert "acc_token_norm" in output
    assert Path("exports/own_text-chat/model.safetensors").is_file()


@pytest.mark.slow
def test_five_minute_experiment_is_compared(documented_folder):
    outputs = [run_command(command) for command in read_commands(ROOT / "CONTRIBUTING.md")]

    assert "learning_rate" in outputs[-1]
    assert Path("runs/compare.png").is_file()


OTHER_PAGES = [page for page in PAGES if any(map(runs_locally, read_commands(page)))]
OTHER_PAGES = [page for page in OTHER_PAGES if page.name not in ("README.md", "CONTRIBUTING.md")]


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda path: path.stem)
def test_local_commands_of_a_page_run(documented_folder, page):
    # test_data_page.py runs the commands of this section.
    for command in read_commands(page, excluded_section="Which file do you have?"):
        if runs_locally(command):
            run_command(command)


# ---- the notebooks


def test_walkthrough_notebook_is_up_to_date():
    text = walkthrough_notebook.NOTEBOOK.read_text(encoding="utf-8")

    assert text == walkthrough_notebook.notebook()


def replace_values(text: str) -> str:
    """Replace numbers and quoted texts, which differ between machines."""
    without_numbers = re.sub(r"\d[\d,.e-]*", "N", text.replace("'def'", "def"))
    return re.sub(r"'[^']*'", "TEXT", without_numbers)


def printed_text(notebook) -> str:
    """Return the standard output of an executed notebook."""
    text = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stdout":
                text += output["text"]
    return text


@pytest.mark.slow
def test_walkthrough_notebook_prints_lines_of_page():
    import nbformat
    from nbclient import NotebookClient

    page = (ROOT / "docs/walkthrough.md").read_text(encoding="utf-8")
    steps = re.findall(r"```python\n([^`]*?)```\n+((?:    [^\n]*\n)*)", page)
    text = walkthrough_notebook.NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text.replace("updates = 300", "updates = 25"), as_version=4)
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}

    NotebookClient(notebook, timeout=600, resources=resources).execute()

    assert len(steps) == 8
    expected = "".join(output for _, output in steps).replace("    ", "")
    printed = printed_text(notebook)
    assert replace_values(printed) == replace_values(expected)
    assert "bitwise identical: True" in printed
    assert "the same batch again: True" in printed


@pytest.mark.slow
def test_quickstart_notebook_runs_from_a_clone(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / "text.txt").write_text(TEXT)
    flags = (
        "--dataset_name null --data_files text.txt --validation_fraction 0.1"
        " --tokenizer_vocab_size 300 --max_steps 20 --eval_steps 10 --save_steps 10"
        " --sample_steps 0"
    )
    monkeypatch.setenv("FLAGS", flags)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(clone / "notebooks")}}

    NotebookClient(notebook, timeout=600, resources=resources).execute()

    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "image/png" in outputs
    assert "runs/notebook/model/" in outputs
    assert "---- sample 2 of 2" in outputs


def test_commands_of_quickstart_notebook_are_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    notebook = json.loads((ROOT / "notebooks/quickstart.ipynb").read_text())
    lines = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines += cell["source"]
    commands = [line.replace("{FLAGS}", "") for line in lines if line.startswith("!python")]

    scripts = []
    for command in commands:
        _, script, *words = shlex.split(command)
        PARSERS[script](words)
        scripts.append(script)

    assert scripts == ["train.py", "generate.py"]


# ---- the program of docs/cluster.md that follows metrics.jsonl


def read_watch_program() -> str:
    """Return the Python program of docs/cluster.md that prints metrics for a monitor."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [block for block in blocks if "train{{run" in block]
    return program


def test_metrics_rows_are_printed_when_complete(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "train/loss": 2.5, "train/grad_norm": null}\n{"step": 2, "tr')
    program = shlex.quote(read_watch_program())
    command = f"tail -n +1 -F {log} | {shlex.quote(sys.executable)} -c {program} r"
    process = subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

    try:
        first_row = [process.stdout.readline() for _ in range(2)]
        with log.open("a") as file:
            file.write('ain/loss": 2.25}\n')
        second_row = [process.stdout.readline() for _ in range(2)]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    assert first_row == ['train{run="r",name="step"} 1\n', 'train{run="r",name="train/loss"} 2.5\n']
    assert second_row[1] == 'train{run="r",name="train/loss"} 2.25\n'
