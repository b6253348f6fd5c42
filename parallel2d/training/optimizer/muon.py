"""`Muon`: an optimizer for sharded parameters that updates hidden matrices by Muon (Jordan et al.
2024) and all other parameters by AdamW. On unsharded tensors the updates of `Muon` are bitwise
equal to the updates of ``torch.optim.Muon`` and ``torch.optim.AdamW``.

[Note: orthogonalization needs the whole matrix] Muon's momentum is elementwise and stays sharded.
Its update is the unsharded momentum matrix, orthogonalized by Newton-Schulz iterations in bf16.
Iterations on shards would round differently from iterations on the unsharded matrix. Therefore one
rank, the owner, runs the iterations. Every rank casts its shard to bf16, the first operation of the
iteration, and sends the cast shard to the owner. The owner sends every rank its shard of the
result. If a parameter contains several matrices (`matrix_splits.py`), its owner iterates on each
matrix; see [Note: one owner per matrix] in `matrix_owners.py`. The matrices of a model are divided
among the ranks by the FLOPs of their iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from parallel2d.parallel.sync.engine.replica_reducer import update_mesh_of
from parallel2d.parallel.weights.geometry import local_part, local_region
from parallel2d.training.optimizer.matrix_owners import MatrixOwners, MatrixRound
from parallel2d.training.optimizer.matrix_splits import MatrixInside, matrices_in

MUON, ADAMW = "muon", "adamw"  # values of a group's ``algorithm``
DTYPE = torch.bfloat16  # dtype of sent matrices and updates
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Updates groups with ``algorithm="muon"`` (matrices) by Muon, and groups with
    ``algorithm="adamw"`` by AdamW.

    ``step()`` is collective over the ranks that share the updates. All of these ranks must have
    gradients of the same matrices.

    Args:
        params: parameter groups with the key ``algorithm``, as `optimizer.plan_groups` returns
            them.
        lr: learning rate of both algorithms. With ``adjust_lr_fn="match_rms_adamw"`` (Liu et al.
            2025) Muon's updates have about the size of AdamW's, so both can use the same learning
            rate. With ``"original"``, Muon's groups need a learning rate about 20 times as large
            (``lr_scale``).
        momentum, nesterov, ns_steps: settings of Muon.
        betas, adamw_eps, foreach, fused: settings of AdamW.
        splits: the matrices in each divided parameter of Muon. Every other parameter is one matrix.

    Raises ValueError if a parameter of Muon without an entry in ``splits`` is not a matrix.
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
        splits: Mapping[Tensor, list[MatrixInside]] | None = None,
    ) -> None:
        muon = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # The defaults of this AdamW complete the groups of AdamW below. Its constructor requires a
        # parameter; this one is never updated, because `step` replaces the groups.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(0)], lr=lr, betas=betas, eps=adamw_eps, foreach=foreach, fused=fused
        )
        groups = []
        for group in params:
            defaults = muon if group["algorithm"] == MUON else self._adamw.defaults
            groups.append({**defaults, "lr": lr, **group})
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._splits = dict(splits or {})
        for parameter, _ in self._matrices():
            if parameter.ndim != 2 and parameter not in self._splits:
                raise ValueError(
                    f"Muon takes matrices, got a parameter of shape {list(parameter.shape)}"
                )
        mesh = update_mesh_of(parameter for parameter, _ in self._matrices())
        self._owners = MatrixOwners(mesh)
        # The planned rounds, and the matrices (by id) and settings for which they were planned
        self._rounds: list[MatrixRound] = []
        self._planned_for: list[tuple[int, int]] = []

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def _matrices(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self._groups(MUON):
            yield from zip(group["params"], repeat(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once. Collective if matrices are sharded."""
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        self._update_matrices()
        # AdamW uses the groups and the state of this optimizer. Groups and state are assigned in
        # each step, because load_state_dict replaces both.
        self._adamw.param_groups = self._groups(ADAMW)
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update_matrices(self) -> None:
        """Update the matrices by Muon; see [Note: orthogonalization needs the whole matrix].
        Collective."""
        matrices, groups = [], []
        for parameter, group in self._matrices():
            if parameter.grad is not None:
                matrices.append(parameter)
                groups.append(group)
        for each in self._plan(matrices, groups):
            parts = {}
            for matrix in each.matrices:
                number = matrix.number
                self._add_to_momentum(matrices[number], groups[number])
                if each.is_sent(matrix):
                    parts[number] = self._before_iteration(matrices[number], groups[number])
            wholes = each.gather(parts)
            for number in wholes:
                wholes[number] = self._iterate(
                    wholes[number], matrices[number], groups[number]["ns_steps"]
                )
            for batch in each.batches:
                for number, part in each.scatter(batch, wholes).items():
                    self._apply(part, matrices[number], groups[number])

    def _matrices_in(self, parameter: Tensor) -> list[MatrixInside]:
        return self._splits.get(parameter) or matrices_in(parameter.shape, {})

    def _iterate(self, whole: Tensor, parameter: Tensor, steps: int) -> Tensor:
        """Return the orthogonalized matrices of the unsharded tensor ``whole``."""
        result = torch.empty_like(whole)
        for region, shape in self._matrices_in(parameter):
            matrix = whole[region.slices].reshape(shape)
            update = _zeropower_via_newtonschulz(matrix, _NS_COEFFICIENTS, steps, _NS_EPS)
            result[region.slices] = update.reshape(region.lengths)
        return result

    def _apply(self, part: Tensor, parameter: Tensor, group: dict[str, Any]) -> None:
        local, held = local_part(parameter), local_region(parameter)
        local.mul_(1 - group["lr"] * group["weight_decay"])
        part = part.reshape(local.shape)
        for region, shape in self._matrices_in(parameter):
            common = region.intersect(held)
            if common is not None:
                # Computed from the unsharded shape, as in `torch.optim.Muon`.
                lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
                inside = common.slices_in(held)
                local[inside].add_(part[inside], alpha=-lr)

    def _plan(self, matrices: list[Tensor], groups: list[dict[str, Any]]) -> list[MatrixRound]:
        """Return the rounds for ``matrices``. The rounds are planned again only if the matrices or
        ``ns_steps`` change."""
        if not matrices:
            return []
        steps = [group["ns_steps"] for group in groups]
        wanted = list(zip(map(id, matrices), steps, strict=True))
        if wanted != self._planned_for:
            costs = []
            for matrix, number in zip(matrices, steps, strict=True):
                inside = self._matrices_in(matrix)
                costs.append(sum(iteration_flops(shape, number) for _, shape in inside))
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
        """Return this rank's shard of the iteration's input, in bf16."""
        update = local_part(self.state[parameter]["momentum_buffer"])
        if group["nesterov"]:
            assert parameter.grad is not None
            update = local_part(parameter.grad).lerp(update, group["momentum"])
        # A copy, because the iteration divides its input in place if it is bf16 already.
        return update.to(DTYPE, copy=True)


def iteration_flops(shape: torch.Size, steps: int) -> float:
    """Return the FLOPs of ``steps`` Newton-Schulz iterations. With the shorter side *k* and the
    longer side *l*, each iteration has two products of 2·k·k·l FLOPs and one of 2·k·k·k FLOPs."""
    shorter, longer = sorted(shape)
    return steps * (4.0 * shorter * shorter * longer + 2.0 * shorter**3)
