"""Stopping early: SIGTERM, Ctrl-C, or a launcher that died, agreed on by all processes."""

import os
import signal

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Set by `accelerate launch` and by torchrun: then the parent process is a launcher, and its death is a request to stop
# (`accelerate launch` dies of SIGTERM without telling its child).
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


class StopRequest:
    """Notes a request to stop and lets the loop ask for it where it is safe.

    Every process of a launch may hear of it at another moment; ``agreed`` makes them stop at the same place. The
    question goes over a small gloo group: no device is involved, no stream waits.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED) else None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signal = signal.Signals(number)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        if self.signal is None and self._parent is not None and os.getppid() != self._parent:
            self.signal = signal.SIGTERM
        return self.signal is not None

    def agreed(self) -> bool:
        """Return whether any process was asked to stop; every process must call it at the same place."""
        (stop,) = self.any_of(self.requested)
        if stop and self.signal is None:
            self.signal = signal.SIGTERM
        return stop

    def any_of(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether any process has it set; every process must call it at the same place."""
        if self._group is None:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in tensor.tolist()]

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + int(self.signal or signal.SIGTERM)
