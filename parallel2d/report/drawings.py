"""The drawings of a report as plain dictionaries in the form of plotly.js, so that making them
needs no library: `drawings`.

Every text that comes from a run is escaped: plotly.js reads a few HTML tags in texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel2d import files
from parallel2d.errors import counted
from parallel2d.metrics import keys
from parallel2d.report.curves import all_curves
from parallel2d.report.drawing import Drawing, escaped, layout_of, run_colour, short_name
from parallel2d.report.overview import mesh_text
from parallel2d.report.runs import Run, all_parts, first_names, host_names

AXIS_COLOURS = {"replicate": "#d62728", "shard": "#1f77b4", "tensor": "#2ca02c"}
_COMPUTE, _DATA, _UNKNOWN = "#b8c4ce", "#ff7f0e", "#dddddd"
_HOST_COLOURS = (
    "#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc", "#fff2cc", "#d0e0e3", "#e6d5f2", "#f4cccc",
)  # fmt: skip
_MOST_RANKS = 4096  # of a mesh that is drawn
_MOST_LABELLED = 256  # ranks whose numbers are written into the cells


def drawings(runs: Sequence[Run]) -> list[Drawing]:
    """All drawings that these runs have values for, in their order."""
    parts = all_parts(runs)
    bars = [bars_of_steps(parts), bars_of_bytes(parts), waterfall(runs)]
    found = [each for each in bars if each is not None]
    return [*all_curves(runs), *found, *mesh_pictures(parts)]


def bars_of_steps(parts: Sequence[Run]) -> Drawing | None:
    """Where a step's time goes: a stacked bar for each layout, as means in milliseconds."""
    shown = [part for part in parts if part.mean(keys.STEP_S)]
    if not shown:
        return None
    split = [_seconds_of_step(part) for part in shown]
    names = {
        "compute": ("compute and the rest", _COMPUTE),
        "data": ("waits for data", _DATA),
        "not split": ("communication was not measured", _UNKNOWN),
        **{axis: (f"waits for {axis}", AXIS_COLOURS[axis]) for axis in keys.AXES},
    }
    traces = []
    for name, (label, colour) in names.items():
        heights = [1000 * seconds[name] for seconds in split]
        if any(heights):
            traces.append(_bars(shown, label, heights, colour, "ms"))
    layout = layout_of(x="", y="ms per step") | {"barmode": "stack"}
    layout["xaxis"] |= _places(shown)
    return Drawing("Where a step's time goes", "A step", traces, layout)


def _seconds_of_step(part: Run) -> dict[str, float]:
    """Means of compute, of waiting for data and for each axis, and of what was not told apart."""
    waits: dict[str, float | None] = {}
    for axis in keys.AXES:
        waits[axis] = part.mean(keys.communication_key(axis, "exposed_seconds"))
    found = {axis: value or 0.0 for axis, value in waits.items()}
    found["data"] = part.mean(keys.time_key("data_s")) or 0.0
    rest = max(0.0, (part.mean(keys.STEP_S) or 0.0) - sum(found.values()))
    was_measured = any(value is not None for value in waits.values())
    found["compute"] = rest if was_measured else 0.0
    found["not split"] = 0.0 if was_measured else rest
    return found


def bars_of_bytes(parts: Sequence[Run]) -> Drawing | None:
    """Bytes that a rank sends per step over each axis, measured beside predicted."""
    traces: list[dict[str, Any]] = []
    for axis in keys.AXES:
        key = keys.communication_key(axis, "bytes")
        measured = [part.mean(key) for part in parts]
        predicted = [part.predicted(key) for part in parts]
        if not any(measured) and not any(predicted):
            continue
        traces.append(_bars(parts, axis, _megabytes(measured), AXIS_COLOURS[axis], "MB"))
        if any(value is not None for value in predicted):
            label = f"{axis} (predicted)"
            bars = _bars(parts, label, _megabytes(predicted), AXIS_COLOURS[axis], "MB")
            bars["marker"] |= {"opacity": 0.45, "pattern": {"shape": "/"}}
            traces.append(bars)
    if not traces:
        return None
    layout = layout_of(x="", y="MB per step and rank") | {"barmode": "group"}
    layout["xaxis"] |= _places(parts)
    return Drawing("Bytes by axis", "A step", traces, layout)


def _megabytes(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else value / 1e6 for value in values]


def _bars(
    parts: Sequence[Run], name: str, heights: Sequence[float | None], colour: str, unit: str
) -> dict[str, Any]:
    # Numbers as places: two runs may have the same short name.
    return {
        "type": "bar",
        "name": name,
        "x": list(range(len(parts))),
        "y": list(heights),
        "text": [escaped(part.name, 120) for part in parts],
        "textposition": "none",
        "hovertemplate": "%{text}<br>" + name + ": %{y:.4~g} " + unit + "<extra></extra>",
        "marker": {"color": colour},
    }


def _places(parts: Sequence[Run]) -> dict[str, Any]:
    names = [short_name(part.name).replace(": ", ":<br>") for part in parts]
    edge = [-0.6, max(len(parts), 2) - 0.4]
    return {"tickvals": list(range(len(parts))), "ticktext": names, "range": edge}


_WATERFALL = (
    ("first_step", "first steps"),
    ("data", "data"),
    ("checkpoint", "saving"),
    ("validation", "validation"),
    ("restart", "restarts"),
    ("repeated", "repeated"),
)


def waterfall(runs: Sequence[Run]) -> Drawing | None:
    """From the wall time to the useful time, less each of the losses."""
    shown = [run for run in runs if run.last(keys.WALL_S) and run.last(keys.USEFUL_S) is not None]
    if not shown:
        return None
    unit, seconds = _unit_of_time(max(run.seconds(keys.WALL_S) for run in shown))
    labels = ["wall time", *(label for _, label in _WATERFALL), "other", "useful"]
    measures = ["absolute", *["relative"] * (len(labels) - 2), "total"]
    traces: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        if run not in shown:
            continue
        heights = _falls(run)
        traces.append(
            {
                "type": "waterfall",
                "name": short_name(run.name),
                "x": labels,
                "y": [value / seconds for value in heights],
                "measure": measures,
                "connector": {"visible": False},
                "increasing": {"marker": {"color": "#bbbbbb"}},
                "decreasing": {"marker": {"color": "#e8a29c"}},
                "totals": {"marker": {"color": run_colour(number)}},
                "hovertemplate": "%{x}: %{delta:.4~g} " + unit + "<extra>%{fullData.name}</extra>",
            }
        )
    layout = layout_of(x="", y=unit) | {"waterfallmode": "group"}
    return Drawing("Goodput: from wall time to useful time", "Goodput", traces, layout)


def _falls(run: Run) -> list[float]:
    """Seconds: the wall time, less each of the losses; 0 stands for the rest."""
    wall, useful = run.seconds(keys.WALL_S), run.seconds(keys.USEFUL_S)
    lost = [run.seconds(keys.lost_key(cause)) for cause, _ in _WATERFALL]
    # What no cause is known for: setting up, writing rows, the agreement of ranks to end.
    other = wall - useful - sum(lost)
    return [wall, *(-value for value in lost), -other, 0.0]


def _unit_of_time(seconds: float) -> tuple[str, float]:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return unit, length
    return "s", 1.0


def mesh_pictures(parts: Sequence[Run]) -> list[Drawing]:
    """The ranks of each mesh, with a colour for each host: a row is a replica, a column a place in
    it. Equal meshes are drawn once."""
    found: dict[str, tuple[Run, list[str]]] = {}
    for part in parts:
        if _ranks_of(part):
            what = f"{mesh_text(part)} {part.layout['ranks']} {part.layout['hosts']}"
            found.setdefault(what, (part, []))[1].append(part.name)
    return [_mesh_picture(part, names) for part, names in found.values()]


def _ranks_of(part: Run) -> list[list[list[int]]]:
    """[replicate][shard][tensor]; empty where the layout does not hold that, or too many."""
    hosts = host_names(part.layout)
    # Lists of unequal lengths give fewer dims.
    ranks = np.asarray(part.layout.get("ranks"), dtype=object)
    if ranks.ndim != 3 or not 0 < ranks.size <= _MOST_RANKS:
        return []
    # Not isinstance: True and False are ints too.
    if not all(type(rank) is int and 0 <= rank < len(hosts) for rank in ranks.flat):
        return []
    found: list[list[list[int]]] = ranks.tolist()
    return found


def _mesh_picture(part: Run, names: Sequence[str]) -> Drawing:
    ranks = _ranks_of(part)
    hosts = host_names(part.layout)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    cells = [list(itertools.chain.from_iterable(replica)) for replica in ranks]
    colours = [_HOST_COLOURS[n % len(_HOST_COLOURS)] for n in range(len(numbers))]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [[numbers[hosts[rank]] for rank in row] for row in cells],
        "text": [[str(rank) for rank in row] for row in cells],
        "hovertext": _places_of_ranks(ranks, hosts),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "colorscale": _steps_of(colours),
        "zmin": -0.5,
        "zmax": len(colours) - 0.5,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    if sum(map(len, cells)) <= _MOST_LABELLED:
        trace["texttemplate"] = "%{text}"
    is_split = len(ranks[0][0]) > 1
    layout = layout_of(x="shard x tensor" if is_split else "shard", y="replicate")
    layout["xaxis"] |= {"showgrid": False, "dtick": max(1, len(cells[0]) // 8), "zeroline": False}
    layout["yaxis"] |= {"showgrid": False, "dtick": max(1, len(cells) // 8), "zeroline": False}
    layout["yaxis"] |= {"autorange": "reversed"}
    layout["height"] = min(420, 150 + 30 * len(cells))
    title = _title_of_mesh(part, len(numbers), names)
    return Drawing(title, "Meshes: ranks, a colour for each host", [trace], layout)


def _title_of_mesh(part: Run, hosts: int, names: Sequence[str]) -> str:
    strategy = files.printable(part.layout.get("strategy", "-"), 40)
    return f"{strategy} {mesh_text(part)}, {counted(hosts, 'host')}: {first_names(names)}"


def _places_of_ranks(
    ranks: Sequence[Sequence[Sequence[int]]], hosts: Sequence[str]
) -> list[list[str]]:
    """For each cell of a mesh's picture its rank, host and place in words."""
    texts = []
    for replicate, replica in enumerate(ranks):
        row = []
        for shard, group in enumerate(replica):
            for tensor, rank in enumerate(group):
                place = f"replicate {replicate}, shard {shard}, tensor {tensor}"
                row.append(f"rank {rank} on {escaped(hosts[rank], 60)}<br>{place}")
        texts.append(row)
    return texts


def _steps_of(colours: Sequence[str]) -> list[list[Any]]:
    """A scale that jumps from one colour to the next."""
    found: list[list[Any]] = []
    for number, colour in enumerate(colours):
        found += [[number / len(colours), colour], [(number + 1) / len(colours), colour]]
    return found
