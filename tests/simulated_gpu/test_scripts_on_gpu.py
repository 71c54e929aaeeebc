"""The scripts on a pretended card: what only a card reaches is run, on the right side, and the host seldom waits."""

import contextlib
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
from conftest import RECIPE, ROOT, WORDS, CompletedScript, run_script, torchrun_environments
from run_results import TINY_RECIPE, final_state, losses_by_step, metrics_rows
from simulated_cuda import A6000, H200, T4, GpuModel, run_on_gpu

from ursa_minor.base import gpus
from ursa_minor.preflight import estimate, trials
from ursa_minor.recipe import command_line

HAS_EVALUATE = importlib.util.find_spec("evaluate") is not None
CHILD = str(ROOT / "tests" / "simulated_gpu" / "gpu_process.py")
SMALL = {
    "tokenizer: characters": "tokenizer: bpe\ntokenizer_vocab_size: 300",
    "vocab_size: 64": "vocab_size: 320",
    "tokens_per_step: 128": "tokens_per_step: 64",
    "max_steps: 12": "max_steps: 6",
    "eval_tokens: 320": "eval_tokens: 128",
    "eval_steps: 4": "eval_steps: 3",
    "tokens: 4": "tokens: 6",
}
NOTHING_ELSE = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "0")


@dataclasses.dataclass
class Seen(CompletedScript):
    """What came of a run on a card, and what became known of the card."""

    card: dict


@functools.cache
def import_what_cards_need() -> None:
    """Import once what each run on a card would otherwise on its own, for it is a fork of this process."""
    for name in ("check_setup", "eval_hellaswag", "export_model", "generate", "matplotlib.figure"):
        importlib.import_module(name)
    importlib.import_module(
        "torch._inductor.cudagraph_trees"
    )  # the compiler, which torch._dynamo.reset brings
    if HAS_EVALUATE:
        importlib.import_module("evaluate")


def run_on(
    card: GpuModel, script: str, *flags: str, expect: int | None = 0, **environment: str
) -> Seen:
    """Run a script on a pretended card, or on ``card.count`` of them, a process each; ``card`` is then that of rank 1."""
    import_what_cards_need()
    given = {
        "CARD": json.dumps(dataclasses.asdict(card)),
        "SCRIPT": script,
        "ACCELERATE_USE_CPU": "false",
    }
    done = run_script(CHILD, *flags, processes=card.count, expect=expect, **given | environment)
    known = Path("card.json" if card.count == 1 else "card1.json")
    return Seen(**vars(done), card=json.loads(known.read_text()) if known.exists() else {})


@pytest.fixture(scope="module")
def gpu_run_folder(tmp_path_factory) -> Path:
    """A folder with tiny.yaml, short documents, HellaSwag's kind of items, and a finished run on an H200: runs/whole."""
    folder, draw, recipe = tmp_path_factory.mktemp("card"), random.Random(1), RECIPE

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    for old, new in SMALL.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    with contextlib.chdir(folder):
        Path("tiny.yaml").write_text('data_files: ["text/*.txt"]\n' + recipe, encoding="utf-8")
        Path("text").mkdir()
        for number in range(150):  # a document each
            Path(f"text/{number:03}.txt").write_text(words(14))
        items = [
            {"ind": i, "activity_label": "cat", "ctx_a": words(3 + i), "ctx_b": "", "label": i % 4}
            for i in range(8)
        ]
        rows = [
            item | {"ctx": item["ctx_a"], "endings": [words(2) for _ in range(4)]} for item in items
        ]
        Path("items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_script("prepare_data.py", *TINY_RECIPE)
        done = run_on(H200, "train", *WHOLE, "--run_name", "whole")
        Path("whole.json").write_text(json.dumps(vars(done)))
    return folder


SCORED = "--tasks hellaswag --task_steps 6 --task_files hellaswag=items.jsonl --data_device cpu"
WHOLE = (*TINY_RECIPE, *SCORED.split())


@pytest.fixture
def whole(gpu_run_folder, tmp_path, monkeypatch) -> Seen:
    """What came of that run, in a folder of one's own that holds it."""
    shutil.copytree(gpu_run_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Seen(**json.loads(Path("whole.json").read_text()))


def train(card: GpuModel, *flags: str, **given) -> Seen:
    return run_on(card, "train", *TINY_RECIPE, *NOTHING_ELSE, "--run_name", "r", *flags, **given)


# Transformers asks of a forward pass that is not compiled, as in validation, whether its positions are packed.
PACKED = "read loss.NextTokenLoss.forward"


def test_a_bf16_run_is_trained_scored_and_sampled_on_the_card(whole):
    assert "device   NVIDIA H200, precision bf16, TF32, compile inductor" in whole.stderr
    assert re.search(r"loss [\d.]+  [\d,]+ tokens/s  mfu \d+%  memory \d+%  left ", whole.stderr)
    assert (
        "speed    GPT-2 124M on one GPU: tokens/s " in whole.stderr
        and "MFU good from" in whole.stderr
    )
    assert losses_by_step("whole")[6] < losses_by_step("whole")[1]
    steps = {
        name: [row["step"] for row in metrics_rows("whole") if name in row]
        for name in ("eval/loss", "hellaswag/acc")
    }
    assert steps == {"eval/loss": [0, 3, 6], "hellaswag/acc": [0, 6]}
    assert "the " in Path("runs/whole/samples.txt").read_text()
    assert (
        whole.card["compiled"] == [{"backend": "inductor"}]
        and whole.card["allocator"] == "expandable_segments:True"
    )
    update = [row for row in metrics_rows("whole") if "train/loss" in row][-1]
    assert (update["gpu/utilization"], update["gpu/watts"]) == (0.97, 287.5) and 0 < update[
        "gpu/memory"
    ] < 1e-4


def test_the_host_reads_the_card_once_an_update_and_waits_for_no_batch(whole):
    updates, waits = whole.card["updates"], whole.card["waits"]
    assert updates.count({"read update.update": 1}) == 4  # where nothing else was due
    assert all(update["read update.update"] == 1 for update in updates) and "windows." not in str(
        waits
    )
    assert waits["read validation.validation_loss"] == 3  # one a look, however many batches


def test_training_takes_the_cards_fast_attention_and_scores_none_that_prepares_itself_for_each_shape(
    whole,
):
    forward_passes = (
        6 * 2 + 2 + whole.card["waits"][PACKED]
    )  # the try before has two micro-batches too
    # Of two layers, and one for the log.
    assert whole.card["kernels"]["cudnn attention._causal_attention"] == 2 * forward_passes + 1
    assert whole.card["kernels"].keys() == {
        f"{name} attention._causal_attention" for name in ("cudnn", "efficient")
    }
    assert f"kernels  attention cudnn; torch {torch.__version__}, CUDA 13.0, cuDNN" in whole.stderr
    assert ", driver 580.1\n" in whole.stderr
    assert {key.split()[0] for key in whole.card["products"] if "train.train" in key} == {
        "bfloat16"
    }


def test_evaluations_compute_in_the_runs_precision_and_an_update_is_one_fused_kernel_a_parameter_group(
    whole,
):
    products = whole.card["products"].keys()
    assert whole.card["watched"]["_fused_adamw_ float32 update.update"] == 6 * 2
    assert {key.split()[0] for key in products if "loss." in key} == {
        "bfloat16"
    }  # validation's too
    assert {key.split()[0] for key in products if "likelihood." in key} == {"bfloat16"}


def tiny_shape() -> estimate.Shape:
    return estimate.shape_of(
        command_line.parse_training([*TINY_RECIPE, "--vocab_size", "320"])[0].model
    )


def test_mfu_is_a_share_of_the_cards_peak_in_the_runs_precision(whole):
    row = next(row for row in metrics_rows("whole") if "mfu" in row)
    peak = row["tokens_per_second"] * tiny_shape().flops_per_token / row["mfu"]
    assert peak == pytest.approx(gpus.peak_flops("NVIDIA H200", "bf16"))


def test_a_deterministic_run_takes_no_kernel_that_varies(whole):
    done = run_on(H200, "train", *WHOLE, "--run_name", "d", "--deterministic", "true")
    assert done.card["kernels"].keys() == {
        f"{name} attention._causal_attention" for name in ("flash", "efficient")
    }
    assert done.card["waits"] == whole.card["waits"] and losses_by_step("d") == losses_by_step(
        "whole"
    )


def test_fp16_skips_an_overflow_muon_computes_in_what_the_card_has_and_a_killed_run_resumes_with_its_scale(
    whole,
):
    flags, scale = (
        ("--optimizer", "muon", "--max_steps", "6", "--save_steps", "3"),
        {"SCALE": str(2.0**19)},
    )
    done = train(T4, *flags, "--run_name", "u", **scale)
    assert "device   Tesla T4, precision fp16, compile inductor" in done.stderr
    skipped = [0, *(row["skipped_updates"] for row in metrics_rows("u"))]
    lost = [after - before for before, after in itertools.pairwise(skipped)]
    assert done.stderr.count("update skipped: fp16 overflow; the loss scale was lowered") == sum(
        lost
    )
    assert 0 < sum(lost) < 6
    assert [update["read update.update"] for update in done.card["updates"]] == [
        3 if each else 1 for each in lost
    ]
    assert done.card["products"].keys() >= {
        "float16 muon.orthogonalize",
        "float16 loss.NextTokenLoss.forward",
    }
    assert not [key for key in done.card["products"] if "bfloat16" in key]
    assert final_state("u", 6)["state"]["scaler"]["scale"] == 2.0 ** (19 - sum(lost))
    train(T4, *flags, expect=-9, KILL_AT="5", **scale)
    train(T4, *flags, **scale)
    assert final_state("r", 6) == final_state("u", 6) and losses_by_step("r") == losses_by_step("u")


def test_documents_apart_blocks_computed_again_and_ids_that_live_on_the_card(whole):
    flags = ("--document_mask", "true", "--gradient_checkpointing", "full", "--profile")
    done = train(A6000, *flags, "--max_steps", "14", "--tokens_per_step", "32", ROWS="5")
    assert "precision bf16, TF32, compile inductor, full gradient checkpointing" in done.stderr
    # Two layers, each twice for it is computed again, in 14 steps and a try; once more for the log.
    assert done.card["kernels"] == {"efficient attention._causal_attention": 2 * 2 * 15 + 1}
    assert done.card["updates"][1:] == [{"read update.update": 1}] * 13
    assert (
        done.card["waits"]["write batches.Resident.__init__"] == 1
    )  # data_device auto, and little data
    assert done.card["profiled"] == ["CPU", "CPU", "CUDA"]  # the first for the log
    assert "kernels  attention efficient;" in done.stderr  # dropout rules FlexAttention out
    assert "attention" in Path("runs/r/profile/table.txt").read_text()


def test_generate_writes_what_it_writes_on_a_cpu(whole):
    flags = (
        "--model",
        "runs/whole",
        "--prompt",
        "the ",
        "--max_new_tokens",
        "12",
        "--temperature",
        "0",
    )
    done = run_on(A6000, "generate", *flags)
    assert done.stdout == run_script("generate.py", *flags).stdout and done.stdout.startswith(
        "the "
    )
    assert (
        "write generate.print_samples" in done.card["waits"]
        and "float32 sampling.sample" in done.card["products"]
    )


@pytest.mark.skipif(not HAS_EVALUATE, reason="needs the evaluate package")
def test_eval_hellaswag_halves_its_batch_and_scores_what_a_cpu_scores(whole):
    flags = ("--model", "runs/whole", "--data_files", "items.jsonl")
    card = dataclasses.replace(T4, most_sequences=4)
    found, there = (
        json.loads(done.stdout)
        for done in (
            run_script("eval_hellaswag.py", *flags),
            run_on(card, "eval_hellaswag", *flags),
        )
    )
    assert {name: there[name] for name in found if name != "seconds"} == {
        n: found[n] for n in found if n != "seconds"
    }
    half = run_on(A6000, "eval_hellaswag", *flags, ACCELERATE_MIXED_PRECISION="bf16")
    assert (
        "bfloat16 likelihood._score" in half.card["products"]
        and json.loads(half.stdout)["precision"] == "bf16"
    )
    assert "score_model.run" in str(json.loads(Path("card.json").read_text())["waits"])


def test_export_model_measures_both_models_on_the_card(whole):
    done = run_on(A6000, "export_model", "runs/whole", "--out", "out", "--dtype", "bf16")
    record = json.loads(Path("out/export.json").read_text())
    assert (
        abs(record["after"]["loss"] - record["before"]["loss"]) < 0.01
        and "this is a CPU" not in done.stdout
    )
    products = {f"{each} convert.LogitsLoss.forward" for each in ("float32", "bfloat16")}
    assert products <= done.card["products"].keys()


def test_check_setup_tries_what_training_takes(whole):
    offline = {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "expect": None,
    }  # a missing package is an error too
    done = run_on(A6000, "check_setup", "--recipe", "tiny.yaml", "--json", **offline)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("gpu", "kernels", "bf16", "compile"):
        assert found[name]["level"] == "ok", found[name]
    assert "a6000.yaml" in found["launch"]["text"] and "ms on cuda" in found["bf16"]["text"]
    assert {f"{each} loss.NextTokenLoss.forward" for each in ("float32", "bfloat16")} <= done.card[
        "products"
    ].keys()
    assert done.card["waits"]["synchronize trials._finish"] == 2 * 2 * 2  # trials, models, turns


# Two cards.

TWO = dataclasses.replace(A6000, count=2)
ACCUMULATING = (
    "--max_steps",
    "4",
    "--per_device_train_batch_size",
    "1",
)  # 2 micro-batches on each of two cards


def test_two_cards_exchange_each_gradient_once_an_update_over_nccl(whole):
    """Also where the launcher starts lost processes anew, and they meet by a name of their own."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = train(TWO, *ACCUMULATING, MASTER_PORT=str(store.port), **launcher)
    assert (
        "2 processes x 2 micro-batches x 1 sequence" in done.stderr
        and done.card["backend"] == "nccl"
    )
    assert (
        done.card["wrapped"]["device_ids"] == [1]
        and done.card["wrapped"]["gradient_as_bucket_view"] is True
    )
    assert done.card["exchanged"] == 4 * 4 * tiny_shape().parameters  # of 4 updates, in fp32


def test_check_setups_all_reduce_takes_a_card_a_process():
    environments = torchrun_environments(2)

    def one(rank):
        os.environ.update(environments[rank])
        assert trials.all_reduce(backend="nccl", megabytes=1).startswith("nccl, 2 processes: ")
        assert simulated_cuda.machine.device.index == rank

    run_on_gpu(
        TWO,
        lambda machine: torch.multiprocessing.start_processes(one, nprocs=2, start_method="fork"),
    )
