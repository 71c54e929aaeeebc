"""Where the time of a few steady steps went: a trace of torch.profiler and a table."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pretrain.base import files
from pretrain.run.clock import Clock

log = logging.getLogger(__name__)

SKIPPED, WARM_UP, RECORDED = 8, 2, 3  # updates: compiling and clocks settle; the profiler itself; those of the trace


@contextlib.contextmanager
def profiling(folder: Path | None, device: torch.device, clock: Clock) -> Iterator[Callable[[], None]]:
    """Record a few updates of this process into ``folder``; without one do nothing. Give what is called after each update.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev) and ``table.txt``, and logs where they lie, or why there are
    none. The training's ``clock`` stands still meanwhile, for writing takes seconds.
    """
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    on_card, table = device.type == "cuda", folder / "table.txt"
    files.remove(table)

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
        which = "self_device_time_total" if on_card else "self_cpu_time_total"
        files.write_text(table, recorded.key_averages().table(sort_by=which, max_name_column_width=60))
        log.info(f"profile of {RECORDED} updates in {folder}/: table.txt, and trace.json.gz for ui.perfetto.dev")

    def step() -> None:
        with clock.paused():
            recording.step()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    plan = schedule(wait=SKIPPED, warmup=WARM_UP, active=RECORDED, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write, acc_events=True) as recording:
        yield step
    if not table.is_file():
        log.info(f"no profile of fewer than {SKIPPED + WARM_UP + RECORDED} updates; give a larger --max_steps")
