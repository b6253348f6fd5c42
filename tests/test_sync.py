"""The engine of the replicate axis: reductions of a bucket, the dtype of additions, ranks on
different routes.
"""

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
from gradient_cases import DIM, ByRank, Case, Everything, OneRankAlone, Route
from test_gradient_routes import backward_passes, expected_gradients, largest_difference
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerError

from parallel2d import (
    ConfigError,
    MeshSpec,
    ParallelConfig,
    Topology,
    accumulate,
    build_mesh,
    data_coordinate,
    parallelize,
    register_sync_hook,
    replicate_group,
)
from parallel2d.base.config import SyncConfig
from parallel2d.parallel import fsdp_internals
from parallel2d.parallel.fsdp_internals.sharded_model import groups, states
from parallel2d.parallel.mesh import mesh_shape

HYBRID = MeshSpec(replicate=2, shard=2)


def sharded(case=Everything, strategy="hybrid", spec=HYBRID, **config):
    torch.manual_seed(3)
    mesh = build_mesh(spec, strategy)
    return parallelize(case(), mesh, ParallelConfig(strategy, **config)), mesh


def batch(rank, micro=0):
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * rank + micro))


def backward(model, mesh, micro=0):
    rank = data_coordinate(mesh)
    model.loss(batch(rank, micro), Route(rank, rank // mesh_shape(mesh).shard, micro, 0)).backward()


def gradients(model):
    return [None if p.grad is None else p.grad.full_tensor().clone() for p in model.parameters()]


def mean_in_place(state, bucket):
    dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=state)


def mean_by_hand(state, bucket):
    """Reduce a copy through every method of a bucket."""
    assert bucket.buffer().numel() >= sum(g.numel() for g in bucket.gradients())
    shapes = [parameter.to_local().shape for parameter in bucket.parameters()]
    assert shapes == [gradient.shape for gradient in bucket.gradients()]
    seen.append((bucket.index(), bucket.is_last()))
    mean = bucket.buffer() / 2
    dist.all_reduce(mean, group=state)
    bucket.set_buffer(mean)


seen: list[tuple[int, bool]] = []


def _hooked():
    found = {}
    model, mesh = sharded(ByRank, sync=SyncConfig(bucket_mib=0.001))
    group = replicate_group(model)
    assert group is not mesh.get_group("replicate"), "others' collectives could come between"
    backward(model, mesh)
    expected = gradients(model)
    power = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=DIM, start_powerSGD_iter=2, use_error_feedback=False
    )
    for name, hook, state in (
        ("in place", mean_in_place, None),
        ("by hand", mean_by_hand, None),
        ("allreduce_hook", default_hooks.allreduce_hook, None),
        ("bf16", default_hooks.bf16_compress_hook, None),
        ("powerSGD", powerSGD_hook.powerSGD_hook, power),
    ):
        register_sync_hook(model, hook, state)
        for _ in range(4 if name == "powerSGD" else 1):
            model.zero_grad()
            backward(model, mesh)
        pairs = [(a, b) for a, b in zip(gradients(model), expected, strict=True) if b is not None]
        assert all(a is not None for a, _ in pairs)
        found[name] = max(((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs)
    return found, list(seen)


def test_a_hook_reduces_each_bucket_and_torchs_own_hooks_work(ranks):
    exact = ("in place", "by hand", "allreduce_hook")
    for found, buckets in ranks.run(4, _hooked):
        assert max(found[name] for name in exact) < 1e-6
        assert 1e-5 < found["bf16"] < 1e-2
        assert found["powerSGD"] < 1.0  # of low rank: an approximation
        assert buckets == [(n, n == len(buckets) - 1) for n in range(len(buckets))]
        assert len(buckets) > 2


def _hook_without_replicas():
    register_sync_hook(sharded(spec=MeshSpec(shard=4))[0], mean_in_place)


def test_sync_hook_is_refused_on_a_mesh_with_one_replica(ranks):
    with pytest.raises(WorkerError, match="ConfigError: no gradients cross a replicate axis here"):
        ranks.run(4, _hook_without_replicas)


def _accumulate_hooks(case):
    """Record when hooks of parameters run, and their gradients."""
    model, mesh = sharded(case)
    heard = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: heard.setdefault(name, p.grad.full_tensor().clone())
        )
    backward(model, mesh)
    return all(
        torch.equal(heard[name], p.grad.full_tensor()) if p.grad is not None else name not in heard
        for name, p in model.named_parameters()
    ), sum(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("case", "unused"), [(ByRank, 0), (OneRankAlone, 12)])
def test_hooks_after_accumulation_see_the_mean_over_all_ranks(ranks, case, unused):
    assert ranks.run(4, _accumulate_hooks, case) == [(True, unused)] * 4


class Additions(TorchDispatchMode):
    """Record the dtypes of additions, exchanged tensors and requested sums in collectives."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()
        self.sent = set()
        self.summed = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = str(function)
        leaves = torch.utils._pytree.tree_leaves(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if "c10d" in name and "reduce" in name:
            self.dtypes |= {tensor.dtype for tensor in tensors}
        elif "c10d" in name and "alltoall" in name:
            self.sent |= {tensor.dtype for tensor in tensors}
        elif (name.startswith("aten.sum.dim") and (kwargs or {}).get("dtype")) or (
            name.startswith("aten.add_.Tensor") and len(tensors) == 2
        ):
            self.summed.add(out.dtype)
        return out


def _additions(precision, spec, strategy, mode):
    model, mesh = sharded(strategy=strategy, spec=spec, precision=precision)
    found = Additions()
    for micro in accumulate(model, range(3), mode):
        rank = data_coordinate(mesh)
        loss = model.loss(batch(rank, micro), Route(rank, 0, micro, 0))
        with found:
            loss.backward()
    kept = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return found.dtypes, found.sent, found.summed, kept


@pytest.mark.parametrize(
    ("spec", "strategy", "mode"),
    [
        (HYBRID, "hybrid", "full"),
        (HYBRID, "hybrid_zero2", "none"),
        (MeshSpec(), "ddp", "reduce_scatter_only"),
    ],
)
def test_additions_are_in_fp32_for_every_communication_dtype(ranks, spec, strategy, mode):
    found = ranks.run(4, _additions, "bf16_reduce_bf16", spec, strategy, mode)
    for dtypes, sent, summed, kept in found:
        assert torch.bfloat16 not in dtypes
        assert summed == {torch.float32}
        assert sent == {torch.bfloat16}
        assert kept == {torch.float32}


def _tensor_errors(tensor):
    """The relative errors of norms, biases and routers with a tensor axis, by kind, from fp64; one
    data rank.
    """
    mesh = build_mesh(MeshSpec(tensor=tensor), "zero3")
    plan = {"*.norm": "sequence", "*.router": "sequence", "*.up": "colwise", "*.down": "rowwise"}
    found = {}
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(Routed(), Routed())
        expected = copy.deepcopy(model).double()
        x = torch.randn(4, 256, 64, generator=torch.Generator().manual_seed(seed))
        (expected(x.double()) - x.roll(1)).square().sum().backward()
        config = ParallelConfig("zero3", precision="bf16")
        model = parallelize(model, mesh, config, tensor_plan=plan if tensor > 1 else None)
        (model(x).float() - x.roll(1)).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            kind = next((kind for kind in ("norm", "router", "bias") if kind in name), "matrix")
            found.setdefault(kind, []).append(
                ((p.grad.full_tensor().double() - q.grad).norm() / q.grad.norm()).item()
            )
    return {kind: sum(errors) / len(errors) for kind, errors in found.items()}


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(64), nn.Linear(64, 4)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        h = self.norm(x)
        hidden = self.down(torch.nn.functional.silu(self.up(h)))
        return x + hidden * self.router(h).softmax(-1)[..., :1]


@pytest.mark.slow
def test_tensor_axis_rounds_replicated_gradients_like_one_rank(ranks):
    alone = ranks.run(1, _tensor_errors, 1)[0]
    split = ranks.run(4, _tensor_errors, 4)[0]
    assert all(split[kind] <= 1.05 * alone[kind] for kind in alone), (alone, split)


class WholeBlocks(Case):
    """Rank 1 skips a block."""

    def run(self, number, block, x, route):
        skipped = route.rank == 1 and number == 1 and route.step == 0
        return torch.zeros_like(x) if skipped else block(x, 0)


class Swapped(Case):
    """Rank 1 runs its blocks in another order: torch pairs them without a word, since they are
    equal in size.
    """

    def forward(self, x, route):
        x = self.first(x)
        for block in reversed(self.blocks) if route.rank == 1 and route.step == 0 else self.blocks:
            x = x + block(x, 0)
        return self.last(x)


def _different_routes(one_host, strategy, mode, case):
    """Return the error; then train another global batch that is equal on all ranks, and return the
    difference of its gradients from one process.
    """
    mesh = build_mesh(HYBRID if strategy.startswith("hybrid") else MeshSpec(), strategy)
    rank = dist.get_rank()
    topology = Topology(("here",) * 4 if one_host else tuple(f"host{rank}" for rank in range(4)))
    torch.manual_seed(3)
    plain = case().double()
    config = ParallelConfig(strategy, precision="fp64", allow_cross_node=True)
    model = parallelize(copy.deepcopy(plain), mesh, config, topology=topology)
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(ConfigError) as error:
        backward_passes(model, [Route(rank, rank // 2, micro, 0) for micro in range(2)], mode)
    assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    assert all(
        torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True)
    )
    backward_passes(model, [Route(rank, rank // 2, micro, 1) for micro in range(2)], mode)
    return str(error.value), largest_difference(model, expected_gradients(plain, 4, 2, 2, 1))


@pytest.mark.parametrize(
    ("one_host", "strategy", "mode", "case"),
    [
        (True, "hybrid", "reduce_scatter_only", WholeBlocks),
        (True, "zero3", "none", WholeBlocks),
        (True, "hybrid", "reduce_scatter_only", Swapped),
        (False, "zero3", "full", Swapped),
    ],
)
def test_different_blocks_within_a_shard_group_are_refused(ranks, one_host, strategy, mode, case):
    """Left out or in another order; on several hosts ranks compare hashes."""
    answers = ranks.run(4, _different_routes, one_host, strategy, mode, case)
    for told, worst in answers:
        assert "of the same shard group" in told
        assert "rank 1 " in told
        assert worst < 1e-9
    if case is WholeBlocks:
        assert "blocks.1" in answers[0][0]
        assert len({told for told, _ in answers}) == 1


def _one_rank_leaves_out(what, strategy, spec, out_of_step):
    """The error, after which nothing is updated; then steps that all ranks make together."""
    model, mesh = sharded(strategy=strategy, spec=spec)
    optimizers = [
        torch.optim.SGD(p, lr=0.1) for p in (model.first.parameters(), model.parameters())
    ]
    updated = []

    def step(leaves_out=""):
        for micro in range(1 if leaves_out == "backward" else 2):
            backward(model, mesh, micro)
        for optimizer in optimizers[: 1 if leaves_out == "update" else 2]:
            optimizer.step()
        updated[:] = [p.to_local().clone() for p in model.parameters()]
        model.zero_grad()

    step()
    with pytest.raises(ConfigError) as error:
        step(what if dist.get_rank() in out_of_step else "")
        step()
    assert all(
        torch.equal(a, p.to_local()) for a, p in zip(updated, model.parameters(), strict=True)
    )
    model.zero_grad()
    step()
    step()
    return str(error.value)


@pytest.mark.parametrize(("what", "strategy", "spec", "out_of_step", "counts"), [
    ("backward", "hybrid", HYBRID, (2, 3), "rank 0 called optimizer.step() 0 times and rank 2 2 times"),
    ("update", "hybrid", HYBRID, (2, 3), "rank 0 called optimizer.step() 2 times and rank 2 1 times"),
    ("update", "hybrid", HYBRID, (1,), "rank 0 called optimizer.step() 2 times and rank 1 1 times"),
    ("update", "zero3", MeshSpec(), (3,), "rank 0 called optimizer.step() 2 times and rank 3 1 times"),
    ("backward", "ddp", MeshSpec(), (0,), "rank 0 called optimizer.step() 2 times and rank 1 0 times"),
])  # fmt: skip
def test_a_rank_out_of_step_is_named_before_the_next_update(
    ranks, what, strategy, spec, out_of_step, counts
):
    messages = ranks.run(4, _one_rank_leaves_out, what, strategy, spec, out_of_step)
    assert len(set(messages)) == 1
    passes = "3 and 4" if what == "backward" else "4 and 5"
    assert (
        f"between the backward passes {passes} that ended a global batch, {counts}" in messages[0]
    )


def _two_models():
    """Train two models in one loss together with an average of the first, each stepped in turn."""
    mesh = build_mesh(HYBRID, "hybrid")
    torch.manual_seed(1)
    plain = [ByRank(), Everything()]
    config = ParallelConfig("hybrid", precision="fp64")
    ours = [parallelize(copy.deepcopy(model), mesh, config) for model in plain]
    plain = [model.double() for model in plain]
    average = [p.detach().clone() for p in ours[0].parameters()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (*ours, *plain)]
    rank = dist.get_rank()

    def loss(models, rank):
        route = Route(rank, rank // 2, 0, 0)
        x = batch(rank).double()
        return models[1](models[0](x, route), route).square().mean() + models[0].loss(x, route)

    for _ in range(3):
        loss(ours, rank).backward()
        for other in range(4):
            (loss(plain, other) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in ours[0].parameters()], 0.5)
    found, expected = (training.weights_of(nn.ModuleList(models)) for models in (ours, plain))
    return training.largest_difference(found, expected)


def test_two_models_share_a_loss(ranks):
    assert max(ranks.run(4, _two_models)) < 1e-9


class Uneven(Case):
    """Parameters that two shard ranks divide unevenly, in blocks that replica 1 skips; and two
    entry points.
    """

    widths = (3, 5)

    def encode(self, x):
        return self.first(x)

    def decode(self, x, route):
        for number, block in enumerate(self.blocks):
            if route.replica == 0 or number != 1:
                x = x + block(x, number % 2)
        return self.last(x)

    def forward(self, x, route):
        return self.decode(self.encode(x), route)


def _unusual_loops():
    """The largest difference from one process after each of several loops that people write; every
    group is a bucket.
    """
    mesh = build_mesh(HYBRID, "hybrid")
    rank = data_coordinate(mesh)
    found = {}

    def compare(name, strategy, ours, plain):
        torch.manual_seed(7)
        expected = Uneven().double()
        config = ParallelConfig(strategy, precision="fp64", sync=SyncConfig(bucket_mib=1e-5))
        model = parallelize(copy.deepcopy(expected), mesh, config)

        def data_of(rank):
            return lambda micro=0: (batch(rank, micro).double(), Route(rank, rank // 2, micro, 0))

        ours(model, data_of(rank))
        for other in range(4):
            plain(expected, data_of(other))
        means = {
            n: p.grad if p.grad is None else p.grad / 4 for n, p in expected.named_parameters()
        }
        found[name] = largest_difference(model, means)

    def once(model, data):
        model.loss(*data()).backward()

    def cleared_between(model, data):
        once(model, data)
        with torch.no_grad():
            # leaves gathered parameters in their places where they are not freed
            model.loss(*data())
        loss = model.loss(*data())
        model.zero_grad()
        loss.backward()

    def by_methods(model, data):
        for name in ("encode", "decode"):
            torch.distributed.fsdp.register_fsdp_forward_method(model, name)
        x, route = data()
        model.decode(model.encode(x), route).square().mean().backward()

    def frozen_in_between(model, data):
        for trained in (True, False, True):
            model.blocks.requires_grad_(trained)
            model.zero_grad()
            once(model, data)

    def retained(model, data):
        x, route = data()
        out = model(model(x, route), route)
        out.square().mean().backward(retain_graph=True)
        out.mean().backward()

    def nothing_in_the_last(mode):
        def loop(model, data):
            for micro in accumulate(model, range(3), mode):
                if micro < 2:
                    model.loss(*data(micro)).backward()

        return loop

    def both(model, data):
        model.loss(*data(0)).backward()
        model.loss(*data(1)).backward()

    # hybrid_zero2 leaves gathered parameters in their places.
    for strategy in ("hybrid", "hybrid_zero2"):
        compare(f"{strategy}: cleared between", strategy, cleared_between, once)
        compare(f"{strategy}: frozen in between", strategy, frozen_in_between, once)
    compare("methods", "hybrid_zero2", by_methods, once)
    compare("retained", "hybrid", retained, retained)
    for mode in ("reduce_scatter_only", "none", "full"):
        compare(f"{mode}, nothing in the last", "hybrid", nothing_in_the_last(mode), both)
    return found


def test_custom_loops_give_the_gradients_of_one_process(ranks):
    for found in ranks.run(4, _unusual_loops):
        assert {name: worst for name, worst in found.items() if not worst <= 1e-9} == {}


def _lacking():
    model, mesh = sharded()
    backward(model, mesh)
    objects = [*states(model), *groups(model), *(state._comm_ctx for state in states(model))]
    objects += [state._state_ctx for state in states(model)]
    objects += [parameter for group in groups(model) for parameter in group.fsdp_params]
    assert {type(owner) for owner in objects} == set(fsdp_internals.KEPT)
    return {
        f"{type(owner).__name__}.{name}"
        for owner in objects
        for name in fsdp_internals.KEPT[type(owner)]
        if not hasattr(owner, name)
    }


def test_private_names_of_torch_exist(ranks):
    missing = {
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in (*fsdp_internals.REACHED, *fsdp_internals.OTHERS)
        for name in names
        if not hasattr(owner, name)
    }
    missing = missing.union(*ranks.run(4, _lacking))
    assert not missing, (
        f"torch {torch.__version__} lacks them: see parallel2d/parallel/fsdp_internals"
    )


ROOT = Path(__file__).parents[1]
INTERNALS = ROOT / "parallel2d" / "parallel" / "fsdp_internals"
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def _names_reached(path):
    """Attributes that the code in a file reaches on other objects than ``self``, also by getattr
    and its like.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            found |= {name.value for name in node.args[1:2] if isinstance(name, ast.Constant)}
    return found


def _private(names):
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_tables_list_the_private_names_that_are_reached():
    tables = [*fsdp_internals.REACHED, *fsdp_internals.KEPT.items(), *fsdp_internals.OTHERS]
    listed = set().union(*(names for _, names in tables))
    reached = set().union(*map(_names_reached, INTERNALS.glob("*.py")))
    assert _private(reached) == _private(listed)
    of_fully_shard = [names for _, names in (*fsdp_internals.REACHED, *fsdp_internals.KEPT.items())]
    assert sum(map(len, of_fully_shard)) <= 20


def test_no_other_file_reaches_private_names_of_fully_shard():
    """Names without underscore of torch's private classes are not used either, except names that
    public classes have too.
    """
    tables = [*fsdp_internals.REACHED, *fsdp_internals.KEPT.items()]
    public = {*dir(nn.Module), *dir(FSDPModule), *dir(MixedPrecisionPolicy)}
    of_torch = set()
    for owner, names in tables:
        if getattr(owner, "__module__", "").startswith("torch.distributed.fsdp"):
            of_torch |= _private(names) | (set(names) - public)
    found = set()
    for folder in ("parallel2d", "models", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if INTERNALS in path.parents:
                continue
            where = path.relative_to(ROOT)
            found |= {f"{where}: {name}" for name in _names_reached(path) & of_torch}
            private = [n for n in _imported(path) if n.startswith("torch.distributed.fsdp._")]
            found |= {f"{where}: {name}" for name in private}
    assert not found


def test_streams_come_from_the_device_module():
    """A generic `torch.Stream` takes events of a device module without an error, and does not wait
    for them.
    """
    generic = ("torch.Stream", "torch.Event", "torch.accelerator.current_stream")
    found = set()
    for folder in ("parallel2d", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = [
                n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
            ]
            names = {ast.unparse(call) for call in calls}
            wrong = {name for name in names if name in generic or name.endswith(".wait_event")}
            found |= {f"{path.relative_to(ROOT)}: {name}" for name in wrong}
    assert not found
