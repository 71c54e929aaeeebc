"""The presets that are for no single card, as `accelerate launch` reads them; the large recipes; pages that name both."""

import re

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import ROOT

from ursa_minor.preflight import estimate
from ursa_minor.recipe import command_line, keys, loading

GPT2_XL = estimate.Shape(48, 1600, 50304, 1024)
MOMENTS, SHARED = {"moments"}, {"weights", "gradients", "moments"}


def launched(name, *flags):
    """The flags of ``accelerate launch`` with this preset, and the environment that its processes get."""
    words = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), *flags, "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args, prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    "name, reshard", [("zero2_x8", "false"), ("zero3_x8", "true"), ("fsdp2_x8", "true")]
)
def test_a_sharded_preset_is_fsdp2_over_gpt2_blocks(name, reshard):
    args, environment = launched(name, "--main_process_port", "0")
    wanted = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
    }
    wanted |= {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    wanted |= {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    assert wanted.items() <= environment.items()
    assert args.num_processes == 8 and args.nproc_per_node == "8" and not args.multi_gpu


def test_zero1_is_ddp_and_its_head_gives_the_flag_that_shards():
    args, environment = launched("zero1_x8", "--main_process_port", "0")
    assert args.multi_gpu and args.num_processes == 8 and "ACCELERATE_USE_FSDP" not in environment
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    head = (ROOT / "accelerate_configs/zero1_x8.yaml").read_text().splitlines()[0]
    assert "zero1_x8.yaml" in head and "--shard_optimizer true" in head


@pytest.mark.parametrize(
    "name, sharded, compiled",
    [
        ("zero1_x8", MOMENTS, True),
        ("zero2_x8", SHARED, False),
        ("zero3_x8", SHARED | {"half copies"}, False),
    ],
)
def test_the_memory_in_a_head_is_the_formulas(name, sharded, compiled):
    shards = dict.fromkeys(sharded, 8)
    if name == "zero1_x8":  # the buckets of DDP contain a second copy of the gradients
        shards |= estimate.IN_BUCKETS
    how = {"micro_batch": 1, "half": True, "compiled": compiled, "shards": shards}
    without, with_it = (
        f"{sum(estimate.memory(GPT2_XL, checkpointing=on, **how).values()) / 2**30:.1f}"
        for on in ("none", "full")
    )
    text = (ROOT / "accelerate_configs" / f"{name}.yaml").read_text()
    assert f"{without} GiB per GPU, {with_it} with gradient checkpointing" in text
    assert (
        f"| {without} GiB | {with_it} GiB |" in (ROOT / "accelerate_configs/README.md").read_text()
    )


PAGES = ["README.md", "accelerate_configs/README.md", "recipes/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w/.:-])((?:[\w-]+/)*[\w-]+\.(?:py|yaml|sh|md|ipynb))\b", text))
    ours = {"accelerate_configs", "recipes", "docs", "scripts", "benchmarks", "tests", "ursa_minor"}
    missing = {
        name for name in named if name.partition("/")[0] in ours and not (ROOT / name).is_file()
    }
    folders = [ROOT / name for name in ("accelerate_configs", "recipes", "recipes/post")]
    yamls = {name for name in named if name.endswith(".yaml") and "/" not in name}
    missing |= {name for name in yamls if not any((folder / name).is_file() for folder in folders)}
    # Two stand for any, one is llm.c's; a run's, one to be written, one that was left out.
    known = {
        "accelerate_configs/MACHINE.yaml",
        "accelerate_configs/CARD.yaml",
        "scripts/run_gpt2_124M.sh",
    }
    assert named and missing <= known | {"recipe.yaml", "X.yaml", "h100_fp8.yaml", "dvc.yaml"}
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_tuning_page_names_only_recipe_keys_that_exist_and_its_short_run_is_a_valid_one():
    text = (ROOT / "docs/gpu_tuning.md").read_text()
    others = {"all_cards", "config_file", "dynamo_backend", "main_process_port", "mixed_precision"}
    assert set(re.findall(r"--([a-z]+_[a-z_]+)", text)) - others <= set(keys.FIELDS)
    words = re.search(r"^ +(--max_steps 70 .+)$", text, re.MULTILINE)[1].split()
    recipe, _, _ = command_line.parse_training(
        ["--recipe", str(ROOT / "recipes/gpt2_124m.yaml"), *words]
    )
    assert recipe.schedule.max_steps == 70 and recipe.saving.output_dir == "runs/try1"


@pytest.mark.parametrize("name", ["gpt2_small", "gpt2_350m", "gpt2_774m", "gpt2_1558m"])
def test_a_big_recipes_arithmetic_is_the_formulas(name):
    recipe = loading.load_recipe(ROOT / "recipes" / f"{name}.yaml")
    shape = estimate.shape_of(recipe.model)
    tokens = recipe.schedule.max_steps * recipe.batch.tokens_per_step
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert f"= {shape.flops_per_token * tokens:.2e} FLOP (estimated".replace("e+", "e") in text
    assert f"{tokens / shape.parameters:.0f} tokens per parameter" in text
    assert (
        tokens <= recipe.data.limit_tokens
        and recipe.batch.tokens_per_step // recipe.model.sequence_length % 16 == 0
    )
    assert tokens / shape.parameters >= 20
