"""Every collective of a step on every rank, compared with the policy and among the ranks, on rank
0: `CollectiveAudit`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, zip_longest
from operator import attrgetter

from parallel2d.base.exchange import sendable
from parallel2d.instruments.certification.certificate import Discrepancy
from parallel2d.instruments.certification.expected_run import Subject
from parallel2d.parallel.mesh import axis_names
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.training.metrics.communication import LoggedCollective
from parallel2d.training.optimizer import Muon

_SHARE_OF_BYTES = 0.02
# Bytes of a value of what replicas send
_WIRE_BYTES = {"bf16": 2, "int8": 1, "int4": 1}

Log = Sequence[LoggedCollective]  # of one rank, in order

sendable(LoggedCollective)


class CollectiveAudit:
    """The audit of ``subject``."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        precision, sync = subject.config.precision, subject.config.sync
        param, reduce = DTYPES[precision.param].itemsize, DTYPES[precision.reduce].itemsize
        # Muon sends matrices and results in bf16.
        update = 2 if isinstance(subject.optimizer, Muon) else 8
        if sync.name == "diloco":
            between = exchanged = _WIRE_BYTES.get(sync.wire, 4)
        else:
            between = min(_WIRE_BYTES.get(sync.wire, 8), reduce)
            exchanged = min(between, update)
        # How wide what is sent must be, in bytes of a value: of a collective on an axis, of any
        # other on that axis, of any other
        self._least = {
            ("replicate", "all_to_all"): exchanged,
            ("replicate", ""): between,
            ("shard", "reduce_scatter"): reduce,
            ("", ""): 1 if precision.float8 != "none" else min(param, reduce, update),
        }

    def check(self, step: int, ranks: Sequence[Log], predictable: bool) -> list[Discrepancy]:
        """What is wrong with the collectives of a step. ``predictable``: its bytes were
        predicted."""
        found = self._too_narrow(step, ranks)
        mesh, predicted = self._subject.mesh, self._subject.predicted
        if not predictable or self._subject.config.sync.name != "every_step":
            predicted = {}
        for dim, axis in enumerate(axis_names(mesh)):
            # A rank that began nothing has its place too.
            logs = [[each for each in log if each.axis == axis] for log in ranks]
            # The mean, because ranks send different updates of Muon.
            sent = sum(map(attrgetter("sent"), chain(*logs))) / len(logs)
            wanted = predicted.get(f"comm/{axis}/bytes", 0.0)
            if wanted and abs(sent / wanted - 1) > _SHARE_OF_BYTES:
                what = f"{sent:.0f} bytes were sent over the {axis} axis, {wanted:.0f} were "
                found.append(Discrepancy("bytes", step, f"{what}predicted", axis=axis))
            groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            for first, *others in groups:
                for rank in others:
                    found += _other_order(step, axis, (first, rank), logs)
        return found

    def _too_narrow(self, step: int, ranks: Sequence[Log]) -> list[Discrepancy]:
        senders: dict[tuple[str, str], set[int]] = defaultdict(set)
        for rank, log in enumerate(ranks):
            for each in log:
                places = ((each.axis, each.collective), (each.axis, ""), ("", ""))
                least = next(filter(None, map(self._least.get, places)), 0)
                # Codes are bytes, not floating-point numbers.
                if each.dtype.is_floating_point and each.dtype.itemsize < least:
                    what = f"{describe(each)}; the configuration asks for {8 * least} bits"
                    senders[each.axis, what].add(rank)
        return [
            Discrepancy("collective", step, what, axis=axis, ranks=tuple(sorted(numbers)))
            for (axis, what), numbers in senders.items()
        ]


def _other_order(
    step: int, axis: str, pair: tuple[int, int], logs: Sequence[Log]
) -> list[Discrepancy]:
    """Compares two ranks of one group, which must begin the same collectives in the same order."""
    sequences = [map(describe, logs[rank]) for rank in pair]
    for number, (one, other) in enumerate(zip_longest(*sequences, fillvalue="nothing more"), 1):
        if one != other:
            what = f"number {number} is {one} on rank {pair[0]} and {other} on rank {pair[1]}"
            return [Discrepancy("order of collectives", step, what, axis=axis, ranks=pair)]
    return []


def describe(each: LoggedCollective) -> str:
    """For people."""
    return f"{each.collective} in {each.dtype} over the {each.axis} axis"
