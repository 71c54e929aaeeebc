"""What keeps training waiting: a checkpoint, a validation.

    python benchmarks/pauses.py                 # GPT-2 124M with AdamW's moments, 1.5 GB, in a temporary folder

Beside a checkpoint: how long until it is on disk; the same one written while training waits; and an update's time while
one is being written against an update's time alone (a small model's, so that the writer has something to disturb). A
validation's time is that of --eval_tokens tokens, as train.py does it, in fp32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import statistics
import tempfile
import time

import torch

from benchmarks import side_by_side
from benchmarks.runs import write_json
from pretrain.evaluation import validation
from pretrain.machine import hardware
from pretrain.model.build import build
from pretrain.model.loss import NextTokenLoss
from pretrain.optim import optimizers
from pretrain.optim.schedule import set_lr
from pretrain.run import checkpoint

SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 128, "sequence_length": 64}


def timed(work) -> float:
    """Return the seconds of ``work``."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def model_and_optimizer(device: torch.device, sizes: dict[str, int]):
    """Return our model of these sizes and its AdamW."""
    recipe = side_by_side.recipe_of(**sizes)
    model = build(recipe.model, eos_token_id=0).to(device)
    optimizer = optimizers.build(model, recipe.optimizer)
    set_lr(optimizer, recipe.schedule.learning_rate)
    return model, optimizer


def small_update(device: torch.device):
    """Return a function that does one update of the small model."""
    model, optimizer = model_and_optimizer(device, SMALL)
    module = NextTokenLoss(model)
    ids_BT = torch.randint(0, 128, (12, 64), device=device)

    def update() -> None:
        loss = module(ids_BT, ids_BT)
        loss.backward()
        side_by_side.apply_update(model, optimizer, loss)

    return update


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side_by_side.add_sizes(parser)
    parser.add_argument("--eval_tokens", type=int, default=8192, help="a multiple of 4 sequences")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="on the disk to be measured (default: the temporary one)")
    asked = parser.parse_args(argv)
    device = hardware.this_device()
    place = side_by_side.device()
    model, optimizer = model_and_optimizer(place, side_by_side.sizes_of(asked))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()  # makes the moments
    optimizer.zero_grad()
    update = small_update(place)
    for _ in range(5):
        update()
    alone = [timed(update) for _ in range(50)]
    pauses, writes, beside = [], [], []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        where = Path(folder)
        with checkpoint.Saver(where / "beside", is_main=True, keep=2) as saver:
            saver.prepare(model, optimizer)
            made_ready = timed(saver.ready)
            for step in range(1, asked.saves + 1):
                begin = time.perf_counter()
                pauses.append(timed(lambda step=step: saver.save(step, model, optimizer, {})))
                while not saver.done:
                    beside.append(timed(update))
                saver.finish()
                writes.append(time.perf_counter() - begin)
        if checkpoint.step_of(checkpoint.list_checkpoints(where / "beside")[0]) < asked.saves:
            sys.exit("a save failed (see above): no figures")
        waiting = []
        with checkpoint.Saver(where / "waiting", is_main=True, keep=0) as saver:
            for step in (1, 2):
                pause = timed(lambda step=step: saver.save(step, model, optimizer, {}))
                waiting.append(pause + timed(saver.finish))
    ids_BT = torch.randint(0, asked.vocab_size, (4, asked.sequence_length))
    batches = [(ids_BT, ids_BT)] * (asked.eval_tokens // ids_BT.numel())
    how = {"device": place, "bytes_per_token": None}
    validating = [timed(lambda: validation.validation_loss(NextTokenLoss(model), batches, **how)) for _ in range(3)]
    found = {
        "validation_tokens": asked.eval_tokens,
        "validation_seconds": validating,
        "machine": f"{device.name}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "checkpoint_bytes": 12 * side_by_side.shape_of(asked).parameters,
        "pause_seconds": pauses,
        "memory_ready_seconds": made_ready,
        "on_disk_seconds": writes,
        "waiting_seconds": waiting,
        "update_alone_seconds": statistics.median(alone),
        "update_beside_seconds": statistics.median(beside) if beside else None,
    }
    print(f"machine             {found['machine']}")
    print(f"checkpoint          {found['checkpoint_bytes'] / 1e9:.2f} GB")
    print(f"training waits      {', '.join(f'{s:.2f}' for s in pauses)} s")
    print(f"memory made ready   {made_ready:.2f} s, once, beside training")
    print(f"on disk after       {', '.join(f'{s:.2f}' for s in writes)} s, hashed, read back, beside training")
    print(f"if training waited  {', '.join(f'{s:.2f}' for s in waiting)} s")
    print(f"validation          {statistics.median(validating):.2f} s for {asked.eval_tokens:,} tokens (median of 3)")
    print(f"a small update      {1000 * found['update_alone_seconds']:.1f} ms alone", end="")
    print(f", {1000 * found['update_beside_seconds']:.1f} ms while one is being written" if beside else "")
    write_json(asked.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
