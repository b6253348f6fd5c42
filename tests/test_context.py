"""Sequences divided over a context axis have the losses of one process, and a model that cannot be
divided is refused.
"""

import copy
from types import CodeType
from typing import Any

import pytest
import test_parity
import torch
import torch.nn.functional as F
from checkpoint_runs import run as checkpoint_run
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.utils.checkpoint import checkpoint
from training import forget_compiled_code
from workers import Pools, logged, refusal

from parallel2d import MeshSpec, ParallelConfig, build_mesh, clip_gradient_norm, parallelize
from parallel2d.base.config import CompileConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.topology import Topology
from parallel2d.parallel.mesh_sizes import check_placement
from parallel2d.parallel.parallelize.context_blocks import SplitBlock

VOCAB, WIDTH, LENGTH = 53, 32, 24


class Block(nn.Module):
    """A block as in many scripts; ``how`` makes a block that cannot be divided."""

    def __init__(self, how: str, dropout: float, kv_heads: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * kv_heads * 8)
        self.how, self.dropout = how, nn.Dropout(dropout)
        if how == "convolution":
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        elif how == "gate":
            self.gate = nn.Parameter(torch.full((WIDTH,), 1e-6))
        elif how == "batch norm":
            self.mix = nn.BatchNorm1d(WIDTH)
        elif how == "checkpoint":
            self.inner = Block("", dropout, kv_heads)
        elif how == "multihead":
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.how == "checkpoint":
            return checkpoint(self.inner, x, mask, table, use_reentrant=False)
        if self.how in ("convolution", "batch norm"):
            x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        elif self.how == "gate":
            x = x + self.gate * x.cumsum(1)
        elif self.how == "loss":
            self.loss = x.mean((0, 1)).square().sum()
        elif self.how == "positions":
            table = torch.linspace(0, 1, length, dtype=x.dtype)[:, None]
        h = self.norm(x) + table
        if self.how == "multihead":
            return x + self.attention(h, h, h, need_weights=False)[0]
        q, k, v = (
            each.view(batch, length, -1, 8).transpose(1, 2)
            for each in (self.query(h), *self.key_value(h).chunk(2, -1))
        )
        causal = mask is None and self.how != "bidirectional"
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1]
        )
        x = x + self.dropout(self.project(out.transpose(1, 2).flatten(2)))
        return x + self.mlp(x).tanh()


class Model(nn.Module):
    def __init__(self, how: str = "", dropout: float = 0.0, kv_heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(how, dropout, kv_heads) for _ in range(2))
        self.how = how

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        x, mask, length = self.embedding(tokens), None, tokens.shape[1]
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same & torch.ones(length, length, dtype=torch.bool).tril()
        table = torch.linspace(-1, 1, 64, dtype=x.dtype)[:length, None]
        for block in self.blocks:
            x = block(x, mask, table)
            if self.how == "between":
                x = x - x.mean(1, keepdim=True)
        return self.head(x)


def inputs_of(step: int, documents: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    tokens = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    starts = (torch.arange(LENGTH) > torch.tensor([[5], [11], [17], [2]])).long()
    return (tokens[:, :-1], starts)[: 1 + documents], tokens[:, 1:]


def differences(sizes: dict[str, int], strategy: str, cases: list[dict[str, Any]]) -> list[float]:
    """Return the largest differences of losses and gradient norms of `Model` from one process over
    some steps; 1e9 for a refusal.
    """
    mesh, found = build_mesh(MeshSpec(**sizes), strategy), []
    for case in cases:
        torch.manual_seed(1)
        options = dict(case)
        documents = options.pop("documents", False)
        recomputed = options.pop("recomputed", "none")
        compilation = options.pop("compile", "none")
        plain = Model(**options).double()
        config = ParallelConfig(
            strategy, precision="fp64", activation_checkpointing=recomputed, compile=compilation
        )
        model = parallelize(copy.deepcopy(plain), mesh, config)
        both = [(each, torch.optim.AdamW(each.parameters(), 1e-2)) for each in (plain, model)]
        most = 0.0
        for step in range(3):
            inputs, targets = inputs_of(step, documents)
            values = []
            for each, optimizer in both:
                loss = F.cross_entropy(each(*inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                values.append((loss.item(), float(clip_gradient_norm(each.parameters(), 1.0))))
                optimizer.step()
                optimizer.zero_grad()
            most = max(most, *(abs(a - b) for a, b in zip(*values, strict=True)))
        found.append(most)
    return found


SOUND = [
    {},
    {"how": "bidirectional", "kv_heads": 1, "documents": False},
    {"kv_heads": 2, "documents": True},
    {"kv_heads": 1, "recomputed": "full"},
    {"kv_heads": 1, "recomputed": "selective"},
    {"kv_heads": 1, "documents": True},
    {"how": "multihead"},
    {"how": "multihead", "recomputed": "full"},
]


EAGER = CompileConfig("block", "eager")
COMPILED = [
    {"kv_heads": 2, "documents": True, "compile": EAGER},
    {"kv_heads": 1, "recomputed": "full", "compile": EAGER},
    {"how": "bidirectional", "kv_heads": 1, "compile": EAGER},
]


def compiled_differences(*args: Any) -> tuple[list[float], int, list[str]]:
    """Return the `differences`, the number of graphs, and the warnings about compilation."""
    forget_compiled_code()
    with logged("parallel2d.parallel.parallelize.compilation") as messages:
        found = differences(*args)
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"], messages


@pytest.fixture
def fresh_ranks():
    """Ranks in new processes: torch counts the compilations of a process."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.slow
def test_compiled_blocks_exchange_their_attention_in_one_graph(fresh_ranks):
    for found, graphs, messages in fresh_ranks.run(
        2, compiled_differences, {"context": 2}, "zero3", COMPILED
    ):
        assert max(found) < 1e-10, found
        assert graphs == len(COMPILED)
        assert not messages
    # A checkpoint hides the function mode from the compiler.
    hidden = [{"how": "checkpoint", "compile": EAGER}]
    for found, _, messages in fresh_ranks.run(
        2, compiled_differences, {"context": 2}, "zero3", hidden
    ):
        assert max(found) < 1e-10, found
        assert messages == [
            "blocks.0 is not compiled, which is slower: a checkpoint inside of it calls attention"
        ]


def differences_of_skipped_code(*args: Any) -> tuple[list[float], list[str]]:
    """Return the `differences` of blocks whose code torch no longer compiles, and the warnings."""
    constants = SplitBlock._forward_of.__code__.co_consts
    code = next(each for each in constants if isinstance(each, CodeType))
    # As torch marks a function and the functions that it calls
    eval_frame.set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    with logged("parallel2d.parallel.parallelize.compilation") as messages:
        return differences(*args), messages


@pytest.mark.slow
def test_block_runs_uncompiled_when_torch_no_longer_compiles_its_code(fresh_ranks):
    case = {"kv_heads": 2, "compile": EAGER}
    for found, messages in fresh_ranks.run(
        2, differences_of_skipped_code, {"context": 2}, "zero3", [case]
    ):
        assert max(found) < 1e-10, found
        assert messages == [
            "blocks.0 is not compiled, which is slower: torch has compiled its code too often in "
            "this process"
        ]


def attention_inside_blocks(sizes: dict[str, int]) -> set[int]:
    """Identities of ``F.scaled_dot_product_attention`` while blocks run."""
    mesh = build_mesh(MeshSpec(**sizes), "zero3")
    model = parallelize(Model("multihead"), mesh, ParallelConfig("zero3"), broadcast_from=0)
    found = {id(F.scaled_dot_product_attention)}

    def pack(tensor: Tensor) -> Tensor:
        found.add(id(F.scaled_dot_product_attention))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(LENGTH).repeat(2, 1)).sum().backward()
    return found


def test_blocks_run_with_sdpa_replaced_by_context_attention(ranks):
    for found in ranks.run(2, attention_inside_blocks, {"context": 2}):
        assert len(found) == 1


def refusals(sizes: dict[str, int], hows: list[str]) -> list[str]:
    mesh, found = build_mesh(MeshSpec(**sizes), "zero3"), []
    for how in hows:
        length = 23 if how == "odd" else LENGTH
        model = parallelize(Model(how), mesh, ParallelConfig("zero3"), broadcast_from=0)
        found.append(refusal(model, torch.arange(length).repeat(2, 1)))
    return found


def test_two_context_ranks_compute_as_one_and_position_mixing_is_refused(ranks):
    for found in ranks.run(2, differences, {"context": 2}, "zero3", SOUND):
        assert max(found) < 1e-10, found
    words = {
        "convolution": "blocks.0.mix (Conv1d) mixes positions outside of",
        "gate": "blocks.0 (Block) mixes positions",
        "positions": "or counts them",
        "loss": "blocks.0.loss is computed from a slice",
        "batch norm": "blocks.0.mix is a BatchNorm1d",
        "between": "Model, between its blocks, mixes positions",
        "odd": "sequences of 23 positions, which must be a multiple of 2",
    }
    for messages in ranks.run(2, refusals, {"context": 2}, list(words)):
        for message, word in zip(messages, words.values(), strict=True):
            assert message.startswith("mesh.context=2: "), message
            assert word in message, message


def drawn(sizes: dict[str, int]) -> Any:
    """Return the output of a forward with dropout on this rank, and the random numbers drawn after
    it.
    """
    mesh = build_mesh(MeshSpec(**sizes), "zero3")
    torch.manual_seed(1)
    config = ParallelConfig("zero3", precision="fp64", activation_checkpointing="full")
    model = parallelize(Model(dropout=0.5).double(), mesh, config)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    torch.manual_seed(5)
    logits = model(tokens)
    logits.sum().backward()
    return logits[0, :, 0].tolist(), torch.rand(1).item()


@pytest.mark.slow
def test_dropout_differs_between_sequence_slices_and_ranks_stay_in_step(ranks):
    (logits, number), other = ranks.run(2, drawn, {"context": 2})
    assert other == (logits, number)
    assert logits[: LENGTH // 2] != logits[LENGTH // 2 :]


AOT = {"compile": CompileConfig("block", "aot_eager")}
CASES = [
    ({"replicate": 2, "context": 2}, "hybrid", {}, {"accumulation": 2}),
    ({"shard": 2, "context": 2}, "zero3", {}, {"loss_chunk": 7}),
    ({"context": 4}, "zero3", {}, {}),
    ({"context": 2, "tensor": 2}, "zero3", {}, {}),
    ({"replicate": 2, "context": 2}, "hybrid_full", {}, {"loss_chunk": 50}),
    ({"replicate": 2, "context": 2}, "hybrid", AOT, {"accumulation": 2}),
    ({"replicate": 2, "context": 2}, "hybrid", {**AOT, "activation_checkpointing": "full"}, {}),
    ({"context": 4}, "zero3", {**AOT, "activation_checkpointing": "selective"}, {}),
    ({"context": 2, "tensor": 2}, "zero3", AOT, {"loss_chunk": 7}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "strategy", "config", "options"), CASES)
def test_fp64_equals_plain_pytorch(ranks, fresh_ranks, mesh, strategy, config, options):
    config = {"strategy": strategy, **config}
    test_parity.check(
        fresh_ranks if "compile" in config else ranks, 4, mesh, config, steps=10, **options
    )


@pytest.mark.slow
def test_run_resumes_with_other_context_sizes(ranks, tmp_path):
    layouts = [
        (4, {"context": 4}, "zero3"),
        (1, {}, "zero3"),
        (4, {"replicate": 1, "shard": 1, "context": 2, "tensor": 2}, "hybrid"),
    ]
    losses: dict[str, dict[int, float]] = {}
    for folder, chain in (("same", layouts[1:2] * 3), ("other", layouts)):
        losses[folder] = {}
        for step, (world, mesh, strategy) in enumerate(chain, start=1):
            config = {"strategy": strategy, "precision": "fp64"}
            path = str(tmp_path / folder)
            run = ranks.run(world, checkpoint_run, path, mesh, config, steps=step)[0]
            losses[folder] |= run["losses"]
    assert losses["other"] == pytest.approx(losses["same"], abs=1e-10)


def test_context_axis_size_and_placement_are_checked():
    hosts = Topology.equal_hosts(2, 8)
    shape = MeshSpec(context=4).resolve("hybrid", hosts)
    assert (shape.replicate, shape.shard, shape.context, shape.data_ranks) == (2, 2, 4, 4)
    assert not check_placement(shape.place(hosts), hosts, False)
    with pytest.raises(ConfigError, match=r"strategy=zero3 or strategy=hybrid"):
        MeshSpec(context=2).resolve("ddp", hosts)
    with pytest.raises(ConfigError, match=r"mesh.context=3 does not divide 16 ranks"):
        MeshSpec(context=3).resolve("zero3", hosts)
    across = MeshSpec(1, 1, context=4).resolve("zero3", Topology.equal_hosts(1, 4))
    with pytest.raises(ConfigError, match=r"mesh.context=4: the context group .* crosses hosts"):
        check_placement(across.place(Topology.equal_hosts(1, 4)), Topology(("a", "b") * 4), False)
