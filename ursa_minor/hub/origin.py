"""Find the run of a model that is exported, or the metadata of its model card.

The name of a model comes in. An ``Origin`` comes out, which describes the run if it is on this
machine.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ursa_minor.base import checkpoint_files, files, model_id, paths, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.redaction import redact, redact_url
from ursa_minor.hub import card_metadata, client
from ursa_minor.model.resolve import RUNS
from ursa_minor.recipe import keys, loading

log = logging.getLogger(__name__)

# Key of the config.json of an export with a chat template: the name of the model before chats. A
# program that trains the export, such as TRL, copies the key into the config.json that it writes.
BASE_MODEL_KEY = "base_model_name_or_path"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of train.py and the step of its weights.

    Attributes:
        recipe: the recipe of the run.
        step: the step of the weights.
        last_step: the last step of the run when these weights were saved. It differs from ``step``
            if the weights with the lowest validation loss were saved at the end.
        rows: all rows of metrics.jsonl, also those of later steps.
        prompt: the first prompt of the run's samples, or None if it generated none.
    """

    recipe: keys.Recipe
    step: int
    last_step: int
    rows: list[dict]
    prompt: str | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model was trained on."""
        return self.step * self.recipe.batch.tokens_per_step

    @property
    def rows_until_saved(self) -> list[dict]:
        """The rows of metrics.jsonl up to the moment at which the weights were saved."""
        return [row for row in self.rows if row["step"] <= self.last_step]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run or model from which a model comes.

    Attributes:
        name: the name of the run or folder without its path, or the id on the Hub with its
            revision.
        run: the run, or None if there is none on this machine.
        is_base: whether the model was trained on after the run, by a program such as TRL.
        metadata: the metadata of the README.md in the folder or repository of the model.
    """

    name: str
    run: TrainingRun | None = None
    is_base: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hub_id(self) -> str | None:
        """The id on the Hub under which others find this model, or None."""
        if self.run is None:
            name, _, _ = self.name.partition("@")
            return name if "/" in name else None
        hub = self.run.recipe.hub
        if hub.push_to_hub and hub.hub_model_id and "/" in hub.hub_model_id:
            return hub.hub_model_id
        return None


class NamedStep(NamedTuple):
    """The name of a model, and the step of a run or None."""

    name: str
    step: int | None


def find(source: str, base_model: str | None, tokens: Collection[str]) -> Origin:
    """Return the origin of a model.

    Args:
        source: a run folder, a checkpoint, a model folder, or a Hub id (ID or ID@REVISION).
        base_model: the value of ``BASE_MODEL_KEY`` in the model's config, or None.
        tokens: the tokens of the model.
    """
    run_dir = checkpoint_files.run_folder_of(Path(source))
    if run_dir is not None:
        step = _step_of_weights(Path(source), run_dir)
        return Origin(name=_name_of_folder(run_dir), run=_read_run(run_dir, step))
    metadata = _read_metadata(source)
    if isinstance(base_model, str) and base_model:
        named = _split_step(base_model)
        run = None
        if named.step is not None and "/" not in named.name:
            run = _find_run(named.name, named.step, near=Path(source), tokens=tokens)
        return Origin(name=redact(named.name), run=run, is_base=True, metadata=metadata)
    return Origin(name=public_name(source), metadata=metadata)


def base_model_value(source: str) -> str:
    """Return the value of ``BASE_MODEL_KEY`` for a model.

    It contains no path: NAME@step-N for a run, the name of a folder, or the Hub id.
    """
    run_dir = checkpoint_files.run_folder_of(Path(source))
    if run_dir is None:
        return public_name(source)
    step = _step_of_weights(Path(source), run_dir)
    return f"{_name_of_folder(run_dir)}@{run_files.step_name(step)}"


def public_name(source: str) -> str:
    """Return the name of a model for publication: the last component of a path, or the Hub id."""
    if Path(source).exists():
        return _name_of_folder(Path(source))
    return redact(source)


def public_file_name(path: str) -> str:
    """Return the name of a data file for publication: without its folder, or a URL's secrets."""
    if paths.is_url(path):
        return redact_url(path)
    return keys.shortened("data_files", path)


def _name_of_folder(folder: Path) -> str:
    """Return the name of a folder, or that of its parent if it is the folder model/."""
    folder = folder.resolve()
    if folder.name == run_files.MODEL_FOLDER:
        folder = folder.parent
    return redact(folder.name)


def _split_step(name: str) -> NamedStep:
    """Split NAME@step-N. Another revision stays in the name."""
    location, _, revision = name.rpartition("@")
    if location and run_files.STEP.fullmatch(revision):
        return NamedStep(location, checkpoint_files.step_of(Path(revision)))
    return NamedStep(name, None)


def _step_of_weights(source: Path, run_dir: Path) -> int:
    """Return the step of the weights in a run folder, its ``model/`` or one of its checkpoints."""
    model_folder = checkpoint_files.model_folder_of(source) or source.resolve()
    if run_files.STEP.fullmatch(model_folder.name):
        return checkpoint_files.step_of(model_folder)
    finish = run_files.read_finish(run_dir)
    if finish is not None:
        return finish.step if finish.weights_step is None else finish.weights_step
    # The run was killed between writing model/ and finished.json.
    rows = run_files.read_metrics(run_dir / run_files.METRICS)
    return max((row["step"] for row in rows), default=0)


def _last_step(run_dir: Path, step: int) -> int:
    """Return the last step of a run at which the weights of a step were saved."""
    finish = run_files.read_finish(run_dir)
    if finish is not None and finish.weights_step == step:
        return finish.step
    return step


def _read_run(run_dir: Path, step: int) -> TrainingRun | None:
    """Return the run in a folder, or None with a warning if its recipe cannot be read."""
    try:
        recipe = loading.load_run_recipe(run_dir)
    except BadInput as error:
        log.warning(f"The model card does not describe the training: {error}")
        return None
    prompts = recipe.evaluation.sample_prompts
    prompt = prompts[0] if prompts else None
    return TrainingRun(
        recipe=recipe,
        step=step,
        last_step=_last_step(run_dir, step),
        rows=run_files.read_metrics(run_dir / run_files.METRICS),
        prompt=prompt or run_files.read_first_prompt(run_dir / run_files.SAMPLES),
    )


def _find_run(name: str, step: int, near: Path, tokens: Collection[str]) -> TrainingRun | None:
    """Return the run with a name, or None if it is not on this machine.

    Args:
        name: name of the run folder.
        step: the step of the weights.
        near: a path next to which run folders are searched, in addition to runs/.
        tokens: the tokens of the model. A run with the same name but other tokens is not returned.
    """
    for parent in (near.resolve().parent, Path(RUNS)):
        run_dir = parent / name
        has_recipe = (run_dir / run_files.RECIPE).is_file()
        if has_recipe and _tokens_of_run(run_dir) <= set(tokens):
            return _read_run(run_dir, step)
    return None


def _tokens_of_run(run_dir: Path) -> set[str]:
    """Return the tokens of a run's model, or an empty set if the run has no model any more."""
    model_folder = checkpoint_files.model_folder_of(run_dir)
    if model_folder is None:
        return set()
    try:
        tokenizer = files.read_json(model_folder / "tokenizer.json")
        return set(tokenizer["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _read_metadata(source: str) -> dict[str, Any]:
    """Return the metadata of the README.md of a folder or Hub id, or {} if they cannot be read."""
    try:
        if Path(source).exists():
            text = (Path(source) / card_metadata.CARD_FILE).read_text(encoding="utf-8")
        else:
            location, revision = model_id.parse(source, "")
            downloaded = client.api().hf_hub_download(
                location, card_metadata.CARD_FILE, revision=revision
            )
            text = Path(downloaded).read_text(encoding="utf-8")
        return card_metadata.parse(text).metadata
    except Exception:  # no card, a damaged one, or no network: the export does not need it
        return {}
