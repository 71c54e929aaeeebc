"""What a knob does to a recipe: the loss that it ends with, the time of an update, the memory of one.

    python benchmarks/knobs.py --out knobs --steps 400 --seeds 1 2              # the quickstart, on Python's own source
    python benchmarks/knobs.py --out tuned --recipe recipes/shakespeare_char.yaml --data_files tinyshakespeare.txt \
        --knobs learning_rate=6e-3 learning_rate=6e-3,weight_decay=0

A knob is KEY=VALUE of the recipe, several with commas. Each is compared with the recipe as it is, on the CPU. Losses are
train.py's, to the end of a schedule of --steps with a tenth of it as warm-up, with every seed; the base is run once. A key
that cannot change what is learned (docs/knobs.md) is not trained to the end. For time and memory all are train.py's
processes side by side that take turns of a few updates, so that a machine that varies varies for all. Memory is the peak
of PyTorch's allocations in an update, above weights and moments. Finished runs in --out are not repeated.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import functools
import os
import statistics
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.runs import ROOT, once, prepare_shards, train_once, write_json
from benchmarks.side_by_side import Turns, alternate, be_train, most_held, positive
from pretrain.base.entry import exit_on_bad_input
from pretrain.machine import hardware
from pretrain.recipe import keys, reading

BASE = "as it is"
KNOBS = [
    "label_smoothing=0.1",
    "z_loss=1e-4",
    "document_mask=true",
    "resid_pdrop=0.1,embd_pdrop=0.1,attn_pdrop=0.1",
    "gradient_checkpointing=mlp",
    "gradient_checkpointing=full",
]


def flags(knob: str) -> list[str]:
    """Return a knob as train.py's flags."""
    pairs = [pair.partition("=") for pair in knob.split(",")] if knob != BASE else []
    return [word for key, _, value in pairs for word in (f"--{key}", value)]


def changes_learning(knob: str) -> bool:
    """Return whether a knob has a key that is fixed for a run, because it changes what is learned."""
    return any(keys.FIELDS[flag[2:]].metadata["kind"] != "run" for flag in flags(knob)[::2])


def final_losses(asked: argparse.Namespace, knobs: list[str], given: list[str]) -> dict[str, list[float]]:
    """Train with each knob and seed; return the final validation losses, in the seeds' order.

    Args:
        given: flags of every run.
    """
    folder, recipe = Path(asked.out), Path(asked.recipe).resolve()

    def one(job: tuple[int, str]) -> float:
        seed, knob = job
        argv = [*given, *flags(knob)]
        name = (
            f"{recipe.stem}-seed{seed}-{zlib.crc32(' '.join([recipe.read_text(encoding='utf-8'), *argv]).encode()):08x}"
        )
        loss = train_once(folder, name, recipe, argv, threads=asked.threads, seed=seed)["loss"]
        print(f"{knob:48} seed {seed}: {loss:.4f}", flush=True)
        return loss

    jobs = [(seed, knob) for seed in asked.seeds for knob in knobs]
    with ThreadPoolExecutor(asked.workers) as pool:
        losses = dict(zip(jobs, pool.map(one, jobs), strict=True))
    return {knob: [losses[seed, knob] for seed in asked.seeds] for knob in knobs}


def take_turns(argv: list[str], folder: Path, turns: Turns) -> None:
    """Be train.py with these flags in turns; note ``peak``, the bytes of the second update."""
    profile = torch.profiler.profile(profile_memory=True)

    def note(updates: int) -> None:
        if updates == 1:
            profile.start()
        elif updates == 2:
            profile.stop()
            turns.notes["peak"] = most_held(profile)

    os.chdir(folder)
    with tempfile.TemporaryDirectory() as place:
        be_train([*argv, "--output_dir", place], turns, note)


def in_turn(asked: argparse.Namespace, knobs: list[str], given: list[str]) -> dict[str, dict]:
    """Let all knobs train in turn; return of each its milliseconds, ratios to the base, peak bytes, losses."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(asked.threads)}  # of the processes
    words = ["--recipe", str(Path(asked.recipe).resolve()), *given, "--max_steps", "1000000000"]
    folder = Path(asked.out).resolve()
    variants = {knob: functools.partial(take_turns, [*words, *flags(knob)], folder) for knob in knobs}
    found, rows = alternate(variants, rounds=asked.rounds, steps=asked.steps_per_round), {}
    for knob, result in found.items():
        if result["problem"] or found[BASE]["problem"]:
            rows[knob] = {"problem": result["problem"] or "the base failed"}
            continue
        pairs = list(zip(result["turns"], found[BASE]["turns"], strict=True))
        rows[knob] = {
            "ms": 1000 * statistics.median(turn["seconds"] for turn in result["turns"]),
            "ratios": [turn["seconds"] / base["seconds"] for turn, base in pairs],
            "peak": result["turns"][-1]["peak"],
            "apart": max(abs(turn["loss"] - base["loss"]) for turn, base in pairs),
        }
    return rows


def report(knobs: list[str], losses: dict[str, list[float]], rows: dict[str, dict]) -> None:
    """Print a row a knob."""
    print(f"\n{'knob':48} loss (mean)  difference  ms an update  of the base's         peak MiB  each seed's loss")
    for knob in knobs:
        mean = statistics.mean(losses[knob]) if knob in losses else None
        by = mean - statistics.mean(losses[BASE]) if mean else None
        words = f"{knob:48} {f'{mean:11.4f} {by:+11.4f}' if mean else ' ' * 23}"
        row = rows[knob]
        if "problem" in row:
            print(f"{words}  {row['problem']}")
            continue
        ratios = row["ratios"]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        words += f"  {row['ms']:12.1f}  {spread:20}  {row['peak'] / 2**20:8.1f}"
        each = ", ".join(f"{loss:.4f}" for loss in losses.get(knob, ()))
        print(f"{words}  {each or 'training losses differ by ' + format(row['apart'], '.1e') + ' at most'}")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Train and time every knob; print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "quickstart.yaml"))
    parser.add_argument("--data_files", nargs="+", help="text to train on; default: the recipe's data")
    parser.add_argument(
        "--knobs", nargs="+", default=KNOBS, metavar="KEY=VALUE[,KEY=VALUE]", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=positive, default=400, help="updates of a run; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=positive, default=1, help="runs at a time (losses only)")
    parser.add_argument("--threads", type=positive, default=1, help="of each run; default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=9, help="turns of each; default: %(default)s")
    parser.add_argument("--steps_per_round", type=positive, default=5, help="updates of a turn; default: %(default)s")
    parser.add_argument("--out", default="knobs", help="folder of the runs and of knobs.json; default: %(default)s")
    asked = parser.parse_args(argv)
    data = ["--data_files", *(str(Path(name).resolve()) for name in asked.data_files)] if asked.data_files else []
    knobs = [BASE, *asked.knobs]
    given = [*data, "--max_steps", str(asked.steps), "--warmup_steps", str(asked.steps // 10)]
    for knob in knobs:  # refuse before anything is trained
        reading.parse_training(once(["--recipe", asked.recipe, *given, *flags(knob)]))
    about = {"machine": hardware.this_device().name, "load": os.getloadavg()[0], "torch": torch.__version__}
    about |= {"recipe": Path(asked.recipe).stem, "steps": asked.steps, "seeds": asked.seeds, "threads": asked.threads}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    prepare_shards(Path(asked.out), Path(asked.recipe).resolve(), data)
    rows = in_turn(asked, knobs, given)
    learned = [knob for knob in knobs if knob == BASE or changes_learning(knob)]
    losses = final_losses(asked, learned, given) if len(learned) > 1 else {}
    report(knobs, losses, rows)
    result = about | {"knobs": {knob: rows[knob] | {"losses": losses.get(knob)} for knob in knobs}}
    write_json(Path(asked.out) / "knobs.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
