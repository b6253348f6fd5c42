"""A calibration measures what training uses, and the planner reads the file that it writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parallel2d.calibration.link_fit import CollectiveSample, fit_link
from parallel2d.config import ClusterConfig, LinkConfig
from parallel2d.config.composition import compose
from parallel2d.cost.collective_time import GroupPlacement, collective_seconds
from parallel2d.cost.step_time import GroupSeconds, StepSchedule, step_seconds
from parallel2d.errors import ConfigError
from parallel2d.planner.layout_cost import cost_of
from parallel2d.preflight import main

BETWEEN = GroupPlacement(ranks=4, hosts=4, groups_per_host=1)


def samples(latency: float, bytes_per_s: float) -> list[CollectiveSample]:
    found = []
    for size in (4096, 65536, 1 << 20, 1 << 24):
        seconds = 3 * latency + size / bytes_per_s
        found.append(CollectiveSample("all_gather", size, 3, size, seconds))
    return found


def calibrate(*words: str, cwd: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallel2d.preflight", "--calibrate=mine.yaml", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_calibration_of_two_ranks_gives_a_file_that_the_planner_reads(tmp_path):
    done = calibrate("--nproc=2", "--seconds=0.05", "--largest-mib=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measuring: all_to_all inside nodes" in done.stderr
    path = tmp_path / "mine.yaml"
    words = [f"cluster={path}", "plan.verify=false", "mesh.shard=2"]
    composed = compose(words)
    cluster = composed.config.cluster
    assert (cluster.name, cluster.nodes, cluster.ranks_per_node) == ("mine", 1, 2)
    assert cluster.device.peak_tflops.fp32 > 0
    assert 0 < cluster.device.efficiency <= 1
    assert cluster.inside_node.bytes_per_s > 0
    assert cluster.between_nodes == LinkConfig()
    assert cost_of(composed.config).time.seconds.total > 0
    # The same file as a choice of the group.
    (tmp_path / "cluster").mkdir()
    path.rename(tmp_path / "cluster" / "mine.yaml")
    assert compose(["--config-dir", str(tmp_path), "cluster=mine"]).config.cluster == cluster


def test_words_beside_a_cluster_file_go_before_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: it's mine\nnodes: 2\ndevice: {efficiency: 0.5, memory_gib: null}\n")
    for words in (["cluster.nodes=4", f"cluster={path}"], [f"cluster={path}", "cluster.nodes=4"]):
        cluster = compose(words).config.cluster
        assert (cluster.name, cluster.nodes, cluster.device.efficiency) == ("it's mine", 4, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "not YAML"),
        ("42", "no cluster file"),
        ("nodes: [1]", "is no value"),
        ("nodez: 2", "nodez"),
        ("device: {efficiency: 2}", "efficiency"),
    ],
)
def test_a_file_that_is_no_cluster_file_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose([f"cluster={path}"])


def test_a_cluster_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        compose([f"cluster={tmp_path}/none.yaml"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate=mine.json"], "must end with .yaml"),
        (["--calibrate=none/mine.yaml"], "cannot be written"),
        (["--calibrate=mine.yaml", "--largest-mib=0"], "--largest-mib=0 must be from"),
        (["--calibrate=mine.yaml", "--largest-mib=nan"], "--largest-mib=nan must be from"),
        (["--calibrate=mine.yaml", "--seconds=60"], "at most 2"),
        (["--calibrate=mine.yaml", "--json"], "--json is of the check"),
    ],
)
def test_wrong_arguments_write_no_file(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_fails_is_one_message_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "no bool")
    done = calibrate("--nproc=2", "--seconds=0.01", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed while it measured" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_fit_finds_latency_and_bandwidth():
    found = fit_link(samples(2e-4, 1e8))
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bytes_per_s == pytest.approx(1e8)


def test_a_disturbed_measurement_does_not_move_a_fit():
    disturbed = CollectiveSample("all_gather", 4096, 3, 4096, 0.1)
    found = fit_link([*samples(2e-4, 1e8), disturbed])
    assert found.latency_s == pytest.approx(2e-4, rel=0.05)
    assert found.bytes_per_s == pytest.approx(1e8, rel=0.05)
    assert found.worst_error > 0.9


def test_bytes_that_cost_nothing_give_no_link():
    steps = [CollectiveSample("all_gather", size, 3, size, 1 / size) for size in (1, 10, 100)]
    with pytest.raises(ValueError, match="did not take longer"):
        fit_link([*steps, CollectiveSample("all_gather", 1, 0, -1, 1.0)])


def test_gloo_reduces_by_rings_alone():
    link = LinkConfig(up_gbit=8, down_gbit=8, latency_us=10)
    cluster = ClusterConfig(inside_node=link, between_nodes=link)
    steps = {
        name: collective_seconds(name, 0, BETWEEN, cluster, "cpu") / 10e-6
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert steps == pytest.approx({"all_gather": 3, "reduce_scatter": 6, "all_reduce": 6})
    # NCCL takes a tree where that is faster.
    assert collective_seconds("all_reduce", 0, BETWEEN, cluster, "cuda") == pytest.approx(4 * 10e-6)


def test_backward_on_a_cpu_waits_for_each_collective_of_the_shard_axis():
    groups = [GroupSeconds(1, 2, 3, 4, 0, frees=True)] * 3
    schedule = StepSchedule(1, "none", False, overlaps_gathers=False, waits_for_scatters=True)
    assert step_seconds(groups, schedule, update=0).total == 3 * (1 + 2 + 3 + 3 + 4)
