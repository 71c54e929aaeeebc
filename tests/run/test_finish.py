"""The error of a run whose updates are skipped names what to try."""

import pytest

from ursa_minor.base import cudnn
from ursa_minor.run import finish


@pytest.mark.parametrize(
    ("kernel", "variable", "words", "others"),
    [
        (
            "cudnn",
            None,
            "The attention backend is cudnn, .* resume with TORCH_CUDNN_SDPA_DEPRIORITIZED=1$",
            "although",
        ),
        (
            "cudnn",
            "1",
            "The attention backend is cudnn, although TORCH_CUDNN_SDPA_DEPRIORITIZED is set$",
            "resume with",
        ),
        ("flash", None, "these batches. The attention backend is flash$", "TORCH_CUDNN"),
        (None, None, "The same command resumes after these batches$", "attention"),  # a CPU
    ],
)
def test_diverged_run_names_its_attention_backend(monkeypatch, kernel, variable, words, others):
    monkeypatch.delenv(cudnn.DEPRIORITIZED_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, variable)
    error = finish.diverged(7, "loss nan", 3, kernel)
    assert (
        error.status == 1
        and "3 updates in a row were skipped, the last at step 7: loss nan" in str(error)
    )
    with pytest.raises(type(error), match=words):
        raise error
    assert others not in str(error)
