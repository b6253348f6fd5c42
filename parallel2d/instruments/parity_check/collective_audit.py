"""Compares every collective of a step with the configuration and between ranks:
`CollectiveAudit`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from parallel2d.base.exchange import sendable
from parallel2d.instruments.parity_check.parity_report import Discrepancy
from parallel2d.instruments.parity_check.reference_run import CheckedRun
from parallel2d.parallel.mesh import axis_names, positions_in, ranks_of
from parallel2d.parallel.mesh_sizes import groups_along
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.training.metrics.communication import LoggedCollective
from parallel2d.training.optimizer import Muon

_SHARE_OF_BYTES = 0.02

Log = Sequence[LoggedCollective]  # of one rank, in order

sendable(LoggedCollective)


class CollectiveAudit:
    """Audit of the collectives of the run ``checked``."""

    def __init__(self, checked: CheckedRun) -> None:
        self._checked = checked
        # Muon sends matrices and results in bf16.
        self._update_bytes = 2 if isinstance(checked.optimizer, Muon) else 8

    def check(self, step: int, ranks: Sequence[Log], predictable: bool) -> list[Discrepancy]:
        """Return the discrepancies of a step. ``predictable``: True if its bytes were predicted."""
        found = self._too_narrow(step, ranks)
        mesh = self._checked.mesh
        for axis in axis_names(mesh):
            # Ranks without collectives are included, with an empty log.
            logs = []
            for log in ranks:
                logs.append([each for each in log if each.axis == axis])
            if predictable and self._checked.method.replicas_equal:
                found += self._other_bytes(step, axis, logs)
            positions = positions_in(mesh).reshape(ranks_of(mesh).shape)
            for group in groups_along(positions, axis).tolist():
                for rank in group[1:]:
                    found += _other_order(step, axis, (group[0], rank), logs)
        return found

    def _too_narrow(self, step: int, ranks: Sequence[Log]) -> list[Discrepancy]:
        senders: dict[tuple[str, str], set[int]] = defaultdict(set)
        for rank, log in enumerate(ranks):
            for each in log:
                least = self._least_bytes(each)
                # Quantized values are bytes, not floating-point numbers.
                if each.dtype.is_floating_point and each.dtype.itemsize < least:
                    what = f"{describe(each)}; the configuration asks for {8 * least} bits"
                    senders[each.axis, what].add(rank)
        found = []
        for (axis, what), numbers in senders.items():
            by_rank = tuple(sorted(numbers))
            found.append(Discrepancy("collective", step, what, axis=axis, ranks=by_rank))
        return found

    def _least_bytes(self, each: LoggedCollective) -> int:
        """Return the smallest allowed size, in bytes, of a value in the collective."""
        precision, method = self._checked.config.precision, self._checked.method
        param, reduce = DTYPES[precision.param].itemsize, DTYPES[precision.reduce].itemsize
        if each.axis == "replicate":
            least = method.format_for(DTYPES[precision.reduce]).item_bytes
            if not method.replicas_equal:
                return least
            least = min(least, reduce)
            if each.collective == "all_gather":  # of updated parameters
                least = min(least, DTYPES[precision.storage].itemsize)
            return min(least, self._update_bytes) if each.collective == "all_to_all" else least
        if each.axis == "shard" and each.collective == "reduce_scatter":
            return reduce
        return 1 if precision.float8 != "none" else min(param, reduce, self._update_bytes)

    def _other_bytes(self, step: int, axis: str, logs: Sequence[Log]) -> list[Discrepancy]:
        predicted = self._checked.predicted.get(f"comm/{axis}/bytes")
        # Compare the mean over ranks, because with Muon ranks send updates of different sizes.
        sent = sum(sum(each.sent for each in log) for log in logs) / len(logs)
        if not predicted or abs(sent / predicted - 1) <= _SHARE_OF_BYTES:
            return []
        what = f"{sent:.0f} bytes were sent over the {axis} axis, {predicted:.0f} were predicted"
        return [Discrepancy("bytes", step, what, axis=axis)]


def _other_order(
    step: int, axis: str, pair: tuple[int, int], logs: Sequence[Log]
) -> list[Discrepancy]:
    """Return a discrepancy if the two ranks ``pair`` of one group begin different collectives, or
    begin them in different orders."""
    sequences = []
    for rank in pair:
        sequences.append(map(describe, logs[rank]))
    for number, (one, other) in enumerate(zip_longest(*sequences, fillvalue="nothing more"), 1):
        if one != other:
            what = f"number {number} is {one} on rank {pair[0]} and {other} on rank {pair[1]}"
            return [Discrepancy("order of collectives", step, what, axis=axis, ranks=pair)]
    return []


def describe(each: LoggedCollective) -> str:
    """Return a description of the collective, for messages."""
    return f"{each.collective} in {each.dtype} over the {each.axis} axis"
