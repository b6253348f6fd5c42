"""Weights: from one rank to all, from a folder, whole for a moment; and what frozen ones cost."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerError

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    clip_gradient_value,
    load_pretrained,
    load_state,
    parallelize,
    summon_full_params,
)
from parallel2d.errors import ConfigError


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


def _broadcast(how, source, sizes):
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    torch.manual_seed(dist.get_rank())
    if how == "meta" and dist.get_rank() != source:
        with torch.device("meta"):
            model = Tabled()
    else:
        model = Tabled()
        model.saved.fill_(dist.get_rank())
    model = parallelize(model, mesh, ParallelConfig("hybrid"), broadcast_from=source)
    torch.manual_seed(source)
    expected = Tabled()
    same = all(
        torch.equal(training.whole(p), q)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    )
    return same, model.saved.tolist(), model.table.tolist()


@pytest.mark.parametrize("how", ["real", "meta"])
@pytest.mark.parametrize("source", [0, 3])
def test_all_ranks_start_from_one_ranks_weights_and_buffers(ranks, how, source):
    assert (
        ranks.run(4, _broadcast, how, source, {})
        == [(True, [source] * 3, [0.0, 1.0, 2.0, 3.0, 4.0])] * 4
    )


def _broadcast_nothing():
    with torch.device("meta"):
        model = Tabled()
    parallelize(model, build_mesh(MeshSpec(), "hybrid"), broadcast_from=1)


def test_broadcasting_from_a_rank_without_weights_is_an_error(ranks):
    with pytest.raises(
        WorkerError, match="broadcast_from=1: that rank has no values for layers.0.0.weight"
    ):
        ranks.run(2, _broadcast_nothing)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _broadcast_tied():
    torch.manual_seed(0)
    model = Tied()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    if dist.get_rank():
        model = model.to("meta")  # takes the tie apart
    model = parallelize(model, build_mesh(MeshSpec(), "hybrid"), broadcast_from=0)
    assert model.head.weight is model.embedding.weight
    model(torch.arange(8)).sum().backward()
    return all(
        torch.equal(training.whole(p), q) for p, q in zip(model.parameters(), expected, strict=True)
    )


def test_weights_tied_on_the_rank_they_come_from_are_tied_on_all(ranks):
    assert ranks.run(2, _broadcast_tied) == [True, True]


def _other_model(how, options):
    torch.manual_seed(0)
    odd = dist.get_rank() == 1
    with build_on_meta() if "seed" in options else contextlib.nullcontext():
        model = Tabled(
            dim=16 if odd and how == "shape" else 8, layers=4 if odd and how == "more" else 3
        )
    if odd and how == "frozen":
        model.layers[1].requires_grad_(False)
    if odd and how == "tied":
        model.layers[2][0].weight = model.layers[0][0].weight
    if odd and how == "buffer":
        model.saved = model.saved.double()
    parallelize(model, build_mesh(MeshSpec(), "hybrid"), **options)


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ("shape", {"broadcast_from": 0}, r"layers.0.0.weight has shape \(16, 16\), not \(8, 8\)"),
        ("more", {"broadcast_from": 0}, "layers.3.0.weight is not on rank 0"),
        ("frozen", {"broadcast_from": 0}, "layers.1.0.weight is frozen, on rank 0 trained"),
        ("frozen", {}, "layers.1.0.weight is frozen, on rank 0 trained"),
        ("frozen", {"seed": 0}, "layers.1.0.weight is frozen, on rank 0 trained"),
        ("tied", {"seed": 0}, "layers.2.0.weight is tied to layers.0.0.weight, on rank 0 not tied"),
        ("buffer", {"broadcast_from": 0}, "saved is torch.float64, on rank 0 torch.float32"),
    ],
)
def test_ranks_with_different_models_are_told_what_differs(ranks, how, options, message):
    with pytest.raises(
        WorkerError, match=rf"ranks \[1\] have another model than rank 0. On rank 1: {message}"
    ):
        ranks.run(2, _other_model, how, options)


class Allocations(TorchDispatchMode):
    """The largest storage that an operator made, in bytes; those of ``kept`` are not counted."""

    def __init__(self, kept=()):
        super().__init__()
        self.kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if (
                type(tensor) is torch.Tensor and not tensor.is_meta
            ):  # a DTensor's own storage is nominal
                storage = tensor.untyped_storage()
                self.largest = max(
                    self.largest, storage.nbytes() if storage.data_ptr() not in self.kept else 0
                )
        return result


class LargeRows(nn.Module):
    """A matrix, and a tensor of which one row of dim 0 is larger than what travels at once."""

    def __init__(self, rows, deep=(2, 3, 2**21)):
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(rows, 1024))
        self.deep = nn.Parameter(torch.empty(deep))

    def reset_parameters(self):
        nn.init.zeros_(self.matrix)
        nn.init.zeros_(self.deep)


def _load_large(megabytes):
    from parallel2d.weights import scatter as weights

    rows = megabytes * 2**20 // 4096
    with build_on_meta():
        model = LargeRows(rows)
    model = parallelize(model, build_mesh(MeshSpec(), "zero3"), ParallelConfig("zero3"), seed=0)
    state = None
    if dist.get_rank() == 0:
        state = {
            "matrix": torch.arange(rows * 1024.0).view(rows, 1024),
            "deep": torch.arange(6.0 * 2**21).view(2, 3, 2**21),
        }
    with Allocations([parameter.to_local() for parameter in model.parameters()]) as allocated:
        load_state(model, state)
    first = dist.get_rank() * -(-rows // 4) * 1024
    right = bool((model.matrix.to_local().flatten()[:5] == torch.arange(first, first + 5.0)).all())
    if dist.get_rank() < 2:  # two rows for four ranks
        right &= bool(
            (
                model.deep.to_local().flatten()
                == torch.arange(3.0 * 2**21) + dist.get_rank() * 3 * 2**21
            ).all()
        )
    return right, allocated.largest, weights.PIECE_BYTES


def test_no_other_rank_ever_holds_what_rank_0_scatters(ranks):
    for rank, (right, largest, piece) in enumerate(ranks.run(4, _load_large, 40)):
        assert right
        if rank:
            assert largest <= piece < 24 * 2**20


M_MMAP_THRESHOLD = -3  # in malloc.h


def _resident(field):
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _receive(how, mebibytes, folder):
    """How far this process's memory rose over what it was while it received a state dict; the bytes it keeps; whether they are right.

    The least of three times: what an allocator or a thread of the process group happens to take once is not what receiving needs."""
    # Large tensors get pages of their own, which are given back with them. Otherwise the C library
    # takes them from its heap once earlier tests have freed tensors of that size, and what it has
    # between those of this test would be counted.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    _received(how, 1, folder)  # imports and first-use memory of the runtime
    risen, kept, right = zip(*(_received(how, mebibytes, folder) for _ in range(3)), strict=True)
    return min(risen), kept[0], all(right)


def _received(how, mebibytes, folder):
    import safetensors.torch

    rows, first = mebibytes * 256, dist.get_rank() == 0
    mesh = build_mesh(MeshSpec(), "zero3")
    full = torch.arange(float(rows)).repeat_interleave(1024).view(rows, 1024) if first else None
    if how == "load_pretrained" and full is not None:
        safetensors.torch.save_file(
            {"matrix": full, "deep": torch.ones(1, 4)}, f"{folder}/model.safetensors"
        )
    state = {"matrix": full, "deep": torch.ones(1, 4)} if first else None
    with torch.device("meta"):
        model = LargeRows(rows, (1, 4))
    if how == "broadcast_from" and full is not None:
        model.matrix, model.deep = nn.Parameter(full), nn.Parameter(torch.ones(1, 4))
    options = {
        "broadcast_from": {"broadcast_from": 0},
        "load_state": {
            "seed": 0,
            "weights": lambda sharded: load_state(sharded, state) or {"matrix", "deep"},
        },
        "load_pretrained": {"seed": 0, "weights": functools.partial(load_pretrained, path=folder)},
    }[how]
    dist.barrier()
    gc.collect()
    # what earlier tests freed would be used again, and not be seen
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM becomes what is resident now
    before = _resident("VmRSS")
    model = parallelize(model, mesh, ParallelConfig("zero3"), **options)
    risen = _resident("VmHWM") - before
    local = model.matrix.to_local()
    begin = dist.get_rank() * (rows // 4)
    right = bool((local == torch.arange(float(begin), begin + rows // 4)[:, None]).all())
    return risen, local.nbytes, right


# what a rank may hold beside its part: a piece of 16 MiB, and what allocator and process group need,
# which is less than a second piece
SLACK = 30 * 2**20


def check_receiving(ranks, tmp_path, how, mebibytes, record_property=None):
    for rank, (risen, kept, right) in enumerate(
        ranks.run(4, _receive, how, mebibytes, str(tmp_path))
    ):
        assert right
        assert kept == mebibytes * 2**18
        if record_property is not None:
            record_property(
                f"rank {rank}: MiB above the baseline, MiB kept", (risen / 2**20, kept / 2**20)
            )
        if rank or how == "load_pretrained":
            assert kept // 2 < risen <= kept + SLACK < mebibytes * 2**20, rank


RECEIVING = ("broadcast_from", "load_state", "load_pretrained")


@pytest.mark.slow
@pytest.mark.parametrize("how", RECEIVING)
def test_a_rank_that_receives_weights_holds_its_part_and_a_piece(ranks, tmp_path, how):
    check_receiving(ranks, tmp_path, how, 128)


@pytest.mark.soak
@pytest.mark.parametrize("how", RECEIVING)
def test_a_rank_that_receives_a_gibibyte_holds_its_part_and_a_piece(
    ranks, tmp_path, record_property, how
):
    check_receiving(ranks, tmp_path, how, 1024, record_property)


def _load_both_ways():
    mesh = build_mesh(MeshSpec(), "hybrid")
    torch.manual_seed(1)
    source = Tabled()
    whole = {name: value.clone() for name, value in source.state_dict().items()}
    a = parallelize(source, mesh, ParallelConfig("hybrid"))
    sharded = a.state_dict()
    found = []
    for state in (sharded, whole if dist.get_rank() == 0 else None):
        with build_on_meta():
            b = Tabled()
        b = parallelize(b, mesh, ParallelConfig("hybrid", "layer"), seed=0)
        load_state(b, state)
        found.append(
            all(torch.equal(training.whole(p), whole[name]) for name, p in b.named_parameters())
        )
    with pytest.raises(ValueError, match="do not fit: layers.0.0.weight is missing"):
        load_state(b, {} if dist.get_rank() == 0 else None)
    return found


def test_full_and_sharded_state_dicts_are_loaded(ranks):
    assert ranks.run(4, _load_both_ways) == [[True, True]] * 4


def _summon(options, sizes):
    mesh = build_mesh(MeshSpec(**sizes), "hybrid")
    with build_on_meta():
        model = training.build_llama()
    plan = training.tensor_plan(model, 2) if sizes.get("tensor") else None
    model = parallelize(
        model, mesh, ParallelConfig("hybrid"), seed=0, init=model.init_weights, tensor_plan=plan
    )
    tokens, _ = training.global_batch(0)
    model(tokens).square().mean().backward()
    before = {name: training.whole(p).clone() for name, p in model.named_parameters()}
    gradients = {name: training.whole(p.grad).clone() for name, p in model.named_parameters()}
    here = not options.get("rank0_only") or dist.get_rank() == 0
    with summon_full_params(model, **options):
        inside = dict(model.named_parameters())
        assert inside.keys() == before.keys()
        for name, parameter in inside.items():
            own = options.get("recurse", True) or "." not in name
            assert (type(parameter) is nn.Parameter) == (here and own), name
            if here and own:
                assert torch.equal(parameter, before[name])
                assert (parameter.grad is not None) == options.get("with_grads", False)
                if options.get("with_grads"):
                    assert torch.allclose(parameter.grad, gradients[name], rtol=1e-6, atol=0)
                    parameter.grad.mul_(2)
                with torch.no_grad():
                    parameter.add_(1)
    after = {name: training.whole(p) for name, p in model.named_parameters()}
    doubled = {name: training.whole(p.grad) for name, p in model.named_parameters()}
    model(tokens)  # still works
    changed = all(torch.equal(after[name], before[name] + 1) for name in before)
    kept = all(torch.equal(after[name], before[name]) for name in before)
    return changed, kept, all(torch.allclose(doubled[n], 2 * gradients[n]) for n in before)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}])
@pytest.mark.parametrize(("options", "expected"), [
    ({}, (True, False, False)),
    ({"rank0_only": True, "offload_to_cpu": True, "with_grads": True}, (True, False, True)),
    ({"writeback": False}, (False, True, False)),
    ({"recurse": False}, (False, True, False)),
])  # fmt: skip
def test_whole_parameters_for_a_moment(ranks, options, expected, sizes):
    assert ranks.run(4, _summon, options, sizes) == [expected] * 4


def _drop_gradients(options):
    mesh = build_mesh(MeshSpec(), "hybrid")
    model = parallelize(training.build_llama(), mesh, ParallelConfig("hybrid"), broadcast_from=0)
    tokens, _ = training.global_batch(0)
    model(tokens).square().mean().backward()
    with summon_full_params(model, with_grads=True, **options):
        for parameter in model.output.parameters():
            parameter.grad = None
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize("options", [{}, {"rank0_only": True}])
def test_a_gradient_that_is_dropped_in_whole_parameters_is_dropped(ranks, options):
    assert ranks.run(4, _drop_gradients, options) == [{"output.weight"}] * 4


def _load_after_forward():
    mesh = build_mesh(MeshSpec(), "zero2")
    model = parallelize(Tabled(), mesh, ParallelConfig("zero2"), broadcast_from=0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(2, 8))  # zero2 keeps the parameters gathered until backward
    load_state(model, saved)
    return all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


def test_a_sharded_state_is_loaded_after_a_forward(ranks):
    assert ranks.run(2, _load_after_forward) == [True] * 2


class Bytes(TorchDispatchMode):
    """Elements that reduce-scatters and all-reduces are given."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            function.namespace == "c10d"
            and "reduce" in str(function)
            and not training.is_agreement(function, args)
        ):
            flat = torch.utils._pytree.tree_leaves(
                args[1] if "reduce_scatter" in str(function) else args[0]
            )
            self.elements += sum(
                tensor.numel() for tensor in flat if isinstance(tensor, torch.Tensor)
            )
        return function(*args, **(kwargs or {}))


class Adapted(nn.Module):
    """A frozen matrix and two small trained ones beside it (LoRA, Hu et al. 2021)."""

    def __init__(self, dim):
        super().__init__()
        self.base = nn.Linear(dim, dim, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 4, bias=False), nn.Linear(4, dim, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


def _frozen(bucketing):
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(16) for _ in range(3)))
    model = parallelize(model, build_mesh(MeshSpec(), "zero3"), ParallelConfig("zero3", bucketing))
    with Bytes() as counted:
        model(torch.ones(2, 16)).sum().backward()
    gradients = sum(p.grad.to_local().numel() for p in model.parameters() if p.grad is not None)
    held = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return counted.elements, trained, gradients, held


@pytest.mark.parametrize("bucketing", ["block", "layer"])
def test_frozen_parameters_cost_no_gradient_memory_or_traffic(ranks, bucketing):
    for moved, trained, gradients, held in ranks.run(4, _frozen, bucketing):
        assert moved == trained  # sizes that 4 ranks divide: nothing is padded
        assert gradients == held


def _clip():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    expected = nn.Linear(6, 5)
    expected.load_state_dict(model.state_dict())
    model = parallelize(model, build_mesh(MeshSpec(), "hybrid"))
    x = torch.arange(12.0).view(2, 6)
    for module in (model, expected):
        module(x).square().sum().backward()
    clip_gradient_value(model.parameters(), 3.0)
    nn.utils.clip_grad_value_(expected.parameters(), 3.0)
    with pytest.raises(ValueError, match="max_value=-1"):
        clip_gradient_value(model.parameters(), -1)
    same = all(
        torch.equal(training.whole(p.grad), q.grad)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    )
    return same, clip_gradient_norm(model.parameters(), math.inf).item() > 3


def test_clipping_by_value_is_that_of_a_single_process(ranks):
    assert ranks.run(4, _clip) == [(True, True)] * 4


def test_parts_that_differ_in_a_dim_that_is_not_concatenated_are_refused():
    from parallel2d.files.tensor_file import Entry
    from parallel2d.models.huggingface import StoredForm
    from parallel2d.weights.pretrained import _put_together

    form = StoredForm([["gate"], ["up"]], False, 0)
    headers = {
        "gate": (None, Entry("F32", (4, 2), 0, 32)),
        "up": (None, Entry("F32", (3, 2), 32, 56)),
    }
    assert _put_together("gate_up", form, headers).shape == (7, 2)
    headers["up"] = (None, Entry("F32", (3, 4), 32, 80))
    with pytest.raises(ConfigError, match=r"gate_up .* along dim 0 .* \[\(3, 4\), \(4, 2\)\]"):
        _put_together("gate_up", form, headers)
