"""Token shards: the format, the windows, and an order that nothing but seed and position decides."""

import random

import numpy as np
import pytest

from pretrain import shards
from pretrain.errors import BadInput

# What windows() returned on the day the order was fixed: a change breaks every run that is resumed.
GOLDEN = [[3, 2, 6, 1, 7, 4, 5, 0, 10, 8, 9, 11], [2, 1, 7, 6, 0, 4, 5, 3, 10, 9, 11, 8]]


def write(folder, lengths=(50,), *, split="train", vocab_size=1000, shard_tokens=10**9, start=0):
    """Shards of documents that count up from ``start``; return their rows."""
    writer = shards.ShardWriter(folder, split, vocab_size, shard_tokens)
    for length in lengths:
        writer.add(np.arange(start, start + length, dtype=np.uint32), text_bytes=2 * length)
        start += length
    return writer.close()


def by_hand(path, ids, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype=dtype).tobytes())
    return path


def ids_of(folder, rows):
    dtypes = [shards.read_header(folder / row["file"])[1] for row in rows]
    parts = [np.fromfile(folder / r["file"], d, offset=1024) for r, d in zip(rows, dtypes, strict=True)]
    return np.concatenate(parts).tolist()


def order(**changes):
    known = {
        "num_windows": 10,
        "sequence_length": 4,
        "sequences_per_step": 4,
        "micro_batch_size": 2,
        "num_processes": 1,
        "seed": 1,
    }
    return shards.TrainOrder(**(known | changes))


def step_windows(given, step):
    micro_steps = given.sequences_per_step // (given.micro_batch_size * given.num_processes)
    parts = [given.windows(step, m, r) for m in range(micro_steps) for r in range(given.num_processes)]
    return np.concatenate(parts).tolist()


@pytest.mark.parametrize("vocab_size, itemsize, magic", [(65536, 2, (20240520, 1)), (65537, 4, (20240801, 7))])
def test_written_ids_are_read_back_in_llm_c_format(tmp_path, vocab_size, itemsize, magic):
    rows = write(tmp_path, [7, 5], vocab_size=vocab_size, start=vocab_size - 12)
    assert [(row["file"], row["tokens"], row["text_bytes"]) for row in rows] == [("train_000000.bin", 12, 24)]
    header = np.fromfile(tmp_path / "train_000000.bin", "<i4", count=256)
    assert (header[0], header[1], header[2]) == (*magic, 12)
    assert (tmp_path / "train_000000.bin").stat().st_size == 1024 + 12 * itemsize
    assert ids_of(tmp_path, rows) == list(range(vocab_size - 12, vocab_size))


def test_shards_are_cut_where_they_are_full_and_lose_nothing(tmp_path):
    rows = write(tmp_path, [3, 25, 0, 2], shard_tokens=10)
    assert [row["tokens"] for row in rows] == [10, 10, 10] and len({row["file"] for row in rows}) == 3
    assert sum(row["text_bytes"] for row in rows) == 60
    assert ids_of(tmp_path, rows) == list(range(30))
    assert sorted(path.name for path in tmp_path.iterdir()) == [row["file"] for row in rows]


def test_rows_hold_the_hash_of_each_file(tmp_path):
    (row,) = write(tmp_path)
    assert row["sha256"] == shards.files.sha256(tmp_path / row["file"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda b: b"\x00" + b[1:], "offset 0: magic"),
        (lambda b: b[:4] + b"\x09" + b[5:], "version 9: not a token shard"),
        (lambda b: b[:8] + b"\x09" + b[9:], "the header says 9 tokens"),
        (lambda b: b[:-2], "the header says 50 tokens"),
        (lambda b: b[:-1], "the header says 50 tokens"),
        (lambda b: b + b"\x00", "the header says 50 tokens"),
        (lambda b: b[:1023], "train_000000.bin: "),
        (lambda b: b[:1020], "fewer than a shard's header"),
        (lambda b: b"", "train_000000.bin: "),
    ],
    ids=["magic", "version", "count", "token", "byte", "longer", "odd-header", "header", "empty"],
)
def test_damaged_shard_is_refused_with_its_name(tmp_path, change, words):
    rows = write(tmp_path)
    path = tmp_path / rows[0]["file"]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadInput) as caught:
        shards.TokenShards(tmp_path, rows, 4, 1000)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_missing_shard_is_refused_with_its_name(tmp_path):
    rows = write(tmp_path)
    (tmp_path / "train_000000.bin").unlink()
    with pytest.raises(BadInput, match="train_000000.bin: cannot be read"):
        shards.TokenShards(tmp_path, rows, 4, 1000)


def test_shard_that_is_not_the_manifests_is_refused(tmp_path):
    rows = write(tmp_path)
    by_hand(tmp_path / rows[0]["file"], range(40))
    with pytest.raises(BadInput, match="has 40 tokens, manifest.json says 50"):
        shards.TokenShards(tmp_path, rows, 4, 1000)


@pytest.mark.parametrize("check_ids", [True, False])
@pytest.mark.parametrize("vocab_size, dtype, magic, version", [(50, "<u2", 20240520, 1), (50, "<u4", 20240801, 7)])
def test_id_beyond_the_vocabulary_is_refused_with_file_and_offset(
    tmp_path, check_ids, vocab_size, dtype, magic, version
):
    ids = [1] * 20
    ids[13] = 50
    by_hand(tmp_path / "train_0.bin", ids, magic, version, dtype)
    rows = [{"file": "train_0.bin", "tokens": 20}]
    with pytest.raises(BadInput) as caught:
        shards.TokenShards(tmp_path, rows, 4, vocab_size, check_ids=check_ids).batch(np.arange(4))
    itemsize = np.dtype(dtype).itemsize
    assert f"train_0.bin: offset {1024 + 13 * itemsize}: token 13 is id 50" in str(caught.value)


def test_the_last_id_of_the_vocabulary_is_accepted(tmp_path):
    by_hand(tmp_path / "train_0.bin", [49] * 20)
    opened = shards.TokenShards(tmp_path, [{"file": "train_0.bin", "tokens": 20}], 4, 50, check_ids=True)
    assert opened.batch(np.array([0]))[0].tolist() == [[49] * 4]


def test_every_token_is_a_target_once_and_no_window_crosses_a_shard(tmp_path):
    length = 4
    rows = write(tmp_path, [62], shard_tokens=21)  # shards of 21, 21 and 20 tokens: the last one drops its tail
    opened = shards.TokenShards(tmp_path, rows, length, 1000)
    inputs, targets = opened.batch(np.arange(opened.num_windows))
    assert inputs.dtype == targets.dtype == shards.torch.int64 and inputs.shape == (14, length)
    assert (inputs[:, 1:] == targets[:, :-1]).all() and (targets == inputs + 1).all()
    whole = [*range(1, 21), *range(22, 42), *range(43, 59)]
    assert sorted(targets.flatten().tolist()) == whole
    for start, end in zip(inputs[:, 0].tolist(), targets[:, -1].tolist(), strict=True):
        assert start // 21 == end // 21
    assert opened.num_tokens == 62


def test_shards_without_a_window_between_others_are_passed_over(tmp_path):
    parts = [range(9), [], range(100, 102), range(200, 209)]
    rows = []
    for number, part in enumerate(parts):
        by_hand(tmp_path / f"train_{number}.bin", list(part))
        rows.append({"file": f"train_{number}.bin", "tokens": len(part)})
    opened = shards.TokenShards(tmp_path, rows, 4, 1000)
    assert opened.batch(np.arange(opened.num_windows))[0][:, 0].tolist() == [0, 4, 200, 204]


def test_text_shorter_than_one_window_is_refused(tmp_path):
    rows = write(tmp_path, [4])
    with pytest.raises(BadInput, match=r"has 4 tokens, fewer than one window of sequence_length \+ 1 = 5"):
        shards.TokenShards(tmp_path, rows, 4, 1000)
    assert shards.TokenShards(tmp_path, rows, 3, 1000).num_windows == 1


def test_each_window_comes_once_an_epoch_however_the_step_is_shared():
    draw = random.Random(20240520)
    for _ in range(60):
        num_windows, length, seed = draw.randint(1, 90), draw.randint(1, 9), draw.randint(0, 2**31 - 1)
        sequences = draw.choice([1, 2, 4, 6, 8, 12, 24])
        block_tokens = draw.choice([1, length * 7, length * 16 + 1, 2**26])
        steps = -(-2 * num_windows // sequences)
        seen = None
        for processes in [n for n in (1, 2, 3, 4) if sequences % n == 0]:
            share = sequences // processes
            micro_batch = draw.choice([n for n in range(1, share + 1) if share % n == 0])
            given = shards.TrainOrder(num_windows, length, sequences, micro_batch, processes, seed, block_tokens)
            by_step = [step_windows(given, step) for step in range(steps)]
            if seen is None:
                seen = by_step
                stream = [window for step in by_step for window in step]
                for epoch in range(2):
                    assert sorted(stream[epoch * num_windows :][:num_windows]) == list(range(num_windows))
            assert [sorted(step) for step in by_step] == [sorted(step) for step in seen]


def test_order_stays_within_shuffle_blocks_and_differs_by_epoch_seed_and_block():
    def epoch(number, seed=1):
        given = order(num_windows=60, sequences_per_step=60, micro_batch_size=60, seed=seed, block_tokens=80)
        return step_windows(given, number)

    first = epoch(0)
    assert [sorted(first[i : i + 20]) for i in (0, 20, 40)] == [list(range(i, i + 20)) for i in (0, 20, 40)]
    assert len({tuple(epoch(0)), tuple(epoch(1)), tuple(epoch(0, seed=2))}) == 3
    assert [window - 20 for window in first[20:40]] != first[:20]


def test_order_never_changes_between_versions():
    given = order(num_windows=12, sequences_per_step=12, micro_batch_size=12, seed=1337, block_tokens=32)
    assert step_windows(given, 0) == GOLDEN[0]
    assert step_windows(given, 1) == GOLDEN[1]


@pytest.mark.parametrize(
    "processes, batch_size, max_tokens", [(1, 3, 0), (3, 2, 0), (2, 5, 24), (4, 1, 1), (3, 2, 10**9)]
)
def test_validation_gives_each_window_once_over_the_processes(tmp_path, processes, batch_size, max_tokens):
    opened = shards.TokenShards(tmp_path, write(tmp_path, [45]), 4, 1000)
    assert opened.num_windows == 11
    firsts = []
    for rank in range(processes):
        for inputs, targets in shards.eval_batches(
            opened, max_tokens=max_tokens, batch_size=batch_size, rank=rank, num_processes=processes
        ):
            assert 0 < len(inputs) <= batch_size and (targets == inputs + 1).all()
            firsts += inputs[:, 0].tolist()
    wanted = {0: 11, 24: 6, 1: 1, 10**9: 11}[max_tokens]
    assert sorted(firsts) == [4 * (i * opened.num_windows // wanted) for i in range(wanted)]


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        shards.describe_folder(tmp_path / "none")


def test_unfinished_manifest_is_not_read(tmp_path):
    (tmp_path / "manifest.json").write_text('{"complete": false, "splits": {}}')
    assert shards.read_manifest(tmp_path) is None
    with pytest.raises(BadInput, match="was not finished; run prepare_data.py"):
        shards.describe_folder(tmp_path)


def test_no_manifest_is_none(tmp_path):
    assert shards.read_manifest(tmp_path) is None


@pytest.mark.parametrize("body", [b"", b'{"complete": tr', b"[]", b"{}", b"\xff\xfe", b"7"])
def test_corrupt_manifest_is_refused_with_a_remedy(tmp_path, body):
    (tmp_path / "manifest.json").write_bytes(body)
    for read in (shards.read_manifest, shards.describe_folder):
        with pytest.raises(BadInput, match="manifest.json: not a manifest .*; delete the folder and prepare it again"):
            read(tmp_path)


def test_manifest_of_ours_is_returned(tmp_path):
    manifest = {"complete": True, "splits": {"train": write(tmp_path)}, "tokenizer": None}
    shards.files.write_json(tmp_path / "manifest.json", manifest)
    assert shards.describe_folder(tmp_path) == shards.read_manifest(tmp_path) == manifest


def test_folder_named_by_llm_c_is_read_without_a_manifest(tmp_path):
    by_hand(tmp_path / "fineweb_train_000002.bin", range(100, 109))
    by_hand(tmp_path / "fineweb_train_000001.bin", range(9))
    by_hand(tmp_path / "fineweb_val_000000.bin", range(500, 505))
    described = shards.describe_folder(tmp_path)
    assert described["complete"] and described["tokenizer"] is None
    assert [row["file"] for row in described["splits"]["train"]] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    train, held_out = (
        shards.TokenShards(tmp_path, described["splits"][split], 4, 1000, check_ids=True)
        for split in ("train", "validation")
    )
    assert train.batch(np.array([0, 3]))[1].tolist() == [[1, 2, 3, 4], [105, 106, 107, 108]]
    assert held_out.batch(np.array([0]))[0].tolist() == [[500, 501, 502, 503]]


@pytest.mark.parametrize("name, missing", [("a_train_0.bin", "validation"), ("a_val_0.bin", "train")])
def test_folder_without_a_split_says_which(tmp_path, name, missing):
    by_hand(tmp_path / name, range(9))
    with pytest.raises(BadInput, match=f"holds no {missing} shards"):
        shards.describe_folder(tmp_path)


def test_fingerprint_changes_with_contents_and_order_not_with_the_folder(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    rows = [write(folders[0], [30], shard_tokens=10), write(folders[1], [30], shard_tokens=10)]
    assert shards.fingerprint(rows[0]) == shards.fingerprint(rows[1])
    other = write(folders[2], [30], shard_tokens=10, start=1)
    assert len({shards.fingerprint(r) for r in (rows[0], other, rows[0][::-1], rows[0][:2])}) == 4
