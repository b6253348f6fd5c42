"""Finds input files (`find_files`), divides them into units of work (`plan_units`), and reads a
unit's documents one at a time (`read_unit`).

The units do not depend on the number of workers. Memory is bounded by one document: large files are
read in pieces.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from parallel2d.data.compressed import DAMAGE, EXTENSIONS, open_compressed
from parallel2d.data.documents import (
    BadRow,
    Document,
    ReadOptions,
    SourceFile,
    Unit,
    content_hash,
    row_document,
)
from parallel2d.data.tables import parquet_units, read_table
from parallel2d.errors import ConfigError

UNIT_BYTES = 32 << 20  # of input per unit; a constant, because shards are made per unit
ROW_BYTES = 64 << 20  # a longer line of a .jsonl file is a bad row
_ROW_FORMATS = (".jsonl", ".ndjson")
_NOT_IN_CORPUS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib-dynload",
}
_MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")


def standard_library() -> list[SourceFile]:
    """The Python standard library's own source files, without tests and without files that an
    installation adds."""
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, children, names in os.walk(root):
        children[:] = sorted(child for child in children if child not in _NOT_IN_CORPUS)
        for name in names:
            path = os.path.join(folder, name)
            if (
                name.endswith(".py")
                and not name.startswith(_MACHINE_MADE)
                and not os.path.islink(path)
            ):
                files.append(SourceFile(Path(path).relative_to(root).as_posix(), path))
    if not files:
        raise ConfigError(
            f"data=stdlib: there is no Python source under {root}; use data=text data.path=..."
        )
    return sorted(files, key=lambda file: file.name)


def find_files(path: str) -> list[SourceFile]:
    """The files that a path names, sorted by relative name: a file, the files of a folder that are
    not hidden, or the matches of a glob."""
    start = Path(path).expanduser()
    if start.is_file():
        return [SourceFile(start.name, str(start))]
    if start.is_dir():
        found = [
            SourceFile(file.relative_to(start).as_posix(), str(file))
            for file in start.rglob("*")
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(start).parts)
        ]
        if not found:
            raise ConfigError(f"data.path={path} is a folder without files")
        return sorted(found, key=lambda file: file.name)
    found = [
        SourceFile(Path(name).as_posix(), name)
        for name in glob.glob(str(start), recursive=True)
        if os.path.isfile(name)
    ]
    if not found:
        raise ConfigError(
            f"data.path={path} is no file, no folder, and as a glob it matches no file"
        )
    return sorted(found, key=lambda file: file.name)


def plan_units(files: list[SourceFile]) -> list[Unit]:
    """Divides the input into units of about `UNIT_BYTES`, in order. The result depends on names and
    sizes only."""
    units: list[Unit] = []
    group: list[SourceFile] = []
    group_kind, group_bytes = "", 0
    for file in files:
        kind, compressed = _kind(file.path)
        size = os.path.getsize(file.path)
        alone = compressed or kind == "parquet" or size > UNIT_BYTES
        # A file with units of its own ends the group before it: units keep the order of files.
        if group and (alone or kind != group_kind or group_bytes + size > UNIT_BYTES):
            units.append(Unit(group_kind, group))
            group, group_bytes = [], 0
        if alone:
            units += _units_of_one(file, kind, compressed, size)
        else:
            group, group_kind, group_bytes = [*group, file], kind, group_bytes + size
    return [*units, Unit(group_kind, group)] if group else units


def _units_of_one(file: SourceFile, kind: str, compressed: bool, size: int) -> list[Unit]:
    if kind == "parquet":
        return parquet_units(file, UNIT_BYTES)
    if compressed:
        return [Unit(kind, [file])]
    begins = range(0, size, UNIT_BYTES)
    return [Unit(kind, [file], begin, min(begin + UNIT_BYTES, size)) for begin in begins]


def read_unit(unit: Unit, options: ReadOptions) -> Iterator[Document | BadRow]:
    """Yields the documents and the bad rows of a unit, in order."""
    if unit.kind in ("parquet", "hf"):
        yield from read_table(unit, options)
        return
    for source in unit.files:
        line = 0
        try:
            with _open(source.path) as file:
                reader = _read_text if unit.kind == "text" else _read_rows
                for item, line in reader(file, unit, options):  # noqa: B007  the last line is reported below
                    yield _with_place(item, source, unit) if isinstance(item, BadRow) else item
        except DAMAGE as error:
            yield _with_place(
                BadRow("", line + 1, f"the compressed file is damaged: {error}"), source, unit
            )
        except OSError as error:
            yield BadRow(source.name, line + 1, f"cannot be read: {error.strerror or error}")


def _kind(path: str) -> tuple[str, bool]:
    """(kind, is compressed) by extension."""
    stem, extension = os.path.splitext(path.lower())
    compressed = extension in EXTENSIONS
    if compressed:
        extension = os.path.splitext(stem)[1]
    if extension == ".parquet" and not compressed:
        return "parquet", False
    return ("rows" if extension in _ROW_FORMATS else "text"), compressed


def _open(path: str) -> IO[bytes]:
    if path.lower().endswith(EXTENSIONS):
        return open_compressed(path)
    return open(path, "rb", buffering=1 << 20)


def _with_place(row: BadRow, source: SourceFile, unit: Unit) -> BadRow:
    """The bad row with its file and its line in that file. ``row.line`` counts from the start of
    the unit; the lines before the unit are counted only here, where a row is bad."""
    before = 0
    if unit.start:
        with open(source.path, "rb") as file:
            file.seek(0)
            left = unit.start
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                before += block.count(b"\n")
                left -= len(block)
            # A line that began before this unit belongs to the unit before
            before += not block.endswith(b"\n")
    return BadRow(source.name, before + row.line, row.reason)


def _enter(file: IO[bytes], start: int) -> int:
    """Moves to the first line that starts at or after ``start`` and returns its offset. A line
    belongs to the unit that contains its first byte.
    """
    if start == 0:
        return 0
    # One byte before: what ends there tells whether a line starts exactly at ``start``.
    file.seek(start - 1)
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _read_text(
    file: IO[bytes], unit: Unit, options: ReadOptions
) -> Iterator[tuple[Document | BadRow, int]]:
    """Yields (document, lines read up to its end). Pieces end at line ends, or inside a line that
    is longer than a piece.
    """
    position, line, carried, inside_line = _enter(file, unit.start), 0, b"", False
    while position < unit.stop or inside_line:
        piece = _read_up_to(file, min(options.document_bytes, unit.stop - position))
        if not piece.endswith(b"\n"):
            piece += file.readline(min(options.document_bytes, 1 << 26))
        position += len(piece)
        inside_line = bool(piece) and not piece.endswith(b"\n")
        piece, carried = carried + piece, b""
        if not piece:
            return
        if inside_line:
            whole = _whole_characters(piece)
            piece, carried = piece[:whole], piece[whole:]
        item = _document(piece, line + 1)
        line += piece.count(b"\n")
        yield item, line


def _document(piece: bytes, first: int) -> Document | BadRow:
    """``first``: the number of the line that ``piece`` begins in."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{piece[error.start]:02x}, {error.reason}"
        return BadRow("", first + piece[: error.start].count(b"\n"), reason)
    # Zero bytes are valid UTF-8, and no text has them.
    if "\0" in text:
        before = piece[: piece.index(b"\0")]
        return BadRow("", first + before.count(b"\n"), "binary: it has zero bytes")
    return Document(text, content_hash(piece))


def _read_up_to(file: IO[bytes], count: int) -> bytes:
    """``file.read(count)`` without the buffer of ``count`` bytes that it allocates first."""
    parts = []
    while count > 0 and (part := file.read(min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _whole_characters(piece: bytes) -> int:
    """Length of ``piece`` without an incomplete UTF-8 character at its end."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte >= 0xC0:  # the leading byte of a character of several bytes
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return len(piece) - back if needed > back else len(piece)
        if byte < 0x80:  # a character of one byte, so nothing is incomplete
            break
    return len(piece)


def _read_rows(
    file: IO[bytes], unit: Unit, options: ReadOptions
) -> Iterator[tuple[Document | BadRow, int]]:
    """Yields (document, lines read) of a file with one JSON object per line."""
    position, line = _enter(file, unit.start), 0
    while position < unit.stop and (row := file.readline(ROW_BYTES + 1)):
        position, line = position + len(row), line + 1
        if len(row) > ROW_BYTES:
            # Its rest is passed over in pieces, so that it takes no memory.
            while not row.endswith(b"\n") and (row := file.readline(1 << 20)):
                position += len(row)
            yield BadRow("", line, f"the line is longer than {ROW_BYTES} bytes"), line
        elif row.strip():
            yield _parse_row(row, line, options), line


def _parse_row(row: bytes, line: int, options: ReadOptions) -> Document | BadRow:
    try:
        value = json.loads(row)
    except UnicodeDecodeError as error:
        return BadRow("", line, f"not UTF-8: {error.reason}")
    except (ValueError, RecursionError) as error:
        return BadRow("", line, f"not JSON: {error or 'nested too deeply'}")
    return row_document(value, line, options)
