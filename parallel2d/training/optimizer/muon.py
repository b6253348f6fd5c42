"""Muon (Jordan et al. 2024) for the hidden matrices and AdamW for all else, as one optimizer, on
parameters that may be sharded: the class `Muon`. On plain tensors the updates are those of
``torch.optim.Muon`` and ``torch.optim.AdamW`` to the bit.

[Note: orthogonalization needs the whole matrix] Muon's momentum is elementwise and stays sharded.
Its update is the whole momentum matrix made orthogonal by Newton-Schulz iterations in bf16, in
which a sum over parts rounds differently from the sum over the whole. So each rank casts its part
to bf16, as the iteration would do first, and one rank, the owner, gets all parts, iterates, and
sends every rank its part of the result: see [Note: one owner per matrix] in `matrix_owners.py`. The
iterations of a model are divided among the ranks that make the same updates, by their FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from parallel2d.parallel.sync.engine.replica_reducer import update_mesh_of
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.training.optimizer.matrix_owners import MatrixOwners, MatrixRound

MUON, ADAMW = "muon", "adamw"  # what a group's ``algorithm`` may be
DTYPE = torch.bfloat16  # of matrices and updates that are sent
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Groups with ``algorithm="muon"`` (matrices) are updated by Muon, those with
    ``algorithm="adamw"`` by AdamW.

    Args:
        params: parameter groups, each with ``algorithm``, as `optimizer.plan_groups` makes them.
        lr: of both; with ``adjust_lr_fn="match_rms_adamw"`` (Liu et al. 2025) Muon's updates have
            the size of AdamW's, so that one rate serves both; ``"original"`` wants about 20 times
            as much for Muon's groups (``lr_scale``).
        momentum, nesterov, ns_steps: of Muon.
        betas, adamw_eps, foreach, fused: of AdamW.

    ``step()`` is collective over the ranks that make the same updates, among which the matrices are
    divided; every rank must have gradients of the same matrices. Raises ValueError for a parameter
    of Muon that is no matrix.
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
        for parameter, _ in self._matrices():
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon takes matrices, got a parameter of shape {list(parameter.shape)}"
                )
        mesh = update_mesh_of(parameter for parameter, _ in self._matrices())
        self._owners = MatrixOwners(mesh)
        # The rounds, and the settings of the matrices for which they were planned, by id
        self._rounds: list[MatrixRound] = []
        self._planned_for: list[tuple[int, int]] = []

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def _matrices(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self._groups(MUON):
            yield from zip(group["params"], repeat(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective where matrices are sharded."""
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        self._update_matrices()
        # AdamW works on this optimizer's own groups and state; they are looked up each time because
        # load_state_dict replaces them.
        self._adamw.param_groups = self._groups(ADAMW)
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update_matrices(self) -> None:
        """Collective. See [Note: orthogonalization needs the whole matrix]."""
        trained = [pair for pair in self._matrices() if pair[0].grad is not None]
        matrices = [matrix for matrix, _ in trained]
        groups = [group for _, group in trained]
        for each in self._plan(matrices, groups):
            parts = {}
            for matrix in each.matrices:
                number = matrix.number
                self._add_to_momentum(matrices[number], groups[number])
                if each.is_sent(matrix):
                    parts[number] = self._before_iteration(matrices[number], groups[number])
            wholes = each.gather(parts)
            for number in wholes:
                wholes[number] = _zeropower_via_newtonschulz(
                    wholes[number], _NS_COEFFICIENTS, groups[number]["ns_steps"], _NS_EPS
                )
            for batch in each.batches:
                for number, part in each.scatter(batch, wholes).items():
                    _apply(part, matrices[number], groups[number])

    def _plan(self, matrices: list[Tensor], groups: list[dict[str, Any]]) -> list[MatrixRound]:
        """The rounds in which ``matrices`` are updated; planned anew only for others."""
        if not matrices:
            return []
        steps = [group["ns_steps"] for group in groups]
        wanted = list(zip(map(id, matrices), steps, strict=True))
        if wanted != self._planned_for:
            costs = list(map(iteration_flops, [matrix.shape for matrix in matrices], steps))
            owners = self._owners.assign(costs)
            self._rounds = self._owners.plan(dict(enumerate(matrices)), owners, DTYPE)
            self._planned_for = wanted
        return self._rounds

    def _add_to_momentum(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                gradient, memory_format=torch.preserve_format
            )
        local_part(state["momentum_buffer"]).lerp_(local_part(gradient), 1 - group["momentum"])

    def _before_iteration(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is made orthogonal, in bf16."""
        update = local_part(self.state[parameter]["momentum_buffer"])
        if group["nesterov"]:
            assert parameter.grad is not None
            update = local_part(parameter.grad).lerp(update, group["momentum"])
        # A copy, because the iteration divides its input in place where that is bf16 already.
        return update.to(DTYPE, copy=True)


def iteration_flops(shape: torch.Size, steps: int) -> float:
    """FLOPs of ``steps`` Newton-Schulz iterations on a matrix: products of the shorter side *k* and
    the longer side *l*, 2·k·k·l twice and 2·k·k·k once per iteration."""
    shorter, longer = sorted(shape)
    return steps * (4.0 * shorter * shorter * longer + 2.0 * shorter**3)


def _apply(part: Tensor, parameter: Tensor, group: dict[str, Any]) -> None:
    local = local_part(parameter)
    local.mul_(1 - group["lr"] * group["weight_decay"])
    # By the shape of the whole matrix, as `torch.optim.Muon` does.
    lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
    local.add_(part.reshape(local.shape), alpha=-lr)
