"""Find out the machine, the software, the date and the commit of a measurement."""

import json
import subprocess
import sys
import time
from importlib.metadata import version

from benchmarks.runs import ROOT, commit, last_line
from ursa_minor.base import gpus
from ursa_minor.base.errors import BadInput
from ursa_minor.preflight import checks

# A child process runs this: a CUDA context of this process would occupy memory of the GPU during
# all measurements.
DEVICE_PROGRAM = """
import json, torch
from ursa_minor.machine import device as hardware
device = hardware.this_device()
print(json.dumps({
    "kind": device.kind,
    "machine": device.name,
    "memory_bytes": device.memory_bytes,
    "count": device.count,
    "cuda": torch.version.cuda,
}))
"""
PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")


def about() -> dict:
    """Return the first entries of the record: machine, software, date and commit.

    Raises:
        BadInput: PyTorch cannot be imported, or fails to find the device.
    """
    process = subprocess.run(
        [sys.executable, "-c", DEVICE_PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        reason = last_line(process.stderr, default="no output")
        raise BadInput(f"PyTorch cannot find the device of this machine: {reason}")
    device = json.loads(process.stdout.splitlines()[-1])
    listed_gpus = checks.nvidia_smi()
    driver = listed_gpus[0]["driver"] if listed_gpus else gpus.kernel_driver()
    return device | {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": sys.version.split()[0],
        "driver": driver,
        "versions": {package: version(package) for package in PACKAGES},
    }
