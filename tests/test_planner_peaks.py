"""FLOPs and peaks of deep models from few of their blocks, compared with the figures of all
blocks.
"""

import functools
from typing import Any

import pytest
import torch
from planned import Odd, small_llama
from torch import nn
from training import loss_of_logits

from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import JobCosts
from parallel2d.parallel.cost import flops as flop_counts
from parallel2d.parallel.cost.equal_blocks import by_blocks, find_equal_blocks
from parallel2d.parallel.cost.flops import count_flops
from parallel2d.training.data.batch import token_sequences
from tools.bench.predicted_peaks import LAYOUTS, MODELS, error_of

EXAMPLE = functools.partial(token_sequences(8).example, 1)


def counted_runs(monkeypatch) -> list[int]:
    """The number of parameters of each model that is run."""
    runs: list[int] = []
    run = flop_counts._count

    def noted(model, example, loss):
        runs.append(sum(parameter.numel() for parameter in model.parameters()))
        return run(model, example, loss)

    monkeypatch.setattr(flop_counts, "_count", noted)
    return runs


def both_counts(model: nn.Module, loss: Any = loss_of_logits) -> tuple[int | None, int | None]:
    """Counted FLOPs, and the FLOPs of a run of all blocks."""
    all_blocks = flop_counts._count(model, EXAMPLE, loss)
    return count_flops(model, EXAMPLE, loss), all_blocks and all_blocks["flops"]


class Encoder(nn.Module):
    """Two stacks of different blocks; each block of the second reads the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.decoder = nn.ModuleList(nn.Linear(16, 8) for _ in range(9))
        self.head = nn.Linear(8, 37)

    def forward(self, tokens):
        seen = self.embedding(tokens)
        for block in self.encoder:
            seen = block(seen)
        x = self.embedding(tokens)
        for block in self.decoder:
            x = block(torch.cat([x, seen], dim=-1))
        return self.head(x)


class Alternating(nn.Module):
    """Equal blocks that are not used alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.head = nn.Linear(8, 37)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_flops_of_deep_models_count_all_their_blocks(monkeypatch):
    with torch.device("meta"):
        deep, encoder, alternating, odd = small_llama(n_layers=20), Encoder(), Alternating(), Odd()
    # Frozen blocks and tied weights count as they are.
    odd.blocks.extend(list(Odd(tied=False).to("meta").blocks)[2:] * 2)
    for model in (deep, encoder, alternating, odd):
        few, all_of_them = both_counts(model)
        assert few == all_of_them
    assert [stack.count for stack in find_equal_blocks(encoder)] == [7, 9]
    runs = counted_runs(monkeypatch)
    count_flops(deep, EXAMPLE, loss_of_logits)
    whole = sum(parameter.numel() for parameter in deep.parameters())
    assert len(runs) == 3
    assert max(runs) < whole / 2
    assert len(deep.layers) == 20
    # Blocks that are used differently are all run.
    count_flops(alternating, EXAMPLE, loss_of_logits)
    assert runs[-1] == sum(parameter.numel() for parameter in alternating.parameters())


def test_adjacent_equal_blocks_are_grouped_and_unmeasurable_figures_are_none():
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
    blocks[9].bias.requires_grad = False
    (stack,) = find_equal_blocks(nn.Sequential(blocks))
    assert (stack.first, stack.count) == (0, 9)
    assert by_blocks(small_llama(n_layers=6), lambda part: None) is None


# By model: the layouts, of any two settings, and the bounds of the error.
PEAKS = {
    "llama": (
        ("hybrid, selective", "zero2", "tensor 2", "hybrid_full, bf16 between replicas"),
        -0.005,
        0.04,
    ),
    "llama, large vocabulary": (("hybrid",), -0.001, 0.01),
    "llama, large vocabulary, loss_chunk": (("zero2",), -0.001, 0.01),
    "mlp": (
        ("hybrid, by layer", "hybrid, whole gradients kept", "zero3, full recomputation, by layer"),
        -0.03,
        0.06,
    ),
}


def test_predicted_peak_is_near_the_traced_peak():
    cost, error = error_of(*MODELS["llama"], *LAYOUTS["zero3, one micro-batch, bf16"])
    assert -0.005 < error < 0.04
    assert sum(cost.predicted.by_kind.values()) == cost.predicted.peak


@pytest.mark.slow
@pytest.mark.parametrize("model", PEAKS)
def test_predicted_peak_is_near_the_traced_peak_of_other_models(model):
    layouts, least, most = PEAKS[model]
    for layout in layouts:
        _, error = error_of(*MODELS[model], *LAYOUTS[layout])
        assert least < error < most, layout


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_peak_is_near_the_traced_peak_on_every_layout(layout):
    _, error = error_of(*MODELS["llama"], *LAYOUTS[layout])
    assert -0.005 < error < 0.04


@pytest.mark.slow
def test_chunked_loss_lowers_the_predicted_peak():
    words = (*MODELS["llama, large vocabulary"], "strategy=ddp", "train.micro_batch_size=8")
    peaks = []
    for chunk in ("null", "64"):
        config = compose([*words, "train.seq_len=128", f"train.loss_chunk={chunk}"]).config
        costs = JobCosts(config)
        peaks.append(costs.with_peak(config, costs.cost(config)).predicted.peak)
    logits = 8 * 128 * 32768 * 4
    # The logits and their gradient, later replaced by the gradient of the head's weight.
    assert peaks[0] - peaks[1] > logits
