"""The definition of an architecture agrees with the model that is built from it."""

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

OTHER_VALUES = {
    "n_layer": 3,
    "n_head": 8,
    "n_embd": 64,
    "vocab_size": 128,
    "sequence_length": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "resid_pdrop": 0.25,
    "embd_pdrop": 0.25,
    "attn_pdrop": 0.25,
}


@pytest.fixture(params=ARCHITECTURES)
def model(request) -> keys.Model:
    """The model section of a recipe with the required keys of its architecture."""
    architecture_keys = keys.ARCHITECTURE_KEYS[request.param]
    stated = {key: KINDS["untied"][key] for key in architecture_keys}
    return keys.Model(**SHAPE | {"n_head": 4}, architecture=request.param, **stated)


def test_recipe_knows_every_architecture():
    assert set(keys.ARCHITECTURE_KEYS) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_has_name_of_transformers(name):
    assert ARCHITECTURES[name].name == name
    assert AutoConfig.for_model(name).model_type == name


def complete_config(model: keys.Model) -> dict:
    """Return the configuration of Transformers for a model, with its changes for training."""
    definition = ARCHITECTURES[model.architecture]
    return definition.config(model) | definition.training_config(model)


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_key_changes_config_where_it_applies(model, key):
    """The conditions of a key name the architectures that have it."""
    conditions = keys.FIELDS[key].metadata["effect"]
    applies = all(condition.holds(vars(model)) for condition in conditions)
    changed_model = dataclasses.replace(model, **{key: OTHER_VALUES[key]})

    is_changed = complete_config(changed_model) != complete_config(model)

    assert is_changed == applies


def test_block_name_selects_the_hidden_matrices(model):
    transformer = build.build(model, eos_token_id=0)
    head = transformer.get_output_embeddings()
    expected = set()
    for name, module in transformer.named_modules():
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            expected.add(f"{name}.weight")

    blocks = ARCHITECTURES[model.architecture].blocks
    selected = set()
    for name, weight in transformer.named_parameters():
        if blocks in name and weight.dim() == 2:
            selected.add(name)

    assert selected == expected


def test_estimated_shape_equals_built_model(model):
    transformer = build.build(model, eos_token_id=0)
    blocks = ARCHITECTURES[model.architecture].blocks
    num_hidden = 0
    num_vector_values = 0
    for name, weight in transformer.named_parameters():
        if weight.dim() == 1:
            num_vector_values += weight.numel()
        elif blocks in name:
            num_hidden += weight.numel()

    shape = estimate.shape_of(model)

    assert shape.hidden == num_hidden
    assert shape.vectors == num_vector_values
    assert shape.parameters == transformer.num_parameters()
