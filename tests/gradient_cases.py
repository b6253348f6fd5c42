"""Models that use their parameters differently by rank and by micro-batch, for
`test_gradient_routes`.

Each case is a class: its constructor builds the model from the global random state, ``loss(x,
route)`` computes one micro-batch. A route is (number of the data rank, number of its replica,
number of the micro-batch, number of the step).
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 8


class Route(NamedTuple):
    rank: int
    replica: int
    micro: int
    step: int


class Case(nn.Module):
    """Three blocks between a first and a last layer."""

    widths = (DIM, DIM)  # of the experts

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Experts(self.widths) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def loss(self, x, route):
        return self(x, route).square().mean()

    def forward(self, x, route):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + self.run(number, block, x, route)
        return self.last(x)

    def run(self, number, block, x, route):
        return block(x, 0)


class Experts(nn.Module):
    """One of several layers, chosen by the caller."""

    def __init__(self, widths):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, w), nn.Tanh(), nn.Linear(w, DIM)) for w in widths
        )

    def forward(self, x, chosen):
        return self.experts[chosen](self.norm(x))


class Everything(Case):
    """Nothing is chosen."""


class ByRank(Case):
    def run(self, number, block, x, route):
        return block(x, route.rank % 2)


class ByMicroBatch(Case):
    def run(self, number, block, x, route):
        return block(x, (route.micro + number) % 2)


class UnequalByBoth(Case):
    widths = (3, 5, 9)

    def run(self, number, block, x, route):
        return block(x, (route.rank * 2 + route.micro + route.step) % 3)


class OneRankAlone(Case):
    """The second expert is used by one data rank in one micro-batch only, the third by no rank."""

    widths = (DIM, 5, 4)

    def run(self, number, block, x, route):
        return block(x, int(route.rank == 1 and route.micro == 0))


class LayerDrop(Case):
    """Whole blocks are skipped, by replica and micro-batch."""

    def run(self, number, block, x, route):
        if (number + route.replica + route.micro + route.step) % 3 == 0:
            return torch.zeros_like(x)
        return block(x, (route.micro + route.rank) % 2)


class SkippedByTheLast(Case):
    """The last of the micro-batches runs no block; replica 1 never runs the first."""

    def run(self, number, block, x, route):
        if route.micro == 1 or (route.replica == 1 and number == 0):
            return torch.zeros_like(x)
        return block(x, route.rank % 2)


class Twice(Case):
    """Each block runs twice, the second time with another expert."""

    def run(self, number, block, x, route):
        return block(block(x, route.rank % 2), route.micro % 2)


class Reversed(Case):
    """Replicas run their blocks in different orders."""

    def forward(self, x, route):
        x = self.first(x)
        for block in reversed(self.blocks) if route.replica == 1 else self.blocks:
            x = x + block(x, route.rank % 2)
        return self.last(x)


class Tied(Case):
    """A weight that belongs to two groups, and experts chosen by rank."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.blocks[0].experts[1][0].weight

    def run(self, number, block, x, route):
        return block(x, (route.rank + route.micro) % 2)


class Scalars(Case):
    """Parameters without dimensions: the first is always used, the second by one rank, the third
    by no rank.
    """

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.rare, self.unused = nn.Parameter(torch.tensor(-0.3)), nn.Parameter(torch.tensor(2.0))
        self.blocks[0].gate = nn.Parameter(torch.tensor(0.1))

    def run(self, number, block, x, route):
        out = block(x, route.rank % 2)
        return out * block.gate if number == 0 else out

    def forward(self, x, route):
        out = super().forward(x, route) * self.scale.exp()
        return out + self.rare if route.rank == 1 and route.micro == 0 else out


class Complex(Case):
    """Layers in the frequency domain (Rao et al. 2021, Global Filter Networks), and experts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Filter() for _ in range(2))

    def run(self, number, block, x, route):
        return block(x, (route.rank + route.micro) % 2)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(DIM // 2 + 1, dtype=torch.complex128) for _ in range(2)
        )

    def forward(self, x, chosen):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weights[chosen], n=DIM)


class Frozen(Case):
    """Frozen parameters in groups of trained ones, and a group that is frozen as a whole."""

    def __init__(self):
        super().__init__()
        self.blocks[0].experts[0].requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def run(self, number, block, x, route):
        return block(x, route.rank % 2)


class Recomputed(Case):
    """Activations of each block are computed again in backward."""

    def run(self, number, block, x, route):
        return checkpoint(block, x, (route.rank + route.micro) % 2, use_reentrant=False)


class Detached(Case):
    """One replica uses the output of a block without a gradient, and another rank omits it from
    the loss.
    """

    def run(self, number, block, x, route):
        out = block(x, 0)
        return out.detach() if number == 1 and route.replica == 0 else out


CASES = {
    case.__name__: case
    for case in (
        Everything,
        ByRank,
        UnequalByBoth,
        ByMicroBatch,
        OneRankAlone,
        LayerDrop,
        SkippedByTheLast,
        Twice,
        Reversed,
        Tied,
        Scalars,
        Complex,
        Detached,
        Frozen,
        Recomputed,
    )
}
