"""Parity check for the model of a custom training loop: `certify`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.base.config import OptimizerConfig, ParallelConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.exchange import among
from parallel2d.instruments.parity_check.checked_steps import certify_steps, choose_steps
from parallel2d.instruments.parity_check.parity_report import ParityReport
from parallel2d.instruments.parity_check.reference_run import CheckedRun
from parallel2d.parallel.cost.traffic import predicted_bytes
from parallel2d.parallel.mesh import mesh_shape, part_group
from parallel2d.parallel.model_structure import tensor_leaves
from parallel2d.parallel.parallelize import parallelize
from parallel2d.parallel.parallelize.layout import Workload, resolve
from parallel2d.parallel.weights.initial_values import Initializer
from parallel2d.training.metrics.communication import CommunicationMeter
from parallel2d.training.optimizer import build_optimizer, muon_names


def certify(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    optimizer: OptimizerConfig | None = None,
    seed: int = 0,
    init: Initializer | None = None,
    tensor_plan: Mapping[str, object] | None = None,
) -> ParityReport:
    """Train some steps on ``mesh`` and compare them with a reference run in one process.
    Collective. The report is the same on every rank; in the report the ranks of ``mesh`` are
    numbered from 0. After the check, the random generators are seeded with torch's initial seed.

    Args:
        model: the model before `parallelize`, with weights or on meta. It is not changed: the check
            trains copies.
        config: the configuration for `parallelize`. It is not changed: the check uses a copy, in
            which a long ``sync.every`` is shortened.
        loss: ``loss(model, batch)`` returns a scalar, the sum over the samples of ``batch``.
        batch: a global batch, which must be the same on every rank. Tensors in lists, tuples or
            dictionaries, with samples along dim 0. It needs at least two samples for each data
            rank.
        optimizer: default AdamW.
        seed, init, tensor_plan: see `parallelize`.

    Raises:
        ConfigError: for a batch that is too small, and for a model or configuration that
            `parallelize` refuses.
    """
    shape = mesh_shape(mesh)
    sizes = set(map(len, tensor_leaves(batch)))
    if len(sizes) != 1 or min(sizes) < 2 * shape.data_ranks:
        raise ConfigError(
            f"certify: the tensors of batch have {sorted(sizes)} samples in dim 0; they must have "
            f"the same number, at least two for each of {shape.data_ranks} data ranks"
        )
    config = copy.deepcopy(config)
    optimizer = optimizer or OptimizerConfig()
    notes: list[str] = []
    steps = choose_steps(config, notes)
    parallel = parallelize(
        copy.deepcopy(model), mesh, config, seed=seed, init=init, tensor_plan=tensor_plan
    )
    trained_by = build_optimizer(parallel, optimizer)
    workload = Workload(optimizer=optimizer, muon=frozenset(muon_names(model, optimizer)))
    layout = resolve(config, shape, model, workload, mesh=mesh, tensor_plan=tensor_plan)
    checked = CheckedRun(
        model=parallel,
        mesh=mesh,
        shape=shape,
        config=config,
        optimizer=trained_by,
        optimizer_config=optimizer,
        loss_of=loss,
        read=lambda step, data_rank: _micro_batches(batch, step, data_rank, shape.data_ranks),
        count=_samples,
        # Without the tensor axis, whose bytes depend on the operations of the model.
        predicted=predicted_bytes(layout),
        plain=model,
        seed=seed,
        init=init,
        weights=None,
        notes=notes,
    )
    with among(part_group(mesh)):
        return certify_steps(checked, CommunicationMeter(mesh), steps)


def _samples(batch: Any) -> int:
    return next(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _micro_batches(batch: Any, step: int, data_rank: int, data_ranks: int) -> list[Any]:
    """Return the micro-batches of a data rank in ``step``. In each step the samples of a rank begin
    one sample later. Odd steps have one micro-batch. Even steps have two micro-batches, and the
    size of the second may differ between data ranks."""
    share = _samples(batch) // data_ranks
    begin = data_rank * share + step
    places = []
    for each in range(share):
        places.append((begin + each) % (share * data_ranks))
    parts = [places]
    if step % 2 == 0:
        half = share // 2
        parts = [places[:half], places[half + data_rank % (share - half) :]]

    def take(leaf: Any, part: list[int]) -> Any:
        return leaf[part] if isinstance(leaf, Tensor) else leaf

    return [tree_map(functools.partial(take, part=part), batch) for part in parts]
