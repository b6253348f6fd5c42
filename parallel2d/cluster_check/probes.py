"""Measures a node's way to another: whether it can connect (`reach`), how long a message takes
(`round_trips`), how many bytes per second arrive (`bandwidth`).

`ProbeServer` listens on one address and an ephemeral port, as gloo and NCCL do; the functions below
it are its clients. Plain TCP, no torch: a second process on the node starts in tenths of a second.
Figures are those of TCP streams from Python; what a fabric with RDMA does beside TCP is not
measured.

A connection opens with a token of 16 bytes, which only the nodes of this check have, and one
letter: ``P`` answers with the node's number (4 bytes); ``E`` answers each byte with the server's
clock (8 bytes, fp64); ``M`` opens a measurement (4 bytes streams, 8 bytes seconds), answers with
its number (4 bytes) and in the end with bytes and seconds (2 x 8 bytes, fp64); ``D`` with a
measurement's number is one of its streams. All numbers are big-endian.

[Note: measured where it arrives] To a sender, bytes count as sent once they are in buffers of the
kernel, on a slow link for many seconds. So the receiver counts what arrives in a window that opens
a third into the time, when TCP's slow start and the burst of a shaper are over. Then it closes the
streams hard; the sender writes until it is cut off.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parallel2d.store.address import connection_failure

TOKEN_BYTES = 16
_CHUNK = 1 << 18
_BACKLOG = 1024
_ANSWER_S = 5.0  # beyond what a probe takes by itself


@dataclass
class _Measurement:
    """Streams that are being received, and what they brought between ``opens`` and ``closes``."""

    streams: int
    seconds: float
    opens: float = 0.0
    closes: float = 0.0
    received: int = 0
    ended: int = 0
    condition: threading.Condition = field(default_factory=threading.Condition)

    def begin(self) -> None:
        with self.condition:
            if not self.closes:
                now = time.monotonic()
                self.opens, self.closes = now + self.seconds / 3, now + self.seconds


class ProbeServer:
    """Answers the probes of other nodes, each connection in a thread of its own, until `close`.

    ``address``: the only one it listens on. ``token``: connections without it are dropped.
    ``node``: this node's number. ``clock``: what ``E`` is answered with, seconds since the epoch.
    """

    def __init__(
        self, address: str, token: bytes, node: int, clock: Callable[[], float] = time.time
    ) -> None:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(target)
        self._listener.listen(_BACKLOG)
        self.address: str = address
        self.port: int = self._listener.getsockname()[1]
        self._token, self._node, self._clock = token, node, clock
        self._measurements: dict[int, _Measurement] = {}
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            with contextlib.suppress(OSError):  # the other side may be gone already
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_ANSWER_S)
            if _receive(connection, TOKEN_BYTES) != self._token:
                return
            match _receive(connection, 1):
                case b"P":
                    connection.sendall(struct.pack("!i", self._node))
                case b"E":
                    while connection.recv(1):
                        connection.sendall(struct.pack("!d", self._clock()))
                case b"M":
                    self._measure(connection)
                case b"D":
                    (number,) = struct.unpack("!i", _receive(connection, 4))
                    if number in self._measurements:
                        _drain(connection, self._measurements[number])

    def _measure(self, control: socket.socket) -> None:
        streams, seconds = struct.unpack("!id", _receive(control, 12))
        measurement, number = _Measurement(streams, seconds), next(self._numbers)
        self._measurements[number] = measurement
        control.sendall(struct.pack("!i", number))
        with measurement.condition:
            measurement.condition.wait_for(
                lambda: measurement.ended == streams, timeout=seconds + _ANSWER_S
            )
        del self._measurements[number]
        control.sendall(
            struct.pack("!dd", measurement.received, measurement.closes - measurement.opens)
        )


def _drain(connection: socket.socket, measurement: _Measurement) -> None:
    """See [Note: measured where it arrives]."""
    buffer = bytearray(_CHUNK)
    received = 0
    try:
        measurement.begin()
        while (left := measurement.closes - time.monotonic()) > 0:
            connection.settimeout(left)
            count = connection.recv_into(buffer)
            if not count:
                break
            if measurement.opens <= time.monotonic() <= measurement.closes:
                received += count
    finally:
        # close drops what is still on its way
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with measurement.condition:
            measurement.received += received
            measurement.ended += 1
            measurement.condition.notify_all()


@dataclass(frozen=True)
class Peer:
    """Where another node's `ProbeServer` listens, and from which address of ours it is called."""

    address: str
    port: int
    token: bytes
    source: str | None = None


def connect(peer: Peer, letter: bytes, timeout_s: float) -> socket.socket:
    """An open connection after token and letter. Raises OSError."""
    family, _, _, _, target = socket.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM)[
        0
    ]
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if peer.source:
            connection.bind(socket.getaddrinfo(peer.source, 0, family, socket.SOCK_STREAM)[0][4])
        connection.connect(target)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(peer.token + letter)
    except BaseException:
        connection.close()
        raise
    return connection


def reach(peer: Peer, node: int, timeout_s: float = 5.0) -> str | None:
    """None when node number ``node`` answers on a fresh connection; otherwise why not:
    ``connection timed out (...)``."""
    try:
        with connect(peer, b"P", timeout_s) as connection:
            try:
                (answered,) = struct.unpack("!i", _receive(connection, 4))
            except (TimeoutError, EOFError, ConnectionError):
                return (
                    "connected, but no answer came (something between the nodes accepts "
                    "connections in the other's place)"
                )
    except OSError as error:
        return connection_failure(error)
    return (
        None
        if answered == node
        else f"reached node number {answered} instead (two nodes share an address?)"
    )


@dataclass(frozen=True)
class RoundTrips:
    """``latency_s``: half the shortest round trip. ``clock_offset_s``: how far the other clock is
    ahead of this one, +- latency."""

    latency_s: float
    clock_offset_s: float


def round_trips(peer: Peer, count: int = 20, timeout_s: float = 5.0) -> RoundTrips:
    """``count`` messages of one byte, there and back. The offset is read off the shortest, with
    both ways taken as equally long (Cristian's algorithm, Distributed Computing 3, 1989). Raises
    OSError."""
    shortest, offset = float("inf"), 0.0
    with connect(peer, b"E", timeout_s) as connection:
        for _ in range(count):
            sent, began = time.time(), time.perf_counter()
            connection.sendall(b".")
            try:
                (theirs,) = struct.unpack("!d", _receive(connection, 8))
            except EOFError:
                raise ConnectionResetError("the other node closed the connection") from None
            took = time.perf_counter() - began
            if took < shortest:
                shortest, offset = took, theirs - (sent + took / 2)
    return RoundTrips(shortest / 2, offset)


def bandwidth(peer: Peer, seconds: float = 0.3, streams: int = 4) -> float:
    """Bytes per second that arrive at ``peer`` over ``streams`` connections at once. Raises
    OSError. See [Note: measured where it arrives]."""
    with connect(peer, b"M", _ANSWER_S) as control:
        control.settimeout(seconds + 2 * _ANSWER_S)
        control.sendall(struct.pack("!id", streams, seconds))
        try:
            (number,) = struct.unpack("!i", _receive(control, 4))
            senders = [
                threading.Thread(target=_flood, args=(peer, number, seconds), daemon=True)
                for _ in range(streams)
            ]
            for sender in senders:
                sender.start()
            received, took = struct.unpack("!dd", _receive(control, 16))
        except EOFError:
            raise ConnectionResetError("the other node closed the connection") from None
        for sender in senders:
            sender.join()
    return received / took if took else 0.0


def _flood(peer: Peer, number: int, seconds: float) -> None:
    payload = bytes(_CHUNK)
    with contextlib.suppress(OSError):  # the receiver ends it
        with connect(peer, b"D", _ANSWER_S) as connection:
            connection.sendall(struct.pack("!i", number))
            connection.settimeout(seconds + _ANSWER_S)
            while True:
                connection.send(payload)


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def serve_until_input_ends(address: str, token: str, node: int) -> None:
    """The other process of a measurement inside a node: prints its port and serves until standard
    input ends."""
    import sys

    server = ProbeServer(address, bytes.fromhex(token), node)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()
