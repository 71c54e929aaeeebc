"""Check the variables that torchrun and accelerate launch set for each process of a run.

This module does not import torch.
"""

import re
from collections.abc import Mapping

from ursa_minor.base.errors import BadInput

# torchrun, and accelerate launch with several processes, set all of these.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# mpirun and srun --mpi=pmi2 set one of these, and none of the above.
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCH_COMMANDS = "torchrun --nproc_per_node N or accelerate launch --quiet --num_processes N"
FIX = f"Start several processes with {LAUNCH_COMMANDS}"


def check_launch(environment: Mapping[str, str]) -> None:
    """Check the variables with which the processes of a run find each other.

    Every process reports an error, because it is not known which one is the main process.

    Raises:
        BadInput: the variables state several processes, or the rank of one of them, but are
            incomplete or contradict each other.
    """
    _check_numbers(environment)
    _check_not_started_by_mpi(environment)
    rank = int(environment.get("RANK", "0"))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "-1"))  # -1 used to mean "not launched"
    if world_size < 1:
        raise _error(f"WORLD_SIZE = {world_size}: must be at least 1. {FIX}, which set it")
    if world_size == 1 and rank == 0 and local_rank == -1:
        return

    assignments = [
        f"{name} = {environment[name]}" for name in RANK_VARIABLES if name in environment
    ]
    values = ", ".join(assignments)
    missing = [name for name in LAUNCH_VARIABLES if not environment.get(name)]
    if missing:
        present = [name for name in LAUNCH_VARIABLES if name in environment]
        raise _error(
            f"{values}, but without {', '.join(missing)}. {FIX}, which set all. "
            f"For a single process: unset {' '.join(present)}"
        )
    if not 0 <= rank < world_size:
        raise _error(f"{values}: RANK must be from 0 to WORLD_SIZE - 1. {FIX}, which set both")


def _check_numbers(environment: Mapping[str, str]) -> None:
    for name in NUMBERS:
        text = environment.get(name, "0")
        if not re.fullmatch(r"-?\d+", text):
            raise _error(f"{name} = {text!r}: must be a whole number. {FIX}, which set it")


def _check_not_started_by_mpi(environment: Mapping[str, str]) -> None:
    for name in MPI_SIZES:
        size = environment.get(name, "1")
        if size not in ("0", "1") and "WORLD_SIZE" not in environment:
            raise _error(
                f"{name} = {size}: processes that mpirun or srun starts do not find each other. "
                f"{FIX}"
            )


def _error(message: str) -> BadInput:
    return BadInput(message, print_on_every_process=True)
