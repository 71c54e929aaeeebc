"""Report the rewards of a post-training run: log lines, metrics.jsonl and reward.png."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback

from ursa_minor.base import files
from ursa_minor.base.run_files import METRICS, read_metrics
from ursa_minor.reporting.curves import draw_rewards

log = logging.getLogger(__name__)

PICTURE = "reward.png"


class RewardReport(TrainerCallback):
    """Write ``metrics.jsonl`` and ``reward.png`` into a folder. The Trainer calls the methods.

    Args:
        folder: folder for the files, or None to write nothing (on all processes but the main one).
        title: title of the picture.
        score: function that returns the mean reward of the held-out prompts. It is called at step
            0, every ``score_steps`` steps, and at the end.
        score_steps: number of steps between two scores.
        resumed: whether to keep the rows of the run that is resumed.

    Attributes:
        rows: the rows of metrics.jsonl, with the keys ``step``, ``train/reward`` (mean reward of
            sampled completions) and ``eval/reward`` (mean reward of greedy completions of the
            held-out prompts).
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
        self.folder = folder
        self.title = title
        self.score = score
        self.score_steps = score_steps
        self.rows: list[dict] = []
        if folder and resumed:
            self.rows = read_metrics(folder / METRICS)
        self.start_time = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        """Score the model before the first step, and drop rows after the step that is resumed."""
        self.rows = [row for row in self.rows if row["step"] <= state.global_step]
        if not self.rows:
            self._add({"step": state.global_step, "eval/reward": self.score()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Report the mean training reward since the last call, and the score if it is due."""
        if not logs or "reward" not in logs:
            return
        step = state.global_step
        row = {"step": step, "train/reward": logs["reward"]}
        if step % self.score_steps == 0 or step == state.max_steps:
            row["eval/reward"] = self.score()
        self._add(row)

    def on_train_end(self, args, state, control, **kwargs):
        """Draw the rewards."""
        if self.folder is None:
            return
        try:
            draw_rewards(self.rows, self.folder / PICTURE, self.title)
        except ImportError:
            log.info(
                f"{PICTURE} is not drawn, because matplotlib is not installed. The rewards are in "
                f"{METRICS}"
            )

    def _add(self, row: dict) -> None:
        self.rows.append(row)
        train_reward = _format_reward(row, "train/reward")
        eval_reward = _format_reward(row, "eval/reward")
        seconds = time.perf_counter() - self.start_time
        log.info(
            f"step {row['step']:4}  reward {train_reward:5}  held out {eval_reward:5}  "
            f"{seconds:5.0f} s"
        )
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [files.to_json(row) + "\n" for row in self.rows]
            files.write_text(self.folder / METRICS, "".join(lines))


def _format_reward(row: dict, key: str) -> str:
    return f"{row[key]:.3f}" if key in row else ""
