"""Checks of gradients that run in the ranks of the preflight check: parity checks of a small model
in every communication format, also with delayed gradients."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import CompileConfig, LlamaModel, ParallelConfig, SyncConfig
from parallel2d.base.device import current_device, name_of, synchronize
from parallel2d.base.exchange import all_gather
from parallel2d.base.runtime import Runtime
from parallel2d.instruments.parity_check.custom_loop import certify
from parallel2d.instruments.parity_check.parity_report import ParityReport
from parallel2d.instruments.preflight.self_check import GRADIENTS, KILLED, chosen_checks, write_row
from parallel2d.parallel.fsdp_internals.fsdp_group import FSDPGroup
from parallel2d.parallel.loss import cross_entropy_sum
from parallel2d.parallel.mesh import build_mesh
from parallel2d.parallel.mesh_sizes import MeshSpec
from parallel2d.parallel.parallelize.reduce_scatter import OrderedReduceScatter
from parallel2d.training.hooks import Hook, RunView
from parallel2d.training.model_families import build_model


class KillOnce(Hook):
    """Hook that kills the last rank after a step, once in a run."""

    def step(self, run: RunView, step: int, metrics: Mapping[str, float]) -> None:
        mark = Path(run.run_dir, "killed")
        if run.rank == int(run.mesh.mesh.max()) and step == KILLED and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def check_gradients(runtime: Runtime, given: argparse.Namespace) -> int:
    """Run the checks of ``given.only`` that need ranks, and return the exit code. Rank 0 prints the
    rows of the table. Collective."""
    device, ranks, shown = runtime.device, dist.get_world_size(), runtime.is_first
    if shown:
        only = ": this checks the CPU path only, with gloo" if device.type == "cpu" else ""
        print(f"{ranks} x {name_of(device)}, torch {torch.__version__}{only}", flush=True)
    has_launcher = given.verdict is not None and runtime.identity.nodes == 1
    passed = True
    for name in chosen_checks(given.only):
        if name in GRADIENTS:
            passed &= write_row(name, functools.partial(_check, runtime, name), shown)
        elif not has_launcher:
            write_row(name, lambda: "skipped: start the command by itself, on one node", shown)
    return int(not all(all_gather(passed)))


def _check(runtime: Runtime, name: str) -> str:
    ranks = dist.get_world_size()
    if ranks % 2:
        return f"skipped: two replicas need an even number of ranks, and here is {ranks}"
    sizes = [(2, ranks // 2)]
    if name == "streams":
        sizes.append((1, ranks))
    error = bound = 0.0
    for replicate, shard in sizes:
        spec = MeshSpec(replicate=replicate, shard=shard)
        mesh = build_mesh(spec, "hybrid", topology=runtime.topology, allow_cross_node=True)
        found = compare(mesh, _config(name, mesh.device_type), late=name == "streams")
        if not found.passed:
            return f"FAILED: {replicate} x {shard}, {found.discrepancies[0].line()}"
        bound = found.bounds["gradient"]
        error = max(error, *(row.gradient for row in found.parameters.values()))
    return f"passed: largest error of a gradient {error:.1e}, bound {bound:.0e}"


def compare(mesh: DeviceMesh, config: ParallelConfig, late: bool) -> ParityReport:
    """Compare steps of a small model with a reference run in one process. ``late``: True to use
    `late_gradients`. Collective."""
    device = current_device(mesh.device_type)
    torch.manual_seed(0)
    model = build_model(LlamaModel(dim=64, n_layers=2, hidden_dim=128)).module
    tokens = torch.randint(0, 256, (4 * mesh.size(), 33)).to(device)
    with late_gradients(device) if late else contextlib.nullcontext():
        return certify(model, mesh, config, _loss, tokens)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])


def _config(name: str, device_type: str) -> ParallelConfig:
    key, _, value = name.partition("=")
    precision = "bf16" if name == "bf16" else "fp32"
    config = ParallelConfig("hybrid", precision=precision, allow_cross_node=True)
    if key == "sync.wire":
        config.sync = SyncConfig(wire=value)
    elif key == "compile":
        # Inductor needs a C++ compiler for the CPU.
        backend = "aot_eager" if device_type == "cpu" else "inductor"
        config.compile = CompileConfig(value, backend)
    return config


@contextlib.contextmanager
def late_gradients(device: torch.device, products: int = 8) -> Iterator[None]:
    """Delay the write of each group's gradients on the stream that writes them: the reduce-scatter
    stream, or the compute stream if the shard axis has one rank.

    Before each write, the stream fills the gradients with NaN and computes ``products`` products of
    large matrices. The host issues these in microseconds, and an accelerator computes them in about
    20 ms. A stream that does not wait for the writing stream reads NaN.
    """
    size = 64 if device.type == "cpu" else 4096
    factor = torch.zeros(size, size, device=device)

    def delay() -> None:
        for _ in range(products):
            torch.mm(factor, factor)

    scatter, prepare = OrderedReduceScatter.__call__, FSDPGroup.prepare_gradients

    def late_scatter(self: OrderedReduceScatter, **arguments: Any) -> Any:
        arguments["output_tensor"].fill_(torch.nan)
        delay()
        return scatter(self, **arguments)

    @torch.no_grad()
    def late_gradient(self: FSDPGroup, fill: bool) -> None:
        prepare(self, fill)
        for parameter in self.trained if self.is_alone else ():
            gradient = parameter.take_unsharded_gradient()
            if gradient is not None:
                late = torch.full_like(gradient, torch.nan)
                delay()
                parameter.set_unsharded_gradient(late.copy_(gradient))

    synchronize(device.type)
    OrderedReduceScatter.__call__ = late_scatter  # type: ignore[method-assign, assignment]
    FSDPGroup.prepare_gradients = late_gradient  # type: ignore[method-assign]
    try:
        yield
        synchronize(device.type)
    finally:
        OrderedReduceScatter.__call__ = scatter  # type: ignore[method-assign]
        FSDPGroup.prepare_gradients = prepare  # type: ignore[method-assign]
