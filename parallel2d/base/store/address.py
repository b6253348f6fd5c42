"""Addresses of a store, and their default port. `bind` listens on exactly one address. `connect`
connects to an address, with retries.

An invalid or unreachable address raises `ConfigError`; the message names the given host and port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

from parallel2d.base.errors import ConfigError

_Answer = TypeVar("_Answer")

DEFAULT_PORT = 29500  # of ``python -m parallel2d.launch store``; torchrun has the same default

# All nodes of a cluster may connect within one second. The kernel limits the value to
# net.core.somaxconn.
_BACKLOG = 4096
# Error number of a failed connection -> its message, the same on every node
_FAILURES: dict[int | None, str] = {
    errno.ECONNREFUSED: "connection refused (the machine answers, nothing listens on the port)",
    errno.ETIMEDOUT: "connection timed out (a firewall drops it, or the machine is down)",
    errno.EHOSTUNREACH: "no route to host (no route, or no machine has this address)",
    errno.ENETUNREACH: "network is unreachable (no route, or no machine has this address)",
}


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``node0:29500`` or ``[fe80::1%eth0]:29500`` into host and port. Raises `ConfigError`
    for other texts."""
    host, _, port = endpoint.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    # A bare IPv6 address has colons and no port.
    is_host = host.startswith("[") or ":" not in host
    if not is_port or not is_host or not host.strip("[]"):
        raise ConfigError(
            f"endpoint={endpoint} must be HOST:PORT with a port from 0 to 65535, such as "
            f"node0:{DEFAULT_PORT} or [fd00::1]:{DEFAULT_PORT}"
        )
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    """Inverse of `split_endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[tuple[socket.AddressFamily, str, tuple[Any, ...]]]:
    """Return ``(family, numeric address, socket address with port 0)`` for every address of
    ``host``. IPv4 addresses come first, because most clusters route IPv4. Raises `ConfigError` if
    the name does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise ConfigError(
            f"host name {host} does not resolve on {socket.gethostname()} ({reason})"
        ) from None
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    resolved: list[tuple[socket.AddressFamily, str, tuple[Any, ...]]] = []
    for family, _, _, _, address in found:
        resolved.append((family, socket.getnameinfo(address, numeric)[0], address))
    return resolved


def owns_address(host: str) -> bool:
    """True if an address of ``host`` belongs to this network namespace. Raises `ConfigError` if the
    name does not resolve."""
    for family, _, address in resolve(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.bind(address)
            return True
    return False


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket that listens only on the address of ``host``, and this numeric address.

    Args:
        host: a name or an address (IPv4, IPv6, ``fe80::1%eth0``) of this machine. Of several
            addresses, the first that belongs to this machine is used.
        port: 0 for a free port.

    Raises:
        ConfigError: if the name does not resolve, the address belongs to another machine, or the
            port is taken or reserved.
    """
    failure: OSError | None = None
    for family, numeric, address in resolve(host):
        place: Any = (address[0], port, *address[2:])
        try:
            # This call also succeeds if the port is in TIME_WAIT because a store has just ended.
            return socket.create_server(place, family=family, backlog=_BACKLOG), numeric
        except OSError as error:
            if failure is None or failure.errno == errno.EADDRNOTAVAIL:
                failure = error
    assert failure is not None
    if failure.errno == errno.EADDRINUSE:
        raise PortTaken(
            f"port {port} on {host} is in use by another process; choose another port"
        ) from None
    problems = {
        errno.EADDRNOTAVAIL: f"{host} is not an address of {socket.gethostname()}: the store can "
        "only listen where it runs",
        errno.EACCES: f"port {port} may not be opened by this user; choose one from 1024 to 65535",
    }
    otherwise = f"cannot listen on {host}:{port} ({failure.strerror})"
    raise ConfigError(problems.get(failure.errno or 0, otherwise)) from None


class PortTaken(ConfigError):  # noqa: N818 (named after what happened)
    """The port is taken. The process that uses it may be a store, so the caller may try to
    connect."""


def connect(address: str, patience_s: float, *, was_up: bool = False) -> socket.socket:
    """Connect to ``HOST:PORT`` or ``unix:PATH``, with retries for a server that starts later.

    Args:
        address: the address. Its host name is resolved again for every attempt.
        patience_s: seconds during which failed attempts are repeated.
        was_up: True if the server was up before. A refused connection then means that it has
            ended, and is not retried.

    Raises:
        ConfigError: with the last failure, such as a refused connection.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _connect_once(address, min(5.0, max(0.5, deadline - time.monotonic())))
        except ConfigError:  # the name has no address yet, such as the name of a pod
            if time.monotonic() >= deadline:
                raise
        except OSError as error:
            if was_up and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                deadline = patience_s = 0.0
            if time.monotonic() >= deadline:
                # The timeout of a socket has no error number.
                number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
                otherwise = error.strerror or str(error) or type(error).__name__
                raise ConfigError(
                    f"{socket.gethostname()} cannot reach the endpoint {address} within "
                    f"{patience_s:g} s: {_FAILURES.get(number, otherwise.lower())}"
                ) from None
        time.sleep(min(0.2, patience_s / 4))


def _connect_once(address: str, seconds: float) -> socket.socket:
    kind, _, path = address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            with unix_path(path) as short:
                connection.connect(short)
        except OSError:
            connection.close()
            raise
        return connection
    host, port = split_endpoint(address)
    failure: OSError | None = None
    for _, numeric, _ in resolve(host):
        try:
            connection = socket.create_connection((numeric, port), seconds)
        except OSError as error:
            # "Refused" is reported only if all addresses refuse.
            if failure is None or isinstance(failure, ConnectionRefusedError):
                failure = error
        else:
            set_for_requests(connection)
            return connection
    assert failure is not None
    raise failure


def set_for_requests(connection: socket.socket) -> None:
    """Set two socket options: small messages are sent without delay, and a peer that disappears
    without closing the connection is detected."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@contextlib.contextmanager
def unix_path(path: str) -> Iterator[str]:
    """Yield a name for ``path`` that is short enough for a Unix socket (107 bytes). On systems
    other than Linux, yield ``path`` unchanged."""
    if sys.platform != "linux":
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def in_thread(function: Callable[[], _Answer]) -> futures.Future[_Answer]:
    """Run ``function`` in a daemon thread, which does not keep the process alive."""
    found: futures.Future[_Answer] = futures.Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def answered_within(seconds: float, ask: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Return the result of ``ask``, which sends requests to a store, or ``otherwise`` if the store
    does not answer within ``seconds``. An exception of ``ask`` is raised.

    A store that accepts connections and does not answer, for example because its process is
    stopped, blocks torch's client forever, even in its constructor. In this case this function
    abandons the thread of ``ask`` and its connection. A caller that gets ``otherwise`` must not use
    the store again.
    """
    answer = in_thread(ask)
    futures.wait([answer], seconds)
    return answer.result() if answer.done() else otherwise
