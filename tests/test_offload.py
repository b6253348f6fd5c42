"""Offloading to CPU and float8, tested without a GPU. Both are refused here; their parts run on
CPU.
"""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
import training
from torch import nn
from workers import WorkerError

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    clip_gradient_norm,
    mesh_shape,
    parallelize,
)
from parallel2d.base.config import PrecisionConfig
from parallel2d.base.config.checks import validated
from parallel2d.base.errors import ConfigError
from parallel2d.parallel.fsdp_internals.sharded_model import groups
from parallel2d.parallel.model_structure import find_blocks
from parallel2d.parallel.parallelize.float8 import convert_to_float8
from parallel2d.parallel.parallelize.layout import resolve
from parallel2d.parallel.parallelize.sharding import shard
from parallel2d.parallel.weights.initial_values import allocate
from parallel2d.train import main


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (
            "cpu_offload=true",
            "cpu_offload=true moves parameters from GPUs to CPU memory, and this runs on CPU",
        ),
        (
            "precision.float8=rowwise",
            (
                "precision.float8=rowwise needs an NVIDIA GPU of compute capability 8.9 or higher, "
                "and this runs on cpu"
            ),
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_refuses_offload_on_cpu(tmp_path, monkeypatch, capsys, word, reason):
    monkeypatch.setattr(
        "parallel2d.train.start_workers", lambda *_: pytest.fail("workers were started")
    )
    (tmp_path / "text.txt").write_text("some words of a text\n" * 500)
    monkeypatch.chdir(tmp_path)
    data = ["data=text", "data.path=text.txt", "data.cache_dir=cache", "train.seq_len=16"]
    assert main([word, *data, "hydra.run.dir=run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert reason in said


def _refused(config):
    torch.manual_seed(0)
    parallelize(nn.Linear(4, 4), build_mesh(MeshSpec(), "hybrid"), ParallelConfig(**config))


@pytest.mark.parametrize(
    "config", [{"cpu_offload": True}, {"precision": PrecisionConfig(float8="tensorwise")}]
)
def test_library_refuses_offload_on_cpu(ranks, config):
    with pytest.raises(WorkerError, match="runs on (CPU|cpu)") as error:
        ranks.run(2, _refused, config)
    assert error.value.kind == "ConfigError"


def test_float8_needs_products_in_bf16():
    wide = PrecisionConfig(float8="rowwise", storage="fp64", param="fp64", reduce="fp64")
    message = "does not go with precision.param=fp64: products take precision.param=bf16"
    with pytest.raises(ConfigError, match=message):
        validated(ParallelConfig(precision=wide))


def _offloaded():
    """Train a step with accumulation and clipping with the engine's offloading on CPU tensors,
    where copies do nothing; compare with plain PyTorch.
    """
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 8), *blocks)
    expected = copy.deepcopy(model)
    mesh = build_mesh(MeshSpec(), "zero3")
    layout = resolve(ParallelConfig("zero3"), mesh_shape(mesh), model, mesh=mesh)
    layout.config.cpu_offload = True
    model = shard(model, mesh, layout)
    allocate(model, "cpu", offload=True)
    offloaded = [p.offload_to_cpu for g in groups(model) for p in g.fsdp_params]
    x = torch.randn(4, 6)
    norms = []
    for module in (model, expected):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            for part in x.chunk(2):
                F.mse_loss(module(part), part.new_ones(2, 8)).backward()
            clip = clip_gradient_norm if module is model else nn.utils.clip_grad_norm_
            norm = clip(module.parameters(), 0.1)
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    difference = training.largest_difference(*map(training.weights_of, (model, expected)))
    return all(offloaded) and bool(offloaded), norms[:3], norms[3:], difference


def test_offloaded_parameters_train_as_on_the_device(ranks):
    for offloaded, norms, expected, difference in ranks.run(2, _offloaded):
        assert offloaded
        assert norms == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-5


@pytest.mark.extras("torchao")
def test_float8_replaces_layers_of_blocks_and_keeps_names():
    with build_on_meta():
        # 40 is not a multiple of 16: the feed-forward keeps its layer
        model = training.build_llama(n_layers=2, hidden_dim=40)
    names = list(dict(model.named_parameters()))
    precision = PrecisionConfig(float8="rowwise", float8_exclude=["layers.0.attention.wo"])
    converted = convert_to_float8(find_blocks(model), precision, {id(model.layers[1].attention.wk)})
    expected = [f"layers.{i}.attention.{w}" for i in (0, 1) for w in ("wq", "wk", "wv", "wo")]
    assert converted == [
        name for name in expected if name not in ("layers.0.attention.wo", "layers.1.attention.wk")
    ]
    for name, module in model.named_modules():
        assert (type(module).__name__ == "Float8Linear") == (name in converted), name
    assert list(dict(model.named_parameters())) == names
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.extras("torchao")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_are_close_and_have_gradients(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    )
    x = torch.randn(16, 32)
    expected = model(x)
    convert_to_float8(find_blocks(model), PrecisionConfig(float8=recipe), emulate=True)
    found = model(x)
    found.sum().backward()
    difference = (found - expected).norm() / expected.norm()
    assert 1e-4 < difference < 0.1
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.extras("torchao")
def test_float8_without_matching_layers_is_an_error():
    for exclude, told in (
        ("*.wq.*", r"float8_exclude: \*.wq.\* matches no Linear layer inside a block; there are"),
        ("*", "no Linear layer inside the blocks can be converted; 7: excluded"),
    ):
        precision = PrecisionConfig(float8="rowwise", float8_exclude=[exclude])
        with pytest.raises(ConfigError, match=told):
            convert_to_float8(find_blocks(training.build_llama()), precision)


def test_float8_without_torchao_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r'needs torchao: pip install "parallel2d\[float8\]"'):
        convert_to_float8(find_blocks(training.build_llama()), PrecisionConfig(float8="rowwise"))
