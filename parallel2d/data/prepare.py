"""Tokenizes documents into token shards (see `token_shards`): `prepare`.

Preparation is resumable, and its output has the same bytes whatever the number of workers. Work is
done in units: the shards of a unit are moved into place and then its record ``unit-00007.json`` is
written, so a kill loses at most the units in progress. The manifest is written last, and a folder
without it is not readable.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.data import token_shards as store
from parallel2d.data.documents import HASH_RANGE, BadRow, Document, ReadOptions, SourceFile, Unit
from parallel2d.data.preparation_pool import run_in_workers
from parallel2d.data.reading import read_unit
from parallel2d.data.tokenizer import Tokenizer, load_tokenizer
from parallel2d.errors import ConfigError
from parallel2d.files import flush_folder

_BATCH_CHARACTERS = 1 << 20  # given to the tokenizer at a time: bounds memory
_BATCH_DOCUMENTS = 1024
_REPORTED_ROWS = 10

Record = dict[str, Any]
Progress = Callable[[int, int, Record], None]


@dataclass(frozen=True)
class PrepareOptions:
    """The options that, with the input, decide the content of a prepared folder."""

    tokenizer: str = "bytes"
    end_token: str | None = None
    validation_fraction: float = 0.02
    max_bad_rows: int = 0
    read: ReadOptions = field(default_factory=ReadOptions)


def prepare(
    units: list[Unit],
    options: PrepareOptions,
    folder: Path,
    *,
    source: str,
    workers: int = 1,
    lock: int | None = None,
    progress: Progress | None = None,
) -> store.TokenStore:
    """Prepares ``units`` into ``folder`` and opens it. The caller holds the folder's lock.

    Args:
        source: how messages name the input, e.g. ``data.path=corpus/``.
        workers: number of processes; with 1 this process does the work.
        lock: descriptor of the folder's lock, which workers inherit (see `lock.folder_lock`).
        progress: called with (units done, units, record) after each unit.

    Raises `ConfigError` for input that is empty or has more bad rows than allowed. Nothing is
    published then.
    """
    tokenizer = load_tokenizer(options.tokenizer, options.end_token)
    folder.mkdir(parents=True, exist_ok=True)
    threshold = int(options.validation_fraction * HASH_RANGE)
    jobs = [
        Preparation(number, unit, options, threshold, tokenizer.fingerprint)
        for number, unit in enumerate(units)
    ]
    signature = hashlib.sha256("".join(job.signature for job in jobs).encode()).hexdigest()
    if (folder / store.MANIFEST).exists():
        return _kept(folder, signature)
    for leftover in folder.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    records = _run(jobs, folder, source, workers, lock, progress, tokenizer)
    documents = {
        name: sum(record[name]["documents"] for record in records) for name in store.SPLITS
    }
    if threshold and not documents["validation"] and documents["train"] >= 2:
        # There are few documents and the fraction selected none. Hold out the one with the lowest
        # hash, which depends on the content only.
        number = min(range(len(records)), key=lambda index: records[index]["lowest_hash"])
        job = Preparation(
            number,
            units[number],
            options,
            records[number]["lowest_hash"] + 1,
            tokenizer.fingerprint,
        )
        records[number] = _run([job], folder, source, 1, lock, None, tokenizer)[0]
    _publish(records, options, tokenizer, folder, source, signature)
    _clean(folder)
    return store.TokenStore(folder)


def _kept(folder: Path, signature: str) -> store.TokenStore:
    finished = store.TokenStore(folder)
    if finished.manifest["signature"] != signature:
        raise ConfigError(
            f"{folder} already holds data prepared from other input or with other options; remove "
            "it or choose another folder"
        )
    _clean(folder)
    return finished


@dataclass(frozen=True)
class Preparation:
    """One unit, and everything that its shards depend on."""

    number: int
    unit: Unit
    options: PrepareOptions
    threshold: int
    tokenizer: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Preparation:
        """The job that ``asdict`` converted to ``values``."""
        unit, options = values["unit"], values["options"]
        files = [SourceFile(**file) for file in unit["files"]]
        return cls(
            values["number"],
            Unit(**{**unit, "files": files}),
            PrepareOptions(**{**options, "read": ReadOptions(**options["read"])}),
            values["threshold"],
            values["tokenizer"],
        )

    @cached_property
    def signature(self) -> str:
        """Equal exactly if a finished record of an earlier run can be kept."""
        stats = [os.stat(file.path) for file in self.unit.files if os.path.exists(file.path)]
        # How many bad rows are allowed changes no record.
        content = replace(self, options=replace(self.options, max_bad_rows=0))
        state = [
            asdict(content),
            store.VERSION,
            [(stat.st_size, stat.st_mtime_ns) for stat in stats],
        ]
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _run(
    jobs: list[Preparation],
    folder: Path,
    source: str,
    workers: int,
    lock: int | None,
    progress: Progress | None,
    tokenizer: Tokenizer,
) -> list[Record]:
    """The records of all jobs, in order; those that an earlier run finished are kept."""
    records: dict[int, Record] = {}
    for job in jobs:
        record = _finished(job, folder)
        if record is not None:
            records[job.number] = record
    left = [job for job in jobs if job.number not in records]
    bad = BadRows(source, jobs[0].options.max_bad_rows if jobs else 0)
    for record in records.values():
        bad.add(record)
    with contextlib.closing(_results(left, folder, workers, lock, tokenizer)) as results:
        for number, record in results:
            records[number] = record
            if progress is not None:
                progress(len(records), len(jobs), record)
            bad.add(record)
    return [records[job.number] for job in jobs]


def _results(
    jobs: list[Preparation], folder: Path, workers: int, lock: int | None, tokenizer: Tokenizer
) -> Generator[tuple[int, Record]]:
    if min(workers, len(jobs)) <= 1:
        return ((job.number, run_unit(job, folder, tokenizer)) for job in jobs)
    return run_in_workers([{**asdict(job), "folder": str(folder)} for job in jobs], workers, lock)


def _finished(job: Preparation, folder: Path) -> Record | None:
    try:
        record: Record = json.loads(_record_path(folder, job.number).read_text(encoding="utf-8"))
        complete = record["signature"] == job.signature and all(
            (folder / name).stat().st_size == entry["bytes"]
            for split in store.SPLITS
            for name, entry in record[split]["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if complete else None


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"unit-{number:05d}.json"


def run_unit(job: Preparation, folder: Path, tokenizer: Tokenizer) -> Record:
    """Tokenizes one unit into a shard per split and returns (and writes) its record."""
    dtype = store.token_dtype(tokenizer.vocab_size)
    writers = {
        name: store.ShardWriter(folder, f"{name}-{job.number:05d}", dtype) for name in store.SPLITS
    }
    record: Record = {"signature": job.signature, "lowest_hash": HASH_RANGE, "bytes": 0, "empty": 0}
    bad_rows: list[BadRow] = []
    bad_count = 0
    batch: list[Document] = []
    characters = 0
    try:
        for item in read_unit(job.unit, job.options.read):
            if isinstance(item, BadRow):
                bad_count += 1
                bad_rows = [*bad_rows, item][:_REPORTED_ROWS]
                continue
            if not item.text:
                record["empty"] += 1
                continue
            record["lowest_hash"] = min(record["lowest_hash"], item.hash)
            batch.append(item)
            characters += len(item.text)
            # The tokenizer works on a batch in parallel; all of a unit would take much memory.
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                record["bytes"] += _write(batch, writers, tokenizer, job.threshold)
                batch, characters = [], 0
        record["bytes"] += _write(batch, writers, tokenizer, job.threshold)
        for name, writer in writers.items():
            record[name] = writer.finish()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    record["bad_rows"] = {"count": bad_count, "first": [asdict(row) for row in bad_rows]}
    store.write_json(_record_path(folder, job.number), record)
    return record


def _write(
    batch: list[Document],
    writers: dict[str, store.ShardWriter],
    tokenizer: Tokenizer,
    threshold: int,
) -> int:
    """Appends a batch to the shards of its splits; returns the bytes of text."""
    pieces = [document.segments or [(document.text, True)] for document in batch]
    texts: list[str] = []
    for segments in pieces:
        texts += [text for text, _ in segments]
    encoded = iter(tokenizer.encode(texts))
    end = np.array([tokenizer.end_id], dtype=np.uint32)
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in writers}
    masks: dict[str, list[NDArray[np.uint8] | None]] = {name: [] for name in writers}
    for document, segments in zip(batch, pieces, strict=True):
        parts = [*itertools.islice(encoded, len(segments)), end]
        name = "validation" if document.hash < threshold else "train"
        rows[name].append(np.concatenate(parts))
        # All of a document without segments may be a target.
        masks[name].append(_target_mask(segments, parts) if document.segments else None)
    for name, writer in writers.items():
        writer.add(rows[name], masks[name])
    return sum(len(text.encode("utf-8")) for text in texts)


class BadRows:
    """Counts bad rows over units. Above the limit it raises `ConfigError` with files and lines of
    the first ones."""

    def __init__(self, source: str, limit: int) -> None:
        self._source, self._limit = source, limit
        self.count = 0
        self.first: list[dict[str, Any]] = []

    def add(self, record: Record) -> None:
        """Counts the bad rows of one unit."""
        self.count += record["bad_rows"]["count"]
        self.first = [*self.first, *record["bad_rows"]["first"]][:_REPORTED_ROWS]
        if self.count > self._limit:
            places = "; ".join(
                f"{row['file']}:{row['line']}: {row['reason']}" for row in self.first[:3]
            )
            more = f" (and {self.count - 3} more)" if self.count > 3 else ""
            raise ConfigError(
                f"{self._source} has {self.count} bad rows, data.max_bad_rows={self._limit} are "
                f"allowed: {places}{more}"
            )


def _publish(
    records: list[Record],
    options: PrepareOptions,
    tokenizer: Tokenizer,
    folder: Path,
    source: str,
    signature: str,
) -> None:
    splits = {name: _split_entry([record[name] for record in records]) for name in store.SPLITS}
    held_out = splits["validation"]["documents"]
    if not splits["train"]["documents"]:
        missing = "training document" if held_out else "document with text"
        raise ConfigError(f"{source} has no {missing}")
    if options.validation_fraction and not held_out:
        raise ConfigError(
            f"{source} is one document, which cannot be split; "
            f"data.validation_fraction={options.validation_fraction} must be 0 here"
        )
    manifest: dict[str, Any] = {
        "format": store.FORMAT,
        "version": store.VERSION,
        "dtype": store.token_dtype(tokenizer.vocab_size),
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "end_id": tokenizer.end_id,
            "fingerprint": tokenizer.fingerprint,
        },
        "signature": signature,
        "bytes": sum(record["bytes"] for record in records),
        "empty_documents": sum(record["empty"] for record in records),
        "bad_rows": sum(record["bad_rows"]["count"] for record in records),
        "splits": splits,
    }
    digests = [(name, entry["sha256"]) for name, entry in store.shard_files(manifest)]
    state = json.dumps([manifest["dtype"], tokenizer.fingerprint, digests])
    manifest["content"] = hashlib.sha256(state.encode()).hexdigest()
    flush_folder(str(folder))
    store.write_json(folder / store.MANIFEST, manifest)


def _target_mask(segments: list[tuple[str, bool]], parts: list[NDArray[Any]]) -> NDArray[np.uint8]:
    """uint8 per token of ``parts``: those of the segments and the end of the document."""
    flags = [loss for _, loss in segments]
    # The end-of-document id is a target if the segment before it is one.
    flags.append(flags[-1])
    return np.repeat(np.array(flags, np.uint8), [len(part) for part in parts])


def _split_entry(shards: list[Record]) -> Record:
    filled = [shard for shard in shards if shard["documents"]]
    totals = {key: sum(shard[key] for shard in filled) for key in ("tokens", "documents")}
    return {**totals, "shards": filled}


def _clean(folder: Path) -> None:
    """Removes the files that a published folder does not need: records, and shards of an attempt
    with other input."""
    needed = {name for name, _ in store.shard_files(store.read_manifest(folder))}
    for pattern in ("unit-*.json", "train-*.*", "validation-*.*"):
        for path in folder.glob(pattern):
            if path.name not in needed:
                path.unlink(missing_ok=True)
