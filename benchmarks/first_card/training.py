"""Parts a, i, m, j and report: train 30 steps with train.py, and measure speed and memory.

The parts on resuming and on the compiler cache start train.py with the functions of this module.
"""

import re
import shutil
import statistics
from pathlib import Path

import yaml

from benchmarks.first_card.data import carried
from benchmarks.first_card.runner import TINY_MODEL, Part
from benchmarks.runs import ROOT, flag_words
from ursa_minor.base import gpus
from ursa_minor.base.run_files import read_metrics

# Keys of a recipe that describe its data, which is replaced by the data of the part carry.
DATA_KEYS = (
    "dataset_name",
    "dataset_config_name",
    "text_column",
    "validation_tokens",
    "license",
    "language",
    "tokenizer",
)
QUIET = {
    "eval_steps": 0,
    "sample_steps": 0,
    "save_steps": 0,
    "task_steps": 0,
    "logging_steps": 1,
}
SETTLED = 10  # the speed of the first steps does not count
MICRO_BATCHES = re.compile(r"(\d+) micro-batch(?:es)? x (\d+) sequence")
KERNELS = re.compile(r"^.*\bkernels  (\S.*)$", re.MULTILINE)
PERCENT = re.compile(r"[\d.]+%")
MIN_PROFILE_SHARE = 2  # percent of the time, of the operations in the row


def profiled_steps(part: Part) -> None:
    """Train gpt2_124m for 30 steps with this GPU's configuration file, and profile three."""
    if not measure_steps(part, "profiled", train_arguments=("--profile",)):
        return
    run = part.work / "runs" / "profiled"
    table_file = run / "profile" / "table.txt"
    table = table_file.read_text()
    part.note(profile_summary(table), profile=table.splitlines())


def report(part: Part) -> None:
    """Train gpt2_124m for 30 steps with this GPU's configuration file."""
    measure_steps(part, "steps")


def fp16(part: Part) -> None:
    """Train gpt2_124m for 30 steps in fp16."""
    launch = []
    if part.command.has_gpu:
        launch = ["--mixed_precision", "fp16"]
    if measure_steps(part, "fp16", launch_arguments=launch):
        folder = part.work / "runs" / "fp16"
        rows = read_metrics(folder / "metrics.jsonl")
        skipped = max(row.get("skipped_updates", 0) for row in rows)
        part.note(f"{skipped} updates skipped", skipped_updates=skipped)


def muon(part: Part) -> None:
    """Train gpt2_124m_fast, which uses Muon, for 30 steps."""
    measure_steps(part, "muon", recipe_name="gpt2_124m_fast")


def several_gpus(part: Part) -> None:
    """Train gpt2_124m for 30 steps on all GPUs of the machine."""
    machine = part.command.record
    count = machine["count"]
    if count < 2:
        part.note(f"cards of this machine: {count}", cards=count)
        return
    preset = gpus.preset(machine["machine"], count)
    config_file = ROOT / "accelerate_configs" / f"{preset}.yaml"
    # The launcher uses the last --config_file.
    launch = ["--config_file", config_file]
    if not preset.endswith(f"_x{count}"):
        launch += ["--multi_gpu", "--num_processes", count]
    measure_steps(part, "several_cards", launch_arguments=launch)


def measure_steps(
    part: Part,
    run_name: str,
    *,
    recipe_name: str = "gpt2_124m",
    launch_arguments=(),
    train_arguments=(),
) -> bool:
    """Train 30 steps, and note speed, micro-batch, losses and attention kernel.

    Args:
        part: receives the figures.
        run_name: of the run. It is also the name of the figures in the record.
        recipe_name: of a recipe in recipes/.
        launch_arguments: additional arguments for accelerate's launcher.
        train_arguments: additional arguments for train.py.

    Returns:
        Whether the training finished.
    """
    steps = 14 if part.is_tiny else 30
    folder = empty_run_folder(part, run_name)
    recipe_keys = {
        "run_name": run_name,
        "max_steps": steps,
        "warmup_steps": 4,
    }
    output = train(
        part,
        f"{steps} steps, {run_name}",
        write_recipe(part, recipe_name),
        recipe_keys,
        launch_arguments=launch_arguments,
        train_arguments=train_arguments,
    )
    if output is None:
        return False

    result = pace(folder, part.command.record["memory_bytes"])
    losses = losses_of(folder)
    accumulation, micro_batch = MICRO_BATCHES.search(output).groups()
    kernels = None
    kernels_match = KERNELS.search(output)
    if kernels_match:
        kernels = kernels_match[1]
    result["losses"] = losses
    result["accumulation"] = int(accumulation)
    result["micro_batch"] = int(micro_batch)
    result["kernels"] = kernels

    first_loss = losses[1]
    last_loss = losses[steps]
    phrases = [
        f"{run_name}: micro-batch {micro_batch} x {accumulation}: {describe_pace(result)}",
        f"loss {first_loss:.2f} to {last_loss:.2f} in {steps} steps",
    ]
    if kernels:
        phrases.append(kernels)
    phrase = "; ".join(phrases)
    part.note(phrase, **{run_name: result})
    return True


def train(
    part: Part,
    title: str,
    recipe: Path,
    recipe_keys: dict,
    *,
    launch_arguments=(),
    train_arguments=(),
    compiler_cache: Path | None = None,
) -> str | None:
    """Run train.py with ``accelerate launch`` and the configuration file of the GPU.

    Args:
        part: that runs it.
        title: of the program in messages and in the record.
        recipe: path of the recipe.
        recipe_keys: replace values of the recipe. A run that has checkpoints is resumed.
        launch_arguments: additional arguments for accelerate's launcher.
        train_arguments: additional arguments for train.py.
        compiler_cache: cache folder of the compiler, or None for the default.

    Returns:
        The output, or None if the program failed.
    """
    preset = ROOT / "accelerate_configs" / f"{part.command.preset}.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", preset, *launch_arguments]
    command += [ROOT / "train.py", "--recipe", recipe, *flag_words(recipe_keys)]
    command += train_arguments
    environment = {}
    if compiler_cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiler_cache)
    return part.run(title, command, part.work, **environment)


def write_recipe(part: Part, name: str) -> Path:
    """Write a copy of a recipe that trains on the data of the part carry.

    Args:
        part: in a rehearsal the model of the recipe is tiny.
        name: of a recipe in recipes/.

    Returns:
        The path of the copy.
    """
    original = ROOT / "recipes" / f"{name}.yaml"
    recipe = yaml.safe_load(original.read_text())
    for key in DATA_KEYS:
        recipe.pop(key, None)
    ids = carried(part) / "ids"
    recipe["data_dir"] = str(ids)
    recipe["tokenizer"] = str(ids / "tokenizer")
    recipe |= QUIET
    if part.is_tiny:
        recipe |= TINY_MODEL
        recipe["tokens_per_step"] = 512
        recipe["warmup_steps"] = 2
    text = yaml.safe_dump(recipe, sort_keys=False)
    copy = part.work / f"{name}.yaml"
    copy.write_text(text)
    return copy


def empty_run_folder(part: Part, run_name: str) -> Path:
    """Delete a run if it exists, and return its folder."""
    folder = part.work / "runs" / run_name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def pace(folder: Path, memory_bytes: int) -> dict:
    """Return the median speed of a run without its first steps, and its memory peak.

    Args:
        folder: of the run.
        memory_bytes: memory of the GPU.

    Returns:
        ``tokens_per_second``, ``ms_per_step``, the number of ``updates`` that count, and ``mfu``,
        ``watts``, ``utilization`` and ``peak_bytes``, each None if the run does not report it.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    rows = [row for row in rows if "tokens_per_second" in row]
    settled_rows = [row for row in rows if row["step"] > SETTLED]

    def median(key: str) -> float | None:
        values = [row[key] for row in settled_rows if key in row]
        return statistics.median(values) if values else None

    memory_shares = [row["gpu/memory"] for row in rows if "gpu/memory" in row]
    peak_bytes = None
    if memory_shares:
        peak_bytes = round(max(memory_shares) * memory_bytes)
    return {
        "tokens_per_second": median("tokens_per_second"),
        "ms_per_step": median("ms_per_step"),
        "mfu": median("mfu"),
        "watts": median("gpu/watts"),
        "utilization": median("gpu/utilization"),
        "peak_bytes": peak_bytes,
        "updates": len(settled_rows),
    }


def describe_pace(speed: dict) -> str:
    """Return the figures of ``pace`` for the row."""
    tokens_per_second = speed["tokens_per_second"]
    mfu = speed["mfu"]
    peak_bytes = speed["peak_bytes"]
    watts = speed["watts"]
    phrases = [f"{tokens_per_second:,.0f} tokens/s"]
    if mfu:
        phrases.append(f"{mfu:.1%} MFU")
    if peak_bytes:
        gibibytes = peak_bytes / 2**30
        phrases.append(f"peak {gibibytes:.2f} GiB")
    if watts:
        phrases.append(f"{watts:.0f} W")
    return ", ".join(phrases)


def losses_of(folder: Path) -> dict[int, float]:
    """Return the training loss of each step of a run."""
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def profile_summary(table: str) -> str:
    """Return the largest shares in a table of torch.profiler.

    Args:
        table: content of a run's profile/table.txt. Its columns are separated by two spaces.
    """
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    (header,) = [cells for cells in rows if cells[0] == "Name"]
    # On a GPU, the time of the kernels counts. The table of a CPU has no such column.
    column = "Self CUDA %" if "Self CUDA %" in header else "Self CPU %"
    position = header.index(column)
    shares = []
    for cells in rows:
        # The other lines are the header, rules, and the total times.
        if len(cells) != len(header) or not PERCENT.fullmatch(cells[position]):
            continue
        operation = cells[0]
        # ProfilerStep contains all operations of an update.
        if operation.startswith("ProfilerStep"):
            continue
        share = float(cells[position].rstrip("%"))
        if share >= MIN_PROFILE_SHARE:
            shares.append(f"{operation} {share:.1f}%")
    listed_shares = ", ".join(shares)
    return f"profile of three updates, {column}: {listed_shares}"
