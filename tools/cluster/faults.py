"""Faults of the command line: `parse_fault` reads ``at=30s kill-worker node=1 rank=0``, and
`Schedule` calls `Cluster` at that time.

``at=`` is seconds since the start of the job (``30s``) or a step of the job (``step:20``). A step
needs the run directory.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


# Key -> parser and description of its value
_VALUES: dict[str, tuple[Callable[[str], Any], str]] = {
    "node": (int, "a whole number"),
    "rank": (int, "a whole number"),
    "for": (_seconds, "seconds such as 5s"),
    "share": (_share, "a share such as 1% or 0.01"),
    "rate": (parse_rate, "a rate such as 200mbit"),
    "delay": (lambda text: float(text.removesuffix("ms")), "milliseconds such as 5ms"),
    "power_loss": ({"true": True, "false": False}.__getitem__, "true or false"),
}


@dataclass(frozen=True)
class _Kind:
    """One kind of fault."""

    begin: str  # method of `Cluster`; receives the values of ``needs``
    needs: tuple[str, ...]  # required keys
    end: str | None = None  # method that undoes the fault after ``for=``
    undone_with: tuple[str, ...] = ("node",)  # keys that ``end`` receives
    may: tuple[str, ...] = ()  # optional keys


_KINDS = {
    "kill-worker": _Kind("kill_worker", ("node", "rank")),
    "stop-worker": _Kind("stop_worker", ("node", "rank"), "continue_worker", ("node", "rank")),
    "continue-worker": _Kind("continue_worker", ("node", "rank")),
    "kill-node": _Kind("kill_node", ("node",), "restore_node", may=("power_loss",)),
    "restore-node": _Kind("restore_node", ("node",)),
    "kill-store": _Kind("kill_store", (), "restore_store", ()),
    "restore-store": _Kind("restore_store", ()),
    "partition": _Kind("partition", ("node",), "heal"),
    "heal": _Kind("heal", ("node",)),
    "rate": _Kind("set_rate", ("node", "rate"), "restore_rate"),
    "loss": _Kind("set_loss", ("node", "share"), "set_loss"),
    "delay": _Kind("set_delay", ("node", "delay"), "set_delay"),
}


@dataclass(frozen=True)
class Fault:
    """One fault and its time. Exactly one of ``seconds`` and ``step`` is set."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)  # key -> typed value
    seconds: float | None = None  # since the start of the job
    step: int | None = None  # of the job

    def begin(self, cluster: Cluster) -> None:
        """Inject the fault."""
        kind = _KINDS[self.kind]
        optional = {key: self.values[key] for key in kind.may if key in self.values}
        getattr(cluster, kind.begin)(*(self.values[key] for key in kind.needs), **optional)

    def end(self, cluster: Cluster) -> None:
        """Undo the fault; `Schedule` calls this after ``for=``."""
        kind = _KINDS[self.kind]
        assert kind.end is not None
        getattr(cluster, kind.end)(*(self.values[key] for key in kind.undone_with))


def parse_fault(text: str) -> Fault:
    """Parse ``at=30s partition node=1 for=10s``. Raises `ClusterError` with the mistake and the allowed
    values."""
    words = text.split()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    kinds = [word for word in words if "=" not in word]
    when = given.pop("at", None)
    if len(kinds) > 1:
        both = " and ".join(kinds)
        raise ClusterError(f"--fault {text!r}: {both} are two faults; give --fault twice")
    name = kinds[0] if kinds else "no kind"
    if name not in _KINDS:
        near = difflib.get_close_matches(name, _KINDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ClusterError(f"--fault {text!r}: {name} is not a fault{hint} ({', '.join(_KINDS)})")
    kind = _KINDS[name]
    allowed = (*kind.needs, *kind.may, *(("for",) if kind.end else ()))
    for key in given:
        if key not in allowed:
            raise ClusterError(f"--fault {text!r}: {name} has no {key}=, only {', '.join(allowed)}")
    for key in kind.needs:
        if key not in given:
            raise ClusterError(f"--fault {text!r}: {name} needs {key}=")
    values = {key: _read(text, key, value) for key, value in given.items()}
    if when is None:
        raise ClusterError(f"--fault {text!r}: say when, at=30s or at=step:20")
    try:
        if when.startswith("step:"):
            return Fault(name, values, step=int(when.removeprefix("step:")))
        return Fault(name, values, seconds=_seconds(when))
    except ValueError:
        raise ClusterError(
            f"--fault {text!r}: at={when} must be seconds (30s) or a step (step:20)"
        ) from None


def _read(text: str, key: str, value: str) -> Any:
    parse, expected = _VALUES[key]
    try:
        return parse(value)
    except (ValueError, KeyError, ClusterError):
        raise ClusterError(f"--fault {text!r}: {key}={value} must be {expected}") from None


class Schedule:
    """Injects faults from a separate thread while a job runs. If a fault cannot be injected, the
    schedule ends, and ``error`` has the exception."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        assert cluster.job is not None
        if cluster.job.run_dir is None and any(fault.step is not None for fault in faults):
            raise ClusterError("at=step:N needs hydra.run.dir=DIR among the words of the job")
        for fault in faults:
            cluster.log_path(fault.values.get("node", 0))  # raises an exception for an unknown node
        self._cluster, self._job = cluster, cluster.job
        self.waiting = list(faults)  # faults that are not due yet
        self._ends: list[tuple[float, Fault]] = []
        self._begun = time.monotonic()
        self._over = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _is_due(self, fault: Fault) -> bool:
        if fault.seconds is not None:
            return time.monotonic() - self._begun >= fault.seconds
        assert fault.step is not None
        return self._job.step() >= fault.step

    def _run(self) -> None:
        try:
            while not self._over.wait(0.05):
                for fault in [fault for fault in self.waiting if self._is_due(fault)]:
                    self.waiting.remove(fault)
                    fault.begin(self._cluster)
                    if "for" in fault.values:
                        self._ends.append((time.monotonic() + fault.values["for"], fault))
                for entry in [entry for entry in self._ends if time.monotonic() >= entry[0]]:
                    self._ends.remove(entry)
                    entry[1].end(self._cluster)
        except Exception as error:  # `tools.cluster` raises it when it waits for the job
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
