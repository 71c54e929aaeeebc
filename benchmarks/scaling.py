"""How train.py's loop scales over the cards of this machine: tokens a second of 1, 2, 4 and 8 processes, and why.

    python benchmarks/scaling.py                                     # GPT-2 124M, as many processes as there are cards
    python benchmarks/scaling.py --micro_batch 16 --accumulation 8 --json scaling.json
    python benchmarks/scaling.py --n_layer 4 --n_embd 256 --n_head 4 --sequence_length 128     # something for a CPU

Each process has the same micro-batch. One process runs alone, without DDP, as its user would run it; more are started
by torchrun and talk over this machine only. Without a card: 1 and 2 processes of one thread each, over gloo. Beside
what is measured stands what the exchange of gradients explains: an all-reduce of as many bytes is timed in the same
run, and its time lies either wholly after the backward pass (no overlap) or behind it as far as that is long enough.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks import side_by_side, throughput
from benchmarks.runs import write_json
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import TrainingStopped
from pretrain.machine import estimate

LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Alone:
    """What ``Turns`` talks to where there is no parent: one round after the other, then the end."""

    def __init__(self, rounds: int, steps: int):
        self.asked, self.answers = [side_by_side.WARM_UP] + [steps] * rounds, []

    def recv(self) -> int:
        """Return the updates of the next round; raises EOFError after the last."""
        if not self.asked:
            raise EOFError
        return self.asked.pop(0)

    def send(self, figures: dict) -> None:
        """Keep what a round gave."""
        self.answers.append(figures)


def work(asked: argparse.Namespace, folder: Path) -> None:
    """Be one of the processes: train, time an exchange; the first one writes both to ``result.json``."""
    alone = Alone(asked.rounds, asked.steps_per_round)
    turns = side_by_side.Turns(alone)
    try:
        turns.wait()
        throughput.ours(asked, asked.micro_batch, folder, turns)
    except EOFError:
        pass
    result = {"seconds": [answer["seconds"] for answer in alone.answers[1:]], "loss": alone.answers[-1]["loss"]}
    if dist.is_initialized():
        result["link"] = exchange_speed(4 * side_by_side.shape_of(asked).parameters)
        dist.barrier()
    if os.environ.get("RANK", "0") == "0":
        (folder / "result.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def exchange_speed(size: int) -> float:
    """Return the bytes per second over each link of the ring when ``size`` bytes of fp32 are summed (median of 5)."""
    values = torch.zeros(size // 4, device=side_by_side.device())  # the card that Accelerate chose
    taken = []
    for _ in range(6):
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter())
    count = dist.get_world_size()
    return 2 * (count - 1) / count * size / statistics.median(b - a for a, b in itertools.pairwise(taken))


def launch(count: int, words: list[str], folder: Path) -> dict:
    """Start ``count`` processes of this script and return what the first one wrote."""
    command = [sys.executable, __file__] if count == 1 else [sys.executable, "-m", "torch.distributed.run"]
    if count > 1:
        command += ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(count), __file__]
    environment = LOCAL | os.environ
    done = subprocess.run([*command, *words, "--work", str(folder)], env=environment, stderr=subprocess.PIPE)
    if done.returncode:
        raise TrainingStopped(f"{count} processes: exit status {done.returncode}: {done.stderr.decode()[-2000:]}")
    return json.loads((folder / "result.json").read_text())


def efficiencies(alone: float, exchange: float) -> tuple[float, float]:
    """Return the share of the speed that is left when an update of ``alone`` seconds also exchanges: none, all hidden."""
    return alone / (alone + exchange), alone / max(alone, exchange)


def report(asked: argparse.Namespace, found: dict[int, list[dict]]) -> list[dict]:
    """Print the table; return its rows for the JSON."""
    shape, tokens, rows = (
        side_by_side.shape_of(asked),
        asked.micro_batch * asked.accumulation * asked.sequence_length,
        [],
    )
    print("           tokens/s                               efficiency   all-reduce          estimated efficiency")
    print("processes  in all (slowest .. fastest)  each      measured     GB/s      ms       no overlap  full overlap")
    alone = statistics.median(seconds for run in found[1] for seconds in run["seconds"])
    for count, runs in found.items():
        row = {"processes": count}
        row |= side_by_side.summary([seconds for run in runs for seconds in run["seconds"]], count * tokens)
        row |= {"efficiency": row["tokens_per_second"] / (count * tokens / alone), "loss": runs[-1]["loss"]}
        line = (
            f"{count:9}  {row['tokens_per_second']:9,.0f} ({row['slowest']:,.0f} .. {row['fastest']:,.0f})  "
            f"{row['tokens_per_second'] / count:9,.0f}  {row['efficiency']:8.1%}"
        )
        if count > 1:
            row["link"] = statistics.median(run["link"] for run in runs)
            row["exchange_seconds"] = estimate.exchange_seconds(shape, count=count, link=row["link"])
            row["no_overlap"], row["full_overlap"] = efficiencies(alone, row["exchange_seconds"])
            line += (
                f"  {row['link'] / 1e9:8.2f}  {1000 * row['exchange_seconds']:8.2f}  {row['no_overlap']:11.1%}  "
                f"{row['full_overlap']:12.1%}"
            )
        print(line)
        rows.append(row)
    print(
        f"exchanged an update: {4 * shape.parameters / 2**20:,.1f} MiB of fp32 gradients; GB/s over each link of a ring"
    )
    return rows


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Measure each number of processes; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_sizes(parser)
    card = side_by_side.device().type == "cuda"
    parser.add_argument(
        "--micro_batch", type=side_by_side.positive, default=16 if card else 4, help="sequences, of each process"
    )
    parser.add_argument(
        "--accumulation",
        type=side_by_side.positive,
        default=1,
        help="micro-batches an update: more exchange less often",
    )
    side_by_side.add_turns(parser)
    parser.add_argument(
        "--launches", type=side_by_side.positive, default=2, help="of each number of processes, in turns; --rounds each"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    asked = parser.parse_args(words)
    if not card:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    device = side_by_side.settle(asked)
    if asked.work:
        work(asked, Path(asked.work))
        return 0
    record = side_by_side.about(asked, device)
    counts = [count for count in (1, 2, 4, 8) if count <= (device.count if card else 2)]
    print(
        f"micro-batch  {asked.micro_batch} x {asked.accumulation} a process, precision {asked.precision}, "
        f"{'compiled' if asked.compile else 'eager'}, {', '.join(map(str, counts))} process(es)"
        f"{f' on {device.count} card(s)' if card else ' of one thread each'}, {asked.launches} launches"
    )
    found = {count: [] for count in counts}
    for number in range(asked.launches):
        for count in counts:
            with tempfile.TemporaryDirectory() as name:
                side_by_side.write_ids(Path(name), asked.vocab_size)
                found[count].append(launch(count, words, Path(name)))
            middle = 1000 * statistics.median(found[count][-1]["seconds"])
            print(f"launch {number + 1}, {count} process(es): {middle:,.1f} ms an update", file=sys.stderr, flush=True)
    record |= {"micro_batch": asked.micro_batch, "accumulation": asked.accumulation, "compiled": asked.compile}
    record["rows"] = report(asked, found)
    write_json(asked.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
