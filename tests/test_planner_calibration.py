"""The planner's knowledge of a cluster: presets, measured files, the fit of a link, and the cost
of gloo's collectives.
"""

import math
import os
from dataclasses import fields
from pathlib import Path

import pytest

from parallel2d.base.config import ClusterConfig
from parallel2d.base.config.composition import compose
from parallel2d.base.errors import ConfigError
from parallel2d.instruments.preflight.rank_measurement import CollectiveSample, fit_link
from parallel2d.parallel.cost.collectives import GroupPlacement
from tools.bench import gpu_model

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "cluster"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
BETWEEN = GroupPlacement(ranks=4, hosts=4, groups_per_host=1)


def samples(latency: float, bytes_per_s: float) -> list[CollectiveSample]:
    found = []
    for name, steps in (("all_gather", 3), ("all_reduce", 6), ("all_to_all", 3)):
        for size in (4096, 65536, 1 << 20, 1 << 24):
            seconds = steps * latency + size / bytes_per_s
            found.append(CollectiveSample(name, size, steps, size, seconds))
    return found


def test_overrides_take_precedence_over_the_cluster_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: it's mine\nnodes: 2\ndevice: {efficiency: 0.5, memory_gib: null}\n")
    for words in (["cluster.nodes=4", f"cluster={path}"], [f"cluster={path}", "cluster.nodes=4"]):
        cluster = compose(words).config.cluster
        assert (cluster.name, cluster.nodes, cluster.device.efficiency) == ("it's mine", 4, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "while parsing"),
        ("42", "no cluster file"),
        ("nodes: [1]", "is not a value"),
        ("a b: 1", "is not a key"),
        (None, "No such file"),
        ("name: '${oc.env:HOME}'", "is an interpolation"),
        ("name: &a x\ndevice: {name: *a}", "an alias"),
        ("[" * 5000, "nested too deep"),
    ],
)
def test_invalid_cluster_file_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"cluster={path}: .*{message}"):
        compose([f"cluster={path}"])


def test_cluster_file_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        compose([f"cluster={tmp_path}/mine.yaml"])


def test_cluster_file_is_validated_like_overrides(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, message in (("nodez: 2", "nodez"), ("device: {efficiency: 2}", "efficiency")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            compose([f"cluster={path}"])


def test_fit_of_measurements_gives_latency_and_bandwidth():
    found = fit_link(samples(2e-4, 1e8))
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bytes_per_s == pytest.approx(1e8)
    # A negative latency is fitted as zero.
    early = [each._replace(seconds=each.link_bytes / 1e8 - 1e-5) for each in samples(0, 1)]
    assert fit_link(early).latency_s == 0
    # Disturbed measurements do not move a fit.
    rows = samples(2e-4, 1e8)
    for disturbed in (0, 5, 9):
        rows[disturbed] = rows[disturbed]._replace(seconds=0.5)
    found = fit_link(rows)
    assert found.latency_s == pytest.approx(2e-4, rel=0.05)
    assert found.bytes_per_s == pytest.approx(1e8, rel=0.05)
    # Bytes that cost nothing show no bandwidth.
    rows = [CollectiveSample("all_gather", size, 3, size, 1 / size) for size in (1, 10, 100)]
    assert fit_link(rows).bytes_per_s == math.inf


def cluster(*words: str) -> ClusterConfig:
    return compose(list(words)).config.cluster


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


@pytest.mark.slow
def test_counts_of_the_stream_simulator_give_the_planned_seconds():
    counted, planned = gpu_model.traced_prediction("hybrid")
    seconds = planned.seconds
    # The fused attention of the trace computes its scores again in backward.
    assert seconds.compute < counted.compute < 1.02 * seconds.compute
    assert counted.shard == pytest.approx(seconds.shard, rel=0.005)
    assert counted.replicate == pytest.approx(seconds.replicate, rel=1e-6)
    assert counted.update == pytest.approx(seconds.update, rel=0.02)
    assert counted.total == pytest.approx(seconds.total, rel=0.005)


@pytest.mark.slow
def test_published_throughput_outside_of_the_fit_is_predicted():
    (row,) = [row for row in gpu_model.ROWS if row.name == "8B, 64 A100"]
    assert abs(gpu_model.compare(row).error) <= gpu_model.TOLERANCE
