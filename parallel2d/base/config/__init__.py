"""Typed configuration: what can be set, its defaults, and the consequence of each choice.

The dataclasses work without Hydra (``ParallelConfig("zero3")`` in a loop of your own) and are the
schema that the command line is checked against. `parallel` says how a model is laid over the ranks,
`model_and_data` what is trained on what, `cluster` on which machines, `job` holds the rest.
`checks` finds contradictions, `composition` is Hydra.
"""

from __future__ import annotations

from parallel2d.base.config.cluster import ClusterConfig, DeviceConfig, LinkConfig, PeakConfig
from parallel2d.base.config.job import (
    OPTIMIZERS,
    CheckpointConfig,
    Job,
    LaunchConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainConfig,
)
from parallel2d.base.config.model_and_data import (
    CustomModel,
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
)
from parallel2d.base.config.parallel import (
    AXES,
    PRECISIONS,
    STRATEGIES,
    STRATEGY_NAMES,
    TENSOR_WORDS,
    ActivationCheckpointingConfig,
    BucketingConfig,
    CompileConfig,
    MeshConfig,
    ParallelConfig,
    PrecisionConfig,
    PrefetchConfig,
    StrategyConfig,
    SyncConfig,
    named_strategy,
)

__all__ = [
    "AXES",
    "OPTIMIZERS",
    "PRECISIONS",
    "STRATEGIES",
    "STRATEGY_NAMES",
    "TENSOR_WORDS",
    "ActivationCheckpointingConfig",
    "BucketingConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CompileConfig",
    "CustomModel",
    "DataConfig",
    "DeviceConfig",
    "HuggingFaceModel",
    "Job",
    "LaunchConfig",
    "LinkConfig",
    "LlamaModel",
    "MeshConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PeakConfig",
    "PrecisionConfig",
    "PrefetchConfig",
    "SchedulerConfig",
    "StrategyConfig",
    "SyncConfig",
    "TrainConfig",
    "named_strategy",
]
