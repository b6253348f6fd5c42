"""Every gradient arrives in its parameter for any use of parameters by ranks and micro-batches:
all compared with one plain process.
"""

import contextlib
import copy

import pytest
import torch
from gradient_cases import CASES, DIM, Route

import parallel2d
from parallel2d.base.config import BucketingConfig, PrecisionConfig
from parallel2d.parallel.mesh import mesh_shape
from parallel2d.parallel.model_structure import updated_as

FP64 = PrecisionConfig("fp64", "fp64", "fp64", "fp64")
STEPS = 2
PLAN = {"blocks.*.experts.*.0": "colwise", "blocks.*.experts.*.2": "rowwise"}


def batch(route):
    generator = torch.Generator().manual_seed(route.rank * 100 + route.micro * 10 + route.step)
    return torch.randn(3, DIM, dtype=torch.float64, generator=generator)


def expected_gradients(model, data_ranks, shards, micros, step):
    """Gradients of the mean over the data ranks of the sum over micro-batches, in one process."""
    for rank in range(data_ranks):
        for micro in range(micros):
            route = Route(rank, rank // shards, micro, step)
            (model.loss(batch(route), route) / data_ranks).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def largest_difference(model, expected):
    """Over all parameters; infinite where only one of both has a gradient."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        one, other = updated_as(parameter).grad, expected[name]
        if one is None or other is None:
            worst = max(worst, 0.0 if one is other else float("inf"))
            continue
        worst = max(worst, (one.full_tensor() - other).abs().max().item())
    return worst


def backward_passes(model, routes, mode):
    """Process one global batch, through `accumulate` or in a custom loop."""
    forward = type(model).loss
    if mode.startswith("own_"):
        how = mode.removeprefix("own_")
        is_held = how in ("none", "reduce_scatter_only")
        with parallel2d.no_sync(model, how) if is_held else contextlib.nullcontext():
            for route in routes[:-1]:
                forward(model, batch(route), route).backward()
        forward(model, batch(routes[-1]), routes[-1]).backward()
        return
    for route in parallel2d.accumulate(model, routes, mode):
        forward(model, batch(route), route).backward()


def differences(sizes, strategy, bucketing, mode, micros, names):
    """By case: the largest difference of any gradient on this rank, in two steps."""
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**sizes), strategy)
    shape = mesh_shape(mesh)
    rank = parallel2d.data_coordinate(mesh)
    found = {}
    for name in names:
        torch.manual_seed(3)
        reference = CASES[name]().double()
        settings = parallel2d.ParallelConfig(strategy, bucketing, FP64)
        plan = PLAN if shape.tensor > 1 else None
        model = parallel2d.parallelize(copy.deepcopy(reference), mesh, settings, tensor_plan=plan)
        # It never steps; split updates want to know it.
        parallel2d.attach_optimizer(
            model, torch.optim.SGD(parallel2d.updated_parameters(model), lr=0.0)
        )
        worst = 0.0
        for step in range(STEPS):
            expected = expected_gradients(reference, shape.data_ranks, shape.shard, micros, step)
            backward_passes(
                model, [Route(rank, rank // shape.shard, m, step) for m in range(micros)], mode
            )
            worst = max(worst, largest_difference(model, expected))
            model.zero_grad()
        found[name] = worst
    return found


EVERYTHING = BucketingConfig("size", float("inf"))
LAYOUTS = [
    ({"replicate": 2, "shard": 2}, "hybrid", "block", "reduce_scatter_only", 2),
    ({"replicate": 2, "shard": 2}, "hybrid", "layer", "none", 2),
    ({"replicate": 2, "shard": 2}, "hybrid_zero2", "block", "full", 2),
    ({"replicate": 2, "shard": 2}, "hybrid_full", "block", "full", 2),
    ({"replicate": 4, "shard": 1}, "ddp", "block", "reduce_scatter_only", 3),
    ({"replicate": 2, "shard": 1, "tensor": 2}, "ddp", "block", "none", 3),
    ({"replicate": 4, "shard": 1}, "ddp", "layer", "own_none", 2),
    ({"replicate": 1, "shard": 2, "tensor": 2}, "zero3", "block", "full", 2),
    ({"replicate": 1, "shard": 4}, "zero3", "block", "none", 2),
    ({"replicate": 1, "shard": 4}, "zero2", "block", "own_plain", 2),
    ({"replicate": 2, "shard": 2}, "hybrid", "block", "own_reduce_scatter_only", 3),
    ({"replicate": 2, "shard": 2}, "hybrid", EVERYTHING, "own_plain", 3),
]


ALL_CASES = (0, 3, 4)  # hybrid, hybrid_full, ddp


def runs(number, name):
    """True if a layout runs a case: cases of `ALL_CASES` run on every possible layout, the other
    cases on a third of them in turn.
    """
    sizes, _, bucketing = LAYOUTS[number][:3]
    # Ranks of a shard group have to choose the same groups of modules.
    if bucketing == "layer" and sizes["shard"] > 1:
        return name in ("Everything", "ByMicroBatch", "Detached")
    # Sizes that the axis divides, and a weight that is not tied to a split one
    if "tensor" in sizes and name in ("Complex", "UnequalByBoth", "OneRankAlone", "Tied"):
        return False
    # The parameters of a group have one dtype.
    if sizes["shard"] > 1 and name == "Complex":
        return False
    return number in ALL_CASES or (list(CASES).index(name) + number) % 3 == 1


@pytest.mark.parametrize(
    "number",
    [
        1,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 6, 10)),
        *(pytest.param(number, marks=pytest.mark.soak) for number in (2, 3, 7, 8)),
        *(pytest.param(number, marks=pytest.mark.soak) for number in (4, 5, 9, 11)),
    ],
)
def test_gradients_equal_one_process(ranks, number):
    names = [name for name in CASES if runs(number, name)]
    for found in ranks.run(4, differences, *LAYOUTS[number], names):
        assert {name: worst for name, worst in found.items() if not worst <= 1e-9} == {}
