"""The model of time against throughput that others have published, and how its estimates of a job hang together."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict

import pytest

from parallel2d.config.composition import compose
from parallel2d.cost.step_estimate import StepEstimate
from parallel2d.planner.cost_summary import summary
from parallel2d.planner.layout_cost import LayoutCost, cost_of
from tools.bench.published_steps import ROWS, compare

SMALL = (
    "model.dim=512",
    "model.n_layers=4",
    "model.hidden_dim=1024",
    "train.seq_len=256",
    "plan.verify=false",
    "precision=bf16",
)


@functools.cache
def cost(*words: str) -> LayoutCost:
    composition = compose([*SMALL, *words])
    assert composition is not None
    return cost_of(composition.config)


def estimate(*words: str) -> StepEstimate:
    found = cost(*words).time
    assert isinstance(found, StepEstimate), found
    return found


@pytest.mark.slow
def test_published_throughput():
    compared = [compare(row) for row in ROWS]
    errors = [abs(each.error) for each in compared]
    assert statistics.median(errors) < 0.15
    assert max(errors) < 0.35
    # From one layout or number of ranks to another, inside one source.
    by_source = defaultdict(list)
    for each in compared:
        by_source[each.row.source].append(1 + each.error)
    for factors in by_source.values():
        assert max(factors) / min(factors) < 1.10


FOUR_NODES = ("cluster=h100_100g", "cluster.nodes=4", "train.global_batch_size=64")


def test_throughput_mfu_and_step_time_are_one_figure():
    found = estimate(*FOUR_NODES)
    seconds = found.seconds
    parts = seconds.compute + seconds.tensor + seconds.shard + seconds.replicate + seconds.update
    assert parts == pytest.approx(seconds.total)
    assert found.samples_per_s == pytest.approx(64 / seconds.total)
    flops = cost(*FOUR_NODES).flops
    assert flops is not None
    assert found.mfu == pytest.approx(flops * 64 / seconds.total / (32 * 989.4e12))


def test_hybrid_beats_flat_sharding_where_the_network_is_slow():
    hybrid = estimate(*FOUR_NODES, "strategy=hybrid").seconds
    flat = estimate(*FOUR_NODES, "strategy=zero3").seconds
    assert flat.total > 1.5 * hybrid.total
    assert hybrid.compute == pytest.approx(flat.compute)


def test_a_faster_network_exposes_less():
    waits = [
        estimate(f"cluster=h100{kind}", *FOUR_NODES[1:]).seconds.exposed_share
        for kind in ("_100g", "_400g", "")
    ]
    assert waits[0] > waits[1] > waits[2]


def test_sync_methods_that_send_less_expose_less():
    plain = estimate(*FOUR_NODES).seconds.replicate
    narrow = estimate(*FOUR_NODES, "sync.wire=bf16").seconds.replicate
    rare = estimate(*FOUR_NODES, "sync=diloco").seconds.replicate
    assert plain > narrow > rare > 0
    delayed = ("sync=diloco", "sync.every=100", "sync.fragments=4", "sync.delay=25")
    assert estimate(*FOUR_NODES, *delayed).seconds.replicate == 0


def test_split_updates_send_as_much_and_hide_half_of_it():
    split = estimate(*FOUR_NODES, "strategy=hybrid_full").seconds
    whole = estimate(*FOUR_NODES, "strategy=hybrid").seconds
    assert split.replicate > whole.replicate
    # A quarter of the rows is updated.
    assert split.update == pytest.approx(whole.update / 4, rel=0.01)


def test_recomputation_costs_a_third_of_compute():
    plain = estimate(*FOUR_NODES).seconds.compute
    assert estimate(*FOUR_NODES, "activation_checkpointing=full").seconds.compute == pytest.approx(
        plain * 4 / 3
    )
    every_second = ("activation_checkpointing=full", "activation_checkpointing.every=2")
    assert estimate(*FOUR_NODES, *every_second).seconds.compute == pytest.approx(plain * 7 / 6)


def test_failures_of_nodes_decide_how_often_to_save():
    few = estimate(*FOUR_NODES, "plan.save_s=10").saving
    many = estimate(
        "cluster=h100", "cluster.nodes=64", "train.global_batch_size=512", "plan.save_s=10"
    ).saving
    assert few is not None
    assert many is not None
    # Sixteen times the nodes: four times as often.
    assert few.interval_s == pytest.approx(4 * many.interval_s)
    assert 1 > few.goodput > many.goodput > 0.9
    assert estimate(*FOUR_NODES).saving is None


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        ((), "cluster.device.peak_tflops.bf16 is not known"),
        (("cluster=commodity",), "what share of its peak GeForce RTX 4090 reaches in bf16 is not known: give plan.efficiency"),
        (("cluster=h100", "precision=fp32"), "what share of its peak H100 SXM 80 GB reaches in fp32 is not known: give plan.efficiency"),
        (("cluster=h100", "cluster.device.memory_gb_per_s=null"), "cluster.device.memory_gb_per_s is not known"),
        (
            ("cluster=h100", "cluster.inside_node={up_gbit: null, down_gbit: null, latency_us: null}"),
            "cluster.inside_node is not known",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_instead_of_guessed(words, lacking):
    composition = compose([*SMALL, *words])
    assert composition is not None
    planned = cost_of(composition.config)
    assert planned.time == lacking
    assert f"time        not known: {lacking}" in summary(composition.config, planned)


TENSOR = (*FOUR_NODES, "strategy=zero3", "mesh.tensor=2", "train.micro_batch_size=1")


@pytest.mark.slow
def test_every_collective_of_the_tensor_axis_costs_its_latency():
    alone = estimate(*TENSOR).seconds.tensor
    waiting = estimate(*TENSOR, "cluster.inside_node.latency_us=103.4").seconds.tensor
    # 100 microseconds more for each time that a ring of two is gone round.
    passes = (waiting - alone) / 100e-6
    assert passes == pytest.approx(round(passes))
    assert passes > 4 * 10  # four of them at least in each block, forward and backward
    # Twice the micro-batches: twice as many.
    halves = ("train.global_batch_size=128",)
    twice = estimate(*TENSOR, *halves, "cluster.inside_node.latency_us=103.4").seconds.tensor
    assert twice - estimate(*TENSOR, *halves).seconds.tensor == pytest.approx(2 * passes * 100e-6)


def test_the_bytes_of_a_tensor_axis_are_those_of_the_planned_device():
    on_gpu = cost(*TENSOR).moved["comm/tensor/bytes"]
    on_cpu = cost(*TENSOR, "cluster.device.type=cpu").moved["comm/tensor/bytes"]
    # On CPU a reduce-scatter costs an all-reduce.
    assert on_cpu > 1.2 * on_gpu


def test_only_linear_layers_of_blocks_are_as_fast_as_float8():
    words = (*FOUR_NODES, "plan.efficiency=0.4", "compile=block")
    narrow = estimate(*words, "precision.float8=tensorwise").seconds.compute
    known = cost(*words)
    flops = known.flops
    assert flops is not None
    layers, sizes = 4, 2 * 512 * 512 + 2 * 512 * key_rows() + 3 * 512 * 1024
    in_float8 = 6 * 256 * layers * sizes
    assert in_float8 < 0.9 * flops
    # 64 samples on 32 ranks; the rest runs in bf16 as compiled bf16 does.
    seconds = 2 * (in_float8 / (0.4 * 1978.9e12) + (flops - in_float8) / (0.366 * 989.4e12))
    assert narrow == pytest.approx(seconds, rel=1e-6)


def key_rows() -> int:
    """Rows of the key's weight."""
    composition = compose([*SMALL])
    assert composition is not None
    model = composition.config.model
    return model.dim // model.n_heads * model.n_kv_heads


def test_a_given_efficiency_makes_an_estimate():
    found = estimate("cluster=commodity", "plan.efficiency=0.5")
    half = estimate("cluster=commodity", "plan.efficiency=0.25")
    assert half.seconds.compute == pytest.approx(2 * found.seconds.compute)
