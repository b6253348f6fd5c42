"""Adapters of the ``peft`` library (LoRA) on a model: `add_adapter`.

An adapted model is the library's ``PeftModel`` around the base model. The base is frozen, and its
layers are renamed. The functions here use these names. Only functions that create an adapter or its
configuration import the library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

# Arguments of peft.LoraConfig that do not depend on the values of the base and change only the
# named layers. The other arguments would need unsharded weights, or tensors that are not saved.
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
    "lora_bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "task_type",
)
# Entries that the library writes in addition, without effect on the weights.
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
    unknown = [str(name) for name in arguments if name not in ARGUMENTS]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: an adapter is LoRA with {', '.join(ARGUMENTS)}; other "
            "features of peft (DoRA, other initial values, trained biases) are not supported"
        )
    initial = arguments.get("init_lora_weights", True)
    # Not with `in`: 1 equals True.
    if initial is not True and initial != "gaussian":
        raise ValueError(
            f"init_lora_weights={initial} must be true or gaussian: others are computed from the "
            "base's unsharded weights, which no rank has"
        )
    rank = arguments.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"r={rank} must be a whole number of at least 1")
    try:
        return library().LoraConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"peft.LoraConfig: {error}") from None


def add_adapter(model: nn.Module, arguments: Mapping[str, Any], path: str) -> nn.Module:
    """Freeze ``model`` and return it with a LoRA adapter called ``default``.

    Parameters of the adapter are on meta where the parameters of ``model`` are.

    Args:
        model: the base model.
        arguments: arguments of peft.LoraConfig.
        path: folder of the base, for the adapter's configuration.

    Raises:
        ValueError: see `lora_settings`, and for modules that ``model`` does not have.
        ImportError: the library is missing.
    """
    settings = lora_settings(arguments)
    # With a task the library would choose a class with other argument names in its forward.
    task, settings.task_type = settings.task_type, None
    adapted: Any = library().get_peft_model(model, settings)
    made = adapted.peft_config["default"]
    made.task_type = task
    made.base_model_name_or_path = os.path.abspath(path)
    # The library may have added settings, such as base parameters to adapt.
    checked_settings(plain_settings(made))
    return adapted


def base_of(model: Any) -> tuple[nn.Module, str]:
    """Return the base model, and the prefix of its names in ``model``.

    For a model without adapters, ``model`` and "".
    """
    # Sharding makes a subclass of the model's class.
    if not any(kind.__module__.startswith("peft.peft_model") for kind in type(model).__mro__):
        return model, ""
    base = model.base_model.model
    name = next(name for name, module in model.named_modules() if module is base)
    return base, f"{name}."


def base_name(name: str, prefix: str) -> str | None:
    """Return the name of a parameter in the base without adapters; None for adapter parameters.

    ``prefix``: from `base_of`.
    """
    if not prefix:
        return name
    kept: list[str] = []
    parts = iter(name.removeprefix(prefix).split("."))
    for part in parts:
        if part.startswith("lora_"):
            return None
        # Layers with an adapter, and layers that are trained as a copy, are one level deeper.
        if part in ("base_layer", "original_module"):
            continue
        if part == "modules_to_save":
            next(parts)  # the adapter's name
            continue
        kept.append(part)
    return ".".join(kept)


def saved_name(name: str, adapter: str) -> str | None:
    """Return the name of a parameter in peft's file of ``adapter``; None if peft omits it."""
    parts = name.split(".")
    for at, (part, following) in enumerate(pairwise(parts)):
        # A layer that is trained as a copy is saved under the layer's own name.
        is_copy = part == "modules_to_save"
        if following == adapter and (is_copy or part.startswith("lora_")):
            return ".".join(parts[: at + (not is_copy)] + parts[at + 2 :])
    return None


def settings_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Map each adapter to its configuration as plain values; empty for a model without adapters."""
    return {name: plain_settings(settings) for name, settings in _adapters_in(model).items()}


def _adapters_in(model: nn.Module) -> dict[str, Any]:
    for module in model.modules():
        # `vars`: the library's models forward other attributes to their base.
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

    Raises ValueError for another method, and for an argument outside of `ARGUMENTS` with another
    value than its default.
    """
    if plain.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={plain.get('peft_type')}: only LORA is converted")
    defaults = plain_settings(library().LoraConfig())
    for key in plain.keys() - {*ARGUMENTS, *_DESCRIPTIVE}:
        # An empty list and None both mean that a feature is not used.
        if (plain[key] or None) != (defaults.get(key) or None):
            raise ValueError(f"{key}={plain[key]}: adapters of this kind are not converted")
    return lora_settings({key: plain[key] for key in ARGUMENTS if key in plain})


def reset_adapter(layer: Any, model: nn.Module) -> None:
    """Initialize the adapters of a layer of ``model``, if any, by peft's own rule.

    One factor is random, the other is zero. Raises ValueError for adapters with initial values that
    are computed from the base's weights.
    """
    if not hasattr(layer, "reset_lora_parameters"):
        return
    settings = _adapters_in(model)
    for adapter in layer.r:
        initial = settings[adapter].init_lora_weights
        if initial not in (True, "gaussian") or settings[adapter].use_dora:
            raise ValueError(
                f"adapter {adapter}: init_lora_weights={initial}, "
                f"use_dora={settings[adapter].use_dora} are computed from the base's weights, and "
                "the model is on meta: build it with real weights, or use init_lora_weights=True"
            )
        layer.reset_lora_parameters(adapter, initial)


def initialized_modules(model: nn.Module, given: set[str]) -> Iterator[nn.Module]:
    """Yield modules of ``model`` with all parameters in ``given``, by name, and no meta buffer."""
    for name, module in model.named_modules():
        names = dict(module.named_parameters(prefix=name)).keys()
        on_meta = any(buffer.is_meta for buffer in module.buffers())
        if names and names <= given and not on_meta:
            yield module
