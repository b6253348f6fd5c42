"""parallel2d: hybrid 2-D parallel training. Shard inside a node, replicate across nodes; the loss does not depend on the mesh.

The names below are imported when first used, so that commands which do not train start without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel2d.config import ConfigError, ParallelConfig
    from parallel2d.gradients import clip_gradient_norm, clip_gradient_value
    from parallel2d.loss import cross_entropy_sum, token_weight
    from parallel2d.mesh import MeshSpec, Topology, build_mesh, data_coordinate, mesh_shape
    from parallel2d.parallelize import build_on_meta, parallelize
    from parallel2d.sync import accumulate, no_sync
    from parallel2d.weights import load_pretrained, load_state, summon_full_params

_MODULES = {
    "ConfigError": "config",
    "MeshSpec": "mesh",
    "ParallelConfig": "config",
    "Topology": "mesh",
    "accumulate": "sync",
    "build_mesh": "mesh",
    "build_on_meta": "parallelize",
    "clip_gradient_norm": "gradients",
    "clip_gradient_value": "gradients",
    "cross_entropy_sum": "loss",
    "data_coordinate": "mesh",
    "load_pretrained": "weights",
    "load_state": "weights",
    "mesh_shape": "mesh",
    "no_sync": "sync",
    "parallelize": "parallelize",
    "summon_full_params": "weights",
    "token_weight": "loss",
}

__all__ = [
    "ConfigError",
    "MeshSpec",
    "ParallelConfig",
    "Topology",
    "accumulate",
    "build_mesh",
    "build_on_meta",
    "clip_gradient_norm",
    "clip_gradient_value",
    "cross_entropy_sum",
    "data_coordinate",
    "load_pretrained",
    "load_state",
    "mesh_shape",
    "no_sync",
    "parallelize",
    "summon_full_params",
    "token_weight",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
