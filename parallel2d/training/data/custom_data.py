"""Data that somebody else has made: a data set in Python (``data=custom``), and a file of token ids
(``data=bin``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import default_collate

from parallel2d.base.config import DataConfig
from parallel2d.base.config.options import call_reference
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.parallelize.layout import SampleShape, TensorShape
from parallel2d.training.data.batch import IGNORED, Batch, mixed_with
from parallel2d.training.data.order import Schedule
from parallel2d.training.data.prepare import worker_count
from parallel2d.training.data.stream import Array, SampleStream

# What a parameter of a model's forward, and a key of a batch, is called that holds targets
_INPUTS_TOO = ("labels", "label", "y")
TARGET_NAMES = ("targets", "target", *_INPUTS_TOO)
_TOKEN_BYTES = 2
_DIGESTED = 2**20  # bytes at either end of a file of tokens that its fingerprint covers
_MOST_THREADS = 16  # with data.workers=auto: several ranks share a machine


class BinTokens:
    """Token ids of a file of little-endian uint16 and nothing else; as `TokenSplit`."""

    masked = False

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` for a file that cannot be one."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.path={path} is no file; with data=bin it holds token ids")
        self.bytes = file.stat().st_size
        if self.bytes == 0 or self.bytes % _TOKEN_BYTES:
            raise ConfigError(f"data.path={path} has {self.bytes} bytes, which are no uint16 ids")
        self._ids = np.memmap(file, dtype="<u2", mode="r")
        self.tokens = len(self._ids)

    def ids(self, start: int, count: int) -> NDArray[Any]:
        """Token ids ``start .. start + count``."""
        return self._ids[start : start + count]

    def content(self) -> str:
        """A digest of the size and of both ends."""
        ends = (self._ids[:_DIGESTED].tobytes(), self._ids[-_DIGESTED:].tobytes())
        return hashlib.sha256(b"".join((str(self.bytes).encode(), *ends))).hexdigest()


class CustomSamples:
    """The data set that ``data.target`` builds, and how a batch is made of its samples."""

    def __init__(self, config: DataConfig) -> None:
        """Raises `ConfigError` for what is no data set."""
        assert config.target is not None
        what = f"data.target={config.target}"
        built = call_reference("data.target", config.target, **config.arguments)
        try:
            self.dataset, self.collate = built, default_collate
            if isinstance(built, tuple):
                self.dataset, self.collate = built
            self._length = len(self.dataset)
            first = self.batch([self.dataset[0]]) if self._length else None
        except Exception as error:
            raise ConfigError(
                f"{what} with arguments {config.arguments}: {type(error).__name__}: {error}; it "
                "must return a data set with __len__ and __getitem__, or that and a function that "
                "makes a batch of a list of samples"
            ) from error
        if first is None:
            raise ConfigError(f"{what} returned a data set without samples")
        inputs, targets = tree_map_only(
            torch.Tensor, lambda each: TensorShape(tuple(each.shape[1:]), each.dtype), first
        )
        self.shape = SampleShape("samples", inputs, targets)

    def __len__(self) -> int:
        return self._length

    def batch(self, samples: Sequence[Any]) -> tuple[Any, torch.Tensor | None]:
        """The inputs and the targets of some samples: of a tuple the last is the targets, of a dict
        the one that has such a name. Raises `ConfigError` for several."""
        batch = self.collate(list(samples))
        if isinstance(batch, dict):
            named = [name for name in TARGET_NAMES if name in batch]
            # Beside targets, labels are inputs, as the classes ``y`` of a diffusion model.
            if len(named) > 1 and (named[0] in _INPUTS_TOO or named[1] not in _INPUTS_TOO):
                raise ConfigError(f"a batch has {' and '.join(named)}: which are the targets?")
            inputs = {name: value for name, value in batch.items() if name not in named[:1]}
            return inputs, batch[named[0]] if named else None
        if isinstance(batch, tuple | list):
            *values, targets = batch
            return (tuple(values), targets) if values else (targets, None)
        return batch, None


class CustomStream(SampleStream):
    """Samples of `CustomSamples` addressed by position. ``workers``: threads that read a batch."""

    def __init__(self, samples: CustomSamples, workers: int | str, **how: Any) -> None:
        read: list[Any] = [samples]  # here, as they fill no rows of tokens
        super().__init__(read, Schedule([1]), **how)
        threads = worker_count(workers)
        if workers == "auto":
            threads = min(threads, _MOST_THREADS)
        self._samples = samples
        # The executor starts no thread before it is used
        self._pool = ThreadPoolExecutor(threads, "parallel2d-read")

    def _batch(self, count: int, rows: list[int], where: Array) -> Batch:
        """Of the samples that have a position; where none has, one that counts nothing."""
        indices = [index for _, index in self._locate(where if rows else np.zeros(1, np.int64))]
        samples = list(self._pool.map(self._samples.dataset.__getitem__, indices))
        hashes = np.array(list(map(_content_hash, samples)), dtype=np.uint64)
        inputs, targets = self._samples.batch(samples)
        valid = len(rows)
        if rows and targets is not None and not targets.is_floating_point():
            valid = int((targets != IGNORED).sum())
        total = int(mixed_with(hashes[: len(rows)], where).sum())
        return Batch(inputs, targets, None, hash=total, valid_tokens=valid)


def _content_hash(sample: Any) -> int:
    """A 64-bit hash of all values in a sample."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        array = np.ascontiguousarray(leaf.detach().cpu() if torch.is_tensor(leaf) else leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")
