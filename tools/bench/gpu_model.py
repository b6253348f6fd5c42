"""Predict the step time, exposed communication and MFU of GPUs, from counts.

    python -m tools.bench.gpu_model [traced] [layouts] [published]

The formula is that of the planner (`parallel2d/parallel/cost/step_time.py`). It has the time of the
FLOPs at a share of the peak, the time of collectives as rings on links of the data sheet, and their
overlap. Each part of the script prints a table:

* traced: two predictions for one step of a small job. One uses the counts of the stream simulator
  (FLOPs, bytes of collectives, memory traffic of the optimizer), the other the planner's counts
  from shapes;
* layouts: Llama 8B on 8 and on 16 x 8 H100, and FSDP2 without parallel2d. The counts of a block are
  multiplied by the number of blocks;
* published: measurements of torchtitan that were not used to fit the efficiencies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from stream_simulator.step_trace import StepTrace, trace_of
from stream_simulator.training_jobs import LAYOUTS, SMALL

from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import JobCosts, LayoutCost
from parallel2d.parallel.cost.collectives import collective_seconds, sent_bytes
from parallel2d.parallel.cost.step_time import (
    GroupSeconds,
    StepEstimate,
    StepSchedule,
    StepSeconds,
    step_seconds,
)
from tools.bench.published_steps import PublishedRow, compare

# Data sheet figures are those of conf/cluster/h100.yaml and a100.yaml, which name their sources.
ASSUMPTIONS = (
    "device: the peak and memory bandwidth of the data sheet (conf/cluster); the share of the peak is "
    "`EFFICIENCIES` of step_time.py, fitted on the rows of tools/bench/published_steps.py",
    "forward has a third of the FLOPs, and a group has a part in proportion to its parameters",
    "collectives are rings at the bandwidth of the data sheet, with NCCL's latencies",
    "collectives do not slow compute down, and the host issues kernels before the device needs them",
    "the update reads and writes its tensors at the full memory bandwidth",
    "FSDP2 has the groups of parallel2d, and reduces each group over the replicas in one all-reduce",
)
TOLERANCE = 0.15
EFFICIENCY = 0.4  # of the traced job, in fp32. The comparison does not depend on the value.
TRACED = ("hybrid", "hybrid bf16")
TRACED_CLUSTER = (
    "cluster=h100",
    "cluster.nodes=2",
    "cluster.ranks_per_node=2",
    f"cluster.device.efficiency={EFFICIENCY}",
)

H100 = ("model=llama_8b", "cluster=h100", "train.seq_len=8192", "train.micro_batch_size=2")
COMMON = (*H100, "precision=bf16", "compile=block", "activation_checkpointing=selective")
ONE_BUCKET_PER_GROUP = "sync.bucket_mib=0.001"
# Name, nodes, overrides
PREDICTED: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("parallel2d zero3", 1, ("strategy=zero3",)),
    ("FSDP2", 1, ("strategy=zero3",)),
    ("parallel2d hybrid", 16, ("strategy=hybrid",)),
    ("FSDP2, two axes", 16, ("strategy=hybrid", ONE_BUCKET_PER_GROUP)),
    ("parallel2d zero3", 16, ("strategy=zero3",)),
    ("FSDP2", 16, ("strategy=zero3",)),
)

# torchtitan: benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (vanilla tensor parallelism, bf16),
# and docs/performance.md of 2024 (64 A100; the rows do not say if blocks are compiled).
_TENSOR = ("cluster=h100", "compile=block", "train.seq_len=8192", "mesh.tensor=8")
_A100 = ("cluster=a100", "compile=block", "train.micro_batch_size=1", "strategy=zero3")
ROWS = (
    PublishedRow(
        "70B, 256 H100, tensor 8", "torchtitan 2025",
        ("model=llama_70b", *_TENSOR, "activation_checkpointing=full", "train.micro_batch_size=16", "strategy=zero3"),
        32, 597.3, batch=2,
    ),
    PublishedRow(
        "8B, 64 H100, tensor 8", "torchtitan 2025",
        ("model=llama_8b", *_TENSOR, "activation_checkpointing=selective", "train.micro_batch_size=12", "strategy=zero3"),
        8, 4378, batch=1.5,
    ),
    PublishedRow(
        "8B, 64 A100", "torchtitan 2024",
        ("model=llama_8b", *_A100, "activation_checkpointing=selective", "train.seq_len=8192"), 8, 2973, batch=1,
    ),
    PublishedRow(
        "70B, 64 A100", "torchtitan 2024",
        ("model=llama_70b", *_A100, "activation_checkpointing=full", "train.seq_len=8192"), 8, 331, batch=1,
    ),
)  # fmt: skip
FLOAT8 = (
    "float8 rows of torchtitan (8B: 8,532 on 8 and 8,380 on 128 H100; 70B: 829 on 256) have no "
    "prediction: no efficiency is fitted for matrix products in 8-bit floats"
)


class Prediction(NamedTuple):
    """Two predictions for one job: from the counts of the trace, and from the planner's counts."""

    counted: StepSeconds
    planned: StepEstimate


def plan(words: tuple[str, ...]) -> tuple[LayoutCost, StepEstimate]:
    """Return the cost and the estimate of a job."""
    composition = compose([*words, "plan.verify=false"])
    assert composition is not None
    cost = JobCosts(composition.config).cost(composition.config)
    assert not isinstance(cost.time, str), cost.time
    return cost, cost.time


def counted_seconds(trace: StepTrace, words: tuple[str, ...]) -> StepSeconds:
    """Return the result of the planner's formula for the counts of a trace. The layout must be
    hybrid."""
    composition = compose(list(words))
    assert composition is not None
    config = composition.config
    cost, _ = plan(words)
    peak = getattr(config.cluster.device.peak_tflops, config.precision.param)
    memory = config.cluster.device.memory_gb_per_s
    assert peak is not None
    assert memory is not None
    compute = trace.flops / (peak * 1e12 * EFFICIENCY)
    groups = _groups_of(trace, compute, cost, words)
    places = cost.places
    schedule = StepSchedule(
        accumulation=1,
        during_accumulation="none",
        shares_link=places["shard"].is_inside == places["replicate"].is_inside,
        overlaps=True,
    )
    return step_seconds(groups, schedule, update=trace.update_bytes / (memory * 1e9))


def _groups_of(
    trace: StepTrace, compute: float, cost: LayoutCost, words: tuple[str, ...]
) -> list[GroupSeconds]:
    """Return the groups in forward order, from the collectives in the order of the step."""
    composition = compose(list(words))
    assert composition is not None
    cluster = composition.config.cluster

    def seconds(kind: str, whole: int, axis: str) -> float:
        place = cost.places[axis]
        found = collective_seconds(
            kind, sent_bytes(kind, whole, place.ranks, "cuda"), place, cluster
        )
        assert found is not None
        return found

    gathers = [each for each in trace.collectives if each.kind == "all_gather"]
    scatters = [each for each in trace.collectives if each.kind == "reduce_scatter"]
    shard_group = gathers[0].group
    count = len(scatters)
    whole = sum(each.whole_bytes for each in gathers[:count])
    again = [each.whole_bytes for each in gathers[count:]]
    groups = []
    for gather, scatter in zip(gathers[:count], reversed(scatters), strict=True):
        share = gather.whole_bytes / whole
        frees = gather.whole_bytes in again
        if frees:
            again.remove(gather.whole_bytes)
        group = GroupSeconds(
            forward=share * compute / 3,
            backward=share * compute * 2 / 3,
            gather=seconds("all_gather", gather.whole_bytes, "shard"),
            scatter=seconds("reduce_scatter", scatter.whole_bytes, "shard"),
            reduce=0.0,
            frees=frees,
        )
        groups.append(group)
    # A bucket starts after the reduce-scatter of its last group.
    ended = 0
    replicas = cost.places["replicate"].ranks
    for each in trace.collectives:
        ended += each.kind == "reduce_scatter"
        crosses = each.kind == "all_reduce" and each.ranks == replicas
        if crosses and each.group != shard_group and ended:
            last = count - ended
            reduce = seconds("all_reduce", each.whole_bytes, "replicate")
            groups[last] = groups[last]._replace(reduce=groups[last].reduce + reduce)
    return groups


def traced_prediction(name: str) -> Prediction:
    """Trace the job ``name`` in the stream simulator. Predict its step time from the trace and from
    shapes."""
    layout = LAYOUTS[name]
    words = (*SMALL, *layout.overrides, *TRACED_CLUSTER)
    _, planned = plan(words)
    return Prediction(counted_seconds(trace_of(layout), words), planned)


def print_traced() -> None:
    print("| traced job | from | compute, us | shard, us | replicate, us | update, us | step, us |")
    print("|---|---|---|---|---|---|---|")
    for name in TRACED:
        counted, planned = traced_prediction(name)
        for source, part in (("counts", counted), ("shapes", planned.seconds)):
            parts = (part.compute, part.shard, part.replicate, part.update, part.total)
            cells = " | ".join(f"{1e6 * each:.2f}" for each in parts)
            print(f"| {name} | {source} | {cells} |", flush=True)


def print_layouts() -> None:
    print("| GPUs | implementation | step, s | exposed | tokens/s/GPU | MFU |")
    print("|---|---|---|---|---|---|")
    for name, nodes, words in PREDICTED:
        ranks = 8 * nodes
        given = (f"cluster.nodes={nodes}", f"train.global_batch_size={2 * ranks}")
        _, estimate = plan((*COMMON, *words, *given))
        tokens = estimate.samples_per_s * 8192 / ranks
        seconds = estimate.seconds
        print(
            f"| {ranks} H100 | {name} | {seconds.total:.3f} | {seconds.exposed_share:.1%} "
            f"| {tokens:,.0f} | {estimate.mfu:.1%} |",
            flush=True,
        )


def print_published() -> None:
    print("| published, not fitted | tokens/s/GPU | predicted | error | within 15 % |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        found = compare(row)
        within = "yes" if abs(found.error) <= TOLERANCE else "**no**"
        print(
            f"| {row.source}: {row.name} | {row.tokens_per_s:,.0f} | {found.predicted:,.0f} "
            f"| {found.error:+.1%} | {within} |",
            flush=True,
        )
    print(f"\n{FLOAT8}.")


PARTS = {"traced": print_traced, "layouts": print_layouts, "published": print_published}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # argparse in Python 3.11 compares the default of "*" with the choices, so the default is a choice.
    parser.add_argument("parts", nargs="*", choices=["all", *PARTS], default="all")
    chosen = parser.parse_args().parts
    for part in PARTS if "all" in chosen else chosen:
        PARTS[part]()
        print()
    print("Assumptions:\n")
    for line in ASSUMPTIONS:
        print(f"* {line}")


if __name__ == "__main__":
    main()
