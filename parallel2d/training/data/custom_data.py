"""Custom data: a data set from a user's function (``data=custom``), and a raw file of token ids
(``data=bin``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
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
from parallel2d.training.data.packing import Array
from parallel2d.training.data.prepare import worker_count
from parallel2d.training.data.sample_order import Schedule
from parallel2d.training.data.stream import SampleStream

# Names of targets, as parameters of a model's forward and as keys of a batch
_INPUTS_TOO = ("labels", "label", "y")
TARGET_NAMES = ("targets", "target", *_INPUTS_TOO)
_TOKEN_BYTES = 2
_DIGESTED = 2**20  # number of tokens at each end of a file that its fingerprint covers
_MOST_THREADS = 16  # limit with data.workers=auto, because several ranks share a machine


class BinTokens:
    """The token ids in a raw file of little-endian uint16, with the interface of `TokenSplit`."""

    masked = False

    def __init__(self, path: str) -> None:
        """Map the file into memory. Raises `ConfigError` if it does not exist or has an invalid
        size."""
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"data.path={path} is not a file; data=bin reads token ids from a file"
            )
        self.bytes = file.stat().st_size
        if self.bytes == 0 or self.bytes % _TOKEN_BYTES:
            raise ConfigError(f"data.path={path} has {self.bytes} bytes, which are not uint16 ids")
        self._ids = np.memmap(file, dtype="<u2", mode="r")
        self.tokens = len(self._ids)

    def ids(self, start: int, count: int) -> NDArray[Any]:
        """Return ``count`` token ids from ``start``."""
        return self._ids[start : start + count]

    def content(self) -> str:
        """Return a digest of the size, the beginning and the end of the file."""
        ends = (self._ids[:_DIGESTED].tobytes(), self._ids[-_DIGESTED:].tobytes())
        return hashlib.sha256(b"".join((str(self.bytes).encode(), *ends))).hexdigest()


class Collation:
    """Combines samples to batches with ``collate``, by default torch's `default_collate`.
    ``shape``: the shape of ``sample``.

    Raises `ConfigError` if ``collate`` fails for ``sample``.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None, sample: Any, what: str) -> None:
        self._collate = collate or default_collate
        try:
            first = self.batch([sample])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{what}: its samples cannot be collated: {type(error).__name__}: {error}; return "
                "a pair with a function that makes a batch of a list of samples"
            ) from error
        inputs, targets = tree_map_only(
            torch.Tensor, lambda each: TensorShape(tuple(each.shape[1:]), each.dtype), first
        )
        self.shape = SampleShape("samples", inputs, targets)

    def batch(self, samples: Sequence[Any]) -> tuple[Any, torch.Tensor | None]:
        """Collate samples to inputs and targets. The targets are the last element of a tuple, or
        the value in a dict whose key is in `TARGET_NAMES`. Raises `ConfigError` for a dict with
        several possible targets."""
        batch = self._collate(list(samples))
        if isinstance(batch, dict):
            named = list(filter(batch.__contains__, TARGET_NAMES))
            # If a dict has the key ``targets`` or ``target``, other labels are inputs, such as the
            # classes ``y`` of a diffusion model.
            if len(named) > 1 and (named[0] in _INPUTS_TOO or named[1] not in _INPUTS_TOO):
                raise ConfigError(f"a batch has {' and '.join(named)}: which are the targets?")
            inputs = dict(batch)
            return inputs, inputs.pop(named[0]) if named else None
        if isinstance(batch, tuple | list):
            *values, targets = batch
            return (tuple(values), targets) if values else (targets, None)
        return batch, None


class CustomSamples:
    """The data set that ``data.target`` builds, and the collation of its samples to batches."""

    def __init__(self, config: DataConfig) -> None:
        """Build the data set. Raises `ConfigError` if the function fails or does not return a data
        set."""
        assert config.target is not None
        what = f"data.target={config.target}"
        built = call_reference("data.target", config.target, **config.arguments)
        try:
            self.dataset, collate = built if isinstance(built, tuple) else (built, None)
            self._length = len(self.dataset)
            if self._length:
                self.collation = Collation(collate, self.dataset[0], what)
        except Exception as error:
            raise ConfigError(
                f"{what} with arguments {config.arguments}: {type(error).__name__}: {error}; it "
                "must return a data set with __len__ and __getitem__, or that and a function that "
                "makes a batch of a list of samples"
            ) from error
        if not self._length:
            raise ConfigError(f"{what} returned a data set without samples")
        self.shape = self.collation.shape

    def __len__(self) -> int:
        return self._length


class CustomStream(SampleStream):
    """A stream of the samples in `CustomSamples`. ``workers`` threads read the samples of a
    batch."""

    def __init__(self, samples: CustomSamples, workers: int | str, **how: Any) -> None:
        read: list[Any] = [samples]  # `_batch` below reads these samples, not the base class
        super().__init__(read, Schedule([1]), **how)
        self._samples = samples
        # The executor starts its threads on first use.
        self._pool = ThreadPoolExecutor(thread_count(workers), "parallel2d-read")

    def _batch(self, count: int, rows: list[int], where: Array, filler: int) -> Batch:
        """Collate the samples at the positions ``where``. If no row has a position, collate the
        sample at ``filler`` with weight zero."""
        indices = []
        for _, index in self._locate(where if rows else np.array([filler])):
            indices.append(index)
        samples = list(self._pool.map(self._samples.dataset.__getitem__, indices))
        return batch_of(self._samples.collation, samples, rows, where)


def thread_count(workers: int | str) -> int:
    """Return the number of threads for ``data.workers``."""
    threads = worker_count(workers)
    return min(threads, _MOST_THREADS) if workers == "auto" else threads


def batch_of(
    collation: Collation, samples: Sequence[Any], rows: Sequence[int], where: Array
) -> Batch:
    """Collate the samples at the positions ``where``. If ``rows`` is empty, the batch has one
    sample with weight zero."""
    hashes = np.array(list(map(_content_hash, samples)), dtype=np.uint64)
    inputs, targets = collation.batch(samples)
    valid = len(rows)
    if rows and targets is not None and not targets.is_floating_point():
        valid = int((targets != IGNORED).sum())
    total = int(mixed_with(hashes[: len(rows)], where).sum())
    return Batch(inputs, targets, None, hash=total, valid_tokens=valid)


def _content_hash(sample: Any) -> int:
    """Return a 64-bit hash of all values in a sample, with their dtypes and shapes."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        array = np.ascontiguousarray(leaf.detach().cpu() if torch.is_tensor(leaf) else leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little")
