"""Compares the values of the ranks with the reference run, on rank 0: `StepComparison`."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from parallel2d.base.exchange import sendable
from parallel2d.instruments.parity_check.collective_audit import CollectiveAudit, describe
from parallel2d.instruments.parity_check.parity_report import (
    Discrepancy,
    ParameterRow,
    ParityReport,
    ranks_text,
)
from parallel2d.instruments.parity_check.reference_run import (
    CheckedRun,
    ReferenceGradient,
    ReferenceRun,
    Tensors,
    size_of,
)
from parallel2d.parallel.mesh import axis_names, positions_in
from parallel2d.parallel.mesh_sizes import MeshShape
from parallel2d.parallel.parallelize.precision import DTYPES
from parallel2d.parallel.weights.geometry import Region
from parallel2d.parallel.weights.named_tensors import tied_names
from parallel2d.training.metrics.communication import LoggedCollective
from parallel2d.training.optimizer import Muon

# A cause explains a difference if it accounts for all of the difference except this share.
_LEFT = 0.02
# Effect of one more rounding on the 2-norm of a tensor, in units of the dtype's eps
_ROUNDINGS = 64

# Unsharded tensors by FQN: one mapping per replica with diloco, otherwise one for the first replica
ByReplica = Sequence[Mapping[str, Tensor]]


class Bounds:
    """Bounds of the relative errors of ``checked``, which depend only on its dtypes.

    Ranks run the same kernels as one process if the layout has no tensor axis, no compiler and no
    8-bit floats. The contribution of a rank then equals the reference except for the order of sums
    inside kernels, and the sums over ranks add rounding errors. With different kernels, partial
    sums are also rounded to the compute dtype.
    """

    def __init__(self, checked: CheckedRun) -> None:
        config, precision = checked.config, checked.config.precision
        param, reduce = DTYPES[precision.param], DTYPES[precision.reduce]
        storage = DTYPES[precision.storage]
        in_8_bits = precision.float8 != "none"
        same_kernels = config.compile.name == "none" and checked.shape.tensor == 1 and not in_8_bits
        device_type = checked.mesh.device_type
        computed = 0.2 if in_8_bits else _computed(param, same_kernels, device_type)
        rounding = _ROUNDINGS * torch.finfo(torch.promote_types(storage, torch.float32)).eps
        ranks = checked.shape.sharding.shard
        sent = torch.finfo(reduce).eps * (2 + ranks) if reduce.itemsize < 4 else 0.0
        # The optimizer gets gradients in the dtype of the sharded parameters.
        sent += torch.finfo(storage).eps if storage.itemsize < 4 else 0.0
        comm_format = checked.method.named_format
        coded = comm_format.bound[0 if same_kernels else 1] if comm_format is not None else 0.0
        self.loss = (computed + rounding) / 8
        self.gradient = computed + sent + rounding  # relative to the mean norm of the contributions
        self.norm = rounding / 4
        # The error of an update is relative to the update plus 4 units in the last place of the
        # parameter. A mistake to detect: state in bf16 instead of fp32 changes an update by 1e-3.
        # The bound for Muon is larger, because Muon multiplies in bf16, and in another order if a
        # matrix is split.
        self.update = 0.05 if isinstance(checked.optimizer, Muon) else 20 * rounding
        if checked.method.replicas_equal:
            self.gradient += coded
        else:
            self.update += coded
        # Errors are relative to at least this share of the average for a parameter of the same
        # size, because some gradients are zero except for rounding.
        self.least_share = 1e-4 if same_kernels else 1e-2


def _computed(param: torch.dtype, same_kernels: bool, device_type: str) -> float:
    """Return the relative error that computation in the dtype ``param`` may cause."""
    eps = torch.finfo(param).eps
    if not same_kernels:
        return 1000 * eps if param.itemsize >= 4 else 24 * eps
    if device_type == "cpu":
        # Bitwise equal, except for the order of sums over micro-batches
        return 32 * min(eps, torch.finfo(torch.float32).eps)
    # Some GPU kernels add in an order that varies between calls.
    return 32 * eps if param.itemsize >= 4 else eps / 4


@sendable
@dataclass
class RankRecord:
    """Results of one rank in a step, in addition to the values of parameters and gradients."""

    data_rank: int
    forwards: int = 0  # number of forward passes, one per micro-batch
    loss: float = 0.0  # summed over the micro-batches
    norm: float = 0.0  # 2-norm of the gradient
    used: list[str] = field(default_factory=list)  # parameters that have a gradient
    # Kind of value -> name -> (group, region of the tensor, hash); equal within a group
    held: dict[str, dict[str, tuple[int, Region, int]]] = field(default_factory=dict)
    # buffers that forward passes have changed so far
    buffers: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[LoggedCollective] = field(default_factory=list)


class StepComparison:
    """Comparison of the run ``checked`` with its reference run, step by step."""

    def __init__(self, checked: CheckedRun) -> None:
        self._checked = checked
        # The records are only of ranks in the mesh.
        self._ranks = positions_in(checked.mesh)
        self._axes = axis_names(checked.mesh)
        self._bounds = Bounds(checked)
        self._audit = CollectiveAudit(checked)
        self._run = ReferenceRun(checked)
        self._step = 0
        # Values of the previous step, by replica
        self._gradients_before: list[Tensors] = [{} for _ in self._run.replicas]
        config, shape, module = checked.config, checked.shape, self._run.plain.module
        crosses = checked.method.description
        rows: dict[str, ParameterRow] = {}
        for name, parameter in module.named_parameters():
            notes = [] if parameter.requires_grad else ["frozen"]
            rows[name] = ParameterRow(list(parameter.shape), parameter.requires_grad, notes=notes)
        for name, first in tied_names(module).items():
            rows[first].notes.append(f"tied to {name}")
        self.report = ParityReport(
            f"{' '.join(f'{axis}={size}' for axis, size in shape.shown.items())} "
            f"strategy={config.strategy.name} precision={config.precision.name} ({crosses})",
            type(module).__name__,
            dict(vars(self._bounds)),
            rows,
            checked.notes,
        )

    def begin(self, records: Sequence[RankRecord], weights: ByReplica) -> None:
        """Compare the initial weights of every replica with the weights of one process, and copy
        the regions of the shards."""
        self._compare_copies(records)
        for replica, found in zip(self._run.replicas, weights, strict=True):
            self._equal("initial weight", found, replica.parameters)
            replica.take(found, found)
        self._run.sync.take(weights[0])
        for name in weights[0]:
            regions = set()
            for each in records:
                regions.add(each.held["weights"][name][1])
            in_order = sorted(regions, key=lambda region: region.offsets)
            # A rank without elements of the parameter has no shard.
            self._run.sync.cuts[name] = [each for each in in_order if each.numel]

    def compare(
        self, step: int, records: Sequence[RankRecord], whole: Mapping[str, ByReplica]
    ) -> None:
        """Compare a step, and set the reference to the values of the ranks for the next step.

        Args:
            step: number of the step, from 1.
            records: one record per rank.
            whole: unsharded tensors by kind. ``gradients``: before clipping. ``weights``: in the
                forward passes. ``updated``: after the optimizer step. ``shared``: with diloco, the
                weights that all replicas share.
        """
        self._step = step
        expected = self._run.gradients(step)
        self._losses(records)
        self._compare_copies(records)
        for replica, wanted in enumerate(expected):
            self._gradients(replica, whole["gradients"][replica], wanted)
            self._norm_and_update(replica, whole["gradients"][replica], records)
        # The prediction of bytes assumes that every FSDP group runs once per micro-batch.
        runs_once = set(self._run.plain.calls.values()) <= {sum(self._run.forwards)}
        logs = list(map(attrgetter("collectives"), records))
        for each in self._audit.check(step, logs, predictable=runs_once and step % 2 == 1):
            self.report.add(each)
        self.report.collectives = dict(Counter(map(describe, logs[0])))
        self._weights(whole["weights"], whole["updated"], whole["shared"])
        for rank, record in enumerate(records):
            buffers = {**self._run.plain.initial_buffers, **record.buffers}
            wanted_buffers = self._run.plain.buffers_of(record.data_rank)
            self._equal("buffer", buffers, wanted_buffers, self._bounds.loss + 1e-5, ranks=(rank,))

    def _losses(self, records: Sequence[RankRecord]) -> None:
        for rank, record in enumerate(records):
            wanted, given = self._run.losses[record.data_rank], self._run.forwards[record.data_rank]
            if abs(record.loss - wanted) <= self._bounds.loss * abs(wanted):
                continue
            cause = "the model, its weights or the batch are others there"
            if record.forwards != given:
                cause = f"a micro-batch is missing or repeated: {record.forwards} of {given} ran"
            what = f"{record.loss:.8g} on rank {rank}, {wanted:.8g} in one process"
            self._differs("loss", what, cause=cause, ranks=(rank,))

    def _gradients(
        self, replica: int, found: Tensors, wanted: Mapping[str, ReferenceGradient]
    ) -> None:
        before = self._gradients_before[replica]
        self._gradients_before[replica] = {name: each.value for name, each in wanted.items()}
        numel = sum(each.value.numel() for each in wanted.values())
        typical = math.hypot(*(each.size for each in wanted.values())) / math.sqrt(max(numel, 1))
        for name, each in wanted.items():
            row = self.report.parameters[name]
            if not each.used and "unused" not in row.notes:
                row.notes.append("unused")
            value = found[name].to(each.value.dtype)
            least = self._bounds.least_share * typical * math.sqrt(each.value.numel())
            error = _error(value, each.value, max(each.size, least))
            row.gradient = max(row.gradient, error)
            if error > self._bounds.gradient:
                cause, axis = _cause(value, each, before.get(name), self._checked.shape)
                what = f"relative error {error:.1e}, bound {self._bounds.gradient:.0e}"
                if len(self._run.replicas) > 1:
                    what = f"{what}, in replica {replica}"
                self._differs("gradient", what, parameter=name, cause=cause, axis=axis)

    def _norm_and_update(
        self, number: int, gradients: Tensors, records: Sequence[RankRecord]
    ) -> None:
        """Compare the gradient norm, and update the reference with the clipped gradients of the
        ranks."""
        sizes = {}
        for name, each in gradients.items():
            sizes[name] = size_of(each)
        wanted = math.hypot(*sizes.values())
        ranks = self._ranks.reshape(len(self._run.replicas), -1)[number].tolist()
        used = records[ranks[0]].used
        factor = min(1.0, self._checked.optimizer_config.clip_norm / (wanted + 1e-6))
        self._run.replicas[number].update({name: gradients[name] for name in used}, factor)
        for rank in ranks:
            found = records[rank].norm
            if abs(found - wanted) <= self._bounds.norm * wanted:
                continue
            cause = ""
            for name, size in sizes.items():
                if math.isclose(wanted**2 - found**2, size**2, rel_tol=1e-3):
                    cause = f"it lacks the gradient of {name}"
            what = f"the norm of the gradient is {wanted:.8g}, rank {rank} has {found:.8g}"
            self._differs("norm", what, cause=cause, ranks=(rank,))

    def _weights(self, weights: ByReplica, updated: ByReplica, shared: ByReplica) -> None:
        sync, method = self._run.sync, self._checked.method
        if shared:
            sync.after_update(self._step)
            self._updates("shared weight", shared[0], sync.shared, sync.before)
            sync.take(shared[0])
        for replica, used, owned in zip(self._run.replicas, weights, updated, strict=True):
            self._updates("update", owned, replica.parameters, replica.before)
            for name, row in self.report.parameters.items():
                cause, wanted = "a frozen parameter has moved", replica.weights[name]
                if row.trained:
                    cause, wanted = "replicas do not have it", method.expected_copy(owned[name])
                self._equal("update", used, {name: wanted}, cause=cause)
            replica.take(used, owned)

    def _updates(self, check: str, found: Tensors, expected: Tensors, before: Tensors) -> None:
        for name, row in self.report.parameters.items():
            if not row.trained:
                continue
            wanted = expected[name].detach()
            size = max(size_of(wanted - before[name]), 1e-30)
            last_place = 4 * torch.finfo(wanted.dtype).eps * size_of(wanted)
            error = max(_error(found[name], wanted, size) - last_place / size, 0.0)
            row.update = max(row.update, error)
            if error > self._bounds.update:
                cause = "it was not updated" if torch.equal(found[name], before[name]) else ""
                what = f"relative error {error:.1e}, bound {self._bounds.update:.0e}"
                self._differs(check, what, parameter=name, cause=cause)

    def _equal(
        self, check: str, found: Tensors, wanted: Tensors, bound: float = 0.0, **where: Any
    ) -> None:
        for name, value in wanted.items():
            error = _error(found[name].to(value.device), value, size_of(value))
            if error > bound:
                self._differs(check, f"relative error {error:.1e}", parameter=name, **where)

    def _compare_copies(self, records: Sequence[RankRecord]) -> None:
        """Compare hashes between ranks: if two ranks of a group have the same region of a tensor,
        their values must be equal."""
        for what, names in records[0].held.items():
            for name in names:
                ranks: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
                for rank, record in enumerate(records):
                    group, region, value = record.held[what][name]
                    ranks[group, region][value].append(rank)
                parts = []
                for each in ranks.values():
                    if len(each) > 1:
                        parts.append(list(each.values()))
                if parts:
                    ours, theirs = parts[0][:2]
                    text = f"the {what} of {ranks_text(ours)} and {ranks_text(theirs)} differ"
                    # The first axis with different coordinates
                    places = []
                    for part in (ours, theirs):
                        places.append((self._ranks == part[0]).nonzero()[0])
                    axis = self._axes[int((places[0] != places[1]).nonzero()[0])]
                    holders = tuple(sorted(itertools.chain(*itertools.chain(*parts))))
                    self._differs("copies", text, parameter=name, axis=axis, ranks=holders)

    def _differs(self, check: str, what: str, **where: Any) -> None:
        self.report.add(Discrepancy(check, self._step, what, **where))


def _error(found: Tensor, wanted: Tensor, size: float) -> float:
    """Return the norm of the difference relative to ``size``. If it is NaN, return infinity."""
    wide = torch.promote_types(wanted.dtype, torch.float64)
    error = size_of(found.to(wide) - wanted.to(wide)) / max(size, 1e-30)
    return error if math.isfinite(error) else math.inf


def _cause(
    found: Tensor, expected: ReferenceGradient, before: Tensor | None, shape: MeshShape
) -> tuple[str, str | None]:
    """Return the cause of a wrong gradient and its axis; an empty text or None if they are not
    known. A cause is named only if it explains the difference. ``before``: the expected gradient of
    the previous step."""
    wanted, later = expected.value, expected.later
    if not found.isfinite().all():
        return "it holds NaN or infinity", None
    if not found.any():
        return "it is zero: the gradient was dropped, or never added", None
    explanations: dict[str, Tensor] = {}
    if later is not None:
        explanations["micro-batch 1 is missing"] = later
        explanations["all micro-batches but the first are missing"] = wanted - later
        explanations["micro-batch 1 counts twice"] = 2 * wanted - later
    if before is not None:
        explanations["it is that of the step before: a buffer was not filled again"] = before
        explanations["it holds that of the step before too: it was not cleared"] = before + wanted
    for text, explanation in explanations.items():
        if _explains(explanation, found, wanted):
            return text, None
    return _factor(found, wanted, shape)


def _factor(found: Tensor, wanted: Tensor, shape: MeshShape) -> tuple[str, str | None]:
    off = _is_off(found, wanted)
    product = (found[off] * wanted[off].conj()).sum().real
    factor = float(product / wanted[off].abs().square().sum().clamp(min=1e-30))
    # With few values, the gradient may be near a multiple of the expected gradient by chance.
    if wanted.numel() < 8 or not _explains(wanted * factor, found, wanted):
        return "", None
    text = f"it is {factor:.4g} times what it should be"
    axes = []
    for axis, size in shape.sizes.items():
        if size > 1 and min(abs(factor / size - 1), abs(factor * size - 1)) < 1e-3:
            axes.append(axis)
    if axes:
        how = "summed instead of averaged" if factor > 1 else "divided once too often"
        text += f", as if {how} over the {' or the '.join(axes)} axis"
    return text, axes[0] if len(axes) == 1 else None


def _is_off(found: Tensor, wanted: Tensor) -> Tensor:
    """Return a mask of the elements where ``found`` differs from ``wanted``. A fault may affect
    only some elements, such as the end of a bucket."""
    off = (found - wanted).abs()
    return off > 1e-3 * off.max()


def _explains(candidate: Tensor, found: Tensor, wanted: Tensor) -> bool:
    """True if the wrong elements of ``found`` equal ``candidate``."""
    off = _is_off(found, wanted)
    left = torch.linalg.vector_norm((found - candidate)[off])
    return float(left) < _LEFT * float(torch.linalg.vector_norm((found - wanted)[off]))
