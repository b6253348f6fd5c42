"""Result of a parity check, as text and as JSON: `ParityReport`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata

import torch

from parallel2d.base import files
from parallel2d.base.exchange import sendable

FILE = "certificate.json"
_SHOWN = 3  # discrepancies of each check that a message lists


@sendable
@dataclass(frozen=True)
class Discrepancy:
    """Difference from the reference run. ``parameter``: fully qualified name."""

    check: str  # initial weight, loss, gradient, norm, update, copies, buffer, collective, ...
    step: int  # 0: before the first
    what: str
    cause: str = ""
    parameter: str | None = None
    axis: str | None = None
    ranks: tuple[int, ...] = ()

    def line(self) -> str:
        place = f"step {self.step}" if self.step else "before the first step"
        where = f"{self.check} of {self.parameter}" if self.parameter else self.check
        cause = f"; {self.cause}" if self.cause else ""
        return f"{place}: {where}: {self.what}{cause}"


@sendable
@dataclass
class ParameterRow:
    """Largest relative errors of one parameter over all steps."""

    shape: list[int]
    trained: bool
    gradient: float = 0.0
    update: float = 0.0
    notes: list[str] = field(default_factory=list)


@sendable
@dataclass
class ParityReport:
    """Result of the comparison of a layout with one process. The layout is right if ``passed``."""

    layout: str
    model: str
    bounds: dict[str, float]  # largest allowed relative errors
    parameters: dict[str, ParameterRow]
    notes: list[str]
    discrepancies: list[Discrepancy] = field(default_factory=list)
    # number of collectives that rank 0 has begun in the last step
    collectives: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0

    def add(self, found: Discrepancy) -> None:
        """Add ``found``, unless an earlier step has a discrepancy of the same kind."""
        kind = (found.check, found.parameter, found.axis)
        for each in self.discrepancies:
            if (each.check, each.parameter, each.axis) != kind:
                continue
            # In one step, copies of a weight differ only because the copies of its gradient differ.
            if each.step < found.step or found.check == "copies":
                return
        self.discrepancies.append(found)

    @property
    def passed(self) -> bool:
        return not self.discrepancies

    def write(self, folder: str) -> None:
        """Write `FILE`. Non-finite numbers are written as strings, because JSON does not have
        them."""
        versions = {"parallel2d": metadata.version("parallel2d"), "torch": str(torch.__version__)}
        text = json.dumps({"passed": self.passed, "versions": versions, **asdict(self)})
        text = json.dumps(json.loads(text, parse_constant=str), indent=1)
        os.makedirs(folder, exist_ok=True)
        files.replace(os.path.join(folder, FILE), text)

    def problems(self) -> str:
        """Return a message with the first discrepancies of each check; empty if there are none."""
        shown: Counter[str] = Counter()
        lines = []
        for each in self.discrepancies:
            shown[each.check] += 1
            if shown[each.check] <= _SHOWN:
                lines.append(each.line())
        more = len(self.discrepancies) - len(lines)
        if more:
            lines.append(f"and {more} more in {FILE}")
        return "\n  ".join([f"not certified: {self.layout}", *lines]) if lines else ""

    def table(self, rows: int = 12) -> str:
        """Return a table for a terminal: the parameters with the largest errors, and the number of
        collectives."""
        bounds = self.bounds
        width = max(map(len, (*self.parameters, "parameter")))
        lines = [
            f"{self.model}: {self.layout}",
            f"{self.steps} steps in {self.seconds:.1f} s",
            f"{'parameter':{width}}  error of gradient  of update",
            f"{'(bound)':{width}}  {bounds['gradient']:17.0e}  {bounds['update']:9.0e}",
        ]
        worst = sorted(self.parameters.items(), key=lambda item: -item[1].gradient)
        for name, row in worst[:rows]:
            errors = f"{row.gradient:17.1e}  {row.update:9.1e}"
            lines.append(f"{name:{width}}  {errors}  {', '.join(row.notes)}".rstrip())
        if len(worst) > rows:
            lines.append(f"... and {len(worst) - rows} parameters with smaller errors")
        for kind, calls in self.collectives.items():
            lines.append(f"{calls} x {kind}")
        for note in self.notes:
            lines.append(f"note: {note}")
        lines.append("certified" if self.passed else "NOT CERTIFIED")
        return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks [2, 3]``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
