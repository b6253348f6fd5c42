"""Files in folders that somebody else may write to: no link is followed, and nothing is believed to
be small or sound."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import Any, BinaryIO

MAX_DEPTH = 32  # of lists and dicts in what is read as JSON


def open_regular(path: str) -> BinaryIO:
    """A file to read. Raises OSError for a link and for what is no regular file, such as a pipe
    that would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(descriptor, "rb")


def read_json(path: str, largest: int = 16 * 2**20) -> Any:
    """What a JSON file holds. Raises OSError as `open_regular`, ValueError for more than
    ``largest`` bytes, for what is not JSON, and for lists and dicts nested deeper than any code
    that walks them expects."""
    with open_regular(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"more than {largest} bytes")
    return parse(data)


def check_density(data: bytes) -> None:
    """Raises ValueError for JSON that is hardly more than brackets: each becomes an object of many
    times its size."""
    if data.count(b"{") + data.count(b"[") > len(data) // 8 + 10_000:
        raise ValueError("more lists than a file of its size has")


def parse(data: bytes | str) -> Any:
    """JSON from anywhere. Raises ValueError."""
    check_density(data if isinstance(data, bytes) else data.encode())
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ValueError when lists and dicts nest deeper than any code that walks them expects."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        containers = [item.values() if isinstance(item, dict) else item for item in level]
        level = [
            item for container in containers for item in container if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def replace(path: str, text: str, *, durable: bool = False) -> None:
    """Gives ``path`` this content in one rename: a reader sees the old file or the whole new one,
    and a link is not followed.

    ``durable``: it survives a loss of power once the folder does. Raises OSError, and leaves
    nothing behind then.
    """
    draft = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def check_no_planted_links(folder: str) -> None:
    """Raises OSError for a link, in the folder or in one inside it, that another user has made:
    what is written there goes elsewhere. Nothing happens when the folder does not exist."""
    level = [folder]
    for _ in range(2):
        entries: list[os.DirEntry[str]] = []
        for inside in level:
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError),
                os.scandir(inside) as found,
            ):
                entries += found
        for entry in entries:
            if entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid != os.getuid():
                raise OSError(
                    errno.ELOOP,
                    "a link that another user has made, and is not followed",
                    entry.path,
                )
        level = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def printable(text: object, limit: int = 120) -> str:
    """``text`` for a message: one line, control characters escaped, long text cut."""
    shown = "".join(map(_escaped, str(text)[: limit + 1]))
    return shown if len(shown) <= limit else shown[:limit] + "..."


def for_terminal(text: object) -> str:
    """A whole message: lines stay, other control characters are escaped."""
    return "".join(c if c in "\n\t" else _escaped(c) for c in str(text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
