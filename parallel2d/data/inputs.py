"""Which units of raw input a `DataConfig` names (`prepare_units`), and the options they are
prepared with (`prepare_options`).

`open_data` and the command line both use this module.
"""

from __future__ import annotations

import os

from parallel2d.config import DataConfig
from parallel2d.data.cache import files_identity
from parallel2d.data.documents import WHOLE_FILE, ReadOptions, Unit
from parallel2d.data.prepare import PrepareOptions
from parallel2d.data.reading import find_files, plan_units, standard_library

# Files of the standard library that may be bad rows, in some version of Python
_CORPUS_BAD_ROWS = 100


def prepare_units(config: DataConfig) -> tuple[list[Unit], str, str]:
    """Units of the raw input that ``config`` names, a digest of its content, and its name in
    messages."""
    if config.name == "hf":
        from parallel2d.data.tables import data_set_units

        units, identity = data_set_units(str(config.path), config.subset, config.split)
        return units, identity, f"data.path={config.path}"
    if config.name == "stdlib":
        files, source = standard_library(), "data=stdlib"
    else:
        files, source = find_files(str(config.path)), f"data.path={config.path}"
    return plan_units(files), files_identity(files), source


def prepare_options(config: DataConfig) -> PrepareOptions:
    """The options of a `DataConfig` that decide the content of a prepared folder."""
    document_bytes = WHOLE_FILE if config.name == "stdlib" else config.document_kib << 10
    return PrepareOptions(
        tokenizer=config.tokenizer,
        end_token=config.end_token,
        validation_fraction=config.validation_fraction,
        max_bad_rows=_CORPUS_BAD_ROWS if config.name == "stdlib" else config.max_bad_rows,
        read=ReadOptions(config.text_field, document_bytes),
    )


def worker_count(workers: int | str) -> int:
    """Processes that prepare; ``auto`` is one per core that this process may use."""
    if workers != "auto":
        return int(workers)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
