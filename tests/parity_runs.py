"""Models and faults for tests of the parity check. A fault is a possible action of a library, a
driver or a user's code on a rank.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d import MeshSpec, ParallelConfig, build_mesh, certify
from parallel2d.base.config import SyncConfig
from parallel2d.base.config.job import OPTIMIZERS
from parallel2d.instruments.parity_check import checked_steps, custom_loop
from parallel2d.parallel.sync.methods.diloco import OuterSync

SAMPLES = 16


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """Two experts, weighted by a gate."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList([Expert(width), Expert(width)])
        self.dropout = nn.Dropout(dropout)
        self.exchanged_on: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(self.norm(x)).softmax(-1)
        experts = list(self.experts)
        if self.exchanged_on == dist.get_rank():
            experts.reverse()
        mixed = sum(weights[..., n : n + 1] * each(x) for n, each in enumerate(experts))
        return x + self.dropout(mixed)


class Experts(nn.Module):
    """Embeddings that are tied to the head, a frozen norm, an unused layer, a number without dimensions."""

    def __init__(self, dropout: float = 0.0, statistics: bool = False, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(61, 24)
        self.layers = nn.ModuleList(Layer(24, dropout) for _ in range(2))
        self.unused = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.statistics = nn.BatchNorm1d(24) if statistics else None
        self.head = nn.Linear(24, 61, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.layers[0].norm.bias.requires_grad_(False)
        self.louder_on: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.statistics is not None:
            x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        if self.louder_on == dist.get_rank():
            x = x * 1.01
        return self.head(x * self.scale)


class Convolutions(nn.Module):
    """Convolutions over sequences, as images of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(16, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x.transpose(1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(61, 20)
        self.reader = nn.GRU(20, 20, batch_first=True)
        self.head = nn.Linear(20, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.reader(self.embedding(tokens))[0])


def transformer() -> nn.Module:
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(61, 24), encoder, nn.Linear(24, 61))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "untied": lambda: Experts(0.2, tied=False),
    "dropout": lambda: Experts(0.2),
    "statistics": lambda: Experts(statistics=True),
    "convolutions": Convolutions,
    "recurrent": Recurrent,
    "transformer": transformer,
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    logits = model(tokens).float()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1).sum()


def run(
    model: str,
    sizes: dict[str, Any],
    parallel: dict[str, Any],
    fault: str = "",
    optimizer: str = "adamw",
    seed: int | None = None,
    tensor_plan: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the parity report of this process group as plain values. ``seed`` seeds the random
    numbers of all ranks; by default each rank has its own seed. ``optimizer`` is a name, and may be
    followed by the dtype of the state, as in ``adamw bf16``.
    """
    words = dict(parallel)
    if "sync" in words:
        words["sync"] = SyncConfig(**words["sync"])
    config = ParallelConfig(**words)
    mesh = build_mesh(MeshSpec(**sizes), config.strategy.name)
    tokens = torch.randint(0, 61, (SAMPLES, 9), generator=torch.Generator().manual_seed(8))
    module = MODELS[model]()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(20 + dist.get_rank() if seed is None else seed)
    drawn = torch.get_rng_state()
    with fault_of(fault, module):
        batch = (tokens[:, :-1], tokens[:, 1:])
        name, _, dtype = optimizer.partition(" ")
        settings = dataclasses.replace(OPTIMIZERS[name], lr=3e-3, state_dtype=dtype or "fp32")
        options = {"optimizer": settings, "seed": 2}
        found = certify(module, mesh, config, loss_of, batch, tensor_plan=tensor_plan, **options)
    untouched = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return {
        "passed": found.passed,
        "untouched": untouched and torch.equal(torch.get_rng_state(), drawn),
        "lines": [each.line() for each in found.discrepancies],
        "found": [
            (each.check, each.parameter, each.axis, each.ranks, each.cause)
            for each in found.discrepancies
        ],
        "table": found.table(),
        "notes": {name: row.notes for name, row in found.parameters.items()},
        "steps": found.steps,
        "update": max(row.update for row in found.parameters.values()),
    }


Put = Callable[[Any, str, Any], None]  # replaces an attribute for the time of the fault
FAULTS: dict[str, Callable[[Any, Put], None]] = {}


def fault(name: str) -> Callable[[Any], Any]:
    return lambda function: FAULTS.setdefault(name, function)


@contextmanager
def fault_of(kind: str, module: nn.Module) -> Iterator[None]:
    """Inside, something is wrong on some rank, and few steps are compared."""
    replaced: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    if kind:
        put(checked_steps, "_FEWEST_STEPS", 2)
        FAULTS[kind](module, put)
    try:
        yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


def _reductions(put: Put, change: Callable[[Tensor, Callable[[Tensor], Any]], None]) -> None:
    """``change`` gets every large sum over a group, and a function that adds a tensor over it."""
    original = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if group is None or tensor.numel() < 100:
            return original(tensor, op, group, async_op)
        change(tensor, lambda value: original(value, op, group))
        return _Done() if async_op else None

    put(dist, "all_reduce", all_reduce)


@fault("a sum in bf16")
def _sum_in_bf16(_module: Any, put: Put) -> None:
    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        narrow = tensor.bfloat16()
        add(narrow)
        tensor.copy_(narrow)

    _reductions(put, change)


@fault("a factor of 2")
def _summed_twice(_module: Any, put: Put) -> None:
    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        add(tensor)
        tensor.mul_(2)

    _reductions(put, change)


@fault("a parameter left out of one replica's reduction")
def _left_out(_module: Any, put: Put) -> None:
    """The end of each bucket is not reduced in the second replica."""

    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        kept = tensor[-400:].clone()
        add(tensor)
        if dist.get_rank() >= dist.get_world_size() // 2:
            tensor[-400:] = kept

    _reductions(put, change)


@fault("a stale buffer")
def _stale(_module: Any, put: Put) -> None:
    """One reduction returns its result of the previous step."""
    before: list[Tensor] = []

    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        add(tensor)
        now = tensor.clone()
        if before and before[-1].shape == now.shape:
            tensor.copy_(before[-1])
        before.append(now)

    _reductions(put, change)


@fault("a missed micro-batch")
def _missed_micro_batch(_module: Any, put: Put) -> None:
    accumulate = checked_steps.accumulate
    put(
        checked_steps,
        "accumulate",
        lambda model, batches, mode: accumulate(model, batches[:1], mode),
    )


@fault("a lost contribution to the norm")
def _lost_contribution_to_the_norm(_module: Any, put: Put) -> None:
    gradient_norm = checked_steps.gradient_norm
    put(checked_steps, "gradient_norm", lambda parameters: gradient_norm(list(parameters)[1:]))


def _before_clipping(put: Put, change: Callable[[Any], None]) -> None:
    """``change`` gets the model when its gradients are complete."""
    gather = checked_steps._CheckedSteps._gradients

    def changed(self: Any, *arguments: Any) -> Any:
        with torch.no_grad():
            change(self._checked.model)
        return gather(self, *arguments)

    put(checked_steps._CheckedSteps, "_gradients", changed)


def _after_the_step(put: Put, change: Callable[[Any], None]) -> None:
    """``change`` gets the model when it was updated."""
    reshard = checked_steps.reshard

    def changed(model: nn.Module) -> None:
        reshard(model)
        with torch.no_grad():
            change(model)

    put(checked_steps, "reshard", changed)


@fault("one bit of one replica")
def _one_bit(_module: Any, put: Put) -> None:
    def change(model: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            local = model.layers[0].experts[0].up.weight.to_local()
            local.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    _after_the_step(put, change)


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.to_local().clone()
    one.to_local().copy_(other.to_local())
    other.to_local().copy_(kept)


@fault("exchanged gradients")
def _exchanged_gradients(_module: Any, put: Put) -> None:
    def change(model: Any) -> None:
        one, other = model.layers[1].experts
        _exchange(one.up.weight.grad, other.up.weight.grad)

    _before_clipping(put, change)


@fault("exchanged weights")
def _exchanged_weights(_module: Any, put: Put) -> None:
    parallelize = custom_loop.parallelize

    def exchanged(*arguments: Any, **more: Any) -> nn.Module:
        model: Any = parallelize(*arguments, **more)
        one, other = model.layers[0].experts
        with torch.no_grad():
            _exchange(one.down.weight, other.down.weight)
        return model

    put(custom_loop, "parallelize", exchanged)


@fault("a frozen parameter that moves")
def _moving_frozen(_module: Any, put: Put) -> None:
    _after_the_step(put, lambda model: model.layers[0].norm.bias.to_local().add_(1e-4))


@fault("another weight decay on one rank")
def _other_weight_decay(_module: Any, put: Put) -> None:
    build_optimizer = custom_loop.build_optimizer

    def built(*arguments: Any, **more: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(*arguments, **more)
        if dist.get_rank() == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        return optimizer

    put(custom_loop, "build_optimizer", built)


@fault("a state in bf16 where it is large")
def _bf16_state(_module: Any, put: Put) -> None:
    build_optimizer = custom_loop.build_optimizer

    def round_large(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                local = state[key].to_local() if isinstance(state[key], DTensor) else state[key]
                if local.numel() >= 500:
                    local.copy_(local.bfloat16())

    def built(*arguments: Any, **more: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(*arguments, **more)
        optimizer.register_step_post_hook(round_large)
        return optimizer

    # The rounded state is used from the third step on.
    put(checked_steps, "_FEWEST_STEPS", 3)
    put(custom_loop, "build_optimizer", built)


@fault("statistics that do not move")
def _stale_statistics(_module: Any, put: Put) -> None:
    def change(model: Any) -> None:
        for buffer in model.buffers():
            buffer.copy_(torch.ones_like(buffer))

    _before_clipping(put, change)


@fault("half of an outer step")
def _halved_outer_step(_module: Any, put: Put) -> None:
    apply = OuterSync._apply

    def halved(self: Any, fragment: Any, mix: float) -> None:
        fragment.pending.finish()
        fragment.pending = None
        for parameter in fragment.parameters:
            parameter.mean.mul_(0.5)
        apply(self, fragment, mix)

    put(OuterSync, "_apply", halved)


@fault("other updates than the owners'")
def _other_updates(_module: Any, put: Put) -> None:
    """An unsharded parameter differs from the local shards of its owners."""
    _after_the_step(put, lambda model: model.layers[0].gate.weight.to_local().mul_(1.5))


@fault("a model that depends on the rank")
def _rank_dependent(module: Any, put: Put) -> None:
    put(module, "louder_on", dist.get_world_size() - 2)


@fault("experts exchanged on one rank")
def _exchanged_experts(module: Any, put: Put) -> None:
    put(module.layers[1], "exchanged_on", dist.get_world_size() - 2)
