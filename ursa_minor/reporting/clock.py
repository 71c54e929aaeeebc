"""Measure training time and speed."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Measures training time. It is paused during evaluation and saving.

    Args:
        flops_per_token: of the forward and backward pass.
        peak_flops: peak of all devices together in FLOP/s. If it is None, MFU is unknown.
        elapsed: seconds of training before this process started.
    """

    def __init__(self, flops_per_token: int, peak_flops: float | None, elapsed: float = 0.0):
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._earlier_seconds = elapsed  # until the clock was started the last time
        self._started: float | None = time.perf_counter()  # None while it is paused
        self._start_window(elapsed)

    def _start_window(self, elapsed: float) -> None:
        """Start to measure the speed from this training time."""
        self._window_start = elapsed
        self._window_tokens = 0
        self._window_updates = 0

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, including those before a resume."""
        if self._started is None:
            return self._earlier_seconds
        return self._earlier_seconds + (time.perf_counter() - self._started)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the block."""
        self._earlier_seconds = self.elapsed
        self._started = None
        try:
            yield
        finally:
            self._started = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Add one update, which has trained on this number of tokens."""
        self._window_tokens += tokens
        self._window_updates += 1

    def read(self) -> dict[str, float]:
        """Return the speed since the last call.

        Returns:
            ``tokens_per_second``, ``ms_per_step`` and, if the peak is known, ``mfu`` (a fraction).
        """
        now = self.elapsed
        seconds = max(now - self._window_start, 1e-9)
        tokens_per_second = self._window_tokens / seconds
        speed = {
            "tokens_per_second": tokens_per_second,
            "ms_per_step": 1000 * seconds / max(self._window_updates, 1),
        }
        self._start_window(now)
        if self.peak_flops:
            mfu = tokens_per_second * self.flops_per_token / self.peak_flops
            if mfu <= 1:  # above 1, the peak is that of another GPU
                speed["mfu"] = mfu
        return speed
