"""Reduces gradients over the replicate axis: in which micro-batch, in which order, in which form.

`methods/` says what crosses the axis and when, `formats/` in which format, `engine/` does it by
both.
"""

from parallel2d.parallel.sync.engine.accumulation import (
    accumulate,
    clear_with_gradients,
    discard_accumulated,
    no_sync,
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
