"""Formats plans as text and as JSON: the cost of one layout, the ranking of a search, or a
scaling."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from parallel2d.base.config import AXES, TrainConfig
from parallel2d.instruments.planner.layout_cost import LayoutCost, excess
from parallel2d.instruments.planner.layout_search import RankedLayout, SearchResult
from parallel2d.instruments.planner.scaling import (
    COMPARED,
    ScalingPoint,
    samples_per_rank,
    wait_between_hosts,
)
from parallel2d.parallel.cost.predicted_peak import PredictedMemory
from parallel2d.parallel.cost.traffic import AxisTraffic, exact_bytes
from parallel2d.parallel.parallelize.layout import Layout

_GIB = 2**30
_MOST_LINES = 12
_INDENT = " " * 12


def summary(config: TrainConfig, cost: LayoutCost) -> list[str]:
    """Return the cost of one layout as lines of at most 80 columns, except for long names."""
    shape, layout, cluster = cost.shape, cost.layout, config.cluster
    return [
        f"plan        {shape.world_size:,} ranks, {cost.topology.describe()}; cluster "
        f"{cluster.name}, device {cluster.device.name}",
        f"mesh        {shape}; strategy {config.strategy.name}",
        *(f"{_INDENT}{note}" for note in shape.notes),
        *_undivided_head_lines(config, shape.context),
        f"model       {cost.model}: {cost.parameters:,} parameters",
        f"{_INDENT}precision {config.precision.name}, bucketing {config.bucketing.name}, "
        f"activation checkpointing {config.activation_checkpointing.name}",
        f"sync        {layout.method.description}",
        f"batch       {cost.sample.describe(config.train.global_batch_size)} = "
        f"{shape.data_ranks} data ranks x {layout.workload.accumulation} micro-batches x "
        f"{layout.workload.micro_batch_size}",
        *_memory_lines(config, cost),
        *_traffic_lines(cost),
        _compute_line(cost),
        *_time_lines(cost),
    ]


def _undivided_head_lines(config: TrainConfig, context: int) -> list[str]:
    if context == 1 or config.train.loss_chunk is not None:
        return []
    return [
        f"{_INDENT}head and loss run whole on each of {context} context ranks, which the seconds "
        "omit;",
        f"{_INDENT}train.loss_chunk=1024 divides them too",
    ]


def shortage(config: TrainConfig, cost: LayoutCost) -> str | None:
    """Return a sentence if the job does not fit into memory; None if it fits, or if this is not
    known."""
    much = excess(config, cost)
    if much is None:
        return None
    what = "at its peak"
    if not cost.has_peak:
        what = "for parameters, gradients, optimizer state and buffers, without activations"
    return (
        f"does not fit: the peak-memory rank needs {much} {what}; shard over more ranks, recompute "
        "more (activation_checkpointing=full) or take a smaller train.micro_batch_size"
    )


def _memory_lines(config: TrainConfig, cost: LayoutCost) -> list[str]:
    where = ", in the memory of the host but for buffers" if config.cpu_offload else ""
    lines = [
        f"memory      {_size(cost.states.total)} from step to step on the peak-memory rank{where}",
        f"{_INDENT}{_listed(dataclasses.asdict(cost.states))}",
    ]
    if config.optimizer.name == "custom":
        lines.append(f"{_INDENT}without the state of {config.optimizer.target}, which is not known")
    memory = config.cluster.device.memory_gib
    device = "" if memory is None else f" of {memory:.1f} GiB"
    if isinstance(cost.predicted, str):
        lines.append(f"{_INDENT}activations are not known: {cost.predicted}")
    else:
        lines.append(f"{_INDENT}{_size(cost.predicted.peak)}{device} at the peak of a step")
        lines.append(f"{_INDENT}{_listed(cost.predicted.by_kind)}")
    if cost.traced is not None:
        lines.append(f"{_INDENT}{_size(cost.traced)}{device} at the peak as traced")
    return lines


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in kinds.items() if size)


def _size(size: int) -> str:
    """Format bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{size / 2**20:.2f} MiB" if size < _GIB / 10 else f"{size / _GIB:.2f} GiB"


def _traffic_lines(cost: LayoutCost) -> list[str]:
    lines = []
    for axis in AXES:
        if cost.places[axis].ranks == 1:
            continue
        moved = cost.moved.get(f"comm/{axis}/bytes")
        amount = "not known"
        if moved is not None:
            amount = f"{moved / 1e9:.3f} GB" if moved >= 1e8 else f"{moved / 1e6:.3f} MB"
        where = "inside hosts" if cost.places[axis].is_inside else "between hosts"
        lines.append(f"{_INDENT}{axis} {amount}, {where}")
        if axis == "replicate" and moved and cost.layout.method.named_format is not None:
            share = moved / exact_bytes(cost.layout)
            lines.append(f"{_INDENT}{share:.3f} of exact gradients in fp32{_in_finer(cost.layout)}")
    if lines:
        return ["bytes       sent by a rank per step", *lines]
    return ["bytes       nothing is sent"]


def _in_finer(layout: Layout) -> str:
    """Return the share of the gradients in the finer of two communication formats, as text."""
    comm_format = layout.method.named_format
    if comm_format is None or not layout.method.has_error_feedback:
        return ""
    hidden = values = 0
    for group, count in AxisTraffic(layout).groups:
        hidden += count * sum(shape.numel() for shape in group.hidden_shapes)
        values += count * group.reduced_numel
    return f"; {1 - hidden / values:.1%} of the values in {comm_format.finer}"


def _compute_line(cost: LayoutCost) -> str:
    if cost.flops is None:
        return "compute     not known: the model does not run on tensors without storage"
    step = cost.flops * cost.layout.global_batch_size / cost.shape.world_size
    return f"compute     {step / 1e12:.3f} TFLOP per rank and step, recomputation not counted"


def _time_lines(cost: LayoutCost) -> list[str]:
    if isinstance(cost.time, str):
        return [f"time        not known: {cost.time}"]
    seconds = cost.time.seconds
    rate = cost.time.samples_per_s * cost.sample.targets_per_sample
    lines = [
        f"time        {seconds.total:.3f} s per step by a model, {seconds.exposed_share:.0%} of it "
        "waiting for links",
        f"{_INDENT}compute {seconds.compute:.3f} s, update {seconds.update:.3f} s; not hidden: "
        f"tensor {seconds.tensor:.3f} s, shard {seconds.shard:.3f} s, replicate "
        f"{seconds.replicate:.3f} s",
        f"{_INDENT}{rate:,.0f} {cost.sample.noun}/s, {rate / cost.shape.world_size:,.0f} per rank, "
        f"MFU {cost.time.mfu:.1%}",
    ]
    if cost.time.assumed:
        lines.append(f"{_INDENT}{cost.time.assumed}")
    if seconds.context:
        lines.append(f"{_INDENT}not hidden either: context {seconds.context:.3f} s")
    return lines


# Rankings


def ranking_lines(result: SearchResult) -> list[str]:
    """Return lines for the chosen layout, then the best layout of each other mesh and strategy,
    fastest first, then faster layouts that do not fit."""
    shown = _shown(result)
    lines = [
        f"search      {len(result.ranked)} layouts by their step time; {len(result.refusals)} "
        "cannot run",
        f"{_INDENT}{'step':>9}  {'rank needs':>12}  layout",
    ]
    for layout in shown:
        needed = f"{layout.cost.needed / _GIB:.1f} GiB"
        if not layout.cost.has_peak:
            # The search computes no more peaks after a layout fits. Without a peak, the size of the
            # states is a lower bound.
            needed = f"> {needed}"
        seconds = layout.time.seconds.total
        lines.append(f"{_INDENT}{seconds:>7.3f} s  {needed:>12}  {' '.join(layout.words)}")
        lines.append(f"{_INDENT}{'':>9}  {'':>12}  {layout.reason or 'chosen'}")
    if len(shown) < len(result.ranked):
        lines.append(f"{_INDENT}and {len(result.ranked) - len(shown)} more")
    return [*lines, *_reason_lines(result)]


def _reason_lines(result: SearchResult) -> list[str]:
    """Return lines about the choice that are not in the table: the batch is too small for the
    cluster, or the network is fast."""
    lines, cost = [], result.chosen.cost
    batch, ranks = cost.layout.global_batch_size, cost.shape.world_size
    if batch < ranks:
        lines.append(
            f"{_INDENT}train.global_batch_size={batch} is less than one sample per rank, which "
            f"slows every layout: use at least {ranks}"
        )
    had_choice = any(each.cost.shape.replicate > 1 for each in result.ranked)
    if had_choice and cost.shape.replicate == 1 and not cost.places["shard"].is_inside:
        lines.append(
            f"{_INDENT}one replica: the network is fast enough that sharding over all hosts waits "
            f"{wait_between_hosts(result.chosen):.0%} of a step for it"
        )
    return lines


def _shown(result: SearchResult) -> Sequence[RankedLayout]:
    place = result.ranked.index(result.chosen)
    shown = [result.chosen]
    seen = {result.chosen.words[:4]}  # strategy and mesh
    for layout in result.ranked[place + 1 :]:
        if layout.words[:4] not in seen:
            seen.add(layout.words[:4])
            shown.append(layout)
    # The fastest layouts that do not fit come last.
    too_large = result.ranked[: min(place, _MOST_LINES // 2)]
    return [*shown[: _MOST_LINES - len(too_large)], *too_large]


def ranking_json(result: SearchResult, command: str) -> str:
    """Return all layouts as JSON with the keys ``command``, ``layouts`` and ``refusals``.

    An entry of ``layouts`` has ``words`` (overrides), ``reason`` (null for the chosen layout),
    ``seconds`` by part, ``memory``, ``predicted_peak`` and ``traced_peak`` (null if they were not
    computed) and ``bytes``. ``refusals`` has the overrides of layouts that cannot run, and the
    reasons.
    """
    refusals = [{"words": list(words), "reason": reason} for words, reason in result.refusals]
    layouts = list(map(_fields, result.ranked))
    return json.dumps({"command": command, "layouts": layouts, "refusals": refusals}, indent=1)


def _fields(layout: RankedLayout) -> dict[str, Any]:
    cost = layout.cost
    predicted = cost.predicted if isinstance(cost.predicted, PredictedMemory) else None
    return {
        "words": list(layout.words),
        "reason": layout.reason or None,
        **dataclasses.asdict(layout.time),
        "memory": dataclasses.asdict(cost.states),
        "predicted_peak": predicted and dataclasses.asdict(predicted),
        "traced_peak": cost.traced,
        "bytes": dict(cost.moved),
    }


# Scalings


def scaling_lines(points: Sequence[ScalingPoint], config: TrainConfig) -> list[str]:
    """Return a table of the best layouts."""
    found = []
    for point in points:
        for layout in point.best.values():
            if layout:
                found.append(layout)
    cost = found[0].cost
    heads = "".join(f"{name:>16}" for name in COMPARED)
    lines = [
        f"scaling     {config.plan.scaling}: {cost.model}, {cost.parameters:,} parameters; cluster "
        f"{config.cluster.name}",
        f"{_INDENT}{cost.sample.noun}/s per rank, and the share of a step that waits for links",
        f"{_INDENT}between hosts, of the fastest layout of each strategy that fits",
        f"{'ranks':>10}{'batch':>8}{heads}  mesh of hybrid",
    ]
    for point in points:
        cells = ""
        for layout in point.best.values():
            cell = "-"
            if layout is not None:
                cell = f"{samples_per_rank(layout):,.0f} {wait_between_hosts(layout):>4.0%}"
            cells += f"{cell:>16}"
        mesh = ""
        if (hybrid := point.best["hybrid"]) is not None:
            mesh = " x ".join(map(str, hybrid.cost.shape.sizes.values()))
        row = f"{point.ranks:>10,}{point.global_batch_size:>8,}{cells}  {mesh}"
        lines.append(row.rstrip())
    return lines


def scaling_json(points: Sequence[ScalingPoint], config: TrainConfig) -> str:
    """Return JSON with the keys ``scaling``, ``cluster`` and ``points``. A point has ranks, nodes,
    global batch, and by strategy the best layout as in `ranking_json`, or null."""
    fields = []
    for point in points:
        best: dict[str, Any] = {}
        for name, layout in point.best.items():
            best[name] = layout and {
                **_fields(layout),
                "per_rank": samples_per_rank(layout),
                "between_hosts": wait_between_hosts(layout),
            }
        fields.append({**vars(point), "best": best})
    scaling, cluster = config.plan.scaling, config.cluster.name
    return json.dumps({"scaling": scaling, "cluster": cluster, "points": fields}, indent=1)
