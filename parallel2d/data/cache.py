"""The cache of prepared folders: one folder per content, prepared once, under a lock. Start at
`open_cached`.

Any number of processes may open the same folder at once. The first takes the lock and prepares it;
the others wait and open the published folder. The lock is flock, which the kernel releases however
its holder ends. The next process keeps what a killed holder had finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from parallel2d.data import token_shards as store
from parallel2d.data.documents import SourceFile
from parallel2d.data.lock import folder_lock
from parallel2d.data.prepare import PrepareOptions
from parallel2d.data.tokenizer import load_tokenizer
from parallel2d.errors import ConfigError

# Larger input is identified by names, sizes and modification times instead of by content
_READ_WHOLE = 256 << 20


def cache_root(cache_dir: str | None) -> Path:
    """``data.cache_dir``, or ``parallel2d`` in the user's XDG cache folder."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "parallel2d"


def files_identity(files: list[SourceFile]) -> str:
    """A hex digest that changes when a file's name or content does."""
    digest = hashlib.sha256()
    try:
        _digest_files(files, digest)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _digest_files(files: list[SourceFile], digest: hashlib._Hash) -> None:
    sizes = [os.path.getsize(file.path) for file in files]
    whole = sum(sizes) <= _READ_WHOLE
    for file, size in zip(files, sizes, strict=True):
        digest.update(json.dumps([file.name, size]).encode())
        if whole:
            with open(file.path, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        else:
            digest.update(str(os.stat(file.path).st_mtime_ns).encode())


def options_key(options: PrepareOptions, source: str) -> str:
    """A hex digest of a source's identity, the options, the tokenizer and the format's version."""
    tokenizer = load_tokenizer(options.tokenizer, options.end_token).fingerprint
    values = {**asdict(options), "tokenizer": tokenizer, "version": store.VERSION}
    return hashlib.sha256(json.dumps([source, values], sort_keys=True).encode()).hexdigest()[:32]


def open_cached(
    root: Path, name: str, key: str, make: Callable[[Path, int], store.TokenStore]
) -> store.TokenStore:
    """The prepared folder ``root/name-key``. ``make(folder, lock)`` prepares it under a lock if it
    is missing or damaged.

    Raises `ConfigError` if the cache cannot be written.
    """
    folder = root / f"{name}-{key}"
    found = _published(folder)
    if found is not None:
        return found
    try:
        with folder_lock(folder) as lock:
            # Another process may have prepared it while this one waited for the lock.
            found = _published(folder)
            if found is not None:
                return found
            # A damaged folder must not look finished while it is prepared again.
            (folder / store.MANIFEST).unlink(missing_ok=True)
            return make(folder, lock)
    except OSError as error:
        raise ConfigError(
            f"the data cache {root} is not writable ({error.strerror or error}: "
            f"{error.filename or folder}); set data.cache_dir to a folder that can"
        ) from error


def _published(folder: Path) -> store.TokenStore | None:
    """The prepared folder, or None if it is missing or damaged; then it is prepared again."""
    with contextlib.suppress(ConfigError):
        return store.TokenStore(folder)
    return None
