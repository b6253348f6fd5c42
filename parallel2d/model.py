"""From the ``model`` config group to what training needs of a model: the module on meta, its initializer, its tensor-parallel plan
and its loss."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel2d.config import ConfigError, CustomModel, LlamaModel
from parallel2d.loss import cross_entropy_sum
from parallel2d.models import llama
from parallel2d.parallelize import build_on_meta
from parallel2d.parallelize.initialization import Initializer

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class ModelParts:
    """``loss(output, targets)`` is summed over the valid targets; ``tensor_plan(model, tensor)`` gives module pattern -> style."""

    module: nn.Module
    init: Initializer | None
    tensor_plan: Callable[[Any, int], Mapping[str, object]] | None
    loss: Loss
    vocab_size: int | None


def build_model(config: Any) -> ModelParts:
    """Builds the configured model with its parameters on meta. Raises `ConfigError` for what cannot be imported or built."""
    if isinstance(config, LlamaModel):
        arguments = dataclasses.asdict(config)
        del arguments["family"]
        with build_on_meta():
            module = llama.Llama(**arguments)
        return ModelParts(module, module.init_weights, llama.tensor_plan, cross_entropy_sum, config.vocab_size)
    assert isinstance(config, CustomModel)
    factory = load_reference("model.target", config.target)
    try:
        with build_on_meta():
            module = factory(**config.arguments)
    except Exception as error:
        what = f"model.target={config.target} with arguments {config.arguments}"
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.target={config.target} returned {type(module).__name__}, not an nn.Module")
    plan = load_reference("model.tensor_plan", config.tensor_plan) if config.tensor_plan else None
    return ModelParts(
        module,
        load_reference("model.init", config.init) if config.init else None,
        (lambda model, _tensor: plan(model)) if plan else None,
        load_reference("model.loss", config.loss) if config.loss else cross_entropy_sum,
        None,
    )


def load_reference(key: str, reference: str) -> Any:
    """The object that ``package.module:name`` names. Raises `ConfigError` with the reason when it cannot be imported."""
    module_name, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ConfigError(f"{key}={reference} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"{key}={reference}: module {module_name} has no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}={reference} is not callable")
    return found
