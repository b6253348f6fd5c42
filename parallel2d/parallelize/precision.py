"""The dtypes of mixed precision for one model: what is stored, gathered, added and sent in which.

`Precision.of` turns the words of a `PrecisionConfig` into dtypes, once; every transform reads them
from there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallel2d.config import PrecisionConfig
from parallel2d.errors import ConfigError
from parallel2d.model_structure import (
    candidate_classes,
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
        # Buffers keep the dtype they were built with, but fp64 would be lost in narrower ones.
        buffers = config.buffers
        if buffers is None and config.storage == "fp64":
            buffers = "fp64"
        return cls(
            storage=DTYPES[config.storage],
            param=DTYPES[config.param],
            reduce=DTYPES[config.reduce],
            output=DTYPES[config.output] if config.output else None,
            buffers=DTYPES[buffers] if buffers else None,
            cast_inputs=config.cast_forward_inputs,
            keep_reduced=config.keep_low_precision_gradients,
            fp32_modules=frozenset(_modules_of(model, config.fp32_modules)),
        )

    @property
    def sums(self) -> torch.dtype:
        """In which gradients are added: fp32 at least."""
        return torch.promote_types(self.storage, torch.float32)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """For `fully_shard`; a dtype that equals the one it would have anyway is omitted."""
        return MixedPrecisionPolicy(
            param_dtype=self.param if self.param != self.storage else None,
            reduce_dtype=self.reduce if self.reduce != self.param else None,
            cast_forward_inputs=self.cast_inputs,
        )

    @property
    def fp32_policy(self) -> MixedPrecisionPolicy:
        """As `policy`, for a module that computes in fp32 and hands over what `param` says."""
        return MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=self.param)


def input_dtype(config: PrecisionConfig) -> torch.dtype | None:
    """In which floating-point inputs reach the model; None for as they are."""
    return DTYPES[config.param] if config.cast_forward_inputs else None


def _modules_of(model: nn.Module, classes: Collection[str]) -> set[int]:
    """Ids of the modules of these classes that own parameters, and of such modules inside them."""
    found = [
        module
        for module in model.modules()
        if type(module).__name__ in classes and next(module.parameters(), None) is not None
    ]
    missing = set(classes) - {type(module).__name__ for module in found}
    if missing:
        raise ConfigError(
            f"precision.fp32_modules={list(classes)}: no module of class "
            f"{', '.join(sorted(missing))} with parameters in {type(model).__name__}; candidates: "
            f"{candidate_classes(model)}"
        )
    return {id(inner) for outer in found for _, inner in owning_modules(outer)}


def cast_storage(model: nn.Module, precision: Precision) -> nn.Module:
    """Casts parameters to the storage dtype, complex ones to the complex dtype of its width, and
    buffers to theirs. Makes them contiguous.

    The parameters of ``precision.fp32_modules`` are stored in fp32 at least. Raises `ConfigError`
    for complex parameters in fewer than 32 bits, which no such dtype can hold.
    """
    wide = {
        id(parameter)
        for module in model.modules()
        if id(module) in precision.fp32_modules
        for parameter in own_parameters(module)
    }
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            _check_complex(name, precision)
        elif not parameter.is_floating_point():
            continue
        storage = precision.sums if id(parameter) in wide else precision.storage
        if parameter.is_complex():
            storage = storage.to_complex()
        value = parameter.detach()
        stored = value.to(storage).contiguous()
        if stored is not value:
            cast[parameter] = nn.Parameter(stored, parameter.requires_grad)
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held in cast:
                setattr(module, name, cast[held])
        if precision.buffers is not None:
            _cast_buffers(module, precision.buffers)
    return model


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Complex ones only to a dtype of 32 bits or more."""
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)
        elif buffer.is_complex() and dtype.itemsize >= 4:
            module._buffers[name] = buffer.to(dtype.to_complex())


def _check_complex(name: str, precision: Precision) -> None:
    """Raises `ConfigError` where a dtype has fewer than 32 bits for the complex parameter
    ``name``."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    for setting in ("storage", "param", "reduce"):
        dtype = getattr(precision, setting)
        if dtype.itemsize < 4:
            raise ConfigError(
                f"precision.{setting}={words[dtype]}: {name} is complex, and no complex dtype is "
                "that narrow; use precision=fp32"
            )
