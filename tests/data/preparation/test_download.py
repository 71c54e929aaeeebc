"""Test the download of token files from the Hub, and training while they are downloaded."""

import importlib
import json
import os
import re
import shutil
import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from conftest import RECIPE, RECORDED_TRAINING, run_in_fork, run_script
from http_server import DataServer
from run_results import final_state, losses_by_step
from token_files import write_datatrove, write_megatron

import prepare_data
from ursa_minor.base import retry
from ursa_minor.data.preparation import measure
from ursa_minor.data.tokens import manifest as manifests

NUM_TRAIN_FILES = 9
TRAIN_FILE_TOKENS = 1200
ALWAYS = 10**6
REPOSITORY = "hf://datasets/me/tokens"
PREPARE_REPOSITORY = ("prepare_data.py", "--recipe", "tiny.yaml", "--data_dir")
WITHOUT_EVALUATION = ("--eval_steps", "0", "--sample_steps", "0")


def write_llm_c_file(path: Path, ids: np.ndarray) -> None:
    """Write a token file in the format of llm.c."""
    header = np.zeros(256, np.int32)
    header[:3] = [20240520, 1, len(ids)]
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def cut_into_documents(ids: np.ndarray) -> list[list[int]]:
    """Return documents of 30 ids, and an empty one."""
    return [ids[start : start + 30].tolist() for start in range(0, len(ids), 30)] + [[]]


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    """Serve a data set of .bin token files, with files of other formats in subfolders."""
    root = tmp_path_factory.mktemp("served")
    folder = root / "datasets" / "me" / "tokens"
    npy_folder = folder / "npy"
    npy_folder.mkdir(parents=True)
    (folder / "README.md").write_text("ids")
    draw = np.random.default_rng(0)
    for number in range(NUM_TRAIN_FILES):
        ids = draw.integers(0, 20, TRAIN_FILE_TOKENS + number)
        write_llm_c_file(folder / f"fineweb_train_{number:06d}.bin", ids)
        np.save(npy_folder / f"edu_train_{number:06d}.npy", ids.astype(np.uint16))
        documents = cut_into_documents(ids)
        write_datatrove(folder / "datatrove" / "train" / f"{number:05d}_unshuffled.ds", documents)
        write_megatron(folder / "megatron" / f"train_{number}_document.bin", documents)
    ids = draw.integers(0, 20, 700)
    write_llm_c_file(folder / "fineweb_val_000000.bin", ids)
    np.save(npy_folder / "edu_val_000000.npy", ids.astype(np.uint16))
    documents = cut_into_documents(ids)
    write_datatrove(folder / "datatrove" / "val" / "00000_unshuffled.ds", documents)
    write_megatron(folder / "megatron" / "val_0_document.bin", documents)
    nano_gpt_folder = folder / "nano_gpt"
    nano_gpt_folder.mkdir()
    for name in ("train.bin", "val.bin"):
        ids.astype("<u2").tofile(nano_gpt_folder / name)
    with DataServer(root) as server:
        yield server


@pytest.fixture
def server(module_server, prepared_folder, tmp_path, monkeypatch):
    """Return the server, and change to a folder with tiny.yaml and its tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tokenizer,) = (prepared_folder / "data").glob("*/tokenizer")
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    recipe = RECIPE.replace("tokenizer: characters", "tokenizer: tokenizer")
    (tmp_path / "tiny.yaml").write_text(recipe)
    module_server.problems = []
    module_server.log = []
    return module_server


def hub_environment(server: DataServer) -> dict[str, str]:
    """Return the environment of a process that uses the server as its Hub."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "10",
    }


def prepare_in_this_process(server: DataServer, source: str) -> None:
    """Run prepare_data.py without waiting, and write its exit status and waits to a file."""
    os.environ.update(hub_environment(server))
    importlib.reload(huggingface_hub.constants)
    waits = []
    retry.time.sleep = waits.append
    status = prepare_data.main(["--recipe", "tiny.yaml", "--data_dir", source])
    Path("status.json").write_text(json.dumps([status, waits]))


def prepare(server: DataServer, source: str = REPOSITORY) -> tuple[int, list[float]]:
    """Run prepare_data.py. Return its exit status and its waits in seconds."""
    run_in_fork(prepare_in_this_process, server, source)
    status, waits = json.loads(Path("status.json").read_text())
    return status, waits


def prepared_data() -> Path:
    """Return the only folder with prepared data."""
    (folder,) = Path("data").iterdir()
    return folder


def file_names(folder: Path) -> list[str]:
    """Return the names of the files of a folder except lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock"))


def find_train_problems() -> list:
    """Return the problems of the prepared train files."""
    shards = manifests.read_manifest(prepared_data()).splits["train"]
    return list(manifests.find_problems(prepared_data(), shards))


def downloaded_names(server: DataServer) -> set[str]:
    """Return the names of the files that the server has sent."""
    names = set()
    for line in server.log:
        if line.startswith("GET") and "/resolve/" in line:
            names.add(line.rpartition("/")[2])
    return names


def change_last_byte(path: Path) -> None:
    """Change the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


@pytest.mark.parametrize("subfolder", ["npy", pytest.param("datatrove", marks=pytest.mark.slow)])
def test_killed_streaming_run_equals_local_run(server, subfolder):
    environment = hub_environment(server) | {"LEDGER": "k.ledger"}
    flags = ("--recipe", "tiny.yaml", "--shuffle_block_tokens", "1200", *WITHOUT_EVALUATION)
    local_folder = server.folder / "datasets" / "me" / "tokens" / subfolder
    run_script("train.py", *flags, "--data_dir", str(local_folder), "--run_name", "local")
    streaming = (RECORDED_TRAINING, *flags, "--data_dir", f"{REPOSITORY}@main/{subfolder}/")
    streaming += ("--stream_keep", "consumed", "--run_name", "streaming")

    run_script(*streaming, expect=-9, KILL_AT="step:5", **environment)
    assert not manifests.is_complete(prepared_data())
    run_script(*streaming, **environment)

    assert len(losses_by_step("local")) == 12
    assert losses_by_step("streaming") == losses_by_step("local")
    local_weights = final_state("local")["model.safetensors"]
    assert final_state("streaming")["model.safetensors"] == local_weights


@pytest.fixture
def interrupted_download(server):
    """Download until the server fails at the fourth train file."""
    server.problems = [["GET .*/resolve/.*train_000003", "503", ALWAYS]]
    status, _ = prepare(server)
    assert status == 1
    server.problems = []
    server.log = []


def test_failed_download_keeps_finished_files(server, interrupted_download):
    manifest = manifests.read_manifest(prepared_data())

    assert not manifest.complete
    assert len(manifest.splits["train"]) == 3


def test_resumed_download_stays_at_first_commit(server, interrupted_download, monkeypatch):
    first_commit = server.commit
    monkeypatch.setattr(server, "commit", "beef" + "0" * 36)

    status, _ = prepare(server)

    assert status == 0
    for line in server.log:
        if "/resolve/" in line or "/tree/" in line:
            assert first_commit in line
    for name in downloaded_names(server):
        assert not re.search(r"train_00000[012]|val", name)
    manifest = manifests.read_manifest(prepared_data())
    assert manifest.complete
    assert manifest.revision == first_commit
    source_folder = server.folder / "datasets" / "me" / "tokens"
    for shard in manifest.shards:
        content = (prepared_data() / shard.file).read_bytes()
        assert content == (source_folder / shard.file).read_bytes()
    source_names = [path.name for path in source_folder.glob("*.bin")]
    assert file_names(prepared_data()) == sorted([*source_names, "manifest.json"])


def test_temporary_problems_are_retried(server):
    server.problems = [
        ["GET .*/resolve/.*train_000002", "429:7", 2],
        ["GET .*/tree/", "503", 1],
        ["GET .*/resolve/.*train_000005", "empty", 2],
    ]

    status, waits = prepare(server)

    assert status == 0
    assert len(waits) >= 4
    assert max(waits) >= 7
    assert manifests.is_complete(prepared_data())
    assert not find_train_problems()


def test_file_with_another_hash_is_rejected(server, monkeypatch):
    """The server lists the hash of the file, but sends other bytes of the same size."""
    path = server.folder / "datasets/me/tokens/fineweb_train_000001.bin"
    listed_bytes = path.read_bytes()

    def damage_when_sent(request_path, headers):
        path.write_bytes(listed_bytes)
        if "resolve" in request_path:
            change_last_byte(path)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(server, "allowed", damage_when_sent)
        status, waits = prepare(server)
    path.write_bytes(listed_bytes)

    assert status == 1
    assert len(waits) == retry.TRIES - 1
    assert "fineweb_train_000000.bin" in file_names(prepared_data())
    assert path.name not in file_names(prepared_data())
    assert prepare(server) == (0, [])
    assert manifests.is_complete(prepared_data())


def test_missing_and_changed_files_are_downloaded_again(server):
    prepare(server)
    (prepared_data() / "fineweb_train_000001.bin").unlink()
    change_last_byte(prepared_data() / "fineweb_train_000004.bin")
    server.log = []

    status, _ = prepare(server)

    assert status == 0
    assert downloaded_names(server) == {"fineweb_train_000001.bin", "fineweb_train_000004.bin"}
    assert not find_train_problems()


@pytest.mark.parametrize(
    ("subfolder", "num_train_files", "side_endings"),
    [
        ("npy", NUM_TRAIN_FILES, []),
        ("nano_gpt", 1, []),
        ("datatrove", NUM_TRAIN_FILES, [".ds.index", ".ds.metadata"]),
        ("megatron", NUM_TRAIN_FILES, [".idx"]),
    ],
)
def test_each_format_is_downloaded_with_side_files(
    server, subfolder, num_train_files, side_endings
):
    status, _ = prepare(server, f"{REPOSITORY}/{subfolder}")

    assert status == 0
    manifest = manifests.read_manifest(prepared_data())
    assert len(manifest.splits["train"]) == num_train_files
    served_folder = server.folder / "datasets" / "me" / "tokens" / subfolder
    for path in served_folder.rglob("*.*"):
        copied = prepared_data() / path.relative_to(served_folder)
        assert copied.read_bytes() == path.read_bytes()
    for ending in side_endings:
        assert len(list(prepared_data().rglob(f"*{ending}"))) == num_train_files + 1
    assert "are intact (checked: sizes, hashes" in measure.verify(prepared_data(), 64)


def test_damaged_side_files_are_downloaded_again(server):
    source = f"{REPOSITORY}/datatrove"
    prepare(server, source)
    train_folder = prepared_data() / "train"
    index = train_folder / "00002_unshuffled.ds.index"
    index.write_bytes(index.read_bytes()[8:16] + index.read_bytes()[8:])
    (train_folder / "00003_unshuffled.ds.metadata").write_text("damaged")
    (train_folder / "00004_unshuffled.ds.index").unlink()
    (train_folder / "00004_unshuffled.ds.metadata").unlink()

    status, _ = prepare(server, source)

    assert status == 0
    assert index.read_bytes()[:8] == (30).to_bytes(8, "little")
    assert not find_train_problems()


class FileCounter(threading.Thread):
    """Counts the train files on the disk while it is used as a context manager.

    Attributes:
        most: the largest number of files at any time.
    """

    def __init__(self):
        super().__init__()
        self.most = 0
        self.finished = threading.Event()

    def run(self) -> None:
        while not self.finished.wait(0.01):
            self.most = max(self.most, len(list(Path("data").glob("*/*train*.bin"))))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.finished.set()
        self.join()


def test_consumed_files_are_deleted_during_training(server):
    flags = ("--recipe", "tiny.yaml", "--data_dir", REPOSITORY, "--stream_keep", "consumed")
    flags += ("--tokens_per_step", "256", "--per_device_train_batch_size", "16")
    flags += ("--max_steps", "37", "--save_steps", "4", "--save_total_limit", "2")
    flags += ("--shuffle_block_tokens", "1200", "--logging_steps", "37", *WITHOUT_EVALUATION)

    with FileCounter() as counter:
        run_script("train.py", *flags, **hub_environment(server))

    assert max(losses_by_step("tiny")) == 37
    assert len(manifests.read_manifest(prepared_data()).splits["train"]) == NUM_TRAIN_FILES
    assert 0 < counter.most <= 7
    remaining = [name for name in file_names(prepared_data()) if "train" in name]
    assert len(remaining) < NUM_TRAIN_FILES


@pytest.mark.parametrize(
    "source, message",
    [
        ("hf://datasets/me/nowhere", "HTTP status 404"),
        ("hf://datasets/me/tokens/empty", "HTTP status 404"),
        ("hf://datasets/me/tokens/only_train", "has no validation shards"),
    ],
)
def test_missing_repository_or_split_is_rejected(server, source, message):
    token_folder = server.folder / "datasets/me/tokens"
    only_train = token_folder / "only_train"
    only_train.mkdir(exist_ok=True)
    shutil.copy(token_folder / "fineweb_train_000000.bin", only_train)

    result = run_script(*PREPARE_REPOSITORY, source, expect=2, **hub_environment(server))

    assert f"data_dir = {source}" in result.stderr
    assert message in result.stderr
    assert not list(Path().glob("data/*/manifest.json"))


def test_dry_run_prints_number_of_files(server):
    result = run_script(*PREPARE_REPOSITORY, REPOSITORY, "--dry_run", **hub_environment(server))

    assert f"train: {NUM_TRAIN_FILES} files" in result.stdout
