"""Presets of accelerate_configs for several GPUs, large recipes, and the pages that name them."""

import re

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import ROOT

from ursa_minor.preflight import estimate
from ursa_minor.recipe import command_line, keys, loading

GPT2_XL = estimate.Shape(48, 1600, 50304, 1024)
PRESETS = ROOT / "accelerate_configs"


def parse_launch(preset: str):
    """Return the arguments of accelerate launch with a preset, and the environment that it sets."""
    config = str(PRESETS / f"{preset}.yaml")
    words = ["--config_file", config, "--main_process_port", "0", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args, prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    ("preset", "reshard"), [("zero2_x8", "false"), ("zero3_x8", "true"), ("fsdp2_x8", "true")]
)
def test_sharded_preset_wraps_blocks_with_fsdp2(preset, reshard):
    args, environment = parse_launch(preset)

    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    assert expected.items() <= environment.items()
    assert args.num_processes == 8
    assert args.nproc_per_node == "8"
    assert not args.multi_gpu


def test_zero1_preset_is_ddp_with_sharded_optimizer():
    args, environment = parse_launch("zero1_x8")

    assert args.multi_gpu
    assert args.num_processes == 8
    assert "ACCELERATE_USE_FSDP" not in environment
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    first_line = (PRESETS / "zero1_x8.yaml").read_text().splitlines()[0]
    assert "zero1_x8.yaml" in first_line
    assert "--shard_optimizer true" in first_line


def estimate_gpt2_xl_gib(checkpointing: str, *, is_compiled: bool, shards: dict) -> str:
    """Return the estimated memory of GPT-2 XL per GPU in GiB, with one decimal."""
    memory = estimate.memory(
        GPT2_XL,
        checkpointing=checkpointing,
        micro_batch=1,
        half=True,
        compiled=is_compiled,
        shards=shards,
    )
    return f"{sum(memory.values()) / 2**30:.1f}"


# The buckets of DDP contain a second copy of the gradients.
ZERO1_SHARDS = {"moments": 8} | estimate.IN_BUCKETS
ZERO2_SHARDS = {"weights": 8, "gradients": 8, "moments": 8}
ZERO3_SHARDS = ZERO2_SHARDS | {"half copies": 8}


@pytest.mark.parametrize(
    ("preset", "shards", "is_compiled"),
    [
        ("zero1_x8", ZERO1_SHARDS, True),
        ("zero2_x8", ZERO2_SHARDS, False),
        ("zero3_x8", ZERO3_SHARDS, False),
    ],
)
def test_documented_memory_equals_estimate(preset, shards, is_compiled):
    gib = estimate_gpt2_xl_gib("none", is_compiled=is_compiled, shards=shards)
    checkpointed_gib = estimate_gpt2_xl_gib("full", is_compiled=is_compiled, shards=shards)

    text = (PRESETS / f"{preset}.yaml").read_text()
    assert f"{gib} GiB per GPU, {checkpointed_gib} with gradient checkpointing" in text
    assert f"| {gib} GiB | {checkpointed_gib} GiB |" in (PRESETS / "README.md").read_text()


PAGES = ["README.md", "accelerate_configs/README.md", "recipes/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("accelerate_configs", "recipes", "docs", "scripts", "benchmarks", "tests", "ursa_minor")
# Placeholders, files of a run or that the reader writes, and files of other projects.
OTHER_FILES = {
    "accelerate_configs/MACHINE.yaml",
    "accelerate_configs/CARD.yaml",
    "scripts/run_gpt2_124M.sh",
    "recipe.yaml",
    "X.yaml",
    "h100_fp8.yaml",
    "dvc.yaml",
}


def file_exists(name: str) -> bool:
    """Return whether a file exists. A YAML file without a folder is a preset or a recipe."""
    if "/" in name:
        return (ROOT / name).is_file()
    folders = ("accelerate_configs", "recipes", "recipes/post")
    return any((ROOT / folder / name).is_file() for folder in folders)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    pattern = r"(?<![\w/.:-])((?:[\w-]+/)*[\w-]+\.(?:py|yaml|sh|md|ipynb))\b"

    names = set(re.findall(pattern, text))

    assert names
    yaml_names = {name for name in names if name.endswith(".yaml") and "/" not in name}
    names_in_folders = {name for name in names if name.partition("/")[0] in FOLDERS}
    missing = {name for name in yaml_names | names_in_folders if not file_exists(name)}
    assert missing <= OTHER_FILES


def test_tuning_page_names_only_existing_recipe_keys():
    text = (ROOT / "docs/gpu_tuning.md").read_text()
    flags_of_other_programs = {
        "all_cards",
        "config_file",
        "dynamo_backend",
        "main_process_port",
        "mixed_precision",
    }

    names = set(re.findall(r"--([a-z]+_[a-z_]+)", text))

    assert names - flags_of_other_programs <= set(keys.FIELDS)


def test_short_run_of_tuning_page_is_valid():
    text = (ROOT / "docs/gpu_tuning.md").read_text()
    words = re.search(r"^ +(--max_steps 70 .+)$", text, re.MULTILINE).group(1).split()
    recipe_flags = ["--recipe", str(ROOT / "recipes/gpt2_124m.yaml")]

    recipe, _, _ = command_line.parse_training([*recipe_flags, *words])

    assert recipe.schedule.max_steps == 70
    assert recipe.saving.output_dir == "runs/try1"


@pytest.mark.parametrize("name", ["gpt2_small", "gpt2_350m", "gpt2_774m", "gpt2_1558m"])
def test_documented_flops_of_recipe_equal_formula(name):
    path = ROOT / "recipes" / f"{name}.yaml"

    recipe = loading.load_recipe(path)

    text = path.read_text()
    shape = estimate.shape_of(recipe.model)
    tokens = recipe.schedule.max_steps * recipe.batch.tokens_per_step
    flops = f"{shape.flops_per_token * tokens:.2e}".replace("e+", "e")
    assert f"= {flops} FLOP (estimated" in text
    assert f"{tokens / shape.parameters:.0f} tokens per parameter" in text
    assert tokens / shape.parameters >= 20
    assert tokens <= recipe.data.limit_tokens
    sequences_per_step = recipe.batch.tokens_per_step // recipe.model.sequence_length
    assert sequences_per_step % 16 == 0
