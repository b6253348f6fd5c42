"""Rows to files: ``metrics.jsonl`` and ``tensorboard/``, from rank 0 only."""

from __future__ import annotations

import json
import math
import os
from typing import Any, TextIO


class MetricsWriter:
    """Appends one flat row per logged step to both places. Lines are flushed as they are written."""

    def __init__(self, run_dir: str, config_text: str, *, tensorboard: bool) -> None:
        self._run_dir, self._config_text, self._tensorboard = run_dir, config_text, tensorboard
        self._file: TextIO | None = None
        self._board: Any = None

    def begin(self, from_step: int) -> None:
        """Opens both, to go on after ``from_step``. Rows after it belong to a history that a restart undid."""
        path = os.path.join(self._run_dir, "metrics.jsonl")
        _set_aside_after(path, from_step)
        self._file = open(path, "a")  # noqa: SIM115 (closed by close)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(self._run_dir, "tensorboard")
            self._board = SummaryWriter(folder, purge_step=from_step + 1 if from_step else None, flush_secs=5)
            self._board.add_text("config", f"```yaml\n{self._config_text}\n```")

    def write(self, row: dict[str, Any]) -> None:
        """``row`` must hold ``step``; numbers become scalars, non-finite ones are written as null."""
        assert self._file is not None, "begin() comes first"
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _set_aside_after(path: str, from_step: int) -> None:
    """Keeps rows up to ``from_step`` in place. Later rows belong to a history that a restart undid: the old file is kept whole
    beside the new one."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return
    with open(path) as file:
        lines = file.readlines()
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= from_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    if len(kept) == len(lines):
        return
    number = 1
    while os.path.exists(aside := path.replace(".jsonl", f".before-restart-{number}.jsonl")):
        number += 1
    os.rename(path, aside)
    with open(path, "w") as file:
        file.writelines(kept)
