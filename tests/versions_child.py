"""Two updates of a tied GPT-2 that FSDP2 shards over gloo, by the accelerate that is imported; prints a line of JSON.

Argument: ``train`` gives Accelerate what train.py gives it, the model within the module that returns the loss; ``bare``
the model itself, as loops that are not ours do.
"""

import json
import os
import sys

import accelerate
import torch
from machine_child import sharded
from small_models import built, ids

from pretrain.machine import accelerator, hardware
from pretrain.model.loss import NextTokenLoss


def main(way: str) -> None:
    """Prepare and train; errors are Accelerate's own."""
    os.environ["FSDP"] = "true"
    machine = sharded(accelerator.make_accelerator)(hardware.this_device())
    model = built()
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    machine.state.fsdp_plugin.transformer_cls_names_to_wrap = list(model._no_split_modules)
    if way == "train":
        module, optimizer = accelerator.prepare(NextTokenLoss(model), optimizer, machine)
        loss_of = module
    else:
        module, optimizer = machine.prepare(model, optimizer)
        loss_of = lambda inputs_BT, targets_BT: module(inputs_BT, labels=inputs_BT, shift_labels=targets_BT).loss  # noqa: E731
    for _ in range(2):
        loss = loss_of(ids(2, 16), ids(2, 16).flip(1))
        machine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if machine.is_main_process:
        found = {"version": accelerate.__version__, "file": accelerate.__file__, "loss": loss.item()}
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
