"""Stop all processes of a run at the same step after a signal or the death of the launcher."""

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

# Errors of NCCL and gloo after the connection to another process has failed or timed out.
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|timed? ?out|timing out|broken pipe"
    r"|remote process exited",
    re.IGNORECASE,
)
# `accelerate launch` sets the first variable and torchrun the second. If one of them is set, the
# parent process is a launcher. `accelerate launch` ends after SIGTERM without forwarding the signal
# to its child, so the child must notice it.
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
CHECK_SECONDS = 0.5


def end_with_launcher(parent: int) -> None:
    """Send SIGTERM to this process when its launcher has died. Do nothing without a launcher.

    Args:
        parent: process id of the launcher. It must be read as early as possible, because the parent
            becomes another process when the launcher dies.
    """
    if any(name in os.environ for name in LAUNCHED):
        threading.Thread(target=_wait_for_end_of, args=(parent,), daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Records signals that stop a run. The training loop polls for them where it is safe to stop.

    Each process of a launch may receive the signal at a different time, and ``agreed`` makes all of
    them stop at the same step. The processes communicate over their own gloo group, which needs no
    GPU and does not wait for its work.

    Args:
        timeout: seconds after which a process that does not answer is considered lost.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.signal: signal.Signals | None = None
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGHUP and is_ignored:  # by nohup
                continue
            signal.signal(number, self._record)

    def _record(self, number: int, frame: object) -> None:
        # Only the first signal counts: after Ctrl-C, the launcher may also send SIGTERM.
        if self.signal is None:
            self.signal = signal.Signals(number)

    @property
    def requested(self) -> bool:
        """Whether this process has received a signal to stop."""
        return self.signal is not None

    def agreed(self) -> bool:
        """Return whether any process has received a signal to stop.

        Every process must call this at the same step.
        """
        (stop,) = self.any_of(self.requested)
        if stop and self.signal is None:
            self.signal = signal.SIGTERM
        return stop

    def any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is true in any process.

        Every process must call this at the same step, with the same number of flags.

        Raises:
            TrainingStopped: another process has died or does not answer.
        """
        if self._group is None:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        with raise_on_lost_peer():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    @property
    def exit_code(self) -> int:
        """The exit status after the signal: 128 plus its number, as in a shell.

        It is 0 under ``torchrun --max_restarts``, which would restart a process that fails.
        """
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            return 0
        return 128 + int(self.signal or signal.SIGTERM)


@contextlib.contextmanager
def default_signal_actions() -> Iterator[None]:
    """Let a signal end the process inside the block, where there is nothing to save yet.

    Afterwards, ``StopRequest`` records signals again.
    """
    handlers = {}
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_requests(timeout: float) -> Iterator[StopRequest]:
    """Record signals inside the block. Afterwards, they have the actions that they had before.

    Args:
        timeout: see ``StopRequest``.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield StopRequest(timeout)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def raise_on_lost_peer() -> Iterator[None]:
    """Raise TrainingStopped instead of the error of a collective operation with a lost process.

    NCCL and gloo raise RuntimeErrors with various messages. All of them state that a connection has
    failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:
        match = LOST_PEER.search(str(error))
        if match is None:
            raise
        raise TrainingStopped(
            f"another process of this run died, was killed (memory?) or hangs ({match[0]}); its "
            f"messages, if any, are above or in its log. The same command resumes from the newest "
            f"checkpoint; torchrun and accelerate launch do this automatically with "
            f"--max_restarts 3. If the time limit is too short, increase --ddp_timeout",
            print_on_every_process=True,
        ) from None
