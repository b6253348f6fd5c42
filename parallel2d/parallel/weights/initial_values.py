"""Initial values that depend only on a seed and on names: `InitialWeights`.

[Note: mesh-independent weights] A module's initial values depend only on the seed and on fully
qualified names (FQNs). Before any transform a meta copy of the model is kept (structure without
storage). After sharding the copy is filled one part at a time: storage on CPU, then each module's
own initializer in post-order, under a generator seeded by a hash of the seed and the FQN of the
module. A part is a module, such as one linear layer, whose values no initializer around it writes.
The parts are dealt to the ranks of a replica, and the rank that has drawn a part sends the other
ranks their local shards (`replica_ranks`). The values thus do not depend on device, mesh or world
size, and each rank draws about as many values as it keeps.
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

    Raises `ConfigError` for a mixture, and for meta parameters without a seed.
    """
    # The name of a meta parameter, and the name of a parameter with values.
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


# A meta tensor: its FQN, the parameter or buffer dict of its module, its key there, and the tensor.
_Place = tuple[str, dict[str, Any], str, Tensor]


class Part(NamedTuple):
    """Modules that are initialized together, independently of all other modules."""

    # (name, module); children come before their parent, whose initializer may overwrite their
    # values
    modules: list[tuple[str, nn.Module]]
    places: list[_Place]
    # Place -> the tensor of the sharded model that gets its value
    targets: list[tuple[_Place, Tensor]]


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
            device_type: the kind of device of meta parameters.
            given: FQNs of tensors that keep their values.
            mesh: the mesh of parameters; None: this rank draws all values.

        Raises:
            NoInitializerError: parameters that no initializer sets, with their names, on all ranks.
            ConfigError: an initializer that failed on another rank.
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
        """Return the parts to draw, and the FQNs of parameters outside of all parts."""
        here = all_tensors(model)
        # Ids of tensors with values: a tied parameter is drawn under its first name.
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
            # A part with only loaded values is not drawn.
            if targets:
                found.append(Part(modules, places, targets))
        parameters = parameters_by_name(model)
        return found, [name for name, each in parameters.items() if id(each) not in written]

    def _draw_all(self, parts: Sequence[Part], ranks: ReplicaRanks, seed: int) -> list[str]:
        """Draw the parts and fill their targets. Returns the FQNs that no initializer set.

        Collective.
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
                    # The other ranks wait for values, so this rank reports the error after the last
                    # exchange.
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
            # Values are drawn on CPU, so only the CPU generator is seeded and restored.
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                for name, module in part.modules:
                    self._initialize(module, name, seed)
            return [held[key].detach() for (_, held, key, _), _ in part.targets]
        finally:
            # Back to meta, so that only the values that are sent next have storage.
            for _, held, key, on_meta in part.places:
                held[key] = on_meta

    def _modules_of_parts(self, given: set[str]) -> Iterator[list[tuple[str, nn.Module]]]:
        """Yield (name, module) of each part: of the model without its blocks, then of the blocks.

        Parts with tied parameters are one part.
        """
        loaded: set[int] = set()
        # The base of a model with adapters is large and loaded, and adapters are in every block, so
        # loaded modules are skipped. In other models the initializer of a module may set parameters
        # inside a loaded module.
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
        """Return True if ``module`` holds tensors, or its initializer writes to modules below it.

        The initializer runs on meta tensors, which have no values.
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
        # The initializer reads values, or refuses meta tensors: it is treated as one that writes.
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

        ``is_complete`` is True if all parameters below ``module`` belong to its part. None: True if
        none of these parameters is on meta.
        """
        digest = hashlib.sha256(f"{seed}/{fqn_of(name)}".encode()).digest()

        # Seeded for each call: a module's values do not depend on draws of other modules.
        def run(initialize: Callable[..., object], *args: Any) -> None:
            # torch's generators take a signed 64-bit seed.
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            initialize(*args)

        has_values = False
        library = self._library_initializer(name)
        if library is not None:
            # Hugging Face's initializers may write below a module. Modules of other parts are on
            # meta, where a write has no effect.
            run(library, module)
            # Classes without a rule in the library still get their own initializer.
            has_values = all(_has_values(value) for _, value in direct_parameters(module))
        # The initializer of a module would write to modules of other parts below it. If the module
        # owns parameters directly, the initializer must run nevertheless, because nothing else sets
        # these parameters.
        if is_complete is None:
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


class _Writes(TorchDispatchMode):
    """Notes if an operator changes a tensor."""

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
    """Yield ``parts`` in their order; parts that share a tensor are merged."""
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
        # Integer buffers that nothing sets become zeros, a common initial value.
        missing: complex = torch.nan if dtype.is_floating_point else 0
        return torch.full_like(tensor, missing, device="cpu")
    missing = False
    # Values are drawn in 32 bits for every storage dtype, so that all precisions start from the
    # same values.
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
    if value.is_complex():
        return bool(value.isnan().any())
    # The minimum is NaN if any value is NaN, and needs no memory.
    if value.is_floating_point():
        return bool(value.numel()) and bool(value.min().isnan())
    # A bool has no spare value to mark it as unset.
    if value.dtype == torch.bool or value.numel() == 0:
        return False
    # The largest integer may occur as a value, but hardly as all values.
    return bool((value == torch.iinfo(value.dtype).max).all())


def _has_values(value: Tensor) -> bool:
    # `all` of an empty tensor is True.
    return value.is_meta or value.numel() == 0 or not value.isnan().all()


def apply_to_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer ``x`` by ``function(x)``; tied parameters stay tied."""
    # `_apply` makes a new parameter at each place of a tied parameter, so ties are restored
    # afterwards.
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
