"""Converts text to token ids: `load_tokenizer`.

The tokenizer ``bytes`` needs no file: its ids are the 256 byte values and one end-of-document id.
Any other name is the path of a ``tokenizer.json``, which the tokenizers library reads (extra
``data``). Such a file contains no code.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable
from parallel2d.base.files.limited_child import try_in_child

_LARGEST = 256 << 20  # bytes of a file
_MOST_GROWTH = 4096
# Printable ASCII, and characters of several bytes
_SAMPLE = "".join(map(chr, range(32, 127))) + " \u00e9\u2603\u4e2d\ufb01\U0001f600\n\t" * 20
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")


class Tokenizer:
    """The tokenizer ``bytes``: UTF-8 bytes as ids 0-255, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257  # all ids, including the end-of-document id, are smaller
    end_id = 256  # follows each document
    fingerprint = "bytes"  # equal if and only if the same text gives the same ids

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        """Return a 1-D array of unsigned ids for each text, without the end-of-document id."""
        found: list[NDArray[Any]] = []
        for text in texts:
            found.append(np.frombuffer(text.encode("utf-8"), dtype=np.uint8))
        return found

    def encode_marked(
        self, parts: Sequence[tuple[str, bool]]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return the ids of the joined parts, and a uint8 flag per id: 1 if the text of the id
        overlaps a part with the flag True. The end-of-document id is not added."""
        ids = self.encode([text for text, _ in parts])
        flags = np.array([flag for _, flag in parts], np.uint8)
        return np.concatenate(ids), np.repeat(flags, list(map(len, ids)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Ids without text are omitted, and bytes that are not UTF-8
        become the replacement character."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class LibraryTokenizer(Tokenizer):
    """The tokenizer in a ``tokenizer.json``. The tokenizer adds no special tokens to a text;
    ``end_token`` is the end-of-document token.

    If ``end_token`` is None, the first name of `_ENDS` that is in the vocabulary is used. If the
    vocabulary has none of these names, the end-of-document id is a new id after its last id.
    """

    def __init__(self, path: str, end_token: str | None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={path} needs the tokenizers library: pip install "
                "'parallel2d[data]'; data.tokenizer=bytes needs nothing"
            ) from None
        file = Path(path).expanduser()
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"data.tokenizer={path} must be 'bytes' or the path of a tokenizer.json or of its "
                "folder; there is no file"
            )
        size = file.stat().st_size
        if size > _LARGEST:
            raise ConfigError(f"data.tokenizer={path} has more than {_LARGEST >> 20} MiB")
        content = file.read_bytes()
        read = functools.partial(_read, tokenizers.Tokenizer, content, path)
        # Native code that reads a malicious file may crash the process, or use all memory.
        # Therefore a child process reads the file first.
        try_in_child(path, size, read)
        self._tokenizer = read()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if end_token is None:
            end_token = next((token for token in _ENDS if token in vocabulary), None)
        elif end_token not in vocabulary:
            raise ConfigError(f"data.end_token={end_token} is not in the vocabulary of {path}")
        self.name = file.name
        self.end_id = size if end_token is None else vocabulary[end_token]
        self.vocab_size = max(size, self.end_id + 1)
        self.fingerprint = hashlib.sha256(content + f"/{self.end_id}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            raise _as_config_error(error, f"data.tokenizer={self.name} cannot encode") from None
        found: list[NDArray[Any]] = []
        for encoding in encodings:
            found.append(np.array(encoding.ids, dtype=np.uint32))
        return found

    def encode_marked(
        self, parts: Sequence[tuple[str, bool]]
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        text = "".join(part for part, _ in parts)
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            raise _as_config_error(error, f"data.tokenizer={self.name} cannot encode") from None
        # before[i]: number of marked characters among the first i characters. A difference of two
        # entries counts the marked characters in between.
        marked = np.repeat([int(flag) for _, flag in parts], [len(part) for part, _ in parts])
        before = np.concatenate([[0], np.cumsum(marked)])
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        return np.array(encoding.ids, np.uint32), (before[ends] > before[begins]).astype(np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, with special tokens as text."""
        known = []
        for token in ids:
            if self._tokenizer.id_to_token(token) is not None:
                known.append(token)
        return str(self._tokenizer.decode(known, skip_special_tokens=False))


def _read(kind: Any, content: bytes, path: str) -> Any:
    """Return the library's tokenizer, after a test with a sample text. Raises `ConfigError` for an
    invalid file, and for a tokenizer that may make a text much longer."""
    try:
        tokenizer = kind.from_str(content.decode("utf-8"))
        growth = (
            _growth(json.loads(tokenizer.normalizer.__getstate__())) if tokenizer.normalizer else 1
        )
        if growth > _MOST_GROWTH:
            raise ValueError(f"it may make a text {growth} times longer")
        tokenizer.encode(_SAMPLE, add_special_tokens=False)
    except BaseException as error:
        raise _as_config_error(
            error, f"data.tokenizer={path} is not a readable tokenizer.json"
        ) from None
    return tokenizer


def _growth(normalizer: Any) -> int:
    """Return the largest factor by which a normalizer of the library can lengthen a text."""
    growth = 1
    for each in normalizer.get("normalizers", ()):
        growth *= _growth(each)
    for key in ("content", "prepend"):
        growth *= max(1, len(normalizer.get(key) or ""))
    if charsmap := normalizer.get("precompiled_charsmap"):
        data = base64.b64decode(charsmap)
        # Format of sentencepiece: the size of a trie, the trie, and zero-terminated replacement
        # texts
        trie = int.from_bytes(data[:4], "little")
        growth *= max(map(len, data[4 + trie :].split(b"\0")), default=1) + 1
    return growth


def _as_config_error(error: BaseException, what: str) -> BaseException:
    """Return a `ConfigError` for an error of the library: an `Exception`, or a panic of Rust, which
    is not an `Exception`. Other errors, such as KeyboardInterrupt, are returned unchanged."""
    is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return ConfigError(f"{what}: {printable(error, 300)}") if is_of_library else error


def load_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of ``data.tokenizer``. Raises `ConfigError` for a missing file or an
    invalid ``end_token``."""
    if name != "bytes":
        return LibraryTokenizer(name, end_token)
    if end_token is not None:
        problem = "has no meaning with data.tokenizer=bytes, whose end id is 256"
        raise ConfigError(f"data.end_token={end_token} {problem}")
    return Tokenizer()
