"""parallel2d: hybrid 2-D parallel training. Shard inside a node, replicate across nodes; the loss does not depend on the mesh."""

from parallel2d.config import ConfigError, ParallelConfig
from parallel2d.gradients import clip_gradient_norm
from parallel2d.loss import cross_entropy_sum, token_weight
from parallel2d.mesh import MeshSpec, Topology, build_mesh, data_coordinate, mesh_shape
from parallel2d.parallelize import build_on_meta, parallelize
from parallel2d.sync import accumulate, no_sync

__all__ = [
    "ConfigError",
    "MeshSpec",
    "ParallelConfig",
    "Topology",
    "accumulate",
    "build_mesh",
    "build_on_meta",
    "clip_gradient_norm",
    "cross_entropy_sum",
    "data_coordinate",
    "mesh_shape",
    "no_sync",
    "parallelize",
    "token_weight",
]
