"""Modules that return views: a hook on such a tensor crashes torch, or is lost when its caller
changes it in place.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn

from parallel2d import ParallelConfig, accumulate, build_mesh, parallelize
from parallel2d.parallel.mesh_sizes import MeshSpec

WIDTH = 8


class Stale(nn.Linear):
    """A view of a base that changes after the view was taken: torch dies by SIGSEGV when a hook is
    set on the view.
    """

    def forward(self, x: Tensor) -> Tensor:
        base = super().forward(torch.tanh(x))
        view = base.view(-1, WIDTH)
        base[:, :2].add_(0.5 * x[:, 2:4])
        return view


class Sliced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(super().forward(torch.tanh(x)), (1, 1))[:, 1:-1]


class Several(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, object]:
        whole = super().forward(torch.tanh(x))
        parts = (whole[:, :4], [whole[:, 4:]])
        return {"parts": parts, "name": "several", "constant": torch.ones(1).view(1)}


class Net(nn.Module):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            if isinstance(y, dict):
                assert y["name"] == "several"
                y = torch.cat([y["parts"][0], y["parts"][1][0]], 1)
            y += x  # in place: on the output of the layer
            x = y
        return x[:, 1:]


def _gradients(kind: type[nn.Linear], strategy: str) -> float:
    mesh = build_mesh(MeshSpec(), strategy)
    torch.manual_seed(0)
    model = Net(kind).double()
    plain = copy.deepcopy(model)
    model = parallelize(model, mesh, ParallelConfig(strategy, "layer", precision="fp64"))
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    plain(x).square().mean().backward()
    for micro in accumulate(model, [x]):
        out = model(micro)
        out *= 1.0  # the root's too
        out.square().mean().backward()
    expected = dict(plain.named_parameters())
    return max(
        float((training.full_tensor_of(parameter.grad) - expected[name].grad).abs().max())
        for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("kind", [Stale, Sliced, Several])
@pytest.mark.parametrize("strategy", ["zero3", "hybrid", "ddp"])
def test_output_views_have_the_gradients_of_plain_pytorch(ranks, kind, strategy):
    world = 4 if strategy == "hybrid" else 2
    assert max(ranks.run(world, _gradients, kind, strategy)) < 1e-14
