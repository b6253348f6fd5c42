"""States loaded into a sharded model: the model's alone by `load_state`, with its optimizer's by
`load_full_state` and `load_sharded_state`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.errors import ConfigError, first_five
from parallel2d.exchange import broadcast
from parallel2d.weights.geometry import copy_slice
from parallel2d.weights.kept import keepers_in
from parallel2d.weights.named_tensors import (
    by_fqn,
    model_tensors,
    parameters_by_name,
    reshard,
    tied_names,
    updated_by_name,
)
from parallel2d.weights.optimizer_loading import (
    MatchedState,
    TensorEntry,
    entry_tensor,
    match_optimizer_state,
)
from parallel2d.weights.optimizer_settings import put_settings
from parallel2d.weights.scatter import scatter
from parallel2d.weights.whole_tensors import fill_tensor


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, Tensor] | None, *, source: int = 0) -> None:
    """Loads ``state``, FQN -> tensor, into a parallelized ``model``. Collective.

    Whole tensors are needed on rank ``source`` alone; the others pass None and get their parts
    piece by piece (`parallel2d.weights.scatter.PIECE_BYTES`), so none of them ever holds a
    whole one. `DTensor`s, as ``model.state_dict()`` gives them on every rank, are copied, or
    redistributed one at a time where they are split differently.

    Raises `ConfigError` when names or shapes differ.
    """
    given: dict[str, Tensor] | None = None
    if state is not None:
        given = by_fqn(state.items())
        if any(isinstance(tensor, DTensor) for tensor in given.values()):
            _load_parts(model, given)
            _take_over(model)
            return
    # Every rank calls `state_dict`, although the source alone needs the names: after a forward, it
    # also frees gathered parameters, and `scatter` must find sharded ones on all ranks.
    persistent = by_fqn(model.state_dict().items())
    buffers = by_fqn(model.named_buffers())
    if given is not None:
        # A state dict has no buffers that are not persistent. The source sends its own.
        transient = buffers.keys() - persistent.keys()
        given |= {name: buffers[name] for name in transient}
    scatter(model, given, source)
    _take_over(model)


def _take_over(model: nn.Module) -> None:
    """After the parameters were loaded: what is kept beside them follows."""
    for keeper in keepers_in(model):
        keeper.parameters_were_loaded()


def _load_parts(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Copies this rank's parts of a sharded state dict, FQN -> tensor."""
    # After a forward without backward, some parameters may still be gathered.
    reshard(model)
    parameters = parameters_by_name(model)
    wrong = []
    for name, parameter in parameters.items():
        if name not in given or given[name].shape != parameter.shape:
            wrong.append(name)
    _refuse("sharded", wrong, separator=", ")
    # Every rank in this order: parts that are split differently are redistributed, a collective.
    for name, parameter in parameters.items():
        copy_part(parameter, given[name])
    # Buffers are optional: a state dict has the persistent ones alone.
    buffers = by_fqn(model.named_buffers())
    for name, buffer in buffers.items():
        if name in given:
            buffer.copy_(given[name])


@torch.no_grad()
def load_full_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any] | None,
    *,
    from_rank0: bool = True,
    settings: bool = True,
) -> None:
    """Gives whole tensors to a model (and its optimizer), sharded or bare: what `full_state`
    returned, or plain state dicts. Collective.

    Args:
        optimizer: None: the model alone is loaded.
        state: ``{"model": state dict, "optimizer": state dict}``, the optimizer's called by name or
            by number. Rank 0 alone needs it (others may pass None or ``{}``) unless ``from_rank0``
            is false.
        from_rank0: rank 0's tensors are sent to the others piece by piece; False: every rank takes
            its part of its own, and nothing is sent.
        settings: parameter groups take those of the state (lr, betas, weight decay), as with
            torch's own ``load_state_dict``, which is what a scheduler of torch goes on from; False:
            they keep theirs.

    Optimizer state that does not exist yet is created. Raises `ConfigError` on every rank, before
    anything is written, when names, shapes or the class of the optimizer differ; with
    ``from_rank0=False`` on the ranks whose own state differs.
    """
    # After a forward without backward, some parameters may still be gathered.
    reshard(model)
    is_sent = from_rank0 and dist.is_initialized()
    matched = MatchedState()
    tensors: Mapping[str, Tensor] = {}
    problems: list[str] = []
    if not is_sent or dist.get_rank() == 0:
        given = state or {}
        problems, matched = _match(model, optimizer, given, settings)
        tensors = given.get("model", {})
    entries = matched.describe()
    new_settings = matched.settings
    if is_sent:
        # Ranks without the state learn whether it fits, and which tensors come in which order.
        problems, entries, new_settings = broadcast((problems, entries, new_settings))
    _refuse("whole", problems)

    for name, tensor in model_tensors(model).items():
        fill_tensor(tensor, tensors.get(name), from_rank0=is_sent)
    for keeper in keepers_in(model):
        keeper.kept_was_loaded()
    if optimizer is None:
        return
    put_settings(optimizer, new_settings)
    parameters = updated_by_name(model)
    for name, key, value in entries:
        # Plain values and scalars have come with the list of entries.
        if not isinstance(value, TensorEntry):
            optimizer.state[parameters[name]][key] = value
            continue
        tensor = entry_tensor(optimizer, parameters[name], key, value.shape, value.dtype)
        if value.scalar is not None:
            tensor.fill_(value.scalar)
        else:
            whole = matched.entries.get(name, {}).get(key)
            fill_tensor(tensor, whole, from_rank0=is_sent)


@torch.no_grad()
def load_sharded_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    *,
    settings: bool = True,
) -> None:
    """Gives back what `sharded_state` returned, on every rank, to a model on the same ranks;
    another layout of them is redistributed tensor by tensor. Collective where layouts differ.

    ``settings``: as for `load_full_state`. Raises `ConfigError` when names, shapes or the class of
    the optimizer differ.
    """
    reshard(model)
    problems, matched = _match(model, optimizer, state, settings)
    _refuse("sharded", problems)

    for name, tensor in model_tensors(model).items():
        copy_part(tensor, state["model"][name])
    for keeper in keepers_in(model):
        keeper.kept_was_loaded()
    if optimizer is None:
        return
    put_settings(optimizer, matched.settings)
    parameters = updated_by_name(model)
    for name, entries in matched.entries.items():
        parameter = parameters[name]
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensor = entry_tensor(optimizer, parameter, key, value.shape, value.dtype)
                copy_part(tensor, value)
            else:
                optimizer.state[parameter][key] = value


def _match(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    settings: bool,
) -> tuple[list[str], MatchedState]:
    """Everything in which ``state`` does not fit, and its optimizer's part."""
    problems = list(_model_problems(model, state))
    if optimizer is None:
        return problems, MatchedState()
    matched = match_optimizer_state(model, optimizer, state.get("optimizer"), settings=settings)
    return [*problems, *matched.problems], matched


def _model_problems(model: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    given: Mapping[str, Tensor] | None = state.get("model")
    if not isinstance(given, Mapping):
        problem = "it has no model"
        # A likely slip: the model's state dict itself was given.
        if any(isinstance(value, Tensor) for value in state.values()):
            problem += ': give a state dict as {"model": state_dict}'
        yield problem
        return
    here = model_tensors(model)
    for name in here:
        if name not in given:
            yield f"{name} is missing"
    for name, tensor in here.items():
        if name not in given:
            continue
        shape = given[name].shape
        if shape != tensor.shape:
            yield f"{name} has shape {list(shape)}, not {list(tensor.shape)}"
    # A bare model's state dict lists a tied parameter under each of its names.
    known = {*here, *tied_names(model)}
    for name in given:
        if name not in known:
            yield f"{name} is not in the model"


def _refuse(kind: str, problems: Sequence[str], separator: str = "; ") -> None:
    """Raises `ConfigError` with the first five of ``problems``, if there are any."""
    if problems:
        shown = first_five(problems, separator)
        raise ConfigError(f"the {kind} state does not fit: {shown}")


@torch.no_grad()
def copy_part(tensor: Tensor, other: Tensor) -> None:
    """Copies ``other``, of the same whole shape, into ``tensor``; a `DTensor` that is split
    differently is redistributed first, or, on another mesh, made whole for a moment."""
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        tensor.copy_(other)
        return
    if other.device_mesh != tensor.device_mesh:
        # torch redistributes on one mesh only.
        copy_slice(tensor, other.full_tensor())
        return
    # A collective: `other` is split in another way on the same mesh.
    if other.placements != tensor.placements:
        other = other.redistribute(tensor.device_mesh, tensor.placements)
    tensor.to_local().copy_(other.to_local())
