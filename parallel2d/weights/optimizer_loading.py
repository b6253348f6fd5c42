"""A stored optimizer state compared with the optimizer it is loaded into: start at
`match_optimizer_state`.

`parallel2d.weights.loading` writes the tensors, which `entry_tensor` creates where the optimizer
has none yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from parallel2d.errors import ConfigError
from parallel2d.exchange import sendable
from parallel2d.weights.named_tensors import describe_optimizer, optimizer_tensors
from parallel2d.weights.optimizer_settings import (
    Settings,
    match_settings,
    other_class,
    plain_settings,
)
from parallel2d.weights.states import (
    parameters_of_groups,
    rekey_optimizer_state,
)

Entries = Mapping[str, Mapping[str, Any]]  # parameter name -> key, such as exp_avg -> value


@sendable
@dataclass(frozen=True)
class TensorEntry:
    """A tensor of an optimizer state, for the ranks that do not have the state. A scalar comes with
    its value, so that no collective is needed for it."""

    shape: torch.Size
    dtype: torch.dtype
    scalar: float | None


@dataclass(frozen=True)
class MatchedState:
    """A stored optimizer state that fits an optimizer, or, where it does not, the problems alone.

    ``settings``: new ones for each group of the optimizer, {} where it keeps its own.
    """

    entries: Entries = field(default_factory=dict)
    settings: list[Settings] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> list[tuple[str, str, Any]]:
        """(parameter name, key, `TensorEntry` or plain value) of every entry."""
        # Tensors are sent in this order. Scalars are read here, on the rank that has the state:
        # from a GPU, this waits for the device.
        described: list[tuple[str, str, Any]] = []
        for name, entries in self.entries.items():
            for key, value in entries.items():
                if not isinstance(value, Tensor):
                    described.append((name, key, value))
                    continue
                scalar = value.item() if value.ndim == 0 else None
                described.append((name, key, TensorEntry(value.shape, value.dtype, scalar)))
        return described


def match_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    *,
    settings: bool,
) -> MatchedState:
    """Compares ``state``, whose parameters are called by name or by number, with ``optimizer``.

    ``settings``: whether those of the state's groups are wanted.
    """
    if state is None:
        return MatchedState(problems=["it has no optimizer"])
    # The names of the parameters here, group by group, and all of them in the same order.
    groups = describe_optimizer(model, optimizer)["groups"]
    names = [group["parameters"] for group in groups]
    all_names = list(chain.from_iterable(names))
    # torch's own `state_dict` numbers parameters; `full_state` and `sharded_state` name them.
    kinds = {type(parameter) for parameter in parameters_of_groups(state)}
    if kinds == {int}:
        # Numbers count through the groups: they mean the same only where groups are as large.
        sizes = [len(group["params"]) for group in state["param_groups"]]
        here = [len(listed) for listed in names]
        if sizes != here:
            problem = (
                f"its optimizer has groups of {sizes} parameters, this one of {here}; call them by "
                "name with rekey_optimizer_state"
            )
            return MatchedState(problems=[problem])
        state = rekey_optimizer_state(state, key="name", names=all_names)
    stored = [(plain_settings(group), group["params"]) for group in state["param_groups"]]
    # All problems at once: whoever loads a state of another model wants the list.
    problems = [
        *_unknown_parameters(state["state"], all_names),
        *_other_shapes(state["state"], optimizer_tensors(model, optimizer)),
        *other_class(optimizer, names, stored),
    ]
    # {} changes nothing: each group keeps its own settings.
    new_settings: list[Settings] = [{} for _ in groups]
    if settings:
        new_settings, found = match_settings(optimizer, names, stored)
        problems += found
    # Without entries, so that nothing is read or sent of a state that does not fit.
    if problems:
        return MatchedState(problems=problems)
    return MatchedState(state["state"], new_settings)


def _unknown_parameters(entries: Entries, names: Collection[str]) -> Iterator[str]:
    for name in entries:
        if name not in names:
            yield f"{name} is in its optimizer and not in this one"


def _other_shapes(entries: Entries, here: Mapping[str, Tensor]) -> Iterator[str]:
    """``here``: what `optimizer_tensors` returns; empty before the optimizer's first step, when any
    shape fits."""
    for name, stored in entries.items():
        for key, value in stored.items():
            present = here.get(f"{key}/{name}")
            # Where one of them is no tensor, the stored value replaces the one here.
            if present is None or not isinstance(value, Tensor):
                continue
            if present.shape != value.shape:
                shapes = f"{list(value.shape)}, not {list(present.shape)}"
                yield f"{key} of {name} has shape {shapes}"


def entry_tensor(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    key: str,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """The tensor ``key`` of the state of ``parameter``; one that the optimizer does not have is
    created.

    Raises `ConfigError` for one that it does not have and that is neither a scalar nor of the shape
    of the parameter: only the optimizer knows how it is split.
    """
    # A default dict: where the parameter has no state yet, this makes an empty one.
    entries = optimizer.state[parameter]
    if isinstance(entries.get(key), Tensor):
        return entries[key]
    # Moments are split like the parameter, and copied from it they are `DTensor`s on its mesh.
    # The step count of a parameter without dims has its shape too, and is no `DTensor` like it.
    is_like_parameter = shape == parameter.shape and key != "step"
    is_scalar = len(shape) == 0
    if is_like_parameter:
        entries[key] = torch.zeros_like(parameter, requires_grad=False)
    elif is_scalar:
        device = _device_of_scalars(optimizer, parameter)
        entries[key] = torch.zeros(shape, dtype=dtype, device=device)
    else:
        raise ConfigError(
            f"{key} of shape {list(shape)}: how it is split is unknown before the optimizer's "
            "first step"
        )
    return entries[key]


def _device_of_scalars(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Where torch's optimizers count the steps of ``parameter``: on the CPU, unless their kernels
    are fused or captured in a CUDA graph and read the count on the device."""
    for group in optimizer.param_groups:
        # A parameter is in one group. By id: `in` would compare the values of tensors.
        ids = {id(other) for other in group["params"]}
        if id(parameter) not in ids:
            continue
        if group.get("fused") or group.get("capturable"):
            return parameter.device
    return torch.device("cpu")
