"""Faults as words of the command line: `parse_fault` reads ``at=30s kill-worker node=1 rank=0``,
`Schedule` calls `Cluster` at its time.

``at=`` is seconds since the job was started (``30s``) or a step of the job (``step:20``), which
needs the run directory.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tools.cluster.network import ClusterError, parse_rate

if TYPE_CHECKING:
    from tools.cluster.cluster import Cluster


def _seconds(text: str) -> float:
    value = float(text.removesuffix("s"))
    if value < 0:
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _rate(text: str) -> str:
    parse_rate(text)
    return text


def _yes(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _milliseconds(text: str) -> float:
    return float(text.removesuffix("ms"))


_EXPECTED: dict[Callable[[str], object], str] = {
    int: "a whole number", _seconds: "seconds such as 5s", _share: "a share such as 1% or 0.01", _rate: "a rate such as 200mbit",
    _yes: "true or false", _milliseconds: "milliseconds such as 5ms",
}  # fmt: skip
_Keys = dict[str, Callable[[str], object]]
_NODE: _Keys = {"node": int}
_WORKER: _Keys = {"node": int, "rank": int}
# Kind -> (keys that must be there, keys that may)
_KINDS: dict[str, tuple[_Keys, _Keys]] = {
    "kill-worker": (_WORKER, {}),
    "stop-worker": (_WORKER, {"for": _seconds}),
    "continue-worker": (_WORKER, {}),
    "kill-node": (_NODE, {"power_loss": _yes, "for": _seconds}),
    "restore-node": (_NODE, {}),
    "kill-store": ({}, {"for": _seconds}),
    "restore-store": ({}, {}),
    "partition": (_NODE, {"for": _seconds}),
    "heal": (_NODE, {}),
    "rate": ({**_NODE, "rate": _rate}, {"for": _seconds}),
    "loss": ({**_NODE, "share": _share}, {"for": _seconds}),
    "delay": ({**_NODE, "delay": _milliseconds}, {"for": _seconds}),
}


@dataclass(frozen=True)
class Fault:
    """What happens when. Exactly one of ``seconds`` and ``step`` is set. ``values``: the keys of this kind, typed."""

    kind: str
    values: dict[str, object] = field(default_factory=dict)
    seconds: float | None = None
    step: int | None = None

    def actions(self, cluster: Cluster) -> list[Callable[[], None]]:
        """What begins the fault and, where the fault has an end of its own (``for=``), what ends it."""
        values = self.values
        node = int(values.get("node", 0))  # type: ignore[call-overload]
        rank = int(values.get("rank", 0))  # type: ignore[call-overload]
        table: dict[str, list[Callable[[], None]]] = {
            "kill-worker": [lambda: cluster.kill_worker(node, rank)],
            "stop-worker": [
                lambda: cluster.stop_worker(node, rank),
                lambda: cluster.continue_worker(node, rank),
            ],
            "continue-worker": [lambda: cluster.continue_worker(node, rank)],
            "kill-node": [
                lambda: cluster.kill_node(node, power_loss=bool(values.get("power_loss", False))),
                lambda: cluster.restore_node(node),
            ],
            "restore-node": [lambda: cluster.restore_node(node)],
            "kill-store": [cluster.kill_store, cluster.restore_store],
            "restore-store": [cluster.restore_store],
            "partition": [lambda: cluster.partition(node), lambda: cluster.heal(node)],
            "heal": [lambda: cluster.heal(node)],
            "rate": [
                lambda: cluster.set_rate(node, str(values["rate"])),
                lambda: cluster.set_rate(node, cluster.rate),
            ],
            "loss": [
                lambda: cluster.set_loss(node, float(str(values["share"]))),
                lambda: cluster.set_loss(node, 0.0),
            ],
            "delay": [
                lambda: cluster.set_delay(node, float(str(values["delay"]))),
                lambda: cluster.set_delay(node, 0.0),
            ],
        }
        return table[self.kind][: 2 if "for" in values else 1]


def parse_fault(text: str) -> Fault:
    """``at=30s partition node=1 for=10s`` -> `Fault`. Raises `ClusterError` with what is wrong and
    what is possible."""
    when: str | None = None
    kind: str | None = None
    given: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals:
            if kind is not None:
                raise ClusterError(
                    f"--fault {text!r}: {kind} and {word} are two faults; give --fault twice"
                )
            kind = word
        elif key == "at":
            when = value
        else:
            given[key] = value
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind or "", _KINDS, 1)
        raise ClusterError(
            f"--fault {text!r}: {kind or 'no kind'} is not a fault{f'; did you mean {near[0]}?' if near else ''} ({', '.join(_KINDS)})"
        )
    required, optional = _KINDS[kind]
    allowed = {**required, **optional}
    for key in given:
        if key not in allowed:
            raise ClusterError(f"--fault {text!r}: {kind} has no {key}=, only {', '.join(allowed)}")
    for key in required:
        if key not in given:
            raise ClusterError(f"--fault {text!r}: {kind} needs {key}=")
    values = {}
    for key, value in given.items():
        try:
            values[key] = allowed[key](value)
        except (ValueError, KeyError, ClusterError):
            raise ClusterError(
                f"--fault {text!r}: {key}={value} must be {_EXPECTED[allowed[key]]}"
            ) from None
    if when is None:
        raise ClusterError(f"--fault {text!r}: say when, at=30s or at=step:20")
    try:
        if when.startswith("step:"):
            return Fault(kind, values, step=int(when.removeprefix("step:")))
        return Fault(kind, values, seconds=_seconds(when))
    except ValueError:
        raise ClusterError(
            f"--fault {text!r}: at={when} must be seconds (30s) or a step (step:20)"
        ) from None


class Schedule:
    """Carries out faults in a thread of its own while a job runs. A fault that cannot be carried out ends the schedule and is
    kept in ``error``."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        assert cluster.job is not None
        if cluster.job.run_dir is None and any(fault.step is not None for fault in faults):
            raise ClusterError("at=step:N needs hydra.run.dir=DIR among the words of the job")
        for fault in faults:
            node = int(str(fault.values["node"]))
            if not 0 <= node < len(cluster.nodes):
                raise ClusterError(
                    f"{fault.kind} node={node}: there are nodes 0 to {len(cluster.nodes) - 1}"
                )
        self._cluster, self._waiting = cluster, list(faults)
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._begun = time.monotonic()
        self._over = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> list[Fault]:
        """Faults whose time has not come."""
        return list(self._waiting)

    def _due(self, fault: Fault) -> bool:
        if fault.seconds is not None:
            return time.monotonic() - self._begun >= fault.seconds
        assert self._cluster.job is not None
        assert fault.step is not None
        return self._cluster.job.step() >= fault.step

    def _run(self) -> None:
        try:
            while not self._over.wait(0.05):
                for fault in [fault for fault in self._waiting if self._due(fault)]:
                    self._waiting.remove(fault)
                    begin, *end = fault.actions(self._cluster)
                    begin()
                    if end:
                        self._ends.append(
                            (time.monotonic() + float(str(fault.values["for"])), end[0])
                        )
                for entry in [entry for entry in self._ends if time.monotonic() >= entry[0]]:
                    self._ends.remove(entry)
                    entry[1]()
        except Exception as error:  # raised where the job is waited for
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
