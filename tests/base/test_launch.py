"""Environment variables of a launch: complete, incomplete and contradictory ones."""

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch

COMPLETE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def error_of(environment):
    """Return the error that the environment of a launch causes."""
    with pytest.raises(BadInput) as caught:
        check_launch(environment)
    return caught.value


@pytest.mark.parametrize(
    ("stated", "missing"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "-1"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK, WORLD_SIZE"),
    ],
)
def test_missing_variables_are_named(stated, missing):
    (line,) = error_of(stated).lines

    name, value = next(iter(stated.items()))
    assert line.startswith(f"{name} = {value}, but without {missing}. ")


@pytest.mark.parametrize("name", ["MASTER_PORT", "LOCAL_RANK"])
def test_missing_variable_of_complete_launch_is_named(name):
    environment = {key: value for key, value in COMPLETE.items() if key != name}

    (line,) = error_of(environment).lines

    assert f", but without {name}. " in line


def test_empty_address_is_missing():
    (line,) = error_of(COMPLETE | {"MASTER_ADDR": ""}).lines

    assert ", but without MASTER_ADDR. " in line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            COMPLETE | {"RANK": "2"},
            "RANK = 2, WORLD_SIZE = 2, LOCAL_RANK = 1: RANK must be from 0 to WORLD_SIZE - 1",
        ),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE = -1: must be at least 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be a whole number"),
        ({"RANK": ""}, "RANK = '': must be a whole number"),
        (COMPLETE | {"MASTER_PORT": "http"}, "MASTER_PORT = 'http': must be a whole number"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x': must be a whole number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 2: processes that mpirun"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE = 4: processes that mpirun"),
    ],
)
def test_invalid_variable_is_named(environment, words):
    (line,) = error_of(environment).lines

    assert words in line


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1"}, {"WORLD_SIZE": "two"}, {"PMI_SIZE": "4"}, COMPLETE | {"RANK": "2"}],
)
def test_every_process_prints_a_working_launcher(environment):
    error = error_of(environment)

    (line,) = error.lines
    assert "torchrun --nproc_per_node N or accelerate launch" in line
    assert error.status == 2
    assert error.print_on_every_process  # the rank may be unknown


@pytest.mark.parametrize(
    "environment",
    [
        {},
        COMPLETE,
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        # Clouds set these variables for one process.
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "worker-0"},
        # So does accelerate launch on a CPU.
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"LOCAL_RANK": "-1"},
        {"PMI_SIZE": "1"},
        # srun has started torchrun on each node.
        COMPLETE | {"PMI_SIZE": "2"},
    ],
)
def test_valid_launch_is_accepted(environment):
    check_launch(environment)
