"""Optimizers equal plain torch in one process on any layout; parameter groups; their traffic;
saves and resumes.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jobs
import pytest
import torch
import torch.nn.functional as F
from checkpoint_runs import build, train_step
from test_parity import initial_model
from torch import nn
from training import build_llama, global_batch, largest_difference, weights_of

import parallel2d
from parallel2d.base.config import OPTIMIZERS, CheckpointConfig, OptimizerConfig
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.weights.construction import build_on_meta
from parallel2d.parallel.weights.initial_values import InitialWeights
from parallel2d.training.checkpoint import Checkpointer
from parallel2d.training.optimizer import build_optimizer, plan_groups
from parallel2d.training.optimizer.learning_rate import set_learning_rate

GROUPS = [
    {"pattern": "layers.*.wq.*", "lr_scale": 0.5, "weight_decay": 0.3},
    {"pattern": "*norm*", "lr_scale": 2.0},
]
VARIANTS = {
    **OPTIMIZERS,
    "adamw_foreach": replace(OPTIMIZERS["adamw"], implementation="foreach", groups=GROUPS),
    "adamw_amsgrad": replace(OPTIMIZERS["adamw"], implementation="loop", amsgrad=True),
    "sgd_nesterov": replace(OPTIMIZERS["sgd"], nesterov=True, weight_decay=0.01),
    # examples/adafactor.py
    "adafactor": OptimizerConfig(
        "custom", lr=1e-2, weight_decay=0.01, groups=GROUPS, target="adafactor:build"
    ),
    "muon_original": replace(
        OPTIMIZERS["muon"], adjust_lr="original", nesterov=False, groups=GROUPS
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, int], str]] = {
    "zero3": (2, {"shard": 2}, "zero3"),
    "hybrid": (4, {"replicate": 2, "shard": 2}, "hybrid"),
    "tensor": (4, {"replicate": 1, "shard": 2, "tensor": 2}, "hybrid"),
    "ddp": (2, {"replicate": 2}, "ddp"),
    "split": (4, {"replicate": 2, "shard": 2}, "hybrid_full"),
    # 3 replicas divide none of the sizes evenly
    "split_uneven": (3, {"replicate": 3, "shard": 1}, "hybrid_full"),
    "split_tensor": (4, {"replicate": 2, "shard": 1, "tensor": 2}, "hybrid_full"),
}
STEPS = 3


def rate(config: OptimizerConfig, step: int) -> float:
    return config.lr / step


def train(
    layout: str, config: OptimizerConfig, first: int = 1, last: int = STEPS, folder: str = ""
) -> tuple[list[float], dict[str, Any]]:
    """Return losses and unsharded weights in fp64; with ``folder`` resume from there before
    ``first``, and save after ``last``.
    """
    _, mesh_sizes, strategy = LAYOUTS[layout]
    seed = 0 if first == 1 else 9
    mesh, model, _ = build(mesh_sizes, {"strategy": strategy, "precision": "fp64"}, seed=seed)
    optimizer = build_optimizer(model, config)
    saved = CheckpointConfig(enabled=bool(folder), every=0)
    checkpointer = Checkpointer(saved, folder, mesh, model, optimizer, layout={})
    restored = checkpointer.restore()
    assert (restored["step"] if restored else 0) == first - 1
    losses = []
    for step in range(first, last + 1):
        set_learning_rate(optimizer, rate(config, step))
        losses.append(train_step(model, optimizer, mesh, step))
        checkpointer.save_if_due(step, {}, last=step == last)
    checkpointer.finish()
    return losses, weights_of(model)


def plain_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """torch's optimizers, with the groups written out by hand. ``group["lr_scale"]`` multiplies the
    learning rate.
    """

    def settings(name: str, parameter: torch.Tensor) -> tuple[float, float]:
        if config.groups and ".wq." in name:
            return 0.5, 0.3
        return (2.0 if config.groups and "norm" in name else 1.0), (
            config.weight_decay if parameter.ndim > 1 else 0.0
        )

    hidden, other = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale, decay = settings(name, parameter)
        matrix = parameter.ndim == 2 and name.startswith(("layers.", "blocks."))
        group = {"params": [parameter], "weight_decay": decay, "lr_scale": scale}
        (hidden if matrix else other).append(group)
    adam: dict[str, Any] = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "eps": config.eps,
        "amsgrad": config.amsgrad,
    }
    if config.name == "muon":
        muon = {"momentum": config.momentum, "nesterov": config.nesterov}
        matrices = torch.optim.Muon(hidden, lr=config.lr, adjust_lr_fn=config.adjust_lr, **muon)
        return [matrices, torch.optim.AdamW(other, **adam)]
    groups = hidden + other
    if config.name in ("adamw", "adam"):
        return [{"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.name](groups, **adam)]
    if config.name == "sgd":
        momentum = {"momentum": config.momentum, "nesterov": config.nesterov}
        return [torch.optim.SGD(groups, lr=config.lr, **momentum)]
    return [torch.optim.Adafactor(groups, lr=config.lr)]


REFERENCES: dict[str, Any] = {}


def reference(variant: str) -> tuple[list[float], dict[str, Any]]:
    if variant not in REFERENCES:
        config = VARIANTS[variant]
        model = copy.deepcopy(initial_model()).double()
        losses = train_plain(model, config, plain_optimizers(model, config))
        REFERENCES[variant] = losses, weights_of(model)
    return REFERENCES[variant]


def train_plain(
    model: nn.Module, config: OptimizerConfig, optimizers: Sequence[Any]
) -> list[float]:
    """Train in one process, without this package. Return the losses."""
    losses = []
    for step in range(1, STEPS + 1):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(config, step) * group.get("lr_scale", 1.0)
        tokens, targets = global_batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Elementwise optimizers cannot see the layout; the others are tried on each.
CASES = [
    ("muon", "split_tensor"),  # the other layouts: test_matrix_owners
    ("muon_original", "zero3"),
    ("adam", "hybrid"),
    ("sgd", "hybrid"),
    ("adamw", "split"),
    ("adamw_foreach", "ddp"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("adafactor", "tensor"),
            ("muon", "split_uneven"),
            ("sgd", "split"),
            ("adamw", "split_uneven"),
            ("adamw", "tensor"),
            ("sgd_nesterov", "tensor"),
            ("adamw_amsgrad", "tensor"),
            ("muon_original", "tensor"),
        )
    ),
]


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_optimizer_equals_plain_torch_on_every_layout(ranks, variant, layout):
    losses, weights = ranks.run(LAYOUTS[layout][0], train, layout, VARIANTS[variant])[0]
    expected_losses, expected = reference(variant)
    assert losses == pytest.approx(expected_losses, rel=1e-10, abs=0)
    assert largest_difference(weights, expected) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("sgd", "hybrid"),
        ("adamw_amsgrad", "hybrid"),
        ("adafactor", "split"),
        ("muon", "hybrid"),
    ],
)
def test_run_saved_on_two_ranks_resumes_on_four(ranks, tmp_path, variant, layout):
    config = VARIANTS[variant]
    ranks.run(2, train, "zero3", config, 1, 2, str(tmp_path))
    losses, weights = ranks.run(4, train, layout, config, 3, STEPS, str(tmp_path))[0]
    expected_losses, expected = reference(variant)
    assert losses == pytest.approx(expected_losses[2:], rel=1e-10, abs=0)
    assert largest_difference(weights, expected) <= 1e-10


LOW_PRECISION = {
    f"{name}_{dtype}": replace(OPTIMIZERS[name], state_dtype=dtype, groups=GROUPS)
    for name in ("adamw", "adam", "sgd")
    for dtype in ("bf16", "int8")
}
# Two and four blocks in a row, so that the tensor axis cuts rows and no blocks
WIDE = {"dim": 64, "hidden_dim": 128}


def train_low_precision(
    layout: str, config: OptimizerConfig, first: int, last: int, folder: str
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return losses, unsharded weights and optimizer state in fp64; see `train`."""
    _, mesh_sizes, strategy = LAYOUTS[layout]
    mesh, model, _ = build(mesh_sizes, {"strategy": strategy, "precision": "fp64"}, **WIDE)
    optimizer = build_optimizer(model, config)
    saved = CheckpointConfig(every=0)
    checkpointer = Checkpointer(saved, folder, mesh, model, optimizer, layout={})
    restored = checkpointer.restore()
    assert (restored["step"] if restored else 0) == first - 1
    losses = []
    for step in range(first, last + 1):
        set_learning_rate(optimizer, rate(config, step))
        losses.append(train_step(model, optimizer, mesh, step))
        checkpointer.save_if_due(step, {}, last=step == last)
    checkpointer.finish()
    weights = weights_of(model)
    state = parallel2d.full_state(model, optimizer)
    for _ in range(2):  # a second time from unsharded state
        parallel2d.load_full_state(model, optimizer, state)
        state = parallel2d.full_state(model, optimizer)
    return losses, weights, state["optimizer"]["state"] if state else {}


def one_process(config: OptimizerConfig) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return the values of `train_low_precision` without a mesh or a process group."""
    with build_on_meta():
        model = build_llama(**WIDE)
    InitialWeights(model, find_blocks(model), model.init_weights).write(model, 0, "cpu")
    model.double()
    optimizer = build_optimizer(model, config)
    losses = train_plain(model, config, [optimizer])
    state = {name: optimizer.state[each] for name, each in model.named_parameters()}
    return losses, weights_of(model), state


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("adamw_int8", "tensor"),
        ("adam_bf16", "split_uneven"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("adamw_int8", "hybrid"),
                ("adamw_bf16", "zero3"),
                ("adam_int8", "split"),
                ("sgd_int8", "split_tensor"),
                ("sgd_bf16", "ddp"),
                ("adamw_int8", "split_uneven"),
            )
        ),
    ],
)
def test_low_precision_state_has_the_same_codes_on_every_layout(ranks, tmp_path, variant, layout):
    config = LOW_PRECISION[variant]
    first, *_ = ranks.run(2, train_low_precision, "zero3", config, 1, 2, str(tmp_path))[0]
    rest, weights, state = ranks.run(
        LAYOUTS[layout][0], train_low_precision, layout, config, 3, STEPS, str(tmp_path)
    )[0]
    expected_losses, expected, expected_state = one_process(config)
    assert first + rest == pytest.approx(expected_losses, rel=1e-10, abs=0)
    assert largest_difference(weights, expected) <= 1e-10
    stored = set()
    for name, entries in expected_state.items():
        assert state[name].keys() == entries.keys()
        for key, value in entries.items():
            found = state[name][key]
            assert found.dtype == value.dtype
            if found.dtype == torch.float64:  # norms
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-14)
                continue
            stored.add(found.dtype)
            assert torch.equal(found, value), (name, key)
    codes = {"bf16": {torch.bfloat16}, "int8": {torch.int8, torch.uint8}}[config.state_dtype]
    assert codes - {torch.uint8} <= stored <= {*codes, torch.float32}


def test_low_precision_state_takes_a_half_or_a_quarter_of_the_memory():
    model = nn.Linear(256, 1000, bias=False)
    sizes = {}
    for dtype in ("fp32", "bf16", "int8"):
        optimizer = build_optimizer(model, OptimizerConfig(state_dtype=dtype))
        model(torch.randn(2, 256)).square().mean().backward()
        optimizer.step()
        sizes[dtype] = sum(each.nbytes for each in optimizer.state[model.weight].values())
    assert sizes["fp32"] == 4 + 2 * 4 * 256_000
    assert sizes["bf16"] == 4 + 2 * 2 * 256_000
    assert sizes["int8"] == 4 + 2 * (256_000 + 4 * 8 * 1000)


def test_stochastic_rounding_keeps_small_changes_of_moments():
    """A second moment that decays by 0.1 % per step, less than the distance of two codes."""
    for dtype in ("bf16", "int8"):
        model = nn.Linear(256, 64, bias=False)
        optimizer = build_optimizer(
            model, OptimizerConfig(betas=[0.9, 0.999], state_dtype=dtype, lr=1e-9)
        )
        values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        for scale in [1.0] + [0.0] * 500:
            model.weight.grad = values * scale
            optimizer.step()
        state = optimizer.state[model.weight]
        found = state["exp_avg_sq"].double()
        if dtype == "int8":
            scales = state["exp_avg_sq_scale"].double().repeat_interleave(32, dim=1)
            found = (found / 255) ** 8 * scales
        expected = values.double().square() * 0.001 * 0.999**500
        ratio = found / expected
        assert ratio.mean() == pytest.approx(1, abs=0.02)
        assert ratio.min() > 0
        assert not torch.equal(ratio, ratio.round())


@pytest.mark.slow
def test_loss_curve_of_low_precision_state_stays_within_two_percent_of_fp32():
    ends = {}
    for dtype in ("fp32", "bf16", "int8"):
        with build_on_meta():
            model = build_llama(**WIDE)
        InitialWeights(model, find_blocks(model), model.init_weights).write(model, 0, "cpu")
        config = OptimizerConfig(betas=[0.9, 0.999], state_dtype=dtype, lr=3e-3)
        optimizer = build_optimizer(model, config)
        losses = []
        for step in range(150):
            tokens, targets = global_batch(step % 4)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2
        ends[dtype] = sum(losses[-20:]) / 20
    assert ends["bf16"] == pytest.approx(ends["fp32"], rel=0.02)
    assert ends["int8"] == pytest.approx(ends["fp32"], rel=0.02)
    assert len(set(ends.values())) == 3


def test_state_of_another_dtype_is_refused():
    def stepped(dtype: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        optimizer = build_optimizer(model, OptimizerConfig(state_dtype=dtype))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped("int8")
    state = parallel2d.full_state(model, optimizer)
    # torch's own form of the state continues too
    again, loaded = stepped("int8")
    loaded.load_state_dict(optimizer.state_dict())
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        for key, value in optimizer.state[old].items():
            assert loaded.state[new][key].dtype == value.dtype
            assert torch.equal(loaded.state[new][key], value)
    for dtype, says in (("bf16", "state_dtype=int8, this one bf16"), ("fp32", "another class")):
        other, other_optimizer = stepped(dtype)
        with pytest.raises(ConfigError, match=says):
            parallel2d.load_full_state(other, other_optimizer, state)
    with pytest.raises(ConfigError, match="the state has state_dtype=int8, this optimizer bf16"):
        stepped("bf16")[1].load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "muon"}, "optimizer.state_dtype.*muon"),
        ({"amsgrad": True}, "amsgrad=true exclude each other"),
        ({"implementation": "loop"}, "implementation=loop has no effect"),
        ({"name": "sgd", "momentum": 0.0, "implementation": "foreach"}, "has no state"),
    ],
)
def test_low_precision_state_is_refused_where_it_has_no_effect(changes, says):
    config = replace(OptimizerConfig(state_dtype="int8"), **changes)
    with pytest.raises(ConfigError, match=says):
        build_optimizer(build_llama(), config)


def narrow_rows() -> None:
    _, model, _ = build({"tensor": 2, "shard": 1}, {"strategy": "zero3"})
    build_optimizer(model, OptimizerConfig(state_dtype="int8"))


def test_tensor_axis_that_cuts_blocks_is_refused(ranks):
    with pytest.raises(
        Exception, match=r"wo.weight: its rows of 32 values are cut .* blocks of 32"
    ):
        ranks.run(2, narrow_rows)


class FusedBlock(nn.Module):
    """A fused projection of unequal parts, experts with two matrices each, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(6, 14, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 10))
        self.convolution = nn.Conv1d(6, 5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.wqkv(x).split([6, 4, 4], -1)
        mixed = torch.einsum("bsd,edh->bsh", query, self.experts)
        found = self.convolution(x.transpose(1, 2)).square().mean()
        return x + mixed[..., :6] * key.sum(-1, True) + found * mixed[..., 4:] * value.mean()


def build_fused() -> nn.Module:
    return nn.Sequential(FusedBlock(), FusedBlock(), nn.Linear(6, 1, bias=False))


def draw(module: nn.Module, name: str) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3)


MATRICES = [
    {"pattern": "*.wqkv.*", "rows": [6, 4, 4]},
    {"pattern": "*.experts", "columns": 2},
    {"pattern": "*.convolution.*", "flatten": True},
]
FUSED = replace(OPTIMIZERS["muon"], matrices=MATRICES, lr=0.02)


def train_fused(layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the unsharded weights in fp64, at the start and after `STEPS` steps."""
    _, mesh_sizes, strategy = LAYOUTS[layout]
    config = parallel2d.ParallelConfig(strategy=strategy, precision="fp64")
    mesh = parallel2d.build_mesh(parallel2d.MeshSpec(**mesh_sizes), strategy)
    with parallel2d.build_on_meta():
        model = build_fused()
    parallel2d.parallelize(model, mesh, config, seed=0, init=draw)
    first = weights_of(model)
    optimizer = build_optimizer(model, FUSED)
    for step in range(STEPS):
        for (x,) in parallel2d.accumulate(model, [(fused_input(step),)]):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, weights_of(model)


def fused_input(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)


def matrices_by_hand(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices of a parameter as views of it."""
    if "wqkv" in name:
        return list(tensor.split([6, 4, 4]))
    if "experts" in name:
        return [half for expert in tensor for half in expert.split(5, -1)]
    return [tensor.flatten(1)]


def train_fused_matrices(first: dict[str, Any]) -> dict[str, Any]:
    """Return the weights after `STEPS` steps of torch's optimizers, with each matrix as a separate
    parameter.
    """
    model = build_fused().double()
    model.load_state_dict({name: torch.from_numpy(each) for name, each in first.items()})
    apart: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not name.startswith("2."):
            views = matrices_by_hand(name, parameter.detach())
            apart[name] = [nn.Parameter(view.clone()) for view in views]
    options = {"lr": FUSED.lr, "weight_decay": FUSED.weight_decay}
    every = list(chain.from_iterable(apart.values()))
    muon = torch.optim.Muon(every, momentum=FUSED.momentum, adjust_lr_fn=FUSED.adjust_lr, **options)
    adamw = torch.optim.AdamW(model[2].parameters(), betas=tuple(FUSED.betas), **options)
    for step in range(STEPS):
        model.zero_grad()
        model(fused_input(step)).square().mean().backward()
        for name, matrices in apart.items():
            gradients = matrices_by_hand(name, model.get_parameter(name).grad)
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient.clone()
        muon.step()
        adamw.step()
        for name, matrices in apart.items():
            views = matrices_by_hand(name, model.get_parameter(name).detach())
            for matrix, view in zip(matrices, views, strict=True):
                view.copy_(matrix.detach())
    return weights_of(model)


@pytest.mark.parametrize(
    "layout",
    [
        "split_uneven",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("zero3", "hybrid", "ddp", "split")
        ),
    ],
)
def test_muon_updates_each_matrix_of_a_parameter_on_every_layout(ranks, layout):
    first, weights = ranks.run(LAYOUTS[layout][0], train_fused, layout)[0]
    expected = train_fused_matrices(first)
    assert largest_difference(weights, expected) <= 1e-10
    assert largest_difference(weights, first) > 1e-3


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"pattern": "*.wqkv.*", "rows": 3}, r"14 rows do not divide into 3 equal parts"),
        ({"pattern": "*.wqkv.*", "rows": [6, 4]}, r"rows=\[6, 4\] sum up to 10, and it has 14"),
        ({"pattern": "*.wqk.*", "rows": 2}, r"wqk\.\* matches no parameter"),
        ({"pattern": "*.wqkv.*", "row": 2}, r"an entry has the form"),
        ({"pattern": "*.wqkv.*", "rows": 2, "flatten": True}, r"an entry has the form"),
    ],
)
def test_matrices_that_do_not_fit_are_an_error(entry, says):
    with pytest.raises(ConfigError, match=says):
        build_optimizer(build_fused(), replace(FUSED, matrices=[entry]))


MUON_JOB = (
    "optimizer=muon",
    "strategy=hybrid",
    "mesh.replicate=2",
    "mesh.shard=2",
    "checkpoint.enabled=false",
)


def test_predicted_optimizer_traffic_equals_the_measured(ranks, folder):
    ranks.run(4, jobs.run, str(folder), str(folder / "run"), MUON_JOB, 3)
    layout = json.loads((folder / "run" / "layout.json").read_text())
    rows = jobs.rows(folder / "run")
    measured = [row["comm/shard/bytes"] for row in rows[1:]]  # of the step before
    assert measured == pytest.approx([layout["predicted"]["comm/shard/bytes"]] * 2, rel=1e-3)
    assert all(row["loss"] > 0 for row in rows)


def grouped(
    config: OptimizerConfig, model: nn.Module | None = None
) -> dict[str, tuple[float, float, str | None]]:
    """Name -> (weight decay, rate, algorithm)."""
    model = model or build_llama()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 1.0)
    return {
        names[id(p)]: (group["weight_decay"], group["lr"], group.get("algorithm"))
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_the_first_matching_pattern_counts_and_defaults_hold_for_the_rest():
    entries = [
        {"pattern": "*feed_forward_norm*", "lr_scale": 3.0},
        {"pattern": "*norm*", "weight_decay": 0.2},
    ]
    found = grouped(OptimizerConfig(groups=[*entries, {"pattern": "embedding*", "lr_scale": 0.1}]))
    assert found["layers.0.feed_forward_norm.weight"] == (0.0, 3.0, None)
    assert found["layers.0.attention_norm.weight"] == (0.2, 1.0, None)
    assert found["embedding.weight"] == (0.1, 0.1, None)
    assert found["output.weight"] == (0.1, 1.0, None)


def of_two_rates(groups):
    return torch.optim.SGD([groups[0], {**groups[1], "lr": 0.25}])


def test_the_rate_of_a_group_is_scaled_before_the_first_schedule_too():
    config = OptimizerConfig(lr=0.5, groups=[{"pattern": "*norm*", "lr_scale": 0.1}])
    optimizer = build_optimizer(build_llama(), config)
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.05, 0.5]
    # A learning rate that a script sets for a group is scaled too.
    config = OptimizerConfig("custom", lr=0.5, target="test_optimizers:of_two_rates")
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = build_llama(n_layers=2)
    for layer in model.layers:
        layer.scale = nn.Parameter(torch.ones(4))
        layer.mix = nn.Parameter(torch.ones(4, 4))  # a matrix that a block holds itself
    found = grouped(OPTIMIZERS["muon"], model)
    assert {name for name, (_, _, algorithm) in found.items() if algorithm == "muon"} == {
        name for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2
    }
    entry = {"pattern": "layers.*.wo.*", "algorithm": "adamw"}
    moved = grouped(replace(OPTIMIZERS["muon"], groups=[entry]))
    assert moved["layers.0.attention.wo.weight"][2] == "adamw"
    assert moved["layers.0.attention.wq.weight"][2] == "muon"


def test_muon_without_blocks_asks_which_matrices_are_hidden():
    # A row of parametrized layers does not count as repeated blocks.
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3)]
    with pytest.raises(ConfigError, match="no repeated blocks"):
        build_optimizer(nn.Sequential(*layers), OPTIMIZERS["muon"])
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"no repeated blocks.*algorithm: muon"):
        build_optimizer(model, OPTIMIZERS["muon"])
    entry = {"pattern": "0.weight", "algorithm": "muon"}
    found = grouped(replace(OPTIMIZERS["muon"], groups=[entry]), model)
    assert found["0.weight"][2] == "muon"
    entry["pattern"] = "0.*"
    with pytest.raises(ConfigError, match=r"0.bias of shape \[4\] to Muon"):
        build_optimizer(model, replace(OPTIMIZERS["muon"], groups=[entry]))


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("embeding*", "matches no parameter; near: embedding.weight"),
        ("*.atention.*", "near: layers.0.attention"),
        (
            "layers.0.attention.wq.weight",
            "has no effect: an earlier one, layers.*, matches layers.0.attention.wq.weight first",
        ),
        ("norm.weight", "matches frozen parameters only, such as norm.weight"),
    ],
)
def test_pattern_without_match_is_an_error(pattern, says):
    model = build_llama()
    model.norm.weight.requires_grad_(False)
    groups = [{"pattern": "layers.*", "lr_scale": 1.0}, {"pattern": pattern, "lr_scale": 1.0}]
    if "atention" in pattern:
        groups = groups[1:]
    with pytest.raises(ConfigError) as error:
        plan_groups(model, OptimizerConfig(groups=groups))
    assert says in str(error.value)
