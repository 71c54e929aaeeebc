"""Left padding: with the hook, a padded row has the same logits as the row alone, also in TRL."""

import pytest
import torch
from conftest import needs_trl, run_in_fork
from small_models import build_small_model, random_ids, randomize_weights, stock_copy

from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post.positions import derive_positions

MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1], [1] * 8])
PROMPTS = ("abcdefgh", "xy", "hello")
PROMPT_LENGTH = 8  # of the longest prompt
NUM_NEW = 6


def make_model(**changes):
    """Return a small GPT-2 with random weights."""
    return stock_copy(randomize_weights(build_small_model(**changes)))


@torch.no_grad()
def differences_of_padding(model, rows, mask) -> list[float]:
    """Return the largest difference between the logits with and without padding for each row."""
    padded_logits = model(rows, attention_mask=mask).logits
    differences = []
    for row, row_mask, logits in zip(rows, mask.bool(), padded_logits, strict=True):
        expected = model(row[row_mask][None]).logits[0]
        differences.append((logits[row_mask] - expected).abs().max().item())
    return differences


def test_hook_makes_padding_irrelevant():
    model = make_model()
    rows = random_ids(3, 8)

    without_hook = differences_of_padding(model, rows, MASK)
    derive_positions(model)
    with_hook = differences_of_padding(model, rows, MASK)

    assert max(without_hook[:2]) > 0.1
    assert max(with_hook) < 1e-4


@torch.no_grad()
def test_given_positions_are_unchanged():
    model = make_model()
    rows = random_ids(3, 8)
    inputs = {"attention_mask": MASK, "position_ids": torch.arange(8)[None]}
    expected = model(rows, **inputs).logits
    expected_without_mask = model(rows).logits

    derive_positions(model)

    assert torch.equal(model(rows, **inputs).logits, expected)
    assert torch.equal(model(rows).logits, expected_without_mask)


@torch.no_grad()
def test_cached_tokens_are_not_counted_twice():
    model = make_model()
    rows = random_ids(3, 8)
    derive_positions(model)
    expected = model(rows, attention_mask=MASK).logits[:, 6:]

    first = model(rows[:, :6], attention_mask=MASK[:, :6], use_cache=True)
    last = model(rows[:, 6:], attention_mask=MASK, past_key_values=first.past_key_values)

    assert (last.logits - expected).abs().max() < 1e-4


def test_rotary_model_gets_no_hook():
    model = build_small_model(architecture="llama", num_key_value_heads=1, intermediate_size=48)

    derive_positions(model)

    assert not model.base_model._forward_pre_hooks


def make_trainer(model, tokenizer, folder):
    """Return a GRPOTrainer for two prompts of different lengths."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    dataset = Dataset.from_list([{"prompt": "abcdefgh"}, {"prompt": "xy"}])

    def no_reward(completions, **_):
        return [0.0] * len(completions)

    return GRPOTrainer(model, no_reward, config, dataset, processing_class=tokenizer)


def pad_prompts(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and the mask of PROMPTS with left padding, (3, PROMPT_LENGTH) each."""
    padded_rows = []
    masks = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        num_padding = PROMPT_LENGTH - len(ids)
        padded_rows.append([tokenizer.eos_token_id] * num_padding + ids)
        masks.append([0] * num_padding + [1] * len(ids))
    return torch.tensor(padded_rows), torch.tensor(masks)


def save_differences_in_trl(has_hook: bool, folder) -> None:
    """Compare the log-probabilities of GRPOTrainer with those of ``generate``.

    The largest difference of each prompt is saved to differences.pt.
    """
    tokenizer = tokenization.make_characters(["".join(map(chr, range(64, 127)))])
    model = make_model(sequence_length=32)
    if has_hook:
        derive_positions(model)
    trainer = make_trainer(model, tokenizer, folder)
    prompt_ids, prompt_mask = pad_prompts(tokenizer)

    generated = model.eval().generate(
        prompt_ids,
        attention_mask=prompt_mask,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=True,
        pad_token_id=tokenizer.eos_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new_ids = generated.sequences[:, PROMPT_LENGTH:]
    log_probabilities = torch.stack(generated.logits, 1).log_softmax(-1)
    expected = log_probabilities.gather(2, new_ids[..., None])[..., 0]
    mask = torch.cat([prompt_mask, torch.ones_like(new_ids)], 1)
    with torch.no_grad():
        values, _, _ = trainer._get_per_token_logps_and_entropies(
            model, generated.sequences, mask, logits_to_keep=NUM_NEW
        )

    torch.save((values - expected).abs().amax(1), folder / "differences.pt")


@pytest.mark.post
@needs_trl
def test_trl_computes_log_probabilities_of_generate(tmp_path):
    """Without the hook, only those of the longest prompt are right."""
    run_in_fork(save_differences_in_trl, True, tmp_path)
    with_hook = torch.load(tmp_path / "differences.pt").tolist()
    run_in_fork(save_differences_in_trl, False, tmp_path)
    without_hook = torch.load(tmp_path / "differences.pt").tolist()

    assert max(with_hook) < 1e-4
    assert without_hook[0] < 1e-4
    assert min(without_hook[1:]) > 1e-2
