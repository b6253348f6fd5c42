"""Axis sizes, placement on hosts, refusals. All tests but one, on real ranks, need no process
group.
"""

import pytest
import torch

from parallel2d.base.config import STRATEGY_NAMES
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.mesh import Topology, build_mesh
from parallel2d.parallel.mesh_sizes import MeshSpec, check_placement, draw_mesh


def resolve(strategy="hybrid", hosts=(4,), **sizes):
    topology = Topology(tuple(f"host{i}" for i, n in enumerate(hosts) for _ in range(n)))
    shape = MeshSpec(**sizes).resolve(strategy, topology)
    return (shape.replicate, shape.shard, shape.tensor), shape, topology


@pytest.mark.parametrize(
    ("strategy", "hosts", "sizes", "expected"),
    [
        ("ddp", (4,), {}, (4, 1, 1)),
        ("ddp", (4,), {"tensor": 2}, (2, 1, 2)),
        ("zero2", (4, 4), {}, (1, 8, 1)),
        ("zero3", (4, 4), {"tensor": 4}, (1, 2, 4)),
        ("hybrid", (8, 8, 8), {}, (3, 8, 1)),
        ("hybrid", (8, 8), {"tensor": 2}, (2, 4, 2)),
        ("hybrid", (8, 8), {"replicate": 4}, (4, 4, 1)),
        ("hybrid", (8, 8), {"shard": 2}, (8, 2, 1)),
        ("hybrid", (4, 2), {}, (3, 2, 1)),
        ("hybrid", (1, 1), {}, (2, 1, 1)),
        ("hybrid", (1,), {}, (1, 1, 1)),
        ("hybrid", (2,), {}, (1, 2, 1)),
        ("hybrid", (7,), {}, (1, 7, 1)),
        ("hybrid", (8,), {}, (2, 4, 1)),
        ("hybrid_zero2", (6,), {}, (2, 3, 1)),
        ("hybrid", (9,), {}, (3, 3, 1)),
    ],
)
def test_sizes_follow_from_strategy_and_topology(strategy, hosts, sizes, expected):
    assert resolve(strategy, hosts, **sizes)[0] == expected


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("world", range(1, 17))
def test_auto_fills_every_world(strategy, world):
    sizes, shape, topology = resolve(strategy, (world,))
    assert sizes[0] * sizes[1] * sizes[2] == world
    assert sorted(shape.place(topology).flatten().tolist()) == list(range(world))


def test_single_host_split_is_logged():
    assert "2 replicas of 2" in resolve()[1].notes[0]
    assert "single replica" in resolve(hosts=(3,))[1].notes[0]
    assert resolve(hosts=(4, 4))[1].notes == ()


@pytest.mark.parametrize(
    ("strategy", "hosts", "sizes", "words"),
    [
        ("hybrid", (4,), {"tensor": 3}, ["mesh.tensor=3", "4 ranks", "1, 2 or 4"]),
        ("hybrid", (4,), {"shard": 3}, ["mesh.shard=3", "must be 4", "2 x 2"]),
        ("hybrid", (4,), {"replicate": 3}, ["mesh.replicate=3", "must be 4", "2 x 2"]),
        ("zero2", (4,), {"replicate": 4}, ["strategy=zero2", "hybrid_zero2"]),
        (
            "hybrid",
            (8,),
            {"replicate": 2, "shard": 2},
            ["mesh.replicate=2", "mesh.shard=2", "must be 8", "2 x 4"],
        ),
        ("hybrid", (4,), {"shard": 0}, ["mesh.shard=0", "at least 1"]),
        ("hybrid", (4,), {"shard": "two"}, ["mesh.shard=two", "auto"]),
        ("ddp", (4,), {"shard": 2}, ["strategy=ddp", "mesh.shard=2", "hybrid_zero2"]),
        ("zero3", (4,), {"replicate": 2}, ["strategy=zero3", "mesh.replicate=2", "hybrid"]),
        ("ddp", (4,), {"replicate": 2}, ["must be 4"]),
        ("hybrid", (3, 3), {"tensor": 2}, ["mesh.tensor=2", "every host"]),
    ],
)
def test_impossible_mesh_sizes_give_one_error_with_possible_sizes(strategy, hosts, sizes, words):
    with pytest.raises(ConfigError) as error:
        resolve(strategy, hosts, **sizes)
    assert all(word in str(error.value) for word in words), error.value


def test_hosts_stay_together_for_any_order_of_ranks():
    topology = Topology(("a", "b", "a", "b"))
    shape = MeshSpec().resolve("hybrid", topology)
    assert shape.place(topology).squeeze(3).squeeze(2).tolist() == [[0, 2], [1, 3]]
    assert check_placement(shape.place(topology), topology, False) == []


def test_a_transposed_mesh_is_refused_with_the_numbers():
    topology = Topology(("a", "a", "b", "b"))
    transposed = torch.tensor([[[[0]], [[2]]], [[[1]], [[3]]]])
    with pytest.raises(ConfigError) as error:
        check_placement(transposed, topology, False)
    for word in ("mesh.shard=2", "[0, 2]", "1 on a", "1 on b", "4 times", "allow_cross_node=true"):
        assert word in str(error.value)
    assert "ranks [0, 2] crosses hosts" in check_placement(transposed, topology, True)[0]
    # A tensor group across hosts is refused too.
    with pytest.raises(ConfigError, match="mesh.tensor=2"):
        check_placement(torch.tensor([[[[0, 2]]], [[[1, 3]]]]), topology, False)


def test_shard_group_across_hosts_is_logged_and_straddling_is_refused():
    _, shape, topology = resolve("zero3", (2, 2))
    assert "uses the slow link" in check_placement(shape.place(topology), topology, False)[0]

    _, shape, topology = resolve("hybrid", (3, 3), shard=2)
    with pytest.raises(ConfigError, match=r"1 on host0.*fit inside one host of 3"):
        check_placement(shape.place(topology), topology, False)


def test_mesh_picture_shows_the_position_of_each_rank():
    _, shape, topology = resolve("hybrid", (4, 4), tensor=2)
    assert draw_mesh(shape.place(topology), topology).splitlines() == [
        "  replica 0  [(0 1) (2 3)]  on host0",
        "  replica 1  [(4 5) (6 7)]  on host1",
    ]
    assert len(draw_mesh(torch.zeros(500, 8, 1, 1, dtype=torch.int64), topology).splitlines()) == 10


def _axes(host_ids):
    import torch.distributed as dist

    from parallel2d.parallel.mesh import data_coordinate

    topology = Topology.gather(host_ids[dist.get_rank()] if host_ids else None)
    mesh = build_mesh(MeshSpec(), "hybrid", topology=topology)
    return mesh.mesh_dim_names, mesh.mesh.tolist(), data_coordinate(mesh), len(set(topology.hosts))


def test_topology_is_gathered_from_the_ranks(ranks):
    assert ranks.run(4, _axes, None)[0] == (("replicate", "shard"), [[0, 1], [2, 3]], 0, 1)
    answers = ranks.run(4, _axes, ["x", "y", "x", "y"])
    assert answers[0][1] == [[0, 2], [1, 3]]
    assert [answer[2] for answer in answers] == [0, 2, 1, 3]
