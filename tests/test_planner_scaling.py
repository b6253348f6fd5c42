"""``plan.scaling``: the best layouts on more and more ranks."""

from __future__ import annotations

import functools
import json
import re

import pytest

from parallel2d import ConfigError, plan
from parallel2d.config.composition import compose
from parallel2d.planner.layout_search import search
from parallel2d.planner.ranking import fixed_keys
from parallel2d.planner.scaling import ScalingResult, scale
from parallel2d.planner.scaling_summary import answers, scaling_lines

# Two nodes of eight ranks, one sequence each.
JOB = (
    "model.dim=512", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=4", "model.hidden_dim=1024", "train.seq_len=128",
    "precision=bf16", "cluster=h100_100g", "cluster.nodes=2", "train.global_batch_size=16", "mesh.tensor=1",
    "bucketing=block",
)  # fmt: skip
UNTRACED = "plan.verify=false"
NAMES = ["hybrid", "zero3", "ddp", "int8", "diloco int4"]


@functools.cache
def scaled(*words: str) -> ScalingResult:
    composition = compose([*JOB, *words])
    assert composition is not None
    return scale(composition.config, fixed_keys([*JOB, *words]))


def weak() -> ScalingResult:
    return scaled(UNTRACED, "plan.scaling=weak")


def test_ranks_double_and_the_batch_grows_with_them():
    points = weak().points
    assert [point.ranks for point in points] == [8 * 2**step for step in range(12)]
    assert all(point.global_batch_size == point.ranks for point in points)
    assert all(list(point.best) == NAMES for point in points)


def test_each_point_is_the_best_of_a_search_for_that_many_ranks():
    point = weak().points[2]
    words = (
        *JOB, UNTRACED, f"cluster.nodes={point.nodes}", f"train.global_batch_size={point.global_batch_size}",
        "strategy=zero3",
    )  # fmt: skip
    composition = compose(list(words))
    assert composition is not None
    chosen = search(composition.config, fixed_keys(words)).chosen
    best = point.best["zero3"]
    assert best is not None
    assert best.time.seconds.total == pytest.approx(chosen.seconds)
    assert best.words == chosen.words
    assert best.cost.needed == chosen.cost.needed


def test_a_fixed_batch_leaves_layouts_out_that_it_does_not_divide():
    points = scaled(UNTRACED, "plan.scaling=strong").points
    for point in points:
        assert point.global_batch_size == 16
        assert all((best is not None) == (point.ranks <= 16) for best in point.best.values())


def test_what_leaves_hosts_is_what_waits():
    inside, crossing = weak().points[0], weak().points[-1]
    for name in NAMES:
        assert inside.best[name].between_hosts == 0
    assert crossing.best["zero3"].between_hosts > crossing.best["hybrid"].between_hosts > 0.1
    assert crossing.best["hybrid"].between_hosts > crossing.best["diloco int4"].between_hosts
    assert crossing.best["zero3"].tokens_per_s < crossing.best["hybrid"].tokens_per_s


def test_sentences_say_what_the_points_are():
    found = answers(weak())
    assert re.fullmatch(
        r"hybrid beats flat sharding \(zero3\) from [\d,]+ ranks on, by a factor of up to [\d.]+ on 16,384 ranks\.",
        found[0],
    )
    hybrid = [(point.ranks, point.best["hybrid"].between_hosts > 0.1) for point in weak().points]
    first = next(ranks for ranks, waits in hybrid if waits)
    assert found[1] == (
        f"hybrid waits more than 10 % of a step for links between hosts from {first} ranks on."
    )
    assert any(line.startswith("diloco int4 moves that point of hybrid") for line in found)


@pytest.mark.slow
def test_only_layouts_that_fit_are_shown():
    limit = weak().points[0].best["ddp"].cost.states.total / 2**30 * 0.9
    smaller = scaled(UNTRACED, "plan.scaling=weak", f"cluster.device.memory_gib={limit}")
    assert all(point.best["ddp"] is None for point in smaller.points)
    assert smaller.points[0].best["zero3"] is not None
    composition = compose([*JOB, UNTRACED])
    lines = scaling_lines(smaller, composition.config)
    rows = [line for line in lines if line.lstrip()[:1].isdigit()]
    assert len(rows) == 12
    assert all(" - " in line for line in rows)
    assert "            ddp has no layout that can run and fits." in lines


def test_peaks_count():
    for point in weak().points:
        best = point.best["zero3"]
        assert best.cost.needed > best.cost.states.total


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("strategy=ddp",), "plan.scaling: omit strategy: several strategies are compared"),
        (("mesh.shard=8",), "plan.scaling: omit mesh.shard: it differs with the number of ranks"),
        (
            ("train.global_batch_size=17",),
            "plan.scaling=weak: train.global_batch_size=17 on 16 ranks is not a whole number of samples on 8; take a multiple of 2",
        ),
        (("plan.dry_run=true",), "plan.scaling=weak is about several layouts"),
        (
            ("cluster.device.memory_gib=0.00001",),
            "plan.scaling=weak: no layout can run and fit on 8 to 16,384 ranks",
        ),
        (("precision=fp64",), "plan.scaling: step times are not known"),
    ],
)
def test_what_cannot_be_scaled_is_one_sentence(words, message):
    with pytest.raises(ConfigError) as caught:
        scaled(UNTRACED, "plan.scaling=weak", *words)
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_file_of_a_scaling(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*JOB, UNTRACED, "plan.scaling=weak", "plan.json=scaling.json"]
    assert plan.main(words) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    shown = capsys.readouterr().out
    assert all(answer in shown for answer in written["answers"])
    assert written["points"][-1]["best"]["hybrid"]["per_rank"] > 0
    # A second time no file is replaced.
    assert plan.main(words) == 2
    assert "plan.json=scaling.json cannot be written: File exists" in capsys.readouterr().err
