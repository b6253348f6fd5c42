"""`prepare` tokenizes raw input into a folder of token shards (see `token_shards`).

The input is divided into units of work. When a unit is finished, its shards get their final names,
and then its record ``unit-00007.json`` is written. If the process is killed, the next call
continues after the finished units. The manifest is written last, because readers accept only a
folder with a manifest. The output does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from parallel2d.base import files
from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.training.data import reading
from parallel2d.training.data import token_shards as store
from parallel2d.training.data.chat import ChatTemplate
from parallel2d.training.data.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_REPORTED_ROWS = 3
# Number of bad rows, above the allowed number, after which reading of a unit stops
_MORE_BAD_ROWS = 1000
# Limits per call of the tokenizer, which bound memory
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 1024

Record = dict[str, Any]


@dataclass(frozen=True)
class UnitJob:
    """A unit of work, with everything that determines its shards."""

    folder: Path
    number: int
    unit: reading.Unit
    config: DataConfig
    threshold: int  # documents with a smaller hash are held out
    signature: str  # digest of the input and of the options

    @property
    def record(self) -> Path:
        """Path of the record, which is written after the shards of the unit have their final
        names."""
        return self.folder / f"unit-{self.number:05d}.json"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[int]:
    """Create the folder, and hold its lock inside the context. The lock excludes other processes on
    all machines that share the file system. Yields the lock's file descriptor.

    A flock(2) belongs to the open file: the kernel releases it when the last process that inherited
    the descriptor has ended. Workers inherit the descriptor. If their parent is killed, the next
    holder also waits for these workers, so that two preparations never write to the folder at the
    same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def content_key(config: DataConfig, identity: str, tokenizer: Tokenizer) -> str:
    """Return a hex digest of the input's identity and of every option that affects the shards."""
    cut = {"text_field": config.text_field, "document_bytes": reading.document_bytes(config)}
    options = {
        "tokenizer": tokenizer.fingerprint,
        "end_token": config.end_token,
        "validation_fraction": config.validation_fraction,
        "max_bad_rows": _allowed_bad_rows(config),
        "read": cut,
        "version": store.VERSION,
    }
    if config.name == "chat":
        options["chat"] = ChatTemplate(config).fingerprint
    return hashlib.sha256(json.dumps([identity, options], sort_keys=True).encode()).hexdigest()[:32]


def _allowed_bad_rows(config: DataConfig) -> int:
    # Some files of the standard library are not readable as text; their number depends on the
    # Python version.
    return 100 if config.name == "stdlib" else config.max_bad_rows


def worker_count(workers: int | str) -> int:
    """Return the number of worker processes; ``auto`` is one per core available to this process."""
    if workers != "auto":
        return int(workers)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    config: DataConfig,
    units: list[reading.Unit],
    identity: str,
    folder: Path,
    lock: int,
    progress: Callable[[int], object] = lambda done: None,
) -> store.TokenStore:
    """Prepare the input of ``config`` into ``folder``, and open the folder.

    Args:
        units, identity: the result of `reading.find_units` for ``config``.
        lock: descriptor of the folder's lock (`folder_lock`), which the caller holds.
        progress: called with the number of finished units.

    Raises `ConfigError` for empty input or too many bad rows; the folder then has no manifest.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.end_token)
    # The number of allowed bad rows does not affect the shards.
    signature = content_key(replace(config, max_bad_rows=0), identity, tokenizer)
    if (folder / store.MANIFEST).exists():
        finished = store.TokenStore(folder)
        if finished.manifest["signature"] != signature:
            raise ConfigError(
                f"{folder} already holds data prepared from other input or with other options; "
                "remove it or choose another folder"
            )
        _clean(folder, finished.manifest)
        return finished
    for leftover in folder.glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    threshold = int(config.validation_fraction * reading.HASH_RANGE)
    jobs = []
    for n, unit in enumerate(units):
        jobs.append(UnitJob(folder, n, unit, config, threshold, signature))
    records: list[Record] = []
    # Closing the generator also ends its workers.
    with contextlib.closing(_records(jobs, tokenizer, lock)) as found:
        for record in found:
            records.append(record)
            progress(len(records))
            if record["bad_rows"]:
                _check_bad_rows(config, records)
    splits = _splits(records)
    if threshold and not splits["validation"]["documents"] and splits["train"]["documents"] >= 2:
        # The fraction has selected no document, because the input has few documents. Hold out the
        # document with the lowest hash: this choice depends only on the content.
        chosen = min(jobs, key=lambda job: records[job.number]["lowest_hash"])
        again = replace(chosen, threshold=records[chosen.number]["lowest_hash"] + 1)
        (records[chosen.number],) = _records([again], tokenizer, lock)
    manifest = _manifest(config, signature, tokenizer, records)
    # Every unit has flushed its files, and this call persists their names. The manifest is written
    # only afterwards, because it declares the folder complete. The records of the units are deleted
    # last: if the process is killed before the manifest exists, the next call continues from these
    # records.
    files.flush_folder(str(folder))
    store.write_json(folder / store.MANIFEST, manifest)
    _clean(folder, manifest)
    return store.TokenStore(folder)


def _records(jobs: list[UnitJob], tokenizer: Tokenizer, lock: int) -> Generator[Record]:
    """Yield the record of each job in order. The record may be written by an earlier call, by a
    worker, or by this process."""
    left = []
    for job in jobs:
        if _record(job) is None:
            left.append(job)
    with contextlib.ExitStack() as stack:
        workers = _fork_workers(stack, left, lock)
        turns = dict(zip((job.number for job in left), itertools.cycle(workers), strict=False))
        for job in jobs:
            # A worker writes a line after each unit. If a worker has ended with an error, the unit
            # runs again in this process, which raises the same error with its cause.
            worker = turns.get(job.number)
            if worker is not None and not worker.stdout.readline() and worker.wait() < 0:
                raise RuntimeError(
                    f"the process that prepared {job.unit.files[0].name} was killed by signal "
                    f"{-worker.returncode}; finished units are kept; start again to continue"
                )
            record = _record(job)
            if record is None:
                run_unit(job, tokenizer)
                record = _record(job)
            assert record is not None, job.record
            yield record


def _record(job: UnitJob) -> Record | None:
    """Read the record of a finished unit. Return None if the unit is unfinished, if a file is
    missing, or if the record belongs to other input or options."""
    try:
        record: Record = files.read_json(str(job.record))
        store.check_sizes(job.folder, record)
        same = (record["signature"], record["threshold"]) == (job.signature, job.threshold)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if same else None


def _fork_workers(stack: contextlib.ExitStack, jobs: list[UnitJob], lock: int) -> list[Any]:
    """Start worker processes, among which the jobs are divided. Return an empty list for a single
    job or worker.

    The workers are separate programs and not forks, so they do not inherit threads or sockets of
    this process, and do not import the caller's main module. If the parent is killed, a worker
    still finishes its current unit.
    """
    count = min(worker_count(jobs[0].config.workers), len(jobs)) if jobs else 0
    workers: list[Any] = []
    for _ in range(count if count > 1 else 0):
        worker = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                "from parallel2d.training.data.prepare import work; work()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Workers import modules from the same path as this process
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[lock],
        )
        workers.append(stack.enter_context(worker))
        stack.callback(worker.kill)
    for number, worker in enumerate(workers):
        # `_records` detects a worker that has ended when it waits for the worker's first unit.
        with contextlib.suppress(BrokenPipeError), worker.stdin:
            pickle.dump(jobs[number::count], worker.stdin)
    return workers


def work() -> None:
    """Main program of a worker: run the jobs that the parent has pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops its workers
    lines = os.dup(1)
    # Send library output to stderr, because each line on stdout means a finished unit
    os.dup2(2, 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs: list[UnitJob] = pickle.load(sys.stdin.buffer)
    tokenizer = load_tokenizer(jobs[0].config.tokenizer, jobs[0].config.end_token)
    # The parent repeats the failed unit and raises the error, unless it has ended.
    with contextlib.suppress(ConfigError, OSError):
        for job in jobs:
            run_unit(job, tokenizer)
            os.write(lines, b"\n")


def run_unit(job: UnitJob, tokenizer: Tokenizer) -> None:
    """Write one shard for each split, then the record of the unit."""
    record: Record = {"signature": job.signature, "threshold": job.threshold}
    record |= {**dict.fromkeys(store.COUNTS, 0), "lowest_hash": reading.HASH_RANGE}
    bad: list[tuple[str, int, str]] = []
    most = _allowed_bad_rows(job.config) + _MORE_BAD_ROWS

    def report(file: str, line: int, reason: str) -> None:
        record["bad_rows"] += 1
        if len(bad) < _REPORTED_ROWS:
            bad.append((file, line, reason))
        if record["bad_rows"] > most:
            _check_bad_rows(job.config, [{**record, "first_bad": _places(job.unit, bad)}])

    dtype = store.token_dtype(tokenizer.vocab_size)
    names = []
    for split in store.SPLITS:
        names.append(f"{split}-{job.number:05d}")
    train, validation = (store.ShardWriter(job.folder, name, dtype) for name in names)
    with train, validation:
        for batch in _batches(reading.read_unit(job.unit, job.config, report)):
            documents = []
            for document in batch:
                if document.utf8:
                    documents.append(document)
            record["empty_documents"] += len(batch) - len(documents)
            rows: tuple[list[store.MarkedTokens], list[store.MarkedTokens]] = ([], [])
            for document, row in zip(documents, _encoded(documents, tokenizer), strict=True):
                number = reading.content_hash(document.utf8)
                rows[number < job.threshold].append(row)
                record["lowest_hash"] = min(record["lowest_hash"], number)
                record["bytes"] += len(document.utf8)
            train.add(rows[0])
            validation.add(rows[1])
        shards = {"train": train.finish(), "validation": validation.finish()}
    # The record is written after the renames in `finish`. If it exists, all shards of the unit are
    # complete, and a later call can skip the unit.
    record["splits"] = {name: {"shards": [shard]} for name, shard in shards.items()}
    record["first_bad"] = _places(job.unit, bad)
    store.write_json(job.record, record)


def _places(unit: reading.Unit, bad: list[tuple[str, int, str]]) -> list[str]:
    before = reading.lines_before(unit) if bad else 0
    # Names and reasons come from untrusted data, in which a line break could forge a second
    # message.
    places: list[str] = []
    for file, line, reason in bad:
        places.append(
            f"{files.printable(file, 300)}:{before + line}: {files.printable(reason, 300)}"
        )
    return places


def _batches(documents: Iterable[reading.Document]) -> Iterator[list[reading.Document]]:
    """Yield the documents in batches. The tokenizer runs in parallel over a batch, and the size of
    a batch bounds memory."""
    batch: list[reading.Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.utf8)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    yield batch


def _encoded(batch: list[reading.Document], tokenizer: Tokenizer) -> Iterator[store.MarkedTokens]:
    """Yield the ids of each document with the end-of-document id, and its mask; None in place of a
    mask if all ids may be targets."""
    texts: list[str] = []
    for document in batch:
        texts += [] if document.joined else [text for text, _ in document.parts]
    ids = iter(tokenizer.encode(texts))
    end = np.array([tokenizer.end_id], dtype=np.uint32)
    for document in batch:
        if document.joined:
            yield tokenizer.encode_marked(document.parts)
            continue
        parts = [*itertools.islice(ids, len(document.parts)), end]
        flags = []
        for _, target in document.parts:
            flags.append(target)
        mask = None
        if not all(flags):
            # The end of the document is a target if the part before it is a target.
            flags.append(flags[-1])
            mask = np.repeat(np.array(flags, np.uint8), list(map(len, parts)))
        yield np.concatenate(parts), mask


def _check_bad_rows(config: DataConfig, records: list[Record]) -> None:
    count, allowed = sum(record["bad_rows"] for record in records), _allowed_bad_rows(config)
    if count > allowed:
        places = itertools.chain.from_iterable(record["first_bad"] for record in records)
        shown = "; ".join(itertools.islice(places, _REPORTED_ROWS))
        more = f" (and {count - _REPORTED_ROWS} more)" * (count > _REPORTED_ROWS)
        raise ConfigError(
            f"{_source(config)} has {count} bad rows, data.max_bad_rows={allowed} are allowed: "
            f"{shown}{more}"
        )


def _source(config: DataConfig) -> str:
    return "data=stdlib" if config.name == "stdlib" else f"data.path={config.path}"


def _splits(records: list[Record]) -> Record:
    splits = {}
    for name in store.SPLITS:
        shards = []
        for record in records:
            shards += record["splits"][name]["shards"]
        splits[name] = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(shard["documents"] for shard in shards),
            # A unit may have no documents of this split.
            "shards": [shard for shard in shards if shard["documents"]],
        }
    return splits


def _manifest(
    config: DataConfig, signature: str, tokenizer: Tokenizer, records: list[Record]
) -> Record:
    """Combine the records to the manifest. Raises `ConfigError` if a requested split has no
    document."""
    splits = _splits(records)
    if not splits["train"]["documents"]:
        raise ConfigError(f"{_source(config)} has no document with text to train on")
    if config.validation_fraction and not splits["validation"]["documents"]:
        raise ConfigError(
            f"{_source(config)} is one document, which cannot be split; "
            f"data.validation_fraction={config.validation_fraction} must be 0 here"
        )
    manifest: Record = {
        "format": store.FORMAT,
        "version": store.VERSION,
        "dtype": store.token_dtype(tokenizer.vocab_size),
        "tokenizer": {key: getattr(tokenizer, key) for key in store.TOKENIZER},
        "signature": signature,
        "splits": splits,
    }
    manifest |= {key: sum(record[key] for record in records) for key in store.COUNTS}
    digests = []
    for name, entry in store.shard_files(manifest):
        digests.append((name, entry["sha256"]))
    state = json.dumps([manifest["dtype"], tokenizer.fingerprint, digests])
    return {**manifest, "content": hashlib.sha256(state.encode()).hexdigest()}


def _clean(folder: Path, manifest: Record) -> None:
    needed = dict(store.shard_files(manifest))
    for pattern in ("unit-*.json", "train-*.*", "validation-*.*"):
        for path in folder.glob(pattern):
            if path.name not in needed:
                path.unlink(missing_ok=True)
