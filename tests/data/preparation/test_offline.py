"""Test the environment variables that switch off access to the Hub."""

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation import offline
from ursa_minor.data.sources.find import find_source
from ursa_minor.data.tokens.manifest import Manifest, write_manifest
from ursa_minor.recipe.keys import DataSource

VARIABLES = ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_unprepared_dataset_is_rejected_offline(tmp_path, monkeypatch, variable):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = DataSource(
        data_seed=1, tokenizer="bpe", dataset_name="me/corpus", prepared_data_dir=str(tmp_path)
    )
    offline.check_online(config)
    monkeypatch.setenv(variable, "1")

    with pytest.raises(BadInput) as caught:
        offline.check_online(config)

    (line,) = caught.value.lines
    assert "dataset_name = me/corpus" in line
    assert variable in line
    folder = find_source(config).folder
    folder.mkdir()
    write_manifest(folder, Manifest(tokenizer=None, splits={"train": []}, complete=True))
    offline.check_online(config)
