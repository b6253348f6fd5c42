"""Finds the raw input of a `DataConfig`, divides it into units of work (`find_units`), and reads
the documents of a unit one at a time (`read_unit`).

Units depend only on the names and sizes of files, so any process that prepares them produces the
same shards. Large files are read in pieces, so that memory is bounded by one document. The
libraries for .zst, Parquet and data sets are extras and are imported only here.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError

# Size of a unit of files and of a data set; constants, because shards are made per unit
UNIT_BYTES, _UNIT_ROWS = 32 << 20, 50_000
ROW_BYTES = 64 << 20  # a longer line of a .jsonl file is a bad row
HASH_RANGE = 1 << 64  # upper limit of `content_hash`
# Larger input is identified by names, sizes and modification times instead of its content
_IDENTIFIED_WHOLE = 256 << 20
_WHOLE_FILE = 1 << 62
_TABLE_ROWS = 256  # rows of a Parquet file in memory at a time
_NOT_IN_CORPUS = ("test", "tests", "idle_test", "site-packages", "dist-packages")
_MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")
_COMPRESSED = (".gz", ".zst")
# A compressed file may expand to this size, or to this multiple of its size; text takes 3 to 10.
_FREE_BYTES, _MOST_EXPANSION = 4 << 20, 100

# Pieces of a file, each with the number of lines that it spans
_Pieces = Iterator[tuple[Any, int]]
BadRows = Callable[[str, int, str], None]


class SourceFile(NamedTuple):
    """A file. Files are sorted by name, and messages use the name."""

    name: str  # relative to the path that the user gave
    path: str


@dataclass(frozen=True)
class Unit:
    """The input that one worker reads at a time: several small files, or a range of a large one."""

    kind: str  # text, rows, parquet or hf
    files: list[SourceFile]
    start: int = 0  # bytes of the file (text, rows), row groups (parquet) or rows (hf)
    stop: int = _WHOLE_FILE


@dataclass(frozen=True)
class Document:
    """One text, in parts with a flag: True for parts that are targets of the loss."""

    utf8: bytes
    parts: list[tuple[str, bool]]


class _BadRowError(ValueError):
    """A piece of a file is not a document; the message says why. ``line`` counts from 0."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def find_units(config: DataConfig) -> tuple[list[Unit], str]:
    """Return the units of the raw input of ``config`` in order, and a hex digest that changes with
    a file's name or content. Raises `ConfigError` for input that cannot be read."""
    if config.name == "hf":
        data_set = _open_data_set(config)
        source = [SourceFile(f"{config.path} {config.subset or ''} {config.split}", "")]
        begins, rows = range(0, len(data_set), _UNIT_ROWS), len(data_set)
        units = [Unit("hf", source, row, min(row + _UNIT_ROWS, rows)) for row in begins]
        return units, str(data_set._fingerprint)
    files = _standard_library() if config.name == "stdlib" else find_files(str(config.path))
    try:
        return plan_units(files), files_identity(files)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None


def find_files(path: str) -> list[SourceFile]:
    """Return the files of a path, sorted: a file, the visible files of a folder, or of a glob."""
    start = Path(path).expanduser()
    if start.is_dir():
        return _files_below(start)
    if start.is_file():
        return [SourceFile(start.name, str(start))]
    matches = filter(Path.is_file, map(Path, glob.glob(str(start), recursive=True)))
    found = sorted(SourceFile(match.as_posix(), str(match)) for match in matches)
    if not found:
        problem = "is not a file or folder, and as a glob it matches no file"
        raise ConfigError(f"data.path={path} {problem}")
    return found


def _standard_library() -> list[SourceFile]:
    """Return Python's own library sources, without tests and files that an installation adds."""
    files = []
    for file in _files_below(Path(sysconfig.get_paths()["stdlib"]), _NOT_IN_CORPUS):
        last = os.path.basename(file.path)
        added = os.path.islink(file.path) or last.startswith(_MACHINE_MADE)
        if file.name.endswith(".py") and not added:
            files.append(file)
    return files


def _files_below(root: Path, omitted: Collection[str] = ()) -> list[SourceFile]:
    """Return files below ``root``, without hidden ones and ``omitted`` folders, sorted by name."""
    files = []
    for folder, children, names in os.walk(root):
        # The walk descends into the folders that remain in this list.
        children[:] = set(filter(_is_shown, children)).difference(omitted)
        inside = os.path.relpath(folder, root)
        for name in filter(_is_shown, names):
            path = os.path.join(folder, name)
            # Not a pipe, a socket, or a broken link
            if os.path.isfile(path):
                files.append(SourceFile(os.path.normpath(os.path.join(inside, name)), path))
    return sorted(files)


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def plan_units(files: list[SourceFile]) -> list[Unit]:
    """Divide the input into units of about `UNIT_BYTES`, in the order of the files."""
    units: list[Unit] = []
    left = -1  # bytes that the last unit has left for further files; -1: it is full
    for file in files:
        room, left = left, -1
        name, size = file.path.lower(), os.path.getsize(file.path)
        stem = name.removesuffix(".gz").removesuffix(".zst")
        kind = "rows" if stem.endswith((".jsonl", ".ndjson")) else "text"
        if name.endswith(".parquet"):
            units += _parquet_units(file)
        elif name.endswith(_COMPRESSED):
            units.append(Unit(kind, [file]))
        elif size > UNIT_BYTES:
            begins = range(0, size, UNIT_BYTES)
            units += [Unit(kind, [file], at, min(at + UNIT_BYTES, size)) for at in begins]
        else:
            if size > room or kind != units[-1].kind:
                units.append(Unit(kind, []))
                room = UNIT_BYTES
            units[-1].files.append(file)
            left = room - size
    return units


def _parquet_units(file: SourceFile) -> list[Unit]:
    """Return units of consecutive row groups. Reads only the file's footer."""
    table = _open_parquet(file.path)
    units, begin, held = [], 0, 0
    for group in range(table.num_row_groups):
        held += table.metadata.row_group(group).total_byte_size
        if held >= UNIT_BYTES or group == table.num_row_groups - 1:
            units.append(Unit("parquet", [file], begin, group + 1))
            begin, held = group + 1, 0
    return units


def files_identity(files: list[SourceFile]) -> str:
    """Return a hex digest that changes with a file's name or content."""
    digest = hashlib.sha256()
    sizes = [os.path.getsize(file.path) for file in files]
    whole = sum(sizes) <= _IDENTIFIED_WHOLE
    for file, size in zip(files, sizes, strict=True):
        digest.update(json.dumps([file.name, size]).encode())
        if not whole:
            digest.update(str(os.stat(file.path).st_mtime_ns).encode())
            continue
        with open(file.path, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def content_hash(data: bytes) -> int:
    """Return the first 64 bits of blake2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def read_unit(unit: Unit, config: DataConfig, report: BadRows) -> Iterator[Document]:
    """Yield the documents of a unit in order.

    A piece that is not a document is passed to ``report``: the name of its file, its line in the
    unit (in a table: its row), counted from 1, and the reason. Raises `ConfigError` for a missing
    extra.
    """
    pieces, document_of = _FORMATS[unit.kind]
    for file in unit.files:
        line = 1
        try:
            for piece, lines in pieces(file.path, unit, config):
                try:
                    yield from document_of(piece, config.text_field)
                except _BadRowError as error:
                    report(file.name, line + error.line, str(error))
                line += lines
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            report(file.name, line, f"cannot be read from here on: {reason}")


def lines_before(unit: Unit) -> int:
    """Return the number of lines or rows before the unit. Reads the file up to the unit,
    so it is called only for messages about bad rows."""
    path = unit.files[0].path
    if unit.kind == "hf" or unit.start == 0:
        return unit.start
    if unit.kind == "parquet":
        metadata = _open_parquet(path).metadata
        return sum(metadata.row_group(group).num_rows for group in range(unit.start))
    with open(path, "rb") as file:
        end = _enter(file, unit.start)
        file.seek(0)
        blocks = iter(lambda: file.read(min(end - file.tell(), 1 << 20)), b"")
        return sum(block.count(b"\n") for block in blocks)


def document_bytes(config: DataConfig) -> int:
    """Return the size that text files are cut to; standard-library files are never cut."""
    return _WHOLE_FILE if config.name == "stdlib" else config.document_kib << 10


def _text_pieces(path: str, unit: Unit, config: DataConfig) -> _Pieces:
    """Yield bytes that end at line ends, or inside a line that is longer than a document."""
    # Files that are not cut need this bound too, because `read` allocates its size in advance.
    size, carried, inside_line = min(document_bytes(config), ROW_BYTES), b"", False
    with _open(path) as file:
        position = _enter(file, unit.start)
        while position < unit.stop or inside_line:
            piece = file.read(max(0, min(size, unit.stop - position)))
            if not piece.endswith(b"\n"):
                piece += file.readline(size)
            position += len(piece)
            inside_line = bool(piece) and not piece.endswith(b"\n")
            piece = carried + piece
            if not piece:
                return
            # Cut only between characters; invalid UTF-8 is reported later.
            whole = codecs.utf_8_decode(piece, "replace")[1] if inside_line else len(piece)
            piece, carried = piece[:whole], piece[whole:]
            yield piece, piece.count(b"\n")


def _row_pieces(path: str, unit: Unit, _: DataConfig) -> _Pieces:
    """Yield lines. The rest of a line that is too long is skipped without using memory."""
    with _open(path) as file:
        position = _enter(file, unit.start)
        while position < unit.stop and (row := file.readline(ROW_BYTES + 1)):
            position += len(row)
            rest = row
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                position += len(rest)
            yield row, 1


# Functions for `read_unit` that parse one piece of a file into at most one document, and raise
# `_BadRowError` otherwise


def _text_document(piece: bytes, _: str) -> list[Document]:
    zero = piece.find(b"\0")  # valid UTF-8, but not part of any text
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{piece[error.start]:02x}, {error.reason}"
        raise _BadRowError(reason, piece.count(b"\n", 0, error.start)) from None
    if zero >= 0:
        raise _BadRowError("binary: it has zero bytes", piece.count(b"\n", 0, zero))
    return [Document(piece, [(text, True)])]


def _line_document(line: bytes, text_field: str) -> list[Document]:
    if len(line) > ROW_BYTES:
        raise _BadRowError(f"the line is longer than {ROW_BYTES} bytes")
    if not line.strip():
        return []
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise _BadRowError(f"not UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not JSON: {error}") from None
    return _row_document(row, text_field)


def _row_document(row: Any, text_field: str) -> list[Document]:
    """Parse one row: ``segments``, a list of {"text": str, "loss": bool}; or ``prompt`` and
    ``completion``, with only the completion as target; or the text field."""
    match row:
        case {"segments": segments} if segments is not None:
            try:
                parts = [(part["text"], bool(part["loss"])) for part in segments]
            except (TypeError, KeyError):
                form = '{"text": ..., "loss": true or false}'
                raise _BadRowError(f"segments must be a list of {form}") from None
        case {"prompt": prompt, "completion": completion} if row.get(text_field) is None:
            parts = [(prompt, False), (completion, True)]
        case dict() if text_field in row:
            parts = [(row[text_field], True)]
        case dict():
            found = ", ".join(list(row)[:8]) or "none"
            raise _BadRowError(f"no field data.text_field={text_field}; fields: {found}")
        case _:
            raise _BadRowError(f"a row must be an object, got {type(row).__name__}")
    try:
        return [Document("".join(text for text, _ in parts).encode("utf-8"), parts)]
    except TypeError:
        raise _BadRowError("the text is not a string") from None
    except UnicodeEncodeError:
        raise _BadRowError("the text has half a surrogate pair, which no encoding has") from None


def _enter(file: IO[bytes], start: int) -> int:
    """Move to the first line that starts at or after ``start`` and return its offset.

    A line belongs to the unit that contains its first byte. Every unit applies this rule at its
    start and at its end, so that each line of a file is read exactly once, whichever workers read
    the units.
    """
    if start == 0:
        return 0
    # Begin one byte earlier: if that byte ends a line, a line starts exactly at ``start``.
    file.seek(start - 1)
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _open(path: str) -> IO[bytes]:
    file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115  the caller closes it
    if path.lower().endswith(".gz"):
        stream: Any = gzip.GzipFile(fileobj=file)
    elif path.lower().endswith(".zst"):
        # Unlike the stream reader of zstandard, this reader reports a truncated file.
        stream = _library("pyarrow", "data", path).CompressedInputStream(file, "zstd")
    else:
        return file
    return cast(IO[bytes], io.BufferedReader(_Decompressed(file, stream), 1 << 16))


class _Decompressed(io.RawIOBase):
    """Passes decompressed bytes on. Raises OSError for more bytes than text could expand to."""

    def __init__(self, file: IO[bytes], stream: Any) -> None:
        self._file, self._stream, self._given = file, stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._stream.readinto(buffer))
        self._given += count
        if self._given > _FREE_BYTES + _MOST_EXPANSION * self._file.tell():
            raise OSError(f"it expands to more than {_MOST_EXPANSION} times its size, unlike text")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _library(name: str, extra: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path} needs {name}: pip install 'parallel2d[{extra}]'") from None


def _open_parquet(path: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile`. Raises `ConfigError` for any other file."""
    pyarrow, parquet = (_library(name, "data", path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable Parquet file: {error}") from None


def _open_data_set(config: DataConfig) -> Any:
    """Return the `datasets.Dataset` of ``data=hf``. Raises `ConfigError` if loading fails."""
    path = str(config.path)
    datasets = _library("datasets", "hf-datasets", f"data=hf data.path={path}")
    try:
        # The results of save_to_disk: one data set, or a folder of several splits
        if os.path.exists(os.path.join(path, "state.json")):
            return datasets.load_from_disk(path)
        if os.path.exists(os.path.join(path, "dataset_dict.json")):
            return datasets.load_from_disk(path)[config.split]
        return datasets.load_dataset(path, config.subset, split=config.split)
    # The library raises many types: for a missing data set, a missing split, no network
    except Exception as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"data=hf data.path={path} data.split={config.split} cannot be loaded: {reason}"
        ) from None


def _parquet_pieces(path: str, unit: Unit, config: DataConfig) -> _Pieces:
    table = _open_parquet(path)
    columns = _columns(table.schema_arrow.names, config.text_field)
    groups = list(range(unit.start, unit.stop))
    damage = (_library("pyarrow", "data", path).ArrowException, UnicodeDecodeError)
    try:
        for batch in table.iter_batches(_TABLE_ROWS, groups, columns, use_threads=False):
            yield from zip(batch.to_pylist(), itertools.repeat(1))
    except damage as error:
        raise OSError(str(error)) from None


def _data_set_pieces(_: str, unit: Unit, config: DataConfig) -> _Pieces:
    data_set = _open_data_set(config)
    columns = _columns(data_set.column_names, config.text_field)
    rows = data_set.select_columns(columns).select(range(unit.start, unit.stop))
    yield from zip(rows, itertools.repeat(1))


def _columns(names: list[str], text_field: str) -> list[str]:
    """Select the columns for documents; without any, all columns, for the message about a row."""
    wanted = (text_field, "prompt", "completion", "segments")
    return [name for name in names if name in wanted] or names


# Kind of unit -> a function that reads its files in pieces, and a function that parses a piece
_Format = tuple[Callable[[str, Unit, DataConfig], _Pieces], Callable[[Any, str], list[Document]]]
_FORMATS: dict[str, _Format] = {
    "text": (_text_pieces, _text_document),
    "rows": (_row_pieces, _line_document),
    "parquet": (_parquet_pieces, _row_document),
    "hf": (_data_set_pieces, _row_document),
}
