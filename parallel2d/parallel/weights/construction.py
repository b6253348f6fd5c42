"""Constructors of models: `build_on_meta` runs constructors without storage for parameters.

`own_constructor` finds models with constructors that set initial values directly, and
`build_for_real` calls these constructors again, with storage.

[Note: constructors that initialize] By default weights are initialized module by module (see
[Note: mesh-independent weights]). This initialization misses values that a constructor sets: a
projection that is set to zero, a parameter that no initializer sets, or a buffer that is computed
from weights. If a constructor sets values, the first rank of each replica builds the model with
storage, on CPU and under the seed, and sends the weights to the other ranks of its replica, tensor
by tensor. The weights equal the result of ``torch.manual_seed(seed); Model(...)`` in one process.
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

# Names of tensor methods: methods that draw random values, and all methods that write
_DRAWS = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_")
_WRITES = re.compile(r"__setitem__|(?!requires_grad_|detach_|share_memory_)[a-z]\w*_")
# Writes inside of these functions do not count: the first two run again when weights are
# initialized, and the third casts and moves parameters.
_NOT_ITS_OWN = ("reset_parameters", "_reset_parameters", "_apply")

# Attributes of modules: the `_Call` that built the module, and a dict from the name of a parameter
# to the `_Call` that wrote to it last
_MADE_BY, _WRITTEN_BY = "_parallel2d_made_by", "_parallel2d_written_by"
_COPIES = copyreg.__newobj__.__code__  # type: ignore[attr-defined]  # code of `copy.deepcopy`
_ON_META = "_parallel2d_on_meta"  # attribute of a parameter: its replacement on meta

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Call:
    """A recorded call of a module's constructor."""

    kind: Callable[..., nn.Module] = nn.Module
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    def __deepcopy__(self, _memo: object) -> _Call:
        return self  # a copied module has the call of its original


_NO_CALL = _Call()  # stands for code outside of all constructors


@contextmanager
def build_on_meta() -> Iterator[list[weakref.ref[nn.Module]]]:
    """Move parameters to the meta device when a module of the body registers them.

    Yields the list of the modules that the body builds, in order. Buffers stay on their device, so
    that tables that a constructor computes are correct. At most one parameter has storage at a
    time.

    Constructor calls are recorded by a Python profile function (`sys.setprofile`), because torch
    has hooks only for the registration of parameters, not for the construction of modules. A
    running profiler is suspended in the body.
    """
    recorder = _Recorder()
    # torch's annotation omits the result that its documentation allows.
    hook: Callable[..., Any] = recorder.replace_registered
    handle = register_module_parameter_registration_hook(hook)
    profiler = sys.getprofile()
    try:
        sys.setprofile(recorder.note_call)
        with recorder:
            yield recorder.built
    finally:
        # A cProfile object is not callable.
        sys.setprofile(profiler if callable(profiler) else None)
        if isinstance(profiler, cProfile.Profile):
            profiler.enable()
        handle.remove()
        recorder.mark_modules()


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    attributes = dict(vars(param))
    # One replacement per parameter, so that tied parameters stay tied.
    if _ON_META not in attributes:
        found = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
        # Keep subclasses of Parameter and attributes that a library adds.
        vars(found).update(attributes)
        setattr(param, _ON_META, found)
    return getattr(param, _ON_META)


class _Recorder(TorchFunctionMode):
    """Records writes to parameters on meta, and skips random initialization.

    On meta, torch would decompose random operators in Python and import its compiler for this,
    which takes a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.built: list[weakref.ref[nn.Module]] = []
        # Storage of a parameter (shared by its views and `data`) -> the constructor call that wrote
        # to it last; None: not written
        self._writers: dict[torch.UntypedStorage, _Call | None] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Writing functions take the tensor as first argument or as `out`; initializers return it.
        tensor = kwargs.get("out", next(iter([*args, *kwargs.values()]), None))
        if not (isinstance(tensor, Tensor) and tensor.is_meta):
            return function(*args, **kwargs)
        name, module = (getattr(function, key, "") for key in ("__name__", "__module__"))
        # Some initializers check `is_meta` and return without a write, so record the check.
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
        """Record a module that is constructed or copied. Profile function."""
        # This function runs at every call and return of Python, so the function must be fast.
        if event == "call":
            if frame.f_code.co_name == "__init__":
                self._note_constructor(frame)
        elif event == "return" and frame.f_code is _COPIES and isinstance(value, nn.Module):
            self.built.append(weakref.ref(value))

    def _note_constructor(self, frame: FrameType) -> None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # Record only the first `__init__` of a module; constructors of base classes come later.
        if isinstance(module, nn.Module) and _MADE_BY not in vars(module):
            vars(module)[_MADE_BY] = _Call(type(module), *_arguments_of(frame))
            self.built.append(weakref.ref(module))

    def replace_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the meta parameter to register in the place of ``param``. Registration hook."""
        param = param if param.is_meta else _on_meta(param)
        self._note_registered(module, name, param)
        return param

    def _note_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Record the registration of a parameter, unless it was registered before (tied).

        The registration counts as a write, because the parameter gets a value. The registration
        does not count if ``module`` registers a new name in its constructor, and an initializer of
        a module under construction will set the parameter again.
        """
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
            calls = (vars(module)[_MADE_BY] for module in modules)
            self._writers[tensor.untyped_storage()] = next(calls, _NO_CALL)

    def mark_modules(self) -> None:
        """Store in each module which constructor calls wrote to its parameters."""
        found: set[nn.Module] = set()
        for reference in self.built:
            built = reference()
            if built is not None and "_modules" in vars(built):
                found.update(built.modules())
        for module in found:
            for name, parameter in direct_parameters(module):
                writer = self._writers.get(parameter.untyped_storage())
                if writer is not None:
                    vars(module).setdefault(_WRITTEN_BY, {})[name] = writer


def _arguments_of(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of the call in ``frame``, without ``self``."""
    names, rest, named, values = inspect.getargvalues(frame)
    count = frame.f_code.co_argcount
    positional = tuple(values[name] for name in names[1:count])
    keywords = {}
    for name in names[count:]:
        keywords[name] = values[name]
    return positional + (values[rest] if rest else ()), keywords | (values[named] if named else {})


def _constructing() -> list[nn.Module] | None:
    """Return the modules with a running constructor, innermost first.

    None inside of an initializer, because initializers run again when weights are initialized.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Models of transformers are initialized again by `_init_weights`.
        library = str(frame.f_globals.get("__name__")).startswith("transformers.")
        repeated = library or code.co_name in _NOT_ITS_OWN
        if code.co_argcount and (repeated or code.co_name == "__init__"):
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and repeated:
                return None
            # Skip a module whose constructor was already running when the context began.
            if isinstance(owner, nn.Module) and _MADE_BY in vars(owner):
                found.append(owner)
        frame = frame.f_back
    return found


def own_constructor(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return a function that builds ``model`` again with storage, if a constructor sets values.

    None if initializers set all values. Raises `ConfigError` if a value was set outside of the
    model's constructors, because it cannot be set again. See [Note: constructors that initialize].
    """
    # Adapters have an initializer, and the weights of their base model are loaded.
    if adapters.settings_of(model):
        return None
    construct = recorded_constructor(model)
    # If the call of the model's constructor was not recorded, it cannot be called again.
    made_by = set()
    for module in model.modules() if construct else ():
        made_by.add(vars(module).get(_MADE_BY))
    late, written = [], False
    for prefix, module in model.named_modules():
        for name, writer in vars(module).get(_WRITTEN_BY, {}).items():
            written = True
            if writer not in made_by:
                late.append(fqn_of(join_names(prefix, name)))
    if late:
        raise ConfigError(
            f"{first_five(late, ', ')}: set inside build_on_meta by none of the constructors of "
            f"{type(model).__name__}, and only these run again; set it in a constructor, pass "
            "init=function(module, name), or build the model with values and pass broadcast_from=0"
        )
    # A buffer on meta was computed from parameters, so it needs their values.
    written |= construct is not None and any(buffer.is_meta for buffer in model.buffers())
    return construct if written else None


def recorded_constructor(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return a function that builds ``model`` again with storage.

    None if the call of the constructor was not recorded, and for adapters. `WeightSource.fill` uses
    this function for models of a library with constructors that set parameters that no initializer
    sets.
    """
    calls: dict[Any, _Call] = {}
    if not adapters.settings_of(model):
        _collect_calls(model, calls)
    return functools.partial(_call_again, model, calls) if calls else None


def _collect_calls(module: nn.Module, calls: dict[Any, _Call]) -> None:
    call = vars(module).get(_MADE_BY)
    if call is not None and module not in calls:
        calls[module] = call
        for leaf in tree_leaves((call.arguments, call.keywords)):
            if isinstance(leaf, nn.Module):
                _collect_calls(leaf, calls)


def _call_again(model: nn.Module, calls: dict[Any, _Call]) -> nn.Module:
    made: dict[Any, nn.Module] = {}
    # Call in the original order, so that random values are drawn in the same order.
    for module, call in sorted(calls.items(), key=lambda each: each[1].number):
        given = (call.arguments, call.keywords)
        arguments, keywords = tree_map_only(nn.Module, lambda leaf: made.get(leaf, leaf), given)
        made[module] = call.kind(*arguments, **keywords)
    return made[model]


def seeds_of(models: Sequence[nn.Module], seed: int) -> list[int]:
    """Return a seed for each of ``models`` from one `build_on_meta`.

    The first model has ``seed``, each later model a seed derived from ``seed`` and its number. A
    copy has the seed of its original.
    """
    numbers: dict[object, int] = {}
    found = []
    for model in models:
        number = numbers.setdefault(vars(model).get(_MADE_BY, model), len(numbers))
        digest = hashlib.sha256(f"{seed}/model {number}".encode()).digest()
        found.append(int.from_bytes(digest[:8], "big") >> 1 if number else seed)
    return found


def outline(model: nn.Module) -> list[str]:
    """Describe the classes, names, shapes and ties of ``model``, one per line.

    `build_for_real` compares these lines with the original model's.
    """
    lines = []
    for name, each in model.named_modules():
        lines.append(f"{name or 'root'}: {type(each).__name__}")
    for name, each in all_tensors(model).items():
        lines.append(f"{name} {tuple(each.shape)}")
    return lines + [f"{name} tied to {first}" for name, first in ties_of(model).items()]


def build_for_real(construct: Callable[[], nn.Module], seed: int, expected: list[str]) -> nn.Module:
    """Call ``construct`` on CPU under ``seed`` and return its model.

    The random generators of this process are restored afterwards. Raises `ConfigError` if the
    `outline` of the model is not ``expected``, and for parameters that nothing has set.
    """
    python, numbers = random.getstate(), numpy.random.get_state()
    mode = torch.get_deterministic_debug_mode()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            # In this mode `torch.empty` fills tensors with NaN, which shows unset parameters.
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
            f"built with values, the model has {differing[0]}; on meta it has {differing[1]}: its "
            "structure must not depend on values, or change after the constructor; or set "
            "model.init (init=)"
        )
    unset = [name for name, each in model.named_parameters() if each.is_meta or is_unset(each)]
    if unset:
        raise no_initializer(unset)
    return model
