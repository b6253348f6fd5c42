"""The likely cause of a tensor that is not what it should be: `Causes`.

Each kind of error leaves a trace in the numbers: a factor, the values of another tensor or of the
step before, a contribution that is missing or counted twice, values that a narrower dtype can hold.
The kinds are tried one after the other, and the first one that explains the difference is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from parallel2d.certification.certificate import UNEXPLAINED, ranks_text
from parallel2d.certification.exchanged import exchanged_names, exchanged_pairs
from parallel2d.certification.expected_run import ExpectedGradient
from parallel2d.certification.plain_model import Contribution
from parallel2d.mesh import MeshShape
from parallel2d.weights.geometry import as_real

# A kind explains a difference when it leaves less than this share of it.
_EXPLAINED = 0.02
_MOST_PARTNERS = 64  # parameters of the same shape that are looked at
_MOST_ROWS = 512
_MISSING = 0.02  # a contribution that counts less is not there
_MOST_CONTRIBUTIONS = 256


@dataclass(frozen=True)
class Cause:
    """``text`` for people; ``axis`` and ``ranks`` where they are known."""

    text: str
    axis: str | None = None
    ranks: tuple[int, ...] = ()


@dataclass
class Causes:
    """What the gradients of one step are compared with.

    ``ranks_of``: the global ranks of each data rank; ``data_ranks``: over which the gradient is a
    mean; ``before``: the gradients of the step before; ``contributions``: of this step, for the
    named parameters; ``with_weights_before``: the gradient at the weights of the step before;
    ``with_exchanged``: what a data rank adds when each parameter has the value of another.
    """

    shape: MeshShape
    ranks_of: Sequence[Sequence[int]]
    data_ranks: Sequence[int]
    expected: Mapping[str, ExpectedGradient]
    before: Mapping[str, Tensor]
    contributions: Callable[[Sequence[str]], list[Contribution]]
    with_weights_before: Callable[[], Mapping[str, ExpectedGradient]] | None
    with_exchanged: Callable[[Mapping[str, str]], list[Contribution]]
    _kept: dict[str, list[Contribution]] = field(default_factory=dict)
    _exchanges: list[tuple[tuple[str, str], dict[str, str], list[Contribution]]] | None = None
    _old: Mapping[str, ExpectedGradient] | None = None
    _part: Tensor | None = None

    def of_gradient(self, name: str, found: Tensor) -> Cause:
        """Why ``found`` is not the gradient of the parameter ``name``."""
        expected = self.expected[name].value
        found = found.to(expected.dtype)
        # An error may be in a part of a tensor, such as the end of a bucket: only that is looked at
        off = (found - expected).abs()
        self._part = off > 1e-3 * off.max()
        if not found.isfinite().all():
            return Cause("it holds NaN or infinity, which no rank's contribution does")
        for kind in (
            self._is_zero,
            self._is_old,
            self._is_scaled,
            self._is_narrow,
            self._is_another,
            self._has_rows_exchanged,
            self._lacks_contributions,
            self._has_contributions_of_another,
            self._used_old_weights,
            self._used_exchanged_modules,
            self._is_scaled_somehow,
        ):
            cause = kind(name, found, expected)
            if cause is not None:
                return cause
        return Cause(_where(found, expected))

    def _is_zero(self, _name: str, found: Tensor, expected: Tensor) -> Cause | None:
        if found.any() or not expected.any():
            return None
        return Cause("it is zero: the gradient was dropped, or never added")

    def _is_old(self, name: str, found: Tensor, expected: Tensor) -> Cause | None:
        before = self.before.get(name)
        if before is None:
            return None
        if self._explains(before, found, expected):
            return Cause("it is the gradient of the step before: a buffer was not filled again")
        if self._explains(before + expected, found, expected):
            return Cause("it holds the gradient of the step before too: gradients were not cleared")
        return None

    def _is_scaled(self, _name: str, found: Tensor, expected: Tensor) -> Cause | None:
        """By a small number of ranks or micro-batches, or divided by one."""
        factor = _factor(found, expected)
        near = Fraction(factor).limit_denominator(64)
        if not near or 1 not in near.as_integer_ratio() or abs(factor / near - 1) > 1e-3:
            return None
        # A single number is always some multiple of another.
        if (
            near == 1
            or expected.numel() == 1
            or not self._explains(expected * factor, found, expected)
        ):
            return None
        words = f"it is {float(near):.4g} times what it should be"
        axes = self._axes_of_size(near)
        if axes:
            how = "summed instead of averaged" if near > 1 else "divided once too often"
            ranks = [f"the {size} ranks of the {axis} axis" for axis, size in axes.items()]
            words += f", as if {how} over {' or '.join(ranks)}"
        return Cause(words, next(iter(axes)) if len(axes) == 1 else None)

    def _axes_of_size(self, factor: Fraction) -> dict[str, int]:
        """Axes of as many ranks as ``factor``, or as one over it, and their sizes."""
        found = {}
        for axis in ("replicate", "shard", "tensor"):
            size = getattr(self.shape, axis)
            if size > 1 and factor in (size, Fraction(1, size)):
                found[axis] = size
        return found

    def _is_scaled_somehow(self, _name: str, found: Tensor, expected: Tensor) -> Cause | None:
        factor = _factor(found, expected)
        if expected.numel() < 8 or not self._explains(expected * factor, found, expected):
            return None
        return Cause(f"it is {factor:.6g} times what it should be")

    def _is_narrow(self, _name: str, found: Tensor, expected: Tensor) -> Cause | None:
        if is_rounded_to(found, torch.bfloat16) and not is_rounded_to(expected, torch.bfloat16):
            return Cause("all of its values are bfloat16 numbers: it was added or sent in bfloat16")
        # The mean of a few bfloat16 numbers needs a bit more, and looks like float16.
        if is_rounded_to(found, torch.float16) and not is_rounded_to(expected, torch.float16):
            return Cause("all of its values have 11 bits: it was added or sent in 16 bits")
        return None

    def _is_another(self, name: str, found: Tensor, expected: Tensor) -> Cause | None:
        for other in self._partners(name):
            value = self.expected[other].value
            if self._explains(value, found, expected):
                return Cause(f"it is the gradient of {other}: the two were exchanged")
        return None

    def _has_rows_exchanged(self, _name: str, found: Tensor, expected: Tensor) -> Cause | None:
        """Parts along dim 0, such as experts that share a tensor."""
        if found.ndim < 2 or not 2 <= found.shape[0] <= _MOST_ROWS:
            return None
        ours, theirs = found.flatten(1), expected.flatten(1)
        off = (ours - theirs).norm(dim=1)
        rows = (off > 0.01 * theirs.norm(dim=1).clamp(min=1e-30)).nonzero()[:, 0].tolist()
        if len(rows) < 2:
            return None
        came_from: dict[int, int] = {}
        for row in rows:
            distances = (theirs - ours[row]).norm(dim=1)
            nearest = int(distances.argmin())
            if nearest == row or distances[nearest] > _EXPLAINED * off[row]:
                return None
            came_from[row] = nearest
        moved = ", ".join(f"{row} holds {other}" for row, other in list(came_from.items())[:6])
        return Cause(f"parts along dim 0 were exchanged: {moved}")

    def _lacks_contributions(self, name: str, found: Tensor, expected: Tensor) -> Cause | None:
        parts = self._contributions_to(name)
        basis = [self._as_mean(part, name) for part in parts]
        if not basis or len(basis) > _MOST_CONTRIBUTIONS:
            return None
        weights = _fit([each[self._part] for each in basis], found[self._part])
        if weights is None:
            return None
        fitted = torch.stack(basis).mul(_along_first(weights, basis[0])).sum(0)
        if not self._explains(fitted, found, expected):
            return None
        counted = list(zip(parts, weights, strict=True))
        missing = [part for part, weight in counted if weight < _MISSING]
        if not missing:
            return self._counted_otherwise(counted)
        return self._not_counted(missing, [weight for weight in weights if weight >= _MISSING])

    def _not_counted(self, missing: Sequence[Contribution], others: Sequence[float]) -> Cause:
        """``others``: how often each of the other contributions is in the gradient."""
        words = "missing: " + ", ".join(self._called(part) for part in missing)
        words += _how_others_count(others)
        axis = self._axis_of({part.data_rank for part in missing})
        return Cause(words, axis, self._ranks_of(missing))

    def _counted_otherwise(self, counted: Sequence[tuple[Contribution, float]]) -> Cause:
        """``counted``: contributions, and how often each is in the gradient."""
        least = 0.3 * max(abs(weight - 1) for _, weight in counted)
        wrong = [(part, weight) for part, weight in counted if abs(weight - 1) >= least]
        listed = ", ".join(f"{self._called(part)} counts {w:.6g} times" for part, w in wrong)
        return Cause(listed, ranks=self._ranks_of(part for part, _ in wrong))

    def _has_contributions_of_another(
        self, name: str, found: Tensor, expected: Tensor
    ) -> Cause | None:
        for other in self._partners(name):
            for own in self.data_ranks:
                kept = self._sum_of(self._contributions_to(name), name, [own])
                moved = self._sum_of(self._contributions_to(other), other, [own])
                if self._explains(expected - kept + moved, found, expected):
                    ranks = tuple(self.ranks_of[own])
                    what = f"on {ranks_text(ranks)} it holds what belongs to {other}"
                    return Cause(f"{what}: the two were exchanged", None, ranks)
        return None

    def _used_old_weights(self, name: str, found: Tensor, expected: Tensor) -> Cause | None:
        if self.with_weights_before is None:
            return None
        if self._old is None:
            self._old = self.with_weights_before()
        if self._explains(self._old[name].value, found, expected):
            return Cause("it was computed with the weights of the step before")
        return None

    def _used_exchanged_modules(self, name: str, found: Tensor, expected: Tensor) -> Cause | None:
        # One data rank alone has exchanged them, or all have.
        suspects = [*([each] for each in self.data_ranks), list(self.data_ranks)]
        for pair, names, parts in self._tried_exchanges():
            for among in suspects:
                kept = self._sum_of(self._contributions_to(name), name, among)
                # The gradient goes to the module that was used, or stays in its place.
                for place in (names[name], name):
                    moved = self._sum_of(parts, place, among)
                    if self._explains(expected - kept + moved, found, expected):
                        numbers = self._ranks_of_data(among)
                        what = f"{pair[0]} and {pair[1]} are exchanged"
                        return Cause(f"{what} on {ranks_text(numbers)}", None, numbers)
        return None

    def _tried_exchanges(
        self,
    ) -> list[tuple[tuple[str, str], dict[str, str], list[Contribution]]]:
        """Pairs of modules, which parameter takes the place of which, and contributions then."""
        if self._exchanges is None:
            shapes = {name: each.value.shape for name, each in self.expected.items()}
            self._exchanges = []
            for pair in exchanged_pairs(shapes):
                names = exchanged_names(shapes, pair)
                self._exchanges.append((pair, names, self.with_exchanged(names)))
        return self._exchanges

    def _sum_of(
        self, parts: Sequence[Contribution], name: str, data_ranks: Sequence[int]
    ) -> Tensor:
        total = torch.zeros_like(self.expected[name].value)
        for part in parts:
            if part.data_rank in data_ranks:
                total += self._as_mean(part, name)
        return total

    def _explains(self, candidate: Tensor, found: Tensor, expected: Tensor) -> bool:
        """Whether ``found`` is ``candidate`` rather than ``expected``, where it is not as
        expected."""
        left = torch.linalg.vector_norm((found - candidate)[self._part])
        off = torch.linalg.vector_norm((found - expected)[self._part])
        return float(left) < _EXPLAINED * float(off)

    def _partners(self, name: str) -> list[str]:
        """Other parameters of the same shape."""
        shape = self.expected[name].value.shape
        found = [other for other, each in self.expected.items() if each.value.shape == shape]
        found.remove(name)
        return found[:_MOST_PARTNERS]

    def _contributions_to(self, name: str) -> list[Contribution]:
        if name not in self._kept:
            names = [name, *self._partners(name)]
            parts = [
                part for part in self.contributions(names) if part.data_rank in self.data_ranks
            ]
            self._kept.update(dict.fromkeys(names, parts))
        return self._kept[name]

    def _as_mean(self, part: Contribution, name: str) -> Tensor:
        """What ``part`` adds to the mean over data ranks."""
        gradient = part.gradients[name]
        value = self.expected[name].value
        if gradient is None:
            return torch.zeros_like(value)
        return gradient.to(value.dtype) / len(self.data_ranks)

    def _called(self, part: Contribution) -> str:
        return f"micro-batch {part.number + 1} of {ranks_text(self.ranks_of[part.data_rank])}"

    def _ranks_of(self, parts: Iterable[Contribution]) -> tuple[int, ...]:
        return self._ranks_of_data(sorted({part.data_rank for part in parts}))

    def _ranks_of_data(self, data_ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for each in data_ranks for rank in self.ranks_of[each])

    def _axis_of(self, data_ranks: set[int]) -> str | None:
        """Over which axis the contributions of ``data_ranks`` did not arrive."""
        replicas = {each // self.shape.shard for each in data_ranks}
        whole = {r * self.shape.shard + s for r in replicas for s in range(self.shape.shard)}
        if data_ranks == whole and len(replicas) < self.shape.replicate:
            return "replicate"
        if self.shape.shard > 1 and len(replicas) == 1:
            return "shard"
        return None


def cause_of_norm(
    found: float, wanted: float, squares: Mapping[str, float], shape: MeshShape
) -> str:
    """Why the run's norm is ``found`` where the gradients have ``wanted``. ``squares``: of each
    parameter's norm."""
    lacks = wanted**2 - found**2
    for name, square in squares.items():
        if square and abs(lacks - square) < 1e-3 * square:
            return f"it lacks the gradient of {name}"
    ratio = found / wanted
    for axis in ("replicate", "shard", "tensor"):
        size = getattr(shape, axis)
        for power in (0.5, -0.5, 1.0, -1.0):
            if size > 1 and abs(ratio - size**power) < 1e-4 * ratio:
                return f"it is {ratio:.4g} times that, as if the {axis} axis counted wrongly"
    if lacks > 0:
        return f"{lacks / wanted**2:.1%} of its square is missing"
    return "it counts something more than once"


def is_rounded_to(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether (nearly) all values of ``tensor`` are numbers of the narrower ``dtype``."""
    if tensor.dtype == dtype or tensor.dtype.itemsize <= dtype.itemsize:
        return False
    real = as_real(tensor)
    values = real[real != 0]
    if values.numel() < 16:
        return False
    return bool((values.to(dtype).to(values.dtype) == values).double().mean() > 0.98)


def _factor(found: Tensor, expected: Tensor) -> float:
    square = float((expected.abs() ** 2).sum())
    if square == 0:
        return 0.0
    return float((found * expected.conj()).sum().real) / square


def _fit(basis: Sequence[Tensor], found: Tensor) -> list[float] | None:
    """By least squares, how often ``found`` holds each of ``basis``; None where there are too few
    numbers to tell."""
    rows = torch.stack([as_real(each).reshape(-1) for each in basis]).double().cpu()
    right = as_real(found).reshape(-1).double().cpu()
    # With as many unknowns as numbers anything fits.
    if rows.shape[1] < 4 * len(basis):
        return None
    weights = torch.linalg.lstsq(rows.T, right[:, None], driver="gelsd").solution[:, 0]
    return [float(weight) for weight in weights]


def _along_first(weights: Sequence[float], like: Tensor) -> Tensor:
    """One number for each of several tensors that are stacked."""
    shape = (-1, *[1] * like.ndim)
    return torch.tensor(weights, dtype=like.real.dtype, device=like.device).view(shape)


def _where(found: Tensor, expected: Tensor) -> str:
    """Where the largest difference is."""
    difference = (found - expected).abs().flatten()
    place = int(difference.argmax())
    share = float((difference > 0.1 * difference.max()).double().mean())
    index = [int(each) for each in torch.unravel_index(torch.tensor(place), expected.shape)]
    values = (
        f"{found.flatten()[place].item():.6g} instead of {expected.flatten()[place].item():.6g}"
    )
    return f"{UNEXPLAINED}; largest at {index}: {values}; {share:.1%} of it is as far off"


def _how_others_count(weights: Sequence[float]) -> str:
    """What is said of contributions that are there, but not once; empty where they are."""
    if not weights or max(weights) - min(weights) >= 0.02 or abs(weights[0] - 1) <= 0.02:
        return ""
    return f"; the others count {weights[0]:.3g} times"
