"""``plan.scaling``: the best layouts on more and more ranks."""

import functools
import json

import pytest

from parallel2d import ConfigError, plan
from parallel2d.base.config.composition import compose
from parallel2d.instruments.planner.layout_search import fixed_keys, search
from parallel2d.instruments.planner.plan_text import scaling_lines
from parallel2d.instruments.planner.scaling import COMPARED, ScalingPoint, scale, wait_between_hosts

# Two nodes of eight ranks, one sequence each.
JOB = (
    "model.dim=512",
    "model.n_layers=4",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.hidden_dim=1024",
    "train.seq_len=128",
    "precision=bf16",
    "cluster=h100_100g",
    "cluster.nodes=2",
    "train.global_batch_size=16",
    "mesh.tensor=1",
)


@functools.cache
def scaled(*words: str) -> list[ScalingPoint]:
    return scale(compose([*JOB, *words]).config, fixed_keys([*JOB, *words]))


def weak() -> list[ScalingPoint]:
    return scaled("plan.scaling=weak")


@pytest.mark.slow
def test_each_point_is_the_best_of_a_search_for_that_many_ranks():
    points = weak()
    assert [point.ranks for point in points] == [8 * 2**step for step in range(12)]
    for point in points:
        assert point.global_batch_size == point.ranks
        assert list(point.best) == list(COMPARED)
        assert point.best["zero3"].cost.has_peak
    point = points[2]
    batch = f"train.global_batch_size={point.global_batch_size}"
    words = (*JOB, f"cluster.nodes={point.nodes}", batch, "strategy=zero3")
    chosen = search(compose(list(words)).config, fixed_keys(words)).chosen
    best = point.best["zero3"]
    assert best.time.seconds.total == pytest.approx(chosen.time.seconds.total)
    assert (best.words, best.cost.needed) == (chosen.words, chosen.cost.needed)


@pytest.mark.slow
def test_a_fixed_batch_leaves_layouts_out_that_it_does_not_divide():
    for point in scaled("plan.scaling=strong"):
        assert point.global_batch_size == 16
        assert all((best is not None) == (point.ranks <= 16) for best in point.best.values())


@pytest.mark.slow
def test_exposed_time_of_scaling_is_inter_node_communication():
    inside, crossing = weak()[0].best, weak()[-1].best
    assert [wait_between_hosts(inside[name]) for name in COMPARED] == [0, 0, 0]
    assert wait_between_hosts(crossing["zero3"]) > wait_between_hosts(crossing["hybrid"]) > 0.1
    assert crossing["zero3"].time.samples_per_s < crossing["hybrid"].time.samples_per_s


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("strategy=ddp", "plan.scaling: omit strategy, which the table compares or varies"),
        ("mesh.shard=8", "plan.scaling: omit mesh.shard, which"),
        (
            "train.global_batch_size=17",
            (
                "plan.scaling=weak: train.global_batch_size=17 on 2 nodes is not a whole number of "
                "samples on 1; take a multiple of 2"
            ),
        ),
        ("plan.dry_run=true", "plan.scaling=weak does not go with plan.dry_run=true"),
        pytest.param(
            "cluster.device.memory_gib=0.00001",
            "plan.scaling=weak: no layout can run and fit on 8 to 16,384 ranks",
            marks=pytest.mark.slow,
        ),
        ("precision.float8=tensorwise", "layouts cannot be ranked"),
    ],
)
def test_invalid_scaling_request_gives_one_sentence(word, message):
    with pytest.raises(ConfigError) as caught:
        scaled("plan.scaling=weak", word)
    assert message in str(caught.value)


@pytest.mark.slow
def test_only_layouts_that_fit_are_shown_and_the_file_has_them(capsys, tmp_path, monkeypatch):
    limit = weak()[0].best["ddp"].cost.states.total / 2**30 * 0.9
    smaller = scaled("plan.scaling=weak", f"cluster.device.memory_gib={limit}")
    assert all(point.best["ddp"] is None for point in smaller)
    assert smaller[0].best["zero3"] is not None
    lines = scaling_lines(smaller, compose([*JOB, "plan.scaling=weak"]).config)
    rows = [line for line in lines if line.lstrip()[:1].isdigit()]
    assert len(rows) == 12
    assert all(" - " in line for line in rows)
    monkeypatch.chdir(tmp_path)
    words = [*JOB, "plan.scaling=weak", "plan.json=scaling.json"]
    assert plan.main(words) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["points"][-1]["best"]["hybrid"]["per_rank"] > 0
    assert plan.main(words) == 2
    assert "plan.json=scaling.json cannot be written: File exists" in capsys.readouterr().err
