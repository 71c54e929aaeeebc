"""Which versions of accelerate train the tied GPT-2 under FSDP2: each that was released between requirements.txt's ends.

    python benchmarks/versions.py --json benchmarks/results/accelerate-versions-cpu-DATE.json

Each is installed with pip into a folder that goes before the environment's own packages, so that those stay as they are,
and does three updates on two processes over gloo, sharded as the YAMLs for ZeRO-2 and 3 do it (tests/machine_child.py).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
from importlib.metadata import version as installed

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.runs import ROOT, commit, flag_words, prepare_shards, write_json
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import TrainingStopped
from pretrain.machine import doctor, verdicts

RECIPE = ROOT / "recipes" / "shakespeare_char.yaml"
SMALL = {"data_files": ROOT / "docs" / "knobs.md", "vocab_size": 256, "sequence_length": 16, "tokens_per_step": 128}
SMALL |= {"n_layer": 2, "n_head": 2, "n_embd": 32, "per_device_train_batch_size": 2, "max_steps": 3}
SMALL |= {"warmup_steps": 1, "eval_steps": 0, "sample_steps": 0, "save_steps": 0, "logging_steps": 1}
SECONDS = 300  # for three updates that take ten


def pip(*words: str) -> str:
    """Return what pip prints; raises TrainingStopped with its last line where it fails."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        raise TrainingStopped(f"pip {' '.join(words)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout


def released(taken: SpecifierSet) -> list[str]:
    """Return each version of accelerate that the index has between the ends of a range, or left out of it."""
    ends = SpecifierSet(",".join(str(one) for one in taken if one.operator != "!="))
    (found,) = re.findall(r"^Available versions: (.*)$", pip("index", "versions", "accelerate"), re.MULTILINE)
    return sorted(filter(ends.contains, found.split(", ")), key=Version)


def train(version: str, folder: Path) -> dict:
    """Install a version below ``folder``, train with it there, and return its row: the last loss, or the problem."""
    packages = folder / f"accelerate-{version}"
    pip("install", "--quiet", "--no-deps", "--target", str(packages), f"accelerate=={version}")
    environment = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}", "OMP_NUM_THREADS": "1", "FSDP": "true"}
    environment |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "tests" / "machine_child.py"), "--recipe", str(RECIPE)]
    words = flag_words(SMALL | {"run_name": version})
    try:
        done = subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"accelerate": version, "problem": f"no end after {SECONDS} s"}
    if done.returncode:
        raised = re.search(r"^(?:\[rank\d+\]: ?)?(\w+(?:Error|Exception): .+)$", done.stderr, re.MULTILINE)
        return {"accelerate": version, "problem": raised[1] if raised else done.stderr[-300:]}
    metrics = (folder / "runs" / version / "metrics.jsonl").read_text().splitlines()
    return {
        "accelerate": version,
        "loss": [row["train/loss"] for row in map(json.loads, metrics) if "train/loss" in row][-1],
    }


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Try each version, print a line of the table for each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the figures here too")
    asked = parser.parse_args(argv)
    taken = verdicts.read_ranges(doctor.REQUIREMENTS.read_text(encoding="utf-8"))["accelerate"]
    machine = {name: installed(name) for name in ("torch", "transformers")}
    machine |= {"python": platform.python_version(), "system": platform.platform(), "commit": commit()}
    print(
        f"torch {machine['torch']}, transformers {machine['transformers']}\n\n| accelerate | FSDP2, tied GPT-2 |\n|---|---|"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="versions-") as name:
        prepare_shards(Path(name), RECIPE, flag_words(SMALL))
        for version in released(taken):
            rows.append(row := train(version, Path(name)) | {"taken": taken.contains(version)})
            print(f"| {version} | {row.get('problem') or 'loss {:.6f}'.format(row['loss'])} |", flush=True)
    write_json(asked.json, machine | {"range": str(taken), "versions": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
