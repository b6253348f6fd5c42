"""Opens the data that a configuration names: `open_data`.

Raw text is prepared into the cache. Other data are opened in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from parallel2d.base.config import DataConfig
from parallel2d.base.config.checks import check_data
from parallel2d.base.config.model_and_data import validation_set
from parallel2d.base.errors import ConfigError
from parallel2d.training.data.custom_data import BinTokens, CustomSamples, CustomStream
from parallel2d.training.data.order import Schedule
from parallel2d.training.data.prepare import content_key, folder_lock, prepare
from parallel2d.training.data.reading import find_units
from parallel2d.training.data.stream import PackedSamples, PaddedSamples, Samples, SampleStream
from parallel2d.training.data.token_shards import MANIFEST, TokenStore
from parallel2d.training.data.tokenizer import load_tokenizer

# Validation samples are read once, in the same order in every run
_VALIDATION: dict[str, Any] = {"seed": 0, "name": "validation", "epochs": 1, "end": "pad"}


@dataclass(frozen=True)
class OpenData:
    """The streams that a run reads, and what they are."""

    train: SampleStream
    # Finite, in an order that does not depend on the seed; None if nothing is held out
    validation: SampleStream | None
    vocab_size: int  # targets are below it; 0: that is not known
    # Hex; equal on two machines exactly if every position reads the same sample on both. Of data of
    # one's own it covers what they are built from and their number, not their content.
    fingerprint: str
    description: str  # one line
    # The sets of ``data.validation``, by name; each is finite, as `validation`
    named_validation: Mapping[str, SampleStream] = field(default_factory=dict)
    # Of these sets, as `fingerprint`; empty without any
    validation_fingerprint: str = ""
    # The name and the fingerprint of the tokenizer; empty where there is none
    tokenizer: tuple[str, str] = ("", "")

    @property
    def streams(self) -> list[SampleStream]:
        """All of them."""
        return [*filter(None, [self.train, self.validation]), *self.named_validation.values()]


def open_data(
    config: DataConfig, *, seed: int, seq_len: int | None = None, context: int = 0
) -> OpenData:
    """Opens the data that ``config`` names, and prepares it into the cache if necessary.

    Safe to call in any number of processes at once. ``seq_len`` is in tokens; data of one's own do
    not use it. The targets of the first ``context`` positions of every sequence are ignored. Raises
    `ConfigError` that names what is wrong: a missing path, empty or undecodable input, too few
    tokens for one sample, a cache that cannot be written.
    """
    check_data(config)

    def open_source(config: DataConfig) -> _Source:
        if config.name == "custom":
            return _CustomData(config)
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
            # All is read where nothing is held out.
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
    """The prepared folders that ``config`` names. Raises `ConfigError` for a mixture of two
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
        """Raises `ConfigError` for another tokenizer than that of the training data."""
        if self.tokenizer[1] != training.tokenizer[1]:
            raise ConfigError(
                f"prepared with the tokenizer {self.tokenizer[0]}, the training data with "
                f"{training.tokenizer[0]} (another one, or another end token)"
            )

    def check_length(self) -> None:
        """Raises `ConfigError` for a folder whose training split is less than one sample."""
        needed = self._seq_len + 1 if self._config.packing == "packed" else 1
        for name, store in zip(self._names, self._stores, strict=True):
            tokens = store.splits["train"].tokens
            if tokens < needed:
                raise ConfigError(
                    f"{name} holds {tokens} training tokens, fewer than one sample needs: "
                    f"train.seq_len={self._seq_len} + 1"
                )

    def validation(self) -> SampleStream | None:
        """The documents that are held out; None where there are none."""
        held_out = any(store.splits["validation"].tokens for store in self._stores)
        return self.stream("validation", **_VALIDATION) if held_out else None

    def stream(self, split: str, **how: Any) -> SampleStream:
        """One split of all folders that have it. Raises `ConfigError` where none has."""
        samples: list[Samples] = []
        weights = []
        for store, weight in zip(self._stores, self._weights, strict=True):
            each: Samples = PackedSamples(
                store.splits[split],
                self._seq_len,
                self._end_id,
                self._config.intra_document_masking,
            )
            if self._config.packing == "padded":
                each = PaddedSamples(store.splits[split], self._seq_len, self._end_id)
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
        """A digest of all that decides which sample is at a position."""
        contents = [store.content for store in self._stores]
        identity = list(zip(contents, self._weights, strict=True))
        masking = self._config.intra_document_masking
        # A context only where there is one, so that fingerprints of earlier runs stay true.
        context = [self._context] if self._context else []
        return _digest([identity, [self._seq_len, seed, self._config.packing, masking, *context]])

    def describe(self, samples: int) -> str:
        """One line for the log. ``samples``: how many are trained on."""
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
        if self._config.packing == "padded":
            cut = sum(split.documents_longer_than(self._seq_len + 1) for split in splits)
            text += f", {cut:,} documents cut to that length" * (cut > 0)
        return text + f", {bad:,} bad rows omitted" * (bad > 0)


class _Unprepared:
    """As `_Tokens`, all of it for training."""

    vocab_size = 0  # which of the ids a model must know is not told
    tokenizer = ("", "")

    def validation(self) -> SampleStream | None:
        return None


class _BinFile(_Unprepared):
    """A file of token ids."""

    def __init__(self, config: DataConfig, seq_len: int, context: int) -> None:
        self._path, self._seq_len, self._context = str(config.path), seq_len, context
        self._file = BinTokens(self._path)
        if self._file.tokens <= seq_len:
            raise ConfigError(
                f"data.path={self._path} holds {self._file.tokens} tokens, fewer than one sample "
                f"needs: train.seq_len={seq_len} + 1"
            )

    def check_like(self, training: _Source) -> None:
        """Raises `ConfigError` beside training data whose tokens are of a known tokenizer."""
        if training.tokenizer[1]:
            raise ConfigError(
                f"{self._path}: whether its token ids are those of the data is unknown"
            )

    def stream(self, _split: str, **how: Any) -> SampleStream:
        samples = PackedSamples(self._file, self._seq_len, end_id=0)
        return SampleStream([samples], Schedule([1]), context=self._context, **how)

    def fingerprint(self, seed: int) -> str:
        return _digest(["bin", self._file.content(), self._seq_len, seed, self._context])

    def describe(self, samples: int) -> str:
        size = f"{self._file.bytes / 1e6:,.1f} MB"
        return f"bin {self._path} {size}, {samples:,} samples of {self._seq_len} tokens"


class _CustomData(_Unprepared):
    """A data set of somebody's own."""

    def __init__(self, config: DataConfig) -> None:
        self._config, self._samples = config, CustomSamples(config)

    def check_like(self, training: _Source) -> None:
        """Any two go together, as far as can be told."""

    def stream(self, _split: str, **how: Any) -> SampleStream:
        return CustomStream(self._samples, self._config.workers, **how)

    def fingerprint(self, seed: int) -> str:
        config = self._config
        return _digest(["custom", config.target, config.arguments, len(self._samples), seed])

    def describe(self, samples: int) -> str:
        return f"custom {self._config.target}, {samples:,} samples"


_Source = _Tokens | _BinFile | _CustomData


def _open_store(config: DataConfig) -> TokenStore:
    """The prepared folder of the input that ``config`` names. In the cache it is prepared under a
    lock where it is missing or damaged. Raises `ConfigError` if the cache cannot be written."""
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
            # Another process may have prepared it while this one waited for the lock.
            with contextlib.suppress(ConfigError):
                return TokenStore(folder)
            # A damaged folder must not look finished while it is prepared again.
            (folder / MANIFEST).unlink(missing_ok=True)
            return prepare(config, units, identity, folder, lock)
    except OSError as error:
        raise ConfigError(
            f"the data cache {root} is not writable ({error.strerror or error}: "
            f"{error.filename or folder}); set data.cache_dir to a folder that can"
        ) from error
