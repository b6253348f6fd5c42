"""parallel2d in a custom loop: five lines make a plain module train on any mesh.

torchrun --nproc-per-node=4 examples/own_loop.py

With this command, a failed replica does not stop the others (kill a rank to see it):

python -m parallel2d.launch run launch.nproc_per_node=4 launch.max_restarts=5 examples/own_loop.py
"""

import torch
from torch import nn

from parallel2d import (
    ParallelConfig,
    Replicas,
    accumulate,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    cross_entropy_sum,
    limit_waiting,
    parallelize,
    reduce,
    setup,
    teardown,
    token_weight,
)

VOCAB, STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ = 64, 20, 16, 2, 32


def build_model() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCAB, 64), nn.TransformerEncoder(block, 3), nn.Linear(64, VOCAB)
    )


def main() -> None:
    runtime = setup(timeout_s=600, replicas=True)
    # 1: detects the ranks of each node
    mesh = build_mesh(strategy="hybrid", topology=runtime.topology)
    with build_on_meta():  # 2: without weights
        model = build_model()
    # 3: shards the model, then draws its weights
    model = parallelize(model, mesh, ParallelConfig(strategy="hybrid", bucketing="block"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    replicas = Replicas(mesh, model, optimizer)
    for step in replicas.steps(1, STEPS):
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(0, VOCAB, (GLOBAL_BATCH, 1), generator=generator)
        batch = (start + 3 * torch.arange(SEQ + 1)) % VOCAB
        while replicas.compute():  # again after a replica has failed
            tokens = batch.tensor_split(replicas.data_ranks)[replicas.data_rank]
            tokens = tokens.to(mesh.device_type)
            # 4: the mean over all valid tokens, on any mesh
            weight = token_weight(tokens[:, 1:].numel(), mesh)
            total = torch.zeros((), device=mesh.device_type)
            # 5: one reduction over the slow axis per global batch
            for micro in accumulate(model, tokens.split(MICRO_BATCH)):
                loss = cross_entropy_sum(model(micro[:, :-1]), micro[:, 1:]) * weight.float()
                loss.backward()
                total += loss.detach()
            mean = reduce(total)
        norm = clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            limit_waiting(600)  # the first step may take longer than later steps
        if runtime.is_first:
            print(f"step {step:3} loss {mean.item():.4f} grad_norm {norm.item():.3f}", flush=True)
    teardown()


if __name__ == "__main__":
    main()
