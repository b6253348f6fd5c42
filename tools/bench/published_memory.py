"""Published peaks of GPU memory beside the traced peak of the same layout.

    python -m tools.bench.published_memory

Takes about a minute, in which the layouts are laid out and run on tensors without storage.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel2d.config.composition import compose
from parallel2d.planner.layout_cost import cost_of
from tools.bench.published_steps import LLAMA_70B, SEQ_8192

_GIB = 2**30
# Floats of 8 bits are not traced; what backward keeps is stored in bf16 all the same.
BF16_70B = tuple(word for word in LLAMA_70B if not word.startswith(("precision.", "plan.")))


class PublishedPeak(NamedTuple):
    name: str
    words: tuple[str, ...]
    nodes: int
    gib: float


# torchtitan: benchmarks/llama3_h100_202412_torchtitan.md; H100 with 96 GB. "Memory" is the largest reserved memory of PyTorch's allocator.
PEAKS = (
    PublishedPeak("8B, 8 H100", SEQ_8192, 1, 82.4),
    PublishedPeak("8B, 128 H100", SEQ_8192, 16, 67.0),
    PublishedPeak("70B, 256 H100, FSDP 32 x TP 8, compiled, float8", BF16_70B, 32, 71.9),
)


def main() -> None:
    print("| row | published GiB | traced GiB | error | by kind |\n|---|---|---|---|---|")
    for row in PEAKS:
        composition = compose(
            [
                *row.words,
                "cluster=h100",
                "precision=bf16",
                f"cluster.nodes={row.nodes}",
                f"train.global_batch_size={16 * row.nodes}",
            ]
        )
        assert composition is not None
        traced = cost_of(composition.config, flops=1).traced
        assert traced is not None
        kinds = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in traced.by_kind.items())
        peak = traced.peak / _GIB
        print(f"| {row.name} | {row.gib} | {peak:.1f} | {peak / row.gib - 1:+.1%} | {kinds} |")


if __name__ == "__main__":
    main()
