"""Count the kernels of one training step and the waits of the host on simulated devices, without a GPU.

    python tools/bench/gpu_counts.py [LAYOUT ...]

The script runs the train command with a llama of two layers in each layout: by default `COUNTED_LAYOUTS`, otherwise
any of `LAYOUTS` in tests/stream_simulator/training_jobs.py. It prints one row for step 3 of rank 0:

* kernels of this package, without those of the model, autograd, FSDP2 and the optimizer;
* waits of the host;
* waits of the host while operators are still outstanding;
* the same waits, only between the last forward and the optimizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from stream_simulator.counts import COUNTED_LAYOUTS, counts_of
from stream_simulator.training_jobs import LAYOUTS, run_layout


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in LAYOUTS]:
        sys.exit(f"no layout {', '.join(unknown)}; choose from: {', '.join(LAYOUTS)}")
    print(
        "| layout | own kernels | waits of the host | with outstanding operators | before the update |"
    )
    print("|---|---|---|---|---|")
    for name in names or COUNTED_LAYOUTS:
        counts = counts_of(run_layout(name))
        print(f"| {name} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
