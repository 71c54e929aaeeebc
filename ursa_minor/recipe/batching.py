"""How one step of ``tokens_per_step`` is shared: derived from recipe and machine, printed, never set."""

from dataclasses import dataclass

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or
from ursa_minor.recipe.keys import Recipe
from ursa_minor.recipe.rules import divisors

MANY_EPOCHS = (
    4  # beyond these, reading again teaches much less than new text would (Muennighoff et al. 2023)
)


@dataclass(frozen=True)
class Plan:
    """A step's processes, sequences and micro-batches.

    Attributes:
        exchange_each: whether gradients are exchanged in each micro-batch, and not in a step's last only.
    """

    num_processes: int
    sequences_per_step: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    exchange_each: bool = False


def make_plan(recipe: Recipe, num_processes: int, ceiling: int | None = None) -> Plan:
    """Share a step over the processes: the largest micro-batch at or below the ceiling that divides it.

    Args:
        ceiling: instead of the recipe's; without any (auto) a process takes its whole share at once.

    Raises BadInput with the process counts and token counts that work when none does.
    """
    sequences = recipe.batch.tokens_per_step // recipe.model.sequence_length
    if sequences % num_processes:
        counts = [n for n in divisors(sequences) if n <= 64]
        step = recipe.model.sequence_length * num_processes
        nearest = max(1, round(recipe.batch.tokens_per_step / step)) * step
        raise BadInput(
            f"tokens_per_step = {recipe.batch.tokens_per_step} is {sequences} sequences of {recipe.model.sequence_length} "
            f"tokens, which {num_processes} processes cannot share equally. Use {join_or(counts)} processes, or "
            f"--tokens_per_step {nearest}"
        )
    share = sequences // num_processes
    if ceiling is None and recipe.batch.per_device_train_batch_size != "auto":
        ceiling = recipe.batch.per_device_train_batch_size
    micro_batch = next(
        size for size in range(min(ceiling or share, share), 0, -1) if share % size == 0
    )
    return Plan(num_processes, sequences, micro_batch, share // micro_batch)
