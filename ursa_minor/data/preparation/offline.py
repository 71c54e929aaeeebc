"""Check that access to the Hub is not switched off where data must be prepared from it."""

import os

from ursa_minor.base.errors import BadInput
from ursa_minor.data.sources.find import find_source
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.recipe.keys import DataSource
from ursa_minor.recipe.source_kind import STDLIB

TRUE_VALUES = ("1", "ON", "YES", "TRUE")  # as in huggingface_hub


def check_online(config: DataSource) -> None:
    """Check that the Hub may be used, unless the source is prepared or does not need it.

    Raises:
        BadInput: an environment variable switches off access to the Hub.
    """
    variable = offline_variable()
    name = _name_on_hub(config)
    if variable is None or name is None:
        return
    folder = find_source(config).folder
    if manifests.is_complete(folder):
        return
    raise BadInput(
        f"{name}: {folder} is not completely prepared, and {variable}={os.environ[variable]} "
        f"switches off access to the Hub. Unset {variable}, or run prepare_data.py with the same "
        f"flags and --prefetch on a machine with a network and copy this folder"
    )


def offline_variable() -> str | None:
    """Return the environment variable that switches off access to the Hub, or None."""
    hub_variable = "HF_HUB_OFFLINE"
    if not os.environ.get(hub_variable):
        hub_variable = "TRANSFORMERS_OFFLINE"  # as in huggingface_hub
    for variable in (hub_variable, "HF_DATASETS_OFFLINE"):
        if os.environ.get(variable, "").upper() in TRUE_VALUES:
            return variable
    return None


def _name_on_hub(config: DataSource) -> str | None:
    """Return the key and the value by which a source names data of the Hub, or None."""
    if config.data_dir:
        return f"data_dir = {config.data_dir}" if config.data_dir.startswith("hf://") else None
    if config.data_files:
        names = [*config.data_files, *(config.validation_files or ())]
        hub_names = [name for name in names if name.startswith("hf://")]
        return f"data_files = {hub_names[0]}" if hub_names else None
    if config.dataset_name and config.dataset_name != STDLIB:
        return f"dataset_name = {config.dataset_name}"
    return None
