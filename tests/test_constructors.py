"""Models with constructors that set initial values keep these values, on every layout and through
the train command.
"""

import copy
import math
import random
from unittest import mock

import jobs
import numpy
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn

from parallel2d import (
    MeshSpec,
    ParallelConfig,
    build_mesh,
    build_on_meta,
    certify,
    parallelize,
)
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.parity_check import training_job
from parallel2d.parallel.weights import source


class Norm(nn.Module):
    """Without an initializer, as nanoGPT has it."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.5))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight)


class Feedforward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.c_fc, self.c_proj = Norm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        return x + self.c_proj(self.c_fc(self.norm(x)).relu())


class Gpt(nn.Module):
    """Set all weights from the root, the weights of projections again, and tie two weights."""

    real = 0  # how many were built with values, in this process

    def __init__(self, dim=16, layers=2, vocabulary=320):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Feedforward(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.wte.weight = self.head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
        Gpt.real += not self.head.weight.is_meta

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Modulated(nn.Module):
    """Zeros, values that torch's initializer does not show on meta, a module that was copied, and
    one given a parameter.
    """

    def __init__(self, dim=16):
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(dim) for _ in range(2))
        for block in self.blocks:
            nn.init.zeros_(block.c_fc.weight)
            block.c_proj.bias.data.fill_(0.25)
        self.position = nn.Parameter(torch.zeros(dim, dim))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.out = nn.Linear(dim, dim)
        self.out.weight = nn.Parameter(torch.eye(dim))
        self.out.bias.data = torch.arange(float(dim))


class Drawn(nn.Module):
    """Values that nothing sets again, from three generators; a scalar; buffers."""

    def __init__(self, inner, dim=16):
        super().__init__()
        self.inner = inner
        self.table = nn.Parameter(torch.randn(7, dim) * random.random())
        self.scale = nn.Parameter(1e-4 * torch.from_numpy(numpy.random.rand(dim)).float())
        self.temperature = nn.Parameter(torch.rand(()))
        self.register_buffer("seen", torch.rand(3))
        self.register_buffer("waves", torch.rand(5), persistent=False)


class Computed(nn.Module):
    """Buffers that the constructor computes from weights."""

    def __init__(self, dim=16):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(dim, dim))
        self.target = nn.Linear(dim, dim)
        self.register_buffer("first", self.target.weight.detach().clone())


# A library has initializers of its own, which do not set this parameter.
LIBRARY = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, dim=16, vocabulary=320):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary)
        self.scale = nn.Parameter(torch.log(torch.full((dim,), 3.0)))

    def forward(self, tokens):
        return self.head(self.embedding(tokens) * self.scale)
"""


def scaled():
    library = {"__name__": "transformers.scaled"}
    exec(LIBRARY, library)
    return library["Scaled"]()


def drawn():
    return Drawn(inner=nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))


MODELS = (Gpt, Modulated, drawn, Computed, scaled)
LAYOUTS = (
    ("hybrid", {"replicate": 2, "shard": 2}),
    ("zero3", {}),
    ("ddp", {}),
    ("hybrid_full", {"replicate": 2, "shard": 2}),
    ("hybrid", {"replicate": 1, "shard": 2, "tensor": 2}),
)
PLAN = {"blocks.*.c_fc": "colwise", "blocks.*.c_proj": "rowwise"}


def plain(build):
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    model = build()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differing(model, expected):
    """Names of tensors that are not bitwise equal to one process."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert named.keys() == expected.keys()
    whole = {name: training.full_tensor_of(each) for name, each in named.items()}
    return [name for name, each in whole.items() if not torch.equal(each, expected[name])]


def _on_every_layout():
    found = []
    for strategy, sizes in LAYOUTS:
        mesh = build_mesh(MeshSpec(**sizes), strategy)
        for build in MODELS[:2] if "tensor" in sizes else MODELS:
            expected = plain(build)
            torch.manual_seed(dist.get_rank())
            with build_on_meta():
                model = build()
            before, Gpt.real = torch.get_rng_state(), 0
            plan = PLAN if "tensor" in sizes else None
            model = parallelize(model, mesh, ParallelConfig(strategy), seed=5, tensor_plan=plan)
            found.append(differing(model, expected))
            assert torch.equal(torch.get_rng_state(), before)
            first = all(mesh.get_coordinate()[1:][axis] == 0 for axis in range(mesh.ndim - 1))
            assert Gpt.real == (build is Gpt and first)
    return found


def test_constructor_values_equal_one_process_on_every_layout(ranks):
    assert ranks.run(4, _on_every_layout) == [[[]] * 22] * 4


JOB = (
    "model=custom",
    "model.target=test_constructors:Gpt",
    "precision=fp32",
    "train.seed=5",
    "checkpoint.enabled=false",
)


def _through_the_train_command(folder):
    split = "model.tensor_plan={blocks.*.c_fc: colwise, blocks.*.c_proj: rowwise}"
    found = []
    for words in (("strategy=hybrid", "mesh.shard=2"), ("strategy=ddp",), ("mesh.tensor=2", split)):
        trainer = jobs.build(folder, f"{folder}/run", (*JOB, *words))
        found.append(differing(trainer.model, plain(Gpt)))
        trainer.recorder.close()
    job = jobs.job_of(folder, f"{folder}/run", JOB)
    found.append(training_job.certify_job(*job).problems())
    return found


@pytest.mark.slow
def test_job_starts_from_constructor_values_and_passes_parity_check(ranks, folder):
    assert ranks.run(4, _through_the_train_command, str(folder)) == [[[], [], [], ""]] * 4


def _certified():
    mesh = build_mesh(MeshSpec(replicate=2, shard=1), "ddp")
    with build_on_meta():
        model = scaled()
    tokens = torch.arange(40).reshape(8, 5)

    def loss(model, tokens):
        return model(tokens).logsumexp(-1).sum()

    return certify(model, mesh, ParallelConfig("ddp"), loss, tokens, seed=5).problems()


def test_parity_check_starts_from_values_of_a_library_constructor(ranks):
    assert ranks.run(2, _certified) == ["", ""]


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Gpt()
        nn.init.zeros_(self.model.head.weight)


class Empty(Gpt):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.empty(3))


class OfRank(Gpt):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.full((3,), float(dist.get_rank())))


class Growing(Gpt):
    def __init__(self):
        super().__init__()
        if not self.head.weight.is_meta:
            self.more = nn.Linear(3, 3)


class Failing(Gpt):
    def __init__(self):
        super().__init__()
        if not self.head.weight.is_meta and dist.get_rank() == 1:
            raise OSError("no table of words")


def set_late():
    model = Gpt()
    nn.init.zeros_(model.blocks[1].c_fc.bias)
    return model


REFUSED = {
    set_late: "blocks.1.c_fc.bias: set inside build_on_meta by none of the constructors of Gpt",
    lambda: (
        Around().model
    ): "head.weight: set inside build_on_meta by none of the constructors of Gpt",
    Empty: "no initializer sets more",
    OfRank: "ranks [0, 1] built the model under one seed and got different weights",
    Growing: "built with values, the model has more: Linear; on meta it has wte.weight",
    Failing: "the model cannot be built for real: OSError: no table of words",
}


def _with_ones(module, _name):
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def _refused():
    mesh, told = build_mesh(MeshSpec(), "ddp"), []
    for build in (*REFUSED, Gpt):
        with build_on_meta():
            model = build()
        free = 2**10 if build is Gpt else 2**40
        with (
            pytest.raises(ConfigError) as error,
            mock.patch.object(source, "free_memory", return_value=free),
        ):
            parallelize(model, mesh, ParallelConfig("ddp"), seed=5)
        told.append(str(error.value))
    # A copy asks no constructor for values.
    with build_on_meta():
        model = set_late()
    copy.deepcopy(parallelize(model, mesh, ParallelConfig("ddp"), seed=5, init=_with_ones))
    return told


def test_non_reproducible_constructor_is_refused_by_name_on_every_rank(ranks):
    first, second = ranks.run(2, _refused)
    assert first == second
    *told, memory = first
    for text, expected in zip(told, REFUSED.values(), strict=True):
        assert expected in text
    assert memory.startswith("the model's constructor sets its values: 2 on ")
    assert "are free; set model.init (init=)" in memory
