"""A launch that is incomplete is reported in one line that names a launcher."""

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.base.launch import check_launch

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE = 2, but without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. ",
        ),
        ({"RANK": "1"}, "RANK = 1, but without WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. "),
        (
            {"LOCAL_RANK": "0"},
            "LOCAL_RANK = 0, but without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. ",
        ),
        (
            {"LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "LOCAL_RANK = 1, but without RANK, WORLD_SIZE. ",
        ),
        *((WHOLE | {name: ""}, f", but without {name}. ") for name in ("MASTER_ADDR",)),
        (
            {name: value for name, value in WHOLE.items() if name != "MASTER_PORT"},
            ", but without MASTER_PORT. ",
        ),
        (
            {name: value for name, value in WHOLE.items() if name != "LOCAL_RANK"},
            ", but without LOCAL_RANK. ",
        ),
        (
            WHOLE | {"RANK": "2"},
            "RANK = 2, WORLD_SIZE = 2, LOCAL_RANK = 1: RANK must be from 0 to WORLD_SIZE - 1. ",
        ),
        ({"RANK": "-1"}, "RANK = -1, but without"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1. "),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE = -1: must be at least 1. "),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be a whole number. "),
        ({"RANK": ""}, "RANK = '': must be a whole number. "),
        (WHOLE | {"MASTER_PORT": "http"}, "MASTER_PORT = 'http': must be a whole number. "),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x': must be a whole number. "),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE = 2: processes that mpirun or srun starts",
        ),
        ({"PMI_SIZE": "4"}, "PMI_SIZE = 4: processes that mpirun or srun starts"),
    ],
)
def test_incomplete_launch_is_rejected_in_one_line(environment, message):
    with pytest.raises(BadInput) as caught:
        check_launch(environment)
    (line,) = caught.value.lines
    assert message in line and "torchrun --nproc_per_node N or accelerate launch" in line
    assert (
        caught.value.status == 2 and caught.value.print_on_every_process
    )  # whichever process it is, it prints the line


@pytest.mark.parametrize(
    "environment",
    [
        {},
        WHOLE,
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "worker-0",
        },  # as clouds set them for one process
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},  # as accelerate launch does on a CPU
        {"LOCAL_RANK": "-1"},
        {"PMI_SIZE": "1"},
        WHOLE | {"PMI_SIZE": "2"},  # torchrun on nodes where srun started it
    ],
)
def test_single_process_and_complete_launch_are_accepted(environment):
    check_launch(environment)
