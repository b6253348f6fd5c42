"""Rows of Arrow and Parquet files of any origin, in bounded memory: `bounded_rows`.

A table of a few kilobytes can stand for gigabytes: rows share the values of a dictionary, and
buffers are compressed. Sizes are computed before values become Python objects.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable
from parallel2d.base.files.limited_child import try_in_child

BATCH_ROWS = 256  # in memory at a time
TOO_LONG = object()  # in the place of a row
TOO_MUCH = "it expands to more than 100 times its size, unlike text"


def library(name: str, extra: str, path: str) -> Any:
    """A module of an extra. Raises `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path} needs {name}: pip install 'parallel2d[{extra}]'") from None


def bounded_rows(batches: Iterable[Any], row_bytes: int, most_bytes: int) -> Iterator[Any]:
    """Yields the rows of Arrow batches as dicts, `TOO_LONG` for one of more than ``row_bytes``.
    Raises OSError for damage, and where all take more than ``most_bytes``."""
    pyarrow = library("pyarrow", "data", "a table")
    given = 0
    try:
        for batch in batches:
            # Offsets that lead out of their buffers would be followed.
            batch.validate(full=True)
            for part, size in _parts(batch, row_bytes):
                given += size
                if given > most_bytes:
                    raise OSError(TOO_MUCH)
                yield from part.to_pylist() if size <= row_bytes else [TOO_LONG]
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from None


def _parts(batch: Any, row_bytes: int) -> Iterator[tuple[Any, int]]:
    """Divides a batch until each part, unless it is a single row, takes ``row_bytes`` at most as
    Python objects. Yields each part with its size."""
    size = sum(map(_decoded_bytes, batch.columns))
    if size <= row_bytes or batch.num_rows <= 1:
        yield batch, size
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half), row_bytes)
    yield from _parts(batch.slice(half), row_bytes)


def _decoded_bytes(array: Any) -> int:
    """Bytes of an Arrow array with the values of its dictionaries in their places. Raises OSError
    for a type that documents are not made of."""
    import pyarrow
    from pyarrow import compute, types

    kind, size = array.type, 8 * len(array)
    if types.is_struct(kind):
        return size + sum(map(_decoded_bytes, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        return size + _decoded_bytes(array.flatten())
    values = array.dictionary if types.is_dictionary(kind) else array
    if types.is_primitive(values.type) or types.is_null(values.type):
        return size
    try:
        lengths = compute.cast(compute.binary_length(values), pyarrow.int64())
    except (pyarrow.ArrowException, TypeError):
        raise OSError(f"columns of type {kind} are not read") from None
    if types.is_dictionary(kind):
        lengths = lengths.take(array.indices)
    return size + int(compute.sum(lengths).as_py() or 0)


def open_parquet(path: str, dictionaries: Iterable[str] = ()) -> Any:
    """A `pyarrow.parquet.ParquetFile`, with these columns read as dictionaries. Raises
    `ConfigError` for another file, and for a footer that describes more than the file holds."""
    pyarrow, parquet = (library(name, "data", path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.ParquetFile(path, memory_map=True, read_dictionary=list(dictionaries))
    except (pyarrow.ArrowException, OSError) as error:
        shown = printable(path, 300)
        raise ConfigError(f"{shown} is not a readable Parquet file: {printable(error)}") from None
    stored = sum(map(stored_bytes, map(table.metadata.row_group, range(table.num_row_groups))))
    if stored > os.path.getsize(path):
        raise ConfigError(
            f"{printable(path, 300)} is damaged: its footer describes more bytes than it has"
        )
    return table


def strings_in(table: Any) -> list[str]:
    """The paths of the leaf columns of a Parquet file that hold strings."""
    found: list[str] = []
    for column in map(table.schema.column, range(len(table.schema))):
        if column.physical_type == "BYTE_ARRAY":
            found.append(column.path)
    return found


def stored_bytes(group: Any) -> int:
    """Bytes of a row group in its Parquet file, as the footer says."""
    columns = map(group.column, range(group.num_columns))
    return sum(column.total_compressed_size for column in columns)


def open_arrow(path: str) -> Any:
    """A reader of an Arrow stream file, which is mapped. Raises OSError for another file."""
    pyarrow, ipc = (library(name, "data", path) for name in ("pyarrow", "pyarrow.ipc"))
    try:
        return ipc.open_stream(pyarrow.memory_map(path))
    except pyarrow.ArrowException as error:
        raise OSError(
            f"{printable(path, 300)} is not a readable Arrow file: {printable(error)}"
        ) from None


def check_arrow(paths: Sequence[str]) -> None:
    """Raises `ConfigError` for files whose batches cannot be mapped in bounded memory: compressed
    batches may expand to any size."""

    def read_headers() -> None:
        for path in paths:
            for _ in open_arrow(path):
                pass

    library("pyarrow.ipc", "data", paths[0])
    try_in_child(paths[0], sum(map(os.path.getsize, paths)), read_headers)


def row_range(batches: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    """The rows ``start`` to ``stop`` of batches, in batches of `BATCH_ROWS` at most."""
    row = 0
    for batch in batches:
        for begin in range(max(start - row, 0), min(stop - row, batch.num_rows), BATCH_ROWS):
            yield batch.slice(begin, min(BATCH_ROWS, stop - row - begin))
        row += batch.num_rows
        if row >= stop:
            return
