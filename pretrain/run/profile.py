"""Where the time of a few steady steps went: a trace of torch.profiler and a table."""

import logging
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pretrain.base import files
from pretrain.run.clock import Clock

log = logging.getLogger(__name__)

SKIPPED, WARM_UP, RECORDED = 8, 2, 3  # updates: compiling and clocks settle; the profiler itself; those of the trace


class Profile:
    """Records a few updates of this process into ``folder``; without one it does nothing.

    Writes ``trace.json.gz`` (for https://ui.perfetto.dev) and ``table.txt``, and logs where they lie, or why there are
    none. The training's ``clock`` stands still meanwhile, for writing takes seconds.
    """

    def __init__(self, folder: Path | None, device: torch.device, clock: Clock):
        self.on_card = device.type == "cuda"
        self._profile, self._written, self._clock = None, False, clock
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_card else [])]
            plan = schedule(wait=SKIPPED, warmup=WARM_UP, active=RECORDED, repeat=1)
            self._profile = profile(
                activities=activities, schedule=plan, on_trace_ready=partial(self._write, folder), acc_events=True
            )
            self._profile.start()

    def step(self) -> None:
        """An update is done."""
        if self._profile is not None:
            with self._clock.paused():
                self._profile.step()

    def close(self) -> None:
        """End; a run shorter than the recording has none."""
        if self._profile is not None:
            self._profile.stop()
            if not self._written:
                log.info(f"no profile of fewer than {SKIPPED + WARM_UP + RECORDED} updates; give a larger --max_steps")
            self._profile = None

    def _write(self, folder: Path, recorded: profile) -> None:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
        which = "self_device_time_total" if self.on_card else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=which, max_name_column_width=60)
        files.write_text(folder / "table.txt", table)
        self._written = True
        log.info(f"profile of {RECORDED} updates in {folder}/: table.txt, and trace.json.gz for ui.perfetto.dev")
