"""Published throughput beside what the planner's model of time says, and the efficiencies that fit best.

    python -m tools.bench.published_steps

`parallel2d/cost/efficiency.py` is fitted on these rows but those with a tensor axis, and on nothing else. Takes a few seconds, in which the
FLOPs of each model are counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from parallel2d.config.composition import compose
from parallel2d.cost.efficiency import compute_efficiency
from parallel2d.planner.layout_cost import cost_of

SEQ_8192 = (
    "model=llama_8b",
    "train.seq_len=8192",
    "train.micro_batch_size=2",
    "activation_checkpointing=selective",
    "strategy=zero3",
)
FLOAT8 = ("compile=block", "precision.float8=tensorwise")
LLAMA_2 = (
    "train.seq_len=4096",
    "train.micro_batch_size=2",
    "compile=block",
    "model.vocab_size=32000",
    "model.max_seq_len=4096",
)
LLAMA_2_7B = ("model=llama_8b", "model.n_kv_heads=32", "model.hidden_dim=11008", *LLAMA_2)
LLAMA_2_13B = (
    "model=llama_8b",
    "model.dim=5120",
    "model.n_layers=40",
    "model.n_heads=40",
    "model.n_kv_heads=40",
    "model.hidden_dim=13824",
    *LLAMA_2,
)


# A tensor axis refuses compilation here, so the efficiency of the compiled float8 rows is given. Async TP, which splits the products of the
# tensor axis to hide its collectives, is not in this library.
LLAMA_70B = (
    "model=llama_70b",
    "train.seq_len=8192",
    "train.micro_batch_size=16",
    "mesh.tensor=8",
    "activation_checkpointing=full",
    "strategy=zero3",
    "precision.float8=tensorwise",
    f"plan.efficiency={compute_efficiency('H100', 'fp8', compiled=True)}",
)


class PublishedRow(NamedTuple):
    """``tokens_per_s``: of one GPU. ``source``: rows of one source are compared with each other. ``batch``: samples of the global batch per
    GPU. ``is_fitted``: the row takes part in the fit."""

    name: str
    source: str
    words: tuple[str, ...]
    nodes: int
    tokens_per_s: float
    batch: int = 2
    is_fitted: bool = True


# torchtitan: benchmarks/llama3_h100_202412_torchtitan.md. fms-fsdp: its README; the network of its A100 nodes is not in it, 400 Gbit/s is an
# assumption.
ROWS = (
    PublishedRow("8B, 8 H100", "torchtitan", (*SEQ_8192, "cluster=h100"), 1, 5762),
    PublishedRow("8B, 8 H100, compiled", "torchtitan compiled", (*SEQ_8192, "cluster=h100", "compile=block"), 1, 6667),
    PublishedRow("8B, 128 H100", "torchtitan", (*SEQ_8192, "cluster=h100"), 16, 5605),
    PublishedRow("8B, 128 H100, compiled", "torchtitan compiled", (*SEQ_8192, "cluster=h100", "compile=block"), 16, 6514),
    PublishedRow("8B, 8 H100, compiled, float8", "torchtitan float8", (*SEQ_8192, "cluster=h100", *FLOAT8), 1, 8532),
    PublishedRow("8B, 128 H100, compiled, float8", "torchtitan float8", (*SEQ_8192, "cluster=h100", *FLOAT8), 16, 8380),
    PublishedRow("7B, 96 H100, hybrid", "fms-fsdp H100", (*LLAMA_2_7B, "cluster=h100", "strategy=hybrid"), 12, 7500),
    PublishedRow("13B, 96 H100", "fms-fsdp H100", (*LLAMA_2_13B, "cluster=h100", "strategy=zero3"), 12, 3800),
    PublishedRow("7B, 128 A100, hybrid", "fms-fsdp A100", (*LLAMA_2_7B, "cluster=a100_400g", "strategy=hybrid"), 16, 3650),
    PublishedRow("13B, 128 A100", "fms-fsdp A100", (*LLAMA_2_13B, "cluster=a100_400g", "strategy=zero3"), 16, 1800),
    PublishedRow("70B, 256 H100, FSDP 32 x TP 8, compiled, float8", "torchtitan 2D", (*LLAMA_70B, "cluster=h100"), 32, 829, is_fitted=False),
)  # fmt: skip


class ComparedRow(NamedTuple):
    """``key``: which efficiency was used; ``compute_share``: of the step; ``error``: predicted over published, less 1."""

    row: PublishedRow
    predicted: float
    key: tuple[str, str, bool]
    compute_share: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.tokens_per_s - 1


# Counted once for each model and length of its sequences.
_FLOPS: dict[str, int | None] = {}


def compare(row: PublishedRow) -> ComparedRow:
    ranks = 8 * row.nodes
    composition = compose(
        [
            *row.words,
            "precision=bf16",
            "plan.verify=false",
            f"cluster.nodes={row.nodes}",
            f"train.global_batch_size={row.batch * ranks}",
        ]
    )
    assert composition is not None
    config = composition.config
    model = f"{config.model} {config.train.seq_len}"
    cost = cost_of(config, _FLOPS.get(model))
    _FLOPS[model] = cost.flops
    assert not isinstance(cost.time, str), cost.time
    predicted = cost.time.samples_per_s * config.train.seq_len / ranks
    seconds = cost.time.seconds
    dtype = "bf16" if config.precision.float8 == "none" else "fp8"
    key = (config.cluster.name.partition("_")[0], dtype, config.compile.name != "none")
    return ComparedRow(row, predicted, key, seconds.compute / seconds.total)


def main() -> None:
    found = [compare(row) for row in ROWS]
    print("| row | published | predicted | error |\n|---|---|---|---|")
    factors: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for compared in found:
        row = compared.row
        print(
            f"| {row.source}: {row.name} | {row.tokens_per_s:,.0f} | {compared.predicted:,.0f} | {compared.error:+.1%} |"
        )
        if row.is_fitted:
            factors[compared.key].append(-math.log(1 + compared.error) / compared.compute_share)
    for (device, dtype, compiled), logs in factors.items():
        factor = math.exp(sum(logs) / len(logs))
        word = "compiled" if compiled else "eager"
        print(f"{device}, {dtype}, {word}: multiply the efficiency by {factor:.3f}")


if __name__ == "__main__":
    main()
