"""Write, verify and read checkpoints.

A checkpoint is a folder such as ``step-00001000`` with these files:

- ``model.safetensors``: the weights
- ``config.json``, ``generation_config.json`` and the files of the tokenizer: with the weights, they
  are a model that Transformers loads
- ``training/optimizer.safetensors``: the moments, as PARAMETER/KIND, such as
  ``transformer.wte.weight/exp_avg``
- ``training/state.json``: scalars; see ``state`` and ``run/resume.py``
- ``manifest.json``: size and SHA-256 of each of the other files; it is written last. Its entry
  ``kept`` states whether and how the checkpoint is kept for a learning curve

A checkpoint that is kept with its weights only (``keep_optimizer: false``) has no ``training/``.

The folder is written under a temporary name and renamed when all files are on the disk. A folder
with the final name is therefore complete. The names of the tensors do not depend on the
parallelism: one process, DDP, ZeRO-1 and FSDP2 can read each other's checkpoints. The weights have
the names that the ecosystem uses in files (``Architecture.file_name``).

A checkpoint contains no pickle files, which could execute code. It contains no states of random
number generators either, because the order of the data and dropout are functions of (seed, step,
micro-batch).
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ursa_minor.base import files, paths
from ursa_minor.base.checkpoint_files import (
    find_model_problem,
    find_problem,
    is_weights_only,
    kept_as,
    list_checkpoints,
    list_resume_points,
    step_of,
)
from ursa_minor.base.errors import BadInput, errno_of
from ursa_minor.base.run_files import (
    CHECKPOINTS,
    COMPLETE,
    KEPT,
    MANIFEST,
    METRICS,
    MODEL,
    OPTIMIZER,
    STATE,
    TRAINING,
    WEIGHTS,
    clear_partial,
    step_name,
)
from ursa_minor.base.wording import did_you_mean_file
from ursa_minor.model.architectures import file_names

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Tensors = dict[str, torch.Tensor]  # by name


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        weights: tensors on the CPU by their name in the file; see ``gather``.
        moments: tensors of the optimizer on the CPU, as PARAMETER/KIND; see ``gather``. None for a
            checkpoint that contains only a model.
        state: the contents of ``state.json``. Its ``step`` gives the name of the checkpoint.
        model_files: the text of config.json and of the other files that make the folder a model, by
            file name.
        kept: ``COMPLETE`` or ``WEIGHTS`` for a checkpoint that is kept for a learning curve.
    """

    weights: Tensors
    moments: Tensors | None
    state: dict
    model_files: Mapping[str, str]
    kept: str | None = None


def write(
    folder: Path, contents: Contents, keep: int = 0, keep_steps: Collection[int | None] = ()
) -> Path:
    """Write ``folder/step-XXXXXXXX``, verify it, and then remove older checkpoints.

    Checkpoints that are kept for a learning curve are not removed, and only complete ones that do
    not stay complete are counted. Those that are not needed any more lose ``training/``.

    Args:
        folder: the checkpoints of the run.
        contents: the tensors and files to write.
        keep: number of resume points to keep, or 0 for all of them.
        keep_steps: steps whose checkpoints are also kept unchanged.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError, SafetensorError: the checkpoint cannot be written. Nothing is removed.
    """
    step = contents.state["step"]
    path = folder / step_name(step)
    # An existing checkpoint of this step is replaced. It is corrupted, or the run has resumed from
    # an earlier one.
    with files.create_folder(path, replace=True) as temporary:
        _save_tensors(contents.weights, temporary / MODEL)
        if contents.moments is not None:
            (temporary / TRAINING).mkdir()
            _save_tensors(contents.moments, temporary / OPTIMIZER)
            files.write_json(temporary / STATE, contents.state)
        for name, text in contents.model_files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        written = sorted(file for file in temporary.rglob("*") if file.is_file())
        rows = {
            file.relative_to(temporary).as_posix(): files.manifest_row(file) for file in written
        }
        manifest: dict[str, Any] = {"step": step, "files": rows}
        if contents.kept:
            manifest[KEPT] = contents.kept
        files.write_json(temporary / MANIFEST, manifest)
        # After a power failure, the metrics must not end before the checkpoint. If the disk cannot
        # store the metrics, the checkpoint is written nevertheless.
        with contextlib.suppress(OSError):
            files.fsync(folder.parent / METRICS)
    problem = find_problem(path) if contents.moments is not None else find_model_problem(path)
    if problem:
        raise OSError(f"{path}: the checkpoint was not written correctly: {problem}")
    try:
        clear_partial(folder)
        if keep:
            _remove_older(path, keep, keep_steps)
    except OSError as error:
        log.error(f"an older checkpoint cannot be removed: {error}. The run continues")
    return path


def _save_tensors(tensors: Tensors, file: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # Transformers requires this metadata to load a file of weights.
    save_file(contiguous, file, metadata={"format": "pt"})


def _remove_older(path: Path, keep: int, keep_steps: Collection[int | None]) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``path``, and those of ``keep_steps``.

    Checkpoints of later steps, which exist if the run has gone back, are not counted. Neither are
    those that are kept for a learning curve, except while they have a folder ``training/`` that
    will be removed.
    """
    counted = []
    for other in list_checkpoints(path.parent):
        is_counted = not is_weights_only(other) and kept_as(other) != COMPLETE
        if other.name <= path.name and is_counted:
            counted.append(other)
    for older in counted[keep:]:
        if step_of(older) in keep_steps:
            continue
        if kept_as(older) == WEIGHTS:
            _remove_training(older)
        else:
            files.remove(older)


def clear_interrupted(folder: Path) -> None:
    """Remove what killed processes have left in the checkpoints of a run.

    Call this only while holding the lock of the run folder.
    """
    clear_partial(folder)
    for path in list_checkpoints(folder):
        if kept_as(path):
            clear_partial(path)
        if is_weights_only(path):
            files.remove(path / TRAINING)


def _remove_training(path: Path) -> None:
    """Turn a complete checkpoint into one that contains only a model.

    The manifest is replaced first. From then on, ``training/`` does not belong to the checkpoint.
    If the process is killed then, ``clear_interrupted`` removes it.
    """
    manifest = files.read_json(path / MANIFEST)
    rows = manifest["files"]
    manifest["files"] = {
        name: row for name, row in rows.items() if not name.startswith(f"{TRAINING}/")
    }
    files.write_json(path / MANIFEST, manifest)
    files.remove(path / TRAINING)


def gather(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[Tensors, Tensors]:
    """Return weights and moments by name, as ``Contents`` has them.

    All processes must call this. The main process gets all tensors. They are copies on the CPU if
    the model is sharded (FSDP2), and otherwise the tensors themselves.

    Args:
        model: the Transformers model without wrappers.
        optimizer: its optimizer.
    """
    weights = gather_weights(model)
    if not _is_sharded(model):
        moments_by_parameter = _named_moments(model, optimizer)
    elif optimizer.state:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=_gathering(model))
        moments_by_parameter = optimizer_state.get("state", {})
    else:
        # No update was applied yet. get_optimizer_state_dict would create moments by an update,
        # which the optimizer would count.
        moments_by_parameter = {}
    moments: Tensors = {}
    for name, kinds in moments_by_parameter.items():
        for kind, value in kinds.items():
            # Some optimizers count their steps in an int.
            moments[f"{name}/{kind}"] = torch.as_tensor(value)
    return weights, moments


def gather_weights(model: PreTrainedModel) -> Tensors:
    """Return the weights by name. All processes must call this; see ``gather``."""
    state_dict = get_model_state_dict(model, options=_gathering(model))
    # The state dict has the weights of a tied head twice, and named_parameters has them once.
    weights = {}
    for name, file_name in _file_names(model).items():
        if name in state_dict:
            weights[file_name] = state_dict[name]
    return weights


def _gathering(model: nn.Module) -> StateDictOptions:
    """Return the options that gather the tensors of a sharded model on the main process."""
    is_sharded = _is_sharded(model)
    return StateDictOptions(full_state_dict=is_sharded, cpu_offload=is_sharded)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _names_by_parameter(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _file_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the name in ``model.safetensors`` of each parameter, by its name in the model."""
    return file_names(model.config.model_type, [name for name, _ in model.named_parameters()])


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Return the moments of each parameter by the name of the parameter.

    With ZeRO-1, the main process gets the moments of all processes, and the others get none.
    """
    names = _names_by_parameter(model)
    # ZeroRedundancyOptimizer is not imported here, because its import is slow.
    is_zero = hasattr(optimizer, "consolidate_state_dict")
    if not is_zero:
        return {names[parameter]: kinds for parameter, kinds in optimizer.state.items()}
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() != 0:
        return {}
    # The state dict numbers the parameters in the order of the groups.
    ordered_names: list[str] = []
    for group in optimizer.param_groups:
        ordered_names += [names[parameter] for parameter in group["params"]]
    state = optimizer.state_dict()["state"]
    return {ordered_names[index]: kinds for index, kinds in state.items()}


def find_newest(folder: Path, start: Path | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint of a run, and a line for each newer corrupted one.

    Checkpoints that contain only a model are ignored. The checkpoint is None for a new run.

    Args:
        folder: the checkpoints of the run.
        start: the checkpoint that the run starts from, or None. Checkpoints in ``folder`` of runs
            that did not start from it are ignored. If no other checkpoint is intact, ``start``
            itself is returned. It may be in ``folder``: then the run goes back to it and ignores
            the later checkpoints.

    Raises:
        BadInput: one of these:

            - ``start`` is None, and all checkpoints are corrupted. A new run would replace them.
            - ``start`` is needed and is corrupted.
            - ``start`` is needed and in another folder, and ``folder`` contains checkpoints of runs
              that did not start from it.
    """
    all_checkpoints = list_resume_points(folder)
    checkpoints = all_checkpoints
    if start is not None:
        checkpoints = [path for path in all_checkpoints if _may_continue(path, start)]
    corrupted: list[str] = []
    for path in checkpoints:
        problem = find_problem(path)
        if problem is None:
            return path, corrupted
        corrupted.append(f"{path}: {problem}")

    if start is not None:
        read_state(start)  # raises BadInput if it is corrupted
        has_other_run = len(checkpoints) < len(all_checkpoints)
        if has_other_run and start.resolve().parent != folder.resolve():
            raise BadInput(
                f"resume_from_checkpoint = {start}: {folder} contains checkpoints of a run that "
                f"did not start from it; use another --run_name"
            )
        return start, corrupted
    if corrupted:
        fix = "no checkpoint is intact. To start a new run, use another --run_name"
        raise BadInput([*corrupted, f"{folder}: {fix}"])
    return None, []


def _may_continue(path: Path, start: Path) -> bool:
    """Return whether a checkpoint is of a run that started from ``start``, or cannot be read."""
    try:
        origin = files.read_json(path / STATE).get("origin")
    except (OSError, ValueError, AttributeError):
        return True  # find_newest reports that it is corrupted
    return matches_origin(origin, start)


def origin_of(start: Path) -> dict[str, str]:
    """Return what ``state.json`` stores about the checkpoint that a run starts from.

    This is its name and the SHA-256 of its weights. The path is not stored, because the checkpoint
    may be moved, and because ``state.json`` may be pushed to the Hub.
    """
    return {"checkpoint": start.name, "sha256": _hash_of_weights(start)}


def matches_origin(origin: Any, start: Path) -> bool:
    """Return whether the ``origin`` in a ``state.json`` is the checkpoint ``start``.

    If ``start`` was deleted in the meantime, only its name is compared.
    """
    if not isinstance(origin, dict) or origin.get("checkpoint") != start.name:
        return False
    try:
        return origin.get("sha256") == _hash_of_weights(start)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _hash_of_weights(path: Path) -> str:
    return files.read_json(path / MANIFEST)["files"][MODEL]["sha256"]


def read_state(path: Path) -> dict:
    """Verify a checkpoint and return the contents of its ``state.json``.

    Raises:
        BadInput: there is no such checkpoint, or it is corrupted.
    """
    if is_weights_only(path):
        raise BadInput(
            f"resume_from_checkpoint = {path}: this checkpoint contains only weights "
            f"(keep_optimizer = false). Use a complete checkpoint, or start a new run from these "
            f"weights: --init_from {paths.quoted(path)} with another --run_name"
        )
    problem = _no_checkpoint(path)
    if problem is None:
        problem = find_problem(path)
    if problem is None:
        return files.read_json(path / STATE)
    fix = "use auto, none or an intact step-XXXXXXXX folder"
    if not path.exists():
        fix += did_you_mean_file(str(path), Path.is_dir)
    raise BadInput(f"resume_from_checkpoint = {path}: {problem}; {fix}")


def _no_checkpoint(path: Path) -> str | None:
    """Return why a path is not a checkpoint folder, or None if it is one."""
    if not path.is_dir():
        if os.path.lexists(path):
            return "this is not a folder"
        hint = ""
        if HUB_ID.fullmatch(str(path)) and not path.parent.exists():
            hint = f" (for a checkpoint on the Hub, write hub://{path})"
        return f"there is no such folder{hint}"
    if (path / MANIFEST).exists():
        return None
    inner_checkpoints = [*list_resume_points(path), *list_resume_points(path / CHECKPOINTS)]
    if inner_checkpoints:
        return f"this folder contains checkpoints; the newest is {inner_checkpoints[0]}"
    return f"this folder has no {MANIFEST}, so it is not a checkpoint"


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Load the weights of a verified checkpoint into the model in place.

    Raises:
        BadInput: they differ from those of the model in names, shapes or types.
    """
    names = _file_names(model)
    parameters = {names[name]: parameter for name, parameter in model.named_parameters()}
    tensors = _read_tensors(path, MODEL, parameters)
    weights = {name: tensors[file_name] for name, file_name in names.items()}
    # Not strict, because the checkpoint has the weights of a tied head once and the model twice.
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)


def load(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state_tensors: Callable[..., Tensors],
) -> None:
    """Load a verified checkpoint into the model and the optimizer in place.

    Args:
        path: the checkpoint.
        model: the Transformers model without wrappers.
        optimizer: its optimizer.
        state_tensors: ``state_tensors`` of the optimizer in ``OPTIMIZERS``, which returns the
            expected moments of a parameter.

    Raises:
        BadInput: the weights or moments differ from those of the model and the optimizer in names,
            shapes or types.
    """
    load_weights(path, model)
    names = _names_by_parameter(model)
    expected: Tensors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            like = torch.empty(parameter.shape, device="meta")
            for kind, moment in state_tensors(group, like).items():
                expected[f"{names[parameter]}/{kind}"] = moment
    state = files.read_json(path / STATE)
    # An optimizer has no moments before the first update that was applied.
    may_be_empty = state["skipped_updates"] >= state["step"]
    tensors = _read_tensors(path, OPTIMIZER, expected, may_be_empty=may_be_empty)
    moments: dict[str, Tensors] = {}  # by name of the parameter, then by kind
    for name, tensor in tensors.items():
        parameter_name, kind = name.split("/")
        moments.setdefault(parameter_name, {})[kind] = tensor

    if _is_sharded(model):
        if not moments:
            return  # see gather
        # The parameter groups and their settings come from the recipe. Only the moments are loaded.
        options = StateDictOptions(full_state_dict=True)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        loaded_state = optimizer_state | {"state": moments}
        set_optimizer_state_dict(model, optimizer, loaded_state, options=options)
        return
    # With ZeRO-1, this process updates only a part of the parameters, with the optimizer `optim`.
    local_optimizer = getattr(optimizer, "optim", optimizer)
    # load_state_dict is not used, because it would cast the moments to the type of their parameter.
    for group in local_optimizer.param_groups:
        for parameter in group["params"]:
            kinds = moments.get(names[parameter], {})
            local_optimizer.state[parameter] = {
                kind: _restore_moment(tensor, parameter.device) for kind, tensor in kinds.items()
            }


def _read_tensors(
    path: Path, name_of_file: str, expected: Tensors, *, may_be_empty: bool = False
) -> Tensors:
    """Return the tensors of a file of a checkpoint after comparing them with the expected ones.

    Args:
        path: the checkpoint.
        name_of_file: a safetensors file in it.
        expected: tensors with the expected names, shapes and types.
        may_be_empty: whether a file without tensors is valid.

    Raises:
        BadInput: the file cannot be read, or a tensor differs.
    """
    file = path / name_of_file
    try:
        tensors = _load_tensors(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read ({error})") from None
    if may_be_empty and not tensors:
        return tensors
    for name in sorted(tensors.keys() | expected.keys()):
        in_checkpoint = _describe(tensors, name)
        in_run = _describe(expected, name)
        if in_checkpoint != in_run:
            raise BadInput(
                f"{file}: tensor {name} is {in_checkpoint} in the checkpoint but {in_run} in this "
                f"run. To resume from the previous checkpoint, move {path} to another place"
            )
    return tensors


def _describe(tensors: Tensors, name: str) -> str:
    if name not in tensors:
        return "missing"
    tensor = tensors[name]
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _load_tensors(file: Path) -> Tensors:
    """Return the tensors of a file, also if the file system cannot map the file into memory."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        if errno_of(error) not in files.NO_MAPPING:
            raise
        return load_bytes(file.read_bytes())


def _restore_moment(tensor: torch.Tensor, device: torch.device) -> torch.Tensor | int:
    """Return a moment as the optimizer had it. ``gather`` has converted counts from int."""
    is_count = tensor.dim() == 0 and not tensor.is_floating_point()
    if is_count:
        return tensor.item()
    return tensor.to(device)
