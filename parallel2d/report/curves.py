"""The curves of a report, with a line for each run and the events of a run on it: `all_curves`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallel2d.metrics import keys
from parallel2d.report.drawing import Drawing, escaped, layout_of, run_colour, short_name
from parallel2d.report.events import Event, events_of
from parallel2d.report.runs import Run

MOST_POINTS = 600  # per line; more are thinned, ends kept
_SYMBOLS = {
    "restart": "x",
    "resume": "triangle-right",
    "change of layout": "diamond-open",
    "save": "circle-open",
    "stop": "square",
}


def all_curves(runs: Sequence[Run]) -> list[Drawing]:
    """One drawing for each quantity that a run has."""
    found = [curves(runs, title, unit, key) for title, unit, key in _CURVES]
    return [each for each in found if each is not None]


def _memory(run: Run) -> str:
    """Of the device if it was measured, otherwise of the process."""
    return keys.PEAK_GIB if run.series(keys.PEAK_GIB) else keys.PEAK_RSS_GIB


def _always(key: str) -> Callable[[Run], str]:
    return lambda run: key


# Title, unit, key
_CURVES: tuple[tuple[str, str, Callable[[Run], str]], ...] = (
    ("Training loss", "", _always(keys.LOSS)),
    ("Validation loss", "", _always(keys.VALIDATION_LOSS)),
    ("Throughput", "tokens/s", _always(keys.TOKENS_PER_S)),
    ("Gradient norm", "", _always(keys.GRAD_NORM)),
    ("Learning rate", "", _always(keys.LEARNING_RATE)),
    ("Goodput", "share of the wall time", _always(keys.GOODPUT)),
    ("Peak memory of the largest rank", "GiB", _memory),
)


def curves(
    runs: Sequence[Run], title: str, unit: str, key_of: Callable[[Run], str]
) -> Drawing | None:
    """A line for each run over its steps, dashed in every second start, with the run's events on
    it. None where no run has the key."""
    traces: list[dict[str, Any]] = []
    events: list[tuple[Run, Event, dict[str, float]]] = []
    for number, run in enumerate(runs):
        key = key_of(run)
        rows = _rows_with(run, key)
        if not rows:
            continue
        traces += _lines_of(run, rows, key, number, _width(number, len(runs)))
        events += [(run, event, _nearest(rows, event.step)) for event in events_of(run)]
    if not traces:
        return None
    colours = {run.path: run_colour(number) for number, run in enumerate(runs)}
    for marks in _marks_by_kind(events, key_of, colours):
        # There may be many saves, and one drawing that shows them is enough.
        if marks["name"] == "save" and title != _CURVES[0][0]:
            marks["visible"] = "legendonly"
        traces.append(marks)
    layout = layout_of(x="steps", y=unit)
    if unit or title == "Learning rate":
        layout["yaxis"]["rangemode"] = "tozero"
    return Drawing(title, "Curves", traces, layout, over=True)


def _rows_with(run: Run, key: str) -> list[dict[str, float]]:
    return _thin([row for row in run.rows if key in row])


def _lines_of(
    run: Run, rows: Sequence[dict[str, float]], key: str, number: int, width: float
) -> list[dict[str, Any]]:
    """The run's line, and the dashed one of every second start if there is one."""
    found = []
    for is_dashed in (False, True):
        line = _line_of(run, rows, key, is_dashed=is_dashed)
        if line is None:
            continue
        dash = "dot" if is_dashed else "solid"
        shown = {"color": run_colour(number), "width": width, "dash": dash}
        found.append(
            {**line, "line": shown, "legendgroup": str(number), "showlegend": not is_dashed}
        )
    return found


def _width(number: int, runs: int) -> float:
    """Of few runs the first are wider, so that equal curves are all seen."""
    return 1.8 + 1.6 * (runs - 1 - number) if runs <= 4 else 1.8


def _line_of(
    run: Run, rows: Sequence[dict[str, float]], key: str, *, is_dashed: bool
) -> dict[str, Any] | None:
    """The rows of every second start; those of the others are gaps. The first row of a start is
    also the last point of the line before it, so that lines meet."""
    numbers = {segment.number: place for place, segment in enumerate(run.segments)}
    xs = _Positions()
    ys: list[float | None] = []
    texts: list[str] = []
    was_own = False
    for row in rows:
        place = numbers.get(int(row.get(keys.SEGMENT, 0)), 0)
        is_own = bool(place % 2) == is_dashed
        if is_own or was_own:
            xs.add(row)
            ys.append(row[key])
            texts.append(f"start {int(row.get(keys.SEGMENT, 1))}")
        elif ys and ys[-1] is not None:
            xs.add(None)
            ys.append(None)
            texts.append("")
        was_own = is_own
    # A gap follows a point, so a line without points has no gaps either.
    if not ys:
        return None
    single = len(ys) - ys.count(None) == 1
    name = short_name(run.name)
    return {
        "type": "scatter",
        # A line through one point would not be seen.
        "mode": "markers" if single else "lines",
        "name": name,
        "x": xs.steps,
        "y": ys,
        "text": texts,
        "hovertemplate": f"%{{x:,.6~g}}: %{{y:.6~g}}<br>%{{text}}<extra>{name}</extra>",
        "meta": xs.all(),
    }


class _Positions:
    """Where points are, in each of the quantities that the x axis may count."""

    def __init__(self) -> None:
        self.steps: list[float | None] = []
        self._tokens: list[float | None] = []
        self._hours: list[float | None] = []

    def add(self, row: dict[str, float] | None) -> None:
        """None is a gap in the line."""
        given = row or {}
        self.steps.append(given.get(keys.STEP))
        self._tokens.append(given.get(keys.TOKENS))
        wall_s = given.get(keys.WALL_S)
        self._hours.append(None if wall_s is None else wall_s / 3600)

    def all(self) -> dict[str, list[float | None]]:
        return {"steps": self.steps, "tokens": self._tokens, "hours": self._hours}


def _marks_by_kind(
    events: Sequence[tuple[Run, Event, dict[str, float]]],
    key_of: Callable[[Run], str],
    colours: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The marks of each kind of event that there is."""
    found = []
    for kind in _SYMBOLS:
        of_kind = [each for each in events if each[1].kind == kind]
        if of_kind:
            found.append(_marks(of_kind, kind, key_of, colours))
    return found


def _marks(
    events: Sequence[tuple[Run, Event, dict[str, float]]],
    kind: str,
    key_of: Callable[[Run], str],
    colours: Mapping[str, str],
) -> dict[str, Any]:
    xs = _Positions()
    ys: list[float] = []
    texts: list[str] = []
    shown = _thin(events)
    for run, event, row in shown:
        xs.add(row)
        ys.append(row[key_of(run)])
        texts.append(f"{short_name(run.name)}: {escaped(event.text, 200)}")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": xs.steps,
        "y": ys,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "symbol": _SYMBOLS[kind],
            "size": 14 if kind == "change of layout" else 10,
            "color": [colours[run.path] for run, _, _ in shown],
            "line": {"width": 1.5, "color": "#222222"},
        },
        "meta": xs.all(),
    }


def _nearest(rows: Sequence[dict[str, float]], step: float) -> dict[str, float]:
    return min(rows, key=lambda row: abs(row[keys.STEP] - step))


def _thin(values: Sequence[Any]) -> list[Any]:
    step = max(1, math.ceil(len(values) / MOST_POINTS))
    kept = list(values[::step])
    return kept if not kept or kept[-1] is values[-1] else [*kept, values[-1]]
