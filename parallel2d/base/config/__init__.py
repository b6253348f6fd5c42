"""Typed configuration: every key, its default and its consequence.

The dataclasses work without Hydra (``ParallelConfig("zero3")`` in a custom training loop) and are
the schema of the command line. The module `parallel` defines the sections for the layout of a model
over the ranks, `model_and_data` for the model and the data set, `cluster` for the machines, and
`launch` for the start of ranks. The module `job` defines all other sections. `checks` finds
contradictions between keys, `composition` calls Hydra.
"""

from __future__ import annotations

from parallel2d.base.config.cluster import ClusterConfig as ClusterConfig
from parallel2d.base.config.cluster import DeviceConfig as DeviceConfig
from parallel2d.base.config.cluster import LinkConfig as LinkConfig
from parallel2d.base.config.cluster import PeakConfig as PeakConfig
from parallel2d.base.config.job import OPTIMIZERS as OPTIMIZERS
from parallel2d.base.config.job import CheckpointConfig as CheckpointConfig
from parallel2d.base.config.job import Job as Job
from parallel2d.base.config.job import OptimizerConfig as OptimizerConfig
from parallel2d.base.config.job import SchedulerConfig as SchedulerConfig
from parallel2d.base.config.job import TrainConfig as TrainConfig
from parallel2d.base.config.launch import LaunchConfig as LaunchConfig
from parallel2d.base.config.model_and_data import CustomModel as CustomModel
from parallel2d.base.config.model_and_data import DataConfig as DataConfig
from parallel2d.base.config.model_and_data import HuggingFaceModel as HuggingFaceModel
from parallel2d.base.config.model_and_data import LlamaModel as LlamaModel
from parallel2d.base.config.parallel import AXES as AXES
from parallel2d.base.config.parallel import PRECISIONS as PRECISIONS
from parallel2d.base.config.parallel import STRATEGIES as STRATEGIES
from parallel2d.base.config.parallel import STRATEGY_NAMES as STRATEGY_NAMES
from parallel2d.base.config.parallel import TENSOR_WORDS as TENSOR_WORDS
from parallel2d.base.config.parallel import (
    ActivationCheckpointingConfig as ActivationCheckpointingConfig,
)
from parallel2d.base.config.parallel import BucketingConfig as BucketingConfig
from parallel2d.base.config.parallel import ChecksConfig as ChecksConfig
from parallel2d.base.config.parallel import CompileConfig as CompileConfig
from parallel2d.base.config.parallel import FSDPConfig as FSDPConfig
from parallel2d.base.config.parallel import MeshConfig as MeshConfig
from parallel2d.base.config.parallel import ParallelConfig as ParallelConfig
from parallel2d.base.config.parallel import PrecisionConfig as PrecisionConfig
from parallel2d.base.config.parallel import PrefetchConfig as PrefetchConfig
from parallel2d.base.config.parallel import StrategyConfig as StrategyConfig
from parallel2d.base.config.parallel import SyncConfig as SyncConfig
from parallel2d.base.config.parallel import named_strategy as named_strategy
