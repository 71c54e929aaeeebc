"""An architecture's record describes the model that is built: its config, its names, its sizes."""

import dataclasses

import pytest
from small_models import KINDS, SHAPE
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from ursa_minor.model import build
from ursa_minor.model.architectures import ARCHITECTURES
from ursa_minor.preflight import estimate
from ursa_minor.recipe import keys

OTHERS = {
    "n_layer": 3,
    "n_head": 8,
    "n_embd": 64,
    "vocab_size": 128,
    "sequence_length": 8,
    "num_key_value_heads": 4,
}
OTHERS |= {"intermediate_size": 80, "tie_word_embeddings": True, "rope_theta": 1e6}
OTHERS |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.25)


@pytest.fixture(params=ARCHITECTURES)
def model(request) -> keys.Model:
    """A recipe's model that states what its architecture needs."""
    stated = {key: KINDS["untied"][key] for key in keys.ARCHITECTURE_KEYS[request.param]}
    return keys.Model(**SHAPE | {"n_head": 4}, architecture=request.param, **stated)


def test_the_recipes_names_are_the_records_and_transformers():
    assert set(keys.ARCHITECTURE_KEYS) == set(ARCHITECTURES)
    assert all(
        AutoConfig.for_model(name).model_type == record.name == name
        for name, record in ARCHITECTURES.items()
    )


@pytest.mark.parametrize("key", OTHERS)
def test_a_key_changes_the_config_unless_the_recipe_refuses_it(model, key):
    """The conditions of a key name the architectures that have it."""

    def config(asked: keys.Model) -> dict:
        record = ARCHITECTURES[asked.architecture]
        return record.config(asked) | record.training_config(asked)

    changes = config(model) != config(dataclasses.replace(model, **{key: OTHERS[key]}))
    conditions = keys.FIELDS[key].metadata["effect"]
    assert changes == all(condition.holds(vars(model)) for condition in conditions)


def test_names_of_blocks_are_those_of_every_matrix_but_embeddings_and_head(model):
    built = build.build(model, eos_token_id=0)
    record, shape = ARCHITECTURES[model.architecture], estimate.shape_of(model)
    head = built.get_output_embeddings()
    products = {
        f"{name}.weight"
        for name, m in built.named_modules()
        if type(m) in (nn.Linear, Conv1D) and m is not head
    }
    named = dict(built.named_parameters())
    assert products == {
        name for name, weight in named.items() if record.blocks in name and weight.dim() == 2
    }
    assert shape.hidden == sum(named[name].numel() for name in products)
    assert shape.vectors == sum(weight.numel() for weight in named.values() if weight.dim() == 1)
    assert shape.parameters == built.num_parameters()
