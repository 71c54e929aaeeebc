"""Checkpoints that cannot be half-written, silently damaged, or executed.

A checkpoint is a folder ``step-00001000``: ``model.safetensors`` and ``optimizer.safetensors`` under plain parameter
names (so one process, DDP, ZeRO-1 and FSDP2 read each other's), ``state.json``, and ``manifest.json`` with every
file's size and SHA-256, written last. It is made under another name and renamed when all of it is on disk. No pickle.
There is no generator state to save: order and dropout are functions of (seed, step, micro-batch).
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection
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

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput, errno_of
from ursa_minor.base.run_files import (
    CHECKPOINTS,
    MANIFEST,
    METRICS,
    MODEL,
    OPTIMIZER,
    STATE,
    STEP,
    clear_partial,
    step_name,
)
from ursa_minor.base.wording import did_you_mean_file

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Tensors = dict[str, torch.Tensor]  # by name


def write(
    folder: Path,
    tensors: tuple[Tensors, Tensors],
    state: dict,
    keep: int = 0,
    keep_steps: Collection[int | None] = (),
) -> Path:
    """Write ``folder/step-XXXXXXXX``; older checkpoints go only after it was read back and verified.

    Args:
        tensors: weights and moments by name, on the CPU.
        state: what else a resumed run needs, JSON; its ``step`` gives the name.
        keep: checkpoints to leave (0 = all), beside those of ``keep_steps``.

    Raises OSError or SafetensorError where it cannot be written; then nothing is changed.
    """
    path = folder / step_name(state["step"])
    with files.making(
        path, replace=True
    ) as temporary:  # a damaged one, which the run did not resume from, makes way
        for name, named in zip((MODEL, OPTIMIZER), tensors, strict=True):
            # With what Transformers asks a file for, the weights are also those of a pushed model.
            whole = {key: tensor.contiguous() for key, tensor in named.items()}
            save_file(whole, temporary / name, metadata={"format": "pt"})
        files.write_json(temporary / STATE, state)
        rows = {name: files.manifest_row(temporary / name) for name in (MODEL, OPTIMIZER, STATE)}
        files.write_json(temporary / MANIFEST, {"step": state["step"], "files": rows})
        # Write the checkpoint even if the disk rejects the rows.
        with contextlib.suppress(OSError):
            # After a power cut, no checkpoint is without the rows before it.
            files.fsync(folder.parent / METRICS)
    if problem := find_problem(path):
        raise OSError(f"{path}: does not read back as written: {problem}")
    try:
        clear_partial(folder)
        kept = [other for other in list_checkpoints(folder) if other.name <= path.name]
        for old in kept[keep:] if keep else ():
            if step_of(old) not in keep_steps:
                files.remove(old)
    except OSError as error:
        log.error(f"an older checkpoint cannot be removed: {error}. The run continues")
    return path


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, Tensors]:
    """Return weights and moments by name: the tensors themselves, or copies of what is sharded, on the main process.

    Args:
        model: the bare Transformers model, not a wrapper of it.
    """
    sharded = _is_sharded(model)
    options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
    weights = get_model_state_dict(model, options=options)
    if sharded:
        moments = get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
    else:
        moments = _named_moments(model, optimizer)
    # A tied head is saved once.
    weights = {name: weights[name] for name, _ in model.named_parameters() if name in weights}
    each = (
        (f"{name}/{kind}", value)
        for name, kinds in moments.items()
        for kind, value in kinds.items()
    )
    # An optimizer may count its steps in an int.
    return weights, {name: torch.as_tensor(value) for name, value in each}


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Return each parameter's moments by its name; of ZeRO's, which are brought together, on the main process."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    # ZeroRedundancyOptimizer is not imported here, because its import is slow.
    if not hasattr(optimizer, "consolidate_state_dict"):
        return {names[parameter]: kinds for parameter, kinds in optimizer.state.items()}
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank():
        return {}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {order[index]: kinds for index, kinds in optimizer.state_dict()["state"].items()}


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths with a checkpoint's name, newest first, verified or not."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if STEP.fullmatch(path.name)), reverse=True)


def step_of(path: Path) -> int:
    """Return how many updates a checkpoint folder stands for."""
    return int(path.name.removeprefix("step-"))


def find_problem(path: Path) -> str | None:
    """Return the problem of a checkpoint, file first, or None when every byte is as it was written and can be read."""
    name = MANIFEST
    try:
        manifest = files.read_json(path / MANIFEST)
        rows, step = (
            {one: manifest["files"][one] for one in (MODEL, OPTIMIZER, STATE)},
            manifest["step"],
        )
        if type(step) is not int or path.name != step_name(step):
            return f"{MANIFEST} is of step {step!r:.40}"
        for name, row in rows.items():
            if problem := files.problem_of(path / name, row):
                return f"{name} {problem}"
        if (told := files.read_json(path / STATE)["step"]) != step:
            return f"{STATE} is of step {told!r:.40}, {MANIFEST} of step {step}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error!s:.60}"
        return f"{name} cannot be read ({why})"
    return None


def find_newest(folder: Path, begin: Path | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint in ``folder`` that verifies, and one line for each newer one that does not.

    Args:
        begin: the checkpoint that the run began at: only checkpoints that came of it count, and where there is none it is
            returned itself. It may lie in ``folder``: then the run goes back, and what came
            after it before is passed over.

    Raises BadInput when there are checkpoints and none verifies, for a run must not begin again over them; and where
    ``begin`` is needed and does not verify, or lies elsewhere and ``folder`` holds another run's checkpoints.
    """

    def is_mine(path: Path) -> bool:
        try:
            origin = files.read_json(path / STATE).get("origin")
        except (OSError, ValueError, AttributeError):
            return True  # nobody knows; it is damaged, and will be named
        return begin is not None and began_at(origin, begin)

    there, skipped = list_checkpoints(folder), []
    mine = [path for path in there if begin is None or is_mine(path)]
    for path in mine:
        if not (problem := find_problem(path)):
            return path, skipped
        skipped.append(f"{path}: {problem}")
    if begin is None:
        if skipped:
            raise BadInput(
                [
                    *skipped,
                    f"{folder}: no checkpoint verifies. To begin again, give another --run_name",
                ]
            )
        return None, []
    read_state(begin)
    if len(mine) < len(there) and begin.resolve().parent != folder.resolve():
        raise BadInput(
            f"resume_from_checkpoint = {begin}: {folder} holds checkpoints of another beginning; give another --run_name"
        )
    return begin, skipped


def origin_of(begin: Path) -> dict[str, str]:
    """Return what ``state.json`` states of the checkpoint that a run began at: its name and the hash of its weights.

    The path is not stated: the checkpoint may be moved, and ``state.json`` may be pushed to the Hub.
    """
    return {"checkpoint": begin.name, "sha256": _hash_of_weights(begin)}


def began_at(origin: Any, begin: Path) -> bool:
    """Return whether the ``origin`` in a checkpoint's ``state.json`` is the checkpoint ``begin``."""
    if not isinstance(origin, dict) or origin.get("checkpoint") != begin.name:
        return False
    try:
        return origin.get("sha256") == _hash_of_weights(begin)
    except (OSError, ValueError, KeyError, TypeError):
        return True  # it was deleted since then


def _hash_of_weights(path: Path) -> str:
    return files.read_json(path / MANIFEST)["files"][MODEL]["sha256"]


def read_state(path: Path) -> dict:
    """Return a verified checkpoint's ``state.json``. Raises BadInput when the checkpoint does not verify."""
    problem = _no_checkpoint(path) or find_problem(path)
    if problem:
        near = "" if path.exists() else did_you_mean_file(str(path), Path.is_dir)
        fix = f"give auto, none or a sound step-XXXXXXXX folder{near}"
        raise BadInput(f"resume_from_checkpoint = {path}: {problem}; {fix}")
    return files.read_json(path / STATE)


def _no_checkpoint(path: Path) -> str | None:
    """Return why a path does not lead to a checkpoint folder at all, None if it does."""
    if not path.is_dir():
        if os.path.lexists(path):
            return "this is not a folder"
        hint = ""
        if HUB_ID.fullmatch(str(path)) and not path.parent.exists():
            hint = f" (for a checkpoint on the Hub, write hub://{path})"
        return f"there is no such folder{hint}"
    if (path / MANIFEST).exists():
        return None
    inside = [*list_checkpoints(path), *list_checkpoints(path / CHECKPOINTS)]
    if inside:
        return f"this folder contains checkpoints; the newest is {inside[0]}"
    return f"this folder has no {MANIFEST}, so it is not a checkpoint"


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a verified checkpoint's weights into the model in place.

    Raises BadInput where they have not the names, shapes and types of the model's.
    """
    weights = _read(path / MODEL, dict(model.named_parameters()))
    how = StateDictOptions(full_state_dict=True, strict=False)  # a tied head was saved once
    set_model_state_dict(model, weights, options=how)


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, keeps: Callable[..., dict]
) -> None:
    """Load a verified checkpoint into the model and the optimizer in place; ``keeps``: of the optimizer's Record.

    Raises BadInput where its tensors have not the names, shapes and types of theirs.
    """
    load_weights(path, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    wanted = {
        f"{names[parameter]}/{kind}": moment
        for group in optimizer.param_groups
        for parameter in group["params"]
        for kind, moment in keeps(group, torch.empty(parameter.shape, device="meta")).items()
    }
    counted = files.read_json(path / STATE)
    # Moments do not exist before the first update.
    none_applied = counted["skipped_updates"] >= counted["step"]
    state: dict[str, Tensors] = {}
    for name, tensor in _read(path / OPTIMIZER, wanted, may_be_empty=none_applied).items():
        parameter, kind = name.split("/")
        state.setdefault(parameter, {})[kind] = tensor
    # The groups (which tensors, which settings) are the recipe's; a checkpoint holds what they have grown.
    if _is_sharded(model):
        options = StateDictOptions(full_state_dict=True)
        moments = get_optimizer_state_dict(model, optimizer, options=options) | {"state": state}
        set_optimizer_state_dict(model, optimizer, moments, options=options)
        return
    share = getattr(optimizer, "optim", optimizer)  # of ZeRO, this process's share
    # Not by load_state_dict, which casts moments to the type of their weight.
    for parameter in (p for group in share.param_groups for p in group["params"]):
        kinds = state.get(names[parameter], {})
        share.state[parameter] = {
            kind: _moment(tensor, parameter.device) for kind, tensor in kinds.items()
        }


def _read(file: Path, wanted: Tensors, *, may_be_empty: bool = False) -> Tensors:
    """Return a file's tensors. Raises BadInput unless they are like those that are wanted, or none where that may be."""
    try:
        found = _load_tensors(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read ({error})") from None
    for name in sorted(found.keys() | wanted.keys()) if found or not may_be_empty else ():
        there, ours = (
            f"{tuple(each[name].shape)} {each[name].dtype}" if name in each else "not there"
            for each in (found, wanted)
        )
        if there != ours:
            raise BadInput(
                f"{file}: {name} is {there}, and in this run {ours}; move {file.parent} away to resume from the one before"
            )
    return found


def _load_tensors(file: Path) -> Tensors:
    """Return the tensors of a file, also where the file system cannot map it into memory."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        if errno_of(error) not in files.NO_MAPPING:
            raise
        return load_bytes(file.read_bytes())


def _moment(tensor: torch.Tensor, device: torch.device) -> torch.Tensor | int:
    count = tensor.dim() == 0 and not tensor.is_floating_point()  # it was saved from an int
    return tensor.item() if count else tensor.to(device)
