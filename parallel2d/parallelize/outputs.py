"""What a sharded group hands on: tensors of its own, never views.

[Note: views and hooks] `fully_shard` puts a hook on what a group returns; when its gradient comes,
backward gathers the group's parameters. Two things go wrong when that is a view. If the view's base
was changed in place after the view was taken (``y = h.view(-1); h[0] += 1; return y``), torch ends
the process by SIGSEGV as the hook is set (seen with 2.13; pytorch issue 196459 says 2.9 to 2.14).
And if the caller changes the view in place (``y = block(x); y += x``), the hook is lost, and
backward fails for want of parameters. So a view is handed on as a tensor that shares its memory and
its version, and has a place of its own in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.utils._pytree import tree_map


class _OwnTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def own_outputs(module: nn.Module) -> None:
    """Makes ``module`` return no views. Before `fully_shard`, whose hook must come later; see
    [Note: views and hooks]."""
    module.register_forward_hook(_without_views)


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or not any(
        _is_live_view(tensor) for tensor in collect_grad_tensors(output)
    ):
        return output
    return tree_map(lambda leaf: _OwnTensor.apply(leaf) if _is_live_view(leaf) else leaf, output)


def _is_live_view(leaf: Any) -> bool:
    """Whether it is a view with a gradient; its place in the graph is brought up to date, which is
    what torch forgets."""
    return (
        isinstance(leaf, Tensor)
        and leaf.requires_grad
        and leaf.grad_fn is not None
        and leaf._is_view()
    )
