"""What happened to a run at which step, from its starts, its rows and its summary: `events_of`."""

from __future__ import annotations

from dataclasses import dataclass

from parallel2d import files
from parallel2d.metrics import keys
from parallel2d.report.overview import mesh_text
from parallel2d.report.runs import CHECKPOINT_S, Run, parts_of


@dataclass(frozen=True)
class Event:
    """``kind``: restart, resume, change of layout, save or stop."""

    kind: str
    step: float
    text: str


def events_of(run: Run) -> list[Event]:
    """In the order of their kinds. A save is known by the row that has its seconds, so with
    ``metrics.log_every`` above 1 it was in one of the steps up to that row."""
    found: list[Event] = []
    for segment in run.segments[1:]:
        kind = "restart" if segment.restarted else "resume"
        begun = files.printable(segment.begun, 40)
        text = f"start {segment.number} ({kind}) at step {segment.first_step}, {begun}"
        found.append(Event(kind, segment.first_step, text))
    for part in parts_of(run)[1:]:
        strategy = files.printable(part.layout.get("strategy", "-"), 40)
        step = part.rows[0][keys.STEP]
        text = f"layout from step {step}: {strategy} {mesh_text(part)}"
        found.append(Event("change of layout", step, text))
    for step, seconds in run.series(CHECKPOINT_S):
        if seconds > 0:
            found.append(Event("save", step, f"saved up to step {step}"))
    stopped, reason = run.summary.get("stopped") is True, run.summary.get("reason")
    if stopped or isinstance(reason, str):
        why = files.printable(reason, 200) if isinstance(reason, str) else "it was asked to end"
        step = run.rows[-1][keys.STEP]
        found.append(Event("stop", step, f"stopped after step {step}: {why}"))
    return found
