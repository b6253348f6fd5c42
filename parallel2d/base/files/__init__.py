"""Reads and writes files in folders that other users may write to. Links are not followed, and
sizes and contents are checked before use. Start at `read_json` and `replace`."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any, BinaryIO, TypeGuard

MAX_COUNT = 2**63 - 1  # largest size or offset
MAX_DEPTH = 32  # deepest nesting of lists and dicts in a JSON value
MAX_FOLDERS = 100  # deepest nesting of folders
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def regular(path: str, flags: int) -> int:
    """``opener`` of `open` for a file in a run directory, to read or to write. Raises OSError for a
    link and for any other file that is not regular, such as a pipe."""
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "a symbolic link, which is not followed"
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, or a socket
            error.strerror = "not a regular file"
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError as `regular` does."""
    return open(path, "rb", opener=regular)


def inside(folder: str, path: str) -> str:
    """Return the path of a file in an untrusted folder, with all links resolved. Raises OSError for
    a link that leads out of the folder, and for a path that is not a regular file.

    In the cache of the Hugging Face Hub the files of a folder ``snapshots/REVISION`` are links
    into the folder ``blobs``, which belongs to the same model or data set.
    """
    root, real = os.path.realpath(folder), os.path.realpath(path)
    outer, kind = os.path.split(os.path.dirname(root))
    allowed = [root, os.path.join(outer, "blobs")] if kind == "snapshots" else [root]
    if all(os.path.commonpath([each, real]) != each for each in allowed):
        raise OSError(errno.ELOOP, "a path that leads out of its folder, and is not followed", path)
    if os.path.lexists(real) and not os.path.isfile(real):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return real


def read_json(path: str, largest: int = 16 * 2**20) -> Any:
    """Read a JSON file of at most ``largest`` bytes. Raises OSError as `open_regular` does, and
    ValueError as `parse` does or for a larger file."""
    with open_regular(path) as file:
        # One byte more than allowed is enough to see that a file is too large.
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"more than {largest} bytes")
    return parse(data)


def parse(data: bytes | str, *, unique: bool = False) -> Any:
    """Parse untrusted JSON.

    Raises:
        ValueError: for text that is not JSON or consists mostly of brackets, for deep nesting as
            `check_depth`, and with ``unique`` for a key that is given twice.
    """
    # Checked before objects are created, because a list takes at least 60 bytes of memory, and a
    # dictionary 200. The first 10,000 brackets are not counted, because their objects take little
    # memory.
    encoded = data.encode() if isinstance(data, str) else data
    objects, lists = encoded.count(b"{") - 10_000, encoded.count(b"[") - 10_000
    if lists > len(encoded) // 10 or objects > len(encoded) // 32:
        raise ValueError("more lists than a file of its size has")
    try:
        value = json.loads(data, object_pairs_hook=_without_repeated_keys if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and dicts nest deeper than `MAX_DEPTH`. After this check, recursive
    code cannot exhaust the stack."""
    # Level by level, because a recursive check could exhaust the stack.
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict | list):
                below += container.values() if isinstance(container, dict) else container
        if not below:
            return
        level = below
    raise ValueError("nested too deeply")


def is_count(value: Any, largest: int = MAX_COUNT) -> bool:
    """True if a JSON value is an integer from 0 to ``largest``."""
    # Not `isinstance`, which would accept True and False.
    return type(value) is int and 0 <= value <= largest


def is_number(value: Any) -> TypeGuard[float]:
    """True if a JSON value is a finite number in the range of a float."""
    # An int may be larger than any float; math.isfinite would raise OverflowError.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def number(value: Any) -> float:
    """Return a JSON value as a float; NaN if it is not a finite number."""
    return float(value) if is_number(value) else math.nan


def replace(
    path: str, content: str | Callable[[BinaryIO], object], *, durable: bool = False
) -> None:
    """Replace the file at ``path`` in one rename. A reader sees either the old file or the complete
    new file. A link is not followed.

    Args:
        path: the file, which need not exist.
        content: a text, or a function that writes the content.
        durable: True to flush the content to the storage. After `flush_folder`, the file then
            survives a loss of power.

    Raises:
        OSError: if the file cannot be written. The temporary file is removed.
    """
    # The temporary file is in the same folder, because a rename cannot cross file systems.
    draft = f"{path}.{os.urandom(8).hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o666), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())  # without this, a crash could leave an empty file
        os.replace(draft, path)
    except BaseException:  # also after an interrupt
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def walk(
    path: str, enters: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder at and below ``path``, and the names of its files. Links to folders are not
    followed. Raises OSError for folders that nest deeper than `MAX_FOLDERS`.

    ``enters(name)``: False for folders that are skipped.
    """
    level = [path]
    for _ in range(MAX_FOLDERS):
        below: list[str] = []
        for folder in level:
            with os.scandir(folder) as entries:
                inner = sorted(entries, key=lambda entry: entry.name)
            names = [entry.name for entry in inner if not entry.is_dir()]
            folders = [entry for entry in inner if entry.is_dir(follow_symlinks=False)]
            below += [entry.path for entry in folders if enters(entry.name)]
            yield folder, names
        if not below:
            return
        level = below
    raise OSError(errno.ELOOP, f"folders nested deeper than {MAX_FOLDERS}", printable(path, 300))


def remove_tree(path: str, *, must_succeed: bool = False) -> None:
    """Remove a folder with all its contents, or a file or link. Links are not followed.

    `shutil.rmtree` fails for folders that nest thousands deep. In this case the inner folders are
    moved up until no folder contains another. Raises OSError only with ``must_succeed``.
    """
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        root = os.open(path, _FOLDER)
        try:
            while folders := _unlink_files(root):
                for name in folders:
                    _lift_folders(root, name)
        finally:
            os.close(root)
        os.rmdir(path)
    except OSError:
        if must_succeed:
            raise


def _unlink_files(folder: int) -> list[str]:
    """Remove the files in an open folder; returns the names of its folders."""
    with os.scandir(folder) as entries:
        found = []
        for entry in entries:
            found.append((entry.name, entry.is_dir(follow_symlinks=False)))
    for name, is_folder in found:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    files: list[str] = []
    for name, is_folder in found:
        if is_folder:
            files.append(name)
    return files


def _lift_folders(outer: int, name: str) -> None:
    """Remove a folder in ``outer``. The folders in it move to ``outer``."""
    # Use descriptors instead of paths, because another user with write permission could replace a
    # folder by a link.
    inner = os.open(name, _FOLDER, dir_fd=outer)
    try:
        for below in _unlink_files(inner):
            os.rename(below, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=outer)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=outer)


def flush_folder(path: str) -> None:
    """Flush renames and new names in the folder to the storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Files of a run directory that are written in place. All other files are replaced by a rename.
_WRITTEN_FILES = {"train.log", "metrics.jsonl", "segments.jsonl", "checkpoints"}
_WRITTEN_FOLDERS = {".hydra", "tensorboard", "logs", "stacks", "traces", "memory", "refused"}
_FOLDERS = _WRITTEN_FOLDERS | {"checkpoints"}
_FILES = _WRITTEN_FILES - _FOLDERS | {"layout.json", "owner.json", "summary.json"}


def check_run_directory(folder: str) -> None:
    """Raise OSError for links in a run directory that would redirect writes.

    The check covers the folder, which need not exist, and two levels of folders inside it. The
    check refuses links at the paths that a run reads or writes, and all links of other users. The
    check also refuses a folder or a pipe at the path of a file, and a file at the path of a folder.
    """
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise OSError(errno.EACCES, "cannot be written to", folder)
    for inside in _checked_folders(folder, _WRITTEN_FILES | _WRITTEN_FOLDERS):
        is_ours = os.path.basename(inside) in _WRITTEN_FOLDERS
        # The second level, such as the folders of mesh axes in the folder of TensorBoard
        for further in _checked_folders(inside, None if is_ours else ()):
            _checked_folders(further, None if is_ours else ())
    for name in sorted(_FILES | _FOLDERS):
        path, kind = os.path.join(folder, name), "regular file"
        is_right = os.path.isfile(path)
        if name in _FOLDERS:
            is_right, kind = os.path.isdir(path), "folder"
        if os.path.lexists(path) and not is_right:
            raise OSError(errno.EINVAL, f"not a {kind}", path)


def refuse_link(path: str) -> None:
    """Raise OSError for a link. For the folder of a run's checkpoints the message names the setting
    that moves them."""
    if not os.path.islink(path):
        return
    reason = "a symbolic link, which is not followed"
    if os.path.basename(path) == "checkpoints":
        target = printable(os.path.realpath(path), 500)
        reason += f": checkpoint.folder={target} has checkpoints elsewhere"
    raise OSError(errno.ELOOP, reason, path)


def _checked_folders(folder: str, ours: Container[str] | None) -> list[str]:
    """Return the paths of the folders in ``folder``; none if it cannot be listed. ``ours``: names
    that must not be links of any user; None for all names."""
    entries: list[os.DirEntry[str]] = []
    # A folder that does not exist yet or that this user cannot list needs no check.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        entries += os.scandir(folder)
    for entry in entries:
        # The owner of the link counts, because its target may belong to this user.
        if entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid != os.getuid():
            reason = "a link that another user has made, and is not followed"
            raise OSError(errno.ELOOP, reason, entry.path)
        if ours is None or entry.name in ours:
            refuse_link(entry.path)
    folders: list[str] = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
    return folders


def printable(text: object, limit: int = 120) -> str:
    """Return ``text`` for a message: one line, with control characters escaped, cut after
    ``limit`` characters."""
    # One character more than the limit shows that the text is too long.
    characters = str(text)[: limit + 1]
    shown = "".join(map(_escaped, characters))
    return shown if len(shown) <= limit else f"{shown[:limit]}..."


def for_terminal(text: object) -> str:
    """Return a message of several lines, with all control characters but line breaks escaped."""
    return "".join(
        character if character in "\n\t" else _escaped(character) for character in str(text)
    )


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    # Such as \x1b, the start of terminal commands, and \udc80 in a name that is not UTF-8.
    return character.encode("unicode_escape").decode()
