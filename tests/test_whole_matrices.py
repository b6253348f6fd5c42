"""Custom optimizers on unsharded tensors: equal to one process on any layout, saved and resumed on
another.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import largest_difference, weights_of

import parallel2d
from parallel2d.base.config import SyncConfig

WIDTH, SAMPLES, STEPS = 7, 12, 4
LAYOUTS: dict[str, tuple[int, dict[str, int], str]] = {
    "zero3": (3, {"shard": 3}, "zero3"),
    "hybrid": (4, {"replicate": 2, "shard": 2}, "hybrid"),
    "hybrid_full": (4, {"replicate": 2, "shard": 2}, "hybrid_full"),
    "ddp": (3, {"replicate": 3}, "ddp"),
    "tensor": (4, {"shard": 2, "tensor": 2}, "zero3"),
}


class StackedMuon(torch.optim.Optimizer):
    """Matrices of one shape are stacked, and share a state; all else is AdamW's. As nanochat's."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._step_stacked(group)
            else:
                self._step_adamw(group)

    def _step_stacked(self, group: dict[str, Any]) -> None:
        parameters = group["params"]
        gradients = torch.stack([each.grad for each in parameters])
        state = self.state[parameters[0]]
        if not state:
            state["momentum"] = torch.zeros_like(gradients)
        update = state["momentum"].lerp_(gradients, 0.1)
        update = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(3):
            update = 1.5 * update - 0.5 * update @ update.mT @ update
        stacked = torch.stack(parameters) - group["lr"] * update
        torch._foreach_copy_(parameters, list(stacked.unbind()))

    def _step_adamw(self, group: dict[str, Any]) -> None:
        for each in group["params"]:
            state = self.state[each]
            if not state:
                state["step"] = 0
                state["first"], state["second"] = torch.zeros_like(each), torch.ones_like(each)
            state["step"] += 1
            state["first"].lerp_(each.grad, 0.1)
            state["second"].lerp_(each.grad.square(), 0.05)
            rate = group["lr"] / state["step"]
            each.addcdiv_(state["first"], state["second"].sqrt(), value=-rate)


class Preconditioned(torch.optim.Optimizer):
    """One preconditioner for each dim, in a list, and a count in the groups. As SOAP's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    sides = [torch.eye(size).to(each) if size < 9 else [] for size in each.shape]
                    state |= {"sides": sides, "momentum": each * 0}
                    state["decay"] = torch.ones((), dtype=each.dtype)
                update = state["momentum"].lerp_(each.grad, 0.5)
                for dim, side in enumerate(state["sides"]):
                    if len(side):
                        flat = each.grad.movedim(dim, 0).reshape(len(side), -1)
                        side.lerp_(flat @ flat.mT, 0.2)
                        turned = update.movedim(dim, 0)
                        solved = torch.linalg.solve(side, turned.reshape(len(side), -1))
                        update = solved.view_as(turned).movedim(0, dim)
                state["decay"] *= 0.9
                each.sub_(update, alpha=group["lr"] * state["decay"].item() / group["count"])


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Model(nn.Module):
    """Matrices of equal shapes, one that 2 and 3 ranks do not divide, four dims, one, and none."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.conv(x[:, None])


def built(kind: str, model: nn.Module, wrap: bool, lr: float = 0.05) -> torch.optim.Optimizer:
    if kind == "stacked":
        matrices: dict[Any, list[Tensor]] = {}
        others = []
        for name, each in model.named_parameters():
            if name.startswith("blocks.") and each.ndim == 2:
                matrices.setdefault(each.shape, []).append(each)
            else:
                others.append(each)
        groups = [{"params": each, "kind": "muon", "lr": lr} for each in matrices.values()]
        groups.append({"params": others, "kind": "adamw", "lr": lr})
        return parallel2d.whole_matrices(StackedMuon, groups) if wrap else StackedMuon(groups)
    if wrap:
        return parallel2d.whole_matrices(Preconditioned, model.parameters(), split=True, lr=lr)
    return Preconditioned(model.parameters(), lr=lr)


def samples(step: int) -> Tensor:
    return torch.randint(0, 11, (SAMPLES, 5), generator=torch.Generator().manual_seed(step))


def steps(
    model: nn.Module, optimizer: Any, mesh: Any, first: int, last: int, own: slice = slice(None)
) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (first + step))
    for step in range(first, last + 1):
        part = samples(step)[own]
        if mesh is not None:
            part = part.tensor_split(parallel2d.mesh_shape(mesh).data_ranks)[
                parallel2d.data_coordinate(mesh)
            ]
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def plain(layout: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Model(6 if layout == "tensor" else WIDTH).double()


def sharded(layout: str, seed: int = 0, sync: SyncConfig | None = None) -> tuple[Any, nn.Module]:
    _, sizes, strategy = LAYOUTS[layout]
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**sizes), strategy)
    config = parallel2d.ParallelConfig(strategy, precision="fp64", sync=sync or SyncConfig())
    tensor = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if layout == "tensor" else None
    return mesh, parallel2d.parallelize(plain(layout, seed), mesh, config, tensor_plan=tensor)


def train(kind: str, layout: str, folder: str, resumes: bool) -> tuple[Any, Any, int]:
    """Run half of the steps: the first half, which is saved, or the second half from the saved
    state.
    """
    mesh, model = sharded(layout, seed=int(resumes))
    optimizer = built(kind, model, wrap=True)
    parallel2d.attach_optimizer(model, optimizer)
    checkpointer = parallel2d.Checkpointer(
        parallel2d.CheckpointConfig(every=2), folder, mesh, model, optimizer, layout={}
    )
    assert (checkpointer.restore(settings=True) is not None) == resumes
    steps(model, optimizer, mesh, 3 if resumes else 1, 4 if resumes else 2)
    if not resumes:
        for parameter in optimizer.param_groups[0]["params"]:
            assert not optimizer.state[parameter]  # it is with the owners
        checkpointer.save_if_due(2, {})
    checkpointer.finish()
    state = parallel2d.full_state(model, optimizer, rank0_only=False, key_by="id")["optimizer"]
    inner = len(optimizer._inner.param_groups)
    return weights_of(model), state, inner


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("stacked", "zero3", "hybrid"),
        ("lists", "ddp", "hybrid_full"),
        pytest.param("stacked", "hybrid_full", "ddp", marks=pytest.mark.slow),
        pytest.param("stacked", "tensor", "tensor", marks=pytest.mark.slow),
        pytest.param("lists", "hybrid", "zero3", marks=pytest.mark.slow),
    ],
)
def test_updates_equal_one_process_when_resumed(ranks, tmp_path, kind, first, then):
    model = plain(first)
    optimizer = built(kind, model, wrap=False)
    steps(model, optimizer, None, 1, 2)
    halfway = weights_of(model)
    steps(model, optimizer, None, 3, 4)
    found = ranks.run(LAYOUTS[first][0], train, kind, first, str(tmp_path), False)
    assert max(largest_difference(each[0], halfway) for each in found) <= 1e-10
    found = ranks.run(LAYOUTS[then][0], train, kind, then, str(tmp_path), True)
    assert max(largest_difference(each[0], weights_of(model)) for each in found) <= 1e-10
    # Groups that are stacked have one owner; parameters that are not are divided.
    whole = len(optimizer.param_groups) if kind == "stacked" else len(found)
    owners = LAYOUTS[then][1].get("replicate", 1) if LAYOUTS[then][2] != "hybrid_full" else 1
    assert sum(inner for *_, inner in found) == whole * (owners if kind == "stacked" else 1)
    if kind == "stacked":
        expected = optimizer.state_dict()
        for state in [each[1] for each in found]:
            assert state["state"].keys() == expected["state"].keys()
            for number, entries in expected["state"].items():
                for key, value in entries.items():
                    torch.testing.assert_close(state["state"][number][key], value)


def continued(kind: str, layout: str, path: str, sync: SyncConfig | None) -> dict[str, Any]:
    """Run two steps from the state that a script saved in one process, with a `state_dict` in
    between.
    """
    mesh, model = sharded(layout, sync=sync)
    optimizer = built(kind, model, wrap=True)
    parallel2d.attach_optimizer(model, optimizer)
    weights, state = torch.load(path, weights_only=False)
    parallel2d.load_state(model, weights)
    optimizer.load_state_dict(state)
    steps(model, optimizer, mesh, 3, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    steps(model, optimizer, mesh, 4, 4)
    return weights_of(model)


def test_a_state_of_one_process_is_loaded(ranks, tmp_path):
    for kind, layout in (("stacked", "hybrid"), ("lists", "hybrid_full")):
        model = plain(layout)
        optimizer = built(kind, model, wrap=False)
        steps(model, optimizer, None, 1, 2)
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / kind)
        steps(model, optimizer, None, 3, 4)
        found = ranks.run(4, continued, kind, layout, str(tmp_path / kind), None)
        assert max(largest_difference(each, weights_of(model)) for each in found) <= 1e-10
    # With diloco each replica has separate owners, and equals a job of one process on its samples.
    found = ranks.run(4, continued, kind, "hybrid", str(tmp_path / kind), SyncConfig("diloco"))
    for replica in range(2):
        model = plain("hybrid")
        optimizer = built(kind, model, wrap=False)
        weights, state = torch.load(tmp_path / kind, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        steps(model, optimizer, None, 3, 4, slice(6 * replica, 6 * replica + 6))
        of_replica = found[2 * replica : 2 * replica + 2]
        assert max(largest_difference(each, weights_of(model)) for each in of_replica) <= 1e-10


def without_the_wrapper(saved: dict[str, Any]) -> dict[str, Any]:
    _, model = sharded("hybrid")
    matrices = [each for each in model.parameters() if each.ndim == 2]
    model(samples(0)).square().mean().backward()
    built_bare = {
        "StackedMuon": StackedMuon([{"params": matrices[1:], "kind": "muon", "lr": 0.1}]),
        "Adafactor": torch.optim.Adafactor(matrices),
        "Muon": torch.optim.Muon(matrices),
    }
    for name, optimizer in built_bare.items():
        with pytest.raises(
            parallel2d.ConfigError, match=rf"{name}\.step .*whole_matrices\({name}, "
        ):
            optimizer.step()
    with pytest.raises(parallel2d.ConfigError, match="needs a closure"):
        parallel2d.whole_matrices(torch.optim.LBFGS, matrices)
    _, full = sharded("hybrid_full")
    optimizer = torch.optim.LBFGS(parallel2d.updated_parameters(full))
    with pytest.raises(parallel2d.ConfigError, match=r"LBFGS\.step .* use strategy=hybrid$"):
        parallel2d.attach_optimizer(full, optimizer)
    optimizer = parallel2d.whole_matrices(torch.optim.Rprop, matrices)
    optimizer.add_param_group({"params": [model.scale]})
    with pytest.raises(parallel2d.ConfigError, match="all parameter groups at once"):
        optimizer.step()
    optimizer = parallel2d.whole_matrices(torch.optim.Rprop, matrices)
    if optimizer._inner.param_groups:  # only on the owner, and all ranks receive the result
        optimizer._inner.state["count"] = 1
    with pytest.raises(parallel2d.ConfigError, match="count in the optimizer's state cannot be"):
        optimizer.state_dict()
    # Whole state that torch's own optimizers load is cut.
    mesh, model = sharded("hybrid")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # The ranks share its memory.
    optimizer.load_state_dict(copy.deepcopy(saved))
    steps(model, optimizer, mesh, 3, 3)
    return weights_of(model)


def test_unsupported_calls_on_sharded_parameters_are_explained_and_full_state_is_sharded(ranks):
    model = plain("hybrid")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = {name: each.clone() for name, each in model.state_dict().items()}
    steps(model, optimizer, None, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    model.load_state_dict(start)
    steps(model, optimizer, None, 3, 3)
    for found in ranks.run(4, without_the_wrapper, saved):
        assert largest_difference(found, weights_of(model)) <= 1e-10
