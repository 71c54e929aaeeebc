"""Tune AdamW or Muon for nanoGPT's character run, with the same search for both.

    python benchmarks/tune_optimizers.py --text tinyshakespeare.txt --optimizer adamw \\
        --trials_file adamw.json
    python benchmarks/tune_optimizers.py --text tinyshakespeare.txt --optimizer muon \\
        --trials_file muon.json

The search is a local one. The first trial has the settings of ``BEGIN``. Every other trial takes
one of the three best trials so far and moves one to three of its settings to a value nearby in
``SPACE``. The result of a trial is the mean final loss of the seeds 11 and 12 on the complete
validation split. At the end the four best trials are trained with three more seeds (13, 14, 15).

It prints the loss of each trial, and at the end the best settings. They belong into ``TUNED`` of
benchmarks/time_to_loss.py, which compares the two optimizers on seeds that no search has used.

Each trial is written to ``--trials_file`` as soon as it is finished. After an interruption, the
same command continues with the next trial: the random numbers of a trial depend only on its number,
so the result is the same as without the interruption. All settings are train.py's own flags. 64
trials of one optimizer take about 40 minutes on two idle cores.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.runs import ROOT, commit, flag_words, prepare_shards, train_once
from ursa_minor.base import paths
from ursa_minor.base.files import write_text
from ursa_minor.machine import device as hardware

RECIPE = ROOT / "recipes" / "shakespeare_char.yaml"
SEARCH_SEEDS = (11, 12)
CONFIRMATION_SEEDS = (13, 14, 15)
CONFIRMED_TRIALS = 4
PARENTS = 3  # how many of the best trials a new trial may start from

# The values of each setting, in order. "linear 0.0" is a linear schedule whose min_lr_ratio is 0.
# "wsd 0.5" is a schedule that is constant and then falls over the last half (decay_ratio 0.5).
COMMON_SPACE = {
    "learning_rate": (2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.2e-2, 3.2e-2, 4.5e-2),
    "adam_beta1": (0.7, 0.8, 0.85, 0.9, 0.95),
    "adam_beta2": (0.95, 0.98, 0.99, 0.995),
    "weight_decay": (0.01, 0.03, 0.1, 0.3, 1.0),
    "warmup_steps": (10, 30, 60, 100, 150),
    "schedule": ("cosine 0.1", "cosine 0.0", "linear 0.0", "wsd 0.8", "wsd 0.5"),
    "max_grad_norm": (0.1, 0.3, 1.0, 0.0),
    "initializer_range": (0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
}
SPACE = {
    "adamw": COMMON_SPACE,
    "muon": COMMON_SPACE | {"muon_momentum": (0.7, 0.8, 0.85, 0.9, 0.95)},
}

# The best settings that were known before the search.
COMMON_BEGIN = {
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "schedule": "linear 0.0",
    "max_grad_norm": 1.0,
}
BEGIN = {
    "adamw": {
        **COMMON_BEGIN,
        "learning_rate": 5.6e-3,
        "adam_beta1": 0.8,
        "warmup_steps": 100,
        "initializer_range": 0.08,
    },
    "muon": {
        **COMMON_BEGIN,
        "learning_rate": 2.2e-2,
        "adam_beta1": 0.9,
        "warmup_steps": 10,
        "initializer_range": 0.02,
        "muon_momentum": 0.85,
    },
}
STEPS = {"adamw": 700, "muon": 400}  # about the number of updates at which each one's loss is 1.88

Settings = dict[str, float | str]


@dataclass
class Trial:
    """Settings and the final validation loss (nats per character) of each seed."""

    settings: Settings
    losses: dict[str, float]
    confirmation: dict[str, float] = field(default_factory=dict)  # losses of the seeds 13, 14, 15

    @property
    def loss(self) -> float:
        """The mean loss of the two seeds of the search."""
        return statistics.mean(self.losses.values())

    @property
    def confirmed_loss(self) -> float:
        """The mean loss of the three seeds that the search did not use."""
        return statistics.mean(self.confirmation.values())


def train_flags(optimizer: str, settings: Settings, max_steps: int) -> list[str]:
    """Return the flags of train.py for these settings."""
    flags = dict(settings)
    schedule = str(flags.pop("schedule"))
    flags["optimizer"] = optimizer
    flags["max_steps"] = max_steps
    flags["eval_on_start"] = "false"
    scheduler, number = schedule.split()
    flags["lr_scheduler_type"] = scheduler
    if scheduler == "wsd":
        flags["min_lr_ratio"] = 0.0
        flags["decay_ratio"] = number
    else:
        flags["min_lr_ratio"] = number
    return flag_words(flags)


def neighbor(settings: Settings, space: dict[str, tuple], generator: random.Random) -> Settings:
    """Return a copy of the settings in which one to three values have changed.

    Args:
        settings: of another trial.
        space: the values of each setting. A value moves by one or two places in this list.
        generator: of random numbers.
    """
    changed = dict(settings)
    num_changes = generator.randint(1, 3)
    for name in generator.sample(sorted(space), num_changes):
        values = space[name]
        old_value = settings[name]
        place = values.index(old_value)
        first = max(0, place - 2)
        nearby = list(values[first : place + 3])
        nearby.remove(old_value)
        changed[name] = generator.choice(nearby)
    return changed


def next_settings(optimizer: str, trials: list[Trial]) -> Settings:
    """Return the settings of the next trial: a pure function of the trials before it."""
    if not trials:
        return BEGIN[optimizer]
    generator = random.Random(len(trials))
    ranked_trials = sorted(trials, key=lambda trial: trial.loss)
    best_trials = ranked_trials[:PARENTS]
    tried = [trial.settings for trial in trials]
    while True:
        parent = generator.choice(best_trials)
        settings = neighbor(parent.settings, SPACE[optimizer], generator)
        if settings not in tried:
            return settings


class Search:
    """The trials of one optimizer, and the file that stores them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        space = SPACE[args.optimizer]
        self.header = {
            "optimizer": args.optimizer,
            "steps": STEPS[args.optimizer],
            "space": {name: list(values) for name, values in space.items()},
        }
        self.about = {
            "machine": hardware.this_device().name,
            "torch": torch.__version__,
            "commit": commit(),
        }
        self.hours = 0.0
        self.trials: list[Trial] = []
        self.pool = ThreadPoolExecutor(args.workers)
        text = Path(args.text).resolve()
        self.data_flags = ["--data_files", paths.literal(str(text))]
        if args.trials_file.exists():
            self.load()
        prepare_shards(args.folder, RECIPE, self.data_flags)

    def load(self) -> None:
        """Read the trials of an interrupted search.

        Raises:
            SystemExit: the file belongs to a search of another optimizer, length or space.
        """
        stored = json.loads(self.args.trials_file.read_text())
        for name, value in self.header.items():
            if stored[name] != value:
                sys.exit(
                    f"error: {self.args.trials_file} has another '{name}'. "
                    f"Choose another --trials_file."
                )
        self.about = stored["about"]
        self.hours = stored["hours"]
        self.trials = [Trial(**trial) for trial in stored["trials"]]

    def save(self) -> None:
        """Write all trials, atomically."""
        record = {
            "about": self.about,
            "hours": round(self.hours, 3),
            **self.header,
            "trials": [asdict(trial) for trial in self.trials],
        }
        text = json.dumps(record, indent=1)
        write_text(self.args.trials_file, f"{text}\n")

    def train(self, settings: Settings, seeds: tuple[int, ...]) -> dict[str, float]:
        """Return the final validation loss of each seed, and count the hours."""
        started = time.monotonic()
        optimizer = self.args.optimizer
        flags = train_flags(optimizer, settings, STEPS[optimizer])
        flags += self.data_flags
        values = "-".join(str(value) for value in settings.values())
        values = values.replace(" ", "_")

        def train_seed(seed: int) -> float:
            name = f"{optimizer}-{values}-{seed}"
            result = train_once(self.args.folder, name, RECIPE, flags, threads=1, seed=seed)
            return result["loss"]

        losses = list(self.pool.map(train_seed, seeds))
        seconds = time.monotonic() - started
        self.hours += seconds / 3600
        return {str(seed): loss for seed, loss in zip(seeds, losses, strict=True)}

    def run(self) -> Trial:
        """Make the trials that are missing, confirm the best ones and return the best of these."""
        while len(self.trials) < self.args.trials:
            settings = next_settings(self.args.optimizer, self.trials)
            losses = self.train(settings, SEARCH_SEEDS)
            trial = Trial(settings, losses)
            self.trials.append(trial)
            self.save()
            best_loss = min(trial.loss for trial in self.trials)
            number = len(self.trials)
            print(f"{number:3} {trial.loss:.4f} (best {best_loss:.4f}) {settings}", flush=True)

        ranked_trials = sorted(self.trials, key=lambda trial: trial.loss)
        candidates = ranked_trials[:CONFIRMED_TRIALS]
        for trial in candidates:
            if not trial.confirmation:
                trial.confirmation = self.train(trial.settings, CONFIRMATION_SEEDS)
                self.save()
            print(
                f"confirmed: {trial.confirmed_loss:.4f} (was {trial.loss:.4f}) {trial.settings}",
                flush=True,
            )
        return min(candidates, key=lambda trial: trial.confirmed_loss)


def main(argv: list[str] | None = None) -> int:
    """Run or continue the search that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text",
        required=True,
        type=paths.argument,
        metavar="PATH",
        help="Text file: TinyShakespeare (1,115,394 characters).",
    )
    parser.add_argument(
        "--optimizer",
        required=True,
        choices=tuple(SPACE),
        help="Optimizer to tune.",
    )
    parser.add_argument(
        "--trials_file",
        required=True,
        type=paths.path_argument,
        metavar="PATH",
        help="JSON file that stores the trials.",
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        default=64,
        help="Number of trials. Default: %(default)s.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=2,
        help="Runs at the same time, with one thread each. Default: %(default)s.",
    )
    parser.add_argument(
        "--folder",
        default="tune_optimizers",
        type=paths.path_argument,
        metavar="PATH",
        help="Folder of the runs. Finished runs are not repeated. Default: %(default)s.",
    )
    args = parser.parse_args(argv)
    search = Search(args)
    print(", ".join(f"{key} {value}" for key, value in search.about.items()))
    best = search.run()
    print(f"best of {len(search.trials)} trials ({search.hours:.2f} hours): {best.settings}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
