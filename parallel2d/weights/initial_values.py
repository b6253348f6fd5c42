"""Weights that do not know the mesh: `build_on_meta`, the seeded initial values, and what each rank
keeps of them.

[Note: mesh-independent weights] A module's initial values depend on the seed and on canonical names
alone. Before any transform a blueprint of the model (structure without storage) is kept. After
sharding it is filled one unit at a time, where a unit is a repeated block or the rest of the model:
storage on CPU, each module's own initializer in post-order, under a generator seeded from a hash of
the seed and that module's name. Every rank does the same and keeps its slice, so no device, mesh or
world size enters, and a rank never holds more than the largest unit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallel2d.errors import ConfigError
from parallel2d.model_structure import canonical_name, tied_parameters
from parallel2d.weights.geometry import copy_slice

Initializer = Callable[[nn.Module, str], None]


class _NothingToDraw(TorchFunctionMode):
    """Leaves out initial values of tensors that have none. On meta, drawing would be decomposed in
    Python, for which torch loads its whole compiler: a second per process."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        initializes = getattr(function, "__module__", None) == "torch.nn.init" or function in _DRAWS
        tensor = args[0] if args else kwargs.get("tensor")
        if initializes and isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
        return function(*args, **kwargs)


_DRAWS = {
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.exponential_,
    Tensor.bernoulli_,
    Tensor.log_normal_,
    Tensor.cauchy_,
}


@contextmanager
def build_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device; buffers stay real,
    so that tables which a constructor computes are right without being computed again. Costs one
    parameter of memory at a time."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            attributes = dict(param.__dict__)
            param = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
            param.__dict__.update(attributes)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with _NothingToDraw():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def has_meta_parameters(model: nn.Module, seed: int | None) -> bool:
    """Whether all parameters are on meta. Raises `ConfigError` for a mixture, or for meta without a
    seed."""
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if not meta and not real:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if meta and real:
        raise ConfigError(
            f"{meta[0]} is on meta and {real[0]} is not: build the whole model one way"
        )
    if meta and seed is None:
        raise ConfigError("the parameters are on meta: give the seed of their initial values")
    return bool(meta)


def module_seed(seed: int, name: str) -> int:
    """The generator seed of the module called ``name``: 63 bits of SHA-256 over seed and canonical
    name."""
    digest = hashlib.sha256(f"{seed}/{canonical_name(name)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class InitialWeights:
    """What `plan` found: a blueprint of the model, its units, and how each module is
    initialized."""

    def __init__(self, blueprint: nn.Module, units: list[str], init: Initializer | None) -> None:
        self.blueprint, self.units, self.init = blueprint, units, init

    def write(
        self, model: nn.Module, seed: int, device_type: str, given: Container[str] = ()
    ) -> None:
        """Allocates what is still on meta on this rank's device and fills it with its slice of the
        initial values.

        What ``given`` names (canonically) keeps its value; a unit of which everything is given
        costs nothing. Raises `ConfigError` naming every other parameter that no initializer sets.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, device_type)
        destinations = {
            canonical_name(name): p for name, p in model.named_parameters(remove_duplicate=False)
        }
        buffers = dict(model.named_buffers(remove_duplicate=False))
        written: set[int] = {
            id(parameter) for name, parameter in destinations.items() if name in given
        }
        unset: list[str] = []
        for unit in self.units:
            if given and self._is_given(unit, destinations, written):
                continue
            filled = self._fill(unit, seed)
            for name, value in filled.named_parameters(prefix=unit, remove_duplicate=False):
                parameter = destinations[canonical_name(name)]
                if value.is_meta or id(parameter) in written:
                    continue
                if _is_unset(value):
                    unset.append(name)
                written.add(id(parameter))
                copy_slice(parameter, value)
            for name, buffer in filled.named_buffers(prefix=unit, remove_duplicate=False):
                if (
                    not buffer.is_meta
                    and name in buffers
                    and self.blueprint.get_buffer(name).is_meta
                ):
                    if buffer.is_floating_point() and buffer.isnan().any():
                        unset.append(name)
                    buffers[name].copy_(buffer)
        if unset:
            raise ConfigError(
                f"no initializer sets {', '.join(unset)}: give the module that owns "
                f"{'them' if len(unset) > 1 else 'it'} a reset_parameters method, pass "
                "init=function(module, name) "
                "(model.init=package.module:function), or build the model with real weights"
            )

    def _is_given(
        self, unit: str, destinations: dict[str, nn.Parameter], written: set[int]
    ) -> bool:
        top = self.blueprint.get_submodule(unit)
        inside = (
            canonical_name(name)
            for name, _ in top.named_parameters(prefix=unit, remove_duplicate=False)
        )
        others = (
            tuple(f"{other}." for other in self.units if other and other != unit)
            if not unit
            else ()
        )
        own = [name for name in inside if not name.startswith(others)] if others else list(inside)
        meta = any(
            buffer.is_meta
            for name, buffer in top.named_buffers(prefix=unit)
            if not name.startswith(others or ("\0",))
        )
        return not meta and all(id(destinations[name]) in written for name in own)

    def _fill(self, unit: str, seed: int) -> nn.Module:
        """The unit's modules with storage on CPU and initial values; other units inside it stay on
        meta."""
        top = self.blueprint.get_submodule(unit)
        others = {id(self.blueprint.get_submodule(name)) for name in self.units if name != unit}
        kept: dict[int, Any] = {
            id(module): module for module in top.modules() if id(module) in others
        }
        # what is in the memo is not copied: it stays the blueprint's, on meta
        filled = copy.deepcopy(top, dict(kept))
        foreign = {id(m) for module in kept.values() for m in module.modules()}
        storage: dict[int, nn.Parameter] = {}
        for module in filled.modules():
            if id(module) in foreign:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in storage:
                        storage[id(parameter)] = _empty_on_cpu(parameter)
                    module._parameters[name] = storage[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    empty = torch.empty_like(buffer, device="cpu")
                    module._buffers[name] = (
                        empty.fill_(torch.nan) if buffer.is_floating_point() else empty.zero_()
                    )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self._initialize(filled, unit, seed, foreign, complete=not kept)
        return filled

    def _initialize(
        self, module: nn.Module, name: str, seed: int, foreign: set[int], complete: bool
    ) -> None:
        for child_name, child in module.named_children():
            if id(child) not in foreign:
                child_path = f"{name}.{child_name}" if name else child_name
                whole = not any(id(m) in foreign for m in child.modules())
                self._initialize(child, child_path, seed, foreign, whole)
        owns = any(parameter is not None for parameter in module._parameters.values())
        library = self._library_initializer(name) if self.init is None else None
        # may reach below; what is not here is on meta, where setting it does nothing
        if library is not None:
            torch.default_generator.manual_seed(module_seed(seed, name))
            library(module)
            if all(
                not p.isnan().all()
                for p in module._parameters.values()
                if p is not None and not p.is_meta and p.numel()
            ):
                return
        if not owns and not complete:
            return  # its initializer would reach into modules that are not here
        # of the CPU alone; values are made there
        torch.default_generator.manual_seed(module_seed(seed, name))
        if self.init is not None:
            self.init(module, canonical_name(name))
            return
        for attribute in ("reset_parameters", "_reset_parameters"):
            reset = getattr(module, attribute, None)
            if callable(reset):
                reset()
                return

    def _library_initializer(self, name: str) -> Callable[[nn.Module], None] | None:
        """``_init_weights`` of the innermost model around ``name`` that has one: Hugging Face's
        contract, by which a model sets the weights of the modules below it."""
        if not callable(getattr(self.blueprint, "_init_weights", None)):
            return None
        while True:
            found = getattr(self.blueprint.get_submodule(name), "_init_weights", None)
            if callable(found):
                return found
            name = name.rpartition(".")[0]


def _empty_on_cpu(parameter: nn.Parameter) -> nn.Parameter:
    """Drawn in 32 bits whatever it is stored in, so that every precision starts from the same
    values; `_is_unset` until set."""
    shape, dtype = parameter.shape, parameter.dtype
    if dtype.is_complex:
        unset = torch.full(shape, complex(torch.nan, torch.nan), dtype=torch.complex64)
    elif dtype.is_floating_point:
        unset = torch.full(shape, torch.nan, dtype=torch.float32)
    elif dtype == torch.bool:
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    else:
        unset = torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
    return nn.Parameter(unset, parameter.requires_grad)


def _is_unset(value: Tensor) -> bool:
    """Whether an initializer left a part of ``value``, or an integer ``value`` as a whole, as
    `_empty_on_cpu` made it."""
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return (
        value.dtype != torch.bool
        and value.numel() > 0
        and bool((value == torch.iinfo(value.dtype).max).all())
    )


def plan_weights(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], init: Initializer | None
) -> InitialWeights:
    """Keeps a blueprint of ``model``, whose parameters are on meta, before the transforms;
    `InitialWeights.write` comes after them. See [Note: mesh-independent weights]."""
    return InitialWeights(copy.deepcopy(model), ["", *(name for name, _ in blocks)], init)


def allocate(model: nn.Module, device_type: str, *, offload: bool = False) -> None:
    """Gives every parameter and buffer storage on this rank's device, with ``offload`` sharded
    parameters in CPU memory; tied parameters stay tied."""
    device: torch.device | str = (
        torch.device(device_type, torch.accelerator.current_device_index())
        if device_type != "cpu"
        else "cpu"
    )
    ties = tied_parameters(model)

    def place(tensor: Tensor) -> Tensor:
        home = "cpu" if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    model._apply(place)
    for (first, first_name), *others in ties:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
