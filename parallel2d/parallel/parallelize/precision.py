"""The dtypes in which a model is stored, gathered, added and sent."""

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
    fqn_of,
    held_parameters,
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
    """The dtypes of a model that is trained in mixed precision."""

    storage: torch.dtype  # of sharded parameters, their gradients and the optimizer state
    param: torch.dtype  # of gathered parameters and activations
    reduce: torch.dtype  # of gradients while they are sent
    output: torch.dtype | None  # of what the model returns; None: whatever it computes
    buffers: torch.dtype | None  # None: as built
    cast_inputs: bool  # floating-point inputs are cast to `param`
    keep_reduced: bool  # gradients stay in `reduce` instead of being cast to `storage`
    fp32_modules: frozenset[int]  # ids of modules that compute in fp32 beside a lower `param`

    @classmethod
    def of(cls, config: PrecisionConfig, model: nn.Module) -> Precision:
        """The dtypes that ``config`` names. Raises `ConfigError` for a class in
        ``config.fp32_modules`` that ``model`` does not have."""
        buffers = config.buffers
        # They keep the dtype they were built with, but fp64 would be lost in narrower ones.
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
        """The dtype in which gradients are added: fp32 at least."""
        return torch.promote_types(self.storage, torch.float32)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """For `fully_shard`; a dtype that equals the one it would have anyway is omitted."""
        param = None if self.param == self.storage else self.param
        reduce = None if self.reduce == self.param else self.reduce
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=self.cast_inputs
        )


def input_dtype(config: PrecisionConfig) -> torch.dtype | None:
    """The dtype in which floating-point inputs reach the model; None: as they are."""
    if not config.cast_forward_inputs:
        return None
    return DTYPES[config.param]


def cast_inputs(model: nn.Module, precision: Precision) -> None:
    """Let ``model`` cast its floating-point inputs where `fully_shard` does not, because ``param``
    equals ``storage``. Inputs of blocks stay as the model computes them, as in one process."""
    if not precision.cast_inputs or precision.param != precision.storage:
        return

    def is_other(leaf: object) -> bool:
        is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return is_floating and leaf.dtype != precision.param

    def cast(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        # A copy of containers only where it is needed
        if not any(map(is_other, tree_leaves((args, kwargs)))):
            return None
        return tree_map(
            lambda leaf: leaf.to(precision.param) if is_other(leaf) else leaf, (args, kwargs)
        )

    model.register_forward_pre_hook(cast, with_kwargs=True)


def _fp32_modules(model: nn.Module, classes: Collection[str]) -> set[int]:
    """Ids of the modules of these classes that own parameters, and of such modules inside them."""
    missing = set(classes)
    found: set[int] = set()
    for module in model.modules():
        name = type(module).__name__
        # One without parameters, such as an activation, has no dtype to compute in.
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
    """Casts parameters to the storage dtype, complex ones to the complex dtype of its width, and
    buffers to theirs. Makes them contiguous.

    The parameters of ``precision.fp32_modules`` are stored in fp32 at least; those with FQNs in
    ``ignored`` in the dtype that computes. Raises `ConfigError` for complex parameters in fewer
    than 32 bits, which no such dtype can hold.
    """
    storage = storage_dtypes(model, precision, ignored)
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, dtype in storage.items():
        value = parameter.detach()
        # `to` and `contiguous` return the tensor itself where they have nothing to do.
        stored = value.to(dtype).contiguous()
        if stored is not value:
            cast[parameter] = nn.Parameter(stored, parameter.requires_grad)
    for module in model.modules():
        for name, held in list(held_parameters(module)):
            # A tied parameter is replaced by the same new one in each of its modules.
            if held in cast:
                setattr(module, name, cast[held])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[name] = buffer.to(buffer_dtype(buffer, precision))
    return model


def storage_dtypes(
    model: nn.Module, precision: Precision, ignored: Container[str] = ()
) -> dict[nn.Parameter, torch.dtype]:
    """The dtype in which `cast_storage` stores each floating-point or complex parameter."""
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
    """Returns the dtype in which a buffer is stored; a complex one changes only to one of 32 bits
    or more."""
    dtype = precision.buffers
    if dtype is not None and buffer.is_floating_point():
        return dtype
    if dtype is not None and buffer.is_complex() and dtype.itemsize >= 4:
        return dtype.to_complex()
    return buffer.dtype
