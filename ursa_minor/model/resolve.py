"""What a model's name stands for: a run, a folder, or a model of the Hub. Needs no torch."""

import difflib
from pathlib import Path

from ursa_minor.base import model_id, paths
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import CHECKPOINTS, MODEL_FOLDER
from ursa_minor.base.wording import did_you_mean_file
from ursa_minor.model.adapters import check_no_adapter


def resolve_model(name: str, option: str = "--model ") -> str:
    """Return the name that ``pretrained.load`` takes: a run folder stands for its ``model/``, any other for itself.

    Args:
        name: a run folder, a model folder, or an id of the Hub, which may end in @REVISION.
        option: the option that the name comes from; messages begin with it.

    Raises BadInput where there is no such folder, the run has not written its model, or @REVISION is malformed.
    """
    path = Path(name)
    model_folder = path / MODEL_FOLDER
    if model_folder.is_dir():
        check_no_adapter(model_folder, f"{option}{name}")
        return str(model_folder)
    check_no_adapter(path, f"{option}{name}")
    if path.is_dir() and (path / CHECKPOINTS).is_dir():
        out = paths.quoted(f"exports/{path.name}")
        raise BadInput(
            f"{option}{name}: the run has not written model/ yet; it does so at its end. Until then "
            f"python export_model.py {paths.quoted(name)} --out {out} makes a model of its newest checkpoint"
        )
    if path.is_file() or (path.is_dir() and not (path / "config.json").is_file()):
        raise BadInput(
            f"{option}{name}: holds no model; give a folder with config.json and weights"
        )
    check_source_exists(name, option)
    return name


def check_source_exists(name: str, option: str = "--model ") -> None:
    """Raise BadInput for a name that is neither there nor may be a Hub id; it names the nearest folder."""
    if Path(name).exists():
        return
    location = model_id.parse(name, option).location
    parent = Path(location).parent
    is_below_runs = Path(location).parts[:1] == ("runs",)
    has_more_parts_than_an_id = parent.parent != Path()
    is_beside_a_folder = parent != Path() and parent.is_dir()
    if is_below_runs or has_more_parts_than_an_id or is_beside_a_folder:
        suggestion = did_you_mean_file(name, Path.is_dir)
        raise BadInput(f"{option}{name}: no such folder (a Hub id is owner/name){suggestion}")
    if "/" not in location:  # some Hub ids have no owner, so a run must be much alike
        runs = [run.name for run in Path("runs").glob("*")]
        if near := difflib.get_close_matches(name, runs, n=1, cutoff=0.9):
            raise BadInput(f"{option}{name}: no such folder; did you mean runs/{near[0]}?")
