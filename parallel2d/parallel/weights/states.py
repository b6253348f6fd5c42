"""The state of a sharded model and its optimizer in memory.

`full_state` returns unsharded tensors and `sharded_state` local shards. `load_full_state`,
`load_sharded_state` and `load_state` load these tensors. `Checkpointer` saves states to files.

``torch.distributed.checkpoint.state_dict`` is not used. Its getters run an optimizer step if the
optimizer state is empty, and do not support parameters of which a replica updates only a part. Its
setters send pickles, need memory for each unsharded parameter on every rank, and may find a
mismatch after some tensors are already written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import among, broadcast, leader, sendable
from parallel2d.parallel.model_structure import by_fqn
from parallel2d.parallel.weights.geometry import scales_like, scales_shape
from parallel2d.parallel.weights.named_tensors import (
    all_tensors,
    custom_hooks,
    describe_optimizer,
    drop_state,
    masters_were_loaded,
    meet,
    model_tensors,
    optimizer_tensors,
    part_of,
    refuse_extra_state,
    reshard,
    spread_state,
    tied_names,
    trained_parameters,
    updated_by_name,
)
from parallel2d.parallel.weights.optimizer_settings import (
    Settings,
    match_settings,
    plain_settings,
    put_settings,
)
from parallel2d.parallel.weights.unsharded_tensors import fill, gather_tensor

Key = Literal["name", "id"]
Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
Entries = Mapping[str, Mapping[str, Any]]  # FQN of a parameter -> key, such as exp_avg -> value


@torch.no_grad()
def full_state(
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    rank0_only: bool = True,
    cpu: bool = True,
    key_by: Key = "name",
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` with unsharded tensors. Collective.

    ``"optimizer"`` is present only if ``optimizer`` is given. ``state["model"]`` can be passed to
    ``load_state_dict`` of the model without parallelize. Peak memory is the returned state and one
    unsharded tensor.

    Args:
        model: a model, or a dict of several models by name. ``state["model"]`` is then a dict of
            their states by name.
        optimizer: an optimizer, or a dict of several by the names of their models.
        rank0_only: True to return the state only on rank 0, and an empty dict on other ranks.
        cpu: True to move each tensor to CPU memory as soon as it is unsharded.
        key_by: keys of the optimizer's parameters: FQNs (``name``), or numbers (``id``) as in the
            ``state_dict`` of ``torch.optim``; `rekey_optimizer_state` converts them.
    """
    if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
        states: dict[str, Any] = {}
        for name, each, own in _by_name(model, optimizer):
            part = full_state(each, own, rank0_only=rank0_only, cpu=cpu, key_by=key_by)
            for kind, value in part.items():
                states.setdefault(kind, {})[name] = value
        return states
    if key_by not in ("name", "id"):
        raise ConfigError(f"key_by={key_by} is not one of name, id")
    refuse_extra_state(model, "full_state")
    hooked = custom_hooks(model, "_state_dict_hooks")
    if hooked:
        raise ConfigError(
            f"full_state: {first_five(hooked, ', ')} has a state dict hook, which takes whole "
            "tensors: call model.state_dict() inside parallel2d.summon_full_params(model, "
            "writeback=False), or remove the hook"
        )
    is_kept_once = rank0_only and dist.is_initialized()
    keep = not is_kept_once or dist.get_rank() == leader(part_of(model))

    def gather(tensor: Tensor) -> Tensor | None:
        return gather_tensor(tensor, keep=keep, cpu=cpu)

    meet(model, "gathers a state")
    # Unsharding is collective, so all ranks take part, also those that return {}.
    state = _state(model, optimizer, gather)
    if not keep:
        return {}
    # `load_state_dict` expects a tied parameter under each of its names.
    for name, first in tied_names(model).items():
        state["model"][name] = state["model"][first]
    if optimizer is not None and key_by == "id":
        state["optimizer"] = rekey_optimizer_state(state["optimizer"], key="id")
    return state


@torch.no_grad()
def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, copy: bool = False
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` with this rank's local shards.

    Sharded tensors are `DTensor`s, and the optimizer's parameters are keyed by FQN. The tensors
    share memory with the model and the optimizer, so the next step changes them, unless
    ``copy=True``. No communication.
    """

    def take(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if copy else tensor.detach()

    return _state(model, optimizer, take)


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    take: Callable[[Tensor], Tensor | None],
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}`` by FQN, with ``take(tensor)`` for each tensor."""
    # After a forward without backward, some parameters may be unsharded.
    reshard(model)
    tensors = {name: take(tensor) for name, tensor in model_tensors(model).items()}
    if optimizer is None:
        return {"model": tensors}
    spread_state(optimizer)
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in trained_parameters(model, optimizer).items():
        # A parameter that was never updated has no state and is not listed, as in torch.
        for key, value in optimizer.state.get(parameter, {}).items():
            taken = take(value) if isinstance(value, Tensor) else value
            state.setdefault(name, {})[key] = taken
    groups = []
    for group in describe_optimizer(model, optimizer)["groups"]:
        groups.append({**group["settings"], "params": group["parameters"]})
    return {"model": tensors, "optimizer": {"state": state, "param_groups": groups}}


def rekey_optimizer_state(
    state: Mapping[str, Any], *, key: Key, names: list[str] | None = None
) -> dict[str, Any]:
    """Convert the keys of an optimizer state between names and numbers.

    Args:
        state: the optimizer state.
        key: ``"id"`` for numbers, ``"name"`` for names.
        names: only for ``key="name"``: the names of the parameters in the order of the groups.

    Raises:
        ConfigError: the number of names differs from the number of parameters.
    """
    old = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    # In torch the number of a parameter is its position in the groups.
    new: Sequence[Any] = range(len(old))
    if key == "name":
        new = names or []
    if len(new) != len(old):
        raise ConfigError(
            f"names must give the {len(old)} parameters of the groups, got {len(new)}"
        )
    rekeyed = dict(zip(old, new, strict=True))
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [rekeyed[each] for each in group["params"]]})
    # Parameters without state occur only in groups.
    state_of = {}
    for parameter, entries in state["state"].items():
        state_of[rekeyed[parameter]] = entries
    return {"state": state_of, "param_groups": groups}


def load_state(model: nn.Module, state: Mapping[str, Tensor] | None, *, source: int = 0) -> None:
    """Load ``state``, FQN -> tensor, into a parallelized ``model``. Collective.

    ``state`` contains either unsharded tensors or `DTensor`s. Unsharded tensors are needed only on
    rank ``source``; the other ranks may pass None and receive their local shards piece by piece.
    `DTensor`s must be passed on every rank, as from ``model.state_dict()``. `DTensor`s are copied,
    or redistributed one by one if their placements differ. Raises `ConfigError` on every rank if
    names or shapes differ; no tensor is written in this case.
    """
    given = state or {}
    is_sharded = any(isinstance(tensor, DTensor) for tensor in given.values())
    sender = source if dist.is_initialized() and not is_sharded else None
    _load(model, None, {"model": given}, sender, settings=False)


def load_full_state(
    model: Models,
    optimizer: Optimizers | None,
    state: Mapping[str, Any] | None,
    *,
    from_rank0: bool = True,
    settings: bool = True,
) -> None:
    """Load unsharded tensors into a model and its optimizer, parallelized or not. Collective.

    The state is from `full_state`, or consists of state dicts of a single process. Optimizer state
    that does not exist yet is created.

    Args:
        model: a model, or a dict of several models as for `full_state`.
        optimizer: the optimizer; None to load only the model.
        state: ``{"model": state dict, "optimizer": state dict}``. The optimizer state is keyed by
            FQN or number. With ``from_rank0`` only rank 0 needs the state; others may pass None.
        from_rank0: True to send rank 0's tensors to the other ranks piece by piece. False: every
            rank copies its local shards from the state that it has passed, without communication.
        settings: True to load the settings of parameter groups (lr, betas, weight decay), from
            which a torch scheduler continues; False to keep the current settings.

    Raises:
        ConfigError: names, shapes or the class of the optimizer differ. Raised on every rank (with
            ``from_rank0=False`` only on ranks whose state differs) before a tensor is written.
    """
    if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
        for name, each, own in _by_name(model, optimizer):
            parts = _part_of(state or {}, name)
            try:
                load_full_state(each, own, parts, from_rank0=from_rank0, settings=settings)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return
    is_sent = from_rank0 and dist.is_initialized()
    with among(part_of(model)):
        _load(model, optimizer, state or {}, leader() if is_sent else None, settings)


def _part_of(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("model", "optimizer"):
        given = state.get(kind) or {}
        if name in given:
            found[kind] = given[name]
    return found


def _by_name(
    models: Models, optimizers: Optimizers | None
) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer | None]]:
    given = optimizers or {}
    if not (isinstance(models, Mapping) and isinstance(given, Mapping)) or set(given) - set(models):
        raise ConfigError(
            "several models and optimizers must be dicts, an optimizer by the name of its model"
        )
    for name, model in models.items():
        yield name, model, given.get(name)


def load_sharded_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    *,
    settings: bool = True,
) -> None:
    """Load a state from `sharded_state`. Call this on every rank with the rank's state.

    If the layout of the model differs, the tensors are redistributed one by one, which is
    collective. For ``settings`` and errors see `load_full_state`.
    """
    _load(model, optimizer, state, None, settings)


@sendable
@dataclass(frozen=True)
class TensorEntry:
    """Shape and dtype of a tensor of an optimizer state, to send to ranks without the state."""

    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def _load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    source: int | None,
    settings: bool,
) -> None:
    """Load a state, from rank ``source`` with unsharded tensors.

    If ``source`` is None, every rank copies its local shards from its argument ``state``, which may
    have unsharded or sharded tensors.
    """
    meet(model, "loads a state")
    reshard(model)
    problems: list[str] = []
    tensors: Mapping[str, Tensor] = {}
    entries: Entries = {}
    new_settings: list[Settings] = []
    described: dict[str, dict[str, Any]] = {}
    if source is None or dist.get_rank() == source:
        # Collect all problems, so that one error lists them.
        tensors, problems = _match_model(model, state)
        if optimizer is not None:
            given = state.get("optimizer")
            entries, new_settings, more = _match_optimizer(model, optimizer, given, settings)
            problems += more
        # `_described` needs a state that fits.
        if not problems:
            described = _described(entries, tensors, updated_by_name(model))
    if source is not None:
        # Ranks without the state receive the problems, and the names of the tensors in order.
        plan = problems, described, new_settings
        problems, described, new_settings = broadcast(plan, source)
    if problems:
        raise ConfigError(f"the state does not fit: {first_five(problems)}")

    fill([(here, tensors.get(name)) for name, here in model_tensors(model).items()], source)
    masters_were_loaded(model)
    if optimizer is not None:
        put_settings(optimizer, new_settings)
        parameters = trained_parameters(model, optimizer)
        drop_state(optimizer, parameters, described)
        fill(_tensors_to_fill(optimizer, parameters, described, entries), source)


def _match_model(model: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of the model in ``state`` by FQN, and a list of problems."""
    given = state.get("model")
    if not isinstance(given, Mapping):
        problem = "it has no model"
        # A common mistake is to pass the state dict of the model.
        if any(isinstance(value, Tensor) for value in state.values()):
            problem += ': pass a state dict as {"model": state_dict}'
        elif state:
            problem += f", but {first_five(list(map(str, state)), ', ')}"
        return {}, [problem]
    tensors = by_fqn(given.items())
    here = model_tensors(model)
    problems = []
    for name in here:
        if name not in tensors:
            problems.append(f"{name} is missing")
    problems += _other_shapes(tensors, here)
    # A state dict may list a tied parameter under each of its names. Non-persistent buffers are
    # also allowed.
    known = all_tensors(model).keys() | here.keys()
    for name in tensors:
        if name not in known:
            problems.append(f"{name} is not in the model")
    hooked = custom_hooks(model, "_load_state_dict_pre_hooks")
    if problems and hooked:
        problems.insert(
            0,
            f"{first_five(hooked, ', ')} has a state dict hook, which is not called: load the "
            "bare model and give parallelize(..., broadcast_from=0)",
        )
    return tensors, problems


def _other_shapes(given: Mapping[str, Any], here: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in here.items():
        value = given.get(name)
        # A value that is not a tensor is replaced without a comparison.
        if isinstance(value, Tensor) and value.shape != tensor.shape:
            yield f"{name} has shape {list(value.shape)}, not {list(tensor.shape)}"


def _match_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    settings: bool,
) -> tuple[Entries, list[Settings], list[str]]:
    """Return the entries of ``state`` by FQN, the new settings of each group, and problems.

    The settings are {} for a group of ``optimizer`` whose settings do not change.
    """
    if state is None:
        return {}, [], ["it has no optimizer"]
    names = list(map(itemgetter("parameters"), describe_optimizer(model, optimizer)["groups"]))
    all_names = list(chain.from_iterable(names))
    listed = list(map(itemgetter("params"), state["param_groups"]))
    # torch's own `state_dict` numbers parameters; `full_state` and `sharded_state` name them.
    if isinstance(next(chain.from_iterable(listed), None), int):
        # The numbers run through all groups, so they match only if groups have equal sizes.
        sizes, here = list(map(len, listed)), list(map(len, names))
        if sizes != here:
            problem = f"its optimizer has groups of {sizes} parameters, this one of {here}"
            return {}, [], [f"{problem}; call them by name with rekey_optimizer_state"]
        state = rekey_optimizer_state(state, key="name", names=all_names)
    entries: Entries = state["state"]
    problems = []
    for name in sorted(entries.keys() - set(all_names)):
        problems.append(f"{name} is in its optimizer and not in this one")
    given: dict[str, Any] = {}
    for name, values in entries.items():
        given |= {f"{key}/{name}": value for key, value in values.items()}
    # Before its first step the optimizer has no tensors to compare.
    problems += _other_shapes(given, optimizer_tensors(model, optimizer))
    stored = []
    for group in state["param_groups"]:
        stored.append((plain_settings(group), group["params"]))
    new_settings, more = match_settings(optimizer, names, stored, wanted=settings, check_class=True)
    return entries, new_settings, problems + more


def _described(
    entries: Entries, given: Mapping[str, Tensor], here: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return ``entries`` with a `TensorEntry` for each tensor.

    ``given`` are the parameters in the state, ``here`` the parameters of the model.
    """
    described: dict[str, dict[str, Any]] = {}
    for name, values in entries.items():
        described[name] = dict(values)
        for key, value in values.items():
            # Tensors without dims stay in the description and are sent with it.
            if isinstance(value, Tensor) and (value.ndim or type(value) is not Tensor):
                dtype = state_dtype(value.dtype, given[name].dtype, here[name].dtype)
                described[name][key] = TensorEntry(value.shape, dtype)
    return described


def state_dtype(stored: torch.dtype, of_parameter: torch.dtype, here: torch.dtype) -> torch.dtype:
    """Return the dtype of a loaded optimizer tensor.

    If its dtype in the state (``stored``) is that of its parameter (``of_parameter``), it gets the
    dtype of the model's parameter (``here``). Other tensors keep their dtype.
    """
    return here if stored == of_parameter else stored


def _tensors_to_fill(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    described: Entries,
    entries: Entries,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each tensor of the optimizer's state, with the tensor to load, or None.

    The tensor to load is from ``entries``; it is None on ranks without the state. Missing tensors
    are created. Tensors without dims and other values are set here and not yielded.
    """
    for name, values in described.items():
        parameter = parameters[name]
        # `optimizer.state` is a defaultdict, so indexing creates a missing state.
        state = optimizer.state[parameter]
        for key, value in values.items():
            is_tensor = isinstance(value, TensorEntry | Tensor)
            if not is_tensor:
                state[key] = value
            elif not isinstance(state.get(key), Tensor):
                state[key] = new_state_tensor(optimizer, parameter, key, value.shape, value.dtype)
            if isinstance(value, Tensor):
                state[key].copy_(value)
            elif is_tensor:
                yield state[key], entries.get(name, {}).get(key)


def new_state_tensor(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    key: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return zeros for the entry ``key`` of the optimizer state of ``parameter``.

    A tensor with the shape of the parameter is sharded like the parameter. Other supported shapes
    are block scales (see [Note: blocks of rows]) and tensors of one element, which are not sharded.
    Raises `ConfigError` for any other ``shape``, because its sharding is unknown. Optimizers with
    ``spread_state`` may have tensors of any shape, which are not sharded.
    """
    # The step count of a parameter without dims has the parameter's shape, but is no `DTensor`.
    if tuple(shape) == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if key.endswith("_scale") and tuple(shape) == scales_shape(parameter.shape):
        return scales_like(parameter, dtype)
    # Optimizers of `whole_matrices` also have unsharded tensors of other shapes.
    shares_state = hasattr(optimizer, "spread_state")
    if tuple(shape) not in ((), (1,)) and not shares_state:
        raise ConfigError(
            f"{key} of shape {list(shape)}: how it is split is unknown before the optimizer's "
            "first step"
        )
    # The step count of torch's optimizers is on CPU, except with ``fused`` or ``capturable``.
    device = torch.device("cpu")
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        # Compare ids, because `in` would compare the values of tensors.
        on_device = on_device or (shares_state and shape)
        if on_device and id(parameter) in map(id, group["params"]):
            device = parameter.device
    return torch.zeros(tuple(shape), dtype=dtype, device=device)
