"""Initial values that depend only on a seed and on names: `InitialWeights`.

[Note: mesh-independent weights] A module's initial values depend only on the seed and on fully
qualified names (FQNs). Before any transform a meta copy of the model is kept (structure without
storage). After sharding the copy is filled one unit at a time, where a unit is a repeated block or
the rest of the model: storage on CPU, then each module's own initializer in post-order, under a
generator seeded by a hash of the seed and the FQN of the module. Every rank does the same and keeps
its local shard. The values thus do not depend on device, mesh or world size, and a rank never holds
more than the largest unit.
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
    """Return True if all parameters are on meta.

    Raises `ConfigError` for a mixture, and for meta parameters without a seed.
    """
    # One name of a meta parameter, and one of another parameter.
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


# A meta tensor: its FQN, the parameter or buffer dict of its module, its key there, and the tensor.
_Place = tuple[str, dict[str, Any], str, Tensor]


class InitialWeights:
    """Keeps a meta copy of ``model`` before the transforms; `write` fills the sharded model.

    ``init``: None for the modules' own initializers. See [Note: mesh-independent weights].
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], init: Initializer | None
    ) -> None:
        self.blueprint = copy.deepcopy(model)
        self.blocks = [name for name, _ in blocks]
        self.init = init
        self._given: Container[str] = ()

    def write(
        self, model: nn.Module, seed: int, device_type: str, given: Container[str] = ()
    ) -> None:
        """Allocate meta parameters on this rank's device and fill them with initial values.

        Tensors with FQNs in ``given`` keep their values. Raises `ConfigError` with the names of all
        other parameters that no initializer sets.
        """
        self._given = given
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, device_type)
        here = all_tensors(model)
        # Ids of tensors with values: a tied parameter is drawn under its first name.
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
        """Yield the units as (name, module): first the model without its blocks, then each block.

        Children come before their parent, since its initializer may overwrite their values.
        """
        loaded: set[int] = set()
        # The base of a model with adapters is large and loaded, and adapters are in every block, so
        # loaded modules are skipped. In other models the initializer of a module may set parameters
        # inside a loaded module.
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
        """Draw the values of ``modules`` and copy local shards that are not ``written`` yet.

        Adds the copied tensors to ``written``. Returns the FQNs that no initializer set.
        """
        places = list(_places_on_meta(modules))
        # Skip the drawing of a unit with only loaded values.
        if all(id(here.get(fqn)) in written for fqn, *_ in places):
            return []
        storage: dict[int, Tensor] = {}
        for _, held, key, on_meta in places:
            # The places of a tied parameter get the same storage.
            if id(on_meta) not in storage:
                storage[id(on_meta)] = _without_values(on_meta)
            held[key] = storage[id(on_meta)]
        # Values are drawn on CPU, so only the CPU generator is seeded and restored.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name, module in modules:
                self._initialize(module, name, seed)
        unset = []
        for fqn, held, key, on_meta in places:
            value = held[key]
            # Back to meta, so that only one unit has storage at a time.
            held[key] = on_meta
            tensor = here.get(fqn)
            # The transforms may have removed a buffer from the model.
            if tensor is None or id(tensor) in written:
                continue
            if is_unset(value):
                unset.append(fqn)
            written.add(id(tensor))
            copy_part(tensor, value)
        return unset

    def _initialize(self, module: nn.Module, name: str, seed: int) -> None:
        digest = hashlib.sha256(f"{seed}/{fqn_of(name)}".encode()).digest()

        # Seeded for each call: a module's values do not depend on draws of other modules.
        def run(initialize: Callable[..., object], *args: Any) -> None:
            # torch's generators take a signed 64-bit seed.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            initialize(*args)

        has_values = False
        library = self._library_initializer(name)
        if library is not None:
            # Hugging Face's initializers may write below a module. Modules of other units are on
            # meta, where a write has no effect.
            run(library, module)
            # Classes without a rule in the library still get their own initializer.
            has_values = all(_has_values(value) for _, value in direct_parameters(module))
        # The initializer of a module would write to modules of other units below it. If the module
        # owns parameters directly, it must run nevertheless: nothing else sets them.
        is_complete = not any(parameter.is_meta for parameter in module.parameters())
        reset = initializer_of(module)
        if not has_values and (is_complete or owns_itself(module)):
            if self.init is not None:
                run(self.init, module, fqn_of(name))
            elif reset is not None:
                run(reset)
        # A layer with adapters sets them last, and overwrites the values of its children.
        try:
            run(
                adapters.reset_adapter,
                module,
                self.blueprint,
                lambda key: fqn_of(join_names(name, key)) in self._given,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _library_initializer(self, name: str) -> Callable[[nn.Module], None] | None:
        """Return ``_init_weights`` of the innermost model around ``name`` that has this method.

        By Hugging Face's contract a model sets the weights of the modules below it.
        """
        if self.init is not None or not callable(getattr(self.blueprint, "_init_weights", None)):
            return None
        # Ends at the root, which has an empty name.
        while True:
            found = getattr(self.blueprint.get_submodule(name), "_init_weights", None)
            if callable(found):
                return found
            name = name.rpartition(".")[0]


def _in_post_order(
    module: nn.Module, name: str, skipped: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) below ``module`` and then ``module``, without modules in ``skipped``.

    ``skipped`` holds ids. A module in two places is yielded twice.
    """
    for child_name, child in module.named_children():
        if id(child) not in skipped:
            yield from _in_post_order(child, join_names(name, child_name), skipped)
    yield name, module


def _places_on_meta(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[_Place]:
    for name, module in modules:
        held: dict[str, Any]
        # Buffers are real under `build_on_meta`, with the values of the constructor.
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield fqn_of(join_names(name, key)), held, key, tensor


def initializer_of(module: nn.Module) -> Callable[[], object] | None:
    # nn.MultiheadAttention and nn.Transformer use the second name.
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
    """Return a parameter or buffer like ``tensor`` on CPU, for which `is_unset` is True."""
    dtype = tensor.dtype
    if not isinstance(tensor, nn.Parameter):
        # Integer buffers that nothing sets become zeros, a common initial value.
        missing: complex = torch.nan if dtype.is_floating_point else 0
        return torch.full_like(tensor, missing, device="cpu")
    missing = False
    # Drawn in 32 bits for every storage dtype: all precisions start from the same values.
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
    """Return True if floating-point values of ``value``, or all its integers, are still unset.

    `_without_values` defines the unset values.
    """
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    # A bool has no spare value to mark it as unset.
    if value.dtype == torch.bool or value.numel() == 0:
        return False
    # The largest integer may occur as a value, but hardly as all values.
    return bool((value == torch.iinfo(value.dtype).max).all())


def _has_values(value: Tensor) -> bool:
    # `all` of an empty tensor is True.
    return value.is_meta or value.numel() == 0 or not value.isnan().all()


def apply_to_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by ``function`` of it; tied parameters stay tied."""
    # `_apply` makes a new parameter at each place of a tied one, so ties are restored afterwards.
    ties = tied_parameters(model)
    model._apply(function)
    tie_again(ties)


def allocate(model: nn.Module, device_type: str, *, offload: bool = False) -> None:
    """Allocate every parameter and buffer on this rank's device.

    With ``offload`` sharded parameters are allocated in CPU memory.
    """

    def place(tensor: Tensor) -> Tensor:
        in_cpu_memory = offload and isinstance(tensor, DTensor)
        home = current_device("cpu" if in_cpu_memory else device_type)
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(home)

    apply_to_tensors(model, place)
