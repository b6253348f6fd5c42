"""Reads documents from tables, which are Parquet files and Hugging Face data sets: `parquet_units`,
`data_set_units` and `read_table`.

Both libraries are extras and are imported only here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from parallel2d.data.documents import BadRow, Document, ReadOptions, SourceFile, Unit, row_document
from parallel2d.errors import ConfigError

_UNIT_ROWS = 50_000  # of a data set per unit; a constant, because shards are made per unit
_BATCH_ROWS = 256  # rows in memory at a time


def parquet_units(file: SourceFile, unit_bytes: int) -> list[Unit]:
    """Units of consecutive row groups of a Parquet file, of about ``unit_bytes`` each. Reads only
    the file's footer."""
    table = _open_parquet(file)
    units, begin, held = [], 0, 0
    for group in range(table.num_row_groups):
        held += table.metadata.row_group(group).total_byte_size
        if held >= unit_bytes or group == table.num_row_groups - 1:
            units.append(Unit("parquet", [file], begin, group + 1))
            begin, held = group + 1, 0
    return units


def data_set_units(path: str, subset: str | None, split: str) -> tuple[list[Unit], str]:
    """Units of rows of a Hugging Face data set, and the library's fingerprint of its content."""
    data_set = _load_data_set(path, subset, split)
    fingerprint = str(data_set._fingerprint)  # instead of a path: identifies the content
    # No path has a line break, so a worker can take the three apart again.
    source = SourceFile("\n".join([path, subset or "", split]), fingerprint)
    rows = len(data_set)
    units = [
        Unit("hf", [source], begin, min(begin + _UNIT_ROWS, rows))
        for begin in range(0, rows, _UNIT_ROWS)
    ]
    return units, fingerprint


def read_table(unit: Unit, options: ReadOptions) -> Iterator[Document | BadRow]:
    """The documents of a unit of either kind, in the order of the rows."""
    rows = _parquet_rows(unit, options) if unit.kind == "parquet" else _data_set_rows(unit, options)
    name = unit.files[0].name.replace("\n", " ")
    for number, row in rows:
        item = row if isinstance(row, BadRow) else row_document(row, number, options)
        yield BadRow(name, item.line, item.reason) if isinstance(item, BadRow) else item


def _open_parquet(file: SourceFile) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{file.path} needs pyarrow: pip install 'parallel2d[data]'") from None
    try:
        return parquet.ParquetFile(file.path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file.path} is not a readable Parquet file: {error}") from None


def _columns(names: list[str], options: ReadOptions, what: str) -> list[str]:
    """Those of the columns ``names`` that documents are made of. Raises `ConfigError` for none."""
    wanted = (options.text_field, "prompt", "completion", "segments")
    found = [name for name in names if name in wanted]
    if not found:
        raise ConfigError(
            f"{what} has no column data.text_field={options.text_field}; columns: "
            f"{', '.join(names[:8])}"
        )
    return found


def _parquet_rows(unit: Unit, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    import pyarrow

    file = unit.files[0]
    table = _open_parquet(file)
    columns = _columns(table.schema_arrow.names, options, file.path)
    # Rows are counted from the start of the file, as people find them.
    number = sum(table.metadata.row_group(group).num_rows for group in range(unit.start))
    groups = list(range(unit.start, min(unit.stop, table.num_row_groups)))
    try:
        for batch in table.iter_batches(
            _BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False
        ):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield number + 1, BadRow("", number + 1, f"cannot be read from here on: {error}")


def _data_set_rows(unit: Unit, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    path, subset, split = unit.files[0].name.split("\n")
    data_set = _load_data_set(path, subset or None, split)
    columns = _columns(data_set.column_names, options, f"data.path={path}")
    data_set = data_set.select_columns(columns)
    for begin in range(unit.start, unit.stop, _BATCH_ROWS):
        batch = data_set[begin : min(begin + _BATCH_ROWS, unit.stop)]
        for offset, values in enumerate(zip(*(batch[name] for name in columns), strict=True)):
            yield begin + offset + 1, dict(zip(columns, values, strict=True))


def _load_data_set(path: str, subset: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data=hf data.path={path} needs the datasets library: pip install "
            "'parallel2d[hf-datasets]'"
        ) from None
    try:
        if os.path.isdir(path) and os.path.exists(os.path.join(path, "state.json")):
            return datasets.load_from_disk(path)
        if os.path.isdir(path) and os.path.exists(os.path.join(path, "dataset_dict.json")):
            return datasets.load_from_disk(path)[split]
        return datasets.load_dataset(path, subset, split=split)
    # The library raises many types: no such data set, no such split, no network
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data=hf data.path={path} data.split={split} cannot be loaded: {reason}"
        ) from None
