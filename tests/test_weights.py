"""Weights: broadcast from one rank, loaded from a folder, summoned unsharded; and the cost of
frozen parameters.
"""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import training
from test_checkpoint_unsharded import Held
from test_parallelize import CollectiveCounter
from test_sharded_context import Adapted
from torch import nn
from workers import refusal

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    clip_gradient_value,
    full_state,
    load_full_state,
    load_pretrained,
    load_state,
    parallelize,
    summon_full_params,
)
from parallel2d.base.config import SyncConfig
from parallel2d.base.errors import ConfigError
from parallel2d.base.files.tensor_file import Entry
from parallel2d.models.huggingface import StoredForm
from parallel2d.parallel.weights.geometry import Region, local_region
from parallel2d.parallel.weights.hashes import hashes_of
from parallel2d.parallel.weights.pretrained import _put_together
from parallel2d.parallel.weights.unsharded_tensors import PIECE_BYTES


class Tabled(nn.Module):
    """Repeated layers, a buffer that is saved and one that is not."""

    def __init__(self, dim=8, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))
            for _ in range(layers)
        )
        self.register_buffer("saved", torch.full((3,), 1.0))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def equals(model, whole):
    expected = whole.state_dict() if isinstance(whole, nn.Module) else whole
    return all(
        torch.equal(training.full_tensor_of(p), expected[name])
        for name, p in model.named_parameters()
    )


def _broadcast(how, source):
    torch.manual_seed(dist.get_rank())
    with torch.device("meta" if how == "meta" and dist.get_rank() != source else "cpu"):
        model = Tabled()
    if how == "real":
        model.saved.fill_(dist.get_rank())
    mesh = build_mesh(MeshSpec(), "hybrid")
    model = parallelize(model, mesh, ParallelConfig("hybrid"), broadcast_from=source)
    torch.manual_seed(source)
    return equals(model, Tabled()), model.saved.tolist(), model.table.tolist()


@pytest.mark.parametrize(("how", "source", "saved"), [("real", 3, 3.0), ("meta", 0, 1.0)])
def test_broadcast_gives_all_ranks_weights_and_buffers_of_one_rank(ranks, how, source, saved):
    found = ranks.run(4, _broadcast, how, source)
    assert found == [(True, [saved] * 3, [0.0, 1.0, 2.0, 3.0, 4.0])] * 4


def _broadcast_tied():
    torch.manual_seed(0)
    model = training.build_llama(tie_embeddings=True)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.get_rank():
        model = model.to("meta")  # takes the tie apart
    model = parallelize(model, build_mesh(MeshSpec(), "hybrid"), broadcast_from=0)
    assert model.output.weight is model.embedding.weight
    model(torch.arange(8)[None]).sum().backward()
    return equals(model, expected)


def test_tied_weights_of_the_source_rank_are_tied_on_all_ranks(ranks):
    assert ranks.run(2, _broadcast_tied) == [True, True]


def change(model, how):
    if how == "shape":
        model.layers[0][0] = nn.Linear(16, 16, bias=False)
    elif how == "more":
        model.register_parameter("more", nn.Parameter(torch.ones(1)))
    elif how == "frozen":
        model.layers[1][0].weight.requires_grad_(False)
    elif how == "tied":
        model.layers[2][0].weight = model.layers[0][0].weight
    elif how == "buffer":
        model.saved = model.saved.double()
    elif how in ("sparse", "sparse, sent"):
        model.saved = model.saved.to_sparse()
    elif how == "order":
        model._buffers["saved"] = model._buffers.pop("saved")
    elif how == "meta":
        model.to("meta")


OTHER_MODELS = (
    ("shape", {"broadcast_from": 0}, ("layers.0.0.weight, trained, of shape (16, 16); not "
                                     "layers.0.0.bias, trained, of shape (8,); layers.0.0")),
    ("more", {"broadcast_from": 0}, "more, trained, of shape (1,); not nothing"),
    ("frozen", {}, ("layers.1.0.weight, frozen, of shape (8, 8); not layers.1.0.weight, trained, "
                   "of shape (8, 8)")),
    ("tied", {"seed": 0}, "layers.2.0.weight, trained, of shape (8, 8) tied to layers.0.0.weight; not"),
    ("buffer", {"broadcast_from": 0}, ("saved, a buffer in torch.float64 of shape (3,); not "
                                      "saved, a buffer in torch.float32")),
    ("sparse", {}, "saved, a buffer in torch.float32 of shape (3,) and layout torch.sparse_coo; not"),
    ("sparse, sent", {"broadcast_from": 0}, "broadcast_from=0: saved is sparse, and only dense"),
    ("order", {}, "the same in another order"),
    ("meta", {"broadcast_from": 1}, ("broadcast_from=1: that rank has no values for "
                                    "layers.0.0.weight, layers.0.0.bias")),
    (None, {"broadcast_from": 2}, "broadcast_from=2 is not a rank of the mesh: use 0 to 1"),
)  # fmt: skip


def _models_that_differ():
    """Return the errors for a model or values of rank 1 that differ from rank 0."""
    told = []
    for how, options, _ in OTHER_MODELS:
        torch.manual_seed(0)
        with build_on_meta() if "seed" in options else contextlib.nullcontext():
            model = Tabled()
            if dist.get_rank() == 1:
                change(model, how)
        told.append(refusal(parallelize, model, build_mesh(MeshSpec(), "hybrid"), **options))
    return told


def test_different_models_on_ranks_are_refused_with_the_difference(ranks):
    start = "ranks [1] have a different model than rank 0. Rank 1 has "
    for told in ranks.run(2, _models_that_differ):
        for text, (how, _, expected) in zip(told, OTHER_MODELS, strict=True):
            is_whole = how in ("meta", "sparse, sent", None)
            assert text.startswith(expected if is_whole else start + expected)


def test_hashes_differ_where_sums_of_products_are_equal():
    ones, numbers = torch.ones(4096), torch.arange(1.0, 9.0, dtype=torch.float64)
    others = [numbers.clone() for _ in range(2)]
    others[0][[2, 5]] *= -1
    others[1][[2, 5]] = others[1][[5, 2]]
    pairs = [(ones, ones * 0), (numbers, others[0]), (numbers, others[1])]
    pairs += [
        (torch.full((4,), 3, dtype=dtype), torch.full((4,), 5, dtype=dtype))
        for dtype in (torch.int64, torch.float64)
    ]
    for one, other in pairs:
        first, second = hashes_of([one, other])
        # Of buffers, ranks compare the lowest 20 bits.
        assert first % 2**20 != second % 2**20
        assert first == hashes_of([one.clone()])[0]


class LargeRows(nn.Module):
    """A matrix, and a tensor with rows of dim 0 that are larger than one chunk of a transfer."""

    def __init__(self, rows, deep=(2, 3, 2**21)):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(rows, 1024))
        self.deep = nn.Parameter(torch.empty(deep))

    def reset_parameters(self):
        nn.init.zeros_(self.matrix)
        nn.init.zeros_(self.deep)


def _load_large(how, rows, folder):
    """True if the tensors are correct, and the peak memory of this rank above its local shards."""
    import safetensors.torch

    mesh, first = build_mesh(MeshSpec(), "zero3"), dist.get_rank() == 0
    with torch.device("meta"):
        model = LargeRows(rows)
    state = {
        "matrix": torch.arange(rows * 1024.0).view(rows, 1024),
        "deep": torch.arange(6.0 * 2**21).view(2, 3, 2**21),
    }
    options = {"seed": 0}
    if how == "load_pretrained":
        if first:
            safetensors.torch.save_file(state, f"{folder}/model.safetensors")
        options["weights"] = functools.partial(load_pretrained, path=folder)
    elif how == "load_state":
        given = state if first else None
        options["weights"] = lambda sharded: load_state(sharded, given) or {"matrix", "deep"}
    else:
        options = {"broadcast_from": 0}
        if first:
            model.load_state_dict(state, assign=True)
    dist.barrier()
    with Held() as held:
        model = parallelize(model, mesh, ParallelConfig("zero3"), **options)
    named = dict(model.named_parameters())
    right = [
        torch.equal(parameter.to_local(), state[name][local_region(parameter).slices])
        for name, parameter in named.items()
    ]
    # fully_shard pads each part to the largest.
    parts = (-(-value.shape[0] // 4) * value[0].nbytes for value in state.values())
    return right, held.peak - sum(parts)


@pytest.mark.parametrize("how", ["broadcast_from", "load_state", "load_pretrained"])
def test_receiving_rank_holds_its_shard_and_one_chunk(ranks, tmp_path, how):
    for rank, (right, beside) in enumerate(ranks.run(4, _load_large, how, 10_000, str(tmp_path))):
        assert right == [True, True]
        if rank or how == "load_pretrained":
            assert beside <= PIECE_BYTES + 2**16 < 24 * 2**20, rank


def _load_both_ways():
    mesh = build_mesh(MeshSpec(), "hybrid")
    torch.manual_seed(1)
    source = Tabled()
    whole = {name: value.clone() for name, value in source.state_dict().items()}
    sharded = parallelize(source, mesh, ParallelConfig("hybrid")).state_dict()
    found = []
    for strategy, state in (("hybrid", sharded), ("zero2", sharded), ("hybrid", whole)):
        with build_on_meta():
            model = Tabled()
        other = build_mesh(MeshSpec(), strategy)
        model = parallelize(model, other, ParallelConfig(strategy, "layer"), seed=0)
        model(torch.ones(2, 8))  # zero2 keeps the parameters gathered until backward
        load_state(model, state if state is sharded or dist.get_rank() == 0 else None)
        found.append(equals(model, whole))
    for wrong in ({}, {**whole, "more": torch.ones(1)}):
        found.append(refusal(load_state, model, wrong if dist.get_rank() == 0 else None))
    return found


def test_full_and_sharded_state_dicts_are_loaded(ranks):
    for *same, missing, more in ranks.run(4, _load_both_ways):
        assert same == [True] * 3
        assert missing.startswith("the state does not fit: layers.0.0.weight is missing; ")
        assert more == "the state does not fit: more is not in the model"


def _master_values(name, options, folder):
    """Load full values into a model with replicas that compute in another dtype; return the saved
    state and the values used in compute.
    """
    import safetensors.torch

    config = ParallelConfig(name, sync=SyncConfig(**options))
    mesh = build_mesh(MeshSpec(replicate=2, shard=2), name)
    torch.manual_seed(0)
    model = parallelize(Tabled(), mesh, config)
    found = []
    for load in ("load_state", "load_full_state", "load_pretrained"):
        values = {key: torch.randn_like(value) for key, value in Tabled().state_dict().items()}
        if load == "load_pretrained":
            if dist.get_rank() == 0:
                safetensors.torch.save_file(values, f"{folder}/model.safetensors")
            dist.barrier()
            load_pretrained(model, folder)
        elif load == "load_state":
            load_state(model, values)
        else:
            load_full_state(model, None, {"model": values})
        saved = full_state(model, rank0_only=False)["model"]
        kept = all(torch.equal(saved[key], value) for key, value in values.items())
        rounded = {key: value.bfloat16().float() for key, value in values.items()}
        found.append((kept, equals(model, values), equals(model, rounded)))
    return found


@pytest.mark.parametrize(
    ("name", "options", "rounded"),
    [
        ("hybrid_full", {"wire": "bf16"}, True),
        ("hybrid", {"name": "diloco", "every": 2}, False),
    ],
)
def test_master_values_are_loaded_and_saved(ranks, tmp_path, name, options, rounded):
    for found in ranks.run(4, _master_values, name, options, str(tmp_path)):
        assert found == [(True, not rounded, rounded)] * 3


SUMMONED = (
    ({}, (True, False)),
    ({"rank0_only": True, "offload_to_cpu": True, "with_grads": True}, (True, True)),
    ({"writeback": False, "with_grads": True}, (False, False)),
    ({"recurse": False}, (False, False)),
)


def values_of(model):
    values, gradients = {}, {}
    for name, parameter in model.named_parameters():
        values[name] = training.full_tensor_of(parameter).clone()
        gradients[name] = training.full_tensor_of(parameter.grad).clone()
    return values, gradients


def _summon(sizes):
    """Return by options True if parameters and gradients equal the values written to the unsharded
    tensors.
    """
    _, model = training.sharded(sizes, {"strategy": "hybrid"})
    tokens, _ = training.global_batch(0)
    model(tokens).square().mean().backward()
    found = []
    for options, _ in SUMMONED:
        before, gradients = values_of(model)
        here = not options.get("rank0_only") or dist.get_rank() == 0
        with summon_full_params(model, **options):
            inside = dict(model.named_parameters())
            assert inside.keys() == before.keys()
            for name, parameter in inside.items():
                own = options.get("recurse", True) or "." not in name
                assert (type(parameter) is nn.Parameter) == (here and own), name
                if not (here and own):
                    continue
                assert torch.equal(parameter, before[name])
                assert (parameter.grad is not None) == options.get("with_grads", False)
                if parameter.grad is not None:
                    assert torch.allclose(parameter.grad, gradients[name], rtol=1e-6, atol=0)
                    parameter.grad.mul_(2)
                with torch.no_grad():
                    parameter.add_(1)
        after, gradients_after = values_of(model)
        changed = {torch.equal(after[name], value + 1) for name, value in before.items()}
        doubled = {torch.allclose(gradients_after[name], 2 * g) for name, g in gradients.items()}
        found.append((changed, doubled))
        # Without gradients: a forward that awaits backward keeps the root's parameters unsharded.
        with torch.no_grad():
            model(tokens)
    with summon_full_params(model), pytest.raises(ConfigError, match="is already unsharded"):
        summon_full_params(model).__enter__()
    dropped = []
    for rank0_only in (False, True):
        model(tokens).square().mean().backward()
        with summon_full_params(model, with_grads=True, rank0_only=rank0_only):
            model.output.weight.grad = None
        dropped.append([name for name, p in model.named_parameters() if p.grad is None])
    return found, dropped


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)])
def test_summoned_parameters_are_unsharded_inside_the_context(ranks, sizes):
    for found, dropped in ranks.run(4, _summon, sizes):
        assert found == [({changed}, {doubled}) for _, (changed, doubled) in SUMMONED]
        assert dropped == [["output.weight"]] * 2


def _frozen():
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    model = parallelize(model, build_mesh(MeshSpec(), "zero3"), ParallelConfig("zero3"))
    with CollectiveCounter() as counted:
        model(torch.ones(2, 16)).sum().backward()
    gradients = sum(p.grad.to_local().numel() for p in model.parameters() if p.grad is not None)
    held = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return counted.elements["reduce_scatter"], trained, gradients, held


def test_frozen_parameters_cost_no_gradient_memory_or_traffic(ranks):
    for moved, trained, gradients, held in ranks.run(4, _frozen):
        assert moved == trained  # sizes that 4 ranks divide: nothing is padded
        assert gradients == held


def _clip():
    torch.manual_seed(0)
    expected = nn.Linear(6, 5)
    model = parallelize(copy.deepcopy(expected), build_mesh(MeshSpec(), "hybrid"))
    x = torch.arange(12.0).view(2, 6)
    for module in (model, expected):
        module(x).square().sum().backward()
    clip_gradient_value(model.parameters(), 3.0)
    nn.utils.clip_grad_value_(expected.parameters(), 3.0)
    with pytest.raises(ValueError, match="max_value=-1"):
        clip_gradient_value(model.parameters(), -1)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    same = all(torch.equal(training.full_tensor_of(p.grad), q.grad) for p, q in pairs)
    return same, clip_gradient_norm(model.parameters(), math.inf).item() > 3


def test_clipping_by_value_equals_a_single_process(ranks):
    assert ranks.run(4, _clip) == [(True, True)] * 4


@pytest.mark.parametrize(
    ("names", "stacked", "dim", "shapes", "whole"),
    [
        ([["a"], ["b"]], False, 0, {"a": (4, 2), "b": (3, 2)}, (7, 2)),
        ([["a", "b"], ["c", "d"]], True, 1, dict.fromkeys("abcd", (4, 2)), (2, 8, 2)),
        ([["a"], ["b"]], False, 0, {"a": (4, 2), "b": (3, 4)}, None),
        ([["a", "b"], ["c"]], True, 1, dict.fromkeys("abc", (4, 2)), None),
        ([["a", "b"]], True, None, {"a": (4, 2), "b": (3, 2)}, None),
        ([["a"], ["b"]], False, 0, {"a": (), "b": ()}, None),
        ([["a", "b"]], False, None, dict.fromkeys("ab", (4, 2)), None),
    ],
)
def test_tensors_with_gaps_are_refused(names, stacked, dim, shapes, whole):
    headers = {name: (None, Entry("F32", shape, 0, 0)) for name, shape in shapes.items()}
    form = StoredForm(names, stacked, dim)
    if whole is None:
        with pytest.raises(ConfigError, match="put together from tensors that do not fit together"):
            _put_together("x", form, headers)
        return
    stored = _put_together("x", form, headers)
    assert stored.shape == whole
    seen = torch.zeros(whole)
    for entry, begin in stored.parts.values():
        seen[Region(begin, entry.shape).slices] += 1
    assert (seen == 1).all()
