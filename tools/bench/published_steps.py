"""Compare published throughput with the planner's time model, and print the best-fitting efficiencies.

    python -m tools.bench.published_steps

`EFFICIENCIES` in `parallel2d/parallel/cost/step_time.py` are fitted only on these rows. The script counts the FLOPs of each model, which takes a
few seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import JobCosts

SEQ_8192 = (
    "model=llama_8b",
    "train.seq_len=8192",
    "train.micro_batch_size=2",
    "activation_checkpointing=selective",
    "strategy=zero3",
)
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


class PublishedRow(NamedTuple):
    """One published measurement."""

    name: str
    source: str  # only rows of one source are compared with each other
    words: tuple[str, ...]
    nodes: int
    tokens_per_s: float  # of one GPU
    batch: float = 2  # samples of the global batch per GPU


# torchtitan: benchmarks/llama3_h100_202412_torchtitan.md. fms-fsdp: its README. The README does not name the network of its A100 nodes;
# 400 Gbit/s is an assumption.
ROWS = (
    PublishedRow("8B, 8 H100", "torchtitan", (*SEQ_8192, "cluster=h100"), 1, 5762),
    PublishedRow("8B, 8 H100, compiled", "torchtitan compiled", (*SEQ_8192, "cluster=h100", "compile=block"), 1, 6667),
    PublishedRow("8B, 128 H100", "torchtitan", (*SEQ_8192, "cluster=h100"), 16, 5605),
    PublishedRow("8B, 128 H100, compiled", "torchtitan compiled", (*SEQ_8192, "cluster=h100", "compile=block"), 16, 6514),
    PublishedRow("7B, 96 H100, hybrid", "fms-fsdp H100", (*LLAMA_2_7B, "cluster=h100", "strategy=hybrid"), 12, 7500),
    PublishedRow("13B, 96 H100", "fms-fsdp H100", (*LLAMA_2_13B, "cluster=h100", "strategy=zero3"), 12, 3800),
    PublishedRow("7B, 128 A100, hybrid", "fms-fsdp A100", (*LLAMA_2_7B, "cluster=a100_400g", "strategy=hybrid"), 16, 3650),
    PublishedRow("13B, 128 A100", "fms-fsdp A100", (*LLAMA_2_13B, "cluster=a100_400g", "strategy=zero3"), 16, 1800),
)  # fmt: skip


class ComparedRow(NamedTuple):
    """A published measurement and its prediction."""

    row: PublishedRow
    predicted: float
    key: tuple[str, bool]  # key of the efficiency: device, and True if blocks are compiled
    compute_share: float  # share of compute in the predicted step

    @property
    def error(self) -> float:
        """Predicted over published throughput, minus 1."""
        return self.predicted / self.row.tokens_per_s - 1


def compare(row: PublishedRow) -> ComparedRow:
    ranks = 8 * row.nodes
    composition = compose(
        [
            *row.words,
            "precision=bf16",
            "plan.verify=false",
            f"cluster.nodes={row.nodes}",
            f"train.global_batch_size={round(row.batch * ranks)}",
        ]
    )
    assert composition is not None
    config = composition.config
    cost = JobCosts(config).cost(config)
    assert not isinstance(cost.time, str), cost.time
    predicted = cost.time.samples_per_s * config.train.seq_len / ranks
    seconds = cost.time.seconds
    key = (config.cluster.name.partition("_")[0], config.compile.name != "none")
    return ComparedRow(row, predicted, key, seconds.compute / seconds.total)


def main() -> None:
    found = [compare(row) for row in ROWS]
    print("| row | published | predicted | error |\n|---|---|---|---|")
    factors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for compared in found:
        row = compared.row
        print(
            f"| {row.source}: {row.name} | {row.tokens_per_s:,.0f} | {compared.predicted:,.0f} | {compared.error:+.1%} |"
        )
        factors[compared.key].append(-math.log(1 + compared.error) / compared.compute_share)
    for (device, compiled), logs in factors.items():
        factor = math.exp(sum(logs) / len(logs))
        word = "compiled" if compiled else "eager"
        print(f"{device}, {word}: multiply the efficiency by {factor:.3f}")


if __name__ == "__main__":
    main()
