"""Unusual models and loops that DDP allows: correct results, or one sentence with the remedy."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel2d import (
    ConfigError,
    MeshSpec,
    ParallelConfig,
    PrecisionConfig,
    accumulate,
    attach_optimizer,
    build_mesh,
    certify,
    compare_replicas,
    full_state,
    load_full,
    parallelize,
    save_full,
    summon_full_params,
    updated_parameters,
)
from parallel2d.config import CheckpointConfig
from parallel2d.training.checkpoint.checkpointer import Checkpointer


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.a = nn.Parameter(torch.empty(0, 4))
        self.b = nn.Parameter(torch.empty(4, 0))

    def attend(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0] + x @ self.a.T @ self.b.T

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)


class Odd(nn.Module):
    """Blocks in containers that are never called, forwards called directly, sparse and empty
    gradients.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleDict({"attention": Attention()}), nn.LayerNorm(4), None])
            for _ in range(2)
        )

    def forward(self, x):
        x = self.embedding(x)
        for inner, norm, _ in self.layers:
            x = norm(inner["attention"].forward(x))
        return x


def _train(model, tokens):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.forward(tokens).square().mean().backward()
        optimizer.step()
    return model


def _mesh(strategy):
    sizes = {"replicate": 2, "shard": 2} if strategy.startswith("hybrid") else {}
    return build_mesh(MeshSpec(**sizes), strategy)


def _odd(strategy, bucketing):
    torch.manual_seed(0)
    alone, model = Odd().double(), Odd().double()
    model.load_state_dict(alone.state_dict())
    # The model's own dtype until it runs; then the configured dtype is used.
    config = ParallelConfig(strategy, bucketing, precision="fp64")
    mesh = _mesh(strategy)
    model = parallelize(model, mesh, config, broadcast_from=0)
    tokens = torch.arange(8).view(4, 2)
    _train(model, tokens[dist.get_rank() : dist.get_rank() + 1])
    whole = full_state(model, rank0_only=False)["model"]
    expected = _train(alone, tokens).state_dict()
    filled = {name: value for name, value in expected.items() if value.numel()}
    worst = [(whole[name] - value).abs().max().item() for name, value in filled.items()]
    config = ParallelConfig(strategy, precision="fp64")
    low = parallelize(nn.Linear(4, 4), mesh, config, broadcast_from=0)
    low.float()(torch.ones(2, 4)).sum().backward()
    return max(worst), {parameter.grad.dtype for parameter in low.parameters()}


@pytest.mark.parametrize("strategy", ["hybrid", "zero3", "ddp"])
def test_unusual_models_train_as_in_one_process(ranks, strategy):
    for bucketing in ("block", "layer"):
        for worst, dtypes in ranks.run(4, _odd, strategy, bucketing):
            assert worst < 1e-12
            assert dtypes == {torch.float32}


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Mixed(nn.Module):
    """A block with a part that computes in fp32."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.router = Router(8, 8)

    def forward(self, x):
        return x + self.up(x) * self.router(x).softmax(-1)


class InPlace(nn.Module):
    """A block that changes results in place, or one of its arguments."""

    def __init__(self, changes=""):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.changes = changes

    def forward(self, x):
        if self.changes == "argument":
            x += 1
        query = self.up(x)
        scores = query @ x.transpose(-1, -2)
        scores /= 2
        scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9)
        hidden = self.up(scores.softmax(-1) @ query)
        hidden[:, 0] += 1
        hidden.data.mul_(0.5)
        if self.changes == "many":
            torch._foreach_add_([hidden], [x])
        return self.down(torch.tanh(hidden) * F.relu(self.up(x), inplace=True))


class Cached(InPlace):
    def forward(self, x, cache):
        if cache is not None:
            cache.keys = self.up(x)
        return super().forward(x)


class Generating(nn.Module):
    """A model with the cache of transformers: blocks fill it unless ``use_cache`` is false."""

    def __init__(self, always=False):
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList([Cached(), Cached()])
        self.config, self.always = SimpleNamespace(use_cache=True), always

    def forward(self, x, use_cache=True):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, SimpleNamespace() if use_cache or self.always else None)
        return x


class Changed(nn.Sequential):
    """Modify the outputs of the blocks."""

    def forward(self, x):
        for block in self:
            result = block(x=x)
            result += 1
            x = torch.tanh(result)
        return x


def _gradients(plain, batch, strategy, casts=(), autocast=False, **config):
    """Return the largest relative difference of a gradient from one process, after two
    micro-batches of each of four ranks, and the pairs (dtype of a parameter, of its gradient).
    """
    config = ParallelConfig(strategy, **config)
    model = parallelize(copy.deepcopy(plain), _mesh(strategy), config)
    for module in casts:
        module.bfloat16()
    optimizer = torch.optim.SGD(updated_parameters(model), lr=0.1)
    attach_optimizer(model, optimizer)
    dtype = next(plain.parameters()).dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for part in batch.chunk(4):
            for micro_batch in part.split(1):
                (plain(micro_batch.to(dtype)).float().square().mean() / 4).backward()
        for micro_batch in accumulate(model, batch.chunk(4)[dist.get_rank()].split(1)):
            model(micro_batch).float().square().mean().backward()
    worst, dtypes = 0.0, set()
    for own, updated in zip(plain.parameters(), updated_parameters(model), strict=True):
        error = (updated.grad.full_tensor().double() - own.grad.double()).abs().max()
        worst = max(worst, (error / own.grad.double().abs().max()).item())
        dtypes.add((own.dtype, updated.grad.dtype))
    optimizer.step()
    return worst, dtypes


BF16 = PrecisionConfig("bf16", "bf16", "bf16", "fp32", fp32_modules=["Router"])


def _computed_alike(strategy):
    torch.manual_seed(0)
    found = {}
    plain = nn.Sequential(nn.Linear(8, 8), Mixed(), Mixed())
    batch = torch.randn(8, 5, 8)
    found["autocast"] = _gradients(copy.deepcopy(plain), batch, strategy, autocast=True)
    # Floating-point inputs are cast, also where parameters are not.
    found["inputs"] = _gradients(copy.deepcopy(plain), batch.double(), strategy)
    casts = [plain[0], plain[1].up, plain[2].up]
    found["fp32 modules"] = _gradients(plain, batch, strategy, casts=casts, precision=BF16)
    for mode in ("full", "selective"):
        plain = Changed(InPlace(), InPlace(), InPlace()).double()
        options = {"precision": "fp64", "activation_checkpointing": mode}
        found[mode] = _gradients(plain, batch.double(), strategy, **options)
        found[mode + " cache"] = _gradients(
            Generating().double(), batch.double(), strategy, **options
        )
    refused = []
    for changes, bucketing in (
        ("argument", "block"), ("argument", "layer"), ("many", "block"), ("cache", "block"),
    ):  # fmt: skip
        model = Changed(*(InPlace(changes) for _ in range(3)))
        if changes == "cache":
            model = Generating(always=True)
        config = ParallelConfig(strategy, bucketing, activation_checkpointing="selective")
        model = parallelize(model, _mesh(strategy), config)
        with pytest.raises(RuntimeError) as error:
            model(torch.tanh(batch.requires_grad_()))
        refused.append(str(error.value))
    return found, refused


CHANGES = (
    "0 changes an argument in place, which sharded modules cannot",
    "0 changes an argument in place, and activation_checkpointing recomputes it",
    "0 calls _foreach_add_.List, which has wrong gradients with activation_checkpointing=selective",
    "blocks.0 stores tensors in its SimpleNamespace argument, and activation_checkpointing",
)


@pytest.mark.parametrize("strategy", ["hybrid", "hybrid_full"])
def test_dtypes_and_changes_in_place_equal_one_process(ranks, strategy):
    for found, refused in ranks.run(4, _computed_alike, strategy):
        assert found["autocast"][0] < 1e-2
        assert found["fp32 modules"][0] < 1e-2
        low, high = torch.bfloat16, torch.float32
        assert found["fp32 modules"][1] == {(low, low), (high, high)}
        assert found["inputs"][0] < 1e-6
        for mode in ("full", "selective", "full cache", "selective cache"):
            assert found[mode][0] < 1e-12, mode
        for message, expected in zip(refused, CHANGES, strict=True):
            assert message.startswith(expected)


def _two_jobs(folder):
    """Two models, each on one half of the ranks, which train for different numbers of steps."""
    rank = dist.get_rank()
    meshes = [
        DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        for ranks in ([[0, 1]], [[2], [3]])
    ]
    half = rank // 2
    mesh, config = meshes[half], ParallelConfig(["zero3", "ddp"][half], precision="fp64")
    torch.manual_seed(rank)  # the first rank of each half sends its weights
    model = nn.Sequential(nn.Linear(4, 6 + half), nn.Tanh(), nn.Linear(6 + half, 4)).double()
    model = parallelize(model, mesh, config, broadcast_from=2 * half)
    torch.manual_seed(2 * half)
    plain = nn.Sequential(nn.Linear(4, 6 + half), nn.Tanh(), nn.Linear(6 + half, 4)).double()
    batch, path = torch.randn(4, 4, dtype=torch.float64), f"{folder}/half{half}"
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain)]

    def train(trained, optimizer, steps):
        for _ in range(3 - half if steps is None else steps):
            optimizer.zero_grad()
            rows = batch.chunk(2)[rank % 2] if trained is not plain else batch
            trained(rows).square().mean().backward()
            optimizer.step()

    def difference(trained):
        found = full_state(trained, rank0_only=False)["model"]
        return max((found[name] - each).abs().max() for name, each in plain.state_dict().items())

    train(model, optimizers[0], None)
    train(plain, optimizers[1], None)
    state = full_state(model, optimizers[0])
    saved = Checkpointer(CheckpointConfig(every=1), path, mesh, model, optimizers[0])
    saved.save_if_due(3, {}, last=True)
    saved.finish()
    save_full(f"{path}.pt", model, optimizers[0], half=half)
    again = parallelize(copy.deepcopy(plain), mesh, config)
    resumed = torch.optim.AdamW(again.parameters(), 0.01)
    extra = load_full(f"{path}.pt", again, resumed)
    step = Checkpointer(CheckpointConfig(), path, mesh, again, resumed).restore()["step"]
    train(again, resumed, 1)
    train(plain, optimizers[1], 1)
    found = [bool(state), extra == {"half": half}, step, difference(again) < 1e-12]
    compare_replicas(again, mesh)
    with summon_full_params(again, rank0_only=True), torch.no_grad():
        if rank == 2 * half:
            again[0].bias.fill_(half)
    found.append(full_state(again, rank0_only=False)["model"]["0.bias"].unique().tolist())
    report = certify(plain, mesh, config, lambda model, x: model(x).square().sum(), batch)
    found.append(report.passed)
    torch.manual_seed(rank)
    refused = []
    for model, where in ((plain, meshes[1 - half]), (nn.Linear(2, 2), mesh)):
        with pytest.raises(ConfigError) as error:
            parallelize(model, where)
        refused.append(str(error.value)[:54])
    return found, refused


def test_models_on_parts_of_the_ranks_train_save_and_load(ranks, tmp_path):
    for rank, (found, refused) in enumerate(ranks.run(4, _two_jobs, str(tmp_path))):
        half = rank // 2
        assert found == [rank % 2 == 0, True, 3, True, [half], True]
        other = [[2, 3], [0, 1]][half]
        assert refused[0].startswith(
            f"rank {rank} is not in the mesh, which has ranks {other}"[:54]
        )
        assert refused[1].startswith(
            f"ranks [{2 * half + 1}] hold different weights than rank {2 * half}"
        )


class Saving(nn.Sequential):
    module: nn.Module

    def save_pretrained(self, folder, state_dict=None):
        return state_dict


def _refused():
    mesh = build_mesh(MeshSpec(), "zero3")

    def build(**options):
        model = Saving(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        return parallelize(model, mesh, ParallelConfig("zero3"), broadcast_from=0, **options)

    def penalize():
        (model(x).sum() + sum(each.square().sum() for each in model.parameters())).backward()

    def differentiate():
        with forward_ad.dual_level():
            model(forward_ad.make_dual(x, x))

    def send_sparse():
        plain = nn.Linear(4, 4)
        plain.register_buffer("edges", torch.eye(4).to_sparse())
        parallelize(plain, mesh, broadcast_from=0)

    model, x = build(), torch.ones(2, 4)
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    assert not hasattr(model, "module")
    model.add_module("module", nn.Identity())
    assert isinstance(model.module, nn.Identity)
    del model.module
    assert model.save_pretrained("folder", state_dict={"a": 1}) == {"a": 1}
    told = []
    for call in (
        lambda: x[0] @ model[0].weight,
        penalize,
        differentiate,
        send_sparse,
        lambda: parallelize(nn.ModuleList([nn.Linear(4, 4)]), mesh),
        lambda: model.double(),
        lambda: model.save_pretrained("folder"),
        lambda: model.module,
    ):
        with pytest.raises((RuntimeError, ConfigError, AttributeError)) as error:
            call()
        told.append(str(error.value))
    return told


TOLD = (
    "got a plain tensor and a sharded parameter.*full_tensor",
    "got a plain tensor and a sharded parameter.*full_tensor",
    "Saving was called with a derivative of torch.autograd.forward_ad.*torch.func.jvp",
    "broadcast_from=0: edges is sparse",
    "a ModuleList has no forward.*parallelize each of its members",
    r"model.to\(torch.float64\).*updated in torch.float32.*ParallelConfig",
    r"save_pretrained\(...\) .*full_state.*checkpoint convert",
    r"parallelize\(...\) returns the model itself",
)


def test_refused_scripts_name_the_remedy(ranks):
    for told in ranks.run(2, _refused):
        for sentence, pattern in zip(told, TOLD, strict=True):
            assert re.search(pattern, sentence), sentence
