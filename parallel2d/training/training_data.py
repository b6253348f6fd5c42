"""Opens the configured data set and matches it with the model: `open_training_data`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from parallel2d.base.config import TrainConfig
from parallel2d.base.config.checks import check_steps
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.opening import OpenData, open_data
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.metrics.keys import VALIDATION_LOSS
from parallel2d.training.model_families import ModelParts, words_of

log = logging.getLogger(__name__)


def open_training_data(config: TrainConfig, parts: ModelParts) -> OpenData:
    """Open the configured data, and prepare them if necessary. Targets at positions without a model
    output are ignored. Raises `ConfigError` for data that the model cannot read, and for custom
    data with fewer samples than a global batch."""
    check_reads(config, parts)
    seed, seq_len = config.train.seed, config.train.seq_len
    data = open_data(
        config.training_data(),
        seq_len=seq_len,
        seed=seed,
        context=parts.context(seq_len),
        global_batch_size=config.train.global_batch_size,
    )
    if parts.vocab_size is not None and not config.data.has_own_samples:
        for stream in data.streams:
            stream.check_ids(parts.vocab_size)
    embedding = next((e for e in parts.module.modules() if isinstance(e, nn.Embedding)), None)
    if embedding is not None:
        data.train.weigh(embedding.embedding_dim)
    batch = config.train.global_batch_size
    if config.data.name == "custom" and data.train.end is None and len(data.train) < batch:
        raise ConfigError(
            f"train.global_batch_size={batch} is more than the {len(data.train)} samples of "
            f"data.target={config.data.target}"
        )
    ModelLoss(config, parts).check(data.train.shape)
    return data


def check_reads(config: TrainConfig, parts: ModelParts) -> None:
    """Raise `ConfigError` if the data are token ids and the model reads another kind of input."""
    name = config.data.name
    if parts.reads is not None and not config.data.has_own_samples:
        raise ConfigError(
            f"{words_of(config.model)}: {type(parts.module).__name__} reads {parts.reads}, and "
            f"data={name} gives token ids: use data=custom data.target=package.module:build"
        )


def check_targets(config: TrainConfig, parts: ModelParts, data: OpenData) -> None:
    """Raise `ConfigError` if the data have more token ids than the model has outputs."""
    if parts.vocab_size is not None and parts.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={parts.vocab_size} is smaller than the {data.vocab_size} token ids "
            f"of data={config.data.name}; it must be at least {data.vocab_size}"
        )


def fit_to_data(config: TrainConfig, data: OpenData) -> TrainConfig:
    """Return ``config`` with ``train.steps`` computed from ``train.epochs`` and ``data``. Raises
    `ConfigError` if the data have fewer samples than a global batch, or if other keys contradict
    the computed steps. Also raises it if a watched metric needs validation data and ``data`` has
    none."""
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
    """Raise `ConfigError` if the run of the checkpoint used other data, so that its position is not
    valid here. With ``checkpoint.strict=false`` only log a warning."""
    saved = restored.get("data_fingerprint")
    if saved in (None, data.fingerprint):
        return
    text = (
        f"the checkpoint of step {restored['step']} was trained on other data, or on the same "
        "data with other settings (files, tokenizer, train.seq_len, train.seed, data.*): sample "
        f"{restored['samples']} is a different sample here"
    )
    if config.checkpoint.strict:
        raise ConfigError(
            f"{text}; checkpoint.load=model_only starts over with its weights, "
            "checkpoint.strict=false continues at that position"
        )
    log.warning("%s; continuing at that position", text)
