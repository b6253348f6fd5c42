"""Documents, the units of work in which they are read, and the rows that could not be read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

WHOLE_FILE = 1 << 62


@dataclass(frozen=True)
class SourceFile:
    """A file, and its name relative to the path that the user gave. Files are sorted and reported
    by that name."""

    name: str
    path: str


@dataclass(frozen=True)
class Unit:
    """What one worker reads at a time: several small files, or a range of one large file."""

    kind: str  # text, rows, parquet or hf
    files: list[SourceFile]
    start: int = 0  # bytes of the file (text, rows), row groups (parquet) or rows (hf)
    stop: int = WHOLE_FILE


@dataclass(frozen=True)
class ReadOptions:
    """How documents are found in files."""

    text_field: str = "text"
    document_bytes: int = 64 << 10  # longer text files are cut at the next line end


@dataclass(frozen=True)
class Document:
    """One text. ``segments`` are (text, may be a target) pairs, where the source says which parts
    are targets of the loss."""

    text: str
    hash: int  # 64 bits of the content's blake2b: decides the split
    segments: list[tuple[str, bool]] | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that is not a document, with its file, line and the reason."""

    file: str
    line: int  # counted from 1; in a table, the row
    reason: str


HASH_RANGE = 1 << 64  # `content_hash` is below it


def content_hash(data: bytes) -> int:
    """The first 64 bits of blake2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def row_document(row: Any, line: int, options: ReadOptions) -> Document | BadRow:
    """The document of one row.

    ``segments``: a list of {"text": str, "loss": bool}; or ``prompt`` and ``completion``, of which
    only the completion is a target; or the text field.
    """
    if not isinstance(row, dict):
        return BadRow("", line, f"a row must be an object, got {type(row).__name__}")
    try:
        segments = _segments(row, options)
    except (TypeError, KeyError):
        return BadRow("", line, 'segments must be a list of {"text": ..., "loss": true or false}')
    if segments is None and options.text_field not in row:
        found = ", ".join(list(row)[:8]) or "none"
        return BadRow("", line, f"no field data.text_field={options.text_field}; fields: {found}")
    parts = [row[options.text_field]] if segments is None else [text for text, _ in segments]
    if not all(isinstance(part, str) for part in parts):
        return BadRow("", line, "the text is not a string")
    text = "".join(parts)
    try:
        return Document(text, content_hash(text.encode("utf-8")), segments)
    except UnicodeEncodeError:
        return BadRow("", line, "the text has half a surrogate pair, which no encoding can hold")


def _segments(row: dict[str, Any], options: ReadOptions) -> list[tuple[Any, bool]] | None:
    """The parts of a row that says which of them are targets; None for one that is a text. Raises
    TypeError or KeyError for ``segments`` that are none."""
    if row.get("segments") is not None:
        return [(part["text"], bool(part["loss"])) for part in row["segments"]]
    if row.get(options.text_field) is None and {"prompt", "completion"} <= set(row):
        return [(row["prompt"], False), (row["completion"], True)]
    return None
