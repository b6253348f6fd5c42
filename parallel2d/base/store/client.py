"""`StoreClient`, with torch's interface for stores. See [Note: mutual authentication] in
`store`."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store

from parallel2d.base.errors import ConfigError
from parallel2d.base.store.address import connect
from parallel2d.base.store.channel import (
    CODE,
    GREETING,
    HEADER,
    HELLO,
    NUMBER,
    Channel,
    Untrusted,
    frame_length,
)

# answers take this long only if all ranks of a large cluster connect in the same second
_ANSWER_S = 30.0
_LONGEST_S = 1e9
# number of attempts, and the pause between them, if the store closes the connection
_TRIES, _AGAIN_S = 3, 0.3
# References to the clients. Torch references only the C++ part of a client, which does not work
# after the Python object is freed.
_kept: set[StoreClient] = set()


class StoreClient(Store):
    """A `torch.distributed.Store` over mutually authenticated connections. Threads do not wait for
    each other. Connections stay open until `close`.

    Operations raise `DistStoreError` if keys are not set within the timeout, `DistNetworkError` if
    the store has ended or does not answer, and ValueError for unsupported arguments.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``.
        timeout_s: default timeout of ``get`` and ``wait``.
        connect_timeout_s: seconds to wait for a store that does not listen yet; default
            ``timeout_s``.

    Raises:
        ConfigError: for a store that cannot be reached, does not answer, or has another ``secret``.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        *,
        timeout_s: float = 300.0,
        connect_timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.timeout: timedelta  # of the C++ object
        self.address, self._secret = address, secret
        self.set_timeout(timedelta(seconds=timeout_s))
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        patience = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._idle.append(_Connection(address, secret, patience, min(timeout_s, _ANSWER_S)))
        _kept.add(self)

    def close(self) -> None:
        """Close all connections. Neither this client nor its clones may be used again."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
        _kept.discard(self)

    # The methods that torch calls, with bytes. Some names differ between Python and C++.

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(b"set", *itertools.chain(*zip(keys, values, strict=True)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(b"get", keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(b"wait", keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *keys)[0] == b"1"

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare_set", key, expected, desired)[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", key, value)

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", key)[0] == b"1"

    def delete_all(self, beginning: str) -> None:
        """Delete all keys with this prefix."""
        self._ask(b"delete_all", beginning)

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> StoreClient:
        """Return this client, which is safe to use from several threads."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def _await(self, operation: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = min(max(0.0, timeout.total_seconds()), _LONGEST_S)
        answer = self._ask(operation, str(int(1000 * seconds)), *keys, late_s=seconds)
        if answer is None:
            raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")
        return answer

    def _ask(self, *fields: str | bytes, late_s: float = 0.0) -> list[bytes]:
        """Send a request. Return the fields after ``ok`` of the answer, or None for ``late``."""
        request = []
        for field in fields:
            request.append(field if isinstance(field, bytes) else field.encode())
        answer_s = late_s + _ANSWER_S
        try:
            status, *answer = self._exchange(request, answer_s)
        except TimeoutError:
            raise DistNetworkError(
                f"the store at {self.address}: no answer within {answer_s:g} s"
            ) from None
        except (OSError, ConfigError, Untrusted) as error:
            raise DistNetworkError(f"the store at {self.address}: {error}") from None
        if status == b"error":
            raise ValueError(answer[0].decode())
        return answer if status == b"ok" else None  # type: ignore[return-value]

    def _exchange(self, request: Sequence[bytes], answer_s: float) -> list[bytes]:
        with self._lock:
            if self._closed:
                raise DistNetworkError(f"the store at {self.address}: this client was closed")
            # All open connections may be in use by other threads.
            idle = self._idle.pop() if self._idle else None
        connection = idle or _Connection(
            self.address, self._secret, _ANSWER_S, _ANSWER_S, was_up=True
        )
        try:
            answer = connection.ask(request, answer_s)
        # Also after an exception in a signal handler: otherwise the next request would get the
        # answer of this request.
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
        return answer


class _Closed(ConfigError):  # noqa: N818 (named after what happened)
    """The store closed the connection before its proof: the secrets differ, or it is ending."""


class _Connection:
    def __init__(
        self,
        address: str,
        secret: str,
        patience_s: float,
        answer_s: float,
        *,
        was_up: bool = False,
    ) -> None:
        deadline = time.monotonic() + patience_s
        for left in reversed(range(_TRIES)):
            left_s = round(max(0.0, deadline - time.monotonic()), 1)
            self._socket = connect(address, left_s, was_up=was_up)
            self._socket.settimeout(answer_s)
            try:
                self._channel = self._prove(address, secret)
                return
            except BaseException as error:
                self._socket.close()
                ends = time.monotonic() + _AGAIN_S > deadline or not left
                if ends or not isinstance(error, _Closed):
                    raise
            time.sleep(_AGAIN_S)

    def _prove(self, address: str, secret: str) -> Channel:
        stranger = f"{address} answers, but not as a store (%s): does another program listen there?"
        greeted = False
        try:
            hello = self._receive(HELLO)
            greeted = hello.startswith(GREETING)
            if not greeted:
                raise ConfigError(stranger % "it speaks another protocol")
            own = secrets.token_bytes(NUMBER)
            channel = Channel(secret, hello[len(GREETING) :], own, server=False)
            self._socket.sendall(own + channel.proof)
            channel.check(self._receive(CODE))
        except TimeoutError:
            silent = f"no answer within {self._socket.gettimeout():g} s"
            raise ConfigError(stranger % silent) from None
        except OSError as error:
            if not greeted:
                raise _Closed(stranger % error) from None
            raise _Closed(
                f"the store at {address} does not take this node's secret: give every node the "
                "same launch.secret_file or PARALLEL2D_SECRET"
            ) from None
        except Untrusted:
            raise ConfigError(
                f"the store at {address} does not know this job's secret: it belongs to another job"
            ) from None
        return channel

    def ask(self, request: Sequence[bytes], answer_s: float) -> list[bytes]:
        """Send a request and return the answer. Raises OSError, `Untrusted`, and TimeoutError after
        ``answer_s`` seconds without a byte."""
        self._socket.settimeout(answer_s)
        self._socket.sendall(self._channel.seal(request))
        header = self._receive(HEADER)
        return self._channel.open(header, self._receive(frame_length(header)))

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self._socket.recv(min(length - len(data), 1 << 20))
            if not piece:
                raise ConnectionError("the connection was closed")
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._socket.close()
