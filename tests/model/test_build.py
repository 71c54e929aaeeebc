"""The model is stock GPT-2 or Llama with seeded weights, computes what Transformers does, and recomputes exactly."""

import pytest
import torch
from small_models import (
    KINDS,
    build_small_model,
    gradients_by_name,
    random_ids,
    randomize_weights,
    stock_copy,
)
from torch.testing import assert_close
from transformers import PreTrainedModel

from ursa_minor.model.loss import NextTokenLoss


@pytest.fixture(params=KINDS)
def kind(request) -> dict:
    return {"n_head": 4} | KINDS[request.param]


def test_logits_and_generated_text_equal_the_stock_models(kind):
    model = randomize_weights(build_small_model(**kind))
    stock = stock_copy(model)
    tokens = random_ids(2, 16)
    assert torch.allclose(model(tokens).logits, stock(tokens).logits, atol=1e-4)
    tokens, mask = random_ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0  # padding
    settings = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": True,
    }
    ours = model.generate(tokens, attention_mask=mask, **settings)
    assert torch.equal(ours, stock.generate(tokens, attention_mask=mask, **settings))


def test_the_first_weights_are_the_seeds_and_as_wide_as_initializer_range_says(kind):
    narrow, again, other, wide = (
        dict(build_small_model(**kind | change).requires_grad_(False).named_parameters())
        for change in ({}, {}, {"seed": 2}, {"initializer_range": 0.08})
    )
    for name, a in narrow.items():
        assert torch.equal(a, again[name]) and torch.equal(a, other[name]) == (a.dim() == 1), name
        if a.dim() == 2:  # projections back to the stream are scaled down from it, as GPT-2's are
            assert float(wide[name].std()) == pytest.approx(4 * float(a.std()), rel=1e-4), name
        else:
            assert torch.equal(a, wide[name]), name


# Recomputing in the backward pass.


@pytest.mark.parametrize("dtype, dropout", [(None, 0.3), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("gradient_checkpointing", ["mlp", "full"])
def test_recomputing_changes_no_gradient_and_no_name(kind, gradient_checkpointing, dtype, dropout):
    kind = kind | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    plain, other = (
        build_small_model(**kind),
        build_small_model(**kind, gradient_checkpointing=gradient_checkpointing),
    )
    assert list(plain.state_dict()) == list(other.state_dict())
    assert_close(gradients_by_name(other, dtype), gradients_by_name(plain, dtype), rtol=0, atol=0)


def saved_activation_bytes(model: PreTrainedModel) -> int:
    """Bytes of what the backward pass is handed, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = NextTokenLoss(model).train()(random_ids(2, 16), random_ids(2, 16))
    assert loss.requires_grad
    return sum(size for start, size in kept.items() if start not in weights)


def test_recomputing_an_mlp_keeps_its_products_results_only_and_recomputing_blocks_keeps_least(
    kind,
):
    none, mlp, full = (
        saved_activation_bytes(build_small_model(**kind, gradient_checkpointing=g))
        for g in ("none", "mlp", "full")
    )
    # The activation's result, or gate's activation and its product with the other; fp32 of 2 layers of 2 x 16 tokens.
    fewer = 2 * 48 if kind.get("architecture") == "llama" else 128
    assert none - mlp == 4 * 2 * 2 * 16 * fewer
    assert full < mlp / 2
