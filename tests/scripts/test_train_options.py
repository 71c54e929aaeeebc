"""Run train.py with other models and options, and check the effect of each option."""

import shutil
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

FAILING_TRAINING = str(ROOT / "tests" / "failing_training.py")
FEW_OUTPUTS = ("--eval_steps", "0", "--sample_steps", "0", "--save_steps", "4")
NO_DROPOUT = ("--resid_pdrop", "0", "--embd_pdrop", "0", "--attn_pdrop", "0")
SHORT = (*TINY_RECIPE, *NO_DROPOUT, *FEW_OUTPUTS, "--max_steps", "4", "--warmup_steps", "1")
LLAMA_SHAPE = ("--num_key_value_heads", "1", "--intermediate_size", "48", "--rope_theta", "10000")
LLAMA_DROPOUT = ("--resid_pdrop", "0", "--embd_pdrop", "0")
LLAMA = ("--architecture", "llama", "--tie_word_embeddings", "true", *LLAMA_SHAPE, *LLAMA_DROPOUT)
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "vocab_size", "tokenizer")


def write_recipe_without_model(**changes) -> str:
    """Write more.yaml: tiny.yaml without the keys that init_from determines, with changes."""
    recipe = yaml.safe_load(Path("tiny.yaml").read_text())
    for key in MODEL_KEYS:
        del recipe[key]
    Path("more.yaml").write_text(yaml.safe_dump(recipe | changes))
    return "more.yaml"


def read_recipe(run_name: str) -> dict:
    """Return the recipe that a run has written."""
    return yaml.safe_load(Path(f"runs/{run_name}/recipe.yaml").read_text())


# Initialization from a model.


def test_initialized_run_starts_at_the_models_loss(finished_run):
    final_loss = losses_by_step("whole", "eval/loss")[12]
    recipe = write_recipe_without_model(init_from="runs/whole")

    result = run_script("train.py", "--recipe", recipe, "--run_name", "more")

    losses = losses_by_step("more", "eval/loss")
    assert losses[0] == pytest.approx(final_loss, abs=1e-5)
    assert losses[12] < final_loss - 0.05
    assert "from runs/whole" in result.stderr
    written = read_recipe("more")
    assert written["n_layer"] == 2
    assert written["n_embd"] == 32
    assert written["vocab_size"] == 64

    # A killed run resumes exactly.
    killed = ("--recipe", recipe, "--run_name", "k")
    run_script(RECORDED_TRAINING, *killed, expect=-9, LEDGER="l", KILL_AT="step:6")
    result = run_script("train.py", *killed)
    assert "resumed from runs/k/checkpoints/step-00000003" in result.stderr
    assert final_state("k") == final_state("more")


def test_run_starts_from_unfinished_run(finished_run):
    final_loss = losses_by_step("whole", "eval/loss")[12]
    shutil.rmtree("runs/whole/model")
    recipe = write_recipe_without_model(init_from="runs/whole")
    flags = ("--recipe", recipe, "--run_name", "more", "--max_steps", "1")

    result = run_script("train.py", *flags)

    assert result.stderr.count("runs/whole has no model/ yet") == 1
    losses = losses_by_step("more", "eval/loss")
    assert losses[0] == pytest.approx(final_loss, abs=1e-5)
    written = read_recipe("more")
    assert written["init_from"].endswith("runs/whole")
    assert written["tokenizer"].endswith("runs/whole")


def test_other_tokenizer_than_the_models_is_rejected(finished_run):
    Path("other.txt").write_text("Ωmega " * 2000)
    model = ("--recipe", write_recipe_without_model(), "--init_from", "runs/whole")
    data = ("--data_files", "other.txt", "--tokenizer", "characters")

    result = run_script("train.py", *model, *data, expect=2)

    assert "init_from = runs/whole" in result.stderr
    assert "Use --tokenizer runs/whole" in result.stderr
    assert not Path("runs/more").exists()


def save_llama(folder: str) -> None:
    """Save a small Llama model of 75 tokens without a tokenizer."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=75,
        max_position_embeddings=16,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_sentencepiece_tokenizer(folder: str) -> None:
    """Save a tokenizer that marks the start of a word as SentencePiece does."""
    characters = sorted(set(TEXT) - {" "})
    tokens = ["</s>", "<unk>", "\u2581", *characters, "\u2581a", "th"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("t", "h")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)


@pytest.fixture
def llama_recipe(workspace) -> str:
    """A recipe that continues from a Llama model without a tokenizer."""
    save_llama("bare")
    return write_recipe_without_model(init_from="bare", resid_pdrop=0.0, embd_pdrop=0.0)


def test_model_without_tokenizer_needs_one(llama_recipe):
    flags = ("--recipe", llama_recipe, *FEW_OUTPUTS, "--run_name", "r")

    result = run_script("train.py", *flags, expect=None)

    assert result.returncode != 0
    assert "tokenizer = bare: " in result.stderr
    assert not Path("runs/r").exists()


def test_llama_with_sentencepiece_tokenizer_learns(llama_recipe):
    save_sentencepiece_tokenizer("words")
    flags = ("--recipe", llama_recipe, *FEW_OUTPUTS, "--max_steps", "4", "--run_name", "r")

    run_script("train.py", *flags, "--tokenizer", "words")

    assert read_recipe("r")["vocab_size"] == 128
    assert "lm_head.weight" in load_file("runs/r/model/model.safetensors")
    losses = losses_by_step("r")
    assert losses[4] < losses[1]


# The Llama architecture.


def test_llama_run_exports_standard_model(workspace):
    run_script("train.py", *TINY_RECIPE, *LLAMA, "--run_name", "llama")

    losses = losses_by_step("llama", "eval/loss")
    assert losses[12] < losses[0] - 0.3
    model, info = AutoModelForCausalLM.from_pretrained("runs/llama/model", output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.num_key_value_heads == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight

    # A killed run resumes exactly.
    killed = (*TINY_RECIPE, *LLAMA, "--run_name", "k")
    run_script(RECORDED_TRAINING, *killed, expect=-9, LEDGER="l", KILL_AT="step:5")
    run_script("train.py", *killed)
    assert final_state("k") == final_state("llama")


@pytest.mark.slow
def test_llama_with_fsdp2_learns_like_one_process(workspace):
    run_script("train.py", *SHORT, *LLAMA, "--run_name", "one")

    run_script(FAILING_TRAINING, *SHORT, *LLAMA, "--run_name", "sharded", processes=2, FSDP="true")

    assert losses_by_step("sharded") == pytest.approx(losses_by_step("one"), abs=1e-5)


# Options of the loss.


@pytest.fixture
def document_run(workspace):
    """Return a function that runs train.py on 200 short documents and returns its stderr.

    The run `plain` has no further options.
    """
    Path("docs").mkdir()
    for number in range(200):
        Path(f"docs/{number:03}.txt").write_text(TEXT[40 * number : 40 * number + 40])

    def train(run_name: str, *flags: str) -> str:
        data = ("--data_files", "docs/*.txt", "--eval_steps", "4")
        return run_script("train.py", *SHORT, *data, *flags, "--run_name", run_name).stderr

    return train


def test_loss_options_change_only_their_losses(document_run):
    """The losses at step 0 and 1 are those of the same weights: reported losses are plain ones."""
    outputs = document_run("plain")
    outputs += document_run("smoothing", "--label_smoothing", "0.1")
    outputs += document_run("z_loss", "--z_loss", "0.01")
    outputs += document_run("masked", "--document_mask", "true")
    deterministic_output = document_run("deterministic", "--deterministic", "true")

    plain = losses_by_step("plain")
    plain_evals = losses_by_step("plain", "eval/loss")
    for name in ("smoothing", "z_loss"):
        losses = losses_by_step(name)
        evals = losses_by_step(name, "eval/loss")
        objectives = losses_by_step(name, "train/objective")
        assert losses[1] == plain[1]
        assert evals[0] == plain_evals[0]
        assert evals[4] != plain_evals[4]
        assert objectives[1] != losses[1]

    assert ", deterministic" in deterministic_output
    assert ", deterministic" not in outputs
    assert losses_by_step("deterministic") == plain
    assert losses_by_step("deterministic", "eval/loss") == plain_evals

    # A document mask applies to training and validation.
    masked_evals = losses_by_step("masked", "eval/loss")
    assert losses_by_step("masked")[1] != plain[1]
    assert masked_evals[0] != plain_evals[0]
    assert masked_evals[4] != plain_evals[4]
    for name in ("plain", "deterministic", "masked"):
        assert not losses_by_step(name, "train/objective")


# Options of memory and speed.


def test_8bit_moments_need_less_memory(workspace):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    # Tensors of less than 4,096 elements stay in 32 bits.
    wide = (*SHORT, "--n_embd", "128")

    run_script("train.py", *wide, "--run_name", "plain")
    run_script("train.py", *wide, "--optimizer", "adamw_8bit", "--run_name", "eight")

    assert losses_by_step("eight") != losses_by_step("plain")
    assert losses_by_step("eight") == pytest.approx(losses_by_step("plain"), abs=0.05)
    moments = "checkpoints/step-00000004/training/optimizer.safetensors"
    plain_size = Path("runs/plain", moments).stat().st_size
    assert Path("runs/eight", moments).stat().st_size < 0.4 * plain_size
