"""Rows to files: ``metrics.jsonl`` and ``tensorboard/``, from rank 0 only."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, TextIO

from parallel2d.metrics.tensorboard import Board

_BLOCK = 1 << 20  # bytes read at once from the end of a file


class MetricsWriter:
    """Appends one flat row per logged step to both places. Lines are flushed as they are written.

    ``texts``: shown in TensorBoard beside the curves (``config``, ``mesh``), as Markdown.
    ``hparams``: settings by which the runs of a sweep are told apart, so that TensorBoard shows
    them in one table.
    """

    def __init__(
        self,
        run_dir: str,
        texts: dict[str, str],
        *,
        tensorboard: bool,
        hparams: dict[str, str | float | bool] | None = None,
    ) -> None:
        self._run_dir, self._texts, self._tensorboard = run_dir, texts, tensorboard
        self._hparams = hparams or {}
        self._file: TextIO | None = None
        self._board: Board | None = None

    def begin(self, from_step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Opens both, to go on after ``from_step``. Rows after it belong to a history that a
        restart undid.

        Returns the last row that earlier incarnations wrote, undone or not, and the last one that
        stands; None where there is none.
        """
        path = os.path.join(self._run_dir, "metrics.jsonl")
        rows = _set_aside_after(path, from_step)
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)
        if self._tensorboard:
            self._board = Board(
                os.path.join(self._run_dir, "tensorboard"), from_step, self._texts, self._hparams
            )
        return rows

    def write(self, row: dict[str, Any], busy_s: Sequence[float] = ()) -> None:
        """``row`` must hold ``step``; numbers become scalars, non-finite ones are written as null.
        ``busy_s``: of each rank."""
        assert self._file is not None, "begin() comes first"
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write(row, busy_s)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _set_aside_after(
    path: str, from_step: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Keeps rows up to ``from_step`` in place. Later rows belong to a history that a restart undid:
    they move to a file beside it.

    Reads and writes only those, from the end: a restart takes no longer because the run is long.
    Returns the last row that was there and the last one that stays.
    """
    if not os.path.exists(path):
        return None, None
    last = standing = None
    with open(path, "r+b") as file:
        cut = end = file.seek(0, os.SEEK_END)
        for begin, line in _lines_backwards(file):
            row = _row(line)
            last = last or row
            if row is not None and row["step"] <= from_step:
                standing = row
                break
            cut = begin
        if cut < end:
            number = 1
            while os.path.exists(
                aside := path.replace(".jsonl", f".before-restart-{number}.jsonl")
            ):
                number += 1
            file.seek(cut)
            with open(aside, "wb") as undone:
                shutil.copyfileobj(file, undone)
            file.truncate(cut)
    return last, standing


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and where each begins, from the last to the first."""
    begin, rest = file.seek(0, os.SEEK_END), b""
    while begin:
        size = min(_BLOCK, begin)
        begin -= size
        file.seek(begin)
        data = file.read(size) + rest
        lines = data.splitlines(keepends=True)
        at = begin + len(data)
        rest = lines.pop(0) if begin else b""  # its beginning may lie before this block
        for line in reversed(lines):
            at -= len(line)
            yield at, line


def _row(line: bytes) -> dict[str, Any] | None:
    """None for a line that a kill tore."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and type(row.get("step")) is int
    return row if whole else None
