"""Left padding: a hooked GPT-2 reads a padded row as it reads the row alone, in TRL's trainer too."""

import pytest
import torch
from conftest import needs_trl, run_in_fork
from small_models import build_small_model, random_ids, randomize_weights, stock_copy

from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.post.positions import derive_positions

PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1], [1] * 8])


def model(**changes):
    return stock_copy(randomize_weights(build_small_model(**changes)))


def differences(one, rows, mask):
    """The largest difference of each row's logits at its own tokens, padded to alone."""
    padded = one(rows, attention_mask=mask).logits
    kept = [
        (padded[i], row, seen.bool()) for i, (row, seen) in enumerate(zip(rows, mask, strict=True))
    ]
    return [
        (logits[seen] - one(row[seen][None]).logits[0]).abs().max().item()
        for logits, row, seen in kept
    ]


@torch.no_grad()
def test_a_padded_row_is_read_as_alone_with_the_hook_and_as_another_without():
    one, rows = model(), random_ids(3, 8)
    assert max(differences(one, rows, PADDED)[:2]) > 0.1
    derive_positions(one)
    assert max(differences(one, rows, PADDED)) < 1e-4


@torch.no_grad()
def test_positions_that_are_given_and_a_cache_are_left_as_they_are():
    one, rows = model(), random_ids(3, 8)
    wanted = one(rows, attention_mask=PADDED, position_ids=torch.arange(8)[None]).logits
    plain = one(rows).logits
    derive_positions(one)
    assert torch.equal(
        one(rows, attention_mask=PADDED, position_ids=torch.arange(8)[None]).logits, wanted
    )
    assert torch.equal(one(rows).logits, plain)
    begun = one(rows[:, :6], attention_mask=PADDED[:, :6], use_cache=True)
    ended = one(rows[:, 6:], attention_mask=PADDED, past_key_values=begun.past_key_values).logits
    whole = one(rows, attention_mask=PADDED).logits[:, 6:]
    assert (ended - whole).abs().max() < 1e-4


def test_a_rotary_model_gets_no_hook():
    one = build_small_model(architecture="llama", num_key_value_heads=1, intermediate_size=48)
    derive_positions(one)
    assert not one.base_model._forward_pre_hooks


def gaps_in_trl(hooked, folder):
    """Write each row's largest difference of log-probabilities, GRPOTrainer's to generate's, for three prompts."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = tokenization.make_characters(["".join(map(chr, range(64, 127)))])
    one = model(sequence_length=32)
    if hooked:
        derive_positions(one)
    about = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
    }
    trainer = GRPOTrainer(
        one,
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(str(folder), **about),
        Dataset.from_list([{"prompt": "abcdefgh"}, {"prompt": "xy"}]),
        processing_class=tokenizer,
    )
    eos = tokenizer.eos_token_id
    rows = [tokenizer(text)["input_ids"] for text in ("abcdefgh", "xy", "hello")]
    prompts = torch.tensor([[eos] * (8 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (8 - len(row)) + [1] * len(row) for row in rows])
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": True, "pad_token_id": eos}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    made = one.eval().generate(prompts, attention_mask=mask, **how)
    new = made.sequences[:, 8:]
    wanted = torch.stack(made.logits, 1).log_softmax(-1).gather(2, new[..., None])[..., 0]
    whole = torch.cat([mask, torch.ones_like(new)], 1)
    with torch.no_grad():
        found, _, _ = trainer._get_per_token_logps_and_entropies(
            one, made.sequences, whole, logits_to_keep=6
        )
    torch.save((found - wanted).abs().amax(1), folder / "gaps.pt")


@pytest.mark.post
@needs_trl
def test_trls_training_forward_gives_the_log_probabilities_of_generate(tmp_path):
    """To 1e-4, for prompts of several lengths; without the hook, of the longest one only."""
    run_in_fork(gaps_in_trl, True, tmp_path)
    assert torch.load(tmp_path / "gaps.pt").max() < 1e-4
    run_in_fork(gaps_in_trl, False, tmp_path)
    longest, *padded = torch.load(tmp_path / "gaps.pt").tolist()
    assert longest < 1e-4 and min(padded) > 1e-2
