"""Constructors of models: `build_on_meta` runs them without values and records what they do,
`own_constructor` says whether they set initial values themselves, and `build_for_real` runs them
again for those values.

[Note: constructors that initialize] Initial values are drawn module by module by what a module has
for it (see [Note: mesh-independent weights]), and a constructor that goes on to zero a projection,
or sets a parameter that no method sets again, would lose that. So one rank of each replica builds
such a model for real, on CPU and under the seed, and sends it to the others of the replica, 16 MiB
at a time. The weights are those of ``torch.manual_seed(seed); Model(...)``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.base.runtime import seed_everything
from parallel2d.models import adapters
from parallel2d.parallel.model_structure import fqn_of, held_parameters, join_names
from parallel2d.parallel.weights.initial_values import is_unset, no_initializer, unreachable
from parallel2d.parallel.weights.named_tensors import ties_of

_DRAWS = {
    *(Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_),
    *(Tensor.log_normal_, Tensor.cauchy_),
}
_KEEP_VALUES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
# Drawing initial values calls the first two again; the third casts or moves.
_REPEATED = {"reset_parameters", "_reset_parameters", "_apply"}

# Attributes of modules: the `_Call` that made it; by parameter, when it was written to
_MADE_BY, _WRITTEN = "_parallel2d_made_by", "_parallel2d_written"
# An attribute of a parameter that was registered: its substitute
_ON_META = "_parallel2d_on_meta"
_INSIDE, _AFTER = "inside", "after"  # of a constructor

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module's constructor. ``rebound``: arguments that it changed before it called
    that of ``nn.Module``, where they are seen."""

    number: int
    kind: type[nn.Module]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    rebound: list[str]

    def __deepcopy__(self, _memo: object) -> _Call:
        return self  # of a copied model, whose constructor never ran


@contextmanager
def build_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device; buffers stay real,
    so that tables which a constructor computes are right without being computed again. Costs one
    parameter of memory at a time. `parallelize` gives the values."""
    with recorded_on_meta():
        yield


@contextmanager
def recorded_on_meta() -> Iterator[list[weakref.ref[nn.Module]]]:
    """As `build_on_meta`; gives the modules that are built inside, in their order."""
    recorder = _Recorder()
    construct, register = nn.Module.__init__, nn.Module.register_parameter

    # Every module calls this constructor, whatever its class.
    def construct_and_record(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        recorder.built.append(weakref.ref(self))
        vars(self).setdefault(_MADE_BY, _call_of(self, sys._getframe()))

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = _substitute(param)
        if param is not None:
            recorder.registered(self, name, param)
        register(self, name, param)

    nn.Module.__init__ = construct_and_record  # type: ignore[method-assign]
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with recorder:
            yield recorder.built
    finally:
        nn.Module.__init__ = construct  # type: ignore[method-assign]
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        recorder.mark_modules()


def _substitute(param: nn.Parameter) -> nn.Parameter:
    """``param`` on meta; the same one each time, so that what is tied stays tied."""
    attributes = dict(vars(param))
    if _ON_META in attributes:
        return attributes[_ON_META]
    # Subclasses of Parameter and attributes that a library hangs on it are kept.
    on_meta = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
    vars(on_meta).update(attributes)
    setattr(param, _ON_META, on_meta)
    return on_meta


def _call_of(module: nn.Module, frame: FrameType) -> _Call:
    """The call of the outermost constructor of ``module`` that ``frame`` runs in."""
    outermost, above = frame, frame.f_back
    while above is not None:
        if above.f_code.co_name == "__init__" and _owner(above) is module:
            outermost = above
        above = above.f_back
    code, found = outermost.f_code, inspect.getargvalues(outermost)
    values, count = found.locals, code.co_argcount
    more = values[found.varargs] if found.varargs else ()
    keywords = {name: values[name] for name in found.args[count:]}
    keywords.update(values[found.keywords] if found.keywords else {})
    positional = [values[name] for name in found.args[1:count]]
    rebound = _rebound(code, outermost.f_lasti)
    return _Call(next(_numbers), type(module), (*positional, *more), keywords, rebound)


@functools.cache
def _rebound(code: CodeType, before: int) -> list[str]:
    """Arguments that a function assigns to before the instruction at offset ``before``."""
    stored: set[str] = set()
    for step in dis.get_instructions(code):
        if step.offset < before and step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            stored.update(step.argrepr.split(", "))
    return [name for name in inspect.getargs(code).args if name in stored]


def _owner(frame: FrameType) -> nn.Module | None:
    """The module whose method ``frame`` runs."""
    first = next(iter(frame.f_code.co_varnames), "")
    owner = frame.f_locals.get(first) if frame.f_code.co_argcount else None
    return owner if isinstance(owner, nn.Module) else None


class _Recorder(TorchFunctionMode):
    """Notes which parameters on meta are written to, and skips the drawing of values for them: on
    meta it would be decomposed in Python, for which torch loads its whole compiler, a second per
    process."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[weakref.ref[nn.Module]] = []
        # By storage, which a parameter shares with its `data` and with views of it: when it was
        # written to, None for not yet
        self._written: dict[torch.UntypedStorage, str | None] = {}
        # What runs around the context constructs nothing inside it.
        self._around: set[FrameType] = set()
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self._around.add(frame)
            frame = frame.f_back

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What is written to comes first.
        tensor = kwargs.get("out", next(iter([*args, *kwargs.values()]), None))
        if not (isinstance(tensor, Tensor) and tensor.is_meta):
            return function(*args, **kwargs)
        module = getattr(function, "__module__", None)
        # Some initializers look at `is_meta`, and return.
        caller = sys._getframe(1).f_globals.get("__name__")
        if "torch.nn.init" in (module, caller) or _writes(getattr(function, "__name__", "")):
            self._note(tensor)
        if function in _DRAWS or module == "torch.nn.init":
            return tensor
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            before = self._written.get(tensor.untyped_storage())
            function(tensor, args[1].to("meta"))
            self._written[tensor.untyped_storage()] = before
            return self._note(tensor)
        return function(*args, **kwargs)

    def registered(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """A parameter that another module's constructor, or nobody's, gives to ``module``, or that
        takes the place of one, has values that nothing draws; unless it is tied."""
        if param.untyped_storage() in self._written:
            return
        _, innermost = self._writer()
        if innermost is not module or module._parameters.get(name) is not None:
            self._note(param)
        self._written.setdefault(param.untyped_storage(), None)

    def _note(self, tensor: Tensor) -> None:
        stage, _ = self._writer()
        if stage is not None:
            self._written[tensor.untyped_storage()] = stage

    def _writer(self) -> tuple[str | None, nn.Module | None]:
        """When a parameter is written to now: inside of a constructor, or after it; None for what
        is repeated when values are drawn. And the module whose constructor that is."""
        innermost: nn.Module | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame not in self._around:
            # transformers sets values by `_init_weights`, which is called again too.
            if str(frame.f_globals.get("__name__")).startswith("transformers."):
                return None, None
            if frame.f_code.co_name in _REPEATED and _owner(frame) is not None:
                return None, None
            if frame.f_code.co_name == "__init__" and innermost is None:
                innermost = _owner(frame)
            frame = frame.f_back
        return (_AFTER if innermost is None else _INSIDE), innermost

    def mark_modules(self) -> None:
        """Notes at each module which of its parameters were written to."""
        self._around.clear()
        alive = filter(None, [reference() for reference in self.built])
        for module in set(chain.from_iterable(each.modules() for each in alive)):
            for name, parameter in held_parameters(module):
                stage = self._written.get(parameter.untyped_storage())
                if stage is not None:
                    vars(module).setdefault(_WRITTEN, {})[name] = stage


def _writes(name: str) -> bool:
    """Whether a function or method of torch writes to its first argument, by the convention."""
    in_place = name.endswith("_") and not name.endswith("__")
    return name == "__setitem__" or (in_place and name not in _KEEP_VALUES)


def _written(model: nn.Module, stage: str) -> list[str]:
    """FQNs of the parameters on meta that were written to at ``stage``."""
    found = []
    for prefix, module in model.named_modules():
        marks = vars(module).get(_WRITTEN, {})
        for name, parameter in held_parameters(module):
            if parameter.is_meta and marks.get(name) == stage:
                found.append(fqn_of(join_names(prefix, name)))
    return found


def late_writes(model: nn.Module) -> list[str]:
    """FQNs of the parameters on meta that were written to inside `build_on_meta` by no constructor
    or initializer, which is not repeated."""
    return _written(model, _AFTER)


def refuse_late_writes(names: Collection[str]) -> None:
    """Raises `ConfigError` for any."""
    if names:
        raise ConfigError(
            f"{first_five(sorted(names), ', ')}: set inside build_on_meta after the constructor "
            "had returned, which is not repeated; set it in the constructor, pass "
            "init=function(module, name), or build the model for real and pass broadcast_from=0"
        )


def own_constructor(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Builds ``model``, from `build_on_meta`, again; None where initial values are drawn: no
    constructor sets any by itself. See [Note: constructors that initialize]."""
    # An adapter sets its values itself, and its base is loaded.
    if adapters.settings_of(model):
        return None
    call, inside = vars(model).get(_MADE_BY), _written(model, _INSIDE)
    if call is None and inside:
        raise ConfigError(
            f"a constructor sets {first_five(inside, ', ')}, and {type(model).__name__} around it "
            "was built outside of build_on_meta: build the whole model inside"
        )
    if call is None or not (inside or unreachable(model)):
        return None
    calls: dict[nn.Module, _Call] = {}
    _collect_calls(model, calls)
    # In their order, in which they draw.
    return functools.partial(_call_again, sorted(calls.items(), key=lambda each: each[1].number))


def forget_constructors(model: nn.Module) -> None:
    """Lets go of what constructors were called with."""
    for module in model.modules():
        vars(module).pop(_MADE_BY, None)
        vars(module).pop(_WRITTEN, None)


def _call_again(calls: Sequence[tuple[nn.Module, _Call]]) -> nn.Module:
    """The last of the modules, made again, with the others where they were arguments."""
    made: dict[nn.Module, nn.Module] = {}

    def replaced(leaf: Any) -> Any:
        return made.get(leaf, leaf) if isinstance(leaf, nn.Module) else leaf

    for module, call in calls:
        if call.rebound:
            raise ConfigError(
                f"{call.kind.__name__} changes its argument {first_five(call.rebound, ', ')} "
                "before it calls super().__init__(), so that it cannot be called again: let it "
                "call that first, or pass init=function(module, name)"
            )
        arguments, keywords = tree_map(replaced, (call.arguments, call.keywords))
        made[module] = call.kind(*arguments, **keywords)
    return made[calls[-1][0]]


def _collect_calls(module: nn.Module, calls: dict[nn.Module, _Call]) -> None:
    """Adds the calls that made ``module`` and the modules among its arguments."""
    call = vars(module).get(_MADE_BY)
    if call is None or module in calls:
        return
    calls[module] = call
    for leaf in tree_leaves((call.arguments, call.keywords)):
        if isinstance(leaf, nn.Module):
            _collect_calls(leaf, calls)


def outline(model: nn.Module) -> list[str]:
    """What a model that is built again must have in common: classes, names, shapes and ties."""
    lines = [
        f"{name or 'the model'}: {type(each).__name__}" for name, each in model.named_modules()
    ]
    ties = ties_of(model)
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors:
        tie = f" tied to {ties[name]}" if name in ties else ""
        lines.append(f"{name} of shape {tuple(tensor.shape)}{tie}")
    return lines


def build_for_real(construct: Callable[[], nn.Module], seed: int, expected: list[str]) -> nn.Module:
    """What ``construct`` returns in a process that was just seeded, on CPU; random generators of
    this process stay as they are.

    Raises `ConfigError` when it fails, when its `outline` is not ``expected``, and for parameters
    that have no values.
    """
    try:
        with _seeded(seed):
            model = construct()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model's constructor, called again for its initial values, failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    found = outline(model)
    if found != expected:
        both = itertools.zip_longest(found, expected, fillvalue="nothing")
        other, first = next(pair for pair in both if pair[0] != pair[1])
        raise ConfigError(
            f"built for real, with its values, the model has {other}; on meta it has {first}: "
            "what is built must not depend on values, and not be changed after the constructor has "
            "returned; or give model.init (init=)"
        )
    unset = [name for name, each in model.named_parameters() if each.is_meta or is_unset(each)]
    if unset:
        raise no_initializer(unset)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    python, numbers = random.getstate(), numpy.random.get_state()
    mode = torch.get_deterministic_debug_mode()
    devices = []
    if torch.accelerator.is_available():
        devices = [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices), torch.device("cpu"):
        try:
            seed_everything(seed, deterministic=False)
            # torch.empty then gives NaN, by which a parameter that nothing sets is found.
            torch.set_deterministic_debug_mode("warn")
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            random.setstate(python)
            numpy.random.set_state(numbers)
