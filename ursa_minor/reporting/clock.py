"""The clock of training time, and the speed since it was last read."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Measures training time; evaluating and saving pause it.

    Args:
        flops_per_token: forward and backward.
        peak_flops: of all devices together, FLOP/s; None = unknown, then MFU is too.
        elapsed: seconds of training before this process.
    """

    def __init__(self, flops_per_token: int, peak_flops: float | None, elapsed: float = 0.0):
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._before = elapsed
        self._since: float | None = time.perf_counter()
        self._window_tokens, self._window_updates, self._window_start = 0, 0, elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, also before a resume."""
        return self._before + (
            time.perf_counter() - self._since if self._since is not None else 0.0
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the block."""
        self._before, self._since = self.elapsed, None
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Add an update and the tokens trained on in it."""
        self._window_tokens += tokens
        self._window_updates += 1

    def read(self) -> dict[str, float]:
        """Return the speed since the last read.

        ``tokens_per_second``, ``ms_per_step`` and, where the peak is known, ``mfu`` (a fraction).
        """
        now = self.elapsed
        seconds = max(now - self._window_start, 1e-9)
        speed = self._window_tokens / seconds
        result = {
            "tokens_per_second": speed,
            "ms_per_step": 1000 * seconds / max(self._window_updates, 1),
        }
        self._window_tokens, self._window_updates, self._window_start = 0, 0, now
        if self.peak_flops and (mfu := speed * self.flops_per_token / self.peak_flops) <= 1:
            result["mfu"] = mfu  # more only means that the peak is another card's
        return result
