"""The components of a `Trainer` (`TrainerParts`), and the callbacks by which the trainer informs
the command that runs it (`LoopCallbacks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel2d.base.config import TrainConfig
from parallel2d.base.replicas import Quorum
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.data.feed import BatchPlan
from parallel2d.training.data.opening import OpenData
from parallel2d.training.hooks import Hook
from parallel2d.training.loss.model_loss import ModelLoss
from parallel2d.training.metrics.recorder import Recorder
from parallel2d.training.run_directory.ownership import OwnershipLock


@dataclass(kw_only=True, eq=False)
class TrainerParts:
    """The components of a `Trainer`, built by `build_trainer`."""

    config: TrainConfig
    run_dir: str
    model: nn.Module  # parallelized over ``mesh``, with initialized weights
    loss: ModelLoss
    mesh: DeviceMesh
    device: torch.device
    optimizer: torch.optim.Optimizer
    data: OpenData
    plan: BatchPlan
    recorder: Recorder
    checkpointer: Checkpointer
    ownership: OwnershipLock  # checked before every row and every checkpoint
    hooks: Sequence[Hook]  # called after every step
    replicas: Quorum | None = None  # set if replicas may fail and join
    # Called on the new leader after a failure of the old leader
    take_roles: Callable[[Any], None] = lambda trainer: None


@dataclass(frozen=True)
class LoopCallbacks:
    """Callbacks to the command that runs the loop.

    Attributes:
        stop_requested: called in every step; True if this rank must save and stop.
        first_step_done: called once after the first step of this process.
        speaks: called once if this rank becomes the leader after a failure of the old leader.
    """

    stop_requested: Callable[[], bool] = lambda: False
    first_step_done: Callable[[], object] = lambda: None
    speaks: Callable[[], object] = lambda: None
