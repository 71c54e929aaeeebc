"""Compare epochs and weight decays for own_text.yaml on texts of several sizes in two scripts.

    python benchmarks/epochs_screen.py --manuals manuals --results_file results.json --hours 2
    python benchmarks/epochs_screen.py --results_file results.json --report

``benchmarks/manuals.py`` describes the texts, and how to get them. The model has width 128. The
result of a run is the loss on the held-out documents of its script in bits per byte, which can be
compared between tokenizers: at the end of the run, and the lowest of eight evaluations, which is
what own_text.yaml saves (``load_best_model_at_end``). "today" is own_text.yaml as it was before
this comparison: 1,000 updates and a weight decay of 0.5.

The most informative combinations come first (``STAGES``). After the stages that compare weight
decays, the two best combinations of each text, if they differ by at most 0.02 bits per byte, and
today's are repeated with a second seed.

Each run is written to ``--results_file`` as soon as it is finished. After an interruption, the same
command continues: a run that was interrupted starts again. ``--hours`` limits the time of all
calls together; no run starts later. All combinations take about 20 hours on two idle cores.
``--report`` prints tables in Markdown, with "not run" for the missing combinations.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import math
import shutil
import statistics
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import product

from benchmarks import manuals
from benchmarks.runs import ROOT, commit, flag_words, prepare_shards, train_once
from ursa_minor.base import files, paths
from ursa_minor.data.loading.windows import Windows
from ursa_minor.data.tokens.manifest import describe_folder
from ursa_minor.machine import device as hardware
from ursa_minor.recipe import loading
from ursa_minor.recipe.batching import steps_of_epochs

RECIPE = ROOT / "recipes" / "own_text.yaml"
WIDTH = 128
VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 128  # as in the recipe
TODAY_STEPS = 1000
TODAY_DECAY = 0.5
NUM_EVALUATIONS = 8  # in a run; each reads all held-out documents

SCRIPTS = tuple(manuals.PAGES)
SIZES = (0.3, 1.0, 3.0)  # MB
LARGE_SIZE = 10.0  # MB, in one script
LARGE_SCRIPT = "latin"
EPOCHS = (5, 10, 20, 40)
LARGE_EPOCHS = (5, 10)
DECAYS = (0.1, 0.5, 1.0, 2.0)
SEEDS = (1, 2)
MARGIN = 0.02  # bits per byte; a second seed decides between results that are closer


@dataclass(frozen=True)
class Text:
    """A text of the screen."""

    script: str
    megabytes: float

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.script}-{self.megabytes:g}MB"


@dataclass(frozen=True)
class Run:
    """A combination of settings, and the seed."""

    text: Text
    epochs: int | None  # None for TODAY_STEPS
    weight_decay: float
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        epochs = "today" if self.epochs is None else f"{self.epochs}epochs"
        return f"{epochs}-decay{self.weight_decay:g}-seed{self.seed}"


@dataclass(frozen=True)
class Result:
    """The losses of a finished run, which are in nats per token and bits per byte."""

    script: str
    megabytes: float
    epochs: int | None
    weight_decay: float
    seed: int
    steps: int
    seconds: float
    loss: float
    bits_per_byte: float
    best_loss: float
    best_bits_per_byte: float
    best_step: int
    commit: str
    machine: str

    @property
    def run(self) -> Run:
        """The run that has this result."""
        text = Text(self.script, self.megabytes)
        return Run(text, self.epochs, self.weight_decay, self.seed)


@dataclass(frozen=True)
class Stage:
    """Runs that are done before those of the next stage."""

    runs: list[Run]
    repeats: bool  # whether contested runs of these texts are repeated with the second seed


def combinations(
    megabytes: float, epochs: Sequence[int | None], decays: Sequence[float]
) -> list[Run]:
    """Return the runs for a size, in both scripts or in ``LARGE_SCRIPT``."""
    scripts = SCRIPTS
    if megabytes == LARGE_SIZE:
        scripts = (LARGE_SCRIPT,)
    runs = []
    for number, decay, script in product(epochs, decays, scripts):
        text = Text(script, megabytes)
        runs.append(Run(text, number, decay))
    return runs


def epochs_of(megabytes: float) -> tuple[int, ...]:
    """Return the numbers of epochs that are compared for a size."""
    return LARGE_EPOCHS if megabytes == LARGE_SIZE else EPOCHS


def runs_of(stages: Iterable[Stage]) -> list[Run]:
    """Return the runs of several stages."""
    runs = []
    for stage in stages:
        runs += stage.runs
    return runs


def texts_of(runs: Iterable[Run]) -> list[Text]:
    """Return each text of several runs once."""
    return list(dict.fromkeys(run.text for run in runs))


def make_stages() -> list[Stage]:
    """Return the stages. They contain all combinations once, with the first seed."""
    other_decays = (1.0, 2.0, 0.1)
    small, medium, large = SIZES
    today = (TODAY_DECAY,)
    stages = [
        Stage(combinations(small, (10, 20), today), repeats=False),
        Stage(combinations(small, (10,), other_decays), repeats=False),
        Stage(combinations(small, (5,), today), repeats=False),
        Stage(combinations(medium, (10, 5, None), today), repeats=False),
        Stage(combinations(small, (None,), today), repeats=True),
        Stage(combinations(medium, (10,), other_decays), repeats=True),
        Stage(combinations(medium, (20,), today), repeats=True),
        Stage(combinations(small, (40,), today), repeats=True),
        Stage(combinations(large, (None, 5, 10), today), repeats=False),
        Stage(combinations(medium, (40,), today), repeats=False),
        Stage(combinations(large, (5,), other_decays), repeats=True),
        Stage(combinations(LARGE_SIZE, (None, 5), today), repeats=False),
        Stage(combinations(large, (20,), today), repeats=False),
    ]

    # Then the rest of the grid.
    planned = runs_of(stages)
    for megabytes in (*SIZES, LARGE_SIZE):
        grid = combinations(megabytes, epochs_of(megabytes), DECAYS)
        rest = [run for run in grid if run not in planned]
        stages.append(Stage(rest, repeats=True))
    return stages


STAGES = make_stages()


def contested(results: Iterable[Result], text: Text) -> list[Run]:
    """Return the runs of a text for which a second seed matters.

    Returns:
        The best combination and the second best one with the first seed, if their results differ by
        at most ``MARGIN``, and today's, as runs with the second seed.
    """
    of_text = [result for result in results if result.run.text == text and result.seed == SEEDS[0]]
    ranked = sorted(of_text, key=lambda result: result.best_bits_per_byte)
    runs = []
    if len(ranked) > 1:
        best, second = ranked[:2]
        if second.best_bits_per_byte - best.best_bits_per_byte <= MARGIN:
            runs += [best.run, second.run]
    runs.append(Run(text, None, TODAY_DECAY))
    return [replace(run, seed=SEEDS[1]) for run in dict.fromkeys(runs)]


def next_run(results: Sequence[Result], started: Collection[Run]) -> Run | None:
    """Return the next run, or None if all have been started.

    Args:
        results: of the finished runs.
        started: runs that are finished or being trained.
    """
    for stage in STAGES:
        for run in stage.runs:
            if run not in started:
                return run
        if stage.repeats:
            for text in texts_of(stage.runs):
                for run in contested(results, text):
                    if run not in started:
                        return run
    return None


def count_windows(data_folder: Path) -> int:
    """Return the number of training windows in a prepared folder."""
    windows = Windows(SEQUENCE_LENGTH, VOCAB_SIZE)
    for shard in describe_folder(data_folder).splits["train"]:
        windows.append(data_folder / shard.file, shard.tokens, None, 0)
    return windows.num_windows


def count_steps(epochs: int | None, num_windows: int) -> int:
    """Return the number of updates of a run."""
    if epochs is None:
        return TODAY_STEPS
    recipe = loading.load_recipe(RECIPE, {"data_files": ["text"]})
    return steps_of_epochs(epochs, num_windows, recipe)


def count_bytes(documents: Iterable[str]) -> int:
    """Return the size of documents in UTF-8."""
    return sum(len(document.encode()) for document in documents)


def read_evaluations(run_folder: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl that have a validation loss."""
    evaluations = []
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval/loss" in row:
            evaluations.append(row)
    return evaluations


class Screen:
    """The texts, the results, and the file that stores them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.commit = commit()
        self.machine = hardware.this_device().name
        self.earlier_hours = 0.0
        self.started_at = time.monotonic()
        self.texts: dict[str, dict] = {}
        self.results: list[Result] = []
        self.started: set[Run] = set()
        self.lock = threading.Lock()
        self.is_stopping = False
        if args.results_file.exists():
            self.load()

    def load(self) -> None:
        """Read the results of an earlier call."""
        stored = json.loads(self.args.results_file.read_text())
        self.earlier_hours = stored["hours"]
        self.texts = stored["texts"]
        self.results = [Result(**row) for row in stored["results"]]
        self.started = {result.run for result in self.results}

    @property
    def hours(self) -> float:
        """The time of all calls."""
        return self.earlier_hours + (time.monotonic() - self.started_at) / 3600

    def save(self) -> None:
        """Write all results, atomically."""
        finished = {result.run for result in self.results}
        missing = [run for run in runs_of(STAGES) if run not in finished]
        record = {
            "hours": round(self.hours, 3),
            "width": WIDTH,
            "texts": self.texts,
            "results": [asdict(result) for result in self.results],
            "not_run": [f"{run.text.name}-{run.name}" for run in missing],
        }
        text = json.dumps(record, indent=1)
        files.write_text(self.args.results_file, f"{text}\n")

    def prepare(self) -> None:
        """Write the texts and their token shards, unless an earlier call has done it."""
        documents: dict[str, list[str]] = {}
        for text in texts_of(runs_of(STAGES)):
            if text.name in self.texts:
                continue
            if text.script not in documents:
                documents[text.script] = manuals.read_documents(self.args.manuals, text.script)
            cut = manuals.cut(documents[text.script], round(text.megabytes * 1e6))
            folder = self.args.folder / text.name
            folder.mkdir(parents=True, exist_ok=True)
            manuals.write_documents(folder / "train.jsonl", cut.train)
            manuals.write_documents(folder / "held_out.jsonl", cut.held_out)
            prepare_shards(folder, RECIPE, self.data_flags(text))
            (data_folder,) = [path.parent for path in folder.glob("data/*/manifest.json")]
            self.texts[text.name] = {
                "documents": len(cut.train),
                "bytes": count_bytes(cut.train),
                "held_out_documents": len(cut.held_out),
                "held_out_bytes": count_bytes(cut.held_out),
                "windows": count_windows(data_folder),
            }
            self.save()
            print(f"{text.name}: {self.texts[text.name]}", flush=True)

    def data_flags(self, text: Text) -> list[str]:
        """Return the flags of train.py for a text."""
        folder = (self.args.folder / text.name).resolve()
        flags = {
            "data_files": paths.literal(str(folder / "train.jsonl")),
            "validation_files": paths.literal(str(folder / "held_out.jsonl")),
            "n_embd": WIDTH,
        }
        return flag_words(flags)

    def train(self, run: Run) -> Result:
        """Train a run to its end, from the beginning."""
        folder = self.args.folder / run.text.name
        run_folder = folder / "runs" / run.name
        if run_folder.exists() and not (run_folder / "model").is_dir():
            shutil.rmtree(run_folder)  # an earlier call was interrupted
        steps = count_steps(run.epochs, self.texts[run.text.name]["windows"])
        flags = {
            "max_steps": steps,
            "weight_decay": run.weight_decay,
            "eval_on_start": "false",
            "eval_steps": math.ceil(steps / NUM_EVALUATIONS),
            "eval_tokens": 0,  # all held-out documents
            "load_best_model_at_end": "false",
        }
        words = self.data_flags(run.text) + flag_words(flags)
        trained = train_once(folder, run.name, RECIPE, words, threads=1, seed=run.seed)
        evaluations = read_evaluations(run_folder)
        best = min(evaluations, key=lambda row: row["eval/loss"])
        last = evaluations[-1]
        return Result(
            script=run.text.script,
            megabytes=run.text.megabytes,
            epochs=run.epochs,
            weight_decay=run.weight_decay,
            seed=run.seed,
            steps=steps,
            seconds=trained["seconds"],
            loss=last["eval/loss"],
            bits_per_byte=last["eval/bits_per_byte"],
            best_loss=best["eval/loss"],
            best_bits_per_byte=best["eval/bits_per_byte"],
            best_step=best["step"],
            commit=self.commit,
            machine=self.machine,
        )

    def work(self) -> None:
        """Train one run after the other until none is left, the time is over or a run fails."""
        while self.hours < self.args.hours and not self.is_stopping:
            with self.lock:
                run = next_run(self.results, self.started)
                if run is None:
                    return
                self.started.add(run)
            result = self.train(run)
            with self.lock:
                self.results.append(result)
                self.save()
            best = f"best {result.best_bits_per_byte:.4f} at step {result.best_step}"
            print(
                f"{self.hours:.2f} hours: {run.text.name} {run.name}: "
                f"{result.bits_per_byte:.4f} bits per byte after {result.steps} steps ({best}), "
                f"{result.seconds:.0f} s",
                flush=True,
            )

    def run(self) -> None:
        """Train the missing runs."""
        with ThreadPoolExecutor(self.args.workers) as pool:
            workers = [pool.submit(self.work) for _ in range(self.args.workers)]
            wait(workers, return_when=FIRST_EXCEPTION)
            self.is_stopping = True  # after an error, the other workers finish their runs and end
            for worker in workers:
                worker.result()


def seeds_of(results: Iterable[Result], run: Run) -> list[Result]:
    """Return the results of a combination with any seed."""
    return [result for result in results if replace(result.run, seed=run.seed) == run]


def mean_best(results: Iterable[Result]) -> float:
    """Return the mean of the best bits per byte."""
    return statistics.mean(result.best_bits_per_byte for result in results)


def cell(results: Iterable[Result], run: Run) -> str:
    """Return the table's entry for a combination.

    Returns:
        The best bits per byte, the final ones in parentheses if they are higher (means of the
        seeds), and the largest distance of a seed from the mean. "not run" without results.
    """
    seeds = seeds_of(results, run)
    if not seeds:
        return "not run"
    best = mean_best(seeds)
    last = statistics.mean(result.bits_per_byte for result in seeds)
    entry = f"{best:.3f}"
    if last > best:
        entry += f" ({last:.3f})"
    if len(seeds) > 1:
        distance = max(result.best_bits_per_byte - best for result in seeds)
        entry += f" ±{distance:.3f}"
    return entry


def describe_epochs(epochs: int | None) -> str:
    """Return the entry for a number of epochs, or for today's updates."""
    if epochs is None:
        return f"today ({TODAY_STEPS:,} updates)"
    return f"{epochs} epochs"


def row(cells: Iterable[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def best_row(results: Sequence[Result], text: Text) -> str:
    """Return the row with the best combination of a text, and today's result."""
    of_text = [result for result in results if result.run.text == text]
    today = cell(of_text, Run(text, None, TODAY_DECAY))
    if not of_text:
        return row([text.name, "not run", "", today])
    best = min(of_text, key=lambda result: mean_best(seeds_of(of_text, result.run)))
    settings = f"{describe_epochs(best.epochs)}, decay {best.weight_decay:g}"
    return row([text.name, settings, cell(of_text, best.run), today])


def grid(results: Sequence[Result], text: Text) -> list[str]:
    """Return the lines of the table of a text."""
    decays = [f"decay {decay:g}" for decay in DECAYS]
    lines = [row([text.name, *decays]), "|---" * (1 + len(DECAYS)) + "|"]
    for epochs in (None, *epochs_of(text.megabytes)):
        cells = [describe_epochs(epochs)]
        for decay in DECAYS:
            run = Run(text, epochs, decay)
            is_planned = epochs is not None or decay == TODAY_DECAY
            cells.append(cell(results, run) if is_planned else "")
        lines.append(row(cells))
    return lines


def report(results: Sequence[Result]) -> str:
    """Return tables in Markdown: the best combination of each text, and all results of each."""
    texts = texts_of(runs_of(STAGES))
    lines = [row(["text", "best", "bits per byte", "today"]), "|---|---|---|---|"]
    for text in texts:
        lines.append(best_row(results, text))
    for text in texts:
        lines += ["", *grid(results, text)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run or continue the screen, or print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results_file",
        required=True,
        type=paths.path_argument,
        metavar="PATH",
        help="JSON file that stores the results.",
    )
    parser.add_argument(
        "--manuals",
        default="manuals",
        type=paths.path_argument,
        metavar="PATH",
        help="Folder into which the packages were unpacked. Default: %(default)s.",
    )
    parser.add_argument(
        "--folder",
        default="epochs_screen",
        type=paths.path_argument,
        metavar="PATH",
        help="Folder of the texts and runs. Default: %(default)s.",
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="N",
        default=12.0,
        help="Time after which no run starts, of all calls together. Default: %(default)s.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=2,
        help="Runs at the same time, with one thread each. Default: %(default)s.",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="Print the results as tables in Markdown, and exit.",
    )
    args = parser.parse_args(argv)
    screen = Screen(args)
    if args.report:
        print(report(screen.results))
        return 0
    screen.prepare()
    screen.run()
    print(report(screen.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
