"""States in memory leave a sharded model, unsharded or as shards, and are loaded again; and the
peak memory of a rank meanwhile.
"""

import copy
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import build, train_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves
from training import build_llama, full_tensor_of, optimizer_of
from workers import refusal

from parallel2d import (
    CheckpointConfig,
    Checkpointer,
    MeshSpec,
    ParallelConfig,
    apply_full,
    build_mesh,
    build_on_meta,
    full_state,
    load_full,
    load_full_state,
    load_sharded_state,
    parallelize,
    rekey_optimizer_state,
    save_full,
    sharded_modules,
    sharded_state,
    summon_full_params,
)
from parallel2d.base.config import OPTIMIZERS
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.weights.geometry import local_part
from parallel2d.training.optimizer import build_optimizer

LAYOUTS = [
    (4, {"replicate": 2, "shard": 2}, {"strategy": "hybrid"}, "name"),
    (4, {"replicate": 1, "shard": 2, "tensor": 2}, {"strategy": "hybrid"}, "id"),
    (2, {"replicate": 2}, {"strategy": "ddp"}, "id"),
    (3, {"shard": 3}, {"strategy": "zero3"}, "name"),
]
HYBRID = LAYOUTS[0][1:3]


def trained(mesh_sizes, config, name="adamw"):
    mesh, model, _ = build(mesh_sizes, config)
    optimizer = build_optimizer(model, OPTIMIZERS[name])
    for step in (1, 2):
        train_step(model, optimizer, mesh, step)
    return mesh, model, optimizer


def fresh(mesh_sizes, config, name="adamw"):
    _, model, _ = build(mesh_sizes, config, seed=7)
    return model, build_optimizer(model, OPTIMIZERS[name])


def next_losses(mesh, model, optimizer):
    return [train_step(model, optimizer, mesh, step) for step in (3, 4)]


def through_torch(state, name):
    """The whole state after it was in plain torch's own hands, where it was the same."""
    bare = build_llama()
    bare_optimizer = build_optimizer(bare, OPTIMIZERS[name])
    bare.load_state_dict(state["model"])
    bare_optimizer.load_state_dict(state["optimizer"])
    named = dict(bare.named_parameters())
    names = {id(p): key for key, p in named.items()}
    listed = [names[id(p)] for group in bare_optimizer.param_groups for p in group["params"]]
    entries = rekey_optimizer_state(state["optimizer"], key="name", names=listed)["state"]
    for key, values in entries.items():
        for entry, value in values.items():
            assert torch.equal(value, bare_optimizer.state[named[key]][entry]), (key, entry)
    return {"model": bare.state_dict(), "optimizer": bare_optimizer.state_dict()}


def round_trip(mesh_sizes, config, name, from_rank0, key_by, bare=False):
    """Gather the states, load them into a fresh model of another seed, and compare the next steps
    of both.
    """
    mesh, model, optimizer = trained(mesh_sizes, config, name)
    state = full_state(model, optimizer, rank0_only=from_rank0, key_by=key_by)
    if bare and state:
        state = through_torch(state, name)
    other, other_optimizer = fresh(mesh_sizes, config, name)
    load_full_state(other, other_optimizer, state, from_rank0=from_rank0)
    same = next_losses(mesh, model, optimizer) == next_losses(mesh, other, other_optimizer)
    return same, len(state)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh", "config", "key_by"), LAYOUTS)
def test_full_state_from_rank_0_continues_bitwise(ranks, world, mesh, config, key_by):
    results = ranks.run(world, round_trip, mesh, config, "adamw", True, key_by)
    # other ranks keep nothing
    assert results == [(True, 2)] + [(True, 0)] * (world - 1)


def test_optimizer_continues_from_full_state_of_each_rank(ranks):
    assert ranks.run(4, round_trip, *HYBRID, "sgd", False, "name") == [(True, 2)] * 4


def in_parts():
    """Takes a copy, trains on, and goes back to it."""
    mesh, model, optimizer = trained(*HYBRID)
    kept = sharded_state(model, optimizer, copy=True)
    live = sharded_state(model, optimizer)["model"]
    first = next_losses(mesh, model, optimizer)
    pairs = [(local_part(live[key]), local_part(value)) for key, value in kept["model"].items()]
    assert not all(torch.equal(*pair) for pair in pairs), "without copy they are the live ones"
    load_sharded_state(model, optimizer, kept)
    assert next_losses(mesh, model, optimizer) == first
    other, _ = fresh({"shard": dist.get_world_size()}, {"strategy": "zero3"})
    load_sharded_state(other, None, kept)  # split in another way: redistributed
    for key, p in other.named_parameters():
        assert torch.equal(full_tensor_of(p), full_tensor_of(kept["model"][key]))
    values = kept["model"].values()
    return sum(local_part(value).numel() for value in values) / sum(v.numel() for v in values)


def test_sharded_state_loads_on_the_same_and_another_layout(ranks):
    assert ranks.run(4, in_parts) == [pytest.approx(0.5, abs=0.02)] * 4


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_full_state_round_trips_through_an_unwrapped_model(ranks, name):
    found = ranks.run(4, round_trip, *HYBRID, name, True, "id", bare=True)
    assert found == [(True, 2)] + [(True, 0)] * 3


def through_files(folder, mesh_sizes, config):
    """Read files of `save_full` in a script of one process, and its files here. Returns the output
    of the script.
    """
    mesh, model, optimizer = trained(mesh_sizes, config)
    save_full(f"{folder}/ours.pt", model, optimizer, epoch=7, args={"lr": [1e-3]})
    first = dist.get_rank() == 0
    if first:
        bare = build_llama()
        bare_optimizer = build_optimizer(bare, OPTIMIZERS["adamw"])
        content = torch.load(f"{folder}/ours.pt")
        bare.load_state_dict(content["model"])
        bare_optimizer.load_state_dict(content["optimizer"])
        states = {"model": bare.state_dict(), "optimizer": bare_optimizer.state_dict()}
        torch.save({**states, "epoch": 8, "counts": Counter("ab")}, f"{folder}/theirs.pt")
        torch.save(bare.state_dict(), f"{folder}/model.pt")
        torch.save({"state_dict": bare.state_dict(), "epoch": 8}, f"{folder}/other.pt")
        assert sorted(content) == ["args", "epoch", "model", "optimizer"]
    expected = next_losses(mesh, model, optimizer)
    other, other_optimizer = fresh(mesh_sizes, config)
    extra = load_full(f"{folder}/theirs.pt", other, other_optimizer)
    assert extra == {"epoch": 8, "counts": Counter("ab")}
    assert next_losses(mesh, other, other_optimizer) == expected
    assert load_full(f"{folder}/model.pt", other) == {}
    for name, says in (
        ("other", "it has no model, but state_dict, epoch"),
        ("none", "No such file"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_full(f"{folder}/{name}.pt", other)
    with pytest.raises(ConfigError, match="save_full: .* not written"):
        save_full(f"{folder}/none/ours.pt", other)


def listed(state):
    """Every value with the keys that lead to it."""
    return sorted(map(str, tree_flatten_with_path(state)[0]))


class Rounded(torch.optim.SGD):
    def step(self):  # with a state in bf16, for parameters in any dtype
        super().step()
        for entries in self.state.values():
            entries["momentum_buffer"] = entries["momentum_buffer"].bfloat16()


def pair(seed, world):
    """Generator and critic with an optimizer each, after a step; the critic has buffers."""
    torch.manual_seed(seed)
    mesh = build_mesh(MeshSpec(), "zero3" if world < 4 else "hybrid")
    config = ParallelConfig("zero3" if world < 4 else "hybrid", precision="fp64")
    models = {
        "generator": parallelize(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh, config),
        "critic": parallelize(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), mesh, config),
    }
    optimizers = {
        "generator": torch.optim.AdamW(models["generator"].parameters(), lr=0.1),
        "critic": Rounded(models["critic"].parameters(), lr=0.1, momentum=0.9),
    }
    return mesh, models, optimizers


def several(folder, resumes):
    """Full states of a generator and a critic that were trained or resumed from the checkpoint,
    loaded again from full states.
    """
    mesh, models, optimizers = pair(int(resumes), dist.get_world_size())
    checkpointer = Checkpointer(CheckpointConfig(), folder, mesh, models, optimizers)
    if checkpointer.restore() is None:
        models["critic"](models["generator"](torch.randn(8, 4).double())).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        checkpointer.save_if_due(1, {"samples": 8}, last=True)
        checkpointer.finish()
    state = full_state(models, optimizers, rank0_only=False, key_by="id")
    _, others, their_optimizers = pair(5, dist.get_world_size())
    load_full_state(others, their_optimizers, state)
    again = full_state(others, their_optimizers, rank0_only=False, key_by="id")
    assert listed(again) == listed(state)
    bare = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    bare.load_state_dict(state["model"]["critic"])
    torch.optim.SGD(bare.parameters()).load_state_dict(state["optimizer"]["critic"])
    del state["model"]["critic"]
    with pytest.raises(ConfigError, match="critic: the state does not fit: it has no model"):
        load_full_state(others, None, state)
    with pytest.raises(ConfigError, match="an optimizer by the name of its model"):
        full_state(others, {"critics": their_optimizers["critic"]})
    return listed(again)


def test_full_tensor_files_of_several_models_are_saved_and_loaded(ranks, tmp_path):
    ranks.run(4, through_files, str(tmp_path), *HYBRID)
    trained_pair = ranks.run(4, several, str(tmp_path), False)
    resumed = ranks.run(2, several, str(tmp_path), True)
    assert all(each == trained_pair[0] for each in (*trained_pair, *resumed))


def is_plain(value):
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta


class Held(TorchDispatchMode):
    """Bytes of tensors made inside that are alive at once, at most. Storage is counted once, views
    included.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.users: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if is_plain(t)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                key, size = storage.data_ptr(), storage.nbytes()
                if not size or (key in given and key not in self.users):
                    continue  # a view of something from before
                if key not in self.users:
                    self.users[key] = 0
                    self.now += size
                self.users[key] += 1
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self.release, key, size)
        return result

    def release(self, key, size):
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self.now -= size


def wide(layers=6, dim=128):
    mesh = build_mesh(MeshSpec(), "zero3")
    with build_on_meta():
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))
    model = parallelize(model, mesh, ParallelConfig("zero3", bucketing="layer"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, dim)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def peaks():
    """Peak memory of a rank while a state is gathered and while it is loaded, in units of one
    unsharded parameter.

    The least of three measurements: a thread of gloo that has not run yet may hold a finished
    tensor.
    """
    model, optimizer = wide()
    unit = 128 * 128 * 4
    found = []
    for _ in range(3):
        with Held() as gathering:
            state = full_state(model, optimizer)
        with Held() as scattering:
            load_full_state(model, optimizer, state)
        found.append((gathering.peak / unit, scattering.peak / unit))
    return tuple(map(min, zip(*found, strict=True)))


def test_rank_holds_one_unsharded_parameter_at_a_time(ranks):
    first, *others = ranks.run(2, peaks)
    assert 17 <= first[0] <= 21, "rank 0 keeps 6 parameters with 2 states each"
    for gathering, scattering in others:
        assert 1 <= gathering <= 3, "a whole parameter and the pieces it is made from"
        assert scattering <= 2.1


def stepped(model, optimizer):
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_invalid_state_is_refused_before_any_tensor_is_written():
    model = build_llama()
    model, optimizer = stepped(model, optimizer_of(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = full_state(build_llama())
    for wrong, says in [
        ({}, "it has no model"),
        ({"model": {**state["model"], "extra": torch.ones(1)}}, "extra is not in the model"),
        (
            {"model": {**state["model"], "norm.weight": torch.ones(1)}},
            "norm.weight has shape [1], not [32]",
        ),
        ({"model": state["model"]}, "it has no optimizer"),
        (
            {**state, "optimizer": {"state": {"lost": {}}, "param_groups": []}},
            "lost is in its optimizer and not in this one",
        ),
        (
            {**state, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
            "groups of [1] parameters, this one of [12]",
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            load_full_state(model, optimizer, wrong)
        assert says in str(error.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(ConfigError, match="key_by=number is not one of name, id"):
        full_state(model, key_by="number")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names must give"):
        rekey_optimizer_state(optimizer.state_dict(), key="name", names=["norm.weight"])


class Halves(nn.Module):
    """Its state dict has a fused weight in two halves."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.register_state_dict_post_hook(self.divide)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def divide(_module, state, prefix, _metadata):
        state[f"{prefix}one"], state[f"{prefix}two"] = state.pop(f"{prefix}fused").chunk(2)

    @staticmethod
    def join(_module, state, prefix, *_):
        state[f"{prefix}fused"] = torch.cat(
            [state.pop(f"{prefix}{half}") for half in ("one", "two")]
        )


class Extra(nn.Linear):
    def get_extra_state(self):
        return 1


def refused_states(folder):
    mesh = build_mesh(MeshSpec(), "zero3")
    plain = nn.Sequential(Halves(), nn.Linear(2, 2))
    hooked = parallelize(copy.deepcopy(plain), mesh, ParallelConfig("zero3"), broadcast_from=0)
    extra = parallelize(nn.Sequential(Extra(2, 2)), mesh, ParallelConfig("zero3"), broadcast_from=0)
    with summon_full_params(hooked, writeback=False):
        names = list(hooked.state_dict())
    told = [
        refusal(full_state, hooked),
        refusal(load_full_state, hooked, None, {"model": plain.state_dict()}),
        refusal(full_state, extra),
        refusal(Checkpointer, CheckpointConfig(), folder, mesh, extra, None),
    ]
    return told, names == list(plain.state_dict())


def test_state_dict_hooks_and_extra_state_are_refused_by_name(ranks, tmp_path):
    for told, are_equal in ranks.run(2, refused_states, tmp_path):
        assert told[0].startswith("full_state: 0 has a state dict hook")
        assert "0 has a state dict hook, which is not called" in told[1]
        assert told[2].startswith("full_state: 0 has extra state (get_extra_state)")
        assert told[3].startswith("Checkpointer: 0 has extra state")
        assert are_equal


def scaled(value):
    return value * torch.arange(1.0, value.shape[0] + 1).view(-1, *[1] * (value.ndim - 1))


def applied():
    _, model, _ = build(*HYBRID)
    seen = []

    def scale(module):
        for parameter in module.parameters(recurse=False):
            seen.append((tuple(parameter.shape), isinstance(parameter, DTensor)))
            with torch.no_grad():
                parameter.copy_(scaled(parameter))

    before = full_state(model, rank0_only=False)["model"]
    apply_full(model, scale)
    after = full_state(model, rank0_only=False)["model"]
    right = all(torch.equal(after[name], scaled(value)) for name, value in before.items())
    shapes = [(tuple(value.shape), False) for value in before.values()]
    return right, sorted(seen) == sorted(shapes), [name for name, _ in sharded_modules(model)]


def test_apply_gets_unsharded_parameters_and_sharded_modules_are_listed(ranks):
    assert ranks.run(4, applied) == [(True, True, ["", "layers.0"])] * 4


def scheduled():
    """Losses of steps 4 to 6 with a learning rate that is a tensor and that a scheduler
    multiplies: without an interruption, and with new objects that resume.
    """

    def made(seed):
        mesh, model, _ = build({"shard": 2}, {"strategy": "zero3"}, seed=seed)
        rate = torch.tensor(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        return mesh, model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def steps(mesh, model, optimizer, scheduler, first):
        losses = []
        for step in range(first, first + 3):
            losses.append(train_step(model, optimizer, mesh, step))
            scheduler.step()
        return losses, float(optimizer.param_groups[0]["lr"])

    first, whole_state, parts = made(0), made(7), made(8)
    steps(*first, 1)
    saved = first[3].state_dict()
    load_full_state(*whole_state[1:3], full_state(*first[1:3], key_by="id"))
    load_sharded_state(*parts[1:3], sharded_state(*first[1:3], copy=True))
    for other in (whole_state, parts):
        other[3].load_state_dict(saved)
    return [steps(*each, 4) for each in (first, whole_state, parts)]


def test_torch_scheduler_resumes_from_its_state(ranks):
    undisturbed, whole_state, parts = ranks.run(2, scheduled)[0]
    assert undisturbed[1] == pytest.approx(0.1 * 0.5**6, rel=1e-6)
    assert undisturbed == whole_state == parts


def shown(optimizer, *keys):
    return [tuple(group[key] for key in keys) for group in optimizer.param_groups]


def test_param_group_settings_are_matched_by_their_parameters():
    model = build_llama()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.5}]
    two = torch.optim.AdamW(groups, lr=0.5)
    state_of_two = full_state(model, stepped(model, torch.optim.AdamW(groups, lr=0.5))[1])
    one = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75), fused=True)
    state = full_state(model, stepped(model, one)[1])
    load_full_state(model, two, state, settings=False)
    assert shown(two, "lr", "weight_decay") == [(0.5, 0.01), (0.5, 0.5)]
    load_full_state(model, two, state)
    of_one = (0.25, (0.5, 0.75), 0.01, None)
    assert shown(two, "lr", "betas", "weight_decay", "fused") == [of_one] * 2
    load_full_state(model, one, state_of_two, settings=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other_class = "is of another class: it has amsgrad, betas, eps, and SGD here has dampening"
    for load in (load_full_state, load_sharded_state):
        for settings in (True, False):
            with pytest.raises(ConfigError, match=other_class):
                load(model, sgd, state, settings=settings)

    def changed(**settings):
        group = {**state["optimizer"]["param_groups"][0], **settings}
        return {**state, "optimizer": {**state["optimizer"], "param_groups": [group]}}

    for wrong, says in (
        (state_of_two, "weight_decay=0.01 and weight_decay=0.5 for parameters that are one group"),
        (changed(lr="high"), "its lr is 'high', not a number"),
        (changed(betas=0.5), "its betas is 0.5, not a list"),
        (changed(betas=[0.5, 0.6, 0.7]), "its betas is .0.5, 0.6, 0.7., not a list of 2"),
        (model.state_dict(), r'it has no model: pass a state dict as \{"model": state_dict\}'),
    ):
        with pytest.raises(ConfigError, match=says):
            load_full_state(model, one, wrong)
