"""What activation checkpointing keeps and what it costs, per mode: bytes of activations at the end of forward, peak memory, CPU-seconds.

    python tools/bench/activation_checkpointing.py [--rounds 5]

One process, a small Llama with the seed's weights. *Kept* is what forward leaves allocated for backward, *peak* the most that is
allocated at once in a step, both above what was there before, from the allocator's own reports of each allocation and release. The modes
take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch

LLAMA = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden_dim": 704,
    "vocab_size": 320,
    "max_seq_len": 256,
}
BATCH = 2


def build(config: Any, compiled: bool) -> torch.nn.Module:
    from parallel2d import build_on_meta
    from parallel2d.config import CompileConfig
    from parallel2d.model_structure import find_blocks
    from parallel2d.models.llama import Llama
    from parallel2d.parallelize.activation_checkpointing import checkpoint_activations
    from parallel2d.parallelize.compilation import compile_blocks
    from parallel2d.weights.initial_values import plan_weights

    with build_on_meta():
        model = Llama(**LLAMA)
    blocks = find_blocks(model)
    plan_weights(model, blocks, model.init_weights).write(model, 0, "cpu")
    checkpoint_activations(model, blocks, config)
    if compiled:
        budget = config.memory_budget if config.name == "budget" else None
        compile_blocks(model, blocks, CompileConfig("block", "aot_eager"), 1, budget)
    return model


def allocated(run: Any) -> tuple[float, float, Any]:
    """MiB that ``run()`` leaves allocated, the most it had allocated at once, and its result."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = run()
    assert profile.profiler is not None
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return held / 2**20, peak / 2**20, result


def main() -> int:
    from parallel2d.config import ActivationCheckpointingConfig as Config

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each mode that are timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "none": (Config(), False),
        "selective": (Config("selective"), False),
        "selective, keep=[scaled_dot_product_*]": (
            Config("selective", keep=["scaled_dot_product_*"]),
            False,
        ),
        "full, blocks=[FeedForward]": (Config("full", blocks=["FeedForward"]), False),
        "full, every=2": (Config("full", every=2), False),
        "full": (Config("full"), False),
        "none, compile": (Config(), True),
        "budget, memory_budget=0.5, compile": (Config("budget", memory_budget=0.5), True),
        "budget, memory_budget=0, compile": (Config("budget", memory_budget=0.0), True),
    }
    models = {name: build(*case) for name, case in cases.items()}
    tokens = torch.randint(
        0,
        LLAMA["vocab_size"],
        (BATCH, LLAMA["max_seq_len"]),
        generator=torch.Generator().manual_seed(0),
    )

    def forward(model: torch.nn.Module) -> torch.Tensor:
        return model(tokens).float().square().mean()

    def step(model: torch.nn.Module) -> None:
        forward(model).backward()

    rows = {}
    for name, model in models.items():
        step(model)  # compiles, and makes the gradients
        kept, _, loss = allocated(lambda model=model: forward(model))
        del loss
        rows[name] = (kept, allocated(lambda model=model: step(model))[1])
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        for name, model in list(models.items())[:: 1 if number % 2 else -1]:
            begin = time.process_time()
            step(model)
            seconds[name].append(time.process_time() - begin)
    print(
        "| activation_checkpointing | kept for backward, MiB | peak of a step, MiB | CPU-s per step |"
    )
    print("|---|---|---|---|")
    for name, (kept, peak) in rows.items():
        print(f"| {name} | {kept:.1f} | {peak:.1f} | {statistics.median(seconds[name]):.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
