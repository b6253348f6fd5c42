"""Training steps with a hand-written `fully_shard`, and faults of its stream order.

Each fault drops one wait or one reference of FSDP2 in the simulated process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from stream_simulator.simulator import Simulator


def train(simulator: Simulator, shape: tuple[int, ...], precision: str, fault: str = "") -> None:
    """Train a small model for three steps.

    Args:
        simulator: the device.
        shape: the mesh; two axes are hybrid sharding.
        precision: "fp32", "mixed" (computes in bf16, reduces in fp32), or "bf16".
        fault: a key of `FAULTS`; empty for FSDP2 as it is.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if fault:
        FAULTS[fault]()
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
    model = nn.Sequential(*blocks).to("cuda")
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "mixed": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    }
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policies[precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        simulator.step = step + 1
        loss = model(torch.randn(8, 64, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    simulator.step = 0


def _without(
    method: str, callers: tuple[str, ...], is_meant: Callable[[FrameType], bool] | None = None
) -> None:
    """Drop the calls of ``torch.cuda.Stream.method`` that one of the functions ``callers`` makes."""
    original = getattr(torch.cuda.Stream, method)

    def wait(self: Any, *args: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_name in callers and (is_meant is None or is_meant(frame)):
            return
        original(self, *args)

    setattr(torch.cuda.Stream, method, wait)


def _all_reduce_does_not_wait_for_reduce_scatter() -> None:
    # With two axes `foreach_reduce` waits for a stream twice: for the copies, and then for the
    # reduce-scatter.
    lines: list[int] = []

    def is_second(frame: FrameType) -> bool:
        lines.append(frame.f_lineno)
        return frame.f_lineno != min(lines)

    _without("wait_stream", ("foreach_reduce",), is_second)


def _free_reduce_scatter_input_early() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    state: Any = module.ReduceScatterState
    module.ReduceScatterState = lambda _, event: state(None, event)  # type: ignore[assignment, misc]


def _free_all_reduce_input_early() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    module.AllReduceState = lambda _, __: None  # type: ignore[assignment, misc]


FAULTS: dict[str, Callable[[], None]] = {
    "copy-out does not wait for the all-gather": lambda: _without(
        "wait_event", ("foreach_all_gather_copy_out",)
    ),
    "all-gather does not wait for copy-in": lambda: _without(
        "wait_stream", ("foreach_all_gather",)
    ),
    "reduce-scatter does not wait for copy-in": lambda: _without(
        "wait_stream", ("foreach_reduce",)
    ),
    "optimizer does not wait for the gradients": lambda: _without(
        "wait_event", ("finalize_backward", "_root_post_backward_final_callback")
    ),
    "all-gather does not wait for the optimizer": lambda: _without(
        "wait_stream", ("_root_pre_forward",)
    ),
    "all-gather output is freed before copy-out": lambda: _without(
        "wait_event", ("_wait_all_gather_streams_on_event",)
    ),
    "all-reduce does not wait for the reduce-scatter": _all_reduce_does_not_wait_for_reduce_scatter,
    "reduce-scatter input is not kept": _free_reduce_scatter_input_early,
    "all-reduce input is not kept": _free_all_reduce_input_early,
}
