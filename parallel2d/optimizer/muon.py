"""Muon (Jordan et al. 2024) for the hidden matrices and AdamW for all else, as one optimizer, on
parameters that may be sharded: the class `Muon`.

The algorithms are ``torch.optim.Muon``'s and
``torch.optim.AdamW``'s; on plain tensors the updates are theirs to the bit.

[Note: orthogonalization needs the whole matrix] Muon's momentum is elementwise and stays sharded.
Its update is the whole momentum matrix made orthogonal by Newton-Schulz iterations in bf16, in
which a sum over parts rounds differently from the sum over the whole. So each rank casts its part
to bf16, as the iteration would do first, the parts are gathered (2 bytes per element and matrix
over the axes that split it), every rank iterates on the same whole matrix, and keeps its part of
the result. One whole bf16 matrix and the iteration's intermediates are held at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from parallel2d.cost.collectives import sent_bytes
from parallel2d.optimizer.groups import ADAMW, MUON
from parallel2d.optimizer.sums import split_axes
from parallel2d.weights.geometry import local_region

_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Groups with ``algorithm="muon"`` (matrices) are updated by Muon, those with
    ``algorithm="adamw"`` by AdamW.

    Args:
        params: parameter groups, each with ``algorithm``, as `parallel2d.optimizer.plan_groups`
            makes them.
        lr: of both; with ``adjust_lr_fn="match_rms_adamw"`` (Liu et al. 2025) Muon's updates have
            the size of AdamW's, so that one rate serves both; ``"original"`` wants about 20 times
            as much for Muon's groups (``lr_scale``).
        momentum, nesterov, ns_steps: of Muon.
        betas, adamw_eps, foreach, fused: of AdamW.

    State, param_groups and learning-rate schedules are those of any optimizer. ``step()`` is
    collective where matrices are sharded.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # Its defaults complete AdamW's groups. torch wants a parameter of its own for it, which is
        # never updated: see `step`.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(0)], lr=lr, betas=betas, eps=adamw_eps, foreach=foreach, fused=fused
        )
        groups = []
        for group in params:
            defaults = muon if group["algorithm"] == MUON else self._adamw.defaults
            groups.append({**defaults, "lr": lr, **group})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        for group in self._groups(MUON):
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(
                        f"Muon takes matrices, got a parameter of shape {list(parameter.shape)}"
                    )

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective where matrices are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._groups(MUON):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        # AdamW works on this optimizer's own groups and state; they are looked up each time because
        # load_state_dict replaces them.
        self._adamw.param_groups = self._groups(ADAMW)
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """See [Note: orthogonalization needs the whole matrix]. Collective."""
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                gradient, memory_format=torch.preserve_format
            )
        local = _local(parameter)
        local_gradient = _local(gradient)
        momentum = _local(state["momentum_buffer"])
        momentum.lerp_(local_gradient, 1 - group["momentum"])
        update = momentum
        if group["nesterov"]:
            update = local_gradient.lerp(momentum, group["momentum"])
        # A copy, because the iteration divides its input in place where that is bf16 already.
        whole = _gather(update.to(torch.bfloat16, copy=True), parameter)
        whole = _zeropower_via_newtonschulz(whole, _NS_COEFFICIENTS, group["ns_steps"], _NS_EPS)
        mine = whole[local_region(parameter).slices].reshape(local.shape)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        # By the shape of the whole matrix, as `torch.optim.Muon` does.
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        local.add_(mine, alpha=-lr)

    def update_bytes(self) -> dict[str, float]:
        """See `parallel2d.optimizer.update_bytes`."""
        found: dict[str, float] = defaultdict(float)
        for group in self._groups(MUON):
            for parameter in group["params"]:
                # The part of a rank grows with each axis over which `_gather` gathers it.
                shape = list(_local(parameter).shape)
                for split in _splits(parameter):
                    shape[split.dim] = split.ranks * split.size  # with padding
                    size = math.prod(shape) * torch.bfloat16.itemsize
                    found[split.name] += sent_bytes(
                        "all_gather", size, split.ranks, parameter.device.type
                    )
                    shape[split.dim] = split.length
        return dict(found)


class _Split(NamedTuple):
    """A mesh axis of ``ranks`` that splits dim ``dim``, of ``length``, into parts of ``size``, the
    last ones shorter or empty."""

    axis: int
    name: str
    dim: int
    ranks: int
    length: int
    size: int


def _splits(parameter: Tensor) -> list[_Split]:
    """The axes that split ``parameter``, in the order in which its parts are put together: the
    axis that split last comes first (`parallel2d.weights.geometry.local_region`)."""
    # Each axis splits what those before it have left, so the list is made backwards.
    lengths = list(parameter.shape)
    found: list[_Split] = []
    for axis, name, dim, ranks in _in_order_of_splitting(parameter):
        assert isinstance(parameter, DTensor)
        size = -(-lengths[dim] // ranks)  # rounded up
        found.append(_Split(axis, name, dim, ranks, lengths[dim], size))
        rank = parameter.device_mesh.get_local_rank(axis)
        begin = min(rank * size, lengths[dim])
        lengths[dim] = min(size, lengths[dim] - begin)
    return found[::-1]


def _in_order_of_splitting(parameter: Tensor) -> list[tuple[int, str, int, int]]:
    """`split_axes` with the axis that split the whole first. Axes split from the outermost to the
    innermost, but a strided one splits what those inside it have left."""
    axes = split_axes(parameter)
    if not isinstance(parameter, DTensor):
        return axes
    plain = [each for each in axes if type(parameter.placements[each[0]]) is Shard]
    strided = [each for each in axes if type(parameter.placements[each[0]]) is not Shard]
    return plain + strided[::-1]


def _gather(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole matrix of which ``part`` is this rank's, split as ``parameter``: one all-gather per
    axis that splits it. Collective."""
    for split in _splits(parameter):
        assert isinstance(parameter, DTensor)
        part = _padded(part, split.dim, split.size)
        parts = part.new_empty([split.ranks, *part.shape])
        dist.all_gather_single(
            parts.flatten(0, 1),
            part.contiguous(),
            group=parameter.device_mesh.get_group(split.axis),
        )
        # [ranks, rows, columns], joined along the dim that was split, without the padding.
        joined = parts.movedim(0, split.dim).flatten(split.dim, split.dim + 1)
        part = joined.narrow(split.dim, 0, split.length)
    return part.contiguous()


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """``part`` with zeros at the end of ``dim`` up to ``size``: all ranks gather equal sizes."""
    missing = size - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
