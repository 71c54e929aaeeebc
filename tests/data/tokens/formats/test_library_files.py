"""Files that datatrove and megatron-core write are read with the same ids.

URSA_MINOR_FORMATS_PYTHON is a Python with both libraries in a separate environment:

    python -m venv formats
    formats/bin/pip install 'datatrove==0.10.*' orjson regex tokenizers torch==2.13.0
    formats/bin/pip install --no-deps 'megatron-core==0.16.*'
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import RECIPE, ROOT, TEXT, run_script
from run_results import losses_by_step

from ursa_minor.data.tokens import documents, shards
from ursa_minor.data.tokens import manifest as manifests

PYTHON = os.environ.get("URSA_MINOR_FORMATS_PYTHON")
WRITER = Path(__file__).with_name("write_with_library.py")
SEPARATOR = 7
NUM_DOCUMENTS = 400
LARGEST_ID = {2: 2**16, 4: 150_000}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="URSA_MINOR_FORMATS_PYTHON is not set to a Python with datatrove and megatron-core",
    ),
]


def make_documents(id_bytes: int) -> list[list[int]]:
    """Return documents of different lengths, two of which are empty."""
    draw = np.random.default_rng(id_bytes)
    lengths = draw.integers(1, 200, NUM_DOCUMENTS)
    lengths[[0, 123]] = 0
    return [draw.integers(10, LARGEST_ID[id_bytes], length).tolist() for length in lengths]


def read_train_split(folder: Path) -> list[int]:
    """Return the ids of a folder as a run reads them."""
    ids = []
    for path in sorted((folder / "train").iterdir()):
        if shards.is_token_file(path):
            file_ids, _ = shards.open_ids(path)
            ids += documents.with_separators(path, file_ids, SEPARATOR)[:].tolist()
    return ids


@pytest.mark.parametrize("num_files", [1, 2, 17])
@pytest.mark.parametrize("id_bytes", [2, 4])
@pytest.mark.parametrize("library", ["datatrove", "megatron"])
def test_ids_of_library_equal_ours(tmp_path, library, id_bytes, num_files):
    texts = make_documents(id_bytes)
    per_file = -(-len(texts) // num_files)
    files = [texts[start : start + per_file] for start in range(0, len(texts), per_file)]
    expected = []
    for document in texts:
        if document:
            expected += [SEPARATOR, *document]

    subprocess.run(
        [PYTHON, WRITER, library, str(id_bytes), tmp_path],
        input=json.dumps(files),
        text=True,
        check=True,
        capture_output=True,
    )
    shutil.copytree(tmp_path / "train", tmp_path / "val")

    assert read_train_split(tmp_path) == expected
    train = manifests.describe_folder(tmp_path).splits["train"]
    assert len(train) == num_files
    assert sum(shard.tokens for shard in train) == sum(map(len, texts))


def python_block(page: str, word: str) -> str:
    """Return the block of Python on a page that contains a word."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [
        code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if word in code
    ]
    return block


@pytest.fixture
def raw_text(tmp_path, monkeypatch) -> Path:
    """Write the folders of JSON lines of docs/data.md, and change to their parent."""
    monkeypatch.chdir(tmp_path)
    sentences = [TEXT[start : start + 150] for start in range(0, 9000, 150)]
    rows = {"train/0": sentences[:25], "train/1": sentences[25:50], "val/0": sentences[50:]}
    for name, texts in rows.items():
        path = tmp_path / "raw" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def test_documented_commands_train_like_our_own_shards(raw_text):
    """Two local tasks of datatrove tokenize the text with our tokenizer, in the same order."""
    text_flags = ("--data_files", "raw/train/0.jsonl", "raw/train/1.jsonl")
    text_flags += ("--validation_files", "raw/val/0.jsonl")
    Path("tiny.yaml").write_text(RECIPE.replace("validation_fraction: 0.1\n", ""))
    run_script("prepare_data.py", "--recipe", "tiny.yaml", *text_flags)
    (tokenizer,) = Path("data").glob("*/tokenizer")
    shutil.copytree(tokenizer, "tokenizer")
    Path("tokenize_text.py").write_text(python_block("data.md", "DocumentTokenizer"))
    run_script("train.py", "--recipe", "tiny.yaml", *text_flags, "--run_name", "ours")

    subprocess.run([PYTHON, "tokenize_text.py"], check=True, capture_output=True)
    result = run_script(
        *("train.py", "--recipe", "tiny.yaml", "--data_dir", "tokens"),
        *("--tokenizer", "tokenizer", "--run_name", "datatrove"),
    )

    assert "50 train documents" in result.stdout + result.stderr
    assert len(losses_by_step("ours")) == 12
    assert losses_by_step("datatrove") == losses_by_step("ours")
    verified = run_script("prepare_data.py", "--verify", "tokens", "--recipe", "tiny.yaml")
    assert "the index of 60 documents" in verified.stdout


def test_slurm_example_has_arguments_of_datatrove():
    """The cluster page replaces the executor. Slurm itself is not needed to create it."""
    block = python_block("cluster.md", "SlurmPipelineExecutor").replace(".run()", "")

    subprocess.run([PYTHON, "-c", block], check=True, capture_output=True)
