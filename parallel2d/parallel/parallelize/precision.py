"""The dtypes of a model in storage, computation, accumulation and communication."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves, tree_map

from parallel2d.base.config import PrecisionConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import (
    candidate_classes,
    direct_parameters,
    fqn_of,
    own_parameters,
    owning_modules,
)

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of one model in mixed-precision training."""

    storage: torch.dtype  # of sharded parameters, their gradients and the optimizer state
    param: torch.dtype  # of unsharded parameters and activations
    reduce: torch.dtype  # of gradients in communication
    output: torch.dtype | None  # of the model's outputs; None: the dtype that it computes
    buffers: torch.dtype | None  # None: the dtype that the constructor chose
    cast_inputs: bool  # True to cast floating-point inputs to `param`
    keep_reduced: bool  # True to keep gradients in `reduce` instead of casting them to `storage`
    fp32_modules: frozenset[int]  # ids of modules that compute in fp32 despite a lower `param`

    @classmethod
    def of(cls, config: PrecisionConfig, model: nn.Module) -> Precision:
        """Return the dtypes that ``config`` names.

        Raises `ConfigError` for a class in ``config.fp32_modules`` that ``model`` does not contain.
        """
        buffers = config.buffers
        # By default buffers keep the dtype of the constructor. With fp64 storage they become fp64,
        # because a narrower dtype would lose precision.
        if buffers is None and config.storage == "fp64":
            buffers = "fp64"
        return cls(
            storage=DTYPES[config.storage],
            param=DTYPES[config.param],
            reduce=DTYPES[config.reduce],
            output=DTYPES.get(config.output or ""),
            buffers=DTYPES.get(buffers or ""),
            cast_inputs=config.cast_forward_inputs,
            keep_reduced=config.keep_low_precision_gradients,
            fp32_modules=frozenset(_fp32_modules(model, config.fp32_modules)),
        )

    @property
    def sums(self) -> torch.dtype:
        """The accumulation dtype of gradients: fp32 at least."""
        return torch.promote_types(self.storage, torch.float32)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy for `fully_shard`; None for a dtype that equals FSDP's default."""
        param = None if self.param == self.storage else self.param
        reduce = None if self.reduce == self.param else self.reduce
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=self.cast_inputs
        )


def input_dtype(config: PrecisionConfig) -> torch.dtype | None:
    """Return the dtype to which the model casts floating-point inputs; None: no cast."""
    if not config.cast_forward_inputs:
        return None
    return DTYPES[config.param]


def cast_inputs(model: nn.Module, precision: Precision) -> None:
    """Make ``model`` cast its floating-point inputs if ``param`` equals ``storage``.

    In this case `fully_shard` gets no ``param_dtype`` and does not cast inputs. The inputs of
    blocks are not cast, as in training in one process.
    """
    if not precision.cast_inputs or precision.param != precision.storage:
        return

    def is_other(leaf: object) -> bool:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return False
        return leaf.dtype != precision.param

    def cast(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        # A script may have changed the dtype of the model, for example by `nn.Module.float`.
        if all(parameter.dtype != precision.param for parameter in model.parameters()):
            return None
        # Return early, because `tree_map` copies containers.
        if not any(map(is_other, tree_leaves((args, kwargs)))):
            return None
        return tree_map(
            lambda leaf: leaf.to(precision.param) if is_other(leaf) else leaf, (args, kwargs)
        )

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _fp32_modules(model: nn.Module, classes: Collection[str]) -> set[int]:
    """Return the ids of the modules with direct parameters that are of these classes or inside of
    a module of these classes."""
    missing = set(classes)
    found: set[int] = set()
    for module in model.modules():
        name = type(module).__name__
        # A module without parameters, such as an activation, has no compute dtype.
        if name in classes and next(module.parameters(), None) is not None:
            missing.discard(name)
            found.update(id(inner) for _, inner in owning_modules(module))
    if missing:
        raise ConfigError(
            f"precision.fp32_modules={list(classes)}: no module of class "
            f"{', '.join(sorted(missing))} with parameters in {type(model).__name__}; candidates: "
            f"{candidate_classes(model)}"
        )
    return found


def cast_storage(model: nn.Module, precision: Precision, ignored: Container[str] = ()) -> nn.Module:
    """Cast parameters and buffers to their storage dtypes, and make both contiguous.

    A complex parameter gets the complex dtype with real and imaginary parts of the storage dtype.
    The parameters of ``precision.fp32_modules`` are stored in fp32 or wider. Parameters with FQNs
    in ``ignored`` are stored in the compute dtype. Raises `ConfigError` for a complex parameter if
    a dtype of ``precision`` has fewer than 32 bits.
    """
    storage = storage_dtypes(model, precision, ignored)
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, dtype in storage.items():
        value = parameter.detach()
        # `to` and `contiguous` return the same tensor if nothing changes.
        stored = value.to(dtype).contiguous()
        if stored is not value:
            cast[parameter] = nn.Parameter(stored, parameter.requires_grad)
    for module in model.modules():
        for name, held in list(direct_parameters(module)):
            # A tied parameter is replaced by the same new parameter in all its modules.
            if held in cast:
                setattr(module, name, cast[held])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = buffer.to(buffer_dtype(buffer, precision))
    return model


def storage_dtypes(
    model: nn.Module, precision: Precision, ignored: Container[str] = ()
) -> dict[nn.Parameter, torch.dtype]:
    """Return the storage dtype of each floating-point or complex parameter; see `cast_storage`."""
    in_fp32: set[nn.Parameter] = set()
    for module in model.modules():
        if id(module) in precision.fp32_modules:
            in_fp32.update(own_parameters(module))
    storage: dict[nn.Parameter, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        dtype = precision.param if fqn_of(name) in ignored else precision.storage
        if parameter in in_fp32:
            dtype = torch.promote_types(dtype, torch.float32)
        if parameter.is_complex():
            for setting in ("storage", "param", "reduce"):
                narrow = getattr(precision, setting)
                if narrow.itemsize < 4:
                    word = {dtype: word for word, dtype in DTYPES.items()}[narrow]
                    raise ConfigError(
                        f"precision.{setting}={word}: {name} is complex, and no complex dtype is "
                        "that narrow; use precision=fp32"
                    )
            storage[parameter] = dtype.to_complex()
        elif parameter.is_floating_point():
            storage[parameter] = dtype
    return storage


def buffer_dtype(buffer: torch.Tensor, precision: Precision) -> torch.dtype:
    """Return the storage dtype of a buffer. Complex buffers are cast only to 32 bits or more."""
    dtype = precision.buffers
    if dtype is not None and buffer.is_floating_point():
        return dtype
    if dtype is not None and buffer.is_complex() and dtype.itemsize >= 4:
        return dtype.to_complex()
    return buffer.dtype
