"""Reads .gz and .zst files as streams (`open_compressed`), with an error for a stream that ends
early.

Memory is bounded by one block, whatever the size of the file.
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import IO, Any, cast

from parallel2d.errors import ConfigError

EXTENSIONS = (".gz", ".zst")
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)  # what reading a damaged stream raises
_BLOCK = 16 << 10


def open_compressed(path: str) -> IO[bytes]:
    """Opens a file whose name ends with one of `EXTENSIONS`. Reading a damaged file raises one of
    `DAMAGE`."""
    if path.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return cast(IO[bytes], io.BufferedReader(_ZstdFile(path), buffer_size=1 << 20))


class _ZstdFile(io.RawIOBase):
    """All frames of a .zst file. The library's own reader does not report that a file was cut
    off."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"{path} needs zstandard: pip install 'parallel2d[data]'") from None
        self._library: Any = zstandard
        self._file = open(path, "rb")  # noqa: SIM115  closed in close
        self._decoder: Any = None
        self._waiting = b""  # compressed bytes that follow the end of a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._waiting or self._file.read(_BLOCK)
            self._waiting = b""
            if not data:
                if self._decoder is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._decoder is None:
                self._decoder = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._decoder.decompress(data))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from None
            if self._decoder.eof:
                self._waiting, self._decoder = self._decoder.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
