"""Adafactor (Shazeer and Stern 2018) on parameters that may be sharded: the class `Adafactor`.

The variant is ``torch.optim.Adafactor``'s, its state has the same names and whole shapes, and on
plain tensors the update is the same.

[Note: statistics of sharded matrices] Several numbers and vectors depend on a whole matrix: the
root mean square of the parameter, the row and the column means of the squared gradient, the mean of
the row means, and the root mean square of the update. Each is a sum, so each rank sums its own part
and the sums are added over those mesh axes that split the summed dim. The row statistic of a matrix
that an axis splits by rows is itself split by that axis. All parameters share one all-reduce per
axis and round, and there are three rounds per update, because the second needs the first's result
and the third the second's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.parallel.cost.collectives import sent_bytes
from parallel2d.parallel.weights.geometry import local_part


@dataclass
class _Update:
    """One parameter's update while it is computed; tensors are this rank's parts."""

    parameter: Tensor
    gradient: Tensor
    whole: Tensor  # the parameter itself, for its whole shape and its placements
    state: dict[str, Any]
    group: dict[str, Any]
    alpha: float = 0.0  # by how much the update is multiplied, before it is clipped
    row_means: Tensor | None = None  # mean over rows of row_var, whole; None but for matrices

    @property
    def eps1(self) -> float:
        given = self.group["eps"][0]
        if given is None:
            return torch.finfo(self.parameter.dtype).eps
        return float(given)


class Adafactor(torch.optim.Adafactor):
    """``torch.optim.Adafactor`` that is exact on `DTensor`s; see [Note: statistics of sharded
    matrices].

    State exists from the start, so that a checkpoint can be loaded before the first step: ``step``,
    and ``row_var`` and ``col_var`` (of matrices, sharded like them) or ``variance``. ``foreach``
    and ``maximize`` are not offered. ``step()`` is collective.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _initial_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective where parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = list(self._updates())
        if not updates:
            return loss
        self._first_round(updates)
        self._second_round(updates)
        self._third_round(updates)
        return loss

    def update_bytes(self) -> dict[str, float]:
        """See `optimizer.update_bytes`."""
        sums = AxisSums(count_only=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._count(parameter, sums)
        return sums.sent()

    def _count(self, parameter: Tensor, sums: AxisSums) -> None:
        """Adds tensors on meta of the shapes that the three rounds add for ``parameter``."""
        dims = parameter.ndim
        dtype = _reduced_dtype(parameter)
        scalar = torch.empty((), dtype=torch.float64, device="meta")
        sums.add(parameter, scalar, range(dims))
        if dims > 1:
            factors = [local_part(self.state[parameter][key]) for key in _FACTORS]
            row, column = (torch.empty(f.shape, dtype=dtype, device="meta") for f in factors)
            sums.add(parameter, row, [dims - 1])
            sums.add(parameter, column, [dims - 2])
            row_mean = torch.empty((*row.shape[:-2], 1, 1), dtype=dtype, device="meta")
            sums.add(parameter, row_mean, [dims - 2])
        sums.add(parameter, scalar, range(dims))

    def _updates(self) -> Iterator[_Update]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                yield _Update(
                    parameter=local_part(parameter),
                    gradient=local_part(parameter.grad),
                    whole=parameter,
                    state=self.state[parameter],
                    group=group,
                )

    def _first_round(self, updates: list[_Update]) -> None:
        """The parameter's root mean square; decay; row and column statistics."""
        sums = AxisSums()
        handles = []
        for update in updates:
            dims = update.whole.ndim
            square = sums.add(update.whole, _sum_of_squares(update.parameter), range(dims))
            row = column = None
            if dims > 1:
                squared = update.gradient.to(_reduced_dtype(update.gradient)).square()
                row = sums.add(update.whole, squared.sum(-1, keepdim=True), [dims - 1])
                column = sums.add(update.whole, squared.sum(-2, keepdim=True), [dims - 2])
            handles.append((square, row, column))
        sums.reduce()
        for update, (square, row, column) in zip(updates, handles, strict=True):
            group = update.group
            state = update.state
            shape = update.whole.shape
            state["step"] += 1
            step = state["step"].item()
            rms = math.sqrt(sums.value(square).item() / max(update.whole.numel(), 1))
            rate = min(float(group["lr"]), 1 / math.sqrt(step))
            update.alpha = max(group["eps"][1], rms) * rate
            if group["weight_decay"] != 0:
                update.parameter.mul_(1 - group["lr"] * group["weight_decay"])
            # The weight of the new squares; 1 in the first step, which replaces the initial zeros.
            new = step ** group["beta2_decay"]
            if row is None or column is None:
                variance = local_part(state["variance"])
                variance.lerp_(update.gradient * update.gradient, new)
                continue
            _move_towards(state["row_var"], sums.value(row) / shape[-1], new)
            _move_towards(state["col_var"], sums.value(column) / shape[-2], new)

    def _second_round(self, updates: list[_Update]) -> None:
        """The mean over rows of the row statistic."""
        sums = AxisSums()
        handles = []
        for update in updates:
            dims = update.whole.ndim
            if dims > 1:
                row = local_part(update.state["row_var"])
                handle = sums.add(update.whole, row.sum(-2, keepdim=True), [dims - 2])
                handles.append((update, handle))
        sums.reduce()
        for update, handle in handles:
            update.row_means = sums.value(handle) / update.whole.shape[-2]

    def _third_round(self, updates: list[_Update]) -> None:
        """The update's root mean square, then the update; computed twice so that one parameter's is
        held at a time."""
        sums = AxisSums()
        handles = []
        for update in updates:
            square = _sum_of_squares(_scaled_gradient(update))
            handles.append(sums.add(update.whole, square, range(update.whole.ndim)))
        sums.reduce()
        for update, handle in zip(updates, handles, strict=True):
            rms = math.sqrt(sums.value(handle).item() / max(update.whole.numel(), 1))
            # Clipped: an update whose root mean square is above `d` is scaled down to it.
            clipping = max(1.0, rms / update.group["d"])
            update.parameter.add_(_scaled_gradient(update), alpha=-update.alpha / clipping)


_FACTORS = ("row_var", "col_var")


def _scaled_gradient(update: _Update) -> Tensor:
    """The gradient over the root of its estimated variance: this rank's part."""
    eps = update.eps1
    if update.row_means is not None:
        row, column = (local_part(update.state[key]) for key in _FACTORS)
        variance = (row @ column).div_(update.row_means.clamp(min=eps).to(row.dtype))
    else:
        variance = local_part(update.state["variance"]).clone()
    return variance.clamp_(min=eps * eps).rsqrt_().mul_(update.gradient)


def _move_towards(variance: Tensor, mean: Tensor, weight: float) -> None:
    """Moves ``variance`` towards the whole ``mean`` by ``weight``."""
    local = local_part(variance)
    local.lerp_(mean.to(local.dtype), weight)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    return tensor.to(_reduced_dtype(tensor)).square().sum(dtype=torch.float64)


def _reduced_dtype(tensor: Tensor) -> torch.dtype:
    """Sums are kept in fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _initial_state(parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32)}
    if parameter.ndim > 1:
        state["row_var"] = _factor(parameter, parameter.ndim - 1)
        state["col_var"] = _factor(parameter, parameter.ndim - 2)
    else:
        state["variance"] = torch.zeros_like(parameter, requires_grad=False)
    return state


def _factor(parameter: Tensor, summed: int) -> Tensor:
    """Zeros of the parameter's shape with dim ``summed`` reduced to 1, split by the axes that split
    another dim."""
    local = local_part(parameter)
    local_shape = list(local.shape)
    local_shape[summed] = 1
    zeros = local.new_zeros(local_shape)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = list(parameter.placements)
    for axis, _, dim, _ in split_axes(parameter):
        if dim == summed:
            placements[axis] = Replicate()
    shape = list(parameter.shape)
    shape[summed] = 1
    # `from_local` takes shape and stride, because parts may be of different sizes.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def split_axes(tensor: Tensor) -> list[tuple[int, str, int, int]]:
    """(number, name, tensor dim, size) of each mesh axis of more than one rank that splits
    ``tensor``, outermost first."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    if not names:  # the axes of a mesh without names are called 0, 1, ...
        names = tuple(map(str, range(mesh.ndim)))
    found = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        ranks = mesh.size(axis)
        # Parameters are never partial, so what is not replicated is a Shard, which has a dim.
        dim = placement.dim  # type: ignore[attr-defined]
        if ranks > 1:
            found.append((axis, names[axis], dim, ranks))
    return found


class AxisSums:
    """Adds partial sums over mesh axes, all tensors of one dtype in one all-reduce per axis.

    Call `add` for each partial sum, `reduce` once, then `value` for each sum. ``count_only``:
    nothing is sent, and `sent` returns what would be.
    """

    def __init__(self, count_only: bool = False) -> None:
        self._count_only = count_only
        self._values: list[Tensor] = []
        # Handles of the values that are added over a group, in the order of `add`.
        self._by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = defaultdict(list)
        self._bytes: dict[str, float] = defaultdict(float)

    def add(self, like: Tensor, part: Tensor, dims: Collection[int]) -> int:
        """Takes this rank's ``part`` of a sum over ``dims`` of a tensor that is split as ``like``.
        Returns a handle for `value`.

        Calls must be made in the same order on every rank.
        """
        handle = len(self._values)
        self._values.append(part)
        for axis, name, dim, ranks in split_axes(like):
            # Over an axis that splits another dim there is nothing to add: ranks hold different
            # sums, each of them whole.
            if dim not in dims:
                continue
            # `split_axes` finds axes of DTensors only.
            assert isinstance(like, DTensor)
            mesh = like.device_mesh
            sent = sent_bytes("all_reduce", part.nbytes, ranks, mesh.device_type)
            self._bytes[name] += sent
            if self._count_only:
                continue
            group = mesh.get_group(axis)
            self._by_group[group, part.dtype].append(handle)
        return handle

    def reduce(self) -> None:
        """Runs the all-reduces: one per mesh axis and dtype. Collective."""
        # In the order of the calls of `add`, and so in the same order on every rank.
        for (group, _), handles in self._by_group.items():
            parts = [self._values[handle] for handle in handles]
            lengths = [part.numel() for part in parts]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=group)
            wholes = flat.split(lengths)
            # Written back, since a value that two axes split is summed again over the second.
            for handle, part, whole in zip(handles, parts, wholes, strict=True):
                self._values[handle] = whole.view(part.shape)

    def value(self, handle: int) -> Tensor:
        """The whole sum, after `reduce`."""
        return self._values[handle]

    def sent(self) -> dict[str, float]:
        """Bytes that this rank sends per mesh axis."""
        return dict(self._bytes)
