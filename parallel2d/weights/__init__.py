"""Weights as people handle them: read from a folder into a sharded model, spread from one rank,
looked at and changed whole.

Parallelized models flow in. States that outlive the process are `parallel2d.checkpoint`'s.
"""

from parallel2d.weights.loading import load_state
from parallel2d.weights.pretrained import load_pretrained
from parallel2d.weights.summon import summon_full_params

__all__ = ["load_pretrained", "load_state", "summon_full_params"]
