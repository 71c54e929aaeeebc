"""Stopping early: a signal such as SIGTERM or Ctrl-C, or a launcher that died, agreed on by all processes."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ursa_minor.base.errors import TrainingStopped
from ursa_minor.base.signals import SIGNALS

LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|timed? ?out|timing out|broken pipe|remote process exited",
    re.IGNORECASE,
)
# Set by `accelerate launch` and by torchrun: then the parent process is a launcher, and its death is a request to stop
# (`accelerate launch` dies of SIGTERM without telling its child).
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
CHECK_SECONDS = 0.5


def end_with_launcher(parent: int) -> None:
    """Send this process SIGTERM when its launcher has died; without a launcher do nothing.

    Args:
        parent: its process id, noted as early as can be: a launcher that has died since is noticed, too.
    """
    if any(name in os.environ for name in LAUNCHED):
        threading.Thread(target=_wait_for_end_of, args=(parent,), daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Notes a request to stop and lets the loop ask for it where it is safe.

    Every process of a launch may receive it at another moment; ``agreed`` makes them stop at the same place. The
    question goes over a small gloo group: no device is involved, no stream waits. It is also where a process that
    died, or hangs for ``timeout`` seconds, is noticed first.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.signal: signal.Signals | None = None
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if several else None
        )
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGHUP and is_ignored:  # by nohup
                continue
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        # After Ctrl-C, the launcher ends as well.
        self.signal = self.signal or signal.Signals(number)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None

    def agreed(self) -> bool:
        """Return whether any process was asked to stop; every process must call it at the same place."""
        (stop,) = self.any_of(self.requested)
        if stop and self.signal is None:
            self.signal = signal.SIGTERM
        return stop

    def any_of(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether any process has it set; every process must call it at the same place.

        Raises TrainingStopped when another process is lost.
        """
        if self._group is None:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        with raise_on_lost_peer():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it.

        0 under ``torchrun --max_restarts``, which would start a failed process anew although it was asked to stop.
        """
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            return 0
        return 128 + int(self.signal or signal.SIGTERM)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a signal end the process inside the block, as before StopRequest: there is nothing yet to be saved."""
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    noting = {number: signal.signal(number, signal.SIG_DFL) for number in heeded}
    try:
        yield
    finally:
        for number, handler in noting.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def raise_on_lost_peer() -> Iterator[None]:
    """Turn the error of an exchange with a lost process, inside the block, into TrainingStopped.

    NCCL and gloo raise RuntimeErrors of many wordings; what they have in common is that a connection failed or timed
    out.
    """
    try:
        yield
    except RuntimeError as error:
        words = LOST.search(str(error))
        if words is None:
            raise
        raise TrainingStopped(
            f"another process of this run died, was killed (memory?) or hangs ({words[0]}); its messages, if any, "
            f"are above or in its log. The same command resumes from the newest checkpoint; torchrun and accelerate "
            f"launch do so by themselves with --max_restarts 3. If the time limit is too short: --ddp_timeout",
            alone=True,
        ) from None
