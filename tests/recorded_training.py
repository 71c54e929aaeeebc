"""train.py with a witness: each micro-batch's (step, micro_step, rank, windows) is written before it is trained on.

Environment: LEDGER = file to append to; KILL_AT = "step:N" or "save:STAGE:N" kills this process with SIGKILL at the N-th
update, with each save before it on disk, or at a stage of the N-th save; STOP_AT = "STEP:MICRO_STEP" sends it the
signal STOP_BY there. Its readers are controlled_reader.py where one of that file's variables is set.
"""

import os
import signal
import sys
from pathlib import Path

import train
from ursa_minor.base import files
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.loading import corpus
from ursa_minor.data.loading import order as window_order
from ursa_minor.optim import update
from ursa_minor.run import resume


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def call_after(module, name, when) -> None:
    """Replace a function by itself followed by ``when(arguments)``."""
    real = getattr(module, name)

    def replaced(*args, **kwargs):
        result = real(*args, **kwargs)
        when(args)
        return result

    setattr(module, name, replaced)


class RecordedOrder(window_order.TrainOrder):
    """Writes down what is asked for."""

    def windows(self, step, micro_step, rank, num_windows):
        draws = super().windows(step, micro_step, rank, num_windows)
        with open(os.environ["LEDGER"], "a") as ledger:
            ledger.write(f"{step} {micro_step} {rank} {' '.join(f'{s}:{w}' for s, w in draws)}\n")
        if os.environ.get("STOP_AT") == f"{step}:{micro_step}":
            os.kill(os.getpid(), getattr(signal, os.environ["STOP_BY"]))
        return draws


def main(argv: list[str] | None = None) -> int:
    """Train under the eyes of a witness."""
    window_order.TrainOrder = RecordedOrder
    if {"KILL_READER", "HOLD_READER"} & set(os.environ):
        real, child = corpus.Preparation, str(Path(__file__).with_name("controlled_reader.py"))
        corpus.Preparation = lambda command: real([command[0], child, *command[2:]])
    what, *where = os.environ.get("KILL_AT", "").split(":")
    if what == "step":
        kill_in_update(int(where[0]))
    elif what == "save":
        kill_in_save(where[0], int(where[1]))
    return train.main(argv)


def kill_in_update(number: int) -> None:
    """Arrange for death in the ``number``-th update; which checkpoint is the newest then is not left to chance."""
    savers, updates = [], []
    call_after(resume.Checkpoints, "__init__", lambda args: savers.append(args[0]))

    def at(args) -> None:
        updates.append(1)
        if len(updates) == number:
            savers[-1].finish()
            kill_this_process()

    call_after(update, "update", at)


def kill_in_save(stage: str, number: int) -> None:
    """Arrange for death after the named stage of the ``number``-th save that has it."""
    seen = []

    def at(stage_now: str) -> None:
        if stage_now == stage:
            seen.append(1)
            if len(seen) == number:
                kill_this_process()

    call_after(
        checkpoint,
        "save_file",
        lambda args: at("model" if args[1].name == checkpoint.MODEL else "optimizer"),
    )
    stages = {checkpoint.STATE: "state", checkpoint.MANIFEST: "manifest"}
    call_after(files, "write_json", lambda args: at(stages.get(args[0].name, "")))
    call_after(checkpoint, "find_problem", lambda args: at("rename"))
    remove = files.remove

    def half_removed(path):
        if stage == "rotate" and checkpoint.STEP.fullmatch(path.name):
            (path / checkpoint.MODEL).unlink(missing_ok=True)
            at("rotate")
        remove(path)

    files.remove = half_removed


if __name__ == "__main__":
    sys.exit(main())
