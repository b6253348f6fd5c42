"""Constructors of models: `build_on_meta` runs them without values, `own_constructor` finds those
that set initial values by themselves, and `build_for_real` runs them again for these.

[Note: constructors that initialize] Values that are drawn module by module (see [Note:
mesh-independent weights]) lack what a constructor does after it: a projection that is zeroed, a
parameter that no method sets again. Such a model is built for real by the first rank of each
replica, on CPU and under the seed, and sent inside the replica piece by piece. So its weights are
those of ``torch.manual_seed(seed); Model(...)`` in one process.
"""

from __future__ import annotations

import copyreg
import cProfile
import functools
import hashlib
import inspect
import itertools
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel2d.base.errors import ConfigError, first_five
from parallel2d.models import adapters
from parallel2d.parallel.model_structure import direct_parameters, fqn_of, join_names
from parallel2d.parallel.weights.initial_values import initializer_of, is_unset, no_initializer
from parallel2d.parallel.weights.named_tensors import all_tensors, ties_of

# Names of methods of tensors: those that draw, and all that write
_DRAWS = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_")
_WRITES = re.compile(r"__setitem__|(?!requires_grad_|detach_|share_memory_)[a-z]\w*_")
# The first two are called again where values are drawn; the third casts and moves.
_NOT_ITS_OWN = ("reset_parameters", "_reset_parameters", "_apply")

# Attributes of modules: the `_Call` that made it, and by parameter the one that wrote to it last
_MADE_BY, _WRITTEN_BY = "_parallel2d_made_by", "_parallel2d_written_by"
_COPIES = copyreg.__newobj__.__code__  # type: ignore[attr-defined]  # makes copies of objects
_ON_META = "_parallel2d_on_meta"  # an attribute of a parameter: its substitute

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a module's constructor."""

    kind: Callable[..., nn.Module] = nn.Module
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    def __deepcopy__(self, _memo: object) -> _Call:
        return self  # of a copied module too


_NO_CALL = _Call()  # what runs in no constructor


@contextmanager
def build_on_meta() -> Iterator[list[weakref.ref[nn.Module]]]:
    """Inside, every parameter that a module registers goes to the meta device; buffers stay real,
    so that tables which a constructor computes are right without being computed again. Costs one
    parameter of memory at a time. Gives the modules that are built, in their order.

    A profile function of Python (`sys.setprofile`) sees the calls of constructors: torch has hooks
    for the parameters that a module registers, and none for its construction. A profiler that is
    running rests meanwhile.
    """
    recorder = _Recorder()
    # torch's annotation lacks the result that its documentation allows.
    hook: Callable[..., Any] = recorder.replace_registered
    handle = register_module_parameter_registration_hook(hook)
    profiler = sys.getprofile()
    try:
        sys.setprofile(recorder.note_call)
        with recorder:
            yield recorder.built
    finally:
        # cProfile, whose object is not a function
        sys.setprofile(profiler if callable(profiler) else None)
        if isinstance(profiler, cProfile.Profile):
            profiler.enable()
        handle.remove()
        recorder.mark_modules()


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    attributes = dict(vars(param))
    # The same one for each place, so that what is tied stays tied.
    if _ON_META not in attributes:
        found = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
        # Subclasses of Parameter and attributes that a library hangs on it are kept.
        vars(found).update(attributes)
        setattr(param, _ON_META, found)
    return getattr(param, _ON_META)


class _Recorder(TorchFunctionMode):
    """Notes which parameters on meta are written to, and skips the drawing of values for them: on
    meta it would be decomposed in Python, for which torch loads its whole compiler, a second per
    process."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[weakref.ref[nn.Module]] = []
        # By storage, which views and `data` of a parameter share with it; None: not written to
        self._writers: dict[torch.UntypedStorage, _Call | None] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Functions that write take the tensor first, or as `out`; initializers return it.
        tensor = kwargs.get("out", next(iter([*args, *kwargs.values()]), None))
        if not (isinstance(tensor, Tensor) and tensor.is_meta):
            return function(*args, **kwargs)
        name, module = (getattr(function, key, "") for key in ("__name__", "__module__"))
        # Some initializers look at `is_meta` alone, and return.
        initializes = "torch.nn.init" in (module, sys._getframe(1).f_globals.get("__name__"))
        if initializes or _WRITES.fullmatch(name):
            self._note_written(tensor)
        if name in _DRAWS or module == "torch.nn.init":
            return tensor
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            writer = self._writers.get(tensor.untyped_storage())
            function(tensor, args[1].to("meta"))
            self._writers[tensor.untyped_storage()] = writer
            return self._note_written(tensor)
        return function(*args, **kwargs)

    def note_call(self, frame: FrameType, event: str, value: object) -> None:
        """Profile function: note a module whose construction begins, or that is copied."""
        # It runs at every call and return, so that the most frequent cases come first.
        if event == "call":
            if frame.f_code.co_name == "__init__":
                self._note_constructor(frame)
        elif event == "return" and frame.f_code is _COPIES and isinstance(value, nn.Module):
            self.built.append(weakref.ref(value))

    def _note_constructor(self, frame: FrameType) -> None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # Constructors of base classes have other arguments.
        if isinstance(module, nn.Module) and _MADE_BY not in vars(module):
            vars(module)[_MADE_BY] = _Call(type(module), *_arguments_of(frame))
            self.built.append(weakref.ref(module))

    def replace_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        """Hook of torch: return the parameter on meta that ``module`` registers instead."""
        param = param if param.is_meta else _on_meta(param)
        self._note_registered(module, name, param)
        return param

    def _note_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """What is not tied has a value here. It counts as written to unless ``module`` itself
        registers it, for the first time, and an initializer around it sets it again."""
        if param.untyped_storage() in self._writers:
            return
        self._writers[param.untyped_storage()] = None
        modules = _constructing() or []
        repeated = module._parameters.get(name) is None and modules[:1] == [module]
        if not (repeated and any(map(initializer_of, modules))):
            self._note_written(param)

    def _note_written(self, tensor: Tensor) -> None:
        modules = _constructing()
        if modules is not None:
            calls = [vars(module)[_MADE_BY] for module in modules]
            self._writers[tensor.untyped_storage()] = next(iter(calls), _NO_CALL)

    def mark_modules(self) -> None:
        """Notes at each module what wrote to its parameters."""
        alive = filter(None, [reference() for reference in self.built])
        begun = [module for module in alive if "_modules" in vars(module)]
        for module in set(chain.from_iterable(each.modules() for each in begun)):
            for name, parameter in direct_parameters(module):
                writer = self._writers.get(parameter.untyped_storage())
                if writer is not None:
                    vars(module).setdefault(_WRITTEN_BY, {})[name] = writer


def _arguments_of(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments, without ``self``, of the call that begins in
    ``frame``."""
    names, rest, named, values = inspect.getargvalues(frame)
    count = frame.f_code.co_argcount
    positional = tuple(values[name] for name in names[1:count])
    keywords = {name: values[name] for name in names[count:]}
    return positional + (values[rest] if rest else ()), keywords | (values[named] if named else {})


def _constructing() -> list[nn.Module] | None:
    """The modules whose constructors run, the innermost first; None inside of what is called again
    where values are drawn."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Models of transformers have `_init_weights`.
        library = str(frame.f_globals.get("__name__")).startswith("transformers.")
        repeated = library or code.co_name in _NOT_ITS_OWN
        if code.co_argcount and (repeated or code.co_name == "__init__"):
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and repeated:
                return None
            # Not one around the context.
            if isinstance(owner, nn.Module) and _MADE_BY in vars(owner):
                found.append(owner)
        frame = frame.f_back
    return found


def own_constructor(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Builds ``model`` again, with values, where a constructor has set some by itself inside
    `build_on_meta`, or nothing else can; else None. Raises `ConfigError` for what cannot be
    repeated. See [Note: constructors that initialize]."""
    # Adapters set their own values, and their base is loaded.
    if adapters.settings_of(model):
        return None
    calls: dict[Any, _Call] = {}
    _collect_calls(model, calls)
    # None are called again where the model itself was put together outside of the context.
    made_by = {vars(module).get(_MADE_BY) for module in model.modules() if calls}
    late, written = [], False
    for prefix, module in model.named_modules():
        for name, writer in vars(module).get(_WRITTEN_BY, {}).items():
            written = True
            if writer not in made_by:
                late.append(fqn_of(join_names(prefix, name)))
    if late:
        raise ConfigError(
            f"{first_five(late, ', ')}: set inside build_on_meta by none of the constructors of "
            f"{type(model).__name__}, which is not repeated; set it there, pass "
            "init=function(module, name), or build the model for real and pass broadcast_from=0"
        )
    return functools.partial(_call_again, model, calls) if written else None


def _collect_calls(module: nn.Module, calls: dict[Any, _Call]) -> None:
    call = vars(module).get(_MADE_BY)
    if call is not None and module not in calls:
        calls[module] = call
        for leaf in tree_leaves((call.arguments, call.keywords)):
            if isinstance(leaf, nn.Module):
                _collect_calls(leaf, calls)


def _call_again(model: nn.Module, calls: dict[Any, _Call]) -> nn.Module:
    made: dict[Any, nn.Module] = {}
    # In the order in which they have drawn.
    for module, call in sorted(calls.items(), key=lambda each: each[1].number):
        given = (call.arguments, call.keywords)
        arguments, keywords = tree_map_only(nn.Module, lambda leaf: made.get(leaf, leaf), given)
        made[module] = call.kind(*arguments, **keywords)
    return made[model]


def seeds_of(models: Sequence[nn.Module], seed: int) -> list[int]:
    """The seeds of ``models`` that were built in one `build_on_meta`: ``seed`` for the first, and
    another one for each construction that follows it. A copy has the seed of its original."""
    numbers: dict[object, int] = {}
    found = []
    for model in models:
        number = numbers.setdefault(vars(model).get(_MADE_BY, model), len(numbers))
        digest = hashlib.sha256(f"{seed}/model {number}".encode()).digest()
        found.append(int.from_bytes(digest[:8], "big") >> 1 if number else seed)
    return found


def outline(model: nn.Module) -> list[str]:
    """What a model that is built again must have in common: classes, names, shapes and ties."""
    lines = [f"{name or 'root'}: {type(each).__name__}" for name, each in model.named_modules()]
    lines += [f"{name} {tuple(each.shape)}" for name, each in all_tensors(model).items()]
    return lines + [f"{name} tied to {first}" for name, first in ties_of(model).items()]


def build_for_real(construct: Callable[[], nn.Module], seed: int, expected: list[str]) -> nn.Module:
    """What ``construct`` returns in a process that was just seeded, on CPU; random generators of
    this process stay as they are. Raises `ConfigError` when its `outline` is not ``expected``, and
    for parameters that have no values."""
    python, numbers = random.getstate(), numpy.random.get_state()
    mode = torch.get_deterministic_debug_mode()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            # torch.empty then gives NaN, by which a parameter that nothing sets is found.
            torch.set_deterministic_debug_mode("warn")
            model = construct()
        finally:
            torch.set_deterministic_debug_mode(mode)
            random.setstate(python)
            numpy.random.set_state(numbers)
    pairs = itertools.zip_longest(outline(model), expected, fillvalue="nothing")
    differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if differing is not None:
        raise ConfigError(
            f"built for real, the model has {differing[0]}; on meta it has {differing[1]}: do not "
            "build by values, or change a model after its constructor has returned; or give "
            "model.init (init=)"
        )
    unset = [name for name, each in model.named_parameters() if each.is_meta or is_unset(each)]
    if unset:
        raise no_initializer(unset)
    return model
