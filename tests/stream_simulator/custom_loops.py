"""A loop of the library's functions, without the train command."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stream_simulator.simulator import Simulator


class SkippedBlocks(nn.Module):
    """A small transformer that uses its first blocks only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, tokens: Tensor, used: int) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks[:used]:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def train(simulator: Simulator, uses_all_blocks: bool) -> None:
    """Train for four steps with accumulation over two replicas.

    Args:
        simulator: the device.
        uses_all_blocks: False: from the second step on, replica 1 uses its first block only, so
            some of its buckets have no gradients.
    """
    import parallel2d as p

    mesh = p.build_mesh(p.MeshSpec(replicate=2, shard=2), "hybrid")
    with p.build_on_meta():
        plain = SkippedBlocks()
    sync = p.SyncConfig(bucket_mib=0.01)
    config = p.ParallelConfig(strategy="hybrid", bucketing="block", sync=sync)
    model = p.parallelize(plain, mesh, config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(4):
        simulator.step = step + 1
        uses_all = uses_all_blocks or step == 0 or mesh.get_coordinate()[0] == 0
        start = torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(step))
        sequences = (start + 3 * torch.arange(33)) % 64
        batch = sequences[2 * p.data_coordinate(mesh) :][:2].to(mesh.device_type)
        weight = p.token_weight(batch[:, 1:].numel(), mesh)
        total = torch.zeros((), device=mesh.device_type)
        for micro in p.accumulate(model, batch.split(1)):
            logits = model(micro[:, :-1], 3 if uses_all else 1)
            loss = p.cross_entropy_sum(logits, micro[:, 1:]) * weight.float()
            loss.backward()
            total += loss.detach()
        mean = p.reduce(total)
        p.clip_gradient_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean.item()
    simulator.step = 0
