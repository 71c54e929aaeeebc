"""Where the time of a few steady steps went: a trace of torch.profiler and a table."""

import functools
import logging
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from pretrain.base import files
from pretrain.run.clock import Clock

log = logging.getLogger(__name__)

SKIPPED, WARM_UP, RECORDED = 8, 2, 3  # updates: compiling and clocks settle; the profiler itself; those of the trace
KINDS = {  # the first that an operation's or kernel's name matches; a compiled kernel's name lists what it computes
    "attention": r"flash|attention|fmha|mha",
    "matrix products": r"gemm|addmm|\bmm\b|::bmm|baddbmm|matmul|cutlass|xmma|::linear|mkl",
    "exchange": r"nccl|c10d|gloo|allreduce|all_gather|reduce_scatter",
    "optimizer": r"adam|lerp|Optimizer|foreach|multi_tensor",
    "loss": r"softmax|nll_loss|logsumexp|one_hot|scatter|gather",
    "norms, activations": r"layer_norm|gelu|dropout|tanh|rsqrt|_mean_",
    "other compiled kernels": r"triton|inductor|graph_\d|Torch-Compiled|CompiledFunction|cpp_fused",
    "copies": r"memcpy|memset|copy_|_to_copy|::to\b|fill_|zero_",
}
# The profiler's own waits, to which it adds the kernels that were started meanwhile, a second time.
OVERHEAD = r"^(Command Buffer Full|Activity Buffer Request|Buffer Flush|Instrumentation|Resource)$"


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
            write = functools.partial(self._write, folder)
            plan = schedule(wait=SKIPPED, warmup=WARM_UP, active=RECORDED, repeat=1)
            self._profile = profile(activities=activities, schedule=plan, on_trace_ready=write, acc_events=True)
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
                least = SKIPPED + WARM_UP + RECORDED
                log.info(f"no profile: the run ended before {least} updates; give a larger --max_steps")
            self._profile = None

    def _write(self, folder: Path, recorded: profile) -> None:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
        rows = recorded.key_averages()
        which = "self_device_time_total" if self.on_card else "self_cpu_time_total"
        table = rows.table(sort_by=which, row_limit=30, max_name_column_width=60)
        files.write_text(folder / "table.txt", f"{_by_kind(recorded.events(), which)}\n{table}")
        self._written = True
        log.info(f"profile of {RECORDED} updates in {folder}/: table.txt, and trace.json.gz for ui.perfetto.dev")


def _by_kind(events: Iterable[FunctionEvent], which: str) -> str:
    """Return a table of milliseconds an update by kind of operation; what the optimizer calls is the optimizer's.

    Args:
        which: the attribute with an event's own microseconds. A kernel's are its operation's, on the host.
    """
    sums = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in events:
        if event.device_type == DeviceType.CPU and not re.search(OVERHEAD, event.name):
            sums[_kind(event)] += getattr(event, which) / 1000 / RECORDED
    total = sum(sums.values()) or 1.0
    lines = [f"{kind:22} {ms:10.2f} ms {ms / total:6.1%}" for kind, ms in sorted(sums.items(), key=lambda row: -row[1])]
    return "\n".join([f"{'an update':22} {total:10.2f} ms", *lines]) + "\n"


def _kind(event: FunctionEvent) -> str:
    above = event
    while above is not None:
        if above.name.startswith("Optimizer.step#"):
            return "optimizer"
        above = above.cpu_parent
    return next((kind for kind, words in KINDS.items() if re.search(words, event.name, re.IGNORECASE)), "other")
