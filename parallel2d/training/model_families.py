"""Builds the model of the ``model`` config group, and collects the facts about this model that
training needs: `build_model`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel2d.base.config import CustomModel, HuggingFaceModel, LlamaModel, TrainConfig
from parallel2d.base.config.options import call_reference, load_reference
from parallel2d.base.errors import ConfigError
from parallel2d.models import adapters, huggingface, llama
from parallel2d.parallel.chunked_head import find_head
from parallel2d.parallel.model_structure import fqn_of
from parallel2d.parallel.weights.construction import build_on_meta
from parallel2d.parallel.weights.initial_values import Initializer
from parallel2d.parallel.weights.pretrained import has_weights, load_pretrained
from parallel2d.parallel.weights.unsharded_tensors import copy_part

TensorPlan = Callable[[Any, int], Mapping[str, object]]


@dataclass(frozen=True)
class ModelParts:
    """A model with its parameters on meta, and the facts that training needs about it."""

    module: nn.Module
    init: Initializer | None
    # (model, size of the tensor axis) -> {module pattern: style or name of a style}; None: no plan
    tensor_plan: TensorPlan | None
    vocab_size: int | None
    # Loads weights from a folder into the sharded model, and returns the names of these parameters
    weights: Callable[[nn.Module], Collection[str]] | None = None
    # seq_len -> number of positions at the start of a sequence without a model output, so that
    # their targets must be ignored
    context: Callable[[int], int] = lambda _seq_len: 0
    # The library's name of the input, if it is not only token ids
    reads: str | None = None
    # Builds the module with the initial values of its constructor; None: `init` or the default
    # initialization draws the values
    construct: Callable[[], nn.Module] | None = None


def words_of(config: Any) -> str:
    """Return the ``key=value`` setting that selects the model, for messages."""
    if isinstance(config, CustomModel):
        return f"model.target={config.target}"
    if not isinstance(config, HuggingFaceModel):
        return f"model.family={config.family}"
    if config.path is not None:
        return f"model.path={config.path}"
    return f"model.architecture={config.architecture}"


def build_model(config: Any) -> ModelParts:
    """Build the configured model with its parameters on meta. Raises `ConfigError` if it cannot be
    imported or built."""
    if isinstance(config, LlamaModel):
        arguments = dataclasses.asdict(config)
        del arguments["family"]
        with build_on_meta():
            module = llama.Llama(**arguments)
        return ModelParts(module, module.init_weights, llama.tensor_plan, config.vocab_size)
    if isinstance(config, HuggingFaceModel):
        return _build_hugging_face(config)
    assert isinstance(config, CustomModel)
    return _build_custom(config)


def _build_custom(config: CustomModel) -> ModelParts:
    construct = functools.partial(_call_factory, config)
    with build_on_meta():
        built = construct()
    init = load_reference("model.init", config.init) if config.init else None
    return ModelParts(
        built,
        init,
        _configured_plan(config.tensor_plan),
        vocab_size=None,
        construct=construct if init is None else None,
    )


def _call_factory(config: CustomModel) -> nn.Module:
    built = call_reference("model.target", config.target, **config.arguments)
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"model.target={config.target} returned {type(built).__name__}, not an nn.Module"
        )
    return built


@contextlib.contextmanager
def _built_by_library(what: str) -> Iterator[None]:
    """Build modules on meta inside the context, and convert errors of the library to
    `ConfigError`."""
    try:
        with build_on_meta():
            yield
    except ImportError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        # ValueErrors of `huggingface` and `adapters` already have messages for users.
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{error}") from error


def _build_hugging_face(config: HuggingFaceModel) -> ModelParts:
    what = words_of(config)
    with _built_by_library(what):
        module = huggingface.build(config.path, config.architecture, config.arguments, config.head)
    # The library's name of a model's first input: input_ids, pixel_values, input_features, ...
    reads = getattr(module, "main_input_name", "input_ids")
    is_pair = getattr(module.config, "is_encoder_decoder", False)
    plan = _configured_plan(config.tensor_plan)
    if plan is None and huggingface.has_tensor_plan(module):
        plan = _library_plan
    weights = None
    if config.load_weights and config.path is not None and has_weights(config.path):
        weights = functools.partial(load_pretrained, path=config.path)
    vocab_size = getattr(module.config, "vocab_size", None)
    parts = ModelParts(module, None, plan, vocab_size, weights)
    if reads != "input_ids":
        also = " and token ids" * is_pair
        parts = dataclasses.replace(parts, vocab_size=None, reads=f"{reads}{also}")
    elif is_pair:
        parts = _reading_prefix_and_suffix(parts, what)
    if config.adapter is not None:
        # The adapter is added last, because the facts above are about the base model.
        parts = _with_adapter(parts, config)
    return parts


def _with_adapter(parts: ModelParts, config: HuggingFaceModel) -> ModelParts:
    """Freeze the model, and add a trainable adapter. The result has no tensor-parallel plan."""
    what = f"model.adapter={config.adapter}"
    assert config.path is not None
    assert config.adapter is not None
    if parts.weights is None:
        raise ConfigError(f"{what}: model.path={config.path} holds no weights to adapt")
    with _built_by_library(what):
        module = adapters.add_adapter(parts.module, config.adapter, config.path)
    weights = functools.partial(_with_magnitudes, parts.weights)
    return dataclasses.replace(parts, module=module, tensor_plan=None, weights=weights)


def _unsharded(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _with_magnitudes(
    weights: Callable[[nn.Module], Collection[str]], model: nn.Module
) -> Collection[str]:
    """Load the base model by ``weights``, then set the magnitudes of DoRA from the base model.
    Collective."""
    filled = set(weights(model))
    for name, magnitude, value in adapters.initial_magnitudes(model, _unsharded):
        copy_part(magnitude, value)
        filled.add(fqn_of(name))
    return filled


def _reading_prefix_and_suffix(parts: ModelParts, what: str) -> ModelParts:
    """Adapt an encoder-decoder to single sequences of tokens: the encoder reads the first half of a
    sequence, and the loss covers the second half."""
    try:
        huggingface.read_prefix_and_suffix(parts.module)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None
    return dataclasses.replace(parts, context=huggingface.context_of)


def _library_plan(model: Any, _tensor: int) -> Mapping[str, object]:
    """Return the library's tensor-parallel plan for the model. Raises ValueError if the plan has a
    style without an equivalent here."""
    return huggingface.tensor_words(model)


def _configured_plan(plan: Any) -> TensorPlan | None:
    """Return the plan of ``model.tensor_plan``: the given styles, or the function that is named
    there."""
    if not plan:
        return None
    if isinstance(plan, str):
        function = load_reference("model.tensor_plan", plan)
        return lambda model, _tensor: function(model)
    words = dict(plan)
    return lambda _model, _tensor: words


def plan_tensor_axis(
    config: TrainConfig, parts: ModelParts, tensor: int
) -> Mapping[str, object] | None:
    """Return the tensor-parallel plan for an axis of ``tensor`` ranks; None for one rank. Raises
    `ConfigError` without a plan, and if the plan cannot split the model."""
    if tensor == 1:
        return None
    seq_len = config.train.seq_len
    if isinstance(config.model, LlamaModel) and seq_len % tensor:
        raise ConfigError(
            f"train.seq_len={seq_len} must be a multiple of mesh.tensor={tensor}: norms run on "
            "slices of the sequence"
        )
    plan: Mapping[str, object] | None = None
    try:
        if parts.tensor_plan is not None:
            plan = parts.tensor_plan(parts.module, tensor)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not plan:
        raise ConfigError(
            f"mesh.tensor={tensor}: {type(parts.module).__name__} has no tensor-parallel plan; "
            "give one with model.tensor_plan={pattern: word} or package.module:function, or set "
            "mesh.tensor=1"
        )
    return plan


def name_of_head(config: TrainConfig, parts: ModelParts) -> str | None:
    """Return the name of the Linear that computes the logits in chunks; None without
    ``train.loss_chunk``.

    Raises `ConfigError` for a model that does not support a loss in chunks.
    """
    chunk = config.train.loss_chunk
    if chunk is None:
        return None
    if parts.context(config.train.seq_len):
        raise ConfigError(
            f"train.loss_chunk={chunk}: the loss of {type(parts.module).__name__} ignores the "
            "first targets of each sequence, which a loss in chunks does not support; omit "
            "train.loss_chunk"
        )
    return find_head(parts.module)
