"""Where the weights of a model come from: `WeightSource` keeps them while the model is sharded, and
checks that all ranks hold the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.exchange import all_gather, broadcast
from parallel2d.base.memory import free_memory
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh import ranks_of, route_in_replica
from parallel2d.parallel.weights.construction import build_for_real, outline, own_constructor
from parallel2d.parallel.weights.hashes import hashes_of
from parallel2d.parallel.weights.initial_values import (
    Initializer,
    InitialWeights,
    allocate,
    apply_to_tensors,
    has_meta_parameters,
)
from parallel2d.parallel.weights.named_tensors import all_tensors, ties_of
from parallel2d.parallel.weights.whole_tensors import Route, fill


class WeightSource:
    """The weights that a model starts from: those it has, those of one rank, or, for a model on
    meta, values drawn from a seed or set by its constructor. See [Note: constructors that
    initialize]."""

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
        """Takes the weights that one rank gives the others out of ``model``. Collective. Arguments
        are those of `parallel2d.parallelize`, ``given`` is its ``weights``. ``construct`` builds
        the model with its values; None: what was recorded of it. Raises `ConfigError` when ranks
        have different models, and for arguments that exclude each other."""
        self._seed = seed
        self._init = init
        self._given = given or (lambda _: ())
        self._source = broadcast_from
        self._received: dict[str, Tensor] = {}
        if broadcast_from is not None:
            self._received = _hand_over(model, broadcast_from)
            seed = 0  # nothing is drawn, so a model on meta needs no seed
        # After the weights were handed over, which ties on all ranks what is tied on the source.
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
        if is_drawn and init is None:
            self._construct = construct or own_constructor(model)
            self._outline = outline(model)
            self._bytes = sum(each.nbytes for each in chain(model.parameters(), model.buffers()))

    def remember(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Keeps what `fill` needs of ``model`` as it is before the transforms. Collective. Raises
        `ConfigError` when ranks hold different weights."""
        if not self._on_meta:
            digests = all_gather(_digest(model.named_parameters()))
            different = [rank for rank, other in enumerate(digests) if other != digests[0]]
            if different:
                raise ConfigError(
                    f"ranks {different} hold other weights than rank 0: build the model under the "
                    "same torch.manual_seed on every rank, or under parallel2d.build_on_meta with "
                    "seed=, or let all start from rank 0's by parallelize(..., broadcast_from=0)"
                )
        elif self._source is None and self._construct is None:
            _check_buffers(model)
            self._initial = InitialWeights(model, blocks, self._init)

    def fill(
        self, model: nn.Module, mesh: DeviceMesh, topology: Topology, *, offload: bool
    ) -> None:
        """Gives ``model``, sharded by now, storage where it has none, in CPU memory with
        ``offload``, and its weights. Collective. Raises `ConfigError` on every rank when they
        cannot be made."""
        if not self._on_meta:
            return
        allocate(model, mesh.device_type, offload=offload)
        here: dict[str, Tensor] = all_tensors(model)
        route: int | Route | None = self._source
        if route is None:
            # Weights that are loaded into the allocated model are not drawn.
            given = self._given(model)
            if self._initial is not None:
                self._initial.write(model, self._seed or 0, mesh.device_type, given=given)
                return
            loaded = {id(each) for name, each in here.items() if name in given}
            here = {name: each for name, each in here.items() if id(each) not in loaded}
            if not any(isinstance(each, nn.Parameter) for each in here.values()):
                return
            self._build(mesh, topology)
            route = route_in_replica(mesh)
        # Buffers too: those of the other ranks may have been on meta. What is tied is sent once.
        pairs = {id(each): (each, self._received.get(name)) for name, each in here.items()}
        fill(pairs.values(), route)
        self._received = {}

    def _build(self, mesh: DeviceMesh, topology: Topology) -> None:
        """Builds the model for real on the first rank of each replica. Collective. Raises
        `ConfigError` on every rank when one of them cannot, or gets other weights."""
        assert self._construct is not None
        rank, builders = dist.get_rank(), ranks_of(mesh)[:, 0, 0, 0].tolist()
        host = topology.hosts[rank]
        count = sum(topology.hosts[builder] == host for builder in builders)
        needed, free = count * self._bytes / 2**30, free_memory() / 2**30
        problem = weights = None
        if rank in builders and needed > free:
            problem = (
                f"the model's constructor sets its values: {count} on {host} take {needed:.3g} GiB "
                f"and {free:.3g} are free; give model.init (init=), called module by module"
            )
        # Before any of them takes memory.
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
                "its constructor must draw from the generators of torch, NumPy and Python alone"
            )


def _raise_any(problem: str | None, value: str | None = None) -> dict[int, str]:
    """Raises the first ``problem`` of any rank; returns the values of all that have one."""
    found = all_gather((problem, value))
    for first, _ in found:
        if first is not None:
            raise ConfigError(first)
    return {rank: value for rank, (_, value) in enumerate(found) if value is not None}


def _hand_over(model: nn.Module, source: int) -> dict[str, Tensor]:
    """Takes the weights out of ``model``, which is on meta afterwards; returns them by FQN on rank
    ``source``. Collective. Raises `ConfigError` on every rank when the source has none."""
    world = dist.get_world_size()
    if not 0 <= source < world:
        raise ConfigError(f"broadcast_from={source} is no rank: there are {world}, counted from 0")
    _refuse_sparse(model, source)
    # The source alone has weights to give, and finds out whether it lacks any.
    weights: dict[str, Tensor] = {}
    problem = None
    if dist.get_rank() == source:
        weights = {name: tensor.detach() for name, tensor in all_tensors(model).items()}
        meta = [name for name, tensor in weights.items() if tensor.is_meta]
        if meta:
            names = first_five(meta, ", ")
            problem = f"broadcast_from={source}: that rank has no values for {names}, on meta"
    problem = broadcast(problem, source)
    if problem is not None:
        raise ConfigError(problem)
    # `model.to("meta")`, with which the other ranks may have been built, takes ties apart.
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, first in broadcast(ties_of(model), source).items():
        # What differs here is reported by the check that all ranks have one structure.
        if {name, first} <= named.keys() and named[name].shape == named[first].shape:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._parameters[attribute] = named[first]
    # Buffers stay real, and are overwritten.
    apply_to_tensors(
        model, lambda each: each.to("meta") if isinstance(each, nn.Parameter) else each
    )
    return weights


def _refuse_sparse(model: nn.Module, source: int) -> None:
    """Raise `ConfigError` on every rank if a tensor of one is sparse. Collective."""
    sparse = [name for name, each in all_tensors(model).items() if each.layout != torch.strided]
    problem = None
    if sparse:
        problem = (
            f"broadcast_from={source}: {first_five(sparse)} is sparse, and only dense tensors are "
            "sent: build it alike on every rank and register it after parallelize, or make it dense"
        )
    _raise_any(problem)


def check_same_structure(model: nn.Module) -> None:
    """Raises `ConfigError` when a rank's model has other parameters, shapes, ties or frozen
    parameters than rank 0's: sooner or later its collectives would wait for, or be filled with,
    something else. Collective."""
    ties = ties_of(model)
    # Dtypes of parameters may differ: they are cast alike.
    own = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        training = "trained" if parameter.requires_grad else "frozen"
        tie = f" tied to {ties[name]}" if name in ties else ""
        own.append(f"{name}, {training}, of shape {tuple(parameter.shape)}{tie}")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        layout = "" if buffer.layout == torch.strided else f" and layout {buffer.layout}"
        own.append(f"{name}, a buffer in {buffer.dtype} of shape {tuple(buffer.shape)}{layout}")
    # Every rank compares its model with rank 0's; all show what the first that differs has found.
    first = broadcast(own)
    difference = ""
    if own != first:
        more = sorted(set(own) - set(first)) or ["the same in another order"]
        less = sorted(set(first) - set(own)) or ["nothing"]
        difference = f"{first_five(more)}; not {first_five(less)}"
    found = dict(enumerate(all_gather(difference)))
    different = [rank for rank, text in found.items() if text]
    if different:
        one = different[0]
        raise ConfigError(
            f"ranks {different} have another model than rank 0. Rank {one} has {found[one]}"
        )


def _check_buffers(model: nn.Module) -> None:
    """Raises `ConfigError` where a constructor has given ranks different values of a buffer, which
    no initializer sets again. Collective."""
    own = {
        name: _digest([(name, each)]) for name, each in model.named_buffers() if not each.is_meta
    }
    first = broadcast(own)
    differing = [name for name, digest in own.items() if digest != first.get(name)]
    found = dict(enumerate(all_gather(differing)))
    different = {rank: names for rank, names in found.items() if names}
    if different:
        names = next(iter(different.values()))
        raise ConfigError(
            f"ranks {list(different)} hold other values of the buffer {first_five(names, ', ')} "
            "than rank 0, which its constructor gives it and no initializer sets again; call the "
            "same torch.manual_seed on every rank before the model is built"
        )


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest that differs if any tensor does."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        data = tensor.detach()
        if data.layout != torch.strided:
            data = data.to_dense()
        if data.is_complex():
            data = torch.view_as_real(data.resolve_conj())
        # Ranks may hold equal values in several dtypes, which are cast alike.
        wide = data.double() if data.is_floating_point() else data.long()
        digest.update(f"{name} {tuple(tensor.shape)} {hashes_of([wide])}".encode())
    return digest.hexdigest()
