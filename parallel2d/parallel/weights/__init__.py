"""Weights of parallelized models: read from a folder of pretrained files, loaded from a state dict
of one rank, and gathered to be viewed or changed whole.

What is written to survive the process is in `checkpoint`.
"""

from parallel2d.parallel.weights.pretrained import load_pretrained
from parallel2d.parallel.weights.states import load_state
from parallel2d.parallel.weights.whole_tensors import summon_full_params

__all__ = ["load_pretrained", "load_state", "summon_full_params"]
