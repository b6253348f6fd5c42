"""The words every room shares: typed configuration and its validation.

Plain dataclasses flow out of here and nothing flows in. They are usable without Hydra
(``ParallelConfig(strategy=...)`` in somebody's own loop) and are the schema that Hydra composes
against at the door (``train.py``). Each field's comment gives its consequence; what may not be is
in `validation.py`.

In the order in which they build on each other: `options.py`, `parallel.py` (how), `content.py`
(what), `job.py` (all of it). None imports torch or Hydra.
"""

from __future__ import annotations

from parallel2d.config.content import (
    CustomModel,
    DataConfig,
    HuggingFaceModel,
    LlamaModel,
)
from parallel2d.config.job import (
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    CheckpointConfig,
    LaunchConfig,
    LoopConfig,
    MetricsConfig,
    OptimizerConfig,
    ProfileConfig,
    SchedulerConfig,
    TrainConfig,
)
from parallel2d.config.options import (
    ConfigError,
    option,
)
from parallel2d.config.parallel import (
    BUCKETINGS,
    CHECKPOINTINGS,
    COMPILES,
    DTYPES,
    KEPT_OPERATORS,
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
    ResolvedParallelConfig,
    StrategyConfig,
    SyncConfig,
)

__all__ = [
    "BUCKETINGS",
    "CHECKPOINTINGS",
    "COMPILES",
    "DTYPES",
    "KEPT_OPERATORS",
    "OPTIMIZERS",
    "OPTIMIZER_NAMES",
    "PRECISIONS",
    "STRATEGIES",
    "STRATEGY_NAMES",
    "TENSOR_WORDS",
    "ActivationCheckpointingConfig",
    "BucketingConfig",
    "CheckpointConfig",
    "CompileConfig",
    "ConfigError",
    "CustomModel",
    "DataConfig",
    "HuggingFaceModel",
    "LaunchConfig",
    "LlamaModel",
    "LoopConfig",
    "MeshConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PrefetchConfig",
    "ProfileConfig",
    "ResolvedParallelConfig",
    "SchedulerConfig",
    "StrategyConfig",
    "SyncConfig",
    "TrainConfig",
    "option",
]
