"""Server of the store: `StoreServer`. A thread stores keys in memory and answers clients that have
the secret.

See [Note: mutual authentication] in `store`. A request is a list of fields and begins with its
name. An answer is a list of fields and begins with ``ok``, ``late`` (the awaited keys were not set
within the timeout) or ``error``.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from parallel2d.base.errors import ConfigError
from parallel2d.base.open_files import raise_limit
from parallel2d.base.store.address import bind, join_endpoint, set_for_requests, unix_path
from parallel2d.base.store.channel import (
    ANSWER,
    CODE,
    GREETING,
    HEADER,
    NUMBER,
    Channel,
    Untrusted,
    frame_length,
)

_PROOF_S = 20.0  # time in which a new connection must prove that it has the secret
# Largest number of unproven connections; at most a quarter of the process's descriptors
_UNPROVEN = 4096
_LONGEST_WAIT_S = 3600.0  # longest time between two checks of the deadlines
_REPORTED = 100  # addresses
_PIECE = 1 << 16
# if a peer has not read more than this number of bytes of answers, its requests are not read
_MOST_UNSENT = 1 << 20


class StoreServer:
    """Server thread, which runs until `close` or until this process ends.

    Args:
        listener: a listening socket.
        address: the address for clients.
        report: called once for each address of a connection that did not prove the secret.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        secret: str,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.address, self._secret, self._report = address, secret, report
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Wait]] = {}
        self._deadlines: list[tuple[float, int, _Wait]] = []
        self._numbers = itertools.count()
        # peer -> deadline of its proof, in the order of the deadlines
        self._unproven: dict[_Peer, float] = {}
        self._told: set[str] = set()
        self._listener = listener
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (listener, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._most_unproven = max(1, min(_UNPROVEN, raise_limit() // 4))
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    @classmethod
    def at(
        cls, host: str, port: int, secret: str, report: Callable[[str], None] | None = None
    ) -> StoreServer:
        """Start a server on one address of this machine. ``port``: 0 for a free port. Raises
        `ConfigError` as `bind` does."""
        listener, numeric = bind(host, port)
        return cls(listener, join_endpoint(numeric, listener.getsockname()[1]), secret, report)

    @classmethod
    def within(cls, folder: str, secret: str) -> StoreServer:
        """Start a server on a Unix socket in a private folder."""
        path, listener = os.path.join(folder, "store"), socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with unix_path(path) as short:
            try:
                listener.bind(short)
            except OSError as error:
                raise ConfigError(
                    f"{path}: {error.strerror or error}; set TMPDIR to another folder of your own"
                ) from None
        listener.listen(128)
        return cls(listener, f"unix:{path}", secret)

    @property
    def port(self) -> int:
        """Port of the listening socket."""
        return int(self.address.rpartition(":")[2])

    def close(self) -> None:
        """End the thread and close all connections."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        self._thread.join()

    # The loop

    def _serve(self) -> None:
        try:
            while not self._is_woken(self._selector.select(self._expire())):
                pass
        finally:  # waiting clients get an error
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wake.close()

    def _is_woken(self, ready: list[tuple[selectors.SelectorKey, int]]) -> bool:
        for key, events in ready:
            if key.fileobj is self._woken:
                return True
            if key.data is None:
                self._accept()
            elif not key.data.gone:  # otherwise the peer was dropped earlier in this round
                with self._guarded(key.data):
                    self._attend(key.data, events)
        return False

    def _expire(self) -> float:
        """Drop connections with an overdue proof, and answer requests after their timeout.
        Return the seconds until the next deadline."""
        now = time.monotonic()
        # The entries are in the order of arrival, so the first deadline is the earliest.
        while self._unproven and next(iter(self._unproven.values())) <= now:
            peer = next(iter(self._unproven))
            self._drop(peer, suspect=bool(peer.inbox))
        while self._deadlines and self._deadlines[0][0] <= now:
            wait = heapq.heappop(self._deadlines)[2]
            if not wait.over:
                self._finish(wait, [b"late"])
        dues = [now + _LONGEST_WAIT_S, *itertools.islice(self._unproven.values(), 1)]
        for due, _, _ in self._deadlines[:1]:
            dues.append(due)
        return min(dues) - now

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # out of descriptors, or the client has disconnected
            if self._unproven:
                self._drop(next(iter(self._unproven)))
            else:
                # Authenticated peers use all descriptors. Without a pause, the waiting connection
                # would make this loop run continuously.
                time.sleep(0.05)
            return
        peer = _Peer(connection, str(address[0]) if address else "")
        self._unproven[peer] = time.monotonic() + _PROOF_S
        self._selector.register(connection, selectors.EVENT_READ, peer)
        # Unproven connections must not take all descriptors: drop the oldest one.
        if len(self._unproven) > self._most_unproven:
            self._drop(next(iter(self._unproven)))
        with self._guarded(peer):
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                set_for_requests(connection)
            self._send(peer, GREETING + peer.number)

    def _attend(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(peer, b"")
            self._read(peer)  # requests that arrived while the answers waited
        if events & selectors.EVENT_READ:
            # An unproven peer may send its answer to the greeting, and no further byte.
            piece = peer.socket.recv(_PIECE if peer.channel else ANSWER - len(peer.inbox))
            if piece:
                peer.inbox += piece
                self._read(peer)
            else:
                self._drop(peer)

    @contextlib.contextmanager
    def _guarded(self, peer: _Peer) -> Iterator[None]:
        """Context for work on one connection. An exception in the context drops this connection,
        and the server continues. After `BlockingIOError` the connection stays open."""
        try:
            yield
        except BlockingIOError:
            pass
        except Untrusted:
            self._drop(peer, suspect=True)
        except Exception:
            self._drop(peer)

    def _read(self, peer: _Peer) -> None:
        if peer.channel is None:
            if len(peer.inbox) < ANSWER:
                return
            clients, proof = _take(peer.inbox, NUMBER), _take(peer.inbox, CODE)
            channel = Channel(self._secret, peer.number, clients, server=True)
            channel.check(proof)
            peer.channel = channel
            del self._unproven[peer]
            self._send(peer, channel.proof)
        while not peer.gone and len(peer.inbox) >= HEADER and not peer.is_full:
            length = frame_length(peer.inbox)
            if len(peer.inbox) < HEADER + length:
                return
            header, content = _take(peer.inbox, HEADER), _take(peer.inbox, length)
            answer = self._answer(peer, peer.channel.open(header, content))
            if answer is not None:
                self._send(peer, peer.channel.seal(answer))

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.outbox += data
        with contextlib.suppress(BlockingIOError):
            while peer.outbox:
                del peer.outbox[: peer.socket.send(peer.outbox)]
        # A peer that sends requests and reads no answers must not fill the memory of the store.
        events = (not peer.is_full) * selectors.EVENT_READ
        events |= bool(peer.outbox) * selectors.EVENT_WRITE
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: _Peer, suspect: bool = False) -> None:
        if peer.gone:
            return
        peer.gone = True
        self._unproven.pop(peer, None)
        if peer.wait is not None:
            self._forget(peer.wait)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.inbox.clear()
        peer.outbox.clear()
        told = peer.address in self._told or len(self._told) >= _REPORTED
        if suspect and self._report is not None and not told:
            self._told.add(peer.address)
            # In a thread, because a stopped terminal must not block the store.
            threading.Thread(target=self._report, args=(peer.address,), daemon=True).start()

    # Requests

    def _answer(self, peer: _Peer, request: Sequence[bytes]) -> list[bytes] | None:
        """Return the answer, or None if the request must wait. Raises `Untrusted` if an earlier
        request of the peer still waits."""
        if peer.wait is not None:
            raise Untrusted("it asked twice at once")
        try:
            operation, *fields = request
            if operation not in (b"get", b"wait"):
                return self._operations[operation](self, *fields)
            milliseconds, *keys = fields
            due = time.monotonic() + int(milliseconds) / 1000
        except (KeyError, TypeError, ValueError) as error:
            return [b"error", f"{type(error).__name__}: {error}".encode()]
        wanted = keys if operation == b"get" else []
        missing = set(keys) - self._values.keys()
        if not missing:
            return self._found(wanted)
        peer.wait = _Wait(peer, wanted, missing)
        self._await(peer.wait)
        # The number decides between equal times, because `_Wait` objects cannot be compared.
        heapq.heappush(self._deadlines, (due, next(self._numbers), peer.wait))
        return None

    def _await(self, wait: _Wait) -> None:
        for key in wait.missing:
            self._waiting.setdefault(key, []).append(wait)

    def _found(self, keys: Sequence[bytes]) -> list[bytes]:
        return [b"ok", *(self._values[key] for key in keys)]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if wait.missing or wait.over:
                continue
            # A key may have been deleted while other keys were missing.
            wait.missing = set(wait.wanted) - self._values.keys()
            if wait.missing:
                self._await(wait)
            else:
                self._finish(wait, self._found(wait.wanted))

    def _finish(self, wait: _Wait, answer: Sequence[bytes]) -> None:
        self._forget(wait)
        channel = wait.peer.channel
        assert channel is not None, "only those who have proved themselves wait"
        with self._guarded(wait.peer):
            self._send(wait.peer, channel.seal(answer))

    def _forget(self, wait: _Wait) -> None:
        wait.over, wait.peer.wait = True, None
        for key in wait.missing:
            others = []
            for other in self._waiting.pop(key, ()):
                if other is not wait:
                    others.append(other)
            if others:
                self._waiting[key] = others

    def _set(self, *pairs: bytes) -> list[bytes]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._put(key, value)
        return [b"ok"]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        value = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, value)
        return [b"ok", value]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return [b"ok", self._values.get(key, expected)]

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + value)
        return [b"ok"]

    def _delete_all(self, beginning: bytes) -> list[bytes]:
        kept = {}
        for key, value in self._values.items():
            if not key.startswith(beginning):
                kept[key] = value
        self._values = kept
        return [b"ok"]

    _operations: ClassVar[dict[bytes, Callable[..., list[bytes]]]] = {
        b"set": _set,
        b"check": lambda self, *keys: [b"ok", b"%d" % (self._values.keys() >= set(keys))],
        b"add": _add,
        b"compare_set": _compare_set,
        b"append": _append,
        b"delete": lambda self, key: [b"ok", b"%d" % (self._values.pop(key, None) is not None)],
        b"delete_all": _delete_all,
        b"count": lambda self: [b"ok", b"%d" % len(self._values)],
    }


def log_dropped_connection(address: str) -> None:
    """Print that a connection from ``address`` was dropped; a ``report`` of `StoreServer`."""
    text = f"dropped a connection from {address}, which does not know this job's secret"
    with contextlib.suppress(Exception):  # the terminal may be closed
        print(f"parallel2d: {text}", file=sys.stderr, flush=True)


class _Peer:
    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket, self.address = connection, address
        self.number = secrets.token_bytes(NUMBER)
        self.channel: Channel | None = None  # None before the proof
        self.wait: _Wait | None = None  # the pending request of the peer
        self.inbox, self.outbox = bytearray(), bytearray()
        self.events, self.gone = selectors.EVENT_READ, False

    @property
    def is_full(self) -> bool:
        return len(self.outbox) > _MOST_UNSENT


class _Wait:
    """Request that is answered with ``wanted`` once all ``missing`` keys are set."""

    def __init__(self, peer: _Peer, wanted: Sequence[bytes], missing: set[bytes]) -> None:
        self.peer, self.wanted, self.missing, self.over = peer, wanted, missing, False


def _take(buffer: bytearray, length: int) -> bytes:
    taken = bytes(buffer[:length])
    del buffer[:length]
    return taken
