"""What runs show, in sentences: `describe_runs`. Every other function is one kind of sentence; it
returns none where the rows do not show it.

The first step of a process counts in no mean: rows give its seconds apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from parallel2d import files
from parallel2d.cost.collectives import sent_bytes
from parallel2d.errors import counted
from parallel2d.metrics import keys
from parallel2d.report.overview import measured_and_predicted, mesh_text, quantity_of
from parallel2d.report.runs import (
    NOT_FINITE,
    Points,
    Run,
    all_parts,
    first_names,
    host_names,
    is_number,
)

EQUAL = 1e-4  # of the loss; up to this, losses of two runs are called equal
WAITS = 0.10  # of a step, from which a wait for an axis is named
DATA_WAITS = 0.05  # of a step
DEVIATES = 0.05  # of a prediction of bytes, as `metrics/deviation.py` has it
TIME_DEVIATES = 0.25  # of any other prediction, such as the step time, which is a model
FASTER = 1.05  # times the tokens per second of the slowest
LOW_GOODPUT = 0.9
SKEWED = 1.2  # times the mean busy time of the ranks
ROSE = 1.1  # times the lowest mean of a tenth of the losses
WORSE = 1.01  # times the best validation loss
_FEWEST_ROWS = 5  # of which a rank or a speed is judged
_TENTHS = 10
_WORTH_A_MOVE = 0.75  # of the bytes that leave a host, below which another layout is named

_ITEM_BYTES = {"fp64": 8, "fp32": 4}
_CAUSES = {
    "first_step": "first steps of processes (warm-up and compilation)",
    "data": "waits for data",
    "checkpoint": "saving",
    "validation": "validation",
    "restart": "restarts",
    "repeated": "steps that were done again",
}
# Sections that decide the losses of exact training, whatever the layout
_DECIDE_LOSSES = ("model", "data", "optimizer", "scheduler", "precision", "sync")
_DECIDE_LOSSES_OF_TRAIN = ("seed", "global_batch_size", "seq_len", "steps", "epochs")


def describe_runs(runs: Sequence[Run]) -> list[str]:
    """Sentences on all runs, then on each run, then on each layout of a run."""
    parts = all_parts(runs)
    found = [*equal_losses(runs), *different_losses(runs), *fastest(parts)]
    for run in runs:
        for of_run in _OF_A_RUN:
            found += of_run(run)
    for part in parts:
        for of_part in _OF_A_LAYOUT:
            found += of_part(part)
    return [*found, *missing_certificates(parts)]


def equal_losses(runs: Sequence[Run]) -> list[str]:
    """Which runs have equal losses, and within what, at all steps that they share."""
    found: list[str] = []
    for group in _groups_of_equal(runs):
        if len(group) < 2:
            continue
        widest, steps = _widest([_losses(run) for run in group])
        # Each agrees with the first run, but there may be no step that all have.
        if not steps:
            continue
        within = f"within {_rounded_up(widest)}" if widest else "to the last digit"
        names = first_names([run.name for run in group])
        found.append(
            f"Losses of {len(group)} runs ({names}) are equal {within}, at all "
            f"{steps:,} steps that they share."
        )
    return found


def different_losses(runs: Sequence[Run]) -> list[str]:
    """Runs whose losses are not equal although all settings that decide them are."""
    groups = _groups_of_equal(runs)
    found: list[str] = []
    for one, other in pairwise(group[0] for group in groups):
        ours, theirs = _losses(one), _losses(other)
        shared = sorted(ours.keys() & theirs.keys())
        if not shared or not _should_be_equal(one, other):
            continue
        first = next(step for step in shared if not _is_close(ours[step], theirs[step]))
        widest = max(abs(ours[step] - theirs[step]) for step in shared)
        found.append(
            f"Losses of {one.name} and {other.name} differ by up to {widest:.2g}, from step "
            f"{first} on, although model, data, optimizer, precision, sync and seed are the same."
        )
    return found


def _should_be_equal(one: Run, other: Run) -> bool:
    """Whether every start of both had the same settings, as far as these decide losses."""
    settings = [_deciding(segment.config) for run in (one, other) for segment in run.segments]
    if not one.segments or not other.segments:
        return False
    return bool(settings[0]) and settings.count(settings[0]) == len(settings)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    train = config.get("train")
    if not isinstance(train, Mapping):
        return {}
    found = {name: config.get(name) for name in _DECIDE_LOSSES}
    return found | {f"train.{name}": train.get(name) for name in _DECIDE_LOSSES_OF_TRAIN}


def _losses(run: Run) -> dict[float, float]:
    return dict(run.series(keys.LOSS))


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= EQUAL * max(abs(one), abs(other))


def _groups_of_equal(runs: Sequence[Run]) -> list[list[Run]]:
    """Each run is in the first group with whose first run it agrees at every shared step."""
    groups: list[list[Run]] = []
    for run in runs:
        ours = _losses(run)
        for group in groups:
            theirs = _losses(group[0])
            shared = ours.keys() & theirs.keys()
            # One shared step, such as the first, shows little.
            if len(shared) > 1 and all(_is_close(ours[step], theirs[step]) for step in shared):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _widest(losses: Sequence[Mapping[float, float]]) -> tuple[float, int]:
    """The largest difference at a step that all have, and how many steps that are."""
    shared = set(losses[0]).intersection(*losses[1:])
    widest = 0.0
    for step in shared:
        values = [each[step] for each in losses]
        widest = max(widest, max(values) - min(values))
    return widest, len(shared)


def fastest(parts: Sequence[Run]) -> list[str]:
    """The layout with most tokens per second beside the one with fewest, where both do the same
    work."""
    speeds: list[tuple[float, Run]] = []
    for part in parts:
        speed = part.median(keys.TOKENS_PER_S)
        if speed and len(part.series(keys.TOKENS_PER_S)) >= _FEWEST_ROWS:
            speeds.append((speed, part))
    if len({_work(part) for _, part in speeds}) != 1:
        return []
    speeds.sort(key=lambda each: each[0])
    (low, slow), (high, fast) = speeds[0], speeds[-1]
    if high < FASTER * low:
        return []
    return [
        f"{_who(fast)} trains {high / low:.2f} times as many tokens per second as {_who(slow)} "
        "(medians)."
    ]


def _work(part: Run) -> tuple[object, ...]:
    names = ("parameters", "global_batch_size", "seq_len", "flops_per_sequence", "precision")
    return (*(str(part.layout.get(name)) for name in names), len(host_names(part.layout)))


def divergence(run: Run) -> list[str]:
    """Losses that were not finite, and a training loss that rose."""
    found: list[str] = []
    broken = [step for step, _ in run.series(NOT_FINITE)]
    if broken:
        more = f", and in {len(broken) - 1:,} more rows" if len(broken) > 1 else ""
        found.append(f"The loss of {run.name} was not finite at step {broken[0]}{more}.")
    means = _means_of_tenths(run.series(keys.LOSS))
    if means:
        lowest = min(means, key=lambda each: each[2])
        first, last, end = means[-1]
        if lowest[2] > 0 and end > ROSE * lowest[2]:
            found.append(
                f"The training loss of {run.name} rose: its mean was {lowest[2]:.4g} over steps "
                f"{lowest[0]} to {lowest[1]}, and {end:.4g} over steps {first} to {last}."
            )
    return found


def _means_of_tenths(points: Points) -> list[tuple[float, float, float]]:
    """(first step, last step, mean) of each tenth; none of fewer than 20 points."""
    if len(points) < 2 * _TENTHS:
        return []
    found = []
    for number in range(_TENTHS):
        begin, end = (len(points) * each // _TENTHS for each in (number, number + 1))
        tenth = points[begin:end]
        found.append((tenth[0][0], tenth[-1][0], math.fsum(v for _, v in tenth) / len(tenth)))
    return found


def worse_validation(run: Run) -> list[str]:
    """A validation loss that was lower before the end."""
    losses = run.series(keys.VALIDATION_LOSS)
    if len(losses) < 3:
        return []
    step, lowest = min(losses, key=lambda point: point[1])
    _, end = losses[-1]
    if lowest <= 0 or end <= WORSE * lowest:
        return []
    return [
        f"The validation loss of {run.name} was lowest at step {step}, {lowest:.4g}; at the end it "
        f"is {end:.4g}."
    ]


def skipped_steps(run: Run) -> list[str]:
    """Steps whose update was left out."""
    skipped = run.last(keys.SKIPPED_STEPS)
    if not skipped:
        return []
    steps = run.rows[-1][keys.STEP]
    return [
        f"{run.name} skipped the update of {skipped:g} of {steps:,} steps: something in "
        "them was not finite."
    ]


def cost_of_restarts(run: Run) -> list[str]:
    """Seconds between a failure and the next step, and of steps that were done again."""
    restarts = sum(segment.restarted for segment in run.segments)
    paused = run.seconds(keys.lost_key("restart"))
    repeated = run.seconds(keys.lost_key("repeated"))
    wall = run.seconds(keys.WALL_S)
    if not all((restarts, paused, wall)):
        return []
    times = counted(restarts, "restart")
    again = ""
    if repeated:
        again = f", and steps that were done again {_seconds(repeated)}"
    share = (paused + repeated) / wall
    return [f"{times} of {run.name} took {_seconds(paused)}{again}: {share:.1%} of its wall time."]


def low_goodput(run: Run) -> list[str]:
    """What took most of the wall time that trained nothing."""
    goodput, wall = run.last(keys.GOODPUT), run.last(keys.WALL_S)
    if goodput is None or not wall or goodput >= LOW_GOODPUT:
        return []
    lost = {cause: run.seconds(keys.lost_key(cause)) for cause in keys.LOSSES}
    cause, seconds = max(lost.items(), key=lambda each: each[1])
    if not seconds:
        return []
    return [
        f"Goodput of {run.name} is {goodput:.1%}. The largest loss: {_CAUSES[cause]}, "
        f"{_seconds(seconds)} of {_seconds(wall)}."
    ]


def exposed_waits(part: Run) -> list[str]:
    """Axes that a step waits for."""
    waits: list[str] = []
    for axis in keys.AXES:
        share = part.share(keys.communication_key(axis, "exposed_seconds"))
        if share is not None and share >= WAITS:
            waits.append(f"{share:.0%} of a step for the {axis} axis")
    return [f"{_who(part)} waits {' and '.join(waits)}."] if waits else []


def fewer_bytes_with_hybrid(part: Run) -> list[str]:
    """Bytes that leave a host with the flat group of ``part``, and with hybrid on the same hosts.

    A ring passes each host once, so a host sends over its link what one rank of the group sends,
    for each group ([Note: collectives in time] in `parallel2d.cost`). Of hybrid these are, per
    step, one all-reduce of each rank's shard of the gradients.
    """
    axis = {"ddp": "replicate", "zero2": "shard", "zero3": "shard"}.get(_strategy(part))
    per_host, hosts = _equal_hosts(part)
    item_bytes = _exact_item_bytes(part)
    parameters = part.layout.get("parameters")
    if axis is None or min(hosts, per_host) < 2 or not item_bytes or not is_number(parameters):
        return []
    key = keys.communication_key(axis, "bytes")
    flat = part.predicted(key)
    if not flat or part.section("mesh").get(axis) != hosts * per_host:
        return []
    # Each of the groups of the replicate axis has one rank on a host, and a shard of its own.
    whole = parameters * item_bytes
    hybrid = per_host * sent_bytes("all_reduce", whole / per_host, hosts, "cuda")
    if hybrid > _WORTH_A_MOVE * flat:
        return []
    held = f"{hosts} times the parameters" if axis == "shard" else f"1/{per_host} of them"
    return [
        f"By arithmetic, hybrid (replicate {hosts} x shard {per_host}) would send "
        f"{hybrid / flat:.0%} of the bytes that leave a host with {_who(part)}: "
        f"{hybrid / 1e6:.4g} MB per step for {flat / 1e6:.4g} MB. Each rank would hold {held}."
    ]


def _equal_hosts(part: Run) -> tuple[int, int]:
    """(ranks of each host, hosts), of hosts with as many ranks each whose ranks follow one
    another; (0, 0) otherwise."""
    hosts = host_names(part.layout)
    counts = Counter(hosts)
    changes = sum(one != other for one, other in pairwise(hosts))
    # A ring through ranks in another order would pass a host more than once.
    if len(set(counts.values())) != 1 or changes != len(counts) - 1:
        return 0, 0
    return next(iter(counts.values())), len(counts)


def _exact_item_bytes(part: Run) -> int:
    """Of one gradient as it is reduced; 0 where that is not known, or where anything else than
    the exact gradients of all parameters crosses the replicate axis once per step."""
    sync = part.setting("sync")
    if not isinstance(sync, Mapping) or part.setting("model", "adapter"):
        return 0
    exact = sync.get("name") == "every_step" and sync.get("wire") in ("auto", "fp32")
    if not exact or sync.get("during_accumulation") == "full":
        return 0
    return _ITEM_BYTES.get(str(part.setting("precision", "reduce")), 0)


def data_waits(part: Run) -> list[str]:
    """A step that waits for its data."""
    share = part.share(keys.time_key("data_s"))
    if share is None or share < DATA_WAITS:
        return []
    return [f"{_who(part)} waits {share:.0%} of a step for data."]


def slow_rank(part: Run) -> list[str]:
    """A rank that was the slowest in most rows, by more than the others differ."""
    rows = [row for row in part.rows if keys.SLOWEST_RANK in row and keys.SKEW in row]
    if len(rows) < _FEWEST_ROWS:
        return []
    (rank, times), *_ = Counter(int(row[keys.SLOWEST_RANK]) for row in rows).most_common(1)
    skews = sorted(row[keys.SKEW] for row in rows if row[keys.SLOWEST_RANK] == rank)
    median = skews[len(skews) // 2]
    if times < 0.75 * len(rows) or median < SKEWED:
        return []
    hosts = host_names(part.layout)
    where = ""
    if 0 <= rank < len(hosts):
        where = f" on {files.printable(hosts[rank].split('/')[0], 40)}"
    return [
        f"Rank {rank}{where} was the slowest of {_who(part)} in {times:,} of {len(rows):,} rows, "
        f"busy {median:.2f} times as long as the mean of the ranks; all others wait for it."
    ]


def deviations(part: Run) -> list[str]:
    """Quantities that are not what was predicted."""
    found: list[str] = []
    of_replicas = keys.communication_key("replicate", "bytes")
    for key, measured, predicted in measured_and_predicted(part):
        if measured is None or predicted is None:
            continue
        # Of diloco most steps send nothing between replicas, so their mean tells little.
        if key == of_replicas and part.setting("sync", "name") == "diloco":
            continue
        allowed = TIME_DEVIATES * abs(predicted)
        if key.endswith("/bytes"):
            allowed = DEVIATES * max(abs(predicted), 1.0)
        if abs(measured - predicted) <= allowed:
            continue
        quantity, scale = quantity_of(key)
        times = f", {measured / predicted:.2f} times as much" if predicted else ""
        found.append(
            f"{_who(part)}: {quantity} per step, predicted {predicted * scale:.4g}, measured "
            f"{measured * scale:.4g}{times}."
        )
    return found


def missing_certificates(parts: Sequence[Run]) -> list[str]:
    """Layouts that nothing compared with one process. Only of runs that record it."""
    without: list[str] = []
    for part in parts:
        if part.segments and not any(segment.certified for segment in part.segments):
            without.append(f"{_strategy(part)} {mesh_text(part)} ({part.name})")
    if not without:
        return []
    return [f"No certificate compares these layouts with one process: {first_names(without)}."]


def _strategy(part: Run) -> str:
    return files.printable(part.layout.get("strategy", "-"), 40)


def _who(part: Run) -> str:
    strategy = _strategy(part)
    if strategy == "-" or strategy in part.name:
        return part.name
    return f"{part.name} ({strategy})"


def _seconds(value: float) -> str:
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * seconds:
            return f"{value / seconds:.1f} {unit}"
    return f"{value:.1f} s" if value >= 0.1 else f"{value:.2g} s"


def _rounded_up(value: float) -> str:
    """With one digit, and not below ``value``: ``2e-9``."""
    power = math.floor(math.log10(value))
    # A difference of losses has few digits: 2.0000001e-9 is still 2e-9.
    digit = math.ceil(value / 10.0**power * (1 - 1e-6))
    if digit == 10:
        digit, power = 1, power + 1
    return f"{digit}e{power}" if power < -3 else f"{digit * 10.0**power:g}"


_OF_A_RUN: tuple[Callable[[Run], list[str]], ...] = (
    divergence,
    worse_validation,
    skipped_steps,
    cost_of_restarts,
    low_goodput,
)
_OF_A_LAYOUT: tuple[Callable[[Run], list[str]], ...] = (
    exposed_waits,
    fewer_bytes_with_hybrid,
    data_waits,
    slow_rank,
    deviations,
)
