"""Adds an adapter of the ``peft`` library (LoRA) to a model: `add_adapter`.

An adapted model is the library's ``PeftModel`` around the base model. The base model is frozen, and
its layers get other names. The functions in this module convert between the names. Only functions
that create an adapter or its configuration import the library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# Supported arguments of peft.LoraConfig. They change only the named layers, and the initial values
# of the adapter need only local computation: random numbers, zeros, weights of the base, or norms
# of their rows. Other arguments would need unsharded weights, or tensors that are not saved.
ARGUMENTS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "task_type",
)
# Further entries of a configuration file. They have no effect on the weights.
_DESCRIPTIVE = (
    "peft_type",
    "peft_version",
    "base_model_name_or_path",
    "auto_mapping",
    "inference_mode",
    "revision",
)


def library() -> Any:
    """Return the ``peft`` module. Raise ImportError with the extra that installs it."""
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            f'adapters need the peft library: pip install "parallel2d[peft]" ({error})'
        ) from None
    return peft


def lora_settings(arguments: Mapping[str, Any]) -> Any:
    """Return the ``peft.LoraConfig`` of these arguments.

    Raises ValueError for arguments outside of `ARGUMENTS`, and for values that the library refuses.
    """
    unknown = []
    for name in arguments:
        if name not in ARGUMENTS:
            unknown.append(str(name))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: an adapter is LoRA with {', '.join(ARGUMENTS)}; other "
            "features of peft (other initial values, 4-bit bases) are not supported"
        )
    initial = arguments.get("init_lora_weights", True)
    # Not `in (True, "gaussian")`, which would also accept 1, because 1 equals True.
    if initial is not True and initial != "gaussian":
        raise ValueError(
            f"init_lora_weights={initial} must be true or gaussian: others are computed from the "
            "base's unsharded weights, which no rank has"
        )
    rank = arguments.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"r={rank} must be a whole number of at least 1")
    if arguments.get("bias", "none") not in ("none", "all", "lora_only"):
        raise ValueError(f"bias={arguments['bias']} must be none, all or lora_only")
    if type(arguments.get("use_dora", False)) is not bool:
        raise ValueError(f"use_dora={arguments['use_dora']} must be true or false")
    try:
        return library().LoraConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"peft.LoraConfig: {error}") from None


def add_adapter(model: nn.Module, arguments: Mapping[str, Any], path: str) -> nn.Module:
    """Freeze ``model`` and return it with a LoRA adapter called ``default``.

    If the parameters of a layer are on meta, the parameters of its adapter are on meta too.

    Args:
        model: the base model.
        arguments: arguments of peft.LoraConfig.
        path: folder of the base model, which the configuration of the adapter names.

    Raises:
        ValueError: see `lora_settings`, and for modules that ``model`` does not have.
        ImportError: the library is missing.
    """
    settings = lora_settings(arguments)
    # If a task is set, the library chooses a class whose forward has other argument names.
    task, settings.task_type = settings.task_type, None
    adapted: Any = library().get_peft_model(model, settings)
    made = adapted.peft_config["default"]
    made.task_type = task
    made.base_model_name_or_path = os.path.abspath(path)
    # The library may have added settings, such as base parameters to adapt.
    checked_settings(plain_settings(made))
    for name, _, layer in _magnitudes(adapted):
        base = layer.get_base_layer()
        if type(base).__name__ not in ("Linear", "Conv1D"):
            raise ValueError(f"use_dora: {name} is of {type(base).__name__}, and must be a Linear")
    return adapted


def trained_copy(module: Any) -> Any:
    """Return the trained copy of a module in ``modules_to_save``; for any other module, return
    ``module``."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or len(copies) != 1:
        return module
    return next(iter(copies.values()))


def _magnitudes(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each magnitude of DoRA, its parameter, and its layer."""
    for name, layer in model.named_modules():
        for adapter, part in getattr(layer, "lora_magnitude_vector", {}).items():
            yield f"{name}.lora_magnitude_vector.{adapter}.weight", part.weight, layer


def initial_magnitudes(
    model: nn.Module, unsharded: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each magnitude of DoRA as (name, parameter, initial value). The initial value has the
    norms of the rows of the base weight, because an untrained adapter adds zero to this weight.
    ``unsharded`` returns the unsharded tensor, and may be collective."""
    for name, magnitude, layer in _magnitudes(model):
        weight = unsharded(layer.get_base_layer().weight.detach())
        # A Conv1D of the library has a transposed weight.
        yield name, magnitude, torch.linalg.norm(weight, dim=0 if layer.fan_in_fan_out else 1)


def base_of(model: Any) -> tuple[nn.Module, str]:
    """Return the base model, and the prefix of its parameter names in ``model``.

    For a model without adapters, ``model`` and "".
    """
    # Sharding makes a subclass of the model's class.
    if not any(kind.__module__.startswith("peft.peft_model") for kind in type(model).__mro__):
        return model, ""
    base = model.base_model.model
    name = next(name for name, module in model.named_modules() if module is base)
    return base, f"{name}."


def base_name(name: str, prefix: str) -> str | None:
    """Return the name that a parameter has in the base model without adapters. None for parameters
    of an adapter.

    ``prefix``: from `base_of`.
    """
    if not prefix:
        return name
    kept: list[str] = []
    parts = iter(name.removeprefix(prefix).split("."))
    for part in parts:
        if part.startswith("lora_"):
            return None
        # If a layer has an adapter or is trained as a copy, the library puts the original layer one
        # level deeper.
        if part in ("base_layer", "original_module"):
            continue
        if part == "modules_to_save":
            next(parts)  # the adapter's name
            continue
        kept.append(part)
    return ".".join(kept)


def saved_name(name: str, adapter: str, bias: str = "none") -> str | None:
    """Return the name of a parameter in the file that peft writes for ``adapter``. None if peft
    does not write the parameter.

    ``bias``: the adapter's argument, which selects biases of the base that are trained.
    """
    parts = name.split(".")
    for at, (part, following) in enumerate(pairwise(parts)):
        # A layer that is trained as a copy is saved under the layer's own name.
        is_copy = part == "modules_to_save"
        if following == adapter and (is_copy or part.startswith("lora_")):
            kept = parts[at + 2 :] if part != "lora_magnitude_vector" else []
            return ".".join(parts[: at + (not is_copy)] + kept)
    end = {"all": ".bias", "lora_only": ".base_layer.bias"}.get(bias)
    return name if end is not None and name.endswith(end) else None


def settings_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return adapter name -> configuration as JSON values; empty for a model without adapters."""
    found: dict[str, dict[str, Any]] = {}
    for name, settings in _adapters_in(model).items():
        found[name] = plain_settings(settings)
    return found


def _adapters_in(model: nn.Module) -> dict[str, Any]:
    for module in model.modules():
        # `vars` and not `getattr`, because the library's models look up missing attributes in their
        # base model.
        settings = vars(module).get("peft_config")
        if isinstance(settings, dict):
            return settings
    return {}


def plain_settings(settings: Any) -> dict[str, Any]:
    """Return a peft configuration as JSON values; sets become sorted lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        return str(getattr(value, "value", value))  # the value of an enum member

    # `plain` handles the values that JSON does not support.
    return json.loads(json.dumps(settings.to_dict(), default=plain))


def checked_settings(plain: Mapping[str, Any]) -> Any:
    """Return the ``peft.LoraConfig`` of ``plain``, as read from a file; see `plain_settings`.

    Raises ValueError if the method is not LoRA, or if an argument outside of `ARGUMENTS` has a
    value other than its default.
    """
    if plain.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={plain.get('peft_type')}: only LORA is converted")
    defaults = plain_settings(library().LoraConfig())
    for key in plain.keys() - {*ARGUMENTS, *_DESCRIPTIVE}:
        # An empty list and None both mean that a feature is not used.
        if (plain[key] or None) != (defaults.get(key) or None):
            raise ValueError(f"{key}={plain[key]}: adapters of this kind are not converted")
    return lora_settings({key: plain[key] for key in ARGUMENTS if key in plain})


def reset_adapter(layer: Any, model: nn.Module, is_given: Callable[[str], bool]) -> None:
    """Initialize the adapters of ``layer``, a layer of ``model``, with peft's method. A layer
    without adapters is not changed.

    One of the two LoRA matrices is random, and the other is zero. Raises ValueError if an initial
    value is computed from the weights of the base model. The magnitude of DoRA is accepted if
    ``is_given(name)`` is true for its name in the layer.
    """
    if not hasattr(layer, "reset_lora_parameters"):
        return
    settings = _adapters_in(model)
    for adapter in layer.r:
        initial = settings[adapter].init_lora_weights
        has_magnitude = is_given(f"lora_magnitude_vector.{adapter}.weight")
        lacks_magnitude = settings[adapter].use_dora and not has_magnitude
        if initial not in (True, "gaussian") or lacks_magnitude:
            raise ValueError(
                f"adapter {adapter}: init_lora_weights={initial}, "
                f"use_dora={settings[adapter].use_dora} are computed from the base's weights, and "
                "the model is on meta: build it with real weights, or use init_lora_weights=True"
            )
        layer.reset_lora_parameters(adapter, initial)


def initialized_modules(model: nn.Module, given: set[str]) -> Iterator[nn.Module]:
    """Yield each module of ``model`` whose parameter names are all in ``given``, and that has no
    meta buffer."""
    for name, module in model.named_modules():
        names = dict(module.named_parameters(prefix=name)).keys()
        on_meta = any(buffer.is_meta for buffer in module.buffers())
        if names and names <= given and not on_meta:
            yield module
