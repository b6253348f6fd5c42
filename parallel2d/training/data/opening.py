"""`open_data` opens the data of a configuration.

Raw text is first tokenized into the cache; all other data are read in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from parallel2d.base.config import DataConfig
from parallel2d.base.config.checks import check_data
from parallel2d.base.config.model_and_data import validation_set
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.custom_data import BinTokens, CustomSamples, CustomStream
from parallel2d.training.data.iterables import IterableStream, Shards
from parallel2d.training.data.packing import FittedSamples, PackedSamples, PaddedSamples, Samples
from parallel2d.training.data.prepare import content_key, folder_lock, prepare
from parallel2d.training.data.reading import find_units
from parallel2d.training.data.sample_order import Schedule
from parallel2d.training.data.stream import SampleStream
from parallel2d.training.data.token_shards import MANIFEST, TokenStore
from parallel2d.training.data.tokenizer import load_tokenizer

# Each validation reads the samples in the same order, in every run
_VALIDATION: dict[str, Any] = {"seed": 0, "name": "validation", "epochs": 1, "end": "pad"}


@dataclass(frozen=True)
class OpenData:
    """The open streams of a run, and facts about them."""

    train: SampleStream
    # Finite stream whose order does not depend on the seed; None without held-out documents
    validation: SampleStream | None
    vocab_size: int  # all targets are smaller; 0: unknown
    # Hex digest of the data. Two machines with the same digest read the same sample at every
    # position. For custom data the digest covers only the arguments and the number of samples.
    fingerprint: str
    description: str  # one line
    # Streams of the data sets in ``data.validation``, by name; finite like `validation`
    named_validation: Mapping[str, SampleStream] = field(default_factory=dict)
    # Fingerprint of the data sets in ``data.validation``; empty if there are none
    validation_fingerprint: str = ""
    # Name and fingerprint of the tokenizer; empty strings if the data have none
    tokenizer: tuple[str, str] = ("", "")

    @property
    def streams(self) -> list[SampleStream]:
        """The streams for training and for all validations."""
        return [*filter(None, [self.train, self.validation]), *self.named_validation.values()]


def open_data(
    config: DataConfig,
    *,
    seed: int,
    seq_len: int | None = None,
    context: int = 0,
    global_batch_size: int = 1,
) -> OpenData:
    """Open the data of ``config``, and prepare them into the cache if necessary. Several processes
    may call this function at the same time.

    Args:
        seed: determines the order of the training samples.
        seq_len: tokens per sequence; custom data do not use it.
        context: number of token positions at the start of every sequence whose targets are ignored.
        global_batch_size: the global batch size of the training; only ``data=stream`` uses it.

    Raises `ConfigError` for a missing path, empty or undecodable input, too few tokens for one
    sample, and a cache that is not writable.
    """
    check_data(config)

    def open_source(config: DataConfig) -> _Source:
        if config.name == "custom":
            return _CustomData(config)
        if config.name == "stream":
            return _Iterables(config, global_batch_size)
        if seq_len is None:
            problem = f"the tokens of a sequence, with data={config.name}"
            raise ConfigError(f"open_data needs seq_len, {problem}")
        kind = _BinFile if config.name == "bin" else _Tokens
        return kind(config, seq_len, context)

    source = open_source(config)
    sets: dict[str, SampleStream] = {}
    set_fingerprints = []
    for name, entry in sorted(config.validation.items()):
        try:
            own = open_source(validation_set(config, entry))
            own.check_like(source)
            # If the data set has no held-out documents, all of its documents are read.
            sets[name] = own.validation() or own.stream("train", **_VALIDATION)
        except ConfigError as error:
            raise ConfigError(f"data.validation.{name}: {error}") from None
        set_fingerprints.append([name, own.fingerprint(seed)])
    if isinstance(source, _Tokens):
        source.check_length()
    how = {"seed": seed, "name": "train", "epochs": config.epochs, "end": config.end}
    train = source.stream("train", **how)
    return OpenData(
        train,
        source.validation(),
        vocab_size=source.vocab_size,
        fingerprint=source.fingerprint(seed),
        description=source.describe(len(train)),
        named_validation=sets,
        validation_fingerprint=_digest(set_fingerprints) if sets else "",
        tokenizer=source.tokenizer,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class _Tokens:
    """A source of prepared folders. Raises `ConfigError` if the folders of a mixture have different
    tokenizers."""

    def __init__(self, config: DataConfig, seq_len: int, context: int) -> None:
        self._config, self._seq_len, self._context = config, seq_len, context
        if config.mixture:
            self._names = [entry["path"] for entry in config.mixture]
            self._weights = [entry["weight"] for entry in config.mixture]
            self._stores = [TokenStore(Path(name).expanduser()) for name in self._names]
        else:
            self._names = [config.name if config.path is None else f"{config.name} {config.path}"]
            self._weights = [1]
            self._stores = [_open_store(config)]
        tokenizer = self._stores[0].manifest["tokenizer"]
        self.vocab_size, self._end_id = tokenizer["vocab_size"], tokenizer["end_id"]
        self.tokenizer = (tokenizer["name"], tokenizer["fingerprint"])
        for name, store in zip(self._names, self._stores, strict=True):
            other = store.manifest["tokenizer"]
            if other["fingerprint"] != tokenizer["fingerprint"]:
                raise ConfigError(
                    f"data.mixture has two tokenizers: {self._names[0]} was prepared with "
                    f"{tokenizer['name']} and {name} with {other['name']} (another one, or another "
                    "end token)"
                )

    def check_like(self, training: _Source) -> None:
        """Raise `ConfigError` if the tokenizer differs from the tokenizer of the training data."""
        if self.tokenizer[1] != training.tokenizer[1]:
            raise ConfigError(
                f"prepared with the tokenizer {self.tokenizer[0]}, the training data with "
                f"{training.tokenizer[0]} (another one, or another end token)"
            )

    def check_length(self) -> None:
        """Raise `ConfigError` if the training split of a folder is smaller than one sample."""
        needed = self._seq_len + 1 if self._config.packing == "packed" else 1
        for name, store in zip(self._names, self._stores, strict=True):
            tokens = store.splits["train"].tokens
            if tokens < needed:
                raise ConfigError(
                    f"{name} holds {tokens} training tokens, fewer than one sample needs: "
                    f"train.seq_len={self._seq_len} + 1"
                )

    def validation(self) -> SampleStream | None:
        """Return a stream of the held-out documents; None if there are none."""
        held_out = any(store.splits["validation"].tokens for store in self._stores)
        return self.stream("validation", **_VALIDATION) if held_out else None

    def stream(self, split: str, **how: Any) -> SampleStream:
        """Return a stream of ``split``, from all folders in which this split is not empty. Raises
        `ConfigError` if it is empty in all folders."""
        samples: list[Samples] = []
        weights = []
        for store, weight in zip(self._stores, self._weights, strict=True):
            each: Samples = PackedSamples(
                store.splits[split],
                self._seq_len,
                self._end_id,
                self._config.intra_document_masking,
            )
            if self._config.packing != "packed":
                kind = PaddedSamples if self._config.packing == "padded" else FittedSamples
                each = kind(store.splits[split], self._seq_len, self._end_id)
            if len(each):
                samples.append(each)
                weights.append(weight)
        if not samples:
            raise ConfigError(f"{self._names[0]} holds no document with two tokens")
        return SampleStream(
            samples,
            Schedule(weights),
            intra_document_masking=self._config.intra_document_masking,
            context=self._context,
            **how,
        )

    def fingerprint(self, seed: int) -> str:
        """Return a digest of everything that determines the sample at a position."""
        contents = map(attrgetter("content"), self._stores)
        identity = list(zip(contents, self._weights, strict=True))
        masking = self._config.intra_document_masking
        # The context is included only if it is set, so that fingerprints of earlier runs stay
        # valid.
        context = [self._context] if self._context else []
        return _digest([identity, [self._seq_len, seed, self._config.packing, masking, *context]])

    def describe(self, samples: int) -> str:
        """Return one line for the log about the ``samples`` for training."""
        splits = list(chain.from_iterable(store.splits.values() for store in self._stores))
        size = sum(store.manifest["bytes"] for store in self._stores)
        bad = sum(store.manifest["bad_rows"] for store in self._stores)
        documents = sum(split.documents for split in splits)
        name = self._names[0]
        if self._config.mixture:
            pairs = zip(self._weights, self._names, strict=True)
            name = " + ".join(f"{weight} {each}" for weight, each in pairs)
        text = f"{name} {size / 1e6:,.1f} MB, {documents:,} documents, {samples:,} samples of "
        text += f"{self._seq_len} tokens"
        if self._config.packing != "packed":
            cut = sum(split.documents_longer_than(self._seq_len + 1) for split in splits)
            text += f", {cut:,} documents cut to that length" * (cut > 0)
        return text + f", {bad:,} bad rows omitted" * (bad > 0)


class _Unprepared:
    """Base class of sources that need no preparation. They have the interface of `_Tokens`, but no
    held-out documents."""

    vocab_size = 0  # unknown
    tokenizer = ("", "")

    def validation(self) -> SampleStream | None:
        return None


class _BinFile(_Unprepared):
    """A source of token ids in a raw file."""

    def __init__(self, config: DataConfig, seq_len: int, context: int) -> None:
        self._path, self._seq_len, self._context = str(config.path), seq_len, context
        self._file = BinTokens(self._path)
        if self._file.tokens <= seq_len:
            raise ConfigError(
                f"data.path={self._path} holds {self._file.tokens} tokens, fewer than one sample "
                f"needs: train.seq_len={seq_len} + 1"
            )

    def check_like(self, training: _Source) -> None:
        """Raise `ConfigError` if the training data have a known tokenizer."""
        if training.tokenizer[1]:
            raise ConfigError(f"{self._path}: its tokenizer is unknown, unlike the training data's")

    def stream(self, _split: str, **how: Any) -> SampleStream:
        samples = PackedSamples(self._file, self._seq_len, end_id=0)
        return SampleStream([samples], Schedule([1]), context=self._context, **how)

    def fingerprint(self, seed: int) -> str:
        return _digest(["bin", self._file.content(), self._seq_len, seed, self._context])

    def describe(self, samples: int) -> str:
        size = f"{self._file.bytes / 1e6:,.1f} MB"
        return f"bin {self._path} {size}, {samples:,} samples of {self._seq_len} tokens"


class _CustomData(_Unprepared):
    """A source of samples from a custom data set."""

    def __init__(self, config: DataConfig) -> None:
        self._config, self._samples = config, CustomSamples(config)

    def check_like(self, training: _Source) -> None:
        """Accept any training data, because nothing can be compared."""

    def stream(self, _split: str, **how: Any) -> SampleStream:
        return CustomStream(self._samples, self._config.workers, **how)

    def fingerprint(self, seed: int) -> str:
        config = self._config
        return _digest(["custom", config.target, config.arguments, len(self._samples), seed])

    def describe(self, samples: int) -> str:
        return f"custom {self._config.target}, {samples:,} samples"


class _Iterables(_Unprepared):
    """A source of samples from iterables."""

    def __init__(self, config: DataConfig, global_batch_size: int) -> None:
        self._config, self._batch = config, global_batch_size
        alone = {"target": config.target, "arguments": config.arguments, "weight": 1}
        self._entries = config.mixture or [alone]
        self._sources = [
            Shards("data.target", str(entry["target"]), entry.get("arguments", {}))
            for entry in self._entries
        ]
        most = min(source.count for source in self._sources)
        sizes = range(1, min(most, global_batch_size) + 1)
        self._lanes = max(lanes for lanes in sizes if global_batch_size % lanes == 0)
        shapes = set()
        for source in self._sources:
            shapes.add(str(source.collation.shape))
        if len(shapes) > 1:
            raise ConfigError(f"the samples of data.mixture differ: {' and '.join(sorted(shapes))}")

    def check_like(self, training: _Source) -> None:
        """Accept any training data, because nothing can be compared."""

    def stream(self, _split: str, **how: Any) -> SampleStream:
        schedule = Schedule([entry["weight"] for entry in self._entries])
        return IterableStream(
            self._sources,
            schedule,
            self._config,
            lanes=self._lanes,
            global_batch_size=self._batch,
            **how,
        )

    def fingerprint(self, seed: int) -> str:
        entries = [sorted(entry.items()) for entry in self._entries]
        shards = list(map(attrgetter("count"), self._sources))
        buffer = self._config.shuffle_buffer
        return _digest(["stream", entries, shards, self._batch, buffer, seed])

    def describe(self, _samples: int) -> str:
        shards = " + ".join(f"{source.what} of {source.count} shards" for source in self._sources)
        return f"stream {shards}, read in {self._lanes} lanes"


_Source = _Tokens | _BinFile | _CustomData | _Iterables


def _open_store(config: DataConfig) -> TokenStore:
    """Open the prepared folder for the input of ``config``. If the folder in the cache is missing
    or damaged, prepare it under a lock. Raises `ConfigError` if the cache is not writable."""
    if config.name == "tokens":
        return TokenStore(Path(str(config.path)).expanduser())
    units, identity = find_units(config)
    key = content_key(config, identity, load_tokenizer(config.tokenizer, config.end_token))
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "parallel2d")
    root = Path(config.cache_dir or cache).expanduser()
    folder = root / f"{config.name}-{key}"
    with contextlib.suppress(ConfigError):
        return TokenStore(folder)
    try:
        with folder_lock(folder) as lock:
            # Another process may have prepared the folder while this one waited for the lock.
            with contextlib.suppress(ConfigError):
                return TokenStore(folder)
            # The manifest marks a finished folder. The manifest is deleted before the preparation
            # starts, because readers take no lock, and must not open a damaged folder during the
            # preparation.
            (folder / MANIFEST).unlink(missing_ok=True)
            return prepare(config, units, identity, folder, lock)
    except OSError as error:
        raise ConfigError(
            f"the data cache {root} is not writable ({error.strerror or error}: "
            f"{error.filename or folder}); set data.cache_dir to a writable folder"
        ) from error
