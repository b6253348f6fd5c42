"""Fine-tune a local ``transformers`` checkpoint, sharded, in a custom loop, and save it in the same
format.

pip install 'parallel2d[hf]'
torchrun --nproc-per-node=4 examples/finetune.py --model FOLDER --save NEW_FOLDER
torchrun --nproc-per-node=4 examples/finetune.py --model FOLDER --save NEW_FOLDER --lora 8

With --lora the saved weights have the adapters merged.

Without --model the example creates a small Llama with random weights in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel2d import (
    ParallelConfig,
    accumulate,
    barrier,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    cross_entropy_sum,
    data_coordinate,
    full_state,
    load_pretrained,
    mesh_shape,
    parallelize,
    reduce,
    setup,
    teardown,
    token_weight,
)
from parallel2d.models import huggingface

SEQ, GLOBAL_BATCH, MICRO_BATCH = 32, 16, 2
ADAPTED = ("q_proj", "v_proj")  # the adapters add to their outputs


class Adapter(nn.Module):
    """Low-rank product up(down(x)). ``up`` starts at zero, so that the model starts unchanged."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Parameter(torch.empty(rank, inputs)),
            nn.Parameter(torch.empty(outputs, rank)),
        )

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.T @ self.up.T


class AdaptedLinear(nn.Linear):
    """A Linear plus an adapter; the parameters of the Linear keep their names."""

    adapter: Adapter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze ``model`` and add an adapter to every Linear with a name in `ADAPTED`."""
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ADAPTED):
            module.__class__ = AdaptedLinear
            module.adapter = Adapter(module.in_features, module.out_features, rank)


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full weights without adapters: W + up @ down for adapted layers."""
    found = {name: tensor for name, tensor in state.items() if ".adapter." not in name}
    for name, down in state.items():
        linear, adapter, leaf = name.rpartition(".adapter.")
        if adapter and leaf == "down":
            found[f"{linear}.weight"] = (
                found[f"{linear}.weight"] + state[f"{linear}.adapter.up"] @ down
            )
    return found


def build_small_llama(path: str) -> None:
    """Write a folder in the format of a download."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    huggingface.build(
        architecture="llama", arguments={**sizes, "num_key_value_heads": 2}
    ).save_pretrained(path)


def train(model: nn.Module, steps: int, lr: float) -> list[dict[str, float]]:
    """Train ``steps`` steps on a small artificial language. Return ``step``, ``loss`` and
    ``grad_norm`` of each step, on every rank."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
    mesh = next(model.parameters()).device_mesh
    rank, ranks, rows = data_coordinate(mesh), mesh_shape(mesh).data_ranks, []
    for step in range(1, steps + 1):
        start = torch.randint(
            0, 64, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step)
        )
        tokens = ((start + 3 * torch.arange(SEQ + 1)) % 64).chunk(ranks)[rank].to(mesh.device_type)
        weight = token_weight(tokens[:, 1:].numel(), mesh).float()
        total = torch.zeros((), device=mesh.device_type)
        for micro in accumulate(model, tokens.split(MICRO_BATCH)):
            loss = cross_entropy_sum(model(micro[:, :-1]), micro[:, 1:]) * weight
            loss.backward()
            total += loss.detach()
        norm = clip_gradient_norm(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step, "loss": reduce(total).item(), "grad_norm": norm.item()})
    return rows


def finetune(
    path: str, save: str | None, *, strategy: str, lora: int, steps: int, lr: float
) -> list[dict[str, float]]:
    """Load the folder ``path`` into shards, train, and write the folder ``save``. Return the rows
    of `train`. Collective."""
    mesh = build_mesh(strategy=strategy)
    with build_on_meta():
        model = huggingface.build(path=path)
        if lora:
            add_adapters(model, lora)
    # Every rank reads only its rows of the folder. The folder has no adapters: they are drawn from
    # the seed.
    weights = partial(load_pretrained, path=path, fresh=("*.adapter.*",) if lora else ())
    model = parallelize(model, mesh, ParallelConfig(strategy), seed=0, weights=weights)
    rows = train(model, steps, lr)
    if save is not None:
        state = full_state(model)  # on rank 0, in CPU memory
        if dist.get_rank() == 0:
            with torch.device("meta"):
                bare = huggingface.build(path=path)
            bare.save_pretrained(save, state_dict=merged(state["model"]))
        barrier("the model is saved")
    return rows


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument(
        "--model", default=None, help="folder with config.json and safetensors weights"
    )
    words.add_argument("--save", default=None, help="a new folder")
    words.add_argument("--strategy", default="hybrid")
    words.add_argument(
        "--lora", type=int, default=0, help="rank of the adapters; 0: every parameter is trained"
    )
    words.add_argument("--steps", type=int, default=10)
    words.add_argument("--lr", type=float, default=3e-3)
    given = words.parse_args()
    runtime = setup(timeout_s=600)
    with tempfile.TemporaryDirectory() as folder:
        shared = [given.model or os.path.join(folder, "model")]
        dist.broadcast_object_list(shared)  # rank 0's folder
        if given.model is None and runtime.is_first:
            build_small_llama(shared[0])
        barrier("there is a model")
        rows = finetune(
            shared[0],
            given.save,
            strategy=given.strategy,
            lora=given.lora,
            steps=given.steps,
            lr=given.lr,
        )
        barrier("the folder is not needed any more")
    for row in rows if runtime.is_first else []:
        print(json.dumps(row), flush=True)
    teardown()


if __name__ == "__main__":
    main()
