"""Which versions of accelerate shard the tied GPT-2 under FSDP2: a range is what was tried.

VERSIONS_JSON = a file to write the table to, as benchmarks/results has it.
"""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version as installed

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

FAULT = "is shared with a parameter already managed by another FSDP group"  # huggingface/accelerate#4171
WAYS = ("train", "bare")


def pip(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    return pytest.skip(f"pip {words[0]}: {done.stderr[-200:]}") if done.returncode else done.stdout


def newest_of_each_minor(ends: SpecifierSet) -> list[str]:
    """The newest release of each minor version between two ends that the package index has."""
    listed = re.search(
        r"^Available versions: (.*)$", pip("index", "versions", "accelerate"), re.MULTILINE
    )
    found = sorted(map(Version, filter(ends.contains, listed[1].split(", "))))
    return [str(newest) for newest in {(one.major, one.minor): one for one in found}.values()]


def tried(version: str, folder, way: str) -> dict | str:
    """What a version's two updates print, or the line that ended them."""
    tests = ROOT / "tests"
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{ROOT}:{tests}:{tests / 'fault_injection'}",
        "ACCELERATE_USE_CPU": "true",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += [__file__, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raised = re.search(r"^(?:\[rank\d+\]: ?)?(\w+Error: .+)$", done.stderr, re.MULTILINE)
        return raised[1] if raised else done.stderr[-300:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == version and found["file"].startswith(str(folder)), (
        "another accelerate was tried"
    )
    return {"loss": found["loss"]}


@pytest.mark.slow
def test_each_minor_version_of_accelerate_that_is_taken_shards_the_tied_gpt2_and_one_left_out_does_not(
    tmp_path,
):
    """Within the module that train.py gives to Accelerate, and bare, as loops that are not ours give it."""
    taken = compatibility.read_ranges(checks.REQUIREMENTS.read_text(encoding="utf-8"))["accelerate"]
    versions = newest_of_each_minor(
        SpecifierSet(",".join(str(one) for one in taken if one.operator != "!="))
    )
    left_out = [one.version for one in taken if one.operator == "!="]
    assert len(versions) > 2 and set(left_out) < set(versions)
    rows = {}
    for version in versions:
        folder = tmp_path / version
        pip("install", "--quiet", "--no-deps", "--target", str(folder), f"accelerate=={version}")
        rows[version] = {way: tried(version, folder, way) for way in WAYS}
        print(f"| {version} | {' | '.join(str(rows[version][way]) for way in WAYS)} |")
    record = {
        "date": str(date.today()),
        "commit": commit(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
    }
    record |= {"python": platform.python_version()} | {
        name: installed(name) for name in ("torch", "transformers")
    }
    write_json(os.environ.get("VERSIONS_JSON"), record | {"range": str(taken), "versions": rows})
    losses = {
        row["loss"]
        for version, ways in rows.items()
        if version not in left_out
        for row in ways.values()
    }
    assert len(losses) == 1, "the versions that are taken compute the same, to the bit"
    if Version(installed("torch")) >= Version(
        "2.13"
    ):  # older ones let a tied weight be in two groups
        assert all(FAULT in rows[version]["bare"] for version in left_out)


def train_two_updates(way: str) -> None:
    """``train`` gives Accelerate what train.py gives it, the model in the module of its loss; ``bare`` the model itself."""
    os.environ["FSDP"] = "true"
    machine = sharded(accelerator.make_accelerator)(hardware.this_device())
    model = build_small_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    machine.state.fsdp_plugin.transformer_cls_names_to_wrap = list(model._no_split_modules)
    if way == "train":
        module, optimizer = accelerator.prepare(NextTokenLoss(model), optimizer, machine)
    else:
        module, optimizer = machine.prepare(model, optimizer)
    inputs_BT, targets_BT = random_ids(2, 16), random_ids(2, 16).flip(1)
    for _ in range(2):
        bare = {"labels": inputs_BT, "shift_labels": targets_BT}
        loss = module(inputs_BT, targets_BT) if way == "train" else module(inputs_BT, **bare).loss
        machine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if machine.is_main_process:
        print(
            json.dumps(
                {
                    "version": accelerate.__version__,
                    "file": accelerate.__file__,
                    "loss": loss.item(),
                }
            )
        )


if __name__ == "__main__":
    train_two_updates(sys.argv[1])
