"""From the ``model`` config group to what training needs of a model: the module on meta, its
initializer, its tensor-parallel plan, its loss, what it reads, and where its weights lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel2d.config import CustomModel, HuggingFaceModel, LlamaModel
from parallel2d.config.reference import load_reference
from parallel2d.errors import ConfigError
from parallel2d.loss import cross_entropy_sum
from parallel2d.models import huggingface, llama
from parallel2d.weights.initial_values import Initializer, build_on_meta
from parallel2d.weights.pretrained import has_weights, load_pretrained

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class ImageInput:
    """What a model says of the images it reads; None: it does not say."""

    size: int | None = None  # pixels of a side
    channels: int | None = None
    classes: int | None = None  # that it tells apart


@dataclass(frozen=True)
class ModelParts:
    """``loss(output, targets)`` is summed over the valid targets; ``tensor_plan(model, tensor)``
    gives module pattern -> style or word; ``weights(model)`` fills the sharded model from a folder
    and returns the names it had; ``context(seq_len)`` is how many positions at the start of a
    sequence the model only reads: their targets must be ignored. ``reads``: ``tokens``, ``images``,
    or None for a model of somebody's own, which may read either."""

    module: nn.Module
    init: Initializer | None
    tensor_plan: Callable[[Any, int], Mapping[str, object]] | None
    loss: Loss
    vocab_size: int | None
    weights: Callable[[nn.Module], Container[str]] | None = None
    context: Callable[[int], int] = lambda _seq_len: 0
    reads: str | None = "tokens"
    images: ImageInput = ImageInput()


def words_of(config: Any) -> str:
    """The key and the value that say which model this is."""
    if isinstance(config, HuggingFaceModel):
        return (
            f"model.path={config.path}"
            if config.path is not None
            else f"model.architecture={config.architecture}"
        )
    return (
        f"model.target={config.target}"
        if isinstance(config, CustomModel)
        else f"model.family={config.family}"
    )


def build_model(config: Any) -> ModelParts:
    """Builds the configured model with its parameters on meta. Raises `ConfigError` for what cannot
    be imported or built."""
    if isinstance(config, LlamaModel):
        arguments = dataclasses.asdict(config)
        del arguments["family"]
        with build_on_meta():
            module = llama.Llama(**arguments)
        return ModelParts(
            module, module.init_weights, llama.tensor_plan, cross_entropy_sum, config.vocab_size
        )
    loss = load_reference("model.loss", config.loss) if config.loss else cross_entropy_sum
    if isinstance(config, HuggingFaceModel):
        return _build_hugging_face(config, loss)
    assert isinstance(config, CustomModel)
    factory = load_reference("model.target", config.target)
    try:
        with build_on_meta():
            built = factory(**config.arguments)
    except Exception as error:
        what = f"model.target={config.target} with arguments {config.arguments}"
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"model.target={config.target} returned {type(built).__name__}, not an nn.Module"
        )
    init = load_reference("model.init", config.init) if config.init else None
    size, channels = huggingface.image_input(getattr(built, "config", None))
    return ModelParts(
        built,
        init,
        _given_plan(config.tensor_plan),
        loss,
        None,
        reads=None,
        images=ImageInput(size, channels),
    )


def _build_hugging_face(config: HuggingFaceModel, loss: Loss) -> ModelParts:
    what = words_of(config)
    try:
        with build_on_meta():
            module = huggingface.build(
                config.path, config.architecture, config.arguments, config.head
            )
    except ImportError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{error}") from error
    reads = getattr(module, "main_input_name", "input_ids")
    paired = getattr(module.config, "is_encoder_decoder", False)
    if reads != "input_ids" and (reads != "pixel_values" or paired):
        raise ConfigError(
            f"{what}: {type(module).__name__} reads {reads}{' and token ids' if paired else ''}, "
            "and the train command feeds token ids "
            "or images alone; train it with parallel2d.parallelize in a loop of your own: "
            "docs/models.md, 'Models that read something "
            "else', has the lines"
        )
    plan = _given_plan(config.tensor_plan) or (
        _own_plan if huggingface.has_tensor_plan(module) else None
    )
    weights = None
    if config.load_weights and config.path is not None and has_weights(config.path):
        weights = functools.partial(load_pretrained, path=config.path)
    if reads == "pixel_values":
        if not config.loss and not huggingface.classifies_images(module):
            raise ConfigError(
                f"{what}: {type(module).__name__} gives no logits of classes; set "
                "model.head=image_classification, or model.loss to a "
                "function of what it gives"
            )
        size, channels = huggingface.image_input(module.config)
        images = ImageInput(size, channels, module.config.num_labels)
        return ModelParts(module, None, plan, loss, None, weights, reads="images", images=images)
    vocab_size = getattr(module.config, "vocab_size", None)
    if not paired:
        return ModelParts(module, None, plan, loss, vocab_size, weights)
    try:
        huggingface.read_prefix_and_suffix(module)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None

    def loss_of_suffix(output: Any, targets: Tensor) -> Tensor:
        return loss(output, targets[..., huggingface.context_of(targets.shape[-1]) :])

    return ModelParts(
        module, None, plan, loss_of_suffix, vocab_size, weights, huggingface.context_of
    )


def _own_plan(model: Any, _tensor: int) -> Mapping[str, object]:
    """The plan that the library ships with the model. Raises ValueError for words in it that are
    not translated."""
    return huggingface.tensor_words(model)


def _given_plan(plan: Any) -> Callable[[Any, int], Mapping[str, object]] | None:
    """The plan of the configuration: words as they stand, or what the named function makes of the
    model."""
    if not plan:
        return None
    if isinstance(plan, str):
        function = load_reference("model.tensor_plan", plan)
        return lambda model, _tensor: function(model)
    words = dict(plan)
    return lambda _model, _tensor: words
