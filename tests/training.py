"""A small training run as a function, for tests: the same steps on any layout, and a plain PyTorch reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    accumulate,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    cross_entropy_sum,
    data_coordinate,
    mesh_shape,
    parallelize,
    token_weight,
)
from parallel2d.loss import sum_over_data_ranks
from parallel2d.models.llama import Llama, tensor_plan

VOCAB = 67
LLAMA = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": VOCAB, "max_seq_len": 64}
SEQ, GLOBAL_BATCH = 16, 8


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [GLOBAL_BATCH, SEQ]; some targets are ignored, unevenly over the sequences."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(1, SEQ + 1, (GLOBAL_BATCH,), generator=generator)
    targets[torch.arange(SEQ) >= lengths[:, None]] = -100
    return tokens[:, :-1], targets


def build_llama(**changes: Any) -> Llama:
    return Llama(**{**LLAMA, **changes})


def optimizer_of(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach().clone()


def train(
    mesh_sizes: dict[str, Any],
    config: dict[str, Any],
    *,
    steps: int,
    accumulation: int = 1,
    during_accumulation: str = "reduce_scatter_only",
    llama: dict[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Trains the small Llama on this process group; returns losses, gradient norms and whole final weights (rank 0)."""
    parallel = ParallelConfig(**config)
    resolved = parallel.resolved()
    mesh = build_mesh(MeshSpec(**mesh_sizes), resolved.strategy.name)
    with build_on_meta():
        model = build_llama(**(llama or {}))
    plan = tensor_plan(model, mesh_shape(mesh).tensor) if mesh_shape(mesh).tensor > 1 else None
    model = parallelize(model, mesh, parallel, seed=seed, init=model.init_weights, tensor_plan=plan)
    optimizer = optimizer_of(model)
    rank, data_ranks = data_coordinate(mesh), mesh_shape(mesh).data_ranks
    losses, norms = [], []
    for step in range(steps):
        tokens, targets = (part.chunk(data_ranks)[rank].chunk(accumulation) for part in global_batch(step))
        weight = token_weight(sum(int((t != -100).sum()) for t in targets), mesh)
        total = torch.zeros((), dtype=torch.float64)
        for micro_tokens, micro_targets in accumulate(model, list(zip(tokens, targets, strict=True)), during_accumulation):
            loss = cross_entropy_sum(model(micro_tokens), micro_targets)
            (loss * weight.to(loss.dtype)).backward()
            total += loss.detach().double() * weight
        losses.append((sum_over_data_ranks(total, mesh) / data_ranks).item())
        norms.append(clip_gradient_norm(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(parameter).detach().double().numpy() for name, parameter in model.named_parameters()}
    rank0 = torch.distributed.get_rank() == 0
    return {"losses": losses, "norms": norms, "weights": weights if rank0 else None}


def reference(model: nn.Module, *, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same run in plain PyTorch: one process, the whole global batch at once, torch's own loss and clipping."""
    model = copy.deepcopy(model).to(dtype)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(steps):
        tokens, targets = global_batch(step)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}
