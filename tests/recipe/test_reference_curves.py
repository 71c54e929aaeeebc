"""Whether a published loss curve can be compared with a run."""

import json

import pytest
from conftest import ROOT

from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import loading, reference_curves

REFERENCE = reference_curves.EXAMPLE


@pytest.mark.parametrize("tokenizer", ["bpe", "characters", "EleutherAI/pythia-70m"])
def test_reference_curve_of_another_tokenizer_is_rejected(tokenizer):
    flags = {"tokenizer": tokenizer, "reference_curve": REFERENCE}

    with pytest.raises(BadInput) as caught:
        loading.load_recipe(ROOT / "recipes/own_text.yaml", flags | {"data_files": ["my.txt"]})

    message = str(caught.value)
    assert REFERENCE in message
    assert tokenizer in message
    assert "--reference_curve none" in message


@pytest.mark.parametrize(("num_tokens", "fits"), [(50257, True), (2048, False)])
def test_local_tokenizer_of_a_reference_is_compared_by_size(tmp_path, num_tokens, fits):
    vocabulary = {f"token{number}": number for number in range(num_tokens - 1)}
    definition = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<|endoftext|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))

    problems = list(reference_curves.problems(REFERENCE, str(tmp_path)))

    assert bool(problems) == (not fits)


@pytest.mark.parametrize(
    "tokenizer", ["openai-community/gpt2", "gpt2", "openai-community/gpt2@main"]
)
def test_names_of_the_tokenizer_of_a_reference_fit(tokenizer):
    assert not list(reference_curves.problems(REFERENCE, tokenizer))
