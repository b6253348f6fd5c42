"""Adafactor (Shazeer and Stern 2018) on parameters that may be sharded. Gradients flow in, updated
parameters flow out.

The variant is ``torch.optim.Adafactor``'s, its state has the same names and whole shapes, and on
plain tensors the update is the same.

[Note: statistics of sharded matrices] Four numbers or vectors look at a whole matrix: the root mean
square of the parameter, the row and the column means of the squared gradient, the mean of the row
means, and the root mean square of the update. Each is a sum, so each rank sums its own part and the
sums are added over those mesh axes that split the summed dim. The row statistic of a matrix that an
axis splits by rows is itself split by that axis. All parameters share one all-reduce per axis and
round, and there are three rounds per update, because the second needs the first's result and the
third the second's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallel2d.optimizer.sums import AxisSums, split_axes


@dataclass
class _Work:
    """One parameter's update in flight; tensors are this rank's parts."""

    parameter: Tensor
    gradient: Tensor
    whole: Tensor  # the parameter itself, for its whole shape and its placements
    state: dict[str, Any]
    group: dict[str, Any]
    step: float = 0.0
    alpha: float = 0.0
    row_means: Tensor | None = None  # mean over rows of row_var, whole

    @property
    def eps1(self) -> float:
        given = self.group["eps"][0]
        return torch.finfo(self.parameter.dtype).eps if given is None else float(given)


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
        works = list(self._works())
        if not works:
            return loss
        self._first_round(works)
        self._second_round(works)
        self._third_round(works)
        return loss

    def update_bytes(self) -> dict[str, float]:
        """See `parallel2d.optimizer.update_bytes`."""
        sums = AxisSums(count_only=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                dims, dtype = parameter.ndim, _reduced_dtype(parameter)
                scalar = torch.empty((), dtype=torch.float64, device="meta")
                sums.add(parameter, scalar, range(dims))
                if dims > 1:
                    row, column = (
                        torch.empty(
                            _local(self.state[parameter][key]).shape, device="meta", dtype=dtype
                        )
                        for key in _FACTORS
                    )
                    sums.add(parameter, row, [dims - 1])
                    sums.add(parameter, column, [dims - 2])
                    sums.add(
                        parameter,
                        torch.empty((*row.shape[:-2], 1, 1), dtype=dtype, device="meta"),
                        [dims - 2],
                    )
                sums.add(parameter, scalar, range(dims))
        return sums.sent()

    def _works(self) -> Iterator[_Work]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield _Work(
                        _local(parameter),
                        _local(parameter.grad),
                        parameter,
                        self.state[parameter],
                        group,
                    )

    def _first_round(self, works: list[_Work]) -> None:
        """The parameter's root mean square; decay; row and column statistics."""
        sums = AxisSums()
        parts = []
        for work in works:
            dims = work.whole.ndim
            square = sums.add(work.whole, _sum_of_squares(work.parameter), range(dims))
            row = column = None
            if dims > 1:
                squared = work.gradient.to(_reduced_dtype(work.gradient)).square()
                row = sums.add(work.whole, squared.sum(-1, keepdim=True), [dims - 1])
                column = sums.add(work.whole, squared.sum(-2, keepdim=True), [dims - 2])
            parts.append((square, row, column))
        sums.reduce()
        for work, (square, row, column) in zip(works, parts, strict=True):
            group = work.group
            work.state["step"] += 1
            work.step = work.state["step"].item()
            size, shape = work.whole.numel(), work.whole.shape
            rms = math.sqrt(sums.value(square).item() / max(size, 1))
            work.alpha = max(group["eps"][1], rms) * min(
                float(group["lr"]), 1 / math.sqrt(work.step)
            )
            if group["weight_decay"] != 0:
                work.parameter.mul_(1 - group["lr"] * group["weight_decay"])
            new = work.step ** group["beta2_decay"]  # the new value's weight, 1 in the first step
            if row is not None and column is not None:
                for key, handle, length in (
                    ("row_var", row, shape[-1]),
                    ("col_var", column, shape[-2]),
                ):
                    variance = _local(work.state[key])
                    variance.lerp_((sums.value(handle) / length).to(variance.dtype), new)
            else:
                _local(work.state["variance"]).lerp_(work.gradient * work.gradient, new)

    def _second_round(self, works: list[_Work]) -> None:
        """The mean over rows of the row statistic."""
        sums = AxisSums()
        handles = []
        for work in works:
            if work.whole.ndim > 1:
                row = _local(work.state["row_var"])
                handles.append(
                    (work, sums.add(work.whole, row.sum(-2, keepdim=True), [work.whole.ndim - 2]))
                )
        sums.reduce()
        for work, handle in handles:
            work.row_means = sums.value(handle) / work.whole.shape[-2]

    def _third_round(self, works: list[_Work]) -> None:
        """The update's root mean square, then the update; computed twice so that one parameter's is
        held at a time."""
        sums = AxisSums()
        handles = [
            sums.add(work.whole, _sum_of_squares(_update(work)), range(work.whole.ndim))
            for work in works
        ]
        sums.reduce()
        for work, handle in zip(works, handles, strict=True):
            rms = math.sqrt(sums.value(handle).item() / max(work.whole.numel(), 1))
            work.parameter.add_(_update(work), alpha=-work.alpha / max(1.0, rms / work.group["d"]))


_FACTORS = ("row_var", "col_var")


def _update(work: _Work) -> Tensor:
    """The gradient over the root of its estimated variance: this rank's part."""
    if work.row_means is not None:
        row, column = (_local(work.state[key]) for key in _FACTORS)
        variance = (row @ column).div_(work.row_means.clamp(min=work.eps1).to(row.dtype))
    else:
        variance = _local(work.state["variance"]).clone()
    return variance.clamp_(min=work.eps1 * work.eps1).rsqrt_().mul_(work.gradient)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    return tensor.to(_reduced_dtype(tensor)).square().sum(dtype=torch.float64)


def _reduced_dtype(tensor: Tensor) -> torch.dtype:
    """Sums are kept in fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


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
    shape = torch.Size(1 if dim == summed else length for dim, length in enumerate(parameter.shape))
    local = _local(parameter)
    zeros = local.new_zeros(
        [1 if dim == summed else length for dim, length in enumerate(local.shape)]
    )
    if not isinstance(parameter, DTensor):
        return zeros
    gone = {axis for axis, _, dim, _ in split_axes(parameter) if dim == summed}
    placements = [
        Replicate() if axis in gone else placement
        for axis, placement in enumerate(parameter.placements)
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
