"""Certificates: sound layouts pass, and each kind of fault is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import certified_runs
import pytest
import torch
import torch.distributed as dist
from certified_runs import FAULTS

from parallel2d import MeshSpec, ParallelConfig, build_mesh
from parallel2d.certification import size
from parallel2d.certification.collective_log import CollectiveLog
from parallel2d.config import LlamaModel, TrainConfig
from parallel2d.metrics.communication import LoggedCollective

HYBRID = {"replicate": 2, "shard": 2}
# Fault -> the check that finds it, the parameter or None, a word of the cause
NAMED = {
    "a sum in bf16": ("gradient", "embedding.weight", "bfloat16"),
    "a factor of 2": ("gradient", "embedding.weight", "2 ranks of the replicate axis"),
    "a parameter left out of one replica's reduction": ("copies", None, "replicate"),
    "a stale buffer": ("gradient", "layers.0.gate.weight", "step before"),
    "a missed micro-batch": ("forward", None, "missed"),
    "a lost contribution to the norm": ("norm", None, "lacks the gradient of"),
    "one bit of one replica": ("copies", None, "memory"),
    "exchanged gradients": ("gradient", "layers.1.experts.0.up.weight", "layers.1.experts.1.up"),
    "exchanged weights": ("initial weight", "layers.0.experts.0.down.weight", "experts.1.down"),
    "a frozen parameter that moves": ("update", "layers.0.norm.bias", ""),
    "another weight decay on one rank": ("optimizer", None, "weight decay"),
    "statistics that do not move": ("buffer", "statistics.running_mean", ""),
    "half of an outer step": ("shared weight", "embedding.weight", ""),
    "other updates than the owners'": ("update", "layers.0.gate.weight", ""),
    "a model that depends on the rank": ("forward", None, "model"),
    "experts exchanged on one rank": ("gradient", "embedding.weight", "are exchanged on rank 2"),
}  # fmt: skip
HYBRID_WORDS = {"strategy": "hybrid"}
# Of faults that another layout has
WORDS = {
    "half of an outer step": {"strategy": "hybrid", "sync": {"name": "diloco"}},
    "other updates than the owners'": {"strategy": "hybrid_full"},
}
FAST = ("a sum in bf16", "a parameter left out of one replica's reduction", "a stale buffer")


def slow_unless(fast, *values):
    return values[0] if fast else pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("fault", [slow_unless(each in FAST, each) for each in FAULTS])
def test_every_fault_is_found_and_named(ranks, fault):
    model = "statistics" if fault == "statistics that do not move" else "experts"
    found = ranks.run(4, certified_runs.run, model, HYBRID, WORDS.get(fault, HYBRID_WORDS), fault)[
        0
    ]
    assert not found["passed"]
    check, parameter, cause = NAMED[fault]
    assert any(
        each[0] == check and parameter in (None, each[1]) and cause in each[4]
        for each in found["found"]
    ), found["lines"][:20]
    assert "NOT CERTIFIED" in found["table"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ranks_named"),
    [
        ("a parameter left out of one replica's reduction", {0, 1}),
        ("a model that depends on the rank", {2}),
        ("experts exchanged on one rank", {2}),
        ("one bit of one replica", {1, 3}),
    ],
)
def test_the_ranks_are_named(ranks, fault, ranks_named):
    found = ranks.run(4, certified_runs.run, "experts", HYBRID, {"strategy": "hybrid"}, fault)[0]
    assert any(set(each[3]) == ranks_named for each in found["found"]), found["found"]


LAYOUTS = [
    ("experts", HYBRID, {"strategy": "hybrid"}, "adamw"),
    ("transformer", {"shard": 4, "replicate": 1}, {"strategy": "zero3", "precision": "bf16"}, "adamw"),
    ("dropout", HYBRID, {"strategy": "hybrid_full", "precision": "fp16"}, "sgd"),
    ("statistics", HYBRID, {"strategy": "hybrid", "sync": {"name": "diloco", "wire": "int4"}}, "adamw"),
    ("convolutions", HYBRID, {"strategy": "hybrid", "sync": {"wire": "int8"}}, "adamw"),
]  # fmt: skip
MORE_LAYOUTS = [
    ("recurrent", {"shard": 1, "replicate": 4}, {"strategy": "ddp"}, "adamw"),
    ("perceptron", {"shard": 4, "replicate": 1}, {"strategy": "zero2", "precision": "fp16"}, "adamw"),
    ("experts", HYBRID, {"strategy": "hybrid", "precision": "bf16"}, "adamw"),
    ("dropout", {"shard": 4, "replicate": 1}, {"strategy": "zero3", "precision": "bf16"}, "adamw"),
    ("statistics", {"shard": 1, "replicate": 4}, {"strategy": "ddp"}, "adamw"),
    ("convolutions", HYBRID, {"strategy": "hybrid_full", "sync": {"wire": "bf16"}}, "adamw"),
    ("recurrent", HYBRID, {"strategy": "hybrid", "precision": "fp16"}, "adam"),
    ("transformer", HYBRID, {"strategy": "hybrid", "precision": "bf16_reduce_bf16"}, "adamw"),
    ("perceptron", HYBRID, {"strategy": "hybrid", "sync": {"name": "diloco", "wire": "sparse"}}, "adamw"),
    ("transformer", HYBRID, {"strategy": "hybrid", "sync": {"name": "diloco", "fragments": 2, "delay": 2}}, "adamw"),
    ("experts", HYBRID, {"strategy": "hybrid", "sync": {"during_accumulation": "none"}}, "adamw"),
    ("perceptron", HYBRID, {"strategy": "hybrid", "sync": {"during_accumulation": "full"}}, "sgd"),
    ("perceptron", HYBRID, {"strategy": "hybrid", "sync": {"engine": "torch"}}, "adamw"),
    ("convolutions", {"shard": 4, "replicate": 1}, {"strategy": "zero3", "bucketing": "layer"}, "adafactor"),
    ("transformer", HYBRID, {"strategy": "hybrid"}, "muon"),
    ("transformer", HYBRID, {"strategy": "hybrid_full"}, "muon"),
    ("transformer", HYBRID, {"strategy": "hybrid", "activation_checkpointing": "full", "precision": "fp64"}, "adamw"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "parallel", "optimizer"),
    [*LAYOUTS, *MORE_LAYOUTS],
    ids=str,
)
def test_sound_layouts_raise_no_alarm(ranks, model, sizes, parallel, optimizer):
    found = ranks.run(4, certified_runs.run, model, sizes, parallel, "", optimizer)
    assert found[0]["passed"], found[0]["lines"][:20]
    assert found[0]["untouched"]
    assert found[0]["steps"] >= 5
    # Every rank has the certificate.
    assert found[3]["table"] == found[0]["table"]


def test_what_can_be_said_of_parameters(ranks):
    notes = ranks.run(4, certified_runs.run, "experts", HYBRID, {"strategy": "hybrid"})[0]["notes"]
    assert notes["embedding.weight"] == ["tied to head.weight"]
    assert notes["layers.0.norm.bias"] == ["frozen"]
    assert notes["unused.weight"] == ["unused"]
    assert notes["scale"] == []


TENSOR = {"replicate": 1, "shard": 2, "tensor": 2}


@pytest.mark.parametrize("seed", [None, 4])
def test_tensor_ranks_must_draw_the_same_numbers(ranks, seed):
    plan = {"head": "colwise_gather_output"}
    found = ranks.run(
        4, certified_runs.run, "untied", TENSOR, {"strategy": "zero3"}, "", "adamw", seed, plan
    )[0]
    told = [each for each in found["found"] if each[0] == "random numbers"]
    assert bool(told) == (seed is None)
    assert found["passed"] == (seed is not None), found["lines"][:10]


def logged_collectives(change):
    """What is said of the collectives of a step, of which rank 1 has others."""
    mesh = build_mesh(MeshSpec(replicate=2, shard=1), "ddp")
    meter = SimpleNamespace(log=None)
    predicted = {"comm/replicate/bytes": 800.0}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    log = CollectiveLog(meter, mesh, ParallelConfig("ddp"), predicted, optimizer)
    log.start()
    meter.log += [LoggedCollective("replicate", "all_reduce", torch.float32, 400.0)] * 2
    if dist.get_rank() == 1 and change == "order":
        meter.log[0] = LoggedCollective("replicate", "all_gather", torch.float32, 400.0)
    if dist.get_rank() == 1 and change == "dtype":
        meter.log[0] = LoggedCollective("replicate", "all_reduce", torch.bfloat16, 400.0)
    if dist.get_rank() == 1 and change == "less":
        meter.log.clear()
    if change == "bytes":
        meter.log.pop()
    return [
        (each.check, each.axis, each.collective, each.ranks)
        for each in log.check(1, predictable=True)
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("", []),
        ("bytes", [("bytes", "replicate", None, ())]),
        ("order", [("order of collectives", "replicate", None, (0, 1))]),
        (
            "less",
            [
                ("bytes", "replicate", None, ()),
                ("order of collectives", "replicate", None, (0, 1)),
            ],
        ),
        (
            "dtype",
            [
                ("collective", "replicate", "all_reduce", (1,)),
                ("order of collectives", "replicate", None, (0, 1)),
            ],
        ),
    ],
)
def test_collectives_are_compared_with_the_policy_and_among_ranks(ranks, change, told):
    assert ranks.run(2, logged_collectives, change)[0] == told


MODEL = """
import os

import torch
from torch import nn


if os.environ.get("OTHER_SAMPLES"):
    from parallel2d.data.stream import SampleStream

    read = SampleStream.read

    def other(self, positions):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            positions = [position + 1 for position in positions]
        return read(self, positions)

    SampleStream.read = other


class Louder(nn.Module):
    def __init__(self, rank=-1):
        super().__init__()
        self.embedding = nn.Embedding(320, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 320)
        self.rank = rank

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if not tokens.is_meta and torch.distributed.get_rank() == self.rank:
            x = 1.1 * x
        return self.head(x)
"""
SMALL = (
    "launch.nproc_per_node=2", "strategy=ddp", "model=custom", "model.target=louder:Louder", "data=text", "data.path=corpus.txt",
    "data.cache_dir=cache", "train.seq_len=16", "train.global_batch_size=8", "train.steps=4", "train.validate_every=0",
    "metrics.console=plain", "metrics.tensorboard=false", "checkpoint.enabled=false", "hydra.run.dir=run",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus.txt").write_text("".join(f"{i} and {i * i}\n" for i in range(4000)))
    (tmp_path / "louder.py").write_text(MODEL)
    return tmp_path


def execute(folder, module, *words, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PARALLEL2D")}
    return subprocess.run(
        [sys.executable, "-m", module, *SMALL, *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=150,
    )


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_the_command_writes_a_certificate_and_trains_nothing(folder):
    done = execute(folder, "parallel2d.certify")
    assert done.returncode == 0, done.stderr
    assert "certified" in done.stdout
    certificate = json.loads((folder / "run" / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["versions"]["torch"] == str(torch.__version__)
    assert certificate["parameters"]["head.weight"]["gradient"] < 1e-6
    assert "<svg" in (folder / "run" / "certificate.svg").read_text()
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_the_command_says_what_is_wrong(folder):
    done = execute(folder, "parallel2d.certify", "model.arguments.rank=1")
    assert done.returncode == 1
    assert done.stderr.count("not certified") == 1
    assert "on rank 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not json.loads((folder / "run" / "certificate.json").read_text())["passed"]


@pytest.mark.slow
def test_a_rank_that_reads_other_samples_is_found(folder):
    done = execute(folder, "parallel2d.certify", OTHER_SAMPLES="1")
    assert done.returncode == 1
    assert "did not read the samples of the global batch" in done.stderr
    assert "on rank 1" in done.stderr


@pytest.mark.slow
def test_a_certified_run_trains_as_one_without_certificate(folder):
    done = execute(folder, "parallel2d.train", "train.certify=true")
    assert done.returncode == 0, done.stderr
    with_certificate = losses(folder / "run")
    done = execute(folder, "parallel2d.train", "hydra.run.dir=plain")
    assert done.returncode == 0, done.stderr
    assert with_certificate == losses(folder / "plain")
    report = subprocess.run(
        [sys.executable, "-m", "parallel2d.report", "--markdown", "run", "plain"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert report.returncode == 0, report.stderr
    table = [line for line in (folder / "report.md").read_text().splitlines() if "|" in line]
    place = table[0].split("|").index(" certified ")
    assert [row.split("|")[place].strip() for row in table[2:4]] == ["yes", "-"]


@pytest.mark.slow
def test_a_run_that_is_not_certified_does_not_begin(folder):
    done = execute(folder, "parallel2d.train", "train.certify=true", "model.arguments.rank=1")
    assert done.returncode == 2
    assert "not certified" in done.stderr
    assert not (folder / "run" / "metrics.jsonl").exists()


def fewer_layers():
    """The model that is certified where there is room for few layers, and what is said about it."""
    config = TrainConfig(model=LlamaModel(n_layers=8))
    notes = []
    runtime = SimpleNamespace(device=torch.device("cpu"))
    with mock.patch.object(size, "free_bytes", return_value=60e6):
        model = size.fitting_model(config, runtime, notes)
    return model.n_layers, notes


def test_a_model_that_is_too_large_is_certified_with_fewer_layers(ranks):
    layers, notes = ranks.run(2, fewer_layers)[0]
    assert layers in (1, 2, 4)
    assert f"n_layers={layers} instead of 8" in notes[0]
