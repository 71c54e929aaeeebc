"""Where the time of a few steady steps went: a trace of torch.profiler and a table."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ursa_minor.base import files
from ursa_minor.base.wording import pluralize
from ursa_minor.recipe.command_line import PROFILE_UPDATES
from ursa_minor.reporting.clock import Clock

log = logging.getLogger(__name__)

WARM_UP_UPDATES = 2  # updates in which the profiler itself settles
RECORDED = 3  # updates in the trace
# Updates until compilation and clock rates have settled.
SKIPPED = PROFILE_UPDATES - WARM_UP_UPDATES - RECORDED


@contextlib.contextmanager
def profiling(
    folder: Path | None, device: torch.device, clock: Clock, *, updates_left: int
) -> Iterator[Callable[[], None]]:
    """Record a few updates of this process into ``folder``. Yield a function to call after each update.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev) and ``table.txt``, and logs where they are, or why there are
    none. The training's ``clock`` stands still meanwhile, because writing takes seconds.

    Args:
        folder: where to write, or None to record nothing.
        updates_left: the number of updates until max_steps. If they are too few, nothing is recorded.
    """
    if folder is None:
        yield lambda: None
        return
    if updates_left < PROFILE_UPDATES:
        left = pluralize(updates_left, "update is", "updates are")
        log.info(f"no profile: it takes {PROFILE_UPDATES} updates, and {left} left to train")
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    on_card, table = device.type == "cuda", folder / "table.txt"
    files.remove(table)
    updates = 0

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
        which = "self_device_time_total" if on_card else "self_cpu_time_total"
        files.write_text(
            table, recorded.key_averages().table(sort_by=which, max_name_column_width=60)
        )
        log.info(
            f"profile of {RECORDED} updates in {folder}/: table.txt, and trace.json.gz for ui.perfetto.dev"
        )

    def step() -> None:
        nonlocal updates
        updates += 1
        with clock.paused():
            recording.step()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    plan = schedule(wait=SKIPPED, warmup=WARM_UP_UPDATES, active=RECORDED, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=write, acc_events=True
    ) as recording:
        yield step
    if not table.is_file():
        done = pluralize(updates, "update", "updates")
        log.info(f"no profile: it takes {PROFILE_UPDATES} updates, and the run ended after {done}")
