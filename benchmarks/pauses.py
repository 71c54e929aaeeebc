"""What keeps training waiting: a checkpoint, a validation.

    python benchmarks/pauses.py                 # GPT-2 124M with AdamW's moments, 1.5 GB, in a temporary folder

Beside a checkpoint: how long until it is on disk; the same one written while training waits; and an update's time while
one is being written against an update's time alone (a small model's, so that the writer has something to disturb). A
validation's time is that of --eval_tokens tokens, as train.py does it, in fp32.
"""

import sys
from pathlib import Path

# The repository takes this folder's place in the search: tokenize.py here has the name of a standard module.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import statistics
import tempfile
import time

import torch

from pretrain.evaluation import validation
from pretrain.machine import estimate, hardware
from pretrain.model import model as models
from pretrain.model.loss import NextTokenLoss
from pretrain.optim import optim
from pretrain.run import checkpoint

SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 128, "sequence_length": 64}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0, "seed": 1}
ADAMW = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


def timed(work) -> float:
    """Return the seconds of ``work``."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def small_update(device: torch.device):
    """Return a function that does one update of the small model."""
    model = models.build(**SMALL, **STILL).to(device)
    module, optimizer = NextTokenLoss(model), optim.adamw(model, **ADAMW)
    ids_BT = torch.randint(0, 128, (12, 64), device=device)

    def update() -> None:
        loss = module(ids_BT, ids_BT)
        loss.backward()
        parameters = list(model.parameters())
        optim.update(optimizer, parameters, loss.detach(), max_grad_norm=1.0, scaler=None, reduce_mean=lambda t: t)

    return update


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("n_layer", 12), ("n_head", 12), ("n_embd", 768), ("vocab_size", 50304)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--eval_tokens", type=int, default=8192, help="a multiple of 4,096")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", help="on the disk to be measured (default: the temporary one)")
    parser.add_argument("--json", help="write the figures here too")
    asked = parser.parse_args(argv)
    device = hardware.this_device()
    place = torch.device("cuda" if device.kind == "cuda" else "cpu")
    shape = {name: getattr(asked, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    model = models.build(**shape, sequence_length=1024, **STILL).to(place)
    optimizer = optim.adamw(model, **ADAMW)
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
        waiting = [timed(lambda s=s: checkpoint.save(where / "waiting", s, model, optimizer, {})) for s in (1, 2)]
    ids_BT = torch.randint(0, asked.vocab_size, (4, 1024))
    batches = [(ids_BT, ids_BT)] * (asked.eval_tokens // 4096)
    how = {"device": place, "reduce_sum": lambda tensor: tensor, "bytes_per_token": None}
    looking = [timed(lambda: validation.validation_loss(NextTokenLoss(model), batches, **how)) for _ in range(3)]
    found = {
        "validation_tokens": asked.eval_tokens,
        "validation_seconds": looking,
        "machine": f"{device.name}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "checkpoint_bytes": 12 * estimate.Shape(asked.n_layer, asked.n_embd, asked.vocab_size, 1024).parameters,
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
    print(f"validation          {statistics.median(looking):.2f} s for {asked.eval_tokens:,} tokens (median of 3)")
    print(f"a small update      {1000 * found['update_alone_seconds']:.1f} ms alone", end="")
    print(f", {1000 * found['update_beside_seconds']:.1f} ms while one is being written" if beside else "")
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
