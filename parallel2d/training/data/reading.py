"""`find_units` finds the raw input of a `DataConfig` and divides it into units of work. `read_unit`
reads the documents of a unit one at a time.

Units depend only on the names and sizes of files, so every process produces the same shards. Large
files are read in pieces, so that at most one document is in memory. The libraries for .zst, Parquet
and data sets are optional, and are imported only when they are needed.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from parallel2d.base.config import DataConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files import inside, printable, walk
from parallel2d.training.data import data_set_folder, tables
from parallel2d.training.data.chat import ChatTemplate, without_nulls

# Size of a unit: in bytes of files, or in rows of a data set. The sizes are constants, because each
# unit has its own shards, which must not depend on settings
UNIT_BYTES, _UNIT_ROWS = 32 << 20, 50_000
ROW_BYTES = 64 << 20  # a longer line of a .jsonl file is a bad row
HASH_RANGE = 1 << 64  # upper limit of `content_hash`
# Up to this size, input is identified by its content; larger input by the names, sizes and
# modification times of its files
_IDENTIFIED_WHOLE = 256 << 20
_WHOLE_FILE = 1 << 62
_NOT_IN_CORPUS = ("test", "tests", "idle_test", "site-packages", "dist-packages")
_MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")
_COMPRESSED = (".gz", ".zst")
_ROW_FILES = (".jsonl", ".ndjson")
# For a data set: file name extension -> method of `datasets.Dataset` that reads these files, and
# its arguments
_LIBRARY_READERS: dict[str, tuple[str, dict[str, str]]] = {
    ".csv": ("from_csv", {}),
    ".tsv": ("from_csv", {"sep": "\t"}),
    ".json": ("from_json", {}),
    ".txt": ("from_text", {}),
}
# A compressed file may expand to this size, plus this multiple of its compressed size. Text expands
# to 3 to 10 times its compressed size.
_FREE_BYTES, _MOST_EXPANSION = 4 << 20, 100

# Pieces of a file, each with the number of lines that it spans
_Pieces = Iterator[tuple[Any, int]]
BadRows = Callable[[str, int, str], None]
_RowReader = Callable[[Any], "list[Document]"]


class SourceFile(NamedTuple):
    """An input file. Files are sorted by name, and messages contain the name."""

    name: str  # relative to the path that the user gave
    path: str


@dataclass(frozen=True)
class Unit:
    """A unit of work for one worker: several small files, or a range of one large file."""

    kind: str  # key of `_FORMATS`
    files: list[SourceFile]
    start: int = 0  # in bytes (text, rows), row groups (parquet) or rows (arrow, hf)
    stop: int = _WHOLE_FILE


@dataclass(frozen=True)
class Document:
    """A document: its text, and the text in parts, each with True if the part is a target of the
    loss."""

    utf8: bytes
    parts: list[tuple[str, bool]]
    joined: bool = False  # True if tokens may span parts, and no end-of-document id is added


class _BadRowError(ValueError):
    """A piece of a file is not a valid document; the message gives the reason. ``line``: line in
    the piece, from 0."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def find_units(config: DataConfig) -> tuple[list[Unit], str]:
    """Return the units of the raw input of ``config`` in order, and a hex digest that identifies
    the input. Raises `ConfigError` for input that cannot be read."""
    if config.name == "hf":
        files = _files_of_data_set(config)
        endings = set()
        for file in files:
            endings.add(os.path.splitext(file.name)[1].lower())
        if endings & set(_LIBRARY_READERS):
            data_set = _open_data_set(config)
            source = [SourceFile(f"{config.path} {config.subset or ''} {config.split}", "")]
            return _row_units("hf", source, len(data_set)), str(data_set._fingerprint)
        if endings == {".arrow"}:
            return _arrow_units(files), files_identity(files)
    try:
        if config.name == "stdlib":
            files = _standard_library()
        elif config.name != "hf":
            files = find_files(str(config.path))
        units = plan_units(files)
        for unit in units:
            if config.name == "chat" and unit.kind == "text":
                shown = printable(unit.files[0].name, 300)
                raise ConfigError(f"data=chat reads .jsonl and .parquet, and {shown} is neither")
        return units, files_identity(files)
    except OSError as error:
        where = printable(error.filename or config.path, 300)
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None


def find_files(path: str) -> list[SourceFile]:
    """Return the files of ``path``, sorted by name. ``path`` may be a file, a folder, or a glob.
    Hidden files in a folder are omitted."""
    start = Path(path).expanduser()
    if start.is_dir():
        return _files_below(start)
    if start.is_file():
        return [SourceFile(start.name, str(start))]
    found = []
    try:
        matches = list(filter(os.path.isfile, glob.glob(str(start), recursive=True)))
    except RecursionError:
        raise ConfigError(f"data.path={path}: folders nested too deeply") from None
    for match in matches:
        _refuse_outside(_fixed_part(str(start)), match)
        found.append(SourceFile(Path(match).as_posix(), str(Path(match))))
    found.sort()
    if not found:
        problem = "is not a file or folder, and as a glob it matches no file"
        raise ConfigError(f"data.path={path} {problem}")
    return found


def _fixed_part(pattern: str) -> str:
    """Return the folder before the first wildcard of a glob."""
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)
    return str(Path(*fixed))


def _standard_library() -> list[SourceFile]:
    """Return the source files of Python's standard library, without tests and without files that
    differ between installations."""
    files = []
    for file in _files_below(Path(sysconfig.get_paths()["stdlib"]), _NOT_IN_CORPUS):
        last = os.path.basename(file.path)
        added = os.path.islink(file.path) or last.startswith(_MACHINE_MADE)
        if file.name.endswith(".py") and not added:
            files.append(file)
    return files


def _files_below(root: Path, omitted: Collection[str] = ()) -> list[SourceFile]:
    """Return the files below ``root``, without hidden files and ``omitted`` folders, sorted by
    name."""
    files = []
    for folder, names in walk(str(root), lambda name: _is_shown(name) and name not in omitted):
        place = os.path.relpath(folder, root)
        for name in filter(_is_shown, names):
            path = os.path.join(folder, name)
            # Omit pipes, sockets and broken links.
            if os.path.isfile(path):
                _refuse_outside(root, path)
                files.append(SourceFile(os.path.normpath(os.path.join(place, name)), path))
    return sorted(files)


def _refuse_outside(folder: Path | str, path: str) -> None:
    """Raise `ConfigError` for a link that leads out of ``folder``. In an untrusted folder, such a
    link could make a private file training data."""
    try:
        inside(str(folder), path)
    except OSError as error:
        reason = "copy the file there, or name it in data.path"
        raise ConfigError(f"data: {printable(path, 300)}: {error.strerror}; {reason}") from None


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def plan_units(files: list[SourceFile]) -> list[Unit]:
    """Divide the input into units of about `UNIT_BYTES`, in the order of the files."""
    units: list[Unit] = []
    left = -1  # free bytes in the last unit; -1: no further files are added to it
    for file in files:
        room, left = left, -1
        name, size = file.path.lower(), os.path.getsize(file.path)
        kind = "rows" if _without_compression(name).endswith(_ROW_FILES) else "text"
        if name.endswith(".parquet"):
            units += _parquet_units(file)
        elif name.endswith(_COMPRESSED):
            units.append(Unit(kind, [file]))
        elif size > UNIT_BYTES:
            begins = range(0, size, UNIT_BYTES)
            for at in begins:
                units.append(Unit(kind, [file], at, min(at + UNIT_BYTES, size)))
        else:
            if size > room or kind != units[-1].kind:
                units.append(Unit(kind, []))
                room = UNIT_BYTES
            units[-1].files.append(file)
            left = room - size
    return units


def _without_compression(name: str) -> str:
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def _row_units(kind: str, files: list[SourceFile], rows: int) -> list[Unit]:
    begins = range(0, rows, _UNIT_ROWS)
    units: list[Unit] = []
    for row in begins:
        units.append(Unit(kind, files, row, min(row + _UNIT_ROWS, rows)))
    return units


def _arrow_units(files: list[SourceFile]) -> list[Unit]:
    """Return units of consecutive rows. The call reads only the headers of batches."""
    tables.check_arrow([file.path for file in files])
    units = []
    for file in files:
        rows = sum(batch.num_rows for batch in tables.open_arrow(file.path))
        units += _row_units("arrow", [file], rows)
    return units


def _parquet_units(file: SourceFile) -> list[Unit]:
    """Return units of consecutive row groups. The call reads only the file's footer."""
    table = tables.open_parquet(file.path)
    units, begin, held = [], 0, 0
    for group in range(table.num_row_groups):
        held += table.metadata.row_group(group).total_byte_size
        if held >= UNIT_BYTES or group == table.num_row_groups - 1:
            units.append(Unit("parquet", [file], begin, group + 1))
            begin, held = group + 1, 0
    return units


def files_identity(files: list[SourceFile]) -> str:
    """Return a hex digest of the files' names and contents. For large input it covers modification
    times instead of contents."""
    digest = hashlib.sha256()
    sizes = []
    for file in files:
        sizes.append(os.path.getsize(file.path))
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
    """Return a 64-bit blake2b hash of ``data``."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def read_unit(unit: Unit, config: DataConfig, report: BadRows) -> Iterator[Document]:
    """Yield the documents of a unit in order.

    For a piece that is not a valid document, ``report`` is called with three arguments: the name of
    the file, the line in the unit (the row in a table), counted from 1, and the reason. Raises
    `ConfigError` if an optional library is missing.
    """
    pieces, document_of = _FORMATS[unit.kind]
    of_row = _row_reader(config)
    for file in unit.files:
        line = 1
        try:
            for piece, lines in pieces(file.path, unit, config):
                try:
                    yield from document_of(piece, of_row)
                except _BadRowError as error:
                    report(file.name, line + error.line, str(error))
                line += lines
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            report(file.name, line, f"cannot be read from here on: {reason}")


def lines_before(unit: Unit) -> int:
    """Return the number of lines or rows before the unit in its file. The function reads the file
    up to the unit, and is therefore called only for messages about bad rows."""
    path = unit.files[0].path
    if unit.kind in ("hf", "arrow") or unit.start == 0:
        return unit.start
    if unit.kind == "parquet":
        metadata = tables.open_parquet(path).metadata
        return sum(metadata.row_group(group).num_rows for group in range(unit.start))
    with open(path, "rb") as file:
        end = _enter(file, unit.start)
        file.seek(0)
        blocks = iter(lambda: file.read(min(end - file.tell(), 1 << 20)), b"")
        return sum(block.count(b"\n") for block in blocks)


def document_bytes(config: DataConfig) -> int:
    """Return the size of the documents into which text files are cut. Files of the standard library
    are not cut."""
    return _WHOLE_FILE if config.name == "stdlib" else config.document_kib << 10


def _text_pieces(path: str, unit: Unit, config: DataConfig) -> _Pieces:
    """Yield pieces of about the size of a document. A piece ends at the end of a line, unless the
    line is longer than a document."""
    # Files that are not cut need the bound `ROW_BYTES`, because `read` allocates its buffer in
    # advance.
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
            # Inside a line, cut only between characters. Invalid UTF-8 is reported later.
            whole = codecs.utf_8_decode(piece, "replace")[1] if inside_line else len(piece)
            piece, carried = piece[:whole], piece[whole:]
            yield piece, piece.count(b"\n")


def _row_pieces(path: str, unit: Unit, _: DataConfig) -> _Pieces:
    """Yield lines. A line that is too long is cut, and its remainder is skipped without being
    stored."""
    with _open(path) as file:
        position = _enter(file, unit.start)
        while position < unit.stop and (row := file.readline(ROW_BYTES + 1)):
            position += len(row)
            rest = row
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                position += len(rest)
            yield row, 1


# Functions that parse one piece of a file for `read_unit`. They return a list with at most one
# document, and raise `_BadRowError` for an invalid piece


def _text_document(piece: bytes, _: _RowReader) -> list[Document]:
    zero = piece.find(b"\0")  # valid UTF-8, but not part of any text
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{piece[error.start]:02x}, {error.reason}"
        raise _BadRowError(reason, piece.count(b"\n", 0, error.start)) from None
    if zero >= 0:
        raise _BadRowError("binary: it has zero bytes", piece.count(b"\n", 0, zero))
    return [Document(piece, [(text, True)])]


def _line_document(line: bytes, of_row: _RowReader) -> list[Document]:
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
    return of_row(row)


def _table_document(row: Any, of_row: _RowReader) -> list[Document]:
    if row is tables.TOO_LONG:
        raise _BadRowError(f"the row is longer than {ROW_BYTES} bytes")
    return of_row(row)


def _row_reader(config: DataConfig) -> _RowReader:
    if config.name != "chat":
        return functools.partial(_row_document, text_field=config.text_field)
    template = ChatTemplate(config)

    def read(row: Any) -> list[Document]:
        try:
            parts = template.parts(row)
            return [Document("".join(text for text, _ in parts).encode(), parts, joined=True)]
        except ValueError as error:
            raise _BadRowError(str(error)) from None

    return read


def _row_document(row: Any, text_field: str) -> list[Document]:
    """Parse one row. It has ``segments``, a list of {"text": str, "loss": bool}; or ``prompt`` and
    ``completion``, of which only the completion is a target; or the field ``text_field``."""
    match row:
        case {"segments": segments} if segments is not None:
            try:
                parts = []
                for part in segments:
                    parts.append((part["text"], bool(part["loss"])))
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
        raise _BadRowError(
            "the text has half of a surrogate pair, which UTF-8 cannot encode"
        ) from None


def _enter(file: IO[bytes], start: int) -> int:
    """Move to the first line that starts at or after ``start`` and return its offset.

    A line belongs to the unit that contains its first byte. Every unit applies this rule at its
    start and at its end, so that each line of a file is read exactly once.
    """
    if start == 0:
        return 0
    # Begin one byte earlier. If this byte ends a line, the next line starts exactly at ``start``.
    file.seek(start - 1)
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _open(path: str) -> IO[bytes]:
    file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115  the caller closes it
    if path.lower().endswith(".gz"):
        stream: Any = gzip.GzipFile(fileobj=file)
    elif path.lower().endswith(".zst"):
        # This reader detects a truncated file, unlike the stream reader of zstandard.
        stream = tables.library("pyarrow", "data", path).CompressedInputStream(file, "zstd")
    else:
        return file
    return cast(IO[bytes], io.BufferedReader(_Decompressed(file, stream), 1 << 16))


class _Decompressed(io.RawIOBase):
    """Reads decompressed bytes from ``stream``. Raises OSError if the file expands to more bytes
    than text would."""

    def __init__(self, file: IO[bytes], stream: Any) -> None:
        self._file, self._stream, self._given = file, stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._stream.readinto(buffer))
        self._given += count
        if self._given > _FREE_BYTES + _MOST_EXPANSION * self._file.tell():
            raise OSError(tables.TOO_MUCH)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _files_of_data_set(config: DataConfig) -> list[SourceFile]:
    """Return the files of ``data=hf``: from a local folder, or downloaded from the Hub. Raises
    `ConfigError` for a file outside of the folder, and for a data set that cannot be loaded."""
    path = os.path.expanduser(str(config.path))
    with _data_set_explained(config):
        if not os.path.isdir(path):
            if str(config.path).startswith(("/", ".", "~")):
                raise ValueError("there is no such folder")
            path = data_set_folder.download(path, config.subset, config.split)
        paths = data_set_folder.saved_files(path, config.split)
        if not paths:
            datasets = tables.library("datasets", "hf-datasets", f"data=hf data.path={path}")
            paths = data_set_folder.files_of_split(datasets, path, config.subset, config.split)
        known = (*_ROW_FILES, ".parquet", ".arrow", *_LIBRARY_READERS)
        for file in paths:
            if not _without_compression(file).endswith(known):
                raise ValueError(f"{printable(os.path.basename(file))} is not one of {known}")
    found: list[SourceFile] = []
    for file in paths:
        found.append(SourceFile(os.path.relpath(file, path), file))
    return found


@contextlib.contextmanager
def _data_set_explained(config: DataConfig) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    # The library raises errors of many types, for a missing data set, a missing split or a network
    # failure.
    except Exception as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        lines = str(getattr(error, "strerror", None) or error).split("\n")
        reason = printable(where + (lines[0] or type(error).__name__), 500)
        raise ConfigError(
            f"data=hf data.path={config.path} data.split={config.split} cannot be loaded: {reason}"
        ) from None


def _open_data_set(config: DataConfig) -> Any:
    """Return the `datasets.Dataset` of ``data=hf``, for file formats that only the library reads.
    Raises `ConfigError` if the data set cannot be loaded."""
    datasets = tables.library("datasets", "hf-datasets", f"data=hf data.path={config.path}")
    files = [file.path for file in _files_of_data_set(config)]
    with _data_set_explained(config):
        (ending,) = {os.path.splitext(file)[1].lower() for file in files}
        for file in files:
            # The library recognizes archives by their content, and unpacks them without a limit on
            # the size.
            if datasets.utils.extract.Extractor.infer_extractor_format(file):
                raise ValueError(f"{os.path.basename(file)} is compressed: decompress it first")
        read, arguments = _LIBRARY_READERS[ending]
        return getattr(datasets.Dataset, read)(files, **arguments)


def _parquet_pieces(path: str, unit: Unit, config: DataConfig) -> _Pieces:
    table = tables.open_parquet(path)
    groups = list(range(unit.start, unit.stop))
    held = sum(tables.stored_bytes(table.metadata.row_group(group)) for group in groups)
    names = table.schema_arrow.names
    columns = _columns(names, config)
    # Strings are read as dictionaries, so that a value that thousands of rows share is in memory
    # only once.
    table = tables.open_parquet(path, tables.strings_in(table))
    batches = table.iter_batches(tables.BATCH_ROWS, groups, columns, use_threads=False)
    yield from _table_pieces(batches, names, config, held)


def _arrow_pieces(path: str, unit: Unit, config: DataConfig) -> _Pieces:
    table = tables.open_arrow(path)
    batches = tables.row_range(table, unit.start, unit.stop)
    yield from _table_pieces(batches, table.schema.names, config, os.path.getsize(path))


def _data_set_pieces(_: str, unit: Unit, config: DataConfig) -> _Pieces:
    data_set = _open_data_set(config)
    rows = data_set.select(range(unit.start, unit.stop)).with_format("arrow")
    # The rows are read as Arrow tables. In other formats, the library would decode images and
    # sounds, and open the paths in the rows.
    batches = itertools.chain.from_iterable(
        table.to_batches() for table in rows.iter(tables.BATCH_ROWS)
    )
    yield from _table_pieces(batches, data_set.column_names, config, _WHOLE_FILE)


def _table_pieces(
    batches: Iterable[Any], names: list[str], config: DataConfig, held: int
) -> _Pieces:
    """Yield the rows of Arrow batches. ``held``: stored size of these batches in bytes, which
    bounds the decoded size."""
    columns = _columns(names, config)
    if not columns:
        yield dict.fromkeys(names), 1  # the message about this row lists the names
        return
    selected = (batch.select(columns) for batch in batches)
    most = _FREE_BYTES + _MOST_EXPANSION * held
    for row in tables.bounded_rows(selected, ROW_BYTES, most):
        yield without_nulls(row) if config.name == "chat" else row, 1


def _columns(names: list[str], config: DataConfig) -> list[str]:
    """Return the columns that documents need."""
    wanted = [config.text_field, "prompt", "completion", "segments"]
    if config.name == "chat":
        wanted = ["messages", "tools"]
    return list(filter(wanted.__contains__, names))


# Kind of a unit -> (function that reads a file in pieces, function that parses a piece)
_Format = tuple[
    Callable[[str, Unit, DataConfig], _Pieces], Callable[[Any, _RowReader], list[Document]]
]
_FORMATS: dict[str, _Format] = {
    "text": (_text_pieces, _text_document),
    "rows": (_row_pieces, _line_document),
    "parquet": (_parquet_pieces, _table_document),
    "arrow": (_arrow_pieces, _table_document),
    "hf": (_data_set_pieces, _table_document),
}
