"""FLOPs and peaks of deep models from few of their blocks, and sync methods that the search may choose."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from planned import Odd, small_llama
from torch import nn

from parallel2d.config.composition import compose
from parallel2d.cost import flops as flop_counts
from parallel2d.cost.equal_blocks import by_blocks, find_equal_blocks
from parallel2d.cost.flops import count_flops
from parallel2d.cost.predicted_peak import PredictedMemory
from parallel2d.data.batch import token_sequences
from parallel2d.loss import cross_entropy_sum
from parallel2d.planner.layout_cost import cost_of
from parallel2d.planner.layout_search import search
from parallel2d.planner.ranking import fixed_keys
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


def both_counts(model: nn.Module, loss: Any = cross_entropy_sum) -> tuple[int | None, int | None]:
    """FLOPs as counted, and those of a run of all blocks."""
    return count_flops(model, EXAMPLE, loss), flop_counts._count(model, EXAMPLE, loss)


def test_flops_of_a_deep_model_are_those_of_all_its_blocks(monkeypatch):
    with torch.device("meta"):
        model = small_llama(n_layers=20)
    few, all_of_them = both_counts(model)
    assert few == all_of_them
    runs = counted_runs(monkeypatch)
    count_flops(model, EXAMPLE, cross_entropy_sum)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert len(runs) == 3
    assert max(runs) < whole / 2
    # It is as it was.
    assert len(model.layers) == 20


class Encoder(nn.Module):
    """Two stacks of different blocks, of which the second sees the first's output in each block."""

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


def test_each_stack_counts_on_its_own():
    model = Encoder().to("meta")
    assert [stack.count for stack in find_equal_blocks(model)] == [7, 9]
    few, all_of_them = both_counts(model)
    assert few == all_of_them


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


def test_blocks_that_are_used_differently_are_all_run(monkeypatch):
    model = Alternating().to("meta")
    few, all_of_them = both_counts(model)
    assert few == all_of_them
    runs = counted_runs(monkeypatch)
    count_flops(model, EXAMPLE, cross_entropy_sum)
    assert runs[-1] == sum(parameter.numel() for parameter in model.parameters())


def test_frozen_blocks_and_tied_weights_count_as_they_are():
    model = Odd().to("meta")
    model.blocks.extend(list(Odd(tied=False).to("meta").blocks)[2:] * 2)
    few, all_of_them = both_counts(model)
    assert few == all_of_them


def test_a_block_that_differs_in_an_attribute_ends_the_run():
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
    for number, block in enumerate(blocks):
        block.number = number
    blocks[9].window = 3
    (stack,) = find_equal_blocks(nn.Sequential(blocks))
    assert (stack.first, stack.count) == (0, 9)


def test_what_cannot_be_measured_is_none():
    assert by_blocks(small_llama(n_layers=6), lambda part: None) is None


HF = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9, "num_attention_heads": 2, "vocab_size": 37},
    "gpt2": {"n_embd": 16, "n_layer": 9, "n_head": 2, "vocab_size": 37},
    "mixtral": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_local_experts": 2, "vocab_size": 37, "experts_implementation": "batched_mm",
    },
}  # fmt: skip


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("architecture", HF)
def test_flops_of_models_of_transformers(architecture):
    words = [f"model.arguments.{key}={value}" for key, value in HF[architecture].items()]
    config = compose(["model=hf", f"model.architecture={architecture}", *words]).config
    from parallel2d.model_families import build_model

    parts = build_model(config.model)
    few, all_of_them = both_counts(parts.module, parts.loss)
    assert few == all_of_them
    assert few is not None


@pytest.mark.extras("transformers")
def test_flops_of_an_encoder_and_a_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=8, num_decoder_layers=7, vocab_size=37
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    model.config.use_cache = False
    # The first block of each stack owns the distances of positions.
    assert [stack.count for stack in find_equal_blocks(model)] == [7, 6]

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, decoder_input_ids=tokens)

    few, all_of_them = both_counts(Pair())
    assert few == all_of_them
    assert few is not None


# The others under -m slow: each takes seconds.
OFTEN = ("zero3, one micro-batch, bf16", "hybrid_full, bf16 between replicas", "ddp")


@pytest.mark.parametrize(
    "layout",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_the_predicted_peak_is_the_traced_one(layout):
    cost, error = error_of(*MODELS["llama"], *LAYOUTS[layout])
    assert -0.005 < error < 0.04
    assert sum(cost.predicted.by_kind.values()) == cost.predicted.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["llama, large vocabulary", "llama, large vocabulary, loss_chunk"]
)
@pytest.mark.parametrize("layout", ["hybrid", "zero2"])
def test_the_predicted_peak_with_a_large_vocabulary(model, layout):
    _, error = error_of(*MODELS[model], *LAYOUTS[layout])
    assert -0.001 < error < 0.01


def test_the_loss_in_chunks_lowers_the_predicted_peak():
    words = (*MODELS["llama, large vocabulary"], "strategy=ddp", "train.micro_batch_size=8")
    whole, chunked = (
        cost_of(compose([*words, "train.seq_len=128", f"train.loss_chunk={chunk}"]).config)
        for chunk in ("null", "64")
    )
    logits = 8 * 128 * 32768 * 4
    # The logits and their gradient, and the gradient of the head's weight comes in their place.
    assert whole.predicted.peak - chunked.predicted.peak > logits


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("tensor")])
def test_the_predicted_peak_of_a_plain_stack_of_layers(layout):
    _, error = error_of(*MODELS["mlp"], *LAYOUTS[layout])
    assert -0.03 < error < 0.16


def test_micro_batches_between_two_that_were_measured_need_what_lies_between():
    words = (
        "model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=4", "model.hidden_dim=128", "train.seq_len=64", "train.global_batch_size=64", "cluster=h100", "cluster.nodes=1", "cluster.ranks_per_node=8",
        "strategy=hybrid", "mesh.shard=4", "mesh.tensor=1", "bucketing=block", "activation_checkpointing=none", "precision=bf16",
    )  # fmt: skip
    result = search(compose(words).config, fixed_keys(words))
    assert [layout.config.train.micro_batch_size for layout in result.ranked] != []
    for layout in result.ranked:
        alone = cost_of(layout.config)
        assert isinstance(alone.predicted, PredictedMemory)
        assert isinstance(layout.cost.predicted, PredictedMemory)
        assert layout.cost.predicted.peak == pytest.approx(alone.predicted.peak, rel=0.02)


# Sync methods


def names(methods):
    return [(method.name, method.wire, method.fragments) for method in methods]


@pytest.mark.slow
def test_a_huge_model_on_a_huge_cluster_is_planned_in_seconds():
    # CPU seconds of a process of its own, with the import of torch: a clock on a wall would depend on what else runs.
    program = (
        "import sys, time; from parallel2d import plan\n"
        "code = plan.main(sys.argv[1:])\n"
        "print('CPU', time.process_time())\n"
        "sys.exit(code)"
    )
    words = (
        "model=llama_405b", "cluster=h100", "cluster.nodes=2048", "precision=bf16", "train.seq_len=8192", "train.global_batch_size=2048",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "mesh.tensor=8" in ended.stdout
    seconds = float(ended.stdout.rsplit("CPU", 1)[1])
    assert seconds < 20
