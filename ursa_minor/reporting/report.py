"""A run's reports: the terminal, metrics.jsonl, samples.txt, curves.png and the trackers.

On a terminal there is a progress bar; in a file or a pipe there is one line every few seconds instead.
"""

import errno
import logging
import os
import re
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
from ursa_minor.base.run_files import CURVES, METRICS, SAMPLES, iterate_metrics
from ursa_minor.checkpoint.state import RunState
from ursa_minor.data.tokens.tokenizer import REPLACEMENT_CHARACTER
from ursa_minor.evaluation.evaluator import describe_loss, describe_scores
from ursa_minor.evaluation.task import Task
from ursa_minor.machine import device as hardware
from ursa_minor.optim.update import Update
from ursa_minor.recipe import keys, reference_curves
from ursa_minor.reporting import curves
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.trackers import Trackers, place_after

log = logging.getLogger(__name__)

HEADING = re.compile(r"^==== step (\d+) · prompt .* ====$", re.MULTILINE)
# What samples.txt begins with; the first where no model was begun from.
NOISE = "At step 0 the weights are random, and so is the text.\n"
BYTES = f"({REPLACEMENT_CHARACTER}: bytes that make no character. A token may be a part of one; later samples have fewer.)\n\n"
HINT_AFTER = 50  # updates, when the gauges have settled
PICTURE_SECONDS = 10  # curves.png is drawn at an evaluation, but not more often
BAR = "step {n_fmt}/{total_fmt} {bar} {desc}"
LINE_SECONDS = 5  # without a terminal a line at most so often


class Report:
    """Writes a run's metrics and samples, and shows its progress; on other processes than the main one it is silent.

    Rows of metrics.jsonl and samples that are later than ``state``, where this process begins, are of a future that
    the checkpoint does not know: they are dropped, and written again as the run gets there.
    """

    def __init__(self, recipe: keys.Recipe, state: RunState, clock: Clock, *, is_main: bool):
        self._recipe, self._clock, self._is_main = recipe, clock, is_main
        self._first_step, self._validation_loss = state.step, 0.0
        self._measured: tuple[int, float] | None = (
            None  # step and seconds that the time left is counted from
        )
        self._hinted = self._undrawn = False
        self._unreported: Callable[[], None] | None = None
        # tqdm needs a line to draw on
        drawn = is_main and sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.step,
            bar_format=BAR,
            dynamic_ncols=True,
            disable=not drawn,
        )
        self._line_at = -float(LINE_SECONDS)  # the first line comes at once
        if not is_main:
            return
        run_dir = recipe.saving.run_dir
        metrics, samples, self._picture = (
            run_dir / METRICS,
            run_dir / SAMPLES,
            run_dir / CURVES,
        )
        self._rows, self._drawn = curves.RowSampler(), time.monotonic()
        sent = self._drop_future(metrics, state.step)
        notes = BYTES if recipe.model.init_from else NOISE + BYTES
        earlier_samples = _samples_before(samples, state.step)
        files.write_text(
            samples, earlier_samples or (notes if recipe.evaluation.sample_steps else "")
        )
        self._metrics, self._samples = files.Log(metrics), files.Log(samples)
        past = iterate_metrics(metrics)
        self._trackers = Trackers(recipe, state.step, ids=state.trackers, rows=past, sent=sent)
        state.trackers = self._trackers.ids
        named = recipe.tracking.reference_curve
        self._reference = reference_curves.load(named) if named else None

    def _drop_future(self, metrics: Path, first_step: int) -> int:
        # A row at a time: of a million they would be gigabytes. Returns the place of the last row that there was.
        sent = -1
        with files.replacing(metrics) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in iterate_metrics(metrics):
                sent = place_after(sent, row["step"])
                # A row of an update belongs to the step that it ended; an evaluation at `first_step` is done again.
                if row["step"] < first_step + ("train/loss" in row):
                    file.write(files.to_json(row) + "\n")
                    self._rows.add(row)
        return sent

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Append a row to metrics.jsonl: step, tokens, values. A kill cannot lose it once this returns to the loop.

        A value that is not finite, such as a skipped update's loss, is null, because JSON has no NaN.

        It is on disk before a checkpoint of this step, or of a later one, has its name. A full disk is logged and
        survived: the row is written with a later one.
        """
        if self._is_main:
            tokens = step * self._recipe.batch.tokens_per_step
            row = files.finite({"step": step, "tokens": tokens, **values})
            _append(self._metrics, files.to_json(row) + "\n")
            self._rows.add(row)
            self._trackers.log(step, row)

    def loss(self, step: int, split: str, result: dict[str, float] | None) -> None:
        """Report the loss of a split; None: a request to stop has ended the evaluation."""
        if result is not None:
            self._validation_loss = (
                result["loss"] if split == "validation" else self._validation_loss
            )
            self._evaluated(
                step,
                "eval" if split == "validation" else split,
                result,
                describe_loss(split, result),
            )

    def scores(
        self, step: int, task: Task, result: dict[str, float] | None, revision: str | None = None
    ) -> None:
        """Report a task's scores.

        Args:
            result: None if a request to stop has ended the evaluation.
            revision: of the public data set, if all of its items were scored. The row contains it,
                so that the model card and curves.png know what was scored.
        """
        if result is None:
            return
        values = dict[str, float | str](result)
        if revision is not None:
            values["revision"] = revision
        self._evaluated(step, task.name, values, describe_scores(task, result))

    def baselines(self, step: int, losses: dict[str, float]) -> None:
        """Report what needs no training, on the same text; nothing where nothing was found."""
        if losses:
            self.log(step, {f"baseline/{name}": value for name, value in losses.items()})
            words = f"without training: a bigram model {losses['bigram']:.4f} nats per token"
            if "gzip" in losses:
                words += f", {losses['bigram_bits_per_byte']:.3f} bits per byte; gzip {losses['gzip']:.3f} bits per byte"
            log.info(words)
            if self._validation_loss > losses["bigram"]:
                option = self._recipe.saving.option_of_another_run
                log.info(
                    f"Validation loss is no better than a bigram baseline. Train longer (--max_steps with another "
                    f"{option}). If the loss was rising, add data or train for fewer steps"
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
        """Report an update: the metrics row, the progress and, once a run, what would use the card better.

        Args:
            is_due: False: ``last_update`` may report it later.
        """
        if not is_due:
            self._unreported = partial(self.update, state, update, lr, device)
            return
        self._unreported = None
        gauges = hardware.gauges(device)
        row = {"train/loss": update.loss}
        if update.objective is not None:
            row["train/objective"] = update.objective
        row |= {"train/grad_norm": update.grad_norm, "train/lr": lr}
        row |= {"skipped_updates": state.skipped_updates, "elapsed_seconds": self._clock.elapsed}
        # The waiting is a part of elapsed_seconds.
        row |= {**self._clock.read(), **gauges, "data_wait_seconds": state.data_wait_seconds}
        self.log(state.step, row)
        if self._is_main:
            self._show(state, row)
            self._hint(state, gauges)

    def last_update(self) -> None:
        """Report the last update if it was not due, unless updates are never reported (logging_steps = 0)."""
        if self._unreported and self._recipe.evaluation.logging_steps:
            self._unreported()

    def samples(self, step: int, texts: list[tuple[str, str]], *, show: bool) -> None:
        """Append samples, each a prompt and what follows it, to samples.txt; ``show`` them on the terminal too."""
        if not self._is_main:
            return
        texts = [(redact(prompt), redact(text)) for prompt, text in texts]
        for prompt, text in texts:
            _append(self._samples, f"==== step {step} · prompt {prompt!r} ====\n{prompt}{text}\n\n")
            if show:
                log.info(f"---- sample, prompt {prompt!r}\n{prompt}{text}")
        self._trackers.log(step, {"samples": texts})

    def draw(self, at_least: float = 0.0) -> None:
        """Draw curves.png, unless less than ``at_least`` seconds have passed since it was."""
        if self._is_main and time.monotonic() - self._drawn >= at_least:
            published, name = curves.published_scores(self._recipe.model), self._recipe.saving.name
            try:
                curves.draw_curves(
                    self._rows.rows,
                    self._picture,
                    name,
                    published=published,
                    reference=self._reference,
                )
            except (OSError, ImportError) as error:  # a full disk; no matplotlib
                fix = ""
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    fix = f" ({space_fix(self._picture)})"
                if not self._undrawn:
                    log.warning(
                        f"{self._picture} was not drawn: {error}{fix}. It is tried again later"
                    )
                self._undrawn = True
            self._drawn = time.monotonic()

    def close(self) -> None:
        """Close the bar, the file and the trackers."""
        self._bar.close()
        if self._is_main:
            for file in (self._metrics, self._samples):
                if lost := file.close():
                    log.error(lost)
            self._trackers.close()

    def _evaluated(
        self, step: int, prefix: str, result: Mapping[str, float | str], words: str
    ) -> None:
        self.log(step, {f"{prefix}/{name}": value for name, value in result.items()})
        log.info(f"step {step}: {words}")
        self.draw(at_least=PICTURE_SECONDS)

    def _show(self, state: RunState, row: dict[str, float]) -> None:
        """Move the bar; without one log a line, at most every few seconds, and the last."""
        elapsed, step, total = row["elapsed_seconds"], state.step, state.max_steps
        words = [f"loss {row['train/loss']:.3f}"]
        if "train/objective" in row:
            words.append(f"objective {row['train/objective']:.3f}")
        words.append(f"{row['tokens_per_second']:,.0f} tok/s")
        words += [f"mfu {row['mfu']:.0%}"] if "mfu" in row else []  # of a known card
        words += [f"memory {row['gpu/memory']:.0%}"] if "gpu/memory" in row else []
        if self._measured is None:  # the first update pays for compiling
            self._measured = step, elapsed
        elif step > self._measured[0]:
            per_step = (elapsed - self._measured[1]) / (step - self._measured[0])
            words.append(f"left {duration((total - step) * per_step)}")
        self._bar.set_description_str("  ".join(words), refresh=False)
        self._bar.total = total  # another one once max_hours has planned it
        self._bar.update(step - self._bar.n)
        if self._bar.disable and (
            time.monotonic() - self._line_at >= LINE_SECONDS or step >= total
        ):
            self._line_at = time.monotonic()
            log.info(f"step {step:{len(str(total))}d}/{total}  {'  '.join(words)}")

    def _hint(self, state: RunState, gauges: dict[str, float]) -> None:
        """Log what would use the card better, once."""
        if self._hinted or state.step - self._first_step < HINT_AFTER:
            return
        waiting = state.data_wait_seconds / max(self._clock.elapsed, 1e-9)
        if text := hardware.hint(gauges, waiting):
            self._hinted = True
            log.info(f"hint: {text}")


def _append(file: files.Log, text: str) -> None:
    if news := file.write(text):
        log.warning(news)


def duration(seconds: float) -> str:
    """Return seconds as people read them: 12 s, 3 min 20 s, 5 h 04 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def due(step: int, interval: int, last: bool = False, at_start: bool = True) -> bool:
    """Whether something that happens every ``interval`` steps (0 = never) happens at this step; also at the last.

    Args:
        at_start: and before the first update.
    """
    return interval > 0 and (last or (step % interval == 0 and (step > 0 or at_start)))


def _samples_before(path: Path, first_step: int) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    later = (heading.start() for heading in HEADING.finditer(text) if int(heading[1]) >= first_step)
    return text[: next(later, len(text))]
