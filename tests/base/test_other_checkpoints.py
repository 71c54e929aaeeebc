"""Checkpoints of other trainers, found by their names, and the folder of the converted copies."""

from pathlib import Path

import pytest

from ursa_minor.base import checkpoint_files, other_checkpoints


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ckpt.pt"], "ckpt.pt"),
        (["model_05000.pt", "model_19072.pt", "log.txt"], "model_19072.pt"),
        (["model_00000200.bin", "model_00019560.bin", "main.log"], "model_00019560.bin"),
        (["model_9.bin", "model_10.bin"], "model_10.bin"),
        (["ckpt.pt", "model_19072.pt"], "ckpt.pt"),
        (["state_00019560_00000.bin"], None),
        (["pytorch_model.bin"], None),
        (["ckpt.pt", "config.json"], None),
        ([], None),
    ],
)
def test_checkpoint_is_found_in_folder(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()

    found = other_checkpoints.find_checkpoint(tmp_path)

    assert found == (tmp_path / expected if expected else None)


def test_run_folder_is_not_searched(tmp_path):
    (tmp_path / "ckpt.pt").touch()
    (tmp_path / "model").mkdir()

    assert other_checkpoints.find_checkpoint(tmp_path) is None
    assert checkpoint_files.model_folder_of(tmp_path) == tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "is_checkpoint"),
    [("a.pt", True), ("a.pth", True), ("a.ckpt", True), ("a.bin", True), ("a.txt", False)],
)
def test_file_is_known_by_suffix(tmp_path, name, is_checkpoint):
    path = tmp_path / name
    path.touch()

    assert other_checkpoints.find_checkpoint(path) == (path if is_checkpoint else None)


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_cache_is_in_home_by_default(monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/me")

    assert other_checkpoints.cache_folder() == Path("/home/me/.cache/ursa_minor/models")


def test_folder_is_named_by_contents(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, text in {"a.pt": "same", "b.pt": "same", "c.pt": "other"}.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "c.pt")]

    folders = [other_checkpoints.converted_folder(path) for path in paths]

    assert folders[0] == folders[1]
    assert folders[0] != folders[2]
    assert folders[0].parent == tmp_path / "ursa_minor/models"
    assert other_checkpoints.converted_folder_of_files(paths[:2]) != folders[0]
