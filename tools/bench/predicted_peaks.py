"""Compare predicted peaks with the traced peaks of the same layouts, for docs/planner.md.

    python -m tools.bench.predicted_peaks

The script takes some minutes on one core. It prints a row for each layout, and the smallest and the
largest error at the end. ``--models NAME ...`` chooses models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import LayoutCost, cost_of
from parallel2d.parallel.cost.predicted_peak import PredictedMemory

_JOB = (
    "train.seq_len=128", "train.micro_batch_size=2", "train.global_batch_size=64", "cluster.device.type=cpu",
    "cluster.ranks_per_node=8", "plan.verify=true",
)  # fmt: skip
_HF = ("model=hf", "data=stdlib")
_LLAMA = (
    "model.dim=256", "model.n_layers=7", "model.n_heads=8", "model.n_kv_heads=8", "model.hidden_dim=512",
)  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "llama": (*_LLAMA, "model.vocab_size=1024"),
    "llama, large vocabulary": (*_LLAMA, "model.vocab_size=32768"),
    "llama, large vocabulary, loss_chunk": (
        *_LLAMA, "model.vocab_size=32768", "train.loss_chunk=64",
    ),
    "gpt2": (
        *_HF, "model.architecture=gpt2", "model.arguments.n_embd=256", "model.arguments.n_layer=7", "model.arguments.n_head=8",
        "model.arguments.vocab_size=1024", "model.arguments.n_positions=128",
    ),
    "mixtral": (
        *_HF, "model.architecture=mixtral", "model.arguments.hidden_size=128", "model.arguments.intermediate_size=256",
        "model.arguments.num_hidden_layers=6", "model.arguments.num_attention_heads=4", "model.arguments.num_key_value_heads=4",
        "model.arguments.num_local_experts=4", "model.arguments.vocab_size=1024", "model.arguments.experts_implementation=batched_mm",
    ),
    "mlp": ("model=custom", "model.target=tools.bench.predicted_peaks:mlp"),
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "hybrid": (),
    "hybrid, bf16": ("precision=bf16",),
    "hybrid, one micro-batch": ("train.global_batch_size=16",),
    "hybrid, full recomputation, bf16": ("activation_checkpointing=full", "precision=bf16"),
    "hybrid, selective": ("activation_checkpointing=selective",),
    "hybrid, by layer": ("bucketing=layer",),
    "hybrid, bf16 between replicas": ("sync.wire=bf16",),
    "hybrid, diloco": ("sync=diloco",),
    "hybrid, whole gradients kept": ("sync.during_accumulation=none",),
    "hybrid_full": ("strategy=hybrid_full",),
    "hybrid_full, bf16 between replicas": ("strategy=hybrid_full", "sync.wire=bf16"),
    "hybrid_zero2": ("strategy=hybrid_zero2",),
    "zero3": ("strategy=zero3",),
    "zero3, one micro-batch, bf16": ("strategy=zero3", "train.global_batch_size=16", "precision=bf16"),
    "zero3, full recomputation, by layer": ("strategy=zero3", "activation_checkpointing=full", "bucketing=layer"),
    "zero2": ("strategy=zero2",),
    "ddp": ("strategy=ddp",),
    "ddp, bf16": ("strategy=ddp", "precision=bf16"),
    "tensor 2": ("mesh.tensor=2",),
    "tensor 2, zero2, full, bf16": ("mesh.tensor=2", "strategy=zero2", "activation_checkpointing=full", "precision=bf16"),
}  # fmt: skip
# Models with a tensor-parallel plan
_SPLITS = ("llama",)


def mlp() -> nn.Module:
    """Return a plain stack of layers."""
    layers: list[nn.Module] = [nn.Embedding(1024, 256)]
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.GELU()]
    layers.append(nn.Linear(256, 1024))
    return nn.Sequential(*layers)


def error_of(*words: str) -> tuple[LayoutCost, float]:
    """Return the cost of a layout and the relative error of its predicted peak."""
    composition = compose([*_JOB, *words])
    assert composition is not None
    cost = cost_of(composition.config)
    assert isinstance(cost.predicted, PredictedMemory), cost.predicted
    assert cost.traced is not None
    return cost, cost.predicted.peak / cost.traced - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    errors = []
    print("| model | layout | traced, MiB | predicted | error |\n|---|---|---|---|---|")
    for model in chosen.models:
        for layout, words in LAYOUTS.items():
            if "mesh.tensor=2" in words and not model.startswith(_SPLITS):
                continue
            cost, error = error_of(*MODELS[model], *words)
            errors.append(error)
            assert cost.traced is not None
            assert isinstance(cost.predicted, PredictedMemory)
            traced, predicted = cost.traced / 2**20, cost.predicted.peak / 2**20
            row = f"| {model} | {layout} | {traced:.2f} | {predicted:.2f} | {error:+.1%} |"
            print(row, flush=True)
    print(f"{len(errors)} layouts: errors from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
