"""Predicted peaks of many layouts of one job: `PeakPredictions`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.config import TrainConfig
from parallel2d.cost.activation_profile import (
    ActivationProfile,
    between_sizes,
    profile_activations,
)
from parallel2d.cost.fake_group import fake_process_group
from parallel2d.cost.predicted_peak import PredictedMemory, predict_peak
from parallel2d.cost.state_memory import StateBytes
from parallel2d.data.batch import SampleShape
from parallel2d.mesh import MeshShape, MeshSpec, build_mesh
from parallel2d.model_families import ModelParts, plan_tensor_axis
from parallel2d.parallelize.precision import input_dtype
from parallel2d.planner.step_loss import step_loss
from parallel2d.topology import Topology


@contextlib.contextmanager
def tensor_mesh(tensor: int) -> Iterator[DeviceMesh | None]:
    """A mesh that has a tensor axis alone, on a process group without processes; None without that
    axis. What a model computes on it does not depend on other axes, and large ones take long."""
    if tensor == 1:
        yield None
        return
    with fake_process_group(tensor):
        yield build_mesh(
            MeshSpec(1, 1, tensor),
            "ddp",
            topology=Topology.single_host(tensor),
            device_type="cpu",
        )


class PeakPredictions:
    """Of layouts of one model, batch and precision. Activations are measured once for each size of
    the tensor axis, recomputation and bucketing.

    ``smallest``, ``largest``: micro-batches that are asked about; those between are taken to need
    what lies between. 0: each is measured.
    """

    def __init__(self, parts: ModelParts, sample: SampleShape) -> None:
        self._parts = parts
        self._sample = sample
        self.smallest = self.largest = 0
        self._profiles: dict[tuple[int, str, str, int], ActivationProfile | str] = {}

    def of(
        self,
        config: TrainConfig,
        shape: MeshShape,
        micro_batch_size: int,
        accumulation: int,
        states: StateBytes,
    ) -> PredictedMemory | str:
        """The peak, or in words why it is not known. Raises `ConfigError` for what `parallelize`
        refuses."""
        reason = _unknown_reason(config)
        if reason:
            return reason
        profile = self._profile(config, shape, micro_batch_size)
        if isinstance(profile, str):
            return profile
        return predict_peak(profile, shape, config.parallel(), states, accumulation)

    def _profile(
        self, config: TrainConfig, shape: MeshShape, samples: int
    ) -> ActivationProfile | str:
        # A chunk has the rows of the micro-batch, or fewer: not in proportion to it.
        chunked = config.train.loss_chunk is not None
        if chunked or not self.smallest < samples < self.largest:
            return self._measured(config, shape, samples)
        small = self._measured(config, shape, self.smallest)
        large = self._measured(config, shape, self.largest)
        if isinstance(small, str) or isinstance(large, str):
            return self._measured(config, shape, samples)
        share = (samples - self.smallest) / (self.largest - self.smallest)
        between = between_sizes(small, large, share)
        return self._measured(config, shape, samples) if between is None else between

    def _measured(
        self, config: TrainConfig, shape: MeshShape, samples: int
    ) -> ActivationProfile | str:
        key = (shape.tensor, f"{config.activation_checkpointing}", f"{config.bucketing}", samples)
        if key not in self._profiles:
            self._profiles[key] = self._measure(config, shape, samples)
        return self._profiles[key]

    def _measure(
        self, config: TrainConfig, shape: MeshShape, samples: int
    ) -> ActivationProfile | str:
        floating = input_dtype(config.precision) or torch.float32

        def plan_of(part: nn.Module) -> Mapping[str, object] | None:
            parts = dataclasses.replace(self._parts, module=part)
            return plan_tensor_axis(config, parts, shape)

        with tensor_mesh(shape.tensor) as mesh:
            return profile_activations(
                self._parts.module,
                functools.partial(step_loss, config, self._parts),
                functools.partial(self._sample.example, samples, floating=floating),
                config.parallel(),
                mesh=mesh,
                plan_of=plan_of,
            )


def _unknown_reason(config: TrainConfig) -> str:
    if config.cpu_offload:
        return "with cpu_offload=true it is not known"
    if config.precision.float8 != "none":
        return f"with precision.float8={config.precision.float8} it is not known"
    if config.activation_checkpointing.compiler_budget is not None:
        return "with activation_checkpointing=budget the compiler decides about it"
    return ""
