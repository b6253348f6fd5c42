"""What is sent over a connection of the store: the proofs at its start, then sealed frames of lists
of fields. Start at `Channel`.

The server begins with a greeting and a random number. The client answers with one of its own and
its proof; the server with its proof. All are of fixed size. A frame is its length, a code over
direction, number, length and content, and the content.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

GREETING = b"parallel2d store"
NUMBER = CODE = 32  # bytes of a random number and of an HMAC-SHA256
HELLO = len(GREETING) + NUMBER  # bytes that the server begins with
ANSWER = NUMBER + CODE  # and that the client answers
HEADER = 4 + CODE  # of a frame
LARGEST_FRAME = 1 << 28


class Untrusted(Exception):  # noqa: N818 (named after what happened)
    """The other end does not have the secret, or a frame is not what it sent."""


class Channel:
    """Both directions of a connection, from the secret and both ends' random numbers."""

    def __init__(self, secret: str, servers: bytes, clients: bytes, *, server: bool) -> None:
        key = hmac.digest(hashlib.sha256(secret.encode()).digest(), servers + clients, "sha256")
        own, other = (b"server", b"client") if server else (b"client", b"server")
        self.proof = hmac.digest(key, b"proof of the " + own, "sha256")
        self._expected = hmac.digest(key, b"proof of the " + other, "sha256")
        self._sends = hmac.digest(key, b"frames of the " + own, "sha256")
        self._receives = hmac.digest(key, b"frames of the " + other, "sha256")
        self._sent = self._received = 0

    def check(self, proof: bytes) -> None:
        """Raises `Untrusted` unless it is the other end's."""
        if not hmac.compare_digest(proof, self._expected):
            raise Untrusted("it does not know the job's secret")

    def seal(self, fields: Sequence[bytes]) -> bytes:
        """The next frame to send. Raises ValueError when it is larger than `LARGEST_FRAME`."""
        content = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        if len(content) > LARGEST_FRAME:
            raise ValueError(f"{len(content)} bytes are more than a store takes at once")
        length = len(content).to_bytes(4, "big")
        code = _code(self._sends, self._sent, length + content)
        self._sent += 1
        return b"".join((length, code, content))

    def open(self, header: bytes, content: bytes) -> list[bytes]:
        """Its fields. Raises `Untrusted` unless the other end sent this frame, and sent it next."""
        code = _code(self._receives, self._received, header[:4] + content)
        if not hmac.compare_digest(header[4:], code):
            raise Untrusted("it sent a frame that is not sealed with the job's secret, or not next")
        self._received += 1
        fields, start = [], 0
        while start < len(content):
            end = start + 4 + int.from_bytes(content[start : start + 4], "big")
            fields.append(content[start + 4 : end])
            start = end
        return fields


def frame_length(header: bytes | bytearray) -> int:
    """Bytes of the content that follows. Raises `Untrusted` for more than `LARGEST_FRAME`."""
    length = int.from_bytes(header[:4], "big")
    if length > LARGEST_FRAME:
        raise Untrusted("it announced a frame that is too large")
    return length


def _code(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", number) + content, "sha256")
