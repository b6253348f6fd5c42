"""Initial values that depend on a seed and on names alone: `build_on_meta` builds a model without
values, `plan_weights` and `InitialWeights.write` give it their slices after it was sharded.

[Note: mesh-independent weights] A module's initial values depend on the seed and on FQNs
alone. Before any transform a blueprint of the model (structure without storage) is kept. After
sharding it is filled one unit at a time, where a unit is a repeated block or the rest of the model:
storage on CPU, each module's own initializer in post-order, under a generator seeded from a hash of
the seed and that module's name. Every rank does the same and keeps its slice, so no device, mesh or
world size enters, and a rank never holds more than the largest unit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallel2d.errors import ConfigError
from parallel2d.model_structure import (
    fqn_of,
    held_parameters,
    join_names,
    owns_itself,
    tied_parameters,
)
from parallel2d.models import adapters
from parallel2d.weights.geometry import copy_slice

Initializer = Callable[[nn.Module, str], None]


class _NothingToDraw(TorchFunctionMode):
    """Skips the drawing of initial values for tensors on meta, which hold none. On meta, drawing
    would be decomposed in Python, for which torch loads its whole compiler: a second per
    process."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        module = getattr(function, "__module__", None)
        if module != "torch.nn.init" and function not in _DRAWS:
            return function(*args, **kwargs)
        # Initializers take the tensor first or by name, and return it.
        tensor = args[0] if args else kwargs.get("tensor")
        on_meta = isinstance(tensor, Tensor) and tensor.is_meta
        if on_meta:
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
            # Subclasses of Parameter and attributes that a library hangs on it are kept.
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
    on_meta: list[str] = []
    real: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            on_meta.append(name)
        else:
            real.append(name)
    if not on_meta and not real:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if not on_meta:
        return False
    if real:
        raise ConfigError(
            f"{on_meta[0]} is on meta and {real[0]} is not: build the whole model one way"
        )
    if seed is None:
        raise ConfigError("the parameters are on meta: give the seed of their initial values")
    return True


def module_seed(seed: int, name: str) -> int:
    """The generator seed of the module ``name``: 63 bits of SHA-256 over seed and
    FQN."""
    text = f"{seed}/{fqn_of(name)}"
    digest = hashlib.sha256(text.encode()).digest()
    # torch's generators take a seed of 64 bits with a sign.
    return int.from_bytes(digest[:8], "big") >> 1


def plan_weights(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], init: Initializer | None
) -> InitialWeights:
    """Keeps a blueprint of ``model``, whose parameters are on meta, before the transforms;
    `InitialWeights.write` comes after them. See [Note: mesh-independent weights]."""
    blueprint = copy.deepcopy(model)
    # The rest of the model, called "" as the root is, comes before its blocks.
    units = ["", *(name for name, _ in blocks)]
    return InitialWeights(blueprint, units, init)


class InitialWeights:
    """What `plan_weights` found: a blueprint of the model, the names of its units (the rest of the
    model, "", comes first), and the function that initializes a module, None for the modules'
    own."""

    def __init__(self, blueprint: nn.Module, units: list[str], init: Initializer | None) -> None:
        self.blueprint = blueprint
        self.units = units
        self.init = init

    def write(
        self, model: nn.Module, seed: int, device_type: str, given: Container[str] = ()
    ) -> None:
        """Allocates what is still on meta on this rank's device and fills it with its slice of the
        initial values.

        What ``given`` names (FQN) keeps its value; a unit of which everything is given
        costs nothing. Raises `ConfigError` naming every other parameter that no initializer sets.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, device_type)
        parameters: dict[str, nn.Parameter] = {}
        # Ids of the parameters that have their values: a tied one is drawn under its first name.
        written: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            called = fqn_of(name)
            parameters[called] = parameter
            if called in given:
                written.add(id(parameter))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        loaded = self._loaded_modules(parameters, written)
        unset: list[str] = []
        for unit in self.units:
            # Nothing is drawn for a unit whose values were all loaded.
            if given and self._is_given(unit, parameters, written):
                continue
            filled = self._fill(unit, seed, loaded)
            unset += _write_parameters(filled, unit, parameters, written)
            unset += self._write_buffers(filled, unit, buffers)
            del filled  # before the next unit is made, or two would be held
        unset += [name for name, value in parameters.items() if id(value) not in written]
        if unset:
            raise _no_initializer(unset)

    def _is_given(
        self, unit: str, parameters: Mapping[str, nn.Parameter], written: set[int]
    ) -> bool:
        """Whether nothing of ``unit`` needs initial values: its parameters are ``written``, and no
        buffer of it is on meta."""
        module = self.blueprint.get_submodule(unit)
        # The first unit, called "", is the model without its blocks, which are the other units.
        blocks: tuple[str, ...] = ()
        if not unit:
            blocks = tuple(f"{name}." for name in self.units[1:])
        for name, buffer in module.named_buffers(prefix=unit):
            if name.startswith(blocks):
                continue
            if buffer.is_meta:
                return False
        for name, _ in module.named_parameters(prefix=unit, remove_duplicate=False):
            called = fqn_of(name)
            if called.startswith(blocks):
                continue
            if id(parameters[called]) not in written:
                return False
        return True

    def _write_buffers(
        self, filled: nn.Module, unit: str, buffers: Mapping[str, Tensor]
    ) -> list[str]:
        """Copies the buffers that were on meta; returns the names of those that nothing set."""
        unset = []
        for name, buffer in filled.named_buffers(prefix=unit, remove_duplicate=False):
            # On meta here: it belongs to another unit.
            if buffer.is_meta:
                continue
            # The transforms may have taken it out of the model.
            if name not in buffers:
                continue
            # A buffer that is real in the blueprint has had its values since the model was built.
            if not self.blueprint.get_buffer(name).is_meta:
                continue
            # Integers that nothing sets are zeros, which may be what is wanted.
            if buffer.is_floating_point() and buffer.isnan().any():
                unset.append(name)
            buffers[name].copy_(buffer)
        return unset

    def _loaded_modules(
        self, parameters: Mapping[str, nn.Parameter], written: set[int]
    ) -> set[int]:
        """Ids of the blueprint's modules that need no initial values, in a model with adapters.

        The base of such a model is large and loaded, and its adapters are in every block. In other
        models the initializer of a module may set what is inside a loaded one.
        """
        if not written or not adapters.settings_of(self.blueprint):
            return set()
        given = {name for name, parameter in parameters.items() if id(parameter) in written}
        return set(map(id, adapters.given_modules(self.blueprint, given)))

    def _fill(self, unit: str, seed: int, loaded: set[int]) -> nn.Module:
        """The unit's modules with storage on CPU and initial values; other units inside it, and
        the modules in ``loaded``, by id, stay on meta."""
        module = self.blueprint.get_submodule(unit)
        others = set(loaded)
        for name in self.units:
            if name != unit:
                others.add(id(self.blueprint.get_submodule(name)))
        # deepcopy does not copy what its memo holds: other units stay the blueprint's, on meta.
        memo: dict[int, Any] = {}
        foreign: set[int] = set()
        for inner in module.modules():
            if id(inner) in others:
                memo[id(inner)] = inner
                foreign.update(map(id, inner.modules()))
        filled = copy.deepcopy(module, memo)
        _give_storage(filled, foreign)
        # Values are made on CPU, so only its generator is seeded, and restored afterwards.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self._initialize(filled, unit, seed, foreign)
        return filled

    def _initialize(self, module: nn.Module, name: str, seed: int, foreign: set[int]) -> None:
        """Runs the initializers of what is below ``module``, called ``name``, and then its own.
        Modules in ``foreign``, by id, are skipped."""
        # Children first: the initializer of their parent may overwrite what they draw.
        for child_name, child in module.named_children():
            if id(child) not in foreign:
                self._initialize(child, join_names(name, child_name), seed, foreign)
        self._initialize_itself(module, name, seed, foreign)
        if adapters.has_adapter(module):
            # Such a layer sets them last, whatever its parts have drawn for them.
            torch.default_generator.manual_seed(module_seed(seed, name))
            try:
                adapters.reset_adapter(module, self.blueprint)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def _initialize_itself(
        self, module: nn.Module, name: str, seed: int, foreign: set[int]
    ) -> None:
        """Runs the initializer of ``module`` alone, whose parts have their values."""
        complete = foreign.isdisjoint(map(id, module.modules()))
        owns = owns_itself(module)
        library = self._library_initializer(name) if self.init is None else None
        if library is not None:
            # Hugging Face's initializers may reach below a module. What is not here is on meta,
            # where setting it does nothing.
            torch.default_generator.manual_seed(module_seed(seed, name))
            library(module)
            # Classes that the library has no rule for still get their own initializer.
            if _has_values(module):
                return
        # The initializer of an incomplete module would reach into modules that are not here. One
        # with parameters of its own must run nevertheless: nothing else sets them.
        if not owns and not complete:
            return
        # Seeded anew for each module: its values depend on no other module's draws.
        torch.default_generator.manual_seed(module_seed(seed, name))
        if self.init is not None:
            self.init(module, fqn_of(name))
        else:
            _reset(module)

    def _library_initializer(self, name: str) -> Callable[[nn.Module], None] | None:
        """``_init_weights`` of the innermost model around ``name`` that has one: Hugging Face's
        contract, by which a model sets the weights of the modules below it."""
        if not callable(getattr(self.blueprint, "_init_weights", None)):
            return None
        # Ends at the latest at the blueprint itself, whose name is empty.
        while True:
            found = getattr(self.blueprint.get_submodule(name), "_init_weights", None)
            if callable(found):
                return found
            name = name.rpartition(".")[0]


def check_initializers(model: nn.Module, init: Initializer | None) -> None:
    """Raises `ConfigError` naming every parameter on meta that no initializer can set, as `write`
    does. Nothing is drawn, so an initializer that leaves a parameter out is not found here."""
    library = callable(getattr(model, "_init_weights", None))
    # Adapters have initializers of their own.
    if init is not None or library or adapters.settings_of(model):
        return
    modules = dict(model.named_modules())
    unset = []
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        around = {owner, *_names_around(owner)}
        if parameter.is_meta and not any(_initializer_of(modules[each]) for each in around):
            unset.append(fqn_of(name))
    if unset:
        raise _no_initializer(unset)


def _names_around(name: str) -> Iterator[str]:
    """The names of the modules in which the module called ``name`` is."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _no_initializer(names: Sequence[str]) -> ConfigError:
    owned = "them" if len(names) > 1 else "it"
    return ConfigError(
        f"no initializer sets {', '.join(names)}: give the module that owns {owned} a "
        "reset_parameters method, pass init=function(module, name) "
        "(model.init=package.module:function), or build the model with real weights"
    )


def _write_parameters(
    filled: nn.Module, unit: str, parameters: Mapping[str, nn.Parameter], written: set[int]
) -> list[str]:
    """Copies this rank's slices of the parameters that are not ``written`` yet, and adds them
    there; returns the names of those that no initializer set."""
    unset = []
    for name, value in filled.named_parameters(prefix=unit, remove_duplicate=False):
        parameter = parameters[fqn_of(name)]
        # On meta: it belongs to another unit.
        if value.is_meta:
            continue
        # Given, or tied to one that came earlier.
        if id(parameter) in written:
            continue
        if _is_unset(value):
            unset.append(name)
        written.add(id(parameter))
        copy_slice(parameter, value)
    return unset


def _give_storage(module: nn.Module, foreign: set[int]) -> None:
    """Replaces what is on meta in ``module``, outside the modules in ``foreign``, by tensors on CPU
    without values; tied parameters stay tied."""
    storage: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        if id(inner) in foreign:
            continue
        for name, parameter in held_parameters(inner):
            # A tied parameter comes once per place; all places get the same storage.
            if id(parameter) not in storage:
                storage[id(parameter)] = _empty_on_cpu(parameter)
            inner._parameters[name] = storage[id(parameter)]
        # Buffers stay real under `build_on_meta`, and keep what the constructor computed.
        for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                inner._buffers[name] = _empty_buffer(buffer)


def _empty_on_cpu(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter like this one, on CPU; `_is_unset` until its values are set.

    Floating-point values are drawn in 32 bits whatever they are stored in, so that every precision
    starts from the same ones.
    """
    shape = parameter.shape
    dtype = parameter.dtype
    if dtype == torch.bool:
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    if dtype.is_complex:
        unset = torch.full(shape, complex(torch.nan, torch.nan), dtype=torch.complex64)
    elif dtype.is_floating_point:
        unset = torch.full(shape, torch.nan, dtype=torch.float32)
    else:
        unset = torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
    return nn.Parameter(unset, parameter.requires_grad)


def _empty_buffer(buffer: Tensor) -> Tensor:
    """A buffer like this one, on CPU: NaN until it is set, or 0 where there is no NaN."""
    empty = torch.empty_like(buffer, device="cpu")
    if buffer.is_floating_point():
        return empty.fill_(torch.nan)
    return empty.zero_()


def _is_unset(value: Tensor) -> bool:
    """Whether an initializer left a part of ``value``, or an integer ``value`` as a whole, as
    `_empty_on_cpu` made it."""
    has_nan = value.is_floating_point() or value.is_complex()
    if has_nan:
        return bool(value.isnan().any())
    # Neither of the two values of a bool can mark it as unset.
    if value.dtype == torch.bool:
        return False
    if value.numel() == 0:
        return False
    # The largest integer may be one of the values, but is hardly all of them.
    return bool((value == torch.iinfo(value.dtype).max).all())


def _has_values(module: nn.Module) -> bool:
    """Whether no parameter that ``module`` itself owns, and that is here, is NaN throughout."""
    for _, parameter in held_parameters(module):
        if parameter.is_meta:
            continue
        # `all` of nothing is true.
        if parameter.numel() == 0:
            continue
        if parameter.isnan().all():
            return False
    return True


def _reset(module: nn.Module) -> None:
    """Runs the initializer that ``module`` brings with it, if there is one."""
    reset = _initializer_of(module)
    if reset is not None:
        reset()


def _initializer_of(module: nn.Module) -> Callable[[], object] | None:
    # nn.MultiheadAttention and nn.Transformer have theirs under the second name.
    for attribute in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, attribute, None)
        if callable(reset):
            return reset
    return None


def allocate(model: nn.Module, device_type: str, *, offload: bool = False) -> None:
    """Gives every parameter and buffer storage on this rank's device, with ``offload`` sharded
    parameters in CPU memory; tied parameters stay tied."""
    cpu = torch.device("cpu")
    device = cpu
    if device_type != "cpu":
        device = torch.device(device_type, torch.accelerator.current_device_index())
    # `_apply` makes a new parameter at each place of a tied one: ties are restored after it.
    ties = tied_parameters(model)

    def place(tensor: Tensor) -> Tensor:
        home = device
        if offload and isinstance(tensor, DTensor):
            home = cpu
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        return tensor.to(home)

    model._apply(place)
    for group in ties:
        (first, first_name), *others = group
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
