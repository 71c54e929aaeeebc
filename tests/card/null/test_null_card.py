"""The product on the null card: every YAML of one and two cards, the compiled step for six kinds of card, memory.

`make test-null-card` runs these: they need the CUDA build of PyTorch, a C++ compiler, and most of an hour on two cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, WORDS, Done
from described_cards import CARDS

pytestmark = [
    pytest.mark.null_card,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA build of PyTorch: make test-null-card"),
]
HERE = Path(__file__).resolve().parent
CACHE = HERE / "built" / "compiled"  # what Inductor and Triton have made: a second run takes a third of the time
YAMLS = sorted(
    path.stem
    for path in (ROOT / "accelerate_configs").glob("*.yaml")
    if yaml.safe_load(path.read_text())["num_processes"] <= 2 and path.stem not in ("cpu", "mps")
)
# A width whose matrices the compiler pads for none of the cards; each update is 4 micro-batches on one card.
TINY = {"n_embd": 64, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "sample_steps": 0}
TINY |= {"max_steps": 4, "eval_steps": 2, "save_steps": 0}
AUTO = {"per_device_train_batch_size": "auto"}


def on_card(card: str, *command: str, count: int = 1, memory: float | None = None, trace=None, **environment) -> Done:
    """Run a command under the null card."""
    start = [sys.executable, str(HERE / "run.py"), "--card", card, "--count", str(count)]
    start += ["--memory", str(memory)] if memory else []
    start += ["--trace", str(trace)] if trace else []
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE)} | environment
    done = subprocess.run([*start, *command], env=os.environ | environment, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def python(card: str, code: str, **how) -> Done:
    """Run some lines of Python under the null card."""
    return on_card(card, "python", "-c", "import torch\n" + code, **how)


def flags(**values) -> list[str]:
    """Return the tiny recipe's keys, and others, as flags."""
    return [word for name, value in (TINY | values).items() for word in (f"--{name}", str(value).lower())]


def train(card: str, config: str, *launcher: str, count=1, memory=None, trace=None, environment=None, **values) -> Done:
    """Train the tiny recipe through accelerate launch."""
    path = ROOT / "accelerate_configs" / f"{config}.yaml"
    command = ["accelerate", "launch", "--config_file", str(path), *launcher, str(ROOT / "train.py")]
    command += ["--recipe", "tiny.yaml", *flags(**values)]
    return on_card(card, *command, count=count, memory=memory, trace=trace, **(environment or {}))


def traces(prefix: Path) -> list[list[str]]:
    """Return the trace of each process that has trained, line by line."""
    found = [path.read_text().splitlines() for path in sorted(prefix.parent.glob(f"{prefix.name}.*"))]
    return [lines for lines in found if any("FusedAdam" in line for line in lines)]


def updates(lines: list[str], evaluated_each: int) -> list[list[str]]:
    """Return what is asked of the card from one optimizer's step to the next, where no evaluation lies between.

    The optimizer's step is two kernels, one a parameter group.
    """
    ends = [number for number, line in enumerate(lines) if "FusedAdam" in line][1::2]
    between = [lines[begin + 1 : end] for begin, end in zip(ends, ends[1:], strict=False)]
    return [part for step, part in enumerate(between, 1) if step % evaluated_each]


# The null card itself.


def test_what_is_not_simulated_fails_and_names_itself():
    done = python("h100", "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    torch.ones(3, device='cuda')")
    assert done.returncode and "null card: cudaStreamBeginCapture is not simulated" in done.stderr


def test_a_card_that_this_pytorch_has_no_kernels_for_refuses_them():
    done = python("v100", "torch.ones(3, device='cuda')")
    assert done.returncode and "no kernel image is available" in done.stderr


# Every YAML of one card and of two.


def card_of(config: str) -> str:
    """Return a card that a YAML is for."""
    return "unknown" if config == "conservative" else config.partition("_x")[0]


@pytest.mark.parametrize("config", YAMLS)
def test_a_yaml_trains(config, workplace):
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{config}.yaml").read_text())
    count, card = settings["num_processes"], card_of(config)
    done = train(card, config, count=count, trace=workplace / "trace")
    if card == "v100":  # tests/card/null/README.md
        assert done.returncode and "no kernels for Tesla V100" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "not simulated" not in done.stderr
    rows = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert (workplace / "runs/tiny/model/model.safetensors").is_file()
    processes = traces(workplace / "trace")
    assert len(processes) == count
    for lines in processes:
        half = {word for line in lines if line.startswith("product ") for word in line.split()[5:]} - {"fp32"}
        assert half == {settings["mixed_precision"]}
        compiled = any(line.startswith("kernel triton") for line in lines)
        assert compiled == (settings.get("dynamo_config", {}).get("dynamo_backend") == "INDUCTOR")


def gradient_bytes(lines: list[str], exchange: str) -> int:
    """Return how many bytes of one kind of exchange there are in a list of trace lines, of those above 1 KB."""
    sizes = [int(line.split()[-1]) for line in lines if line.startswith(f"nccl {exchange} ")]
    return sum(size for size in sizes if size > 1024)


def test_two_cards_exchange_each_gradient_once_an_update(workplace):
    done = train("a6000", "a6000_x2", count=2, trace=workplace / "trace", eval_steps=4)
    assert done.returncode == 0, done.stderr
    parameters = 2 * (12 * 64**2 + 13 * 64) + (64 + 16) * 64 + 2 * 64
    for lines in traces(workplace / "trace"):
        assert {gradient_bytes(part, "all-reduce") for part in updates(lines, 4)} == {4 * parameters}


@pytest.mark.parametrize("config, values", [("fsdp2_x8", AUTO), ("zero1_x8", AUTO | {"shard_optimizer": "true"})])
def test_what_is_for_eight_cards_trains_on_two(config, values, workplace):
    done = train("h100", config, "--num_processes", "2", count=2, trace=workplace / "trace", **values)
    assert done.returncode == 0, done.stderr
    assert len(traces(workplace / "trace")) == 2


def test_cards_whose_launcher_starts_lost_processes_anew_connect_at_the_start_and_after_a_loss(workplace):
    launch = ["torchrun", "--standalone", "--nproc_per_node", "2", "--max_restarts", "1"]
    launch += [str(ROOT / "tests" / "machine_child.py"), "--recipe", "tiny.yaml"]
    how = {"DIE_AT": "3", "PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    done = on_card("a6000", *launch, *flags(save_steps=2), count=2, **how)
    assert done.returncode == 0 and Path("struck").exists(), done.stderr
    assert "resumed from runs/tiny/checkpoints/step-00000002" in done.stderr


# An update on the host's side.


def write_items(path: Path) -> None:
    """Write HellaSwag items of the tests' own words."""
    item = {"activity_label": "the", "ctx_a": "the cat", "ctx_b": "sat", "ctx": "the cat sat"}
    item["endings"] = [" ".join(WORDS[i : i + 2]) for i in range(4)]
    path.write_text("".join(json.dumps(item | {"ind": i, "label": i % 4}) + "\n" for i in range(4)))


def test_the_host_waits_once_an_update_and_nothing_is_compiled_again_after_evaluations(workplace):
    write_items(workplace / "items.jsonl")
    often = {"eval_steps": 3, "tasks": "hellaswag", "task_steps": 3, "task_files": "hellaswag=items.jsonl"}
    often |= {"tokenizer": "bpe", "tokenizer_vocab_size": 300, "vocab_size": 320}  # one that can write an item
    done = train(
        "h200", "h200", trace=workplace / "trace", environment={"TORCH_LOGS": "recompiles"}, max_steps=9, **often
    )
    assert done.returncode == 0, done.stderr
    assert "HellaSwag" in done.stderr + done.stdout and "validation loss" in done.stderr + done.stdout
    assert "Recompiling" not in done.stderr
    (lines,) = traces(workplace / "trace")
    quiet = updates(lines, 3)
    assert len(quiet) == 6
    for part in quiet:
        assert [line for line in part if line.startswith("sync")] == ["sync stream"]
        assert not [line for line in part if line.startswith("copy waiting")]
    assert not [line for line in quiet[-1] if line.startswith(("malloc", "create"))]  # its memory is there by now
    # NVML is asked at most once a second.
    assert sum(line == "nvml power" for line in lines) < 9


@pytest.mark.parametrize("gib", [8, 12, 17.2])
def test_a_micro_batch_that_passes_the_try_before_step_0_trains(gib, workplace):
    (workplace / "text.txt").write_text(" ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(20_000)))
    size = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50304, "sequence_length": 1024}
    size |= {"tokens_per_step": 2**16, "per_device_train_batch_size": "auto", "max_steps": 2, "warmup_steps": 1}
    done = train("h100", "h100", "--dynamo_backend", "no", memory=gib, **size)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    assert 0.5 < rows[-1].get("gpu/memory", rows[-2].get("gpu/memory")) < 1  # as much as fits, not much less


@pytest.mark.parametrize("gib, exchanges", [(2.6, 4), (2.8, 1)])
def test_fsdp2_exchanges_gradients_once_an_update_where_whole_ones_fit_beside_a_micro_batch(gib, exchanges, workplace):
    (workplace / "text.txt").write_text(" ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(20_000)))
    size = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50304, "sequence_length": 1024, "eval_steps": 0}
    size |= {"tokens_per_step": 2**13, "max_steps": 3, "warmup_steps": 1}
    two = {"count": 2, "memory": gib, "trace": workplace / "trace"}
    done = train("h100", "fsdp2_x8", "--num_processes", "2", **two, **size | AUTO)
    assert done.returncode == 0 and "2 processes x 4 micro-batches x 1 sequence" in done.stderr, done.stderr
    assert ("beside whole gradients runs out of memory" in done.stderr) == (exchanges == 4)
    sent = exchanges * 4 * (12 * (12 * 768**2 + 13 * 768) + (50304 + 1024) * 768 + 2 * 768)
    for lines in traces(workplace / "trace"):
        assert [gradient_bytes(part, "reduce-scatter") for part in updates(lines, 9)] == [sent, sent]


# The compiled step.


def compiled(card: str, recipe: str, micro_batch: int) -> dict:
    """Return what compiled.py says of two updates of a recipe."""
    command = ["python", str(HERE / "compiled.py"), f"{ROOT}/recipes/{recipe}.yaml", str(micro_batch)]
    done = on_card(card, *command)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("recipe", ["gpt2_124m", "llama_124m"])
@pytest.mark.parametrize("card", ["t4", "a100", "a6000", "l4", "h200", "rtx5090"])
def test_the_compiled_step_has_flash_attention_no_mask_and_no_whole_logits(card, recipe):
    found = compiled(card, recipe, 16)  # two parts of the loss
    assert tuple(found["capability"]) == CARDS[card].capability and found["graphs"] == 2  # forward and backward
    kernel = "efficient" if card == "t4" else "flash"  # flash begins with Ampere
    passes = (f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward")
    assert found["attention"] == dict.fromkeys(passes, 12) and found["logged"] == kernel
    shapes = [(shape, dtype) for shape, dtype in found["buffers"]]
    assert not [shape for shape, _ in shapes if shape[-2:] == [1024, 1024]]  # a mask, or scores
    logits = [(shape, dtype) for shape, dtype in shapes if shape[-1:] == [50304]]
    assert logits and not [pair for pair in logits if torch.Size(pair[0]).numel() > 8192 * 50304]
    assert not [pair for pair in logits if pair[1] == "float32"]


def test_head_and_loss_at_64_x_1024_take_2_and_a_half_gib(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.side_by_side import recipe_of
from pretrain.model.build import build
from pretrain.model.loss import NextTokenLoss
step = NextTokenLoss(build(recipe_of(n_layer=0).model, eos_token_id=0).to("cuda").train())
run = torch.compile(step)
ids = torch.zeros(64, 1024, dtype=torch.int64, device="cuda")
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = run(ids, ids.clone())
    loss.backward()
    step.zero_grad()
print((torch.cuda.max_memory_allocated() - held) / 2**30)
"""
    done = python("h200", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 2.5
