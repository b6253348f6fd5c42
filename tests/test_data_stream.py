"""Content of a sample: packing, padding, document boundaries, loss masks, mixtures, ends, and
hashes.
"""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import IGNORED, Batch, SampleHash, token_sequences
from parallel2d.training.data.packing import PackedSamples, PaddedSamples, Samples
from parallel2d.training.data.sample_order import MAXIMUM_PERIOD, Schedule
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.data.token_shards import ShardWriter, TokenSplit

END = 256
Documents = list[list[int]]


def write_split(
    folder: Path, shards: list[Documents], masks: list[list[list[int] | None]] | None = None
) -> TokenSplit:
    """Shards of documents (ids without the end id) as a split."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, documents in enumerate(shards):
        flags = masks[number] if masks is not None else [None] * len(documents)
        with ShardWriter(folder, f"train-{number:05d}", "<u2") as writer:
            # One at a time: the hardest case for the writer
            for document, mask in zip(documents, flags, strict=True):
                marked = None if mask is None else np.array([*mask, 1], np.uint8)
                writer.add([(np.array([*document, END], np.uint16), marked)])
            entries.append(writer.finish())
    return TokenSplit(folder, "<u2", entries)


def random_shards(generator: random.Random) -> list[Documents]:
    return [
        [
            [generator.randrange(256) for _ in range(generator.choice([1, 2, 5, 30, 70]))]
            for _ in range(generator.randint(1, 12))
        ]
        for _ in range(generator.randint(1, 4))
    ]


def read_all(
    samples: Samples, ids: bool = False
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    rows = []
    for index in range(len(samples)):
        inputs, targets, numbers = (np.full(samples.seq_len, -7, np.int64) for _ in range(3))
        samples.read(index, inputs, targets, numbers if ids else None)
        rows.append((inputs, targets, numbers))
    return rows


def packed_stream(
    split: TokenSplit, seq_len: int = 8, seed: int = 0, **options: object
) -> SampleStream:
    return SampleStream([PackedSamples(split, seq_len, END)], Schedule([1]), seed=seed, **options)


def test_packing_makes_each_token_a_target_exactly_once_across_documents_and_shards(tmp_path):
    generator = random.Random(1)
    for case in range(12):
        shards = random_shards(generator)
        documents = [[*document, END] for shard in shards for document in shard]
        flat = [token for document in documents for token in document]
        split = write_split(tmp_path / str(case), shards)
        rows = read_all(PackedSamples(split, generator.choice([1, 3, 8, 33]), END))
        valid = [targets != IGNORED for _, targets, _ in rows]
        pairs = list(zip(rows, valid, strict=True))
        assert split.tokens == len(flat)
        assert np.concatenate([row[1][mask] for row, mask in pairs]).tolist() == flat[1:]
        assert np.concatenate([row[0][mask] for row, mask in pairs]).tolist() == flat[:-1]
        assert all(mask.all() for mask in valid[:-1])
        assert set(rows[-1][0][~valid[-1]].tolist()) <= {END}


def test_intra_document_masking_numbers_documents_and_never_predicts_across_them(tmp_path):
    generator = random.Random(2)
    for case in range(12):
        shards = random_shards(generator)
        documents = [document for shard in shards for document in shard]
        lengths = [len(document) + 1 for document in documents]
        owner = np.repeat(np.arange(len(documents)), lengths)
        split = write_split(tmp_path / str(case), shards)
        seq_len = generator.choice([1, 4, 16, 50])
        plain = read_all(PackedSamples(split, seq_len, END))
        masked = read_all(PackedSamples(split, seq_len, END, True), ids=True)
        for row, (inputs, targets, ids) in enumerate(masked):
            np.testing.assert_array_equal(inputs, plain[row][0])
            here = owner[row * seq_len : (row + 1) * seq_len + 1]
            count = len(here) - 1
            np.testing.assert_array_equal(ids[:count], here[:-1] - here[0])
            expected = np.where(here[1:] == here[:-1], plain[row][1][:count], IGNORED)
            np.testing.assert_array_equal(targets[:count], expected)


def test_padded_samples_hold_one_document_each_cut_at_the_length(tmp_path):
    split = write_split(tmp_path, [[[1, 2, 3], [4]], [[5, 6, 7, 8, 9, 10]]])
    rows = read_all(PaddedSamples(split, 4, END), ids=True)
    assert [row[0].tolist() for row in rows] == [[1, 2, 3, END], [4, END, END, END], [5, 6, 7, 8]]
    targets = [[2, 3, END, IGNORED], [END, IGNORED, IGNORED, IGNORED], [6, 7, 8, 9]]
    assert [row[1].tolist() for row in rows] == targets
    assert rows[1][2].tolist() == [0, 1, 1, 1]
    assert split.documents_longer_than(6) == 1
    assert split.documents_longer_than(7) == 0


@pytest.mark.parametrize("kind", [PackedSamples, PaddedSamples])
def test_loss_mask_selects_targets(tmp_path: Path, kind: type) -> None:
    """Prompts (mask 0) are inputs and never targets; a shard without masks next to a shard with
    masks consists of targets only.
    """
    masks: list[list[list[int] | None]] = [[[0, 0, 1], None], [None]]
    split = write_split(tmp_path, [[[10, 11, 12], [13, 14]], [[15, 16]]], masks)
    targets = np.concatenate([row[1] for row in read_all(kind(split, 4, END))])
    found = set(targets.tolist()) - {IGNORED}
    assert {11}.isdisjoint(found)
    assert {12, 14, 16, END} <= found


def test_the_hash_tells_tokens_targets_positions_and_data_apart(tmp_path):
    generator = random.Random(4)
    shards = random_shards(generator)
    stream = packed_stream(write_split(tmp_path / "a", shards))
    size = len(stream)
    changed = [[list(document) for document in documents] for documents in shards]
    changed[0][0][0] ^= 1
    hashes = [
        stream.read([3]).hash,
        stream.read([4]).hash,
        stream.read([3 + size]).hash,
        packed_stream(write_split(tmp_path / "a", shards), seed=1).read([3]).hash,
        stream.read(list(range(size))).hash,
        packed_stream(write_split(tmp_path / "b", changed)).read(list(range(size))).hash,
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(value < 1 << 32 for value in hashes[:4])
    assert stream.read([3, None]).hash == stream.read([3]).hash


def test_sequence_hashes_equal_earlier_versions():
    """Histories of runs are compared by them."""
    inputs = np.arange(15, dtype=np.int64).reshape(3, 5) * 37
    targets = inputs + 1
    targets[1, 2:] = IGNORED
    found = SampleHash(token_sequences(5))(inputs, targets, np.array([0, 7, 2**40]))
    assert found.tolist() == [1216195562, 2252616011, 367690317]


def test_a_missing_position_has_weight_zero(tmp_path):
    stream = packed_stream(write_split(tmp_path, [[[1] * 100]]), intra_document_masking=True)
    batch = stream.read([None, 2, None])
    assert batch.document_ids is not None
    assert batch.targets[[0, 2]].eq(IGNORED).all()
    assert batch.inputs.min() >= 0
    assert batch.valid_tokens == 8
    nothing = stream.read([None, None])
    assert (nothing.hash, nothing.valid_tokens, nothing.inputs.shape) == (0, 0, (2, 8))


@pytest.mark.parametrize(
    ("policy", "batches", "missing", "repeated"),
    [("drop", 2, 0, 0), ("pad", 3, 2, 0), ("wrap", 3, 0, 2)],
)
def test_data_end_is_exact(tmp_path, policy, batches, missing, repeated):
    """13 samples in global batches of 5: dropped, padded with weight zero, or wrapped."""
    stream = packed_stream(write_split(tmp_path, [[list(range(13 * 8))]]), epochs=1, end=policy)
    assert (len(stream), stream.global_batches(5)) == (13, batches)
    ends = [stream.ends_before(first, 5) for first in range(0, 25, 5)]
    assert ends == [step >= batches for step in range(5)]
    read = stream.read(range(5 * batches))
    rows = [tuple(row) for row in read.inputs[read.targets.ne(IGNORED).any(1)].tolist()]
    assert len(rows) == 5 * batches - missing
    assert sum(count - 1 for count in Counter(rows).values()) == repeated


def test_a_shard_that_falls_out_of_the_open_maps_is_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr("parallel2d.training.data.token_shards._OPEN_FILES", 2)
    split = write_split(tmp_path, [[[number] * 9] for number in range(6)])
    stream = packed_stream(split, seq_len=5)
    first, again = (stream.read(range(len(stream))) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    assert split._array.cache_info().currsize <= 2


def test_mixture_weights_are_exact_in_every_window():
    generator = random.Random(5)
    for _ in range(40):
        weights = [float(generator.randint(1, 30)) for _ in range(generator.randint(1, 6))]
        schedule = Schedule(weights)
        chosen, local = schedule.locate(np.arange(3 * schedule.period))
        for component, weight in enumerate(schedule.weights):
            mine = chosen == component
            # each component is read in order, without a gap
            assert local[mine].tolist() == list(range(int(mine.sum())))
            before = np.concatenate([[0], np.cumsum(mine)])
            error = before - np.arange(len(before)) * weight / schedule.period
            assert error.max() - error.min() < 2  # any window: within 2 of its share
            assert np.abs(error).max() < 1 + 1e-9  # from the start: within 1
            whole = before[schedule.period :] - before[: -schedule.period]
            assert set(whole.tolist()) == {weight}  # any window of one period: exact


def test_a_mixture_reads_in_proportion_and_each_sample_once_per_own_epoch(tmp_path):
    tokens, schedule = list(range(200)), Schedule([0.25, 0.75])
    splits = [
        write_split(tmp_path / name, [[ids]]) for name, ids in (("a", tokens), ("b", [255] * 900))
    ]
    parts = [PackedSamples(split, 4, END) for split in splits]
    # The epoch of a mixture ends before the first repetition, here of the 50 samples of `a`.
    length = len(SampleStream(parts, schedule, seed=9, epochs=1, end="drop"))
    chosen, local = schedule.locate(np.arange(length + 1))
    assert (chosen[-1], local[-1]) == (0, 50)
    inputs = SampleStream(parts, schedule, seed=9).read(range(4 * 100)).inputs.tolist()
    mine = [tuple(row) for row in inputs if 255 not in row and row[0] != END]
    assert Counter(mine) == {tuple(tokens[begin : begin + 4]): 2 for begin in range(0, 200, 4)}
    assert [255 in row for row in inputs[:40]].count(False) == 10


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 0.0], "above 0"),
        ([1.0, -2.0], "above 0"),
        (["a"], "above 0"),
        ([0.123457, 1.0], f"at most {MAXIMUM_PERIOD}"),
    ],
)
def test_impossible_weights_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(weights)


def test_batch_moves_to_the_device_with_all_fields(tmp_path):
    split = write_split(tmp_path, [[[1] * 100]])
    batch = packed_stream(split, intra_document_masking=True).read([0, 1])
    moved = batch.to("meta", non_blocking=True)
    assert isinstance(moved, Batch)
    tensors = (moved.inputs, moved.targets, moved.document_ids)
    assert all(tensor.is_meta for tensor in tensors)
    assert (moved.hash, moved.valid_tokens) == (batch.hash, batch.valid_tokens)
