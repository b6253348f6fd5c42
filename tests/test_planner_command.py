"""``plan.dry_run=true``: the plan of a job that is not started."""

import dataclasses
import json
import os
import re

import jobs
import pytest
import torch
from torch import nn

from parallel2d import ConfigError, plan, train
from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_cost import cost_of
from parallel2d.instruments.planner.plan_text import shortage, summary

# A model with unsharded blocks, logits and activations of similar sizes.
SMALL = (
    "model.dim=256",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=8",
    "model.hidden_dim=512",
    "model.vocab_size=1024",
    "train.seq_len=128",
    "train.micro_batch_size=2",
    "train.global_batch_size=64",
    "cluster.device.type=cpu",
    "cluster.ranks_per_node=8",
    "plan.verify=true",
)


def config_of(*words):
    return compose([*SMALL, *words]).config


@pytest.mark.slow
def test_plan_leaves_no_files_or_process_group(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "cluster.device.memory_gib=80", "cluster.nodes=2", "plan.dry_run=true"]
    assert plan.main(words) == 0
    assert os.listdir(tmp_path) == []
    assert not torch.distributed.is_initialized()
    text = capsys.readouterr().out
    for line in (
        "mesh        replicate 2 x shard 8 x tensor 1; strategy hybrid",
        "of 80.0 GiB at the peak of a step",
        "of 80.0 GiB at the peak as traced",
    ):
        assert line in text
    assert re.search(r"replicate [\d.]+ [GM]B, between hosts", text)


@pytest.mark.parametrize("mesh", [[], ["mesh.context=2"]])
def test_the_train_command_plans_instead_of_training(capsys, mesh):
    words = [*SMALL, "plan.verify=false", *mesh]
    assert train.main([*words, "plan.dry_run=true"]) == 0
    dry = capsys.readouterr().out
    assert plan.main([*words, "plan.dry_run=true"]) == 0
    assert capsys.readouterr().out == dry
    assert "at the peak of a step" in dry
    assert "as traced" not in dry


def test_plan_over_the_memory_limit_names_both_numbers(capsys):
    words = [*SMALL, "plan.verify=false", "cluster.device.memory_gib=0.01", "plan.dry_run=true"]
    assert plan.main(words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(
        r"parallel2d: does not fit: the peak-memory rank needs \d+\.\d\d of \d+\.\d\d MiB at "
        r"its peak; shard over",
        error,
    )


def test_plan_without_peak_compares_the_states_with_the_memory():
    config = config_of("plan.verify=false", "cluster.device.memory_gib=0.001")
    found = cost_of(config)
    assert "at its peak" in shortage(config, found)
    unknown = dataclasses.replace(found, predicted="it is not known")
    assert "buffers, without activations" in shortage(config, unknown)
    config.cluster.device.memory_gib = None
    assert shortage(config, found) is None


def test_plan_of_an_invalid_run_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (
            ["cluster.nodes=2", "mesh.shard=2", "mesh.tensor=8", "model.n_kv_heads=4"],
            "does not divide the heads",
        ),
        (["cluster.nodes=1000000"], "are more than 1,000,000 ranks"),
        (["optimizer.groups=[{pattern: nothing, lr_scale: 0.1}]"], "matches no parameter"),
        (["data=custom", "data.target=no.such:thing"], "cannot be imported"),
        (
            ["cpu_offload=true", "cluster.device.type=cuda", "strategy=zero3"],
            "use plan.verify=false",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            cost_of(jobs.config_of([*SMALL, *words]))
    assert plan.main(["-m", *SMALL, "strategy=ddp,zero3"]) == 2
    assert "plans one job: use one value for each key, without -m" in capsys.readouterr().err


class Looking(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary))

    def forward(self, tokens):
        if tokens.sum().item() < 0:
            raise ValueError("no tokens")
        return self.layers(tokens)


def test_model_with_data_dependent_code_is_planned_without_peak():
    words = ["model=custom", "model.target=test_planner_command:Looking"]
    words += ["model.arguments.vocabulary=300"]
    with pytest.raises(ConfigError, match="use plan.verify=false"):
        cost_of(compose([*words, "train.seq_len=8", "plan.verify=true"]).config)
    config = compose([*words, "train.seq_len=8"]).config
    planned = cost_of(config)
    lines = "\n".join(summary(config, planned))
    assert "activations are not known: Looking does not run on tensors without storage" in lines
    assert planned.states.parameters > 0
    assert planned.flops is None


@pytest.mark.slow
def test_ranks_of_torchrun_do_not_plan(tmp_path):
    launcher = ["torch.distributed.run", "--nproc-per-node=1", "-m", "parallel2d.train"]
    ended = jobs.run_python("-m", *launcher, "plan.dry_run=true", cwd=tmp_path)
    assert ended.returncode != 0
    message = "plan.dry_run=true plans in one process: start it without torchrun or srun"
    assert ended.stderr.count(message) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("strategy=hybrid_full", "precision=bf16"), ("mesh.tensor=2", "optimizer=muon")]
)
def test_run_has_mesh_and_bytes_of_its_plan(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = (
        "model.n_layers=2",
        "train.steps=2",
        "train.validate_every=0",
        "checkpoint.enabled=false",
        "metrics.console=silent",
        "metrics.log_every=1",
    )
    planned = cost_of(compose([*job, *words]).config)
    assert train.main([*job, *words, f"hydra.run.dir={tmp_path}/run"]) == 0
    layout = json.loads((tmp_path / "run" / "layout.json").read_text())
    sizes = {axis: getattr(planned.shape, axis) for axis in ("replicate", "shard", "tensor")}
    assert layout["mesh"] == sizes
    assert layout["accumulation"] == planned.layout.workload.accumulation
    assert layout["parameters"] == planned.parameters
    assert planned.moved == pytest.approx(layout["predicted"], rel=1e-12)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (row,) = [row for row in rows if row.get("step") == 2]
    measured = {key: row[key] for key in planned.moved if key in row}
    assert measured == pytest.approx({key: planned.moved[key] for key in measured}, rel=1e-12)
    assert len(measured) > 1
