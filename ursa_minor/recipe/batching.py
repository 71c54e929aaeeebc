"""Divide an update of ``tokens_per_step`` tokens into processes and micro-batches.

The division follows from the recipe and the number of processes. No key sets it directly.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or
from ursa_minor.recipe.keys import Recipe
from ursa_minor.recipe.rules import divisors

# After this number of epochs, repeated text improves a model much less than new text would
# (Muennighoff et al. 2023).
MANY_EPOCHS = 4


@dataclass(frozen=True)
class Plan:
    """The processes, sequences and micro-batches of one update.

    Attributes:
        num_processes: processes that share the update.
        sequences_per_step: sequences of all processes.
        per_device_train_batch_size: sequences in a micro-batch of one process.
        gradient_accumulation_steps: micro-batches of one process.
        exchange_each: whether the processes exchange gradients after each micro-batch, instead of
            after the last one only.
    """

    num_processes: int
    sequences_per_step: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    exchange_each: bool = False


def make_plan(recipe: Recipe, num_processes: int, ceiling: int | None = None) -> Plan:
    """Divide an update equally between the processes, in micro-batches as large as possible.

    Args:
        recipe: states the number of tokens and the maximum micro-batch.
        num_processes: number of processes.
        ceiling: the maximum micro-batch, in sequences, instead of the recipe's. If neither states
            one (``auto``), a micro-batch is the entire share of a process.

    Raises:
        BadInput: the processes cannot share the sequences equally. The message gives numbers of
            processes and of tokens that work.
    """
    sequence_length = recipe.model.sequence_length
    tokens_per_step = recipe.batch.tokens_per_step
    sequences = tokens_per_step // sequence_length
    if sequences % num_processes:
        counts = [count for count in divisors(sequences) if count <= 64]
        smallest_step = sequence_length * num_processes
        nearest = max(1, round(tokens_per_step / smallest_step)) * smallest_step
        raise BadInput(
            f"tokens_per_step = {tokens_per_step} is {sequences} sequences of {sequence_length} "
            f"tokens, which {num_processes} processes cannot share equally. "
            f"Use {join_or(counts)} processes, or --tokens_per_step {nearest}"
        )
    share = sequences // num_processes
    if ceiling is None and recipe.batch.per_device_train_batch_size != "auto":
        ceiling = recipe.batch.per_device_train_batch_size
    sizes_from_largest = range(min(ceiling or share, share), 0, -1)
    micro_batch = next(size for size in sizes_from_largest if share % size == 0)
    return Plan(num_processes, sequences, micro_batch, share // micro_batch)


def steps_of_epochs(epochs: float, num_windows: int, recipe: Recipe) -> int:
    """Return the number of steps that read the training windows ``epochs`` times, rounded up.

    Args:
        epochs: number of epochs, above 0. The decimal number is exact, so that for example 0.1
            epochs of 30 windows are 3 windows.
        num_windows: number of training windows of all sources.
        recipe: states the number of tokens of a step.
    """
    sequences_per_step = recipe.batch.tokens_per_step // recipe.model.sequence_length
    num_sequences = Fraction(repr(epochs)) * num_windows
    return math.ceil(num_sequences / sequences_per_step)
