"""Compares what the ranks have with what is expected, on rank 0: `Examiner`. It writes what it
finds in a `Certificate`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.certification.bounds import Bounds
from parallel2d.certification.certificate import (
    Certificate,
    Discrepancy,
    ParameterRow,
    ranks_text,
)
from parallel2d.certification.expected_run import (
    ExpectedForward,
    ExpectedGradient,
    ExpectedRun,
    StepInputs,
)
from parallel2d.certification.likely_cause import Causes, cause_of_norm, is_rounded_to
from parallel2d.certification.output_norms import Norms, first_difference
from parallel2d.certification.plain_model import Contribution
from parallel2d.mesh import axis_names, mesh_shape


class Examiner:
    """``run``: what is expected; ``clip``: the largest norm of a gradient."""

    def __init__(
        self,
        run: ExpectedRun,
        certificate: Certificate,
        bounds: Bounds,
        mesh: DeviceMesh,
        clip: float,
    ) -> None:
        self.run = run
        self.certificate = certificate
        self.step = 0
        self._bounds = bounds
        self._shape = mesh_shape(mesh)
        self._ranks = mesh.mesh
        self._axes = axis_names(mesh)
        self._clip = clip
        # By track, of the step before
        self._gradients_before: list[dict[str, Tensor]] = [{} for _ in run.tracks]
        # Of the gradient's norm, by parameter, of the last track
        self._squares: dict[str, float] = {}

    @property
    def data_ranks(self) -> list[list[int]]:
        """The global ranks of each data rank: those of its tensor axis."""
        ranks: list[list[int]] = self._ranks.view(-1, self._shape.tensor).tolist()
        return ranks

    def initial_weights(self, found: Mapping[str, Tensor]) -> None:
        """Every replica starts from the weights of one process."""
        wanted = self.run.tracks[0].values()
        for name in wanted.keys() ^ found.keys():
            self.differs("initial weight", "one of the two models does not have it", name)
        for name in wanted.keys() & found.keys():
            if is_equal(found[name], wanted[name]):
                continue
            error = _relative(found[name], wanted[name])
            cause = ""
            for other, value in wanted.items():
                if other != name and is_equal(found[name], value):
                    cause = f"it is that of {other}: the two were exchanged"
                    break
            self.differs("initial weight", f"relative error {error:.1e}", name, cause)

    def random_numbers(self, drawn: Sequence[tuple[int, Any]]) -> None:
        """``drawn``: by rank its data rank, and the states of its generators."""
        if len(drawn) > 1 and all(states == drawn[0][1] for _, states in drawn):
            note = "all ranks draw the same random numbers, as for dropout"
            if self._shape.data_ranks > 1 and note not in self.certificate.notes:
                self.certificate.notes.append(note)
        first: dict[int, tuple[int, Any]] = {}
        for rank, (data_rank, states) in enumerate(drawn):
            leader, expected = first.setdefault(data_rank, (rank, states))
            if states != expected:
                self.differs(
                    "random numbers",
                    f"rank {rank} draws others than rank {leader}, which has the same batch",
                    axis="tensor",
                    ranks=(leader, rank),
                )

    def losses(
        self,
        found: Sequence[float],
        wanted: Sequence[ExpectedForward],
        divisor: float,
        finite: bool,
    ) -> None:
        """``found``: the summed losses by rank; ``wanted``: by data rank."""
        total = 0.0
        for data_rank, ranks in enumerate(self.data_ranks):
            expected = wanted[data_rank].loss
            total += found[ranks[0]]
            wrong = [
                rank
                for rank in ranks
                if not abs(found[rank] - expected) <= self._bounds.loss * abs(expected)
            ]
            if finite and wrong:
                self.differs(
                    "loss",
                    f"{found[wrong[0]]:.8g} on {ranks_text(wrong)}, {expected:.8g} in one process "
                    "for the same batch",
                    cause="the model, its weights or the batch are others there",
                    ranks=tuple(wrong),
                )
        self.certificate.losses.append(
            (total / divisor, sum(each.loss for each in wanted) / divisor)
        )

    def outputs(self, found: Sequence[list[Norms]], wanted: Sequence[ExpectedForward]) -> None:
        """``found``: by rank and forward. Only where ranks compute whole outputs."""
        for data_rank, ranks in enumerate(self.data_ranks):
            expected = len(wanted[data_rank].outputs)
            for rank in ranks:
                if len(found[rank]) != expected:
                    self.differs(
                        "forward",
                        f"rank {rank} ran {len(found[rank])} of {expected} forwards",
                        cause="a micro-batch was missed, or ran twice",
                        ranks=(rank,),
                    )
                    continue
                pairs = zip(found[rank], wanted[data_rank].outputs, strict=True)
                for number, (ours, theirs) in enumerate(pairs, 1):
                    first = first_difference(ours, theirs, self._bounds.outputs)
                    if first is not None:
                        self._other_output(rank, number, *first)
                        break

    def _other_output(self, rank: int, number: int, name: str, ours: float, theirs: float) -> None:
        called = f"what {name} returns" if name else "what the model returns"
        self.differs(
            "forward",
            f"on rank {rank}, in forward {number}, {called} has norm {ours:.8g}, in one "
            f"process {theirs:.8g}",
            cause="the model, its weights or the batch are others there"
            if not name
            else f"{name} or its weights are others there",
            ranks=(rank,),
        )

    def settings(self, found: Sequence[Any]) -> None:
        """``found``: by rank, (name, value) of those of the optimizer's groups."""
        wrong = [rank for rank, each in enumerate(found) if each != found[0]]
        if wrong:
            theirs, ours = dict(found[wrong[0]]), dict(found[0])
            names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
            shown = ", ".join(
                f"{name} is {theirs.get(name, 'missing')} instead of {ours.get(name, 'missing')}"
                for name in names[:4]
            )
            self.differs(
                "optimizer",
                f"{ranks_text(wrong)} has other settings than rank 0: {shown}",
                cause="learning rate, weight decay or another setting was changed there",
                ranks=tuple(wrong),
            )

    def samples(self, found: int, wanted: int | None) -> None:
        """The sums of the samples' hashes."""
        if wanted is not None and found != wanted:
            self.differs("data", "the ranks together did not read the samples of the global batch")

    def gradients(
        self,
        track: int,
        found: Mapping[str, Tensor],
        expected: Mapping[str, ExpectedGradient],
        inputs: StepInputs,
        replica: int,
    ) -> None:
        """Of one track, complete and not clipped, as the ranks of ``replica`` have them."""
        wrong: dict[str, float] = {}
        typical = _typical(expected)
        for name in found:
            each = expected[name]
            row = self.certificate.parameters[name]
            error = _size(found[name].to(each.value.dtype) - each.value)
            least = self._bounds.least_share * typical * math.sqrt(each.value.numel())
            error /= max(each.size, least, 1e-30)
            row.gradient = _larger(row.gradient, error)
            row.gradient_bound = self._bounds.gradient
            is_off = not error <= self._bounds.gradient
            if is_off or (error > _ROUNDED and self._is_narrower(found[name], each.value)):
                wrong[name] = error
            self._note_use(row, each.used_by)
        if not wrong:
            return
        # Computing these costs a step in one process.
        causes = self._causes(track, expected, inputs)
        for name, error in wrong.items():
            cause = causes.of_gradient(name, found[name])
            where = f" in replica {replica}" if replica else ""
            self.differs(
                "gradient",
                f"relative error {error:.1e}{where}, bound {self._bounds.gradient:.0e}",
                name,
                cause.text,
                cause.axis,
                cause.ranks,
            )

    def remember(self, expected: Sequence[Mapping[str, ExpectedGradient]]) -> None:
        """Keeps the gradients of this step, by track, for the next."""
        for track, gradients in enumerate(expected):
            self._gradients_before[track] = {n: each.value for n, each in gradients.items()}

    def _is_narrower(self, found: Tensor, expected: Tensor) -> bool:
        """Whether the values have been rounded to a dtype that the policy does not ask for."""
        if self._bounds.rounds_gradients:
            return False
        return any(
            is_rounded_to(found, dtype) and not is_rounded_to(expected, dtype)
            for dtype in self._bounds.narrow
        )

    def _causes(
        self, track: int, expected: Mapping[str, ExpectedGradient], inputs: StepInputs
    ) -> Causes:
        run = self.run

        def contributions(names: Sequence[str]) -> list[Contribution]:
            found = []
            for each in run.contributions(inputs, run.weights):
                each.gradients = {name: each.gradients[name] for name in names}
                found.append(each)
            return found

        def with_exchanged(names: Mapping[str, str]) -> list[Contribution]:
            weights = []
            for each in run.weights:
                weights.append({name: each[names.get(name, name)] for name in each})
            return list(run.contributions(inputs, weights))

        def with_weights_before() -> Mapping[str, ExpectedGradient]:
            return run.gradients(inputs, run.weights_before)[0][track]

        own = range(len(inputs.batches))
        if run.replicas_differ:
            own = range(track * self._shape.shard, (track + 1) * self._shape.shard)
        return Causes(
            self._shape,
            self.data_ranks,
            list(own),
            expected,
            self._gradients_before[track],
            contributions,
            with_weights_before if self.step > 1 else None,
            with_exchanged,
        )

    def _note_use(self, row: ParameterRow, used_by: set[int]) -> None:
        if not used_by:
            note = "unused"
        elif len(used_by) < self._shape.data_ranks and not self.run.replicas_differ:
            note = "used on some ranks"
        else:
            return
        if note not in row.notes:
            row.notes.append(note)

    def norm(self, found: float, norms: Sequence[float]) -> None:
        """``norms``: of the gradients that the ranks have, by track."""
        wanted = sum(norms) / len(norms)
        self.certificate.norms.append((found, wanted))
        if abs(found - wanted) <= self._bounds.norm * wanted:
            return
        self.differs(
            "norm",
            f"the norm of the gradient is {wanted:.8g}, the run has {found:.8g}",
            cause=cause_of_norm(found, wanted, self._squares, self._shape),
        )

    def update(
        self,
        track: int,
        gradients: Mapping[str, Tensor],
        used: set[str],
        loss_scale: float,
    ) -> float:
        """Updates what is expected with the gradients that the ranks have, clipped; returns their
        norm. ``used``: names of those that have one."""
        self._squares = {
            name: (_size(value) / loss_scale) ** 2 for name, value in gradients.items()
        }
        norm = math.sqrt(sum(self._squares.values()))
        factor = min(1.0, self._clip / (norm + 1e-6)) / loss_scale
        kept = {name: value for name, value in gradients.items() if name in used}
        self.run.tracks[track].update(kept, factor)
        return norm

    def weights(
        self,
        check: str,
        found: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
    ) -> None:
        """Of trained parameters, after an update."""
        bound = self._bounds.outer if self.run.replicas_differ else self._bounds.update
        for name, value in found.items():
            row = self.certificate.parameters[name]
            if not row.trained:
                continue
            wanted = expected[name].detach()
            last_place = 4 * torch.finfo(wanted.dtype).eps * _size(wanted)
            error = max(_size(value - wanted) - last_place, 0.0)
            error /= max(_size(wanted - before[name]), 1e-30)
            row.update = _larger(row.update, error)
            row.update_bound = bound
            if not error <= bound:
                cause = ""
                if is_equal(value, before[name]):
                    cause = "it was not updated"
                elif not value.isfinite().all():
                    cause = "it holds NaN or infinity"
                self.differs(check, f"relative error {error:.1e}, bound {bound:.0e}", name, cause)

    def frozen(self, found: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
        """Parameters that are not trained must not move."""
        for name, row in self.certificate.parameters.items():
            if not row.trained and not is_equal(found[name], before[name]):
                self.differs("update", "a frozen parameter has moved", name)

    def owned(self, weights: Mapping[str, Tensor], updated: Mapping[str, Tensor]) -> None:
        """With split updates: all replicas compute with what the owners have."""
        for name, value in updated.items():
            # One without dimensions is not gathered.
            is_narrow = self._bounds.gathers_bf16 and value.ndim > 0
            rounded = value.bfloat16().to(value.dtype) if is_narrow else value
            if self.certificate.parameters[name].trained and not is_equal(weights[name], rounded):
                self.differs(
                    "update",
                    "the replicas do not have the values of the one that updates it",
                    name,
                    axis="replicate",
                )

    def buffers(self, data_rank: int, found: Mapping[str, Tensor]) -> None:
        """That forwards have changed on a data rank."""
        wanted = self.run.plain.buffers_of(data_rank)
        for name, value in found.items():
            error = _relative(value, wanted[name])
            if not error <= self._bounds.loss + 1e-5:
                ranks = tuple(self.data_ranks[data_rank])
                what = f"relative error {error:.1e} on {ranks_text(ranks)}"
                self.differs("buffer", what, name, ranks=ranks)

    def copies(self, what: str, held: Sequence[Mapping[str, tuple[str, int]]]) -> list[str]:
        """Names of tensors that differ between ranks which have the same part of them.

        ``held``: by rank and name, which part of a tensor it has and a hash of its bits.
        """
        unequal: list[str] = []
        for name in held[0]:
            by_part: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
            for rank, tensors in enumerate(held):
                part, value = tensors[name]
                by_part[part][value].append(rank)
            differing = [each for each in by_part.values() if len(each) > 1]
            if differing:
                unequal.append(name)
                self._unequal(what, name, differing)
        return unequal

    def _unequal(self, what: str, name: str, parts: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """``parts``: of the tensor, each with the ranks of every hash."""
        groups = sorted(parts[0].values(), key=len, reverse=True)
        axis = self._axis_between(groups[0][0], groups[1][0])
        ranks = {rank for hashes in parts for group in hashes.values() for rank in group}
        pair = f"{ranks_text(groups[0])} and {ranks_text(groups[1])}"
        shared = "the same part"
        if len(parts) > 1:
            shared = f"the same of {len(parts)} parts that differ"
        cause = f"a contribution over the {axis} axis did not reach all, or memory was changed"
        if what != "gradients":
            cause = "memory was changed, or something other than the optimizer changed it"
        self.differs(
            "copies",
            f"the {what} of {pair} differ, which hold {shared}",
            name,
            cause,
            axis,
            tuple(sorted(ranks)),
        )

    def _axis_between(self, one: int, other: int) -> str:
        """The first axis along which two ranks differ."""
        places = [(self._ranks == rank).nonzero()[0].tolist() for rank in (one, other)]
        for axis, a, b in zip(self._axes, *places, strict=True):
            if a != b:
                return axis
        return ""

    def differs(
        self,
        check: str,
        what: str,
        parameter: str | None = None,
        cause: str = "",
        axis: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Notes a discrepancy of this step; one of the same kind was noted in its first step."""
        self.certificate.add(
            Discrepancy(check, self.step, what, cause, parameter, axis, None, ranks)
        )


# Errors below are rounding.
_ROUNDED = 1e-5


def new_rows(module: nn.Module) -> dict[str, ParameterRow]:
    """A row for each parameter of ``module``, with what can be said before it is trained."""
    rows: dict[str, ParameterRow] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            rows[first[id(parameter)]].notes.append(f"tied to {name}")
            continue
        first[id(parameter)] = name
        rows[name] = ParameterRow(list(parameter.shape), parameter.requires_grad)
        if not parameter.requires_grad:
            rows[name].notes.append("frozen")
    return rows


def is_equal(one: Tensor, other: Tensor) -> bool:
    """In shape and in every value."""
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def _typical(expected: Mapping[str, ExpectedGradient]) -> float:
    """The root mean square of all gradients."""
    numel = sum(each.value.numel() for each in expected.values())
    return math.sqrt(sum(each.size**2 for each in expected.values()) / max(numel, 1))


def _size(tensor: Tensor) -> float:
    """The 2-norm, in fp64."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return float(torch.linalg.vector_norm(tensor.detach().to(wide)))


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    if not (found.is_floating_point() or found.is_complex()):
        return 0.0 if torch.equal(found, expected) else math.inf
    return _size(found - expected) / max(_size(expected), 1e-30)


def _larger(one: float, other: float) -> float:
    """The larger of two errors. NaN, an error that is not a number, counts as infinite."""
    return max(one, other) if math.isfinite(other) else math.inf
