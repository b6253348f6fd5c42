"""Protocol of a connection to the store: both ends prove that they have the secret, then exchange
authenticated frames. The content of a frame is a list of fields. Start at `Channel`.

The server sends a greeting and a random number. The client answers with another random number and
the client's proof. The server answers with the server's proof. All three messages have a fixed
size. A frame consists of three parts: the length of the content; an authentication code of
direction, frame number, length and content; and the content.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

GREETING = b"parallel2d store"
NUMBER = CODE = 32  # bytes of a random number and of an HMAC-SHA256
HELLO = len(GREETING) + NUMBER  # bytes of the server's first message
ANSWER = NUMBER + CODE  # bytes of the client's answer
HEADER = 4 + CODE  # bytes of a frame before its content
LARGEST_FRAME = 1 << 28


class Untrusted(Exception):  # noqa: N818 (named after what happened)
    """The peer does not have the secret, or a frame was forged or altered."""


class Channel:
    """Both directions of a connection, keyed by the secret and the random numbers of both ends."""

    def __init__(self, secret: str, servers: bytes, clients: bytes, *, server: bool) -> None:
        key = hmac.digest(hashlib.sha256(secret.encode()).digest(), servers + clients, "sha256")
        own, other = (b"server", b"client") if server else (b"client", b"server")
        self.proof = hmac.digest(key, b"proof of the " + own, "sha256")
        self._expected = hmac.digest(key, b"proof of the " + other, "sha256")
        self._sends = hmac.digest(key, b"frames of the " + own, "sha256")
        self._receives = hmac.digest(key, b"frames of the " + other, "sha256")
        self._sent = self._received = 0

    def check(self, proof: bytes) -> None:
        """Raise `Untrusted` unless ``proof`` is the peer's proof."""
        if not hmac.compare_digest(proof, self._expected):
            raise Untrusted("it does not know the job's secret")

    def seal(self, fields: Sequence[bytes]) -> bytes:
        """Return the next frame to send. Raises ValueError if it is larger than `LARGEST_FRAME`."""
        content = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        if len(content) > LARGEST_FRAME:
            raise ValueError(f"{len(content)} bytes are more than a store takes at once")
        length = len(content).to_bytes(4, "big")
        code = _code(self._sends, self._sent, length + content)
        self._sent += 1
        return b"".join((length, code, content))

    def open(self, header: bytes, content: bytes) -> list[bytes]:
        """Return the fields of a frame. Raises `Untrusted` unless it is the next frame that the
        peer has sent."""
        code = _code(self._receives, self._received, header[:4] + content)
        if not hmac.compare_digest(header[4:], code):
            raise Untrusted(
                "it sent a frame that is not sealed with the job's secret, or out of order"
            )
        self._received += 1
        fields, start = [], 0
        while start < len(content):
            end = start + 4 + int.from_bytes(content[start : start + 4], "big")
            fields.append(content[start + 4 : end])
            start = end
        return fields


def frame_length(header: bytes | bytearray) -> int:
    """Return the bytes of the content after a header. Raises `Untrusted` for more than
    `LARGEST_FRAME`."""
    length = int.from_bytes(header[:4], "big")
    if length > LARGEST_FRAME:
        raise Untrusted("it announced a frame that is too large")
    return length


def _code(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", number) + content, "sha256")
