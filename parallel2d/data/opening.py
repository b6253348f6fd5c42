"""Opens the data that a configuration names: `open_data`.

Raw text is prepared into the cache. A prepared folder and a folder of images are opened in place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.config import DataConfig
from parallel2d.config.checks import check_data
from parallel2d.config.model_and_data import validation_set
from parallel2d.data.cache import cache_root, open_cached, options_key
from parallel2d.data.images import ImageFolder, ImageSamples, find_images
from parallel2d.data.inputs import prepare_options, prepare_units, worker_count
from parallel2d.data.mixture import Schedule
from parallel2d.data.prepare import prepare
from parallel2d.data.stream import PackedSamples, PaddedSamples, Samples, SampleStream
from parallel2d.data.token_shards import TokenStore
from parallel2d.errors import ConfigError

# Validation samples are read once, in the same order in every run
_VALIDATION: dict[str, Any] = {"seed": 0, "name": "validation", "epochs": 1, "end": "pad"}
# Threads that decode images with data.workers=auto: several ranks share a machine
_MOST_THREADS = 16


@dataclass(frozen=True)
class OpenData:
    """What a run reads."""

    train: SampleStream
    # Finite, in an order that does not depend on the seed; None if nothing is held out
    validation: SampleStream | None
    vocab_size: int  # targets are below it: token ids, or class ids of images
    # Hex; equal on two machines exactly if every position reads the same sample on both (for images
    # see `open_data`)
    fingerprint: str
    description: str  # one line
    classes: tuple[str, ...] = ()  # of images, by class id
    # The sets of ``data.validation``, by name; each is finite, as `validation`
    named_validation: Mapping[str, SampleStream] = field(default_factory=dict)
    # Of these sets, as `fingerprint`; empty without any
    validation_fingerprint: str = ""
    # The name and the fingerprint of the tokenizer; empty for images
    tokenizer: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class _Part:
    """One component of a mixture, or the only data set."""

    name: str
    store: TokenStore
    weight: float


def open_data(
    config: DataConfig, *, seed: int, seq_len: int | None = None, context: int = 0
) -> OpenData:
    """Opens the data that ``config`` names, and prepares it into the cache if necessary.

    Safe to call in any number of processes at once. ``seq_len`` is in tokens; images do not use it.
    The targets of the first ``context`` positions of every sequence are ignored. Raises
    `ConfigError` that names what is wrong: a missing path, empty or undecodable input, too few
    tokens for one sample, a cache that cannot be written.

    The fingerprint of images covers their paths below ``data.path``, the sizes of their files,
    image size, channels, split and seed. It does not change when a file changes without changing
    its size, or when another version of Pillow decodes differently; ``data/batch_hash`` does.
    """
    check_data(config)
    if config.name == "images":
        return _open_images(config, seed)
    if seq_len is None:
        raise ConfigError(
            f"open_data needs seq_len, the tokens of a sequence, with data={config.name}"
        )
    parts = _open_parts(config)
    tokenizer = parts[0].store.manifest["tokenizer"]

    def open_set(own: DataConfig) -> tuple[SampleStream, str]:
        return _open_validation_set(own, tokenizer, seq_len, context)

    named, named_fingerprint = _open_named(config, open_set)
    train = _training_stream(config, parts, seq_len, seed, context)
    validation = _validation_stream(config, parts, "validation", seq_len, context)
    identity = [[part.store.content, part.weight] for part in parts]
    options = [seq_len, seed, config.packing, config.intra_document_masking]
    # Only where there is one, so that fingerprints of earlier runs stay true.
    options += [context] if context else []
    return OpenData(
        train,
        validation,
        vocab_size=tokenizer["vocab_size"],
        fingerprint=hashlib.sha256(json.dumps([identity, options]).encode()).hexdigest(),
        description=_describe(config, parts, train, seq_len),
        named_validation=named,
        validation_fingerprint=named_fingerprint,
        tokenizer=(tokenizer["name"], tokenizer["fingerprint"]),
    )


def _open_parts(config: DataConfig) -> list[_Part]:
    """The components of a mixture, or the only data set. Raises `ConfigError` for two
    tokenizers."""
    if not config.mixture:
        name = config.name if config.path is None else f"{config.name} {config.path}"
        return [_Part(name, _open_store(config), 1)]
    parts = [
        _Part(entry["path"], _prepared(entry["path"]), entry["weight"]) for entry in config.mixture
    ]
    tokenizer = parts[0].store.manifest["tokenizer"]
    for part in parts[1:]:
        other = part.store.manifest["tokenizer"]
        if other["fingerprint"] != tokenizer["fingerprint"]:
            raise ConfigError(
                f"data.mixture has two tokenizers: {parts[0].name} was prepared with "
                f"{tokenizer['name']} and {part.name} with {other['name']} (another one, or "
                "another end token)"
            )
    return parts


def _open_named(
    config: DataConfig, open_set: Callable[[DataConfig], tuple[SampleStream, str]]
) -> tuple[dict[str, SampleStream], str]:
    """The sets of ``data.validation`` by name, and their fingerprint. ``open_set``: a stream and
    its identity. Raises `ConfigError` that names the set."""
    streams, identities = {}, []
    for name, entry in sorted(config.validation.items()):
        try:
            streams[name], identity = open_set(validation_set(config, entry))
        except ConfigError as error:
            raise ConfigError(f"data.validation.{name}: {error}") from None
        identities.append([name, identity])
    if not streams:
        return {}, ""
    return streams, hashlib.sha256(json.dumps(identities).encode()).hexdigest()


def _open_validation_set(
    config: DataConfig, tokenizer: Mapping[str, str], seq_len: int, context: int
) -> tuple[SampleStream, str]:
    """All documents that ``config`` names, or those of them that are held out, where some are."""
    parts = _open_parts(config)
    other = parts[0].store.manifest["tokenizer"]
    if other["fingerprint"] != tokenizer["fingerprint"]:
        raise ConfigError(
            f"prepared with the tokenizer {other['name']}, the training data with "
            f"{tokenizer['name']} (another one, or another end token)"
        )
    held_out = any(part.store.splits["validation"].tokens for part in parts)
    split = "validation" if held_out else "train"
    stream = _validation_stream(config, parts, split, seq_len, context)
    if stream is None:
        raise ConfigError(f"{parts[0].name} holds no document with two tokens")
    identity = [[part.store.content, part.weight] for part in parts]
    return stream, json.dumps([identity, split, config.packing])


def _validation_stream(
    config: DataConfig, parts: list[_Part], split: str, seq_len: int, context: int
) -> SampleStream | None:
    """Reads a split once, in an order that does not depend on the seed; None where it is empty."""
    read = [(part, _samples(config, part, split, seq_len)) for part in parts]
    filled = [(part, samples) for part, samples in read if len(samples)]
    return _stream(config, filled, context, **_VALIDATION) if filled else None


def _open_images(config: DataConfig, seed: int) -> OpenData:
    if config.image_size is None:
        raise ConfigError(
            "data.image_size is required with data=images and a model that does not name its own"
        )
    size, channels = config.image_size, config.channels or 3
    folder = find_images(str(config.path))
    training, held_out = folder.split(config.validation_fraction)
    threads = worker_count(config.workers)
    if config.workers == "auto":
        threads = min(threads, _MOST_THREADS)

    def stream(source: ImageFolder, indices: NDArray[np.int64], **how: Any) -> SampleStream:
        samples = ImageSamples(source, indices, channels, size)
        return SampleStream([samples], Schedule([1]), threads=threads, **how)

    def open_set(own: DataConfig) -> tuple[SampleStream, str]:
        found = find_images(str(own.path))
        if found.classes != folder.classes:
            raise ConfigError(
                f"{own.path} has the classes {', '.join(found.classes)}, and the training images "
                f"{', '.join(folder.classes)}"
            )
        everything, held_out = found.split(own.validation_fraction)
        indices = held_out if len(held_out) else everything
        identity = json.dumps([found.content, own.validation_fraction])
        return stream(found, indices, **_VALIDATION), identity

    named, named_fingerprint = _open_named(config, open_set)
    identity = ["images", folder.content, size, channels, config.validation_fraction, seed]
    return OpenData(
        stream(folder, training, seed=seed, name="train", epochs=config.epochs, end=config.end),
        stream(folder, held_out, **_VALIDATION) if len(held_out) else None,
        vocab_size=len(folder.classes),
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        description=folder.describe(len(training), channels, size),
        classes=folder.classes,
        named_validation=named,
        validation_fingerprint=named_fingerprint,
    )


def _training_stream(
    config: DataConfig, parts: list[_Part], seq_len: int, seed: int, context: int
) -> SampleStream:
    read = [(part, _samples(config, part, "train", seq_len)) for part in parts]
    for part, samples in read:
        _check_length(config, part, samples, seq_len)
    how = {"seed": seed, "name": "train", "epochs": config.epochs, "end": config.end}
    return _stream(config, read, context, **how)


def _stream(
    config: DataConfig, read: list[tuple[_Part, Samples]], context: int, **how: Any
) -> SampleStream:
    return SampleStream(
        [samples for _, samples in read],
        Schedule([part.weight for part, _ in read]),
        intra_document_masking=config.intra_document_masking,
        context=context,
        **how,
    )


def _samples(config: DataConfig, part: _Part, name: str, seq_len: int) -> Samples:
    split = part.store.splits[name]
    end_id = part.store.manifest["tokenizer"]["end_id"]
    if config.packing == "padded":
        return PaddedSamples(split, seq_len, end_id)
    return PackedSamples(split, seq_len, end_id, config.intra_document_masking)


def _check_length(config: DataConfig, part: _Part, samples: Samples, seq_len: int) -> None:
    tokens = part.store.splits["train"].tokens
    if not len(samples) or (config.packing == "packed" and tokens < seq_len + 1):
        raise ConfigError(
            f"{part.name} holds {tokens} training tokens, fewer than one sample needs: "
            f"train.seq_len={seq_len} + 1"
        )


def _describe(config: DataConfig, parts: list[_Part], train: SampleStream, seq_len: int) -> str:
    size = sum(part.store.manifest["bytes"] for part in parts) / 1e6
    splits = [split for part in parts for split in part.store.splits.values()]
    documents = sum(split.documents for split in splits)
    bad = sum(part.store.manifest["bad_rows"] for part in parts)
    name = parts[0].name
    if config.mixture:
        name = " + ".join(f"{part.weight} {part.name}" for part in parts)
    text = (
        f"{name} {size:,.1f} MB, {documents:,} documents, {len(train):,} samples of {seq_len} "
        "tokens"
    )
    if config.packing == "padded":
        cut = sum(split.documents_longer_than(seq_len + 1) for split in splits)
        text += f", {cut:,} documents cut to that length" if cut else ""
    return text + (f", {bad:,} bad rows left out" if bad else "")


def _prepared(path: str) -> TokenStore:
    return TokenStore(Path(path).expanduser())


def _open_store(config: DataConfig) -> TokenStore:
    if config.name == "tokens":
        return _prepared(str(config.path))
    options = prepare_options(config)
    units, identity, source = prepare_units(config)

    def make(folder: Path, lock: int) -> TokenStore:
        workers = worker_count(config.workers)
        return prepare(units, options, folder, source=source, workers=workers, lock=lock)

    return open_cached(
        cache_root(config.cache_dir), config.name, options_key(options, identity), make
    )
