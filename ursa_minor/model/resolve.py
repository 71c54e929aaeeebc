"""Resolve a model name: a run folder, a model folder or checkpoint, or a model on the Hub.

Does not import torch, unless a checkpoint of another trainer must be converted.
"""

import difflib
from pathlib import Path

from ursa_minor.base import checkpoint_files, model_id, other_checkpoints
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import CHECKPOINTS
from ursa_minor.base.wording import did_you_mean_file
from ursa_minor.model import weight_names
from ursa_minor.model.adapters import check_no_adapter
from ursa_minor.recipe import keys

RUNS = "runs"
# Some Hub ids have no owner, so only a name that is very similar to a run is taken for a typo.
MIN_SIMILARITY = 0.9


def resolve_model(name: str, option: str = "--model ") -> str:
    """Return the name that ``pretrained.load`` expects.

    Args:
        name: a run folder, a model folder or checkpoint, a checkpoint of another trainer
            (``import_checkpoint``), or a Hub id, which may end in @REVISION.
        option: the option that the name comes from. Error messages start with it.

    Returns:
        The subfolder ``model/`` of a run folder, or its newest intact checkpoint if the run has not
        written its model yet. For a checkpoint of another trainer, and for a model folder in which
        the names of the weights have prefixes, the folder of a converted copy. Any other name is
        returned unchanged.

    Raises:
        BadInput: the folder is missing or contains no model, the checkpoint cannot be converted, or
            @REVISION is malformed.
    """
    path = Path(name)
    convert_if_other(name, option)
    model_folder = checkpoint_files.model_folder_of(path)
    if model_folder is not None:
        check_no_adapter(model_folder, f"{option}{name}")
        return str(model_folder)
    check_no_adapter(path, f"{option}{name}")
    has_config = (path / "config.json").is_file()
    if path.is_file() or (path.is_dir() and not has_config):
        raise BadInput(_no_model_message(path, option))
    check_source_exists(name, option)
    if has_config and weight_names.may_have_prefix(path):
        # Imported here, because it imports torch.
        from ursa_minor.model import import_checkpoint

        return str(import_checkpoint.rename_weights(path, f"{option}{name}"))
    return name


def convert_if_other(name: str, option: str) -> None:
    """Convert the checkpoint of another trainer, unless this was done before.

    Afterwards ``checkpoint_files.model_folder_of`` returns the converted copy. Nothing happens if
    the name is that of another model.

    Args:
        name: as in ``resolve_model``.
        option: the option that the name comes from. Error messages start with it.

    Raises:
        BadInput: the checkpoint cannot be converted.
    """
    checkpoint = other_checkpoints.find_checkpoint(Path(name))
    if checkpoint is None:
        return
    # Imported here, because it imports torch.
    from ursa_minor.model import import_checkpoint

    import_checkpoint.convert(checkpoint, f"{option}{name}")


def convert_others_in(recipe: keys.Recipe) -> None:
    """Convert the checkpoints of other trainers that a recipe names (``convert_if_other``)."""
    if recipe.model.init_from is not None:
        convert_if_other(recipe.model.init_from, "init_from = ")
    if recipe.data.tokenizer not in keys.TRAINED_TOKENIZERS:
        convert_if_other(recipe.data.tokenizer, "tokenizer = ")


def _no_model_message(path: Path, option: str) -> str:
    """Return the message for a file, or a folder that contains no model."""
    if checkpoint_files.list_checkpoints(path / CHECKPOINTS):
        return (
            f"{option}{path}: the run has not written its model yet, and none of its checkpoints "
            f"is intact. Use another model, or train again with another --run_name"
        )
    if (path / CHECKPOINTS).is_dir():
        return (
            f"{option}{path}: the run has not saved a checkpoint yet. Use another model, or wait "
            f"until it has saved one"
        )
    message = (
        f"{option}{path}: contains no model. Use a checkpoint of nanoGPT, build-nanogpt or llm.c, "
        f"or a folder with config.json and weights"
    )
    checkpoints = checkpoint_files.list_checkpoints(path)
    if checkpoints:
        message += f", for example {checkpoints[0]}"
    return message


def check_source_exists(name: str, option: str = "--model ") -> None:
    """Raise BadInput if a name is neither an existing path nor a possible Hub id.

    The message suggests an existing folder with a similar name.

    Args:
        name: a path or a Hub id, which may end in @REVISION.
        option: the option that the name comes from. Error messages start with it.
    """
    if Path(name).exists():
        return
    location = model_id.parse(name, option).location
    parent = Path(location).parent
    is_below_runs = Path(location).parts[:1] == (RUNS,)
    has_more_parts_than_an_id = parent.parent != Path()
    is_in_a_folder = parent != Path() and parent.is_dir()
    if is_below_runs or has_more_parts_than_an_id or is_in_a_folder:
        if Path(location).suffix in other_checkpoints.SUFFIXES:
            suggestion = did_you_mean_file(name, Path.is_file)
            raise BadInput(f"{option}{name}: no such file{suggestion}")
        suggestion = did_you_mean_file(name, Path.is_dir)
        raise BadInput(f"{option}{name}: no such folder (a Hub id is owner/name){suggestion}")
    if "/" in location:
        return
    runs = [run.name for run in Path(RUNS).glob("*")]
    similar = difflib.get_close_matches(name, runs, n=1, cutoff=MIN_SIMILARITY)
    if similar:
        raise BadInput(f"{option}{name}: no such folder; did you mean {RUNS}/{similar[0]}?")
