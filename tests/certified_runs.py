"""Models and faults for tests of certificates. A fault is something that a library, a driver or a user's code could do on a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d import MeshSpec, ParallelConfig, build_mesh, certify
from parallel2d.certification import in_code
from parallel2d.config import SyncConfig
from parallel2d.config.job import OPTIMIZERS
from parallel2d.sync.outer import OuterSync

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

    def __init__(self, dropout: float = 0.0, statistics: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(61, 24)
        self.layers = nn.ModuleList(Layer(24, dropout) for _ in range(2))
        self.unused = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.statistics = nn.BatchNorm1d(24) if statistics else None
        self.head = nn.Linear(24, 61, bias=False)
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
    """Of sequences as pictures of one row."""

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


def perceptron() -> nn.Module:
    torch.manual_seed(7)
    inner = [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(61, 24), *inner, nn.Linear(24, 61))


def untied() -> nn.Module:
    model = Experts(0.2)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "untied": untied,
    "dropout": lambda: Experts(0.2),
    "statistics": lambda: Experts(statistics=True),
    "convolutions": Convolutions,
    "recurrent": Recurrent,
    "transformer": transformer,
    "perceptron": perceptron,
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
    """The certificate of this process group, as plain values. ``seed``: of all ranks' random numbers; default: each has its own."""
    words = dict(parallel)
    if "sync" in words:
        words["sync"] = SyncConfig(**words["sync"])
    config = ParallelConfig(**words)
    mesh = build_mesh(MeshSpec(**sizes), config.strategy.name)
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 61, (SAMPLES, 9), generator=generator)
    module = MODELS[model]()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(20 + dist.get_rank() if seed is None else seed)
    with fault_of(fault, module):
        found = certify(
            module,
            mesh,
            config,
            loss_of,
            (tokens[:, :-1], tokens[:, 1:]),
            optimizer=dataclasses.replace(OPTIMIZERS[optimizer], lr=3e-3),
            seed=2,
            tensor_plan=tensor_plan,
        )
    untouched = all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return {
        "passed": found.passed,
        "untouched": untouched,
        "lines": [each.line() for each in found.discrepancies],
        "found": [
            (each.check, each.parameter, each.axis, each.ranks, each.cause)
            for each in found.discrepancies
        ],
        "table": found.table(),
        "notes": {name: row.notes for name, row in found.parameters.items()},
        "gradient": max(row.gradient for row in found.parameters.values()),
        "steps": found.steps,
    }


@contextmanager
def fault_of(kind: str, module: nn.Module) -> Iterator[None]:
    """Inside, something is wrong on some rank."""
    replaced: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    if kind:
        FAULTS[kind](module, put)
    try:
        yield
    finally:
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


def _reductions(put: Any, change: Callable[[Tensor, Callable[[Tensor], Any]], None]) -> None:
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


def _sum_in_bf16(_module: nn.Module, put: Any) -> None:
    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        narrow = tensor.bfloat16()
        add(narrow)
        tensor.copy_(narrow)

    _reductions(put, change)


def _summed_twice(_module: nn.Module, put: Any) -> None:
    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        add(tensor)
        tensor.mul_(2)

    _reductions(put, change)


def _left_out(_module: nn.Module, put: Any) -> None:
    """The end of each bucket is not reduced in the second replica."""

    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        kept = tensor[-400:].clone()
        add(tensor)
        if dist.get_rank() >= dist.get_world_size() // 2:
            tensor[-400:] = kept

    _reductions(put, change)


def _stale(_module: nn.Module, put: Any) -> None:
    """One reduction gives what it gave in the step before."""
    before: list[Tensor] = []

    def change(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
        add(tensor)
        now = tensor.clone()
        if before and before[-1].shape == now.shape:
            tensor.copy_(before[-1])
        before.append(now)

    _reductions(put, change)


def _missed_micro_batch(_module: nn.Module, put: Any) -> None:
    accumulate = in_code.accumulate

    def fewer(model: nn.Module, batches: Any, mode: str) -> Iterator[Any]:
        yield from accumulate(model, batches[:1], mode)

    put(in_code, "accumulate", fewer)


def _lost_contribution_to_the_norm(_module: nn.Module, put: Any) -> None:
    gradient_norm = in_code.gradient_norm
    put(in_code, "gradient_norm", lambda parameters: gradient_norm(list(parameters)[1:]))


def _after_updates(put: Any, change: Callable[[list[Tensor]], None]) -> None:
    step = torch.optim.AdamW.step

    def changed(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        result = step(self, *arguments)
        with torch.no_grad():
            change([p for group in self.param_groups for p in group["params"]])
        return result

    put(torch.optim.AdamW, "step", changed)


def _one_bit(_module: nn.Module, put: Any) -> None:
    def change(parameters: list[Tensor]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            parameters[2].to_local().view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    _after_updates(put, change)


def _exchanged_gradients(_module: nn.Module, put: Any) -> None:
    session = in_code.Session.gradients_ready

    def exchanged(self: Any, *arguments: Any) -> None:
        named = dict(self._model.named_parameters())
        one = named["layers.1.experts.0.up.weight"].grad.to_local()
        other = named["layers.1.experts.1.up.weight"].grad.to_local()
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        session(self, *arguments)

    put(in_code.Session, "gradients_ready", exchanged)


def _exchanged_weights(_module: nn.Module, put: Any) -> None:
    parallelize = in_code.parallelize

    def exchanged(*arguments: Any, **more: Any) -> nn.Module:
        model = parallelize(*arguments, **more)
        named = dict(model.named_parameters())
        with torch.no_grad():
            one = named["layers.0.experts.0.down.weight"].to_local()
            other = named["layers.0.experts.1.down.weight"].to_local()
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        return model

    put(in_code, "parallelize", exchanged)


def _moving_frozen(_module: nn.Module, put: Any) -> None:
    session = in_code.Session.end_step

    def moved(self: Any) -> None:
        with torch.no_grad():
            dict(self._model.named_parameters())["layers.0.norm.bias"].to_local().add_(1e-4)
        session(self)

    put(in_code.Session, "end_step", moved)


def _other_weight_decay(_module: nn.Module, put: Any) -> None:
    build_optimizer = in_code.build_optimizer

    def built(*arguments: Any, **more: Any) -> torch.optim.Optimizer:
        optimizer = build_optimizer(*arguments, **more)
        if dist.get_rank() == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        return optimizer

    put(in_code, "build_optimizer", built)


def _kept_statistics(_module: nn.Module, put: Any) -> None:
    """Buffers get back what they had before each step."""
    ready = in_code.Session.gradients_ready

    def undone(self: Any, *arguments: Any) -> None:
        for buffer in self._model.buffers():
            buffer.copy_(torch.ones_like(buffer))
        ready(self, *arguments)

    put(in_code.Session, "gradients_ready", undone)


def _halved_outer_step(_module: nn.Module, put: Any) -> None:
    apply = OuterSync._apply

    def halved(self: Any, fragment: Any, mix: float) -> None:
        fragment.pending.finish()
        fragment.pending = None
        for parameter in fragment.parameters:
            parameter.mean.mul_(0.5)
        apply(self, fragment, mix)

    put(OuterSync, "_apply", halved)


def _other_updates(_module: nn.Module, put: Any) -> None:
    """A gathered parameter is not what its owners have."""
    end_step = in_code.Session.end_step

    def changed(self: Any) -> None:
        with torch.no_grad():
            dict(self._model.named_parameters())["layers.0.gate.weight"].to_local().mul_(1.5)
        end_step(self)

    put(in_code.Session, "end_step", changed)


def _set(module: nn.Module, put: Any, name: str) -> None:
    put(module, name, dist.get_world_size() - 2)


def _rank_dependent(module: nn.Module, put: Any) -> None:
    _set(module, put, "louder_on")


def _exchanged_experts(module: nn.Module, put: Any) -> None:
    _set(module.layers[1], put, "exchanged_on")  # type: ignore[index]


FAULTS: dict[str, Callable[[nn.Module, Any], None]] = {
    "a sum in bf16": _sum_in_bf16,
    "a factor of 2": _summed_twice,
    "a parameter left out of one replica's reduction": _left_out,
    "a stale buffer": _stale,
    "a missed micro-batch": _missed_micro_batch,
    "a lost contribution to the norm": _lost_contribution_to_the_norm,
    "one bit of one replica": _one_bit,
    "exchanged gradients": _exchanged_gradients,
    "exchanged weights": _exchanged_weights,
    "a frozen parameter that moves": _moving_frozen,
    "another weight decay on one rank": _other_weight_decay,
    "statistics that do not move": _kept_statistics,
    "half of an outer step": _halved_outer_step,
    "other updates than the owners'": _other_updates,
    "a model that depends on the rank": _rank_dependent,
    "experts exchanged on one rank": _exchanged_experts,
}
