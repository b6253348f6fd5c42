"""Parity checks: correct layouts pass, and each kind of fault is found and located."""

import json
import os
from types import SimpleNamespace
from unittest import mock

import jobs
import parity_runs
import pytest
import torch

from parallel2d import ParallelConfig, certify, train
from parallel2d.base.config import LlamaModel, PrecisionConfig
from parallel2d.instruments.parity_check import training_job
from parallel2d.instruments.parity_check.collective_audit import CollectiveAudit
from parallel2d.parallel.sync.methods import method_of
from parallel2d.training.metrics.communication import LoggedCollective

HYBRID = {"replicate": 2, "shard": 2}
ZERO = {"replicate": 1, "shard": 4}
DDP = {"replicate": 4, "shard": 1}
TENSOR = {"replicate": 1, "shard": 2, "tensor": 2}
# Fault -> the check that finds it; parameter, axis and ranks (None: any); a word of the cause
FOUND = {
    "a sum in bf16": ("gradient", "embedding.weight", None, None, ""),
    "a factor of 2": (
        "gradient",
        "embedding.weight",
        None,
        None,
        "2 times what it should be, as if summed instead of averaged over the replicate",
    ),
    "a parameter left out of one replica's reduction": (
        "copies",
        "embedding.weight",
        "replicate",
        (0, 1, 2, 3),
        "",
    ),
    "a stale buffer": ("gradient", "layers.0.gate.weight", None, None, "step before"),
    "a missed micro-batch": ("loss", None, None, (1,), "missing or repeated: 1 of 2"),
    "a lost contribution to the norm": ("norm", None, None, (3,), "lacks the gradient of scale"),
    "one bit of one replica": ("copies", "layers.0.experts.0.up.weight", "replicate", (1, 3), ""),
    "exchanged gradients": ("gradient", "layers.1.experts.0.up.weight", None, None, ""),
    "exchanged weights": ("initial weight", "layers.0.experts.0.down.weight", None, None, ""),
    "a frozen parameter that moves": ("update", "layers.0.norm.bias", None, None, "frozen"),
    "another weight decay on one rank": ("copies", "layers.1.gate.weight", "replicate", (1, 3), ""),
    "a state in bf16 where it is large": (
        "update",
        "layers.0.experts.0.up.weight",
        None,
        None,
        "",
    ),
    "statistics that do not move": ("buffer", "statistics.running_mean", None, (2,), ""),
    "half of an outer step": ("shared weight", "embedding.weight", None, None, ""),
    "other updates than the owners'": ("update", "layers.0.gate.weight", None, None, ""),
    "a model that depends on the rank": ("loss", None, None, (2,), "model"),
    "experts exchanged on one rank": ("loss", None, None, (2,), "model"),
}
# Expected results of faults that another layout has
WORDS = {
    "half of an outer step": {"strategy": "hybrid", "sync": {"name": "diloco"}},
    "other updates than the owners'": {"strategy": "hybrid_full"},
}
FAST = ("a factor of 2", "a parameter left out of one replica's reduction", "a stale buffer")


@pytest.mark.parametrize(
    "fault",
    [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in FOUND],
)
def test_every_fault_is_found_and_located(ranks, fault):
    model = "statistics" if fault == "statistics that do not move" else "experts"
    words = WORDS.get(fault, {"strategy": "hybrid"})
    found = ranks.run(4, parity_runs.run, model, HYBRID, words, fault)[0]
    assert not found["passed"]
    assert "NOT CERTIFIED" in found["table"]
    check, *place, cause = FOUND[fault]
    assert any(
        each[0] == check
        and all(wanted in (None, given) for wanted, given in zip(place, each[1:4], strict=True))
        and cause in each[4]
        for each in found["found"]
    ), found["lines"][:20]


def test_parity_check_covers_every_kind_of_fault():
    assert set(FOUND) == set(parity_runs.FAULTS)


# Every strategy, precision, communication dtype, accumulation mode, engine and optimizer at least
# once
LAYOUTS = [
    ("transformer", ZERO, {"strategy": "zero3", "precision": "bf16"}, "adam"),
    ("dropout", HYBRID, {"strategy": "hybrid_full", "precision": "fp16", "sync": {"wire": "int4"}}, "sgd"),
    ("recurrent", DDP, {"strategy": "ddp"}, "adamw bf16"),
    ("statistics", HYBRID, {"strategy": "hybrid", "sync": {"name": "diloco", "wire": "int4"}}, "adamw"),
    ("transformer", HYBRID, {"strategy": "hybrid", "sync": {"name": "diloco", "fragments": 2, "delay": 2}},
        "adamw"),
    ("convolutions", HYBRID, {"strategy": "hybrid", "sync": {"wire": "int8"}}, "adamw"),
    ("convolutions", ZERO, {"strategy": "zero2", "precision": "fp16", "bucketing": "layer"}, "adamw"),
    ("recurrent", HYBRID, {"strategy": "hybrid", "precision": "bf16"}, "sgd"),
    ("experts", HYBRID, {"strategy": "hybrid", "sync": {"wire": "int4"}}, "adamw"),
    ("recurrent", HYBRID, {"strategy": "hybrid", "precision": "bf16", "sync": {"wire": "int4"}}, "adamw"),
    ("experts", HYBRID, {"strategy": "hybrid", "precision": "bf16_reduce_bf16",
        "sync": {"during_accumulation": "full"}}, "adamw"),
    ("transformer", HYBRID, {"strategy": "hybrid", "sync": {"during_accumulation": "none"}}, "muon"),
    ("transformer", HYBRID, {"strategy": "hybrid_full"}, "muon"),
    ("experts", HYBRID, {"strategy": "hybrid_full",
        "precision": PrecisionConfig("bf16", "bf16", "bf16", "fp32")}, "adamw int8"),
    ("dropout", HYBRID, {"strategy": "hybrid", "activation_checkpointing": "full", "precision": "fp64"},
        "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes", "parallel", "optimizer"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LAYOUTS[::2]),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in LAYOUTS[1::2]),
    ],
    ids=str,
)
def test_correct_layouts_pass_the_parity_check(ranks, model, sizes, parallel, optimizer):
    found = ranks.run(4, parity_runs.run, model, sizes, parallel, "", optimizer)
    assert found[0]["passed"], found[0]["lines"][:20]
    assert found[0]["steps"] >= 5


def test_correct_layout_reports_its_parameter_differences(ranks):
    found = ranks.run(4, parity_runs.run, "experts", HYBRID, {"strategy": "hybrid"})
    assert found[0]["passed"], found[0]["lines"][:20]
    assert all(each["untouched"] for each in found)
    assert found[3]["table"] == found[0]["table"]
    assert "all_reduce in torch.float32 over the replicate axis" in found[0]["table"]
    notes = found[0]["notes"]
    assert notes["embedding.weight"] == ["tied to head.weight"]
    assert notes["layers.0.norm.bias"] == ["frozen"]
    assert notes["unused.weight"] == ["unused"]
    assert notes["scale"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 4])
def test_tensor_ranks_must_draw_equal_random_numbers(ranks, seed):
    plan = {"head": "colwise_gather_output"}
    words = {"strategy": "zero3"}
    found = ranks.run(4, parity_runs.run, "untied", TENSOR, words, "", "adamw", seed, plan)[0]
    told = [each for each in found["found"] if each[0] == "copies"]
    assert [each[2:4] for each in told] == ([] if seed else [("tensor", (0, 1, 2, 3))])
    assert found["passed"] == (seed is not None), found["lines"][:10]


def report_of_collectives(change):
    """Report the collectives of a step with two reductions per replica and another collective on
    rank 1.
    """
    mesh = SimpleNamespace(mesh=torch.arange(2).view(2, 1), mesh_dim_names=("replicate", "shard"))
    mesh.shape = (2, 1)
    config = ParallelConfig("ddp")
    subject = SimpleNamespace(mesh=mesh, config=config, optimizer=None)
    subject.method = method_of(config.strategy, config.sync, replicas=2)
    subject.predicted = {"comm/replicate/bytes": 800.0}
    logs = [[LoggedCollective("replicate", "all_reduce", torch.float32, 400.0)] * 2 for _ in "01"]
    if change == "order":
        logs[1][0] = LoggedCollective("replicate", "all_gather", torch.float32, 400.0)
    if change == "dtype":
        logs[1][0] = LoggedCollective("replicate", "all_reduce", torch.bfloat16, 400.0)
    if change == "less":
        logs[1].clear()
    if change == "bytes":
        logs = [log[1:] for log in logs]
    found = CollectiveAudit(subject).check(1, logs, predictable=True)
    assert all(each.axis == "replicate" for each in found)
    return {each.check: each.ranks for each in found}


def test_collectives_are_compared_with_the_policy_and_among_ranks():
    assert report_of_collectives("") == {}
    assert report_of_collectives("bytes") == {"bytes": ()}
    assert report_of_collectives("order") == {"order of collectives": (0, 1)}
    assert report_of_collectives("less") == {"bytes": (), "order of collectives": (0, 1)}
    assert report_of_collectives("dtype") == {"collective": (1,), "order of collectives": (0, 1)}


MODEL = """
import torch
from torch import nn


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
    "launch.nproc_per_node=2",
    "strategy=ddp",
    "model=custom",
    "model.target=louder:Louder",
    "data=text",
    "data.path=corpus.txt",
    "data.cache_dir=cache",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "train.steps=4",
    "train.validate_every=0",
    "metrics.console=plain",
    "metrics.tensorboard=false",
    "checkpoint.enabled=false",
)


@pytest.fixture
def folder(folder):
    (folder / "louder.py").write_text(MODEL)
    return folder


def execute(folder, module, *words):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PARALLEL2D")}
    environment["OMP_NUM_THREADS"] = "1"
    words = ("-m", module, *SMALL, "hydra.run.dir=run", *words)
    return jobs.run_python(*words, cwd=folder, env=environment)


# The reference has full logits.
CHUNKED = ("train.loss_chunk=9", "train.z_loss=0.01")


def certificate_of_job(folder, other_samples):
    """Return the problems of a job with a rank that may read other samples."""
    from parallel2d.training.data.stream import SampleStream

    read = SampleStream.read

    def other(self, positions, *filler):
        if other_samples and torch.distributed.get_rank() == 1:
            positions = [position + 1 for position in positions]
        return read(self, positions, *filler)

    with mock.patch.object(SampleStream, "read", other):
        job = jobs.job_of(folder, f"{folder}/run", ("strategy=ddp", "model.n_layers=1", *CHUNKED))
        return training_job.certify_job(*job).problems()


@pytest.mark.parametrize("other_samples", [False, True])
def test_parity_check_passes_unless_a_rank_reads_other_samples(ranks, folder, other_samples):
    problems = ranks.run(2, certificate_of_job, str(folder), other_samples)[1]
    assert bool(problems) == other_samples
    assert ("loss" in problems and "on rank 1" in problems) == other_samples
    assert "on rank 0" not in problems


@pytest.mark.slow
def test_parity_command_writes_its_report_and_trains_no_step(folder):
    done = execute(folder, "parallel2d.certify")
    assert done.returncode == 0, done.stderr
    assert "certified" in done.stdout
    certificate = json.loads((folder / "run" / "certificate.json").read_text())
    assert certificate["passed"]
    assert certificate["versions"]["torch"] == str(torch.__version__)
    assert certificate["parameters"]["head.weight"]["gradient"] < 1e-6
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 1), (1, 1), (130, 130)])
def test_parity_command_exit_codes(code, expected):
    with mock.patch.object(train, "main", return_value=code) as trained:
        assert certify_command(["strategy=ddp"]) == expected
    assert trained.call_args.args[0] == ["strategy=ddp", "train.certify_only=true"]


def certify_command(words):
    from parallel2d.certify import main

    return main(words)


@pytest.mark.slow
def test_run_does_not_start_after_a_failed_parity_check(folder):
    done = execute(folder, "parallel2d.train", "train.certify=true", "model.arguments.rank=1")
    assert done.returncode == 2
    assert done.stderr.count("not certified") == 1
    assert "on rank 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not json.loads((folder / "run" / "certificate.json").read_text())["passed"]
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_run_after_a_parity_check_trains_as_without_it(ranks, folder):
    done = execute(folder, "parallel2d.train", "train.certify=true")
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "certificate.json").exists()
    done = execute(folder, "parallel2d.train", "hydra.run.dir=plain")
    assert done.returncode == 0, done.stderr
    certified, plain = (jobs.rows(folder / name) for name in ("run", "plain"))
    assert [row["loss"] for row in certified] == [row["loss"] for row in plain]


def fewer_layers():
    """Check the model with memory for few layers, and return the message."""
    notes = []
    with mock.patch.object(training_job, "free_bytes", return_value=60e6):
        model = training_job.fitting_model(LlamaModel(n_layers=8), torch.device("cpu"), notes)
    return model.n_layers, notes


def test_large_model_is_checked_with_fewer_layers(ranks):
    layers, notes = ranks.run(2, fewer_layers)[0]
    assert layers in (1, 2, 4)
    assert f"n_layers={layers} instead of 8" in notes[0]


def test_parity_check_needs_two_samples_per_data_rank(ranks):
    with pytest.raises(AssertionError, match="at least two for each of 2 data ranks"):
        ranks.run(2, certify_three_samples)


def certify_three_samples():
    from parallel2d import MeshSpec, build_mesh

    mesh = build_mesh(MeshSpec(replicate=2, shard=1), "ddp")
    certify(torch.nn.Linear(2, 2), mesh, ParallelConfig("ddp"), torch.sum, torch.ones(3, 2))
