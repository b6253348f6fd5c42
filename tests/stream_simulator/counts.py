"""The counts of one training step that measure the load of the host, and their upper bounds."""

from __future__ import annotations

from typing import NamedTuple

from stream_simulator.results import Result
from stream_simulator.training_jobs import COUNTED


class Counts(NamedTuple):
    """The counts of one step of rank 0."""

    # Kernels and collectives that neither the model, autograd, FSDP2 nor the optimizer issued
    own_kernels: int
    # Waits of the host for the device, reads of finished events included
    host_waits: int
    # Waits at places where operators were outstanding
    costly_waits: int
    # Such waits between the last forward and the optimizer: the device is idle until the host has
    # issued the update
    waits_before_update: int


def counts_of(result: Result) -> Counts:
    return Counts(
        result.own_kernels(COUNTED),
        result.host_waits(COUNTED),
        result.costly_host_waits(COUNTED),
        len(result.waits_before_update(COUNTED)),
    )


# The measured counts are upper bounds: lower them with every improvement, and never raise them.
UPPER_BOUNDS: dict[str, Counts] = {
    "hybrid": Counts(46, 1, 1, 1),
    "hybrid_full": Counts(60, 1, 1, 1),
    "ddp": Counts(41, 1, 1, 1),
    "zero3": Counts(43, 1, 1, 1),
    "int8": Counts(58, 1, 1, 1),
    "int4": Counts(81, 1, 1, 1),
    "int8, three replicas": Counts(71, 1, 1, 1),
    "int4, three replicas": Counts(145, 1, 1, 1),
    "tensor": Counts(63, 1, 1, 1),
    "context": Counts(181, 1, 1, 1),
    "bucketing=layer": Counts(165, 1, 1, 1),
    "hybrid_zero2": Counts(44, 1, 1, 1),
    "zero2": Counts(41, 1, 1, 1),
    "diloco with delay": Counts(77, 1, 1, 1),
    "muon": Counts(134, 1, 1, 1),
    "EMA and validation": Counts(70, 1, 1, 1),
    "in-memory checkpoints": Counts(130, 1, 1, 1),
    "bf16 state": Counts(1254, 1, 1, 1),
    "int8 state": Counts(2246, 1, 1, 1),
}
COUNTED_LAYOUTS = tuple(UPPER_BOUNDS)
# Waits that the package causes in a step of a custom loop
CUSTOM_LOOP_WAITS = 0
