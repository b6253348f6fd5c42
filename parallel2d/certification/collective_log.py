"""Every collective of a step on every rank, compared with the policy and among the ranks:
`CollectiveLog`."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel2d import exchange
from parallel2d.certification.certificate import Discrepancy
from parallel2d.config import AXES, ParallelConfig
from parallel2d.mesh import axis_positions
from parallel2d.metrics.communication import CommunicationMeter, LoggedCollective
from parallel2d.optimizer import Muon
from parallel2d.parallelize.precision import DTYPES

_SHARE_OF_BYTES = 0.02
# Bytes of a value of what replicas send
_WIRE_BYTES = {"bf16": 2, "int8": 1, "int4": 1, "sparse": 1}


class CollectiveLog:
    """``meter``: of this rank, installed. ``predicted``: bytes by axis of a step as configured;
    ``optimizer``: the parallel run's."""

    def __init__(
        self,
        meter: CommunicationMeter,
        mesh: DeviceMesh,
        config: ParallelConfig,
        predicted: Mapping[str, float],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._meter = meter
        self._mesh = mesh
        self._config = config
        self._predicted = predicted
        # Muon sends matrices and results in bf16.
        self._update_bytes = 2 if isinstance(optimizer, Muon) else 8
        self.lines: dict[str, list[str]] = {}

    def start(self) -> None:
        """Begins a step."""
        self._meter.log = []

    def check(self, step: int, *, predictable: bool) -> list[Discrepancy]:
        """What is wrong with the collectives since `start`; on rank 0, empty elsewhere. Collective.

        ``predictable``: the step has as many micro-batches as training has, and each group of
        modules runs once in each.
        """
        logged = self._meter.log or []
        self._meter.log = None
        found = self._against_policy(logged, step)
        everywhere = exchange.gather(found)
        order = self._order(logged, step)
        sent = exchange.gather(_sent(logged))
        # Rank 0 alone has gathered something.
        if not everywhere:
            return []
        self._describe(logged)
        merged = _merged(everywhere)
        if predictable and self._config.sync.name == "every_step":
            merged += self._bytes(sent, step)
        return merged + order

    def _against_policy(self, logged: Sequence[LoggedCollective], step: int) -> list[Discrepancy]:
        found: dict[tuple[str, str, torch.dtype], Discrepancy] = {}
        for each in logged:
            least = self._least_bytes(each)
            # Codes are bytes.
            if not each.dtype.is_floating_point or each.dtype.itemsize >= least:
                continue
            found[each.axis, each.collective, each.dtype] = Discrepancy(
                "collective",
                step,
                f"{each.collective} over the {each.axis} axis sends {each.dtype}; the "
                f"configuration asks for {8 * least} bits",
                axis=each.axis,
                collective=each.collective,
            )
        return list(found.values())

    def _least_bytes(self, each: LoggedCollective) -> int:
        """How wide what is sent must be, in bytes of a value."""
        precision, sync = self._config.precision, self._config.sync
        param, reduce = DTYPES[precision.param].itemsize, DTYPES[precision.reduce].itemsize
        if each.axis == "replicate":
            if sync.name == "diloco":
                return _WIRE_BYTES.get(sync.wire, 4)
            least = min(_WIRE_BYTES.get(sync.wire, 8), reduce)
            if each.collective == "all_to_all":
                least = min(least, self._update_bytes)
            return least
        if each.axis == "shard" and each.collective == "reduce_scatter":
            return reduce
        if precision.float8 != "none":
            return 1
        return min(param, reduce, self._update_bytes)

    def _order(self, logged: Sequence[LoggedCollective], step: int) -> list[Discrepancy]:
        """Ranks of one group must begin the same collectives in the same order. Collective."""
        sequences: dict[str, list[str]] = defaultdict(list)
        for each in logged:
            sequences[each.axis].append(f"{each.collective} in {each.dtype}")
        positions = axis_positions(self._mesh)
        own: dict[str, tuple[list[int], str, list[str]]] = {}
        # A rank that began nothing has its group too.
        for axis in positions:
            sequence = sequences[axis]
            group = [place for other, place in positions.items() if other != axis]
            digest = hashlib.sha256(json.dumps(sequence).encode()).hexdigest()
            own[axis] = (group, digest, sequence[:2000])
        ranks = exchange.gather(own)
        found: list[Discrepancy] = []
        for axis in own:
            seen: dict[tuple[int, ...], tuple[int, str, list[str]]] = {}
            for rank, each_rank in enumerate(ranks):
                group, digest, sequence = each_rank[axis]
                first = seen.setdefault(tuple(group), (rank, digest, sequence))
                if first[1] != digest:
                    found.append(_out_of_order(step, axis, first, (rank, sequence)))
        return found

    def _bytes(self, by_rank: Sequence[Mapping[str, float]], step: int) -> list[Discrepancy]:
        """``by_rank``: bytes that each rank sent over each axis."""
        found: list[Discrepancy] = []
        for axis in AXES:
            predicted = self._predicted.get(f"comm/{axis}/bytes")
            if not predicted:
                continue
            # The mean, because ranks send different updates of Muon.
            sent = sum(of_rank.get(axis, 0.0) for of_rank in by_rank) / len(by_rank)
            if abs(sent / predicted - 1) > _SHARE_OF_BYTES:
                found.append(
                    Discrepancy(
                        "bytes",
                        step,
                        f"{sent:.0f} bytes were sent over the {axis} axis, {predicted:.0f} "
                        "were predicted",
                        axis=axis,
                    )
                )
        return found

    def _describe(self, logged: Sequence[LoggedCollective]) -> None:
        kinds: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for each in logged:
            total = kinds[each.axis].setdefault(f"{each.collective} in {each.dtype}", [0, 0.0])
            total[0] += 1
            total[1] += each.sent
        for axis, by_kind in kinds.items():
            self.lines[axis] = [
                f"{kind}: {calls:.0f} calls, {sent:.0f} bytes"
                for kind, (calls, sent) in sorted(by_kind.items())
            ]


def _sent(logged: Sequence[LoggedCollective]) -> dict[str, float]:
    """Bytes over each axis."""
    found: dict[str, float] = defaultdict(float)
    for each in logged:
        found[each.axis] += each.sent
    return dict(found)


def _merged(everywhere: Sequence[Sequence[Discrepancy]]) -> list[Discrepancy]:
    """Each discrepancy once, with the ranks that have it."""
    ranks: dict[Discrepancy, list[int]] = defaultdict(list)
    for rank, found in enumerate(everywhere):
        for each in found:
            ranks[each].append(rank)
    return [replace(each, ranks=tuple(numbers)) for each, numbers in ranks.items()]


def _out_of_order(
    step: int, axis: str, first: tuple[int, str, list[str]], other: tuple[int, list[str]]
) -> Discrepancy:
    rank, _, sequence = first
    number = next(
        (
            place
            for place, (ours, theirs) in enumerate(zip(sequence, other[1], strict=False))
            if ours != theirs
        ),
        min(len(sequence), len(other[1])),
    )
    ours = sequence[number] if number < len(sequence) else "nothing more"
    theirs = other[1][number] if number < len(other[1]) else "nothing more"
    return Discrepancy(
        "order of collectives",
        step,
        f"collective {number + 1} over the {axis} axis is {ours} on rank {rank} and {theirs} on "
        f"rank {other[0]}",
        axis=axis,
        ranks=(rank, other[0]),
    )
