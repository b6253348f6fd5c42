"""The source of a model's initial weights: `WeightSource`.

`WeightSource` also checks that all ranks have the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather, broadcast, leader, members
from parallel2d.base.memory import free_memory
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import ranks_of, route_in_replica
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.weights.construction import (
    build_for_real,
    outline,
    own_constructor,
    recorded_constructor,
)
from parallel2d.parallel.weights.hashes import hashes_of
from parallel2d.parallel.weights.initial_values import (
    Initializer,
    InitialWeights,
    NoInitializerError,
    allocate,
    apply_to_tensors,
    has_meta_parameters,
    no_initializer,
)
from parallel2d.parallel.weights.named_tensors import all_tensors, ties_of
from parallel2d.parallel.weights.unsharded_tensors import Route, fill


class WeightSource:
    """The initial weights of a model.

    There are three sources: the weights of the model on each rank, the weights of one rank
    (``broadcast_from``), or, for a model on meta, initializers under a seed or the constructor of
    the model (see [Note: constructors that initialize]).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int | None,
        init: Initializer | None,
        broadcast_from: int | None,
        given: Callable[[nn.Module], Container[str]] | None,
        construct: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Take the weights out of ``model`` if one rank broadcasts them. Collective.

        Args:
            model: the model, not sharded yet.
            seed: see `parallel2d.parallelize`.
            init: see `parallel2d.parallelize`.
            broadcast_from: see `parallel2d.parallelize`.
            given: the argument ``weights`` of `parallel2d.parallelize`.
            construct: builds the model with weights; None: the recorded constructor call.

        Raises:
            ConfigError: ranks have different models, or arguments exclude each other.
        """
        self._seed = seed
        self._init = init
        self._given = given or (lambda _: ())
        self._source = broadcast_from
        self._received: dict[str, Tensor] = {}
        if broadcast_from is not None:
            self._received = _hand_over(model, broadcast_from)
            seed = 0  # no weight is initialized, so a model on meta needs no seed
        # Check after `_hand_over`, which ties the same parameters on all ranks as on the source.
        check_same_structure(model)
        self._on_meta = has_meta_parameters(model, seed)
        is_drawn = self._on_meta and broadcast_from is None
        if given is not None and not is_drawn:
            raise ConfigError(
                "weights= is for a model on meta without broadcast_from: build it under "
                "parallel2d.build_on_meta"
            )
        self._initial: InitialWeights | None = None
        self._construct: Callable[[], nn.Module] | None = None
        # Used if the initializers do not set all weights
        self._recorded: Callable[[], nn.Module] | None = None
        if is_drawn and init is None:
            self._construct = construct or own_constructor(model)
            self._recorded = recorded_constructor(model)
            self._outline = outline(model)
            self._bytes = sum(each.nbytes for each in chain(model.parameters(), model.buffers()))

    def remember(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Store what `fill` needs of ``model`` before the transforms. Collective.

        Raises `ConfigError` if ranks have different weights.
        """
        if not self._on_meta:
            digests = all_gather(_digest(model.named_parameters()))
            pairs = zip(members(), digests, strict=True)
            different = []
            for rank, other in pairs:
                if other != digests[0]:
                    different.append(rank)
            if different:
                first = leader()
                raise ConfigError(
                    f"ranks {different} hold different weights than rank {first}: build the model "
                    "under the same torch.manual_seed on every rank, or under "
                    f"parallel2d.build_on_meta with seed=, or use rank {first}'s by "
                    f"parallelize(..., broadcast_from={first})"
                )
        elif self._source is None and self._construct is None:
            _check_buffers(model)
            self._initial = InitialWeights(model, blocks, self._init)

    def fill(
        self, model: nn.Module, mesh: DeviceMesh, topology: Topology, *, offload: bool
    ) -> None:
        """Allocate the sharded ``model`` and set its weights. Collective.

        With ``offload`` parameters are allocated in CPU memory. Raises `ConfigError` on every rank
        if the weights cannot be created.
        """
        if not self._on_meta:
            return
        computed = [fqn_of(name) for name, buffer in model.named_buffers() if buffer.is_meta]
        allocate(model, mesh.device_type, offload=offload)
        here: dict[str, Tensor] = all_tensors(model)
        route: int | Route | None = self._source
        if route is None:
            # The caller's function fills some weights of the allocated model.
            given = self._given(model)
            if self._is_drawn(model, mesh, given):
                return
            here = _not_given(here, given, computed)
            if not any(isinstance(each, nn.Parameter) for each in here.values()):
                return
            self._build(mesh, topology)
            route = route_in_replica(mesh)
        # Also send buffers, because other ranks may have them on meta. Send tied tensors once.
        pairs = {}
        for name, each in here.items():
            pairs[id(each)] = (each, self._received.get(name))
        fill(pairs.values(), route)
        self._received = {}

    def _is_drawn(self, model: nn.Module, mesh: DeviceMesh, given: Container[str]) -> bool:
        """Initialize the weights by initializers. Return False if the constructor must run instead.

        Collective.
        """
        if self._initial is None:
            return False
        try:
            self._initial.write(model, self._seed or 0, mesh.device_type, given=given, mesh=mesh)
        except NoInitializerError:  # on all ranks
            if self._recorded is None or any(name in given for name in all_tensors(model)):
                raise
            self._construct = self._recorded
            return False
        return True

    def _build(self, mesh: DeviceMesh, topology: Topology) -> None:
        """Build the model with weights on the first rank of each replica. Collective.

        Raises `ConfigError` on every rank if a rank fails or gets different weights.
        """
        assert self._construct is not None
        rank, builders = dist.get_rank(), ranks_of(mesh)[:, 0, 0, 0].tolist()
        host = topology.hosts[rank]
        count = sum(topology.hosts[builder] == host for builder in builders)
        needed, free = count * self._bytes / 2**30, free_memory() / 2**30
        problem = weights = None
        if rank in builders and needed > free:
            problem = (
                f"the model's constructor sets its values: {count} on {host} take {needed:.3g} GiB "
                f"and {free:.3g} are free; set model.init (init=), called module by module"
            )
        # Check the memory of all hosts before any rank allocates the model.
        _raise_any(problem)
        if rank in builders:
            try:
                model = build_for_real(self._construct, self._seed or 0, self._outline)
                self._received = {name: each.detach() for name, each in all_tensors(model).items()}
                weights = _digest(model.named_parameters())
            except Exception as error:
                problem = f"the model cannot be built for real: {type(error).__name__}: {error}"
                problem = str(error) if isinstance(error, ConfigError) else problem
        digests = _raise_any(problem, weights)
        if len(set(digests.values())) > 1:
            raise ConfigError(
                f"ranks {list(digests)} built the model under one seed and got different weights: "
                "its constructor must draw only from the generators of torch, NumPy and Python"
            )


def _not_given(
    tensors: Mapping[str, Tensor], given: Container[str], computed: Sequence[str]
) -> dict[str, Tensor]:
    """Return the ``tensors`` that are not given, neither under their name nor under a tied name.

    Raises `ConfigError` if some tensors are given and a buffer of ``computed`` is not: the
    constructor would compute this buffer from other weights than the given weights.
    """
    loaded = set()
    for name, each in tensors.items():
        if name in given:
            loaded.add(id(each))
    found = {name: each for name, each in tensors.items() if id(each) not in loaded}
    missing = list(filter(found.__contains__, computed)) if loaded else []
    if missing:
        raise no_initializer(missing)
    return found


def _raise_any(problem: str | None, value: str | None = None) -> dict[int, str]:
    """Raise the first ``problem`` of all ranks. If there is none, return rank -> value.
    Collective."""
    found = dict(zip(members(), all_gather((problem, value)), strict=True))
    for first, _ in found.values():
        if first is not None:
            raise ConfigError(first)
    return {rank: value for rank, (_, value) in found.items() if value is not None}


def _hand_over(model: nn.Module, source: int) -> dict[str, Tensor]:
    """Move the parameters of ``model`` to meta. Collective.

    Returns the weights by FQN on rank ``source``, and {} on other ranks. Raises `ConfigError` on
    every rank if the model on rank ``source`` has meta tensors.
    """
    ranks = members()
    if source not in ranks:
        valid = f"0 to {ranks[-1]}" if len(ranks) == ranks[-1] + 1 else f"one of {ranks}"
        raise ConfigError(f"broadcast_from={source} is not a rank of the mesh: use {valid}")
    _refuse_sparse(model, source)
    # Only the source sends weights, so only the source checks them.
    weights: dict[str, Tensor] = {}
    problem = None
    if dist.get_rank() == source:
        weights = {}
        for name, tensor in all_tensors(model).items():
            weights[name] = tensor.detach()
        meta = [name for name, tensor in weights.items() if tensor.is_meta]
        if meta:
            names = first_five(meta, ", ")
            problem = f"broadcast_from={source}: that rank has no values for {names}, on meta"
    problem = broadcast(problem, source)
    if problem is not None:
        raise ConfigError(problem)
    # The other ranks may have used `model.to("meta")`, which unties parameters.
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, first in broadcast(ties_of(model), source).items():
        # If the names or shapes differ, `check_same_structure` reports it later.
        if {name, first} <= named.keys() and named[name].shape == named[first].shape:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._parameters[attribute] = named[first]
    # Buffers stay allocated, and are overwritten later.
    apply_to_tensors(
        model, lambda each: each.to("meta") if isinstance(each, nn.Parameter) else each
    )
    return weights


def _refuse_sparse(model: nn.Module, source: int) -> None:
    """Raise `ConfigError` on every rank if a rank has a sparse tensor. Collective."""
    sparse = [name for name, each in all_tensors(model).items() if each.layout != torch.strided]
    problem = None
    if sparse:
        problem = (
            f"broadcast_from={source}: {first_five(sparse)} is sparse, and only dense tensors are "
            "sent: build it on every rank and register it after parallelize, or make it dense"
        )
    _raise_any(problem)


def check_same_structure(model: nn.Module) -> None:
    """Raise `ConfigError` if a rank's model differs from rank 0's. Collective.

    Compares names, shapes and ties of parameters and buffers, and which parameters are frozen. With
    different models, later collectives would wait forever or mix tensors.
    """
    ties = ties_of(model)
    # Dtypes of parameters may differ: all ranks cast them to one dtype.
    own = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        training = "trained" if parameter.requires_grad else "frozen"
        tie = f" tied to {ties[name]}" if name in ties else ""
        own.append(f"{name}, {training}, of shape {tuple(parameter.shape)}{tie}")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        layout = "" if buffer.layout == torch.strided else f" and layout {buffer.layout}"
        own.append(f"{name}, a buffer in {buffer.dtype} of shape {tuple(buffer.shape)}{layout}")
    # Every rank compares its model with rank 0's. All ranks report the first rank that differs.
    first = broadcast(own)
    difference = ""
    if own != first:
        more = sorted(set(own) - set(first)) or ["the same in another order"]
        less = sorted(set(first) - set(own)) or ["nothing"]
        difference = f"{first_five(more)}; not {first_five(less)}"
    found = dict(zip(members(), all_gather(difference), strict=True))
    different = []
    for rank, text in found.items():
        if text:
            different.append(rank)
    if different:
        one = different[0]
        raise ConfigError(
            f"ranks {different} have a different model than rank {leader()}. Rank {one} has "
            f"{found[one]}"
        )


def _check_buffers(model: nn.Module) -> None:
    """Raise `ConfigError` if the constructor has set a buffer differently on some ranks.

    Such a buffer is not initialized again, so it must be equal. Collective.
    """
    own = {}
    for name, each in model.named_buffers():
        if not each.is_meta:
            own[name] = _digest([(name, each)])
    first = broadcast(own)
    differing = []
    for name, digest in own.items():
        if digest != first.get(name):
            differing.append(name)
    found = dict(zip(members(), all_gather(differing), strict=True))
    different = {rank: names for rank, names in found.items() if names}
    if different:
        names = next(iter(different.values()))
        raise ConfigError(
            f"ranks {list(different)} hold different values of the buffer "
            f"{first_five(names, ', ')} than rank {leader()}: its constructor sets it and no "
            "initializer sets it again; call the same torch.manual_seed on every rank before the "
            "model is built"
        )


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the names, shapes and values of ``tensors``."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        data = tensor.detach()
        if data.layout != torch.strided:
            data = data.to_dense()
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        # Compare values and not dtypes, because all ranks cast parameters to the same dtype later.
        wide = data.double() if data.is_floating_point() else data.long()
        digest.update(f"{name} {tuple(tensor.shape)} {hashes_of([wide])}".encode())
    return digest.hexdigest()
