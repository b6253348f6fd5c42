"""Token shards on disk: the format, the writer `ShardWriter` and the reader `TokenStore`.

A prepared folder contains

  manifest.json        written last: a folder without it is unfinished
  train-00000.tokens   token ids, little-endian, in the smallest unsigned type for the vocabulary
  train-00000.ends     uint64 little-endian per document: its end, in tokens from the start of the
                       shard
  train-00000.mask     uint8 per token, 1 = may be a target; absent if all tokens may be targets
  validation-00000.*   the same for the held-out documents

Shards are raw arrays and contain no code. The shards are memory-mapped, so all processes of a
machine share one copy. Each document ends with the end-of-document id.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import operator
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.base import files
from parallel2d.base.errors import ConfigError

FORMAT = "parallel2d tokens"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
TOKENIZER = ("name", "vocab_size", "end_id", "fingerprint")
COUNTS = ("bytes", "empty_documents", "bad_rows")
# Number of files of a split that stay mapped. With thousands of shards, this limits memory maps
_OPEN_FILES = 64
_TOKEN_TYPES = {"|u1": 1, "<u2": 2, "<u4": 4}  # dtype -> bytes per id
_LARGEST_MANIFEST = 256 * 2**20
_SHARD_NAME, _SHA256 = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"), re.compile(r"[0-9a-f]{64}")
_TYPES = {"tokens": None, "ends": "<u8", "mask": "|u1"}


def token_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned little-endian type for ids below ``vocab_size``."""
    for name, size in _TOKEN_TYPES.items():
        if vocab_size <= 256**size:
            return name
    raise ConfigError(f"the tokenizer has {vocab_size} ids; at most {256**4} can be stored")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically and durably."""
    files.replace(str(path), json.dumps(value, indent=1), durable=True)


# The ids of a document, 1-D, with the end-of-document id, and a uint8 mask: 1 for ids that may be
# targets. None in place of the mask: all ids may be targets
MarkedTokens = tuple[NDArray[Any], NDArray[np.uint8] | None]


class ShardWriter:
    """Writes one shard to temporary files, and renames them when the shard is complete."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._name, self._dtype = name, dtype
        self._paths = {kind: folder / f"{name}.{kind}" for kind in _TYPES}
        self._hashes = {kind: hashlib.sha256() for kind in _TYPES}
        self._files = {
            kind: open(f"{path}.{os.getpid()}.tmp", "wb")  # noqa: SIM115  closed in finish
            for kind, path in self._paths.items()
        }
        self.tokens = self.documents = 0
        self._masked = False

    def add(self, documents: list[MarkedTokens]) -> None:
        """Append documents to the shard."""
        ends = self.tokens + np.cumsum([len(ids) for ids, _ in documents])
        for ids, mask in documents:
            # Most corpora have no masks, so the mask file begins only with the first mask. Ones are
            # written for all earlier tokens.
            if mask is not None and not self._masked:
                self._append("mask", np.ones(self.tokens, np.uint8))
                self._masked = True
            if self._masked:
                self._append("mask", np.ones(len(ids), np.uint8) if mask is None else mask)
            self._append("tokens", ids.astype(self._dtype, copy=False))
            self.tokens += len(ids)
        self._append("ends", ends.astype("<u8"))
        self.documents += len(documents)

    def _append(self, kind: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._hashes[kind].update(data)
        self._files[kind].write(data)

    def finish(self) -> dict[str, Any]:
        """Flush the shard to disk, unless it is empty; return its manifest entry."""
        entries = {}
        for kind, file in self._files.items():
            if self.documents and (kind != "mask" or self._masked):
                # fsync comes before the rename. Otherwise, after a crash, a file with its final
                # name could have incomplete content, and the unit would look finished.
                file.flush()
                os.fsync(file.fileno())
                size, path = file.tell(), self._paths[kind]
                os.replace(file.name, path)
                entries[path.name] = {"bytes": size, "sha256": self._hashes[kind].hexdigest()}
        counts = {"tokens": self.tokens, "documents": self.documents}
        return {"name": self._name, **counts, "files": entries}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files, and delete the temporary files that were not renamed."""
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)


class TokenSplit:
    """One split of a prepared folder: its documents, as one sequence of token ids over all shards.
    ``tokens`` and ``documents``: their numbers."""

    def __init__(self, folder: Path, dtype: str, shards: list[dict[str, Any]]) -> None:
        self._folder, self._types = folder, {**_TYPES, "tokens": dtype}
        self._shards = [shard for shard in shards if shard["documents"]]
        self._masked = [f"{shard['name']}.mask" in shard["files"] for shard in self._shards]
        starts = [(0, 0), *map(operator.itemgetter("tokens", "documents"), self._shards)]
        self._token_starts, self._document_starts = np.cumsum(starts, axis=0).T
        self.tokens, self.documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        self.masked = any(self._masked)
        self._sound: set[int] = set()  # shards whose document ends were checked
        # A file that is dropped from the cache stays mapped as long as a view of its array exists.
        self._array = functools.lru_cache(_OPEN_FILES)(self._mapped)

    def ids(self, start: int, count: int) -> NDArray[Any]:
        """Return ``count`` token ids from ``start``, as a view if they are in one shard."""
        parts = []
        for shard, a, b in self._ranges(start, count):
            parts.append(self._array(shard, "tokens")[a:b])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def may_be_target(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return bool [count] for the tokens from ``start``: True for tokens that may be
        targets."""
        parts = []
        for shard, a, b in self._ranges(start, count):
            parts.append(
                self._array(shard, "mask")[a:b] if self._masked[shard] else np.ones(b - a, np.uint8)
            )
        return np.concatenate(parts).astype(np.bool_)

    def document_ends(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the ends of documents, as token positions in the split, from ``start + 1`` to
        ``start + count``."""
        parts = []
        for shard, a, b in self._ranges(start, count):
            ends = self._array(shard, "ends")
            first, last = np.searchsorted(ends, np.array([a, b], ends.dtype), side="right")
            parts.append(ends[first:last].astype(np.int64) + self._token_starts[shard])
        return np.concatenate(parts)

    def document_span(self, document: int) -> tuple[int, int]:
        """Return the start and end of a document, as token positions in the split. The document
        includes its end id."""
        shard = int(np.searchsorted(self._document_starts, document, side="right")) - 1
        ends, local = self._array(shard, "ends"), document - int(self._document_starts[shard])
        base = int(self._token_starts[shard])
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])

    def document_sizes(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the sizes in tokens of ``count`` documents from ``first``, end ids included."""
        spans = list(map(self.document_span, range(first, first + count)))
        return np.array([end - begin for begin, end in spans], np.int64)

    def documents_longer_than(self, tokens: int) -> int:
        """Return the number of documents with more than ``tokens`` ids, end ids included."""
        count = 0
        for shard in range(len(self._shards)):
            lengths = np.diff(self._array(shard, "ends"), prepend=np.uint64(0))
            count += int(np.count_nonzero(lengths > tokens))
        return count

    def _ranges(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """Return (shard, begin, end) for each shard in a range of the sequence. Begin and end are
        token positions in the shard."""
        shard = int(self._token_starts.searchsorted(start, side="right")) - 1
        found, end = [], start + count
        while start < end:
            base, limit = int(self._token_starts[shard]), int(self._token_starts[shard + 1])
            found.append((shard, start - base, min(end, limit) - base))
            start, shard = limit, shard + 1
        return found

    def _mapped(self, shard: int, kind: str) -> NDArray[Any]:
        path = self._folder / f"{self._shards[shard]['name']}.{kind}"
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(mapped, dtype=self._types[kind])
        if kind == "ends" and shard not in self._sound:
            # The ends are checked once per shard, because a binary search in unsorted ends would
            # give wrong positions.
            ascending = bool(np.all(array[1:] > array[:-1]))
            if array[0] == 0 or array[-1] != self._shards[shard]["tokens"] or not ascending:
                raise ConfigError(
                    f"{path} is damaged: its documents do not end one after the other; prepare the "
                    "data again"
                )
            self._sound.add(shard)
        return array


class TokenStore:
    """A prepared folder. Raises `ConfigError` if it is unfinished, has another format, or if files
    have other sizes than in its manifest."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        # SHA-256 in hex of everything that determines the samples: token files, tokenizer and dtype
        self.content = str(self.manifest["content"])
        dtype, splits = self.manifest["dtype"], self.manifest["splits"]
        self.splits = {name: TokenSplit(folder, dtype, splits[name]["shards"]) for name in SPLITS}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder, and check the sizes of the files against it."""
    path = folder / MANIFEST
    try:
        manifest = files.read_json(str(path), _LARGEST_MANIFEST)
    except FileNotFoundError:
        state = "is unfinished" if any(folder.glob("unit-*.json")) else "is not a prepared folder"
        raise ConfigError(
            f"{folder} {state}: it has no {MANIFEST}; python -m parallel2d.data prepare writes it"
        ) from None
    except (OSError, ValueError) as error:
        reason = files.printable(getattr(error, "strerror", None) or error)
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    try:
        _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({files.printable(error)}); prepare the data again"
        ) from None
    check_sizes(folder, manifest)
    return manifest


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise `ConfigError` if a file is missing or does not have the size in ``manifest``, which may
    also be the record of a unit."""
    for name, entry in shard_files(manifest):
        path, expected = folder / name, entry["bytes"]
        try:
            files.inside(str(folder), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; prepare the data again") from None
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ConfigError(
                f"{path} {found}, the manifest says {expected}; prepare the data again"
            )


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError for a manifest that `prepare` cannot
    have written."""
    kind = manifest.get("format"), manifest.get("version")
    _require(kind == (FORMAT, VERSION), f"it is not of the format {FORMAT!r}, version {VERSION}")
    tokenizer, splits = manifest["tokenizer"], manifest["splits"]
    for text in (tokenizer["name"], tokenizer["fingerprint"], manifest["signature"]):
        _require(text.isprintable() and len(text) <= 1000, f"{text!r:.60} is not text")
    _require(_SHA256.fullmatch(manifest["content"]), "its content is not a sha256")
    _require(files.is_count(tokenizer["vocab_size"], 256**4), "its vocabulary size is not a count")
    _require(files.is_count(tokenizer["end_id"], tokenizer["vocab_size"] - 1), "it has no end_id")
    for key in COUNTS:
        _require(files.is_count(manifest[key], 2**53), f"{key} is not a count")
    _require(set(splits) == set(SPLITS), "its splits are not train and validation")
    for name, split in splits.items():
        for shard in split["shards"]:
            _check_shard(shard, _TOKEN_TYPES[manifest["dtype"]])
        for key in ("tokens", "documents"):
            total = sum(shard[key] for shard in split["shards"])
            _require(split[key] == total, f"{name}: the {key} of its shards do not add up")


def _check_shard(shard: dict[str, Any], item: int) -> None:
    name, tokens, documents = shard["name"], shard["tokens"], shard["documents"]
    _require(_SHARD_NAME.fullmatch(name), f"{name!r:.60} is not the name of a shard")
    for count, most in ((tokens, 2**53), (documents, tokens)):
        _require(files.is_count(count, most), f"{name}: {count!r:.40} is not a number up to {most}")
    sizes = {f"{name}.tokens": item * tokens, f"{name}.ends": 8 * documents, f"{name}.mask": tokens}
    known = {f"{name}.tokens", f"{name}.ends"} <= shard["files"].keys() <= sizes.keys()
    _require(known, f"{name}: its files must be .tokens, .ends and optionally .mask")
    for file, entry in shard["files"].items():
        sound = entry["bytes"] == sizes[file] and _SHA256.fullmatch(entry["sha256"])
        _require(sound, f"{file}: its size or checksum is impossible")


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def shard_files(manifest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, dict with ``bytes`` and ``sha256``) of every file in a manifest."""
    found: list[tuple[str, dict[str, Any]]] = []
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            found += shard["files"].items()
    return found


def verify(folder: Path) -> int:
    """Read all files, compare their SHA-256 with the manifest, and return the number of bytes.
    Raises `ConfigError` with the name of the first damaged file."""
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
