"""Muon's matrices: each matrix is updated by one rank, the work is divided evenly, and updates
equal one process on any layout.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned import WIDTH, Odd
from test_optimizers import plain_optimizers
from torch import nn
from torch.optim import _muon
from training import largest_difference, weights_of

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_optimizer,
    data_coordinate,
    mesh_shape,
)
from parallel2d.base.config import OPTIMIZERS, SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.parallelize import parallelize
from parallel2d.training.optimizer import matrix_owners, muon
from parallel2d.training.optimizer.matrix_owners import MatrixOwners

STEPS = 2
SAMPLES = 12
# Two tensor ranks divide it; two shard ranks do not divide these matrices.
TENSOR_INNER = 6
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
# Ranks, mesh, strategy, limits of a round and of a batch in bytes
LAYOUTS: dict[str, tuple[int, dict[str, int], str, int | None]] = {
    # 7 rows over 3 ranks, a matrix of one row
    "zero3": (3, {"shard": 3}, "zero3", None),
    "hybrid": (4, {"replicate": 2, "shard": 2}, "hybrid", 1),
    "hybrid_full": (4, {"replicate": 2, "shard": 2}, "hybrid_full", 300),
    "ddp": (3, {"replicate": 3}, "ddp", 1),
    # `scale.row` has copies on the tensor ranks
    "tensor": (4, {"shard": 2, "tensor": 2}, "zero3", None),
    "tensor_and_replicas": (4, {"replicate": 2, "tensor": 2}, "hybrid_full", None),
    # More ranks than rows
    "many": (4, {"shard": 4}, "zero3", None),
    # More ranks than matrices: a single block is trained
    "few": (4, {"replicate": 2, "shard": 2}, "hybrid", None),
}


def unusual_model(layout: str = "") -> nn.Module:
    """Odd shapes, a frozen block, a tied embedding, a matrix of one row."""
    torch.manual_seed(0)
    inner = TENSOR_INNER if "tensor" in layout else 7
    model = Odd().double()
    for block in model.blocks:
        trained = block.up.weight.requires_grad
        block.up = nn.Linear(WIDTH, inner).double().requires_grad_(trained)
        block.down = nn.Linear(inner, WIDTH, bias=False).double().requires_grad_(trained)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    if layout == "few":
        model.blocks[2:].requires_grad_(False)
    return model


def samples(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (SAMPLES, 8), generator=torch.Generator().manual_seed(step))


def expected_weights(layout: str = "", part: slice = slice(None)) -> dict[str, Any]:
    """Trained by torch's own Muon and AdamW on one process."""
    model = unusual_model(layout)
    optimizers = plain_optimizers(model, OPTIMIZERS["muon"])
    for step in range(STEPS):
        model(samples(step)[part]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def train(layout: str, sync: SyncConfig | None = None) -> tuple[dict[str, Any], list[tuple]]:
    """Weights after some steps, and the shapes of the matrices that this rank iterated on."""
    _, sizes, strategy, limit = LAYOUTS[layout]
    mesh = build_mesh(MeshSpec(**sizes), strategy)
    config = ParallelConfig(strategy, precision="fp64", sync=sync or SyncConfig())
    plan = PLAN if mesh_shape(mesh).tensor > 1 else None
    model = parallelize(unusual_model(layout), mesh, config, tensor_plan=plan)
    optimizer = build_optimizer(model, OPTIMIZERS["muon"])
    iterated = []

    def counted(matrix: torch.Tensor, *settings: Any) -> torch.Tensor:
        iterated.append(tuple(matrix.shape))
        return _muon._zeropower_via_newtonschulz(matrix, *settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "_zeropower_via_newtonschulz", counted)
        if limit is not None:
            patch.setattr(matrix_owners, "ROUND_BYTES", limit)
            patch.setattr(matrix_owners, "BATCH_BYTES", limit)
        for step in range(STEPS):
            part = samples(step).tensor_split(mesh_shape(mesh).data_ranks)[data_coordinate(mesh)]
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model), iterated


def trained_matrices(layout: str = "") -> list[tuple]:
    return [
        tuple(parameter.shape)
        for name, parameter in unusual_model(layout).named_parameters()
        if name.startswith("blocks.") and parameter.ndim == 2 and parameter.requires_grad
    ]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=pytest.mark.slow) if each in ("ddp", "zero3", "tensor") else each
        for each in LAYOUTS
    ],
)
def test_each_matrix_is_updated_on_one_replica_with_updates_of_one_process(ranks, layout):
    count, sizes, strategy, _ = LAYOUTS[layout]
    found = ranks.run(count, train, layout)
    expected = expected_weights(layout)
    for weights, _ in found:
        assert largest_difference(weights, expected) <= 1e-10
    # Ranks of hybrid_full divide the work.
    together = count if strategy == "hybrid_full" else count // sizes.get("replicate", 1)
    for first in range(0, count, together):
        of_replica = [iterated for _, iterated in found[first : first + together]]
        iterated = list(itertools.chain.from_iterable(of_replica))
        assert sorted(iterated) == sorted(trained_matrices(layout) * STEPS)
        # Every rank has work while matrices remain.
        assert sum(map(bool, of_replica)) == min(together, len(trained_matrices(layout)))


def test_unequal_replicas_update_all_their_matrices(ranks):
    found = ranks.run(4, train, "hybrid", SyncConfig("diloco", every=100))
    for replica, part in enumerate((slice(0, 6), slice(6, 12))):
        expected = expected_weights(part=part)
        iterated = []
        for weights, of_rank in found[2 * replica : 2 * replica + 2]:
            assert largest_difference(weights, expected) <= 1e-10
            assert of_rank
            iterated.extend(of_rank)
        assert sorted(iterated) == sorted(trained_matrices() * STEPS)


def owners_of(shapes: list[tuple[int, int]], sizes: dict[str, int]) -> list[list[tuple]]:
    """By round, (owner, shape) of each matrix as this rank plans them."""
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    matrices = [torch.empty(shape, device="meta") for shape in shapes]
    owners = MatrixOwners(mesh)
    assigned = owners.assign([muon.iteration_flops(matrix.shape, 5) for matrix in matrices])
    return [
        [(matrix.owner, tuple(matrix.shape)) for matrix in each.matrices]
        for each in owners.plan(dict(enumerate(matrices)), assigned, muon.DTYPE)
    ]


def test_owners_are_the_same_on_all_ranks_and_have_equal_work(ranks):
    # As in a Llama of eight blocks: four square matrices and three longer ones in each.
    shapes = [(4096, 4096), (11008, 4096), (1024, 4096), (1024, 4096), (4096, 4096)] * 8
    plans = ranks.run(4, owners_of, shapes, {"replicate": 2, "shard": 2})
    assert all(plan == plans[0] for plan in plans)
    work: dict[tuple, float] = {}
    for each in plans[0]:
        in_round: dict[tuple, int] = {}
        for owner, shape in each:
            flops = muon.iteration_flops(torch.Size(shape), 5)
            work[owner] = work.get(owner, 0.0) + flops
            in_round[owner] = in_round.get(owner, 0) + 2 * shape[0] * shape[1]
        # A matrix of 86 MiB has a separate round.
        assert max(in_round.values()) <= max(matrix_owners.ROUND_BYTES, 2 * 11008 * 4096)
    assert len(work) == 4
    assert max(work.values()) <= 1.1 * sum(work.values()) / 4


def misbuilt() -> None:
    first = build_mesh(MeshSpec(shard=2), "zero3")
    second = build_mesh(MeshSpec(replicate=2), "ddp")
    one = parallelize(unusual_model(), first, ParallelConfig("zero3", precision="fp64"))
    other = parallelize(unusual_model(), second, ParallelConfig("ddp", precision="fp64"))
    groups = [{"pattern": "*.up.weight", "algorithm": "muon"}]
    with pytest.raises(ConfigError, match="on one mesh"):
        build_optimizer(nn.ModuleList([one, other]), replace(OPTIMIZERS["muon"], groups=groups))


def test_matrices_of_two_meshes_are_refused(ranks):
    ranks.run(2, misbuilt)
