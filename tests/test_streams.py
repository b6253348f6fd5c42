"""The stream order of CUDA programs, on simulated devices (`stream_simulator`): steps of FSDP2,
jobs of the train command, and custom loops have no race, no reuse of freed memory, no mismatch and
no wait without effect. Dropped stream operations are found.
"""

import functools
from collections import Counter
from typing import NamedTuple

import pytest
from stream_simulator import custom_loops, fsdp2_steps, processes
from stream_simulator.counts import CUSTOM_LOOP_WAITS, UPPER_BOUNDS, Counts, counts_of
from stream_simulator.results import Result
from stream_simulator.sources import PROJECT
from stream_simulator.stream_operations import Site
from stream_simulator.training_jobs import (
    COUNTED,
    HYBRID,
    LAYOUTS,
    resume,
    run_jobs,
    run_layout,
    sample_text,
    train_in_outer_groups,
)

DEFAULT = ("hybrid", "hybrid_full", "ddp", "zero3", "int8")
# Layouts that reduce gradients over the replicate axis in every step, on a communication stream
REDUCED_BY_BUCKETS = ("hybrid", "hybrid_zero2", "ddp", "bf16 gradients", "int8", "int4")


def marked(names, default):
    """Parameters of a test; those outside of ``default`` are slow."""
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


# FSDP2 as it is, and with faults: the simulator accepts correct programs and can fail.


@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        pytest.param((2,), "mixed"),
        pytest.param((2, 2), "bf16"),
        pytest.param((2,), "fp32", marks=pytest.mark.slow),
        pytest.param((2,), "bf16", marks=pytest.mark.slow),
        pytest.param((2, 2), "fp32", marks=pytest.mark.slow),
        pytest.param((2, 2), "mixed", marks=pytest.mark.slow),
    ],
)
def test_steps_of_fsdp2_have_no_finding(shape, precision):
    size = 4 if len(shape) == 2 else 2
    assert not processes.run(size, fsdp2_steps.train, shape, precision).findings


DEFAULT_FAULTS = ("all-gather does not wait for copy-in", "reduce-scatter input is not kept")


@pytest.mark.parametrize("fault", marked(fsdp2_steps.FAULTS, DEFAULT_FAULTS))
def test_fault_in_fsdp2_is_found(fault):
    if fault.startswith("all-reduce"):
        result = processes.run(4, fsdp2_steps.train, (2, 2), "bf16", fault)
    else:
        result = processes.run(2, fsdp2_steps.train, (2,), "mixed", fault)
    assert set(result.kinds) & {"race", "reuse", "early free"}


# The train command


@functools.cache
def result_of(name: str) -> Result:
    return run_layout(name)


@pytest.mark.parametrize("name", marked(LAYOUTS, DEFAULT))
def test_train_command_has_no_finding(name):
    assert not result_of(name).findings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "hybrid_zero2", "int8", "prefetch"])
def test_groups_outside_of_the_blocks_have_no_finding(name):
    layout = LAYOUTS.get(name) or HYBRID.with_overrides("prefetch.forward=1", "prefetch.backward=2")
    assert not run_jobs(layout, train_in_outer_groups).findings


@pytest.mark.parametrize("name", marked(REDUCED_BY_BUCKETS, DEFAULT))
def test_only_streams_of_the_package_wait_for_reductions(name):
    assert result_of(name).exposed() == 0


@pytest.mark.slow
def test_resumed_run_has_no_finding():
    first, second = (("checkpoint.every=2", f"train.steps={steps}") for steps in (2, 4))
    result = run_jobs(HYBRID, resume, further=(first, second))
    assert result.first.value == (2, 4)
    assert not result.findings


@pytest.mark.slow
def test_samples_of_text_have_no_finding():
    words = ("train.steps=2", "train.validate_every=1", "train.ema=0.9")
    assert not run_jobs(HYBRID, sample_text, further=(words,)).findings


@functools.cache
def custom_loop(uses_all_blocks: bool) -> Result:
    return processes.run(4, custom_loops.train, uses_all_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("uses_all_blocks", [True, False])
def test_custom_loop_has_no_finding(uses_all_blocks):
    assert not custom_loop(uses_all_blocks).findings


# The load of the host


@pytest.mark.parametrize("name", marked(UPPER_BOUNDS, DEFAULT))
def test_kernels_and_host_waits_of_a_step_do_not_grow(name):
    counts = counts_of(result_of(name))
    above = {
        field: f"{value} > {bound}"
        for field, value, bound in zip(Counts._fields, counts, UPPER_BOUNDS[name], strict=True)
        if value > bound
    }
    assert not above


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_kernels_do_not_grow_with_the_number_of_replicas(wire):
    three, four = (result_of(f"{wire}, {number} replicas") for number in ("three", "four"))
    assert four.own_kernels(COUNTED) <= three.own_kernels(COUNTED)


@pytest.mark.slow
def test_host_waits_of_the_package_in_a_custom_loop_do_not_grow():
    waits = [wait for wait in custom_loop(True).waits(COUNTED) if wait.source == PROJECT]
    assert sum(wait.count for wait in waits) <= CUSTOM_LOOP_WAITS, waits


# Every stream operation of the package is dropped in turn. It must be found in one of these
# programs: by a finding, by a further wait of the host, or by a further wait of the default stream
# or of FSDP2 for a collective of the package.

SHORT = ("train.steps=3", "checkpoint.every=2")
PROGRAMS = (
    "zero3",
    "reduce every micro-batch",
    "replica without gradients",
    "hybrid_full int8",
    "diloco",
    "in-memory checkpoints",
)


def run_program(name: str, dropped: tuple[Site, ...] = ()) -> Result:
    if name == "replica without gradients":
        return processes.run(4, custom_loops.train, False, dropped=dropped)
    return run_jobs(LAYOUTS[name], further=(SHORT,), dropped=dropped)


@functools.cache
def unchanged(name: str) -> Result:
    return run_program(name)


def mutants_of(name: str) -> list[Site]:
    """Return each stream operation by its line and caller, and each line with several callers
    together with all of them.
    """
    sites = unchanged(name).sites
    callers = Counter(site.line for site in sites)
    return [*sites, *(line for line, count in callers.items() if count > 1)]


def is_found(result: Result, before: Result) -> bool:
    """True if the result shows a fault that the unchanged program does not have."""
    if result.findings or result.exposed() > before.exposed():
        return True
    waits = result.host_waits() > before.host_waits()
    return waits or result.costly_host_waits() > before.costly_host_waits()


class Mutations(NamedTuple):
    """The mutants of one stream operation of a package. Each is run in the programs that execute
    it until one finds it.
    """

    operation: str
    package: str
    # The mutants that are found, at least
    found: int
    # The mutants that are not found, at most, and the reason
    redundant: int = 0
    reason: str = ""


SYNC, TRAINING = "parallel2d.parallel.sync", "parallel2d.training"
MUTATIONS = (
    Mutations(
        "wait_stream",
        SYNC,
        found=3,
        redundant=7,
        reason="FSDP2's reduce-scatter waits for the current stream, and its last callback "
        "makes the current stream wait for "
        "the reduce-scatter: of the waits of the communication stream only the first for the "
        "reduced gradients is needed",
    ),
    Mutations(
        "stream context",
        SYNC,
        found=3,
        redundant=1,
        reason="a reduction in several exchanges sends the next one inside of a reduce-scatter",
    ),
    Mutations("work.wait", SYNC, found=7),
    Mutations("record_stream", SYNC, found=3),
    Mutations("pin_memory", SYNC, found=1),
    Mutations("pin_memory", TRAINING, found=1),
    Mutations("pin_memory", f"{TRAINING}.data", found=1),
    Mutations(
        "synchronize",
        f"{TRAINING}.checkpoint",
        found=3,
        redundant=1,
        reason="the buffer is freed after the last copy",
    ),
    Mutations("wait_stream", f"{TRAINING}.checkpoint", found=5),
    Mutations(
        "stream context",
        f"{TRAINING}.checkpoint",
        found=0,
        redundant=6,
        reason="copies on the stream of training are correct, and not next to it",
    ),
    Mutations(
        "synchronize",
        TRAINING,
        found=0,
        redundant=1,
        reason="the barrier at the start waits for the device, which has nothing to do yet",
    ),
)


# The first two run more than a hundred steps each. All mutants of the last two are redundant.
LONG = [("wait_stream", SYNC), ("work.wait", SYNC)]
LONG += [("stream context", f"{TRAINING}.checkpoint"), ("synchronize", TRAINING)]


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param(
            each,
            id=f"{each.operation}, {each.package}",
            marks=pytest.mark.soak if each[:2] in LONG else pytest.mark.slow,
        )
        for each in MUTATIONS
    ],
)
def test_dropped_stream_operation_is_found(mutations):
    found: set[Site] = set()
    missed: set[Site] = set()
    for name in PROGRAMS:
        for mutant in mutants_of(name):
            if mutant[:2] != mutations[:2] or mutant in found:
                continue
            is_seen = is_found(run_program(name, (mutant,)), unchanged(name))
            (found if is_seen else missed).add(mutant)
    missed -= found
    assert len(found) >= mutations.found, f"found: {found}; not found: {missed}"
    assert len(missed) <= mutations.redundant, f"not found: {missed}"


@pytest.mark.slow
def test_dropped_wait_of_activation_offload_is_found():
    name = "activation offload"
    found = [each for each in mutants_of(name) if "activation_offload" in each.place]
    # Without a stream context the copies are in the compute stream: slower, and in order.
    waits = [each for each in found if each.operation == "wait_stream"]
    assert len({each.line for each in waits}) == 4
    for each in waits:
        assert is_found(run_program(name, (each,)), unchanged(name)), each


@pytest.mark.slow
def test_every_stream_operation_is_in_the_list_of_mutations():
    issued = {site[:2] for name in PROGRAMS for site in unchanged(name).sites}
    assert issued == {each[:2] for each in MUTATIONS}
    assert sum(each.found for each in MUTATIONS) >= 20
