"""Makes a sharded group return tensors of its own, never views. Start at `own_outputs`.

[Note: views and hooks] `fully_shard` puts a hook on what a group returns; when its gradient comes,
backward gathers the group's parameters. Two things go wrong when that is a view. If the view's base
was changed in place after the view was taken (``y = h.view(-1); h[0] += 1; return y``), torch ends
the process by SIGSEGV as the hook is set (seen with 2.13; pytorch issue 196459 says 2.9 to 2.14).
And if the caller changes the view in place (``y = block(x); y += x``), the hook is lost, and
backward fails for want of parameters. So in place of a view the group returns a tensor that shares
the view's memory and version, and is a node of its own in the autograd graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from parallel2d.fsdp_internals import collect_grad_tensors


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
    if not torch.is_grad_enabled():
        return output
    if not any(_is_live_view(tensor) for tensor in collect_grad_tensors(output)):
        return output
    return tree_map(_own, output)


def _own(leaf: Any) -> Any:
    return _OwnTensor.apply(leaf) if _is_live_view(leaf) else leaf


def _is_live_view(leaf: Any) -> bool:
    """Whether ``leaf`` is a view that backward passes through."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return False
    # Reading grad_fn also makes torch update the view's node in the graph, where the view's base
    # was changed in place. torch omits this before it sets its hook.
    if leaf.grad_fn is None:
        return False
    return leaf._is_view()
