"""Values that the loop, the metrics and the checkpoints share. `Progress` is the position of a run,
and `StepOutcome` the result of a step. `RankReport` has the measurements of one rank, and
`RankReports` the measurements of all ranks. `WatchedMetrics` are the metrics for
``checkpoint.keep_best`` and ``train.stop``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from parallel2d.base.config import TrainConfig
from parallel2d.base.errors import did_you_mean
from parallel2d.base.files import is_count, is_number, printable

LARGEST_COUNT = 2**52  # floats are exact up to twice this value, so a run has room to continue
LARGEST_SCALE = 2.0**24  # of a loss scaler
_LONGEST_NAME = 200


@dataclass
class Progress:
    """The position of a run: the counters that a checkpoint stores next to tensors."""

    step: int = 0  # finished steps
    samples: int = 0  # consumed over all ranks: the position in the data
    tokens: int = 0  # valid targets consumed over all ranks
    skipped: int = 0  # steps without an update, because a value was not finite
    skipped_in_a_row: int = 0

    def count(self, step: int, samples: int, outcome: StepOutcome) -> None:
        """Count a finished ``step``, after which ``samples`` are consumed."""
        self.step, self.samples = step, samples
        self.tokens += outcome.tokens
        self.skipped += not outcome.finite
        self.skipped_in_a_row = 0 if outcome.finite else self.skipped_in_a_row + 1


@dataclass(frozen=True)
class RankReport:
    """Measurements of one rank in a step. All ranks receive them in the status all-reduce of the
    next step, as a list of floats; see [Note: one status all-reduce per step] in `step_status.py`.
    """

    busy_s: float  # seconds of work, without waits for other ranks
    # Values by the keys of `metrics.keys`; all ranks have the same keys
    memory: Mapping[str, float]
    communication: Mapping[str, float]  # empty if it is not measured

    def floats(self) -> list[float]:
        """Return all numbers in the same order on every rank."""
        return [self.busy_s, *self.memory.values(), *self.communication.values()]

    def of_all(self, values: Tensor) -> RankReports:
        """Return the reports of all ranks, from ``values`` [rank, floats] in fp64 on CPU.

        The method creates no object per rank, because it runs in each step and a job may have a
        thousand ranks.
        """
        end = 1 + len(self.memory)
        largest = values[:, 1:end].amax(0).tolist()
        totals = values[:, end:].sum(0).tolist()
        return RankReports(
            values[:, 0].tolist(),
            dict(zip(self.memory, largest, strict=True)),
            dict(zip(self.communication, totals, strict=True)),
        )


@dataclass(frozen=True)
class RankReports:
    """Measurements of all ranks in the previous step."""

    busy_s: list[float]  # by rank; 0 for a failed rank
    memory: Mapping[str, float]  # the largest values
    communication: Mapping[str, float]  # the sums over the ranks


@dataclass(frozen=True)
class StepOutcome:
    """The result of one step, equal on all ranks."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float  # averaged over the replicas if their gradients differ
    own_norm: float  # gradient norm of this rank's replica
    outer_norm: float | None  # norm of the last outer step's weight change; None without one
    tokens: int
    batch_hash: int
    finite: bool
    preempted: bool  # at least one rank must save and stop
    save_is_due: bool  # the clock of a rank requires a save, in addition to the interval in steps
    joins: bool  # a replica waits to join
    preempted_ranks: list[int]  # the preempted ranks
    ready_ranks: set[int]  # ranks of joining replicas that compute from the next step on
    # Seconds lost to failures and joins so far, the largest value of all ranks
    replicas_lost_s: float
    store_ends: bool  # a preempted rank runs on the node that hosts the store
    gives_way: bool  # another start waits for the run directory, and all ranks save and stop
    reports: RankReports


def problems_of_state(state: Mapping[str, Any], step: int) -> list[str]:
    """Return the problems of a `Trainer.state_dict` after ``step``; empty for a valid state.

    Numbers must be finite, in range, and consistent with each other.
    """
    problems = []
    for key in ("scaler", "data_fingerprint"):
        if key not in state:
            problems.append(f"{key} is missing")
    for item in fields(Progress):
        value = state.get(item.name)
        if not is_count(value, LARGEST_COUNT):
            shown = printable(repr(value), 40)
            problems.append(f"{item.name} is {shown}, not a whole number from 0 to 2**52")
    if problems:  # the checks below compare these numbers
        return problems
    fingerprint = state["data_fingerprint"]
    counts = {}
    for name in ("skipped_in_a_row", "skipped", "step", "samples"):
        counts[name] = state[name]
    listed = ", ".join(f"{name} {value}" for name, value in counts.items())
    ascending = list(counts.values()) == sorted(counts.values())
    is_text = isinstance(fingerprint, str) and len(fingerprint) <= 1000
    problems = _unmet(
        (state["step"] == step, f"step is {state['step']}, and the checkpoint is of step {step}"),
        (ascending, f"its counts contradict each other: {listed}"),
        (is_text, "data_fingerprint is not text"),
    )
    problems += _problems_of_scaler(state["scaler"], step)
    # States of earlier versions lack both keys.
    for key in ("best", "stop"):
        problems += problems_of_best(key, state.get(key), step)
    return problems


def _unmet(*checks: tuple[bool, str]) -> list[str]:
    """Return the sentences of the failed checks."""
    return [problem for holds, problem in checks if not holds]


def _problems_of_scaler(scaler: Any, step: int) -> list[str]:
    if not isinstance(scaler, Mapping) or set(scaler) != {"scale", "good_steps"}:
        return ["scaler is not scale and good_steps"]
    scale, good = scaler["scale"], scaler["good_steps"]
    shown = []
    for value in (scale, good):
        shown.append(printable(repr(value), 40))
    in_range = is_number(scale) and 1 <= scale <= LARGEST_SCALE
    return _unmet(
        (in_range, f"scale is {shown[0]}, not a number from 1 to 2**24"),
        (is_count(good, step), f"good_steps is {shown[1]}, not a whole number from 0 to {step}"),
    )


def problems_of_best(name: str, state: Any, step: int) -> list[str]:
    """Return the problems of ``state``: None, or a `BestMetric` as a dict after ``step``."""
    if state is None:
        return []
    names = set()
    for item in fields(BestMetric):
        names.add(item.name)
    if not isinstance(state, Mapping) or set(state) != names:
        return [f"{name} is not {', '.join(sorted(names))}"]
    metric = state["metric"]
    are_counts = is_count(state["step"], step) and is_count(state["since"], step)
    are_numbers = is_number(state["value"]) and is_number(state["min_delta"])
    is_name = isinstance(metric, str) and len(metric) <= _LONGEST_NAME
    return _unmet(
        (are_counts, f"{name} has a step or a count that is not a whole number from 0 to {step}"),
        (are_numbers, f"{name} has a value that is not a finite number"),
        (is_name, f"{name} has no metric"),
        (state["mode"] in ("min", "max"), f"{name} has a mode that is neither min nor max"),
    )


@dataclass
class BestMetric:
    """The best value of a metric so far."""

    metric: str
    mode: str  # "min" or "max": the direction of an improvement
    min_delta: float = 0.0  # smaller improvements do not count
    step: int = 0  # step of the best value; 0: no value yet
    value: float = 0.0
    since: int = 0  # number of measurements since the best value

    def measure(self, step: int, value: float) -> bool:
        """Record a value. True if it is the best value; a value that is not finite is never the
        best."""
        gained = value - self.value if self.mode == "max" else self.value - value
        is_better = self.step == 0 or 0 < gained >= self.min_delta
        if not math.isfinite(value) or not is_better:
            self.since += 1
            return False
        self.step = step
        self.value = value
        self.since = 0
        return True


# Name of a watched metric in the saved state -> its setting
_SETTINGS = {"best": "checkpoint.keep_best", "stop": "train.stop.metric"}


class WatchedMetrics:
    """The metrics of ``checkpoint.keep_best`` and ``train.stop``, if these are set."""

    def __init__(self, config: TrainConfig) -> None:
        keep, stop = config.checkpoint, config.train.stop
        self._patience = stop.patience
        self._watched: dict[str, BestMetric] = {}
        if keep.keep_best is not None:
            self._watched["best"] = BestMetric(keep.keep_best, keep.keep_best_mode)
        if stop.metric is not None:
            self._watched["stop"] = BestMetric(stop.metric, stop.mode, stop.min_delta)
        self._names: set[str] = set()  # names of all measured metrics

    def measure(self, step: int, measured: Mapping[str, float]) -> bool:
        """Record the metrics of ``step`` by key. True if ``keep_best`` has a new best value."""
        self._names.update(measured)
        improved = {}
        for name, watched in self._watched.items():
            if watched.metric in measured:
                improved[name] = watched.measure(step, measured[watched.metric])
        return improved.get("best", False)

    def reason_to_stop(self, step: int) -> str | None:
        """Return the reason if ``train.stop`` ends the run after ``step``; otherwise None."""
        stop = self._watched.get("stop")
        if stop is None or stop.since < self._patience:
            return None
        best = "no value was finite"
        if stop.step:
            best = f"the best is {stop.value:.6g} of step {stop.step}"
        return (
            f"stopped after step {step}: {stop.metric} did not improve in {stop.since} "
            f"measurements (train.stop.patience={self._patience}), {best}"
        )

    def never_measured(self) -> list[str]:
        """Return a sentence for each setting with a metric that was never measured."""
        told = []
        for name, watched in self._watched.items():
            if watched.step + watched.since == 0:
                near = did_you_mean(watched.metric, self._names)
                told.append(f"{_SETTINGS[name]}={watched.metric} was never measured{near}")
        return told

    def state_dict(self) -> dict[str, Any]:
        """Return the values of ``stop``, and of ``best`` if a best value exists."""
        state = {}
        for name, watched in self._watched.items():
            state[name] = asdict(watched)
        if "best" in state and not state["best"]["step"]:
            del state["best"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, which may contain other keys too. A metric with another
        name or other settings than in ``state`` starts without measurements."""
        settings = ("metric", "mode", "min_delta")
        for name, watched in self._watched.items():
            before = state.get(name)
            self._watched[name] = BestMetric(watched.metric, watched.mode, watched.min_delta)
            if before and all(before[key] == getattr(watched, key) for key in settings):
                self._watched[name] = BestMetric(**before)
