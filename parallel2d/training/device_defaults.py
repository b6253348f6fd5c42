"""The settings that ``auto`` leaves to the device: precision and compilation.

Everything that runs or prices a job calls `resolved` once, on the composed configuration, so that
no later line has to know ``auto``. On a CPU ``auto`` is fp32 without compilation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from parallel2d.base import device as devices
from parallel2d.base import exchange
from parallel2d.base.config import PRECISIONS, TrainConfig
from parallel2d.base.config.parallel import AUTOMATIC


@dataclass(frozen=True)
class DeviceAbilities:
    """The properties of a device that decide about defaults."""

    fast_bf16: bool  # its matrix products in bf16 are faster than those in fp32
    compiles: bool  # torch.compile can generate kernels for it

    @classmethod
    def of_this_rank(cls) -> DeviceAbilities:
        """Return the abilities of the accelerator of this process, or of the CPU without one."""
        kind = devices.accelerator_type()
        return cls(devices.has_fast_bf16(kind), devices.can_compile(kind))

    @classmethod
    def of_all_ranks(cls) -> DeviceAbilities:
        """Return the abilities that every rank has, so that all ranks resolve ``auto`` to the same
        settings. Collective."""
        ranks = exchange.all_gather(cls.of_this_rank())
        return cls(all(each.fast_bf16 for each in ranks), all(each.compiles for each in ranks))

    @classmethod
    def planned(cls, config: TrainConfig) -> DeviceAbilities:
        """Return the abilities of the devices of ``cluster``; of this machine where the cluster
        does not name its devices."""
        device = config.cluster.device
        if device.type == "auto":
            return cls.of_this_rank()
        is_gpu = device.type != "cpu"
        return cls(is_gpu and device.peak_tflops.bf16 is not None, is_gpu)


def resolved(config: TrainConfig, abilities: DeviceAbilities) -> TrainConfig:
    """Return ``config`` with the values that ``auto`` stands for on devices with ``abilities``.

    precision: bf16 with gradients that are reduced in fp32, else fp32; other keys of the section
        keep their values.
    compile: none where the device has no compiler. Otherwise ``auto`` stays, and the layout
        chooses block for a model with repeated blocks.
    """
    precision, compilation = config.precision, config.compile
    if precision.name == AUTOMATIC:
        name, param = "fp32", precision.param
        if abilities.fast_bf16 and (precision.storage, param) == ("fp32", "fp32"):
            name, param = "bf16", PRECISIONS["bf16"].param
        precision = dataclasses.replace(precision, name=name, param=param)
    if compilation.name == AUTOMATIC and not abilities.compiles:
        compilation = dataclasses.replace(compilation, name="none")
    return dataclasses.replace(config, precision=precision, compile=compilation)
