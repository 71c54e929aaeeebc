"""Windows, their order and their batches: nothing but seed, weights and position decides what is trained on."""

import contextlib
import random

import numpy as np
import pytest
import torch

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.tokens import shards

CPU = torch.device("cpu")
HEADER = 1024
POSITIONS = 160  # of a small mixture that are compared
# What windows() returned on the day the order was fixed, before there were mixtures: a change breaks every resumed run.
GOLDEN = [[3, 2, 6, 1, 7, 4, 5, 0, 10, 8, 9, 11], [2, 1, 7, 6, 0, 4, 5, 3, 10, 9, 11, 8]]
GOLDEN_MIXTURE = [
    "0.3 2.0 1.7 0.2 0.6 2.5 1.3 0.1 1.5 0.7 1.4 0.4 0.5 0.0 0.14 1.2",
    "1.4 2.0 0.78 0.74 1.8 0.79 0.75 0.77 0.72 1.13 1.9 0.82 0.87 0.80 0.81 0.86",
]


def write(path, ids, dtype=np.uint16):
    """A file with a header and these ids; return what append() wants."""
    path.write_bytes(bytes(HEADER) + np.array(ids, dtype=dtype).tobytes())
    ids_map = (
        np.memmap(path, dtype, mode="r", offset=HEADER, shape=(len(ids),)) if len(ids) else None
    )
    return path, len(ids), ids_map, HEADER


def opened(folder, *parts, length=4, vocab_size=1000, dtype=np.uint16, name="train"):
    """Windows over one shard for each part."""
    given = windows.Windows(length, vocab_size)
    for number, part in enumerate(parts):
        given.append(*write(folder / f"{name}_{number}.bin", part, dtype))
    return given


def all_draws(*sources):
    pairs = [
        (number, window)
        for number, source in enumerate(sources)
        for window in range(source.num_windows)
    ]
    return np.array(pairs, dtype=np.int64)


def read(source, window):
    row = np.zeros(source.sequence_length + 1, dtype=np.int64)
    source.read(window, row)
    return row.tolist()


def order(**changes):
    known = {
        "weights": (1.0,),
        "sequence_length": 4,
        "sequences_per_step": 4,
        "micro_batch_size": 2,
    }
    known |= {"num_processes": 1, "seed": 1, "block_tokens": 2**26}
    return window_order.TrainOrder(**(known | changes))


def draws_of(given, steps, num_windows):
    """The draws of these steps as pairs, in the order of their positions, over all processes and micro-steps."""
    micro_steps = given.sequences_per_step // (given.micro_batch_size * given.num_processes)
    places = [
        (s, m, r) for s in steps for m in range(micro_steps) for r in range(given.num_processes)
    ]
    return [tuple(pair) for place in places for pair in given.windows(*place, num_windows).tolist()]


def drawn_from(source, draws):
    return [window for number, window in draws if number == source]


def small_mixture(draw):
    """A random mixture as the arguments of order(), and the windows of each source: two epochs or more of POSITIONS."""
    sources, length = draw.choice([1, 1, 2, 3, 4]), draw.randint(1, 9)
    changes = {
        "weights": tuple(draw.choice([1.0, 0.7, 2.5, 3.0]) for _ in range(sources)),
        "sequence_length": length,
        "sequences_per_step": draw.choice([1, 2, 4, 6, 8, 12, 24]),
        "micro_batch_size": 1,
        "seed": draw.randint(0, 2**31 - 1),
        "block_tokens": draw.choice([1, length * 3, length * 7, length * 16 + 1, 2**26]),
    }
    return changes, [
        draw.randint(1, round(share * window_order.CYCLE)) for share in order(**changes).shares()
    ]


def shared_out(draw, changes, processes):
    share = changes["sequences_per_step"] // processes
    micro_batch = draw.choice([n for n in range(1, share + 1) if share % n == 0])
    return order(**(changes | {"micro_batch_size": micro_batch, "num_processes": processes}))


@pytest.fixture
def short_cycles(monkeypatch):
    """Cycles of 64 positions: small cases cross some."""
    monkeypatch.setattr(window_order, "CYCLE", 64)


def steps_of(changes):
    return range(-(-POSITIONS // changes["sequences_per_step"]))


# Windows


def test_every_token_is_a_target_once_and_no_window_crosses_a_shard(tmp_path):
    source = opened(tmp_path, range(21), [], range(21, 42), range(90, 92), range(42, 62), [7])
    for batches in (window_batches.Mapped([source], CPU), window_batches.Resident([source], CPU)):
        inputs, targets = batches.batch(all_draws(source))
        assert (
            inputs.shape == (14, 4)
            and (inputs[:, 1:] == targets[:, :-1]).all()
            and (targets == inputs + 1).all()
        )
        assert sorted(targets.flatten().tolist()) == [*range(1, 21), *range(22, 42), *range(43, 59)]
        assert (inputs[:, 0] // 21 == targets[:, -1] // 21).all()
    assert (source.num_tokens, source.num_windows, source.dropped_tokens) == (
        65,
        14,
        3 * 1 + 3 + 2 + 1,
    )


ID_READERS = {
    "read": lambda source: [read(source, window) for window in range(source.num_windows)],
    "check_ids": windows.Windows.check_ids,
    "Mapped": lambda source: window_batches.Mapped([source], CPU).batch(all_draws(source)),
    "Resident": lambda source: window_batches.Resident([source], CPU),
}


@pytest.mark.parametrize("reader", ID_READERS)
def test_id_beyond_the_vocabulary_is_refused_with_file_and_offset(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(shards, "CHECK_TOKENS", 8)  # that are checked in one go
    for token, dtype, found in ((4, np.uint32, 2**32 - 1), (20, np.uint16, 50)):
        ids = [49] * 21
        ids[token] = found
        source = opened(tmp_path, range(10), ids, vocab_size=50, dtype=dtype)
        with pytest.raises(BadInput) as caught:
            ID_READERS[reader](source)
        offset = HEADER + token * np.dtype(dtype).itemsize
        assert str(caught.value) == (
            f"{tmp_path / 'train_1.bin'}: token {token} at offset {offset} has the id {found}, "
            f"but with vocab_size = 50 the largest id is 49. Use the tokenizer that the shards were "
            f"encoded with, and a vocab_size of at least its number of ids"
        )


def test_a_deleted_shard_keeps_its_numbers_and_is_refused_with_a_remedy(tmp_path):
    source = windows.Windows(4, 1000)
    source.append(tmp_path / "gone.bin", 21, None, HEADER)
    source.append(*write(tmp_path / "here.bin", range(21)))
    source.check_ids()
    assert (source.num_windows, source.num_tokens, read(source, 5)) == (10, 42, [0, 1, 2, 3, 4])
    for name in ("read", "Mapped", "Resident"):
        with pytest.raises(
            BadInput,
            match="gone.bin is missing, because stream_keep .*To prepare the data again, delete",
        ):
            ID_READERS[name](source)


def test_shards_whose_windows_all_lie_before_are_released_for_deletion_once(tmp_path):
    for window, released in (
        (0, []),
        (4, []),
        (5, [0, 1]),
        (7, [0, 1]),
        (8, [0, 1, 2]),
        (10, [0, 1, 2, 3]),
    ):
        source = opened(
            tmp_path, range(21), range(3), range(13), range(9)
        )  # windows 0 to 4, none, 5 to 7, 8 to 9
        assert source.release_before(window) == [
            tmp_path / f"train_{number}.bin" for number in released
        ]
        assert source.release_before(window) == [] and source.num_windows == 10
        assert window == 10 or read(source, 9)[0] == 4
        with (
            contextlib.nullcontext()
            if window < 5
            else pytest.raises(BadInput, match="train_0.bin is missing")
        ):
            read(source, 0)


# The order


def test_the_order_is_the_same_for_any_number_of_processes_and_any_micro_batch(short_cycles):
    """Each source gives every window once an epoch; from any step on: a resumed run reads what it would have."""
    draw = random.Random(1)
    for _ in range(8):
        changes, num_windows = small_mixture(draw)
        steps = steps_of(changes)
        wanted, at = draws_of(order(**changes), steps, num_windows), draw.choice(steps)
        for source, have in enumerate(num_windows):
            own = drawn_from(source, wanted)
            assert sorted(own[:have]) == sorted(own[have : 2 * have]) == list(range(have))
        for processes in [n for n in (1, 2, 3, 4) if changes["sequences_per_step"] % n == 0]:
            window_order._cycle.cache_clear()  # as in a new process
            window_order._block.cache_clear()
            found = draws_of(shared_out(draw, changes, processes), steps[at:], num_windows)
            assert found == wanted[at * changes["sequences_per_step"] :]


def test_order_stays_within_shuffle_blocks_and_differs_by_epoch_seed_block_and_source():
    def epoch(number, seed=1, weights=(1.0, 0.0)):
        given = order(
            weights=weights, sequences_per_step=60, micro_batch_size=60, seed=seed, block_tokens=80
        )
        return [window for _, window in draws_of(given, [number], [60, 60])]

    first = epoch(0)
    assert [sorted(first[i : i + 20]) for i in (0, 20, 40)] == [
        list(range(i, i + 20)) for i in (0, 20, 40)
    ]
    assert (
        len(
            {
                tuple(given)
                for given in (first, epoch(1), epoch(0, seed=2), epoch(0, weights=(0.0, 1.0)))
            }
        )
        == 4
    )
    assert [window - 20 for window in first[20:40]] != first[:20]


def test_a_block_is_never_shorter_than_one_window_and_a_source_without_weight_needs_none():
    given = order(sequence_length=9, block_tokens=3)
    assert draws_of(given, [0], [5]) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    given = order(weights=(1.0, 0.0), block_tokens=8)
    assert given.needed(100) == [404, 0] and given.oldest_needed(100) == [400, 0]
    assert given.windows(100, 0, 0, [None, None])[:, 0].tolist() == [0, 0]


def test_order_never_changes_between_versions():
    given = order(sequences_per_step=12, micro_batch_size=12, seed=1337, block_tokens=32)
    for step in (0, 1):
        assert draws_of(given, [step], [12]) == [(0, window) for window in GOLDEN[step]]
    given = order(
        weights=(0.6, 0.3, 0.1),
        sequences_per_step=16,
        micro_batch_size=16,
        seed=1337,
        block_tokens=32,
    )
    for step, golden in zip((0, 64), GOLDEN_MIXTURE, strict=True):
        assert (
            " ".join(
                f"{source}.{window}" for source, window in draws_of(given, [step], [90, 20, 7])
            )
            == golden
        )


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 0.0, 2.0, 0.7)])
def test_every_cycle_holds_each_sources_share_to_one_place(weights):
    given = order(weights=weights, sequences_per_step=64, micro_batch_size=64)
    exact = [weight / sum(weights) for weight in weights]
    assert sum(given.shares()) == 1
    assert all(
        abs(share - wanted) < 1 / window_order.CYCLE
        for share, wanted in zip(given.shares(), exact, strict=True)
    )
    draws = draws_of(given, range(3 * window_order.CYCLE // 64), [10] * len(weights))
    arrangements = set()
    for begin in range(0, len(draws), window_order.CYCLE):
        sources = [source for source, _ in draws[begin : begin + window_order.CYCLE]]
        assert [
            sources.count(s) / window_order.CYCLE for s in range(len(weights))
        ] == given.shares()
        arrangements.add(tuple(sources))
    assert len(arrangements) == (3 if len(weights) > 1 else 1)


def test_a_source_with_any_weight_has_a_place_and_one_without_has_none():
    tiny = order(weights=(1.0, 1e-9, 0.0, 1e-9))
    assert [share * window_order.CYCLE for share in tiny.shares()] == [1022, 1, 0, 1]
    crowd = order(weights=(1e6, *[1e-6] * (window_order.CYCLE - 1)))
    assert set(crowd.shares()) == {1 / window_order.CYCLE}
    for weights, drawn in (((1.0,) * 1025, 1025), ((0.0, 0.0), 0)):
        with pytest.raises(
            BadInput, match=f"{drawn} sources have a weight above 0, .* from 1 to 1024"
        ):
            order(weights=weights)


# The order of a stream that grows


def test_a_step_reads_the_same_windows_while_a_stream_grows_and_when_it_is_complete(short_cycles):
    draw = random.Random(4)
    compared = 0
    for _ in range(40):
        changes, num_windows = small_mixture(draw)
        given = order(**changes)
        for step in steps_of(changes):
            known = [
                None if need <= have else have
                for need, have in zip(given.needed(step), num_windows, strict=True)
            ]
            if set(known) == set(num_windows):
                break
            assert draws_of(given, [step], known) == draws_of(given, [step], num_windows)
            compared += 1
    assert compared > 100


def test_a_step_needs_each_block_that_was_begun_and_none_that_no_later_one_reads(short_cycles):
    draw = random.Random(6)
    for _ in range(30):
        changes, num_windows = small_mixture(draw)
        changes["block_tokens"] = min(changes["block_tokens"], 40)
        block = max(1, changes["block_tokens"] // changes["sequence_length"])
        given, steps = order(**changes), steps_of(changes)
        by_step = [draws_of(given, [step], [None] * len(num_windows)) for step in steps]
        for step in steps[: len(steps) // 2 : 7]:
            before, later = sum(by_step[: step + 1], []), sum(by_step[step:], [])
            last = [
                max(drawn_from(source, before), default=-block)
                for source in range(len(num_windows))
            ]
            assert given.needed(step) == [window // block * block + block for window in last]
            first = [
                min(drawn_from(source, later)) // block * block
                for source in range(len(num_windows))
            ]
            assert given.oldest_needed(step) == first


# Batches


@pytest.fixture
def two_sources(tmp_path):
    return [
        opened(tmp_path, range(21), range(21, 42), range(5), name="a"),
        opened(
            tmp_path,
            range(500, 530),
            [],
            range(70000, 70013),
            vocab_size=80000,
            dtype=np.uint32,
            name="b",
        ),
    ]


@pytest.mark.parametrize("kind", [window_batches.Mapped, window_batches.Resident])
def test_inputs_and_targets_are_the_windows_that_were_asked_for_in_whole_tensors(two_sources, kind):
    batches = kind(two_sources, CPU)
    inputs, targets = batches.batch(np.array([[1, 8], [0, 1], [1, 0]]))
    assert (
        inputs.dtype == targets.dtype == torch.int64
        and inputs.is_contiguous()
        and targets.is_contiguous()
    )
    assert not (inputs.data_ptr() % 16 or targets.data_ptr() % 16)
    assert inputs.tolist() == [[70004, 70005, 70006, 70007], [4, 5, 6, 7], [500, 501, 502, 503]]
    inputs.zero_()  # they are nobody else's
    assert targets.tolist() == [[70005, 70006, 70007, 70008], [5, 6, 7, 8], [501, 502, 503, 504]]
    assert batches.batch(np.array([[0, 1]]))[0].tolist() == [[4, 5, 6, 7]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", [window_batches.Mapped, window_batches.Resident])
def test_batches_in_flight_to_a_gpu_are_not_overwritten(two_sources, kind):
    cuda = torch.device("cuda")
    on_gpu, on_cpu = kind(two_sources, cuda), window_batches.Mapped(two_sources, CPU)
    busy, asked = torch.ones(4096, 4096, device=cuda), all_draws(*two_sources)[:, None]
    given = []
    for draws in asked:
        busy = busy @ busy / 4096  # the copies wait in line behind this
        given.append(on_gpu.batch(draws)[0])
    for draws, inputs in zip(asked, given, strict=True):
        assert torch.equal(inputs.cpu(), on_cpu.batch(draws)[0])


# Validation


@pytest.mark.parametrize(
    "processes, batch_size, max_windows, wanted", [(3, 2, 0, 11), (2, 5, 6, 6), (4, 1, 1, 1)]
)
def test_validation_gives_each_window_once_over_the_processes(
    tmp_path, processes, batch_size, max_windows, wanted
):
    source, firsts = opened(tmp_path, range(45)), []
    draws = window_order.eval_draws([source.num_windows], [1.0], max_windows=max_windows)
    for rank in range(processes):
        shared = {"batch_size": batch_size, "rank": rank, "num_processes": processes}
        for inputs, targets in window_batches.eval_batches(
            window_batches.Mapped([source], CPU), draws, **shared
        ):
            assert 0 < len(inputs) <= batch_size and (targets == inputs + 1).all()
            firsts += inputs[:, 0].tolist()
    assert sorted(firsts) == [4 * (i * source.num_windows // wanted) for i in range(wanted)]


@pytest.mark.parametrize(
    "num_windows, weights, max_windows, counts",
    [
        ([3, 0, 2], [1, 1, 5], 0, [3, 0, 2]),  # no limit
        ([1000, 1000], [0.7, 0.3], 10, [7, 3]),
        ([1000, 10], [1, 1], 100, [50, 10]),
        ([1000, 1000, 1000], [1, 1e-6, 0], 50, [50, 1, 1]),
    ],
)
def test_validation_of_a_mixture_follows_the_weights_spread_over_each_split(
    num_windows, weights, max_windows, counts
):
    draws = window_order.eval_draws(num_windows, weights, max_windows=max_windows)
    for source, (have, count) in enumerate(zip(num_windows, counts, strict=True)):
        assert drawn_from(source, draws.tolist()) == [i * have // count for i in range(count)]
    assert len(draws) == sum(counts)
