"""Shared secret of the processes of a job: `find_secret`, `write_secret`."""

from __future__ import annotations

import os
import secrets
import stat

from parallel2d.base.errors import ConfigError

VARIABLE = "PARALLEL2D_SECRET"
# Used if a job has no secret: every process that reaches the store is trusted.
PUBLIC_SECRET = "launch.insecure=true: this secret is public"
_SHORTEST, _LONGEST = 32, 4096  # characters
_HOW = (
    "make one with `python -m parallel2d.launch secret FILE`, give every node the file as "
    f"launch.secret_file=FILE or its content as {VARIABLE}, or set launch.insecure=true where "
    "no other user reaches the network"
)


def new_secret() -> str:
    """Return 64 random hexadecimal digits."""
    return secrets.token_hex(32)


def write_secret(path: str) -> None:
    """Write a new secret to a file that only its owner can read. Raises `ConfigError` if the file
    exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with open(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(new_secret() + "\n")


def read_secret(path: str) -> str:
    """Read the secret from a file.

    Raises:
        ConfigError: if the file is not regular, if neither this user nor root owns it, or if other
            users can read it. If root owns it, a group may read it.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"launch.secret_file={path}: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"launch.secret_file={path} is not a regular file")
        if status.st_uid not in (0, os.getuid()):
            raise ConfigError(
                f"launch.secret_file={path} belongs to user {status.st_uid}, not to {os.getuid()}"
            )
        # Files that root mounts into a container are read through a separate group.
        others = 0o077 if status.st_uid == os.getuid() else 0o027
        if status.st_mode & others:
            raise ConfigError(f"launch.secret_file={path} can be read by others: chmod 600 {path}")
        return checked(
            file.read(_LONGEST + 1).decode(errors="replace"), f"launch.secret_file={path}"
        )


def find_secret(secret_file: str | None, insecure: bool = False) -> str:
    """Return the secret of a job on several nodes: from ``secret_file``, otherwise from the
    environment, otherwise `PUBLIC_SECRET` if ``insecure``. Raises `ConfigError` if none is
    given."""
    if secret_file is not None:
        return read_secret(secret_file)
    given = os.environ.get(VARIABLE)
    if given:
        return checked(given, VARIABLE)
    if insecure:
        return PUBLIC_SECRET
    raise ConfigError(
        "ranks on several nodes need a secret, because any process that reaches their store can "
        f"run code on them: {_HOW}"
    )


def checked(text: str, where: str) -> str:
    """Return ``text`` without surrounding white space. Raises `ConfigError` for an invalid
    length."""
    text = text.strip()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ConfigError(
            f"{where}: a secret has {_SHORTEST} to {_LONGEST} characters, this has {len(text)}; "
            f"{_HOW}"
        )
    return text
