"""The ``cluster`` group: presets, and what is refused."""

from dataclasses import fields
from pathlib import Path

import pytest

from parallel2d.base.config import ClusterConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "cluster"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def cluster(*words: str) -> ClusterConfig:
    composition = compose(words)
    assert composition is not None
    return composition.config.cluster


def problem(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cluster(*words)
    return str(caught.value)


def test_without_a_choice_the_cluster_is_what_the_job_starts_and_its_figures_are_not_known():
    assert cluster() == ClusterConfig()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_a_preset_has_every_figure_that_a_step_time_needs(name):
    found = cluster(f"cluster={name}")
    assert found.name == name
    assert found.ranks_per_node == 8
    for link in (found.inside_node, found.between_nodes):
        assert None not in [getattr(link, item.name) for item in fields(link)]
    device = found.device
    peaks = device.peak_tflops
    assert None not in (device.memory_gib, device.memory_gb_per_s, peaks.bf16, peaks.fp32)


def test_any_figure_of_a_preset_can_be_set():
    found = cluster("cluster=h100", "cluster.nodes=16", "cluster.between_nodes.up_gbit=50")
    assert (found.nodes, found.between_nodes.up_gbit) == (16, 50)
    assert found.between_nodes.down_gbit == 3200


def test_what_cannot_be_is_refused_with_the_key():
    assert "did you mean h100?" in problem("cluster=h1000")
    assert "cluster.nodes=0 must be a whole number of at least 1" in problem("cluster.nodes=0")
    peak = "cluster.device.peak_tflops.bf16"
    assert f"{peak}=-1.0 must be above 0" in problem(f"{peak}=-1")
    latency = "cluster.inside_node.latency_us"
    assert f"{latency}=inf must be finite" in problem("cluster=h100", f"{latency}=inf")
    assert f"{latency}=-2.0 must be at least 0" in problem("cluster=h100", f"{latency}=-2")
    assert "did you mean cluster.device.memory_gib" in problem("cluster.device.memory_gb=80")


def test_half_a_link_is_refused():
    assert problem("cluster.between_nodes.up_gbit=10") == (
        "cluster.between_nodes.up_gbit=10.0 has no effect without cluster.between_nodes.down_gbit"
    )
