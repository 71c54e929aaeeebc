"""Token files of the Hub: fetched whole or not at all, trained on as a folder that is here, few on the disk if asked."""

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
from conftest import RECIPE, ROOT, run_in_fork, run_script
from http_server import DataServer
from run_results import final_state, losses_by_step

import prepare_data
from ursa_minor.base import retry
from ursa_minor.data.tokens import manifest as manifests

TOKENS, FILES = 1200, 9  # of a train file; train files
REPOSITORY = "hf://datasets/me/tokens"


def write_bin(path: Path, ids: np.ndarray) -> None:
    """As llm.c does."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


@pytest.fixture(scope="module")
def served(prepared_folder, tmp_path_factory):
    """A server with a data set of token files, .bin and, in a folder, .npy; tiny.yaml with the tokenizer of the text."""
    folder, draw = tmp_path_factory.mktemp("served"), np.random.default_rng(0)
    files = folder / "datasets" / "me" / "tokens"
    (files / "npy").mkdir(parents=True)
    (files / "README.md").write_text("ids")
    for number in range(FILES):
        ids = draw.integers(0, 20, TOKENS + number)
        write_bin(files / f"fineweb_train_{number:06d}.bin", ids)
        np.save(files / "npy" / f"edu_train_{number:06d}.npy", ids.astype(np.uint16))
    write_bin(files / "fineweb_val_000000.bin", draw.integers(0, 20, 700))
    np.save(files / "npy" / "edu_val_000000.npy", draw.integers(0, 20, 700).astype(np.uint16))
    with DataServer(folder) as server:
        yield server


@pytest.fixture
def place(served, prepared_folder, tmp_path, monkeypatch):
    """A folder of one's own with tiny.yaml, which reads what the server has, and the tokenizer."""
    monkeypatch.chdir(tmp_path)
    (own,) = (prepared_folder / "data").glob("*/tokenizer")
    shutil.copytree(own, tmp_path / "tokenizer")
    (tmp_path / "tiny.yaml").write_text(
        RECIPE.replace("tokenizer: characters", "tokenizer: tokenizer")
    )
    served.problems, served.log = [], []
    return tmp_path


def hub(server) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "10",
    }


def reached(server, folder: Path, flags: tuple[str, ...]) -> None:
    """Run prepare_data.py in this process, whose waits are noted only; write its exit status, or what it raised."""
    os.environ.update(hub(server))
    importlib.reload(huggingface_hub.constants)
    waits = []
    retry.time.sleep = waits.append
    status = prepare_data.main(["--recipe", "tiny.yaml", *flags])
    (folder / "status.json").write_text(json.dumps([status, waits]))


def prepare(server, *flags: str, source: str = REPOSITORY) -> tuple[int, list[float]]:
    run_in_fork(reached, server, Path.cwd(), ("--data_dir", source, *flags))
    return tuple(json.loads(Path("status.json").read_text()))


def fetched() -> Path:
    (folder,) = Path("data").iterdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock"))


def test_a_run_that_is_killed_while_files_are_fetched_equals_one_on_the_same_files_in_a_folder(
    served, place
):
    here, source = served.folder / "datasets" / "me" / "tokens" / "npy", f"{REPOSITORY}@main/npy/"
    words = (
        "--recipe",
        "tiny.yaml",
        "--shuffle_block_tokens",
        "1200",
        "--eval_steps",
        "0",
        "--sample_steps",
        "0",
    )
    run_script("train.py", *words, "--data_dir", str(here), "--run_name", "here")
    away = (*words, "--data_dir", source, "--stream_keep", "consumed", "--run_name", "away")
    child = str(ROOT / "tests" / "recorded_training.py")
    run_script(child, *away, expect=-9, LEDGER="k.ledger", KILL_AT="step:5", **hub(served))
    assert not manifests.is_complete(fetched())
    run_script(child, *away, LEDGER="k.ledger", **hub(served))
    assert losses_by_step("here") == losses_by_step("away") and len(losses_by_step("here")) == 12
    assert final_state("here")["model.safetensors"] == final_state("away")["model.safetensors"]


def test_used_up_tries_keep_what_is_there_and_the_same_command_goes_on_at_the_commit_of_the_first_contact(
    served, place
):
    served.problems = [["GET .*/resolve/.*train_000003", "503", 10**6]]
    status, _ = prepare(served)
    manifest, there = (
        manifests.read_manifest(fetched()),
        served.folder / "datasets" / "me" / "tokens",
    )
    assert status == 1 and not manifest.complete and len(manifest.splits["train"]) == 3
    before, served.commit = served.commit, "beef" + "0" * 36
    try:
        served.problems, served.log = [], []
        assert prepare(served)[0] == 0
    finally:
        served.commit = before
    assert all(before in line for line in served.log if "/resolve/" in line or "/tree/" in line)
    gets = [line for line in served.log if line.startswith("GET") and "/resolve/" in line]
    assert not [line for line in gets if re.search("train_00000[012]|val", line)]
    manifest = manifests.read_manifest(fetched())
    assert manifest.complete and manifest.revision == before
    for shard in manifest.shards:
        assert (there / shard.file).read_bytes() == (fetched() / shard.file).read_bytes()
    assert names(fetched()) == sorted(
        [*(path.name for path in there.glob("*.bin")), "manifest.json"]
    )


def test_a_fault_on_the_way_is_tried_again_and_each_file_comes_whole(served, place):
    served.problems = [["GET .*/resolve/.*train_000002", "429:7", 2], ["GET .*/tree/", "503", 1]]
    served.problems += [["GET .*/resolve/.*train_000005", "empty", 2]]
    status, waits = prepare(served)
    assert status == 0 and len(waits) >= 4 and max(waits) >= 7 and manifests.is_complete(fetched())
    train = manifests.read_manifest(fetched()).splits["train"]
    assert not [*manifests.find_problems(fetched(), train)]


def test_bytes_that_are_not_the_hubs_are_never_read(served, place):
    """A file whose bytes change on the way, at the same size: its hash is not the listing's."""
    path = served.folder / "datasets/me/tokens/fineweb_train_000001.bin"
    whole = path.read_bytes()
    served.allowed = lambda name, headers: bool(damage(path, whole, "resolve" in name)) or True
    try:
        status, waits = prepare(served)
    finally:
        served.allowed = lambda name, headers: True
        path.write_bytes(whole)
    assert status == 1 and len(waits) == retry.TRIES - 1
    assert "fineweb_train_000001.bin" not in names(
        fetched()
    ) and "fineweb_train_000000.bin" in names(fetched())
    assert prepare(served) == (0, []) and manifests.is_complete(fetched())


def damage(path: Path, whole: bytes, damaged: bool) -> None:
    """Serve other bytes than are listed."""
    path.write_bytes(whole[:-1] + b"\x01" if damaged else whole)


def test_a_file_that_is_missing_or_has_changed_is_fetched_again(served, place):
    prepare(served)
    (fetched() / "fineweb_train_000001.bin").unlink()
    damage(
        fetched() / "fineweb_train_000004.bin",
        (fetched() / "fineweb_train_000004.bin").read_bytes(),
        True,
    )
    served.log = []
    assert prepare(served)[0] == 0
    train = manifests.read_manifest(fetched()).splits["train"]
    assert not [*manifests.find_problems(fetched(), train)]
    gets = {
        line.rpartition("/")[2]
        for line in served.log
        if line.startswith("GET") and "/resolve/" in line
    }
    assert gets == {"fineweb_train_000001.bin", "fineweb_train_000004.bin"}


def test_consumed_keeps_a_bounded_number_of_files_on_the_disk_and_trains_on_all(served, place):
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], sum(1 for _ in Path("data").glob("*/*train*.bin")))

    watching = threading.Thread(target=watch)
    flags = (
        "--data_dir",
        REPOSITORY,
        "--stream_keep",
        "consumed",
        "--max_steps",
        "75",
        "--save_steps",
        "8",
    )
    flags += ("--per_device_train_batch_size", "8", "--logging_steps", "25")
    flags += (
        "--shuffle_block_tokens",
        "1200",
        "--save_total_limit",
        "2",
        "--eval_steps",
        "0",
        "--sample_steps",
        "0",
    )
    watching.start()
    try:
        run_script("train.py", "--recipe", "tiny.yaml", *flags, **hub(served))
    finally:
        done.set()
        watching.join()
    manifest = manifests.read_manifest(fetched())
    left = [name for name in names(fetched()) if "train" in name]
    assert len(manifest.splits["train"]) == FILES and most[0] <= 7 and len(left) < FILES
    assert max(losses_by_step("tiny")) == 75


def test_what_is_not_there_is_named_and_nothing_is_made(served, place):
    tokens = served.folder / "datasets/me/tokens"
    (tokens / "only").mkdir(exist_ok=True)
    shutil.copy(tokens / "fineweb_train_000000.bin", tokens / "only")
    for source, words in (
        (
            "hf://datasets/me/nowhere",
            "data_dir = hf://datasets/me/nowhere: HTTP status 404. Check the name",
        ),
        ("hf://datasets/me/tokens/empty", "HTTP status 404"),
        (
            "hf://datasets/me/tokens/only",
            "data_dir = hf://datasets/me/tokens/only has no validation shards",
        ),
    ):
        done = run_script(
            "prepare_data.py",
            "--recipe",
            "tiny.yaml",
            "--data_dir",
            source,
            expect=2,
            **hub(served),
        )
        assert words in done.stderr and not [*Path().glob("data/*/manifest.json")]
    words = ("prepare_data.py", "--recipe", "tiny.yaml", "--data_dir", REPOSITORY)
    assert f"train: {FILES} files" in run_script(*words, "--dry_run", **hub(served)).stdout
