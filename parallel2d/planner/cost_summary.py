"""A layout's cost as lines for people: `summary`, and whether it fits: `shortage`."""

from __future__ import annotations

from collections.abc import Mapping

from parallel2d.config import AXES, TrainConfig
from parallel2d.mesh import crosses_hosts
from parallel2d.planner.layout_cost import LayoutCost
from parallel2d.planner.layout_search import of_device
from parallel2d.planner.machines import usable_gib
from parallel2d.sync.outer_settings import describe_sync

_GIB = 2**30
_MIB = 2**20


def summary(config: TrainConfig, cost: LayoutCost) -> list[str]:
    """Readable in 80 columns, but for names."""
    shape = cost.shape
    cluster = config.cluster
    return [
        f"plan        {shape.world_size:,} ranks, {cost.topology.describe()}; cluster "
        f"{cluster.name}, device {cluster.device.name}",
        f"mesh        replicate {shape.replicate} x shard {shape.shard} x tensor {shape.tensor}; "
        f"strategy {config.strategy.name}",
        *(f"            {note}" for note in shape.notes),
        f"model       {cost.model}: {cost.parameters:,} parameters",
        f"            precision {config.precision.name}, bucketing {config.bucketing.name}, "
        f"activation checkpointing {config.activation_checkpointing.name}",
        f"sync        {describe_sync(config.strategy, config.sync, shape.replicate)}",
        f"batch       {cost.sample.describe(config.train.global_batch_size)} = "
        f"{shape.data_ranks} data ranks x {cost.accumulation} micro-batches x "
        f"{cost.micro_batch_size}",
        *_memory_lines(config, cost),
        *_traffic_lines(cost),
        *_compute_lines(config, cost),
        *_time_lines(config, cost),
    ]


def shortage(config: TrainConfig, cost: LayoutCost) -> str | None:
    """Why the job does not fit, in one sentence; None where nothing is known against it."""
    memory = usable_gib(config)
    # With offloading, what is kept from step to step is in the memory of the host.
    if memory is None or cost.needed <= memory * _GIB or config.cpu_offload:
        return None
    what = "at its peak"
    if not cost.has_peak:
        what = "for parameters, gradients, optimizer state and buffers alone"
    return (
        f"does not fit: the fullest rank needs {of_device(cost.needed, memory)} {what}; shard over "
        "more ranks, recompute more (activation_checkpointing=full) or take a smaller "
        "train.micro_batch_size"
    )


def _memory_lines(config: TrainConfig, cost: LayoutCost) -> list[str]:
    states = cost.states
    kinds = {
        "parameters": states.parameters,
        "unrounded rows": states.masters,
        "gradients": states.gradients,
        "optimizer state": states.optimizer,
        "outer parameters": states.outer,
        "buffers": states.buffers,
    }
    lines = [f"memory      {_size(states.total)} from step to step on the fullest rank"]
    if config.cpu_offload:
        lines = [f"memory      {_size(states.total)} of it, in the memory of the host but for"]
        lines.append("            buffers, from step to step on the fullest rank")
    lines.append(f"            {_listed(kinds)}")
    lines += _peak_lines(config, cost)
    return lines


def _peak_lines(config: TrainConfig, cost: LayoutCost) -> list[str]:
    if isinstance(cost.predicted, str):
        lines = [f"            activations are not known: {cost.predicted}"]
    else:
        lines = [f"            {_of_device(config, cost.predicted.peak)} at the peak of a step"]
        lines.append(f"            {_listed(cost.predicted.by_kind)}")
    if cost.traced is not None:
        lines.append(f"            {_of_device(config, cost.traced.peak)} at the peak as traced")
        lines.append(f"            {_listed(cost.traced.by_kind)}")
    return lines


def _of_device(config: TrainConfig, size: int) -> str:
    memory = config.cluster.device.memory_gib
    return _size(size) if memory is None else f"{_size(size)} of {memory:.1f} GiB"


def _listed(kinds: Mapping[str, int]) -> str:
    shown = [f"{name} {_size(size)}" for name, size in kinds.items() if size]
    return ", ".join(shown)


def _size(size: int) -> str:
    """In GiB, or in MiB where that would be less than a tenth."""
    if size < _GIB / 10:
        return f"{size / _MIB:.2f} MiB"
    return f"{size / _GIB:.2f} GiB"


def _traffic_lines(cost: LayoutCost) -> list[str]:
    lines = []
    ranks = cost.shape.place(cost.topology)
    for dim, axis in enumerate(AXES):
        if getattr(cost.shape, axis) == 1:
            continue
        moved = cost.moved.get(f"comm/{axis}/bytes")
        amount = "not known" if moved is None else f"{moved / 1e9:.3f} GB"
        where = "inside hosts"
        if crosses_hosts(ranks, dim, cost.topology):
            where = "between hosts"
        lines.append(f"            {axis} {amount}, {where}")
    if lines:
        return ["bytes       sent by a rank per step", *lines]
    return ["bytes       nothing is sent"]


def _compute_lines(config: TrainConfig, cost: LayoutCost) -> list[str]:
    if cost.flops is None:
        return ["compute     not known: the model does not run on tensors without storage"]
    step = cost.flops * config.train.global_batch_size / cost.shape.world_size
    return [f"compute     {step / 1e12:.3f} TFLOP per rank and step, recomputation not counted"]


def _time_lines(config: TrainConfig, cost: LayoutCost) -> list[str]:
    if isinstance(cost.time, str):
        return [f"time        not known: {cost.time}"]
    seconds = cost.time.seconds
    noun = cost.sample.noun
    rate = cost.time.samples_per_s * cost.sample.targets_per_sample
    lines = [
        f"time        {seconds.total:.3f} s per step by a model, {seconds.exposed_share:.0%} of it "
        "waiting for links",
        f"            compute {seconds.compute:.3f} s, update {seconds.update:.3f} s; not hidden: "
        f"tensor {seconds.tensor:.3f} s, shard {seconds.shard:.3f} s, replicate "
        f"{seconds.replicate:.3f} s",
        f"            {rate:,.0f} {noun}/s, {rate / cost.shape.world_size:,.0f} per rank, MFU "
        f"{cost.time.mfu:.1%}",
    ]
    saving = cost.time.saving
    if saving is not None:
        lines.append(
            f"failures    a checkpoint every {saving.interval_s / 60:.1f} minutes, "
            f"{saving.goodput:.1%} of the time is progress that is kept"
        )
    return lines
