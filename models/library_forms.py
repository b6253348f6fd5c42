"""What the ``transformers`` library saves of a model, by names and shapes alone: `saved_groups`.

Between a model and its files the library renames parameters, splits those that it keeps together
(experts) and omits what is tied. Its own rules are used, one group of parameters at a time, so that
a model need not be in memory as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel2d.models import huggingface

_MOST_LABELS = 10_000_000
_BACKBONES = ("backbone", "use_timm_backbone", "use_pretrained_backbone")


@dataclass(frozen=True)
class SavedGroup:
    """Parameters that the library converts together.

    ``parameters``: their names in the model; ``saved``: what is made of them, tensors on meta by
    the names that they have in a file.
    """

    parameters: list[str]
    saved: dict[str, Tensor]


def describe_model(
    path: str | None, architecture: str | None, arguments: Mapping[str, Any], head: str
) -> Any:
    """The model that `huggingface.build` builds of these, with parameters and buffers on meta and
    the configuration of a saved model.

    The arguments may be those of somebody else. Raises ValueError for what
    `huggingface.read_config` refuses, and for settings that make the library fetch code or weights
    from elsewhere; ImportError without the library.
    """
    _refuse_settings(arguments)
    config = huggingface.saved_config(path, architecture, arguments)
    # The folder may have such settings too.
    _refuse_settings(config.to_dict())
    kind = huggingface.model_class(config, head)
    # Which kernel computes attention is no part of a saved model; this one is always there.
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return kind(config)


def _refuse_settings(settings: Any) -> None:
    """Raises ValueError for settings, also nested ones, that stand for more than a structure."""
    if not isinstance(settings, Mapping):
        return
    for name, value in settings.items():
        _refuse_setting(str(name), value)
        _refuse_settings(value)


def _refuse_setting(key: str, value: Any) -> None:
    if key.endswith("_implementation") and "/" in str(value):
        raise ValueError(f"{key}={value} names code that would be downloaded")
    # Another library builds these, and may read files that the settings name.
    of_timm = key == "model_type" and str(value).startswith("timm")
    if of_timm or (key in _BACKBONES and value):
        raise ValueError(f"{key}={value}: a model with parts of other libraries is not converted")
    if key == "quantization_config" and value is not None:
        raise ValueError("quantization_config: quantized models are not converted")
    if key == "num_labels" and isinstance(value, int) and value > _MOST_LABELS:
        raise ValueError(f"num_labels={value} is more than {_MOST_LABELS:,}")


def saved_names(model: Any) -> list[str]:
    """The names in ``model``'s state dict that the library saves: what is tied is saved once."""
    omitted = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    omitted |= set(tied)
    return [name for name in model.state_dict() if name not in omitted]


def saved_groups(model: Any, parameters: Mapping[str, Tensor]) -> list[SavedGroup]:
    """What the library makes of ``parameters``, by name in ``model``, when it saves them. The
    tensors may be on meta: only their shapes and dtypes count."""
    from transformers.core_model_loading import apply_converters, dot_natural_key

    converters = _reversed_converters(model)
    by_target: dict[str, list[str]] = {}
    for name in sorted(parameters, key=dot_natural_key):
        # Parameters with the same target go into one conversion.
        target, pattern = apply_converters(name, converters)
        key = name
        if pattern is not None:
            key = target
        by_target.setdefault(key, []).append(name)
    groups = []
    for names in by_target.values():
        saved = saved_form(model, {name: parameters[name] for name in names})
        groups.append(SavedGroup(names, saved))
    return groups


def _reversed_converters(model: Any) -> list[Any]:
    """The library's rules that change more than names, from model to file."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    back = [rule.reverse_transform() for rule in reversed(rules)]
    return [rule for rule in back if isinstance(rule, WeightConverter)]


def saved_form(model: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, by name in a file, that the library saves for the parameters of one group."""
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(parameters))
    return saved


def saved_configurations(model: Any, dtype: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What ``config.json`` and ``generation_config.json`` hold of ``model`` with weights in
    ``dtype`` (float32, bfloat16, ...); None for a model that generates nothing."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    settings = config.to_diff_dict()
    # These are about the files of the folder that the configuration came from.
    for key in ("auto_map", "transformers_weights", "_name_or_path"):
        settings.pop(key, None)
    generation = None
    if model.can_generate():
        generation = model.generation_config.to_diff_dict()
    return settings, generation
