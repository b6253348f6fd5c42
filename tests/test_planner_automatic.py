"""``strategy=auto``: a job runs in the layout that the planner finds for its ranks."""

import json

import pytest
import torch
from test_command_line import SMALL, execute, folder, rows  # noqa: F401

from parallel2d import ConfigError, MeshSpec, ParallelConfig, build_mesh, plan, train
from parallel2d.base.config import StrategyConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.topology import Topology
from parallel2d.instruments.planner.automatic import with_chosen_layout
from parallel2d.parallel.cost.fake_group import fake_process_group
from parallel2d.parallel.parallelize.preconditions import check_arguments

# 80,000 parameters: 1.3 MB of states in one piece.
JOB = (
    *SMALL,
    "model.dim=64",
    "model.hidden_dim=128",
    "strategy=auto",
    "mesh.tensor=1",
    "bucketing=block",
    "activation_checkpointing=none",
    "train.micro_batch_size=1",
)
SPEEDS = (
    "cluster.device.peak_tflops.fp32=0.05",
    "cluster.device.efficiency=0.5",
    "cluster.device.memory_gb_per_s=10",
    "cluster.inside_node={up_gbit: 8, down_gbit: 8, latency_us: 50}",
    "cluster.between_nodes={up_gbit: 0.1, down_gbit: 0.1, latency_us: 200}",
)
PLENTY = "cluster.device.memory_gib=4"
# Enough for a step of half the model, but not of the full model.
LITTLE = "cluster.device.memory_gib=0.0016"


def chosen(nodes, ranks, *words):
    words = [*JOB, *SPEEDS, *words]
    return with_chosen_layout(compose(words).config, words, nodes, ranks)


@pytest.mark.slow
def test_automatic_layout_follows_memory_and_links():
    whole, lines = chosen(1, 2, PLENTY)
    assert (whole.strategy.name, whole.mesh.replicate, whole.mesh.shard) == ("ddp", 2, 1)
    assert lines[0].startswith("layout      strategy=ddp mesh.replicate=2 mesh.shard=1")
    assert any(line.startswith("runner-up   strategy=") for line in lines)
    # Two nodes of two ranks that cannot hold a full copy: sharded only inside nodes.
    split, lines = chosen(2, 4, LITTLE)
    assert split.strategy.name.startswith("hybrid")
    assert (split.mesh.replicate, split.mesh.shard) == (2, 2)
    assert "exposed on the replicate axis" in lines[-1]
    # The job has found the machines of `cluster`; they are not a part of the result.
    assert split.cluster.nodes == "auto"
    # Named keys keep their values.
    assert chosen(1, 4, PLENTY, "mesh.shard=2")[0].mesh.shard == 2


@pytest.mark.slow
def test_automatic_layout_needs_cluster_figures():
    with pytest.raises(ConfigError) as caught:
        with_chosen_layout(compose(list(JOB)).config, list(JOB), 1, 2)
    assert str(caught.value).startswith("auto: layouts cannot be ranked: cluster.")
    assert "parallel2d.preflight --write" in str(caught.value)
    with pytest.raises(ConfigError, match="5 ranks on 2 nodes are not equally many"):
        chosen(2, 5)


def test_custom_loop_must_name_its_strategy():
    with pytest.raises(ConfigError, match="strategy=auto is not one of ddp"):
        ParallelConfig("auto")
    config = ParallelConfig(StrategyConfig("auto"))
    with pytest.raises(ConfigError, match="strategy=auto was not resolved"):
        _ = config.strategy.placement.shards
    with pytest.raises(ConfigError, match="in code, name one"):
        check_arguments(torch.nn.Linear(2, 2), _mesh(), config)


def _mesh():
    with fake_process_group(1):
        return build_mesh(MeshSpec(1, 1), topology=Topology.equal_hosts(1, 1), device_type="cpu")


@pytest.mark.slow
def test_dry_run_prints_the_automatic_layout(capsys):
    words = [*JOB, *SPEEDS, PLENTY, "launch.nproc_per_node=2"]
    assert train.main([*words, "plan.dry_run=true"]) == 0
    dry = capsys.readouterr().out
    assert "layout      strategy=ddp mesh.replicate=2" in dry
    assert "mesh        replicate 2 x shard 1 x tensor 1; strategy ddp" in dry
    assert plan.main(words) == 0
    assert "strategy=auto" not in capsys.readouterr().out


@pytest.mark.parametrize("launcher", [
    pytest.param(("-m", "parallel2d.train", "launch.nproc_per_node=2"), marks=pytest.mark.slow, id="own"),
    pytest.param(
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "parallel2d.train"),
        marks=pytest.mark.soak, id="torchrun",
    ),
])  # fmt: skip
def test_a_job_runs_in_the_chosen_layout(folder, launcher):  # noqa: F811
    words = [*JOB, *SPEEDS, LITTLE, "checkpoint.every=2", "hydra.run.dir=run"]
    done = execute(folder, *words, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("layout      strategy=zero") == 1
    layout = json.loads((folder / "run" / "layout.json").read_text())
    assert layout["strategy"].startswith("zero")
    assert layout["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1}
    # The command that resumes repeats the requested overrides.
    (resume,) = [line for line in done.stderr.splitlines() if line.startswith("continue")]
    assert " strategy=auto " in resume
    more = execute(folder, *words, "train.steps=6", launcher=launcher)
    assert more.returncode == 0, more.stderr
    assert [row["step"] for row in rows(folder / "run")][-1] == 6
