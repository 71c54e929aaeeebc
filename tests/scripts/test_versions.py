"""Check which versions of accelerate can shard the tied GPT-2 under FSDP2.

The range in requirements.txt contains only versions that were tried. VERSIONS_JSON names a file
for the table, as in benchmarks/results.
"""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version as installed_version
from pathlib import Path

import accelerate
import pytest
import torch
from conftest import ROOT
from failing_training import sharded
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from small_models import build_small_model, random_ids

from benchmarks.runs import commit, write_json
from ursa_minor.machine import accelerator
from ursa_minor.machine import device as hardware
from ursa_minor.model.loss import NextTokenLoss
from ursa_minor.preflight import checks, compatibility

# huggingface/accelerate#4171
SHARED_PARAMETER = "is shared with a parameter already managed by another FSDP group"
# "train" prepares the module of the loss, as train.py does; "bare" prepares the model itself.
METHODS = ("train", "bare")


def run_pip(*arguments: str) -> str:
    """Run pip and return its output. Skip the test if pip fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"pip {arguments[0]}: {result.stderr[-200:]}")
    return result.stdout


def newest_of_each_minor(limits: SpecifierSet) -> list[str]:
    """Return the newest release of each minor version within the limits, oldest first."""
    output = run_pip("index", "versions", "accelerate")
    releases = re.search(r"^Available versions: (.*)$", output, re.MULTILINE)[1].split(", ")
    newest = {}
    for version in sorted(map(Version, limits.filter(releases))):
        newest[version.major, version.minor] = version
    return [str(version) for version in newest.values()]


def try_version(version: str, folder: Path, method: str) -> dict | str:
    """Make two updates with a version of accelerate and return the loss or the error.

    Args:
        version: the expected version.
        folder: where it is installed.
        method: one of METHODS.
    """
    tests = ROOT / "tests"
    paths = (folder, ROOT, tests, tests / "fault_injection")
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "ACCELERATE_USE_CPU": "true",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *torchrun, __file__, method]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if result.returncode:
        error = re.search(r"^(?:\[rank\d+\]: ?)?(\w+Error: .+)$", result.stderr, re.MULTILINE)
        return error[1] if error else result.stderr[-300:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["version"] == version
    assert report["file"].startswith(str(folder))
    return {"loss": report["loss"]}


def write_table(accepted: SpecifierSet, rows: dict[str, dict]) -> None:
    """Write the results of all versions to the file VERSIONS_JSON, if it is set."""
    record = {
        "date": str(date.today()),
        "commit": commit(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "transformers": installed_version("transformers"),
        "range": str(accepted),
        "versions": rows,
    }
    write_json(os.environ.get("VERSIONS_JSON"), record)


@pytest.mark.slow
def test_accepted_accelerate_versions_shard_tied_model(tmp_path):
    """All accepted versions compute the same loss bitwise, and the excluded version fails."""
    ranges = compatibility.read_ranges(checks.REQUIREMENTS.read_text(encoding="utf-8"))
    accepted = ranges["accelerate"]
    excluded = [clause.version for clause in accepted if clause.operator == "!="]
    limits = [str(clause) for clause in accepted if clause.operator != "!="]
    versions = newest_of_each_minor(SpecifierSet(",".join(limits)))
    assert len(versions) > 2
    assert set(excluded) < set(versions)

    rows = {}
    for version in versions:
        folder = tmp_path / version
        target = ("--no-deps", "--target", str(folder))
        run_pip("install", "--quiet", *target, f"accelerate=={version}")
        rows[version] = {method: try_version(version, folder, method) for method in METHODS}
        print(version, rows[version])
    write_table(accepted, rows)

    losses = set()
    for version in versions:
        if version not in excluded:
            losses.update(rows[version][method]["loss"] for method in METHODS)
    assert len(losses) == 1
    # Older versions of torch allow a tied weight in two groups.
    if Version(installed_version("torch")) >= Version("2.13"):
        for version in excluded:
            assert SHARED_PARAMETER in rows[version]["bare"]


def make_two_updates(method: str) -> None:
    """Train a small model for two updates and print the loss as JSON.

    This runs in each process of torchrun.
    """
    os.environ["FSDP"] = "true"
    machine = sharded(accelerator.make_accelerator)(hardware.this_device())
    model = build_small_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    machine.state.fsdp_plugin.transformer_cls_names_to_wrap = list(model._no_split_modules)
    if method == "train":
        module, optimizer = accelerator.prepare(NextTokenLoss(model), optimizer, machine)
    else:
        module, optimizer = machine.prepare(model, optimizer)

    inputs_BT = random_ids(2, 16)
    targets_BT = random_ids(2, 16).flip(1)
    for _ in range(2):
        if method == "train":
            loss = module(inputs_BT, targets_BT)
        else:
            loss = module(inputs_BT, labels=inputs_BT, shift_labels=targets_BT).loss
        machine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    if machine.is_main_process:
        report = {
            "version": accelerate.__version__,
            "file": accelerate.__file__,
            "loss": loss.item(),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    make_two_updates(sys.argv[1])
