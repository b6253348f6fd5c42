"""Token shards on disk: their format, their writer `ShardWriter` and their reader `TokenStore`.

A prepared folder contains

    manifest.json        written last: a folder without it is unfinished
    train-00000.tokens   token ids, little-endian, of the smallest unsigned type that holds the
                         vocabulary
    train-00000.ends     uint64 little-endian per document: where it ends, in tokens from the start
                         of the shard
    train-00000.mask     uint8 per token, 1 = may be a target; only if some source said which tokens
                         are
    validation-00000.*   the same for the documents that were held out

Shards are plain arrays, so nothing in them can be executed. They are memory-mapped, so the
processes of one machine share one copy. Each document is followed by the end-of-document id.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d import files
from parallel2d.errors import ConfigError

FORMAT = "parallel2d tokens"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
# Files of a split that stay mapped: bounds file descriptors on corpora with thousands of shards
_OPEN_FILES = 64
_TOKEN_TYPES = ("|u1", "<u2", "<u4")
_LARGEST_MANIFEST = 256 * 2**20
_SHARD_NAME, _SHA256 = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"), re.compile(r"[0-9a-f]{64}")
_TYPES = {"tokens": None, "ends": "<u8", "mask": "|u1"}


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned little-endian type that holds ids below ``vocab_size``."""
    for limit, name in ((1 << 8, "|u1"), (1 << 16, "<u2"), (1 << 32, "<u4")):
        if vocab_size <= limit:
            return name
    raise ConfigError(f"the tokenizer has {vocab_size} ids; at most {1 << 32} can be stored")


def write_json(path: Path, value: Any) -> None:
    """Writes atomically and durably: a reader sees the old file or the complete new one."""
    files.replace(str(path), json.dumps(value, indent=1), durable=True)


class ShardWriter:
    """Writes one shard under temporary names and moves it into place when it is complete."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self.name, self._dtype = folder, name, dtype
        self._suffix = f".{os.getpid()}-{threading.get_ident()}.tmp"
        self._hashes = {kind: hashlib.sha256() for kind in _TYPES}
        self._bytes = dict.fromkeys(_TYPES, 0)
        self._files = {kind: open(self._temporary(kind), "wb") for kind in _TYPES}  # noqa: SIM115  closed in finish
        self.tokens = self.documents = 0
        self._masked = False

    def _temporary(self, kind: str) -> Path:
        return self._folder / f"{self.name}.{kind}{self._suffix}"

    def add(self, documents: list[NDArray[Any]], masks: list[NDArray[np.uint8] | None]) -> None:
        """Appends documents (1-D arrays of ids, end-of-document id included) and, where given,
        their target masks.
        """
        if not documents:
            return
        ends = self.tokens + np.cumsum([len(document) for document in documents])
        self._append("tokens", np.concatenate(documents).astype(self._dtype, copy=False))
        self._append("ends", ends.astype("<u8"))
        if any(mask is not None for mask in masks):
            # Most corpora have no masks. At the first one, all tokens before it get theirs.
            if not self._masked:
                self._append("mask", np.ones(self.tokens, dtype=np.uint8))
            self._masked = True
        if self._masked:
            filled = [
                np.ones(len(document), np.uint8) if mask is None else mask
                for document, mask in zip(documents, masks, strict=True)
            ]
            self._append("mask", np.concatenate(filled))
        self.tokens = int(ends[-1])
        self.documents += len(documents)

    def _append(self, kind: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._hashes[kind].update(data)
        self._files[kind].write(data)
        self._bytes[kind] += len(data)

    def finish(self) -> dict[str, Any]:
        """Flushes the shard to disk and returns its entry of the manifest. No file is kept for a
        shard without documents.
        """
        files = {}
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if self.documents and (kind != "mask" or self._masked):
                name = f"{self.name}.{kind}"
                os.replace(self._temporary(kind), self._folder / name)
                files[name] = {"bytes": self._bytes[kind], "sha256": self._hashes[kind].hexdigest()}
            else:
                self._temporary(kind).unlink()
        counts = {"tokens": self.tokens, "documents": self.documents}
        return {"name": self.name, **counts, "files": files}

    def abandon(self) -> None:
        """Removes the files that were written."""
        for kind, file in self._files.items():
            file.close()
            with contextlib.suppress(FileNotFoundError):
                self._temporary(kind).unlink()


@dataclass(frozen=True)
class _Shard:
    name: str
    tokens: int
    documents: int
    masked: bool


def _shard(entry: dict[str, Any]) -> _Shard:
    name = entry["name"]
    return _Shard(name, entry["tokens"], entry["documents"], f"{name}.mask" in entry["files"])


class TokenSplit:
    """One split of a prepared folder: one sequence of ``tokens`` ids, made of ``documents``
    documents."""

    def __init__(self, folder: Path, dtype: str, entries: list[dict[str, Any]]) -> None:
        self._folder, self._types = folder, {**_TYPES, "tokens": dtype}
        self._shards = [_shard(entry) for entry in entries if entry["documents"]]
        self._token_starts = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._document_starts = np.cumsum([0, *(shard.documents for shard in self._shards)])
        self.tokens, self.documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        self.masked = any(shard.masked for shard in self._shards)
        self._maps: OrderedDict[tuple[int, str], NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._sound: set[int] = set()  # shards whose ends were checked

    def _check_ends(self, shard: int, ends: NDArray[Any]) -> None:
        ascending = bool(np.all(ends[1:] > ends[:-1]))
        # Once for each shard: positions that are looked up in it are wrong otherwise.
        if ends[0] == 0 or ends[-1] != self._shards[shard].tokens or not ascending:
            path = self._folder / f"{self._shards[shard].name}.ends"
            raise ConfigError(
                f"{path} is damaged: its documents do not end one after the other; prepare the "
                "data again"
            )
        self._sound.add(shard)

    def slices(self, start: int, count: int) -> list[NDArray[Any]]:
        """Token ids ``start .. start + count`` as views of the shards they lie in (one, unless a
        shard ends there).
        """
        return [self._array(shard, "tokens")[a:b] for shard, a, b in self._ranges(start, count)]

    def may_be_target(self, start: int, count: int) -> NDArray[np.bool_]:
        """Bool [count]: which of the tokens may be targets according to the source's loss mask."""
        parts = [
            self._array(shard, "mask")[a:b]
            if self._shards[shard].masked
            else np.ones(b - a, np.uint8)
            for shard, a, b in self._ranges(start, count)
        ]
        return np.concatenate(parts).astype(np.bool_)

    def document_ends(self, start: int, count: int) -> NDArray[np.int64]:
        """Ends of the documents, in tokens from the start of the split, that lie in
        ``start + 1 .. start + count``.
        """
        parts = []
        for shard, a, b in self._ranges(start, count):
            ends = self._array(shard, "ends")
            first, last = np.searchsorted(ends, np.array([a, b], ends.dtype), side="right")
            parts.append(ends[first:last].astype(np.int64) + self._token_starts[shard])
        return np.concatenate(parts)

    def document_span(self, document: int) -> tuple[int, int]:
        """Start and end of a document, in tokens from the start of the split, its end-of-document
        id included.
        """
        shard = int(np.searchsorted(self._document_starts, document, side="right")) - 1
        ends, local = self._array(shard, "ends"), document - int(self._document_starts[shard])
        base = int(self._token_starts[shard])
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])

    def documents_longer_than(self, tokens: int) -> int:
        """How many documents have more than ``tokens`` ids, the end-of-document id included."""
        count = 0
        for shard in range(len(self._shards)):
            lengths = np.diff(self._array(shard, "ends"), prepend=np.uint64(0))
            count += int(np.count_nonzero(lengths > tokens))
        return count

    def _ranges(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """(shard, first token, last token + 1) for a range of the sequence."""
        shard = int(self._token_starts.searchsorted(start, side="right")) - 1
        found, end = [], start + count
        while start < end:
            base, limit = int(self._token_starts[shard]), int(self._token_starts[shard + 1])
            found.append((shard, start - base, min(end, limit) - base))
            start, shard = limit, shard + 1
        return found

    def _array(self, shard: int, kind: str) -> NDArray[Any]:
        key = (shard, kind)
        array = self._maps.get(key)
        if array is None:
            with self._lock:
                path = self._folder / f"{self._shards[shard].name}.{kind}"
                with open(path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                array = np.frombuffer(mapped, dtype=self._types[kind])
                if kind == "ends" and shard not in self._sound:
                    self._check_ends(shard, array)
                self._maps[key] = array
                # The file of an array that leaves stays mapped while anyone reads a view of it.
                while len(self._maps) > _OPEN_FILES:
                    self._maps.popitem(last=False)
        return array


class TokenStore:
    """A prepared folder. Raises `ConfigError` if it is unfinished, of another format, or a file has
    another size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        dtype = self.manifest["dtype"]
        self.splits = {
            name: TokenSplit(folder, dtype, self.manifest["splits"][name]["shards"])
            for name in SPLITS
        }

    @property
    def content(self) -> str:
        """sha256, hex, of everything that decides what is read: token files, tokenizer, type."""
        return str(self.manifest["content"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, checked against the sizes of the files beside it."""
    path = folder / MANIFEST
    try:
        manifest = files.read_json(str(path), _LARGEST_MANIFEST)
    except FileNotFoundError:
        state = "is unfinished" if any(folder.glob("unit-*.json")) else "is not a prepared folder"
        raise ConfigError(
            f"{folder} {state}: it has no {MANIFEST}; python -m parallel2d.data prepare writes it"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else files.printable(error)
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    kind = None
    if isinstance(manifest, dict):
        kind = manifest.get("format"), manifest.get("version")
    if kind != (FORMAT, VERSION):
        raise ConfigError(
            f"{path} is not of the format {FORMAT!r} version {VERSION}; prepare the data again"
        )
    try:
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({files.printable(error)}); prepare the data again"
        ) from None
    for name, expected in shard_files(manifest):
        _check_size(folder / name, expected["bytes"])
    return manifest


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise ConfigError(f"{path} {found}, the manifest says {expected}; prepare the data again")


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError for what `prepare` cannot have
    written."""
    item = np.dtype(_one_of(manifest["dtype"], _TOKEN_TYPES)).itemsize
    tokenizer = manifest["tokenizer"]
    vocabulary = _count(tokenizer["vocab_size"], 1 << 32)
    _count(tokenizer["end_id"], vocabulary - 1)
    texts = [tokenizer["name"], tokenizer["fingerprint"], manifest["signature"]]
    for text in [*texts, manifest["content"]]:
        if not isinstance(text, str) or not text.isprintable() or len(text) > 1000:
            raise ValueError(f"{text!r:.60} is no text")
    for key in ("bytes", "empty_documents", "bad_rows"):
        _count(manifest[key])
    if set(manifest["splits"]) != set(SPLITS):
        raise ValueError("its splits are not train and validation")
    for name, split in manifest["splits"].items():
        for shard in split["shards"]:
            _check_shard(shard, item)
        for key in ("tokens", "documents"):
            if _count(split[key]) != sum(shard[key] for shard in split["shards"]):
                raise ValueError(f"{name}: the {key} of its shards do not add up")


def _check_shard(shard: dict[str, Any], item: int) -> None:
    name, tokens, documents = shard["name"], _count(shard["tokens"]), _count(shard["documents"])
    if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.60} is no name of a shard")
    if documents > tokens:
        raise ValueError(f"{name}: {documents} documents in {tokens} tokens")
    sizes = {f"{name}.tokens": item * tokens, f"{name}.ends": 8 * documents, f"{name}.mask": tokens}
    if not {f"{name}.tokens", f"{name}.ends"} <= shard["files"].keys() <= sizes.keys():
        raise ValueError(f"{name}: its files are not tokens, ends and perhaps mask")
    for file, entry in shard["files"].items():
        if entry["bytes"] != sizes[file] or not _SHA256.fullmatch(entry["sha256"]):
            raise ValueError(f"{file}: its size or checksum is impossible")


def _count(value: Any, largest: int = 2**53) -> int:
    if not files.is_count(value, largest):
        raise ValueError(f"{value!r:.40} is no number from 0 to {largest}")
    return value


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r:.40} is not one of {', '.join(allowed)}")
    return str(value)


def shard_files(manifest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(file name, {"bytes", "sha256"}) of every file that a manifest lists."""
    return [
        (name, entry)
        for split in SPLITS
        for shard in manifest["splits"][split]["shards"]
        for name, entry in shard["files"].items()
    ]


def verify(folder: Path) -> int:
    """Reads every file against its sha256 and returns the number of bytes; raises `ConfigError`
    naming a bad file.
    """
    total = 0
    for name, entry in shard_files(read_manifest(folder)):
        with open(folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise ConfigError(
                f"{folder / name} is damaged: sha256 {found}, the manifest says {entry['sha256']}"
            )
        total += entry["bytes"]
    return total
