"""Beyond the base run, end to end: other models and beginnings, and each knob has its effect or is refused."""

from pathlib import Path

import pytest
import yaml
from conftest import RECORDED_TRAINING, ROOT, TEXT, run_script
from run_results import TINY_RECIPE, final_state, losses_by_step
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

MACHINE = str(ROOT / "tests" / "failing_training.py")
QUIET = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "4")
STILL = ("--resid_pdrop", "0", "--embd_pdrop", "0", "--attn_pdrop", "0")
SHORT = (*TINY_RECIPE, *STILL, *QUIET, "--max_steps", "4", "--warmup_steps", "1")
LLAMA = (
    "--architecture",
    "llama",
    "--num_key_value_heads",
    "1",
    "--intermediate_size",
    "48",
    "--rope_theta",
    "10000",
)
LLAMA += ("--tie_word_embeddings", "true", "--resid_pdrop", "0", "--embd_pdrop", "0")
SHAPE = ("n_layer", "n_head", "n_embd", "vocab_size", "tokenizer")


def shapeless(name: str, **changes) -> str:
    """A recipe that leaves to init_from what a model brings along."""
    recipe = yaml.safe_load(Path("tiny.yaml").read_text())
    kept = {key: value for key, value in recipe.items() if key not in SHAPE}
    Path(name).write_text(yaml.safe_dump(kept | changes))
    return name


@pytest.fixture
def learned(finished_run):
    """The last validation loss of runs/whole, a GPT-2 of 12 updates in a folder of one's own."""
    return losses_by_step("whole", "eval/loss")[12]


# Another beginning.


def test_a_run_that_begins_from_a_model_begins_at_its_loss_learns_on_and_resumes_to_the_bit(
    learned,
):
    recipe = shapeless("more.yaml", init_from="runs/whole")
    done = run_script("train.py", "--recipe", recipe, "--run_name", "more")
    found = losses_by_step("more", "eval/loss")
    assert found[0] == pytest.approx(learned, abs=1e-5) and found[12] < learned - 0.05
    assert "from runs/whole/model" in done.stderr
    written = yaml.safe_load(Path("runs/more/recipe.yaml").read_text())
    assert (written["n_layer"], written["n_embd"], written["vocab_size"]) == (
        2,
        32,
        64,
    )  # filled in
    run_script(
        RECORDED_TRAINING,
        "--recipe",
        recipe,
        "--run_name",
        "k",
        expect=-9,
        LEDGER="l",
        KILL_AT="step:6",
    )
    done = run_script("train.py", "--recipe", recipe, "--run_name", "k")
    assert "resumed from runs/k/checkpoints/step-00000003" in done.stderr and final_state(
        "k"
    ) == final_state("more")


def test_another_tokenizer_than_the_models_is_refused_before_anything_is_written(learned):
    Path("other.txt").write_text("Ωmega " * 2000)
    flags = ("--recipe", shapeless("more.yaml"), "--init_from", "runs/whole")
    done = run_script(
        "train.py", *flags, "--data_files", "other.txt", "--tokenizer", "characters", expect=2
    )
    assert "not the tokenizer of init_from = runs/whole/model" in done.stderr
    assert "Use --tokenizer runs/whole/model" in done.stderr and not Path("runs/more").exists()


def test_a_llama_with_a_sentencepiece_tokenizer_is_trained_on_and_one_without_asks_for_it(
    workspace,
):
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "vocab_size": 75,
        "max_position_embeddings": 16,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained("bare")
    recipe = shapeless("more.yaml", init_from="bare", resid_pdrop=0.0, embd_pdrop=0.0)
    done = run_script("train.py", "--recipe", recipe, *QUIET, "--run_name", "r", expect=None)
    assert "tokenizer = bare: " in done.stderr and not Path("runs/r").exists()
    words = ["</s>", "<unk>", "\u2581", *sorted(set(TEXT) - {" "}), "\u2581a", "th"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [("\u2581", "a"), ("t", "h")], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained("words")
    run_script(
        "train.py",
        "--recipe",
        recipe,
        *QUIET,
        "--tokenizer",
        "words",
        "--run_name",
        "r",
        "--max_steps",
        "4",
    )
    assert yaml.safe_load(Path("runs/r/recipe.yaml").read_text())["vocab_size"] == 128
    assert (
        "lm_head.weight" in load_file("runs/r/model/model.safetensors")
        and losses_by_step("r")[4] < losses_by_step("r")[1]
    )


# Llama.


def test_a_llama_type_run_learns_resumes_to_the_bit_and_exports_what_transformers_loads(workspace):
    run_script("train.py", *TINY_RECIPE, *LLAMA, "--run_name", "llama")
    found = losses_by_step("llama", "eval/loss")
    assert found[12] < found[0] - 0.3
    run_script(
        RECORDED_TRAINING,
        *TINY_RECIPE,
        *LLAMA,
        "--run_name",
        "k",
        expect=-9,
        LEDGER="l",
        KILL_AT="step:5",
    )
    run_script("train.py", *TINY_RECIPE, *LLAMA, "--run_name", "k")
    assert final_state("k") == final_state("llama")
    model, info = AutoModelForCausalLM.from_pretrained("runs/llama/model", output_loading_info=True)
    assert (
        type(model) is LlamaForCausalLM and not info["missing_keys"] and not info["unexpected_keys"]
    )
    assert (
        model.config.num_key_value_heads == 1
        and model.lm_head.weight is model.model.embed_tokens.weight
    )


@pytest.mark.slow
def test_a_llama_type_model_under_fsdp2_learns_what_one_process_learns(workspace):
    run_script("train.py", *SHORT, *LLAMA, "--run_name", "one")
    run_script(MACHINE, *SHORT, *LLAMA, "--run_name", "sharded", processes=2, FSDP="true")
    assert losses_by_step("sharded") == pytest.approx(losses_by_step("one"), abs=1e-5)


# Knobs of the loss.


def test_what_is_added_to_the_loss_is_learned_from_and_not_reported_as_validation(workspace):
    Path("docs").mkdir()
    for number in range(200):
        Path(f"docs/{number:03}.txt").write_text(TEXT[40 * number : 40 * number + 40])
    knobs = {"plain": (), "smoothing": ("--label_smoothing", "0.1"), "z_loss": ("--z_loss", "0.01")}
    knobs |= {"deterministic": ("--deterministic", "true"), "masked": ("--document_mask", "true")}
    for name, flags in knobs.items():
        flags = (*SHORT, "--data_files", "docs/*.txt", "--eval_steps", "4", *flags)
        said = run_script("train.py", *flags, "--run_name", name).stderr
        assert (", deterministic" in said) == (name == "deterministic")
        plain, more = losses_by_step("plain", "eval/loss"), losses_by_step(name, "eval/loss")
        # The same weights: the reported losses are the plain ones; under a mask validation reads as training does.
        assert (
            (plain[0] == more[0])
            == (losses_by_step(name)[1] == losses_by_step("plain")[1])
            == (name != "masked")
        )
        assert (plain[4] == more[4]) == (name in ("plain", "deterministic"))
        objectives = losses_by_step(name, "train/objective")
        assert bool(objectives) == (name in ("smoothing", "z_loss"))
        assert not objectives or objectives[1] != losses_by_step(name)[1]


# Knobs of memory and speed.


def test_eight_bit_moments_learn_nearly_the_same_and_take_less(workspace):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    wide = (*SHORT, "--n_embd", "128")  # tensors of less than 4,096 elements stay as they are
    run_script("train.py", *wide, "--run_name", "plain")
    run_script("train.py", *wide, "--optimizer", "adamw_8bit", "--run_name", "eight")
    assert losses_by_step("eight") != losses_by_step("plain") and losses_by_step(
        "eight"
    ) == pytest.approx(losses_by_step("plain"), abs=0.05)
    moments = (
        Path(f"runs/{name}/checkpoints/step-00000004/optimizer.safetensors")
        for name in ("plain", "eight")
    )
    plain, eight = (path.stat().st_size for path in moments)
    assert eight < 0.4 * plain
