"""Iterables as data: the batches of an undisturbed run on any number of ranks and after resumes,
without reading what came before; mixtures; streamed data sets of Hugging Face.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from test_data_open import feeding, plan

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.opening import open_data

BATCH, ROOT = 16, Path(__file__).parent.parent
SLOW = pytest.mark.slow


READS: Counter[int] = Counter()  # by shard


class Again:
    """A shard whose iterators are new objects, and which keeps the position of the last one."""

    def __init__(self, number: int, size: int, has_state: bool) -> None:
        self.number, self.size, self.at, self.begin = number, size, 0, 0
        if has_state:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "begin", state["at"])

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for at in range(begin, self.size):
            READS[self.number] += 1
            self.at = at + 1
            yield sample_of(self.number, at)


def sample_of(number: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(6.0) * (1 + number) + at % 7
    return (values / 10).sin(), torch.tensor(1000.0 * number + at)


def shards(count: int = 8, size: int = 50, has_state: bool = True, first: int = 0) -> list[Again]:
    return [Again(first + n, size + 3 * n, has_state) for n in range(count)]


def one(size: int = 500) -> Again:
    return Again(0, size, True)


def opened(seed: int = 0, **options: Any) -> Any:
    given = {"target": "test_data_iterables:shards", **options}
    if "mixture" in options:
        del given["target"]
    config = DataConfig(name="stream", **given)
    return open_data(config, seed=seed, global_batch_size=BATCH).train


def targets(stream: Any, first: int, steps: int, ranks: int = 1, micro: Any = "auto") -> list[Any]:
    """For each step the targets of the global batch by position, and its hash."""
    found = []
    plans = [plan(BATCH, rank, ranks, micro_batch_size=micro) for rank in range(ranks)]
    for step in range(steps):
        values: dict[int, float] = {}
        total = 0
        for each in plans:
            for positions in each.positions(first + step * BATCH):
                batch = stream.read(positions)
                total += batch.hash
                values.update(zip(positions, batch.targets.tolist(), strict=True))
        found.append(([values[at] for at in sorted(values)], total))
    return found


@pytest.mark.parametrize("target", ["shards", "one"])
@pytest.mark.parametrize("has_state", [True, False])
def test_batches_are_the_same_on_any_ranks_and_after_any_resume(target, has_state):
    options: dict[str, Any] = {"target": f"test_data_iterables:{target}", "shuffle_buffer": 48}
    if target == "shards":
        options["arguments"] = {"has_state": has_state}
    whole = targets(opened(**options), 0, 60)
    assert targets(opened(**options, workers=3), 0, 60, ranks=4, micro=2) == whole
    stream, found = opened(**options), []
    for begin, end, ranks in [(0, 13, 4), (13, 14, 2), (14, 41, 1), (41, 60, 8)]:
        if begin:
            notes = json.loads(json.dumps(stream.notes_at(begin * BATCH)))
            stream = opened(**options)
            stream.load({"stream": notes})
        found += targets(stream, begin * BATCH, end - begin + 1, ranks, micro=2)[:-1]
    found += targets(stream, 59 * BATCH, 1)
    assert found[: len(whole)] == whole


def test_each_sample_of_a_lane_is_read_once_an_epoch_and_seeds_change_the_order():
    stream = opened(arguments={"count": 4, "size": 48}, shuffle_buffer=8)
    lane = [values[:4] for values, _ in targets(stream, 0, 24)]
    first = [value for values in lane for value in values]
    assert stream.lanes == 4
    assert sorted(first[:48]) == [float(at) for at in range(48)]
    assert first[:48] != sorted(first[:48])
    assert first[48:] != first[:48]
    assert sorted(first[48:96]) == sorted(first[:48])
    other = opened(seed=1, arguments={"count": 4, "size": 48}, shuffle_buffer=8)
    assert targets(other, 0, 1) != targets(stream, 0, 1)
    plain = opened(arguments={"count": 4, "size": 48}, shuffle_buffer=0)
    assert targets(plain, 0, 1)[0][0][:4] == [0.0, 1.0, 2.0, 3.0]


def test_a_resume_reads_from_the_saved_position_and_a_rank_only_its_lanes():
    options: dict[str, Any] = {"arguments": {"size": 100_000}, "shuffle_buffer": 64}
    stream = opened(**options)
    whole = targets(stream, 0, 103)
    notes = stream.notes_at(100 * BATCH)
    assert sorted(notes) == [f"0/{lane}" for lane in range(8)]
    stream._pool.shutdown()  # windows that are read in advance count too
    stream = opened(**options)
    stream.load({"stream": notes})
    READS.clear()
    assert targets(stream, 100 * BATCH, 3) == whole[100:]
    stream._pool.shutdown()
    assert max(READS.values()) <= 4 * 8, "of windows of 8, and not from the beginning"
    stream = opened(**options)
    READS.clear()
    for positions in plan(BATCH, 1, 4, micro_batch_size=4).positions(0):
        stream.read(positions)
    assert sorted(READS) == [2, 3]


def test_a_mixture_is_read_in_proportion_and_resumed():
    sources = [
        {"target": "test_data_iterables:shards", "weight": 3},
        {"target": "test_data_iterables:shards", "arguments": {"first": 100}, "weight": 1},
    ]
    stream = opened(mixture=sources)
    whole = targets(stream, 0, 40)
    for values, _ in whole:
        assert sum(value >= 100_000 for value in values) == 4
    again = opened(mixture=sources)
    again.load({"stream": stream.notes_at(30 * BATCH)})
    assert targets(again, 30 * BATCH, 10, ranks=4) == whole[30:]


def test_feed_restarts_at_earlier_and_later_positions():
    stream = opened(shuffle_buffer=32)
    with feeding(stream, plan(BATCH)) as feed:
        hashes = [feed.next().sample_hash for _ in range(20)]
        feed.restart(plan(BATCH), 3 * BATCH)
        assert [feed.next().sample_hash for _ in range(17)] == hashes[3:]


def unreadable(kind: str) -> Any:
    if kind == "generator":
        return (sample_of(0, at) for at in range(9))
    if kind == "empty":
        return [Again(0, 0, True)]
    if kind == "late":
        return [Again(0, 3, True), Again(1, 0, True)]
    return [[object()]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arguments": {"kind": "generator"}},
            "returned generator, which cannot be iterated more than once",
        ),
        ({"arguments": {"kind": "empty"}}, "has no sample in its first shard"),
        ({"arguments": {"kind": "objects"}}, "its samples cannot be collated"),
        ({"epochs": 2}, "data=stream has no length: omit train.epochs or data.epochs=2"),
        ({"target": None}, "data=stream needs either data.target=package.module:build or"),
        ({"mixture": [{"path": "a", "weight": 1}], "target": None}, "form {target: A, weight: 1}"),
    ],
)
def test_iterables_that_cannot_be_resumed_are_refused(options, message):
    given = {"target": "test_data_iterables:unreadable", **options}
    with pytest.raises(ConfigError) as error:
        open_data(DataConfig(name="stream", **given), seed=0, global_batch_size=BATCH)
    assert message in str(error.value)


def test_lane_without_samples_is_named_and_saved_positions_are_checked():
    stream = opened(
        target="test_data_iterables:unreadable", arguments={"kind": "late"}, shuffle_buffer=2
    )
    with pytest.raises(ConfigError, match="has a lane of shards without samples"):
        targets(stream, 0, 1)
    with pytest.raises(ConfigError, match="the checkpoint's positions in streams"):
        opened().load({"stream": {"0/0": {"window": -1, "epoch": 0, "part": 0, "item": 0}}})


WORDS = (
    "model=custom",
    "model.target=torch.nn:Linear",
    "model.arguments={in_features: 6, out_features: 1}",
    "train.loss=test_custom_parts:mean_absolute",
    "data=stream",
    "data.target=test_data_iterables:shards",
    "data.shuffle_buffer=40",
    "data.workers=2",
    "checkpoint.every=3",
    "checkpoint.keep_last=0",
)


@pytest.mark.parametrize(
    "strategy",
    ["hybrid", *(pytest.param(each, marks=SLOW) for each in ("zero3", "ddp", "hybrid_full"))],
)
def test_three_resumes_on_other_meshes_keep_batches_and_losses(ranks, folder, strategy):
    ranks.run(1, jobs.run, str(folder), str(folder / "alone"), [*WORDS, "strategy=ddp"], 12)
    for world, each in [(4, strategy), (2, "zero3"), (1, "ddp"), (4, strategy)]:
        words = [*WORDS, f"strategy={each}", "train.micro_batch_size=2"]
        ranks.run(world, jobs.run, str(folder), str(folder / "run"), words, 3)
    alone, rows = jobs.rows(folder / "alone"), jobs.rows(folder / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row, other in zip(rows, alone, strict=True):
        assert row["data/batch_hash"] == other["data/batch_hash"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-10, abs=0)
    assert len({row["data/batch_hash"] for row in rows}) == 12
    manifest = folder / "run/checkpoints/step-00000003/manifest.json"
    notes = json.loads(manifest.read_text())["state"]["stream"]
    assert sorted(notes) == [f"0/{lane}" for lane in range(8)]
    assert max(note["source"]["at"] for note in notes.values()) > 0


def streamed(count: int = 4) -> Any:
    """A streamed data set of Hugging Face with one shard per entry of ``numbers``."""
    from datasets import IterableDataset

    def rows(numbers):
        for number in numbers:
            for at in range(60 + number):
                inputs, target = sample_of(number, at)
                yield {"input": inputs.tolist(), "target": target.item()}

    stream = IterableDataset.from_generator(rows, gen_kwargs={"numbers": list(range(count))})
    return stream.with_format("torch")


def buffered() -> Any:
    return streamed().shuffle(seed=0, buffer_size=10)


@pytest.mark.extras("datasets")
def test_streamed_data_sets_of_the_library_resume_from_their_state():
    options = {"target": "test_data_iterables:streamed", "shuffle_buffer": 40}
    stream = opened(**options)
    assert stream.lanes == 4
    whole = targets(stream, 0, 50)
    for step in (7, 30, 44):
        notes = json.loads(json.dumps(stream.notes_at(step * BATCH)))
        assert all(note["source"] for note in notes.values() if note["item"])
        assert any(note["item"] for note in notes.values())
        stream = opened(**options)
        stream.load({"stream": notes})
        assert targets(stream, step * BATCH, 50 - step, ranks=4) == whole[step:]
        stream = opened(**options)
        stream.load({"stream": notes})
        targets(stream, step * BATCH, 50 - step)
    with pytest.raises(ConfigError, match=r"omit it and set data.shuffle_buffer"):
        opened(target="test_data_iterables:buffered")


@SLOW
def test_survivors_read_the_lanes_of_a_failed_replica(tmp_path, monkeypatch):
    import test_replicas

    def command(folder, *words):
        small = [
            each for each in jobs.SMALL if not each.startswith(("data", "model.", "train.seq"))
        ]
        given = ["scheduler=constant", "optimizer.lr=1e-5", f"hydra.run.dir={folder}/run", *words]
        return [sys.executable, "-m", "parallel2d.train", *small, *WORDS, *given]

    monkeypatch.setattr(test_replicas, "command", command)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    words = ("strategy=ddp", "launch.max_restarts=3", "launch.nproc_per_node=4")
    with test_replicas.training(tmp_path, *words) as job:
        jobs.wait_for(lambda: test_replicas.last_row(tmp_path) > (5, 1))
        test_replicas.kill(job, 2)
        jobs.wait_for(lambda: test_replicas.last_row(tmp_path)[1] == 3)
        jobs.wait_for(lambda: test_replicas.last_row(tmp_path)[1] == 4)
    assert test_replicas.differs(tmp_path, "strategy=ddp") < 1e-10
