"""What a run says: the terminal, metrics.jsonl, samples.txt, and the meter of speed.

On a terminal there is a progress bar; in a file or a pipe there is one line every few seconds instead.
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from pretrain.base import files

HEADING = re.compile(r"==== step (\d+) · prompt .* ====$")


class Meter:
    """A clock of training time: looking (validation, samples, saving) pauses it.

    Args:
        flops_per_token: forward and backward.
        peak_flops: of all devices together, FLOP/s; None = unknown, then MFU is too.
        elapsed: seconds of training before this process.
    """

    def __init__(self, flops_per_token: int, peak_flops: float | None, elapsed: float = 0.0):
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._before, self._since = elapsed, time.perf_counter()
        self._window_tokens, self._window_start = 0, elapsed
        self.updates, self._window_updates = 0, 0

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, also before a resume."""
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

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
        self.updates += 1

    def read(self) -> dict[str, float]:
        """Return the speed since the last read.

        ``tokens_per_second``, ``ms_per_step`` and, where the peak is known, ``mfu`` (a fraction).
        """
        now = self.elapsed
        seconds = max(now - self._window_start, 1e-9)
        speed = self._window_tokens / seconds
        result = {"tokens_per_second": speed, "ms_per_step": 1000 * seconds / max(self._window_updates, 1)}
        self._window_tokens, self._window_updates, self._window_start = 0, 0, now
        if self.peak_flops and (mfu := speed * self.flops_per_token / self.peak_flops) <= 1:
            result["mfu"] = mfu  # more would only say that the peak is another card's
        return result


class Report:
    """Writes a run's metrics and samples and speaks to the terminal; on other processes it is silent.

    Args:
        first_step: where this process begins. Rows of later looks and updates are of a future that the checkpoint
            does not know: they are dropped, with a torn last line, and written again as the run gets there.
    """

    def __init__(self, run_dir: Path, *, first_step: int, max_steps: int, tokens_per_step: int, is_main: bool):
        self.first_step, self.max_steps, self.tokens_per_step = first_step, max_steps, tokens_per_step
        self.is_main, self._hinted = is_main, False
        self.metrics_path, self.samples_path = run_dir / "metrics.jsonl", run_dir / "samples.txt"
        self.trackers = None  # what else hears each row: has log(step, row) and sample(step, rows)
        if not is_main:
            return
        rows = [row for row in read_metrics(self.metrics_path) if _is_past(row, first_step)]
        files.write_text(self.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))
        self._metrics = open(self.metrics_path, "a", encoding="utf-8")
        files.write_text(self.samples_path, _samples_before(self.samples_path, first_step))
        self._bar = None
        self._last_line = -1e9
        self._started: tuple[int, float] | None = None
        self._told = False

    def hint(self, text: str | None) -> None:
        """Say what would use the card better, once."""
        if text and not self._hinted:
            self._hinted = True
            self.say(f"hint: {text}")

    def extend(self, max_steps: int, text: str) -> None:
        """Say that the run has another length now, and count towards it."""
        self.max_steps, self._started, self._told = max_steps, None, False
        self.say(text)
        if self.is_main and self._bar is not None:
            self._bar.total = max_steps

    def start_progress(self) -> None:
        """Show the progress bar (on a terminal)."""
        if self.is_main and sys.stderr.isatty():
            self._bar = tqdm(total=self.max_steps, initial=self.first_step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print a line, beside the bar where there is one."""
        if not self.is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a row to metrics.jsonl: step, tokens, values. On disk before this returns to the loop."""
        if self.is_main:
            row = {"step": step, "tokens": step * self.tokens_per_step, **values}
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
            if self.trackers:
                self.trackers.log(step, row)

    def progress(self, step: int, values: dict[str, float]) -> None:
        """Show a row of an update: the bar moves; without a terminal a line at most every five seconds, and the last."""
        if not self.is_main:
            return
        elapsed = values["elapsed_seconds"]
        left = "?"
        if self._started is None:
            self._started = (step, elapsed)
        elif step > self._started[0]:
            per_step = (elapsed - self._started[1]) / (step - self._started[0])
            left = duration((self.max_steps - step) * per_step)
            if not self._told:
                self._told = True
                self.say(f"expected training time {duration((self.max_steps - self.first_step) * per_step)}")
        mfu = f"{100 * values['mfu']:.1f}%" if "mfu" in values else "n/a"
        shown = {"loss": f"{values['train/loss']:.3f}", "tok/s": f"{values['tokens_per_second']:,.0f}", "MFU": mfu}
        shown["ms"] = f"{values['ms_per_step']:,.0f}"
        if "gpu/memory" in values:
            shown["memory"] = f"{values['gpu/memory']:.0%}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        if time.monotonic() - self._last_line < 5 and step < self.max_steps:
            return
        self._last_line = time.monotonic()
        width = len(str(self.max_steps))
        words = "  ".join(f"{name} {value}" for name, value in shown.items())
        self.say(f"step {step:{width}d}/{self.max_steps}  {words}  left {left}")

    def samples(self, step: int, texts: list[tuple[str, str]]) -> None:
        """Append samples, each a prompt and what follows it, to samples.txt."""
        if self.is_main:
            with open(self.samples_path, "a", encoding="utf-8") as out:
                for prompt, text in texts:
                    out.write(f"==== step {step} · prompt {prompt!r} ====\n{prompt}{text}\n\n")
            if self.trackers:
                self.trackers.sample(step, texts)

    def close(self) -> None:
        """Let the bar and the file go."""
        if self.is_main:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            self._metrics.close()
            if self.trackers:
                self.trackers.close()


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a metrics.jsonl; a torn last line (a kill while writing) is left out."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def duration(seconds: float) -> str:
    """Return seconds as people read them: 12 s, 3 min 20 s, 5 h 04 min, 2 d 03 h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 2 * 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"


def due(step: int, interval: int, last: bool = False) -> bool:
    """Whether something that happens every ``interval`` steps (0 = never) happens at this visit; also at the last."""
    return interval > 0 and (last or step % interval == 0)


def _is_past(row: dict, first_step: int) -> bool:
    # A row of an update belongs to the past of the step that it ended; a look at `first_step` is done again.
    step = row.get("step", 0)
    return step < first_step or (step == first_step and "train/loss" in row)


def _samples_before(path: Path, first_step: int) -> str:
    if not path.is_file():
        return ""
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        heading = HEADING.match(line)
        if heading and int(heading[1]) >= first_step:
            break
        kept.append(line)
    return "".join(kept)
