"""Measure the largest relative difference of a loss between low precisions and fp32 over 20 steps.

    python tools/bench/precision.py

The small Llama of the tests, four gloo ranks, every strategy with tensor axis 1 and 2. The bounds in `tests/test_parity.py` are about three
times these figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import training
from workers import Pools

STEPS = 20


def main() -> int:
    pools = Pools()
    exact = pools.run(4, training.train, {}, {"precision": "fp32"}, steps=STEPS)[0]["losses"]
    print("precision         strategy      tensor  largest relative difference")
    for precision in ("bf16", "bf16_reduce_bf16", "fp16"):
        for strategy in ("ddp", "zero2", "zero3", "hybrid_zero2", "hybrid"):
            for tensor in (1, 2):
                config = {"strategy": strategy, "precision": precision}
                losses = pools.run(4, training.train, {"tensor": tensor}, config, steps=STEPS)[0][
                    "losses"
                ]
                worst = max(abs(a - b) / b for a, b in zip(losses, exact, strict=True))
                print(f"{precision:17} {strategy:13} {tensor}       {worst:.2e}", flush=True)
    pools.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
