"""Report a run: to the terminal, metrics.jsonl, samples.txt, curves.png and the trackers.

On a terminal there is a progress bar. In a file or a pipe there is one line every few seconds
instead.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ursa_minor.base import files
from ursa_minor.base.errors import space_fix
from ursa_minor.base.redaction import redact
from ursa_minor.base.run_files import (
    CURVES,
    METRICS,
    SAMPLE_HEADING,
    SAMPLES,
    iterate_metrics,
    sample_heading,
)
from ursa_minor.checkpoint.state import RunState
from ursa_minor.data.tokens.tokenizer import REPLACEMENT_CHARACTER
from ursa_minor.evaluation.evaluator import describe_loss, describe_scores
from ursa_minor.evaluation.task import Task
from ursa_minor.machine import device as hardware
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys, reference_curves
from ursa_minor.reporting import curves
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.trackers import Trackers, position_after

log = logging.getLogger(__name__)

# The first lines of samples.txt. The note on noise is left out if the run has an init_from.
NOISE = "At step 0 the weights are random, and so is the text.\n"
BYTES = (
    f"({REPLACEMENT_CHARACTER} represents bytes that are not a character. "
    f"A token may be a part of a character, and later samples contain fewer of these.)\n\n"
)
EXPECTED_TIME_UPDATES = 20  # updates of this process, after which the expected time is logged
LONG_RUN_SECONDS = 3600.0  # above this time, the log suggests max_hours
ADVICE_AFTER_STEPS = 50  # updates, after which the GPU's utilization has settled
PICTURE_SECONDS = 10  # curves.png is drawn after an evaluation, but not more often than this
BAR = "step {n_fmt}/{total_fmt} {bar} {desc}"
LINE_SECONDS = 5  # without a terminal, lines are at least this far apart


class Report:
    """Write the metrics and samples of a run, and show its progress.

    Only the main process writes and shows anything.

    A run that continues from a checkpoint repeats the steps after it. Their rows in metrics.jsonl
    and their samples are removed first, and written again when the run gets there.

    Args:
        recipe: the recipe of the run.
        state: the state at which this process starts.
        clock: the training time.
        is_main: whether this is the main process.
    """

    def __init__(self, recipe: keys.Recipe, state: RunState, clock: Clock, *, is_main: bool):
        self._recipe = recipe
        self._clock = clock
        self._is_main = is_main
        self._first_step = state.step
        self._last_validation_loss = 0.0  # 0 before the first evaluation of this process
        # Step and elapsed seconds at the first update, from which the time left is extrapolated.
        self._first_timed_update: tuple[int, float] | None = None
        self._has_logged_expected_time = False
        self._has_advised = False  # the advice about an idle GPU is logged once
        self._has_warned_of_picture = False
        # Set while the newest update was not due for a report. last_update calls it.
        self._report_later: Callable[[], None] | None = None

        is_drawable = is_main and _is_terminal_with_lines()
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.step,
            bar_format=BAR,
            dynamic_ncols=True,
            disable=not is_drawable,
        )
        self._last_line_at = -float(LINE_SECONDS)  # so that the first line is logged immediately
        if is_main:
            self._open_files(state)

    def _open_files(self, state: RunState) -> None:
        """Open the files and trackers, without the rows and samples of later steps."""
        recipe = self._recipe
        run_dir = recipe.saving.run_dir
        metrics_file = run_dir / METRICS
        samples_file = run_dir / SAMPLES
        self._picture = run_dir / CURVES
        self._drawn_at = time.monotonic()
        self._rows = curves.RowSampler()
        last_position = self._remove_later_rows(metrics_file, state.step)

        samples = _samples_before(samples_file, state.step)
        if not samples and recipe.evaluation.sample_steps:
            samples = BYTES if recipe.model.init_from else NOISE + BYTES
        files.write_text(samples_file, samples)

        self._metrics = files.Log(metrics_file)
        self._samples = files.Log(samples_file)
        earlier_rows = iterate_metrics(metrics_file)
        self._trackers = Trackers(
            recipe, state.step, ids=state.trackers, rows=earlier_rows, sent=last_position
        )
        state.trackers = self._trackers.ids
        curve_name = recipe.tracking.reference_curve
        self._reference = reference_curves.load(curve_name) if curve_name else None

    def _remove_later_rows(self, metrics_file: Path, first_step: int) -> int:
        """Remove the rows that this process will write again.

        Rows are copied one at a time, because a million of them would need gigabytes of memory.

        Returns:
            The position of the last row before the removal, which trackers may already have.
        """
        last_position = -1
        with (
            files.replacing(metrics_file) as temporary,
            temporary.open("w", encoding="utf-8") as file,
        ):
            for row in iterate_metrics(metrics_file):
                last_position = position_after(last_position, row["step"])
                # The row of an update has the number of the step after that update. So at
                # `first_step` the row of the update is kept, and the rows of the evaluation, which
                # is repeated, are removed.
                is_update = "train/loss" in row
                is_done = row["step"] < first_step or (is_update and row["step"] == first_step)
                if is_done:
                    file.write(files.to_json(row) + "\n")
                    self._rows.add(row)
        return last_position

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Append a row to metrics.jsonl: step, tokens and these values.

        - A value that is not finite, such as the loss of a skipped update, becomes null, because
          JSON has no NaN.
        - When this function returns, the row survives the end of the process. Before a checkpoint
          of this or a later step is complete, the row is on disk.
        - If the disk is full, this is logged, the run continues, and the row is written later.
        """
        if not self._is_main:
            return
        tokens = step * self._recipe.batch.tokens_per_step
        row = files.finite({"step": step, "tokens": tokens, **values})
        _append(self._metrics, files.to_json(row) + "\n")
        self._rows.add(row)
        self._trackers.log(step, row)

    def loss(self, step: int, split: str, result: dict[str, float] | None) -> None:
        """Report the loss of a split.

        Args:
            step: the step of the evaluation.
            split: "validation" or "test".
            result: the losses, or None if a request to stop interrupted the evaluation. Then
                nothing is reported.
        """
        if result is None:
            return
        prefix = split
        if split == "validation":
            prefix = "eval"
            self._last_validation_loss = result["loss"]
        self._evaluated(step, prefix, result, describe_loss(split, result))

    def scores(
        self, step: int, task: Task, result: dict[str, float] | None, revision: str | None = None
    ) -> None:
        """Report the scores of a task.

        Args:
            step: the step of the evaluation.
            task: the task.
            result: the scores, or None if a request to stop interrupted the evaluation.
            revision: commit of the public data set, if all of its items were scored. The row
                contains it for the model card and curves.png.
        """
        if result is None:
            return
        values = dict[str, float | str](result)
        if revision is not None:
            values["revision"] = revision
        self._evaluated(step, task.name, values, describe_scores(task, result))

    def baselines(self, state: RunState, losses: dict[str, float]) -> None:
        """Report the baselines on the validation text, which need no training.

        Args:
            state: the state at the end of the run.
            losses: the result of ``evaluation.baselines``. If it is empty, nothing is reported.
        """
        if not losses:
            return
        step = state.step
        self.log(step, {f"baseline/{name}": value for name, value in losses.items()})
        bigram_loss = losses["bigram"]
        text = f"step {step}: bigram baseline {bigram_loss:.4f} nats per token"
        if "gzip" in losses:
            text += f", {losses['bigram_bits_per_byte']:.3f} bits per byte"
        log.info(text)
        if "gzip" in losses:
            log.info(f"step {step}: gzip baseline {losses['gzip']:.3f} bits per byte")
        if self._last_validation_loss > bigram_loss:
            option = self._recipe.saving.option_of_another_run
            length = self._recipe.schedule.length_option
            if state.max_steps < self._recipe.schedule.total_steps:
                length = "--max_hours"  # which has shortened the run
            log.info(
                f"Validation loss is no better than a bigram baseline. Train longer ({length} "
                f"with a new {option}). If the loss was rising, add data or train for fewer steps"
            )

    def update(
        self,
        state: RunState,
        update: Update,
        lr: float,
        device: torch.device,
        *,
        is_due: bool = True,
    ) -> None:
        """Report an update: its row, the progress and, once per run, advice for a faster setup.

        Args:
            state: the state after the update.
            update: the result of the update.
            lr: its learning rate.
            device: the device that the process trains on.
            is_due: whether to report it now. Otherwise ``last_update`` can report it later.
        """
        if not is_due:
            self._report_later = partial(self.update, state, update, lr, device)
            return
        self._report_later = None
        gpu_metrics = hardware.gpu_metrics(device)
        row = {"train/loss": update.loss}
        if update.objective is not None:
            row["train/objective"] = update.objective
        row["train/grad_norm"] = update.grad_norm
        row["train/lr"] = lr
        row["skipped_updates"] = state.skipped_updates
        row["elapsed_seconds"] = self._clock.elapsed
        row |= self._clock.read()
        row |= gpu_metrics
        row["data_wait_seconds"] = state.data_wait_seconds  # a part of elapsed_seconds
        self.log(state.step, row)
        if self._is_main:
            self._show(state, row)
            self._log_expected_time(state, row["elapsed_seconds"])
            self._log_bottleneck(state, gpu_metrics)

    def last_update(self) -> None:
        """Report the last update if it was not due.

        With logging_steps = 0 updates are never reported.
        """
        if self._report_later and self._recipe.evaluation.logging_steps:
            self._report_later()

    def samples(self, step: int, texts: list[tuple[str, str]], *, show: bool) -> None:
        """Append samples to samples.txt.

        Args:
            step: the step of the model.
            texts: each prompt and the text that the model has generated after it.
            show: whether to log them as well.
        """
        if not self._is_main:
            return
        redacted = []
        for prompt, text in texts:
            redacted.append((redact(prompt), redact(text)))
        for prompt, text in redacted:
            _append(self._samples, f"{sample_heading(step, prompt)}\n{prompt}{text}\n\n")
            if show:
                log.info(f"---- sample, prompt {prompt!r}\n{prompt}{text}")
        self._trackers.log(step, {"samples": redacted})

    def draw(self, at_least: float = 0.0) -> None:
        """Draw curves.png.

        Args:
            at_least: nothing is drawn if it was drawn less than this number of seconds ago.
        """
        if not self._is_main or time.monotonic() - self._drawn_at < at_least:
            return
        try:
            curves.draw_curves(
                self._rows.rows,
                self._picture,
                self._recipe.saving.name,
                published=curves.published_scores(self._recipe.model),
                reference=self._reference,
            )
        except (OSError, ImportError) as error:  # the disk is full, or there is no matplotlib
            self._warn_of_picture(error)
        self._drawn_at = time.monotonic()

    def _warn_of_picture(self, error: OSError | ImportError) -> None:
        """Log once that curves.png could not be drawn."""
        if self._has_warned_of_picture:
            return
        self._has_warned_of_picture = True
        fix = ""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            fix = f" ({space_fix(self._picture)})"
        log.warning(f"{self._picture} was not drawn: {error}{fix}. The run retries it later")

    def end_progress(self) -> None:
        """Leave the progress bar as it is, so that later messages are below it."""
        self._bar.close()

    def close(self) -> None:
        """Close the progress bar, the files and the trackers."""
        self._bar.close()
        if not self._is_main:
            return
        for file in (self._metrics, self._samples):
            problem = file.close()
            if problem:
                log.error(problem)
        self._trackers.close()

    def _evaluated(
        self, step: int, prefix: str, result: Mapping[str, float | str], description: str
    ) -> None:
        """Report the result of an evaluation. Its metrics are named ``prefix/...``."""
        self.log(step, {f"{prefix}/{name}": value for name, value in result.items()})
        log.info(f"step {step}: {description}")
        self.draw(at_least=PICTURE_SECONDS)

    def _show(self, state: RunState, row: dict[str, float]) -> None:
        """Move the progress bar.

        Without a terminal log a line, at most every LINE_SECONDS and after the last update.
        """
        step = state.step
        total = state.max_steps
        text = self._progress(state, row)
        self._bar.set_description_str(text, refresh=False)
        self._bar.total = total  # max_hours changes it during the run
        self._bar.update(step - self._bar.n)

        now = time.monotonic()
        is_line_due = now - self._last_line_at >= LINE_SECONDS or step >= total
        if self._bar.disable and is_line_due:
            self._last_line_at = now
            width = len(str(total))
            log.info(f"step {step:{width}d}/{total}  {text}")

    def _progress(self, state: RunState, row: dict[str, float]) -> str:
        """Return loss, speed, use of the GPU and the time left as one line."""
        parts = [f"loss {row['train/loss']:.3f}"]
        if "train/objective" in row:
            parts.append(f"objective {row['train/objective']:.3f}")
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"mfu {row['mfu']:.0%}")
        if "gpu/memory" in row:
            parts.append(f"memory {row['gpu/memory']:.0%}")
        seconds_left = self._time_left(state, row["elapsed_seconds"])
        if seconds_left is not None:
            parts.append(f"left {duration(seconds_left)}")
        return "  ".join(parts)

    def _time_left(self, state: RunState, elapsed: float) -> float | None:
        """Return the estimated seconds until max_steps, or None at the first update.

        The first update of a process is not part of the estimate, because it includes compilation.
        """
        if self._first_timed_update is None:
            self._first_timed_update = (state.step, elapsed)
            return None
        first_step, first_elapsed = self._first_timed_update
        if state.step <= first_step:
            return None
        seconds_per_step = (elapsed - first_elapsed) / (state.step - first_step)
        return (state.max_steps - state.step) * seconds_per_step

    def _log_expected_time(self, state: RunState, elapsed: float) -> None:
        """Log once how long the rest of the run takes, at the speed of its first updates.

        Nothing is logged for a run that is almost finished.
        """
        if self._has_logged_expected_time or self._first_timed_update is None:
            return
        first_step, _ = self._first_timed_update
        seconds_left = self._time_left(state, elapsed)
        if seconds_left is None or state.step - first_step < EXPECTED_TIME_UPDATES:
            return
        self._has_logged_expected_time = True
        steps_left = state.max_steps - state.step
        if steps_left < EXPECTED_TIME_UPDATES:
            return
        text = (
            f"time     {duration(seconds_left)} for the remaining {steps_left:,} steps, at the "
            f"speed of the last {state.step - first_step} updates and without evaluations"
        )
        if seconds_left > LONG_RUN_SECONDS and not self._recipe.schedule.max_hours:
            text += (
                ". To limit the time, stop the run and repeat the command with --max_hours 1, "
                "which plans fewer steps"
            )
        log.info(text)

    def _log_bottleneck(self, state: RunState, gpu_metrics: dict[str, float]) -> None:
        """Log once how to use the device better, if it is often idle."""
        if self._has_advised or state.step - self._first_step < ADVICE_AFTER_STEPS:
            return
        waiting_share = state.data_wait_seconds / max(self._clock.elapsed, 1e-9)
        advice = hardware.bottleneck_advice(gpu_metrics, waiting_share)
        if advice:
            self._has_advised = True
            log.info(f"hint: {advice}")


def _is_terminal_with_lines() -> bool:
    """Return whether standard error is a terminal on which tqdm can draw a line."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 0


def _append(file: files.Log, text: str) -> None:
    """Append to a file. Log if it can no longer be written, or can be written again."""
    message = file.write(text)
    if message:
        log.warning(message)


def duration(seconds: float) -> str:
    """Return a duration as text: 12 s, 3 min 20 s, 5 h 04 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"


def due(step: int, interval: int, last: bool = False, at_start: bool = True) -> bool:
    """Return whether an event that occurs at regular intervals is due at this step.

    Args:
        step: the number of updates so far.
        interval: the number of steps between two events. 0 means never.
        last: whether this is the last step, at which it is always due.
        at_start: whether it is due at step 0.
    """
    if interval <= 0:
        return False
    is_multiple = step % interval == 0 and (step > 0 or at_start)
    return last or is_multiple


def _samples_before(path: Path, first_step: int) -> str:
    """Return the contents of samples.txt up to the first sample of this step or a later one."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    for heading in SAMPLE_HEADING.finditer(text):
        if int(heading[1]) >= first_step:
            return text[: heading.start()]
    return text
