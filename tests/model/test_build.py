"""A built model has seeded weights, equals Transformers' model, and recomputes exactly."""

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
def shape(request) -> dict:
    """The changes of the small model's shape for each kind, with 4 heads."""
    return {"n_head": 4} | KINDS[request.param]


def test_logits_equal_stock_model(shape):
    model = randomize_weights(build_small_model(**shape))
    stock = stock_copy(model)
    ids = random_ids(2, 16)

    assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-4)


def test_generated_text_equals_stock_model(shape):
    model = randomize_weights(build_small_model(**shape))
    stock = stock_copy(model)
    ids = random_ids(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0  # padding
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": True,
    }

    generated = model.generate(ids, **settings)

    assert torch.equal(generated, stock.generate(ids, **settings))


# Initial weights


def initial_weights(**changes) -> dict[str, torch.Tensor]:
    """Return the weights of a new small model by name."""
    model = build_small_model(**changes).requires_grad_(False)
    return dict(model.named_parameters())


def test_seed_determines_initial_matrices(shape):
    weights = initial_weights(**shape)
    same_seed = initial_weights(**shape)
    other_seed = initial_weights(**shape | {"seed": 2})

    for name, weight in weights.items():
        is_vector = weight.dim() == 1
        assert torch.equal(weight, same_seed[name]), name
        assert torch.equal(weight, other_seed[name]) == is_vector, name


def test_initializer_range_scales_matrices(shape):
    """Projections back to the residual stream are scaled down from it, as in GPT-2."""
    weights = initial_weights(**shape)
    wide_weights = initial_weights(**shape | {"initializer_range": 0.08})

    for name, weight in weights.items():
        wide = wide_weights[name]
        if weight.dim() == 2:
            assert float(wide.std()) == pytest.approx(4 * float(weight.std()), rel=1e-4), name
        else:
            assert torch.equal(weight, wide), name


# Recomputation in the backward pass


@pytest.mark.parametrize(("dtype", "dropout"), [(None, 0.3), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("gradient_checkpointing", ["mlp", "full"])
def test_recomputation_does_not_change_gradients(shape, gradient_checkpointing, dtype, dropout):
    shape = shape | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    plain = build_small_model(**shape)
    recomputing = build_small_model(**shape, gradient_checkpointing=gradient_checkpointing)
    expected = gradients_by_name(plain, dtype)

    gradients = gradients_by_name(recomputing, dtype)

    assert list(recomputing.state_dict()) == list(plain.state_dict())
    assert_close(gradients, expected, rtol=0, atol=0)


def saved_activation_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that are saved for the backward pass, except the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = random_ids(2, 16)
    module = NextTokenLoss(model).train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(ids, ids)
    assert loss.requires_grad
    return sum(size for address, size in sizes.items() if address not in weights)


def test_recomputation_saves_activation_memory(shape):
    plain = saved_activation_bytes(build_small_model(**shape))
    mlp = saved_activation_bytes(build_small_model(**shape, gradient_checkpointing="mlp"))
    full = saved_activation_bytes(build_small_model(**shape, gradient_checkpointing="full"))

    # GPT-2 does not save the result of its activation. Llama does not save the result of the
    # gate's activation and its product with the other projection.
    is_llama = shape.get("architecture") == "llama"
    values_per_token = 2 * 48 if is_llama else 128
    num_layers = 2
    num_tokens = 2 * 16
    assert plain - mlp == 4 * num_layers * num_tokens * values_per_token
    assert full < mlp / 2
