"""Modules that only some ranks run: `conditional_modules` and `run_dummies`.

[Note: conditional modules] A conditional module runs only on some ranks of a shard group, such as a
vision tower that runs only for batches with an image. All ranks of a shard group must take part in
the all-gather and reduce-scatter of each FSDP group, so the collectives of a conditional module
would hang without one of the following settings. The user chooses one setting for each conditional
module:

- ``replicate``: the module is one FSDP group over a mesh of one rank, so that every rank holds its
  parameters unsharded. The engine averages its gradients over the shard axis at the end of a global
  batch, and then over the replicas like all other gradients.
- ``root``: the module is not an FSDP group. The root's group, or the group of a block that contains
  the module, all-gathers its parameters on all ranks.
- ``always``: the module is sharded. A rank that has not run the module runs a dummy forward at the
  same position in the order of collectives: before the forward of the next block. The output of the
  dummy is joined to the input of that block and receives a gradient of zeros, so that backward also
  reaches the module at the same position on all ranks. For the same reason the floating-point
  inputs of a trained module always require a gradient. A parameter that only a dummy has used
  counts as unused.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from parallel2d.base.config.model_and_data import CONDITIONAL
from parallel2d.base.config.options import choice_problem
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.sharded_model import in_backward
from parallel2d.parallel.model_structure import (
    fqn_of,
    is_called,
    near_names,
    stays_replicated,
)
from parallel2d.parallel.sync.engine.buckets import GroupGradients

_METHOD = "dummy_forward"


@dataclass(frozen=True)
class Always:
    """Setting of a conditional module that is sharded and runs on every rank in every forward.

    Attributes:
        dummy: ``dummy(module)`` runs the module on a placeholder input and returns its output.
            None: the method ``dummy_forward`` of the module.
        before: name of the module before which the dummy runs. None: the next repeated block.
    """

    dummy: Callable[[Any], object] | None = None
    before: str | None = None


Conditional = Mapping[str, str | Always]


def conditional_modules(
    model: nn.Module, conditional: Conditional, tensor_ranks: int, offload: bool
) -> dict[str, str | Always]:
    """Return the setting (``replicate``, ``root`` or `Always`) of each conditional module by name.

    Raises `ConfigError` if a pattern matches no module, a setting is unknown, a matching module
    does not support its setting, or one conditional module contains another.
    """
    named = dict(model.named_modules())
    del named[""]  # the root runs on all ranks
    found: dict[str, str | Always] = {}
    for pattern, way in conditional.items():
        problem = choice_problem(f"conditional: {pattern}", way, CONDITIONAL)
        if problem is not None and not isinstance(way, Always):
            raise ConfigError(problem)
        matching = _outermost_matches(list(named), pattern)
        if not matching:
            near = near_names(pattern, list(map(fqn_of, named)))
            raise ConfigError(
                f"conditional: {pattern} is not a module of {type(model).__name__}{near}"
            )
        found |= dict.fromkeys(matching, Always() if way == "always" else way)
    for name, way in found.items():
        for other in found:
            if name.startswith(f"{other}."):
                raise ConfigError(
                    f"conditional: {name} is inside {other}, which is conditional too: name only "
                    f"{other}"
                )
        if way == "replicate" and (tensor_ranks > 1 or offload):
            other = "mesh.tensor" if tensor_ranks > 1 else "cpu_offload"
            raise ConfigError(f"conditional: {name}: replicate does not support {other}: use root")
        _check_setting(model, name, named[name], way)
    return found


def _outermost_matches(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match ``pattern``, without modules inside of other matching modules."""
    matching: list[str] = []
    for name in names:
        is_outermost = not any(name.startswith(f"{other}.") for other in matching)
        if is_outermost and fnmatch.fnmatchcase(fqn_of(name), pattern):
            matching.append(name)
    return matching


def _check_setting(model: nn.Module, name: str, module: nn.Module, way: str | Always) -> None:
    """Raise `ConfigError` if ``module`` does not support its setting."""
    if next(module.parameters(), None) is None:
        raise ConfigError(f"conditional: {name} has no parameters, and needs no setting")
    if way != "root":
        _check_separate(model, name, module)
    if isinstance(way, Always):
        _check_always(model, name, module, way)


def _check_separate(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise `ConfigError` if ``module`` cannot form a separate FSDP group."""
    if not is_called(module):
        raise ConfigError(
            f"conditional: {name} is a {type(module).__name__}, which has no forward: name the "
            f"modules in it ({name}.*), or use root"
        )
    inside = set(module.parameters())
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in inside and not other.startswith(f"{name}."):
            raise ConfigError(
                f"conditional: {fqn_of(other)} is also a parameter of {name}, and modules outside "
                "of it need it on all ranks: use root"
            )


def _check_always(model: nn.Module, name: str, module: nn.Module, way: Always) -> None:
    """Raise `ConfigError` if ``module`` or its dummy does not support ``always``."""
    if way.dummy is None and not callable(getattr(module, _METHOD, None)):
        raise ConfigError(
            f"conditional: {name}: always needs a dummy forward: give {type(module).__name__} a "
            f"method {_METHOD}(self), which returns self(zeros), or use "
            "parallelize(..., conditional={name: parallel2d.Always(dummy=function)})"
        )
    if way.before is not None and way.before not in dict(model.named_modules()):
        near = near_names(way.before, [each for each, _ in model.named_modules() if each])
        raise ConfigError(f"conditional: {name}: before={way.before} is not a module{near}")
    for other, parameter in module.named_parameters():
        if parameter.requires_grad and stays_replicated(parameter):
            raise ConfigError(
                f"conditional: {name}.{other} has no dimensions or no elements, which always does "
                "not support: use root or replicate"
            )


def cut_groups(
    model: nn.Module, groups: Iterable[list[nn.Module]], conditional: Conditional
) -> list[list[nn.Module]]:
    """Adapt ``groups`` to the conditional modules.

    ``root`` and ``replicate`` modules, and the modules inside of them, leave their groups. Modules
    inside of an ``always`` module do not share a group with other modules. `separate_modules`
    names the groups of the conditional modules themselves.
    """
    inside: dict[int, str] = {}
    for name in conditional:
        for module in model.get_submodule(name).modules():
            inside[id(module)] = name
    cut: list[list[nn.Module]] = []
    for group in groups:
        parts: dict[str | None, list[nn.Module]] = defaultdict(list)
        for module in group:
            around = inside.get(id(module))
            if around is None or isinstance(conditional[around], Always):
                parts[around].append(module)
        cut += parts.values()
    return cut


def separate_modules(
    model: nn.Module, conditional: Conditional, separate: Collection[int]
) -> set[int]:
    """Return the ids of the conditional modules that each form a separate FSDP group.

    ``separate`` holds the ids of modules that need a separate group for another reason. Raises
    `ConfigError` if one of these modules is inside a ``root`` or ``replicate`` module.
    """
    found: set[int] = set()
    for name, way in conditional.items():
        outer = model.get_submodule(name)
        if way != "root":
            found.add(id(outer))
        for inner, module in outer.named_modules():
            # A ``replicate`` module itself may be in ``separate``, because it forms a group.
            if isinstance(way, Always) or (way == "replicate" and not inner):
                continue
            if id(module) in separate:
                raise ConfigError(
                    f"conditional: {name}={way} has no groups inside, and "
                    f"{'.'.join(filter(None, (name, inner)))} needs its own, as a module of "
                    "precision.fp32_modules or with complex parameters: use always"
                )
    return found


def check_places(conditional: Conditional, groups: Iterable[Sequence[str]]) -> None:
    """Raise `ConfigError` if a module of ``groups``, other than the root, contains an ``always``
    module."""
    names = list(filter(None, itertools.chain.from_iterable(groups)))
    for name, way in conditional.items():
        around = [each for each in names if name.startswith(f"{each}.")]
        if isinstance(way, Always) and around:
            raise ConfigError(
                f"conditional: {name} is inside {around[0]}, whose parameters are gathered "
                "together; always supports modules between such groups only: use root or replicate"
            )


class _Join(torch.autograd.Function):
    """Return ``tensor`` unchanged. In backward the ``outputs`` of dummies get zero gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *outputs: Tensor) -> Tensor:
        ctx.outputs = [(each.shape, each.dtype, each.device) for each in outputs]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # `0 * sum(output)` would make the loss NaN if an output is not finite.
        zeros = [torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.outputs]
        return gradients[0], *zeros


@dataclass
class _Entry:
    """One ``always`` module."""

    name: str
    module: nn.Module
    dummy: Callable[[nn.Module], object]
    before: str | None
    gradients: list[GroupGradients] = field(default_factory=list)
    has_run: bool = False  # in the running forward of the model

    def with_gradients(self, inputs: Iterable[Any]) -> tuple[Any, ...]:
        """Return ``inputs``; for a trained module their floating-point tensors require grad.

        FSDP reduces the gradients of a group when backward has reached the inputs of the group, or
        at the end of backward if no input requires grad. If the inputs of the dummy and the real
        inputs differed in this, the ranks would reduce the groups in different orders.
        """
        is_trained = any(each.requires_grad for each in self.module.parameters())
        found = []
        for each in inputs:
            lacks_gradient = _is_floating(each) and not (each.requires_grad or each.is_inference())
            if lacks_gradient and is_trained and torch.is_grad_enabled():
                each = each.detach().requires_grad_()
            found.append(each)
        return tuple(found)


class _DummyForwards:
    """Runs the dummies of the ``always`` modules of one model, by hooks of the modules."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = entries
        self._running: _Entry | None = None
        # Outputs of dummies that are not yet joined to the input of a block
        self._outputs: list[Tensor] = []
        # Values of ``before`` whose dummies have run in this forward. None stands for the first
        # block that runs.
        self._reached: set[str | None] = set()
        self._is_checked = False

    def begin(self, *_: Any) -> None:
        """Pre-forward hook of the model."""
        if in_backward():
            return
        self._outputs = []
        self._reached = set()
        for each in self._entries:
            each.has_run = False

    def check(self, *_: Any) -> None:
        """Run each dummy once in the first forward, so that all ranks raise the error of a dummy.

        Pre-forward hook of the model, after FSDP's hook. Raises `ConfigError` if a dummy does not
        call the module or returns no floating-point tensor.
        """
        if self._is_checked:
            return
        self._is_checked = True
        for entry in self._entries:
            with torch.no_grad():
                output = self._call(entry)
            has_run, entry.has_run = entry.has_run, False
            if not has_run:
                raise ConfigError(f"conditional: the dummy of {entry.name} did not call the module")
            if not any(map(_is_floating, tree_leaves(output))):
                raise ConfigError(
                    f"conditional: the dummy of {entry.name} returned no floating-point tensor: "
                    "return the output of the module"
                )

    def enter(self, entry: _Entry, given: Any, named: dict[str, Any]) -> Any:
        """Pre-forward hook of the module of ``entry``."""
        self._note_run(entry)
        return entry.with_gradients(given), dict(
            zip(named, entry.with_gradients(named.values()), strict=True)
        )

    def _note_run(self, entry: _Entry) -> None:
        if self._running is not None:
            entry.has_run |= self._running is entry
            return
        # Activation checkpointing recomputes the forward.
        if in_backward():
            return
        entry.has_run = True
        # All ranks must run the modules in the order of ``conditional``, so the dummies of earlier
        # modules run before this module.
        for other in self._entries[: self._entries.index(entry)]:
            if other.before == entry.before and not other.has_run:
                self._run(other)
        if torch.is_grad_enabled():
            for each in entry.gradients:
                each.ran_module = True

    def reach(self, before: str | None, given: Any, named: dict[str, Any]) -> Any:
        """Run the missing dummies before a block (``before`` is None) or the module ``before``.

        Pre-forward hook. Raises `ConfigError` on all ranks if the block takes no floating-point
        tensor.
        """
        if in_backward() or self._running is not None or before in self._reached:
            return None
        self._reached.add(before)
        arguments = dict(enumerate(given)) | named
        key = next((key for key, value in arguments.items() if _is_floating(value)), None)
        if key is None:
            raise ConfigError(
                f"conditional: {before or 'the first block'} takes no floating-point tensor: give "
                "Always(before=NAME) a module that takes one"
            )
        self._run_missing(before)
        if self._outputs:
            arguments[key] = self._join(arguments[key])
        positional = tuple(arguments[number] for number in range(len(given)))
        return positional, {name: arguments[name] for name in named}

    def end(self, _module: nn.Module, _given: Any, output: Any) -> Any:
        """Run the dummies whose block has not run, and join their outputs to the model's output.

        Forward hook of the model.
        """
        if in_backward():
            return None
        for before in dict.fromkeys(entry.before for entry in self._entries):
            if before not in self._reached:
                self._run_missing(before)
        leaves, structure = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if self._outputs and _is_floating(leaf):
                leaves[index] = self._join(leaf)
                return tree_unflatten(leaves, structure)
        return None

    def _run_missing(self, before: str | None) -> None:
        for entry in self._entries:
            if entry.before == before and not entry.has_run:
                self._run(entry)

    def _run(self, entry: _Entry) -> None:
        """Run the dummy of ``entry``, and store its outputs for `_join`, so that backward reaches
        them."""
        output = self._call(entry)
        if not torch.is_grad_enabled():
            return
        for each in entry.gradients:
            each.ran_dummy = True
        for leaf in tree_leaves(output):
            if _is_floating(leaf) and leaf.requires_grad:
                self._outputs.append(leaf)

    def _call(self, entry: _Entry) -> object:
        self._running = entry
        try:
            return entry.dummy(entry.module)
        finally:
            self._running = None

    def _join(self, tensor: Tensor) -> Tensor:
        outputs, self._outputs = self._outputs, []
        joined: Tensor = _Join.apply(tensor, *outputs)
        return joined


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def run_dummies(
    model: nn.Module,
    conditional: Conditional,
    blocks: Sequence[tuple[str, nn.Module]],
    gradients: Sequence[GroupGradients],
) -> None:
    """Install the dummies of ``always`` modules; see [Note: conditional modules].

    Args:
        model: the model, after `shard`.
        conditional: from `conditional_modules`.
        blocks: (name, module) of the repeated blocks.
        gradients: the `GroupGradients` of all FSDP groups of the model.
    """
    entries = list(_entries(model, conditional, gradients))
    if not entries:
        return
    dummies = _DummyForwards(entries)
    # With `prepend` these hooks run before FSDP's hooks, which all-gather parameters and register
    # backward hooks on the outputs.
    model.register_forward_pre_hook(dummies.begin, prepend=True)
    model.register_forward_pre_hook(dummies.check)
    model.register_forward_hook(dummies.end, prepend=True)
    for entry in entries:
        entry.module.register_forward_pre_hook(
            lambda _module, given, named, entry=entry: dummies.enter(entry, given, named),
            prepend=True,
            with_kwargs=True,
        )
    triggers: list[tuple[str | None, nn.Module]] = []
    for before in dict.fromkeys(entry.before for entry in entries):
        if before is not None:
            triggers.append((before, model.get_submodule(before)))
    inside: set[nn.Module] = set()
    for name in conditional:
        inside.update(model.get_submodule(name).modules())
    for _, block in blocks:
        if block not in inside:
            triggers.append((None, block))
    for before, module in triggers:
        module.register_forward_pre_hook(
            lambda _module, given, named, before=before: dummies.reach(before, given, named),
            prepend=True,
            with_kwargs=True,
        )


def _entries(
    model: nn.Module, conditional: Conditional, gradients: Sequence[GroupGradients]
) -> Iterator[_Entry]:
    for name, way in conditional.items():
        if not isinstance(way, Always):
            continue
        module = model.get_submodule(name)
        entry = _Entry(name, module, way.dummy or _dummy_forward, way.before)
        modules = set(module.modules())
        for each in gradients:
            if each.group.modules[0] in modules:
                entry.gradients.append(each)
        yield entry


def _dummy_forward(module: Any) -> object:
    return getattr(module, _METHOD)()
