"""Reduction of gradients over the replicate axis.

`methods/` defines the tensors that replicas exchange and the steps of the exchanges, `formats/`
defines the communication formats, and `engine/` runs the reductions during and after a backward
pass.
"""

from parallel2d.parallel.sync.engine.accumulation import (
    accumulate,
    clear_with_gradients,
    discard_accumulated,
    no_sync,
    reduce_zeros,
)
from parallel2d.parallel.sync.updates import (
    attach_optimizer,
    compare_replicas,
    finish_updates,
    outer_parameters,
    register_sync_hook,
    replicate_group,
    set_step,
    updated_parameters,
)
