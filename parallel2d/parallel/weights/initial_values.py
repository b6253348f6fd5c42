"""Initial values that depend only on a seed and on names: `InitialWeights`.

[Note: mesh-independent weights] The initial values of a module depend only on the seed and on the
module's fully qualified name (FQN). Before the transforms, a meta copy of the model is made. After
sharding, the modules of the copy are initialized in *parts*. A part is a module, usually one layer,
whose parameters no initializer of a parent module sets. For each part, storage is allocated on CPU,
and the initializers of its modules run, children first, with a generator that is seeded by a hash
of the seed and the module's FQN. The parts are distributed over the ranks of a replica. The rank
that has initialized a part sends the other ranks their local shards (`replica_ranks`). Therefore
the values do not depend on device, mesh or world size, and the work is divided over the ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from parallel2d.parallel.weights.replica_ranks import ReplicaRanks, deal

Initializer = Callable[[nn.Module, str], None]


def has_meta_parameters(model: nn.Module, seed: int | None) -> bool:
    """Return True if all parameters are on meta.

    Raises `ConfigError` if only some are on meta, and for meta parameters without a seed.
    """
    # True -> the name of a meta parameter; False -> the name of a parameter with values
    one = {}
    for name, parameter in model.named_parameters():
        one[parameter.is_meta] = name
    if not one:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if len(one) == 2:
        raise ConfigError(
            f"{one[True]} is on meta and {one[False]} is not: build the whole model one way"
        )
    if True in one and seed is None:
        raise ConfigError("the parameters are on meta: give the seed of their initial values")
    return True in one


# A meta tensor: its FQN, the dict of its module that contains it, its key in the dict, the tensor
_Place = tuple[str, dict[str, Any], str, Tensor]


class Part(NamedTuple):
    """Modules that are initialized together. Their values do not depend on other parts."""

    # (name, module), children before their parent, whose initializer may overwrite their values
    modules: list[tuple[str, nn.Module]]
    places: list[_Place]
    # (place, the tensor of the sharded model to which the value is written)
    targets: list[tuple[_Place, Tensor]]


class InitialWeights:
    """Initializes the weights of a model on meta. See [Note: mesh-independent weights].

    Build this object before the transforms, and call `write` after sharding.

    Args:
        model: the model on meta.
        blocks: (name, module) of the repeated blocks.
        init: initializer of the user; None: the initializers of the modules.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], init: Initializer | None
    ) -> None:
        self.blueprint = copy.deepcopy(model)
        self.blocks = [name for name, _ in blocks]
        self.init = init
        self._given: Container[str] = ()

    def write(
        self,
        model: nn.Module,
        seed: int,
        device_type: str,
        given: Container[str] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Allocate meta parameters on this rank's device and fill them with initial values.

        Collective over the replica of this rank.

        Args:
            model: the model after the transforms.
            seed: the seed of all values.
            device_type: the device type for meta parameters.
            given: FQNs of tensors that already have values and must not change.
            mesh: the mesh of the parameters; None: this rank initializes all values.

        Raises:
            NoInitializerError: no initializer sets some parameters. Raised on all ranks.
            ConfigError: an initializer has failed on another rank.
        """
        self._given = given
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, device_type)
        parts, unset = self.parts(model, given)
        if parts:
            ranks = ReplicaRanks(mesh)
            unset += self._draw_all(parts, ranks, seed)
        if unset:
            raise no_initializer(unset)

    def parts(self, model: nn.Module, given: Container[str] = ()) -> tuple[list[Part], list[str]]:
        """Return the parts to initialize, and the FQNs of parameters that belong to no part."""
        here = all_tensors(model)
        # Compare ids, because a tied parameter has several names and one value.
        written = {id(tensor) for name, tensor in here.items() if name in given}
        have_values = {name for name, tensor in here.items() if id(tensor) in written}
        found = []
        for modules in self._modules_of_parts(have_values):
            places = list(_places_on_meta(modules))
            targets = []
            for place in places:
                tensor = here.get(place[0])
                # The transforms may have removed a buffer from the model.
                if tensor is not None and id(tensor) not in written:
                    written.add(id(tensor))
                    targets.append((place, tensor))
            # Skip a part with only given values.
            if targets:
                found.append(Part(modules, places, targets))
        parameters = parameters_by_name(model)
        return found, [name for name, each in parameters.items() if id(each) not in written]

    def _draw_all(self, parts: Sequence[Part], ranks: ReplicaRanks, seed: int) -> list[str]:
        """Initialize the parts and fill their targets. Collective.

        Returns the FQNs of parameters that no initializer has set.
        """
        unset: list[str] = []
        fault: Exception | None = None
        sizes = []
        for part in parts:
            sizes.append(sum(target.numel() for _, target in part.targets))
        for dealt in deal(sizes, ranks.size):
            values: list[Tensor] = []
            for number in dealt[ranks.own]:
                part = parts[number]
                try:
                    drawn = self.draw(part, seed)
                    for (place, _), value in zip(part.targets, drawn, strict=True):
                        if is_unset(value):
                            unset.append(place[0])
                except Exception as error:
                    # Other ranks wait for the values of this rank, so send zeros and raise the
                    # error after the last exchange.
                    fault = fault or error
                    drawn = [torch.zeros(()).expand(target.shape) for _, target in part.targets]
                values += drawn
            targets = []
            for numbers in dealt:
                of_rank = []
                for each in numbers:
                    of_rank += [target for _, target in parts[each].targets]
                targets.append(of_rank)
            ranks.fill(targets, values)
        problem = None if fault is None else f"{type(fault).__name__}: {fault}"
        answers = ranks.all_gather((problem, unset))
        if fault is not None:
            raise fault
        for rank, (other, _) in answers.items():
            if other is not None:
                raise ConfigError(f"rank {rank} failed to draw initial weights: {other}")
        return sorted(chain.from_iterable(names for _, names in answers.values()))

    def draw(self, part: Part, seed: int) -> list[Tensor]:
        """Return the values of the targets of ``part``, on CPU."""
        storage: dict[int, Tensor] = {}
        for _, held, key, on_meta in part.places:
            # The places of a tied parameter get the same storage.
            if id(on_meta) not in storage:
                storage[id(on_meta)] = _without_values(on_meta)
            held[key] = storage[id(on_meta)]
        try:
            # Values are drawn on CPU, so only the CPU generator must be restored.
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for name, module in part.modules:
                    self._initialize(module, name, seed)
            return [held[key].detach() for (_, held, key, _), _ in part.targets]
        finally:
            # Put the meta tensors back, so that the storage is freed after the values are sent.
            for _, held, key, on_meta in part.places:
                held[key] = on_meta

    def _modules_of_parts(self, given: set[str]) -> Iterator[list[tuple[str, nn.Module]]]:
        """Yield the (name, module) pairs of each part: first parts outside of blocks, then blocks.

        Parts that share a tied parameter are merged, except between blocks.
        """
        loaded: set[int] = set()
        # In a model with adapters, skip loaded modules: the base model is large, and only the
        # adapters need values. In other models loaded modules are not skipped, because the
        # initializer of a parent may set parameters inside of them.
        if given and adapters.settings_of(self.blueprint):
            for module in adapters.initialized_modules(self.blueprint, given):
                loaded.update(map(id, module.modules()))
        blocks = {name: self.blueprint.get_submodule(name) for name in self.blocks}
        in_blocks = loaded.union(
            map(id, chain.from_iterable(map(nn.Module.modules, blocks.values())))
        )
        yield from _with_ties(self._split("", self.blueprint, in_blocks))
        for name, block in blocks.items():
            yield from _with_ties(self._split(name, block, loaded))

    def _split(
        self, name: str, module: nn.Module, skipped: set[int]
    ) -> Iterator[list[tuple[str, nn.Module]]]:
        """Yield the modules of each part in ``module``, without modules in ``skipped`` (ids)."""
        children = {}
        for key, child in module.named_children():
            if id(child) not in skipped:
                children[join_names(name, key)] = child
        if not children or self._writes(name, module, skipped):
            yield list(_in_post_order(module, name, skipped))
            return
        for child_name, child in children.items():
            yield from self._split(child_name, child, skipped)

    def _writes(self, name: str, module: nn.Module, skipped: set[int]) -> bool:
        """Return True if ``module`` has direct meta tensors, or its initializer writes to modules
        below it.

        To find such writes, the initializer runs on the meta tensors.
        """
        below = list(_places_on_meta(list(_in_post_order(module, name, skipped))))
        if any(held is module._parameters or held is module._buffers for _, held, _, _ in below):
            return True
        ids = set()
        for *_, on_meta in below:
            ids.add(id(on_meta))
        is_complete = all(id(each) in ids or not each.is_meta for each in module.parameters())
        writes = _Writes()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), writes:
                self._initialize(module, name, seed=0, is_complete=is_complete)
        # The initializer does not support meta tensors, for example because it reads values. Treat
        # it like an initializer that writes.
        except Exception:
            writes.found = True
        for _, held, key, on_meta in below:
            if held[key] is not on_meta:
                held[key] = on_meta
                writes.found = True
        return writes.found

    def _initialize(
        self, module: nn.Module, name: str, seed: int, is_complete: bool | None = None
    ) -> None:
        """Run the initializers of ``module``.

        ``is_complete`` is True if all parameters of ``module`` and below belong to its part. None:
        find out, because parameters of other parts are on meta.
        """
        digest = hashlib.sha256(f"{seed}/{fqn_of(name)}".encode()).digest()

        # Seed each call, so that the values do not depend on random numbers of other modules.
        def run(initialize: Callable[..., object], *args: Any) -> None:
            # torch's generators take a signed 64-bit seed.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            initialize(*args)

        has_values = False
        library = self._library_initializer(name)
        if library is not None:
            # The initializer may also write to modules below ``module``. If they belong to other
            # parts, they are on meta and the write has no effect.
            run(library, module)
            # The library does not initialize all classes of modules.
            has_values = all(_has_values(value) for _, value in direct_parameters(module))
        # If modules below ``module`` belong to other parts, its initializer must not write to them.
        # The initializer runs nevertheless if ``module`` has direct parameters, because nothing
        # else sets these parameters.
        if is_complete is None:
            is_complete = not any(parameter.is_meta for parameter in module.parameters())
        reset = initializer_of(module)
        if not has_values and (is_complete or owns_itself(module)):
            if self.init is not None:
                run(self.init, module, fqn_of(name))
            elif reset is not None:
                run(reset)
        # Adapters are initialized last, because they overwrite the values of child modules.
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
        """Return the ``_init_weights`` method of the innermost module around ``name`` that has one.

        In transformers, ``_init_weights(module)`` of a model initializes each module of the model.
        """
        if self.init is not None or not callable(getattr(self.blueprint, "_init_weights", None)):
            return None
        # The loop ends at the root, which has this method.
        while True:
            found = getattr(self.blueprint.get_submodule(name), "_init_weights", None)
            if callable(found):
                return found
            name = name.rpartition(".")[0]


class _Writes(TorchDispatchMode):
    """Sets ``found`` if an operator changes a tensor in place."""

    found = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.found = self.found or function._schema.is_mutable
        return function(*args, **(kwargs or {}))


def _with_ties(
    parts: Iterable[list[tuple[str, nn.Module]]],
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield ``parts`` in order. Parts that share a tied parameter are merged."""
    merged: list[list[tuple[str, nn.Module]]] = []
    # Tensor id -> index of its part
    holders: dict[int, int] = {}
    for part in parts:
        ids = set()
        for *_, on_meta in _places_on_meta(part):
            ids.add(id(on_meta))
        sharing = sorted({holders[each] for each in ids if each in holders})
        index = sharing[0] if sharing else len(merged)
        if not sharing:
            merged.append([])
        for other in sharing[1:]:
            merged[index] += merged[other]
            merged[other] = []
            holders |= {each: index for each, held in holders.items() if held == other}
        merged[index] += part
        holders |= dict.fromkeys(ids, index)
    yield from filter(None, merged)


def _in_post_order(
    module: nn.Module, name: str, skipped: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for all modules below ``module``, and then for ``module``.

    Modules whose id is in ``skipped`` are left out. A module with two names is yielded twice.
    """
    for child_name, child in module.named_children():
        if id(child) not in skipped:
            yield from _in_post_order(child, join_names(name, child_name), skipped)
    yield name, module


def _places_on_meta(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[_Place]:
    for name, module in modules:
        held: dict[str, Any]
        # Buffers are usually not on meta: `build_on_meta` leaves them with their values.
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


class NoInitializerError(ConfigError):
    """No initializer sets some parameters of a model on meta."""


def no_initializer(names: Sequence[str]) -> NoInitializerError:
    owned = "them" if len(names) > 1 else "it"
    return NoInitializerError(
        f"no initializer sets {', '.join(names)}: give the module that owns {owned} a "
        "reset_parameters method, pass init=function(module, name) "
        "(model.init=package.module:function), or build the model with real weights"
    )


def _without_values(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer like ``tensor`` on CPU, for which `is_unset` is True."""
    dtype = tensor.dtype
    if not isinstance(tensor, nn.Parameter):
        # An integer buffer that no initializer sets becomes zero.
        missing: complex = torch.nan if dtype.is_floating_point else 0
        return torch.full_like(tensor, missing, device="cpu")
    missing = False
    # Values are always drawn in 32 bits, so that they do not depend on the storage dtype.
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
    """Return True if ``value`` still contains the values of `_without_values`.

    One NaN is enough for a floating-point tensor. An integer tensor is unset if all its values are.
    """
    if value.is_complex():
        return bool(value.isnan().any())
    # The minimum is NaN if any value is NaN, and needs no memory.
    if value.is_floating_point():
        return bool(value.numel()) and bool(value.min().isnan())
    # A bool has no value that could mean unset.
    if value.dtype == torch.bool or value.numel() == 0:
        return False
    # One value may be the largest integer, but it is unlikely that all values are.
    return bool((value == torch.iinfo(value.dtype).max).all())


def _has_values(value: Tensor) -> bool:
    # `all` of an empty tensor is True.
    return value.is_meta or value.numel() == 0 or not value.isnan().all()


def apply_to_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer ``x`` by ``function(x)``; tied parameters stay tied."""
    # `_apply` replaces each occurrence of a tied parameter by a different new parameter.
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
