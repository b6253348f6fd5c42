"""Opening data from a configuration, the cache that processes share, and the feed that reads ahead."""

import contextlib
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.data import main
from parallel2d.training.data.feed import BatchFeed, BatchPlan, EndOfData
from parallel2d.training.data.opening import OpenData, open_data
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.data.token_shards import ShardWriter
from parallel2d.training.loss.embedding_errors import embedding_errors_named


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallel2d"


def text_config(tmp_path: Path, documents: int = 80, **options: Any) -> DataConfig:
    path = tmp_path / "in.jsonl"
    if not path.exists():
        rows = [json.dumps({"text": f"text {number} " * 9}) for number in range(documents)]
        path.write_text("\n".join(rows) + "\n")
    return DataConfig(name="text", path=str(path), **options)


def text(tmp_path: Path, seed: int = 0, seq_len: int = 16, **options: Any) -> OpenData:
    return open_data(text_config(tmp_path, **options), seq_len=seq_len, seed=seed)


def prepared(tmp_path: Path, name: str, texts: list[str], *words: str) -> str:
    source = tmp_path / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    assert main(["prepare", str(source), "--output", str(tmp_path / name), *words]) == 0
    return str(tmp_path / name)


def plan(batch: int = 8, rank: int = 0, ranks: int = 1, **options: Any) -> BatchPlan:
    options.setdefault("micro_batch_size", "auto")
    return BatchPlan(global_batch_size=batch, data_rank=rank, data_ranks=ranks, **options)


@contextlib.contextmanager
def feeding(stream: SampleStream, batches: BatchPlan, **options: Any) -> Iterator[BatchFeed]:
    feed = BatchFeed(stream, batches, "cpu", **options)
    try:
        yield feed
    finally:
        feed.close()


def hashes(data: OpenData, steps: int, ranks: int, start: int = 0, **options: Any) -> list[int]:
    """The hash of each global batch, summed over ranks."""
    totals = [0] * steps
    for rank in range(ranks):
        with feeding(data.train, plan(12, rank, ranks, **options), start=start) as feed:
            for step in range(steps):
                totals[step] += feed.next().sample_hash
    return totals


def test_default_data_is_text_of_the_standard_library():
    data = open_data(DataConfig(), seq_len=128, seed=0)
    assert data.vocab_size == 257
    assert len(data.train) > 20_000
    assert data.validation is not None
    assert len(data.validation) > 50
    assert data.description.startswith("stdlib ")
    assert data.description.endswith(f"{len(data.train):,} samples of 128 tokens")
    found = bytes(data.train.read([5]).inputs[0].clamp(max=255).tolist()).decode(errors="replace")
    assert sum(character.isascii() for character in found) > 100


def test_data_fingerprint_covers_every_setting_that_selects_samples(tmp_path):
    reference = text(tmp_path).fingerprint
    # A checkpoint of an earlier version belongs to the same data.
    assert reference.startswith("4cdda736cbefe88ed999d59eb580fd75")
    found = {
        text(tmp_path, seq_len=17).fingerprint,
        text(tmp_path, seed=1).fingerprint,
        text(tmp_path, packing="padded").fingerprint,
        text(tmp_path, intra_document_masking=True).fingerprint,
        text(tmp_path, validation_fraction=0.3).fingerprint,
    }
    source = tmp_path / "in.jsonl"
    lines = source.read_text()
    source.write_text(lines + '{"text": "one more"}\n')
    found.add(text(tmp_path).fingerprint)
    assert len(found - {reference}) == 6
    (tmp_path / "elsewhere").mkdir()
    assert text(tmp_path / "elsewhere").fingerprint == reference


def test_global_batches_are_the_same_on_any_number_of_ranks_and_after_any_resume(tmp_path):
    data = text(tmp_path, seed=3)
    reference = hashes(data, 40, ranks=1)
    assert len(data.train) < 40 * 12  # more than one epoch
    assert len(set(reference)) == 40
    for ranks, micro in ((2, "auto"), (3, 2), (12, 1)):
        assert hashes(data, 40, ranks, micro_batch_size=micro) == reference
    assert hashes(data, 10, ranks=4, start=30 * 12) == reference[30:]
    assert hashes(data, 40, ranks=5, allow_padding=True) == reference
    assert hashes(text(tmp_path, seed=4), 40, ranks=1) != reference
    # Histories of runs are compared by these hashes, so they equal the hashes of earlier versions.
    assert reference[:3] == [30091671390, 22012458000, 29384867113]


def test_validation_reads_each_held_out_sample_once_and_in_the_same_order_for_every_seed(tmp_path):
    first, second = (text(tmp_path, seed, validation_fraction=0.4).validation for seed in (0, 1))
    whole = first.read(range(len(first)))
    assert torch.equal(whole.inputs, second.read(range(len(first))).inputs)
    with feeding(first, plan(8)) as feed:
        valid = sum(feed.next().valid_tokens for _ in range(-(-len(first) // 8)))
        for _ in range(2):
            with pytest.raises(EndOfData):
                feed.next()
    assert valid == whole.valid_tokens
    assert text(tmp_path, validation_fraction=0.0).validation is None


def test_prepared_folders_and_their_mixtures_are_read(tmp_path):
    folders = [
        prepared(tmp_path, name, [letter * 40 + f"{n:04d}" for n in range(100)])
        for name, letter in (("one", "x"), ("two", "y"))
    ]
    alone = open_data(DataConfig(name="tokens", path=folders[0]), seq_len=16, seed=0)
    assert alone.description.startswith(f"tokens {folders[0]} ")
    mixture = [{"path": folders[0], "weight": 3}, {"path": folders[1], "weight": 1}]
    config = DataConfig(name="tokens", mixture=mixture)
    data = open_data(config, seq_len=16, seed=0)
    letters = [set(row) for row in data.train.read(range(40)).inputs.tolist()]
    assert sum(ord("x") in row for row in letters) == 30
    assert sum(ord("y") in row for row in letters) == 10
    assert data.validation is not None
    assert data.fingerprint != alone.fingerprint
    assert data.description.startswith(f"3 {folders[0]} + 1 {folders[1]} ")
    manifest = tmp_path / "two" / "manifest.json"
    other = manifest.read_text().replace('"fingerprint": "bytes"', '"fingerprint": "other"')
    manifest.write_text(other)
    with pytest.raises(ConfigError, match=r"mixture has two tokenizers: .*one was prepared with"):
        open_data(config, seq_len=16, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "stdlib", "path": "x"}, "data.path=x has no effect with data=stdlib, only with"),
        ({"name": "tokens", "path": "nowhere"}, "nowhere is not a prepared folder"),
        ({"name": "tokens", "path": "x", "tokenizer": "y"}, "data.tokenizer=y has no effect with"),
        ({"name": "other"}, "data.name=other is not one of stdlib, text, chat, tokens"),
        ({"end": "pad"}, "data.end=pad has no effect without data.epochs"),
        (
            {"packing": "padded", "intra_document_masking": True},
            "no effect with data.packing=padded",
        ),
        ({"end_token": "</s>"}, "data.end_token=</s> has no meaning with data.tokenizer=bytes"),
        (
            {"validation_fraction": 0.9},
            "data.validation_fraction=0.9 must be a number, at least 0 and at most",
        ),
    ],
)
def test_wrong_data_configuration_gives_one_clear_message(options, message):
    with pytest.raises(ConfigError) as caught:
        open_data(DataConfig(**options), seq_len=16, seed=0)
    assert message in str(caught.value)


def test_data_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"fewer than one sample needs: train.seq_len=9999 \+ 1"):
        text(tmp_path, seq_len=9999)
    data = text(tmp_path, epochs=1)
    with pytest.raises(ConfigError, match=r"more than an epoch has: \d+ samples; data\.end=drop"):
        BatchFeed(data.train, plan(len(data.train) + 1), "cpu")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = r"file/cache is not writable \(Not a directory: .*set data.cache_dir"
    with pytest.raises(ConfigError, match=message):
        text(tmp_path, cache_dir=str(tmp_path / "file" / "cache"))


def test_a_damaged_cache_is_prepared_again(tmp_path, cache):
    reference = text(tmp_path)
    (folder,) = cache.iterdir()
    tokens = folder / "train-00000.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-10])
    again = text(tmp_path)
    assert again.fingerprint == reference.fingerprint
    assert torch.equal(again.train.read([7]).inputs, reference.train.read([7]).inputs)


def _in_child(function: Callable[[], Any]) -> tuple[int, int]:
    """Fork a child that writes the result of the function. Returns (process, read end)."""
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(function())
        except BaseException as error:
            answer = json.dumps(repr(error))
        os.write(start, answer.encode())
        os._exit(0)
    os.close(start)
    return child, end


def _answers(children: list[tuple[int, int]]) -> list[Any]:
    found = []
    for child, end in children:
        with os.fdopen(end) as file:
            answer = file.read()
        os.waitpid(child, 0)
        found.append(json.loads(answer) if answer else None)
    return found


def test_one_process_prepares_an_empty_cache_and_the_next_one_if_it_is_killed(tmp_path, cache):
    def killed() -> None:
        ShardWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
        text(tmp_path)

    log = tmp_path / "prepared"

    def opened() -> list[Any]:
        real = ShardWriter.finish

        def finish(writer: ShardWriter) -> dict[str, Any]:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return real(writer)

        ShardWriter.finish = finish  # type: ignore[method-assign]
        data = text(tmp_path)
        return [data.fingerprint, data.train.read([11]).hash]

    text_config(tmp_path)  # writes the file
    assert _answers([_in_child(killed)]) == [None]
    assert not list(cache.glob("*/manifest.json"))
    assert list(cache.glob("*/*.tmp"))
    answers = _answers([_in_child(opened) for _ in range(6)])
    assert len(answers[0]) == 2, answers[0]
    assert answers == [answers[0]] * 6
    assert len(set(log.read_text().split())) == 1
    assert not list(cache.glob("*/*.tmp"))


def test_feed_reads_the_configured_number_ahead_and_raises_worker_exceptions(tmp_path):
    data = text(tmp_path)
    real, read = data.train.read, threading.Semaphore(0)
    reads: list[Any] = []

    def counted(positions: Any, filler: int) -> Any:
        reads.append(positions)
        read.release()
        if len(reads) == 5:
            raise OSError("the disk is gone")
        return real(positions, filler)

    data.train.read = counted  # type: ignore[method-assign]
    with feeding(data.train, plan(8), ahead=2) as feed:
        for _ in range(3):  # two wait while one is read
            assert read.acquire(timeout=60)
        assert len(reads) == 3
        feed.next()
        assert read.acquire(timeout=60)
        assert len(reads) == 4
        for _ in range(3):
            feed.next()
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                feed.next()


def test_interrupt_while_waiting_for_the_feed_loses_no_batch(tmp_path):
    data = text(tmp_path)
    expected = hashes(data, 1, 1)
    real, go = data.train.read, threading.Event()

    def slow(positions: Any, filler: int) -> Any:
        go.wait()
        return real(positions, filler)

    data.train.read = slow  # type: ignore[method-assign]

    def interrupt(*_: object) -> None:
        go.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with feeding(data.train, plan(12)) as feed:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                feed.next()
            assert [feed.next().sample_hash] == expected
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_closed_feed_leaves_no_thread_and_no_descriptor(tmp_path):
    data = text(tmp_path)
    data.train.read([0])
    gc.collect()  # maps of earlier tests would be closed meanwhile
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        feed = BatchFeed(data.train, plan(8), "cpu")
        feed.next()
        feed.close()
        feed.close()
        with pytest.raises(RuntimeError, match="closed"):
            feed.next()
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files


def test_ids_beyond_the_vocabulary_are_named_before_they_reach_the_model(tmp_path):
    np.arange(400, dtype="<u2").tofile(tmp_path / "a.bin")
    config = DataConfig(name="bin", path=str(tmp_path / "a.bin"))
    stream = open_data(config, seed=0, seq_len=8).train
    stream.read([0])
    stream.check_ids(300)
    with pytest.raises(ConfigError, match=r"the token id 3\d\d, and the model's embedding has 300"):
        stream.read(range(40))


def test_embedding_with_too_few_rows_is_named():
    model = nn.ModuleDict({"positions": nn.Embedding(5, 2)})
    with pytest.raises(ConfigError, match="positions has 5 rows and was given the ids 0 to 7"):
        with embedding_errors_named(model):
            model["positions"](torch.arange(8))
    with pytest.raises(IndexError), embedding_errors_named(model):
        [][0]
