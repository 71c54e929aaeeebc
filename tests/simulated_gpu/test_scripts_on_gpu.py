"""The scripts on a simulated GPU: devices, precisions, kernels, and how often the host waits."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import simulated_cuda
import torch
from conftest import (
    RECIPE,
    ROOT,
    WORDS,
    CompletedScript,
    create_shared_folder,
    run_script,
    torchrun_environments,
)
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows
from simulated_cuda import A6000, H200, T4, GpuModel, run_on_gpu

from ursa_minor.base import gpus
from ursa_minor.preflight import estimate, trials
from ursa_minor.recipe import command_line

HAS_EVALUATE = importlib.util.find_spec("evaluate") is not None
GPU_PROCESS = str(ROOT / "tests" / "simulated_gpu" / "gpu_process.py")
TWO_A6000 = dataclasses.replace(A6000, count=2)
RECIPE_CHANGES = {
    "tokenizer: characters": "tokenizer: bpe\ntokenizer_vocab_size: 300",
    "vocab_size: 64": "vocab_size: 320",
    "tokens_per_step: 128": "tokens_per_step: 64",
    "max_steps: 12": "max_steps: 6",
    "eval_tokens: 320": "eval_tokens: 128",
    "eval_steps: 4": "eval_steps: 3",
    "tokens: 4": "tokens: 6",
}
NOTHING_ELSE = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "0")
WHOLE_RUN = (
    *TINY_RECIPE,
    *("--tasks", "hellaswag"),
    *("--task_steps", "6"),
    *("--task_files", "hellaswag=items.jsonl"),
    *("--data_device", "cpu"),
)


@dataclasses.dataclass
class GpuRun(CompletedScript):
    """The result of a script, and the record of the simulated GPU."""

    gpu: dict


@functools.cache
def import_modules_for_gpu_runs() -> None:
    """Import the modules of the scripts once, because each run is a fork of this process."""
    for name in ("check_setup", "eval_hellaswag", "export_model", "generate", "matplotlib.figure"):
        importlib.import_module(name)
    # torch._dynamo.reset imports the compiler.
    importlib.import_module("torch._inductor.cudagraph_trees")
    if HAS_EVALUATE:
        importlib.import_module("evaluate")


def run_script_on_gpu(
    model: GpuModel, script: str, *flags: str, expect: int | None = 0, **environment: str
) -> GpuRun:
    """Run a script on simulated GPUs, one process per GPU.

    The result contains the record of rank 1 if there are several GPUs.
    """
    import_modules_for_gpu_runs()
    environment = {
        "GPU_MODEL": json.dumps(dataclasses.asdict(model)),
        "SCRIPT": script,
        "ACCELERATE_USE_CPU": "false",
    } | environment
    result = run_script(GPU_PROCESS, *flags, processes=model.count, expect=expect, **environment)
    record = Path("gpu.json" if model.count == 1 else "gpu1.json")
    recorded = json.loads(record.read_text()) if record.exists() else {}
    return GpuRun(**vars(result), gpu=recorded)


def train_on_gpu(model: GpuModel, *flags: str, **kwargs) -> GpuRun:
    """Train run "r" without evaluations, samples and checkpoints, unless flags request them."""
    flags = (*TINY_RECIPE, *NOTHING_ELSE, "--run_name", "r", *flags)
    return run_script_on_gpu(model, "train", *flags, **kwargs)


def write_gpu_recipe() -> None:
    """Write tiny.yaml: the tests' recipe with a BPE tokenizer and fewer steps."""
    recipe = RECIPE
    for old, new in RECIPE_CHANGES.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    Path("tiny.yaml").write_text('data_files: ["text/*.txt"]\n' + recipe, encoding="utf-8")


def write_documents_and_items() -> None:
    """Write 150 short documents into text/ and 8 items in HellaSwag's format into items.jsonl."""
    generator = random.Random(1)

    def words(count: int) -> str:
        return " ".join(generator.choices(WORDS, k=count))

    Path("text").mkdir()
    for number in range(150):
        Path(f"text/{number:03}.txt").write_text(words(14))

    contexts = [words(3 + number) for number in range(8)]
    with Path("items.jsonl").open("w") as items:
        for number, context in enumerate(contexts):
            item = {
                "ind": number,
                "activity_label": "cat",
                "ctx_a": context,
                "ctx_b": "",
                "ctx": context,
                "label": number % 4,
                "endings": [words(2) for _ in range(4)],
            }
            items.write(json.dumps(item) + "\n")


@pytest.fixture(scope="session")
def gpu_run_folder(tmp_path_factory) -> Path:
    """A folder with tiny.yaml, its text, HellaSwag items and runs/whole, a finished H200 run."""

    def make() -> None:
        write_gpu_recipe()
        write_documents_and_items()
        run_script("prepare_data.py", *TINY_RECIPE)
        result = run_script_on_gpu(H200, "train", *WHOLE_RUN, "--run_name", "whole")
        Path("whole.json").write_text(json.dumps(vars(result)))

    return create_shared_folder(tmp_path_factory, "simulated_gpu", make)


@pytest.fixture
def gpu_run(gpu_run_folder, tmp_path, monkeypatch) -> GpuRun:
    """The finished H200 run. The current folder is a copy of ``gpu_run_folder``."""
    shutil.copytree(gpu_run_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return GpuRun(**json.loads(Path("whole.json").read_text()))


def dtypes_of(products: dict[str, int], place: str) -> set[str]:
    """Return the data types of the matrix products in functions whose name contains ``place``."""
    return {key.split()[0] for key in products if place in key}


def steps_with(run_name: str, metric: str) -> list[int]:
    """Return the steps at which a run logged a metric."""
    return [row["step"] for row in metrics_rows(run_name) if metric in row]


def tiny_shape() -> estimate.Shape:
    """Return the model shape of tiny.yaml."""
    recipe = command_line.parse_training([*TINY_RECIPE, "--vocab_size", "320"])[0]
    return estimate.shape_of(recipe.model)


# Training


def test_bf16_run_trains_scores_and_samples(gpu_run):
    assert "device   NVIDIA H200, precision bf16, TF32, compile inductor" in gpu_run.stderr
    assert gpu_run.gpu["compile_calls"] == [{"backend": "inductor"}]
    assert gpu_run.gpu["allocator_settings"] == "expandable_segments:True"
    losses = losses_by_step("whole")
    assert losses[6] < losses[1]
    assert steps_with("whole", "eval/loss") == [0, 3, 6]
    assert steps_with("whole", "hellaswag/acc") == [0, 6]
    assert "the " in Path("runs/whole/samples.txt").read_text()


def test_log_shows_speed_and_memory(gpu_run):
    progress = r"loss [\d.]+  [\d,]+ tokens/s  mfu \d+%  memory \d+%  left "
    assert re.search(progress, gpu_run.stderr)
    assert "speed    GPT-2 124M on one GPU: tokens/s " in gpu_run.stderr
    assert "MFU good from" in gpu_run.stderr
    last_update = [row for row in metrics_rows("whole") if "train/loss" in row][-1]
    assert last_update["gpu/utilization"] == 0.97
    assert last_update["gpu/watts"] == 287.5
    assert 0 < last_update["gpu/memory"] < 1e-4


def test_host_reads_gpu_once_per_update(gpu_run):
    updates = gpu_run.gpu["updates"]
    waits = gpu_run.gpu["waits"]

    # Other work is due in the remaining two updates.
    assert updates.count({"read update.update": 1}) == 4
    assert {update["read update.update"] for update in updates} == {1}
    assert "windows." not in str(waits)
    # Once per validation, not once per batch.
    assert waits["read validation.validation_loss"] == 3


def test_training_uses_cudnn_attention_on_h200(gpu_run):
    kernels = gpu_run.gpu["kernels"]

    # Validation's forward pass is not compiled. There Transformers reads whether positions are
    # packed, once per pass.
    validation_passes = gpu_run.gpu["waits"]["read loss.NextTokenLoss.forward"]
    # Six updates and the trial before the first one have two micro-batches each.
    forward_passes = 6 * 2 + 2 + validation_passes
    # Two layers, and one call for the log.
    assert kernels["cudnn attention._causal_attention"] == 2 * forward_passes + 1
    assert f"kernels  attention cudnn; torch {torch.__version__}, CUDA 13.0" in gpu_run.stderr
    assert ", cuDNN" in gpu_run.stderr
    assert ", driver 580.1\n" in gpu_run.stderr


def test_scoring_avoids_cudnn_attention(gpu_run):
    """The cuDNN kernel is set up again for each shape, and task items have many shapes."""
    kernels = set(gpu_run.gpu["kernels"])

    assert kernels == {
        "cudnn attention._causal_attention",
        "efficient attention._causal_attention",
    }


def test_training_and_evaluations_compute_in_run_precision(gpu_run):
    products = gpu_run.gpu["products"]

    assert dtypes_of(products, "train.train") == {"bfloat16"}
    assert dtypes_of(products, "loss.") == {"bfloat16"}
    assert dtypes_of(products, "likelihood.") == {"bfloat16"}


def test_update_is_one_fused_kernel_per_group(gpu_run):
    num_updates = 6
    num_groups = 2

    calls = gpu_run.gpu["watched"]["_fused_adamw_ float32 update.update"]

    assert calls == num_updates * num_groups


def test_mfu_is_relative_to_peak_of_precision(gpu_run):
    row = next(row for row in metrics_rows("whole") if "mfu" in row)

    peak = row["tokens_per_second"] * tiny_shape().flops_per_token / row["mfu"]

    assert peak == pytest.approx(gpus.peak_flops("NVIDIA H200", "bf16"))


@pytest.mark.slow
def test_deterministic_run_uses_deterministic_kernels(gpu_run):
    flags = (*WHOLE_RUN, "--run_name", "d", "--deterministic", "true")

    result = run_script_on_gpu(H200, "train", *flags)

    assert set(result.gpu["kernels"]) == {
        "flash attention._causal_attention",
        "efficient attention._causal_attention",
    }
    assert result.gpu["waits"] == gpu_run.gpu["waits"]
    assert losses_by_step("d") == losses_by_step("whole")


# A scale at which the first updates overflow.
INIT_SCALE = 2.0**19
FP16_MUON = ("--optimizer", "muon", "--max_steps", "4", "--save_steps", "2")


def skipped_per_update(run_name: str) -> list[int]:
    """Return for each update of a run how many updates it skipped: 0 or 1."""
    totals = [row["skipped_updates"] for row in metrics_rows(run_name)]
    return [after - before for before, after in itertools.pairwise([0, *totals])]


@pytest.mark.slow
def test_killed_fp16_run_resumes_with_its_loss_scale(gpu_run):
    environment = {"INIT_SCALE": str(INIT_SCALE)}

    result = train_on_gpu(T4, *FP16_MUON, "--run_name", "u", **environment)
    train_on_gpu(T4, *FP16_MUON, expect=-9, KILL_AT="3", **environment)
    train_on_gpu(T4, *FP16_MUON, **environment)

    check_overflows_were_skipped(result)
    check_products_are_fp16(result)
    assert final_state("r", 4) == final_state("u", 4)
    assert losses_by_step("r") == losses_by_step("u")


def check_overflows_were_skipped(result: GpuRun) -> None:
    """Check that run "u" skipped its overflows and lowered the loss scale each time."""
    skipped = skipped_per_update("u")
    total = sum(skipped)
    message = "update skipped: fp16 overflow; the loss scale was lowered"
    assert 0 < total < 4
    assert result.stderr.count(message) == total
    assert final_state("u", 4)["state"]["scaler"]["scale"] == INIT_SCALE / 2**total

    reads = [update["read update.update"] for update in result.gpu["updates"]]
    assert reads == [3 if is_skipped else 1 for is_skipped in skipped]


def check_products_are_fp16(result: GpuRun) -> None:
    """Check that the model and Muon multiply in fp16, and nothing in bf16, which a T4 lacks."""
    products = result.gpu["products"]
    assert "device   Tesla T4, precision fp16, compile inductor" in result.stderr
    assert "float16 muon.orthogonalize" in products
    assert "float16 loss.NextTokenLoss.forward" in products
    assert "bfloat16" not in str(products)


@pytest.mark.slow
def test_masked_checkpointed_run_with_resident_data_is_profiled(gpu_run):
    flags = ("--document_mask", "true", "--gradient_checkpointing", "full", "--profile")
    num_updates = 14
    sizes = ("--max_steps", str(num_updates), "--tokens_per_step", "32")

    result = train_on_gpu(A6000, *flags, *sizes, LOSS_ROWS="5")

    device = "precision bf16, TF32, compile inductor, full gradient checkpointing"
    assert device in result.stderr
    # Dropout excludes FlexAttention.
    assert "kernels  attention efficient;" in result.stderr
    # Two layers, computed twice because of checkpointing, in the updates and in the trial before
    # them. One more call for the log.
    num_calls = 2 * 2 * (num_updates + 1) + 1
    assert result.gpu["kernels"] == {"efficient attention._causal_attention": num_calls}
    assert result.gpu["updates"][1:] == [{"read update.update": 1}] * (num_updates - 1)
    # data_device is auto, and the data are small enough for the GPU.
    assert result.gpu["waits"]["write batches.Resident.__init__"] == 1
    # The first profile is for the log.
    assert result.gpu["profiled_activities"] == ["CPU", "CPU", "CUDA"]
    assert "attention" in Path("runs/r/profile/table.txt").read_text()


# Other scripts


def test_generate_writes_same_text_as_on_cpu(gpu_run):
    sampling = ("--max_new_tokens", "12", "--temperature", "0")
    flags = ("--model", "runs/whole", "--prompt", "the ", *sampling)
    expected = run_script("generate.py", *flags)

    result = run_script_on_gpu(A6000, "generate", *flags)

    assert result.stdout == expected.stdout
    assert result.stdout.startswith("the ")
    assert "write generate.print_samples" in result.gpu["waits"]
    assert "float32 sampling.sample" in result.gpu["products"]


HELLASWAG_FLAGS = ("--model", "runs/whole", "--data_files", "items.jsonl")


@pytest.mark.skipif(not HAS_EVALUATE, reason="needs the evaluate package")
def test_hellaswag_scores_with_halved_batch_equal_cpu(gpu_run):
    small_gpu = dataclasses.replace(T4, most_sequences=4)

    on_cpu = run_script("eval_hellaswag.py", *HELLASWAG_FLAGS)
    on_gpu = run_script_on_gpu(small_gpu, "eval_hellaswag", *HELLASWAG_FLAGS)

    expected = json.loads(on_cpu.stdout)
    scores = json.loads(on_gpu.stdout)
    for timed in (expected, scores):
        timed.pop("seconds", None)
    assert {name: scores[name] for name in expected} == expected


@pytest.mark.skipif(not HAS_EVALUATE, reason="needs the evaluate package")
def test_hellaswag_scores_in_requested_precision(gpu_run):
    precision = {"ACCELERATE_MIXED_PRECISION": "bf16"}

    result = run_script_on_gpu(A6000, "eval_hellaswag", *HELLASWAG_FLAGS, **precision)

    assert "bfloat16 likelihood._score" in result.gpu["products"]
    assert json.loads(result.stdout)["precision"] == "bf16"
    assert "score_model.run" in str(result.gpu["waits"])


def test_export_measures_both_models_on_gpu(gpu_run):
    flags = ("runs/whole", "--out", "out", "--dtype", "bf16")

    result = run_script_on_gpu(A6000, "export_model", *flags)

    record = json.loads(Path("out/export.json").read_text())
    assert record["after"]["loss"] == pytest.approx(record["before"]["loss"], abs=0.01)
    assert "this is a CPU" not in result.stdout
    assert "float32 convert.LogitsLoss.forward" in result.gpu["products"]
    assert "bfloat16 convert.LogitsLoss.forward" in result.gpu["products"]


def test_check_setup_tries_what_training_uses(gpu_run):
    flags = ("--recipe", "tiny.yaml", "--json")
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}

    # The exit status also depends on the packages that are installed.
    result = run_script_on_gpu(A6000, "check_setup", *flags, expect=None, **offline)

    assert result.stdout, result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    for name in ("gpu", "kernels", "bf16", "compile"):
        assert checks[name]["level"] == "ok", checks[name]
    assert "a6000.yaml" in checks["launch"]["text"]
    assert "ms on cuda" in checks["bf16"]["text"]
    assert "float32 loss.NextTokenLoss.forward" in result.gpu["products"]
    assert "bfloat16 loss.NextTokenLoss.forward" in result.gpu["products"]
    # Two trials with two models and two turns each.
    assert result.gpu["waits"]["synchronize trials._finish"] == 2 * 2 * 2


# Two GPUs


def test_ddp_exchanges_gradients_once_per_update(gpu_run):
    """The processes meet by a new name, as they do when a launcher restarts them."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # Each GPU accumulates the gradients of 2 micro-batches.
    num_updates = 4
    sizes = ("--max_steps", str(num_updates), "--per_device_train_batch_size", "1")

    result = train_on_gpu(TWO_A6000, *sizes, **launcher)

    assert "2 processes x 2 micro-batches x 1 sequence" in result.stderr
    assert result.gpu["backend"] == "nccl"
    assert result.gpu["ddp_arguments"]["device_ids"] == [1]
    assert result.gpu["ddp_arguments"]["gradient_as_bucket_view"] is True
    fp32_bytes = 4 * tiny_shape().parameters
    assert result.gpu["exchanged_bytes"] == num_updates * fp32_bytes


def test_all_reduce_trial_uses_one_gpu_per_process():
    environments = torchrun_environments(2)

    def run_trial(rank: int) -> None:
        os.environ.update(environments[rank])
        result = trials.all_reduce(backend="nccl", megabytes=1)
        assert result.startswith("nccl, 2 processes: ")
        assert simulated_cuda.gpu.device.index == rank

    def work(gpu) -> None:
        torch.multiprocessing.start_processes(run_trial, nprocs=2, start_method="fork")

    run_on_gpu(TWO_A6000, work)
