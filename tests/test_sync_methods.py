"""What crosses the replicate axis, by every method: equal to a plain reference in one process, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import sync_runs

from parallel2d.sync.one_process import Method

EVERY_STEP = {
    "fp32": Method(),
    "bf16": Method(wire="bf16"),
    "int8": Method(wire="int8"),
}
DILOCO = {
    "exact": ({}, {}),
    "bf16": ({"wire": "bf16"}, {"wire": "bf16"}),
    "int8": ({"wire": "int8"}, {"wire": "int8"}),
    "int4": ({"wire": "int4"}, {"wire": "int4"}),
    "sparse": ({"wire": "sparse"}, {"wire": "sparse", "lr": 1.0, "momentum": 0.0}),
    "late": ({"delay": 2}, {"delay": 2, "mix": 0.5}),
    "mixed": (
        {"delay": 1, "mix": 0.25, "outer_lr": 0.5, "outer_momentum": 0.3},
        {"delay": 1, "mix": 0.25, "lr": 0.5, "momentum": 0.3},
    ),
}


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in found)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("wire", EVERY_STEP)
def test_every_wire_equals_its_reference(ranks, wire, sizes):
    replicas, shards = sizes
    strategy = "ddp" if shards == 1 else "hybrid"
    word = "auto" if wire == "fp32" else wire
    found = ranks.run(
        replicas * shards,
        sync_runs.run,
        {"replicate": replicas, "shard": shards},
        strategy,
        {"wire": word},
        steps=20,
    )
    expected = sync_runs.reference(EVERY_STEP[wire], replicas, steps=20, shards=shards)
    assert largest_difference(found[0]["parameters"], expected) < 1e-10


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("wire", ["auto", "bf16"])
def test_split_updates_equal_their_reference(ranks, wire, sizes):
    replicas, shards = sizes
    found = ranks.run(
        replicas * shards,
        sync_runs.run,
        {"replicate": replicas, "shard": shards},
        "hybrid_full",
        {"wire": wire},
        steps=20,
    )
    method = Method(wire="fp32" if wire == "auto" else wire, splits_updates=True)
    expected = sync_runs.reference(method, replicas, steps=20, shards=shards)
    assert largest_difference(found[0]["parameters"], expected) < 1e-10


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("case", DILOCO)
def test_diloco_equals_its_reference(ranks, case, sizes):
    replicas, shards = sizes
    sync, numbers = DILOCO[case]
    found = ranks.run(
        replicas * shards,
        sync_runs.run,
        {"replicate": replicas, "shard": shards},
        "ddp" if shards == 1 else "hybrid",
        {"name": "diloco", "every": 5, **sync},
        steps=17,
    )
    method = Method(name="diloco", every=5, **numbers)
    expected = sync_runs.reference(method, replicas, steps=17, shards=shards)
    assert largest_difference(found[0]["parameters"], expected) < 1e-10
