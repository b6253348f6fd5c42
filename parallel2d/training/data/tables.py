"""`bounded_rows` reads rows of untrusted Arrow and Parquet files in bounded memory.

A table of a few kilobytes can expand to gigabytes, because rows may share dictionary values, and
buffers may be compressed. Therefore sizes are computed before values are converted to Python
objects.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from parallel2d.base.errors import ConfigError
from parallel2d.base.files import printable
from parallel2d.base.files.limited_child import try_in_child

BATCH_ROWS = 256  # rows in memory at one time
TOO_LONG = object()  # yielded in place of a row that is too long
TOO_MUCH = "it expands to more than 100 times its size, unlike text"


def library(name: str, extra: str, path: str) -> Any:
    """Return a module that belongs to an optional dependency (extra). Raises `ConfigError` with the
    install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path} needs {name}: pip install 'parallel2d[{extra}]'") from None


def bounded_rows(batches: Iterable[Any], row_bytes: int, most_bytes: int) -> Iterator[Any]:
    """Yield the rows of Arrow batches as dicts, and `TOO_LONG` for a row with more than
    ``row_bytes``. Raises OSError for damaged data, and if the total size of the rows exceeds
    ``most_bytes``."""
    pyarrow = library("pyarrow", "data", "a table")
    given = 0
    try:
        for batch in batches:
            # Without this check, pyarrow would read beyond a buffer with invalid offsets.
            batch.validate(full=True)
            for part, size in _parts(batch, row_bytes):
                given += size
                if given > most_bytes:
                    raise OSError(TOO_MUCH)
                yield from part.to_pylist() if size <= row_bytes else [TOO_LONG]
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from None


def _parts(batch: Any, row_bytes: int) -> Iterator[tuple[Any, int]]:
    """Divide a batch until each part is a single row, or takes at most ``row_bytes`` as Python
    objects. Yield each part with this size."""
    size = sum(map(_decoded_bytes, batch.columns))
    if size <= row_bytes or batch.num_rows <= 1:
        yield batch, size
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half), row_bytes)
    yield from _parts(batch.slice(half), row_bytes)


def _decoded_bytes(array: Any) -> int:
    """Return the bytes of an Arrow array after its dictionaries are decoded. Raises OSError for a
    type that does not occur in documents."""
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
    """Return a `pyarrow.parquet.ParquetFile` that reads the columns ``dictionaries`` as Arrow
    dictionaries. Raises `ConfigError` if the file is not Parquet, or if its footer describes more
    bytes than the file has."""
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
    """Return the paths of the leaf columns of a Parquet file with strings."""
    found: list[str] = []
    for column in map(table.schema.column, range(len(table.schema))):
        if column.physical_type == "BYTE_ARRAY":
            found.append(column.path)
    return found


def stored_bytes(group: Any) -> int:
    """Return the bytes of a row group in its Parquet file, according to the footer."""
    columns = map(group.column, range(group.num_columns))
    return sum(column.total_compressed_size for column in columns)


def open_arrow(path: str) -> Any:
    """Return a reader of an Arrow stream file, which is memory-mapped. Raises OSError for a file in
    another format."""
    pyarrow, ipc = (library(name, "data", path) for name in ("pyarrow", "pyarrow.ipc"))
    try:
        return ipc.open_stream(pyarrow.memory_map(path))
    except pyarrow.ArrowException as error:
        raise OSError(
            f"{printable(path, 300)} is not a readable Arrow file: {printable(error)}"
        ) from None


def check_arrow(paths: Sequence[str]) -> None:
    """Raise `ConfigError` if reading the headers of these files needs too much memory, for example
    because compressed batches expand."""

    def read_headers() -> None:
        for path in paths:
            for _ in open_arrow(path):
                pass

    library("pyarrow.ipc", "data", paths[0])
    try_in_child(paths[0], sum(map(os.path.getsize, paths)), read_headers)


def row_range(batches: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    """Yield the rows from ``start`` up to, but not including, ``stop``, in batches of at most
    `BATCH_ROWS`."""
    row = 0
    for batch in batches:
        for begin in range(max(start - row, 0), min(stop - row, batch.num_rows), BATCH_ROWS):
            yield batch.slice(begin, min(BATCH_ROWS, stop - row - begin))
        row += batch.num_rows
        if row >= stop:
            return
