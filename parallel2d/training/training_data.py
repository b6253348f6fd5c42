"""The configured data set, opened and matched with the model: `open_training_data`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from parallel2d.base.config import DataConfig, TrainConfig
from parallel2d.base.config.checks import check_steps
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.batch import labelled_images
from parallel2d.training.data.opening import OpenData, open_data
from parallel2d.training.metrics.keys import VALIDATION_LOSS
from parallel2d.training.model_families import ModelParts, words_of

log = logging.getLogger(__name__)


def open_training_data(config: TrainConfig, parts: ModelParts) -> OpenData:
    """The configured data, with targets where the model has outputs; prepared where it has not
    been. Raises `ConfigError` for data that the model does not read, and for fewer images than a
    global batch takes."""
    name = config.data.name
    given, wanted = (
        "tokens",
        "set data=images data.path=FOLDER, with a subfolder of images per class",
    )
    if name == "images":
        given = "images"
        wanted = (
            "set data=stdlib, text, tokens or hf, or a model of images, such as "
            "model.architecture=vit"
        )
    if parts.reads not in (None, given):
        gives = "images" if name == "images" else "token ids"
        raise ConfigError(
            f"{words_of(config.model)}: {type(parts.module).__name__} reads {parts.reads}, and "
            f"data={name} gives {gives}: {wanted}"
        )
    read, seed, seq_len = config.training_data(), config.train.seed, config.train.seq_len
    if read.name != "images":
        return open_data(read, seq_len=seq_len, seed=seed, context=parts.context(seq_len))
    data = open_data(fit_images(read, parts), seed=seed)
    batch = config.train.global_batch_size
    too_few = data.train.end is None and len(data.train) < batch
    if too_few or data.train.ends_before(0, batch):
        raise ConfigError(
            f"train.global_batch_size={batch} is more than the {len(data.train)} training images "
            f"of {config.data.path}"
        )
    return data


def fit_images(data: DataConfig, parts: ModelParts) -> DataConfig:
    """``data`` with the image size and channels that the model reads, where they are not given.
    Raises `ConfigError` when neither names a size, or the model does not take what is given."""
    kind = type(parts.module).__name__
    size = data.image_size or parts.images.size
    channels = data.channels or parts.images.channels or 3
    if size is None:
        raise ConfigError(
            f"data.image_size is required: {kind} names no image_size in a configuration of its own"
        )
    if channels not in (1, 3):
        raise ConfigError(
            f"data=images gives 1 or 3 channels (data.channels), and {kind} reads {channels}"
        )
    own = (parts.images.channels or channels, parts.images.size or size)
    # A model of convolutions takes many sizes, one of patches a single one: it is tried.
    error = None
    if (channels, size) != own:
        error = _error_on_images(parts.module, channels, size)
    # Without storage some models run on no size at all, their own included.
    if error is not None and _error_on_images(parts.module, *own) is None:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"{kind} does not read images of data.channels={channels}, data.image_size={size}: "
            f"{reason}"
        )
    return replace(data, image_size=size, channels=channels)


def _error_on_images(model: nn.Module, channels: int, size: int) -> Exception | None:
    example, _ = labelled_images(channels, size).example(1, "meta")
    try:
        copy.deepcopy(model).to("meta").eval()(example)
    except Exception as error:
        return error
    return None


def check_targets(config: TrainConfig, parts: ModelParts, data: OpenData) -> None:
    """Raises `ConfigError` for token ids or classes that the model has no output for."""
    wanted = len(data.classes)
    if wanted and parts.images.classes is not None and parts.images.classes < wanted:
        raise ConfigError(
            f"model.arguments.num_labels={parts.images.classes} is smaller than the {wanted} "
            f"classes of data.path={config.data.path}; it must be at least {wanted}"
        )
    if parts.vocab_size is not None and parts.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={parts.vocab_size} is smaller than the {data.vocab_size} token ids "
            f"of data={config.data.name}; it must be at least {data.vocab_size}"
        )


def fit_to_data(config: TrainConfig, data: OpenData) -> TrainConfig:
    """``config`` with the ``train.steps`` that ``train.epochs`` takes on ``data``. Raises
    `ConfigError` for fewer samples than a global batch takes, for keys that do not fit the steps,
    and for a metric that ``data`` give no validation for."""
    wanted = (config.train.stop.metric, config.checkpoint.keep_best)
    if data.validation is None and VALIDATION_LOSS in wanted:
        raise ConfigError(
            f"{VALIDATION_LOSS} is never measured: data={config.data.name} has no held-out part; "
            "use the loss of a set of data.validation"
        )
    epochs = config.train.epochs
    if epochs is None:
        return config
    batch = config.train.global_batch_size
    steps = data.train.global_batches(batch)
    assert steps is not None, "epochs were given, so the data end"
    samples = len(data.train)
    if steps == 0:
        raise ConfigError(
            f"train.epochs={epochs} of {samples} samples do not fill a global batch "
            f"(train.global_batch_size={batch}), which data.end=drop omits; data.end=pad or wrap "
            "would not"
        )
    fitted = replace(config, train=replace(config.train, steps=steps))
    try:
        check_steps(fitted)
    except ConfigError as error:
        raise ConfigError(f"{error} (train.epochs={epochs} of {samples} samples)") from None
    return fitted


def check_position(restored: Mapping[str, object], data: OpenData, config: TrainConfig) -> None:
    """Raises `ConfigError` when the checkpoint's position is one in other data; with
    ``checkpoint.strict=false`` it is only logged."""
    saved = restored.get("data_fingerprint")
    if saved in (None, data.fingerprint):
        return
    text = (
        f"the checkpoint of step {restored['step']} was trained on other data, or on the same cut "
        "otherwise (files, tokenizer, train.seq_len, image size, train.seed, data.*): here sample "
        f"{restored['samples']} is another one"
    )
    if config.checkpoint.strict:
        raise ConfigError(
            f"{text}; checkpoint.load=model_only starts over with its weights, "
            "checkpoint.strict=false goes on at that position"
        )
    log.warning("%s; going on at that position", text)
