"""The key-value store where ranks and nodes meet, on one address and on no other.

A host name and a port flow in; a `torch.distributed.TCPStore` flows out, either the server or a client of it. Everything that goes
wrong with the address is told in the words of the one who gave it.

[Note: one address] torch's TCPStore binds every interface of the machine when it is left to open its own socket, and it asks nobody
for a password. It does take a socket that is bound already (``master_listen_fd``), with both of its back ends; `bound_store` hands
it one that is bound to the given address alone.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from parallel2d.config import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_Answer = TypeVar("_Answer")

_ANSWER_S = 30.0  # a store that has accepted a connection answers at once, unless a whole cluster comes in the same second
_BACKLOG = 4096  # a whole cluster connects within the same second; the kernel lowers it to net.core.somaxconn


def split_endpoint(endpoint: str, default_port: int | None = None) -> tuple[str, int]:
    """``HOST:PORT`` in its parts: ``node0:29500``, ``10.0.0.1:29500``, ``[fe80::1%eth0]:29500``. Raises `ConfigError`."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or (endpoint.count(":") > 1 and not host.startswith("[")):  # a bare host, or a bare IPv6 address
        if default_port is None:
            raise ConfigError(f"endpoint={endpoint} must be HOST:PORT, such as node0:29500 or [fd00::1]:29500")
        return endpoint.strip("[]"), default_port
    if not host.strip("[]") or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"endpoint={endpoint} must be HOST:PORT with a port from 0 to 65535, such as node0:29500")
    return host.strip("[]"), int(port)


def resolve(host: str) -> list[tuple[socket.AddressFamily, str, tuple[Any, ...]]]:
    """``(family, numeric address, socket address with port 0)`` of every address of ``host``, IPv4 first, which is what most
    clusters route. Raises `ConfigError` when the name does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise ConfigError(f"host name {host} does not resolve on {socket.gethostname()} ({reason})") from None
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [(family, socket.getnameinfo(address, numeric)[0], address) for family, _, _, _, address in found]


def owns_address(host: str) -> bool:
    """Whether an address of ``host`` belongs to this machine (to its network namespace). Raises `ConfigError` as `resolve` does."""
    for family, _, address in resolve(host):
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            try:
                attempt.bind(address)
            except OSError:
                continue
            return True
    return False


def bound_store(host: str, port: int, *, timeout_s: float = 300.0, use_libuv: bool | None = None) -> TCPStore:
    """A TCPStore server that listens on ``host``'s address only; this process is its first client.

    ``host``: a name or an address (IPv4, IPv6, ``fe80::1%eth0``) of this machine; with several addresses, the first that belongs
    to it. ``port``: 0 for a free one; ``store.port`` tells which. ``timeout_s``: how long ``get`` and ``wait`` wait, unless told
    otherwise. ``use_libuv``: torch's back end; None follows the variable USE_LIBUV as torch does, and takes libuv without it.
    The store lives as long as the returned object. Raises `ConfigError` when the name does not resolve, the address is not one of
    this machine, or the port is taken or reserved. See [Note: one address].
    """
    from torch.distributed import TCPStore

    listener, address = _bind(host, port)
    bound_port = listener.getsockname()[1]
    if use_libuv is None:
        use_libuv = os.environ.get("USE_LIBUV", "1") == "1"
    return TCPStore(
        address,
        bound_port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=use_libuv,
    )


def _bind(host: str, port: int) -> tuple[socket.socket, str]:
    failure: OSError | None = None
    for family, numeric, address in resolve(host):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # a store that ended a moment ago left the port waiting
            listener.bind((address[0], port, *address[2:]))
            listener.listen(_BACKLOG)
            return listener, numeric
        except OSError as error:
            listener.close()
            if failure is None or failure.errno == errno.EADDRNOTAVAIL:
                failure = error
    assert failure is not None
    here = socket.gethostname()
    if failure.errno == errno.EADDRINUSE:
        raise PortTaken(f"port {port} on {host} is in use by another process; choose another port") from None
    if failure.errno == errno.EADDRNOTAVAIL:
        raise ConfigError(f"{host} is no address of {here}: the store can only listen where it runs") from None
    if failure.errno == errno.EACCES:
        raise ConfigError(f"port {port} may not be opened by this user; choose one from 1024 to 65535") from None
    raise ConfigError(f"cannot listen on {host}:{port} ({failure.strerror})") from None


class PortTaken(ConfigError):  # noqa: N818 (it says what happened)
    """Somebody listens on this address and port already; for a store that may be started outside, a reason to connect to it."""


def connected_store(host: str, port: int, *, timeout_s: float = 300.0, connect_timeout_s: float | None = None) -> TCPStore:
    """A client of the store at ``host:port``, which may come up later: it is asked again for ``connect_timeout_s`` (default
    ``timeout_s``). Raises `ConfigError` that says what happened last: refused, timed out, unreachable, or name not resolved.

    A plain connection is tried first, because TCPStore's own message does not tell these apart.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    patience = timeout_s if connect_timeout_s is None else connect_timeout_s
    address = _wait_until_it_listens(host, port, patience)

    def connect() -> TCPStore | None:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)

    answer_s = min(timeout_s, _ANSWER_S)
    try:
        if (store := answered_within(answer_s, connect, None)) is not None:
            return store
        reason = f"no answer within {answer_s:g} s"
    except (DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0][:160]
    raise ConfigError(f"{host}:{port} answers, but not as a store ({reason}): does another program listen there?")


def _wait_until_it_listens(host: str, port: int, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        last: OSError | None = None
        for family, numeric, address in resolve(host):
            with socket.socket(family, socket.SOCK_STREAM) as attempt:
                attempt.settimeout(min(5.0, max(0.5, deadline - time.monotonic())))
                try:
                    attempt.connect((address[0], port, *address[2:]))
                    return numeric
                except OSError as error:
                    last = error
        if time.monotonic() >= deadline:
            assert last is not None
            raise ConfigError(
                f"{socket.gethostname()} cannot reach the endpoint {host}:{port} within {patience_s:g} s: {connection_failure(last)}"
            )
        time.sleep(0.2)


def connection_failure(error: OSError) -> str:
    """What a failed connection means, in words that two nodes would use alike: ``connection refused``, ``connection timed out``."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused (the machine answers, nothing listens on the port)"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "connection timed out (a firewall drops it, or the machine is down)"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"{os.strerror(error.errno).lower()} (no route, or nobody has this address)"
    return (error.strerror or str(error) or type(error).__name__).lower()


def answered_within(seconds: float, ask: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """What ``ask``, which asks a store, returns; ``otherwise`` when the store has not answered after so many seconds.

    A process that accepts connections and is silent, such as a store that is stopped, holds torch's client for ever, its constructor
    included. The thread that asks is left behind then, and so is the connection: whoever gets ``otherwise`` must not use the store
    again. What ``ask`` raises in time is raised.
    """
    answer: futures.Future[_Answer] = futures.Future()

    def put() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=put, daemon=True).start()
    futures.wait([answer], seconds)
    return answer.result() if answer.done() else otherwise
