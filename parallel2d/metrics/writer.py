"""Writes rows to ``metrics.jsonl`` and ``tensorboard/``, on rank 0 only: `MetricsWriter`."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, TextIO

from parallel2d.metrics.keys import STEP
from parallel2d.metrics.rows import Row, parse_row
from parallel2d.metrics.tensorboard import Board

_BLOCK = 1 << 20  # bytes read at once from the end of a file


class MetricsWriter:
    """Appends one flat row per logged step to both places. Lines are flushed as they are written.

    ``texts``: shown in TensorBoard beside the curves (``config``, ``mesh``), as Markdown.
    ``hparams``: settings by which the runs of a sweep are told apart, so that TensorBoard shows
    them in one table. ``axes``: of the mesh, those with several ranks.
    """

    def __init__(
        self,
        run_dir: str,
        texts: dict[str, str],
        *,
        tensorboard: bool,
        hparams: dict[str, str | float | bool] | None = None,
        axes: Sequence[str] = (),
    ) -> None:
        self._run_dir = run_dir
        self._texts = texts
        self._tensorboard = tensorboard
        self._hparams = hparams or {}
        self._axes = tuple(axes)
        self._file: TextIO | None = None
        self._board: Board | None = None

    def begin(self, from_step: int) -> tuple[Row | None, Row | None]:
        """Opens both, to go on after ``from_step``; a restart undid the steps of later rows.

        Returns the last row that was written before, undone or not, and the last one that stands;
        None where there is none.
        """
        path = os.path.join(self._run_dir, "metrics.jsonl")
        rows = _set_aside_after(path, from_step)
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)
        if self._tensorboard:
            folder = os.path.join(self._run_dir, "tensorboard")
            self._board = Board(folder, from_step, self._texts, self._hparams, self._axes)
        return rows

    def write(self, row: Row, busy_s: Sequence[float] = ()) -> None:
        """``row`` must hold ``step``; numbers become scalars, non-finite ones are written as null.
        ``busy_s``: of each rank."""
        assert self._file is not None, "begin() comes first"
        clean = {key: _finite(value) for key, value in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write(row, busy_s)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text in TensorBoard, where that is written."""
        if self._board is not None:
            self._board.text(tag, text, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    # JSON has no NaN and no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _set_aside_after(path: str, from_step: int) -> tuple[Row | None, Row | None]:
    """Keeps rows up to ``from_step`` in place, and moves later ones, whose steps a restart undid,
    to a file beside it.

    Reads and writes only those, from the end: a restart takes no longer because the run is long.
    Returns the last row that was there and the last one that stays.
    """
    if not os.path.exists(path):
        return None, None
    last = standing = None
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        cut = end  # where the rows to be moved begin
        for begin, line in _lines_backwards(file):
            row = parse_row(line)
            last = last or row
            # Steps only grow, so all rows before this one stand too.
            if row is not None and row[STEP] <= from_step:
                standing = row
                break
            cut = begin
        if cut < end:
            file.seek(cut)
            with open(_unused_path(path), "wb") as undone:
                shutil.copyfileobj(file, undone)
            file.truncate(cut)
    return last, standing


def _unused_path(path: str) -> str:
    number = 1
    while True:
        aside = path.replace(".jsonl", f".before-restart-{number}.jsonl")
        if not os.path.exists(aside):
            return aside
        number += 1


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file and where each begins, from the last to the first."""
    begin = file.seek(0, os.SEEK_END)
    rest = b""  # the beginning of a line that goes on in the block after
    while begin:
        size = min(_BLOCK, begin)
        begin -= size
        file.seek(begin)
        data = file.read(size) + rest
        lines = data.splitlines(keepends=True)
        at = begin + len(data)
        # The first line may begin before this block.
        rest = lines.pop(0) if begin else b""
        for line in reversed(lines):
            at -= len(line)
            yield at, line
