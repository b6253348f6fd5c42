"""parallel2d: hybrid 2-D parallel training. Shard inside a node, replicate across nodes; the loss
does not depend on the mesh.

The names below are imported when first used, so that commands which do not train start without
loading torch.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel2d.certification import certify
    from parallel2d.checkpoint import Checkpointer
    from parallel2d.chunked_head import ChunkedHead
    from parallel2d.chunked_loss import cross_entropy_from_hidden
    from parallel2d.config import (
        BucketingConfig,
        CheckpointConfig,
        MeshConfig,
        OptimizerConfig,
        ParallelConfig,
        PrecisionConfig,
        PrefetchConfig,
        StrategyConfig,
        SyncConfig,
    )
    from parallel2d.errors import ConfigError
    from parallel2d.exchange import reduce
    from parallel2d.gradients import clip_gradient_norm, clip_gradient_value
    from parallel2d.hooks import Hook, HookResult, RunView
    from parallel2d.loss import cross_entropy_sum, token_weight
    from parallel2d.mesh import MeshSpec, build_mesh, data_coordinate, mesh_shape
    from parallel2d.optimizer import build_optimizer, set_learning_rate
    from parallel2d.parallelize import build_on_meta, parallelize
    from parallel2d.parallelize.context import model_sharded_context
    from parallel2d.runtime import Runtime, barrier, limit_waiting, setup, teardown
    from parallel2d.sync import (
        accumulate,
        attach_optimizer,
        compare_replicas,
        finish_updates,
        no_sync,
        outer_parameters,
        register_sync_hook,
        replicate_group,
        set_step,
        updated_parameters,
    )
    from parallel2d.topology import Topology
    from parallel2d.weights import load_pretrained, load_state, summon_full_params
    from parallel2d.weights.states import (
        full_state,
        load_full_state,
        load_sharded_state,
        rekey_optimizer_state,
        sharded_state,
    )
    from parallel2d.weights.whole_tensors import apply_full, sharded_modules

    __version__: str

_MODULES = {
    "BucketingConfig": "config",
    "CheckpointConfig": "config",
    "Checkpointer": "checkpoint",
    "ChunkedHead": "chunked_head",
    "ConfigError": "errors",
    "Hook": "hooks",
    "HookResult": "hooks",
    "MeshSpec": "mesh",
    "MeshConfig": "config",
    "OptimizerConfig": "config",
    "ParallelConfig": "config",
    "PrecisionConfig": "config",
    "PrefetchConfig": "config",
    "StrategyConfig": "config",
    "SyncConfig": "config",
    "RunView": "hooks",
    "Runtime": "runtime",
    "Topology": "topology",
    "accumulate": "sync",
    "apply_full": "weights.whole_tensors",
    "attach_optimizer": "sync",
    "barrier": "runtime",
    "build_mesh": "mesh",
    "build_on_meta": "parallelize",
    "build_optimizer": "optimizer",
    "certify": "certification",
    "clip_gradient_norm": "gradients",
    "clip_gradient_value": "gradients",
    "compare_replicas": "sync",
    "cross_entropy_from_hidden": "chunked_loss",
    "cross_entropy_sum": "loss",
    "data_coordinate": "mesh",
    "finish_updates": "sync",
    "full_state": "weights.states",
    "limit_waiting": "runtime",
    "load_full_state": "weights.states",
    "load_pretrained": "weights",
    "load_sharded_state": "weights.states",
    "load_state": "weights",
    "mesh_shape": "mesh",
    "model_sharded_context": "parallelize.context",
    "no_sync": "sync",
    "outer_parameters": "sync",
    "register_sync_hook": "sync",
    "replicate_group": "sync",
    "parallelize": "parallelize",
    "reduce": "exchange",
    "rekey_optimizer_state": "weights.states",
    "set_learning_rate": "optimizer",
    "set_step": "sync",
    "setup": "runtime",
    "sharded_modules": "weights.whole_tensors",
    "sharded_state": "weights.states",
    "summon_full_params": "weights",
    "teardown": "runtime",
    "token_weight": "loss",
    "updated_parameters": "sync",
}

__all__ = [
    "BucketingConfig",
    "CheckpointConfig",
    "Checkpointer",
    "ChunkedHead",
    "ConfigError",
    "Hook",
    "HookResult",
    "MeshConfig",
    "MeshSpec",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "PrefetchConfig",
    "RunView",
    "Runtime",
    "StrategyConfig",
    "SyncConfig",
    "Topology",
    "__version__",
    "accumulate",
    "apply_full",
    "attach_optimizer",
    "barrier",
    "build_mesh",
    "build_on_meta",
    "build_optimizer",
    "certify",
    "clip_gradient_norm",
    "clip_gradient_value",
    "compare_replicas",
    "cross_entropy_from_hidden",
    "cross_entropy_sum",
    "data_coordinate",
    "finish_updates",
    "full_state",
    "limit_waiting",
    "load_full_state",
    "load_pretrained",
    "load_sharded_state",
    "load_state",
    "mesh_shape",
    "model_sharded_context",
    "no_sync",
    "outer_parameters",
    "parallelize",
    "reduce",
    "register_sync_hook",
    "rekey_optimizer_state",
    "replicate_group",
    "set_learning_rate",
    "set_step",
    "setup",
    "sharded_modules",
    "sharded_state",
    "summon_full_params",
    "teardown",
    "token_weight",
    "updated_parameters",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(name: str) -> Any:
    """The value of a public name. Raises AttributeError for any other."""
    if name == "__version__":
        return metadata.version("parallel2d")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


# Type checkers would take any name for one of ours if they saw it.
if not TYPE_CHECKING:
    __getattr__ = _load


class _Face(ModuleType):
    """This module, in which `parallelize` and `certify` are functions whatever was imported before.

    A function and the package that it is in, or the command, have one name here. Python sets a
    package's attribute when a module inside it is imported, which would hide the function; a
    property cannot be hidden.
    """

    @property
    def parallelize(self) -> Any:
        return _load("parallelize")

    @parallelize.setter
    def parallelize(self, _package: ModuleType) -> None:
        """What an import of the package sets is not kept; imports find it without."""

    @property
    def certify(self) -> Any:
        return _load("certify")

    @certify.setter
    def certify(self, _command: ModuleType) -> None:
        """As of `parallelize`."""


sys.modules[__name__].__class__ = _Face
