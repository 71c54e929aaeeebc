"""Compile a recipe's training step for the card there is and train two updates; print what the compiler made, as JSON.

compiled.py RECIPE MICRO_BATCH    buffers: [shape, dtype] of each that the generated code allocates, once;
                                  attention: the kernels it calls, with how often; capability: what it is for;
                                  logged: the kernel that a run's log names
"""

import collections
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch._inductor.utils import run_and_get_code

from benchmarks import memory_card
from pretrain.machine import hardware
from pretrain.machine.accelerator import make_accelerator
from pretrain.model.attention import kernel_taken

BUFFER = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")
ATTENTION = re.compile(r"aten\.(_scaled_dot_product_\w+)\.default\(")


def main() -> None:
    """Train, and print."""
    recipe, micro_batch = sys.argv[1], int(sys.argv[2])
    device = hardware.this_device()
    accelerator = make_accelerator(device)
    _, codes = run_and_get_code(memory_card.peaks, recipe, "none", micro_batch, accelerator)
    code = "\n".join(codes)
    model, half = (
        memory_card.read(recipe, "none", micro_batch, 1).model,
        {"bf16": torch.bfloat16, "fp16": torch.float16},
    )
    how = {"document_mask": False, "compiled": True}
    logged = kernel_taken(model, micro_batch, accelerator.device, half[device.precision], **how)
    buffers = {(tuple(map(int, filter(None, shape.split(", ")))), dtype) for shape, dtype in BUFFER.findall(code)}
    print(
        json.dumps(
            {
                "graphs": len(codes),
                "buffers": sorted(buffers),
                "attention": collections.Counter(ATTENTION.findall(code)),
                "logged": logged,
                "capability": torch.cuda.get_device_capability(),
            }
        )
    )


if __name__ == "__main__":
    main()
