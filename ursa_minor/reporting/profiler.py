"""Profile a few updates with torch.profiler: a trace and a table of the operations."""

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

WARM_UP_UPDATES = 2  # updates in which the profiler runs, but its results are discarded
RECORDED = 3  # updates in the trace
# Updates until compilation and clock rates have settled.
SKIPPED = PROFILE_UPDATES - WARM_UP_UPDATES - RECORDED


@contextlib.contextmanager
def profiling(
    folder: Path | None, device: torch.device, clock: Clock, *, updates_left: int
) -> Iterator[Callable[[], None]]:
    """Record a few updates of this process. Yield a function to call after each update.

    The results are ``trace.json.gz`` (for https://ui.perfetto.dev) and ``table.txt``. A log line
    names their folder, or the reason why there are none.

    Args:
        folder: the folder for the results, or None to record nothing.
        device: the device that the process trains on.
        clock: the training time. It is paused while results are written, which takes seconds.
        updates_left: the number of updates until max_steps. If they are too few, nothing is
            recorded.
    """
    if folder is None:
        yield lambda: None
        return
    if updates_left < PROFILE_UPDATES:
        remaining = pluralize(updates_left, "update is", "updates are")
        log.info(f"no profile: it needs {PROFILE_UPDATES} updates, and {remaining} left")
        yield lambda: None
        return

    activities = [ProfilerActivity.CPU]
    sort_key = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        sort_key = "self_device_time_total"
    folder.mkdir(parents=True, exist_ok=True)
    table_file = folder / "table.txt"
    files.remove(table_file)
    num_updates = 0

    def write_results(recorded: profile) -> None:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
        averages = recorded.key_averages()
        table = averages.table(sort_by=sort_key, max_name_column_width=60)
        files.write_text(table_file, table)
        log.info(
            f"profile of {RECORDED} updates in {folder}/: "
            f"table.txt, and trace.json.gz for https://ui.perfetto.dev"
        )

    def count_update() -> None:
        nonlocal num_updates
        num_updates += 1
        with clock.paused():
            recording.step()

    plan = schedule(wait=SKIPPED, warmup=WARM_UP_UPDATES, active=RECORDED, repeat=1)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=write_results, acc_events=True
    ) as recording:
        yield count_update
    if not table_file.is_file():
        done = pluralize(num_updates, "update", "updates")
        log.info(f"no profile: it needs {PROFILE_UPDATES} updates, and the run ended after {done}")
