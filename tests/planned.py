"""Real parallelized models on a process group without processes, for the tests of the planner: the
state of one rank of any world.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel2d import MeshSpec, ParallelConfig, build_mesh, mesh_shape, parallelize
from parallel2d.base.config import OptimizerConfig
from parallel2d.base.topology import Topology
from parallel2d.models import llama
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.cost.state_memory import StateBytes
from parallel2d.parallel.sync import accumulate
from parallel2d.parallel.sync.engine.replica_reducer import engines_in
from parallel2d.parallel.sync.methods.diloco import OuterSync
from parallel2d.parallel.sync.methods.error_feedback import ErrorFeedback
from parallel2d.parallel.sync.methods.owned_parameters import OwnedParameters
from parallel2d.training.metrics.communication import CommunicationMeter
from parallel2d.training.optimizer import build_optimizer

WIDTH = 13
LLAMA = {
    "dim": 16,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 4,
    "hidden_dim": 40,
    "vocab_size": 37,
    "max_seq_len": 8,
}


class UnusualBlock(nn.Module):
    """Sizes that no axis divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.scale = Scale()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return x + self.scale(self.down(self.up(self.norm(x)))) + self.seen.sum()


class Scale(nn.Module):
    """A vector of one element, and a matrix of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x):
        return self.gain * x + self.row


class Odd(nn.Module):
    """Blocks, a frozen block among them; an embedding that is also the head; a convolution with a
    kernel of three dims; a parameter without dimensions.
    """

    def __init__(self, tied: bool = True, frozen: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(UnusualBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class Attending(nn.Module):
    """Torch's own attention, which is never divided, in blocks with dropped biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


class Turning(nn.Module):
    """Complex parameters next to real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.turns = nn.ModuleList(Turn() for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for turn in self.turns:
            x = turn(x)
        return x


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(5, 6, dtype=torch.complex64))

    def forward(self, x):
        return x * (self.phases.real.sum(0) + self.phases.imag.sum(0))


def small_llama(**changes: Any) -> nn.Module:
    return llama.Llama(**(LLAMA | changes))


MODELS = {
    "odd": Odd,
    "untied": lambda: Odd(tied=False, frozen=False),
    "attending": Attending,
    "turning": Turning,
    "llama": small_llama,
    "tied_llama": lambda: small_llama(tie_embeddings=True),
}


class Measured(NamedTuple):
    states: StateBytes
    moved: dict[str, float]  # comm/AXIS/bytes


@contextlib.contextmanager
def fake_mesh(
    sizes: tuple[int, int, int], strategy: str, rank: int = 0
) -> Iterator[tuple[DeviceMesh, Topology]]:
    """The mesh of (replicate, shard, tensor) ranks, each on a separate host: ranks of one host
    would share a file.
    """
    replicate, shard, tensor = sizes
    world = replicate * shard * tensor
    with fake_process_group(world, rank):
        topology = Topology.equal_hosts(world, 1)
        yield build_mesh(MeshSpec(*sizes), strategy, topology=topology, device_type="cpu"), topology


def plan_of(model: nn.Module, tensor: int) -> Any:
    return llama.tensor_plan(model, tensor) if tensor > 1 else None


def measured(
    model: nn.Module,
    sizes: tuple[int, int, int],
    config: ParallelConfig,
    optimizer_config: OptimizerConfig,
    *,
    rank: int = 0,
    accumulation: int = 1,
) -> Measured:
    """Parallelizes ``model``, makes a step, and looks at every tensor that is left."""
    # Nothing arrives from the first rank; the other ranks would compare their models with the
    # model of that rank.
    alone = mock.patch("parallel2d.parallel.weights.source.check_same_structure")
    with fake_mesh(sizes, config.strategy.name, rank) as (mesh, topology), alone:
        model = parallelize(
            model, mesh, config, seed=0, tensor_plan=plan_of(model, sizes[2]), topology=topology
        )
        optimizer = build_optimizer(model, optimizer_config)
        meter = CommunicationMeter(mesh).install()
        meter.start()
        batches = [torch.randint(0, 11, (2, 8)) for _ in range(accumulation)]
        for tokens in accumulate(model, batches, config.sync.during_accumulation):
            model(tokens).float().mean().backward()
        states = _states(model, optimizer)
        moved = {f"comm/{axis}/bytes": meter.sent_over(axis) for axis in mesh.mesh_dim_names}
        meter.remove()
        assert mesh_shape(mesh).world_size == sizes[0] * sizes[1] * sizes[2]
        return Measured(states, moved)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [tuple(parameter.shape) for parameter in updated if parameter.grad is None]
    assert not missing, f"no gradients: {missing}"
    gradients = sum(_bytes(parameter.grad) for parameter in updated)
    optimizer.step()
    state = 0
    for of_parameter in optimizer.state.values():
        state += sum(
            _bytes(value) for value in of_parameter.values() if isinstance(value, torch.Tensor)
        )
    masters = outer = kept = 0
    for engine in engines_in(model):
        if isinstance(engine.updates, ErrorFeedback):
            kept = sum(
                codes.nbytes + scales.nbytes for codes, scales in engine.updates._kept.values()
            )
        if isinstance(engine.updates, OwnedParameters):
            kept_rows = [*engine.updates.masters().values(), *engine.updates._seen.values()]
            masters = sum(map(_bytes, kept_rows))
        if isinstance(engine.updates, OuterSync):
            outer = sum(map(_bytes, engine.updates.masters().values()))
            outer += sum(map(_bytes, engine.updates.momenta.values()))
            residuals = [parameter.residual for parameter in engine.updates.parameters.values()]
            outer += sum(_bytes(residual) for residual in residuals if residual is not None)
    return StateBytes(
        parameters=sum(map(_bytes, model.parameters())),
        masters=masters,
        gradients=gradients,
        optimizer=state,
        outer=outer,
        residuals=kept,
        buffers=sum(map(_bytes, model.buffers())),
    )


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
