"""Running statistics of BatchNorm.

Each rank computes its statistics from its own samples. A warning reports differences between ranks,
and `average_buffers` makes the statistics equal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import first_five
from parallel2d.base.replicas import is_joining
from parallel2d.parallel.mesh import is_first_of, mesh_shape, sum_over_data_ranks
from parallel2d.parallel.model_structure import fqn_of, join_names
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.weights.named_tensors import meet

log = logging.getLogger(__name__)

_STATISTICS = "_parallel2d_statistics"  # attribute of the model
_BUFFERS = ("running_mean", "running_var")


class RunningStatistics:
    """The running statistics of ``norms``, by FQN."""

    def __init__(self, mesh: DeviceMesh, norms: Mapping[str, nn.Module]) -> None:
        self._mesh, self._norms = mesh, norms
        self.differ = self._was_said = False

    def before_forward(self, *_: Any) -> None:
        """Record that a forward in training makes the ranks differ; warn once in evaluation.

        Pre-forward hook, without communication.
        """
        if any(norm.training for norm in self._norms.values()):
            self.differ = True
        elif self.differ and not self._was_said and is_first_of(self._mesh):
            self._was_said = True
            log.warning(
                "%s: running_mean and running_var are of each rank's own samples, so evaluations "
                "differ between ranks: call parallel2d.average_buffers(model) on all ranks before, "
                "or use nn.SyncBatchNorm on GPUs",
                first_five(list(self._norms), ", "),
            )

    @torch.no_grad()
    def average(self) -> None:
        """Make the statistics equal on all data ranks. Collective."""
        for norm in self._norms.values():
            both = torch.stack([getattr(norm, name).double() for name in _BUFFERS])
            ones = torch.ones_like(both[:1])
            addend = torch.cat([both, ones])
            if is_joining():  # a joining replica does not have the statistics of the run yet
                addend.zero_()
            *sums, ranks = sum_over_data_ranks(addend, self._mesh)
            means = [each / ranks for each in sums]
            for name, mean in zip(_BUFFERS, means, strict=True):
                getattr(norm, name).copy_(mean)
        self.differ = False


def watch_statistics(model: nn.Module, mesh: DeviceMesh) -> None:
    """Register the running statistics of ``model`` for `average_buffers` and the warning.

    All other buffers are registered for the comparison of ranks after a global batch.
    """
    norms, others = {}, {}
    for name, module in model.named_modules():
        # A norm without running statistics has None. SyncBatchNorm has equal statistics on all
        # ranks.
        has_both = all(module._buffers.get(buffer) is not None for buffer in _BUFFERS)
        if has_both and not isinstance(module, nn.SyncBatchNorm):
            norms[fqn_of(name)] = module
        for key in () if has_both else module._buffers:
            others[fqn_of(join_names(name, key))] = (module, key)
    if norms and mesh_shape(mesh).data_ranks > 1:
        statistics = vars(model)[_STATISTICS] = RunningStatistics(mesh, norms)
        model.register_forward_pre_hook(statistics.before_forward)
    for engine in engines_in(model):
        engine.used_parameters.buffers = others


def take_over_statistics(twin: nn.Module, model: nn.Module) -> None:
    """Copy to ``twin`` the record that the statistics of the ranks differ.

    ``twin`` is a copy of ``model`` and has its buffers.
    """
    if _STATISTICS in vars(model):
        vars(twin)[_STATISTICS].differ = vars(model)[_STATISTICS].differ


def average_buffers(model: nn.Module) -> None:
    """Set ``running_mean`` and ``running_var`` of each BatchNorm to their means over data ranks.

    Afterwards all ranks evaluate the same model. The new variance is the mean of the variances of
    the ranks; it does not include the variance of their means. Collective.
    """
    meet(model, "averages buffers")
    for module in model.modules():
        if _STATISTICS in vars(module):
            vars(module)[_STATISTICS].average()
