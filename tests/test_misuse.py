"""Mistakes that would train wrongly or hang: each is impossible, or one clear error."""

import copy
import io
import logging
import threading

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from workers import WorkerError, logged, refusal

import parallel2d
from parallel2d import (
    ConfigError,
    MeshSpec,
    OptimizerConfig,
    ParallelConfig,
    average_buffers,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    data_coordinate,
    full_state,
    parallelize,
    reduce,
    sharded_copy,
    token_weight,
)
from parallel2d.base.config import BucketingConfig, PrecisionConfig
from parallel2d.parallel.parallelize import model_calls
from parallel2d.parallel.parallelize.preconditions import check_offload


def _sharded(sizes=None):
    mesh = build_mesh(MeshSpec(**(sizes or {})), "hybrid")
    with build_on_meta():
        model = training.build_llama()
    plan = training.tensor_plan(model, 2) if (sizes or {}).get("tensor") else None
    return parallelize(
        model, mesh, ParallelConfig("hybrid"), seed=0, init=model.init_weights, tensor_plan=plan
    ), mesh


class _Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.lock = None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("means", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.codes.data.lerp_(x.detach().mean(0), 0.1)
            self.count.fill_(5.0 if dist.get_rank() else 3.0)
            self.means.copy_(reduce(x.detach().mean(0)))
        return self.norm(self.linear(x))


def _normalized():
    torch.manual_seed(0)
    mesh = build_mesh(MeshSpec(), "hybrid")
    net = _Norm()
    net.register_buffer("indices", torch.eye(2).to_sparse(), persistent=False)
    model = parallelize(net, mesh, ParallelConfig("hybrid", precision="fp64"))
    x = torch.randn(8, 4, dtype=torch.float64)
    model(x.chunk(4)[data_coordinate(mesh)])
    return model, x


def _statistics_and_pickles():
    """An evaluation with statistics that differ is warned of once, by rank 0, and not after
    `average_buffers`.
    """
    model, x = _normalized()
    model.eval()
    with logged("parallel2d", logging.WARNING) as said:
        model(x), model(x)
    assert len(said) == (dist.get_rank() == 0)
    assert all("norm: running_mean and running_var are of each" in line for line in said)
    for twin in (copy.deepcopy(model), sharded_copy(model)):
        with logged("parallel2d", logging.WARNING) as said:
            twin(x)
        assert len(said) == (dist.get_rank() == 0), "a copy has the same statistics"
    with logged("parallel2d", logging.WARNING) as said:
        for _ in range(2):
            model.train()(x.chunk(4)[dist.get_rank()]).sum().backward()
    assert len(said) == (dist.get_rank() == 0)
    assert all(line.startswith("codes, count: these buffers differ between ranks") for line in said)
    model.eval()
    average_buffers(model)
    twin = sharded_copy(model)
    assert twin.eval() is twin.module, "what a copy lacks is its module's"
    with logged("parallel2d", logging.WARNING) as said:
        results = reduce(model(x).detach(), op="max"), reduce(model(x).detach(), op="min")
    assert torch.equal(*results)
    assert torch.equal(twin(x), model(x))
    assert not said
    mean = (1 - 0.9**3) * model.linear(x).mean(0)
    assert torch.allclose(model.norm.running_mean, mean.detach(), rtol=1e-12, atol=0)
    # A pickle of sharded tensors gives one warning; copies and full states give none.
    model_calls.warn_of_parts.cache_clear()
    with logged("parallel2d", logging.WARNING) as said:
        copy.deepcopy(model.state_dict())
        sharded_copy(model).update(0.5)
        torch.save(full_state(model), io.BytesIO())
        assert not said
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
    (line,) = said
    assert "torch.save" in line
    assert "parallel2d.save_full" in line


def _copied(what):
    mesh = build_mesh(MeshSpec(), "hybrid")
    net, storage = _Norm(), "bf16" if what == "narrow" else "fp32"
    if what == "lock":
        net.lock = threading.Lock()
    if what == "plain":
        sharded_copy(net)
    precision = PrecisionConfig(storage=storage, param=storage, reduce=storage)
    model = parallelize(net, mesh, ParallelConfig("hybrid", precision=precision), broadcast_from=0)
    if what == "late":
        model.register_buffer("table", torch.ones(2))
    if what == "block":
        blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        config = ParallelConfig("hybrid", bucketing="layer")
        copy.deepcopy(parallelize(blocks, mesh, config, broadcast_from=0)[1])
    if what == "narrow":
        sharded_copy(model).update(0.9)
    copy.deepcopy(model)


def _optimizer_first(sharded_later):
    torch.manual_seed(0)
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD((model if sharded_later else other).parameters(), lr=0.1)
    parallelize(model, build_mesh(MeshSpec(), "hybrid"))
    return len(optimizer.param_groups)


def _other_torch(_):
    with pytest.MonkeyPatch.context() as patch:  # the worker continues with other tests
        if torch.distributed.get_rank() == 1:
            patch.setattr(torch, "__version__", "2.99.0")
        _sharded()


def _feed(key):
    model, mesh = _sharded({"tensor": 2})
    tokens, _ = training.global_batch(0)
    rank = torch.distributed.get_rank() if key == "global" else data_coordinate(mesh)
    return model(tokens[rank : rank + 1]).shape[0]


def _tied_apart(_):
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[2].weight = model[0].weight
    precision = PrecisionConfig(param="bf16", fp32_modules=["Embedding"])
    parallelize(model, build_mesh(MeshSpec(), "hybrid"), ParallelConfig(precision=precision))


def _tied_split_apart(plan):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    plan = {"2": torch.distributed.tensor.parallel.ColwiseParallel()} if plan is None else plan
    mesh = build_mesh(MeshSpec(tensor=2), "hybrid")
    parallelize(model, mesh, ParallelConfig("hybrid"), tensor_plan=plan)


SPLIT = "0.weight and 2.weight are one parameter, and the plan makes "
REFUSED = {
    "an optimizer before sharding": (2, _optimizer_first, True,
        "SGD was built before parallelize.*build it after"),
    "torch versions": (2, _other_torch, None,
        r"different torch versions \(.*torch 2.99.0\).*install the same one"),
    "a global rank": (4, _feed, "global",
        "share one tensor axis and were fed different data.*data_coordinate"),
    "a tie of fp32": (2, _tied_apart, None, "precision.fp32_modules: 0 is tied to"),
    "a split tie": (2, _tied_split_apart, None, rf"{SPLIT}0.weight whole, 2.weight as S\(0\)"),
    "a split embedding": (2, _tied_split_apart, {"0": "rowwise"},
        rf"{SPLIT}0.weight as S\(0\), 2.weight whole"),
    "words": (2, _tied_split_apart, {"0": "replicate", "2": "colwise"},
        rf"{SPLIT}0.weight whole, 2.weight as S\(0\)"),
    "a copy of a plain model": (2, _copied, "plain", "_Norm did not come from parallel2d.parallelize"),
    "a copy of a lock": (2, _copied, "lock",
        "deepcopy: _Norm cannot be copied: cannot pickle '_thread.lock'"),
    "a copy of a block": (2, _copied, "block",
        "deepcopy: 1 is a module of a sharded model: copy the whole model"),
    "a copy of what came late": (2, _copied, "late", "deepcopy: table changed after parallelize"),
    "an average in 16 bits": (2, _copied, "narrow",
        r"update\(0.9\) needs a decay in .0, 1. and precision.storage=fp32"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistake_in_a_script_is_refused(ranks, mistake):
    world, function, argument, told = REFUSED[mistake]
    with pytest.raises(WorkerError, match=told) as error:
        ranks.run(world, function, argument)
    assert error.value.kind == "ConfigError"


def test_correct_counterparts_of_mistakes_work(ranks):
    assert ranks.run(2, _optimizer_first, False) == [1, 1]
    assert ranks.run(4, _feed, "data") == [1, 1, 1, 1]


def test_unequal_statistics_and_pickled_shards_give_warnings(ranks):
    ranks.run(4, _statistics_and_pickles)


def _wrong_arguments():
    mesh = build_mesh(MeshSpec(), "hybrid")
    by_class = ParallelConfig(bucketing=BucketingConfig("block", blocks=[nn.Linear]))
    sharded = parallelize(nn.Linear(4, 4), mesh, broadcast_from=0)
    told = []
    for arguments in ((nn.Linear(4, 4), None), (nn.Linear(4, 4), mesh, "zero3"), (sharded, mesh)):
        told.append(refusal(parallelize, *arguments))
    for configuration in (by_class, ParallelConfig("ddp"), ParallelConfig("zero2")):
        sizes = (2, 1) if configuration.strategy.name == "zero2" else (1, 2)
        wide = build_mesh(MeshSpec(*sizes), "hybrid")
        model = nn.Sequential(nn.Linear(4, 4))
        told.append(refusal(parallelize, model, wide, configuration, broadcast_from=0))
    for axes in (("replicate",), ("replicate", "shard", "tensor")):
        own = init_device_mesh("cpu", (2, 1, 1)[: len(axes)], mesh_dim_names=axes)
        told.append(refusal(parallelize, nn.Linear(4, 4), own, ParallelConfig("ddp")))
    return told


def test_arguments_of_wrong_type_give_one_clear_message(ranks):
    told = ranks.run(2, _wrong_arguments)[0]
    no_mesh, no_config, sharded, classes, ddp, zero2, no_shard, tensor = told
    assert no_shard.startswith("the mesh has no axis shard: give it one of size 1")
    assert tensor.startswith("the mesh has an axis tensor of size 1: omit it")
    assert no_mesh.startswith("the second argument of parallelize is the mesh")
    assert no_config.startswith("the third argument of parallelize is a ParallelConfig")
    assert sharded.startswith("the model is sharded already, by parallelize or fully_shard")
    assert classes.startswith("bucketing.blocks are names of classes, in quotes, got [<class")
    assert ddp.startswith("strategy=ddp keeps a full copy per rank, so mesh.shard=2 must be 1")
    assert zero2.startswith("strategy=zero2 shards over all ranks, so mesh.replicate=2 must be 1")


class Holder(nn.Module):
    """A linear layer that stores its weight or another parameter in a place unknown to sharding."""

    def __init__(self, place):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if place == "list":
            self.kept = [self.layer.weight]
        elif place == "list in itself":
            self.kept = []
            self.kept += [self.kept, [self.layer.weight]]
        elif place == "dict of tuples":
            self.kept = {"x": (nn.Parameter(torch.ones(3)),)}
        elif place == "attribute":
            self.__dict__["kept"] = self.layer.weight

    def forward(self, x):
        return self.layer(x)


def _hooked_weight(kind):
    layer = nn.Linear(4, 4)
    getattr(layer.weight, kind)(lambda gradient: None)
    return layer


UNSUITED = {
    "hook": (lambda: _hooked_weight("register_hook"), "0.weight has a gradient hook"),
    "hook after": (
        lambda: _hooked_weight("register_post_accumulate_grad_hook"),
        "0.weight has a gradient hook",
    ),
    "lazy": (lambda: nn.LazyLinear(4), "0.weight has no size yet"),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), "0 has max_norm=1.0"),
    "list": (lambda: Holder("list"), "0.kept holds 0.layer.weight in a plain list"),
    "list in itself": (
        lambda: Holder("list in itself"),
        "0.kept holds 0.layer.weight in a plain list",
    ),
    "dict": (
        lambda: Holder("dict of tuples"),
        "0.kept holds a parameter that the model does not know in a plain dict",
    ),
    "attribute": (lambda: Holder("attribute"), "0.kept holds 0.layer.weight in a plain Parameter"),
}


def _unsuited():
    mesh = build_mesh(MeshSpec(), "hybrid")
    told = {}
    for name, (build, _) in UNSUITED.items():
        torch.manual_seed(0)
        told[name] = refusal(parallelize, nn.Sequential(build(), nn.Linear(4, 4)), mesh)
    return told


def test_state_lost_by_sharding_is_refused_by_name(ranks):
    for told in ranks.run(2, _unsuited):
        for name, (_, expected) in UNSUITED.items():
            assert told[name].startswith(expected)


class Appending(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, losses):
        x = self.two(self.one(x))
        losses.append(x.mean())
        return x


class Encoder(nn.Module):
    def __init__(self, block=None):
        super().__init__()
        block = block or (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(4, 2)

    def encode(self, x):
        return self.head(self.blocks[0](x))

    def project(self, x):
        return self.head(x)

    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses) if isinstance(block, Appending) else block(x)
        return self.head(x).sum() + sum(losses)


def _explained():
    mesh = build_mesh(MeshSpec(), "hybrid")
    x, told = torch.ones(2, 4), []

    def model(block=None):
        torch.manual_seed(0)
        return parallelize(Encoder(block), mesh)

    def penalty():
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model()(inputs).sum(), inputs, create_graph=True)
        slope.square().sum().backward()

    def late_hook():
        changed = model()
        next(changed.parameters()).register_hook(lambda gradient: gradient * 2)
        changed(x).backward()

    for call in (
        lambda: model().encode(x),
        lambda: model().project(x),
        lambda: model(Appending)(x),
        penalty,
        late_hook,
    ):
        with pytest.raises((RuntimeError, ConfigError)) as error:
            call()
        told.append(str(error.value))
    works = model()
    torch.distributed.fsdp.register_fsdp_forward_method(works, "encode")
    works.encode(x).sum().backward()
    return told


def test_calls_on_local_shards_name_the_remedy(ranks):
    for told in ranks.run(2, _explained):
        before, inside, appending, twice, late = told
        assert before.startswith("blocks.0 was called before the model")
        assert inside.startswith("Encoder.project computes with parameters that only a call")
        assert "register_fsdp_forward_method(module, 'project')" in inside
        assert appending.startswith("blocks.")
        assert " changed a list of its arguments" in appending
        assert twice.startswith("backward(create_graph=True) reached blocks.1")
        assert late.startswith("register_hook was called on a parameter")


class Spectral(nn.Module):
    def __init__(self, make=torch.ones):
        super().__init__()
        self.weight = nn.Parameter(make(4, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.weight).real


def _kinds_of_numbers():
    mesh, rank = build_mesh(MeshSpec(), "hybrid"), torch.distributed.get_rank()

    def unset():
        with build_on_meta():
            model = nn.Sequential(Spectral(torch.empty), nn.Linear(4, 4))
        parallelize(model, mesh, seed=0)

    def different(value):
        torch.manual_seed(0)
        model = nn.Sequential(Spectral(), nn.Linear(4, 4))
        if isinstance(value, complex):
            model[0].weight.data.fill_(value)
        elif isinstance(value, nn.Parameter):
            model.table = value
        else:
            model.table = nn.Parameter(torch.tensor([2**62, value]), requires_grad=False)
        parallelize(model, mesh)

    def of_precision(name):
        torch.manual_seed(0)
        model = nn.Sequential(Spectral(), nn.Linear(4, 4))
        return parallelize(model, mesh, ParallelConfig(precision=name))

    told = [refusal(unset), refusal(of_precision, "bf16")]
    exchanged = nn.Parameter(torch.tensor([[1.0, 2.0], [2.0, 1.0]])[rank])
    told += [refusal(different, value) for value in (1 + 1j * rank, 2**53 + rank, exchanged)]
    return told, of_precision("fp64")[0].weight.dtype


def test_complex_and_integer_parameters_are_compared_and_set_unsharded(ranks):
    for told, dtype in ranks.run(2, _kinds_of_numbers):
        assert told[0].startswith("no initializer sets 0.weight")
        assert told[1].startswith("precision.param=bf16: 0.weight is complex")
        assert len(told) == 5
        for each in told[2:]:
            assert each.startswith("ranks [1] hold different weights than rank 0")
        assert dtype == torch.complex128


def _raw_errors():
    mesh = build_mesh(MeshSpec(), "zero3")
    told = [refusal(build_mesh, 2, 2), refusal(token_weight, -3, mesh)]
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    model = parallelize(plain, mesh, ParallelConfig("zero3"))
    told.append(refusal(model.load_state_dict, state))
    parallel2d.load_state(model, state if dist.get_rank() == 0 else None)
    # Arguments that the model sets itself are still accepted.
    model.load_state_dict(model.state_dict())
    return told


def test_torch_errors_are_explained(ranks):
    spec, tokens, whole = ranks.run(2, _raw_errors)[0]
    assert "MeshSpec(replicate=2, shard=4)" in spec
    assert tokens == "token_weight(-3): a number of tokens is at least 0"
    assert "0.weight is sharded" in whole
    assert "load_state" in whole
    with pytest.raises(ValueError, match="norm_type=0 must be above 0"):
        clip_gradient_norm([], 1.0, norm_type=0)
    with pytest.raises(WorkerError, match=r"strategy=ddpp is not one of .*did you mean ddp\?"):
        ranks.run(2, build_mesh, None, "ddpp")
    # As long as torch corrupts it
    with pytest.raises(ConfigError, match="cpu_offload=true with 2 replicas .*pull request 180665"):
        check_offload(True, "cuda", replicate=2)
    with pytest.raises(ConfigError, match="adamW is not one of .*did you mean adamw"):
        parallel2d.build_optimizer(nn.Linear(2, 2), OptimizerConfig("adamW"))
    with pytest.raises(ConfigError, match="did you mean hybrid"):
        ParallelConfig("hybird")
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ConfigError, match=r"\(2, 3, 5\).*\(2, 4\)"):
        parallel2d.cross_entropy_sum(logits, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="logits is a str"):
        parallel2d.cross_entropy_sum("logits", torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="token numbers in int64 or int32, got torch.float32"):
        parallel2d.cross_entropy_sum(logits, torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"OptimizerConfig\('adamw', lr=3e-4\); got 'adamw'"):
        parallel2d.build_optimizer(nn.Linear(2, 2), "adamw")
    flat = parallel2d.cross_entropy_sum(logits, torch.zeros(6, dtype=torch.int64))
    assert flat == parallel2d.cross_entropy_sum(logits, torch.zeros(2, 3, dtype=torch.int64))
