"""The model of time: links, collectives, failures. Published figures are the reference where they
exist.
"""

import functools

import pytest

from parallel2d.base.config import AXES, ClusterConfig, LinkConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.topology import Topology
from parallel2d.instruments.planner.layout_cost import JobCosts, LayoutCost, seconds_in_bf16
from parallel2d.instruments.planner.plan_text import summary
from parallel2d.parallel.cost.collectives import collective_seconds, placement_of, sent_bytes
from parallel2d.parallel.cost.step_time import (
    GroupSeconds,
    StepEstimate,
    StepSchedule,
    exchange_seconds,
    step_seconds,
)
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.sync.engine.buckets import fill_buckets

REPLICATE, SHARD = 0, 1


def placed(shape: MeshShape, dim: int, hosts: int):
    topology = Topology.equal_hosts(hosts, shape.world_size // hosts)
    return placement_of(shape.place(topology), AXES[dim], topology)


def leaving(shape: MeshShape, hosts: int, parameters: float = 1.0) -> float:
    """Bytes that a host sends per step, in units of the parameters, on gloo: two all-gathers and a
    reduce-scatter over the shard axis, an all-reduce over the replicas.
    """
    gathered = sent_bytes("all_gather", parameters, shape.shard, "cpu")
    scattered = sent_bytes("reduce_scatter", parameters, shape.shard, "cpu")
    reduced = sent_bytes("all_reduce", parameters / shape.shard, shape.replicate, "cpu")
    between = placed(shape, REPLICATE, hosts).groups_per_host * reduced
    return placed(shape, SHARD, hosts).groups_per_host * (2 * gathered + scattered) + between


@pytest.mark.parametrize(
    ("hosts", "shape", "measured"),
    [
        (2, MeshShape(2, 2), 1.0018),
        (2, MeshShape(1, 4), 3.0056),
        (2, MeshShape(4, 1), 1.5022),
        (4, MeshShape(4, 2), 1.505),
        (4, MeshShape(1, 8), 3.510),
        (4, MeshShape(8, 1), 1.754),
    ],
)
def test_predicted_bytes_of_a_host_equal_kernel_counters(hosts, shape, measured):
    # Counters of the uplinks of hosts with two ranks each, in units of the parameters, headers of
    # packets included.
    assert leaving(shape, hosts) == pytest.approx(measured, rel=0.006)
    assert leaving(shape, hosts) < measured


# 80 and 8 Gbit/s are 1e10 and 1e9 bytes per second.
CLUSTER = ClusterConfig(
    "test", inside_node=LinkConfig(80, 80, 2), between_nodes=LinkConfig(8, 8, 10)
)


def test_collective_time_has_bandwidth_and_latency_terms():
    inside = placed(MeshShape(4, 8), SHARD, 4)
    assert collective_seconds("all_gather", 1e9, inside, CLUSTER) == pytest.approx(0.1 + 7 * 2e-6)
    assert collective_seconds("all_reduce", 1e9, inside, CLUSTER) == pytest.approx(0.1 + 14 * 2e-6)
    # Eight groups share the link of a host; 3 steps between hosts.
    between = placed(MeshShape(4, 8), REPLICATE, 4)
    assert collective_seconds("all_gather", 1e9, between, CLUSTER) == pytest.approx(8 + 3 * 10e-6)
    # One ring through all: 3 steps between hosts, 28 inside them.
    flat = placed(MeshShape(1, 32), SHARD, 4)
    assert collective_seconds("reduce_scatter", 1e9, flat, CLUSTER) == pytest.approx(
        1 + 3 * 10e-6 + 28 * 2e-6
    )
    # A small all-reduce over many hosts uses a tree.
    many = placed(MeshShape(1024, 1), REPLICATE, 1024)
    tree = collective_seconds("all_reduce", 0, many, CLUSTER)
    assert tree == pytest.approx(2 * 10 * 10e-6)
    assert collective_seconds("all_gather", 0, many, CLUSTER) == pytest.approx(1023 * 10e-6)


def test_slower_direction_and_slower_link_bound_the_time():
    slow_up = ClusterConfig(
        "test", inside_node=LinkConfig(80, 80, 0), between_nodes=LinkConfig(4, 8, 0)
    )
    between = placed(MeshShape(4, 8), REPLICATE, 4)
    assert collective_seconds("all_gather", 1e9, between, slow_up) == pytest.approx(16)
    slow_inside = ClusterConfig(
        "test", inside_node=LinkConfig(1, 1, 0), between_nodes=LinkConfig(80, 80, 0)
    )
    flat = placed(MeshShape(1, 32), SHARD, 4)
    assert collective_seconds("all_gather", 1e9, flat, slow_inside) == pytest.approx(8)


def test_unknown_figures_give_no_time():
    unknown = ClusterConfig()
    assert collective_seconds("all_gather", 1, placed(MeshShape(4, 8), SHARD, 4), unknown) is None
    assert collective_seconds("all_gather", 1, placed(MeshShape(4, 1), SHARD, 4), unknown) == 0
    only_inside = ClusterConfig("test", inside_node=LinkConfig(80, 80, 2))
    between = placed(MeshShape(4, 8), REPLICATE, 4)
    assert collective_seconds("all_gather", 1, between, only_inside) is None


def group(
    forward=1.0, backward=2.0, gather=0.0, scatter=0.0, reduce=0.0, frees=True
) -> GroupSeconds:
    return GroupSeconds(forward, backward, gather, scatter, reduce, frees)


def schedule(
    accumulation=1, mode="reduce_scatter_only", shares=False, overlaps=True, tensor=0.0
) -> StepSchedule:
    return StepSchedule(accumulation, mode, shares, overlaps, tensor)


def test_overlapped_communication_takes_no_time():
    groups = [group(gather=0.5, scatter=0.5, reduce=0.5)] * 10
    found = step_seconds(groups, schedule(), update=0.25)
    assert found.compute == 30
    # The first gather of forward and of backward, and the last reduction.
    assert found.shard == pytest.approx(0.5 + 0.5 + 0.5)
    assert found.replicate == pytest.approx(0.5)
    assert found.total == pytest.approx(30 + 1.5 + 0.5 + 0.25)
    assert found.exposed_share == pytest.approx(2 / found.total)


def test_slow_link_bounds_the_step_time():
    # Each group takes 3 s on the link in forward and 6 s in backward.
    found = step_seconds([group(gather=3, scatter=3)] * 10, schedule(), update=0)
    assert found.total == pytest.approx(30 + 1 + 60, rel=0.05)
    # Replicas: 5 s for each of ten groups on a separate link.
    found = step_seconds([group(reduce=5)] * 10, schedule(), update=0)
    assert found.total == pytest.approx(10 + 2 + 50)
    assert found.replicate == pytest.approx(62 - 30)


def test_two_axes_share_the_bandwidth_of_a_link():
    groups = [group(gather=1, scatter=1, reduce=2)] * 8
    apart = step_seconds(groups, schedule(), update=0).total
    assert step_seconds(groups, schedule(shares=True), update=0).total > apart + 8


def test_all_gathers_are_exposed_once_without_resharding_and_each_without_overlap():
    freed = step_seconds([group(gather=4)] * 6, schedule(), update=0).shard
    kept = step_seconds([group(gather=4, frees=False)] * 6, schedule(), update=0).shard
    assert kept < freed
    # On CPU backward waits for each reduction too.
    found = step_seconds([group(1, 2, 3, 4)] * 3, schedule(overlaps=False), update=0)
    assert found.total == 3 * (1 + 2 + 3 + 3 + 4)


def test_accumulation_mode_sets_the_number_of_reductions():
    groups = [group(scatter=4, reduce=4)] * 5
    totals = {}
    for mode in ("full", "reduce_scatter_only", "none"):
        totals[mode] = step_seconds(groups, schedule(8, mode), update=0).total
    assert totals["full"] > totals["reduce_scatter_only"] > totals["none"]
    # Once per step the replicas' reductions, for any number of micro-batches.
    once = step_seconds(groups, schedule(1), update=0).replicate
    assert step_seconds(groups, schedule(8), update=0).replicate == pytest.approx(once)


def test_tensor_parallel_communication_is_always_exposed():
    plain = step_seconds([group()] * 3, schedule(4), update=0)
    found = step_seconds([group()] * 3, schedule(4, tensor=0.5), update=0)
    assert found.total == pytest.approx(plain.total + 2)


def test_diloco_sends_once_per_interval_and_overlaps_with_its_delay():
    assert exchange_seconds(60, step=1, every=30, fragments=1, delay=0) == 2
    # Three of them in 30 steps: each takes 20 s and hides 5 s.
    assert exchange_seconds(60, step=1, every=30, fragments=3, delay=5) == pytest.approx(1.5)
    assert exchange_seconds(60, step=5, every=30, fragments=3, delay=5) == 0


def test_a_bucket_starts_when_its_last_group_is_reduced():
    # Backward ends the last group first, so the first one completes the bucket of all three.
    early = [group(), group(), group(reduce=4)]
    late = [group(reduce=4), group(), group()]
    assert step_seconds(early, schedule(), update=0).replicate == pytest.approx(0)
    assert step_seconds(late, schedule(), update=0).replicate == pytest.approx(4)


@pytest.mark.parametrize(
    ("sizes", "kinds", "expected"),
    [
        ([1, 1, 1], "aaa", [[0, 1, 2]]),
        ([1, 1, 1, 1], "aabb", [[0, 1], [2, 3]]),
        ([3, 1, 9, 1], "aaaa", [[0, 1], [2], [3]]),
        ([], "", []),
    ],
)
def test_adjacent_groups_of_one_dtype_share_a_bucket(sizes, kinds, expected):
    assert fill_buckets(sizes, list(kinds), 4) == expected


def test_the_first_and_the_last_bucket_are_small():
    mib = 2**20
    assert fill_buckets([mib] * 7, "a" * 7, 4 * mib) == [[0], [1, 2, 3, 4], [5], [6]]


# Estimates of a job

SMALL = (
    "model.dim=512",
    "model.n_layers=4",
    "model.hidden_dim=1024",
    "train.seq_len=256",
    "precision=bf16",
)
FOUR_NODES = ("cluster=h100_100g", "cluster.nodes=4", "train.global_batch_size=64")
HYBRID = (*FOUR_NODES, "strategy=hybrid")
TENSOR = (*FOUR_NODES, "strategy=zero3", "mesh.tensor=2", "train.micro_batch_size=1")


@functools.cache
def cost(*words: str) -> LayoutCost:
    config = compose([*SMALL, *words]).config
    return JobCosts(config).cost(config)


def estimate(*words: str) -> StepEstimate:
    found = cost(*words).time
    assert isinstance(found, StepEstimate), found
    return found


def test_throughput_and_mfu_follow_from_step_time():
    found = estimate(*HYBRID)
    seconds = found.seconds
    parts = seconds.compute + seconds.tensor + seconds.shard + seconds.replicate + seconds.update
    assert parts == pytest.approx(seconds.total)
    assert found.samples_per_s == pytest.approx(64 / seconds.total)
    flops = cost(*HYBRID).flops
    assert flops is not None
    assert found.mfu == pytest.approx(flops * 64 / seconds.total / (32 * 989.4e12))
    half = estimate(*HYBRID, "cluster.device.efficiency=0.183")
    assert half.seconds.compute == pytest.approx(2 * seconds.compute)


@pytest.mark.slow
def test_network_and_sent_bytes_set_the_exposed_time():
    hybrid = estimate(*HYBRID).seconds
    flat = estimate(*FOUR_NODES, "strategy=zero3").seconds
    assert flat.total > 1.5 * hybrid.total
    assert hybrid.compute == pytest.approx(flat.compute)
    faster = estimate("cluster=h100", *HYBRID[1:]).seconds
    assert hybrid.exposed_share > faster.exposed_share
    narrow = estimate(*HYBRID, "sync.wire=bf16").seconds.replicate
    rare = estimate(*HYBRID, "sync=diloco").seconds.replicate
    assert hybrid.replicate > narrow > rare > 0
    delayed = ("sync=diloco", "sync.every=100", "sync.fragments=4", "sync.delay=25")
    assert estimate(*HYBRID, *delayed).seconds.replicate == 0
    # Split updates send as much and hide half of the traffic; a quarter of the rows is updated.
    split = estimate(*FOUR_NODES, "strategy=hybrid_full").seconds
    assert split.replicate > hybrid.replicate
    assert split.update == pytest.approx(hybrid.update / 4, rel=0.01)


def test_recomputation_costs_a_third_of_compute():
    plain = estimate(*HYBRID).seconds.compute
    full = (*HYBRID, "activation_checkpointing=full")
    assert estimate(*full).seconds.compute == pytest.approx(plain * 4 / 3)
    every_second = estimate(*full, "activation_checkpointing.every=2").seconds.compute
    assert every_second == pytest.approx(plain * 7 / 6)


def test_assumed_efficiency_is_reported():
    words = ("cluster=h100", "precision=fp32")
    lines = summary(compose([*SMALL, *words]).config, cost(*words))
    assert "50% of the fp32 peak of 67 TFLOP/s is assumed" in "\n".join(lines)
    in_bf16 = seconds_in_bf16(compose([*SMALL, *words]).config)
    assert in_bf16 == cost("cluster=h100", "precision=bf16").time.seconds.total


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        ((), "cluster.device.peak_tflops.bf16 is not known"),
        (
            ("cluster=commodity",),
            (
                "the share of its peak that GeForce RTX 4090 reaches in bf16 is not known: give "
                "cluster.device.efficiency"
            ),
        ),
        (
            ("cluster=h100", "cluster.device.memory_gb_per_s=null"),
            "cluster.device.memory_gb_per_s is not known",
        ),
        (
            (
                "cluster=h100",
                "cluster.inside_node={up_gbit: null, down_gbit: null, latency_us: null}",
            ),
            "cluster.inside_node is not known",
        ),
    ],
)
def test_unknown_figures_are_named(words, lacking):
    found = cost(*words)
    assert found.time == lacking
    assert f"time        not known: {lacking}" in summary(compose([*SMALL, *words]).config, found)


@pytest.mark.slow
def test_every_collective_of_the_tensor_axis_costs_its_latency():
    alone = estimate(*TENSOR).seconds.tensor
    waiting = estimate(*TENSOR, "cluster.inside_node.latency_us=103.4").seconds.tensor
    # 100 microseconds more for each pass around a ring of two.
    passes = (waiting - alone) / 100e-6
    assert passes == pytest.approx(round(passes))
    assert passes > 4 * 10  # four of them at least in each block, forward and backward
    twice = (*TENSOR, "train.global_batch_size=128")
    waiting = estimate(*twice, "cluster.inside_node.latency_us=103.4").seconds.tensor
    assert waiting - estimate(*twice).seconds.tensor == pytest.approx(2 * passes * 100e-6)
    # On CPU a reduce-scatter costs an all-reduce.
    on_cpu = cost(*TENSOR, "cluster.device.type=cpu").moved["comm/tensor/bytes"]
    assert on_cpu > 1.2 * cost(*TENSOR).moved["comm/tensor/bytes"]
