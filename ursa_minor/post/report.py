"""Post-training's reports: a line and a row of metrics.jsonl where TRL logs, and reward.png."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback

from ursa_minor.base import files
from ursa_minor.base.run_files import METRICS, read_metrics
from ursa_minor.reporting.curves import draw_rewards

log = logging.getLogger(__name__)


class RewardReport(TrainerCallback):
    """Writes ``metrics.jsonl`` and ``reward.png`` into a folder; Trainer calls it.

    Args:
        folder: None: nothing is written, as on all processes but the main one.
        title: of the picture.
        score: returns the mean reward of the held-out prompts; every ``score_steps``, at step 0 and at the end.
        resumed: rows of the run that this one resumes are kept.

    Attributes:
        rows: ``step``, ``train/reward`` (of sampled completions), ``eval/reward`` (of greedy ones to held-out prompts).
    """

    def __init__(
        self,
        folder: Path | None,
        title: str,
        score: Callable[[], float],
        score_steps: int,
        *,
        resumed: bool = False,
    ):
        self.folder, self.title, self.score, self.score_steps = folder, title, score, score_steps
        self.rows: list[dict] = read_metrics(folder / METRICS) if folder and resumed else []
        self.begun = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        """Score the model as it is."""
        self.rows = [row for row in self.rows if row["step"] <= state.global_step]
        if not self.rows:
            self._add({"step": state.global_step, "eval/reward": self.score()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Report the mean reward since the last call, and the held-out prompts' one where that is due."""
        if "reward" in (logs or {}):
            row = {"step": state.global_step, "train/reward": logs["reward"]}
            if state.global_step % self.score_steps == 0 or state.global_step == state.max_steps:
                row["eval/reward"] = self.score()
            self._add(row)

    def on_train_end(self, args, state, control, **kwargs):
        """Draw the rewards."""
        if self.folder:
            try:
                draw_rewards(self.rows, self.folder / "reward.png", self.title)
            except ImportError:
                log.info(
                    "reward.png is not drawn: matplotlib is not installed; metrics.jsonl has its numbers"
                )

    def _add(self, row: dict) -> None:
        self.rows.append(row)
        sampled, held_out = (
            f"{row[key]:.3f}" if key in row else "" for key in ("train/reward", "eval/reward")
        )
        seconds = time.perf_counter() - self.begun
        log.info(
            f"step {row['step']:4}  reward {sampled:5}  held out {held_out:5}  {seconds:5.0f} s"
        )
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [files.to_json(row) + "\n" for row in self.rows]
            files.write_text(self.folder / METRICS, "".join(lines))
