"""The result of a certification, for people and as JSON: `Certificate`."""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

from parallel2d import files
from parallel2d.exchange import sendable

FILE = "certificate.json"
PICTURE = "certificate.svg"
UNEXPLAINED = "no known cause"
_SHOWN = 3  # of each kind and step


@sendable
@dataclass(frozen=True)
class Discrepancy:
    """Something that is not as in one process."""

    check: str  # initial weight, loss, gradient, norm, update, copies, buffer, collective, ...
    step: int  # 0: before the first
    what: str
    cause: str = ""
    parameter: str | None = None
    axis: str | None = None
    collective: str | None = None
    ranks: tuple[int, ...] = ()

    def line(self) -> str:
        place = f"step {self.step}" if self.step else "before the first step"
        where = f"{self.check} of {self.parameter}" if self.parameter else self.check
        cause = f"; {self.cause}" if self.cause else ""
        return f"{place}: {where}: {self.what}{cause}"


@sendable
@dataclass
class ParameterRow:
    """The largest errors of one parameter over all steps, in units of their bounds' norms."""

    shape: list[int]
    trained: bool
    gradient: float = 0.0  # relative error
    gradient_bound: float = 0.0
    update: float = 0.0
    update_bound: float = 0.0
    notes: list[str] = field(default_factory=list)


@sendable
@dataclass
class Certificate:
    """Whether a layout computes what one process computes, with all that was compared.

    ``collectives``: by axis, one line for each kind and dtype, with calls and bytes per step of
    rank 0. ``bounds``: what errors are compared with, in words.
    """

    layout: str
    model: str
    parameters: dict[str, ParameterRow]
    bounds: dict[str, str]
    discrepancies: list[Discrepancy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)  # found, expected
    norms: list[tuple[float, float]] = field(default_factory=list)
    collectives: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0

    def add(self, found: Discrepancy) -> None:
        """Notes ``found``, unless there is one of the same kind from an earlier step."""
        for each in self.discrepancies:
            is_same = (each.check, each.parameter, each.axis, each.collective) == (
                found.check,
                found.parameter,
                found.axis,
                found.collective,
            )
            # Weights differ between ranks because their gradients did.
            is_consequence = is_same and found.check == "copies"
            if is_consequence or (is_same and each.step < found.step):
                return
        self.discrepancies.append(found)

    @property
    def passed(self) -> bool:
        return not self.discrepancies

    def as_json(self) -> str:
        """Numbers that are not finite, which JSON does not have, are strings."""
        content = json.dumps(self.configuration, sort_keys=True)
        values = {
            "passed": self.passed,
            "configuration_sha256": hashlib.sha256(content.encode()).hexdigest(),
            **asdict(self),
        }
        return json.dumps(_in_json(values), indent=1, allow_nan=False)

    def write(self, folder: str) -> None:
        """Writes `FILE` and `PICTURE` to ``folder``."""
        os.makedirs(folder, exist_ok=True)
        files.replace(os.path.join(folder, FILE), self.as_json())
        files.replace(os.path.join(folder, PICTURE), self.picture())

    def problems(self, limit: int = 24) -> str:
        """What differs from one process, in up to ``limit`` lines; empty when nothing does."""
        if self.passed:
            return ""
        lines = [f"not certified: {self.layout}"]
        by_check: dict[tuple[int, str], list[Discrepancy]] = defaultdict(list)
        # Those that are understood come first.
        for each in sorted(self.discrepancies, key=lambda each: UNEXPLAINED in each.cause):
            by_check[each.step, each.check].append(each)
        seen: set[str] = set()
        for (step, check), found in sorted(by_check.items(), key=lambda item: item[0][0]):
            # An error has consequences in later steps.
            if check in seen:
                continue
            seen.add(check)
            lines += [f"  {each.line()}" for each in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  step {step}: {check}: {len(found) - _SHOWN} more in {FILE}")
        return "\n".join(lines[: limit + 1])

    def table(self, rows: int = 12) -> str:
        """For a terminal: the parameters with the largest errors, and what was audited."""
        lines = [f"{self.model}: {self.layout}", f"{self.steps} steps in {self.seconds:.1f} s"]
        width = max([len(name) for name in self.parameters] + [9])
        lines.append(f"{'parameter':{width}}  gradient error  (bound)   update error  (bound)")
        worst = sorted(self.parameters.items(), key=lambda item: -_share(item[1]))
        for name, row in worst[:rows]:
            notes = f"  {', '.join(row.notes)}" if row.notes else ""
            lines.append(
                f"{name:{width}}  {row.gradient:14.1e}  {row.gradient_bound:7.0e}  "
                f"{row.update:13.1e}  {row.update_bound:7.0e}{notes}"
            )
        if len(worst) > rows:
            lines.append(f"... and {len(worst) - rows} parameters with smaller errors")
        for axis, kinds in self.collectives.items():
            lines.append(f"{axis}: {'; '.join(kinds)}")
        lines += [f"note: {note}" for note in self.notes]
        lines.append("certified" if self.passed else "NOT CERTIFIED")
        return "\n".join(lines)

    def picture(self) -> str:
        """SVG: the relative gradient error of each parameter beside its bound, on a logarithmic
        scale."""
        return draw_errors(self.parameters, {each.parameter for each in self.discrepancies})


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _share(row: ParameterRow) -> float:
    """The larger of the two errors, as a share of its bound."""
    shares = [0.0]
    if row.gradient_bound:
        shares.append(row.gradient / row.gradient_bound)
    if row.update_bound:
        shares.append(row.update / row.update_bound)
    return max(each if math.isfinite(each) else math.inf for each in shares)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks [2, 3]``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def versions() -> dict[str, str]:
    """Of what took part."""
    found = {"parallel2d": metadata.version("parallel2d"), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


_LEFT, _WIDTH, _LINE = 340, 460, 18
_LOWEST, _HIGHEST = -9.0, 2.0  # powers of ten


def draw_errors(rows: Mapping[str, ParameterRow], wrong: set[str | None]) -> str:
    """One bar per parameter; a line at its bound."""
    height = _LINE * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="8" y="18" font-size="13">relative error of the gradient; '
        "black line: bound</text>",
    ]
    for power in range(int(_LOWEST), int(_HIGHEST) + 1, 2):
        x = _place(10.0**power)
        parts.append(f'<line x1="{x}" y1="40" x2="{x}" y2="{height - 8}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x}" y="36" text-anchor="middle">1e{power}</text>')
    for number, (name, row) in enumerate(rows.items()):
        y = 44 + number * _LINE
        parts += _bar(name, row, y, "#c0392b" if name in wrong else "#4a7fb5")
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, row: ParameterRow, y: int, color: str) -> Sequence[str]:
    shown = name if len(name) <= 52 else f"...{name[-49:]}"
    end = _place(row.gradient)
    bound = _place(row.gradient_bound)
    return (
        f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{html.escape(shown)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_LINE - 5}" '
        f'fill="{color}"><title>{html.escape(name)}: {row.gradient:.2e}, bound '
        f"{row.gradient_bound:.0e}</title></rect>",
        f'<line x1="{bound}" y1="{y - 1}" x2="{bound}" y2="{y + _LINE - 4}" stroke="#000000"/>',
    )


def _place(value: float) -> float:
    power = math.log10(value) if value > 0 else _LOWEST
    if not math.isfinite(power):
        power = _HIGHEST
    share = (min(max(power, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(_LEFT + share * _WIDTH, 1)
