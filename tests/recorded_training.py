"""Run train.py, log the windows of each micro-batch, and kill or stop the process on request.

Environment variables:

- LEDGER: the file to which each micro-batch appends a line "step micro_step rank windows" before
  it is trained on.
- KILL_AT: "step:N" kills this process with SIGKILL in the N-th update, after all earlier saves are
  on disk. "save:STAGE:N" kills it after a stage of the N-th save.
- STOP_AT: "STEP:MICRO_STEP" sends this process the signal STOP_BY at that micro-batch.

If a variable of controlled_reader.py is set, that script prepares the data.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import train
from ursa_minor.base import files, run_files
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.loading import corpus
from ursa_minor.data.loading import order as window_order
from ursa_minor.optim import update
from ursa_minor.run import resume

JSON_STAGES = {"state.json": "state", "manifest.json": "manifest"}  # by the name of the file


def kill_this_process() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def call_after(module: ModuleType | type, name: str, callback: Callable[[tuple], None]) -> None:
    """Replace a function by one that calls ``callback(arguments)`` after the original."""
    original = getattr(module, name)

    def replacement(*args, **kwargs):
        result = original(*args, **kwargs)
        callback(args)
        return result

    setattr(module, name, replacement)


class RecordedOrder(window_order.TrainOrder):
    """Log the windows of each micro-batch."""

    def windows(self, step, micro_step, rank, num_windows):
        draws = super().windows(step, micro_step, rank, num_windows)
        words = [f"{source}:{window}" for source, window in draws]
        with open(os.environ["LEDGER"], "a") as ledger:
            ledger.write(f"{step} {micro_step} {rank} {' '.join(words)}\n")
        if os.environ.get("STOP_AT") == f"{step}:{micro_step}":
            os.kill(os.getpid(), getattr(signal, os.environ["STOP_BY"]))
        return draws


def main(argv: list[str] | None = None) -> int:
    """Run train.py as the environment variables say."""
    window_order.TrainOrder = RecordedOrder
    if "KILL_READER" in os.environ or "HOLD_READER" in os.environ:
        use_controlled_reader()
    event, *arguments = os.environ.get("KILL_AT", "").split(":")
    if event == "step":
        kill_in_update(int(arguments[0]))
    elif event == "save":
        kill_in_save(arguments[0], int(arguments[1]))
    return train.main(argv)


def use_controlled_reader() -> None:
    """Prepare the data with controlled_reader.py instead of prepare_data.py."""
    start = corpus.Preparation
    script = str(Path(__file__).with_name("controlled_reader.py"))

    def start_controlled_reader(command):
        python, _, *flags = command
        return start([python, script, *flags])

    corpus.Preparation = start_controlled_reader


def kill_in_update(number: int) -> None:
    """Kill this process in the ``number``-th update.

    Earlier saves are finished first, so that the newest checkpoint does not depend on timing.
    """
    savers = []
    updates = 0

    def remember_saver(args: tuple) -> None:
        savers.append(args[0])

    def count_update(_: tuple) -> None:
        nonlocal updates
        updates += 1
        if updates == number:
            savers[-1].finish()
            kill_this_process()

    call_after(resume.Checkpoints, "__init__", remember_saver)
    call_after(update, "update", count_update)


def kill_in_save(stage: str, number: int) -> None:
    """Kill this process after the named stage of the ``number``-th save that has it."""
    saves = 0

    def finish_stage(finished: str) -> None:
        nonlocal saves
        if finished == stage:
            saves += 1
            if saves == number:
                kill_this_process()

    def after_tensors(args: tuple) -> None:
        finish_stage("model" if args[1].name == checkpoint.MODEL else "optimizer")

    def after_json(args: tuple) -> None:
        finish_stage(JSON_STAGES.get(args[0].name, ""))

    def after_rename(_: tuple) -> None:
        finish_stage("rename")

    remove = files.remove

    def remove_model_first(path: Path) -> None:
        if stage == "rotate" and run_files.STEP.fullmatch(path.name):
            (path / checkpoint.MODEL).unlink(missing_ok=True)
            finish_stage("rotate")
        remove(path)

    call_after(checkpoint, "save_file", after_tensors)
    call_after(files, "write_json", after_json)
    call_after(checkpoint, "find_problem", after_rename)
    files.remove = remove_model_first


if __name__ == "__main__":
    sys.exit(main())
