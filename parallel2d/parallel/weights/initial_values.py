"""Initial values that depend on a seed and on names alone: `InitialWeights` gives a model on meta
its slices of them after it was sharded.

[Note: mesh-independent weights] A module's initial values depend on the seed and on fully
qualified names (FQNs) alone. Before any transform a blueprint of the model (structure without
storage) is kept. After sharding it is filled one unit at a time, where a unit is a repeated block
or the rest of the model: storage on CPU, each module's own initializer in post-order, under a
generator seeded from a hash of the seed and that module's FQN. Every rank does the same and keeps
its slice, so no device, mesh or world size enters, and a rank never holds more than the largest
unit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.base.device import current_device
from parallel2d.base.errors import ConfigError
from parallel2d.models import adapters
from parallel2d.parallel.model_structure import (
    direct_parameters,
    fqn_of,
    join_names,
    owns_itself,
    tie_again,
    tied_parameters,
)
from parallel2d.parallel.weights.named_tensors import all_tensors, parameters_by_name
from parallel2d.parallel.weights.unsharded_tensors import copy_part

Initializer = Callable[[nn.Module, str], None]


def has_meta_parameters(model: nn.Module, seed: int | None) -> bool:
    """Whether all parameters are on meta. Raises `ConfigError` for a mixture, or for meta without a
    seed."""
    # One of those that are on meta, and one of those that are not.
    one = {parameter.is_meta: name for name, parameter in model.named_parameters()}
    if not one:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if len(one) == 2:
        raise ConfigError(
            f"{one[True]} is on meta and {one[False]} is not: build the whole model one way"
        )
    if True in one and seed is None:
        raise ConfigError("the parameters are on meta: give the seed of their initial values")
    return True in one


# Of a tensor on meta: its FQN, the parameters or buffers of its module, its key there, and itself.
_Place = tuple[str, dict[str, Any], str, Tensor]


class InitialWeights:
    """Keeps a blueprint of ``model``, whose parameters are on meta, before the transforms; `write`
    comes after them. ``init``: None for the modules' own. See [Note: mesh-independent weights]."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], init: Initializer | None
    ) -> None:
        self.blueprint = copy.deepcopy(model)
        self.blocks = [name for name, _ in blocks]
        self.init = init

    def write(
        self, model: nn.Module, seed: int, device_type: str, given: Container[str] = ()
    ) -> None:
        """Allocates what is still on meta on this rank's device and fills it with its slice of the
        initial values; what ``given`` lists by FQN keeps its own. Raises `ConfigError` naming every
        other parameter that no initializer sets."""
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, device_type)
        here = all_tensors(model)
        # Ids of what has its values: a tied parameter is drawn under its first name.
        written = {id(tensor) for name, tensor in here.items() if name in given}
        unset: list[str] = []
        have_values = {name for name, tensor in here.items() if id(tensor) in written}
        for modules in self._units(have_values):
            unset += self._write_unit(modules, here, written, seed)
        parameters = parameters_by_name(model)
        unset += [name for name, parameter in parameters.items() if id(parameter) not in written]
        if unset:
            raise no_initializer(unset)

    def _units(self, given: set[str]) -> Iterator[list[tuple[str, nn.Module]]]:
        """(name, module) of what is drawn together: first the model without its blocks, then each
        block; children before their parent, whose initializer may overwrite what they draw."""
        loaded: set[int] = set()
        # The base of a model with adapters is large and loaded, and its adapters are in every
        # block. In other models the initializer of a module may set what is inside a loaded one.
        if given and adapters.settings_of(self.blueprint):
            for module in adapters.initialized_modules(self.blueprint, given):
                loaded.update(map(id, module.modules()))
        blocks = {name: self.blueprint.get_submodule(name) for name in self.blocks}
        in_blocks = chain.from_iterable(block.modules() for block in blocks.values())
        yield list(_in_post_order(self.blueprint, "", loaded.union(map(id, in_blocks))))
        for name, block in blocks.items():
            yield list(_in_post_order(block, name, loaded))

    def _write_unit(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        here: Mapping[str, Tensor],
        written: set[int],
        seed: int,
    ) -> list[str]:
        """Draws the values of ``modules`` and copies this rank's slices of what is not ``written``
        yet; adds it there. Returns the FQNs of what no initializer set."""
        places = list(_places_on_meta(modules))
        # Nothing is drawn for a unit whose values were all loaded.
        if all(id(here.get(fqn)) in written for fqn, *_ in places):
            return []
        storage: dict[int, Tensor] = {}
        for _, held, key, on_meta in places:
            # A tied parameter has several places, which get the same storage.
            if id(on_meta) not in storage:
                storage[id(on_meta)] = _without_values(on_meta)
            held[key] = storage[id(on_meta)]
        # Values are made on CPU, so only its generator is seeded, and restored afterwards.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name, module in modules:
                self._initialize(module, name, seed)
        unset = []
        for fqn, held, key, on_meta in places:
            value = held[key]
            # Back on meta: no other unit is held beside this one.
            held[key] = on_meta
            tensor = here.get(fqn)
            # The transforms may have taken a buffer out of the model.
            if tensor is None or id(tensor) in written:
                continue
            if is_unset(value):
                unset.append(fqn)
            written.add(id(tensor))
            copy_part(tensor, value)
        return unset

    def _initialize(self, module: nn.Module, name: str, seed: int) -> None:
        digest = hashlib.sha256(f"{seed}/{fqn_of(name)}".encode()).digest()

        # Seeded anew each time: the values of a module depend on no other module's draws.
        def run(initialize: Callable[..., object], *args: Any) -> None:
            # torch's generators take a seed of 64 bits with a sign.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            initialize(*args)

        has_values = False
        library = self._library_initializer(name)
        if library is not None:
            # Hugging Face's initializers may reach below a module. What is of another unit is on
            # meta, where setting it does nothing.
            run(library, module)
            # Classes that the library has no rule for still get their own initializer.
            has_values = all(_has_values(value) for _, value in direct_parameters(module))
        # The initializer of a module would reach into parts of it that are of another unit. If it
        # has parameters of its own it must run nevertheless: nothing else sets them.
        is_complete = not any(parameter.is_meta for parameter in module.parameters())
        reset = initializer_of(module)
        if not has_values and (is_complete or owns_itself(module)):
            if self.init is not None:
                run(self.init, module, fqn_of(name))
            elif reset is not None:
                run(reset)
        # A layer with adapters sets them last, whatever its parts have drawn for them.
        try:
            run(adapters.reset_adapter, module, self.blueprint)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _library_initializer(self, name: str) -> Callable[[nn.Module], None] | None:
        """``_init_weights`` of the innermost model around ``name`` that has one: Hugging Face's
        contract, by which a model sets the weights of the modules below it."""
        if self.init is not None or not callable(getattr(self.blueprint, "_init_weights", None)):
            return None
        # Ends at the latest at the blueprint itself, whose name is empty.
        while True:
            found = getattr(self.blueprint.get_submodule(name), "_init_weights", None)
            if callable(found):
                return found
            name = name.rpartition(".")[0]


def _in_post_order(
    module: nn.Module, name: str, skipped: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what is below ``module``, but ``skipped`` ones, by id, and of itself. A
    module in two places comes twice."""
    for child_name, child in module.named_children():
        if id(child) not in skipped:
            yield from _in_post_order(child, join_names(name, child_name), skipped)
    yield name, module


def _places_on_meta(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[_Place]:
    for name, module in modules:
        held: dict[str, Any]
        # Buffers are real under `build_on_meta`, and keep what the constructor computed.
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield fqn_of(join_names(name, key)), held, key, tensor


def initializer_of(module: nn.Module) -> Callable[[], object] | None:
    # nn.MultiheadAttention and nn.Transformer have theirs under the second name.
    for attribute in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, attribute, None)
        if callable(reset):
            return reset
    return None


def no_initializer(names: Sequence[str]) -> ConfigError:
    owned = "them" if len(names) > 1 else "it"
    return ConfigError(
        f"no initializer sets {', '.join(names)}: give the module that owns {owned} a "
        "reset_parameters method, pass init=function(module, name) "
        "(model.init=package.module:function), or build the model with real weights"
    )


def _without_values(tensor: Tensor) -> Tensor:
    """A parameter or buffer like ``tensor``, on CPU, of which `is_unset` is true."""
    dtype = tensor.dtype
    if not isinstance(tensor, nn.Parameter):
        # Integers that nothing sets are zeros, which may be what is wanted.
        missing: complex = torch.nan if dtype.is_floating_point else 0
        return torch.full_like(tensor, missing, device="cpu")
    missing = False
    # Drawn in 32 bits whatever they are stored in: every precision starts from the same values.
    if dtype.is_complex:
        missing = complex(torch.nan, torch.nan)
        dtype = torch.complex64
    elif dtype.is_floating_point:
        missing = torch.nan
        dtype = torch.float32
    elif dtype != torch.bool:
        missing = torch.iinfo(dtype).max
    values = torch.full(tensor.shape, missing, dtype=dtype)
    return nn.Parameter(values, tensor.requires_grad)


def is_unset(value: Tensor) -> bool:
    """Whether a part of ``value``, or an integer ``value`` as a whole, is as `_without_values` made
    it."""
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    # Neither of the two values of a bool can mark it as unset.
    if value.dtype == torch.bool or value.numel() == 0:
        return False
    # The largest integer may be one of the values, but is hardly all of them.
    return bool((value == torch.iinfo(value.dtype).max).all())


def _has_values(value: Tensor) -> bool:
    # `all` of nothing is true.
    return value.is_meta or value.numel() == 0 or not value.isnan().all()


def apply_to_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter and buffer by ``function`` of it; tied parameters stay tied."""
    # `_apply` makes a new parameter at each place of a tied one: ties are restored after it.
    ties = tied_parameters(model)
    model._apply(function)
    tie_again(ties)


def allocate(model: nn.Module, device_type: str, *, offload: bool = False) -> None:
    """Gives every parameter and buffer storage on this rank's device, with ``offload`` sharded
    parameters in CPU memory."""

    def place(tensor: Tensor) -> Tensor:
        in_cpu_memory = offload and isinstance(tensor, DTensor)
        home = current_device("cpu" if in_cpu_memory else device_type)
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    apply_to_tensors(model, place)
