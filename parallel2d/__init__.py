"""parallel2d: hybrid 2-D parallel training. Models are sharded inside a node and replicated across
nodes. The loss does not depend on the sizes of the mesh.

The names below are imported at their first use, so that commands without training start without
loading torch.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel2d.base.config import (
        BucketingConfig,
        CheckpointConfig,
        ChecksConfig,
        FSDPConfig,
        MeshConfig,
        OptimizerConfig,
        ParallelConfig,
        PrecisionConfig,
        PrefetchConfig,
        StrategyConfig,
        SyncConfig,
    )
    from parallel2d.base.errors import ConfigError
    from parallel2d.base.exchange import reduce
    from parallel2d.base.runtime import Runtime, barrier, limit_waiting, setup, teardown
    from parallel2d.base.topology import Topology
    from parallel2d.instruments.parity_check.custom_loop import certify
    from parallel2d.parallel.chunked_head import ChunkedHead
    from parallel2d.parallel.chunked_loss import cross_entropy_from_hidden
    from parallel2d.parallel.feature_gather import all_gather
    from parallel2d.parallel.gradients import clip_gradient_norm, clip_gradient_value
    from parallel2d.parallel.loss import cross_entropy_sum, token_weight
    from parallel2d.parallel.mesh import build_mesh, data_coordinate, mesh_shape
    from parallel2d.parallel.mesh_sizes import MeshSpec
    from parallel2d.parallel.parallelize import (
        Always,
        average_buffers,
        build_on_meta,
        model_sharded_context,
        parallelize,
        sharded_copy,
    )
    from parallel2d.parallel.sync import (
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
    from parallel2d.parallel.weights.pretrained import load_pretrained
    from parallel2d.parallel.weights.states import (
        full_state,
        load_full_state,
        load_sharded_state,
        load_state,
        rekey_optimizer_state,
        sharded_state,
    )
    from parallel2d.parallel.weights.unsharded_tensors import (
        apply_full,
        sharded_modules,
        summon_full_params,
    )
    from parallel2d.training.checkpoint import Checkpointer
    from parallel2d.training.checkpoint.full_file import load_full, save_full
    from parallel2d.training.data.together import together
    from parallel2d.training.hooks import Hook, HookResult, RunView
    from parallel2d.training.optimizer import build_optimizer, whole_matrices
    from parallel2d.training.optimizer.learning_rate import set_learning_rate
    from parallel2d.training.own_loop import Replicas

    __version__: str

# Module of each public name
_NAMES = {
    "base.config": (
        "BucketingConfig", "CheckpointConfig", "ChecksConfig", "FSDPConfig", "MeshConfig",
        "OptimizerConfig", "ParallelConfig", "PrecisionConfig", "PrefetchConfig", "StrategyConfig",
        "SyncConfig",
    ),
    "base.errors": ("ConfigError",),
    "base.exchange": ("reduce",),
    "base.runtime": ("Runtime", "barrier", "limit_waiting", "setup", "teardown"),
    "base.topology": ("Topology",),
    "instruments.parity_check.custom_loop": ("certify",),
    "parallel.chunked_head": ("ChunkedHead",),
    "parallel.chunked_loss": ("cross_entropy_from_hidden",),
    "parallel.feature_gather": ("all_gather",),
    "parallel.gradients": ("clip_gradient_norm", "clip_gradient_value"),
    "parallel.loss": ("cross_entropy_sum", "token_weight"),
    "parallel.mesh": ("build_mesh", "data_coordinate", "mesh_shape"),
    "parallel.mesh_sizes": ("MeshSpec",),
    "parallel.parallelize": (
        "Always", "average_buffers", "build_on_meta", "model_sharded_context", "parallelize",
        "sharded_copy",
    ),
    "parallel.sync": (
        "accumulate", "attach_optimizer", "compare_replicas", "finish_updates", "no_sync",
        "outer_parameters", "register_sync_hook", "replicate_group", "set_step",
        "updated_parameters",
    ),
    "parallel.weights.pretrained": ("load_pretrained",),
    "parallel.weights.states": (
        "full_state", "load_full_state", "load_sharded_state", "load_state",
        "rekey_optimizer_state", "sharded_state",
    ),
    "parallel.weights.unsharded_tensors": ("apply_full", "sharded_modules", "summon_full_params"),
    "training.checkpoint": ("Checkpointer",),
    "training.checkpoint.full_file": ("load_full", "save_full"),
    "training.data.together": ("together",),
    "training.hooks": ("Hook", "HookResult", "RunView"),
    "training.optimizer": ("build_optimizer", "whole_matrices"),
    "training.optimizer.learning_rate": ("set_learning_rate",),
    "training.own_loop": ("Replicas",),
}  # fmt: skip
_MODULES: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _MODULES |= dict.fromkeys(_names, _module)

__all__ = [
    "Always", "BucketingConfig", "CheckpointConfig", "Checkpointer", "ChecksConfig", "ChunkedHead",
    "ConfigError", "FSDPConfig", "Hook", "HookResult", "MeshConfig", "MeshSpec", "OptimizerConfig",
    "ParallelConfig", "PrecisionConfig", "PrefetchConfig", "Replicas", "RunView", "Runtime",
    "StrategyConfig", "SyncConfig", "Topology",
    "__version__", "accumulate", "all_gather", "apply_full", "attach_optimizer",
    "average_buffers", "barrier",
    "build_mesh", "build_on_meta", "build_optimizer", "certify", "clip_gradient_norm",
    "clip_gradient_value", "compare_replicas", "cross_entropy_from_hidden", "cross_entropy_sum",
    "data_coordinate", "finish_updates", "full_state", "limit_waiting", "load_full",
    "load_full_state", "load_pretrained", "load_sharded_state", "load_state", "mesh_shape",
    "model_sharded_context", "no_sync", "outer_parameters", "parallelize", "reduce",
    "register_sync_hook", "rekey_optimizer_state", "replicate_group", "save_full",
    "set_learning_rate", "set_step", "setup", "sharded_copy", "sharded_modules", "sharded_state",
    "summon_full_params", "teardown", "together", "token_weight", "updated_parameters",
    "whole_matrices",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(name: str) -> Any:
    """Return the value of a public name. Raise AttributeError for other names."""
    if name == "__version__":
        return metadata.version("parallel2d")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


# With a visible `__getattr__`, type checkers would accept any name.
if not TYPE_CHECKING:
    __getattr__ = _load


class _Face(ModuleType):
    """The class of this module. Its attribute `certify` is always the function, not the command's
    module.

    The module `parallel2d.certify` has the same name as the function. When Python imports a
    submodule, Python sets the attribute of the package to the submodule. The submodule would
    replace the function, but cannot replace a property.
    """

    @property
    def certify(self) -> Any:
        return _load("certify")

    @certify.setter
    def certify(self, _command: ModuleType) -> None:
        """Ignore the value that an import of the command's module sets. The import works without
        it."""


sys.modules[__name__].__class__ = _Face
