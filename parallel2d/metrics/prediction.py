"""What each mesh axis must move per step, known before the first one, to stand beside what is
measured.

A sharded model, its mesh and the accumulation flow in, for the tensor axis a twin of the model on
meta; bytes per axis flow out. `Deviation` compares both and speaks once per axis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from parallel2d.mesh import mesh_shape
from parallel2d.metrics.communication import KEYS, CommunicationMeter, sent_bytes
from parallel2d.parallelize.twin import on_fake_tensors
from parallel2d.sync import GradientSync
from parallel2d.sync.engine import engines_in

log = logging.getLogger(__name__)

_TENSOR_BYTES = KEYS.index("comm/tensor/bytes")
TOLERANCE = 0.05  # of the prediction; beyond it the axis is named


def predict_communication(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    accumulation: int,
    during_accumulation: str = "reduce_scatter_only",
) -> dict[str, float]:
    """Bytes that a rank sends per step over the ``replicate`` and ``shard`` axes, as
    ``{"comm/AXIS/bytes": bytes}``.

    ``model``: after `parallelize`. Per group of parameters (Rajbhandari et al. 2020, ZeRO; Zhao et
    al. 2023, FSDP): an all-gather per micro-batch for forward, another one for backward where
    parameters are freed in between; a reduce-scatter of the gradients per micro-batch, or once with
    ``none``; an all-reduce of the sharded gradients once, or per micro-batch with ``full``.
    Parameters count as they travel: padded to the shard axis, in the dtype they are gathered or
    reduced in. Gradients in fewer than 32 bits are exchanged all to all instead, over the shard
    axis and, with an all-gather of the means, over the replicas. The ``tensor`` axis moves
    activations, which depend on the model's plan: `count_tensor_axis`.
    """
    shape = mesh_shape(mesh)
    device = mesh.device_type
    replicate = shard = 0.0
    exchanges = any(isinstance(engine, GradientSync) for engine in engines_in(model))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            reshard = group.post_forward_mesh_info is not None
            gathered = reduced = reduced_local = 0
            collective = "reduce_scatter"
            policy = group.mp_policy
            for parameter in group.fsdp_params:
                local = parameter._sharded_param_data.numel()
                stored = parameter.sharded_param.dtype
                gathered += local * shape.shard * (policy.param_dtype or stored).itemsize
                if parameter.sharded_param.requires_grad:
                    travels = (policy.reduce_dtype or policy.param_dtype or stored).itemsize
                    reduced += local * shape.shard * travels
                    if exchanges and travels < 4:
                        collective = "all_to_all"
                    reduced_local += local * travels
            gathers = accumulation * (2 if reshard else 1)
            shard += gathers * sent_bytes("all_gather", gathered, shape.shard, device)
            scatters = 1 if during_accumulation == "none" else accumulation
            shard += scatters * sent_bytes(collective, reduced, shape.shard, device)
            reductions = accumulation if during_accumulation == "full" else 1
            replicate += reductions * sent_bytes(
                "all_reduce", reduced_local, shape.replicate, device
            )
    predicted = {"comm/replicate/bytes": replicate, "comm/shard/bytes": shard}
    if shape.tensor == 1:
        predicted["comm/tensor/bytes"] = 0.0
    return predicted


def count_tensor_axis(
    twin: nn.Module,
    mesh: DeviceMesh,
    loss: Callable[[Any, Tensor], Tensor],
    example: Callable[[str], tuple[Tensor, Tensor]],
    *,
    accumulation: int,
    during_accumulation: str = "reduce_scatter_only",
    reduce_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Bytes that a rank sends per step over the ``tensor`` axis, as
    ``{"comm/tensor/bytes": bytes}``.

    ``twin``: from `parallel2d.parallelize.twin.tensor_twin`; ``example(device)``: inputs and
    targets of one micro-batch. It runs forward and backward on tensors without storage, on every
    rank alike; its collectives are counted instead of run, by the same meter that measures. Then
    come those that sharding adds before it reduces: the gradients of weights that stayed whole
    while their inputs were split are summed over the axis, in every backward, or once with
    ``none``, in ``reduce_dtype`` (default: their own). Empty, and the reason logged, for a model
    that such tensors cannot run.
    """
    once = during_accumulation == "none" and accumulation > 1
    devices = range(torch.cuda.device_count())
    problem: Exception | None = None
    # Meta tensors are twice as fast, and some models only run on tensors that say which device they
    # would be on.
    for device_type in ("meta", mesh.device_type):
        meter = CommunicationMeter(mesh, dry=True).install()
        try:
            with (
                nullcontext() if device_type == "meta" else on_fake_tensors(twin, device_type),
                torch.random.fork_rng(devices),
            ):
                inputs, targets = example(device_type)
                meter.start()
                loss(twin(inputs), targets).backward()
                passes = meter.read()[_TENSOR_BYTES]
                meter.start()
                _make_gradients_whole(twin, reduce_dtype)
                gradients = meter.read()[_TENSOR_BYTES]
            return {
                KEYS[_TENSOR_BYTES]: accumulation * passes
                + (1 if once else accumulation) * gradients
            }
        # a model may look at values, which neither has: then nothing is predicted, and said so
        except Exception as error:
            problem = error
        finally:
            meter.remove()
    log.info(
        "bytes over the tensor axis are not predicted: %s: %s",
        type(problem).__name__,
        str(problem).split("\n")[0],
    )
    return {}


def _make_gradients_whole(model: nn.Module, dtype: torch.dtype | None) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(gradient, DTensor)
            and gradient.placements != parameter.placements
        ):
            wide: Any = gradient.to(torch.promote_types(gradient.dtype, dtype or gradient.dtype))
            wide.redistribute(placements=parameter.placements)


class Deviation:
    """Says once per axis that it moves more or less than predicted."""

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._predicted = dict(predicted)

    def check(self, row: Mapping[str, float]) -> list[str]:
        """The warnings for one row of measurements; each axis is named once in a run. They are
        logged as well."""
        found = []
        for key, expected in list(self._predicted.items()):
            measured = row.get(key)
            if measured is None or abs(measured - expected) <= TOLERANCE * max(expected, 1.0):
                continue
            del self._predicted[key]
            axis = key.split("/")[1]
            ratio = f"{measured / expected:.2f} times the" if expected else "not the"
            found.append(
                f"the {axis} axis moves {_bytes(measured)} per step and rank, {ratio} predicted "
                f"{_bytes(expected)}: "
                "look for collectives that the layout does not need"
            )
            log.warning("%s", found[-1])
        return found


def _bytes(value: float) -> str:
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.0f} B"
