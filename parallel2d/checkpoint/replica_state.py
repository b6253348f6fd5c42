"""What replicas that train on their own (``sync=diloco``) save beside the shared parameters.

``model/NAME`` holds the outer parameters, which every other layout goes on from. The outer
optimizer's state is in ``sync/``. Each replica has its parameters, its optimizer's state and what
it did not send yet in ``replica/NUMBER/``; a replica that a checkpoint does not have starts from
the outer parameters, with the optimizer's state of another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel2d.checkpoint.archive import Checkpoint
from parallel2d.sync.outer import OuterSync
from parallel2d.sync.updates import outer_sync
from parallel2d.weights.named_tensors import optimizer_tensors

log = logging.getLogger(__name__)

STEPS = "sync/steps"
REPLICA = "replica/"  # what one replica alone has


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What all replicas have of the outer optimizer; empty with ``sync=every_step``. Collective
    over the replicas: what is on its way between them is received first."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    outer.receive()
    found: dict[str, Tensor] = {STEPS: torch.tensor([outer.steps, outer.finished_after])}
    for name, momentum in outer.momenta.items():
        found[f"sync/momentum/{name}"] = momentum
    for name, parameter in outer.parameters.items():
        # Received, and applied when the delay is over.
        if parameter.mean is not None:
            found[f"sync/mean/{name}"] = parameter.mean
    return found


def replica_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What this replica alone has; empty with ``sync=every_step``."""
    outer = outer_sync(model)
    if outer is None:
        return {}
    prefix = _prefix(outer.replica)
    found: dict[str, Tensor] = {}
    for name, parameter in outer.parameters.items():
        found[f"{prefix}/model/{name}"] = parameter.own_values
        if parameter.residual is not None:
            found[f"{prefix}/residual/{name}"] = parameter.residual
    if optimizer is not None:
        for name, tensor in optimizer_tensors(model, optimizer).items():
            found[f"{prefix}/optimizer/{name}"] = tensor
    return found


def optimizer_prefix(model: nn.Module, names: Iterable[str]) -> str:
    """Where a checkpoint with tensors of these ``names`` keeps the optimizer's state that this rank
    goes on from: ``optimizer``, or that of a replica."""
    available = _replicas_in(names)
    if not available:
        return "optimizer"
    outer = outer_sync(model)
    own = 0 if outer is None else outer.replica
    if own not in available:
        own = available[own % len(available)]
    return f"{_prefix(own)}/optimizer"


def needed_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that `load_replica_state` and the optimizer's loading read on this
    rank."""
    names = list(names)
    prefixes = [optimizer_prefix(model, names)]
    outer = outer_sync(model)
    if outer is not None:
        available = _replicas_in(names)
        prefixes += ["sync", f"{_prefix(outer.replica)}/model"]
        # The residuals of all replicas are read where their number has changed.
        if len(available) == outer.replicas:
            available = [outer.replica]
        prefixes += [f"{_prefix(each)}/residual" for each in available]
    return [name for name in names if name.startswith(tuple(f"{each}/" for each in prefixes))]


@torch.no_grad()
def load_replica_state(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills what `shared_tensors` and `replica_tensors` list, as far as ``checkpoint`` has it; the
    model and its optimizer have been loaded. No communication."""
    outer = outer_sync(model)
    if outer is None or STEPS not in checkpoint.tensors:
        return
    for name, momentum in outer.momenta.items():
        _fill_if_there(momentum, f"sync/momentum/{name}", checkpoint)
    steps, finished_after = checkpoint.read(STEPS).tolist()
    arrived = {name for name in outer.parameters if f"sync/mean/{name}" in checkpoint.tensors}
    for name in outer.resume(steps, finished_after, arrived):
        parameter = outer.parameters[name]
        parameter.mean = torch.zeros_like(parameter.outer, requires_grad=False)
        _fill_if_there(parameter.mean, f"sync/mean/{name}", checkpoint)
    before = _replicas_in(checkpoint.tensors)
    prefix = _prefix(outer.replica)
    for name, parameter in outer.parameters.items():
        _fill_if_there(parameter.own, f"{prefix}/model/{name}", checkpoint)
        if parameter.residual is None:
            continue
        stored = [f"{_prefix(each)}/residual/{name}" for each in before]
        if len(before) == outer.replicas:
            stored = [f"{prefix}/residual/{name}"]
        _fill_with_mean(parameter.residual, stored, checkpoint)
    _report_lost(outer, checkpoint.manifest.mesh.get("replicate", 1), before)


def _report_lost(outer: OuterSync, saved: int, available: list[int]) -> None:
    """Logs what other numbers of replicas cost."""
    lost = [number for number in range(saved) if number not in available[: outer.replicas]]
    if lost and torch.distributed.get_rank() == 0:
        since = max(outer.steps - fragment.sent_after for fragment in outer.fragments)
        log.warning(
            "the replicas %s of the checkpoint are not continued: up to %d steps of each since "
            "they last shared their parameters are dropped",
            lost,
            since,
        )


def _prefix(replica: int) -> str:
    return f"{REPLICA}{replica:05d}"


def _replicas_in(names: Iterable[str]) -> list[int]:
    """The replicas whose state a checkpoint with tensors of these ``names`` has, ascending."""
    found = set()
    for name in names:
        number = name.removeprefix(REPLICA).partition("/")[0]
        # A checkpoint may hold any names.
        if name.startswith(REPLICA) and len(number) == 5 and number.isdecimal():
            found.add(int(number))
    return sorted(found)


def _fill_if_there(tensor: Tensor, name: str, checkpoint: Checkpoint) -> None:
    """Copies this rank's part of what is stored as ``name``; nothing where it is not, or has
    another shape."""
    stored = checkpoint.tensors.get(name)
    if stored is None or stored.shape != tuple(tensor.shape):
        return
    checkpoint.fill(tensor, name)


def _fill_with_mean(tensor: Tensor, names: list[str], checkpoint: Checkpoint) -> None:
    """Fills ``tensor`` with the mean of what is stored under ``names``: what replicas did not send
    counts as much for the shared parameters as before."""
    total = torch.zeros_like(tensor)
    for name in names:
        part = torch.zeros_like(tensor)
        _fill_if_there(part, name, checkpoint)
        total += part
    tensor.copy_(total / max(len(names), 1))
