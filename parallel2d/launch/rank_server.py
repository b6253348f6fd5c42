"""What the process does that ranks are forked from, before the first rank: imports all that they
need.

Only multiprocessing's fork server imports this module; see
`parallel2d.launch.rank_processes.start_server`.
"""

from __future__ import annotations

import gc
import importlib
import os

from parallel2d.launch.processes import LAUNCHER, end_with_parent, set_process_name

_NEEDED_BY_RANKS = (
    "parallel2d.train",
    "parallel2d.assemble",
    # in their first step
    "torch._dynamo",
    "torch.utils.tensorboard",
)

# The launcher may have ended while this process started.
end_with_parent(int(os.environ.get(LAUNCHER) or os.getppid()))
set_process_name("parallel2d ranks")
for _name in _NEEDED_BY_RANKS:
    importlib.import_module(_name)
# The collector leaves alone what is there now, so that ranks go on sharing its memory.
gc.collect()
gc.freeze()
