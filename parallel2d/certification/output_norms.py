"""How large the outputs of a model's modules are: `OutputNorms`. Where a rank computes something
else than one process, the first module whose outputs differ shows where that begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# (module, 2-norm of its output), in the order in which modules end
Norms = list[tuple[str, float]]


class OutputNorms:
    """Of the modules called ``names`` (the root is "") in each forward of ``model``."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._forwards: list[list[tuple[str, Tensor]]] = []
        # Outside of the root's forward, blocks run again where activations are recomputed.
        self._is_inside = False
        modules = dict(model.named_modules())
        model.register_forward_pre_hook(self._enter, prepend=True)
        for name in names:
            if name:
                modules[name].register_forward_hook(self._noting(name))
        model.register_forward_hook(self._noting(""))
        model.register_forward_hook(self._leave)

    def take(self) -> list[Norms]:
        """Of the forwards since the last call."""
        found = [[(name, float(norm)) for name, norm in forward] for forward in self._forwards]
        self._forwards = []
        return found

    def _enter(self, *_: Any) -> None:
        self._is_inside = True
        self._forwards.append([])

    def _leave(self, *_: Any) -> None:
        self._is_inside = False

    def _noting(self, name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._is_inside:
                return
            with torch.no_grad():
                norms = [
                    torch.linalg.vector_norm(leaf.detach().double()) for leaf in _tensors_in(output)
                ]
                if norms:
                    self._forwards[-1].append((name, torch.stack(norms).norm()))

        return note


def _tensors_in(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output)
    # What the transformers library returns is no tree, but has its tensors as attributes.
    if any(hasattr(leaf, "logits") for leaf in leaves):
        leaves = [leaf.logits for leaf in leaves if hasattr(leaf, "logits")]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def first_difference(found: Norms, wanted: Norms, bound: float) -> tuple[str, float, float] | None:
    """The first module whose output differs by more than ``bound`` in relation, and both norms."""
    for (name, ours), (other, theirs) in zip(found, wanted, strict=False):
        if name != other:
            return name, ours, theirs
        if not abs(ours - theirs) <= bound * abs(theirs):
            return name, ours, theirs
    return None
