"""Check the variables that torchrun and accelerate launch set for each process of a run. Needs no torch."""

import re
from collections.abc import Mapping

from ursa_minor.base.errors import BadInput

# torchrun, and accelerate launch for several processes, set all of these.
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# mpirun and srun --mpi=pmi2 set one of these, and none of the above.
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
HOW = "Start several processes with torchrun --nproc_per_node N or accelerate launch --num_processes N"


def check_launch(environment: Mapping[str, str]) -> None:
    """Check the variables by which the processes of a run find each other.

    Raises BadInput where they ask for several processes, or for a place among them, and are incomplete or contradict
    each other. Every process reports it, because it is not known which one is the first.
    """
    for name in NUMBERS:
        text = environment.get(name, "0")
        if not re.fullmatch(r"-?\d+", text):
            raise BadInput(
                f"{name} = {text!r}: must be a whole number. {HOW}, which set it", alone=True
            )
    for name in MPI_SIZES:
        size = environment.get(name, "1")
        if size not in ("0", "1") and "WORLD_SIZE" not in environment:
            raise BadInput(
                f"{name} = {size}: processes that mpirun or srun starts do not find each other. {HOW}",
                alone=True,
            )
    rank = int(environment.get("RANK", "0"))
    processes = int(environment.get("WORLD_SIZE", "1"))
    if processes < 1:
        raise BadInput(
            f"WORLD_SIZE = {processes}: must be at least 1. {HOW}, which set it", alone=True
        )
    local_rank = int(environment.get("LOCAL_RANK", "-1"))  # -1 is an old way to say: not launched
    if processes <= 1 and rank == 0 and local_rank == -1:
        return
    assignments = [f"{name} = {environment[name]}" for name in LAUNCH[:3] if name in environment]
    missing = [name for name in LAUNCH if not environment.get(name)]
    if missing:
        present = [name for name in LAUNCH if name in environment]
        single = f"For a single process: unset {' '.join(present)}"
        raise BadInput(
            f"{', '.join(assignments)}, but without {', '.join(missing)}. {HOW}, which set all. {single}",
            alone=True,
        )
    if not 0 <= rank < processes:
        raise BadInput(
            f"{', '.join(assignments)}: RANK must be from 0 to WORLD_SIZE - 1. {HOW}, which set both",
            alone=True,
        )
