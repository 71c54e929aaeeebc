"""Test windows, their order and their batches.

Only the seed, the weights and the position decide which window is read.
"""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.tokens import shards

CPU = torch.device("cpu")
HEADER = 1024  # bytes
NUM_POSITIONS = 160  # positions of a small mixture that are compared
# The draws of windows() when the order was fixed. A change of the order breaks every resumed run.
GOLDEN = [[3, 2, 6, 1, 7, 4, 5, 0, 10, 8, 9, 11], [2, 1, 7, 6, 0, 4, 5, 3, 10, 9, 11, 8]]
GOLDEN_MIXTURE = {  # step: "source.window" of each position
    0: "0.3 2.0 1.7 0.2 0.6 2.5 1.3 0.1 1.5 0.7 1.4 0.4 0.5 0.0 0.14 1.2",
    64: "1.4 2.0 0.78 0.74 1.8 0.79 0.75 0.77 0.72 1.13 1.9 0.82 0.87 0.80 0.81 0.86",
}


def append_shard(source, path, ids, dtype=np.uint16):
    """Write a file with a header and these ids, and append it to the source."""
    path.write_bytes(bytes(HEADER) + np.array(ids, dtype=dtype).tobytes())
    ids_map = None
    if len(ids):
        ids_map = np.memmap(path, dtype, mode="r", offset=HEADER, shape=(len(ids),))
    source.append(path, len(ids), ids_map, HEADER)


def open_windows(folder, *shard_ids, vocab_size=1000, dtype=np.uint16, name="train"):
    """Return windows of 4 inputs over shards with these ids."""
    source = windows.Windows(4, vocab_size)
    for number, ids in enumerate(shard_ids):
        append_shard(source, folder / f"{name}_{number}.bin", ids, dtype)
    return source


def all_draws(*sources):
    """Return the draws of all windows of all sources."""
    draws = []
    for number, source in enumerate(sources):
        for window in range(source.num_windows):
            draws.append((number, window))
    return np.array(draws, dtype=np.int64)


def read_window(source, window):
    """Return the ids of a window."""
    row = np.zeros(source.sequence_length + 1, dtype=np.int64)
    source.read(window, row)
    return row.tolist()


def read_all_windows(source):
    """Read every window of a source."""
    for window in range(source.num_windows):
        read_window(source, window)


def read_mapped_batch(source):
    """Read a batch of all windows from the memory maps."""
    window_batches.Mapped([source], CPU).batch(all_draws(source))


def load_to_device(source):
    """Load all windows to the device."""
    window_batches.Resident([source], CPU)


def make_order(**changes):
    """Return the order of a run with default settings except for these changes."""
    settings = {
        "weights": (1.0,),
        "sequence_length": 4,
        "sequences_per_step": 4,
        "micro_batch_size": 2,
        "num_processes": 1,
        "seed": 1,
        "block_tokens": 2**26,
    }
    return window_order.TrainOrder(**(settings | changes))


def step_draws(order, step, num_windows):
    """Return the draws of a step as pairs, over all processes and micro-steps, by position."""
    micro_steps = order.sequences_per_step // (order.micro_batch_size * order.num_processes)
    draws = []
    for micro_step in range(micro_steps):
        for rank in range(order.num_processes):
            draws += order.windows(step, micro_step, rank, num_windows).tolist()
    return [tuple(draw) for draw in draws]


def draws_of_steps(order, steps, num_windows):
    """Return the draws of several steps as pairs, by position."""
    draws = []
    for step in steps:
        draws += step_draws(order, step, num_windows)
    return draws


def windows_of_source(source, draws):
    """Return the windows of the draws from one source."""
    return [window for number, window in draws if number == source]


class SmallMixture(NamedTuple):
    """A random mixture of sources, each of which has at least 2 epochs in NUM_POSITIONS.

    Attributes:
        settings: the arguments of make_order().
        num_windows: number of windows of each source.
        steps: the steps that are compared.
    """

    settings: dict
    num_windows: list[int]
    steps: range


def draw_mixture(draw):
    """Return a random small mixture."""
    num_sources = draw.choice([1, 1, 2, 3, 4])
    length = draw.randint(1, 9)
    settings = {
        "weights": tuple(draw.choice([1.0, 0.7, 2.5, 3.0]) for _ in range(num_sources)),
        "sequence_length": length,
        "sequences_per_step": draw.choice([1, 2, 4, 6, 8, 12, 24]),
        "micro_batch_size": 1,
        "seed": draw.randint(0, 2**31 - 1),
        "block_tokens": draw.choice([1, length * 3, length * 7, length * 16 + 1, 2**26]),
    }
    num_windows = []
    for share in make_order(**settings).shares():
        num_windows.append(draw.randint(1, round(share * window_order.CYCLE)))
    num_steps = -(-NUM_POSITIONS // settings["sequences_per_step"])  # rounded up
    return SmallMixture(settings, num_windows, range(num_steps))


def divide_among_processes(draw, settings, num_processes):
    """Return the same order for several processes and a random micro-batch size."""
    share = settings["sequences_per_step"] // num_processes
    divisors = [number for number in range(1, share + 1) if share % number == 0]
    division = {"micro_batch_size": draw.choice(divisors), "num_processes": num_processes}
    return make_order(**(settings | division))


@pytest.fixture
def short_cycles(monkeypatch):
    """Use cycles of 64 positions, so that small cases cross their ends."""
    monkeypatch.setattr(window_order, "CYCLE", 64)


# Windows


@pytest.mark.parametrize("batches_class", [window_batches.Mapped, window_batches.Resident])
def test_every_token_is_a_target_once(tmp_path, batches_class):
    source = open_windows(tmp_path, range(21), [], range(21, 42), range(90, 92), range(42, 62), [7])

    inputs, targets = batches_class([source], CPU).batch(all_draws(source))

    assert inputs.shape == (14, 4)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert (targets == inputs + 1).all()
    assert sorted(targets.flatten().tolist()) == [*range(1, 21), *range(22, 42), *range(43, 59)]
    no_window_crosses_a_shard = inputs[:, 0] // 21 == targets[:, -1] // 21
    assert no_window_crosses_a_shard.all()


def test_tokens_without_window_are_counted(tmp_path):
    source = open_windows(tmp_path, range(21), [], range(21, 42), range(90, 92), range(42, 62), [7])

    assert source.num_tokens == 65
    assert source.num_windows == 14
    # The first token of the shards with 21, 21 and 20 tokens, the last 3 of the latter, and all
    # tokens of the shards with 2 and 1.
    assert source.dropped_tokens == 3 * 1 + 3 + 2 + 1


@pytest.mark.parametrize(
    "read",
    [read_all_windows, windows.Windows.check_ids, read_mapped_batch, load_to_device],
)
@pytest.mark.parametrize(
    "token, dtype, invalid_id", [(4, np.uint32, 2**32 - 1), (20, np.uint16, 50)]
)
def test_id_beyond_vocabulary_is_rejected(tmp_path, monkeypatch, read, token, dtype, invalid_id):
    monkeypatch.setattr(shards, "CHECK_TOKENS", 8)  # number of ids that are checked together
    ids = [49] * 21
    ids[token] = invalid_id
    source = open_windows(tmp_path, range(10), ids, vocab_size=50, dtype=dtype)

    with pytest.raises(BadInput) as caught:
        read(source)

    message = str(caught.value)
    offset = HEADER + token * np.dtype(dtype).itemsize
    assert message.startswith(f"{tmp_path / 'train_1.bin'}: ")
    assert f"token {token} at offset {offset} has the id {invalid_id}" in message
    assert "vocab_size = 50" in message


def open_windows_with_deleted_shard(folder):
    """Return windows over a shard that was deleted and one that exists."""
    source = windows.Windows(4, 1000)
    source.append(folder / "deleted.bin", 21, None, HEADER)
    append_shard(source, folder / "existing.bin", range(21))
    return source


def test_deleted_shard_keeps_its_window_numbers(tmp_path):
    source = open_windows_with_deleted_shard(tmp_path)

    source.check_ids()

    assert source.num_windows == 10
    assert source.num_tokens == 42
    assert read_window(source, 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("read", [read_all_windows, read_mapped_batch, load_to_device])
def test_reading_deleted_shard_is_rejected(tmp_path, read):
    source = open_windows_with_deleted_shard(tmp_path)

    with pytest.raises(BadInput, match="deleted.bin is missing.*stream_keep.*delete the folder"):
        read(source)


@pytest.mark.parametrize(
    "window, released_shards",
    [(0, []), (4, []), (5, [0, 1]), (7, [0, 1]), (8, [0, 1, 2]), (10, [0, 1, 2, 3])],
)
def test_shards_before_window_are_released_once(tmp_path, window, released_shards):
    # The shards have the windows 0 to 4, none, 5 to 7, and 8 to 9.
    source = open_windows(tmp_path, range(21), range(3), range(13), range(9))

    released = source.release_before(window)

    assert released == [tmp_path / f"train_{number}.bin" for number in released_shards]
    assert source.release_before(window) == []
    assert source.num_windows == 10
    if 3 not in released_shards:
        assert read_window(source, 9)[0] == 4
    if 0 not in released_shards:
        assert read_window(source, 0)[0] == 0
    else:
        with pytest.raises(BadInput, match="train_0.bin is missing"):
            read_window(source, 0)


# The order


@pytest.mark.parametrize("seed", range(8))
def test_every_epoch_contains_each_window_once(short_cycles, seed):
    mixture = draw_mixture(random.Random(seed))
    order = make_order(**mixture.settings)

    draws = draws_of_steps(order, mixture.steps, mixture.num_windows)

    for source, num_windows in enumerate(mixture.num_windows):
        source_windows = windows_of_source(source, draws)
        first_epoch = source_windows[:num_windows]
        second_epoch = source_windows[num_windows : 2 * num_windows]
        assert sorted(first_epoch) == list(range(num_windows))
        assert sorted(second_epoch) == list(range(num_windows))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_order_is_independent_of_processes_and_micro_batch(short_cycles, num_processes):
    """Also from any step on: a resumed run reads the same windows as an uninterrupted run."""
    draw = random.Random(1)
    compared = 0
    for _ in range(8):
        mixture = draw_mixture(draw)
        sequences_per_step = mixture.settings["sequences_per_step"]
        if sequences_per_step % num_processes:
            continue
        order = make_order(**mixture.settings)
        expected = draws_of_steps(order, mixture.steps, mixture.num_windows)
        first_step = draw.choice(mixture.steps)
        window_order._cycle.cache_clear()  # as in a new process
        window_order._block.cache_clear()

        divided = divide_among_processes(draw, mixture.settings, num_processes)
        draws = draws_of_steps(divided, mixture.steps[first_step:], mixture.num_windows)

        assert draws == expected[first_step * sequences_per_step :]
        compared += 1
    assert compared > 2


def epoch_windows(epoch=0, seed=1, weights=(1.0, 0.0)):
    """Return the windows of one epoch of 60 windows, in shuffle blocks of 20."""
    order = make_order(
        weights=weights, sequences_per_step=60, micro_batch_size=60, seed=seed, block_tokens=80
    )
    return [window for _, window in step_draws(order, epoch, [60, 60])]


def test_order_stays_within_shuffle_blocks():
    epoch = epoch_windows()

    for start in (0, 20, 40):
        assert sorted(epoch[start : start + 20]) == list(range(start, start + 20))
    assert [window - 20 for window in epoch[20:40]] != epoch[:20]


def test_order_differs_by_epoch_seed_and_source():
    orders = [
        epoch_windows(),
        epoch_windows(epoch=1),
        epoch_windows(seed=2),
        epoch_windows(weights=(0.0, 1.0)),
    ]

    assert len({tuple(order) for order in orders}) == 4


def test_shuffle_block_has_at_least_one_window():
    order = make_order(sequence_length=9, block_tokens=3)

    assert step_draws(order, 0, [5]) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_source_without_weight_needs_no_windows():
    order = make_order(weights=(1.0, 0.0), block_tokens=8)

    assert order.needed(100) == [404, 0]
    assert order.oldest_needed(100) == [400, 0]
    assert order.windows(100, 0, 0, [None, None])[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("step", [0, 1])
def test_order_never_changes_between_versions(step):
    order = make_order(sequences_per_step=12, micro_batch_size=12, seed=1337, block_tokens=32)

    assert step_draws(order, step, [12]) == [(0, window) for window in GOLDEN[step]]


@pytest.mark.parametrize("step", GOLDEN_MIXTURE)
def test_order_of_mixture_never_changes(step):
    order = make_order(
        weights=(0.6, 0.3, 0.1),
        sequences_per_step=16,
        micro_batch_size=16,
        seed=1337,
        block_tokens=32,
    )

    draws = step_draws(order, step, [90, 20, 7])

    assert [f"{source}.{window}" for source, window in draws] == GOLDEN_MIXTURE[step].split()


@pytest.mark.parametrize(
    "weights, num_arrangements", [((1.0,), 1), ((3.0, 0.0, 2.0, 0.7), 3)], ids=["one", "mixture"]
)
def test_every_cycle_contains_exact_shares(weights, num_arrangements):
    cycle = window_order.CYCLE
    order = make_order(weights=weights, sequences_per_step=64, micro_batch_size=64)
    shares = order.shares()
    assert sum(shares) == 1
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / sum(weights)) < 1 / cycle

    draws = draws_of_steps(order, range(3 * cycle // 64), [10] * len(weights))

    arrangements = set()
    for start in range(0, 3 * cycle, cycle):
        sources = [source for source, _ in draws[start : start + cycle]]
        cycle_shares = [sources.count(source) / cycle for source in range(len(weights))]
        assert cycle_shares == shares
        arrangements.add(tuple(sources))
    assert len(arrangements) == num_arrangements


def test_any_weight_above_zero_has_a_position():
    order = make_order(weights=(1.0, 1e-9, 0.0, 1e-9))

    assert [share * window_order.CYCLE for share in order.shares()] == [1022, 1, 0, 1]


def test_most_sources_have_one_position_each():
    order = make_order(weights=(1e6, *[1e-6] * (window_order.CYCLE - 1)))

    assert set(order.shares()) == {1 / window_order.CYCLE}


@pytest.mark.parametrize(
    "weights, num_sources", [((1.0,) * 1025, 1025), ((0.0, 0.0), 0)], ids=["1025", "0"]
)
def test_too_many_or_no_sources_are_rejected(weights, num_sources):
    with pytest.raises(BadInput, match=f"{num_sources} sources .*from 1 to 1024"):
        make_order(weights=weights)


# The order of a source that is not complete


def known_windows(needed, available):
    """Return the number of windows of each source, or None where it has at least those needed."""
    known = []
    for need, have in zip(needed, available, strict=True):
        known.append(None if need <= have else have)
    return known


def test_step_draws_are_equal_before_source_is_complete(short_cycles):
    draw = random.Random(4)
    compared = 0
    for _ in range(40):
        mixture = draw_mixture(draw)
        order = make_order(**mixture.settings)
        for step in mixture.steps:
            known = known_windows(order.needed(step), mixture.num_windows)
            if None not in known:
                break
            expected = step_draws(order, step, mixture.num_windows)
            assert step_draws(order, step, known) == expected
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("seed", range(15))
def test_step_needs_only_blocks_that_are_read(short_cycles, seed):
    """It needs each block that was started, and the oldest block that a later step reads."""
    mixture = draw_mixture(random.Random(seed))
    settings = mixture.settings
    settings["block_tokens"] = min(settings["block_tokens"], 40)
    block = max(1, settings["block_tokens"] // settings["sequence_length"])
    order = make_order(**settings)
    num_sources = len(mixture.num_windows)
    draws = draws_of_steps(order, mixture.steps, [None] * num_sources)

    for step in mixture.steps[: len(mixture.steps) // 2 : 7]:
        step_start = step * order.sequences_per_step
        step_end = step_start + order.sequences_per_step
        needed = []
        oldest_needed = []
        for source in range(num_sources):
            last_read = max(windows_of_source(source, draws[:step_end]), default=-block)
            needed.append(last_read // block * block + block)
            first_to_read = min(windows_of_source(source, draws[step_start:]))
            oldest_needed.append(first_to_read // block * block)

        assert order.needed(step) == needed
        assert order.oldest_needed(step) == oldest_needed


# Batches


@pytest.fixture
def two_sources(tmp_path):
    """Return a source of uint16 ids and one of uint32 ids."""
    first = open_windows(tmp_path, range(21), range(21, 42), range(5), name="a")
    second = open_windows(
        tmp_path,
        range(500, 530),
        [],
        range(70000, 70013),
        vocab_size=80000,
        dtype=np.uint32,
        name="b",
    )
    return [first, second]


@pytest.mark.parametrize("batches_class", [window_batches.Mapped, window_batches.Resident])
def test_batch_contains_the_requested_windows(two_sources, batches_class):
    batches = batches_class(two_sources, CPU)

    inputs, targets = batches.batch(np.array([[1, 8], [0, 1], [1, 0]]))

    assert inputs.tolist() == [[70004, 70005, 70006, 70007], [4, 5, 6, 7], [500, 501, 502, 503]]
    assert targets.tolist() == [[70005, 70006, 70007, 70008], [5, 6, 7, 8], [501, 502, 503, 504]]
    for tensor in (inputs, targets):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("batches_class", [window_batches.Mapped, window_batches.Resident])
def test_changing_batch_does_not_change_data(two_sources, batches_class):
    batches = batches_class(two_sources, CPU)
    inputs, targets = batches.batch(np.array([[1, 8], [0, 1]]))

    inputs.zero_()

    assert targets.tolist() == [[70005, 70006, 70007, 70008], [5, 6, 7, 8]]
    inputs, _ = batches.batch(np.array([[0, 1]]))
    assert inputs.tolist() == [[4, 5, 6, 7]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("batches_class", [window_batches.Mapped, window_batches.Resident])
def test_batches_in_transfer_are_not_overwritten(two_sources, batches_class):
    cuda = torch.device("cuda")
    gpu_batches = batches_class(two_sources, cuda)
    cpu_batches = window_batches.Mapped(two_sources, CPU)
    all_batches = all_draws(*two_sources)[:, None]
    matrix = torch.ones(4096, 4096, device=cuda)

    gpu_inputs = []
    for draws in all_batches:
        matrix = matrix @ matrix / 4096  # the copies are queued behind this
        gpu_inputs.append(gpu_batches.batch(draws)[0])

    for draws, inputs in zip(all_batches, gpu_inputs, strict=True):
        assert torch.equal(inputs.cpu(), cpu_batches.batch(draws)[0])


# Validation


@pytest.mark.parametrize(
    "num_processes, batch_size, max_windows, num_draws", [(3, 2, 0, 11), (2, 5, 6, 6), (4, 1, 1, 1)]
)
def test_processes_share_validation_windows(
    tmp_path, num_processes, batch_size, max_windows, num_draws
):
    source = open_windows(tmp_path, range(45))
    batches = window_batches.Mapped([source], CPU)
    draws = window_order.eval_draws([source.num_windows], [1.0], max_windows=max_windows)

    first_ids = []
    for rank in range(num_processes):
        for inputs, targets in window_batches.eval_batches(
            batches, draws, batch_size=batch_size, rank=rank, num_processes=num_processes
        ):
            assert 0 < len(inputs) <= batch_size
            assert (targets == inputs + 1).all()
            first_ids += inputs[:, 0].tolist()

    spread_windows = [index * source.num_windows // num_draws for index in range(num_draws)]
    assert sorted(first_ids) == [4 * window for window in spread_windows]


@pytest.mark.parametrize(
    "num_windows, weights, max_windows, counts",
    [
        ([3, 0, 2], [1, 1, 5], 0, [3, 0, 2]),  # no limit
        ([1000, 1000], [0.7, 0.3], 10, [7, 3]),
        ([1000, 10], [1, 1], 100, [50, 10]),
        ([1000, 1000, 1000], [1, 1e-6, 0], 50, [50, 1, 1]),
    ],
)
def test_validation_of_mixture_follows_weights(num_windows, weights, max_windows, counts):
    draws = window_order.eval_draws(num_windows, weights, max_windows=max_windows)

    assert len(draws) == sum(counts)
    for source, count in enumerate(counts):
        spread_windows = [index * num_windows[source] // count for index in range(count)]
        assert windows_of_source(source, draws.tolist()) == spread_windows
