"""`parallelize` on modules it has never seen: structure, collectives, weights, names, misuse."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode
from workers import refusal

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    attach_optimizer,
    build_mesh,
    build_on_meta,
    data_coordinate,
    mesh_shape,
    parallelize,
    updated_parameters,
)
from parallel2d.base.config import BucketingConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.gradients import clip_gradient_norm
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.parallelize.bucketing import outer_groups
from parallel2d.parallel.weights.initial_values import InitialWeights


class Gate(nn.Module):
    """A module with a direct parameter in addition to the parameters of its children."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.inner = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.scale


class Strange(nn.Module):
    """Convolution, recurrent cell, attention, a loop over gates, a buffer that the constructor
    computes, a frozen layer.
    """

    def __init__(self, dim=12):
        super().__init__()
        self.convolution = nn.Conv1d(3, dim, 3, padding=1)
        self.recurrent = nn.GRU(dim, dim, batch_first=True)
        self.attention = nn.MultiheadAttention(dim, 3, batch_first=True)
        self.gates = nn.ModuleDict({"a": Gate(dim), "b": Gate(dim), "c": Gate(dim)})
        self.frozen = nn.Linear(dim, dim).requires_grad_(False)
        self.register_buffer("window", torch.hann_window(10), persistent=False)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2) * self.window[:, None]
        x, _ = self.recurrent(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for gate in self.gates.values():
            x = gate(x)
        return self.head(self.frozen(x)).mean(dim=(1, 2))


def regression_batch(step, dtype):
    generator = torch.Generator().manual_seed(step)
    shapes = (8, 10, 3), (8,)
    return (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def _train_strange(config, sizes, steps):
    torch.manual_seed(7)
    model = Strange()
    expected = copy.deepcopy(model).double()
    names = list(dict(model.named_parameters()))
    parallel = ParallelConfig(precision="fp64", **config)
    mesh = build_mesh(MeshSpec(**sizes), parallel.strategy.name)
    model = parallelize(model, mesh, parallel)
    assert list(dict(model.named_parameters())) == names
    losses = []
    for module, share in ((model, True), (expected, False)):
        trained = [p for p in updated_parameters(module) if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        if share:
            attach_optimizer(model, optimizer)
        for step in range(steps):
            x, y = regression_batch(step, torch.float64)
            if share:
                rank, count = data_coordinate(mesh), mesh_shape(mesh).data_ranks
                x, y = x.chunk(count)[rank], y.chunk(count)[rank]
            loss = F.mse_loss(module(x), y)
            loss.backward()
            if share:
                norm = clip_gradient_norm(module.parameters(), 0.5)
                torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG)
            else:
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item(), norm.item()))
    weights = training.largest_difference(*map(training.weights_of, (model, expected)))
    return losses[:steps], losses[steps:], weights


@pytest.mark.parametrize(
    ("strategy", "bucketing"),
    [
        ("ddp", "block"),
        ("zero2", "layer"),
        ("zero3", "size"),
        ("hybrid_zero2", "size"),
        ("hybrid", "layer"),
        ("hybrid_full", "block"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("hybrid", "size"), ("hybrid_full", "layer"))
        ),
    ],
)
def test_third_party_module_equals_its_single_process_run(ranks, strategy, bucketing):
    bucketing = BucketingConfig("size", 0.002) if bucketing == "size" else bucketing
    world = 4 if strategy.startswith("hybrid") else 2
    sharded, alone, weights = ranks.run(
        world, _train_strange, {"strategy": strategy, "bucketing": bucketing}, {}, 3
    )[0]
    assert sharded == [pytest.approx(pair, rel=1e-9) for pair in alone]
    assert weights < 1e-10


class SharedBlock(nn.Module):
    """Encoder and decoder have one block in common."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.encoder = nn.ModuleList([blocks[0], blocks[1]])
        self.decoder = nn.ModuleList([blocks[0], blocks[2]])

    def forward(self, x):
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


def _shared_block(bucketing):
    with build_on_meta():
        model = SharedBlock()
    assert [name for name, _ in find_blocks(model)] == ["encoder.0", "encoder.1", "decoder.1"]
    mesh = build_mesh(MeshSpec(), "zero3")
    model = parallelize(model, mesh, ParallelConfig("zero3", bucketing), seed=0)
    model(torch.ones(2, 4)).sum().backward()
    return {name: training.full_tensor_of(p).tolist() for name, p in model.named_parameters()}


def test_a_block_that_two_parents_share_is_initialized_and_sharded_once(ranks):
    first, *others = [
        ranks.run(2, _shared_block, bucketing)[0]
        for bucketing in ("block", "layer", BucketingConfig("size", math.inf))
    ]
    assert others == [first] * 2
    assert all(0 < abs(value) < 1 for value in first["encoder.0.0.bias"])


def test_blocks_are_found_by_structure():
    def names(model, *classes):
        return [name for name, _ in find_blocks(model, classes)]

    assert names(Strange()) == ["gates.a", "gates.b", "gates.c"]
    assert names(training.build_llama(n_layers=2)) == ["layers.0", "layers.1"]
    parts = names(training.build_llama(n_layers=2), "FeedForward")
    assert parts == ["layers.0.feed_forward", "layers.1.feed_forward"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    layers = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]
    assert names(nn.Transformer(8, 2, 2, 2, 8)) == layers
    told = r"bucketing.blocks=\['Blok'\].*candidates: .*Linear \(15 x"
    with pytest.raises(ConfigError, match=told):
        names(training.build_llama(n_layers=2), "Blok")


class CollectiveCounter(TorchDispatchMode):
    """Count the collectives of the process groups of the axes by kind, with the number of elements
    of this rank's input.
    """

    KINDS = ("allgather", "reduce_scatter", "allreduce", "alltoall")

    def __init__(self):
        super().__init__()
        self.counts = {}
        self.elements = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and not training.is_agreement(function, args):
            (kind,) = (kind for kind in self.KINDS if kind in str(function))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            given = torch.utils._pytree.tree_leaves(args[0] if kind == "allreduce" else args[1])
            size = sum(tensor.numel() for tensor in given if isinstance(tensor, torch.Tensor))
            self.elements[kind] = self.elements.get(kind, 0) + size
        return function(*args, **(kwargs or {}))


def count(config):
    parallel = ParallelConfig(**config)
    mesh = build_mesh(MeshSpec(), parallel.strategy.name)
    with build_on_meta():
        model = Nine()
    model = parallelize(model, mesh, parallel, seed=0)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with CollectiveCounter() as counter:
        model(tokens).sum().backward()
    return counter.counts


class ByWeight(nn.Module):
    """Uses the weights of its embedding and its head before the first call of a module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 16, bias=False)

    def forward(self, tokens):
        weight = self.embedding.weight + 2 * self.head.weight
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), weight)


def _outer_groups(strategy):
    """Return the collectives of the second step, and the largest difference of a gradient."""
    mesh = build_mesh(MeshSpec(), strategy)
    torch.manual_seed(0)
    plain = ByWeight().double()
    config = ParallelConfig(strategy, precision="fp64")
    with training.outer_groups_of_any_size():
        model = parallelize(copy.deepcopy(plain), mesh, config)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (plain, model)]
    tokens = torch.arange(8).view(2, 4)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(tokens).square().sum().backward()
        with CollectiveCounter() as counter:
            model(tokens).square().sum().backward()
        expected = {name: each.grad.clone() for name, each in plain.named_parameters()}
        worst = 0.0
        for name, each in model.named_parameters():
            difference = (each.grad.full_tensor() - expected[name]).abs().max()
            worst = max(worst, difference.item() / expected[name].abs().max().item())
        # The next forward must not use the weights of a forward without backward.
        with torch.no_grad():
            model(tokens)
        for optimizer in optimizers:
            optimizer.step()
    return counter.counts, counter.elements, worst


def test_large_modules_outside_of_the_blocks_form_two_groups():
    def groups(**changes):
        with torch.device("meta"):
            model = training.build_llama(**{"dim": 256, "vocab_size": 2**16, **changes})
        names = {module: name for name, module in model.named_modules()}
        found = outer_groups(model, find_blocks(model), {})
        return [[names[module] for module in group] for group in found]

    # 2**16 rows of 256 values in fp32 are 64 MiB.
    assert groups() == [["norm", "output"], ["embedding"]]
    assert groups(tie_embeddings=True) == []
    assert groups(vocab_size=2**16 - 8) == []


# Per rank of two: a block has 24 elements, the embedding 32, and norm and head 36.
@pytest.mark.parametrize(
    ("strategy", "gathers", "elements"),
    [("zero3", 2 * 2 + 2, 2 * 2 * 24 + 32 + 36), ("zero2", 2 + 2, 2 * 24 + 32 + 36)],
)
def test_groups_outside_of_the_blocks_are_gathered_once(ranks, strategy, gathers, elements):
    for counts, sizes, worst in ranks.run(2, _outer_groups, strategy):
        # The gradient of the head's weight arrives after the gradients of the norm were reduced.
        assert counts == {"allgather": gathers, "reduce_scatter": 2 + 3}
        assert sizes["allgather"] == elements
        assert worst < 1e-10


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))


class Nine(nn.Module):
    """Two blocks and nine modules that own parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("strategy", "bucketing", "expected"),
    [
        # The root's group is not gathered again for backward.
        ("zero3", BucketingConfig("size", math.inf), {"allgather": 1, "reduce_scatter": 1}),
        ("zero3", "layer", {"allgather": 18, "reduce_scatter": 9}),
        # all groups are small: one bucket
        ("hybrid", "layer", {"allgather": 18, "reduce_scatter": 9, "allreduce": 1}),
        ("hybrid", "block", {"allgather": 5, "reduce_scatter": 3, "allreduce": 1}),
        ("zero2", "block", {"allgather": 3, "reduce_scatter": 3}),
        ("ddp", "block", {"allreduce": 1}),
    ],
)
def test_collectives_follow_strategy_and_bucketing(ranks, strategy, bucketing, expected):
    assert ranks.run(4, count, {"strategy": strategy, "bucketing": bucketing})[0] == expected


class Scaled(nn.Module):
    """Its initializer changes the values that modules below it have drawn."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(9, 13), nn.Linear(13, 9)

    def reset_parameters(self):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
            self.down.weight.copy_(self.up.weight.T)

    def forward(self, x):
        return self.down(self.up(x))


class Tied(nn.Module):
    """Blocks of the kind above between tied matrices, and a separate parameter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 9), nn.Linear(9, 11, bias=False)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.gates = nn.ModuleDict({"a": Gate(9)})
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.gates["a"](x))


def _weights(sizes, strategy, bucketing, llama):
    """Return the initial weights, and how many values this rank has drawn."""
    drawn = 0

    def draw(initial, part, seed):
        nonlocal drawn
        values = original(initial, part, seed)
        drawn += sum(map(torch.numel, values))
        return values

    original = InitialWeights.draw
    config = {"strategy": strategy, "bucketing": bucketing}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InitialWeights, "draw", draw)
        if llama is not None:
            model = training.sharded(sizes, config, seed=3, **llama)[1]
        else:
            with build_on_meta():
                model = Tied()
            mesh = build_mesh(MeshSpec(**sizes), strategy)
            parallelize(model, mesh, ParallelConfig(**config), seed=3)
    return training.weights_of(model), drawn


# sizes that divide unevenly
ODD = {"dim": 36, "hidden_dim": 50, "vocab_size": 71, "n_heads": 6, "n_kv_heads": 2}


@pytest.mark.parametrize("llama", [ODD, None])
def test_ranks_of_a_replica_draw_their_share_of_equal_initial_weights(ranks, llama):
    alone, total = ranks.run(1, _weights, {}, "hybrid", "block", llama)[0]
    assert all((value != 0).any() for value in alone.values())
    layouts = [({}, "zero3", "layer", 4), ({}, "hybrid", "block", 2), ({}, "ddp", "block", 1)]
    if llama is not None:
        layouts.append(({"replicate": 1, "shard": 2, "tensor": 2}, "hybrid", "block", 4))
        layouts.append(({"replicate": 2, "shard": 1, "tensor": 2}, "hybrid", "block", 2))
    for sizes, strategy, bucketing, sharing in layouts:
        found = ranks.run(4, _weights, sizes, strategy, bucketing, llama)
        other = found[0][0]
        assert alone.keys() == other.keys()
        assert all((alone[name] == other[name]).all() for name in alone)
        drawn = [count for _, count in found]
        assert sum(drawn) == total * 4 / sharing, strategy
        assert max(drawn) < 1.25 * total / sharing, strategy


def _failing_initializer():
    with build_on_meta():
        model = training.build_llama()

    def init(module, name):
        if name == "layers.0.feed_forward.w2":
            raise ArithmeticError(f"no values for {name}")
        model.init_weights(module, name)

    mesh = build_mesh(MeshSpec(shard=2), "hybrid")
    try:
        parallelize(model, mesh, seed=0, init=init)
    except Exception as error:
        return type(error).__name__, str(error)


def test_initializer_that_fails_on_one_rank_is_an_error_on_all(ranks):
    first, second = sorted(ranks.run(2, _failing_initializer))
    assert first == ("ArithmeticError", "no values for layers.0.feed_forward.w2")
    assert second[0] == "ConfigError"
    assert re.fullmatch(
        r"rank [01] failed to draw initial weights: ArithmeticError: no values for .*", second[1]
    )


def _initial_strange():
    with build_on_meta():
        model = Strange()
    model = parallelize(model, build_mesh(MeshSpec(), "hybrid"), seed=1)
    return model.window.sum().item(), training.full_tensor_of(model.gates["a"].scale).mean().item()


def test_meta_models_are_materialized_with_buffers_and_reset_parameters(ranks):
    window, scale = ranks.run(4, _initial_strange)[0]
    assert window == pytest.approx(torch.hann_window(10).sum().item())
    assert 0.5 < scale < 1.5


def _without_values():
    """Return the errors for models without values, or with different values on each rank."""
    mesh = build_mesh(MeshSpec(), "hybrid")
    with build_on_meta():
        strange, bare = Strange(), nn.Linear(4, 4)
        bare.position = nn.Parameter(torch.zeros(4))
    torch.manual_seed(torch.distributed.get_rank())
    told = []
    for model, options in ((strange, {}), (bare, {"seed": 0}), (nn.Linear(4, 4), {})):
        told.append(refusal(parallelize, model, mesh, **options))
    return told


def test_meta_models_without_initializer_and_unequal_ranks_are_refused(ranks):
    for no_seed, no_initializer, different in ranks.run(2, _without_values):
        assert "give the seed" in no_seed
        assert no_initializer.startswith("position: set inside build_on_meta by none of")
        assert "ranks [1] hold different weights than rank 0" in different


def _mixed_norms(norm_types):
    """Return by kind of norm: the result of clipping, the norm of the unsharded gradient, and the
    norm after clipping.
    """
    mesh = build_mesh(MeshSpec(tensor=2), "hybrid")
    with build_on_meta():
        model = training.build_llama()
    # Only one block's feed-forward is split.
    plan = {
        "layers.*.feed_forward.w[13]": "colwise",
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Replicate()),
    }
    config = ParallelConfig(precision="fp64")
    model = parallelize(model, mesh, config, seed=0, init=model.init_weights, tensor_plan=plan)
    found = []
    for norm_type in norm_types:
        model.zero_grad()
        model(torch.arange(32).view(2, 16)).square().sum().backward()
        whole = torch.cat([training.full_tensor_of(p.grad).flatten() for p in model.parameters()])
        # No backward follows this forward, so the root's parameters stay unsharded.
        model(torch.arange(32).view(2, 16))
        ours = clip_gradient_norm(model.parameters(), 1e-3, norm_type).item()
        updated = updated_parameters(model)
        after = torch.cat([training.full_tensor_of(p.grad).flatten() for p in updated])
        found.append((ours, whole.norm(norm_type).item(), after.norm(norm_type).item()))
    return found


def test_clipping_over_mixed_meshes_gives_the_single_process_norm(ranks):
    for found in ranks.run(4, _mixed_norms, (1.0, 2.0, 3.0, math.inf)):
        for ours, expected, after in found:
            assert ours == pytest.approx(expected, rel=1e-12)
            assert after == pytest.approx(1e-3, rel=1e-3)
