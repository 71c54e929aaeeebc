"""The error of a run whose updates are skipped suggests a fix."""

import pytest

from ursa_minor.base import cudnn
from ursa_minor.run import finish


def diverged_message(kernel: str | None) -> str:
    """Return the message of a run with three skipped updates and this attention backend."""
    return str(finish.diverged(7, "loss nan", 3, kernel))


@pytest.fixture(autouse=True)
def cudnn_with_default_priority(monkeypatch) -> None:
    """Remove the environment variable that changes the priority of cuDNN."""
    monkeypatch.delenv(cudnn.DEPRIORITIZED_VARIABLE, raising=False)


def test_diverged_run_names_skipped_updates():
    error = finish.diverged(7, "loss nan", 3, None)

    assert error.status == 1
    assert "3 updates in a row were skipped" in str(error)
    assert "step 7: loss nan" in str(error)


def test_diverged_run_with_cudnn_suggests_variable():
    message = diverged_message("cudnn")

    assert "attention backend is cudnn" in message
    assert message.endswith("resume with TORCH_CUDNN_SDPA_DEPRIORITIZED=1")
    assert "although" not in message


def test_variable_that_is_set_is_not_suggested(monkeypatch):
    monkeypatch.setenv(cudnn.DEPRIORITIZED_VARIABLE, "1")

    message = diverged_message("cudnn")

    assert "attention backend is cudnn" in message
    assert "although TORCH_CUDNN_SDPA_DEPRIORITIZED is set" in message
    assert "resume with" not in message


def test_other_attention_backend_is_named():
    message = diverged_message("flash")

    assert message.endswith("The attention backend is flash")
    assert "TORCH_CUDNN" not in message


def test_run_on_cpu_names_no_attention_backend():
    message = diverged_message(None)

    assert message.endswith("The same command resumes after these batches")
    assert "attention" not in message
